"""Drafting in one call: graphs that choose a whole chain or tree themselves, by argmax over logits and the host's noise."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specedge.manifest import Graph, Role, Unrolled
from specedge.runtime.binding import OpenGraph
from specedge.runtime.cache import KVCache
from specedge.runtime.delta_graph import Array, DeltaGraph
from specedge.runtime.in_graph import InGraph
from specedge.runtime.law import Law
from specedge.runtime.sample import Logits, best
from specedge.runtime.shape import TreeShape
from specedge.runtime.tree import ROOT, Proposal, TokenTree

Widen = Callable[[Logits], Logits]  # a row [Vd] of the drafter's as one of the target's ids


@dataclass(frozen=True, slots=True, eq=False)
class Drafted:
    """What one call drafted: ids of the target's, in node order, and logits [parents, Vd] of the root and the nodes fed.

    `columns` are those of the rows of text, of which there is room for `width`, and of the nodes fed.
    """

    ids: tuple[int, ...]
    logits: Logits
    columns: dict[str, Array]
    width: int


class Expansion:
    """A chain or tree that one call drafts; its graph is opened when it is first needed."""

    def __init__(self, record: Unrolled, role: Role, cache: KVCache, tables: Array, open_session: Callable[[Graph], OpenGraph]):
        self.shape = TreeShape.from_paths(record.paths)
        self.fed = tuple(node for node in range(len(record.paths)) if self.shape.children(node))
        """The nodes that have children, in the order of their rows."""
        self.depths = (0, *(len(self.shape.paths[node]) for node in self.fed))
        """Of the root and the nodes fed."""
        self.width = record.graph.width
        self._record, self._role, self._cache, self._tables, self._open = record, role, cache, tables, open_session
        self._graph: DeltaGraph | None = None
        paths = [self.shape.paths[node] for node in self.fed]
        above = [[path[: len(other)] == other for other in paths] for path in paths]
        self._sees = np.array(above, np.bool_).reshape(len(paths), len(paths))

    @property
    def seconds(self) -> float:
        return self._graph.seconds if self._graph else 0.0

    def draft(self, ids: Tokens[int], noise: npt.NDArray[np.float32], inputs: Mapping[str, Array]) -> Drafted:
        """Read `ids`, the text that the cache lacks, and `inputs` [1, len(ids), ...] beside them; nothing is committed."""
        if self._graph is None:
            session = self._open(self._record.graph)
            self._graph = DeltaGraph(session, self._record.graph, self._role, self._cache, self._tables, len(self.fed))
        text, start = len(ids), self._cache.length
        sees = np.zeros((text + len(self.fed), text + len(self.fed)), np.bool_)
        sees[:text, :text] = np.tri(text)
        sees[text:, :text] = True
        sees[text:, text:] = self._sees
        positions = np.array([*range(start, start + text), *(start + text - 1 + depth for depth in self.depths[1:])])
        chosen = {"last_row": np.array([text - 1], np.int32), "noise": noise}
        outputs = self._graph.run(ids, positions, sees, {**inputs, **chosen})
        columns = {name.removeprefix("new_"): array for name, array in outputs.items() if name.startswith("new_")}
        drafted = tuple(int(token) for token in outputs["draft_ids"][0])
        return Drafted(drafted, outputs["draft_logits"].astype(np.float32), columns, self.width or text)

    def propose(self, drafted: Drafted, shape: TreeShape, history: Tokens[int], in_graph: InGraph, widen: Widen) -> Proposal:
        """What was drafted as far as `shape` goes; tokens that may not be emitted are left out with all that follows them.

        Raises:
            SpecedgeError: As `sample.best`.
        """
        for logits, depth in zip(drafted.logits, self.depths, strict=True):
            best(logits, f"draft logits for position {len(history) + depth}")  # refuses NaN
        kept: dict[int, int] = {ROOT: ROOT}  # node of the shape -> node of the tree
        for node, parent in enumerate(shape.parents):
            if parent in kept and in_graph.allows(drafted.ids[node]):
                kept[node] = len(kept) - 1
        nodes = [node for node in kept if node != ROOT]
        tree = TokenTree(tuple(drafted.ids[node] for node in nodes), tuple(kept[shape.parents[node]] for node in nodes))
        if not in_graph.draws:
            sure = [float(1.0 / np.exp(row - row.max()).sum()) for row in drafted.logits] if tree.is_chain else []
            return Proposal(tree, confidence=tuple(sure[: len(tree.tokens)]))
        rows = {kept[node]: row for row, node in enumerate((ROOT, *self.fed)) if node in kept}

        def law(node: int) -> Law:
            return in_graph.law(widen(drafted.logits[rows[node]]), history)

        return Proposal(tree, law)


class Unrolling:
    """All that a drafter can draft in one call."""

    def __init__(self, role: Role, cache: KVCache, tables: Array, open_session: Callable[[Graph], OpenGraph]) -> None:
        made = [Expansion(record, role, cache, tables, open_session) for record in role.unrolled]
        self._expansions = sorted(made, key=lambda expansion: len(expansion.shape.parents))

    @property
    def seconds(self) -> float:
        """Time spent inside the graphs so far."""
        return sum(expansion.seconds for expansion in self._expansions)

    @property
    def shapes(self) -> tuple[TreeShape, ...]:
        """What is drafted in one call, the smallest first."""
        return tuple(expansion.shape for expansion in self._expansions)

    def covering(self, shape: TreeShape) -> Expansion | None:
        """The smallest expansion that begins with `shape`, node for node; None if there is none."""
        size = len(shape.parents)
        for expansion in self._expansions:
            if (expansion.shape.parents[:size], expansion.shape.ranks[:size]) == (shape.parents, shape.ranks):
                return expansion
        return None
