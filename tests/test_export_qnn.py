"""Graphs for Qualcomm's NPU, as far as any machine can tell: their form, and what the CPU makes of them."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from bundles import Models, graphs, make, stored
from eagles import Chains
from specedge.bundle import open_bundle
from specedge.devices.table import DEVICES, get_device
from specedge.errors import SpecedgeError, UsageError
from specedge.export.report import mean_kl
from specedge.export.validate import validate
from specedge.export.weights import read_float32
from specedge.manifest import Graph, TensorSpec
from specedge.quant.scheme import Scheme
from specedge.runtime import Sampling, TreeShape, load
from specedge.runtime.agreement import walk
from specedge.runtime.embedding import Embedding
from test_runtime_heads import random_heads
from tiny import Array

IDS = [int(token) for token in np.random.default_rng(0).integers(3, 128, 30)]
INT4: dict[str, Any] = {"body": Scheme(4, 32), "head": Scheme(8, 32)}
ASYMMETRIC: dict[str, Any] = {"body": Scheme(4, 32, False), "head": Scheme(8, 32, False)}
CHANNEL: dict[str, Any] = {"body": Scheme(4, None), "head": Scheme(8, None)}
FLOAT16: dict[str, Any] = {"body": "float16", "head": "float16"}
FORMS = {"int4": INT4, "asymmetric": ASYMMETRIC, "channel": CHANNEL, "float16": FLOAT16}
RAGGED = {"hidden_size": 40, "intermediate_size": 100, "head_dim": 10}  # B17
# What the provider's documentation lists, of the operators that graphs of ours have.
TAKEN = {"Add", "Concat", "Expand", "FusedMatMul", "Gather", "MatMul", "MatMulNBits", "Mul", "RMSNormalization"}
TAKEN |= {"ReduceSum", "Reshape", "Sigmoid", "Slice", "Softmax", "Split", "Squeeze", "Sub", "Tile", "Transpose", "Unsqueeze"}


@pytest.mark.parametrize("shape", [{}, RAGGED], ids=["whole", "ragged"])
@pytest.mark.parametrize("form", FORMS)
def test_the_cpu_computes_what_is_stored(models: Models, shape: dict[str, Any], form: str, tmp_path: Path) -> None:
    source, model = models(**shape)
    path = make(source, tmp_path / "bundle", device="qnn", widths=(1, 4), **FORMS[form])
    bundle, sequence = open_bundle(path), load(path, "cpu-static").target
    truth = tiny.hf_logits(stored(model, bundle), IDS)
    for width in (1, 4, 8):
        found = walk(sequence, IDS, width)
        assert np.abs(found - truth).max() <= 0.02 * np.abs(truth).max()  # float16
        assert mean_kl(truth, found) <= 1e-4


@pytest.mark.parametrize("form", FORMS)
def test_graphs_hold_only_what_the_npu_takes(models: Models, form: str, tmp_path: Path) -> None:
    source, _ = models(**RAGGED)
    bundle = open_bundle(make(source, tmp_path / "bundle", device="qnn", widths=(1, 4), **FORMS[form]))
    for graph in bundle.role("target").graphs:
        specs = {spec.name: spec for spec in (*graph.inputs, *graph.outputs)}
        assert "input_ids" not in specs and specs["input_embeds"].shape == (1, graph.width, 40)
        assert {spec.dtype for spec in specs.values()} == {"float16"}
        assert all(isinstance(size, int) for spec in specs.values() for size in spec.shape)
        assert set(graph.ops) <= TAKEN
    for model in graphs(bundle).values():
        ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in (*model.graph.value_info, *model.graph.input)}
        for node in model.graph.node:
            attributes = {attribute.name: attribute.i for attribute in node.attribute}
            if node.op_type == "MatMulNBits":
                assert attributes["K"] % attributes["block_size"] == 0
            if node.op_type == "RMSNormalization":
                assert ranks.get(node.input[0], 3) == 3  # of rank 4 it is miscomputed


def test_no_mask_is_infinite_in_float16(models: Models, tmp_path: Path) -> None:  # B16
    """Padding rows of every kind: prompts that leave 3, 0 and 7 of a chunk's 8 rows."""
    source, model = models()
    path = make(source, tmp_path / "bundle", device="qnn", widths=(1, 4), body="float16", head="float16")
    assert all(-65504 <= row.mask_value < 0 for row in DEVICES.values())
    target = load(path, "cpu-static")
    for length in (5, 8, 1):
        assert target.generate(IDS[:length], max_new_tokens=20).ids == tiny.hf_greedy(model, IDS[:length], 20)
        for _, buffer in target.target.cache.buffers():
            assert np.isfinite(buffer).all()
        walk(target.target, IDS[:length], 8)
        assert all(np.isfinite(step.logits).all() for step in target.target._steps.values())  # type: ignore[attr-defined]


def test_logits_of_a_large_vocabulary_come_in_pieces(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers, of the same bytes: for the target, Medusa heads with a matrix of their own and without, and EAGLE."""
    source, _ = models()
    whole = {
        kind: make(
            source,
            tmp_path / kind,
            device="qnn",
            medusa=str(random_heads(tmp_path / f"{kind} heads", kind == "own", 128)),
            **INT4,
        )
        for kind in ("own", "shared")
    }
    narrow = dataclasses.replace(get_device("qnn"), widest_output=48)
    monkeypatch.setitem(DEVICES, "qnn", narrow)
    for kind, path in whole.items():
        pieces = make(source, tmp_path / f"{kind} pieces", device="qnn", medusa=str(tmp_path / f"{kind} heads"), **INT4)
        before, after = open_bundle(path), open_bundle(pieces)
        for file in ("target/weights.bin", "medusa/weights.bin"):
            assert before.manifest.files[file] == after.manifest.files[file]
        graph = after.role("target").graphs[-1]
        assert [spec.shape[-1] for spec in graph.pieces("logits")] == [48, 48, 32] and graph.output("logits").shape[-1] == 128  # type: ignore[union-attr]
        assert len(after.manifest.heads["medusa"].graph.pieces("head_logits")) == 3
        one, other = (load(place, "cpu-static", drafter="medusa") for place in (path, pieces))
        np.testing.assert_array_equal(walk(one.target, IDS, 4), walk(other.target, IDS, 4))
        np.testing.assert_array_equal(one._heads.logits(one.target.hidden(-1)), other._heads.logits(one.target.hidden(-1)))  # type: ignore[union-attr]
        assert (
            other.generate(IDS[:5], max_new_tokens=8, gamma=2).ids
            == one.generate(IDS[:5], max_new_tokens=8, speculate=False).ids
        )


@pytest.mark.parametrize("name", ["draft", "eagle1", "eagle3", "some3"])
@pytest.mark.parametrize("draft_device", ["qnn", "cpu"])
def test_drafters_on_the_npu_or_beside_it(chains: Chains, name: str, draft_device: str) -> None:
    """One bundle whose target is for the NPU, its drafter for the same or for the CPU."""
    path = chains.path(name, "qnn", "chain", one_call=None, draft_device=draft_device, **FLOAT16)
    beside = "cpu-static" if draft_device == "qnn" else draft_device
    made = load(path, "cpu-static", beside)
    assert (made.device.name, made.draft_device.name) == ("cpu-static", beside)
    accepted = 0
    for prompt in ([3, 4, 5], [7, 1], [2, 20, 11, 6]):
        plain = made.generate(prompt, max_new_tokens=30, speculate=False).ids
        for shape in (TreeShape.chain(3), TreeShape.from_paths([[0], [1], [0, 0]])):
            drafted = made.generate(prompt, max_new_tokens=30, tree=shape)
            assert drafted.ids == plain
            accepted += drafted.stats.accepted
        seeded: dict[str, Any] = {"sampling": Sampling(0.8, seed=3), "rule": "coupled", "max_new_tokens": 20}
        assert made.generate(prompt, **seeded).ids == made.generate(prompt, speculate=False, **seeded).ids
    assert accepted > 20


def test_a_chain_in_one_call_needs_ids_in_the_graph(chains: Chains) -> None:
    with pytest.raises(UsageError, match="one_call: device 'qnn' takes embeddings"):
        make(
            chains.target("mixed"),
            Path("unused"),
            device="qnn",
            draft=str(chains.draft("draft")),
            one_call=True,
            context=64,
            **FLOAT16,
        )


def test_what_is_computed_in_float16_is_not_stored_in_float32(models: Models, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="compute in float16 here; use fp16"):
        make(models()[0], tmp_path / "bundle", device="qnn")


def test_validate_holds_a_bundle_to_its_checkpoint(models: Models, tmp_path: Path) -> None:
    source, _ = models()
    path = make(source, tmp_path / "bundle", device="qnn", widths=(1, 4), **ASYMMETRIC)
    report = validate(path, str(source), device="cpu-static", prompts=1, tokens=8)
    assert report.passed and not report.devices, [check for check in report.checks if not check.passed]


@pytest.mark.parametrize(
    "head", ["float16", *(Scheme(bits, 32, symmetric) for bits in (4, 8) for symmetric in (True, False))], ids=str
)
def test_the_host_reads_the_rows_that_are_stored(models: Models, head: Any, tmp_path: Path) -> None:
    source, _ = models(**RAGGED)
    body = "float16" if head == "float16" else INT4["body"]
    bundle = open_bundle(make(source, tmp_path / "bundle", device="qnn", body=body, head=head))
    role, embedding = bundle.role("target"), Embedding(bundle, "target")
    weight = next(weight for weight in role.weights if weight.name == "embed_tokens.weight")
    expected: Array = read_float32(weight, bundle.file(weight.file))[0]
    found: Array = embedding.rows(range(128))
    assert found.dtype == np.float16 and found.shape == (128, 40)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=2e-3 * np.abs(expected).max())


@pytest.mark.parametrize("lie", ["scales", "scheme", "shape", "rows"])
def test_an_embedding_that_is_no_matrix_is_refused(models: Models, lie: str, tmp_path: Path) -> None:
    bundle = open_bundle(make(models()[0], tmp_path / "bundle", device="qnn", **INT4))
    role = bundle.role("target")
    weight = next(weight for weight in role.weights if weight.name == "embed_tokens.weight")
    scales, codes = weight.parts["scales"], weight.parts["codes"]
    changes: dict[str, dict[str, Any]] = {
        "scales": {"parts": weight.parts | {"scales": dataclasses.replace(scales, shape=(128, 1), bytes=256)}},
        "scheme": {"scheme": "int4/32"},
        "shape": {"shape": (128, 32)},
        "rows": {"parts": weight.parts | {"codes": dataclasses.replace(codes, shape=(10, *codes.shape[1:]), bytes=640)}},
    }
    others = tuple(dataclasses.replace(one, **changes[lie]) if one is weight else one for one in role.weights)
    lying = dataclasses.replace(bundle.manifest, roles={"target": dataclasses.replace(role, weights=others)})
    with pytest.raises(SpecedgeError, match=r"embed_tokens.weight is stored as .* expected \(128, 64\)"):
        Embedding(dataclasses.replace(bundle, manifest=lying), "target")


def test_heads_beside_a_float32_target_are_not_for_the_npu(models: Models, tmp_path: Path) -> None:
    heads = random_heads(tmp_path / "heads", True, 128)
    with pytest.raises(UsageError, match="draft device 'qnn': computes in float16, and heads in the target's float32"):
        make(models()[0], tmp_path / "bundle", device="cpu-static", draft_device="qnn", medusa=str(heads), **INT4)


def test_pieces_are_all_there_or_none() -> None:
    def graph(*names: str, columns: int | str = 4) -> Graph:
        outputs = tuple(TensorSpec(name, "float16", (1, 2, columns)) for name in names)
        return Graph("x.onnx", 2, (), outputs, {}, None)

    whole = graph("logits_0", "logits_1").output("logits")
    assert whole is not None and whole.shape == (1, 2, 8)
    assert graph("logits_0", "logits_2").output("logits") is None
    assert graph("logits_0", "logits_1", columns="V").output("logits") is None
    assert graph("new_key_0", "new_key_1").output("new_key") is None  # layers, not pieces
    assert graph().output("logits") is None
