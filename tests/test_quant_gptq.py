"""GPTQ against the textbook's loops, and what it must never lose: zeros, ragged rows, columns nobody uses."""

import numpy as np
import pytest

from specedge.quant.gptq import Moments, compensate, gptq
from specedge.quant.pack import Quantized
from specedge.quant.rounding import clipped, fit_grid, round_to_nearest
from specedge.quant.scheme import Scheme
from tiny import Array

SCHEMES = [Scheme(4, 32), Scheme(4, 16), Scheme(4, None), Scheme(8, 32), Scheme(4, 32, False), Scheme(4, None, False)]


def layer(rows: int, columns: int, seed: int = 0) -> tuple[Array, Array]:
    """Weights, and inputs whose columns depend on each other and differ in size."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((4 * columns, columns)) @ (np.eye(columns) + 0.3 * rng.standard_normal((columns, columns)))
    inputs = mixed * np.exp(rng.standard_normal(columns))
    return rng.standard_normal((rows, columns)).astype(np.float32), inputs


def lost(weight: Array, store: Quantized, inputs: Array) -> float:
    """Squared error of a layer's outputs."""
    return float(np.square(inputs @ (store.dequantize() - weight).T).sum())


def by_the_book(weight: Array, hessian: Array, scheme: Scheme, damping: float) -> Array:
    """Optimal brain quantisation in a fixed order: a column is rounded, its error spread by the inverse Hessian of the rest.

    Frantar et al. 2022, equations 2 and 3, in float64 and without any of Algorithm 1's rearrangements.
    """
    diagonal = np.diag(hessian)
    grid = fit_grid(weight, scheme, clipped, (diagonal / diagonal.mean()).astype(np.float32))
    scales = np.repeat(grid.scales.astype(np.float64), scheme.block(weight.shape[1]), 1)
    zeros = np.full(scales.shape, 8.0 if scheme.bits == 4 else 128.0)
    if grid.zero_points is not None:
        zeros = np.repeat(grid.zero_points.astype(np.float64), scheme.block(weight.shape[1]), 1)
    inverse = np.linalg.inv(hessian + damping * diagonal.mean() * np.eye(len(hessian)))
    left, codes = weight.astype(np.float64), np.zeros(weight.shape, np.int64)
    for column in np.argsort(-diagonal, kind="stable"):
        code = np.clip(np.rint(left[:, column] / scales[:, column]) + zeros[:, column], 0, scheme.top_code)
        codes[:, column] = code
        error = (left[:, column] - (code - zeros[:, column]) * scales[:, column]) / inverse[column, column]
        left -= np.outer(error, inverse[column])
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return codes


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_codes_are_the_textbooks(scheme: Scheme) -> None:
    weight, inputs = layer(24, 96)
    hessian = inputs.T @ inputs
    store = gptq(weight, hessian, scheme, damping=0.01)
    same = store.codes.reshape(24, -1)[:, :96] == by_the_book(weight, hessian, scheme, 0.01)
    assert same.mean() > 0.995  # a tie may fall the other way in float32, and its row with it


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_outputs_change_less_than_by_rounding_to_nearest(scheme: Scheme) -> None:
    weight, inputs = layer(48, 96)
    store = gptq(weight, inputs.T @ inputs, scheme)
    assert lost(weight, store, inputs) < 0.7 * lost(weight, round_to_nearest(weight, scheme), inputs)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_without_dependence_between_columns_it_rounds_to_nearest(scheme: Scheme) -> None:
    weight, _ = layer(16, 64)
    store, nearest = gptq(weight, np.eye(64), scheme), round_to_nearest(weight, scheme)
    assert np.array_equal(store.codes, nearest.codes) and np.array_equal(store.scales, nearest.scales)


@pytest.mark.parametrize(("columns", "group"), [(40, 32), (100, 16)])
def test_a_ragged_tail_is_filled_with_zero(columns: int, group: int) -> None:  # B17
    weight, inputs = layer(7, columns)
    store = gptq(weight, inputs.T @ inputs, Scheme(4, group))
    assert store.codes.shape == (7, -(-columns // group), group)
    assert (store.codes.reshape(7, -1)[:, columns:] == 8).all()
    assert lost(weight, store, inputs) < lost(weight, round_to_nearest(weight, Scheme(4, group)), inputs)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_zeros_stay_zero_and_unused_columns_are_rounded_to_nearest(scheme: Scheme) -> None:  # B18
    weight, inputs = layer(16, 96)
    weight[3] = 0
    weight[5] *= 1e-6
    inputs[:, 40] = 0
    with np.errstate(all="raise", under="ignore"):
        store = gptq(weight, inputs.T @ inputs, scheme)
    back = store.dequantize()
    assert np.isfinite(store.scales).all() and not back[3].any()
    assert np.abs(back[5] - weight[5]).max() <= 2 * np.abs(weight[5]).max()
    column = np.abs(back[:, 40] - weight[:, 40])
    assert (column <= np.abs(store.scales).max(axis=1) * 1.01).all()


def test_a_layer_that_is_never_used_is_rounded_to_nearest() -> None:
    weight, _ = layer(8, 64)
    store = gptq(weight, np.zeros((64, 64)), Scheme(4, 32))
    assert np.abs(store.dequantize() - weight).max() <= np.abs(store.scales).max()


def test_compensation_is_the_least_squares_answer() -> None:
    """The weights whose outputs on the changed inputs come nearest to the old ones."""
    weight, before = layer(12, 48)
    rng = np.random.default_rng(1)
    after = before + 0.2 * rng.standard_normal(before.shape) * np.abs(before).mean()
    moments = Moments(after.T @ after, (before - after).T @ after)
    best = np.linalg.lstsq(after, before @ weight.T, rcond=None)[0].T
    np.testing.assert_allclose(compensate(weight, moments, damping=0), best, atol=1e-4)
    full, half = (np.square(after @ compensate(weight, moments, part).T - before @ weight.T).sum() for part in (1, 0.5))
    assert full < half < np.square((after - before) @ weight.T).sum()


def test_without_drift_nothing_is_compensated() -> None:
    weight, inputs = layer(4, 32)
    assert compensate(weight, Moments(inputs.T @ inputs, np.zeros((32, 32)))) is weight
