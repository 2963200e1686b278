"""Rounding to nearest: what every code and scale promises, also for zeros, ragged rows and numbers at the edge."""

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from specedge.quant import rounding
from specedge.quant.pack import Quantized
from specedge.quant.rounding import Fit, absmax, clipped, fit_grid, round_to_grid, round_to_nearest
from specedge.quant.scheme import Scheme
from tiny import Array, f_rand

SCHEMES = [Scheme(*parts) for parts in itertools.product((4, 8), (16, 32, 128, None), (True, False))]
ScaleType = type[np.float32] | type[np.float16]
fits = pytest.mark.parametrize("fit", [absmax, clipped])
scale_types = pytest.mark.parametrize("scale_dtype", [np.float32, np.float16])


def normal(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def steps(store: Quantized) -> Array:
    """The size of one step at every weight, [N, K]."""
    per_block = np.abs(store.scales.astype(np.float64))
    return np.repeat(per_block, store.codes.shape[2], axis=1)[:, : store.shape[1]]


def error(weight: Array, store: Quantized) -> Array:
    return np.abs(store.dequantize().astype(np.float64) - weight)


@given(
    arrays(
        np.float32,
        array_shapes(min_dims=2, max_dims=2, max_side=40),
        elements=st.floats(-1e5, 1e5, width=32)
        | st.floats(-(2**-10), 2**-10, width=32)
        | st.sampled_from([0.0, 1e-6, -1e-7, 1e-44]),
    ),
    st.sampled_from(SCHEMES),
    st.sampled_from([np.float32, np.float16]),
    st.sampled_from([absmax, clipped]),
)
def test_every_weight_is_within_one_step(weight: Array, scheme: Scheme, scale_dtype: ScaleType, fit: Fit) -> None:
    store = round_to_nearest(weight, scheme, scale_dtype, fit)
    vanished = steps(store) == 0  # then every weight of the block is below this many of the smallest steps
    assert (np.abs(weight)[vanished] <= scheme.top_code * np.finfo(scale_dtype).smallest_subnormal).all()
    assert (error(weight, store)[~vanished] <= steps(store)[~vanished] * (1 + 1e-6)).all()
    assert not store.dequantize()[vanished].any()
    assert not store.dequantize()[weight == 0].any()


@fits
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("shift", [0.0, 0.3, -0.7, 3.0])
def test_every_one_of_many_weights_is_within_one_step(scheme: Scheme, fit: Fit, shift: float) -> None:
    weight = normal(128, 256) + np.float32(shift)
    store = round_to_nearest(weight, scheme, fit=fit)
    assert (error(weight, store) <= steps(store) * (1 + 1e-6)).all()


@fits
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_weights_inside_the_grid_go_to_the_nearest_code(scheme: Scheme, fit: Fit) -> None:
    weight = normal(16, 100)
    store = round_to_nearest(weight, scheme, fit=fit)
    codes = store.codes.reshape(16, -1)[:, :100]
    inside = (codes > 0) & (codes < scheme.top_code)
    assert (error(weight, store)[inside] <= 0.5001 * steps(store)[inside]).all()


@pytest.mark.parametrize(("columns", "group"), [(40, 32), (100, 16)])
@pytest.mark.parametrize("symmetric", [True, False])
@fits
def test_a_ragged_tail_is_rounded_as_if_alone(columns: int, group: int, symmetric: bool, fit: Fit) -> None:
    weight = normal(7, columns) + 0.5
    store = round_to_nearest(weight, Scheme(4, group, symmetric), fit=fit)
    tail = columns % group
    alone = round_to_nearest(weight[:, -tail:], Scheme(4, group, symmetric), fit=fit)
    assert np.array_equal(store.scales[:, -1:], alone.scales)
    assert np.array_equal(store.codes[:, -1:], alone.codes)
    zero_codes = 8 if store.zero_points is None else store.zero_points[:, -1:]
    assert (store.codes[:, -1, tail:] == zero_codes).all()


@fits
@scale_types
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_zero_and_tiny_blocks_stay_harmless(scheme: Scheme, scale_dtype: ScaleType, fit: Fit) -> None:
    weight = normal(16, 128)
    weight[2] = 0.0
    weight[5] *= 1e-6
    weight[6] *= 1e-9  # its scale vanishes in float16
    weight[7] *= 1e-44
    weight[8, 32:64] = 0.0
    store = round_to_nearest(weight, scheme, scale_dtype, fit)
    assert np.isfinite(store.scales).all()
    back = store.dequantize()
    assert not back[2].any() and not back[8, 32:64].any()
    assert (np.abs(back[5:8] - weight[5:8]) <= np.abs(weight[5:8]).max(axis=1, keepdims=True)).all()
    if scale_dtype is np.float16:
        assert not back[6:8].any() and not store.scales[6:8].any()


@scale_types
def test_the_zero_rows_of_a_model_keep_its_logits_finite(scale_dtype: ScaleType, tmp_path) -> None:
    head = f_rand(tmp_path, save=False).state_dict()["lm_head.weight"].numpy().copy()
    head[100:] = 0.0
    logits = normal(3, 64) @ round_to_nearest(head, Scheme(4, 32), scale_dtype).dequantize().T
    assert np.isfinite(logits).all() and not logits[:, 100:].any() and logits[:, :100].all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(8, None, symmetric=False)], ids=str)
def test_a_weight_that_is_no_number_is_named(bad: float, scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "CHUNK", 128)  # not in the first chunk
    weight = normal(9, 40)
    weight[7, 35] = bad
    with pytest.raises(ValueError, match=rf"{bad} at \[7, 35\]"):
        round_to_nearest(weight, scheme)


def test_a_scale_too_large_for_its_type_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit float16"):
        round_to_nearest(normal(4, 32) * np.float32(1e7), Scheme(4, 32), np.float16)


@pytest.mark.parametrize("group", [32, None])
def test_absmax_is_the_largest_over_seven_and_clips_nothing(group: int | None) -> None:
    weight = normal(64, 256)
    store = round_to_nearest(weight, Scheme(4, group), fit=absmax)
    blocks = weight.reshape(64, -1, group or 256)
    np.testing.assert_allclose(store.scales, np.abs(blocks).max(axis=2) / 7, rtol=1e-6)
    assert (error(weight, store) <= 0.5001 * steps(store)).all()


@pytest.mark.parametrize("group", [32, None])
@pytest.mark.parametrize(("symmetric", "share"), [(True, 0.75), (False, 0.96)])
def test_clipping_lowers_the_squared_error_of_every_block(group: int | None, symmetric: bool, share: float) -> None:
    weight = normal(64, 256)
    scheme = Scheme(4, group, symmetric)
    plain, best = (
        np.square(error(weight, round_to_nearest(weight, scheme, fit=fit))).reshape(64, -1, group or 256).sum(2)
        for fit in (absmax, clipped)
    )
    assert (best <= plain * (1 + 1e-6)).all()
    assert best.sum() < share * plain.sum()


def test_a_column_that_counts_more_is_rounded_better() -> None:
    weight = normal(256, 32)
    importance = np.ones(32, np.float32)
    importance[3] = 100
    grids = [fit_grid(weight, Scheme(4, 32), clipped, counts) for counts in (None, importance)]
    plain, weighted = (np.square(error(weight, round_to_grid(weight, grid))) for grid in grids)
    assert weighted[:, 3].sum() < 0.5 * plain[:, 3].sum()
    assert (weighted @ importance).sum() < (plain @ importance).sum()


@pytest.mark.parametrize(("bits", "levels"), [(4, range(-8, 8)), (8, range(-127, 128))])
def test_weights_on_a_gguf_grid_come_back_exactly(bits: int, levels: range) -> None:
    """Q4_0 has the largest weight at -8 steps, Q8_0 at 127, both with float16 steps for 32 weights."""
    random = np.random.default_rng(0)
    codes = random.integers(levels[0] + 1, levels[-1] + 1, (50, 4, 32)).astype(np.float32)
    codes[..., 5] = levels[0]
    step = random.standard_normal((50, 4, 1)).astype(np.float16).astype(np.float32)
    weight = (codes * step).reshape(50, 128)
    for scale_dtype in (np.float32, np.float16):
        assert np.array_equal(round_to_nearest(weight, Scheme(bits, 32), scale_dtype).dequantize(), weight)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_chunks_do_not_show(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(37, 100)
    whole = round_to_nearest(weight, scheme)
    monkeypatch.setattr(rounding, "CHUNK", 300)
    chunked = round_to_nearest(weight, scheme)
    assert np.array_equal(whole.codes, chunked.codes) and np.array_equal(whole.scales, chunked.scales)


def test_half_precision_weights_are_read_as_they_are() -> None:
    weight = normal(5, 64).astype(np.float16)
    as_float32 = round_to_nearest(weight.astype(np.float32), Scheme(4, 32))
    assert np.array_equal(round_to_nearest(weight, Scheme(4, 32)).dequantize(), as_float32.dequantize())


def test_memory_stays_near_the_result() -> None:
    weight = normal(8192, 576)
    tracemalloc.start()
    store = round_to_nearest(weight, Scheme(4, 32))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.2 * (store.codes.nbytes + store.scales.nbytes) + 4e6
