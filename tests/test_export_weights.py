"""Tensors written side by side are one matrix to a kernel; whatever is not is never taken for one."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specedge.export.weights import Stored, WeightWriter, read_float32, side_by_side
from specedge.manifest import Extent, Weight
from specedge.quant.pack import Quantized
from specedge.quant.rounding import round_to_nearest
from specedge.quant.scheme import Scheme
from tiny import Array

SCHEMES = [
    Scheme(4, 32),
    Scheme(8, 16, False),
    Scheme(4, None, False),
    Scheme(4, 32, symmetric=False, minima=True),
    Scheme(8, 32, symmetric=False, minima=True),
]


def tensor(name: str, scheme: Scheme | str, rows: int, columns: int = 64) -> Stored:
    rng = np.random.default_rng(rows)
    weight = rng.standard_normal((rows, columns), dtype=np.float32)
    values: Quantized | Array
    if isinstance(scheme, str):
        values = weight.astype(scheme)
    elif scheme.minima:
        per_block = (rows, scheme.blocks(columns))
        codes = rng.integers(0, scheme.top_code + 1, (*per_block, scheme.block(columns)), np.uint8)
        scales, minima = (rng.standard_normal(per_block).astype(np.float16) for _ in range(2))
        values = Quantized(scheme, (rows, columns), codes, scales, minima=minima)
    else:
        values = round_to_nearest(weight, scheme)
    return Stored(name, values, "F32", "", exact=False)


def write(path: Path, *groups: Sequence[Stored]) -> list[list[Weight]]:
    with WeightWriter(path, path.name) as writer:
        return [writer.add(group) for group in groups]


def values(stored: Stored) -> Array:
    return stored.values.dequantize() if isinstance(stored.values, Quantized) else stored.values.astype(np.float32)


@pytest.mark.parametrize("scheme", [*SCHEMES, "float32", "float16"], ids=str)
@pytest.mark.parametrize("rows", [(64, 32, 32), (3, 1, 5), (2100, 1, 1)], ids=str)
def test_what_is_added_together_is_one_matrix(scheme: Scheme | str, rows: tuple[int, ...], tmp_path: Path):
    """Each tensor alone gives its values back, and all of them as one give all rows, in order."""
    before, *others = [tensor(f"t{index}", scheme, count) for index, count in enumerate((7, *rows))]
    path = tmp_path / "weights.bin"
    (_, weights) = write(path, [before], others)
    joint = side_by_side(weights)
    assert joint is not None and joint.shape == (sum(rows), 64) and joint.scheme == weights[0].scheme
    assert joint.name == "t1+t2+t3"
    for stored, weight in zip(others, weights, strict=True):
        np.testing.assert_array_equal(read_float32(weight, path)[0], values(stored))
        assert side_by_side([weight]) == weight
    np.testing.assert_array_equal(read_float32(joint, path)[0], np.concatenate([values(stored) for stored in others]))


@pytest.mark.parametrize("scheme", [*SCHEMES, "float32"], ids=str)
def test_what_does_not_touch_is_not_one_matrix(scheme: Scheme | str, tmp_path: Path):
    (first,), (second,) = write(tmp_path / "weights.bin", [tensor("a", scheme, 5, 40)], [tensor("b", scheme, 5, 40)])
    assert side_by_side([first, second]) is None
    (a, b, c), (_,) = write(tmp_path / "weights.bin", [tensor(name, scheme, 8) for name in "abc"], [tensor("d", scheme, 8)])
    assert side_by_side([a, b, c]) and side_by_side([b, c])
    for wrong in ([b, a], [a, c], [a, a], [a, b, b], [c, b, a]):
        assert side_by_side(wrong) is None
    for part in b.parts:  # one part too far, all others in place
        moved = dataclasses.replace(b.parts[part], offset=b.parts[part].offset + 64)
        assert side_by_side([a, dataclasses.replace(b, parts={**b.parts, part: moved})]) is None


def placed(name: str, shape: tuple[int, int], offset: int, scheme: str = "float32") -> Weight:
    size = 4 * shape[0] * shape[1]
    return Weight(name, scheme, shape, {"values": Extent(offset, size, "float32", shape)}, "F32", "", True, "weights.bin")


def test_weights_that_differ_are_not_one_matrix():
    first = placed("a", (4, 8), 0)
    second = placed("b", (2, 8), 128)
    assert side_by_side([first, second]) is not None
    assert side_by_side([first, placed("b", (2, 4), 128)]) is None  # shorter rows
    assert side_by_side([first, placed("b", (2, 8), 128, "float16")]) is None
    assert side_by_side([first, dataclasses.replace(second, parts={**second.parts, "scales": second.parts["values"]})]) is None
    assert side_by_side([first, placed("b", (2, 8), 124)]) is None  # inside the first
    assert side_by_side([]) is None


@given(st.lists(st.tuples(st.sampled_from(["float32", *SCHEMES]), st.integers(1, 40)), min_size=1, max_size=6))
def test_no_two_tensors_share_a_byte(tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[Scheme | str, int]]):
    """And each stands on 64 bytes, where it is added alone."""
    path = tmp_path_factory.mktemp("weights") / "weights.bin"
    tensors = [tensor(f"t{index}", scheme, rows) for index, (scheme, rows) in enumerate(kinds)]
    weights = [weight for (weight,) in write(path, *([one] for one in tensors))]
    extents = sorted((part.offset, part.bytes) for weight in weights for part in weight.parts.values())
    end = 0
    for offset, size in extents:
        assert offset >= end and offset % 64 == 0
        end = offset + size
    assert end == path.stat().st_size
    for stored, weight in zip(tensors, weights, strict=True):
        np.testing.assert_array_equal(read_float32(weight, path)[0], values(stored))
