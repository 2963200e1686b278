"""Do the graphs that draft in one call draft what single steps do?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from specedge.runtime.decode import prefill
from specedge.runtime.generate import Engine
from specedge.runtime.rules import Children, make_rule
from specedge.runtime.sample import Logits, Sampling
from specedge.runtime.sampler import Sampler
from specedge.runtime.shape import TreeShape


@dataclass(frozen=True, slots=True)
class DraftAgreement:
    """Tokens that one call drafted otherwise than single steps, of how many, and the largest difference of q."""

    different: int
    drafted: int
    q_max_abs: float


def unrolled_agreement(engine: Engine, texts: Sequence[Sequence[int]], shape: TreeShape, seed: int = 0) -> DraftAgreement:
    """Drafts after every text at temperature 1: in one call, and step by step with the same noise added by the host.

    Behind a token that differs nothing more is compared.

    Raises:
        ValueError: No graph of the bundle drafts `shape` in one call.
    """
    rule = make_rule("recursive", Sampler(Sampling(1.0, seed=seed), engine.bundle.manifest.allowed_ids, 0))
    in_graph, expansion, ids = rule.in_graph, engine.expansion(shape), engine.draft_ids
    if expansion is None or in_graph is None:
        raise ValueError(f"no graph drafts {shape.paths} in one call")
    noise_depths, least = expansion.depths, engine.target.role.mask_value
    different = drafted = 0
    worst = 0.0
    for text in texts:
        rows, noise = count(), in_graph.noise(text, noise_depths, ids, least)

        def choose(logits: Logits, history: Sequence[int], path: Sequence[int], first: int, ranks: Sequence[int]) -> Children:
            scores = logits[ids] + noise[next(rows)]  # noqa: B023  # used before the loop goes on
            order = ids[(-scores).argsort(kind="stable")[: max(ranks) + 1]]
            return Children(tuple(int(order[rank]) for rank in ranks), in_graph.law(logits, history))

        proposals = []
        for one in (rule, replace(rule, choose=choose, in_graph=None)):
            drafter = engine.new_drafter(one)
            prefill(engine.target, drafter, text)
            proposals.append(drafter.propose(text, shape))
        together, single = proposals
        drafted += len(single.tree.tokens)
        different += sum(single.tree.path(node) != together.tree.path(node) for node in range(len(single.tree.tokens)))
        for node in {parent for parent in single.tree.parents if single.tree.path(parent) == together.tree.path(parent)}:
            assert together.q and single.q
            size = max(engine.target.role.vocab_size, int(ids[-1]) + 1)
            found = np.abs(together.q(node).dense(size) - single.q(node).dense(size)).max()
            worst = float(np.maximum(worst, found))  # NaN stays
    return DraftAgreement(different, drafted, worst)
