"""Do wide and one-token steps, speculative and plain decoding, agree? (numerical losslessness)"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specedge.runtime.generate import Engine
from specedge.runtime.model import Sequence as ModelSequence
from specedge.runtime.sample import Sampling

Logits = npt.NDArray[np.float32]

TOKENS_PER_NEAR_TIE = 200
"""More near-ties than one in so many tokens are a failure."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Greedy speculative ids against plain ones: tokens compared, drafts verified, near-ties, and the first real difference."""

    tokens: int
    drafted: int
    near_ties: int
    mismatch: str | None

    @property
    def passed(self) -> bool:
        allowed = -(-self.tokens // TOKENS_PER_NEAR_TIE)
        return self.mismatch is None and self.near_ties <= allowed


def walk(sequence: ModelSequence, text: Sequence[int], width: int, start: int = 0) -> Logits:
    """Logits [len(text) - start, V] of a text read in steps of `width` from `start` on, behind a prefilled beginning."""
    sequence.truncate(0)
    sequence.prefill(text[:start])
    rows = []
    for first in range(start, len(text), width):
        piece = text[first : first + width]
        rows.append(sequence.step(piece).copy())
        sequence.commit(range(len(piece)))
    return np.concatenate(rows)


def width_agreement(engine: Engine, ids: Sequence[int]) -> dict[int, float]:
    """For every width wider than one, and the chunk: max |logit difference| to one-token steps over the same text.

    Rows that no tokenizer entry stands for are left out; a NaN anywhere makes the result NaN.
    """
    allowed = engine.bundle.manifest.allowed_ids
    single = walk(engine.target, ids, 1)[:, :allowed]
    widths = sorted({*engine.bundle.manifest.widths, engine.target.role.chunk} - {1})
    return {width: float(np.abs(walk(engine.target, ids, width)[:, :allowed] - single).max()) for width in widths}


def compare_greedy(engine: Engine, prompt: Sequence[int], tokens: int, gamma: int | None, tie: float) -> Agreement:
    """Speculative against plain greedy ids; a difference where plain's two best logits are closer than `tie` is stepped over.

    After a near-tie the comparison goes on behind plain's token.
    """
    plain = engine.generate(list(prompt), Sampling(), tokens, speculate=False).ids
    done = near_ties = drafted = 0
    while done < len(plain):
        result = engine.generate([*prompt, *plain[:done]], Sampling(), len(plain) - done, gamma=gamma)
        drafted += result.stats.drafted
        expected = plain[done:]
        if result.ids == expected:
            break
        same = next((i for i, (a, b) in enumerate(zip(result.ids, expected, strict=False)) if a != b), len(result.ids))
        found = result.ids[same] if same < len(result.ids) else None
        gap = top2_gap(engine, [*prompt, *plain[: done + same]])
        if not gap < tie:
            where = f"token {done + same}: plain {expected[same]}, speculative {found}, top-2 gap {gap:.3g} >= {tie:.3g}"
            return Agreement(len(plain), drafted, near_ties, where)
        near_ties += 1
        done += same + 1
    return Agreement(len(plain), drafted, near_ties, None)


def top2_gap(engine: Engine, text: Sequence[int]) -> float:
    """Difference of the two largest logits after `text`, read in one-token steps where it counts."""
    sequence = engine.target
    sequence.truncate(0)
    sequence.prefill(text[:-1])
    row = sequence.step(text[-1:])[-1][: engine.bundle.manifest.allowed_ids]
    if len(row) < 2:
        return float("inf")
    second, first = np.partition(row, -2)[-2:]
    return float(first - second)
