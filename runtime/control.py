"""What to draft this round: always the same, or as many tokens as measured acceptance and known costs make the best of."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil
from typing import Protocol

from specedge.runtime.chances import Chances
from specedge.runtime.shape import TreeShape

# How sure a drafter is of each token of a chain, as far as it is drafted -> how many tokens of it would be best to verify
Weigh = Callable[[Sequence[float]], int]

_MARGIN = 1.05  # speculation must promise this much over plain: the costs are known no better
_PROBE_SHARE = 0.01  # of the time of plain rounds that probes of a drafter may take
_LONGEST_WAIT = 4  # times as rare they become while they are in vain
_DECAY = 0.95  # of what rounds of drafting earned and took, when another round comes
_OPENING = 2.0  # rounds that earn what is expected, before any was seen


class Control(Protocol):
    """Chooses what is drafted; told afterwards what became of it.

    `confidence` is the proposal's (`tree.Proposal`): one number a token, or none at all.
    """

    @property
    def weigh(self) -> Weigh | None:
        """What a drafter asks that goes token by token; None where it need not ask."""

    def ask(self, depth: int, nodes: int) -> TreeShape:
        """The tree to request from the drafter, at most so deep and of so many nodes."""

    def take(self, confidence: Sequence[float], drafted: int, drawn: bool) -> int:
        """How many of `drafted` proposed tokens to verify: all, if they were drawn at random."""

    def observe(self, confidence: Sequence[float], agreed: int, compared: int) -> None:
        """Of `compared` proposed tokens in a row, verified or not, the first `agreed` were what the target emitted."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same tree or chain, smaller only where room or the drafter's supply ends."""

    shape: TreeShape

    @property
    def weigh(self) -> None:
        return None

    def ask(self, depth: int, nodes: int) -> TreeShape:
        return self.shape.within(depth, nodes)

    def take(self, confidence: Sequence[float], drafted: int, drawn: bool) -> int:
        return drafted

    def observe(self, confidence: Sequence[float], agreed: int, compared: int) -> None:
        return


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of a round by its number of drafts, 0 first, over that of a plain round: `draft` of drafting them, `verify` of
    the step that reads them and of what else a round takes.
    """

    draft: tuple[float, ...]
    verify: tuple[float, ...]


class Adaptive:
    """The chain of the largest expected speed, E(gamma) / (d(gamma) + v(gamma + 1)), or none (docs/contract.md).

    A function of this request's own acceptance, the drafter's confidence and the costs given, nothing else: with a drawn
    drafter the choice may not depend on a clock (docs/contract.md). `acceptance` is a profile's (`chances.Chances`).

    A drafter of no cost is asked every round, and its proposals are compared with the text even when they are not verified,
    so its estimates never age. A costly one is asked as long as its rounds earn what they take, and then probed now and then.
    One that goes token by token (`stepwise`) asks before every token whether a longer chain is worth it.
    """

    def __init__(self, costs: Costs, acceptance: Sequence[float] = (), stepwise: bool = False) -> None:
        self._draft, self._verify, self._stepwise = costs.draft, costs.verify, stepwise
        self._longest = len(costs.verify) - 1
        self._free = not any(costs.draft)
        self._chances = Chances(self._longest, acceptance)
        self._most = self._least = self._drafted = self._taken = 0  # of this round
        probe = costs.draft[1] + costs.verify[1] - 1.0 if self._longest else 0.0
        self._patience = ceil(max(probe, 0.0) / _PROBE_SHARE)  # plain rounds before a probe
        self._waits = self._patience  # the same, longer after every probe in vain
        self._plain_rounds = 0
        promised = self._speed_of(self._chances.rates())
        self._earned, self._spent = _OPENING * (promised if acceptance else max(promised, _MARGIN)), _OPENING
        self._hopeless = self._speed_of([1.0] * self._longest) < _MARGIN  # even if all was accepted

    def ask(self, depth: int, nodes: int) -> TreeShape:
        self._most = 0 if self._hopeless else max(min(depth, nodes, self._longest), 0)
        self._least = self._drafted = self._taken = 0
        gamma = self._gamma() if self._most else 0
        if gamma and not self._free:
            self._drafted = 1  # even if nothing comes of it
        return TreeShape.chain(gamma)

    def _gamma(self) -> int:
        if self._free:
            return self._most
        if self._earned >= self._spent and (gamma := self._most if self._stepwise else self._best((), 0, self._most, 0)):
            self._plain_rounds = 0
            return gamma
        self._plain_rounds += 1
        self._earned, self._spent = self._earned * _DECAY, self._spent * _DECAY  # so that a probe decides
        if self._plain_rounds <= self._waits:
            return 0
        self._plain_rounds, self._least = 0, 1
        self._waits = min(2 * self._waits, _LONGEST_WAIT * self._patience)
        return self._most if self._stepwise else self._best((), 1, self._most, 0)

    @property
    def weigh(self) -> Weigh | None:
        return self._weigh if self._stepwise else None

    def _weigh(self, confidence: Sequence[float]) -> int:
        """The best length of a chain whose last token could still be left out: with or without that, or longer."""
        self._drafted = len(confidence)
        return self._best(confidence, max(len(confidence) - 1, self._least), self._most, len(confidence))

    def take(self, confidence: Sequence[float], drafted: int, drawn: bool) -> int:
        self._drafted = max(self._drafted, drafted)  # also one that was left out took its time
        self._taken = drafted if drawn else self._best(confidence, 0, drafted, drafted)
        return self._taken

    def observe(self, confidence: Sequence[float], agreed: int, compared: int) -> None:
        self._chances.learn(confidence, agreed, compared)
        if self._drafted:
            self._earned = self._earned * _DECAY + min(agreed, self._taken) + 1
            self._spent = self._spent * _DECAY + self._draft[self._drafted] + self._verify[self._taken]
            if agreed:  # look again soon
                self._plain_rounds = self._waits = self._patience

    def _best(self, confidence: Sequence[float], least: int, most: int, drafted: int) -> int:
        """The most promising of `least` to `most` tokens, when so many are drafted already; plain decoding unless another
        promises _MARGIN over it."""
        best, best_speed = 0, _MARGIN / (self._draft[drafted] + self._verify[0]) if least == 0 else 0.0
        expected = reached = 1.0
        for gamma, rate in enumerate(islice(self._chances.rates(confidence), most), start=1):
            reached *= rate
            expected += reached
            speed = expected / (self._draft[max(gamma, drafted)] + self._verify[gamma])
            if gamma >= least and speed > best_speed:
                best, best_speed = gamma, speed
        return best

    def _speed_of(self, rates: Iterable[float]) -> float:
        """Of the best chain whose tokens are accepted at these rates."""
        expected = reached = 1.0
        speed = 0.0
        for draft, verify, rate in zip(self._draft[1:], self._verify[1:], rates, strict=True):
            reached *= rate
            expected += reached
            speed = max(speed, expected / (draft + verify))
        return speed
