"""Laws of the coupled rule: exactly the target's distribution, and a text that no drafter changes.

With u uniform the times -log(1 - u_i) of three tokens are independent exponentials, and all decisions hang on r = t_1 / t_0
and s = t_2 / t_0, whose density is 2 / (1 + r + s)^3. Under a law p token i comes before j where t_i / p_i < t_j / p_j, so
orders change only on the lines r = p_1 / p_0, s = p_2 / p_0 and s = r p_2 / p_1, and the mass between two lines is known.
"""

import math
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest

from laws import (
    LAST,
    PROMPT,
    SAME,
    SAMPLINGS,
    LawOf,
    Line,
    Model,
    Tokens,
    distance,
    integrate,
    language,
    law_after,
    plain_law,
    random_tree,
)
from specedge.runtime.accept import accept_coupled, race
from specedge.runtime.law import Floats, Ids, Law
from specedge.runtime.philox import Numbers, Purpose, uniform
from specedge.runtime.rules import make_rule
from specedge.runtime.sample import Sampling
from specedge.runtime.sampler import Sampler
from specedge.runtime.shape import TreeShape
from specedge.runtime.tree import ROOT, Proposal, TokenTree

DRAWN = Sampling(1.0)
ALL = np.arange(3)

# The plane of r and s, cut by the lines of some laws.


@cache
def noises(laws: tuple[tuple[float, float, float], ...]) -> tuple[tuple[Floats, ...], tuple[float, ...]]:
    """One u [3] for every cell between the lines of these laws, and the probability of each cell."""
    verticals, levels, slopes = (_apart(law[i] / law[j] for law in laws if law[j] > 0.0) for i, j in ((1, 0), (2, 0), (2, 1)))
    breaks = _apart([*verticals, *(level / slope for level, slope in product(levels, slopes))])
    points: list[Floats] = []
    masses: list[float] = []
    for start, end in pairwise([0.0, *breaks, math.inf]):
        middle = math.sqrt(start * end) if start > 0.0 and end < math.inf else 2 * start or end / 2
        lines = [(level, 0.0) for level in levels] + [(0.0, slope) for slope in slopes]
        lines.sort(key=lambda line: line[0] + line[1] * middle)
        for below, above in pairwise([(0.0, 0.0), *lines, (math.inf, 0.0)]):
            r = _between(start, end, len(points))
            s = _between(below[0] + below[1] * r, above[0] + above[1] * r, len(points))
            times = np.array([1.0, r, s]) / max(1.0, r, s)
            points.append(-np.expm1(-times))
            masses.append(_beyond(below, start) - _beyond(below, end) - _beyond(above, start) + _beyond(above, end))
    return tuple(points), tuple(masses)


def _apart(values: Iterable[float]) -> list[float]:
    kept: list[float] = []
    for value in sorted(values):
        if value > 0.0 and (not kept or value > kept[-1] * (1 + 1e-12)):
            kept.append(value)
    return kept


def _between(start: float, end: float, number: int) -> float:
    """A point just inside one end or the other by turns, so that each line is seen from nearby."""
    low, high = start / (1.0 + start), 1.0 if end == math.inf else end / (1.0 + end)
    share = low + (high - low) * (1e-4 if number % 2 else 1.0 - 1e-4)
    return share / (1.0 - share)


def _beyond(line: tuple[float, float], r: float) -> float:
    """Mass to the right of r and above the line s = level + slope r: the integral of 1 / (1 + r + s)^2."""
    level, slope = line
    return 0.0 if math.inf in (level, r) else 1.0 / ((1.0 + slope) * (1.0 + level + (1.0 + slope) * r))


LAWS = [(0.5, 0.3, 0.2), (0.1, 0.2, 0.7), (0.0, 0.25, 0.75), (0.4, 0.6, 0.0), (0.0, 1.0, 0.0)]


@pytest.mark.parametrize("law", LAWS)
def test_the_race_draws_without_replacement(law: tuple[float, float, float]):
    points, masses = noises((law, (0.2, 0.3, 0.5)))  # a line too many does no harm
    assert sum(masses) == pytest.approx(1.0, abs=1e-12)

    def run(line: Line) -> Tokens:
        return race(Law.of(law), points[line.choice((0, Purpose.NOISE, 0), masses)], 2)

    drawn = integrate(run)
    pairs: LawOf = {(i, j): law[i] * law[j] / (1 - law[i]) for i, j in product(range(3), repeat=2) if i != j and law[i] < 1}
    if max(law) == 1.0:
        pairs = {(law.index(1.0),): 1.0}
    assert distance(drawn, pairs) < 1e-12
    for u in points:
        assert race(Law.of(law), u) == race(Law.of(law), u, 2)[:1] == race(Law.of(law), u, 3)[:1]


def test_equal_times_go_by_id_and_impossible_tokens_never_arrive():
    assert race(Law.of([0.0, 0.5, 0.5]), np.zeros(3)) == (1,)
    assert race(Law.of([0.0, 0.5, 0.5]), np.zeros(3), 3) == (1, 2)
    assert race(Law(np.array([4, 7]), np.array([0.0, 1.0])), np.array([0.0, LAST])) == (7,)


def test_a_token_of_hardly_any_chance_arrives_last():
    """At temperature 0.01 most of a vocabulary is like that: its times are beyond float64."""
    assert race(Law.of([5e-324, 1.0, 1e-310]), np.full(3, 0.5), 3) == (1, 0, 2)
    logits = np.linspace(0.0, -7.4, 400, dtype=np.float32)
    law = Sampler(Sampling(0.01), len(logits), 0).law(logits, [])
    assert 0.0 < law.p.min() < 1e-310
    assert race(law, np.full(len(logits), 0.5)) == (0,)


def test_a_round_remembers_no_noise_behind_its_root():
    vocab = 50_000
    rule = make_rule("coupled", Sampler(Sampling(1.0), vocab, 0))
    logits = np.zeros(vocab, np.float32)
    tracemalloc.start()
    for root in range(30):
        history = [0] * (root + 1)
        for depth in range(3):
            rule.choose(logits, history, (0,) * depth, 0, [0, 1])
        rule.judge(Proposal(TokenTree.chain([])), logits[None], history)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 3 * vocab * 8 <= held < 5 * vocab * 8  # the noise of three positions, and the ids


def test_two_laws_agree_as_often_as_the_paper_says():
    """Daliri et al. 2024, section 3: i wins both with probability 1 / sum_j max(p_j / p_i, q_j / q_i)."""
    p, q = LAWS[:2]
    points, masses = noises((p, q))
    for token in range(3):
        both = sum(m for u, m in zip(points, masses, strict=True) if race(Law.of(p), u) == race(Law.of(q), u) == (token,))
        assert both == pytest.approx(1 / sum(max(p[j] / p[token], q[j] / q[token]) for j in range(3)), abs=1e-12)


# The rule over whole rounds.

Guess = Callable[[Tokens, Numbers], TokenTree]  # drafts after a text


def coupled(drafter: Model, sampling: Sampling, shape: TreeShape) -> Guess:
    """The drafter holds the race that the target will hold."""

    def guess(text: Tokens, numbers: Numbers) -> TokenTree:
        tree, drafted = TokenTree.chain([]), {ROOT: ROOT}
        for above in (ROOT, *range(len(shape.parents))):
            wanted = shape.children(above)
            if above in drafted and wanted:
                path = tree.path(drafted[above])
                law = law_after(drafter, sampling, text, path)
                chosen = race(law, numbers.noise(len(path), law.ids), len(wanted))
                drafted |= {child: len(tree.tokens) + rank for rank, child in enumerate(wanted[: len(chosen)])}
                tree = TokenTree(tree.tokens + chosen, tree.parents + (drafted[above],) * len(chosen))
        return tree

    return guess


def arbitrary(seed: int) -> Guess:
    return lambda text, numbers: random_tree(3, seed, *text)


def play(target: Model, sampling: Sampling, guess: Guess, text: Tokens, numbers: Numbers) -> tuple[Tokens, int]:
    """What one round emits, and how much of it was drafted."""
    tree = guess(text, numbers)
    accepted = accept_coupled(tree, lambda node: law_after(target, sampling, text, tree.path(node)), numbers)
    return (*(tree.tokens[node] for node in accepted.nodes), accepted.token), len(accepted.nodes)


Reading = Callable[[int, int], int]  # root, position -> position whose noise is taken


def two_tokens(target: Model, drafter: Model | None, sampling: Sampling, guess: Guess, reading: Reading) -> LawOf:
    """Law of two tokens over as many rounds as they take, the noise of their positions integrated at once."""
    models = [target] if drafter is None else [target, drafter]
    texts: list[list[Tokens]] = [[PROMPT], [(*PROMPT, token) for token in range(3)]]
    cells = {}
    for position, seen in enumerate(texts, start=len(PROMPT)):
        rows = [law_after(model, sampling, text).dense(3).tolist() for text in seen for model in models]
        cells[position] = noises(tuple(map(tuple, rows)))

    def run(line: Line) -> Tokens:
        text = PROMPT
        while len(text) < len(PROMPT) + 2:
            root = len(text) - 1

            def noise(seed: int, position: int, purpose: Purpose, ids: Ids, root: int = root) -> Floats:
                position = reading(root, position)
                if position not in cells:  # beyond the second token
                    return np.array([0.1, 0.5, 0.9])[ids]
                points, masses = cells[position]
                return points[line.choice((position, purpose, 0), masses)][ids]

            text += play(target, sampling, guess, text, Numbers(0, root, uniforms=noise))[0]
        return text[len(PROMPT) : len(PROMPT) + 2]

    return integrate(run)


def rightly(root: int, position: int) -> int:
    return position


def by_root(root: int, position: int) -> int:
    return root + 1


SHAPES = [[[0], [0, 0]], [[0], [1], [0, 0]], [[0], [1], [2], [0, 0], [1, 0]]]


@pytest.mark.parametrize("paths", SHAPES)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_coupled_drafts_keep_the_target_exactly(sampling: Sampling, paths: list[list[int]]):
    target, drafter = language(3, 1, order=1), language(3, 2, order=0)
    guess = coupled(drafter, sampling, TreeShape.from_paths(paths))
    law = two_tokens(target, drafter, sampling, guess, rightly)
    assert distance(law, plain_law(target, sampling, 2)) < SAME


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_arbitrary_drafts_keep_the_target_exactly(sampling: Sampling, seed: int):
    target = language(3, 1)
    law = two_tokens(target, None, sampling, arbitrary(seed), rightly)
    assert distance(law, plain_law(target, sampling, 2)) < SAME


def test_one_noise_for_a_whole_round_is_noticed():
    target, chain = language(3, 1), coupled(language(3, 1), DRAWN, TreeShape.chain(1))
    law = two_tokens(target, None, DRAWN, chain, by_root)
    assert distance(law, plain_law(target, DRAWN, 2)) > 0.05


# With the numbers of a seed.


def written(target: Model, sampling: Sampling, guess: Guess, count: int) -> tuple[Tokens, int]:
    """A text of the real random numbers, and how much of it was drafted."""
    text, agreed = PROMPT, 0
    while len(text) < len(PROMPT) + count:
        tokens, accepted = play(target, sampling, guess, text, Numbers(sampling.seed, len(text) - 1))
        text += tokens
        agreed += accepted
    return text[len(PROMPT) : len(PROMPT) + count], agreed


def guesses(sampling: Sampling) -> Iterator[Guess]:
    drafter = language(3, 2)
    yield from (coupled(drafter, sampling, TreeShape.chain(gamma)) for gamma in (1, 2, 5))
    yield from (coupled(drafter, sampling, TreeShape.from_paths(paths)) for paths in SHAPES)
    yield from (arbitrary(seed) for seed in range(3))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_no_drafter_and_no_tree_changes_the_text(sampling: Sampling, seed: int):
    target = language(3, 7)
    seeded = replace(sampling, seed=seed)
    plain, agreed = written(target, seeded, lambda text, numbers: TokenTree.chain([]), 40)
    assert agreed == 0
    for guess in guesses(seeded):
        text, agreed = written(target, seeded, guess, 40)
        assert text == plain
        assert agreed > 0


def test_seeds_differ():
    texts = {written(language(5, 1), Sampling(1.0, seed=seed), arbitrary(0), 30)[0] for seed in range(10)}
    assert len(texts) == 10


def test_noise_belongs_to_the_position_and_the_id():
    numbers = Numbers(2**63 + 5, 11)
    expected = [uniform(2**63 + 5, 14, Purpose.NOISE, token) for token in (3, 8)]
    assert numbers.noise(2, np.array([3, 8])).tolist() == expected


def test_a_draft_of_the_target_itself_is_always_accepted():
    target = language(3, 3)
    for seed in range(20):
        sampling = Sampling(1.0, seed=seed)
        guess = coupled(target, sampling, TreeShape.chain(4))
        assert play(target, sampling, guess, PROMPT, Numbers(seed, 0))[1] == 4


def test_the_noise_decides_alone_which_child_is_followed():
    """Not the order of drafting: the winner may be any child, or none."""
    p = Law.of([0.2, 0.5, 0.3])
    for seed in range(50):
        numbers = Numbers(seed, 0)
        winner = race(p, numbers.noise(0, ALL))[0]
        for tokens in ((0, 1, 2), (2, 1, 0), (1,), ()):
            accepted = accept_coupled(TokenTree(tokens, (ROOT,) * len(tokens)), lambda node: p, numbers)
            assert accepted.nodes == ((tokens.index(winner),) if winner in tokens else ())
            assert accepted.nodes or accepted.token == winner
