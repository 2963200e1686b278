"""Do wide and one-token steps, speculative and plain decoding, agree? (numerical losslessness)"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specedge.runtime.generate import Engine
from specedge.runtime.sample import Sampling
from specedge.runtime.sequence import Sequence as ModelSequence
from specedge.runtime.shape import TreeShape
from specedge.runtime.tree import ROOT, TokenTree

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


def tree_rows(engine: Engine, ids: Sequence[int], shape: TreeShape) -> tuple[Logits, Logits]:
    """Logits [rows, allowed] on paths of a tree, and of one-token steps after the same text; no rows where it does not fit.

    The text lies on each of the tree's paths in turn and all other nodes carry other tokens: what these may change is only
    the order of sums.
    """
    target, allowed = engine.target, engine.bundle.manifest.allowed_ids
    single = walk(target, ids, 1)[:, :allowed]
    leaves = [node for node in range(len(shape.parents)) if not shape.children(node)]
    none = np.zeros((0, allowed), np.float32)
    found, expected = [none], [none]
    target.truncate(0)
    for start in range(min(len(ids) - shape.depth, target.role.context - len(shape.parents))):
        tree, path = _with_path(shape, leaves[start % len(leaves)], ids[start + 1 :], allowed)
        rows = [0, *(node + 1 for node in path)]
        found.append(target.step([ids[start], *tree.tokens], tree)[rows, :allowed])
        expected.append(single[start : start + len(rows)])
        target.commit([0])
    return np.concatenate(found), np.concatenate(expected)


def tree_agreement(engine: Engine, ids: Sequence[int], shape: TreeShape) -> float:
    """Max |logit difference| of `tree_rows`; NaN if there is one."""
    found, expected = tree_rows(engine, ids, shape)
    return float(np.abs(found - expected).max(initial=0.0))


def _with_path(shape: TreeShape, leaf: int, text: Sequence[int], allowed: int) -> tuple[TokenTree, list[int]]:
    """A tree of this shape with `text` on the way to `leaf`, and that way."""
    path = [leaf]
    while shape.parents[path[0]] != ROOT:
        path.insert(0, shape.parents[path[0]])
    tokens = []
    for node in range(len(shape.parents)):
        depth = len(shape.paths[node]) - 1
        here = node if node in path else next((other for other in path if shape.parents[other] == shape.parents[node]), None)
        siblings = shape.children(shape.parents[node])
        apart = siblings.index(node) - (siblings.index(here) if here is not None else 0)  # siblings differ
        tokens.append((text[depth] + apart) % allowed)
    return TokenTree(tuple(tokens), shape.parents), path


def agreement_of(engine: Engine, ids: Sequence[int], shape: TreeShape | None) -> float:
    """The largest of `width_agreement`, and `tree_agreement` if there is a tree; NaN if one is."""
    found = list(width_agreement(engine, ids).values())
    if shape is not None and not shape.is_chain:
        found.append(tree_agreement(engine, ids, shape))
    return float(np.max(found, initial=0.0))


def compare_greedy(
    engine: Engine, prompt: Sequence[int], tokens: int, gamma: int | None, tie: float, tree: TreeShape | None = None
) -> Agreement:
    """Speculative against plain greedy ids; a difference where plain's two best logits are closer than `tie` is stepped over.

    After a near-tie the comparison goes on behind plain's token.
    """
    plain = engine.generate(list(prompt), Sampling(), tokens, speculate=False).ids
    done = near_ties = drafted = 0
    while done < len(plain):
        result = engine.generate([*prompt, *plain[:done]], Sampling(), len(plain) - done, gamma=gamma, tree=tree)
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
