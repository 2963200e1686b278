"""Grids for weights without calibration, and the rounding of weights to the nearest code of their block's grid."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specedge.quant.pack import Bytes, Quantized, Scales
from specedge.quant.scheme import Scheme

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
ScaleType = type[np.float32] | type[np.float16]

CHUNK = 1 << 17  # weights at a time: the temporaries stay in the cache, and memory near the size of the result
_CUTS = 8  # grids that `clipped` tries between the one that clips nothing and the one that clips by a whole step


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Scales, and zero points where the scheme is asymmetric, of every block of a matrix: [N, blocks]."""

    scheme: Scheme
    scales: Scales
    zero_points: Bytes | None

    def codes(self, values: Floats, blocks: slice | int = slice(None)) -> Bytes:
        """The nearest codes of values [N, n, block], or [N] of the block named."""
        step, zero = self._part(blocks)
        shape = (..., None) if values.ndim == 3 else ...
        raw = values / np.where(step == 0, np.float32(1), step)[shape]  # a vanished scale's block rounds to zero
        np.rint(raw, out=raw)
        raw += zero[shape] if isinstance(zero, np.ndarray) else zero
        np.clip(raw, 0, self.scheme.top_code, out=raw)
        return raw.astype(np.uint8)

    def values(self, codes: Bytes, block: int) -> Floats:
        """What codes [N] of one block stand for."""
        step, zero = self._part(block)
        return (codes.astype(np.float32) - zero) * step

    def _part(self, blocks: slice | int) -> tuple[Floats, Floats | np.float32]:
        scales = self.scales[:, blocks].astype(np.float32)
        if self.zero_points is None:
            return scales, np.float32(self.scheme.middle_code)
        return scales, self.zero_points[:, blocks].astype(np.float32)


# Values [n, blocks, block], what an error of each column counts [blocks, block] (None: alike) -> scales and codes of zero.
Fit = Callable[[Floats, Floats | None, Scheme], tuple[Doubles, Doubles]]


def absmax(values: Floats, importance: Floats | None, scheme: Scheme) -> tuple[Doubles, Doubles]:
    """The smallest grid that clips nothing: largest magnitude / 7 or / 127, or the range from least to largest with zero."""
    highest, lowest = _range(values)
    if scheme.symmetric:
        scales = np.maximum(highest, -lowest) / (scheme.middle_code - 1)
        return scales, np.full_like(scales, scheme.middle_code)
    scales = (highest - lowest) / scheme.top_code
    return scales, np.rint(-lowest / np.where(scales == 0, 1, scales))


def clipped(values: Floats, importance: Floats | None, scheme: Scheme) -> tuple[Doubles, Doubles]:
    """The grid of least squared error among `absmax` and some that clip, none by more than one step.

    Symmetric 4-bit grids are tried with both signs: -8 steps reach further than 7, so a negative scale serves a block whose
    largest weight is positive. Q4_0, with the largest weight at -8, is among them. In 8 bits clipping gains nothing.
    """
    best, zeros = absmax(values, importance, scheme)
    if scheme.bits == 8:
        return best, zeros
    least = _error(values, importance, best, zeros, scheme)
    for scales, zero in _candidates(values, scheme):
        error = _error(values, importance, scales, zero, scheme)
        better = error < least
        least, best, zeros = np.where(better, error, least), np.where(better, scales, best), np.where(better, zero, zeros)
    return best, zeros


def _candidates(values: Floats, scheme: Scheme) -> Iterator[tuple[Doubles, Doubles]]:
    highest, lowest = _range(values)
    if not scheme.symmetric:
        for cut in np.linspace(0, 0.5, _CUTS + 1)[1:]:  # steps off either end: more, and a rounded zero would make it over one
            scales = (highest - lowest) / (scheme.top_code + 2 * cut)
            below = -lowest / np.where(scales == 0, 1, scales)
            yield scales, np.clip(np.rint(below - cut), 0, scheme.top_code)
        return
    middle = np.full_like(highest, scheme.middle_code)
    for sign, top, bottom in ((1, highest, -lowest), (-1, -lowest, highest)):
        widest, narrowest = np.maximum(top / 7, bottom / 8), np.maximum(top / 8, bottom / 9)
        yield sign * np.maximum(top, bottom) / 8, middle
        for share in np.linspace(0, 1, _CUTS):
            yield sign * (narrowest + share * (widest - narrowest)), middle


def _error(values: Floats, importance: Floats | None, scales: Doubles, zeros: Doubles, scheme: Scheme) -> Doubles:
    """Squared error of each block, [n, blocks]."""
    step = scales.astype(np.float32)[..., None]
    step[step == 0] = 1
    zero = zeros.astype(np.float32)[..., None]
    found = values / step
    np.rint(found, out=found)
    np.clip(found, -zero, scheme.top_code - zero, out=found)
    found *= step
    found -= values
    np.square(found, out=found)
    if importance is not None:
        found *= importance
    total: Doubles = found.sum(axis=2, dtype=np.float64)
    return total


def _range(values: Floats) -> tuple[Doubles, Doubles]:
    """The largest and the least of every block and zero."""
    highest = np.maximum(values.max(axis=2), 0).astype(np.float64)
    return highest, np.minimum(values.min(axis=2), 0).astype(np.float64)


def fit_grid(
    weight: npt.NDArray[np.floating[Any]],  # [N, K]
    scheme: Scheme,
    fit: Fit,
    importance: Floats | None = None,  # [K]
    scale_dtype: ScaleType = np.float32,
) -> Grid:
    """The grid of every block of `weight`; raises ValueError as `round_to_nearest` does."""
    rows, columns = weight.shape
    block, blocks = scheme.block(columns), scheme.blocks(columns)
    scales: Scales = np.empty((rows, blocks), scale_dtype)
    zero_points = None if scheme.symmetric else np.empty((rows, blocks), np.uint8)
    counts = None if importance is None else _blocks(importance[None], blocks, block)[0]
    for part in _chunks(rows, blocks * block):
        exact, zeros = fit(_split(weight[part], part.start, blocks, block), counts, scheme)
        scales[part] = _stored(exact, scale_dtype)
        if zero_points is not None:
            zero_points[part] = zeros
    return Grid(scheme, scales, zero_points)


def round_to_grid(weight: npt.NDArray[np.floating[Any]], grid: Grid) -> Quantized:
    """Every weight becomes the nearest code of its block's grid."""
    rows, columns = weight.shape
    block, blocks = grid.scheme.block(columns), grid.scheme.blocks(columns)
    codes = np.empty((rows, blocks, block), np.uint8)
    for part in _chunks(rows, blocks * block):
        zero_points = None if grid.zero_points is None else grid.zero_points[part]
        some = Grid(grid.scheme, grid.scales[part], zero_points)
        codes[part] = some.codes(_split(weight[part], part.start, blocks, block))
    return Quantized(grid.scheme, (rows, columns), codes, grid.scales, grid.zero_points)


def quantized(codes: npt.NDArray[np.uint8], grid: Grid, columns: int) -> Quantized:
    """Codes [N, K] on a grid, its last blocks filled up."""
    block, blocks = grid.scheme.block(columns), grid.scheme.blocks(columns)
    padded = np.empty((len(codes), blocks, block), np.uint8)
    padded[:] = grid.scheme.middle_code if grid.zero_points is None else grid.zero_points[:, :, None]
    padded.reshape(len(codes), -1)[:, :columns] = codes
    return Quantized(grid.scheme, (len(codes), columns), padded, grid.scales, grid.zero_points)


def round_to_nearest(
    weight: npt.NDArray[np.floating[Any]],  # [N, K]
    scheme: Scheme,
    scale_dtype: ScaleType = np.float32,
    fit: Fit = clipped,
) -> Quantized:
    """Quantise `weight` without calibration.

    Every weight is off by at most one step, the size of its block's stored scale; a block of zeros, or one so small
    that its scale vanishes in `scale_dtype`, becomes exactly zero. Raises ValueError for a weight that is not finite
    and for a scale that `scale_dtype` cannot hold.
    """
    return round_to_grid(weight, fit_grid(weight, scheme, fit, scale_dtype=scale_dtype))


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, CHUNK // columns)
    return (slice(start, start + step) for start in range(0, rows, step))


def _split(weight: npt.NDArray[np.floating[Any]], first_row: int, blocks: int, block: int) -> Floats:
    """A float32 copy as [n, blocks, block], its tail filled up with zeros."""
    values = _blocks(weight, blocks, block)
    finite = np.isfinite(values)
    if not finite.all():
        row, *place = np.argwhere(~finite)[0]
        column = place[0] * block + place[1]
        raise ValueError(f"weight is {weight[row, column]} at [{first_row + row}, {column}]; expected finite numbers")
    return values


def _blocks(weight: npt.NDArray[np.floating[Any]], blocks: int, block: int) -> Floats:
    rows, columns = weight.shape
    values = np.zeros((rows, blocks * block), np.float32)
    values[:, :columns] = weight
    return values.reshape(rows, blocks, block)


def _stored(exact: Doubles, scale_dtype: ScaleType) -> Scales:
    """The scales in `scale_dtype`, never rounded towards zero (unless to it): a shorter grid clips by over a step."""
    with np.errstate(over="ignore", under="ignore"):  # over: refused below; under: the block becomes zero
        stored: Scales = exact.astype(scale_dtype)
        away = np.nextafter(stored, np.copysign(scale_dtype(np.inf), stored))
    stored = np.where((np.abs(stored) < np.abs(exact)) & (stored != 0), away, stored)
    if not np.isfinite(stored).all():
        raise ValueError(f"a scale of {np.abs(exact).max()} does not fit {np.dtype(scale_dtype)}")
    return stored
