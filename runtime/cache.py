"""The KV cache of one sequence: accepted columns are kept, rejected ones are never copied."""

import math
import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from specedge.manifest import KVLayout

Array = npt.NDArray[np.generic]


def unwritten(shape: tuple[int, ...], dtype: str) -> Array:
    """Zeros that take no memory until they are written, whatever the heap was used for before."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    pages = mmap.mmap(-1, max(size, 1), access=mmap.ACCESS_COPY)  # private: a process forked later must not share them
    return np.frombuffer(pages, np.uint8, size).view(dtype).reshape(shape)


class KVCache:
    """2 x layers buffers [1, K, slots, D]; the first `length` columns hold the committed tokens, at most `context`."""

    def __init__(self, layout: KVLayout, context: int) -> None:
        shape = (1, layout.heads, layout.slots, layout.head_dim)
        names = [f"{kind}_{layer}" for layer in range(layout.layers) for kind in ("key", "value")]
        self._buffers: dict[str, Array] = {name: unwritten(shape, layout.dtype) for name in names}
        self._context = context
        self.length = 0

    def buffers(self) -> Iterator[tuple[str, Array]]:
        """(name such as "key_0", its buffer), in layer order."""
        yield from self._buffers.items()

    def truncate(self, length: int) -> None:
        """Forget all columns from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} columns to {length}")
        for buffer in self._buffers.values():  # a mask hides neither NaN (0 * NaN is NaN) nor scores larger than it
            buffer[:, :, length : self.length] = 0
        self.length = length

    def append(self, columns: dict[str, Array], rows: Sequence[int]) -> None:
        """Copy columns `rows` of a step's new KV [1, K, T, D] behind the committed ones."""
        end = self._grow(len(rows))
        consecutive = list(rows) == list(range(len(rows)))
        for name, new in columns.items():
            kept = new[:, :, : len(rows)] if consecutive else new[:, :, list(rows)]
            self._buffers[name][:, :, self.length : end] = kept
        self.length = end

    def keep(self, rows: Sequence[int]) -> None:
        """Commit columns `rows`, ascending, of a step that wrote its own into the buffers right behind the committed ones."""
        end = self._grow(len(rows))
        self._close_ranks(self.length, rows)
        self.length = end

    def compact(self, start: int, rows: Sequence[int]) -> None:
        """Of the committed columns from `start` on keep only `rows` (0: the one at `start`), ascending, moved together."""
        if not 0 <= start <= self.length or (len(rows) and not 0 <= rows[0] <= rows[-1] < self.length - start):
            raise ValueError(f"cannot keep columns {list(rows)} behind {start} of a cache of {self.length}")
        self._close_ranks(start, rows)
        self.truncate(start + len(rows))

    def _close_ranks(self, start: int, rows: Sequence[int]) -> None:
        """Move columns `rows` behind `start` to its right side, an accepted path of a tree."""
        if list(rows) != list(range(len(rows))):
            source = [start + row for row in rows]
            for buffer in self._buffers.values():
                buffer[:, :, start : start + len(rows)] = buffer[:, :, source]

    def _grow(self, count: int) -> int:
        end = self.length + count
        if end > self._context:
            raise ValueError(f"{count} more columns after {self.length} do not fit a context of {self._context}")
        return end
