"""Round to nearest: every weight becomes the closest code of its block's grid."""

from typing import Any

import numpy as np
import numpy.typing as npt

from specedge.quant.pack import Quantized, Scales
from specedge.quant.scheme import Scheme

Floats = npt.NDArray[np.float32]

CHUNK = 1 << 17  # weights at a time: the temporaries stay in the cache, and memory near the size of the result


def round_to_nearest(
    weight: npt.NDArray[np.floating[Any]],  # [N, K]
    scheme: Scheme,
    scale_dtype: type[np.float32] | type[np.float16] = np.float32,
) -> Quantized:
    """Quantise `weight` without calibration.

    Every weight is off by at most one step, the size of its block's stored scale; a block of zeros, or one so small
    that its scale vanishes in `scale_dtype`, becomes exactly zero. Raises ValueError for a weight that is not finite
    and for a scale that `scale_dtype` cannot hold.

    Symmetric 4-bit grids are signed, scale = (weight of largest magnitude) / -8, as in llama.cpp's Q4_0: all 16 codes
    serve, against 15 with largest / 7, at the price of negative scales and of clipping near the opposite end. Squared
    error over squared weight, / 7 -> / -8, at group 32 and per channel: layers of SmolLM2-135M 1.02e-2 -> 0.75e-2 and
    2.37e-2 -> 1.82e-2, its embedding 1.60e-2 -> 1.23e-2 and 4.79e-2 -> 3.68e-2, normal weights 0.94e-2 -> 0.74e-2 and
    2.26e-2 -> 1.73e-2. In 8 bits it gains at most 2 %, so scale = largest / 127, which gives Q8_0 tensors back exactly.
    """
    rows, columns = weight.shape
    block, blocks = scheme.block(columns), scheme.blocks(columns)
    codes = np.empty((rows, blocks, block), np.uint8)
    scales: Scales = np.empty((rows, blocks), scale_dtype)
    zero_points = None if scheme.symmetric else np.empty((rows, blocks), np.uint8)
    chunk = max(1, CHUNK // (blocks * block))
    for start in range(0, rows, chunk):
        part = slice(start, start + chunk)
        values = _split(weight[part], start, blocks, block)
        highest, lowest = values.max(axis=2), values.min(axis=2)
        scales[part] = _stored(_exact_scale(highest, lowest, scheme), scale_dtype)
        step = scales[part].astype(np.float32)
        step[step == 0] = 1  # such a block holds nothing that would round to a code other than zero's
        values /= step[:, :, None]
        np.rint(values, out=values)
        if zero_points is None:
            values += scheme.middle_code
        else:
            zero = np.rint(np.minimum(lowest, 0) / -step)
            zero_points[part] = zero
            values += zero[:, :, None]
        np.clip(values, 0, scheme.top_code, out=values)
        codes[part] = values
    return Quantized(scheme, (rows, columns), codes, scales, zero_points)


def _split(weight: npt.NDArray[np.floating[Any]], first_row: int, blocks: int, block: int) -> Floats:
    """A float32 copy as [n, blocks, block], its tail filled up with zeros."""
    rows, columns = weight.shape
    values = np.zeros((rows, blocks * block), np.float32)
    values[:, :columns] = weight
    finite = np.isfinite(values)
    if not finite.all():
        row, column = np.argwhere(~finite)[0]
        raise ValueError(f"weight is {weight[row, column]} at [{first_row + row}, {column}]; expected finite numbers")
    return values.reshape(rows, blocks, block)


def _exact_scale(highest: Floats, lowest: Floats, scheme: Scheme) -> npt.NDArray[np.float64]:
    top, bottom = highest.astype(np.float64), lowest.astype(np.float64)
    if not scheme.symmetric:
        return (np.maximum(top, 0) - np.minimum(bottom, 0)) / scheme.top_code  # a grid over the weights and zero
    if scheme.bits == 8:
        return np.maximum(top, -bottom) / 127
    return np.where(top > -bottom, top, bottom) / -8


def _stored(exact: npt.NDArray[np.float64], scale_dtype: type[np.float32] | type[np.float16]) -> Scales:
    """The scales in `scale_dtype`, never rounded towards zero (unless to it): a shorter grid clips by over a step."""
    with np.errstate(over="ignore", under="ignore"):  # over: refused below; under: the block becomes zero
        stored: Scales = exact.astype(scale_dtype)
        away = np.nextafter(stored, np.copysign(scale_dtype(np.inf), stored))
    stored = np.where((np.abs(stored) < np.abs(exact)) & (stored != 0), away, stored)
    if not np.isfinite(stored).all():
        raise ValueError(f"a scale of {np.abs(exact).max()} does not fit {np.dtype(scale_dtype)}")
    return stored
