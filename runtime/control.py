"""How many tokens to draft this round: a fixed number, or what measured acceptance and known costs make the best of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from specedge.runtime.plan import speedup

_PRIOR_TRIALS = 2.0  # a new class of proposals starts as two trials at the prior rate
_DECAY = 0.9  # weight of the past when a new trial arrives: a memory of about ten trials
_MARGIN = 1.05  # speculation must promise this much over plain: the costs are known no better
_PROBE_AFTER = 16  # plain rounds before a drafter that costs time is asked again; doubled after each vain probe
_PROBE_MOST = 256


class Control(Protocol):
    """Chooses gamma; told afterwards what became of it."""

    def ask(self, room: int) -> int:
        """How many tokens to request from the drafter, at most `room`."""

    def take(self, evidence: int, drafted: int) -> int:
        """How many of `drafted` proposed tokens to verify."""

    def observe(self, evidence: int, agreed: int, compared: int) -> None:
        """`agreed` of the first `compared` proposed tokens were what the target emitted, verified or not."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always gamma tokens, fewer only where room or the drafter's supply ends."""

    gamma: int

    def ask(self, room: int) -> int:
        return min(self.gamma, room)

    def take(self, evidence: int, drafted: int) -> int:
        return drafted

    def observe(self, evidence: int, agreed: int, compared: int) -> None:
        return


@dataclass(slots=True)
class _Acceptance:
    """A decaying estimate of the chance that the next proposed token is accepted, given that all before it were."""

    successes: float
    trials: float

    def add(self, agreed: int, compared: int) -> None:
        for index in range(min(agreed + 1, compared)):
            self.successes = self.successes * _DECAY + (index < agreed)
            self.trials = self.trials * _DECAY + 1.0

    @property
    def rate(self) -> float:
        return self.successes / self.trials


class Adaptive:
    """The gamma of the largest expected speed, E(gamma) / (d gamma + v(gamma + 1)) (design.md §4.5), plain decoding included.

    A function of this request's own acceptance and the costs given, nothing else: with a drawn drafter the choice may not
    depend on a clock (design.md §4.4). `verify_cost` maps a width to its time over width 1; `draft_cost` is the time of one
    drafted token in the same unit. A drafter of no cost is asked every round, and its proposals are compared with the text
    even when they are not verified, so its estimate never ages. A costly one is probed now and then.
    """

    def __init__(
        self, verify_cost: Callable[[int], float], draft_cost: float, widest: int, prior: Callable[[int], float]
    ) -> None:
        self._verify_cost, self._draft_cost, self._widest, self._prior = verify_cost, draft_cost, widest, prior
        self._acceptance: dict[int, _Acceptance] = {}
        self._plain_rounds, self._patience = 0, _PROBE_AFTER

    def ask(self, room: int) -> int:
        most = min(room, self._widest - 1)
        if self._draft_cost == 0.0 or most <= 0:
            return max(most, 0)
        gamma = self._best(0, most)
        if gamma == 0:
            self._plain_rounds += 1
            if self._plain_rounds >= self._patience:
                self._plain_rounds, self._patience = 0, min(self._patience * 2, _PROBE_MOST)
                return min(2, most)
        else:
            self._patience = _PROBE_AFTER
        return gamma

    def take(self, evidence: int, drafted: int) -> int:
        return self._best(evidence, drafted) if self._draft_cost == 0.0 else drafted

    def observe(self, evidence: int, agreed: int, compared: int) -> None:
        self._estimate(evidence).add(agreed, compared)

    def _best(self, evidence: int, most: int) -> int:
        acceptance = self._estimate(evidence).rate

        def speed(gamma: int) -> float:
            promised = speedup(acceptance, gamma, self._draft_cost, self._verify_cost(gamma + 1))
            return promised if gamma == 0 else promised / _MARGIN

        return max(range(most + 1), key=speed)

    def _estimate(self, evidence: int) -> _Acceptance:
        if evidence not in self._acceptance:
            self._acceptance[evidence] = _Acceptance(self._prior(evidence) * _PRIOR_TRIALS, _PRIOR_TRIALS)
        return self._acceptance[evidence]
