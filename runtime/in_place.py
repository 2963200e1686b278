"""A sequence over the in-place form: one session of symbolic width that writes its columns into the cache itself."""

from collections.abc import Sequence as Tokens

import numpy as np
import numpy.typing as npt

from specedge.manifest import Role
from specedge.runtime.binding import OpenGraph
from specedge.runtime.cache import unwritten
from specedge.runtime.sequence import Array, Logits, Positions, Sequence
from specedge.runtime.tree import TokenTree


class InPlaceSequence(Sequence):
    """One session of symbolic width that writes its columns into the cache itself."""

    def __init__(self, role: Role, tables: Array, sessions: dict[int | None, OpenGraph]) -> None:
        super().__init__(role, tables)
        self._binding = sessions[None].bind()
        dtype = role.kv.dtype
        for name, buffer in self.cache.buffers():
            self._binding.input(f"past_{name}", buffer)
            self._binding.output(f"present_{name}", buffer)
        self._ids = np.zeros(self.widest, np.int32)
        self._rope = np.zeros((2, self.widest * self._tables.shape[2]), dtype)
        self._bias = unwritten((self.widest * role.context,), dtype)
        self._logits = unwritten((self.widest * role.vocab_size,), dtype)
        self._hidden = np.zeros((self.widest, self._extra[1] if self._extra else 0), dtype)
        self._lengths = np.zeros((2, 1), np.int32)
        self._wanted = np.zeros(self.widest, np.int64)
        self._binding.input("seqlens_k", self._lengths[0])
        self._binding.input("total_sequence_length", self._lengths[1])
        self._bound = (0, 0)
        self._masked = 0  # so far the bias buffer may hold other numbers than zero

    def _feeding_order(self, tree: TokenTree) -> npt.NDArray[np.intp]:
        # then the first path lies in the cache as a chain does: same bits, and nothing to move when it is accepted
        return np.asarray(tree.depth_first)

    def _run(self, ids: Tokens[int], positions: Positions, mask: Array, wanted: npt.NDArray[np.intp]) -> Logits:
        rows, total = len(ids), self.length + len(ids)
        if self._bound != (rows, len(wanted)):
            self._bind(rows, len(wanted))
        self._ids[:rows] = ids
        self._wanted[: len(wanted)] = wanted
        self._lengths[0], self._lengths[1] = total - 1, total
        self._rope_rows[:] = self._tables[:, positions]
        bias = self._bias[: rows * total].reshape(1, 1, rows, total)
        if mask.any():
            bias[..., : -mask.shape[1]] = 0
            bias[..., -mask.shape[1] :] = mask
            self._masked = max(self._masked, rows * total)
        elif self._masked:  # a row that sees everything, and zeros stay zeros
            self._bias[: self._masked] = 0
            self._masked = 0
        self._binding.input("attention_bias", bias)
        self._timed_run(self._binding)
        logits: Logits = self._logit_rows.astype(np.float32, copy=False)
        return logits

    def _bind(self, rows: int, wanted: int) -> None:
        """Tie the beginnings of the buffers to what a step of `rows` tokens reads and the `wanted` logits it writes."""
        half, vocab = self._tables.shape[2], self.role.vocab_size
        self._rope_rows = self._rope[:, : rows * half].reshape(2, rows, half)  # a view
        cos, sin = self._rope_rows[:, None, None]
        logits = self._logits[: wanted * vocab].reshape(1, wanted, vocab)
        self._binding.input("input_ids", self._ids[:rows].reshape(1, rows))
        self._binding.input("rope_cos", cos)
        self._binding.input("rope_sin", sin)
        self._binding.input("logits_rows", self._wanted[:wanted])
        self._binding.output("logits", logits)
        if self._extra:
            self._binding.output(self._extra[0], self._hidden[None, :rows])
        self._logit_rows = logits[0]
        self._bound = rows, wanted

    def _hidden_rows(self) -> Array:
        return self._hidden

    def _commit(self, rows: Tokens[int]) -> None:
        self.cache.keep([int(self._places[row]) for row in rows])
