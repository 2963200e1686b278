"""Laws of one request: its `Sampling` applied to rows of logits, each after a text of its own."""

from collections.abc import Iterable
from collections.abc import Sequence as Tokens

import numpy as np
from numpy.typing import NDArray

from specedge.errors import SpecedgeError, UsageError
from specedge.runtime.constraint import Constraint, Mask
from specedge.runtime.law import Ids, Law
from specedge.runtime.sample import Logits, Sampling, best, filtered, log_probability

Path = tuple[int, ...]


class Sampler:
    """Turns rows of logits into laws. A row's text is the request's history and the `path` of drafted tokens behind it.

    So penalties see what was emitted and a node's own ancestors, never a rejected token or a cousin, and p and q alike:
    rows of a draft model with fewer ids go the same way. Ids from `allowed` on are padding and have no probability, nor have
    those that the `constraint` leaves out of an answer.

    Raises:
        UsageError: `sampling` names an id that is not allowed, or bans all of them.
    """

    def __init__(
        self,
        sampling: Sampling,
        allowed: int,
        prompt_length: int,
        constraint: Constraint | None = None,
        ends: Iterable[int] = (),
    ) -> None:
        self.sampling, self.constraint, self._ends = sampling, constraint, frozenset(ends)
        self.allowed = allowed
        self._prompt_length = prompt_length
        for name, ids in (("logit_bias", sampling.logit_bias), ("banned_ids", sampling.banned_ids)):
            for token in ids:
                if token >= allowed:
                    raise UsageError(f"{name}: id {token}, expected 0..{allowed - 1}, the ids this model can emit")
        self._banned = _ids(sampling.banned_ids)
        if len(self._banned) >= allowed:
            raise UsageError(f"banned_ids: all {allowed} ids are banned, nothing could be emitted")
        self._biased = _ids(sampling.logit_bias)
        self._bias = np.array([sampling.logit_bias[int(token)] for token in self._biased], np.float32)
        self._changes = sampling.penalises or len(self._banned) > 0 or len(self._biased) > 0 or constraint is not None
        self._masks: dict[Path, Mask] = {}  # of one history
        self._masked = -1  # its length
        self._known = 0  # so much of the history is counted below
        self._occurs = np.zeros(allowed, np.bool_) if sampling.penalises else None
        self._emitted = np.zeros(allowed, np.int64) if sampling.penalises else None

    @property
    def looks_back(self) -> bool:
        """Whether the law of a token depends on which tokens came before, beyond what the logits know."""
        return self.sampling.penalises or self.constraint is not None

    def leaves(self, logits: Logits, history: Tokens[int], path: Tokens[int]) -> bool:
        """Whether a constraint leaves any token that a drafter's row gives a chance to."""
        return self.constraint is None or not np.isneginf(self.scores(logits, history, path)).all()

    def may_emit(self, ids: Ids) -> bool:
        """Whether any of `ids` is allowed and not banned."""
        return bool((~np.isin(ids[ids < self.allowed], self._banned)).any())

    def law(self, logits: Logits, history: Tokens[int], path: Tokens[int] = (), where: str = "logits") -> Law:
        """The law of the token after `history` and `path`, given its logits [V].

        Raises:
            SpecedgeError: As `sample.filtered`, or a constraint allows nothing there.
        """
        return filtered(self._some(self.scores(logits, history, path), history, path), self.sampling, where)

    def best(self, logits: Logits, history: Tokens[int], path: Tokens[int] = (), where: str = "logits") -> int:
        """The likeliest token there, the lowest id of equals.

        Raises:
            SpecedgeError: As `sample.filtered`.
        """
        return best(self._some(self.scores(logits, history, path), history, path), where)

    def log_probability(self, logits: Logits, token: int) -> float:
        """What the model itself gave `token`, in nats: penalties and filters left out, padding too."""
        return log_probability(logits[: self.allowed], token)

    def scores(self, logits: Logits, history: Tokens[int], path: Tokens[int]) -> Logits:
        """Logits of the allowed ids, penalised, biased and banned; the row itself where nothing changes."""
        row = logits[: self.allowed]
        if not self._changes:
            return row
        row = row.copy()
        if self._occurs is not None and self._emitted is not None:
            self._count(history)
            self._penalise(row, self._occurs, self._emitted, path)
        known = self._biased < len(row)
        row[self._biased[known]] += self._bias[known]
        banned = self._banned[self._banned < len(row)]
        if len(banned) == len(row):
            raise UsageError(f"banned_ids: all {len(row)} ids of one of the models are banned, it could not choose any")
        row[banned] = -np.inf
        if self.constraint is not None:
            mask = self._mask(history, path)[: len(row)]
            row[: len(mask)][~mask] = -np.inf
            row[len(mask) :] = -np.inf
        return row

    def _mask(self, history: Tokens[int], path: Tokens[int]) -> Mask:
        """What the constraint allows there, and behind an end of text anything; asked once for each node of a round."""
        assert self.constraint is not None
        if len(history) != self._masked:
            self._masks, self._masked = {}, len(history)
        if (key := tuple(path)) not in self._masks:
            if self._ends.isdisjoint(path):
                mask = self.constraint.allowed([*history[self._prompt_length :], *path])
                self._masks[key] = np.asarray(mask, np.bool_)
            else:
                self._masks[key] = np.ones(self.allowed, np.bool_)
        return self._masks[key]

    def _some(self, row: Logits, history: Tokens[int], path: Tokens[int]) -> Logits:
        """A row of scores in which a constraint has left something."""
        if self.constraint is not None and np.isneginf(row).all():
            place = len(history) + len(path) - self._prompt_length
            raise SpecedgeError(f"constraint: allows no token after {place} tokens of the answer; let it end there")
        return row

    def _penalise(self, row: Logits, occurs: NDArray[np.bool_], emitted: NDArray[np.int64], path: Tokens[int]) -> None:
        sampling, drafted = self.sampling, np.array(path, np.intp)
        was, before = occurs[drafted], emitted[drafted]
        occurs[drafted] = True  # as if it had been emitted, for this row only
        np.add.at(emitted, drafted, 1)
        seen = np.flatnonzero(occurs[: len(row)])
        if sampling.repetition_penalty != 1.0:
            penalty = np.float32(sampling.repetition_penalty)
            with np.errstate(over="ignore"):
                row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
        if sampling.frequency_penalty or sampling.presence_penalty:
            count = emitted[seen]
            row[seen] -= (sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)).astype(row.dtype)
        occurs[drafted], emitted[drafted] = was, before

    def _count(self, history: Tokens[int]) -> None:
        assert self._occurs is not None and self._emitted is not None
        for position in range(self._known, len(history)):
            self._occurs[history[position]] = True
            if position >= self._prompt_length:
                self._emitted[history[position]] += 1
        self._known = len(history)


def _ids(tokens: Iterable[int]) -> Ids:
    return np.unique(np.array(sorted(tokens), np.intp))
