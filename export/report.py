"""What `validate` reports: checks with their limits, and how far logits are from the true ones."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]

LOGITS_LIMIT = {"float32": 1e-3, "float16": 0.1}
"""Largest |logit difference| of a float graph to the reference, and of a wide step to one-token steps."""
ACTIVATION_KL_LIMIT = 0.05
"""A quantised graph against its own stored weights in float32: what int8 activations (accuracy_level 4) may cost."""


@dataclass(frozen=True, slots=True)
class Check:
    """One measured number and its limit; a NaN never passes."""

    name: str
    graph: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.value <= self.limit


@dataclass(frozen=True, slots=True)
class Quality:
    """A role's logits against transformers in float32, over the ids that can be emitted."""

    logits_max_abs: float
    kl_mean: float
    top1_agreement: float
    perplexity: float


@dataclass(frozen=True, slots=True)
class Report:
    """What `validate` measured; `notes` says what it did not."""

    checks: tuple[Check, ...]
    quality: Quality
    width_agreement: float
    near_ties: int
    greedy_match: float
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, object]:
        """The keys of the JSON contract (docs/contract.md)."""
        return {
            "passed": self.passed,
            "checks": [asdict(check) | {"passed": check.passed} for check in self.checks],
            **asdict(self.quality),
            "width_agreement": self.width_agreement,
            "near_ties": self.near_ties,
            "greedy_match": self.greedy_match,
            "notes": list(self.notes),
        }


def measure_quality(truth: Logits, found: Logits, text: Sequence[int], start: range) -> Quality:
    """Of logits [T, V] against the true ones; `start` are the rows that begin `text`, for the perplexity."""
    following = np.asarray([*text[1 : len(start)]])
    surprise = -log_softmax(found[: len(following)])[np.arange(len(following)), following]
    return Quality(
        logits_max_abs=float(np.abs(found - truth).max()),
        kl_mean=mean_kl(truth, found),
        top1_agreement=float((truth.argmax(1) == found.argmax(1)).mean()),
        perplexity=float(np.exp(surprise.mean())) if len(following) else 1.0,
    )


def mean_kl(truth: Logits, found: Logits) -> float:
    """Mean over rows of KL(softmax(truth) || softmax(found)), in nats."""
    log_p, log_q = log_softmax(truth), log_softmax(found)
    return float((np.exp(log_p) * (log_p - log_q)).sum(axis=1).mean())


def log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
