"""An output that a graph gives whole or in pieces of its last dimension, as one array."""

import numpy as np
import numpy.typing as npt

from specedge.manifest import Graph
from specedge.runtime.binding import Binding

Array = npt.NDArray[np.generic]


class Pieces:
    """Binds `array` to the output `name`, or buffers to its pieces."""

    def __init__(self, binding: Binding, graph: Graph, name: str, array: Array) -> None:
        self._array = array
        self._buffers: list[Array] = []
        specs = graph.pieces(name)
        if [spec.name for spec in specs] == [name]:
            binding.output(name, array)
            return
        for spec in specs:
            self._buffers.append(np.zeros((*array.shape[:-1], int(spec.shape[-1])), array.dtype))
            binding.output(spec.name, self._buffers[-1])

    def join(self, rows: slice = slice(None)) -> Array:
        """The array, with these rows (of the last dimension but one) of what the last run gave."""
        if self._buffers:
            np.concatenate([buffer[..., rows, :] for buffer in self._buffers], axis=-1, out=self._array[..., rows, :])
        return self._array
