"""Core ML packages as sessions: the evaluator's text is the CPU's, and what a Mac would be asked for is right."""

import dataclasses
import json
import math
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import tiny
from bundles import Models, make
from eagles import TREE, Chains, save_chained
from specedge.bundle import MANIFEST, open_bundle
from specedge.devices.table import DEVICES, get_device
from specedge.errors import SpecedgeError, UsageError
from specedge.export.validate import validate
from specedge.export.weights import read_float32
from specedge.quant.scheme import Scheme
from specedge.runtime import Engine, Sampling, TreeShape, load
from specedge.runtime.bench import bench
from specedge.runtime.memory import measure_engines
from specedge.runtime.probe import find_provider
from test_export_cli import refused, run
from test_runtime_heads import scripted_heads
from test_runtime_medusa import P
from tiny import Array

coremltools = pytest.importorskip("coremltools", reason="Core ML packages need the extra: pip install -e '.[coreml]'")

from specedge.runtime import evaluator  # noqa: E402  # once coremltools is known to be there

FLOAT16: dict[str, Any] = {"body": "float16", "head": "float16"}
CHANNEL: dict[str, Any] = {"body": Scheme(4, None), "head": Scheme(8, None)}
FORMS = {"float16": FLOAT16, "int4": CHANNEL}
STARTS = ([3, 4, 5, 3, 4, 5, 3, 4], [7, 1], [2, 20, 11, 6, 2, 20])
PACKAGE = "target/model.mlpackage"


@pytest.fixture(scope="module")
def path(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(models()[0], tmp_path_factory.mktemp("bundles") / "b", device="coreml-ane", widths=(1, 4), **CHANNEL)


# ---- text


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row `cpu-static` in float16: scales are then of the type that Core ML's are, and so the codes the same."""
    monkeypatch.setitem(DEVICES, "cpu-static", dataclasses.replace(get_device("cpu-static"), dtype="float16"))


def same_store(one: Path, other: Path) -> None:
    """Both bundles hold the same weights, bit for bit."""
    first, second = open_bundle(one), open_bundle(other)
    for name, role in first.manifest.roles.items():
        weights = {weight.name: weight for weight in second.role(name).weights}
        assert weights.keys() == {weight.name for weight in role.weights}
        for weight in role.weights:
            there = weights[weight.name]
            np.testing.assert_array_equal(
                read_float32(weight, first.file(weight.file))[0], read_float32(there, second.file(there.file))[0]
            )


def same_text(here: Engine, there: Engine, **options: Any) -> int:
    """20 tokens from every start, twice the same; how many drafts were accepted."""
    accepted = 0
    for prompt in STARTS:
        one, other = (engine.generate(prompt, max_new_tokens=20, **options) for engine in (here, there))
        assert one.ids == other.ids and one.stats.per_round == other.stats.per_round
        accepted += other.stats.accepted
    return accepted


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["draft", "eagle1", "some3"])
def test_drafted_text_is_that_of_the_onnx_graphs(chains: Chains, half: None, name: str, form: str) -> None:
    """Of a target of two layers, with what it is drafted by: chains, a tree, and seeded text."""
    options = {"one_call": False if name == "draft" else None, **FORMS[form]}
    paths = [chains.path(name, device, "tree", **options) for device in ("cpu-static", "coreml-ane")]
    same_store(*paths)
    here, there = map(load, paths)
    assert there.emulated == ("coreml-ane",)
    assert same_text(here, there, gamma=3) + same_text(here, there, tree=TreeShape.from_paths(TREE)) > 10
    same_text(here, there, sampling=Sampling(0.8, seed=5), rule="coupled")


@pytest.mark.parametrize("form", FORMS)
def test_medusa_and_lookup_write_the_same_text(half: None, form: str, tmp_path: Path) -> None:
    tiny.f_chain(tmp_path / "target", P, num_hidden_layers=2)
    heads = str(scripted_heads(tmp_path / "heads", P))
    paths = [
        make(tmp_path / "target", tmp_path / device, device=device, widths=(1, 5, 9), medusa=heads, **FORMS[form])
        for device in ("cpu-static", "coreml-ane")
    ]
    same_store(*paths)
    tree = TreeShape.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0], [0, 0, 0]])
    for drafter, options in (("medusa", {"tree": tree}), ("medusa", {"gamma": 3}), ("lookup", {"gamma": 4})):
        here, there = (load(path, drafter=drafter) for path in paths)
        assert same_text(here, there, **options) > 0
        same_text(here, there, **options, sampling=Sampling(0.8, seed=5), rule="point-mass")


@pytest.mark.parametrize(("device", "draft_device"), [("coreml-ane", "cpu"), ("cpu", "coreml-gpu")])
def test_target_and_draft_may_stand_on_different_rows(chains: Chains, device: str, draft_device: str) -> None:
    mixed = chains.path("draft", device, "tree", one_call=None, draft_device=draft_device, **FLOAT16)
    here, there = load(chains.path("draft", "cpu-static", "tree", one_call=False, **FLOAT16)), load(mixed)
    assert same_text(here, there, gamma=3) > 5
    assert (there.device.name, there.draft_device.name) == (device, draft_device)


# ---- proof


@pytest.mark.parametrize("device", ["coreml-ane", "coreml-gpu"])
@pytest.mark.parametrize("form", FORMS)
def test_validate_holds_a_package_to_pytorch(models: Models, device: str, form: str, tmp_path: Path) -> None:
    source, _ = models()
    bundle = make(source, tmp_path / "bundle", device=device, widths=(1, 4), **FORMS[form])
    report = validate(bundle, str(source), prompts=1, tokens=8)
    assert report.passed, [check for check in report.checks if not check.passed]
    assert [found.graph for found in report.devices] == ["target width 1", "target width 4", "target width 8"]
    assert all(found.cosine_min >= 0.999 and found.rows >= 32 and found.kv_error is None for found in report.devices)
    assert any("nothing was run by Core ML" in note for note in report.notes)
    with pytest.raises(UsageError, match="--layers"):
        validate(bundle, str(source), layers=True)


def test_validate_holds_heads_in_a_package_to_theirs(chains: Chains, tmp_path: Path) -> None:
    path = chains.path("some3", "coreml-ane", "tree", one_call=None, **CHANNEL)
    source, head = chains.target("mixed"), save_chained(tmp_path / "head", chains.head("some3"))
    report = validate(path, str(source), str(head), prompts=1, tokens=8)
    assert report.passed, [check for check in report.checks if not check.passed]
    assert {check.name for check in report.checks if check.graph.startswith("eagle")} >= {"draft_ids_differ"}


def test_a_scale_that_was_changed_in_the_package_is_found(models: Models, path: Path, tmp_path: Path) -> None:  # B22
    bundle = tmp_path / "bundle"
    shutil.copytree(path, bundle)
    weight = next(one for one in open_bundle(bundle).role("target").weights if one.name == "layers.1.mlp.up_proj.weight")
    extent = weight.parts["scales"]
    scales = np.memmap(bundle / weight.file, extent.dtype, "r+", extent.offset, extent.shape)
    scales[3] = np.nan
    scales.flush()
    report = validate(bundle, str(models()[0]), prompts=1, tokens=8)
    failed = {check.name for check in report.checks if not check.passed}
    assert {"files_changed", "weight_error", "kl_to_stored_weights"} <= failed


def test_times_of_the_evaluator_are_refused(path: Path) -> None:
    with pytest.raises(UsageError, match="device 'coreml-ane': is emulated here"):
        bench(load(path), {"ids": [[3, 4]]})
    result = run("generate", path, "--ids", "3,4,5", "--max-new-tokens", "2", "--stats", "--json", "-")
    assert json.loads(result.stdout)["emulated"] == ["coreml-ane"] and "tokens/s" not in result.stderr


def test_packages_and_graphs_are_not_taken_for_each_other(models: Models, path: Path, tmp_path: Path) -> None:
    graphs = make(models()[0], tmp_path / "b", device="cpu-static", **FLOAT16)
    for bundle, device, held in ((path, "cpu-static", "Core ML packages"), (graphs, "coreml-gpu", "ONNX graphs")):
        with pytest.raises(SpecedgeError, match=rf"device '{device}': .* holds {held}; convert with --device {device}$"):
            load(bundle, device)
    assert load(path, "coreml-gpu").generate([3, 4], max_new_tokens=2).ids == load(path).generate([3, 4], max_new_tokens=2).ids
    blocks = make(models()[0], tmp_path / "blocks", device="coreml-gpu", body=Scheme(4, 32), head=Scheme(8, 32))
    with pytest.raises(SpecedgeError, match=r"'coreml-ane': target/model\.mlpackage was made for coreml-gpu"):
        load(blocks, "coreml-ane")
    with pytest.raises(UsageError, match="'coreml-ane' is emulated here"):
        measure_engines(path, 1)
    assert "nothing to compile" in refused(2, "compile", path, "--device", "coreml-ane")


# ---- damage


def test_a_package_that_is_not_what_the_manifest_says_is_refused(path: Path, tmp_path: Path) -> None:
    def broken(change: Callable[[dict[str, Any]], None]) -> Path:
        shutil.copytree(path, tmp_path / "bundle", dirs_exist_ok=True)
        data = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        change(data["roles"]["target"]["graphs"])
        tiny.write_json(tmp_path / "bundle" / MANIFEST, data)
        return tmp_path / "bundle"

    for change, said in (
        (lambda graphs: graphs[1].update(function="verify_9"), r"has no function 'verify_9', but .*decode"),
        (lambda graphs: graphs[1]["outputs"][0].update(dtype="float32"), r"verify_4: output logits: manifest says .*float32"),
        (lambda graphs: graphs[1]["inputs"][3].update(dtype="int32"), r"verify_4: input attention_bias: manifest says .*int32"),
        (lambda graphs: graphs[1].update(file="target/other.mlpackage"), r"roles.target.graphs contradicts"),
    ):
        with pytest.raises(SpecedgeError, match=said) as caught:
            load(broken(change))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["model.mlmodel", "weights/weight.bin"])
def test_garbage_in_a_package_is_one_line(path: Path, file: str, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "bundle")
    place = tmp_path / "bundle" / PACKAGE / "Data/com.apple.CoreML" / file
    content = bytearray(place.read_bytes())
    content[: len(content) // 2] = bytes(np.random.default_rng(0).integers(0, 256, len(content) // 2, dtype=np.uint8))
    place.write_bytes(content)
    said = refused(1, "generate", tmp_path / "bundle", "--ids", "3,4,5")
    assert "model.mlpackage" in said
    place.write_bytes(content[:-1])
    assert "bytes, expected" in refused(1, "generate", tmp_path / "bundle", "--ids", "3,4,5")


# ---- a Mac, as far as its vendor's module is asked for anything


class CoreML:
    """Stands in for coremltools.models.CompiledMLModel: notes what it is opened with, and answers as the evaluator does."""

    compiled: ClassVar[list[str]] = []
    opened: ClassVar[list[tuple[str, str, str]]] = []
    wrong: ClassVar[float] = 0.0

    def __init__(self, path: str, compute_units: Any, function_name: str) -> None:
        assert compute_units in coremltools.ComputeUnit
        self.opened.append((path, compute_units.name, function_name))
        package = Path(path, "package").read_text(encoding="utf-8")
        self._program, self._function = evaluator.open_program(Path(package)), function_name

    @classmethod
    def compile(cls, model: str, destination_path: str) -> str:
        cls.compiled.append(model)
        Path(destination_path).mkdir()
        Path(destination_path, "package").write_text(model, encoding="utf-8")
        return destination_path

    def predict(self, data: dict[str, Array]) -> dict[str, Array]:
        inputs = self._program.functions[self._function].inputs
        assert data.keys() == inputs.keys()
        assert all(data[name].shape == tuple(var.shape) for name, var in inputs.items())
        assert {array.dtype for array in data.values()} <= {np.dtype(np.float16), np.dtype(np.int32)}
        made = self._program.run(self._function, data)
        return {name: array.astype(np.float32) + np.float32(self.wrong) for name, array in made.items()}


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[CoreML]:
    monkeypatch.setattr(platform, "mac_ver", lambda: ("15.1", ("", "", ""), "arm64"))
    monkeypatch.setattr(coremltools.models, "CompiledMLModel", CoreML)
    monkeypatch.setattr(coremltools.models.utils, "compile_model", CoreML.compile)
    monkeypatch.setattr(CoreML, "opened", [])
    monkeypatch.setattr(CoreML, "compiled", [])
    monkeypatch.setenv("SPECEDGE_CACHE", str(tmp_path / "cache"))
    return CoreML


@pytest.mark.parametrize(("device", "units"), [("coreml-ane", "CPU_AND_NE"), ("coreml-gpu", "CPU_AND_GPU")])
def test_core_ml_is_asked_for_every_function_on_the_rows_units(
    models: Models, mac: type[CoreML], device: str, units: str, tmp_path: Path
) -> None:
    path = make(models()[0], tmp_path / "bundle", device=device, widths=(1, 4), **FLOAT16)
    engine = load(path)
    assert engine.emulated == () and find_provider(engine.device).sdk == "macOS 15.1"
    assert [one[1:] for one in mac.opened] == [(units, name) for name in ("decode", "verify_4", "prefill")]
    assert mac.compiled == [str(path / PACKAGE)] and len({one[0] for one in mac.opened}) == 1
    assert engine.generate([3, 4, 5], max_new_tokens=6).ids == tiny.hf_greedy(models()[1], [3, 4, 5], 6)
    load(path)
    assert len(mac.compiled) == 1
    other = make(models(seed=1)[0], path, device=device, widths=(1, 4), **FLOAT16)  # B66: other weights in the same place
    assert load(other).generate([3, 4, 5], max_new_tokens=6).ids == tiny.hf_greedy(models(seed=1)[1], [3, 4, 5], 6)
    assert len(mac.compiled) == 2


def test_on_a_mac_core_ml_is_compared_with_the_evaluator(
    models: Models, path: Path, mac: type[CoreML], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = validate(path, str(models()[0]), prompts=1, tokens=8)
    assert report.passed, [check for check in report.checks if not check.passed]
    held = [(found.against, found.kv_error) for found in report.devices]
    assert held == [("PyTorch", None)] * 3 + [("the evaluator", 0.0)] * 3
    assert not any("nothing was run" in note for note in report.notes)
    monkeypatch.setattr(mac, "wrong", 3.0)
    assert not validate(path, str(models()[0]), prompts=1, tokens=8).passed


def test_an_older_mac_is_refused(path: Path, mac: type[CoreML], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "mac_ver", lambda: ("14.7", ("", "", ""), "arm64"))
    with pytest.raises(SpecedgeError, match=r"device 'coreml-ane': its packages need macOS 15, this is 14\.7"):
        load(path)


@pytest.mark.parametrize(("at", "does"), [("compile_model", "open"), ("__init__", "open"), ("predict", "run")])
def test_what_core_ml_says_when_it_fails_is_one_line(
    path: Path, mac: type[CoreML], at: str, does: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("Error compiling model:\nmany lines")

    monkeypatch.setattr(coremltools.models.utils if at == "compile_model" else mac, at, fail)
    with pytest.raises(SpecedgeError, match=rf"decode: Core ML cannot {does} it \(Error compiling model:\)$"):
        load(path).generate([3])


def test_the_evaluator_is_as_exact_as_float16(models: Models, path: Path) -> None:
    """Every value is one that float16 has, whatever it was computed in."""
    program = evaluator.open_program(path / PACKAGE)
    function = program.functions["verify_4"]
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal(var.shape).astype(np.float16) for name, var in function.inputs.items()}
    made = program.run("verify_4", inputs)
    assert all(array.dtype == np.float16 and np.isfinite(array).all() for array in made.values())
    for op in function.operations:
        for var in op.outputs:
            if isinstance(var.val, np.ndarray) and var.val.dtype.kind == "f":
                np.testing.assert_array_equal(var.val, var.val.astype(np.float16))
    assert math.isclose(sum(1 for op in function.operations if op.op_type == "linear"), 2 * 7 + 1)
    assert get_device("coreml-ane").blocks is False
