"""Qualcomm's NPU as its compiler emulates it: the same text as on the CPU, contexts ahead of time, and no silent CPU."""

import contextlib
import dataclasses
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import tiny
from bundles import Models, make
from eagles import TREE, Chains
from specedge.bundle import Bundle, open_bundle
from specedge.devices.table import DEVICES, get_device
from specedge.errors import SpecedgeError, UsageError
from specedge.export import validate_device
from specedge.export.checkpoint import open_checkpoint
from specedge.export.validate import validate
from specedge.progress import silent
from specedge.runtime import Engine, Sampling, load
from specedge.runtime.agreement import walk
from specedge.runtime.bench import bench
from specedge.runtime.compiled import Compiled, compile_bundle, open_graph, read_compiled, why_stale
from specedge.runtime.probe import find_provider
from specedge.runtime.session import Session
from specedge.runtime.shape import TreeShape
from test_export_cli import refused, run
from test_export_qnn import ASYMMETRIC, CHANNEL, FLOAT16, INT4, RAGGED
from test_runtime_heads import scripted_heads
from test_runtime_medusa import P

onnxruntime_qnn = pytest.importorskip("onnxruntime_qnn", reason="pip install 'specedge[qnn]'")
if platform.machine() not in ("x86_64", "AMD64"):
    pytest.skip("the emulator is in the x86-64 library alone", allow_module_level=True)

QNN = get_device("qnn")
STARTS = ([3, 4, 5, 3, 4, 5, 3, 4], [7, 1], [2, 20, 11, 6, 2, 20])
IDS = [int(token) for token in np.random.default_rng(0).integers(3, 128, 24)]


@pytest.fixture(scope="module")
def path(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(models()[0], tmp_path_factory.mktemp("int4") / "bundle", device="qnn", widths=(1, 4), **INT4)


@pytest.fixture
def fresh(models: Models, tmp_path: Path) -> Bundle:
    return open_bundle(make(models()[0], tmp_path / "bundle", device="qnn", widths=(1, 4), **INT4))


# ---- numbers


@pytest.mark.parametrize("shape", [{}, RAGGED], ids=["whole", "ragged"])
@pytest.mark.parametrize("form", [INT4, ASYMMETRIC, CHANNEL, FLOAT16], ids=["int4", "asymmetric", "channel", "float16"])
def test_the_emulator_computes_what_the_cpu_does(models: Models, shape: dict[str, Any], form: dict[str, Any], tmp_path: Path):
    source, _ = models(**shape)
    path = make(source, tmp_path / "bundle", device="qnn", widths=(1, 4), **form)
    here, there = load(path, "cpu-static"), load(path)
    assert there.emulated == ("qnn",) and there.nodes.keys() == {"QNNExecutionProvider"}
    for width in (1, 4, 8):
        expected, found = walk(here.target, IDS, width), walk(there.target, IDS, width)
        cosines = (expected * found).sum(1) / np.linalg.norm(expected, axis=1) / np.linalg.norm(found, axis=1)
        assert cosines.min() >= 0.9998
        for (name, buffer), (_, other) in zip(here.target.cache.buffers(), there.target.cache.buffers(), strict=True):
            assert np.isfinite(other).all(), name
            np.testing.assert_allclose(other.astype(float), buffer.astype(float), atol=0.02 * np.abs(buffer).max())


def same_text(here: Engine, there: Engine, **options: Any) -> int:
    """Both write the same; how many drafts were accepted."""
    accepted = 0
    for prompt in STARTS:
        one, other = (engine.generate(prompt, max_new_tokens=12, **options) for engine in (here, there))
        assert one.ids == other.ids and one.stats.per_round == other.stats.per_round
        accepted += other.stats.accepted
    return accepted


@pytest.mark.parametrize("name", ["draft", "eagle1", "some3"])
@pytest.mark.parametrize("draft_device", ["qnn", "cpu"])
def test_drafted_text_is_the_cpus(chains: Chains, name: str, draft_device: str) -> None:
    """Chains, a tree and seeded text, with the drafter on the NPU or on the CPU beside it."""
    path = chains.path(name, "qnn", "tree", one_call=None, draft_device=draft_device, **FLOAT16)
    here = load(path, "cpu-static", "cpu-static" if draft_device == "qnn" else None)
    there = load(path)
    assert same_text(here, there, gamma=3) + same_text(here, there, tree=TreeShape.from_paths(TREE)) > 10
    same_text(here, there, sampling=Sampling(0.8, seed=5), rule="coupled")
    assert there.draft_device.name == draft_device


def test_medusa_and_lookup_write_the_cpus_text(tmp_path: Path) -> None:
    tiny.f_chain(tmp_path / "target", P)
    heads = scripted_heads(tmp_path / "heads", P)
    path = make(tmp_path / "target", tmp_path / "bundle", device="qnn", widths=(1, 5, 9), medusa=str(heads), **FLOAT16)
    tree = TreeShape.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0], [0, 0, 0]])
    for drafter, options in (("medusa", {"tree": tree}), ("medusa", {"gamma": 3}), ("lookup", {"gamma": 4})):
        here, there = load(path, "cpu-static", drafter=drafter), load(path, drafter=drafter)
        assert same_text(here, there, **options) > 0
        same_text(here, there, **options, sampling=Sampling(0.8, seed=5), rule="point-mass")


def test_validate_compares_the_device_with_the_cpu(models: Models, path: Path) -> None:
    report = validate(path, str(models()[0]), prompts=1, tokens=8, layers=True)
    assert report.passed, [check for check in report.checks if not check.passed]
    assert [found.graph for found in report.devices] == ["target width 1", "target width 4", "target width 8"]
    assert all(found.cosine_min >= 0.9999 and found.rows >= 4 for found in report.devices)
    assert [layer.block for layer in report.layers] == [0, 1, 2] and all(layer.snr_db > 30 for layer in report.layers)
    assert any("emulated" in note for note in report.notes)


def test_a_layer_that_breaks_is_found(models: Models, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider whose second block is wrong: its weights are other ones than the CPU reads."""

    class Wrong(Session):
        def __init__(self, file: Path, graph: Any, device: Any) -> None:
            weights = file.with_name("weights.bin")
            kept = weights.read_bytes()
            if device.plugin:
                damaged = bytearray(kept)
                part = next(
                    one for one in open_bundle(path).role("target").weights if one.name == "layers.1.mlp.up_proj.weight"
                )
                extent = part.parts["scales"]
                damaged[extent.offset : extent.offset + extent.bytes] = bytes(extent.bytes)
                weights.write_bytes(damaged)
            try:
                super().__init__(file, graph, device)
            finally:
                weights.write_bytes(kept)

    monkeypatch.setattr(validate_device, "Session", Wrong)
    noise = validate_device.compare_layers(open_bundle(path), "target", open_checkpoint(str(models()[0])), QNN, IDS)
    assert [layer.snr_db > 30 for layer in noise] == [True, True, False]


def test_times_of_an_emulator_are_refused(path: Path) -> None:
    with pytest.raises(UsageError, match="device 'qnn': is emulated here"):
        bench(load(path), {"ids": [[3, 4]]})
    result = run("generate", path, "--ids", "3,4,5", "--max-new-tokens", "2", "--stats", "--json", "-")
    assert "no speed (qnn is emulated)" in result.stderr and "tokens/s" not in result.stderr
    assert json.loads(result.stdout)["emulated"] == ["qnn"]


# ---- nodes left to the CPU


def test_a_node_left_to_the_cpu_is_an_error_with_its_reason(models: Models, tmp_path: Path) -> None:  # B65
    path = make(models()[0], tmp_path / "bundle", device="cpu-static", **INT4)  # its graphs look embeddings up
    said = refused(1, "generate", path, "--device", "qnn", "--ids", "3,4,5")
    assert "QNNExecutionProvider leaves to the CPU" in said and "GatherBlockQuantized: GPU backend only" in said
    allowed = run(
        "generate", path, "--device", "qnn", "--ids", "3,4,5", "--max-new-tokens", "2", "--allow-cpu-nodes", "--json", "-"
    )
    assert allowed.exit_code == 0 and json.loads(allowed.stdout)["nodes"].keys() == {
        "QNNExecutionProvider",
        "CPUExecutionProvider",
    }
    bundle = open_bundle(path)
    made = dataclasses.replace(bundle.manifest, device="qnn", draft_device="qnn")
    with pytest.raises(SpecedgeError, match=r"leaves to the CPU .*GatherBlockQuantized: GPU backend only"):
        compile_bundle(Bundle(path, made), QNN, None, silent)
    assert [*(path / "compiled" / "qnn").iterdir()] == []


def test_a_provider_that_is_not_here_is_named(path: Path) -> None:  # B65
    script = "import sys; sys.modules['onnxruntime_qnn'] = None; from specedge.export.cli import main; main()"
    for command in (["generate", str(path), "--ids", "3"], ["compile", str(path), "--device", "qnn"]):
        found = subprocess.run([sys.executable, "-c", script, *command], capture_output=True, text=True)
        assert found.returncode == 1 and found.stdout == ""
        assert "needs QNNExecutionProvider, which is not installed here" in found.stderr and "specedge[qnn]" in found.stderr
    assert "use one of cpu, cpu-static, qnn" in refused(1, "generate", path, "--device", "nonsense", "--ids", "3")


def test_devices_says_what_is_emulated() -> None:
    rows = json.loads(run("devices", "--json", "-").stdout)
    assert rows["qnn"]["available"] and rows["qnn"]["emulated"] == "SM8650" and "emulator" in rows["qnn"]["verified_by"]
    assert rows["qnn"]["version"] == onnxruntime_qnn.__version__
    assert rows["cpu"]["available"] and rows["cpu"]["emulated"] is None


# ---- contexts


def compiled(bundle: Bundle, soc: str | None = None) -> Compiled:
    return compile_bundle(bundle, QNN, soc, silent)


def place(bundle: Bundle) -> Path:
    return bundle.path / "compiled" / "qnn" / "SM8650"


def test_all_widths_share_one_file_of_weights(fresh: Bundle) -> None:
    record = compiled(fresh)
    assert record.graphs.keys() == {graph.file for graph in fresh.role("target").graphs}
    weights = [name for name in record.files if name.endswith(".bin")]
    assert len(weights) == 1
    assert (record.key.soc, record.key.provider) == ("SM8650", onnxruntime_qnn.__version__)
    for context in record.graphs.values():
        content = (place(fresh) / context).read_bytes()
        assert b"EPContext" in content and Path(weights[0]).name.encode() in content
    assert open_bundle(fresh.path).manifest == fresh.manifest  # and the bundle is what it was
    assert load(fresh.path).generate([3, 4], max_new_tokens=2).ids  # an emulator runs the graphs themselves


def test_every_role_for_the_npu_is_compiled(chains: Chains) -> None:
    bundle = open_bundle(chains.path("eagle3", "qnn", "tree", one_call=None, draft_device="qnn", **FLOAT16))
    record = compiled(bundle, "SM8750")
    assert record.key.options["soc_model"] == "69" and record.key.options["htp_arch"] == "79"
    assert record.graphs.keys() == {graph.file for role in bundle.manifest.roles.values() for graph in role.all_graphs}
    assert len([name for name in record.files if name.endswith(".bin")]) == 2  # the target's and the head's


def test_fresh_contexts_stay_and_stale_ones_are_made_anew(
    models: Models, fresh: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:  # B66
    first = compiled(fresh)
    stamp = (place(fresh) / "manifest.json").stat().st_mtime_ns
    assert compiled(fresh) == first and (place(fresh) / "manifest.json").stat().st_mtime_ns == stamp

    other, _ = models(seed=1)  # 1: other weights in the same place; convert leaves no contexts of the old ones
    again = open_bundle(make(other, fresh.path, device="qnn", widths=(1, 4), **INT4))
    assert not read_compiled(again, QNN)
    second = compiled(again)
    assert second.key.sources != first.key.sources

    with monkeypatch.context() as patch:  # 2: another version
        patch.setattr(onnxruntime_qnn, "__version__", "9.9")
        assert why_stale(again, second, find_provider(QNN)) == f"provider was {second.key.provider}, is 9.9"
        assert compiled(again).key.provider == "9.9"
    assert compiled(again).key == second.key

    assert QNN.plugin is not None  # 3: another option
    changed = dataclasses.replace(QNN, plugin=dataclasses.replace(QNN.plugin, compile_options=(("vtcm_mb", "4"),)))
    reason = why_stale(again, second, find_provider(changed))
    assert reason == "options changed: htp_graph_finalization_optimization_mode, vtcm_mb"

    weights = next(place(again).rglob("*.bin"))  # 4: a file cut short, or changed
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    assert compiled(again).files.keys() == second.files.keys() and len(weights.read_bytes()) == len(whole)
    (place(again) / "manifest.json").write_text("{")
    assert compiled(again).key == second.key and read_compiled(again, QNN).keys() == {"SM8650"}


def test_two_at_once_both_succeed(fresh: Bundle) -> None:  # B66, 5
    command = [sys.executable, "-m", "specedge.export", "compile", str(fresh.path), "--device", "qnn"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    assert compiled(fresh).files and {entry.name for entry in place(fresh).parent.iterdir()} == {"SM8650"}


@pytest.fixture
def on_the_chip(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, dict[str, str], str]]:
    """A machine with the NPU, as far as can be told without: what its sessions would open, and with which options."""
    opened: list[tuple[Path, dict[str, str], str]] = []
    given: list[dict[str, str]] = []

    def session(path: str, options: Any, **_: Any) -> Any:
        shared = ""
        with contextlib.suppress(RuntimeError):
            shared = options.get_session_config_entry("ep.share_ep_contexts")
        opened.append((Path(path), given[-1], shared))
        raise RuntimeError("there is no NPU here")

    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    monkeypatch.setattr(
        onnxruntime.SessionOptions, "add_provider_for_devices", lambda options, devices, values: given.append(values)
    )
    return opened


def test_the_device_itself_opens_contexts(fresh: Bundle, request: pytest.FixtureRequest) -> None:
    record, graph = compiled(fresh), fresh.role("target").graphs[0]
    opened = request.getfixturevalue("on_the_chip")
    with pytest.raises(SpecedgeError, match=r"there is no NPU here.*compile again"):
        open_graph(fresh, graph, QNN)
    file, options, shared = opened[0]
    assert (file, shared) == (place(fresh) / record.graphs[graph.file], "1")
    assert options["htp_performance_mode"] == "burst" and "soc_model" not in options
    assert "soc: say which chip this is" in refused(2, "compile", fresh.path, "--device", "qnn")


@pytest.mark.parametrize("how", ["stale", "cut", "unreadable", "outside", "several"])
def test_contexts_that_do_not_fit_are_refused(
    fresh: Bundle, how: str, request: pytest.FixtureRequest, monkeypatch: Any
) -> None:
    compiled(fresh)
    said = {
        "stale": r"provider was .*, is 9\.9",
        "cut": "is not whole",
        "unreadable": "cannot be read",
        "outside": "leads outside",
    }
    if how == "several":
        compiled(fresh, "SM8750")
        said["several"] = "for SM8650, SM8750; leave the one of this device"
    manifest = place(fresh) / "manifest.json"
    if how == "stale":
        monkeypatch.setattr(onnxruntime_qnn, "__version__", "9.9")
    elif how == "cut":
        next(place(fresh).rglob("*.bin")).write_bytes(b"x")
    elif how == "unreadable":
        manifest.write_text("{")
    elif how == "outside":
        data = json.loads(manifest.read_text())
        data["graphs"] = dict.fromkeys(data["graphs"], "../../../../etc/hostname")
        manifest.write_text(json.dumps(data))
    opened = request.getfixturevalue("on_the_chip")
    with pytest.raises(SpecedgeError, match=said[how]):
        open_graph(fresh, fresh.role("target").graphs[0], QNN)
    assert opened == []


def test_a_graph_that_was_not_compiled_is_opened_itself(chains: Chains, request: pytest.FixtureRequest) -> None:
    bundle = open_bundle(chains.path("draft", "qnn", "tree", one_call=None, draft_device="cpu-static", **FLOAT16))
    compiled(bundle)
    opened = request.getfixturevalue("on_the_chip")
    graph = bundle.role("draft").graphs[0]
    with pytest.raises(SpecedgeError, match="there is no NPU here"):
        open_graph(bundle, graph, QNN)
    assert opened[0][0] == bundle.file(graph.file)


def test_a_compilation_that_fails_leaves_nothing_to_the_next(models: Models, fresh: Bundle, tmp_path: Path) -> None:
    """What a provider shares between sessions, the chip included, ends with the process that compiled."""
    broken = open_bundle(make(models()[0], tmp_path / "broken", device="cpu-static", **INT4))
    made = dataclasses.replace(broken.manifest, device="qnn", draft_device="qnn")
    with pytest.raises(SpecedgeError, match="GatherBlockQuantized"):
        compile_bundle(Bundle(broken.path, made), QNN, "SM8650", silent)
    compiled(fresh, "SM8750")
    weights = next((fresh.path / "compiled" / "qnn" / "SM8750").rglob("*.bin")).read_bytes()
    assert b"SM8750" in weights and b"SM8650" not in weights


def test_changed_weights_are_not_compiled(fresh: Bundle) -> None:
    compiled(fresh)
    weights = fresh.file("target/weights.bin")
    content = bytearray(weights.read_bytes())
    content[100] ^= 255
    weights.write_bytes(content)
    assert "is not what the manifest says" in refused(1, "compile", fresh.path, "--device", "qnn")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "qnn", "--soc", "SM1"], "soc 'SM1': device 'qnn' knows SM8650, SM8750, SM8850, SM8550, SC8380XP"),
        (["--device", "cpu"], "device 'cpu': runs its graphs as they are"),
    ],
)
def test_what_cannot_be_compiled_is_refused(path: Path, arguments: list[str], said: str) -> None:
    assert said in refused(2, "compile", path, *arguments)


def test_a_bundle_for_another_device_is_not_compiled(models: Models, tmp_path: Path) -> None:
    path = make(models()[0], tmp_path / "bundle", **INT4)
    assert "convert with --device qnn" in refused(1, "compile", path, "--device", "qnn")


def test_the_table_names_its_sources() -> None:
    assert QNN.plugin is not None and DEVICES["qnn"] is QNN
    socs = {soc.name: (soc.model, soc.architecture) for soc in QNN.plugin.socs}
    assert {"SM8650": (57, 75), "SM8750": (69, 79), "SM8850": (87, 81), "SC8380XP": (60, 73)}.items() <= socs.items()
    assert all(soc.source for soc in QNN.plugin.socs)
