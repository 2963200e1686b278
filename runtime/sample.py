"""How tokens are drawn, and from a row of logits to the law they are drawn from."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real

import numpy as np
from numpy.typing import NDArray

from specedge.errors import SpecedgeError
from specedge.runtime.law import Floats, Ids, Law

Logits = NDArray[np.floating]  # [V]

GREEDY_TEMPERATURE = 1e-4
GREEDY_TOP_P = 1e-9

_MARGIN = 1e-4  # a float32 weight exp(x) with x in [-100, 0] is off by less than this share
_FIRST_GUESS = 300.0
_HOTTEST = 1e30  # temperatures whose inverse is a normal float32


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; the default is greedy.

    `temperature` 0 (or up to 1e-4), `top_k` 1 and `top_p` up to 1e-9 all mean greedy. `top_k` 0 or beyond the
    vocabulary, `top_p` 1 and `min_p` 0 are off. `seed` has 64 bits.

    The rest changes logits before that, greedy or not, in this order: `repetition_penalty` r divides positive logits of
    tokens that occur in prompt or answer and multiplies negative ones (Keskar et al. 2019, arXiv 1909.05858; 1 is off);
    `frequency_penalty` is subtracted once per occurrence in the answer, `presence_penalty` once if there is any (0 is off);
    `logit_bias` is added; `banned_ids` never come out. Ids of the tokenizer only.

    Raises:
        ValueError: A value is out of range or not a number; the message starts with the parameter's name.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    banned_ids: Collection[int] = field(default=(), hash=False)

    def __post_init__(self) -> None:
        beyond_one = math.nextafter(1.0, 2.0)
        _check("temperature", self.temperature, Real, "a finite number >= 0", 0.0, math.inf)
        _check("top_k", self.top_k, Integral, "an integer >= 0", 0, math.inf)
        _check("top_p", self.top_p, Real, "a number in [0, 1]", 0.0, beyond_one)
        _check("seed", self.seed, Integral, "an integer in [0, 2^64)", 0, 2**64)
        _check("min_p", self.min_p, Real, "a number in [0, 1]", 0.0, beyond_one)
        _check("repetition_penalty", self.repetition_penalty, Real, "a number in [0.01, 100]", 0.01, 100.0 + 1e-9)
        _check("presence_penalty", self.presence_penalty, Real, "a number in [-100, 100]", -100.0, 100.0 + 1e-9)
        _check("frequency_penalty", self.frequency_penalty, Real, "a number in [-100, 100]", -100.0, 100.0 + 1e-9)
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias: expected a mapping of token id to number, found {self.logit_bias!r}")
        for token, bias in self.logit_bias.items():
            _check("logit_bias", token, Integral, "token ids >= 0 as keys", 0, math.inf)
            _check("logit_bias", bias, Real, "numbers in [-1000, 1000] (banned_ids rules an id out)", -1000.0, 1000.0 + 1e-9)
        if not isinstance(self.banned_ids, Collection) or isinstance(self.banned_ids, str | bytes):
            raise ValueError(f"banned_ids: expected a collection of token ids, found {self.banned_ids!r}")
        for token in self.banned_ids:
            _check("banned_ids", token, Integral, "token ids >= 0", 0, math.inf)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # what is changed later was never checked
        object.__setattr__(self, "banned_ids", tuple(self.banned_ids))

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE or self.top_k == 1 or self.top_p <= GREEDY_TOP_P

    @property
    def penalises(self) -> bool:
        """Whether the law of a token depends on which tokens came before, beyond what the logits know."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def filtered(scores: Logits, sampling: Sampling, where: str = "logits") -> Law:
    """The law that a token is drawn from, given its row of (penalised) logits.

    Greedy gives all mass to `best`. Otherwise, in this order:

    1. temperature: weight = exp((logit - largest logit) / temperature);
    2. top-k: the k largest logits stay, equal logits by lower id;
    3. top-p: in order of falling weight (equal weights by lower id) the shortest prefix stays whose sum is >= top_p
       times the sum of all weights that top-k left, so the token that crosses the line stays;
    4. min-p: weights >= min_p (the largest is 1) stay (Nguyen et al. 2024, arXiv 2407.01082);
    5. one division by the sum of the weights that stayed.

    All of it in float64, except that a long row is first narrowed in float32: tokens that top-p or min-p cannot keep are
    set aside, and their mass counts in step 3 with an error below 1e-6 of the whole.

    Raises:
        SpecedgeError: A logit is NaN or +inf, or all are -inf; the message says `where` and names the first such id.
    """
    peak = best(scores, where)
    if sampling.greedy:
        return Law.certain(peak)
    with np.errstate(over="ignore", under="ignore"):  # far below the largest logit a weight is 0
        return _filtered(scores, peak, sampling)


def _filtered(scores: Logits, peak: int, sampling: Sampling) -> Law:
    largest = float(scores[peak])
    kept: Ids | None = None
    aside = 0.0
    if 0 < sampling.top_k < len(scores):
        kept = top(scores, sampling.top_k)
    elif sampling.top_p < 1.0 or sampling.min_p > 0.0:
        kept, aside = _narrow(scores, largest, sampling)
    weights = (scores if kept is None else scores[kept]).astype(np.float64)
    weights -= largest
    weights /= float(sampling.temperature)
    np.exp(weights, out=weights)
    if sampling.top_p < 1.0:
        nucleus = _nucleus(weights, float(sampling.top_p), aside)
        weights, kept = weights[nucleus], nucleus if kept is None else kept[nucleus]
    if sampling.min_p > 0.0:
        likely = np.flatnonzero(weights >= float(sampling.min_p))
        weights, kept = weights[likely], likely if kept is None else kept[likely]
    weights /= weights.sum()
    return Law.of(weights) if kept is None else Law(kept, weights)


def best(scores: Logits, where: str = "logits") -> int:
    """The id with the largest logit, the lowest of equals.

    Raises:
        SpecedgeError: As `filtered`.
    """
    if scores.ndim != 1 or not len(scores):
        raise ValueError(f"{where}: expected one row [V] that is not empty, found shape {scores.shape}")
    peak = int(scores.argmax())  # NaN counts as largest here
    if not math.isfinite(scores[peak]):
        first = int((np.isnan(scores) | np.isposinf(scores)).argmax())
        raise SpecedgeError(
            f"{where}: {scores[first]} at id {first}, expected finite numbers (-inf only for some ids); "
            "the graph overflowed or its weights are damaged: run spec-export validate"
        )
    return peak


def top(scores: Logits, count: int) -> Ids:
    """The ids of the `count` largest logits, ascending; of equal ones the lower ids."""
    if count >= len(scores):
        return np.arange(len(scores))
    return _largest(scores, count, np.partition(scores, -count)[-count])


def likeliest(scores: Logits, count: int, where: str = "logits") -> list[int]:
    """The ids of the `count` largest logits, the largest first, equal logits by lower id; fewer where the others are -inf.

    Raises:
        SpecedgeError: As `filtered`.
    """
    best(scores, where)
    found = top(scores, count)
    found = found[(-scores[found]).argsort(kind="stable")]
    possible: list[int] = found[scores[found] > -np.inf].tolist()
    return possible


def log_probability(logits: Logits, token: int) -> float:
    """log softmax(logits)[token], in nats: what the model itself says, before penalties, temperature and filters."""
    row = logits.astype(np.float64)
    row -= row.max()
    with np.errstate(under="ignore"):
        return float(row[token] - np.log(np.exp(row).sum()))


def _narrow(scores: Logits, largest: float, sampling: Sampling) -> tuple[Ids | None, float]:
    """The ids that top-p or min-p may keep, found in float32, and the weight of all others; (None, 0) for all of them."""
    if scores.dtype != np.float32 or sampling.temperature > _HOTTEST:
        return None, 0.0
    weights = scores - np.float32(largest)
    weights *= np.float32(1.0 / sampling.temperature)
    np.exp(weights, out=weights)
    floor = float(sampling.min_p)
    if sampling.top_p == 1.0:
        return _at_least(weights, floor)
    mass, spare = float(weights.sum()), 1.0 - float(sampling.top_p)
    safe = spare * mass / (4 * len(weights))  # all below this line holds a quarter of what top-p may drop, or less
    for cut in (_FIRST_GUESS * safe, safe):  # fewer candidates are cheaper, and mostly enough
        kept, aside = _at_least(weights.copy() if cut > safe else weights, max(cut, floor))
        if cut == safe or aside <= spare * mass / 2:
            break
    return kept, aside


def _at_least(weights: NDArray[np.float32], cut: float) -> tuple[Ids, float]:
    """Indices of all weights of `cut` or more, float32 errors allowed for, and the sum of the others; zeroes the former."""
    kept = np.flatnonzero(weights >= np.float32(cut * (1.0 - _MARGIN)))
    weights[kept] = 0.0
    return kept, float(weights.sum())


def _nucleus(weights: Floats, top_p: float, aside: float) -> Ids:
    """Indices of the weights that top-p keeps; `aside` is the weight of tokens too small to be among them."""
    mass = float(weights.sum()) + aside
    spare = max((1.0 - top_p) * mass - aside, 0.0)  # all below this line holds less than half of it: only the rest is sorted
    candidates = weights[np.flatnonzero(weights >= spare / (2 * len(weights)))]
    candidates.sort()
    falling = candidates[::-1]
    count = min(int(falling.cumsum().searchsorted(top_p * mass)) + 1, len(falling))
    return _largest(weights, count, falling[count - 1])


def _largest(values: Logits, count: int, cutoff: np.floating) -> Ids:
    """Indices of the `count` largest values, of which `cutoff` is the smallest; equals of the cutoff by lower index."""
    indices = np.flatnonzero(values >= cutoff)
    surplus = len(indices) - count
    if surplus == 0:
        return indices
    ties = np.flatnonzero(values[indices] == cutoff)
    return np.delete(indices, ties[-surplus:])


def _check(name: str, value: object, kind: type, expected: str, start: float, end: float) -> None:
    """Refuse a `value` outside [start, end); a bool is not a number here."""
    number = float(value) if isinstance(value, np.floating) else value  # a float32 would round the end
    if isinstance(value, bool) or not isinstance(value, kind) or not start <= number < end:  # type: ignore[operator]  # a number by now
        raise ValueError(f"{name}: expected {expected}, found {value!r}")
