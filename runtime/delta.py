"""A sequence over the delta form: a session per static width, whose new columns the host copies."""

from collections.abc import Sequence as Tokens

import numpy as np
import numpy.typing as npt

from specedge.manifest import Graph, Role
from specedge.runtime.binding import Binding, OpenGraph
from specedge.runtime.cache import KVCache
from specedge.runtime.embedding import Embedding
from specedge.runtime.pieces import Pieces
from specedge.runtime.sequence import Array, Logits, Positions, Sequence


class _Step:
    """Buffers and binding of one static width."""

    def __init__(
        self,
        graph: Graph,
        width: int,
        binding: Binding,
        role: Role,
        cache: KVCache,
        half: int,
        extra: tuple[str, int] | None,
        embedding: Embedding | None,
    ) -> None:
        dtype, slots = role.kv.dtype, role.context + width
        self.binding = binding
        self._embedding = embedding
        self._text: Array = np.zeros((1, width, embedding.size), dtype) if embedding else np.zeros((1, width), np.int32)
        self.cos, self.sin = np.zeros((2, 1, 1, width, half), dtype)
        self.bias = np.zeros((1, 1, width, slots), dtype)
        self.logits = np.zeros((1, width, role.vocab_size), dtype)
        self.columns: dict[str, Array] = {}
        for name, buffer in cache.buffers():
            self.columns[name] = np.zeros((1, role.kv.heads, width, role.kv.head_dim), dtype)
            binding.input(f"past_{name}", buffer)
            binding.output(f"new_{name}", self.columns[name])
        inputs = {
            "input_embeds" if embedding else "input_ids": self._text,
            "rope_cos": self.cos,
            "rope_sin": self.sin,
            "attention_bias": self.bias,
        }
        for name, array in inputs.items():
            binding.input(name, array)
        self.pieces = Pieces(binding, graph, "logits", self.logits)
        self.hidden = np.zeros((1, width, extra[1] if extra else 0), dtype)
        if extra:
            binding.output(extra[0], self.hidden)

    def feed(self, ids: Tokens[int]) -> None:
        """These tokens, and padding behind them."""
        rows = len(ids)
        self._text[0, :rows] = self._embedding.rows(ids) if self._embedding else ids
        self._text[0, rows:] = 0


class DeltaSequence(Sequence):
    """One session per static width; a step runs in the smallest that fits, padded, and commit copies what was accepted."""

    def __init__(
        self, role: Role, tables: Array, sessions: dict[int | None, OpenGraph], embedding: Embedding | None = None
    ) -> None:
        super().__init__(role, tables)
        half = self._tables.shape[2]
        widths = sorted(width for width in sessions if width is not None)
        graphs = {graph.width: graph for graph in role.graphs}
        self._steps = {
            width: _Step(graphs[width], width, sessions[width].bind(), role, self.cache, half, self._extra, embedding)
            for width in widths
        }
        self._last = self._steps[widths[0]]

    def _run(self, ids: Tokens[int], positions: Positions, mask: Array, wanted: npt.NDArray[np.intp]) -> Logits:
        rows, context = len(ids), self.role.context
        width = next(width for width in self._steps if width >= rows)
        step = self._last = self._steps[width]
        step.feed(ids)
        step.cos[0, 0, :rows], step.sin[0, 0, :rows] = self._tables[:, positions]
        step.bias[...] = self.role.mask_value
        step.bias[0, 0, :, context:][np.diag_indices(width)] = 0  # padding rows see themselves: no empty softmax
        old = mask.shape[1] - rows  # columns of the past that the mask covers
        step.bias[0, 0, :rows, : self.length] = 0
        step.bias[0, 0, :rows, self.length - old : self.length] = mask[:, :old]
        step.bias[0, 0, :rows, context : context + rows] = mask[:, old:]
        self._timed_run(step.binding)
        asked = slice(rows - len(wanted), rows)
        return step.pieces.join(asked)[0, asked].astype(np.float32, copy=False)

    def _hidden_rows(self) -> Array:
        rows: Array = self._last.hidden[0]
        return rows

    def _commit(self, rows: Tokens[int]) -> None:
        self.cache.append(self._last.columns, rows)
