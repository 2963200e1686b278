"""The weight file: every tensor of a role once, page-aligned, shared by all of its graphs; and its reading back."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from specedge.devices.device import Float
from specedge.manifest import Extent, Weight
from specedge.quant.pack import Quantized, pack_codes, pack_zero_points, unpack_codes, unpack_zero_points
from specedge.quant.scheme import Scheme

Array = npt.NDArray[np.generic]
Float32 = npt.NDArray[np.float32]

PAGE = 4096
_SMALL = 64 * 1024  # below this a tensor is not worth a page of padding; 64 bytes is a cache line
# Kernels know blocks only: one scale per channel is stored as blocks that repeat it, the widest that divides the row.
_BLOCKS = (128, 64, 32)


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A tensor on its way into the file.

    `source` is the type it had in the checkpoint, `method` how it was rounded, `exact` whether it kept its values.
    """

    name: str
    values: Array | Quantized
    source: str
    method: str
    exact: bool

    @property
    def scheme(self) -> str:
        return self.values.scheme.name if isinstance(self.values, Quantized) else str(self.values.dtype)


class WeightWriter:
    """Writes tensors one after the other, in the form a device's kernels take; use as a context manager.

    That is blocks of at most `widest_block`, scales and offsets in `dtype`, and without `zero_points` offsets beside them.
    `file` is the bundle's name for it.
    """

    def __init__(
        self, path: Path, file: str, widest_block: int = _BLOCKS[0], zero_points: bool = True, dtype: Float = "float32"
    ) -> None:
        self._file_name = file
        self._path, self._widest_block, self._zero_points, self._dtype = path, widest_block, zero_points, dtype
        self._file: BinaryIO

    def __enter__(self) -> "WeightWriter":
        self._file = self._path.open("wb")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def add(self, tensors: Sequence[Stored]) -> list[Weight]:
        """Store tensors of one scheme and row length side by side, part by part: one matrix to a kernel that wants it."""
        arrays = [_parts(tensor.values, self._widest_block, self._zero_points, self._dtype) for tensor in tensors]
        extents: list[dict[str, Extent]] = [{} for _ in tensors]
        for part in arrays[0]:
            self._align(sum(array[part].nbytes for array in arrays))
            for array, extent in zip(arrays, extents, strict=True):
                extent[part] = self._append(array[part])
        return [
            Weight(
                tensor.name,
                tensor.scheme,
                tensor.values.shape,
                extent,
                tensor.source,
                tensor.method,
                tensor.exact,
                self._file_name,
            )
            for tensor, extent in zip(tensors, extents, strict=True)
        ]

    def copy(self, weight: Weight, path: Path) -> Weight:
        """Store a weight as it lies in another file."""
        parts = {}
        for name, extent in weight.parts.items():
            self._align(extent.bytes)
            parts[name] = self._append(read_part(path, extent))
        return replace(weight, parts=parts, file=self._file_name)

    def _align(self, size: int) -> None:
        alignment = PAGE if size >= _SMALL else 64
        self._file.seek(-(-self._file.tell() // alignment) * alignment)

    def _append(self, array: Array) -> Extent:
        array = np.ascontiguousarray(array)
        offset = self._file.tell()
        self._file.write(array.data)
        return Extent(offset, array.nbytes, str(array.dtype), array.shape)


def _parts(values: Array | Quantized, widest_block: int, zero_points: bool, dtype: Float) -> dict[str, Array]:
    """What is written of a tensor, in the layout of MatMulNBits; `offsets` are what a graph adds to symmetric codes."""
    if not isinstance(values, Quantized):
        return {"values": values}
    group = values.scheme.group or channel_block(values.shape[1])
    blocked = values if values.scheme.group == min(group, widest_block) else values.regroup(min(group, widest_block))
    bits = blocked.scheme.bits
    parts: dict[str, Array] = {"codes": pack_codes(blocked.codes, bits), "scales": blocked.scales.astype(dtype)}
    if blocked.zero_points is not None:
        parts["zero_points"] = pack_zero_points(blocked.zero_points, bits)
        parts |= {} if zero_points else {"offsets": blocked.offsets().astype(dtype)}
    if blocked.minima is not None:
        parts |= {"offsets": blocked.offsets().astype(dtype), "minima": blocked.minima}
    return parts


StoredAt = tuple[str, int, tuple[int, ...]]


def place_of(weight: Weight) -> StoredAt:
    """What tells a stored weight from all others, whatever their names: file, offset and shape."""
    return weight.file, min(extent.offset for extent in weight.parts.values()), weight.shape


def side_by_side(weights: Sequence[Weight]) -> Weight | None:
    """Weights that lie one after the other in every part as one with all their rows; None for any that do not."""
    if not weights:
        return None
    first, parts = weights[0], dict(weights[0].parts)
    for before, weight in pairwise(weights):
        same = _alike(weight) == _alike(first)
        if not same or any(part.offset != _end(before.parts[name]) for name, part in weight.parts.items()):
            return None
        for name, part in weight.parts.items():
            rows = parts[name].shape[0] + part.shape[0]
            parts[name] = replace(parts[name], bytes=parts[name].bytes + part.bytes, shape=(rows, *part.shape[1:]))
    shape = (sum(weight.shape[0] for weight in weights), *first.shape[1:])
    name = "+".join(weight.name for weight in weights)
    return replace(first, name=name, shape=shape, parts=parts)


def _alike(weight: Weight) -> tuple[object, ...]:
    return weight.file, weight.scheme, weight.shape[1:], weight.parts.keys()


def _end(extent: Extent) -> int:
    return extent.offset + extent.bytes


def channel_block(columns: int) -> int:
    """The block a per-channel scale is repeated over for rows of `columns` weights."""
    return next((block for block in _BLOCKS if columns % block == 0), _BLOCKS[-1])


def block_size(weight: Weight) -> int:
    """Weights per stored scale of a quantised weight."""
    bits = Scheme.from_name(weight.scheme).bits
    return weight.parts["codes"].shape[2] * 8 // bits


def read_float32(weight: Weight, path: Path) -> tuple[Float32, Float32 | None]:
    """Values of a stored weight in float32, dequantised, and the size of a quantisation step at each (None: not quantised)."""
    if weight.pieces:
        read = [read_float32(piece, path) for piece in pieces_of(weight)]
        steps = [step for _, step in read if step is not None]
        return np.concatenate([values for values, _ in read]), np.concatenate(steps) if steps else None
    if "values" in weight.parts:
        return read_part(path, weight.parts["values"]).astype(np.float32), None
    stored = read_quantized(weight, path)
    block = stored.scheme.block(weight.shape[1])
    spans = np.repeat(np.abs(stored.scales.astype(np.float32)), block, axis=1)[:, : weight.shape[1]]
    return stored.dequantize(), spans


def pieces_of(weight: Weight) -> list[Weight]:
    """The rows of a weight that are stored together, as weights."""
    rows = [next(iter(parts.values())).shape[0] for parts in weight.pieces]
    return [
        replace(weight, shape=(count, *weight.shape[1:]), parts=parts, pieces=())
        for count, parts in zip(rows, weight.pieces, strict=True)
    ]


def read_quantized(weight: Weight, path: Path) -> Quantized:
    """In blocks, also where the scheme has one scale per channel."""
    parts: dict[str, Any] = {name: read_part(path, extent) for name, extent in weight.parts.items()}
    scheme = Scheme.from_name(weight.scheme)
    packed = parts["codes"]
    if packed.dtype == np.int8:  # as two's complement
        packed = packed.view(np.uint8) ^ np.uint8(0x88 if scheme.bits == 4 else 0x80)
    codes = unpack_codes(packed, scheme.bits)
    rows, blocks, block = codes.shape
    unpacked = parts.get("zero_points")
    if unpacked is not None and unpacked.ndim == 1:  # rows that do not begin on bytes of their own
        unpacked = unpack_codes(unpacked, scheme.bits)[: rows * blocks].reshape(rows, blocks)
    elif unpacked is not None:
        unpacked = unpack_zero_points(unpacked, scheme.bits, blocks)
    shape = (weight.shape[0], weight.shape[1])
    group: int | None = block
    if scheme.group is None and blocks == 1:
        codes, group = codes[..., : shape[1]], None
    return Quantized(replace(scheme, group=group), shape, codes, parts["scales"], unpacked, parts.get("minima"))


def read_part(path: Path, extent: Extent) -> Array:
    """One part of a stored weight, mapped."""
    return np.memmap(path, extent.dtype, "r", extent.offset, extent.shape)
