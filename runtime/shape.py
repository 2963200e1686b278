"""The shape of a draft tree before its tokens are known: which nodes there are, and the best one for a measured drafter."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby, pairwise
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from specedge.errors import SpecedgeError
from specedge.runtime.law import Floats
from specedge.runtime.tree import ROOT, Nodes, children_of

Ranks = tuple[int, ...]  # one per depth, down a path
Counts = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Nodes 0, 1, ... level by level, each with its parent (-1: the root) and its rank there: 0 is the drafter's first choice.

    A drafter that chooses by score drafts its choice number `rank`; one that draws at random draws as many children as a
    node has, in order. Drafts may be fewer where a drafter runs out of tokens.
    """

    parents: Nodes
    ranks: Ranks
    paths: tuple[Ranks, ...] = field(init=False, repr=False, compare=False)
    """The ranks on the way to each node."""
    levels: tuple[Nodes, ...] = field(init=False, repr=False, compare=False)
    """The nodes of each depth, from 1 on."""
    _children: tuple[Nodes, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        children = _families(self.parents, self.ranks)
        paths: list[Ranks] = []
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            paths.append((*(paths[parent] if parent != ROOT else ()), rank))
        lengths = [len(path) for path in paths]
        if lengths != sorted(lengths):
            raise ValueError(f"tree: expected nodes level by level, found depths {lengths}")
        levels = tuple(tuple(level) for _, level in groupby(range(len(paths)), lengths.__getitem__))
        for name, made in (("paths", tuple(paths)), ("levels", levels), ("_children", children)):
            object.__setattr__(self, name, made)

    @classmethod
    def chain(cls, gamma: int) -> "TreeShape":
        """`gamma` nodes, each after the one before."""
        return _chain(gamma)

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]], top_k: int | None = None, heads: int | None = None) -> "TreeShape":
        """The shape of the usual list of paths (Cai et al. 2024, "Medusa", arXiv 2401.10774, section 2.1.2).

        Each path names one node by the ranks on the way to it, in any order: [[0], [1], [0, 0]] is a root with two children,
        the first of which has one. Every prefix of a path must be listed.

        Raises:
            ValueError: A path is empty, listed twice, not made of ranks in [0, `top_k`), longer than `heads`, or has a
                prefix that is not listed; the message names it.
        """
        known: set[Ranks] = set()
        for given in paths:
            path = _checked(given, top_k, heads)
            if path in known:
                raise ValueError(f"tree: path {list(path)} is listed twice")
            known.add(path)
        ordered = sorted(known, key=lambda path: (len(path), path))
        nodes: dict[Ranks, int] = {(): ROOT}
        for node, path in enumerate(ordered):
            if path[:-1] not in nodes:
                raise ValueError(f"tree: path {list(path)} needs path {list(path[:-1])}, which is not listed; add it")
            nodes[path] = node
        return cls(tuple(nodes[path[:-1]] for path in ordered), tuple(path[-1] for path in ordered))

    @property
    def is_chain(self) -> bool:
        return self == _chain(len(self.parents))

    @property
    def depth(self) -> int:
        """Length of the longest path: tokens that one round may accept."""
        return len(self.levels)

    @property
    def gap(self) -> Ranks | None:
        """The first path that is left out though a sibling of higher rank is there; None if ranks are 0, 1, ... everywhere."""
        for siblings in self._children:
            for rank, node in enumerate(siblings):
                if self.ranks[node] != rank:
                    return (*self.paths[node][:-1], rank)
        return None

    def children(self, node: int) -> tuple[int, ...]:
        """Nodes that follow `node` (-1: the root), by rank."""
        return self._children[node + 1]

    def within(self, depth: int, nodes: int) -> "TreeShape":
        """The shape without nodes deeper than `depth`, and of the others the first `nodes`."""
        return _within(self, max(depth, 0), max(nodes, 0))


def read_shape(file: Path) -> TreeShape:
    """The shape in a JSON file: a list of paths.

    Raises:
        SpecedgeError: The file cannot be read or its paths are no tree.
    """
    paths = read_json(file)
    if not isinstance(paths, list) or not all(isinstance(path, list) for path in paths) or not paths:
        raise SpecedgeError(f"{file}: expected a JSON list of paths such as [[0], [1], [0, 0]]")
    try:
        return TreeShape.from_paths(paths)
    except ValueError as error:
        raise SpecedgeError(f"{file}: {error!s:.300}") from None


def read_json(file: Path) -> Any:
    """What a JSON file holds.

    Raises:
        SpecedgeError: The file cannot be read or is no JSON.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SpecedgeError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise SpecedgeError(f"{file}: is no JSON ({error!s:.300})") from None


def best_shape(acceptance: Sequence[Sequence[float]], nodes: int) -> TreeShape:
    """The tree of at most `nodes` nodes that is expected to have most accepted, by dynamic programming.

    `acceptance[depth][rank]` is the chance that, once a node's parent (at `depth`, 0 for the root) is reached, the child of
    that rank is the one accepted; so a row sums to 1 at most. A node's children have ranks 0, 1, ... without gaps. After
    Chen et al. 2024, "Sequoia" (arXiv 2402.12374, section 3.1), there with one row for all depths; here each depth has its
    own, and a depth without a row drafts nothing.

    Raises:
        ValueError: A chance is not in [0, 1], a row sums to more than 1, or `nodes` is negative.
    """
    if nodes < 0:
        raise ValueError(f"nodes: expected 0 or more, found {nodes}")
    for depth, row in enumerate(acceptance):
        if not all(0.0 <= chance <= 1.0 for chance in row) or sum(row) > 1.0 + 1e-9:
            raise ValueError(f"acceptance[{depth}]: expected chances that sum to 1 at most, found {list(row)}")
    expected, shares = np.zeros(nodes + 1), list[Counts]()  # of a reached node's children, by their budget; by depth
    for depth in reversed(range(min(len(acceptance), nodes))):
        row = acceptance[depth][: nodes - depth]  # the nodes above take one each, so do siblings of lower ranks
        expected, split = _best_split(row, expected)
        shares.insert(0, split)
    paths: list[Ranks] = []
    pending: list[tuple[Ranks, int]] = [((), nodes)]
    while pending:
        path, budget = pending.pop()
        for rank, by_budget in enumerate(shares[len(path)] if len(path) < len(shares) else ()):
            if not (share := int(by_budget[budget])):
                break
            paths.append((*path, rank))
            pending.append(((*path, rank), share - 1))
            budget -= share
    return TreeShape.from_paths(paths)


def tokens_per_round(shape: TreeShape, acceptance: Sequence[Sequence[float]]) -> float:
    """Tokens a round is expected to emit: 1 + the sum over nodes of the product of chances along their paths."""
    chances: list[float] = []
    for path, parent in zip(shape.paths, shape.parents, strict=True):
        depth, rank = len(path) - 1, path[-1]
        known = depth < len(acceptance) and rank < len(acceptance[depth])
        chances.append((chances[parent] if parent != ROOT else 1.0) * (acceptance[depth][rank] if known else 0.0))
    return 1.0 + sum(chances)


def _best_split(row: Sequence[float], deeper: Floats) -> tuple[Floats, Counts]:
    """How a budget of nodes is best shared among the children of a reached node.

    The tokens it then promises [nodes + 1], by budget, and how many nodes the child of each rank takes [ranks, nodes + 1] of a
    budget that is left for it and those behind it, 0 where it is best to stop. `deeper` are the children's own promises.
    """
    nodes = len(deeper) - 1
    best, shares = np.zeros(nodes + 1), np.zeros((len(row), nodes + 1), np.intp)
    for rank in reversed(range(len(row))):  # a child of this rank before the best of those behind it, or none from here on
        own = np.concatenate(([0.0], row[rank] * (1.0 + deeper[:-1])))  # of a child that takes 0, 1, ... nodes
        left = sliding_window_view(np.concatenate((np.full(nodes, -np.inf), best)), nodes + 1)[:, ::-1]
        promises = own + left  # [budget, taken]: left[budget, taken] = best[budget - taken]
        promises[:, 0] = 0.0
        shares[rank] = promises.argmax(axis=1)  # of equals the fewest
        best = promises.max(axis=1)
    return best, shares


def _checked(given: Sequence[int], top_k: int | None, heads: int | None) -> Ranks:
    try:
        path = tuple(index(rank) for rank in given)
        if any(isinstance(rank, bool) for rank in given):
            raise TypeError
    except TypeError:
        raise ValueError(f"tree: path {given!r}: expected a list of ranks") from None
    if not path:
        raise ValueError("tree: an empty path; the root itself is not listed")
    if min(path) < 0 or (top_k is not None and max(path) >= top_k):
        raise ValueError(f"tree: path {list(path)}: expected ranks from 0 to {'...' if top_k is None else top_k - 1}")
    if heads is not None and len(path) > heads:
        raise ValueError(f"tree: path {list(path)} is {len(path)} deep, expected at most {heads}, a head per depth")
    return path


def _families(parents: Nodes, ranks: Ranks) -> tuple[Nodes, ...]:
    """The children of the root and of every node, once parents and ranks are known to be such."""
    numbers = len(parents) == len(ranks) and all(type(number) is int for number in (*parents, *ranks))
    if not numbers or any(not ROOT <= parent < node for node, parent in enumerate(parents)):
        raise ValueError(f"tree: expected an earlier parent and a rank per node, found {parents} and {ranks}")
    children = children_of(parents)
    rising = all(ranks[one] < ranks[other] for siblings in children for one, other in pairwise(siblings))
    if not rising or min(ranks, default=0) < 0:
        raise ValueError(f"tree: expected ranks from 0 on, rising among siblings, found {ranks} under {parents}")
    return children


@lru_cache(maxsize=64)
def _chain(gamma: int) -> TreeShape:
    return TreeShape(tuple(range(ROOT, gamma - 1)), (0,) * gamma)


@lru_cache(maxsize=256)
def _within(shape: TreeShape, depth: int, nodes: int) -> TreeShape:
    kept = min(sum(len(level) for level in shape.levels[:depth]), nodes)
    return TreeShape(shape.parents[:kept], shape.ranks[:kept])
