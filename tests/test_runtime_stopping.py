"""Drafting that stops where the drafter is not sure enough: the chain it makes, and that the law of the text is left alone."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from laws import (
    SAME,
    SAMPLINGS,
    Accept,
    Cuts,
    Draft,
    Game,
    Line,
    Tokens,
    chained_law,
    distance,
    language,
    law_after,
    plain_law,
    recursive_cuts,
)
from specedge.runtime import Sampling
from specedge.runtime.accept import accept_block, accept_recursive, accept_token
from specedge.runtime.control import Weigh
from specedge.runtime.drafters import Draft as Drafting
from specedge.runtime.drafters import draft_tree
from specedge.runtime.philox import Purpose
from specedge.runtime.rules import Children
from specedge.runtime.sample import Logits
from specedge.runtime.shape import TreeShape
from specedge.runtime.tree import Laws, Proposal, TokenTree
from test_runtime_block import block_cuts

VOCAB, LONGEST = 3, 3
RULES: list[tuple[Accept, Cuts]] = [
    (accept_token, recursive_cuts),
    (accept_recursive, recursive_cuts),
    (accept_block, block_cuts),
]


def while_surer(least: float) -> Weigh:
    """One token more as long as the product of what the drafter is sure of stays above."""
    return lambda confidence: len(confidence) + (1 if np.prod(confidence) > least else -1)


def careful(least: float) -> Weigh:
    """The same, but the token that decides is kept."""
    return lambda confidence: len(confidence) + int(np.prod(confidence) > least)


def stopping(sampling: Sampling, weigh: Weigh) -> Draft:
    """Chains as the product drafts them, drawn from a language of the drafter's own."""
    drafter = language(VOCAB, 2)

    def draft(line: Line, text: Tokens) -> tuple[TokenTree, Laws]:
        def choose(logits: Logits, history: Sequence[int], path: Sequence[int], first: int, ranks: Sequence[int]) -> Children:
            law = law_after(drafter, sampling, text, tuple(path))
            token = line.choice((len(text) - 1, Purpose.DRAFT, first), law.dense(VOCAB))
            return Children((token,), law)

        def grow(made: Drafting, nodes: Sequence[int]) -> list[Logits]:
            return [drafter(text + made.path(node)) for node in nodes]

        proposal = draft_tree(text, TreeShape.chain(LONGEST), choose, drafter(text), grow, weigh)
        lengths.add(len(proposal.tree.tokens))
        return proposal.tree, proposal.q or (lambda node: law_after(drafter, sampling, text))

    return draft


lengths: set[int] = set()


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("weigh", [while_surer, careful])
@pytest.mark.parametrize(("accept", "cuts"), RULES)
def test_a_chain_that_ends_by_what_q_is_keeps_the_target_exactly(
    accept: Accept, cuts: Cuts, weigh: Callable[[float], Weigh], sampling: Sampling
) -> None:
    lengths.clear()
    game = Game(language(VOCAB, 1), sampling, stopping(sampling, weigh(0.6)), accept, cuts)
    assert distance(chained_law(game, 2), plain_law(game.target, sampling, 2)) < SAME
    assert len(lengths) > 1


@pytest.mark.parametrize(("accept", "cuts"), RULES)
def test_one_that_ends_by_what_was_drawn_does_not(accept: Accept, cuts: Cuts) -> None:
    """The test above would notice."""
    sampling = SAMPLINGS[0]
    whole = stopping(sampling, lambda confidence: LONGEST)

    def draft(line: Line, text: Tokens) -> tuple[TokenTree, Laws]:
        tree, q = whole(line, text)
        unlikely = [node for node, token in enumerate(tree.tokens) if q(node - 1).dense(VOCAB)[token] < 0.4]
        return Proposal(tree).first(min(unlikely, default=LONGEST)).tree, q

    game = Game(language(VOCAB, 1), sampling, draft, accept, cuts)
    assert distance(chained_law(game, 2), plain_law(game.target, sampling, 2)) > 0.01
