"""A plain install is the runtime alone: heavy packages stay out of it, and each is imported where it belongs."""

import re
import subprocess
import sys

import pytest

from sources import PROJECT, Import, imports, shipped

HEAVY = {
    "torch",
    "transformers",
    "onnx",
    "onnxscript",
    "onnx_ir",
    "coremltools",
    "optimum",
    "safetensors",
    "gguf",
    "accelerate",
}


def importable(requirements: list[str]) -> set[str]:
    """Import names of requirements; for all of ours that is the distribution's name with underscores."""
    return {re.split(r"[^\w-]", requirement)[0].replace("-", "_").lower() for requirement in requirements}


PLAIN = importable(PROJECT["dependencies"])
EXPORT, COREML, QNN = (importable(PROJECT["optional-dependencies"][extra]) for extra in ("export", "coreml", "qnn"))

THIRD_PARTY = {  # what a folder may import beside the standard library, so that its own install is enough
    "devices": set(),
    "quant": {"numpy"},
    "export": PLAIN | EXPORT | COREML,
    "runtime": PLAIN,
}
OWNERS = {  # packages that one or two files wrap for all others
    "onnxruntime": {"specedge/runtime/session.py", "specedge/runtime/probe.py"},
    "onnxruntime_qnn": {"specedge/runtime/session.py", "specedge/runtime/probe.py"},
    "llguidance": {"specedge/runtime/grammar.py"},
    "coremltools": {
        "specedge/mlpackage.py",
        "specedge/export/mil.py",
        "specedge/export/to_coreml.py",
    },
}


def misplaced(file: str, source: str) -> list[str]:
    """Third-party imports of `file`, named as inside a wheel, that it may not make."""
    folder = file.split("/")[1]
    allowed = THIRD_PARTY.get(folder, PLAIN if file == "specedge/tokenizer.py" else {"numpy"})
    return [f"{file}:{found.line} imports {found.name}" for found in imports(source) if not _may_import(file, allowed, found)]


def _may_import(file: str, allowed: set[str], found: Import) -> bool:
    package = found.name.split(".")[0]
    if package == "specedge" or package in sys.stdlib_module_names:
        return True
    if package in OWNERS and file not in OWNERS[package]:
        return False
    optional = package in OWNERS and found.lazy  # an owner may open an extra when it is asked for
    return package in allowed or optional


def test_every_import_is_where_it_belongs():
    assert [line for file, path in shipped().items() for line in misplaced(file, path.read_text("utf-8"))] == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("devices/table.py", "import numpy as np"),
        ("quant/pack.py", "def check():\n    import torch"),
        ("runtime/decode.py", "import torch.nn"),
        ("runtime/decode.py", "import onnxruntime as ort"),
        ("runtime/generate.py", "def load():\n    from transformers import AutoTokenizer"),
        ("runtime/coreml.py", "import coremltools"),
        ("export/validate.py", "import onnxruntime"),
        ("export/train.py", "import pandas"),
        ("bundle.py", "import rich"),
    ],
)
def test_a_misplaced_import_is_found(file, source):
    assert len(misplaced(f"specedge/{file}", source)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("runtime/session.py", "import onnxruntime as ort\nimport numpy"),
        ("mlpackage.py", "def open_graph():\n    import coremltools"),
        ("export/to_onnx.py", "import onnx_ir, torch, os\nfrom specedge.errors import SpecedgeError"),
    ],
)
def test_an_import_in_its_place_is_not(file, source):
    assert misplaced(f"specedge/{file}", source) == []


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


def plain_modules() -> list[str]:
    """Dotted names of all modules outside export."""
    names = (file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in shipped())
    return sorted(name for name in names if not name.startswith("specedge.export"))


def test_plain_requirements_are_not_heavy():
    assert not PLAIN & HEAVY


@pytest.mark.parametrize("modules", [["specedge.runtime", "specedge.export.cli"], plain_modules()], ids=["run", "all"])
def test_nothing_outside_export_loads_a_heavy_package(modules):
    code = f"import sys, {', '.join(modules)}; print(*(name.split('.')[0] for name in sys.modules))"
    done = run(code)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "specedge" in loaded
    assert not loaded & HEAVY


# As in an environment without the extras: None in sys.modules makes an import fail as if it were not installed.
WITHOUT_EXTRAS = (
    f"import sys; sys.modules.update(dict.fromkeys({sorted(HEAVY)})); sys.argv[0] = 'spec-export';"
    "from specedge.export.cli import main; sys.exit(main())"
)


def test_command_line_works_without_the_extras():
    done = run(WITHOUT_EXTRAS, "--help")
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout


def test_a_command_of_export_names_its_extra():
    done = run(WITHOUT_EXTRAS, "convert", "some/model", "-o", "some-bundle")
    assert done.returncode == 1, done.stderr
    assert "[export]" in done.stderr
    assert "Traceback" not in done.stderr
