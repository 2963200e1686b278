"""Laws of the acceptance rules: what comes out has exactly the target's distribution, and known wrong rules fail.

The block rule and the coupled rule have files of their own.
"""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from laws import (
    LAST,
    PROMPT,
    SAME,
    SAMPLINGS,
    Accept,
    Draft,
    Game,
    Line,
    Step,
    Tokens,
    always,
    chained_law,
    distance,
    drawn,
    excess,
    first_token,
    integrate,
    joint_law,
    language,
    law_after,
    no_q,
    plain_law,
    point_mass_cuts,
    random_tree,
    recursive_cuts,
    remove,
    right_step,
    round_law,
)
from specedge.runtime.accept import Accepted, accept_point_mass, accept_recursive, accept_token, rejection_sample
from specedge.runtime.law import Floats, Law
from specedge.runtime.philox import Numbers, Purpose
from specedge.runtime.sample import Sampling
from specedge.runtime.shape import TreeShape
from specedge.runtime.tree import ROOT, Laws, TokenTree

DRAWN = Sampling(1.0)


def by_point_mass(tree: TokenTree, p: Laws, q: Laws, numbers: Numbers) -> Accepted:
    return accept_point_mass(tree, p, numbers)


def proposing(tree: TokenTree, q: Laws = no_q) -> Draft:
    return lambda line, text: (tree, q)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("accept", [accept_token, accept_recursive])
@pytest.mark.parametrize(("vocab", "gamma"), [(3, 0), (3, 1), (3, 2), (4, 2), (5, 1), (3, 3)])
def test_chains_drawn_from_q_keep_the_target_exactly(accept: Accept, sampling: Sampling, vocab: int, gamma: int):
    target, draft = language(vocab, 1), drawn(TreeShape.chain(gamma), language(vocab, 2), sampling)
    law = chained_law(Game(target, sampling, draft, accept, recursive_cuts), 2)
    assert distance(law, plain_law(target, sampling, 2)) < SAME


@pytest.mark.parametrize(
    ("vocab", "paths", "samplings"),
    [
        (5, [[0], [1]], SAMPLINGS),
        (4, [[0], [1], [2]], SAMPLINGS),
        (5, [[0], [1], [2]], SAMPLINGS[:3]),  # top_k = 2 leaves the third child without a token
        (4, [[0], [1], [0, 0]], SAMPLINGS),
        (3, [[0], [1], [0, 0], [0, 1], [1, 0]], SAMPLINGS),
        (3, [[0], [1], [2], [0, 0], [2, 0], [2, 1]], SAMPLINGS[1:2]),
    ],
)
def test_trees_drawn_without_replacement_keep_the_target_exactly(vocab: int, paths: list[list[int]], samplings: list[Sampling]):
    target, shape = language(vocab, 1), TreeShape.from_paths(paths)
    for sampling in samplings:
        game = Game(target, sampling, drawn(shape, language(vocab, 2), sampling), accept_recursive, recursive_cuts)
        assert distance(chained_law(game, 2), plain_law(target, sampling, 2)) < SAME


def test_q_may_have_fewer_tokens_than_a_node_wants_children():
    sampling, sizes = Sampling(0.7, top_k=2), set[int]()
    draft = drawn(TreeShape.from_paths([[0], [1], [2]]), language(4, 2), sampling)

    def run(line: Line) -> Tokens:
        sizes.add(len(draft(line, PROMPT)[0].tokens))
        return ()

    integrate(run)
    assert sizes == {2}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("vocab", [3, 4, 5])
def test_point_mass_keeps_the_target_exactly_on_every_tree(sampling: Sampling, vocab: int):
    target = language(vocab, 1)
    for seed in range(4):

        def draft(line: Line, text: Tokens, seed: int = seed) -> tuple[TokenTree, Laws]:
            return random_tree(vocab, seed, *text), no_q

        law = chained_law(Game(target, sampling, draft, by_point_mass, point_mass_cuts), 2)
        assert distance(law, plain_law(target, sampling, 2)) < SAME


@pytest.mark.parametrize("paths", [[[0]], [[0], [0, 0]], [[0], [1]]])
def test_rounds_integrated_at_once_give_the_same_law(paths: list[list[int]]):
    """No word about independence of rounds is needed."""
    target, sampling = language(3, 1), SAMPLINGS[-1]
    draft = drawn(TreeShape.from_paths(paths), language(3, 2), sampling)
    law = joint_law(Game(target, sampling, draft, accept_recursive, recursive_cuts), 2)
    assert distance(law, plain_law(target, sampling, 2)) < SAME


def test_point_mass_is_the_token_rule_with_one_hot_q_in_law():
    target, tree = language(4, 1), TokenTree.chain([2, 1])
    draft = proposing(tree, lambda node: Law.certain(tree.tokens[node + 1]))
    by_q = round_law(Game(target, DRAWN, draft, accept_token, recursive_cuts), PROMPT)
    assert distance(by_q, round_law(Game(target, DRAWN, draft, by_point_mass, point_mass_cuts), PROMPT)) < SAME


# Known wrong rules: the tests above must be able to tell.


@pytest.mark.parametrize(("told", "share"), [(Sampling(1.0, top_k=2), [0.8, 0.2, 0, 0]), (DRAWN, [2 / 3, 1 / 3, 0, 0])])
def test_q_is_what_was_drawn_from(told: Sampling, share: list[float]):  # B42
    sampling, target, drafter = Sampling(1.0, top_k=2), always(0.64, 0.16, 0.1, 0.1), always(0.3, 0.3, 0.2, 0.2)
    filtered = drawn(TreeShape.chain(1), drafter, sampling)

    def draft(line: Line, text: Tokens) -> tuple[TokenTree, Laws]:
        return filtered(line, text)[0], lambda node: law_after(drafter, told, text)

    law = round_law(Game(target, sampling, draft, accept_token, recursive_cuts), PROMPT)
    assert first_token(law, 4) == pytest.approx(share, abs=1e-7)  # the logits are float32


@pytest.mark.parametrize(("q", "share"), [([1.0, 0.0], [0.4, 0.6]), ([0.5, 0.5], [0.8, 0.2])])
def test_an_argmax_draft_has_one_hot_q_and_not_its_softmax(q: list[float], share: list[float]):  # B43
    draft = proposing(TokenTree.chain([0]), lambda node: Law.of(q))
    law = round_law(Game(always(0.4, 0.6), DRAWN, draft, accept_token, recursive_cuts), PROMPT)
    assert first_token(law, 2) == pytest.approx(share, abs=1e-7)


TOP_TWO = [
    TokenTree((0,), (ROOT,)),
    TokenTree((0, 1), (ROOT, ROOT)),
    TokenTree((0, 1), (ROOT, 0)),
    TokenTree((0, 0, 1, 0), (ROOT, 0, ROOT, 2)),
]


@pytest.mark.parametrize("tree", TOP_TWO)
def test_deterministic_siblings_leave_the_law_alone(tree: TokenTree):  # B46
    game = Game(always(0.5, 0.3, 0.2), DRAWN, proposing(tree), by_point_mass, point_mass_cuts)
    assert first_token(round_law(game, PROMPT), 3) == pytest.approx([0.5, 0.3, 0.2], abs=1e-7)


@pytest.mark.parametrize(
    ("softmax", "update", "share"),
    [(False, True, [0.5, 0.3, 0.2]), (True, True, [5 / 6, 0.0, 1 / 6]), (False, False, [0.75, 0.15, 0.1])],
)
def test_siblings_need_one_hot_q_and_the_residual_of_the_one_before(softmax: bool, update: bool, share: list[float]):  # B46
    def run(line: Line) -> Tokens:
        cuts = [0.3, 0.5, 0.6, 5 / 7, 5 / 6]
        law = residual = np.array([0.5, 0.3, 0.2])
        for token in (0, 1):
            q = np.array([0.6, 0.3, 0.1]) if softmax else np.eye(3)[token]
            rejected = rejection_sample(law, q, token, line.number((0, Purpose.ACCEPT, token), cuts))
            if rejected is None:
                return (token,)
            residual = rejected
            law = residual if update else law
        return (Law.of(residual).draw(line.number((1, Purpose.TOKEN, 0), cuts)),)

    assert first_token(integrate(run), 3) == pytest.approx(share, abs=1e-12)


def test_the_recursive_rule_cannot_be_told_a_softmax_that_drew_nothing():  # B46
    draft = proposing(TOP_TWO[1], lambda node: Law.of([0.6, 0.3, 0.1]))
    law = round_law(Game(always(0.5, 0.3, 0.2), DRAWN, draft, accept_recursive, recursive_cuts), PROMPT)
    assert first_token(law, 3) == pytest.approx([5 / 6, 0.0, 1 / 6], abs=1e-6)


def by_step(step: Step, vocab: int) -> Accept:
    """The recursive rule with `step` for what the next sibling is judged by."""

    def accept(tree: TokenTree, p: Laws, q: Laws, numbers: Numbers) -> Accepted:
        node, nodes = ROOT, list[int]()
        while True:
            law = first = p(node).dense(vocab)
            left = q(node).dense(vocab) if tree.children(node) else law
            for child in tree.children(node):
                token = tree.tokens[child]
                if numbers.accept(child) * left[token] < law[token]:
                    break
                law, left = step(first, law, left, token)
            else:
                return Accepted(tuple(nodes), Law.of(law).draw(numbers.token(len(nodes))))
            node = child
            nodes.append(child)

    return accept


def with_first_residual(first: Floats, p: Floats, q: Floats, token: int) -> tuple[Floats, Floats]:
    return excess(first, q), remove(q, token)


def with_old_p(first: Floats, p: Floats, q: Floats, token: int) -> tuple[Floats, Floats]:
    return p, remove(q, token)


def with_old_q(first: Floats, p: Floats, q: Floats, token: int) -> tuple[Floats, Floats]:
    return excess(p, q), q


def with_raw_q(first: Floats, p: Floats, q: Floats, token: int) -> tuple[Floats, Floats]:
    return excess(p, q), np.where(np.arange(len(q)) == token, 0.0, q)


def with_raw_p(first: Floats, p: Floats, q: Floats, token: int) -> tuple[Floats, Floats]:
    left = np.maximum(p - q, 0.0)
    return left if left.any() else p, remove(q, token)


@pytest.mark.parametrize("step", [with_first_residual, with_old_p, with_old_q, with_raw_q, with_raw_p])
@pytest.mark.parametrize("count", [2, 3])
def test_each_sibling_is_judged_by_what_the_ones_before_left(count: int, step: Step):
    shape = TreeShape.from_paths([[rank] for rank in range(count)])
    target, draft = language(4, 4), drawn(shape, language(4, 11), DRAWN)

    def law(step: Step) -> float:
        game = Game(target, DRAWN, draft, by_step(step, 4), partial(recursive_cuts, step=step))
        return distance(chained_law(game, 1), plain_law(target, DRAWN, 1))

    assert law(right_step) < SAME
    assert law(step) > 0.01


@pytest.mark.parametrize("factor", [0.97, 1.03])
def test_a_decision_that_changes_beside_its_cut_is_noticed(factor: float):
    """What the integration is worth: a verdict off by 3 % where the cuts are those of the right rule."""

    def careless(tree: TokenTree, p: Laws, q: Laws, numbers: Numbers) -> Accepted:
        return accept_token(tree, p, q, Numbers(0, 0, lambda *key: min(numbers.uniform(*key) * factor, 1.0)))

    target, draft = language(3, 1), drawn(TreeShape.chain(1), language(3, 2), DRAWN)
    law = chained_law(Game(target, DRAWN, draft, careless, recursive_cuts), 1)
    assert distance(law, plain_law(target, DRAWN, 1)) > 0.01


# The textbook operator.


@given(
    arrays(np.float64, 5, elements=st.floats(0, 1)).filter(lambda p: p.sum() > 0.1),
    arrays(np.float64, st.integers(3, 7), elements=st.floats(0, 1)).filter(lambda q: q.sum() > 0.1),
)
@settings(deadline=None, derandomize=True)
def test_the_operator_turns_q_into_p(p: Floats, q: Floats):
    """Also where the two vocabularies differ in size."""
    p, q = p / p.sum(), q / q.sum()
    law = np.zeros(5)
    for token, mass in enumerate(q):
        target = p[token] if token < 5 else 0.0
        ratio = target / mass if target < mass else 1.0
        for share, u in ((ratio, ratio * (1 - 1e-9)), (1 - ratio, ratio + 1e-9 * (1 - ratio))):
            if share > 0.0:
                residual = rejection_sample(p, q, token, u)
                law += mass * share * (np.eye(5, 7)[:, token] if residual is None else residual)
    np.testing.assert_allclose(law, p, atol=1e-12)


def strict(u: float, q: float, p: float) -> bool:
    return rejection_sample([p, 1 - p], [q, 1 - q], 0, u) is None


def loose(u: float, q: float, p: float) -> bool:
    return u <= p / q


@pytest.mark.parametrize(("verdict", "wrong"), [(strict, False), (loose, True)])
def test_an_impossible_token_is_never_accepted(verdict: Callable[[float, float, float], bool], wrong: bool):
    assert verdict(0.0, 0.5, 0.0) == wrong
    assert not any(verdict(u, 0.5, 0.0) for u in (5e-324, 0.5, LAST))


def test_what_replaces_an_impossible_token_is_drawn_from_the_rest():
    residual = rejection_sample([0.0, 0.25, 0.75], [0.5, 0.5, 0.0], 0, 0.0)
    assert residual is not None and residual.tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("u", [0.0, LAST, 1.0])
def test_equal_distributions_accept_or_fall_back_to_p(u: float):  # B44
    one_hot = np.array([0.0, 1.0, 0.0])
    residual = rejection_sample(one_hot, one_hot, 1, u)
    assert (residual is None) == (u < 1.0)
    assert residual is None or (residual.tolist() == [0.0, 1.0, 0.0] and Law.of(residual).draw(u) == 1)


def test_a_residual_of_rounding_noise_is_still_a_distribution():  # B44
    p = np.random.default_rng(0).dirichlet(np.ones(50)).astype(np.float32)
    for noise in (1e-9, 1e-8, 0.0, -1e-9):
        q = np.maximum(p + np.float32(noise), 0.0)
        for token in range(50):
            residual = rejection_sample(p, q, token, 1.0)
            assert residual is None or (abs(residual.sum() - 1) < 1e-5 and p[Law.of(residual).draw(LAST)] > 0.0)


def test_without_a_residual_it_is_p_and_not_q():
    residual = rejection_sample([0.25, 0.0, 0.75], [0.26, 0.01, 0.76], 0, LAST)
    assert residual is not None and residual.tolist() == [0.25, 0.0, 0.75]


@pytest.mark.parametrize(
    ("p", "q", "token", "u", "named"),
    [
        ([0.5, math.nan], [0.5, 0.5], 0, 0.1, "p_target: .* nan at id 1"),
        ([0.5, 0.5], [math.nan, 0.5], 1, 0.1, "p_draft: .* nan at id 0"),
        ([1.5, -0.5], [0.5, 0.5], 0, 0.1, "p_target: .* -0.5 at id 1"),
        ([0.5, 0.5], [0.5, 0.5], -1, 0.1, "token -1"),
        ([0.5, 0.5], [0.5, 0.5], 0, math.nan, "u nan"),
    ],
)
def test_what_is_no_distribution_is_refused(p: list[float], q: list[float], token: int, u: float, named: str):
    with pytest.raises(ValueError, match=named):
        rejection_sample(p, q, token, u)


def test_the_operator_leaves_its_arguments_alone():
    p = np.array([0.0, 1.0])
    replacement = rejection_sample(p, p, 1, 1.0)
    assert replacement is not None and not np.shares_memory(replacement, p)
