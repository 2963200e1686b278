"""Graphs for onnxruntime's Core ML provider: only operators it is documented to take, and what others make of them."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import tiny
from bundles import Models, graphs, make
from eagles import Chains
from specedge.bundle import open_bundle
from specedge.devices.operators import Operators
from specedge.devices.table import DEVICES, get_device
from specedge.errors import SpecedgeError, UsageError
from specedge.export.plain import preflight
from specedge.quant.scheme import Scheme
from specedge.runtime import TreeShape, load
from specedge.runtime.agreement import walk
from stand_in import provide
from test_export_cli import refused, run
from test_runtime_heads import random_heads

ROW = get_device("coreml-ep")
assert ROW.operators is not None
OPERATORS = ROW.operators
IDS = [int(token) for token in np.random.default_rng(0).integers(3, 128, 30)]
LIMITS = {"float32": 1e-3, "float16": 0.1}


@pytest.mark.parametrize("dtype", LIMITS)
def test_graphs_compute_the_model_with_the_operators_there_are(models: Models, dtype: str, tmp_path: Path) -> None:
    source, model = models()
    heads = str(random_heads(tmp_path / "heads", False, 128))
    path = make(source, tmp_path / "b", device="coreml-ep", widths=(1, 4), body=dtype, head=dtype, medusa=heads)
    bundle, truth = open_bundle(path), tiny.hf_logits(model, IDS)
    for file, proto in graphs(bundle).items():
        found = preflight(ir.from_proto(proto).graph, OPERATORS)
        assert (found.left, found.partitions) == ({}, 1) and found.nodes > 60, file
        assert {domain.domain for domain in proto.opset_import} == {""}
    for graph in bundle.role("target").graphs:
        assert all(isinstance(size, int) for spec in (*graph.inputs, *graph.outputs) for size in spec.shape)
        assert "input_embeds" in {spec.name for spec in graph.inputs}
    engine = load(path, "cpu-static", drafter="medusa")
    for width in (1, 4, 8):
        assert np.abs(walk(engine.target, IDS, width) - truth).max() <= LIMITS[dtype]
    plain = engine.generate(IDS[:5], max_new_tokens=12, speculate=False).ids
    assert engine.generate(IDS[:5], max_new_tokens=12, gamma=3).ids == plain


@pytest.mark.parametrize("name", ["draft", "eagle1", "some3"])
def test_drafters_are_taken_whole(chains: Chains, name: str) -> None:
    path = chains.path(name, "coreml-ep", "tree", one_call=None, body="float32", head="float32")
    bundle = open_bundle(path)
    for role in bundle.manifest.roles:
        for proto in graphs(bundle, role).values():
            assert preflight(ir.from_proto(proto).graph, OPERATORS).left == {}
    engine = load(path, "cpu-static")
    for prompt in ([3, 4, 5], [7, 1]):
        plain = engine.generate(prompt, max_new_tokens=20, speculate=False).ids
        assert engine.generate(prompt, max_new_tokens=20, tree=TreeShape.from_paths([[0], [1], [0, 0]])).ids == plain


def test_large_values_survive_the_norms_of_float16(models: Models, tmp_path: Path) -> None:
    model = models(seed=5)[1]
    model.state_dict()["model.embed_tokens.weight"][:, 7] *= 2000
    tiny.save_folder(model, tmp_path / "loud")
    truth = tiny.hf_logits(model, IDS)
    path = make(tmp_path / "loud", tmp_path / "b", device="coreml-ep", widths=(1, 4), body="float16", head="float16")
    assert np.abs(walk(load(path, "cpu-static").target, IDS, 4) - truth).max() <= 0.02 * np.abs(truth).max()


# ---- preflight


def test_what_would_stay_on_the_cpu_is_refused_unless_allowed(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A provider that knows no Softmax takes the rest in parts: one per layer, and what is behind the last."""
    less = dataclasses.replace(ROW, operators=dataclasses.replace(OPERATORS, names=OPERATORS.names - {"Softmax"}))
    monkeypatch.setitem(DEVICES, "coreml-ep", less)
    wanted = {"device": "coreml-ep", "widths": (1, 4)}
    with pytest.raises(SpecedgeError, match=r"takes \d+ of \d+ nodes, in \d+ parts, and leaves Softmax \(2\) to the CPU"):
        make(models()[0], tmp_path / "b", **wanted)
    assert not (tmp_path / "b").exists()
    make(models()[0], tmp_path / "b", allow_cpu_nodes=True, **wanted)
    assert "leaves Softmax (2) to the CPU" in caplog.text


TEXT = """
<ir_version: 10, opset_import: ["": 23]>
main (float[2] x, float[2] y) => (float[2] out, float[2] more) <float[2] one = {1, 1}> {
    a = Add(x, one)
    b = Erf(a)
    c = Add(one, one)
    out = Mul(b, c)
    more = Sub(y, one)
}
"""


@pytest.mark.parametrize(
    ("ops", "left", "parts"),
    [
        (("Add", "Erf", "Mul", "Sub"), {}, 2),
        (("Add", "Mul", "Sub"), {"Erf": 1}, 3),
        (("Add",), {"Erf": 1, "Mul": 1, "Sub": 1}, 1),
        (("Cos",), {"Add": 1, "Erf": 1, "Mul": 1, "Sub": 1}, 0),
    ],
)
def test_preflight_counts_nodes_and_parts(ops: tuple[str, ...], left: dict[str, int], parts: int) -> None:
    """But none that is computed of constants: `c`."""
    found = preflight(ir.from_proto(onnx.parser.parse_model(TEXT)).graph, Operators("a test", frozenset(ops)))
    assert (found.nodes, found.left, found.partitions) == (4, left, parts)


@pytest.mark.parametrize("form", [{"body": Scheme(4, 32), "head": Scheme(8, 32)}, {"head": Scheme(8, 32)}])
def test_codes_are_refused(models: Models, form: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"weights int\d/32: device 'coreml-ep' runs floats only; use fp16 or fp32"):
        make(models()[0], tmp_path / "b", device="coreml-ep", **form)
    assert refused(2, "convert", models()[0], "-o", tmp_path / "b", "--device", "coreml-ep", "--weights", "int4")


def test_floats_are_the_default(models: Models, tmp_path: Path) -> None:
    run("convert", models()[0], "-o", tmp_path / "b", "--device", "coreml-ep", "--context", "64", "--chunk", "8")
    assert {weight.scheme for weight in open_bundle(tmp_path / "b").role("target").weights} == {"float32"}


# ---- the session, as far as its vendor's module is asked for anything


def test_elsewhere_the_provider_is_missed_by_name(models: Models, tmp_path: Path) -> None:  # B65
    path = make(models()[0], tmp_path / "b", device="coreml-ep", widths=(1, 4))
    assert "needs CoreMLExecutionProvider, onnxruntime here has" in refused(1, "generate", path, "--ids", "3,4,5")


def test_the_provider_is_asked_for_as_the_row_says(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLProgram, static shapes, no node on the CPU, and a cache that no other graph or version shares."""
    path = make(models()[0], tmp_path / "b", device="coreml-ep", widths=(1, 4))
    asked = provide("CoreMLExecutionProvider", monkeypatch).asked
    engine = load(path)
    assert engine.generate(IDS[:5], max_new_tokens=6).ids == tiny.hf_greedy(models()[1], IDS[:5], 6)
    folders = [own.pop("ModelCacheDirectory") for own, _ in asked]
    wanted = {"ModelFormat": "MLProgram", "MLComputeUnits": "ALL", "RequireStaticInputShapes": "1"}
    assert all(own == wanted for own, _ in asked)
    assert all(options.get_session_config_entry("session.disable_cpu_ep_fallback") == "1" for _, options in asked)
    assert len(set(folders)) == len(folders) == 3 and all(Path(folder).is_dir() for folder in folders)
    asked.clear()
    load(path)
    assert [own["ModelCacheDirectory"] for own, _ in asked] == folders
    asked.clear()
    load(make(models(seed=1)[0], tmp_path / "b", device="coreml-ep", widths=(1, 4)))  # B66: other weights, the same names
    assert not {own["ModelCacheDirectory"] for own, _ in asked} & set(folders)
    asked.clear()
    load(path, allow_cpu_nodes=True)
    for _, options in asked:
        with pytest.raises(RuntimeError, match="disable_cpu_ep_fallback"):
            options.get_session_config_entry("session.disable_cpu_ep_fallback")
