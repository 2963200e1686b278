"""Packed bytes mean to ONNX Runtime what the store says, and unpack to what was packed."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from onnx import TensorProto, helper, numpy_helper

from specedge.quant.pack import Quantized, pack_codes, pack_zero_points, unpack_codes, unpack_zero_points
from specedge.quant.rounding import round_to_nearest
from specedge.quant.scheme import Scheme

SCHEMES = [Scheme(*parts) for parts in itertools.product((4, 8), (16, 32, 64, 128, None), (True, False))]
MINIMA = [Scheme(bits, group, symmetric=False, minima=True) for bits in (4, 8) for group in (16, 32, 64, 128, None)]
SHAPES = [(24, 40), (17, 100), (8, 128), (33, 576)]  # ragged for every block, for some, for none
LEVELS = [
    onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,  # the default
]


def quantized(scheme: Scheme, shape: tuple[int, int] = (24, 40)) -> Quantized:
    weight = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    weight[3] += 1.0  # a lopsided row, whose zero points leave the middle
    return round_to_nearest(weight, scheme)


def with_minima(scheme: Scheme, shape: tuple[int, int] = (24, 40), dtype: Any = np.float16) -> Quantized:
    """Any codes, scales of both signs, minima that no scale explains."""
    rng = np.random.default_rng(1)
    per_block = (shape[0], scheme.blocks(shape[1]))
    codes = rng.integers(0, scheme.top_code + 1, (*per_block, scheme.block(shape[1])), np.uint8)
    scales, minima = (rng.standard_normal(per_block).astype(dtype) for _ in range(2))
    return Quantized(scheme, shape, codes, scales, minima=minima)


def spread(numbers: np.ndarray, scheme: Scheme, columns: int) -> np.ndarray:
    """One number per block of a row as one per column."""
    return np.repeat(numbers, scheme.block(columns), axis=1)[:, :columns]


@given(st.sampled_from([4, 8]), st.data())
def test_codes_unpack_to_what_was_packed(bits: int, data: st.DataObject) -> None:
    rows, blocks, half = data.draw(array_shapes(min_dims=3, max_dims=3, max_side=9))
    codes = data.draw(arrays(np.uint8, (rows, blocks, 2 * half), elements=st.integers(0, (1 << bits) - 1)))
    packed = pack_codes(codes, bits)
    assert packed.shape == (rows, blocks, 2 * half * bits // 8)
    assert np.array_equal(unpack_codes(packed, bits), codes)


@given(st.sampled_from([4, 8]), st.data())
def test_zero_points_unpack_to_what_was_packed(bits: int, data: st.DataObject) -> None:
    rows, blocks = data.draw(array_shapes(min_dims=2, max_dims=2, max_side=9))
    zero_points = data.draw(arrays(np.uint8, (rows, blocks), elements=st.integers(0, (1 << bits) - 1)))
    packed = pack_zero_points(zero_points, bits)
    assert packed.shape == (rows, -(-blocks * bits // 8))
    assert np.array_equal(unpack_zero_points(packed, bits, blocks), zero_points)


def test_the_earlier_code_is_the_low_half() -> None:
    assert pack_codes(np.array([[[1, 2, 3, 15]]], np.uint8), bits=4).tolist() == [[[0x21, 0xF3]]]
    assert pack_zero_points(np.array([[1, 2, 3], [4, 5, 6]], np.uint8), bits=4).tolist() == [[0x21, 3], [0x54, 6]]


@pytest.mark.parametrize(("columns", "group", "blocks", "bytes_per_row"), [(40, 32, 2, 32), (100, 16, 7, 56), (40, 16, 3, 24)])
def test_rows_are_padded_to_whole_blocks(columns: int, group: int, blocks: int, bytes_per_row: int) -> None:
    packed = pack_codes(quantized(Scheme(4, group), (5, columns)).codes, 4)
    assert packed.shape == (5, blocks, group // 2) and packed[0].nbytes == bytes_per_row


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_regrouping_changes_no_number(scheme: Scheme, shape: tuple[int, int]) -> None:
    store = quantized(scheme, shape)
    for group in (16, 32, 64, 128):
        if scheme.group is None or scheme.group % group == 0:
            finer = store.regroup(group)
            assert finer.scheme == Scheme(scheme.bits, group, scheme.symmetric)
            assert np.array_equal(finer.dequantize(), store.dequantize())
            padded = dataclasses.replace(finer, shape=(shape[0], finer.codes[0].size))
            assert not padded.dequantize()[:, shape[1] :].any()  # the tail is made of zeros
        else:
            with pytest.raises(ValueError, match="straddle"):
                store.regroup(group)


@pytest.mark.parametrize("scheme", MINIMA, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_code_0_of_a_scheme_with_minima_means_the_minimum(scheme: Scheme, shape: tuple[int, int]) -> None:
    store = with_minima(scheme, shape)
    assert store.minima is not None
    rows, columns = shape
    codes = store.codes.reshape(rows, -1)[:, :columns].astype(np.float32)
    scales, minima = (spread(part.astype(np.float32), scheme, columns) for part in (store.scales, store.minima))
    np.testing.assert_array_equal(store.dequantize(), codes * scales + minima)
    lowest = dataclasses.replace(store, codes=np.zeros_like(store.codes)).dequantize()
    np.testing.assert_array_equal(lowest, minima)


@pytest.mark.parametrize("scheme", MINIMA, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_regrouping_keeps_minima(scheme: Scheme, shape: tuple[int, int]) -> None:
    store = with_minima(scheme, shape)
    for group in (16, 32, 64, 128):
        if scheme.group is None or scheme.group % group == 0:
            finer = store.regroup(group)
            assert finer.scheme == Scheme(scheme.bits, group, symmetric=False, minima=True)
            assert finer.scales.dtype == store.scales.dtype
            assert np.array_equal(finer.dequantize(), store.dequantize())
        else:
            with pytest.raises(ValueError, match="straddle"):
                store.regroup(group)


def symmetric_twin(store: Quantized) -> Quantized:
    """The symmetric matrix of the same codes and scales."""
    return Quantized(Scheme(store.scheme.bits, store.scheme.group), store.shape, store.codes, store.scales)


def zero_points_of(scheme: Scheme) -> Quantized:
    """Any codes and zero points, float16 scales."""
    store = with_minima(scheme)
    zero_points = np.random.default_rng(2).integers(0, scheme.top_code + 1, store.scales.shape, np.uint8)
    return dataclasses.replace(store, scheme=dataclasses.replace(scheme, minima=False), zero_points=zero_points, minima=None)


@pytest.mark.parametrize("scheme", MINIMA, ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_offsets_are_what_a_symmetric_matrix_lacks(scheme: Scheme, dtype: Any) -> None:
    """To float32's rounding: weight = symmetric weight + offset, for the parts that are added, not for their sum."""
    store = with_minima(scheme, dtype=dtype)
    symmetric, offsets = symmetric_twin(store).dequantize(), store.offsets()
    assert offsets.dtype == np.float32 and offsets.shape == store.scales.shape
    columns = store.shape[1]
    size = np.abs(symmetric) + np.abs(spread(offsets, scheme, columns)) + np.abs(store.dequantize())
    error = np.abs(symmetric.astype(np.float64) + spread(offsets, scheme, columns) - store.dequantize())
    assert (error <= 2 * np.finfo(np.float32).eps * size).all()


@pytest.mark.parametrize("scheme", MINIMA, ids=str)
def test_offsets_of_zero_points_are_exact(scheme: Scheme) -> None:
    """With float16 scales, whose multiples by codes float32 holds."""
    store = zero_points_of(scheme)
    added = symmetric_twin(store).dequantize() + spread(store.offsets(), scheme, store.shape[1])
    np.testing.assert_array_equal(added, store.dequantize())


def test_a_symmetric_matrix_has_no_offsets() -> None:
    with pytest.raises(ValueError, match="int4/32 is symmetric"):
        quantized(Scheme(4, 32)).offsets()


@pytest.mark.parametrize(("minimum", "scale"), [(65504, -65504), (-65504, 65504), (2.0**-24, 65504), (65504, 2.0**-24), (3, 0)])
def test_offsets_of_extreme_numbers_are_finite(minimum: float, scale: float) -> None:
    store = with_minima(Scheme(4, 32, symmetric=False, minima=True))
    store = dataclasses.replace(store, scales=np.full_like(store.scales, scale), minima=np.full_like(store.scales, minimum))
    assert np.isfinite(store.dequantize()).all()
    np.testing.assert_array_equal(store.offsets(), np.float32(minimum + 8 * scale))


def test_an_odd_row_packs_once_regrouped() -> None:
    store = quantized(Scheme(4, None), (5, 41))
    with pytest.raises(ValueError, match="regroup"):
        pack_codes(store.codes, 4)
    assert pack_codes(store.regroup(16).codes, 4).shape == (5, 3, 8)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (24, 41 + 32)},
        {"codes": np.zeros((24, 2, 16), np.uint8)},
        {"codes": np.full((24, 2, 32), 16, np.uint8)},
        {"scales": np.zeros((24, 1), np.float32)},
        {"scales": np.zeros((24, 2), np.float64)},
        {"zero_points": np.zeros((24, 2), np.uint8)},
        {"scheme": Scheme(4, 32, symmetric=False)},
    ],
    ids=lambda change: ", ".join(change),
)
def test_parts_that_do_not_belong_together_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"codes|scales|zero points"):
        dataclasses.replace(quantized(Scheme(4, 32)), **change)


MINIMA_32 = Scheme(4, 32, symmetric=False, minima=True)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"minima": None}, "minima"),
        ({"minima": np.zeros((24, 1), np.float16)}, "minima"),
        ({"minima": np.zeros(48, np.float16)}, "minima"),
        ({"zero_points": np.zeros((24, 2), np.uint8)}, "zero points"),
        ({"scheme": Scheme(4, 32)}, "minima"),
        ({"scheme": Scheme(4, 32, symmetric=False)}, "zero points|minima"),
        ({"scheme": Scheme(4, 16, symmetric=False, minima=True)}, "codes"),
        ({"scales": np.zeros((24, 1), np.float16)}, "scales"),
        ({"codes": np.full((24, 2, 32), 16, np.uint8)}, "codes"),
    ],
)
def test_minima_that_do_not_belong_are_refused(change: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        dataclasses.replace(with_minima(MINIMA_32), **change)


def test_minima_beside_symmetric_codes_are_refused() -> None:
    with pytest.raises(ValueError, match="minima"):
        dataclasses.replace(quantized(Scheme(4, 32)), minima=np.zeros((24, 2), np.float32))


@pytest.mark.parametrize("scheme", MINIMA[:4], ids=str)
def test_matmulnbits_and_offsets_multiply_by_the_dequantized_weights(scheme: Scheme) -> None:
    store = with_minima(scheme, (17, 256))
    for rows in (1, 5):
        x = np.random.default_rng(rows).standard_normal((rows, 256), dtype=np.float32)
        sums = x.reshape(rows, -1, scheme.block(256)).sum(2)
        product = matmul_nbits(symmetric_twin(store), x, LEVELS[1])
        exact = x.astype(np.float64) @ store.dequantize().T.astype(np.float64)
        assert np.abs(product + sums @ store.offsets().T - exact).max() < 1e-5 * np.abs(x).sum() * np.abs(store.scales).max()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matmulnbits_multiplies_by_the_dequantized_weights(scheme: Scheme, shape: tuple[int, int]) -> None:
    store = quantized(scheme, shape)
    for rows in (1, 2, 5, 40):  # the kernels differ with the number of rows
        x = np.random.default_rng(rows).standard_normal((rows, shape[1]), dtype=np.float32)
        exact = x @ store.dequantize().T
        plain, default = (matmul_nbits(store, x, level) for level in LEVELS)
        assert np.abs(plain - exact).max() < 1e-4 and np.abs(default - exact).max() < 1e-4
        int8_inputs = matmul_nbits(store, x, LEVELS[1], accuracy_level=4)
        assert np.abs(int8_inputs - exact).max() < 0.04 * np.abs(exact).max()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gatherblockquantized_reads_rows_from_the_same_bytes(scheme: Scheme, shape: tuple[int, int]) -> None:
    store = quantized(scheme, shape)
    ids = np.array([3, 0, shape[0] - 1], np.int32)
    for level in LEVELS:
        rows = gather_block_quantized(store, ids, level)
        assert np.array_equal(rows[:, : shape[1]], store.dequantize()[ids])
        assert not rows[:, shape[1] :].any()  # as wide as the padded row: the graph slices


def matmul_nbits(store: Quantized, x: np.ndarray, level: Any, accuracy_level: int = 0) -> np.ndarray:
    store = store if store.scheme.group else store.regroup(32)
    weights = initializers(store, pack_codes(store.codes, store.scheme.bits))
    node = helper.make_node(
        "MatMulNBits",
        ["x", *weights],
        ["y"],
        domain="com.microsoft",
        N=store.shape[0],
        K=store.shape[1],
        bits=store.scheme.bits,
        block_size=store.scheme.group,
        accuracy_level=accuracy_level,
    )
    return run_node(node, weights, {"x": x}, level)


def gather_block_quantized(store: Quantized, ids: np.ndarray, level: Any) -> np.ndarray:
    store = store if store.scheme.group else store.regroup(32)
    weights = initializers(store, pack_codes(store.codes, store.scheme.bits).reshape(store.shape[0], -1))
    data, *scales_and_zero_points = weights
    node = helper.make_node(
        "GatherBlockQuantized",
        [data, "ids", *scales_and_zero_points],
        ["y"],
        domain="com.microsoft",
        gather_axis=0,
        quantize_axis=1,
        bits=store.scheme.bits,
        block_size=store.scheme.group,
    )
    return run_node(node, weights, {"ids": ids}, level)


def initializers(store: Quantized, packed: np.ndarray) -> dict[str, np.ndarray]:
    weights: dict[str, np.ndarray] = {"codes": packed, "scales": store.scales.astype(np.float32)}
    if store.zero_points is not None:
        weights["zero_points"] = pack_zero_points(store.zero_points, store.scheme.bits)
    return weights


def run_node(node: Any, weights: dict[str, np.ndarray], feeds: dict[str, np.ndarray], level: Any) -> np.ndarray:
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in feeds.items()
    ]
    graph = helper.make_graph(
        [node],
        "one node",
        inputs,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, feeds)[0]
    return result
