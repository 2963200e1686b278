"""A tensor of llama.cpp's keeps its codes, scales and minima, and means what gguf-py says, bit for bit."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from specedge.export.gguf_grid import GRIDS, read_grid
from specedge.quant.pack import Quantized, pack_codes
from tiny import Array

BLOCK = 32
KINDS = tuple(GRIDS)
HALVES = {"Q4_0": 1, "Q4_1": 2, "Q8_0": 1}  # float16 numbers before the codes of a block
# Zeros of both signs, the smallest and largest subnormal, the smallest normal, the largest number, and ordinary ones.
ODD = [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x3C00, 0xBC00]
finite = st.sampled_from(ODD) | st.integers(0, 0xFFFF).filter(lambda bits: bits & 0x7C00 != 0x7C00)


def block_bytes(kind: str) -> int:
    return gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]


def with_numbers(kind: str, stored: Array, numbers: Array) -> Array:
    """Rows of blocks [N, blocks * bytes] with these float16 bits [N, blocks, 1 or 2] in them."""
    blocks = stored.reshape(*numbers.shape[:2], -1).copy()
    blocks[..., : 2 * numbers.shape[2]] = numbers.astype("<u2").view(np.uint8)
    return blocks.reshape(len(stored), -1)


@st.composite
def tensors(draw: st.DrawFn, kind: str) -> Array:
    """Any bytes whose float16 numbers are finite, [N, blocks * bytes of a block]."""
    rows, blocks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    stored = draw(arrays(np.uint8, (rows, blocks * block_bytes(kind))))
    numbers = draw(arrays(np.uint16, (rows, blocks, HALVES[kind]), elements=finite))
    return with_numbers(kind, stored, numbers)


def bits(values: Array) -> Array:
    assert values.dtype == np.float32
    return values.view(np.uint32)


def file_bytes(grid: Quantized) -> Array:
    """The bytes of the file again: the first half of a block's 4-bit codes is in the low halves (ggml-common.h)."""
    numbers = [grid.scales] if grid.minima is None else [grid.scales, grid.minima]
    assert all(part.dtype == np.float16 for part in numbers)
    header = np.stack(numbers, -1).view(np.uint8)
    codes: Array
    if grid.scheme.bits == 8:
        codes = grid.codes ^ 0x80
    else:
        codes = pack_codes(grid.codes.reshape(*grid.scales.shape, 2, BLOCK // 2).swapaxes(2, 3).reshape(grid.codes.shape), 4)
    return np.concatenate((header, codes), -1).reshape(len(grid.codes), -1)


def check(kind: str, stored: Array) -> None:
    before = stored.copy()
    grid = read_grid(kind, stored)
    assert grid.scheme == GRIDS[kind]
    truth = gguf.dequantize(stored, GGMLQuantizationType[kind])
    assert grid.shape == truth.shape
    np.testing.assert_array_equal(bits(grid.dequantize()), bits(truth))  # the sign of a zero as well
    np.testing.assert_array_equal(file_bytes(grid), before)
    np.testing.assert_array_equal(stored, before)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_grid_is_what_gguf_dequantises_and_gives_the_bytes_back(kind: str, data: st.DataObject) -> None:
    check(kind, data.draw(tensors(kind)))


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_under_every_odd_number(kind: str) -> None:
    """All 256 bytes (so q = -128 too), under each pair of odd scales and minima."""
    pairs = np.array([(first, second) for first in ODD for second in ODD], np.uint16)[:, : HALVES[kind]]
    payload = block_bytes(kind) - 2 * HALVES[kind]
    blocks = 256 // payload
    codes = np.arange(256, dtype=np.uint8).reshape(blocks, payload)
    headers = np.zeros((blocks, 2 * HALVES[kind]), np.uint8)
    row = np.hstack((headers, codes)).ravel()
    numbers = np.repeat(pairs[:, None], blocks, axis=1)
    check(kind, with_numbers(kind, np.tile(row, (len(pairs), 1)), numbers))


@given(scale=finite, code=st.integers(0, 255))
@example(scale=0x7BFF, code=128)
def test_the_lowest_code_of_q8_0_is_minus_128(scale: int, code: int) -> None:
    number = np.array([scale], "<u2")
    stored = np.concatenate((number.view(np.uint8), np.full(BLOCK, code, np.uint8)))[None]
    signed = code - 256 if code >= 128 else code
    expected = np.full((1, BLOCK), np.float32(signed) * number.view("<f2").astype(np.float32))
    np.testing.assert_array_equal(bits(read_grid("Q8_0", stored).dequantize()), bits(expected))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_be_strided_or_not_to_be_written(kind: str) -> None:
    """A GGUF tensor is a read-only map, and q and k come with their rows in another order."""
    rng = np.random.default_rng(0)
    numbers = rng.choice(np.array(ODD, np.uint16), (6, 2, HALVES[kind]))
    stored = with_numbers(kind, rng.integers(0, 256, (6, 2 * block_bytes(kind)), np.uint8), numbers)
    stored.flags.writeable = False
    check(kind, stored[::-2])
