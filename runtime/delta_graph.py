"""One drafter graph in the delta form, run over a cache that other graphs share: the host lays its inputs out."""

import time
from collections.abc import Mapping
from collections.abc import Sequence as Tokens

import numpy as np
import numpy.typing as npt

from specedge.manifest import Graph, Role
from specedge.runtime.binding import OpenGraph
from specedge.runtime.cache import KVCache
from specedge.runtime.embedding import Embedding
from specedge.runtime.pieces import Pieces

Array = npt.NDArray[np.generic]


class DeltaGraph:
    """Rows of text, `more` rows behind them, and the columns that come out; nothing is committed.

    A static graph is padded to its width and sees the whole context, one of symbolic width takes what there is.
    """

    def __init__(
        self,
        session: OpenGraph,
        graph: Graph,
        role: Role,
        cache: KVCache,
        tables: Array,
        more: int = 0,
        embedding: Embedding | None = None,
    ) -> None:
        self.width = graph.width
        """Rows of text it takes at most, None for any number."""
        self.seconds = 0.0
        """Time spent inside the graph so far."""
        self._role, self._cache, self._tables, self._more = role, cache, tables, more
        self._embedding = embedding
        self._binding = session.bind()
        self._outputs: dict[str, Array] = {}
        self._logits: Pieces | None = None
        self._graph = graph
        for name, buffer in cache.buffers():
            self._binding.input(f"past_{name}", buffer)

    def run(
        self, ids: Tokens[int], positions: npt.NDArray[np.integer], sees: npt.NDArray[np.bool_], inputs: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Outputs by name, valid until the next run, padding included.

        `positions` and `sees` are of all rows, `sees` [rows, columns + rows] over the last committed columns and the new ones;
        a row looks at everything before them. `inputs` [1, len(ids), ...] are filled up as `ids` are; others come as they are.
        """
        rows, dtype, context = len(ids), self._role.kv.dtype, self._role.context
        text = self.width or rows
        total, past = text + self._more, self._cache.length if self.width is None else context
        places = np.r_[:rows, text:total]
        tables = np.zeros((2, 1, 1, total, self._tables.shape[2]), dtype)
        tables[:, 0, 0, places] = self._tables[:, np.minimum(positions, context - 1)]
        bias = np.full((1, 1, total, past + total), self._role.mask_value, dtype)
        bias[0, 0, :, past:][np.diag_indices(total)] = 0  # padding rows see themselves: no empty softmax
        old = sees.shape[1] - len(places)
        mask = np.where(sees, 0, self._role.mask_value)
        bias[0, 0, places, : self._cache.length - old] = 0
        bias[0, 0, places, self._cache.length - old : self._cache.length] = mask[:, :old]
        bias[0, 0, places[:, None], past + places] = mask[:, old:]
        embedding = self._embedding
        read = {"input_embeds": embedding.rows(ids)[None]} if embedding else {"input_ids": np.asarray([ids], np.int32)}
        fed = read | dict(inputs)
        for name, array in fed.items():
            self._binding.input(name, _padded(array, text) if array.shape[:2] == (1, rows) else array)
        for name, array in (("rope_cos", tables[0]), ("rope_sin", tables[1]), ("attention_bias", bias)):
            self._binding.input(name, array)
        self._bind_outputs(text, total)
        start = time.perf_counter()
        self._binding.run()
        self.seconds += time.perf_counter() - start
        if self._logits:
            self._outputs["logits"] = self._logits.join()
        return self._outputs

    def _bind_outputs(self, text: int, total: int) -> None:
        pieces = self._graph.pieces("logits")
        cut = {piece.name for piece in pieces} if len(pieces) > 1 else set()
        for spec in (spec for spec in self._graph.outputs if spec.name not in cut):
            shape = [size if isinstance(size, int) else text if size == "T" else total for size in spec.shape]
            if spec.name not in self._outputs or self._outputs[spec.name].shape != tuple(shape):
                self._outputs[spec.name] = np.zeros(shape, spec.dtype)
                self._binding.output(spec.name, self._outputs[spec.name])
        whole = self._graph.output("logits") if cut and not self._logits else None
        if whole:
            array = np.zeros([int(size) for size in whole.shape], whole.dtype)
            self._logits = Pieces(self._binding, self._graph, "logits", array)


def _padded(array: Array, rows: int) -> Array:
    """[1, n, ...] filled up with zeros to so many rows."""
    padding = [(0, 0), (0, rows - array.shape[1]), *[(0, 0)] * (array.ndim - 2)]
    return np.ascontiguousarray(np.pad(array, padding))
