"""GPTQ: weights rounded column by column, each column's error made up for by those that follow."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specedge.quant.pack import Quantized
from specedge.quant.rounding import Fit, ScaleType, clipped, fit_grid, quantized
from specedge.quant.scheme import Scheme

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to it
_TOGETHER = 64  # columns whose error is passed on at once


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """What calibration knows of a layer's inputs: x as the quantised layers before it make them, y as they were before that.

    Sums over rows of float64; `drift` is zero where both are the same.
    """

    hessian: Doubles  # [K, K], of x x^T
    drift: Doubles  # [K, K], of (y - x) x^T


def compensate(weight: Floats, moments: Moments, strength: float = 1.0, damping: float = DAMPING) -> Floats:
    """The weights [N, K] whose outputs on x come nearest to those of `weight` on y.

    What earlier layers lost is made up for (Arai & Ichikawa 2025, Quantization Error Propagation, Proposition 5.1):
    W + strength W (y - x) x^T (x x^T + damping)^-1. A full strength fits the calibration text most closely.
    """
    if not moments.drift.any():
        return weight
    damped = _damped(moments.hessian, damping)
    lost = weight.astype(np.float64) @ moments.drift
    return (weight + strength * np.linalg.solve(damped, lost.T).T).astype(np.float32)


def gptq(
    weight: Floats,  # [N, K]
    hessian: Doubles,  # [K, K], sum of x x^T over the layer's inputs
    scheme: Scheme,
    fit: Fit = clipped,
    damping: float = DAMPING,
    scale_dtype: ScaleType = np.float32,
) -> Quantized:
    """Quantise a layer so that its outputs on calibrated inputs change least.

    Frantar et al. 2022, Algorithm 1, with activation order: columns go by falling diagonal of the Hessian. Grids are fitted
    before, to the weights as they came, each column counting as its diagonal says: so a block's columns need not be
    neighbours in that order. A column that no input ever used is rounded to nearest.
    """
    rows, columns = weight.shape
    diagonal = np.diag(hessian)
    importance = diagonal / max(float(diagonal.mean()), np.finfo(np.float64).tiny)
    grid = fit_grid(weight, scheme, fit, importance.astype(np.float32), scale_dtype)
    order = np.argsort(-importance, kind="stable")
    factor = _factor(_damped(hessian, damping)[np.ix_(order, order)])
    codes = np.empty((columns, rows), np.uint8)
    left = np.ascontiguousarray(weight.T[order])  # a column of the matrix in each row: what is still to be rounded
    block = scheme.block(columns)
    for start in range(0, columns, _TOGETHER):
        end = min(start + _TOGETHER, columns)
        errors = np.empty((end - start, rows), np.float32)
        for place in range(start, end):
            column = order[place]
            codes[column] = grid.codes(left[place], column // block)
            error = (left[place] - grid.values(codes[column], column // block)) / factor[place, place]
            errors[place - start] = error
            left[place + 1 : end] -= factor[place, place + 1 : end, None] * error
        left[end:] -= factor[start:end, end:].T @ errors
    return quantized(codes.T, grid, columns)


def _damped(hessian: Doubles, damping: float) -> Doubles:
    """With a share of the diagonal's mean on the diagonal, so that an inverse exists; unused columns stand for themselves."""
    diagonal = np.diag(hessian)
    mean = float(diagonal.mean()) or 1.0
    return hessian + np.diag(damping * mean + mean * (diagonal == 0))


def _factor(damped: Doubles) -> Floats:
    """Upper Cholesky factor of the inverse."""
    inverse = np.linalg.inv(damped)
    return np.ascontiguousarray(np.linalg.cholesky((inverse + inverse.T) / 2).T, np.float32)
