"""Sampled text has exactly the target's law, and is a function of the seed."""

import random
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

import bundles
from specedge.runtime import Engine, Sampling, load
from tiny import Array, deterministic_chain, f_chain, f_rand, random_chain

REQUESTS = 6000
GAMMA = 3
VOCAB = 64
P, Q = random_chain(VOCAB, seed=1), random_chain(VOCAB, seed=2)
START = 5


def likeliest(token: int) -> int:
    return int(P[token].argmax())


# Likely tokens follow the first 5, so that what lookup copies after the last one is sometimes accepted.
COPIED = [ONE := likeliest(START), TWO := likeliest(ONE), likeliest(TWO)]
LOOKUP_PROMPT = [START, *COPIED, START]
TINY: dict[str, Any] = {"context": 128, "chunk": 8, "widths": (1, 8)}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("chains")
    f_chain(place / "target", P)
    f_chain(place / "draft", Q)
    for name, row in (("p", [0.64, 0.16, 0.10, 0.10]), ("q", [0.30, 0.30, 0.20, 0.20])):  # B42
        law = deterministic_chain(VOCAB, {})
        law[:, :] = np.pad(np.array(row), (0, VOCAB - 4))
        f_chain(place / name, law)
    return place


@pytest.fixture(scope="module", params=["cpu", "cpu-static"])
def engines(request: pytest.FixtureRequest, sources: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    place = tmp_path_factory.mktemp("bundles")
    options = TINY | {"device": request.param}
    path = bundles.make(sources / "target", place / "bundle", draft=str(sources / "draft"), **options)
    other = bundles.engine(sources / "p", place / "b42", draft=str(sources / "q"), **options)
    return {"draft": load(path, threads=1), "lookup": load(path, drafter="lookup", threads=1), "b42": other}


def law_of(row: Array, temperature: float) -> Array:
    scaled = np.exp(np.log(row) / temperature)
    law: Array = scaled / scaled.sum()
    return law


def chi_square(counts: Array, law: Array) -> float:
    """p-value of `counts` under `law`; outcomes expected less than five times are taken together."""
    expected = law.ravel() / law.sum() * counts.sum()
    order = expected.argsort()[::-1]
    common = max(int((expected >= 5).sum()), 1)
    observed, expected = counts.ravel()[order], expected[order]
    if expected[common:].sum() < 5:  # too rare even together
        common -= 1
    merged = [[*values[:common], values[common:].sum()] for values in (observed, expected)]
    return float(chisquare(*merged).pvalue)


def first_two(engine: Engine, prompt: Sequence[int], sampling: Sampling) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """The first two of five tokens, and (drafted, accepted) of the rounds they took."""
    stream = engine.stream(prompt, sampling, max_new_tokens=5, gamma=GAMMA)
    first, second = islice(stream, 2)
    stream.close()
    return (first.id, second.id), stream.result().stats.per_round


# Each request takes a millisecond or two: all four pairs in one form, two of them in the other.
CASES = [*product(["cpu-static"], ("draft", "lookup"), (0.7, 1.3)), ("cpu", "draft", 1.3), ("cpu", "lookup", 0.7)]


@pytest.mark.parametrize(("engines", "drafter", "temperature"), CASES, indirect=["engines"])
def test_the_first_two_tokens_have_the_law_of_the_target(engines: dict[str, Engine], drafter: str, temperature: float) -> None:
    engine, prompt = engines[drafter], [START] if drafter == "draft" else LOOKUP_PROMPT
    pairs, rounds = np.zeros((VOCAB, VOCAB)), []
    for seed in range(REQUESTS):
        pair, per_round = first_two(engine, prompt, Sampling(temperature, seed=seed))
        pairs[pair] += 1
        rounds.append(per_round[0])
    assert all(drafted == GAMMA for drafted, _ in rounds)
    accepted = np.bincount([accepted for _, accepted in rounds], minlength=GAMMA + 1)
    assert accepted.min() > 0  # every kind of round took part: nothing accepted, something, everything

    first = law_of(P[START], temperature)
    joint = first[:, None] * np.stack([law_of(row, temperature) for row in P])
    assert chi_square(pairs.sum(axis=1), first) > 0.001
    assert chi_square(pairs.sum(axis=0), joint.sum(axis=0)) > 0.001
    assert chi_square(pairs, joint) > 0.001
    # and the test would notice the draft's law in its place
    assert chi_square(pairs.sum(axis=1), law_of(Q[START], temperature)) < 1e-9


@pytest.mark.parametrize("engines", ["cpu-static"], indirect=True)
def test_q_is_what_was_drawn_from(engines: dict[str, Engine]) -> None:  # B42
    """top-k on both sides: the rule has to see q after the filter. Judged by the raw q it gives 0.667."""
    counts = np.zeros(VOCAB)
    for seed in range(REQUESTS):
        stream = engines["b42"].stream([START], Sampling(1.0, top_k=2, seed=seed), max_new_tokens=2, gamma=1)
        counts[next(stream).id] += 1
        assert stream.result().stats.per_round[0][0] == 1
        stream.close()
    assert counts[2:].sum() == 0
    assert chisquare(counts[:2], [0.8 * REQUESTS, 0.2 * REQUESTS]).pvalue > 0.001


# ---- the seed (B48)


def sample(
    engine: Engine, seed: int, gamma: int | None = GAMMA, prompt: Sequence[int] = LOOKUP_PROMPT, **settings: Any
) -> list[int]:
    result = engine.generate(prompt, Sampling(1.0, seed=seed, **settings), max_new_tokens=40, gamma=gamma)
    assert result.stats.drafted > 0 or not gamma
    return result.ids


@pytest.mark.parametrize("drafter", ["draft", "lookup"])
def test_the_same_seed_gives_the_same_text(engines: dict[str, Engine], drafter: str) -> None:
    engine = engines[drafter]
    states = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]  # a tuple, in this form
    ids = sample(engine, 42)
    assert sample(engine, 42) == ids
    sample(engine, 7, prompt=[9, 9, 9])
    assert sample(engine, 42) == ids
    assert [token.id for token in engine.stream(LOOKUP_PROMPT, Sampling(1.0, seed=42), 40, gamma=GAMMA)] == ids
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states  # type: ignore[index]  # as above
    again = load(engine.bundle.path, drafter=drafter, threads=1)
    random.seed(1)
    assert sample(again, 42) == ids


def test_the_same_seed_gives_the_same_text_in_another_process(engines: dict[str, Engine]) -> None:
    program = (
        "import sys; from specedge.runtime import Sampling, load; "
        f"engine = load(sys.argv[1], threads=1); sampling = Sampling(1.0, seed=42); "
        f"print(engine.generate({LOOKUP_PROMPT}, sampling, 40, gamma={GAMMA}).ids)"
    )
    command = [sys.executable, "-c", program, str(engines["draft"].bundle.path)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == str(sample(engines["draft"], 42))


@pytest.mark.parametrize("drafter", ["draft", "lookup"])
def test_seeds_matter(engines: dict[str, Engine], drafter: str) -> None:
    assert len({tuple(sample(engines[drafter], seed)) for seed in range(10)}) >= 9


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.8}])
def test_lookup_leaves_the_text_of_a_seed_as_it_is(engines: dict[str, Engine], settings: dict[str, Any]) -> None:
    """A point mass decides by the plain draw, whatever is drafted: token for token the plain text."""
    for seed in range(20):
        plain = sample(engines["lookup"], seed, 0, **settings)
        assert all(sample(engines["lookup"], seed, gamma, **settings) == plain for gamma in (1, 2, 5, None))
        assert sample(engines["draft"], seed, 0, **settings) == plain


# ---- extreme parameters (B47), on a model in which everything matters


@pytest.fixture(scope="module")
def rand(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    place = tmp_path_factory.mktemp("rand")
    f_rand(place / "target", eos_token_id=None)
    f_rand(place / "draft", seed=1, eos_token_id=None)
    return bundles.engine(place / "target", place / "bundle", draft=str(place / "draft"), **TINY)


PROMPT = [3, 14, 15, 92]


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 1e-6}, {"temperature": 1e-4}, {"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}],
    ids=str,
)
def test_parameters_that_leave_one_token_are_greedy(rand: Engine, settings: dict[str, Any]) -> None:
    sampling = Sampling(**({"temperature": 1.0} | settings))
    result = rand.generate(PROMPT, sampling, 30, gamma=GAMMA)
    assert result.ids == rand.generate(PROMPT, max_new_tokens=30, speculate=False).ids
    assert result.stats.drafted > 0


@pytest.mark.parametrize("settings", [{"top_k": 0}, {"top_k": 128}, {"top_k": 10**7}, {"top_p": 1.0}], ids=str)
def test_parameters_that_filter_nothing_are_off(rand: Engine, settings: dict[str, Any]) -> None:
    for seed in range(3):
        off = rand.generate(PROMPT, Sampling(1.0, seed=seed), 30, gamma=GAMMA)
        assert rand.generate(PROMPT, Sampling(1.0, seed=seed, **settings), 30, gamma=GAMMA).ids == off.ids
        assert off.stats.drafted > 0


@pytest.mark.parametrize("temperature", [1.0001e-4, 1e-3, 1e3, 1e30])
def test_any_temperature_gives_tokens(rand: Engine, temperature: float) -> None:
    ids = rand.generate(PROMPT, Sampling(temperature, top_p=0.99), 30, gamma=GAMMA).ids
    assert len(ids) == 30 and all(0 <= token < 128 for token in ids)


def test_little_temperature_is_greedy_and_much_is_not(rand: Engine) -> None:
    greedy = rand.generate(PROMPT, max_new_tokens=30, speculate=False).ids
    assert rand.generate(PROMPT, Sampling(1.0001e-4), 30, gamma=GAMMA).ids == greedy
    assert len(set(rand.generate(PROMPT, Sampling(1e30), 30, gamma=GAMMA).ids)) > 20
