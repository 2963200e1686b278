"""Drafted tokens under a root, and what a drafter proposes for a round."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import index

import numpy as np
from numpy.typing import NDArray

from specedge.runtime.law import Law

ROOT = -1

Nodes = tuple[int, ...]

# node (-1: the root) -> the law of the token after it; asked only for nodes that are reached, so that it may be lazy
Laws = Callable[[int], Law]


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Drafted tokens, node 0, 1, ..., each with the node it follows; parent -1 is the root, which is not stored.

    The verify step feeds the root in row 0 and node n in row n + 1. Parents come before their children, and siblings
    differ in token.

    Raises:
        ValueError: The tree breaks one of these; the message names the node.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    _children: tuple[Nodes, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(
                f"tree: expected a parent per token, found {len(self.tokens)} tokens and {len(self.parents)} parents"
            )
        seen: set[tuple[int, int]] = set()
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if not isinstance(token, int) or token < 0:
                raise ValueError(f"tree: tokens[{node}]: expected an int >= 0, found {token!r}")
            if not isinstance(parent, int) or not ROOT <= parent < node:
                raise ValueError(f"tree: parents[{node}]: expected -1 (the root) or an earlier node, found {parent!r}")
            if (parent, token) in seen:
                raise ValueError(
                    f"tree: tokens[{node}]: expected siblings to differ, found token {token} twice under node {parent}"
                )
            seen.add((parent, token))
        object.__setattr__(self, "_children", children_of(self.parents))

    @classmethod
    def chain(cls, tokens: Iterable[int]) -> "TokenTree":
        """Each token follows the one before; no tokens at all is a chain too."""
        drafted = tuple(index(token) for token in tokens)
        return cls(drafted, tuple(range(ROOT, len(drafted) - 1)))

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(ROOT, len(self.parents) - 1))

    def children(self, node: int) -> tuple[int, ...]:
        """Nodes that follow `node` (-1: the root), in the order they were drafted."""
        return self._children[node + 1]

    def child(self, node: int, token: int) -> int | None:
        """The node after `node` that carries `token`."""
        return next((child for child in self.children(node) if self.tokens[child] == token), None)

    def path(self, node: int) -> tuple[int, ...]:
        """Tokens from below the root to `node`."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(tokens))

    def follow(self, tokens: Tokens[int]) -> tuple[int, ...]:
        """The nodes that carry `tokens`, from below the root down, as far as there are any."""
        nodes: list[int] = []
        for token in tokens:
            child = self.child(nodes[-1] if nodes else ROOT, token)
            if child is None:
                break
            nodes.append(child)
        return tuple(nodes)

    @property
    def depths(self) -> tuple[int, ...]:
        """Distance from the root, per verify row (0 for the root itself): what a row's position adds to the root's."""
        return depths(self.parents)

    @property
    def depth_first(self) -> tuple[int, ...]:
        """Verify rows, the root's first, every row followed by its first child's: the first path comes in one piece."""
        return _depth_first(self.parents)

    @property
    def visible(self) -> NDArray[np.bool_]:
        """[nodes + 1, nodes + 1] over verify rows, read only: a row sees the root, its ancestors and itself."""
        return _visible(self.parents)


# What parents alone say is made once: a request drafts the same few trees over and over.


@lru_cache(maxsize=256)
def children_of(parents: Nodes) -> tuple[Nodes, ...]:
    """The nodes that follow the root, then those that follow node 0, 1, ..., each in order."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        children[parent + 1].append(node)
    return tuple(map(tuple, children))


@lru_cache(maxsize=256)
def _depth_first(parents: Nodes) -> Nodes:
    children, rows, pending = children_of(parents), list[int](), [ROOT]
    while pending:
        node = pending.pop()
        rows.append(node + 1)
        pending += reversed(children[node + 1])
    return tuple(rows)


@lru_cache(maxsize=256)
def _visible(parents: Nodes) -> NDArray[np.bool_]:
    visible = np.eye(len(parents) + 1, dtype=np.bool_)
    for row, parent in enumerate(parents, start=1):
        visible[row] |= visible[parent + 1]
    visible.flags.writeable = False
    return visible


@lru_cache(maxsize=256)
def depths(parents: Nodes) -> Nodes:
    """Distance from the root of the root itself and of every node."""
    known = [0]
    for parent in parents:
        known.append(known[parent + 1] + 1)
    return tuple(known)


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """What a drafter proposes for one round.

    `q` gives, for every node with children and the root (-1), the law that these were drawn from: in order, without
    replacement, after every filter. None if nothing was drawn at random, a point mass. `confidence` is, of a chain, how sure
    the drafter is that each token is accepted, if all before it are; empty if it says nothing.
    """

    tree: TokenTree
    q: Laws | None = None
    confidence: tuple[float, ...] = ()

    def first(self, count: int) -> "Proposal":
        """The proposal with its first `count` nodes only, a tree themselves."""
        if count >= len(self.tree.tokens):
            return self
        tree = TokenTree(self.tree.tokens[:count], self.tree.parents[:count])
        return replace(self, tree=tree, confidence=self.confidence[:count])
