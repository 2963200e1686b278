"""What GPTQ and AWQ packed is read as the codes, zero points and scales that were packed, or refused by name."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import tiny
from bundles import make
from checkpoints import WEIGHTS, check_same, refuse
from packed import Kind, Truth, draw, pack_awq, pack_bits, write_packed
from specedge.bundle import open_bundle
from specedge.errors import SpecedgeError
from specedge.export.checkpoint import open_checkpoint
from specedge.export.cli import main
from specedge.export.packed_grid import PackedMatrix, join_parts
from specedge.export.packing import read_packing
from specedge.export.recipe import INT4, INT8
from specedge.export.safetensors_file import read_header

# One shape for all: a last group of 32 columns where groups are of 64 or 128, in down_proj.
SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 1, "eos_token_id": None}
GROUPS = (16, 32, 64, 128, -1)
LAYOUTS = (("gptq", 4), ("gptq", 8), ("gptq_v2", 4), ("gptq_v2", 8), ("awq", 4))
KINDS = [Kind(layout, bits, group, sym) for layout, bits in LAYOUTS for group in GROUPS for sym in (True, False)]
DOWN = "layers.0.mlp.down_proj"


def matrix(path: Path, truth: Truth, **parts: Any) -> PackedMatrix:
    """The matrix written to a file and opened again; other `parts` replace its own."""
    tensors = {f"m.{part}": torch.as_tensor(array) for part, array in (truth.pack() | parts).items()}
    save_file(tensors, path)
    packing = read_packing({"quantization_config": truth.kind.config}, "config.json")
    assert packing is not None
    opened = join_parts(read_header(path, integers=True), packing)["m.weight"]
    assert isinstance(opened, PackedMatrix)
    return opened


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_was_packed_is_read(kind: Kind, tmp_path: Path):
    """Also of rows whose last group is not whole, which AutoGPTQ packs."""
    truth = draw(kind, 16, 128 if kind.layout == "awq" else 80)
    found = matrix(tmp_path / "one", truth)
    assert (found.dtype, found.shape) == (kind.stored_type, truth.codes.shape)
    values, grid = found.read(), found.grid()
    assert values.dtype == np.float32 and grid is not None
    np.testing.assert_array_equal(values, truth.values)
    np.testing.assert_array_equal(grid.dequantize(), truth.values)
    assert grid.equals(values)
    assert grid.scheme.name == kind.scheme
    assert grid.scales.dtype == np.float16
    np.testing.assert_array_equal(grid.codes.reshape(16, -1)[:, : truth.codes.shape[1]], truth.codes)
    np.testing.assert_array_equal(grid.scales, truth.scales)
    if grid.zero_points is not None:
        np.testing.assert_array_equal(grid.zero_points, truth.zeros)


def test_integers_are_packed_as_published():
    """AutoGPTQ counts up from the lowest bits, AutoAWQ takes even columns first."""
    assert pack_bits(np.arange(8), 4).view(np.uint32) == 0x76543210
    assert pack_bits(np.array([1, 2, 3, 255]), 8).view(np.uint32) == 0xFF030201
    assert pack_awq(np.arange(8)).view(np.uint32) == 0x75316420


@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_points_in_the_middle_are_a_symmetric_grid(symmetric: bool, tmp_path: Path):
    truth = draw(Kind("gptq", 4, 32, False), 16, 64)
    middle = Truth(truth.kind, truth.codes, np.full_like(truth.zeros, 8), truth.scales, truth.groups)
    grid = matrix(tmp_path / "one", middle if symmetric else truth).grid()
    assert grid is not None and grid.scheme.symmetric == symmetric


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_scales_are_kept_too(dtype: torch.dtype, tmp_path: Path):
    truth = draw(Kind("awq", 4, 32, False), 16, 64)
    scales = torch.from_numpy(truth.scales.T.copy()).to(dtype)
    found = matrix(tmp_path / "one", truth, scales=scales)
    exact = Truth(truth.kind, truth.codes, truth.zeros, scales.float().numpy().T, truth.groups)
    grid = found.grid()
    assert grid is not None
    np.testing.assert_array_equal(found.read(), exact.values.astype(np.float32))
    np.testing.assert_array_equal(grid.dequantize(), exact.values.astype(np.float32))


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
def test_activation_order_is_dequantised(layout: str, tmp_path: Path):
    """Columns that share a scale in any order have no grid; whole groups in another order have one."""
    truth = draw(Kind(layout, 4, 32, False), 16, 96)
    order = np.random.default_rng(0).permutation(truth.groups)
    mixed = truth.in_order(order)
    found = matrix(tmp_path / "mixed", mixed)
    assert found.grid() is None
    np.testing.assert_array_equal(found.read(), mixed.values)
    moved = truth.in_order(np.repeat([2, 0, 1], 32))
    grid = matrix(tmp_path / "moved", moved).grid()
    assert grid is not None
    np.testing.assert_array_equal(grid.dequantize(), moved.values)


@pytest.mark.parametrize(
    ("layout", "part", "value", "message"),
    [
        ("gptq", "qzeros", 0x7F777777, r"m\.qzeros: found a stored zero point of 15, expected less.*gptq_v2"),
        ("gptq", "qzeros", 0x76777777, r"m\.qzeros: found a zero point of 7, expected 8 by sym=True"),
        ("gptq_v2", "qzeros", 0x77777777, r"m\.qzeros: found a zero point of 7, expected 8 by sym=True"),
        ("awq", "qzeros", 0x77777777, r"m\.qzeros: found a zero point of 7, expected 8 by zero_point=False"),
        ("gptq", "scales", float("inf"), r"m\.scales\[1, 0\]: expected finite numbers, found inf"),
        ("awq", "scales", float("nan"), r"m\.scales\[1, 0\]: expected finite numbers, found nan"),
        ("gptq", "g_idx", 2, r"m\.g_idx: found group 2, expected 0 to 1"),
        ("gptq", "g_idx", -1, r"m\.g_idx: found group -1, expected 0 to 1"),
    ],
)
@pytest.mark.parametrize("read", [PackedMatrix.read, PackedMatrix.grid])
@pytest.mark.filterwarnings("error")
def test_what_is_no_number_or_ambiguous_is_named(
    layout: str, part: str, value: float, message: str, read: Callable[[PackedMatrix], object], tmp_path: Path
):  # B22
    truth = draw(Kind(layout, 4, 32, True), 16, 64)
    array = truth.pack()[part].copy()
    array[(1, 0) if array.ndim == 2 else 5] = value
    with pytest.raises(SpecedgeError, match=f"one: {message}") as caught:
        read(matrix(tmp_path / "one", truth, **{part: array}))
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "model"
    write_packed(folder, Kind("gptq", 4, 32, False), plain=("lm_head",), **SHAPE)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """GPTQ of 4 bits, to damage."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        *(
            ({"quant_method": method}, [f"quant_method '{method}'", "expected 'gptq' or 'awq'"])
            for method in ("bitsandbytes", "fp8", "compressed-tensors", "hqq")
        ),
        ({"bits": 3}, ["bits 3 is not supported", "4 or 8"]),
        ({"bits": "4"}, ["bits '4'"]),
        ({"group_size": 256}, ["group_size 256", "16 or 32 or 64 or 128 or -1"]),
        ({"checkpoint_format": "marlin"}, ["checkpoint_format 'marlin'", "'gptq' or 'gptq_v2'"]),
        ({"dynamic": {"+:.*down.*": {"bits": 8}}}, ["dynamic", "down"]),
        ({"quant_method": "awq", "bits": 8}, ["bits 8", "expected 4"]),
        ({"quant_method": "awq", "version": "gemv"}, ["version 'gemv'", "'gemm'"]),
        ({"quant_method": "awq", "checkpoint_format": None, "format": "llm-awq"}, ["format 'llm-awq'"]),
        ({"bits": 8}, ["qzeros: found I32 (5, 16), expected I32 (3, 32)", "int8/32"]),
        ({"group_size": 64}, ["qzeros: found I32 (5, 16), expected I32 (3, 16)", "int4/64"]),
    ],
)
def test_other_packings_are_refused_by_name(folder: Path, settings: dict[str, Any], parts: list[str]):
    config = Kind("gptq", 4, 32, False).config | settings
    tiny.edit_json(folder / "config.json", quantization_config=config)
    refuse(folder, "config.json" if "int" not in parts[-1] else WEIGHTS, *parts)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda t: t.pop(f"model.{DOWN}.g_idx"), ["missing tensor", f"{DOWN}.g_idx", "GPTQ4"]),
        (lambda t: t.pop(f"model.{DOWN}.qweight"), ["missing tensor", f"{DOWN}.qweight"]),
        (
            lambda t: t.update({f"model.{DOWN}.scales": t[f"model.{DOWN}.scales"][:-1].clone()}),
            [f"{DOWN}.scales: found F16 (4, 128)", "(5, 128)"],
        ),
        (lambda t: t.update({f"model.{DOWN}.g_idx": t[f"model.{DOWN}.g_idx"].long()}), [f"{DOWN}.g_idx: found I64 (160,)"]),
        (
            lambda t: t.update({f"model.{DOWN}.qweight": t[f"model.{DOWN}.qweight"].flatten()}),
            [f"{DOWN}.qweight: found I32 (2560,)", "two dimensions"],
        ),
        (lambda t: t.update({f"model.{DOWN}.weight": torch.ones(128, 160)}), [f"{DOWN}.weight: there twice"]),
        (lambda t: t.update({"model.norm.weight": torch.ones(128).int()}), ["model.norm.weight: dtype I32"]),
        (lambda t: t.update({f"model.{DOWN}.bias": torch.ones(128)}), [f"unused tensor: model.{DOWN}.bias"]),
    ],
    ids=["no g_idx", "no qweight", "scales", "I64", "flat", "twice", "integers", "bias"],
)
def test_parts_that_do_not_fit_are_refused(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], parts: list[str]):
    edit(folder, change)
    refuse(folder, WEIGHTS if "unused" not in parts[0] else str(folder), *parts)


def test_a_config_of_another_shape_is_refused(folder: Path):
    tiny.edit_json(folder / "config.json", intermediate_size=192)
    refuse(folder, "gate_proj.weight: expected shape (192, 128)", "found (160, 128)")


def test_biases_of_zeros_are_no_biases(folder: Path):
    """AutoGPTQ wrote one for every layer it packed; a model's own are read."""
    before = open_checkpoint(str(folder)).tensor(f"{DOWN}.weight")
    edit(folder, lambda tensors: tensors.update({f"model.{DOWN}.bias": torch.zeros(128).half()}))
    checkpoint = open_checkpoint(str(folder))
    np.testing.assert_array_equal(checkpoint.tensor(f"{DOWN}.weight"), before)
    assert not checkpoint.config.mlp_bias


@pytest.mark.parametrize(
    ("kind", "settings", "plain"),
    [
        (Kind("gptq", 4, 32, False), {"attention_bias": True, "mlp_bias": True}, ()),
        (Kind("gptq_v2", 8, -1, True), {"tie_word_embeddings": True}, ()),
        (Kind("awq", 4, 32, False), {"attention_bias": True}, ("lm_head", "o_proj")),
    ],
    ids=str,
)
def test_a_folder_is_the_model_it_was_packed_from(kind: Kind, settings: dict[str, Any], plain: tuple[str, ...], tmp_path: Path):
    """Biases, tied embeddings and layers left out among them."""
    model, packed = write_packed(tmp_path / "model", kind, plain, **SHAPE, **settings)
    checkpoint = open_checkpoint(str(tmp_path / "model"))
    check_same(checkpoint, model)
    for name in packed:
        assert checkpoint.stored_type(name.removeprefix("model.")) == kind.stored_type
    assert checkpoint.stored_type("embed_tokens.weight") == "F32"
    assert checkpoint.grid("embed_tokens.weight") is None


RUNS = [
    ("cpu", Kind("gptq", 4, 128, False), "down_proj"),  # the last has its columns in activation order
    ("cpu", Kind("gptq", 4, -1, True), None),
    ("cpu", Kind("gptq_v2", 8, 64, False), None),
    ("cpu", Kind("awq", 4, 32, False), None),
    ("cpu-static", Kind("gptq", 4, 128, True), None),
    ("cpu-static", Kind("gptq_v2", 8, 128, False), None),
    ("cpu-static", Kind("awq", 4, 32, False), None),
]


@pytest.mark.parametrize(("device", "kind", "ordered"), RUNS, ids=str)
def test_a_converted_model_is_the_checkpoints(device: str, kind: Kind, ordered: str | None, tmp_path: Path):
    """Every packed matrix exactly, the LM head too, and the graphs compute with them; what has no grid is rounded, and said."""

    def order(name: str, truth: Truth) -> Truth:
        mixed = ordered is not None and ordered in name
        return truth.in_order(np.random.default_rng(1).permutation(truth.groups)) if mixed else truth

    plain = ("lm_head",) if kind.layout == "awq" else ()
    _, packed = write_packed(tmp_path / "model", kind, plain, order, **SHAPE)
    body = INT8 if kind.bits == 8 else INT4
    shape: dict[str, Any] = {"context": 128, "widths": (1, 4), "chunk": 8}
    path = make(tmp_path / "model", tmp_path / "bundle", device=device, body=body, head=INT8, **shape)
    weights = {weight.name: weight for weight in open_bundle(path).role("target").weights}
    assert len(packed) == 8 - len(plain)
    for name in packed:
        weight = weights[name.removeprefix("model.")]
        kept = ordered is None or ordered not in name
        scheme = kind.scheme if kept else body.name
        assert (weight.source, weight.scheme, weight.exact) == (kind.stored_type, scheme, kept), name
    command = ["validate", str(path), "--reference", str(tmp_path / "model"), "--prompts", "2", "--tokens", "8"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
