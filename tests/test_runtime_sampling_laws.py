"""Sampled text has exactly the target's law, under every lossless rule, and is a function of the seed."""

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

import bundles
import eagles
from specedge.runtime import Engine, Sampling, load
from specedge.runtime.control import Costs
from specedge.runtime.results import Outcome, Stats, Token
from specedge.runtime.rules import RULES
from specedge.runtime.shape import TreeShape
from tiny import Array, f_chain, f_rand, random_chain

REQUESTS = 2000  # the law of what was drafted is 1e-9 off by then
GAMMA = 3
VOCAB = 64
P = random_chain(VOCAB, seed=1)
Q = (P + random_chain(VOCAB, seed=2)) / 2
START = 5
CHAIN = TreeShape.chain(GAMMA)
TREE = TreeShape.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
ROWS = {  # laws of the token after any other
    "b42": ([0.64, 0.16, 0.10, 0.10], [0.30, 0.30, 0.20, 0.20]),
    "b43": ([0.4, 0.6], [0.5, 0.5]),
    "b46": ([0.5, 0.3, 0.2], [0.6, 0.3, 0.1]),
    "apart": ([0.3, 0.05, 0.6, 0.05], [0.7, 0.25, 0.03, 0.02]),  # a rejection leaves two tokens, and the drafter another
}


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
    for name, rows in ROWS.items():
        for role, row in zip(("target", "draft"), rows, strict=True):
            f_chain(place / name / role, np.tile(np.pad(np.array(row), (0, VOCAB - len(row))), (VOCAB, 1)))
    return place


@pytest.fixture(scope="module", params=["cpu", "cpu-static"])
def engines(request: pytest.FixtureRequest, sources: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    place = tmp_path_factory.mktemp("bundles")
    options = TINY | {"device": request.param}
    path = bundles.make(sources / "target", place / "bundle", draft=str(sources / "draft"), **options)
    engines = {"draft": load(path, threads=1), "lookup": load(path, drafter="lookup", threads=1)}
    for name in ROWS:
        draft = str(sources / name / "draft")
        engines[name] = bundles.engine(sources / name / "target", place / name, draft=draft, **options)
    return engines


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


@dataclass
class Pairs:
    """How often each pair of tokens began an answer, the trees of the first rounds, and what became of all trees."""

    counts: Array = field(default_factory=lambda: np.zeros((VOCAB, VOCAB)))
    first: Counter[tuple[int, int]] = field(default_factory=Counter)  # (drafted, accepted)
    outcomes: Counter[Outcome] = field(default_factory=Counter)


def first_two(
    engine: Engine, prompt: Sequence[int], rule: str | None, shape: TreeShape | None, requests: int = REQUESTS, **settings: Any
) -> Pairs:
    """The first two of five tokens, seed after seed; streams are closed behind the first round and one token more."""
    pairs = Pairs()
    for seed in range(requests):
        stream = engine.stream(prompt, Sampling(seed=seed, **settings), max_new_tokens=5, tree=shape, rule=rule)
        tokens: list[Token] = []
        while not tokens or tokens[-1].round == 0:
            tokens.append(next(stream))
        stream.close()
        first, second, *_ = tokens
        stats = stream.result().stats
        pairs.counts[first.id, second.id] += 1
        pairs.first[stats.per_round[0]] += 1
        pairs.outcomes += stats.outcomes
    return pairs


def joint_law(temperature: float) -> Array:
    """[V, V]: of the two tokens after START."""
    law: Array = law_of(P[START], temperature)[:, None] * np.stack([law_of(row, temperature) for row in P])
    return law


# Each request takes a millisecond or two: every rule, on chains and on trees, in one of the forms.
CASES: list[tuple[str, str, str | None, TreeShape, float]] = [
    ("cpu-static", "draft", "token", CHAIN, 0.7),
    ("cpu", "draft", "block", CHAIN, 1.3),
    ("cpu-static", "draft", None, CHAIN, 1.3),
    ("cpu", "draft", "recursive", TREE, 0.7),
    ("cpu-static", "draft", "recursive", TREE, 1.3),
    ("cpu-static", "draft", "point-mass", TREE, 0.7),
    ("cpu", "draft", "coupled", TREE, 1.3),
    ("cpu-static", "lookup", None, CHAIN, 1.3),
    ("cpu", "lookup", "coupled", CHAIN, 0.7),
]


@pytest.mark.parametrize(
    ("engines", "drafter", "rule", "shape", "temperature"),
    [pytest.param(*case, id="-".join(map(str, (*case[:3], len(case[3].parents), case[4])))) for case in CASES],
    indirect=["engines"],
)
def test_the_first_two_tokens_have_the_law_of_the_target(
    engines: dict[str, Engine], drafter: str, rule: str | None, shape: TreeShape, temperature: float
) -> None:
    prompt = [START] if drafter == "draft" else LOOKUP_PROMPT
    pairs = first_two(engines[drafter], prompt, rule, shape, temperature=temperature)
    assert {drafted for drafted, _ in pairs.first} == {len(shape.parents)}
    accepted = Counter({depth: count for (_, depth), count in pairs.first.items()})
    assert all(accepted[depth] > 0 for depth in range(shape.depth + 1))  # nothing accepted, something, everything
    by_rank = Stats(outcomes=pairs.outcomes).accepted_by_rank
    assert shape.is_chain or all(max(row[1:], default=1.0) > 0 for row in by_rank)  # and siblings behind the first

    first, joint = law_of(P[START], temperature), joint_law(temperature)
    assert chi_square(pairs.counts.sum(axis=1), first) > 0.001
    assert chi_square(pairs.counts.sum(axis=0), joint.sum(axis=0)) > 0.001
    assert chi_square(pairs.counts, joint) > 0.001
    # and the test would notice the draft's law in its place
    assert chi_square(pairs.counts.sum(axis=1), law_of(Q[START], temperature)) < 1e-9


@pytest.mark.parametrize(("engines", "rule"), [("cpu", "token"), ("cpu-static", "block")], indirect=["engines"])
def test_chains_that_end_where_the_drafter_is_unsure_keep_the_law(
    engines: dict[str, Engine], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control chooses, at costs that make every length the best of some."""
    monkeypatch.setattr(engines["draft"], "costs", Costs((0.0, 0.02, 0.04, 0.06), (1.0, 1.1, 1.2, 1.3)))
    pairs = first_two(engines["draft"], [START], rule, None, REQUESTS // 2, temperature=0.7)
    assert len({len(outcome.parents) for outcome in pairs.outcomes}) > 1
    assert chi_square(pairs.counts.sum(axis=1), law_of(P[START], 0.7)) > 0.001
    assert chi_square(pairs.counts, joint_law(0.7)) > 0.001


@pytest.mark.parametrize("engines", ["cpu"], indirect=True)
def test_siblings_drawn_without_replacement_keep_the_law(engines: dict[str, Engine]) -> None:
    """Few tokens, and most of them drafted: what the first sibling left of p and q decides about the next."""
    law = np.array(ROWS["apart"][0])
    shape = TreeShape.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0]])
    pairs = first_two(engines["apart"], [START], "recursive", shape, temperature=1.0)
    assert pairs.counts[:4, :4].sum() == REQUESTS
    assert chi_square(pairs.counts[:4, :4], law[:, None] * law) > 0.001
    assert chi_square(pairs.counts.sum(axis=1)[:4], law) > 0.001
    assert min(share for row in Stats(outcomes=pairs.outcomes).accepted_by_rank for share in row) > 0


@pytest.mark.parametrize("engines", ["cpu-static"], indirect=True)
def test_penalties_are_part_of_the_law(engines: dict[str, Engine]) -> None:
    """Drafted tokens count like emitted ones for what follows them, and not for their siblings."""

    def law_after(*answer: int) -> Array:
        logits = np.log(P[(START, *answer)[-1]])
        logits[[*{START, *answer}]] *= 0.5
        for token in answer:
            logits[token] += 1.5
        law: Array = np.exp(logits) / np.exp(logits).sum()
        return law

    penalties: dict[str, Any] = {"repetition_penalty": 0.5, "frequency_penalty": -0.5, "presence_penalty": -1.0}
    pairs = first_two(engines["draft"], [START], "recursive", TREE, temperature=1.0, **penalties)
    joint = law_after()[:, None] * np.stack([law_after(token) for token in range(VOCAB)])
    assert chi_square(pairs.counts, joint) > 0.001
    assert chi_square(pairs.counts.sum(axis=0), joint.sum(axis=0)) > 0.001
    assert chi_square(pairs.counts, joint_law(1.0)) < 1e-9  # they matter


@pytest.mark.parametrize("engines", ["cpu"], indirect=True)
def test_the_rule_called_lossy_is(engines: dict[str, Engine]) -> None:
    """Typical acceptance moves mass to what was drafted: only its name may ask for it."""
    pairs = first_two(engines["draft"], [START], "lossy-typical", TREE, requests=1000, temperature=1.3)
    assert chi_square(pairs.counts.sum(axis=1), law_of(P[START], 1.3)) < 1e-6
    assert chi_square(pairs.counts, joint_law(1.3)) < 1e-6


@pytest.mark.parametrize("engines", ["cpu-static"], indirect=True)
def test_q_is_what_was_drawn_from(engines: dict[str, Engine]) -> None:  # B42
    """top-k on both sides: the rule has to see q after the filter. Judged by the raw q it gives 0.667."""
    pairs = first_two(engines["b42"], [START], "token", TreeShape.chain(1), temperature=1.0, top_k=2)
    counts = pairs.counts.sum(axis=1)
    assert counts[2:].sum() == 0 and {drafted for drafted, _ in pairs.first} == {1}
    assert chisquare(counts[:2], [0.8 * REQUESTS, 0.2 * REQUESTS]).pvalue > 0.001


@pytest.mark.parametrize("engines", ["cpu"], indirect=True)
def test_an_argmax_draft_is_judged_as_one(engines: dict[str, Engine]) -> None:  # B43
    """It always drafts 0, and 0 comes as often as the target says. Judged by the draft's softmax it is 0.8."""
    pairs = first_two(engines["b43"], [START], "point-mass", TreeShape.chain(1), 1000, temperature=1.0)
    counts = pairs.counts.sum(axis=1)
    assert pairs.first.keys() == {(1, 0), (1, 1)} and pairs.first[1, 1] == counts[0]
    assert chisquare(counts[:2], [400, 600]).pvalue > 0.001


@pytest.mark.parametrize(
    ("engines", "paths"),
    [("cpu", [[0]]), ("cpu-static", [[0], [1]]), ("cpu-static", [[0], [0, 0], [1], [1, 0]])],
    indirect=["engines"],
)
def test_several_certain_candidates_leave_the_law_alone(engines: dict[str, Engine], paths: list[list[int]]) -> None:  # B46
    """Siblings are the draft's likeliest tokens in order. Tested against its softmax they give [.833, 0, .167]."""
    shape, law = TreeShape.from_paths(paths), np.array(ROWS["b46"][0])
    pairs = first_two(engines["b46"], [START], "point-mass", shape, 2000, temperature=1.0)
    assert pairs.counts[3:].sum() == pairs.counts[:, 3:].sum() == 0
    assert np.abs(pairs.counts.sum(axis=1)[:3] / 2000 - law).max() < 0.04
    assert chi_square(pairs.counts[:3, :3], law[:, None] * law) > 0.001
    assert (
        sum(count for (_, accepted), count in pairs.first.items() if accepted) == pairs.counts[: len(shape.children(-1))].sum()
    )
    for name, prompt in (("b46", [START]), ("draft", LOOKUP_PROMPT)):
        for start in range(8):
            plain = engines[name].generate([*prompt, start], max_new_tokens=20, speculate=False).ids
            result = engines[name].generate([*prompt, start], max_new_tokens=20, tree=shape, rule="point-mass")
            assert result.ids == plain and result.stats.accepted > 0


# ---- drafted in one call: the host's noise chooses, and q is the law without filters


CALLED = TreeShape.from_paths(eagles.TREE)
FEW = 1000


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> eagles.Chains:
    return eagles.Chains(tmp_path_factory.mktemp("called"))


def changed(row: Array, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, **others: Any) -> Array:
    """The law that a request makes of a row of probabilities."""
    logits = np.log(row)
    for token, bias in others.get("logit_bias", {}).items():
        logits[token] += bias
    logits[list(others.get("banned_ids", []))] = -np.inf
    law = np.exp(logits / temperature)
    order = (-law).argsort()
    law[order[top_k or len(law) :]] = 0
    law /= law.sum()
    law[order[1 + int((law[order].cumsum() < top_p).sum()) :]] = 0
    return law / law.sum()


# A head or draft model whose law depends on the token before, and is not the target's.
CALLS: list[tuple[str, str, str, str, dict[str, Any]]] = [
    ("drawn1", "cpu", "chain", "token", {"temperature": 0.7}),
    ("drawn1", "cpu-static", "chain", "block", {"temperature": 1.3}),
    ("drawn3", "cpu-static", "tree", "recursive", {"temperature": 1.3}),
    ("drawn", "cpu-static", "tree", "recursive", {"temperature": 0.7}),
    ("drawn", "cpu", "tree", "recursive", {"temperature": 1.0, "top_k": 4}),
    ("drawn3", "cpu", "chain", "token", {"temperature": 1.2, "top_p": 0.8}),
    ("drawn1", "cpu-static", "tree", "recursive", {"temperature": 1.0, "logit_bias": {1: 2.0, 2: -1.0}, "banned_ids": [4, 7]}),
]


@pytest.mark.parametrize(
    ("drafter", "device", "kind", "rule", "settings"), [pytest.param(*case, id="-".join(map(str, case))) for case in CALLS]
)
def test_what_one_call_drafts_leaves_the_law_alone(
    chains: eagles.Chains, drafter: str, device: str, kind: str, rule: str, settings: dict[str, Any]
) -> None:  # B42, B43
    engine = chains(drafter, device, kind)
    shape = CALLED if kind == "tree" else CHAIN
    assert engine.expansion(shape)
    pairs = first_two(engine, [1, START], rule, shape, FEW, **settings)
    accepted = Counter({depth: count for (_, depth), count in pairs.first.items()})
    assert {drafted for drafted, _ in pairs.first} <= {len(shape.parents)} or "banned_ids" in settings
    assert all(0 < accepted[depth] < FEW for depth in range(shape.depth + 1))

    laws = np.stack([changed(row, **settings) for row in eagles.P])
    joint = laws[START][:, None] * laws
    counts = pairs.counts[: eagles.CHAIN, : eagles.CHAIN]
    assert counts.sum() == FEW and counts[joint == 0].sum() == 0
    assert chi_square(counts.sum(axis=1), laws[START]) > 0.001
    assert chi_square(counts.sum(axis=0), joint.sum(axis=0)) > 0.001
    assert chi_square(counts, joint) > 0.001
    drafts = changed(eagles.Q[START], **settings)
    assert chi_square(counts.sum(axis=1), np.maximum(drafts, 1e-9)) < 1e-6  # the drafter's in its place would be noticed


def test_siblings_of_one_call_are_drawn_without_replacement(chains: eagles.Chains) -> None:  # B46
    """Few tokens, and most of them drafted: what the first sibling left of p and q decides about the next."""
    few = [token for token in range(eagles.CHAIN) if token not in (1, 6, 13, 16)]  # p and q lie far apart
    law = np.stack([changed(row, banned_ids=few) for row in eagles.P])
    for drafter in ("drawn1", "drawn"):
        engine = chains(drafter, "cpu", "tree")
        pairs = first_two(engine, [1, START], "recursive", CALLED, FEW // 2, temperature=1.0, banned_ids=few)
        joint, counts = law[START][:, None] * law, pairs.counts[: eagles.CHAIN, : eagles.CHAIN]
        assert counts.sum() == FEW // 2 and counts[joint == 0].sum() == 0
        assert chi_square(counts[joint > 0], joint[joint > 0]) > 0.001
        assert chi_square(counts.sum(axis=1)[law[START] > 0], law[START][law[START] > 0]) > 0.001
        assert min(share for row in Stats(outcomes=pairs.outcomes).accepted_by_rank[:1] for share in row) > 0


def test_penalties_are_part_of_the_law_of_an_eagle_head(chains: eagles.Chains) -> None:
    """By steps, though there is a graph for one call: what is drafted counts for what follows it."""

    def law_after(*text: int) -> Array:
        logits = np.log(eagles.P[text[-1]])
        for token in text[2:]:
            logits[token] += 1.5
        law: Array = np.exp(logits) / np.exp(logits).sum()
        return law

    penalties: dict[str, Any] = {"frequency_penalty": -0.5, "presence_penalty": -1.0}
    pairs = first_two(chains("drawn1", "cpu", "tree"), [1, START], "recursive", CALLED, FEW, temperature=1.0, **penalties)
    joint = law_after(1, START)[:, None] * np.stack([law_after(1, START, token) for token in range(eagles.CHAIN)])
    counts = pairs.counts[: eagles.CHAIN, : eagles.CHAIN]
    assert chi_square(counts, joint) > 0.001 and chi_square(counts.sum(axis=0), joint.sum(axis=0)) > 0.001
    assert chi_square(counts, eagles.P[START][:, None] * eagles.P) < 1e-6  # they matter


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


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_makes_the_text_a_function_of_the_seed(engines: dict[str, Engine], rule: str) -> None:
    shape = CHAIN if rule in ("token", "block") else TREE
    texts = set()
    for seed in range(10):
        request: dict[str, Any] = {"max_new_tokens": 30, "tree": shape, "rule": rule}
        result = engines["draft"].generate([START], Sampling(1.0, seed=seed), **request)
        engines["draft"].generate([9, 9, 9], Sampling(1.0, seed=seed + 1), **request)
        assert [token.id for token in engines["draft"].stream([START], Sampling(1.0, seed=seed), **request)] == result.ids
        texts.add(tuple(result.ids))
    assert len(texts) >= 9


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
    [{"temperature": 1e-6}, {"temperature": 1e-4}, {"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}, {"min_p": 1.0}],
    ids=str,
)
def test_parameters_that_leave_one_token_are_greedy(rand: Engine, settings: dict[str, Any]) -> None:
    sampling = Sampling(**({"temperature": 1.0} | settings))
    result = rand.generate(PROMPT, sampling, 30, gamma=GAMMA)
    assert result.ids == rand.generate(PROMPT, max_new_tokens=30, speculate=False).ids
    assert result.stats.drafted > 0


@pytest.mark.parametrize("settings", [{"top_k": 0}, {"top_k": 128}, {"top_k": 10**7}, {"top_p": 1.0}, {"min_p": 0.0}], ids=str)
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
