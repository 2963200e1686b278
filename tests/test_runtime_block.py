"""Laws of the block rule: exactly the target's distribution, never fewer accepted tokens than the token rule has."""

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest

from laws import (
    LAST,
    SAME,
    SAMPLINGS,
    Accept,
    Cuts,
    Game,
    Key,
    Line,
    Table,
    Tokens,
    chained_law,
    distance,
    drawn,
    integrate,
    joint_law,
    language,
    plain_law,
    recursive_cuts,
)
from specedge.runtime.accept import Accepted, accept_block, accept_token
from specedge.runtime.law import Law
from specedge.runtime.philox import Numbers, Purpose
from specedge.runtime.sample import Sampling
from specedge.runtime.shape import TreeShape
from specedge.runtime.tree import ROOT, Laws, TokenTree

DRAWN = Sampling(1.0)


def block_cuts(tree: TokenTree, p: Laws, q: Laws, vocab: int) -> Table:
    """Prefix i stays iff u < h_i, written from the paper (Sun et al. 2024, Alg. 2)."""
    table: dict[tuple[Purpose, int], list[float]] = {}
    weight, end = 1.0, len(tree.tokens)
    for node in range(ROOT, end):
        law = p(node).dense(vocab)
        if node != ROOT:
            token = tree.tokens[node]
            weight = min(1.0, weight * p(node - 1).at(token) / q(node - 1).at(token))
        residual = np.maximum(weight * law - q(node).dense(vocab), 0.0) if node < end - 1 else law
        mass = float(residual.sum())
        if node != ROOT and mass > 0.0:
            table[Purpose.ACCEPT, node] = [weight if node == end - 1 else mass / (mass + 1.0 - weight)]
        table[Purpose.TOKEN, node + 1] = (residual / mass if mass > 0.0 else law).cumsum().tolist()
    return table


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("vocab", "gamma"), [(3, 0), (3, 1), (3, 2), (4, 2), (5, 2), (3, 3)])
def test_the_block_rule_keeps_the_target_exactly(sampling: Sampling, vocab: int, gamma: int):
    target, draft = language(vocab, 1), drawn(TreeShape.chain(gamma), language(vocab, 2), sampling)
    law = chained_law(Game(target, sampling, draft, accept_block, block_cuts), 2)
    assert distance(law, plain_law(target, sampling, 2)) < SAME


# A number that influenced one round must not come again in the next.


def by_root(root: int, key: Key) -> Key:
    return key


def by_position(root: int, key: Key) -> Key:
    """The verdict on a token keyed by the token's own absolute position instead of its round's root."""
    _, purpose, index = key
    return (root + 1 + index, purpose, 0) if purpose is Purpose.ACCEPT else key


@pytest.mark.parametrize(
    ("accept", "cuts", "key", "exact"),
    [
        (accept_block, block_cuts, by_root, True),
        (accept_block, block_cuts, by_position, False),  # also rejects by numbers of tokens that it never reached
        (accept_token, recursive_cuts, by_position, True),
    ],
)
def test_a_verdict_belongs_to_its_round(accept: Accept, cuts: Cuts, key: Callable[[int, Key], Key], exact: bool):
    game = Game(language(2, 6), DRAWN, drawn(TreeShape.chain(2), language(2, 11), DRAWN), accept, cuts, key)
    for count in (2, 3):
        difference = distance(joint_law(game, count), plain_law(game.target, DRAWN, count))
        assert difference < SAME if exact else difference > 0.05


# Lengths.

Rows = Callable[[Tokens], Law]  # drafted tokens -> law of the next


def accepted_tokens(accept: Accept, cuts: Cuts, p: Rows, q: Rows, vocab: int, gamma: int) -> float:
    """Drafted tokens that a round is expected to accept."""
    expected = 0.0
    for drafts in product(range(vocab), repeat=gamma):
        chance = float(np.prod([q(drafts[:node]).at(token) for node, token in enumerate(drafts)]))
        if chance > 0.0:
            expected += chance * _accepted(accept, cuts, p, q, vocab, TokenTree.chain(drafts))
    return expected


def _accepted(accept: Accept, cuts: Cuts, p: Rows, q: Rows, vocab: int, tree: TokenTree) -> float:
    def of(rows: Rows) -> Laws:
        return lambda node: rows(tree.tokens[: node + 1])

    table = cuts(tree, of(p), of(q), vocab)

    def run(line: Line) -> Tokens:
        def uniform(seed: int, position: int, purpose: Purpose, index: int = 0) -> float:
            return (
                line.number((position, purpose, index), table.get((purpose, index), ())) if purpose is Purpose.ACCEPT else 0.5
            )

        return accept(tree, of(p), of(q), Numbers(0, 0, uniform)).nodes

    return sum(len(nodes) * mass for nodes, mass in integrate(run).items())


def random_rows(rng: np.random.Generator, vocab: int, depth: int) -> Rows:
    """A law of its own after every prefix, now and then with impossible tokens."""
    laws: dict[Tokens, Law] = {}
    for length in range(depth + 1):
        for prefix in product(range(vocab), repeat=length):
            weights = rng.dirichlet(np.ones(vocab)) * (rng.random(vocab) < 0.9)
            laws[prefix] = Law.of(weights / weights.sum() if weights.any() else np.ones(vocab) / vocab)
    return laws.__getitem__


@pytest.mark.parametrize(("vocab", "gamma", "count"), [(2, 1, 100), (3, 1, 100), (2, 2, 600), (3, 2, 250), (2, 3, 150)])
def test_the_block_rule_accepts_no_less_than_the_token_rule(vocab: int, gamma: int, count: int):
    rng, gains = np.random.default_rng([vocab, gamma]), []
    for _ in range(count):
        p, q = random_rows(rng, vocab, gamma), random_rows(rng, vocab, gamma)
        block, token = (
            accepted_tokens(accept, cuts, p, q, vocab, gamma)
            for accept, cuts in ((accept_block, block_cuts), (accept_token, recursive_cuts))
        )
        gains.append(block - token)
    assert min(gains) >= -1e-12
    assert max(gains) < 1e-12 if gamma == 1 else max(gains) > 0.05


def test_the_known_gain():
    """The example of the paper, with two drafts."""

    def expected(accept: Accept, cuts: Cuts) -> float:
        p, q = Law.of([1 / 3, 2 / 3]), Law.of([2 / 3, 1 / 3])
        return accepted_tokens(accept, cuts, lambda prefix: p, lambda prefix: q, 2, 2)

    assert expected(accept_token, recursive_cuts) == pytest.approx(10 / 9, abs=1e-12)
    assert expected(accept_block, block_cuts) == pytest.approx(11 / 9, abs=1e-12)


# Edges.


def verdict(drafts: Tokens, p: Sequence[Sequence[float]], q: Sequence[Sequence[float]], u: float) -> Accepted:
    def row(laws: Sequence[Sequence[float]]) -> Laws:
        return lambda node: Law.of(laws[node + 1])

    return accept_block(TokenTree.chain(drafts), row(p), row(q), Numbers(0, 0, lambda *key: u))


def test_a_prefix_without_residual_never_ends_a_round():
    """w p <= q everywhere after the first draft, and the second is impossible: even u = 0 accepts neither."""
    accepted = verdict((0, 1), [[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]], [[0.5, 0.5], [0.6, 0.4]], 0.0)
    assert accepted == Accepted((), 1)  # from norm(max(0, p - q)) at the root


@pytest.mark.parametrize("u", [0.0, 0.5, LAST])
def test_a_draft_of_the_target_itself_is_always_accepted(u: float):
    p = [[0.1, 0.2, 0.7], [0.3, 0.3, 0.4], [0.25, 0.5, 0.25], [0.0, 1.0, 0.0]]
    assert verdict((2, 0, 1), p, p, u) == Accepted((0, 1, 2), 1)


def test_a_root_without_residual_falls_back_to_the_law_of_the_root():
    """Rounding only: p is q less one unit in the last place, and so is the weight that the last u meets."""
    p = [[0.0, 1.0 - 2**-53], [1.0, 0.0]]
    assert verdict((1,), p, [[0.0, 1.0]], LAST) == Accepted((), 1)


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_one_hot_laws(gamma: int):
    sure = [[0.0, 1.0]] * (gamma + 1)
    for u in (0.0, LAST):
        assert verdict((1,) * gamma, sure, sure, u) == Accepted(tuple(range(gamma)), 1)
        assert verdict((0,) * gamma, sure, [[0.5, 0.5]] * gamma, u) == Accepted((), 1)


def test_rows_are_read_as_long_as_a_longer_prefix_may_stay():
    asked: list[tuple[str, int]] = []
    tree = TokenTree.chain([0, 1, 0, 0])

    def p(node: int) -> Law:
        asked.append(("p", node))
        return Law.of([[0.2, 0.8], [0.5, 0.5], [0.0, 1.0]][node + 1])

    def q(node: int) -> Law:
        asked.append(("q", node))
        return Law.of([0.9, 0.1])

    accept_block(tree, p, q, Numbers(0, 0, lambda *key: 0.999))
    assert sorted(set(asked)) == [("p", -1), ("p", 0), ("p", 1), ("q", -1), ("q", 0), ("q", 1)]
    assert len(asked) == 6  # each once


def test_all_of_a_chain_without_drafts_is_a_plain_draw():
    def q(node: int) -> Law:
        raise AssertionError("nothing was drawn")

    assert accept_block(TokenTree.chain([]), lambda node: Law.of([0.25, 0.75]), q, Numbers(0, 0, lambda *key: 0.3)).token == 1


def test_what_the_block_rule_cannot_judge_is_refused():
    even = Law.of([0.5, 0.5])
    with pytest.raises(ValueError, match=r"block rule: expected a chain, found parents \(-1, -1\)"):
        accept_block(TokenTree((0, 1), (ROOT, ROOT)), lambda node: even, lambda node: even, Numbers(0, 0))
    with pytest.raises(ValueError, match="q after node 0: expected q > 0 for the drafted token 1"):
        verdict((0, 1), [[0.5, 0.5]] * 3, [[0.5, 0.5], [1.0, 0.0]], LAST)


@pytest.mark.parametrize("where", ["p", "q"])
def test_nan_is_refused(where: str):  # B44
    """Though min(1, NaN) would be 1."""
    even, damaged = Law.of([0.5, 0.5]), Law.of([np.nan, 0.5])
    laws = {"p": even, "q": even, where: damaged}
    with pytest.raises(ValueError, match="nan at id 0"):
        accept_block(TokenTree.chain([0]), lambda node: laws["p"], lambda node: laws["q"], Numbers(0, 0))
