"""What acceptance a request may expect of a chain: what was known before, and what became of its drafts so far."""

from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

_UNKNOWN = 0.5  # acceptance expected of a drafter of which nothing is known
# How many trials of this request weigh as much as what was expected: by a guess or the drafter's own word, by a profile
_SAID, _MEASURED = 2.0, 6.0
_DECAY = 0.95  # weight of the past when a new trial arrives: a memory of about twenty trials
_CONFIDENCES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.925, 0.965)  # between these a drafter's word is held against one record


@dataclass(slots=True)
class _Record:
    """A decaying estimate of the chance that a proposed token is accepted, given that all before it were."""

    successes: float = 0.0
    trials: float = 0.0

    def add(self, accepted: bool) -> None:
        self.successes = self.successes * _DECAY + accepted
        self.trials = self.trials * _DECAY + 1.0

    def rate(self, expected: float, weight: float) -> float:
        return (self.successes + expected * weight) / (self.trials + weight)


class Chances:
    """Chances of up to `longest` tokens in a row, each given that those before it were accepted.

    By confidence where the drafter states one: its word holds until its record speaks against it. By position behind that:
    a position is expected to differ from the one before as a profile had it (`acceptance`, the share of chains accepted as far
    as each), until it has a record of its own.
    """

    def __init__(self, longest: int, acceptance: Sequence[float] = ()) -> None:
        rates = [min(after / before, 1.0) if before else 0.0 for before, after in pairwise((1.0, *acceptance))][:longest]
        self._expected = [*rates, *(rates[-1:] or [_UNKNOWN]) * (longest - len(rates))]
        self._weight = _MEASURED if rates else _SAID
        self._by_position = [_Record() for _ in range(longest)]
        self._by_confidence = [_Record() for _ in range(len(_CONFIDENCES) + 1)]

    def rates(self, confidence: Sequence[float] = ()) -> Iterator[float]:
        """Of one token after the other, of which the first have this confidence."""
        surprise = 0.0  # of the position before
        for position, expected in enumerate(self._expected):
            if position < len(confidence):
                rate = self._record(confidence[position]).rate(confidence[position], _SAID)
            else:
                rate = self._by_position[position].rate(min(max(expected + surprise, 0.0), 1.0), self._weight)
            surprise = rate - expected
            yield rate

    def learn(self, confidence: Sequence[float], agreed: int, compared: int) -> None:
        """Of `compared` tokens in a row the first `agreed` were what the target emitted."""
        for position in range(min(agreed + 1, compared)):
            if position < len(confidence):
                self._record(confidence[position]).add(position < agreed)
            self._by_position[position].add(position < agreed)

    def _record(self, confidence: float) -> _Record:
        return self._by_confidence[bisect(_CONFIDENCES, confidence)]
