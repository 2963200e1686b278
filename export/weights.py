"""The weight file: every tensor of a role once, page-aligned, shared by all of its graphs; and its reading back."""

from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from specedge.bundle import Extent, Weight
from specedge.quant.pack import Quantized, pack_codes, pack_zero_points, unpack_codes, unpack_zero_points
from specedge.quant.scheme import Scheme

Array = npt.NDArray[np.generic]
Float32 = npt.NDArray[np.float32]

PAGE = 4096
_SMALL = 64 * 1024  # below this a tensor is not worth a page of padding; 64 bytes is a cache line
# Kernels know blocks only: one scale per channel is stored as blocks that repeat it, the widest that divides the row.
_BLOCKS = (128, 64, 32)


class WeightWriter:
    """Writes tensors one after the other; use as a context manager."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO

    def __enter__(self) -> "WeightWriter":
        self._file = self._path.open("wb")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def add_float(self, name: str, values: Array) -> Weight:
        """Store values as they are: float32 or float16."""
        return Weight(name, str(values.dtype), values.shape, {"values": self._append(values)})

    def add_quantized(self, name: str, stored: Quantized) -> Weight:
        """Store codes, scales and zero points in the layout of MatMulNBits."""
        blocked = stored.regroup(channel_block(stored.shape[1])) if stored.scheme.group is None else stored
        parts = {
            "codes": self._append(pack_codes(blocked.codes, blocked.scheme.bits)),
            "scales": self._append(blocked.scales),
        }
        if blocked.zero_points is not None:
            parts["zero_points"] = self._append(pack_zero_points(blocked.zero_points, blocked.scheme.bits))
        return Weight(name, str(stored.scheme), stored.shape, parts)

    def _append(self, array: Array) -> Extent:
        array = np.ascontiguousarray(array)
        alignment = PAGE if array.nbytes >= _SMALL else 64
        offset = -(-self._file.tell() // alignment) * alignment
        self._file.seek(offset)
        self._file.write(array.data)
        return Extent(offset, array.nbytes, str(array.dtype), array.shape)


def channel_block(columns: int) -> int:
    """The block a per-channel scale is repeated over for rows of `columns` weights."""
    return next((block for block in _BLOCKS if columns % block == 0), _BLOCKS[-1])


def block_size(weight: Weight) -> int:
    """Weights per stored scale of a quantised weight."""
    bits = Scheme.from_name(weight.scheme).bits
    return weight.parts["codes"].shape[2] * 8 // bits


def read_float32(weight: Weight, path: Path) -> tuple[Float32, Float32 | None]:
    """Values of a stored weight in float32, dequantised, and the size of a quantisation step at each (None: not quantised)."""
    parts: dict[str, Any] = {name: _read(path, extent) for name, extent in weight.parts.items()}
    if "values" in parts:
        return parts["values"].astype(np.float32), None
    scheme = Scheme.from_name(weight.scheme)
    codes = unpack_codes(parts["codes"], scheme.bits)
    _, blocks, block = codes.shape
    zero_points = parts.get("zero_points")
    unpacked = None if zero_points is None else unpack_zero_points(zero_points, scheme.bits, blocks)
    blocked = Scheme(scheme.bits, block, scheme.symmetric)
    shape = (weight.shape[0], weight.shape[1])
    values = Quantized(blocked, shape, codes, parts["scales"], unpacked).dequantize()
    steps = np.repeat(np.abs(parts["scales"].astype(np.float32)), block, axis=1)[:, : shape[1]]
    return values, steps


def _read(path: Path, extent: Extent) -> Array:
    return np.memmap(path, extent.dtype, "r", extent.offset, extent.shape)
