"""Lowering changes which kernels compute, not what: fused norms, joined products, and the rows that are asked for."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from gguf import GGMLQuantizationType
from onnx import helper

import tiny
from bundles import SHAPE, Models, feed, make, run
from checkpoints import any_blocks, rewrite_gguf
from specedge.bundle import Bundle, open_bundle
from specedge.devices.table import get_device
from specedge.export import lower as lowering
from specedge.export import to_onnx
from specedge.export.checkpoint import open_checkpoint
from specedge.export.compose import step
from specedge.export.lower import lower
from specedge.export.recipe import INT4, INT8
from specedge.export.request import Request
from specedge.export.roles import Place, delta_body, layout_of
from specedge.export.weights import Stored, WeightWriter, read_float32
from specedge.manifest import Weight
from specedge.progress import silent
from specedge.quant.rounding import round_to_nearest
from specedge.quant.scheme import Scheme
from tiny import Array

TEXT = list(range(3, 11))
FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int4": {"body": INT4, "head": INT8},
    "asymmetric": {"body": Scheme(4, 16, False), "head": Scheme(8, None, False)},
    "minima": {"body": INT4, "head": INT8},  # of a Q4_1 file
}
SETTINGS = {"attention_bias": True, "mlp_bias": True, "intermediate_size": 96}
forms = pytest.mark.parametrize("form", FORMS)


def source(models: Models, form: str, folder: Path) -> Path:
    """The checkpoint that `form` is made from."""
    plain, _ = models(**SETTINGS)
    if form != "minima":
        return plain
    tiny.f_gguf(plain, folder / "plain.gguf")
    rewrite_gguf(folder / "plain.gguf", folder / "model.gguf", {}, GGMLQuantizationType.Q4_1, any_blocks)
    return folder / "model.gguf"


def lowered(bundle: Bundle, checkpoint: Path, name: str, weights: Sequence[Weight] = ()) -> Path:
    """The target's graph lowered once more, beside the bundle's own, computing in float32: int8 activations blow up a last bit.

    With `weights`, those stand in a file of this name.
    """
    role, device = bundle.role("target"), get_device(bundle.manifest.device)
    width = role.graphs[-1].width
    config = open_checkpoint(str(checkpoint)).config
    place = Place(bundle.path, device, role.context, Request("", bundle.path), silent)
    if device.form == "delta":
        model = step(delta_body(config, "float32"), layout_of(config, role.kv, place).at(width))
    else:
        model = to_onnx.trace_in_place(config, role.context, "float32")
    file = f"target/{name}.onnx"
    lower(model, {one.name: one for one in weights or role.weights}, dataclasses.replace(device, accuracy_level=0), file)
    to_onnx.write(model, bundle.path / file)
    return bundle.path / file


def outputs(bundle: Bundle, path: Path) -> dict[str, Array]:
    """Logits and KV columns of a step behind 5 tokens of some past."""
    past = np.random.default_rng(0).standard_normal
    return run(path, feed(bundle.role("target"), TEXT, 8, lambda shape: np.asarray(past(shape)), 5))


def ops(path: Path) -> Mapping[str, int]:
    return Counter(node.op_type for node in onnx.load(path, load_external_data=False).graph.node)


def check_close(found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.abs(found[name] - array).max() <= 2e-6 * np.abs(array).max(), name


@forms
def test_fused_norms_are_norms_of_sums(models: Models, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoint = source(models, form, tmp_path)
    bundle = open_bundle(make(checkpoint, tmp_path / "bundle", **SHAPE, **FORMS[form]))
    fused = lowered(bundle, checkpoint, "fused")
    with monkeypatch.context() as patch:
        patch.setattr(lowering, "_fuse_norms", lambda graph: None)
        apart = lowered(bundle, checkpoint, "apart")
    assert ops(fused)["SkipSimplifiedLayerNormalization"] == 4 and ops(fused)["RMSNormalization"] == 1
    assert ops(apart)["RMSNormalization"] == 5 and "SkipSimplifiedLayerNormalization" not in ops(apart)
    check_close(outputs(bundle, fused), outputs(bundle, apart))


@pytest.mark.parametrize("device", ["cpu", "cpu-static"])
@forms
def test_q_k_and_v_together_are_q_k_and_v_apart(models: Models, form: str, device: str, tmp_path: Path):
    """Three products of the same weights, which lie scattered, in place of one."""
    checkpoint = source(models, form, tmp_path)
    few = {} if device == "cpu" else {"widths": (1,)}
    bundle = open_bundle(make(checkpoint, tmp_path / "bundle", device=device, **(SHAPE | few), **FORMS[form]))
    joint = lowered(bundle, checkpoint, "joint")
    apart = lowered(bundle, checkpoint, "apart", scattered(bundle, bundle.path / "target/apart.bin"))
    product = "FusedMatMul" if form == "float32" else "MatMulNBits"
    assert ops(apart)[product] == ops(joint)[product] + 2 * 2
    check_close(outputs(bundle, joint), outputs(bundle, apart))


def scattered(bundle: Bundle, path: Path) -> list[Weight]:
    """Every weight written anew, 64 bytes of padding before each part."""
    old = bundle.file("target/weights.bin").read_bytes()
    content = bytearray()
    weights = []
    for weight in reversed(bundle.role("target").weights):
        parts = {}
        for name, part in weight.parts.items():
            content += bytes(64 + -len(content) % 64)
            parts[name] = type(part)(len(content), part.bytes, part.dtype, part.shape)
            content += old[part.offset : part.offset + part.bytes]
        weights.append(dataclasses.replace(weight, parts=parts, file=f"target/{path.name}"))
    path.write_bytes(content)
    return weights


@forms
def test_the_rows_asked_for_are_those_of_all_rows(models: Models, form: str, tmp_path: Path):
    """Any rows, in any order, more than once, or none: the same bits, and the KV columns of all rows."""
    bundle = open_bundle(make(source(models, form, tmp_path), tmp_path / "bundle", **SHAPE, **FORMS[form]))
    inputs = feed(bundle.role("target"), TEXT, 8)
    everything = run(bundle.path / "target/step.onnx", inputs)
    for rows in ([7], [0], [7, 0], [1, 2, 3], [3, 3, 5, 3], [*range(8)][::-1], [2] * 11, []):
        found = run(bundle.path / "target/step.onnx", inputs | {"logits_rows": np.array(rows, np.int64)})
        assert found["logits"].shape == (1, len(rows), 128)
        np.testing.assert_array_equal(found["logits"], everything["logits"][:, rows], err_msg=str(rows))
        for name in found.keys() - {"logits"}:
            np.testing.assert_array_equal(found[name], everything[name], err_msg=name)


@pytest.mark.parametrize("scheme", [Scheme(4, 32), "float32"], ids=str)
@pytest.mark.parametrize(
    ("parts", "products"),
    [
        (("x a", "x b"), 1),
        (("x a", "y b"), 2),  # of different inputs
        (("x b", "x a"), 2),  # not in the order they lie in
        (("x a", "x a"), 2),
        (("x a", "x b", "x"), 2),  # beside something else
        (("x a", "x b", "x c"), 3),  # c lies somewhere else
    ],
    ids=str,
)
def test_only_neighbours_of_one_input_are_joined(parts: tuple[str, ...], products: int, scheme: Scheme | str, tmp_path: Path):
    rng = np.random.default_rng(0)
    matrices = {name: rng.standard_normal((8, 32)).astype(np.float32) for name in "abc"}
    stored = {}
    for name, matrix in matrices.items():
        values = round_to_nearest(matrix, scheme) if isinstance(scheme, Scheme) else matrix
        stored[name] = Stored(name, values, "F32", "", exact=False)
    with WeightWriter(tmp_path / "weights.bin", "weights.bin") as writer:
        weights = [*writer.add([stored["a"], stored["b"]]), *writer.add([tensor("gap")]), *writer.add([stored["c"]])]
    inputs = {name: rng.standard_normal((1, 3, 32)).astype(np.float32) for name in "xy"}
    model = ir.from_proto(concat_of(parts))
    kernels = dataclasses.replace(get_device("cpu-static"), accuracy_level=0)
    lower(model, {weight.name: weight for weight in weights}, kernels, "model.onnx")
    to_onnx.write(model, tmp_path / "model.onnx")
    found = run(tmp_path / "model.onnx", {name: inputs[name] for name in inputs if any(name in part for part in parts)})["out"]
    kept = {weight.name: read_float32(weight, tmp_path / "weights.bin")[0] for weight in weights}
    pieces = [inputs[part[0]] @ kept[part[2]].T if part[1:] else inputs[part] for part in parts]
    assert np.abs(found - np.concatenate(pieces, -1)).max() <= 1e-5
    assert sum(count for op, count in ops(tmp_path / "model.onnx").items() if op in ("FusedMatMul", "MatMulNBits")) == products


def tensor(name: str) -> Stored:
    return Stored(name, np.zeros((1, 32), np.float32), "F32", "", exact=False)


def concat_of(parts: Sequence[str]) -> onnx.ModelProto:
    """`x a` is a linear layer of input x and weight a, `x` the input itself."""
    used = sorted({name for part in parts for name in part.split()})
    nodes = []
    for index, part in enumerate(parts):
        if " " in part:
            x, weight = part.split()
            nodes.append(helper.make_node("Transpose", [weight], [f"t{index}"], perm=[1, 0]))
            nodes.append(helper.make_node("MatMul", [x, f"t{index}"], [f"p{index}"]))
    pieces = [f"p{index}" if " " in part else part for index, part in enumerate(parts)]
    nodes.append(helper.make_node("Concat", pieces, ["out"], axis=-1))
    shapes = {name: [1, 3, 32] if name in "xy" else [8, 32] for name in used}
    graph_inputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    outputs = [helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, None)]
    opsets = [helper.make_opsetid("", to_onnx.OPSET)]
    return helper.make_model(helper.make_graph(nodes, "layers", graph_inputs, outputs), opset_imports=opsets, ir_version=10)
