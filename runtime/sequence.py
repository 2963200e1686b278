"""The cache of one text, and steps that extend it, whatever the form of the graph."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Tokens

import numpy as np
import numpy.typing as npt

from specedge.manifest import Role
from specedge.runtime.binding import Binding
from specedge.runtime.cache import KVCache
from specedge.runtime.tree import TokenTree

Array = npt.NDArray[np.generic]
Logits = npt.NDArray[np.float32]
Positions = slice | npt.NDArray[np.integer]  # rows of the rope tables


class Sequence:
    """The cache of one text, and steps that extend it. Logits are views, valid until the next step."""

    def __init__(self, role: Role, tables: Array) -> None:
        self.role = role
        self._tables = tables
        self.cache = KVCache(self.role.kv, self.role.context)
        self._chain = np.where(np.tri(self.widest, dtype=bool), 0, self.role.mask_value).astype(role.kv.dtype)
        self._in_order = np.arange(self.widest)
        self.text: list[int] = []
        """Tokens of the leading columns, as far as these are a text in order: not nodes of a tree, nor what follows them."""
        self._asked: Tokens[int] = ()  # of the last step, in the order of its rows
        self._places = self._in_order  # where each row of the last step was fed
        self._fed = 0  # rows of the last step
        extra = [spec for spec in role.graphs[0].outputs if spec.name in ("hidden", "features")]
        self._extra = (extra[0].name, int(extra[0].shape[-1])) if extra else None
        self.graph_seconds = 0.0
        """Time spent inside graphs so far; the rest of a step is the host's."""

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self.cache.length

    def hidden(self, rows: int | Tokens[int]) -> npt.NDArray[np.float32]:
        """What draft heads read of a row of the last step (-1: its last) [F], or of several [n, F].

        It is what fed the LM head, or the residual streams of the role's taps; only where the graph gives it out.
        """
        found: npt.NDArray[np.float32] = self._hidden_rows()[self._places[: self._fed][rows]].astype(np.float32)
        return found

    def _hidden_rows(self) -> Array:
        """[T, F] of the last step, as it was fed."""
        raise NotImplementedError

    @property
    def widest(self) -> int:
        """Most tokens one step takes."""
        return self.role.widest

    def truncate(self, length: int) -> None:
        self.cache.truncate(length)
        del self.text[length:]

    def prefill(self, ids: Tokens[int], after_chunk: Callable[[Tokens[int]], None] | None = None) -> Logits | None:
        """Feed and commit all of `ids` in chunks; the logits row [V] of the last one, None for no ids.

        `after_chunk` is told the rows of every chunk while they can be read.
        """
        row = None
        for start in range(0, len(ids), self.role.chunk):
            chunk = ids[start : start + self.role.chunk]
            row = self._feed_chain(chunk, first_row=len(chunk) - 1)[0]
            self.commit(range(len(chunk)))
            if after_chunk:
                after_chunk(range(len(chunk)))
        return row

    def step(self, ids: Tokens[int], tree: TokenTree | None = None) -> Logits:
        """Logits [len(ids), V] after each of `ids`, nothing committed: a chain, or a root with its `tree`."""
        if tree is None or tree.is_chain:
            return self._feed_chain(ids, first_row=0)
        self._check_room(len(ids))
        self._asked = ids
        order = self._feeding_order(tree)
        mask = np.where(tree.visible[np.ix_(order, order)], 0, self.role.mask_value)
        self._places = np.argsort(order)
        positions = self.length + np.asarray(tree.depths)[order]
        return self._run([ids[row] for row in order], positions, mask, self._places)

    def grow(self, ids: Tokens[int], positions: Tokens[int], sees: npt.NDArray[np.bool_]) -> Logits:
        """Feed and commit nodes of a tree part of which is in the cache already; logits [T, V] after each of `ids`.

        `sees` [T, columns + T] says which of the last `columns` committed columns and of the new ones a node looks at; it looks
        at everything before them. `positions` are absolute.
        """
        self._check_room(len(ids))
        mask = np.where(sees, 0, self.role.mask_value)
        self._places = self._in_order
        logits = self._run(ids, np.asarray(positions), mask, self._in_order[: len(ids)])
        self._commit(range(len(ids)))
        return logits

    def keep(self, start: int, columns: Tokens[int], tokens: Tokens[int]) -> None:
        """Of the columns from `start` on keep only these, counted from there, ascending; the text ends behind them.

        `tokens` are theirs.
        """
        self.cache.compact(start, columns)
        if len(self.text) >= start:
            self.text[start:] = tokens

    def append(self, columns: dict[str, Array], rows: Tokens[int], tokens: Tokens[int]) -> None:
        """Commit rows of another graph's columns: a text of these `tokens`, and nodes of a tree behind it."""
        follows = len(self.text) == self.length
        self.cache.append(columns, rows)
        self.text += tokens if follows else ()

    def _check_room(self, rows: int) -> None:
        """Refuse a step that does not fit; of one that does, note its rows."""
        self._fed = rows
        if rows == 0 or self.length + rows > self.role.context:
            raise ValueError(f"a step of {rows} tokens after {self.length} does not fit a context of {self.role.context}")
        if rows > self.widest:
            raise ValueError(f"a step of {rows} tokens is wider than the widest graph, {self.widest}")

    def _feed_chain(self, ids: Tokens[int], first_row: int) -> Logits:
        rows, self._asked = len(ids), ids
        self._check_room(rows)
        self._places = self._in_order
        positions = slice(self.length, self.length + rows)
        return self._run(ids, positions, self._chain[:rows, :rows], self._in_order[first_row:rows])

    def _feeding_order(self, tree: TokenTree) -> npt.NDArray[np.intp]:
        """The verify rows in the order they are fed."""
        return np.arange(len(tree.tokens) + 1)

    def commit(self, rows: Tokens[int]) -> None:
        """Keep these rows of the last step, in order, as the next columns of the text."""
        follows = len(self.text) == self.length
        self._commit(rows)
        self.text += [self._asked[row] for row in rows] if follows else ()

    def _commit(self, rows: Tokens[int]) -> None:
        """Their columns."""
        raise NotImplementedError

    def _timed_run(self, binding: Binding) -> None:
        start = time.perf_counter()
        binding.run()
        self.graph_seconds += time.perf_counter() - start

    def _run(self, ids: Tokens[int], positions: Positions, mask: Array, wanted: npt.NDArray[np.intp]) -> Logits:
        """Logits of the rows that `wanted` names, all of them or the last.

        `mask` [T, columns + T] says what the rows see of the last columns and of each other.
        """
        raise NotImplementedError


def common_beginning(one: Tokens[int], other: Tokens[int]) -> int:
    """How many tokens two texts have in common before they part."""
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
