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
_TOP = 5


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
    """A role's logits against transformers in float32, over the ids that can be emitted.

    `tokens` rows were compared. Top-5 agreement is the share of the reference's five likeliest ids that are among the graph's;
    overlap the mean of sum(min(p, q)) over ids, which is how often the reference would accept a token that this model drafts at
    temperature 1 (Leviathan et al. 2023, Corollary 3.6).
    """

    tokens: int
    logits_max_abs: float
    kl_mean: float
    top1_agreement: float
    top5_agreement: float
    overlap: float
    perplexity: float
    reference_perplexity: float


@dataclass(frozen=True, slots=True)
class GroupError:
    """Tensors of a role that serve alike and are stored alike: how, in how many bits, and |stored - exact| / |exact|."""

    role: str
    part: str
    scheme: str
    method: str
    tensors: int
    bits_per_weight: float
    relative_error: float


@dataclass(frozen=True, slots=True)
class DeviceAgreement:
    """A graph of a role on a device against what else computes it: rows compared, cosines of their logits, and so on."""

    role: str
    graph: str
    against: str
    rows: int
    cosine_mean: float
    cosine_min: float
    kl_mean: float
    top1_differs: int
    near_ties: int
    kv_error: float | None  # unknown where another program computed the logits expected


@dataclass(frozen=True, slots=True)
class LayerNoise:
    """How far a device's residual stream entering a block (the number of blocks: behind the last) is from the CPU's."""

    block: int
    snr_db: float


@dataclass(frozen=True, slots=True)
class Report:
    """What `validate` measured; `notes` says what it did not."""

    checks: tuple[Check, ...]
    quality: Quality
    groups: tuple[GroupError, ...]
    width_agreement: float
    near_ties: int
    greedy_match: float
    notes: tuple[str, ...]
    devices: tuple[DeviceAgreement, ...] = ()
    layers: tuple[LayerNoise, ...] = ()

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, object]:
        """The keys of the JSON contract (docs/contract.md)."""
        return {
            "passed": self.passed,
            "checks": [asdict(check) | {"passed": check.passed} for check in self.checks],
            **asdict(self.quality),
            "groups": [asdict(group) for group in self.groups],
            "width_agreement": self.width_agreement,
            "near_ties": self.near_ties,
            "greedy_match": self.greedy_match,
            "notes": list(self.notes),
            "devices": [asdict(device) for device in self.devices],
            "layers": [asdict(layer) for layer in self.layers],
        }


class Meter:
    """Sums up how far logits are from the true ones."""

    def __init__(self) -> None:
        self.rows = self._text = 0
        self._worst = 0.0
        self._kl = self._overlap = self._top1 = self._top5 = self._surprise = self._true_surprise = 0.0

    def add(self, truth: Logits, found: Logits, following: Sequence[int]) -> None:
        """Logits [T, V], and the tokens that follow the first rows in the text, if any do."""
        log_p, log_q = log_softmax(truth), log_softmax(found)
        self.rows += len(truth)
        self._worst = float(np.maximum(self._worst, np.abs(found - truth).max(initial=0.0)))  # keeps a NaN
        p = np.exp(log_p)
        self._kl += float((p * (log_p - log_q)).sum())
        self._overlap += float(np.minimum(p, np.exp(log_q)).sum())
        self._top1 += int((truth.argmax(1) == found.argmax(1)).sum())
        five = min(_TOP, truth.shape[1])
        ours, theirs = (np.argpartition(-logits, five - 1, 1)[:, :five] for logits in (found, truth))
        self._top5 += float((ours[:, :, None] == theirs[:, None, :]).any(2).mean(1).sum())
        at = np.arange(len(following)), np.asarray(following, np.int64)
        self._text += len(following)
        self._surprise -= float(log_q[at].sum())
        self._true_surprise -= float(log_p[at].sum())

    def quality(self) -> Quality:
        """The means of all rows."""
        rows, text = max(self.rows, 1), max(self._text, 1)
        return Quality(
            tokens=self.rows,
            logits_max_abs=self._worst,
            kl_mean=self._kl / rows,
            top1_agreement=self._top1 / rows,
            top5_agreement=self._top5 / rows,
            overlap=self._overlap / rows,
            perplexity=float(np.exp(self._surprise / text)),
            reference_perplexity=float(np.exp(self._true_surprise / text)),
        )


def mean_kl(truth: Logits, found: Logits) -> float:
    """Mean over rows of KL(softmax(truth) || softmax(found)), in nats."""
    log_p, log_q = log_softmax(truth), log_softmax(found)
    return float((np.exp(log_p) * (log_p - log_q)).sum(axis=1).mean())


def log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
