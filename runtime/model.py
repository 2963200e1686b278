"""One role of a bundle, ready to step: token ids in, logits out, the graph's form hidden."""

import time
from collections.abc import Sequence as Tokens
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specedge.bundle import Bundle, Role
from specedge.devices.device import Device
from specedge.errors import SpecedgeError, UsageError
from specedge.runtime import prepared
from specedge.runtime.cache import KVCache, unwritten
from specedge.runtime.session import Binding, Session
from specedge.runtime.tree import TokenTree

Array = npt.NDArray[np.generic]
Logits = npt.NDArray[np.float32]
Positions = slice | npt.NDArray[np.integer]  # rows of the rope tables


class Model:
    """The opened graphs of one role; any number of sequences share them.

    `prepare` says whether weights are mapped in this machine's own order (`runtime.prepared`), which is made on first use:
    None does so where the device row has such a form and the weights are worth it.
    """

    def __init__(
        self,
        bundle: Bundle,
        role_name: str,
        device: Device,
        threads: int | None = None,
        prepare: bool | None = None,
    ) -> None:
        self.role = bundle.role(role_name)
        if self.role.form != device.form:
            raise SpecedgeError(
                f"device {device.name!r}: runs the {device.form} form, {bundle.path} holds {role_name} in the "
                f"{self.role.form} form; convert with --device {device.name}"
            )
        _check(self.role, f"{bundle.path}: {role_name}")
        self.tables = rope_tables(self.role)
        if prepare and not device.prepares:
            raise UsageError(f"prepare: device {device.name!r} has no prepared form of its graphs; leave it to the default")
        if prepare is None:
            prepare = device.prepares and self.role.stored_bytes >= prepared.WORTH_IT
        self.sessions: dict[int | None, Session] = {}
        self.weight_files: set[Path] = set()
        for graph in self.role.graphs:
            if prepare:
                opened = prepared.open_prepared(bundle, self.role, graph, device, threads, self._same)
            else:
                opened = prepared.open_plain(bundle, self.role, graph, device, threads)
            self.sessions[graph.width] = opened.session
            self.weight_files.add(opened.weight_file)

    def sequence(self) -> "Sequence":
        """A fresh, empty sequence with buffers of its own."""
        return self._sequence(self.sessions)

    def _sequence(self, sessions: dict[int | None, Session]) -> "Sequence":
        kind = _InPlaceSequence if self.role.form == "in-place" else _DeltaSequence
        return kind(self.role, self.tables, sessions)

    def _same(self, first: Session, second: Session) -> bool:
        """Whether two sessions of symbolic width give the same logits, bit for bit."""
        ids = np.arange(min(4, self.role.widest, self.role.context, self.role.vocab_size))
        one, other = (self._sequence({None: session}).step(ids.tolist()) for session in (first, second))
        return np.array_equal(one, other, equal_nan=True)


def _check(role: Role, where: str) -> None:
    """What the manifest says of a role against what it says of the role's graphs, which `Session` compares with the files."""
    kv = role.kv
    names = [f"past_{kind}_{layer}" for layer in range(kv.layers) for kind in ("key", "value")]
    expected = dict.fromkeys(names, ((1, kv.heads, kv.slots, kv.head_dim), kv.dtype))
    widths = [graph.width for graph in role.graphs]
    if not (widths == [None] if role.form == "in-place" else widths and None not in widths):
        raise SpecedgeError(f"{where}: graphs of widths {widths} are no {role.form} form; convert again")
    for graph in role.graphs:
        specs = {spec.name: spec for spec in (*graph.inputs, *graph.outputs)}
        found = {name: (spec.shape, spec.dtype) for name, spec in specs.items() if name.startswith("past_")}
        if found != expected:
            raise SpecedgeError(f"{where}: kv says {kv}, the KV inputs of {graph.file} differ; convert again")
        for name, size in (("logits", role.vocab_size), ("rope_cos", len(role.rope.inv_freq))):
            if name not in specs or specs[name].shape[-1] != size:
                raise SpecedgeError(f"{where}: {name} of {graph.file}: expected last dimension {size}; convert again")


class Sequence:
    """The cache of one text, and steps that extend it. Logits are views, valid until the next step."""

    def __init__(self, role: Role, tables: Array, sessions: dict[int | None, Session]) -> None:
        self.role = role
        self._tables = tables
        self._cache = KVCache(self.role.kv, self.role.context)
        self._chain = np.where(np.tri(self.widest, dtype=bool), 0, self.role.mask_value).astype(role.kv.dtype)
        self._in_order = np.arange(self.widest)
        self._places = self._in_order  # where each row of the last step was fed
        self.graph_seconds = 0.0
        """Time spent inside graphs so far; the rest of a step is the host's."""

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self._cache.length

    @property
    def widest(self) -> int:
        """Most tokens one step takes."""
        return self.role.widest

    def truncate(self, length: int) -> None:
        self._cache.truncate(length)

    def prefill(self, ids: Tokens[int]) -> Logits | None:
        """Feed and commit all of `ids` in chunks; the logits row [V] of the last one, None for no ids."""
        row = None
        for start in range(0, len(ids), self.role.chunk):
            chunk = ids[start : start + self.role.chunk]
            row = self._feed_chain(chunk, first_row=len(chunk) - 1)[0]
            self.commit(range(len(chunk)))
        return row

    def step(self, ids: Tokens[int], tree: TokenTree | None = None) -> Logits:
        """Logits [len(ids), V] after each of `ids`, nothing committed: a chain, or a root with its `tree`."""
        if tree is None or tree.is_chain:
            return self._feed_chain(ids, first_row=0)
        self._check_room(len(ids))
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
        self.commit(range(len(ids)))
        return logits

    def keep(self, start: int, columns: Tokens[int]) -> None:
        """Of the columns from `start` on keep only these, counted from there, ascending; the text ends behind them."""
        self._cache.compact(start, columns)

    def _check_room(self, rows: int) -> None:
        if rows == 0 or self.length + rows > self.role.context:
            raise ValueError(f"a step of {rows} tokens after {self.length} does not fit a context of {self.role.context}")
        if rows > self.widest:
            raise ValueError(f"a step of {rows} tokens is wider than the widest graph, {self.widest}")

    def _feed_chain(self, ids: Tokens[int], first_row: int) -> Logits:
        rows = len(ids)
        self._check_room(rows)
        self._places = self._in_order
        positions = slice(self.length, self.length + rows)
        return self._run(ids, positions, self._chain[:rows, :rows], self._in_order[first_row:rows])

    def _feeding_order(self, tree: TokenTree) -> npt.NDArray[np.intp]:
        """The verify rows in the order they are fed."""
        return np.arange(len(tree.tokens) + 1)

    def commit(self, rows: Tokens[int]) -> None:
        """Keep these rows of the last step, in order, as the next columns of the text."""
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


class _InPlaceSequence(Sequence):
    """One session of symbolic width that writes its columns into the cache itself."""

    def __init__(self, role: Role, tables: Array, sessions: dict[int | None, Session]) -> None:
        super().__init__(role, tables, sessions)
        self._binding = sessions[None].bind()
        dtype = role.kv.dtype
        for name, buffer in self._cache.buffers():
            self._binding.input(f"past_{name}", buffer)
            self._binding.output(f"present_{name}", buffer)
        self._ids = np.zeros(self.widest, np.int32)
        self._rope = np.zeros((2, self.widest * self._tables.shape[2]), dtype)
        self._bias = unwritten((self.widest * role.context,), dtype)
        self._logits = unwritten((self.widest * role.vocab_size,), dtype)
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
        self._logit_rows = logits[0]
        self._bound = rows, wanted

    def commit(self, rows: Tokens[int]) -> None:
        self._cache.keep([int(self._places[row]) for row in rows])


class _Step:
    """Buffers and binding of one static width."""

    def __init__(self, width: int, binding: Binding, role: Role, cache: KVCache, half: int) -> None:
        dtype, slots = role.kv.dtype, role.context + width
        self.binding = binding
        self.ids = np.zeros((1, width), np.int32)
        self.cos, self.sin = np.zeros((2, 1, 1, width, half), dtype)
        self.bias = np.zeros((1, 1, width, slots), dtype)
        self.logits = np.zeros((1, width, role.vocab_size), dtype)
        self.columns: dict[str, Array] = {}
        for name, buffer in cache.buffers():
            self.columns[name] = np.zeros((1, role.kv.heads, width, role.kv.head_dim), dtype)
            binding.input(f"past_{name}", buffer)
            binding.output(f"new_{name}", self.columns[name])
        inputs = {"input_ids": self.ids, "rope_cos": self.cos, "rope_sin": self.sin, "attention_bias": self.bias}
        for name, array in inputs.items():
            binding.input(name, array)
        binding.output("logits", self.logits)


class _DeltaSequence(Sequence):
    """One session per static width; a step runs in the smallest that fits, padded, and commit copies what was accepted."""

    def __init__(self, role: Role, tables: Array, sessions: dict[int | None, Session]) -> None:
        super().__init__(role, tables, sessions)
        half = self._tables.shape[2]
        widths = sorted(width for width in sessions if width is not None)
        self._steps = {width: _Step(width, sessions[width].bind(), role, self._cache, half) for width in widths}
        self._last = self._steps[widths[0]]

    def _run(self, ids: Tokens[int], positions: Positions, mask: Array, wanted: npt.NDArray[np.intp]) -> Logits:
        rows, context = len(ids), self.role.context
        width = next(width for width in self._steps if width >= rows)
        step = self._last = self._steps[width]
        step.ids[0], step.ids[0, :rows] = 0, ids
        step.cos[0, 0, :rows], step.sin[0, 0, :rows] = self._tables[:, positions]
        step.bias[...] = self.role.mask_value
        step.bias[0, 0, :, context:][np.diag_indices(width)] = 0  # padding rows see themselves: no empty softmax
        old = mask.shape[1] - rows  # columns of the past that the mask covers
        step.bias[0, 0, :rows, : self.length] = 0
        step.bias[0, 0, :rows, self.length - old : self.length] = mask[:, :old]
        step.bias[0, 0, :rows, context : context + rows] = mask[:, old:]
        self._timed_run(step.binding)
        return step.logits[0, rows - len(wanted) : rows].astype(np.float32, copy=False)

    def commit(self, rows: Tokens[int]) -> None:
        self._cache.append(self._last.columns, rows)


def rope_tables(role: Role) -> Array:
    """cos and sin [2, C, D / 2] of every position, computed in float32 as transformers does."""
    positions = np.arange(role.context, dtype=np.float32)[:, None]
    angles = positions * np.asarray(role.rope.inv_freq, np.float32)
    tables: Array = (np.stack((np.cos(angles), np.sin(angles))) * np.float32(role.rope.scaling)).astype(role.kv.dtype)
    return tables
