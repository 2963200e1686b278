"""What to draft this round: always the same, or as many tokens as measured acceptance and known costs make the best of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from specedge.runtime.shape import TreeShape

# Acceptance expected before anything was seen: of a drafter without evidence, then of lookups by the length of the match,
# 1, 2-3, 4-7, 8-15, 16-31 and longer (SmolLM2-135M on the built-in prompts, chat and copy alike, within 0.1).
_RATE_BEFORE = (0.5, 0.2, 0.6, 0.8, 0.9, 0.95, 0.98)
_PRIOR_TRIALS = 2.0  # what was expected weighs as much as two trials
_DECAY = 0.95  # weight of the past when a new trial arrives: a memory of about twenty trials
_MARGIN = 1.05  # speculation must promise this much over plain: the costs are known no better
_PROBE = 2  # tokens of a probe
_PROBE_AFTER = 16  # plain rounds before a drafter that costs time is probed; doubled after each vain probe
_PROBE_MOST = 256


class Control(Protocol):
    """Chooses what is drafted; told afterwards what became of it. `evidence` is the proposal's (`tree.Proposal`)."""

    def ask(self, depth: int, nodes: int) -> TreeShape:
        """The tree to request from the drafter, at most so deep and of so many nodes."""

    def take(self, evidence: int, drafted: int) -> int:
        """How many of `drafted` proposed tokens to verify."""

    def observe(self, evidence: int, agreed: int, compared: int) -> None:
        """Of `compared` proposed tokens in a row, verified or not, the first `agreed` were what the target emitted."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same tree or chain, smaller only where room or the drafter's supply ends."""

    shape: TreeShape

    def ask(self, depth: int, nodes: int) -> TreeShape:
        return self.shape.within(depth, nodes)

    def take(self, evidence: int, drafted: int) -> int:
        return drafted

    def observe(self, evidence: int, agreed: int, compared: int) -> None:
        return


@dataclass(slots=True)
class _Acceptance:
    """A decaying estimate of the chance that a proposed token is accepted, given that all before it were."""

    rate_before: float
    successes: float = 0.0
    trials: float = 0.0

    def add(self, accepted: bool) -> None:
        self.successes = self.successes * _DECAY + accepted
        self.trials = self.trials * _DECAY + 1.0

    @property
    def rate(self) -> float:
        return (self.successes + self.rate_before * _PRIOR_TRIALS) / (self.trials + _PRIOR_TRIALS)


class Adaptive:
    """The chain of the largest expected speed, E(gamma) / (d gamma + v(gamma + 1)) (docs/contract.md), plain decoding included.

    A function of this request's own acceptance and the costs given, nothing else: with a drawn drafter the choice may not
    depend on a clock (docs/contract.md). `verify_cost` maps a width to its time over width 1, `draft_cost` a chain's length
    to the time of drafting it in the same unit. A drafter of no cost is asked every round, and its proposals are compared with the text
    even when they are not verified, so its estimates never age. A costly one is probed now and then.

    Acceptance is estimated by the length of the match behind a token: a draft at depth j of a lookup that matched n tokens
    rests on n + j of them.
    """

    def __init__(self, verify_cost: Callable[[int], float], draft_cost: Callable[[int], float], widest: int) -> None:
        self._verify_cost, self._draft_cost, self._widest = verify_cost, draft_cost, widest
        self._free = draft_cost(1) == 0.0
        self._acceptance = [_Acceptance(rate) for rate in _RATE_BEFORE]
        self._plain_rounds, self._patience = 0, _PROBE_AFTER

    def ask(self, depth: int, nodes: int) -> TreeShape:
        return TreeShape.chain(self._gamma(max(min(depth, nodes, self._widest - 1), 0)))

    def _gamma(self, most: int) -> int:
        if self._free:
            return most
        gamma = self._best(0, most)
        if gamma > 0:
            self._patience = _PROBE_AFTER
            return gamma
        self._plain_rounds += 1
        if self._plain_rounds < self._patience:
            return 0
        self._plain_rounds, self._patience = 0, min(self._patience * 2, _PROBE_MOST)
        return min(_PROBE, most)

    def take(self, evidence: int, drafted: int) -> int:
        return self._best(evidence, drafted) if self._free else drafted

    def observe(self, evidence: int, agreed: int, compared: int) -> None:
        if agreed:  # not in vain
            self._patience = _PROBE_AFTER
        for depth in range(min(agreed + 1, compared)):
            self._estimate(evidence, depth).add(depth < agreed)

    def _best(self, evidence: int, most: int) -> int:
        """The most promising gamma up to `most`; plain decoding unless another promises _MARGIN over it."""
        best, best_speed = 0, _MARGIN
        expected = reached = 1.0
        for gamma in range(1, most + 1):
            reached *= self._estimate(evidence, gamma - 1).rate
            expected += reached
            speed = expected / (self._draft_cost(gamma) + self._verify_cost(gamma + 1))
            if speed > best_speed:
                best, best_speed = gamma, speed
        return best

    def _estimate(self, evidence: int, depth: int) -> _Acceptance:
        length = evidence + depth if evidence else 0
        return self._acceptance[min(length.bit_length(), len(self._acceptance) - 1)]
