"""A safetensors file: its header, fully checked before any tensor is read, and its tensors as float32."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specedge.errors import SpecedgeError

Float32 = npt.NDArray[np.float32]

LFS_POINTER = b"version https://git-lfs"

_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}  # numpy has no bfloat16
_INTEGERS: dict[str, np.dtype[Any]] = {"I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "BOOL": np.dtype("?")}
_LONGEST_HEADER = 100_000_000  # the limit of the reference implementation
_LENGTH = 8  # bytes of the little-endian header length that starts the file
_COMPARED = 1 << 24  # values compared at a time: tied matrices can be gigabytes


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies; `start` counts from the beginning of the file. Only `read_header` may admit integers."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def __post_init__(self) -> None:
        if self.dtype not in (known := _DTYPES | _INTEGERS):
            raise _unsupported(self.path, self.name, self.dtype)
        expected = math.prod(self.shape) * known[self.dtype].itemsize
        if self.end - self.start != expected:
            raise SpecedgeError(
                f"{self.path}: {self.name}: {self.dtype} {self.shape} takes {expected} bytes, the header gives it "
                f"{self.end - self.start}; the file is damaged, download it again"
            )

    def read(self, first: int = 0, count: int | None = None) -> Float32:
        """The values as float32 (exact for integers below 2^24), flat if only some are asked for."""
        raw = self._read_raw(first, math.prod(self.shape) if count is None else count)
        if self.dtype == "BF16":  # the upper half of a float32
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        values = raw.astype(np.float32, copy=False)
        return values.reshape(self.shape) if count is None else values

    def read_integers(self) -> npt.NDArray[np.integer]:
        """The values of a tensor of integers as they are stored."""
        return self._read_raw(0, math.prod(self.shape)).reshape(self.shape)

    def _read_raw(self, first: int, count: int) -> npt.NDArray[Any]:
        dtype = (_DTYPES | _INTEGERS)[self.dtype]
        return np.fromfile(self.path, dtype, count, offset=self.start + first * dtype.itemsize)


def same_values(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors hold the same numbers, read piece by piece."""
    if one.shape != other.shape:
        return False
    size = math.prod(one.shape)
    for first in range(0, size, _COMPARED):
        count = min(_COMPARED, size - first)
        if not np.array_equal(one.read(first, count), other.read(first, count)):
            return False
    return True


def require_floats(tensor: StoredTensor) -> None:
    """Refuse a tensor of integers."""
    if tensor.dtype in _INTEGERS:
        raise _unsupported(tensor.path, tensor.name, tensor.dtype)


def read_header(path: Path, integers: bool = False) -> dict[str, StoredTensor]:
    """The tensors of a file whose header and size are consistent: no gap, overlap, cut or trailing byte.

    Reads the header only; `integers` says whether there may be tensors of them. Raises a `SpecedgeError` with path, size and
    the likely cause.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(64)
        header_size = _header_size(path, size, start)
        file.seek(_LENGTH)
        header = file.read(header_size)
    try:
        entries = json.loads(header)
        tensors = [
            StoredTensor(path, name, *_entry(entry, _LENGTH + header_size))
            for name, entry in entries.items()
            if name != "__metadata__"
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, size, f"its header is not valid ({error})", "not a safetensors file, or damaged") from error
    for tensor in [] if integers else tensors:
        require_floats(tensor)
    _check_layout(path, size, _LENGTH + header_size, tensors)
    return {tensor.name: tensor for tensor in tensors}


def _header_size(path: Path, size: int, start: bytes) -> int:
    if size <= _LENGTH:
        raise _damaged(path, size, "too short for a safetensors header", "an interrupted download")
    if start.startswith(LFS_POINTER):
        raise SpecedgeError(f"{path}: {size} bytes: a Git LFS pointer, not weights; run `git lfs pull` or download it again")
    length = int.from_bytes(start[:_LENGTH], "little")
    if length > _LONGEST_HEADER or start[_LENGTH : _LENGTH + 1] != b"{":
        raise _damaged(path, size, f"no safetensors header (length {length})", "another kind of file under this name")
    if _LENGTH + length > size:
        raise _damaged(path, size, f"its header alone takes {length} bytes", "an interrupted download")
    return length


def _entry(entry: Any, data: int) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape, start and end of a header entry; `data` is where the tensors begin."""
    begin, end = entry["data_offsets"]
    numbers = [begin, end, *entry["shape"]]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"offsets and shape {numbers} are not all integers >= 0")
    return str(entry["dtype"]), tuple(entry["shape"]), data + begin, data + end


def _check_layout(path: Path, size: int, data: int, tensors: list[StoredTensor]) -> None:
    position, before = data, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start < position:
            raise _damaged(path, size, f"{tensor.name} overlaps {before}", "a damaged header")
        if tensor.start > position:
            raise _damaged(path, size, f"{tensor.start - position} unused bytes after {before}", "a damaged header")
        position, before = tensor.end, tensor.name
    if size < position:
        raise _damaged(path, size, f"its header promises {position} bytes", "an interrupted download")
    if size > position:
        raise _damaged(path, size, f"{size - position} bytes after the last tensor", "a damaged or concatenated file")


def _unsupported(path: Path, name: str, dtype: str) -> SpecedgeError:
    return SpecedgeError(
        f"{path}: {name}: dtype {dtype} is not supported, expected one of {', '.join(_DTYPES)}; "
        "use the checkpoint that is not quantised"
    )


def _damaged(path: Path, size: int, found: str, cause: str) -> SpecedgeError:
    return SpecedgeError(f"{path}: {size} bytes: {found}; likely {cause}: download it again")
