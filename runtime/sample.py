"""From a row of logits to the distribution p that is drawn from, and from p and a random number to a token."""

import math
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np
from numpy.typing import NDArray

from specedge.errors import SpecedgeError

Logits = NDArray[np.floating]  # [V]
Law = NDArray[np.float64]  # [V], sums to 1

GREEDY_TEMPERATURE = 1e-4
GREEDY_TOP_P = 1e-9


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; the default is greedy.

    `temperature` 0 (or up to 1e-4), `top_k` 1 and `top_p` up to 1e-9 all mean greedy. `top_k` 0 or beyond the
    vocabulary and `top_p` 1 are off. `seed` has 64 bits.

    Raises:
        ValueError: A value is out of range or not a number; the message starts with the parameter's name.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, Real, "a finite number >= 0", math.inf)
        _check("top_k", self.top_k, Integral, "an integer >= 0", math.inf)
        _check("top_p", self.top_p, Real, "a number in [0, 1]", math.nextafter(1.0, 2.0))
        _check("seed", self.seed, Integral, "an integer in [0, 2^64)", 2**64)

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE or self.top_k == 1 or self.top_p <= GREEDY_TOP_P


def probabilities(logits: Logits, sampling: Sampling, allowed: int | None, where: str = "logits") -> Law:
    """The distribution [V] that a token is drawn from; ids >= `allowed` (padded rows) are not read and get 0.

    Greedy gives one-hot of `best`. Otherwise, in this order, all in float64:

    1. temperature: weight = exp((logit - largest logit) / temperature);
    2. top-k: the k largest logits stay, equal logits by lower id;
    3. top-p: in order of falling weight (equal weights by lower id) the shortest prefix stays whose sum is >= top_p
       times the sum of all weights that top-k left, so the token that crosses the line stays;
    4. one division by the sum of the weights that stayed.

    Raises:
        SpecedgeError: A logit is NaN or +inf, or all are -inf; the message says `where` and names the first such id.
    """
    p = np.zeros(len(logits))
    peak = best(logits, allowed, where)
    if sampling.greedy:
        p[peak] = 1.0
        return p
    scores = logits[:allowed]
    kept: slice | NDArray[np.intp] = slice(len(scores))
    if 0 < sampling.top_k < len(scores):
        cutoff = np.partition(scores, -sampling.top_k)[-sampling.top_k]
        kept = _largest(scores, sampling.top_k, cutoff)
    weights = scores[kept].astype(np.float64)
    weights -= np.float64(scores[peak])
    weights /= float(sampling.temperature)
    np.exp(weights, out=weights)
    if sampling.top_p < 1.0:
        nucleus = _nucleus(weights, float(sampling.top_p))
        weights, kept = weights[nucleus], nucleus if isinstance(kept, slice) else kept[nucleus]
    weights /= weights.sum()
    p[kept] = weights
    return p


def best(logits: Logits, allowed: int | None, where: str = "logits") -> int:
    """The id below `allowed` with the largest logit, the lowest of equals.

    Raises:
        SpecedgeError: As `probabilities`.
    """
    if logits.ndim != 1 or (allowed is not None and allowed < 1):
        raise ValueError(f"{where}: expected one row [V] and allowed >= 1, found shape {logits.shape} and {allowed}")
    scores = logits[:allowed]
    peak = int(scores.argmax())  # NaN counts as largest here
    if not math.isfinite(scores[peak]):
        first = int((np.isnan(scores) | np.isposinf(scores)).argmax())
        raise SpecedgeError(
            f"{where}: {scores[first]} at id {first}, expected finite numbers (-inf only for some ids); "
            "the graph overflowed or its weights are damaged: run spec-export validate"
        )
    return peak


def draw(p: Law, u: float) -> int:
    """The token of `p` [V] at `u` in [0, 1]: inverse CDF in id order, summed one by one in float64.

    It is the first id whose cumulative sum exceeds u * (sum of p), so `p` need not sum to exactly 1 and an id with
    p = 0 is never drawn; where rounding leaves no such id, it is the last one that adds to the sum.

    Raises:
        ValueError: `p` has no mass or a NaN, or `u` is out of range.
    """
    cumulative = np.cumsum(p, dtype=np.float64)
    mass = float(cumulative[-1])
    if not 0.0 < mass < math.inf or not 0.0 <= u <= 1.0:
        raise ValueError(f"draw: expected p with a positive sum and u in [0, 1], found sum {mass} and u {u}")
    token = int(cumulative.searchsorted(u * mass, side="right"))
    return token if token < len(cumulative) else int(cumulative.searchsorted(mass, side="left"))


def _nucleus(weights: Law, top_p: float) -> NDArray[np.intp]:
    """Indices of the weights that top-p keeps."""
    mass = float(weights.sum())
    # All below this line holds less than half of what top-p may drop: the nucleus lies above, and only that is sorted.
    candidates = weights[np.flatnonzero(weights >= (1.0 - top_p) * mass / (2 * len(weights)))]
    candidates.sort()
    falling = candidates[::-1]
    count = min(int(falling.cumsum().searchsorted(top_p * mass)) + 1, len(falling))
    return _largest(weights, count, falling[count - 1])


def _largest(values: Logits, count: int, cutoff: np.floating) -> NDArray[np.intp]:
    """Indices of the `count` largest values, of which `cutoff` is the smallest; equals of the cutoff by lower index."""
    indices = np.flatnonzero(values >= cutoff)
    surplus = len(indices) - count
    if surplus == 0:
        return indices
    ties = np.flatnonzero(values[indices] == cutoff)
    return np.delete(indices, ties[-surplus:])


def _check(name: str, value: object, kind: type, expected: str, end: float) -> None:
    """Refuse a `value` outside [0, end); a bool is not a number here."""
    if isinstance(value, bool) or not isinstance(value, kind) or not 0 <= value < end:  # type: ignore[operator]  # a number by now
        raise ValueError(f"{name}: expected {expected}, found {value!r}")
