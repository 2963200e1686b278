"""Laws of the rules by name: how they draft and judge whole texts with the numbers of a seed, and what they refuse."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chisquare

from laws import (
    LAST,
    PROMPT,
    SAMPLINGS,
    Accept,
    Game,
    Line,
    Model,
    Tokens,
    always,
    chained_law,
    distance,
    first_token,
    language,
    law_after,
    logits_of,
    no_q,
    plain_law,
    point_mass_cuts,
    random_tree,
)
from specedge.errors import SpecedgeError, UsageError
from specedge.runtime import accept
from specedge.runtime.accept import Accepted, accept_typical
from specedge.runtime.law import Law
from specedge.runtime.philox import Numbers, Purpose, uniform
from specedge.runtime.rules import RULES, Rule, make_rule
from specedge.runtime.sample import Logits, Sampling
from specedge.runtime.sampler import Sampler
from specedge.runtime.shape import TreeShape
from specedge.runtime.tree import ROOT, Laws, Proposal, TokenTree

LOSSLESS = [name for name in RULES if name != "lossy-typical"]
BY_Q = ["token", "block", "recursive"]
DRAWN = Sampling(1.0)
CHAIN, TREE = TreeShape.chain(2), TreeShape.from_paths([[0], [1], [0, 0]])
SHAPES = {"token": CHAIN, "block": CHAIN, "recursive": TREE, "point-mass": TREE, "coupled": TREE}
Propose = Callable[[Tokens], Proposal]


def rule_of(name: str | None, sampling: Sampling, vocab: int) -> Rule:
    return make_rule(name, Sampler(sampling, vocab, len(PROMPT)))


def drafting(rule: Rule, drafter: Model, shape: TreeShape) -> Propose:
    """What a draft model proposes: the rule's choices, level by level."""

    def propose(text: Tokens) -> Proposal:
        tree, drafted = TokenTree.chain([]), {ROOT: ROOT}  # node of the shape -> node of the tree
        laws: dict[int, Law | None] = {}
        for above in (ROOT, *range(len(shape.parents))):
            wanted = shape.children(above)
            if above in drafted and wanted:
                parent, first = drafted[above], len(tree.tokens)
                path = tree.path(parent)
                chosen = rule.choose(drafter(text + path), text, path, first, [shape.ranks[child] for child in wanted])
                laws[parent] = chosen.law
                drafted |= {child: first + rank for rank, child in enumerate(wanted[: len(chosen.tokens)])}
                tree = TokenTree(tree.tokens + chosen.tokens, tree.parents + (parent,) * len(chosen.tokens))
        drawn = {node: law for node, law in laws.items() if law is not None}
        return Proposal(tree, drawn.__getitem__ if drawn else None)

    return propose


def rows_after(target: Model, text: Tokens, tree: TokenTree) -> list[Logits]:
    return [target(text + tree.path(node)) for node in (ROOT, *range(len(tree.tokens)))]


def speculate(rule: Rule, target: Model, propose: Propose, count: int) -> tuple[Tokens, int]:
    """`count` tokens after PROMPT, and how many of them were drafted, or more if the last round has more."""
    text, agreed = PROMPT, 0
    while len(text) < len(PROMPT) + count:
        proposal = propose(text)
        accepted = rule.judge(proposal, rows_after(target, text, proposal.tree), text)
        agreed += len(accepted.nodes)
        text += (*(proposal.tree.tokens[node] for node in accepted.nodes), accepted.token)
    return text[len(PROMPT) : len(PROMPT) + count], agreed


def arbitrary(vocab: int, seed: int) -> Propose:
    return lambda text: Proposal(random_tree(vocab, seed, *text))


def nothing(text: Tokens) -> Proposal:
    return Proposal(TokenTree.chain([]))


# Names.


def test_an_unknown_rule_is_refused_by_the_names_there_are():
    with pytest.raises(UsageError, match="rule 'typical': expected one of token, block, recursive, point-mass, coupled, lossy"):
        rule_of("typical", DRAWN, 3)
    assert len(RULES) == len(set(RULES)) == 6


@pytest.mark.parametrize("name", [None, *RULES])
def test_a_rule_has_its_name_and_says_whether_it_needs_a_chain(name: str | None):
    rule = rule_of(name, DRAWN, 3)
    assert rule.name == (name or "recursive")
    assert rule.chain == (name in ("token", "block"))


@pytest.mark.parametrize("name", [None, *RULES])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=1), Sampling(repetition_penalty=1.5)])
def test_a_greedy_request_follows_the_argmax_under_every_name(name: str | None, sampling: Sampling):
    target, sampler = language(3, 1), Sampler(sampling, 3, len(PROMPT))
    rule = make_rule(name, sampler)
    assert rule.name == "greedy" and not rule.chain
    plain = PROMPT
    for _ in range(30):
        plain += (sampler.best(target(plain), plain),)
    for propose in (arbitrary(3, 0), arbitrary(3, 1), drafting(rule_of(name, sampling, 3), language(3, 2), TREE), nothing):
        text, agreed = speculate(rule_of(name, sampling, 3), target, propose, 30)
        assert text == plain[len(PROMPT) :]
        assert (agreed > 0) == (propose is not nothing)


# Each name drafts and judges by the functions whose laws are proved elsewhere.


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("name", "path"), [("token", ()), ("block", (1,)), ("recursive", (2, 2)), (None, ())])
def test_drawn_children_are_plain_draws_from_q_without_the_ones_before(name: str | None, path: Tokens, sampling: Sampling):
    text, drafter = (*PROMPT, 2, 1), language(4, 2)
    for seed in range(100):
        rule = rule_of(name, replace(sampling, seed=seed), 4)
        chosen = rule.choose(drafter(text + path), text, path, 7, [0, 1, 2])
        left = law_after(drafter, sampling, text, path).dense(4).copy()
        assert chosen.law is not None and chosen.law.dense(4).tolist() == left.tolist()
        for node, token in enumerate(chosen.tokens, start=7):
            u = uniform(seed, len(text) - 1, Purpose.DRAFT, node)
            assert token == int(np.searchsorted(np.cumsum(left / left.sum()), u, side="right"))
            left[token] = 0.0
        assert len(chosen.tokens) == 3 or not left.any()


@pytest.mark.parametrize("name", ["point-mass", "lossy-typical"])
def test_chosen_children_are_the_likeliest_by_rank(name: str):
    row, rule = logits_of(0.1, 0.4, 0.1, 0.4), rule_of(name, Sampling(1.0, top_k=2), 4)
    for ranks, tokens in (([0], (1,)), ([0, 1, 2], (1, 3, 0)), ([1, 3], (3, 2)), ([2, 5], (0,))):
        chosen = rule.choose(row, PROMPT, (), 0, ranks)
        assert (chosen.tokens, chosen.law) == (tokens, None)


JUDGED: dict[str, Accept] = {
    "token": accept.accept_token,
    "block": accept.accept_block,
    "recursive": accept.accept_recursive,
    "point-mass": lambda tree, p, q, numbers: accept.accept_point_mass(tree, p, numbers),
    "coupled": lambda tree, p, q, numbers: accept.accept_coupled(tree, p, numbers),
    "lossy-typical": lambda tree, p, q, numbers: accept_typical(tree, p, numbers),
}


@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[-1]])
@pytest.mark.parametrize("name", RULES)
def test_a_name_judges_by_its_rule_with_the_numbers_of_the_round(name: str, sampling: Sampling):
    text, target, shape = (*PROMPT, 1, 2), language(4, 1), SHAPES.get(name, TREE)
    for seed in range(100):
        seeded = replace(sampling, seed=seed)
        proposal = drafting(rule_of(name, seeded, 4), language(4, 2), shape)(text)
        tree = proposal.tree

        def p(node: int, tree: TokenTree = tree) -> Law:
            return law_after(target, sampling, text, tree.path(node))

        expected = JUDGED[name](tree, p, proposal.q or no_q, Numbers(seed, len(text) - 1))
        assert rule_of(name, seeded, 4).judge(proposal, rows_after(target, text, tree), text) == expected


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", [*BY_Q, "point-mass"])
@pytest.mark.parametrize("seed", range(3))
def test_text_is_the_plain_text_of_the_seed_when_nothing_is_drawn(sampling: Sampling, name: str, seed: int):
    target, plain = language(3, 7), PROMPT
    for position in range(len(PROMPT), len(PROMPT) + 40):
        plain += (law_after(target, sampling, plain).draw(uniform(seed, position, Purpose.TOKEN)),)
    for propose in (arbitrary(3, 0), arbitrary(3, 1), nothing):
        text, agreed = speculate(rule_of(name, replace(sampling, seed=seed), 3), target, propose, 40)
        assert text == plain[len(PROMPT) :]
        assert (agreed > 0) == (propose is not nothing)


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_seed_gives_one_text_and_seeds_differ(name: str):  # B48
    def text(seed: int) -> Tokens:
        sampling = Sampling(1.0, seed=seed)
        propose = drafting(rule_of(name, sampling, 5), language(5, 2), SHAPES[name])
        return speculate(rule_of(name, sampling, 5), language(5, 1), propose, 30)[0]

    assert text(42) == text(42)
    assert len({text(seed) for seed in range(10)}) == 10


@pytest.mark.parametrize("name", LOSSLESS)
def test_the_numbers_of_seeds_give_the_law(name: str):
    """The law that is proved by integration, with the real random numbers: three tokens over one to three rounds."""
    target, drafter, requests = language(3, 1), language(3, 2), 2500
    observed: Counter[Tokens] = Counter()
    for seed in range(requests):
        sampling = Sampling(0.7, seed=seed)
        propose = drafting(rule_of(name, sampling, 3), drafter, SHAPES[name])
        observed[speculate(rule_of(name, sampling, 3), target, propose, 3)[0]] += 1
    expected = {tokens: mass * requests for tokens, mass in plain_law(target, Sampling(0.7), 3).items()}
    rare = [tokens for tokens, number in expected.items() if number < 5]
    common = [tokens for tokens in expected if tokens not in rare]
    counts = [[*(law.get(tokens, 0) for tokens in common), sum(law.get(t, 0) for t in rare)] for law in (observed, expected)]
    assert chisquare(*counts).pvalue > 0.001


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", [*BY_Q, "coupled"])
def test_a_draft_of_the_target_itself_is_always_accepted(sampling: Sampling, name: str):
    target = language(5, 3)
    for seed in range(20):
        rule = rule_of(name, replace(sampling, seed=seed), 5)
        proposal = drafting(rule, target, TreeShape.chain(4))(PROMPT)
        assert rule.judge(proposal, rows_after(target, PROMPT, proposal.tree), PROMPT).nodes == (0, 1, 2, 3)


# Lossy, and only under its name.


@pytest.mark.parametrize(
    ("p", "stays"),
    [
        ([0.905, 0.095], [True, True]),  # 0.09 is less than 0.3 exp(-H)
        ([0.91, 0.09], [True, False]),  # not more than 0.09
        ([0.125] * 8, [True] * 8),  # 0.3 / 8
        ([0.6, 0.13, 0.1, 0.089, 0.081], [True, True, True, True, False]),  # 0.3 exp(-1.224) = 0.0882
        ([0.0, 1.0], [False, True]),
    ],
)
def test_typical_is_a_probability_above_both_bounds(p: list[float], stays: list[bool]):
    for token, expected in enumerate(stays):
        accepted = accept_typical(TokenTree.chain([token]), lambda node: Law.of(p), Numbers(0, 0))
        assert (accepted.nodes == (0,)) == expected


def test_the_longest_typical_path_wins_and_the_first_of_equals():
    tree = TokenTree((0, 1, 0, 1, 2, 0), (ROOT, ROOT, 1, 1, 0, 4))  # 0 2 0 | 1 0 | 1 1
    typical = Law.of([0.4, 0.4, 0.2])
    closed = Law.of([0.5, 0.5, 0.0])
    numbers = Numbers(0, 0, lambda *key: 0.95)
    assert accept_typical(tree, lambda node: typical, numbers) == Accepted((0, 4, 5), 2)
    assert accept_typical(tree, {ROOT: typical, 0: closed, 1: typical, 2: typical}.__getitem__, numbers) == Accepted((1, 2), 2)
    assert accept_typical(tree, lambda node: Law.certain(2), numbers) == Accepted((), 2)


def test_typical_acceptance_changes_the_law():
    def draft(line: Line, text: Tokens) -> tuple[TokenTree, Laws]:
        return TokenTree.chain([1]), no_q

    law = chained_law(Game(always(0.6, 0.4), DRAWN, draft, JUDGED["lossy-typical"], point_mass_cuts), 2)
    assert first_token(law, 2) == [0.0, 1.0]
    assert distance(law, plain_law(always(0.6, 0.4), DRAWN, 2)) > 0.3


@pytest.mark.parametrize("name", RULES)
def test_only_one_name_is_lossy(name: str):
    proposal, rows = Proposal(TokenTree.chain([1])), [logits_of(0.6, 0.4)] * 2
    rules = [rule_of(name, Sampling(1.0, seed=seed), 2) for seed in range(100)]
    kept = sum(rule.judge(proposal, rows, PROMPT).nodes == (0,) for rule in rules)
    assert kept == 100 if name == "lossy-typical" else 25 < kept < 55


# Edges.


class Read:
    """Rows of which only those given may be read."""

    def __init__(self, rows: dict[int, Logits], count: int) -> None:
        self._rows, self._count = rows, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> Logits:
        return self._rows[row]


SURE = logits_of(0.0, 1.0, 0.0)  # -inf everywhere but one (B44): emits 1


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN])
@pytest.mark.parametrize("name", RULES)
def test_rows_off_the_path_are_never_read(name: str, sampling: Sampling):
    tree = TokenTree((0, 1, 2, 1), (ROOT, ROOT, 0, 1))
    rows = Read({0: SURE, 2: SURE, 4: SURE}, 6)  # the last is padding
    assert rule_of(name, sampling, 3).judge(Proposal(tree), rows, PROMPT) == Accepted((1, 3), 1)


@pytest.mark.parametrize("name", BY_Q)
def test_q_off_the_path_is_never_read(name: str):
    half = Law.of([0.5, 0.5, 0.0])
    proposal = Proposal(TokenTree.chain([1, 0, 1]), {ROOT: half, 0: half}.__getitem__)
    assert rule_of(name, DRAWN, 3).judge(proposal, Read({0: SURE, 1: SURE}, 4), PROMPT) == Accepted((0,), 1)
    if name == "recursive":
        tree = Proposal(TokenTree((0, 1, 2, 0), (ROOT, ROOT, 0, 1)), {ROOT: half, 1: half}.__getitem__)
        assert rule_of(name, DRAWN, 3).judge(tree, Read({0: SURE, 2: SURE}, 5), PROMPT) == Accepted((1,), 1)


@pytest.mark.parametrize("name", [*RULES, "greedy"])
def test_nan_is_an_error_that_names_the_position(name: str):  # B44
    rule = rule_of(None, Sampling(), 3) if name == "greedy" else rule_of(name, DRAWN, 3)
    history, broken = (0,) * 8, np.array([0.0, np.nan, 0.0], np.float32)
    q = (lambda node: Law.of([0.5, 0.5, 0.0])) if name in BY_Q else None
    for rows, position in (([broken, SURE], 8), ([SURE, broken], 9)):
        with pytest.raises(SpecedgeError, match=f"logits for position {position}: nan at id 1"):
            rule.judge(Proposal(TokenTree.chain([1]), q), rows, history)
    with pytest.raises(SpecedgeError, match="nan at id 1"):
        rule.choose(broken, history, (), 0, [0, 1])


def test_nan_that_reaches_a_rule_past_every_check_is_an_error_too():
    broken = Law.of([0.5, math.nan])
    for name in ("token", "recursive"):
        numbers = Numbers(0, 0, lambda *key: LAST)
        with pytest.raises(ValueError, match="nan at id 1"):
            JUDGED[name](TokenTree.chain([0]), lambda node: Law.of([0.1, 0.9]), lambda node: broken, numbers)
        with pytest.raises(ValueError, match="found sum nan"):
            JUDGED[name](TokenTree.chain([]), lambda node: broken, no_q, numbers)


@pytest.mark.parametrize("name", [None, *RULES])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_ids_that_are_not_allowed_are_never_drafted_accepted_or_emitted(name: str | None, temperature: float):  # B39
    row = np.array([-3.0, -2.0, 0.0], np.float32)  # id 2 is padding, and the largest
    proposals = [Proposal(TokenTree.chain([2, 1])), Proposal(TokenTree.chain([2]), lambda node: Law.of([0.0, 0.5, 0.5]))]
    for seed in range(50):
        rule = rule_of(name, Sampling(temperature, seed=seed), 2)
        for proposal in proposals:
            accepted = rule.judge(proposal, [row] * 3, PROMPT)
            assert accepted.nodes == () and accepted.token < 2
        assert set(rule.choose(row, PROMPT, (), 0, [0, 1, 2]).tokens) <= {0, 1}


@pytest.mark.parametrize("name", BY_Q)
@pytest.mark.parametrize(("q", "same"), [([0.4, 0.6], [0.4, 0.6, 0.0]), ([0.2, 0.3, 0.1, 0.4], [0.2, 0.3, 0.1])])
def test_a_draft_vocabulary_of_another_size_has_no_mass_beyond_its_end(name: str, q: list[float], same: list[float]):
    rows, tree = [language(3, 1)(PROMPT)] * 2, TokenTree.chain([1])
    for seed in range(50):
        rule = rule_of(name, Sampling(1.0, seed=seed), 3)
        accepted = rule.judge(Proposal(tree, lambda node: Law.of(q)), rows, PROMPT)
        assert accepted == rule.judge(Proposal(tree, lambda node: Law.of(same)), rows, PROMPT)
        beyond = rule.judge(Proposal(TokenTree.chain([3]), lambda node: Law.of([0.25] * 4)), rows, PROMPT)
        assert beyond.nodes == ()


@pytest.mark.parametrize("name", BY_Q)
def test_what_a_rule_cannot_judge_is_refused(name: str):
    row, even = logits_of(0.5, 0.5), Law.of([0.5, 0.5])
    rule, siblings = rule_of(name, DRAWN, 2), Proposal(TokenTree((0, 1), (ROOT, ROOT)), lambda node: even)
    if name != "recursive":
        with pytest.raises(ValueError, match=rf"{name} rule: expected a chain, found parents \(-1, -1\)"):
            rule.judge(siblings, [row] * 3, PROMPT)
    with pytest.raises(ValueError, match="q after node -1: expected q > 0 for the drafted token 1"):  # not what drew it
        rule.judge(Proposal(TokenTree.chain([1]), lambda node: Law.of([1.0, 0.0])), [row] * 2, PROMPT)


@pytest.mark.parametrize("sampling", [DRAWN, Sampling()])
@pytest.mark.parametrize("name", RULES)
def test_every_node_needs_a_row(name: str, sampling: Sampling):
    with pytest.raises(ValueError, match="2 nodes, found 2 rows"):
        rule_of(name, sampling, 2).judge(Proposal(TokenTree.chain([1, 1])), [logits_of(0.5, 0.5)] * 2, PROMPT)


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_ids_are_not_drafted_at_any_rank(name: str, temperature: float) -> None:
    rule = rule_of(name, Sampling(temperature, banned_ids=[0, 1, 2, 4]), 6)
    tokens = rule.choose(logits_of(0.5, 0.2, 0.1, 0.1, 0.06, 0.04), PROMPT, (), 0, [0, 1, 2, 3, 4]).tokens
    assert {*tokens} == {3, 5} and len(tokens) == 2
