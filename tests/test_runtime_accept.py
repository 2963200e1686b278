"""Laws of the acceptance rules: what comes out has exactly the target's distribution, and the known wrong rules fail."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chisquare

from specedge.errors import SpecedgeError
from specedge.runtime import accept
from specedge.runtime.accept import Accepted, accept_greedy, accept_point_mass, accept_token_rule, rejection_sample
from specedge.runtime.philox import Purpose, Uniform, uniform
from specedge.runtime.sample import Law, Logits, Sampling, best, draw, probabilities
from specedge.runtime.tree import Proposal, Rows, TokenTree

LAST = math.nextafter(1.0, 0.0)
Tokens = tuple[int, ...]
LawOf = Mapping[Tokens, float]  # tokens emitted -> probability
Judge = Callable[[TokenTree, Rows, int, Uniform], Accepted]  # a rule bound to everything but the round

SAMPLINGS = [
    Sampling(1.0),
    Sampling(0.7, top_k=2),
    Sampling(1.3, top_p=0.8),
    Sampling(0.9, top_k=3, top_p=0.9),
]


def logits_of(*p: float) -> Logits:
    with np.errstate(divide="ignore"):
        return np.log(np.array(p)).astype(np.float32)


class Bigger:
    """A language model of the worst kind: every prefix has logits of its own."""

    def __init__(self, vocab: int, seed: int) -> None:
        self.vocab, self.seed = vocab, seed

    def __call__(self, prefix: Tokens) -> Logits:
        return np.random.default_rng([self.seed, len(prefix), *prefix]).normal(0, 1.5, self.vocab).astype(np.float32)


# ---- exact integration over the random numbers


class Unknown(Exception):
    """A number that the integration has not fixed yet."""


def integrate[T](run: Callable[[Uniform], T], cuts: Callable[[int, Purpose, int], list[float]]) -> dict[T, float]:
    """Exact law of `run` over independent uniform numbers: each is split at all `cuts` where an answer may change."""
    law: dict[T, float] = defaultdict(float)
    pending: list[tuple[dict[tuple[int, Purpose, int], float], float]] = [({}, 1.0)]
    while pending:
        known, mass = pending.pop()

        def numbers(seed: int, position: int, purpose: Purpose, index: int = 0) -> float:
            if (position, purpose, index) not in known:  # noqa: B023  # called before the loop goes on
                raise Unknown(position, purpose, index)
            return known[position, purpose, index]  # noqa: B023

        try:
            law[run(numbers)] += mass
        except Unknown as missing:
            ends = sorted({0.0, 1.0, *(cut for cut in cuts(*missing.args) if 0.0 < cut < 1.0)})
            pending += [({**known, missing.args: (a + b) / 2}, mass * (b - a)) for a, b in pairwise(ends)]
    return law
