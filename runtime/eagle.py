"""An EAGLE head opened on a device: a layer of its own over the target's features and the tokens that follow them."""

from collections import Counter
from collections.abc import Sequence as Tokens
from functools import cached_property

import numpy as np
import numpy.typing as npt

from specedge.bundle import Bundle
from specedge.devices.device import Device
from specedge.manifest import Graph
from specedge.runtime.binding import OpenGraph
from specedge.runtime.cache import KVCache
from specedge.runtime.compiled import open_graph
from specedge.runtime.delta_graph import DeltaGraph
from specedge.runtime.embedding import Embedding
from specedge.runtime.rope import rope_tables
from specedge.runtime.sample import Logits
from specedge.runtime.unrolled import Drafted, Expansion, Unrolling
from specedge.runtime.vocabulary import DraftVocabulary

Rows = npt.NDArray[np.float32]


class EagleHead:
    """The cache of one text and the graphs that extend it, opened when they are first needed.

    Column p comes of the target's features of position p and the token of position p + 1.
    """

    def __init__(self, bundle: Bundle, device: Device, threads: int | None = None) -> None:
        self.role = bundle.role("eagle")
        self.cache = KVCache(self.role.kv, self.role.context)
        self.text: list[int] = []
        """Tokens that the columns come of, one more than columns, as far as these are a text in order: no drafts."""
        self.vocabulary = DraftVocabulary.of(bundle, self.role)
        self._bundle, self._device, self._threads = bundle, device, threads
        self._tables = rope_tables(self.role)
        self._reads = "hidden" if self.role.taps == (-1,) else "features"
        self._embedding = Embedding.needed(bundle, "eagle")
        self._opened: list[DeltaGraph] = []
        self.nodes: Counter[str] = Counter()
        """How many nodes which provider took, of plug-ins, of the graphs opened so far."""
        self.step_bytes = _step_bytes(bundle)
        """What one step reads: its own weights but the embedding, and the LM head of the target if it has none."""
        self.unrolling = Unrolling(self.role, self.cache, self._tables, self._open)

    @property
    def graph_seconds(self) -> float:
        """Time spent inside the graphs so far."""
        return self.unrolling.seconds + sum(graph.seconds for graph in self._opened)

    def read(self, tokens: Tokens[int], features: Rows) -> tuple[Logits, Rows]:
        """Feed and commit `tokens` and the features [n, F] of the positions before them.

        Logits [V] behind the last, and what the head feeds back there [H].
        """
        chunk = self.role.chunk
        for start in range(0, len(tokens), chunk):
            piece = tokens[start : start + chunk]
            rows = len(piece)
            length = self.cache.length
            graph = self._fitting(self._first, rows)
            inputs = {self._reads: self._typed(features[start : start + chunk]), "last_row": np.array([rows - 1], np.int32)}
            outputs = graph.run(piece, np.arange(length, length + rows), np.tri(rows, dtype=bool), inputs)
            self._commit(outputs, range(rows), piece)
        return self.vocabulary.widen(outputs["logits"][0, 0].copy()), outputs["fed_back"][0, 0].astype(np.float32)

    def grow(
        self, tokens: Tokens[int], states: Rows, positions: npt.NDArray[np.integer], sees: npt.NDArray[np.bool_]
    ) -> tuple[list[Logits], Rows]:
        """Feed and commit drafted tokens, each with what was fed back before it [n, H]; logits and states behind them.

        `sees` [n, columns + n] is that of `DeltaGraph.run`.
        """
        graph = self._fitting(self._next, len(tokens))
        outputs = graph.run(tokens, positions, sees, {"hidden": self._typed(states)})
        self._commit(outputs, range(len(tokens)), ())
        logits = [self.vocabulary.widen(row.copy()) for row in outputs["logits"][0, : len(tokens)]]
        return logits, outputs["fed_back"][0, : len(tokens)].astype(np.float32)

    @property
    def widest(self) -> int | None:
        """Most drafted tokens one step takes, None for any number."""
        widths = [graph.width for graph in self.role.graphs]
        return None if None in widths else max(width for width in widths if width is not None)

    def draft(self, expansion: Expansion, tokens: Tokens[int], features: Rows, noise: Rows) -> Drafted:
        """Read as `read` does and draft what `expansion` drafts, in one call; what was read is committed."""
        most = expansion.width or self.role.chunk
        if len(tokens) > most:
            self.read(tokens[:-most], features[:-most])
            tokens, features = tokens[-most:], features[-most:]
        drafted = expansion.draft(tokens, noise, {self._reads: self._typed(features)})
        self._append(drafted.columns, range(len(tokens)), tokens)
        return drafted

    def restart(self, text: Tokens[int]) -> None:
        """Keep the columns of this beginning of a text, whose first token comes with no column of its own."""
        self.truncate(min(len(text) - 1, self.cache.length))
        self.text = [*text[: self.cache.length + 1]]

    def truncate(self, length: int) -> None:
        """Forget all columns from `length` on."""
        self.cache.truncate(length)
        del self.text[length + 1 :]

    def _commit(self, outputs: dict[str, npt.NDArray[np.generic]], rows: range, tokens: Tokens[int]) -> None:
        columns = {name.removeprefix("new_"): array for name, array in outputs.items() if name.startswith("new_")}
        self._append(columns, rows, tokens)

    def _append(self, columns: dict[str, npt.NDArray[np.generic]], rows: range, tokens: Tokens[int]) -> None:
        """Columns of a text's `tokens`, or of drafts, which are no text."""
        follows = len(self.text) == self.cache.length + 1
        self.cache.append(columns, rows)
        self.text += tokens if follows else ()

    def _typed(self, rows: Rows) -> npt.NDArray[np.generic]:
        return np.ascontiguousarray(rows[None], dtype=self.role.kv.dtype)

    @cached_property
    def _first(self) -> dict[int | None, DeltaGraph]:
        return self._graphs(self.role.first)

    @cached_property
    def _next(self) -> dict[int | None, DeltaGraph]:
        return self._graphs(self.role.graphs)

    def _graphs(self, graphs: Tokens[Graph]) -> dict[int | None, DeltaGraph]:
        opened = [
            DeltaGraph(self._open(graph), graph, self.role, self.cache, self._tables, embedding=self._embedding)
            for graph in graphs
        ]
        self._opened += opened
        return {graph.width: graph for graph in opened}

    def _fitting(self, graphs: dict[int | None, DeltaGraph], rows: int) -> DeltaGraph:
        """The narrowest graph for so many rows."""
        if None in graphs:
            return graphs[None]
        return graphs[min(width for width in graphs if width is not None and width >= rows)]

    def _open(self, graph: Graph) -> OpenGraph:
        session = open_graph(self._bundle, graph, self._device, self._threads)
        self.nodes.update(session.nodes)
        return session


def _step_bytes(bundle: Bundle) -> int:
    own, target = ({weight.name: weight for weight in bundle.role(name).weights} for name in ("eagle", "target"))
    read = [weight for name, weight in own.items() if name != "embed_tokens.weight"]
    if "lm_head.weight" not in own:
        read.append(target.get("lm_head.weight") or target["embed_tokens.weight"])
    return sum(weight.stored_bytes for weight in read)
