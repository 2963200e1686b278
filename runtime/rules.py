"""The rules by name: how a drafter chooses its tokens, and how they are judged, for one request."""

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specedge.errors import UsageError
from specedge.runtime import accept
from specedge.runtime.accept import Accepted
from specedge.runtime.in_graph import Gumbels, InGraph, Noise, gumbel
from specedge.runtime.law import Floats, Ids, Law
from specedge.runtime.philox import Numbers, Purpose, draft_uniforms, uniforms
from specedge.runtime.sample import Logits, likeliest
from specedge.runtime.sampler import Sampler
from specedge.runtime.tree import Laws, Proposal


@dataclass(frozen=True, slots=True)
class Children:
    """Tokens chosen to follow a node, and the law they were drawn from, if by chance."""

    tokens: tuple[int, ...]
    law: Law | None = None


# (the drafter's logits after `history` and `path`, history, path, number of the first child, ranks) -> children, one per rank
# or fewer
Choose = Callable[[Logits, Tokens[int], Tokens[int], int, Tokens[int]], Children]


class Rows(Protocol):
    """Logits [V] by number: an array [rows, V], or anything that makes a row when it is asked for."""

    def __len__(self) -> int: ...
    def __getitem__(self, row: int, /) -> Logits: ...


# (proposal, logits of the verify rows: row 0 the root, row n + 1 node n; history, ending with the root) -> what stays
Judge = Callable[[Proposal, Rows, Tokens[int]], Accepted]


@dataclass(frozen=True, slots=True)
class Rule:
    """How one request drafts and judges.

    `in_graph` is how a graph that drafts in one call makes the choice, None where only the host can.
    """

    name: str
    choose: Choose
    judge: Judge
    in_graph: InGraph | None

    @property
    def chain(self) -> bool:
        """Whether it judges chains only."""
        return self.name in CHAIN_RULES


CHAIN_RULES = ("token", "block")
"""Those that judge chains only."""

# Temperatures at which float32 adds noise and logits with enough places left: beyond, the host draws.
_COLDEST, _HOTTEST = 0.05, 100.0

RULES = (*CHAIN_RULES, "recursive", "point-mass", "coupled", "lossy-typical")
"""Names a request may ask for; greedy requests need none."""


def make_rule(name: str | None, sampler: Sampler) -> Rule:
    """The rule called `name` over the laws of `sampler`; None is `recursive`, which on a chain is the token rule.

    A greedy request follows the target's argmax under every name. Proposals without q (prompt lookup) are point masses under
    the rules that judge by q.

    Raises:
        UsageError: There is no such rule.
    """
    if name is not None and name not in RULES:
        raise UsageError(f"rule {name!r}: expected one of {', '.join(RULES)}")
    by_score = InGraph(sampler) if not sampler.looks_back else None  # what looks back would have to see the drafts
    if sampler.sampling.greedy:
        return Rule("greedy", _best(sampler), _greedy(sampler), by_score)
    drawn, best = _drawn(sampler), _best(sampler)
    by_chance = by_score if by_score and _COLDEST <= sampler.sampling.temperature <= _HOTTEST else None
    drawn_in_graph = by_chance and InGraph(sampler, _draft_gumbels(sampler), draws=True)
    match name:
        case "token":
            return Rule(name, drawn, _by_q(sampler, accept.accept_token), drawn_in_graph)
        case "block":
            return Rule(name, drawn, _by_q(sampler, accept.accept_block), drawn_in_graph)
        case "point-mass":
            return Rule(name, best, _by_p(sampler, accept.accept_point_mass), by_score)
        case "lossy-typical":
            return Rule(name, best, _by_p(sampler, accept.accept_typical), by_score)
        case "coupled":
            noise = _Noise(sampler)
            coupled_in_graph = by_chance and InGraph(sampler, _shared_gumbels(sampler, noise))
            return Rule(name, _coupled(sampler, noise), _by_p(sampler, accept.accept_coupled, noise), coupled_in_graph)
    return Rule("recursive", drawn, _by_q(sampler, accept.accept_recursive), drawn_in_graph)


def _draft_gumbels(sampler: Sampler) -> Gumbels:
    """Noise of its own for every parent."""

    def gumbels(history: Tokens[int], depths: Tokens[int], ids: Ids) -> Noise:
        seed, root = sampler.sampling.seed, len(history) - 1
        rows = [draft_uniforms(seed, root, parent, len(ids)) for parent in range(len(depths))]
        return gumbel(np.stack(rows))

    return gumbels


def _shared_gumbels(sampler: Sampler, noise: "_Noise") -> Gumbels:
    """The noise of the race that the target will hold too: arriving first is having the largest log q + Gumbel noise."""

    def gumbels(history: Tokens[int], depths: Tokens[int], ids: Ids) -> Noise:
        numbers = noise.numbers(history)
        known = ids[: int(ids.searchsorted(sampler.allowed))]  # the rest is padding
        rows = np.zeros((len(depths), len(ids)), np.float32)
        for row, depth in zip(rows, depths, strict=True):
            row[: len(known)] = gumbel(numbers.noise(depth, known))
        return rows

    return gumbels


def _best(sampler: Sampler) -> Choose:
    """The drafter's likeliest tokens."""

    def choose(logits: Logits, history: Tokens[int], path: Tokens[int], first: int, ranks: Tokens[int]) -> Children:
        where = _position("draft logits", history, path)
        if not sampler.leaves(logits, history, path):
            return Children(())
        if max(ranks) == 0:
            return Children((sampler.best(logits, history, path, where),))
        by_rank = likeliest(sampler.scores(logits, history, path), max(ranks) + 1, where)
        return Children(tuple(by_rank[rank] for rank in ranks if rank < len(by_rank)))

    return choose


def _drawn(sampler: Sampler) -> Choose:
    """Draws from q without replacement."""

    def choose(logits: Logits, history: Tokens[int], path: Tokens[int], first: int, ranks: Tokens[int]) -> Children:
        if not sampler.leaves(logits, history, path):
            return Children(())
        numbers = Numbers(sampler.sampling.seed, len(history) - 1)
        law = sampler.law(logits, history, path, _position("draft logits", history, path))
        left: Law | None = law
        tokens: list[int] = []
        for node in range(first, first + len(ranks)):
            if tokens:
                assert left is not None
                left = left.without(tokens[-1]).normalised()
                if left is None:
                    break
            assert left is not None
            tokens.append(left.draw(numbers.draft(node)))
        return Children(tuple(tokens), law)

    return choose


class _Noise:
    """`philox.uniforms` that remembers whole positions: siblings, the target and the next round race with the same numbers."""

    def __init__(self, sampler: Sampler) -> None:
        self._seed = sampler.sampling.seed
        self._everything = np.arange(sampler.allowed)
        self._known: dict[int, Floats] = {}

    def numbers(self, history: Tokens[int]) -> Numbers:
        """Those of the round after `history`; what it can no longer ask for is forgotten."""
        root = len(history) - 1
        self._known = {position: numbers for position, numbers in self._known.items() if position > root}
        return Numbers(self._seed, root, uniforms=self._uniforms)

    def _uniforms(self, seed: int, position: int, purpose: Purpose, ids: Ids) -> Floats:
        if len(ids) * 4 < len(self._everything):  # what top-k or top-p left is made faster than everything
            return uniforms(seed, position, purpose, ids)
        if position not in self._known:
            self._known[position] = uniforms(seed, position, purpose, self._everything)
        return self._known[position][ids]


def _coupled(sampler: Sampler, noise: _Noise) -> Choose:
    """The first to arrive in the race that the target will hold too."""

    def choose(logits: Logits, history: Tokens[int], path: Tokens[int], first: int, ranks: Tokens[int]) -> Children:
        if not sampler.leaves(logits, history, path):
            return Children(())
        law = sampler.law(logits, history, path, _position("draft logits", history, path))
        return Children(accept.race(law, noise.numbers(history).noise(len(path), law.ids), len(ranks)))

    return choose


def _greedy(sampler: Sampler) -> Judge:
    def judge(proposal: Proposal, logits: Rows, history: Tokens[int]) -> Accepted:
        _check_rows(proposal, logits)

        def best(node: int) -> int:
            path = proposal.tree.path(node)
            return sampler.best(logits[node + 1], history, path, _position("logits", history, path))

        return accept.accept_greedy(proposal.tree, best)

    return judge


def _by_p(sampler: Sampler, rule: Callable[..., Accepted], noise: _Noise | None = None) -> Judge:
    def judge(proposal: Proposal, logits: Rows, history: Tokens[int]) -> Accepted:
        laws = _laws(sampler, proposal, logits, history)
        return rule(proposal.tree, laws, noise.numbers(history) if noise else Numbers(sampler.sampling.seed, len(history) - 1))

    return judge


def _by_q(sampler: Sampler, rule: Callable[..., Accepted]) -> Judge:
    without_q = _by_p(sampler, accept.accept_point_mass)

    def judge(proposal: Proposal, logits: Rows, history: Tokens[int]) -> Accepted:
        if proposal.q is None:
            return without_q(proposal, logits, history)
        laws = _laws(sampler, proposal, logits, history)
        return rule(proposal.tree, laws, proposal.q, Numbers(sampler.sampling.seed, len(history) - 1))

    return judge


def _laws(sampler: Sampler, proposal: Proposal, logits: Rows, history: Tokens[int]) -> Laws:
    """The target's law after a node, made when it is asked for."""
    _check_rows(proposal, logits)

    def law(node: int) -> Law:
        path = proposal.tree.path(node)
        return sampler.law(logits[node + 1], history, path, _position("logits", history, path))

    return law


def _check_rows(proposal: Proposal, logits: Rows) -> None:
    nodes = len(proposal.tree.tokens)
    if len(logits) <= nodes:
        raise ValueError(f"logits: expected a row for the root and {nodes} nodes, found {len(logits)} rows")


def _position(what: str, history: Tokens[int], path: Tokens[int]) -> str:
    return f"{what} for position {len(history) + len(path)}"
