"""How a rule's choice is made inside a graph: what the host adds to the drafter's logits, so that the largest sum is chosen."""

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from specedge.runtime.law import Ids, Law
from specedge.runtime.sample import Logits
from specedge.runtime.sampler import Sampler

Noise = npt.NDArray[np.float32]
# (position of the root, depths of the parents, ids [Vd]) -> Gumbel noise [parents, Vd]
Gumbels = Callable[[int, Tokens[int], Ids], Noise]

_MOST = np.float32(100.0)  # |Gumbel noise| is below 40, but for a number of exactly 0 or 1


class InGraph:
    """Choices of one request made by argmax over logits + noise, the k best being k draws without replacement.

    Noise is the biases, and temperature times Gumbel noise where a rule draws (Gumbel-max; Kool et al. 2019, arXiv
    1903.06059). q is then the law of the temperature and the biases alone: filters would change neither the law of the text
    nor, for a proposal given, raise its acceptance.
    """

    def __init__(self, sampler: Sampler, gumbels: Gumbels | None = None, draws: bool = False) -> None:
        self.draws = draws
        """Whether tokens are drawn from `law`; otherwise they are a point mass."""
        self._sampler = Sampler(replace(sampler.sampling, top_k=0, top_p=1.0, min_p=0.0), sampler.allowed, 0)
        self._gumbels = gumbels
        self._shift: Noise | None = None
        self._banned = frozenset(sampler.sampling.banned_ids)

    def noise(self, history: Tokens[int], depths: Tokens[int], ids: Ids, least: float) -> Noise:
        """[parents, Vd] for parents of these depths (0: the root) and a drafter whose ids are the target's `ids`.

        `least` stands for minus infinity.
        """
        if self._shift is None:
            self._shift = np.full(int(ids[-1]) + 1, -np.inf, np.float32)
            scores = self._sampler.scores(np.zeros(len(self._shift), np.float32), history, ())
            self._shift[: len(scores)] = scores
            self._shift = np.maximum(self._shift[ids], np.float32(least))
        if self._gumbels is None:
            return np.repeat(self._shift[None], len(depths), axis=0)
        noise = self._gumbels(len(history) - 1, depths, ids)
        np.clip(noise, -_MOST, _MOST, out=noise)
        noise *= np.float32(self._sampler.sampling.temperature)
        noise += self._shift
        return noise

    def law(self, logits: Logits, history: Tokens[int]) -> Law:
        """q of a token drawn with these logits [V]."""
        return self._sampler.law(logits, history, (), f"draft logits behind position {len(history) - 1}")

    def allows(self, token: int) -> bool:
        return token < self._sampler.allowed and token not in self._banned


def gumbel(u: npt.NDArray[np.floating]) -> Noise:
    """Gumbel noise of uniform numbers in [0, 1): -log(-log(1 - u))."""
    with np.errstate(divide="ignore"):
        noise: Noise = (-np.log(-np.log1p(-u))).astype(np.float32, copy=False)
    return noise
