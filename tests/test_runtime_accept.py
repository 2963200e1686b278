"""Laws of the acceptance rules: what comes out has exactly the target's distribution, and known wrong rules fail."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import chisquare

from specedge.errors import SpecedgeError
from specedge.runtime import accept
from specedge.runtime.accept import (
    Accepted,
    Rule,
    accept_greedy,
    accept_point_mass,
    accept_token_rule,
    rejection_sample,
)
from specedge.runtime.philox import Purpose, Uniform, uniform
from specedge.runtime.sample import Law, Logits, Sampling, best, draw, probabilities
from specedge.runtime.tree import ROOT, Proposal, TokenTree

LAST = math.nextafter(1.0, 0.0)
Tokens = tuple[int, ...]
PROMPT: Tokens = (0,)
LawOf = Mapping[Tokens, float]  # tokens emitted -> probability
Model = Callable[[Tokens], Logits]  # text -> logits of what follows
Judge = Callable[[TokenTree, list[Logits], int, Uniform], Accepted]  # a rule, bound to all but the round
Propose = Callable[[Tokens], Proposal]

SAMPLINGS = [Sampling(1.0), Sampling(0.7, top_k=2), Sampling(1.3, top_p=0.8), Sampling(0.9, top_k=3, top_p=0.9)]


def logits_of(*p: float) -> Logits:
    with np.errstate(divide="ignore"):
        return np.log(np.array(p)).astype(np.float32)


def language(vocab: int, seed: int) -> Model:
    """A model in which every text has logits of its own."""

    @cache
    def logits(text: Tokens) -> Logits:
        return np.random.default_rng([seed, *text]).normal(0, 1.5, vocab).astype(np.float32)

    return logits


def always(*p: float) -> Model:
    return lambda text: logits_of(*p)


def texts(text: Tokens, tree: TokenTree) -> list[Tokens]:
    """What each verify row has seen."""
    seen = [text]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        seen.append((*seen[parent + 1], token))
    return seen


def emitted(tree: TokenTree, accepted: Accepted) -> Tokens:
    return (*(tree.tokens[node] for node in accepted.nodes), accepted.token)


def random_tree(vocab: int, *seed: int) -> TokenTree:
    rng = np.random.default_rng(seed)
    nodes: list[tuple[int, int]] = []
    for _ in range(rng.integers(0, 8)):
        node = (int(rng.integers(ROOT, len(nodes))), int(rng.integers(vocab)))
        if node not in nodes:
            nodes.append(node)
    return TokenTree(tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes))


# Exact laws: integrate over the random numbers.


class UnknownNumberError(Exception):
    """A number that the integration has not fixed yet."""


def integrate(run: Callable[[Uniform], Tokens], cuts: Callable[[int, Purpose, int], list[float]]) -> LawOf:
    """Law of `run` over independent uniform numbers: each is split at all `cuts`, where an answer may change."""
    law: dict[Tokens, float] = defaultdict(float)
    pending: list[tuple[dict[tuple[int, Purpose, int], float], float]] = [({}, 1.0)]
    while pending:
        known, mass = pending.pop()

        def numbers(
            seed: int,
            position: int,
            purpose: Purpose,
            index: int = 0,
            known: Mapping[tuple[int, Purpose, int], float] = known,
        ) -> float:
            if (position, purpose, index) not in known:
                raise UnknownNumberError(position, purpose, index)
            return known[position, purpose, index]

        try:
            law[run(numbers)] += mass
        except UnknownNumberError as missing:
            ends = sorted({0.0, 1.0, *(cut for cut in cuts(*missing.args) if cut < 1.0)})
            pending += [({**known, missing.args: (a + b) / 2}, mass * (b - a)) for a, b in pairwise(ends)]
    return law


def round_law(
    judge: Judge, target: Model, sampling: Sampling, text: Tokens, tree: TokenTree, q: list[Law] | None = None
) -> LawOf:
    """Law of what one round emits after `text` when `tree` was drafted."""
    root = len(text) - 1
    logits = [target(seen) for seen in texts(text, tree)]
    laws = [probabilities(row, sampling, None) for row in logits]

    def cuts(position: int, purpose: Purpose, index: int) -> list[float]:
        if purpose is Purpose.ACCEPT:
            assert q is not None
            return [float(laws[index][tree.tokens[index]] / q[index][tree.tokens[index]])]
        rows = [row for row, depth in enumerate(tree.depths) if depth == position - root - 1]
        residuals = [np.maximum(laws[row] - q[row], 0.0) for row in rows if row < len(q)] if q else []
        spread = [
            *(laws[row] for row in rows),
            *(residual / residual.sum() for residual in residuals if residual.any()),
        ]
        return [float(end) for law in spread for end in np.cumsum(law)]

    def run(numbers: Uniform) -> Tokens:
        asked: list[tuple[int, Purpose]] = []

        def recorded(seed: int, position: int, purpose: Purpose, index: int = 0) -> float:
            asked.append((position, purpose))
            return numbers(seed, position, purpose, index)

        tokens = emitted(tree, judge(tree, logits, root, recorded))
        # No later round asks for a number of this one, so rounds are independent and laws of rounds may be chained.
        for position, purpose in asked:
            assert root < position <= root + len(tokens) if purpose is Purpose.TOKEN else position == root
        return tokens

    return integrate(run, cuts)


def drafted_law(
    judge: Callable[[list[Law]], Judge],
    target: Model,
    drafter: Model,
    sampling: Sampling,
    gamma: int,
    claim: Callable[[Law, Logits], Law] = lambda q, logits: q,
) -> Callable[[Tokens], LawOf]:
    """Law of a round whose chain is drawn from the drafter; `claim` is the q that the rule is told."""

    def law_after(text: Tokens) -> LawOf:
        law: dict[Tokens, float] = defaultdict(float)
        for drafts in product(range(len(target(text))), repeat=gamma):
            rows = [drafter(text + drafts[:node]) for node in range(gamma)]
            drawn = [probabilities(row, sampling, None) for row in rows]
            mass = math.prod(q[token] for q, token in zip(drawn, drafts, strict=True))
            if mass > 0.0:
                told = [claim(q, row) for q, row in zip(drawn, rows, strict=True)]
                tree = TokenTree.chain(drafts)
                for tokens, share in round_law(judge(told), target, sampling, text, tree, told).items():
                    law[tokens] += mass * share
        return law

    return law_after


def next_tokens(law_after: Callable[[Tokens], LawOf], text: Tokens, count: int) -> LawOf:
    """Law of the next `count` tokens, over as many rounds as they take."""
    law: dict[Tokens, float] = defaultdict(float)
    for tokens, mass in law_after(text).items():
        if len(tokens) >= count:
            law[tokens[:count]] += mass
            continue
        for rest, share in next_tokens(law_after, text + tokens, count - len(tokens)).items():
            law[tokens + rest] += mass * share
    return law


def plain_law(target: Model, sampling: Sampling, text: Tokens, count: int) -> LawOf:
    return next_tokens(
        lambda text: {(token,): float(p) for token, p in enumerate(probabilities(target(text), sampling, None))},
        text,
        count,
    )


def distance(one: LawOf, other: LawOf) -> float:
    return max(abs(one.get(tokens, 0.0) - other.get(tokens, 0.0)) for tokens in {*one, *other})


def token_judge(sampling: Sampling) -> Callable[[list[Law]], Judge]:
    return lambda q: lambda tree, logits, root, numbers: accept_token_rule(tree, logits, q, sampling, root, None, numbers)


def point_mass_judge(sampling: Sampling) -> Judge:
    return lambda tree, logits, root, numbers: accept_point_mass(tree, logits, sampling, root, None, numbers)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("vocab", "gamma"), [(3, 0), (3, 1), (3, 2), (4, 2), (5, 1), (3, 3)])
def test_the_token_rule_keeps_the_target_exactly(sampling: Sampling, vocab: int, gamma: int):
    target, drafter = language(vocab, 1), language(vocab, 2)
    law = next_tokens(drafted_law(token_judge(sampling), target, drafter, sampling, gamma), PROMPT, 2)
    assert distance(law, plain_law(target, sampling, PROMPT, 2)) < 1e-10


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("vocab", [3, 4, 5])
def test_point_mass_keeps_the_target_exactly_on_every_tree(sampling: Sampling, vocab: int):
    target = language(vocab, 1)
    for seed in range(6):

        def law_after(text: Tokens, seed: int = seed) -> LawOf:
            tree = random_tree(vocab, seed, *text)
            return round_law(point_mass_judge(sampling), target, sampling, text, tree)

        assert distance(next_tokens(law_after, PROMPT, 2), plain_law(target, sampling, PROMPT, 2)) < 1e-10


def test_point_mass_is_the_token_rule_with_one_hot_q_in_law():
    sampling, target, tree = Sampling(1.0), language(4, 1), TokenTree.chain([2, 1])
    one_hot = [np.eye(4)[token] for token in tree.tokens]
    by_q = round_law(token_judge(sampling)(one_hot), target, sampling, PROMPT, tree, one_hot)
    assert distance(by_q, round_law(point_mass_judge(sampling), target, sampling, PROMPT, tree)) < 1e-10


# Known wrong rules: the tests above must be able to tell.


def first_token(law: LawOf, vocab: int) -> list[float]:
    return [sum(mass for tokens, mass in law.items() if tokens[0] == token) for token in range(vocab)]


@pytest.mark.parametrize(
    ("unfiltered", "share"),
    [(False, [0.8, 0.2, 0.0, 0.0]), (True, [2 / 3, 1 / 3, 0.0, 0.0])],
)
def test_q_is_what_was_drawn_from(unfiltered: bool, share: list[float]):  # B42
    sampling, target, drafter = Sampling(1.0, top_k=2), always(0.64, 0.16, 0.1, 0.1), always(0.3, 0.3, 0.2, 0.2)

    def claim(q: Law, logits: Logits) -> Law:
        return probabilities(logits, Sampling(1.0), None) if unfiltered else q

    law = drafted_law(token_judge(sampling), target, drafter, sampling, 1, claim)(PROMPT)
    assert first_token(law, 4) == pytest.approx(share, abs=1e-7)  # the logits are float32


@pytest.mark.parametrize(("q", "share"), [([1.0, 0.0], [0.4, 0.6]), ([0.5, 0.5], [0.8, 0.2])])
def test_an_argmax_draft_has_one_hot_q_and_not_its_softmax(q: list[float], share: list[float]):  # B43
    sampling, claimed = Sampling(1.0), [np.array(q)]
    law = round_law(token_judge(sampling)(claimed), always(0.4, 0.6), sampling, PROMPT, TokenTree.chain([0]), claimed)
    assert first_token(law, 2) == pytest.approx(share, abs=1e-7)


TOP_TWO = [
    TokenTree((0,), (ROOT,)),
    TokenTree((0, 1), (ROOT, ROOT)),
    TokenTree((0, 1), (ROOT, 0)),
    TokenTree((0, 0, 1, 0), (ROOT, 0, ROOT, 2)),
]


@pytest.mark.parametrize("tree", TOP_TWO)
def test_deterministic_siblings_leave_the_law_alone(tree: TokenTree):  # B46
    law = round_law(point_mass_judge(Sampling(1.0)), always(0.5, 0.3, 0.2), Sampling(1.0), PROMPT, tree)
    assert first_token(law, 3) == pytest.approx([0.5, 0.3, 0.2], abs=1e-7)


@pytest.mark.parametrize(
    ("softmax", "update", "share"),
    [(False, True, [0.5, 0.3, 0.2]), (True, True, [5 / 6, 0.0, 1 / 6]), (False, False, [0.75, 0.15, 0.1])],
)
def test_siblings_need_one_hot_q_and_the_residual_of_the_one_before(softmax: bool, update: bool, share: list[float]):  # B46
    def run(numbers: Uniform) -> Tokens:
        law = residual = np.array([0.5, 0.3, 0.2])
        for token in (0, 1):
            q = np.array([0.6, 0.3, 0.1]) if softmax else np.eye(3)[token]
            rejected = rejection_sample(law, q, token, numbers(0, 0, Purpose.ACCEPT, token))
            if rejected is None:
                return (token,)
            residual = rejected
            law = residual if update else law
        return (draw(residual, numbers(0, 1, Purpose.TOKEN, 0)),)

    law = integrate(run, lambda position, purpose, index: [0.3, 0.5, 0.6, 5 / 7, 5 / 6])
    assert first_token(law, 3) == pytest.approx(share, abs=1e-12)


# The textbook operator.


@given(
    arrays(np.float64, 5, elements=st.floats(0, 1)).filter(lambda p: p.sum() > 0.1),
    arrays(np.float64, st.integers(3, 7), elements=st.floats(0, 1)).filter(lambda q: q.sum() > 0.1),
)
@settings(deadline=None, derandomize=True)
def test_the_operator_turns_q_into_p(p: Law, q: Law):
    """Also where the two vocabularies differ in size."""
    p, q = p / p.sum(), q / q.sum()
    law = np.zeros(5)
    for token, mass in enumerate(q):
        target = p[token] if token < 5 else 0.0
        ratio = target / mass if target < mass else 1.0
        for start, end in pairwise([0.0, ratio, 1.0]):
            residual = rejection_sample(p, q, token, (start + end) / 2)
            law += mass * (end - start) * (np.eye(5, 7)[:, token] if residual is None else residual)
    np.testing.assert_allclose(law, p, atol=1e-12)


def test_an_impossible_token_is_never_accepted():
    p, q = np.array([0.0, 1.0]), np.array([0.5, 0.5])

    def loose(u: float) -> bool:
        return bool(u <= p[0] / q[0])

    assert loose(0.0)  # the wrong test accepts a token the target never emits
    for u in (0.0, 5e-324, 0.5, LAST):
        residual = rejection_sample(p, q, 0, u)
        assert residual is not None
        assert residual.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("u", [0.0, LAST, 1.0])
def test_equal_distributions_accept_or_fall_back_to_p(u: float):  # B44
    one_hot = np.array([0.0, 1.0, 0.0])
    residual = rejection_sample(one_hot, one_hot, 1, u)
    assert (residual is None) == (u < 1.0)
    assert residual is None or draw(residual, u) == 1


def test_a_residual_of_rounding_noise_is_still_a_distribution():  # B44
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(50)).astype(np.float32)
    for noise in (1e-9, 1e-8, 0.0):
        q = p + np.float32(noise)
        for token in range(50):
            residual = rejection_sample(p, q, token, 1.0)
            assert residual is None or (np.isfinite(residual).all() and p[draw(residual, LAST)] > 0.0)


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


# The rules over whole texts, with the numbers of a seed.


def speculate(rule: Rule, target: Model, propose: Propose, count: int) -> Tokens:
    """`count` tokens after PROMPT, and more if the last round has them."""
    text = PROMPT
    agreed = 0
    while len(text) < len(PROMPT) + count:
        proposal = propose(text)
        accepted = rule(proposal, [target(seen) for seen in texts(text, proposal.tree)], len(text) - 1)
        agreed += len(accepted.nodes)
        text += emitted(proposal.tree, accepted)
    assert agreed > 0 or propose(PROMPT).tree.tokens == ()
    return text[len(PROMPT) : len(PROMPT) + count]


def plainly(target: Model, pick: Callable[[Logits, int], int], count: int) -> Tokens:
    text = PROMPT
    for position in range(len(PROMPT), len(PROMPT) + count):
        text += (pick(target(text), position),)
    return text[len(PROMPT) :]


def drawn_chain(drafter: Model, sampling: Sampling, gamma: int) -> Propose:
    def propose(text: Tokens) -> Proposal:
        drafts: Tokens = ()
        q = []
        for node in range(gamma):
            q.append(probabilities(drafter(text + drafts), sampling, None))
            drafts += (draw(q[-1], uniform(sampling.seed, len(text) - 1, Purpose.DRAFT, node)),)
        return Proposal(TokenTree.chain(drafts), q)

    return propose


@pytest.mark.parametrize("seed", range(10))
def test_greedy_text_is_plain_greedy_text_for_every_tree(seed: int):
    target = language(3, seed)
    text = speculate(accept.greedy(None), target, lambda text: Proposal(random_tree(3, seed, *text)), 40)
    assert text == plainly(target, lambda row, position: best(row, None), 40)


@pytest.mark.parametrize("sampling", [*SAMPLINGS, Sampling()])
@pytest.mark.parametrize("rule", [accept.point_mass, accept.token])
@pytest.mark.parametrize("seed", range(5))
def test_text_is_the_plain_text_of_the_seed_when_nothing_is_drawn(
    sampling: Sampling, rule: Callable[[Sampling, None], Rule], seed: int
):
    target = language(3, 7)
    sampling = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, seed)

    def pick(row: Logits, position: int) -> int:
        return draw(probabilities(row, sampling, None), uniform(seed, position, Purpose.TOKEN))

    plain = plainly(target, pick, 40)
    for tree_seed in range(3):

        def propose(text: Tokens, tree_seed: int = tree_seed) -> Proposal:
            return Proposal(random_tree(3, tree_seed, *text))

        assert speculate(rule(sampling, None), target, propose, 40) == plain
    assert speculate(rule(sampling, None), target, lambda text: Proposal(TokenTree.chain([])), 40) == plain


def test_a_seed_gives_one_text_and_seeds_differ():  # B48
    target, drafter = language(5, 1), language(5, 2)

    def text(seed: int) -> Tokens:
        sampling = Sampling(1.0, seed=seed)
        return speculate(accept.token(sampling, None), target, drawn_chain(drafter, sampling, 3), 30)

    assert text(42) == text(42)
    assert len({text(seed) for seed in range(10)}) == 10


def test_the_numbers_of_seeds_give_the_law():
    """The same law as above, with the real random numbers: three tokens over two or three rounds."""
    target, drafter, count = language(3, 1), language(3, 2), 3
    observed: dict[Tokens, int] = defaultdict(int)
    for seed in range(4000):
        sampling = Sampling(0.7, seed=seed)
        propose = drawn_chain(drafter, sampling, 2)
        text = PROMPT
        while len(text) < len(PROMPT) + count:
            proposal = propose(text)
            rows = [target(seen) for seen in texts(text, proposal.tree)]
            text += emitted(proposal.tree, accept.token(sampling, None)(proposal, rows, len(text) - 1))
        observed[text[len(PROMPT) : len(PROMPT) + count]] += 1
    expected = {tokens: mass * 4000 for tokens, mass in plain_law(target, Sampling(0.7), PROMPT, count).items()}
    rare = [tokens for tokens, number in expected.items() if number < 5]
    common = [tokens for tokens in expected if tokens not in rare]
    counts = [[*(law.get(tokens, 0) for tokens in common), sum(law.get(t, 0) for t in rare)] for law in (observed, expected)]
    assert chisquare(*counts).pvalue > 0.001


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("gamma", [1, 4])
def test_a_draft_of_the_target_itself_is_always_accepted(sampling: Sampling, gamma: int):
    target = language(5, 3)
    for seed in range(20):
        seeded = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, seed)
        proposal = drawn_chain(target, seeded, gamma)(PROMPT)
        rows = [target(seen) for seen in texts(PROMPT, proposal.tree)]
        assert accept.token(seeded, None)(proposal, rows, 0).nodes == tuple(range(gamma))


# Edges.

NOT_READ = np.full(3, np.nan, np.float32)


def test_rows_off_the_path_are_never_read():
    tree = TokenTree((0, 1, 2, 1), (ROOT, ROOT, 0, 1))
    sure = logits_of(0.0, 1.0, 0.0)  # emits 1
    rows = [sure, NOT_READ, sure, NOT_READ, sure, NOT_READ]  # the last is padding
    expected = Accepted((1, 3), 1)
    assert accept_greedy(tree, rows, None) == expected
    assert accept_point_mass(tree, rows, Sampling(1.0), 0, None) == expected
    chain, q = TokenTree.chain([1, 0, 1]), [np.array([0.5, 0.5, 0.0])] * 2 + [NOT_READ]
    assert accept_token_rule(chain, [sure, sure, NOT_READ, NOT_READ], q, Sampling(1.0), 0, None) == Accepted((0,), 1)


def test_nan_is_an_error_that_names_the_position():  # B44
    tree, rows = TokenTree.chain([1]), [logits_of(0.0, 1.0, 0.0), np.array([0.0, np.nan, 0.0], np.float32)]
    half = [np.array([0.5, 0.5, 0.0])]
    with pytest.raises(SpecedgeError, match="verify row 1: nan at id 1"):
        accept_greedy(tree, rows, None)
    with pytest.raises(SpecedgeError, match="position 9: nan at id 1"):
        accept_point_mass(tree, rows, Sampling(1.0), 7, None)
    with pytest.raises(SpecedgeError, match="position 9: nan at id 1"):
        accept_token_rule(tree, rows, half, Sampling(1.0), 7, None)
    with pytest.raises(ValueError, match=r"q for position 8: .* nan at id 0"):
        accept_token_rule(tree, rows, [np.array([np.nan, 0.5, 0.5])], Sampling(1.0), 7, None)


def test_ids_that_are_not_allowed_are_neither_accepted_nor_emitted():  # B39
    rows = [np.array([-3.0, -2.0, 0.0], np.float32)] * 2  # row 2 is padding, and the largest
    tree, q = TokenTree.chain([2]), [np.array([0.0, 0.5, 0.5])]
    for seed in range(50):
        sampling = Sampling(2.0, seed=seed)
        for accepted in (
            accept_greedy(tree, rows, 2),
            accept_point_mass(tree, rows, sampling, 0, 2),
            accept_token_rule(tree, rows, q, sampling, 0, 2),
        ):
            assert accepted.nodes == ()
            assert accepted.token < 2


@pytest.mark.parametrize(("q", "same"), [([0.4, 0.6], [0.4, 0.6, 0.0]), ([0.2, 0.3, 0.1, 0.4], [0.2, 0.3, 0.1])])
def test_a_draft_vocabulary_of_another_size_has_no_mass_beyond_its_end(q: list[float], same: list[float]):
    rows, tree = [language(3, 1)(PROMPT)] * 2, TokenTree.chain([1])
    for seed in range(50):
        sampling = Sampling(1.0, seed=seed)
        accepted = accept_token_rule(tree, rows, [np.array(q)], sampling, 0, None)
        assert accepted == accept_token_rule(tree, rows, [np.array(same)], sampling, 0, None)
        beyond = accept_token_rule(TokenTree.chain([3]), rows, [np.full(4, 0.25)], sampling, 0, None)
        assert beyond.nodes == ()


def test_what_the_token_rule_cannot_judge_is_refused():
    row = logits_of(0.5, 0.5)
    with pytest.raises(ValueError, match="expected a chain"):
        accept_token_rule(TokenTree((0, 1), (ROOT, ROOT)), [row] * 3, [np.ones(2) / 2] * 2, Sampling(1.0), 0, None)
    with pytest.raises(ValueError, match="q > 0 for the drafted token 1"):  # q is not what drew it
        accept_token_rule(TokenTree.chain([1]), [row] * 2, [np.array([1.0, 0.0])], Sampling(1.0), 0, None)


def test_every_node_needs_a_row():
    row, tree = logits_of(0.5, 0.5), TokenTree.chain([1, 1])
    with pytest.raises(ValueError, match="2 nodes, found 2 rows"):
        accept_greedy(tree, [row] * 2, None)
    with pytest.raises(ValueError, match="2 nodes, found 2 rows"):
        accept_token_rule(tree, [row] * 2, [np.ones(2) / 2] * 2, Sampling(1.0), 0, None)
