"""The house stands: every module is packaged, the links lead to the four folders, imports flow one way."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from sources import FOLDERS, ROOT, imports, shipped

_SHARED = {"errors", "progress", "cachedir", "folders", "manifest", "mlpackage", "bundle", "tokenizer", "reports", "devices"}
# What a layer may import beside itself; a new folder or top-level module needs a row here.
MAY_IMPORT: dict[str, set[str]] = {
    "__init__": set(),
    "errors": set(),
    "progress": set(),
    "cachedir": {"errors"},
    "folders": {"errors"},
    "manifest": set(),
    "mlpackage": {"errors"},
    "manifest_checks": {"errors", "manifest", "mlpackage"},
    "bundle": {"errors", "manifest", "manifest_checks"},
    "tokenizer": {"errors", "bundle"},
    "reports": {"bundle", "cachedir"},
    "devices": {"errors", "manifest", "bundle"},
    "quant": {"errors", "manifest", "bundle", "devices"},
    "export": {*_SHARED, "quant"},
    "runtime": _SHARED,
}
# those of export that run bundles
PROVERS = {
    f"specedge/export/{name}.py"
    for name in (
        "cli",
        "cli_train",
        "demo",
        "quality",
        "self_checks",
        "validate",
        "validate_device",
        "validate_eagle",
        "validate_heads",
        "validate_weights",
    )
}


def wrong_imports(file: str, source: str) -> list[str]:
    """Imports of `file`, named as inside a wheel, that go against the flow."""
    layer = layer_of(file)
    allowed = MAY_IMPORT[layer] | {layer, "__version__"}
    if file in PROVERS:
        allowed |= {"runtime"}
    wrong = []
    for found in imports(source):
        package, _, rest = found.name.partition(".")
        if package not in ("specedge", "") or rest.split(".")[0] in allowed:
            continue
        wrong.append(f"{file}:{found.line} imports {found.name}")
    return wrong


def layer_of(file: str) -> str:
    return file.split("/")[1].removesuffix(".py")


def test_imports_flow_one_way():
    assert [line for file, path in shipped().items() for line in wrong_imports(file, path.read_text("utf-8"))] == []


def test_every_layer_has_a_row():
    assert {layer_of(file) for file in shipped()} == MAY_IMPORT.keys()


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("runtime/decode.py", "from specedge.export.decoder import Decoder"),
        ("runtime/decode.py", "from specedge import quant"),
        ("runtime/decode.py", "import specedge.quant.pack as pack"),
        ("runtime/decode.py", "def load():\n    from specedge.export import cli"),
        ("runtime/decode.py", "import importlib\nimportlib.import_module('specedge.export')"),
        ("runtime/decode.py", "from .tree import TokenTree"),
        ("runtime/cli.py", "from specedge.export import cli"),
        ("runtime/cli.py", "def load():\n    from specedge.export.convert import convert"),
        ("export/convert.py", "from specedge.runtime import load"),
        ("export/convert.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from specedge import runtime"),
        ("quant/pack.py", "from specedge.export.weights import write"),
        ("devices/table.py", "from specedge.quant.scheme import Scheme"),
        ("bundle.py", "from specedge.devices.table import row"),
        ("errors.py", "from specedge.bundle import Bundle"),
    ],
)
def test_an_import_against_the_flow_is_found(file, source):
    assert len(wrong_imports(f"specedge/{file}", source)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("export/validate.py", "from specedge.runtime import load"),
        ("export/convert.py", "import runtime_of_somebody_else\nfrom specedge import __version__"),
        ("quant/pack.py", "from specedge.quant.scheme import Scheme\nfrom specedge.bundle import Bundle"),
    ],
)
def test_an_import_with_the_flow_is_not(file, source):
    assert wrong_imports(f"specedge/{file}", source) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_link_leads_to_its_folder(folder):
    link = ROOT / "src/specedge" / folder
    target = os.readlink(link) if link.is_symlink() else link.read_text("utf-8")  # git without links writes a text file
    assert Path(target) == Path("../..") / folder


def copy_tree(to: Path, links: bool) -> Path:
    """The tree that is packaged, as a clone with or without symbolic links has it."""
    shutil.copytree(ROOT / "src", to / "src", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, to / folder, ignore=shutil.ignore_patterns("__pycache__"))
        if not links:
            (to / "src/specedge" / folder).unlink()
            (to / "src/specedge" / folder).write_text(f"../../{folder}", "utf-8")
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, to / name)
    return to


def build(kind: str, tree: Path) -> Path:
    """What setuptools makes of `tree`: a wheel, an sdist, or the wheel of an editable install."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}('dist')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = (tree / "dist").iterdir()
    return made


def check_wheel(wheel: Path, modules: Iterable[str]) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert sorted(name for name in names if name.endswith(".py")) == sorted(modules)
    assert "specedge/py.typed" in names
    trained = {f"specedge/export/trained/{path.name}" for path in (ROOT / "export" / "trained").iterdir()}
    assert trained and trained <= {*names}


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_wheel_holds_every_module_and_no_other(tmp_path, links):
    tree = copy_tree(tmp_path, links)
    check_wheel(build("wheel", tree), shipped(tree))


def test_sdist_holds_all_that_a_wheel_needs(tmp_path):
    tree = copy_tree(tmp_path / "tree", links=True)
    sdist = build("sdist", tree)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert (unpacked / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    check_wheel(build("wheel", unpacked), shipped(tree))


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_editable_install_reads_the_working_tree(tmp_path, links):
    tree = copy_tree(tmp_path / "tree", links)
    site = tmp_path / "site"
    zipfile.ZipFile(build("editable", tree)).extractall(site)
    code = (
        f"import site; site.addsitedir({str(site)!r});"
        "import specedge.devices as module; from pathlib import Path; print(Path(module.__file__).resolve())"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)  # -S: not this venv
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == (tree / "devices/__init__.py").resolve()
