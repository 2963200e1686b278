"""Text drafted by Medusa heads is the text without them, or has its law; what heads read is the text and nothing else."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import bundles
import tiny
from specedge.errors import UsageError
from specedge.runtime import Engine, Result, Sampling, TreeShape, load
from specedge.runtime.decode import Round, decode, prefill
from specedge.runtime.head_drafters import MedusaDrafter
from specedge.runtime.results import Stats
from specedge.runtime.rules import RULES, Rule, make_rule
from specedge.runtime.sampler import Sampler
from test_runtime_heads import random_heads, scripted_heads
from test_runtime_rescoring import PENALTIES, check_scores
from test_runtime_sampling_laws import chi_square
from test_runtime_trees import random_shape

HEADS, VOCAB, CONTEXT, EOS = 3, 64, 128, 40
P = tiny.random_chain(VOCAB, seed=8, sharpness=2.5)
SURE = tiny.deterministic_chain(VOCAB, {})
SHAPE: dict[str, Any] = {"context": CONTEXT, "chunk": 8, "widths": (1, 4, 8, 13)}
PROMPTS = [[3, 14, 15, 92, 3, 14], [9, 8, 7], [50, 51], [*range(30, 41)], [77, 77, 5, 77]]
START = [5, 9]  # two tokens: the heads have a hidden state from the first round on
CHAIN = TreeShape.chain(HEADS)
RULE = make_rule(None, Sampler(Sampling(), 128, len(START)))  # greedy
TREE = TreeShape.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
SHAPES = [shape for seed in range(60) if (shape := random_shape(seed)).depth <= HEADS][:24]


def fitted_heads(folder: Path, model: LlamaForCausalLM) -> Path:
    """Blocks of zeros and least-squares matrices from hidden states to what this model writes two to four tokens later.

    Right often enough for drafts to be accepted at every depth, wrong often enough for most rounds to reject some.
    """
    states, tokens = [], []
    for prompt in PROMPTS:
        text = [*prompt, *tiny.hf_greedy(model, prompt, 40)]
        with torch.no_grad():
            states.append(model.model(torch.tensor([text]), use_cache=False).last_hidden_state[0, : -HEADS - 1])
        tokens += [text[place + 2 : place + 2 + HEADS] for place in range(len(text) - HEADS - 1)]
    hidden, tensors = torch.cat(states), {}
    for head in range(HEADS):
        right = torch.nn.functional.one_hot(torch.tensor(tokens)[:, head], 128).float()
        tensors[f"{head}.0.linear.weight"] = torch.zeros(64, 64)
        tensors[f"{head}.1.weight"] = 8 * torch.linalg.lstsq(hidden, right).solution.T.contiguous()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sources")
    model = tiny.f_rand(place / "rand" / "target", eos_token_id=None)
    fitted_heads(place / "rand" / "fitted", model)
    random_heads(place / "rand" / "random", vocab=128)
    for name, transition, eos in (("chain", P, None), ("sure", SURE, None), ("eos", SURE, EOS)):
        tiny.f_chain(place / name / "target", transition, eos=eos)
        scripted_heads(place / name / "scripted", transition)
    return place


@pytest.fixture(scope="module", params=["cpu", "cpu-static"])
def engines(request: pytest.FixtureRequest, sources: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    """By the name of the target or, of F-RAND, of its heads."""
    place, made = tmp_path_factory.mktemp("bundles"), {}
    for folder in ("rand/fitted", "rand/random", "chain/scripted", "sure/scripted", "eos/scripted"):
        target, heads = folder.split("/")
        options = {"medusa": str(sources / folder), "device": request.param, **SHAPE}
        name = heads if target == "rand" else target
        made[name] = bundles.engine(sources / target / "target", place / name, **options)
    return made


def plain(engine: Engine, prompt: Sequence[int], count: int | None = 40, **options: Any) -> list[int]:
    return engine.generate(list(prompt), max_new_tokens=count, speculate=False, **options).ids


# ---- the same ids


@pytest.mark.parametrize("name", ["fitted", "random", "chain", "sure"])
def test_greedy_ids_are_the_plain_ones(engines: dict[str, Engine], name: str) -> None:  # B46
    engine, accepted, rejected = engines[name], 0, 0
    for index, shape in enumerate([*map(TreeShape.chain, range(1, HEADS + 1)), *SHAPES]):
        prompt = [token % engine.target.role.vocab_size for token in PROMPTS[index % len(PROMPTS)]]
        result = engine.generate(prompt, max_new_tokens=40, tree=shape)
        assert result.ids == plain(engine, prompt)
        assert result.stats.per_round[0][0] == len(shape.parents)
        accepted += result.stats.accepted
        rejected += result.stats.drafted - result.stats.accepted
    assert engine.generate(PROMPTS[1], max_new_tokens=40).ids == plain(engine, PROMPTS[1])  # what control chooses
    assert rejected > 100 and (accepted > 50 or name == "random")


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_every_draft_of_heads_that_know_is_accepted(engines: dict[str, Engine], gamma: int) -> None:  # B49
    result = engines["sure"].generate([3, 4, 5], max_new_tokens=12 * (gamma + 1), gamma=gamma)
    assert result.stats.per_round == [(gamma, gamma)] * 12
    assert result.ids == [(6 + index) % VOCAB for index in range(12 * (gamma + 1))]


@pytest.mark.parametrize("rule", ["point-mass", "coupled"])
@pytest.mark.parametrize("name", ["fitted", "chain"])
def test_the_text_of_a_seed_is_the_plain_one(engines: dict[str, Engine], name: str, rule: str) -> None:
    accepted = 0
    for seed in range(20):
        sampling, shape = Sampling((0.4, 0.7, 1.0)[seed % 3], top_p=(1.0, 0.9)[seed % 2], seed=seed), SHAPES[seed]
        expected = plain(engines[name], START, 30, sampling=sampling, rule=rule)
        for tree in (CHAIN, shape):
            result = engines[name].generate(START, sampling, 30, tree=tree, rule=rule)
            assert result.ids == expected
            accepted += result.stats.accepted
    assert accepted > 50


@pytest.mark.parametrize("kind", PENALTIES)
def test_penalties_and_bans_hold_for_drafts_too(engines: dict[str, Engine], kind: str) -> None:
    engine, drafted = engines["fitted"], 0
    for prompt, shape, (temperature, rule) in product(PROMPTS[:3], (CHAIN, TREE), ((0.0, None), (0.8, "coupled"))):
        sampling = Sampling(temperature, seed=len(prompt), **PENALTIES[kind])
        result = engine.generate(prompt, sampling, 30, tree=shape, rule=rule)
        assert result.ids == plain(engine, prompt, 30, sampling=sampling, rule=rule)
        drafted += result.stats.drafted
    for rule in RULES:
        sampling = Sampling(1.2, seed=1, banned_ids=range(0, 128, 2))
        ids = engine.generate(PROMPTS[0], sampling, 30, tree=CHAIN, rule=rule).ids
        assert len(ids) == 30 and all(token % 2 for token in ids)
    assert drafted > 500


# ---- the same law

CASES: list[tuple[str, str, TreeShape]] = [
    *[("cpu", rule, shape) for rule, shape in (("token", CHAIN), ("recursive", TREE), ("coupled", TREE))],
    *[("cpu-static", rule, shape) for rule, shape in (("block", CHAIN), ("recursive", CHAIN), ("point-mass", TREE))],
    *[("cpu", "lossy-typical", TREE), ("cpu-static", "recursive", TREE)],
]


@pytest.mark.parametrize(
    ("engines", "rule", "shape"),
    [pytest.param(*case, id=f"{case[0]}-{case[1]}-{len(case[2].parents)}") for case in CASES],
    indirect=["engines"],
)
def test_the_first_two_tokens_have_the_law_of_the_target(engines: dict[str, Engine], rule: str, shape: TreeShape) -> None:
    counts, stats = np.zeros((VOCAB, VOCAB)), Stats()
    for seed in range(2000):
        stream = engines["chain"].stream(START, Sampling(1.0, seed=seed), 5, tree=shape, rule=rule)
        first, second = islice(stream, 2)
        stream.close()
        counts[first.id, second.id] += 1
        stats.outcomes += stream.result().stats.outcomes
    law = P[START[-1]]
    sums = (counts.sum(axis=1), law), (counts.sum(axis=0), law @ P), (counts, law[:, None] * P)
    values = [chi_square(found, expected) for found, expected in sums]
    if rule == "lossy-typical":
        assert max(values[0], values[2]) < 1e-6
        return
    assert min(values) > 0.001
    by_rank = stats.accepted_by_rank  # every sibling, and at every depth where drafts are drawn
    assert min(by_rank[0]) > 0 and (rule == "point-mass" or min(share for row in by_rank for share in row) > 0)
    assert chi_square(counts.sum(axis=1), (P @ P)[START[0]]) < 1e-9  # what the first head draws from would be noticed


@pytest.mark.parametrize("rule", RULES)
def test_log_probabilities_are_those_of_the_emitted_text(engines: dict[str, Engine], sources: Path, rule: str) -> None:
    model, accepted = tiny.load_hf(sources / "rand" / "target"), 0
    for seed, (prompt, temperature) in enumerate(product(PROMPTS, (0.0, 0.3, 0.9))):
        shape = CHAIN if rule in ("token", "block") else SHAPES[seed]
        sampling = Sampling(temperature, seed=seed)
        result = engines["fitted"].generate(prompt, sampling, 30, tree=shape, rule=rule, log_probabilities=True)
        check_scores(model, prompt, result)
        accepted += result.stats.accepted
    assert accepted > 20


def test_an_end_of_text_ends_a_burst(engines: dict[str, Engine]) -> None:
    for left, shape in product(range(1, 10), (CHAIN, TREE, TreeShape.chain(2))):
        prompt = [EOS - left - 2, EOS - left - 1, EOS - left]
        result = engines["eos"].generate(prompt, max_new_tokens=30, tree=shape, log_probabilities=True)
        assert (result.ids, result.finish_reason) == ([*range(EOS - left + 1, EOS + 1)], "stop")
        assert result.stats.tokens == left and result.stats.rounds == -(-left // (shape.depth + 1))


def test_the_context_is_filled_to_its_end(engines: dict[str, Engine]) -> None:  # B25
    for shape, length in product((CHAIN, TREE, SHAPES[10]), (CONTEXT - 40, *range(CONTEXT - 6, CONTEXT))):
        prompt = [index % 5 + 3 for index in range(length)]
        result = engines["fitted"].generate(prompt, tree=shape)
        assert (len(result.ids), result.finish_reason) == (CONTEXT - length, "length")
        assert result.ids == plain(engines["fitted"], prompt, None)
        assert result.stats.drafted > 0 or length > CONTEXT - 2


def test_a_prompt_of_one_token_begins_plain(engines: dict[str, Engine]) -> None:
    """There is no hidden state that predicted it, not even one of the request before."""
    engine = engines["fitted"]
    for prompt, shape in product(([5], [50], []), (CHAIN, TREE)):
        engine.generate(PROMPTS[3], max_new_tokens=9)
        result = engine.generate(prompt, max_new_tokens=20, tree=shape)
        assert result.ids == plain(engine, prompt or [1], 20)  # 1: BOS
        assert result.stats.per_round[0] == (0, 0) and result.stats.per_round[1][0] == len(shape.parents)
    drafter = engine.new_drafter(RULE)
    for prompt, drafts in (PROMPTS[0], HEADS), ([5], 0):  # a drafter that is used again
        prefill(engine.target, drafter, prompt)
        assert len(drafter.propose(prompt, CHAIN).tree.tokens) == drafts


def rounds(engine: Engine, rule: Rule, prompt: Sequence[int], shape: TreeShape) -> Iterator[tuple[list[int], Round]]:
    """The text before each round, and the round."""
    drafter, text = engine.new_drafter(rule), list(prompt)
    assert isinstance(drafter, MedusaDrafter)
    prefill(engine.target, drafter, prompt)
    for found in decode(engine.target, drafter, engine.new_control(rule, tree=shape), rule.judge, prompt, 40, ()):
        yield list(text), found
        text += found.tokens


@pytest.mark.parametrize("rule", [None, "recursive", "coupled"])
@pytest.mark.parametrize("name", ["fitted", "chain"])
def test_a_proposal_is_that_of_a_fresh_engine_with_the_whole_text(engines: dict[str, Engine], name: str, rule: str) -> None:
    """Whatever was accepted and rejected before it."""
    other, accepted = load(engines[name].bundle.path, threads=1), set()
    for seed, shape in enumerate([CHAIN, TREE, *SHAPES[8:12]]):
        sampler = Sampler(Sampling(0.6 if rule else 0.0, seed=seed), other.bundle.manifest.allowed_ids, len(START))
        for text, round_ in rounds(engines[name], make_rule(rule, sampler), START, shape):
            drafter = other.new_drafter(make_rule(rule, sampler))
            prefill(other.target, drafter, text)
            fresh = drafter.propose(text, shape.within(len(START) + 39 - len(text), CONTEXT)).tree
            assert fresh == round_.tree and (fresh.tokens or len(text) == len(START) + 39)
            accepted.add(len(round_.nodes))
    assert len(accepted) > 2


def test_a_draft_is_the_choice_of_its_own_depths_head(engines: dict[str, Engine], sources: Path) -> None:  # B46
    """Rank by rank, from the hidden state that predicted the root, both by PyTorch."""
    model = tiny.load_hf(sources / "rand" / "target")
    heads = load_file(sources / "rand" / "fitted" / "medusa_lm_head.safetensors")
    matrices = torch.stack([heads[f"{head}.1.weight"] for head in range(HEADS)])
    nodes = 0
    for shape in SHAPES[::3]:
        for text, round_ in rounds(engines["fitted"], RULE, START, shape):
            with torch.no_grad():
                hidden = model.model(torch.tensor([text[:-1]]), use_cache=False).last_hidden_state[0, -1]
            choices = (matrices @ hidden).argsort(dim=1, descending=True).tolist()
            for token, path in zip(round_.tree.tokens, shape.paths, strict=False):
                assert token == choices[len(path) - 1][path[-1]]
                nodes += 1
    assert nodes > 500


def test_requests_do_not_leak_into_one_another(engines: dict[str, Engine]) -> None:  # B35, B36
    engine = engines["fitted"]
    requests: list[Callable[[Engine], Result]] = [
        lambda e: e.generate(PROMPTS[0], max_new_tokens=100, tree=TREE),
        lambda e: e.generate([50], max_new_tokens=20, gamma=3),
        lambda e: e.generate(PROMPTS[2], Sampling(0.8, seed=3), 30, tree=TREE),
        lambda e: e.generate(PROMPTS[4], Sampling(0.8, seed=3, presence_penalty=1.0), 30),
    ]
    fresh = [request(load(engine.bundle.path, threads=1)) for request in requests]
    for cut, order in enumerate(([0, 1, 2, 3], [3, 1, 0, 2], [1, 0, 1, 3, 2, 1])):
        for index in order:
            stream = engine.stream(PROMPTS[3], tree=TREE)
            assert len([*islice(stream, cut + 1)]) == cut + 1
            stream.close()
            again = requests[index](engine)
            assert (again.ids, again.stats.per_round) == (fresh[index].ids, fresh[index].stats.per_round)


def test_what_heads_cannot_draft_is_refused_by_name(engines: dict[str, Engine]) -> None:
    deep = TreeShape.from_paths([[0], [1], [0, 0], [0, 0, 0], [0, 0, 0, 0]])
    for options, named in (
        ({"gamma": HEADS + 1}, r"gamma 4: expected 0\.\.3, the drafts this bundle can make"),
        ({"tree": deep}, "tree: 4 deep, expected at most 3"),
        ({"tree": TreeShape.chain(12)}, "tree: 12 deep, expected at most 3"),
        ({"tree": TREE, "rule": "token", "sampling": Sampling(1.0)}, "rule 'token': judges chains only"),
    ):
        with pytest.raises(UsageError, match=named):
            engines["fitted"].stream(PROMPTS[0], **options)


def test_the_same_bundle_drafts_by_lookup(engines: dict[str, Engine]) -> None:
    lookup = load(engines["fitted"].bundle.path, drafter="lookup", threads=1)
    prompt = [*PROMPTS[0], *PROMPTS[0], 3]
    result = lookup.generate(prompt, max_new_tokens=40, gamma=5)  # more than there are heads
    assert result.ids == plain(engines["fitted"], prompt) and result.stats.drafted > 0
    assert engines["fitted"].drafter_name == "medusa" and lookup.drafter_name == "lookup"
