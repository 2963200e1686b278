"""A distribution over token ids, and what drawing, rejecting and leaving out do to it."""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ids = NDArray[np.intp]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Law:
    """`p[i]` is the probability of `ids[i]`, ids ascending; an id that is not listed has none.

    What is drawn from need not sum to 1: `draw` takes shares of the sum.
    """

    ids: Ids
    p: Floats

    @classmethod
    def of(cls, p: ArrayLike) -> "Law":
        """The law of an array [V], one probability per id."""
        values = np.asarray(p, np.float64)
        return cls(_first_ids(len(values)), values)

    @classmethod
    def certain(cls, token: int) -> "Law":
        """All mass on one token."""
        return cls(np.array([token]), np.ones(1))

    @property
    def mass(self) -> float:
        return float(self.p.sum())

    def dense(self, vocabulary: int) -> Floats:
        """The probabilities as an array [V]."""
        return self.on(_first_ids(vocabulary))

    def at(self, token: int) -> float:
        """The probability of one token.

        Raises:
            ValueError: It is NaN.
        """
        index = token if self._is_dense else int(self.ids.searchsorted(token))
        found = float(self.p[index]) if index < len(self.ids) and self.ids[index] == token else 0.0
        if math.isnan(found):
            raise ValueError(f"law: expected probabilities, found nan at id {token}")
        return found

    def on(self, ids: Ids) -> Floats:
        """The probabilities of `ids`, ascending."""
        if ids is self.ids:
            return self.p
        found = np.zeros(len(ids))
        if not len(self.ids):
            return found
        if self._is_dense:
            shared = int(ids.searchsorted(len(self.ids)))
            found[:shared] = self.p[ids[:shared]]
            return found
        index = self.ids.searchsorted(ids)
        index[index == len(self.ids)] = 0
        listed = self.ids[index] == ids
        found[listed] = self.p[index[listed]]
        return found

    def draw(self, u: float) -> int:
        """The token at `u` in [0, 1]: inverse CDF in id order, summed one by one in float64.

        It is the first id whose cumulative sum exceeds u * mass, so an id with p = 0 is never drawn; where rounding leaves
        no such id, it is the last one that adds to the sum.

        Raises:
            ValueError: There is no mass or a NaN, or `u` is out of range.
        """
        cumulative = np.cumsum(self.p)
        mass = float(cumulative[-1]) if len(cumulative) else 0.0
        if not 0.0 < mass < math.inf or not 0.0 <= u <= 1.0:
            raise ValueError(f"draw: expected p with a positive sum and u in [0, 1], found sum {mass} and u {u}")
        index = int(cumulative.searchsorted(u * mass, side="right"))
        if index == len(cumulative):
            index = int(cumulative.searchsorted(mass, side="left"))
        return int(self.ids[index])

    def excess(self, other: "Law", weight: float = 1.0) -> "Law":
        """max(0, weight * p - other), not normalised."""
        left = self.p * weight if weight != 1.0 else self.p.copy()
        left -= other.on(self.ids)
        return Law(self.ids, np.maximum(left, 0.0, out=left))

    def without(self, token: int) -> "Law":
        """The law with this token left out, not normalised."""
        p = self.p.copy()
        p[self.ids == token] = 0.0
        return Law(self.ids, p)

    def normalised(self) -> "Law | None":
        """The same shares with sum 1; None if there is no mass.

        Raises:
            ValueError: A probability is NaN.
        """
        mass = self.mass
        if math.isnan(mass):
            raise ValueError(f"law: expected probabilities, found nan at id {self.ids[np.isnan(self.p).argmax()]}")
        return Law(self.ids, self.p / mass) if mass > 0.0 else None

    @property
    def _is_dense(self) -> bool:
        """Whether the ids are 0, 1, 2, ..."""
        return len(self.ids) > 0 and int(self.ids[-1]) == len(self.ids) - 1


@lru_cache(maxsize=4)
def _first_ids(count: int) -> Ids:
    ids = np.arange(count)
    ids.flags.writeable = False
    return ids
