"""F-RESCORE and penalties: a token's row saw the emitted text before it, nothing that was rejected and nothing beside it.

Sampled ids cannot be compared with a reference, their log-probabilities can: PyTorch reads the emitted ids in one pass.
Penalties make a token depend on which tokens came before, so a row that counts a rejected token or a cousin shows at once.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

import bundles
import tiny
from specedge.runtime import Engine, Result, Sampling, load
from specedge.runtime.rules import RULES
from specedge.runtime.shape import TreeShape
from tiny import Array

CONTEXT = 128
SHAPE: dict[str, Any] = {"context": CONTEXT, "chunk": 8, "widths": (1, 4, 13)}
PROMPTS = [[3, 14, 15, 92, 3, 14], [9, 8, 7], [50, 51, 50, 51, 50], [*range(30, 41)]]
BUSHY = TreeShape.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0], [0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 0, 0]])
SIBLINGS = TreeShape.from_paths([[0], [1], [2], [3]])
# (drafter, what it drafts)
DRAFTS: list[tuple[str, dict[str, Any]]] = [
    ("draft", {"tree": BUSHY}),
    ("draft", {"tree": SIBLINGS}),
    ("draft", {"gamma": 4}),
    ("lookup", {"gamma": 3}),
    ("lookup", {"gamma": 12}),
]
CHAINS = ("token", "block")
PENALTIES: dict[str, dict[str, Any]] = {
    "none": {},
    "repetition": {"repetition_penalty": 1.4},
    "presence and frequency": {"presence_penalty": 2.0, "frequency_penalty": 1.5},
    "rewards": {"repetition_penalty": 0.8, "presence_penalty": -1.5},
    "bias and ban": {"logit_bias": {7: 4.0, 20: -100.0, 99: 3.0}, "banned_ids": [3, 14, 66, 101]},
    "all": {"repetition_penalty": 1.2, "frequency_penalty": 1.0, "logit_bias": {50: 2.0}, "banned_ids": (15, 92)},
}


@dataclass(frozen=True)
class Rand:
    """F-RAND without EOS, its noisy draft and lookup, and the reference."""

    engines: dict[str, Engine]
    reference: LlamaForCausalLM


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("rand")
    tiny.f_rand(place / "target", eos_token_id=None)
    tiny.noisy_lm_head(place / "target", place / "draft", sigma=0.15)
    return place


@pytest.fixture(scope="module", params=["cpu", "cpu-static"])
def rand(request: pytest.FixtureRequest, sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Rand:
    place = tmp_path_factory.mktemp("bundles") / "bundle"
    path = bundles.make(sources / "target", place, draft=str(sources / "draft"), device=request.param, **SHAPE)
    engines = {name: load(path, drafter=name, threads=1) for name in ("draft", "lookup")}
    return Rand(engines, tiny.load_hf(sources / "target"))


def rescored(model: LlamaForCausalLM, prompt: Sequence[int], ids: Sequence[int], allowed: int = 128) -> Array:
    """What PyTorch gives each of `ids` in the text after `prompt`, read in one pass."""
    logits = torch.from_numpy(tiny.hf_logits(model, [*prompt, *ids])[len(prompt) - 1 : -1, :allowed])
    scores: Array = torch.log_softmax(logits.double(), dim=-1).numpy()[np.arange(len(ids)), list(ids)]
    return scores


def check_scores(model: LlamaForCausalLM, prompt: Sequence[int], result: Result, allowed: int = 128) -> None:
    assert result.log_probabilities is not None and len(result.log_probabilities) == len(result.ids)
    assert np.abs(rescored(model, prompt, result.ids, allowed) - result.log_probabilities).max() <= 1e-3


def requests(rule: str) -> list[tuple[str, dict[str, Any], Sampling]]:
    """Every way to draft that the rule can judge, with each kind of penalty, sampled and greedy."""
    drafts = [(name, options) for name, options in DRAFTS if "tree" not in options or rule not in CHAINS]
    kinds, penalties = itertools.product(drafts, (0.0, 0.7, 1.3)), list(PENALTIES.values())
    return [
        (name, options, Sampling(temperature, seed=seed, **penalties[(seed + seed // 3) % len(penalties)]))
        for seed, ((name, options), temperature) in enumerate(kinds)
    ]


# ---- F-RESCORE


@pytest.mark.parametrize("rule", RULES)
def test_recorded_log_probabilities_are_those_of_the_emitted_text(rand: Rand, rule: str) -> None:
    """Six rules in two forms: some 4,000 tokens."""
    tokens, accepted = 0, Counter[str]()
    for index, (name, options, sampling) in enumerate(requests(rule)):
        prompt = PROMPTS[index % len(PROMPTS)] if name == "draft" else [*PROMPTS[0], *PROMPTS[3], *PROMPTS[0]]
        result = rand.engines[name].generate(prompt, sampling, 30, rule=rule, log_probabilities=True, **options)
        check_scores(rand.reference, prompt, result)
        tokens += len(result.ids)
        accepted[name] += result.stats.accepted
    assert tokens >= 200 and accepted["draft"] > 20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_long_text_to_the_end_of_the_context_is_rescored(rand: Rand, temperature: float) -> None:
    for seed, shape in enumerate((BUSHY, SIBLINGS)):
        prompt = PROMPTS[seed]
        result = rand.engines["draft"].generate(
            prompt, Sampling(temperature, seed=seed), None, tree=shape, log_probabilities=True
        )
        assert len(prompt) + len(result.ids) == CONTEXT and result.finish_reason == "length"
        check_scores(rand.reference, prompt, result)
        assert result.stats.per_round[0][0] == len(shape.parents) and result.stats.accepted > 10


def test_log_probabilities_come_with_their_tokens_if_asked_for(rand: Rand) -> None:
    options: dict[str, Any] = {"sampling": Sampling(1.0, seed=5), "max_new_tokens": 20, "tree": BUSHY}
    stream = rand.engines["draft"].stream(PROMPTS[0], log_probabilities=True, **options)
    assert [token.log_probability for token in stream] == stream.result().log_probabilities
    silent = rand.engines["draft"].stream(PROMPTS[0], **options)
    assert [token.log_probability for token in silent] == [None] * 20
    assert silent.result().log_probabilities is None and silent.result().ids == stream.result().ids
    none = rand.engines["draft"].generate(PROMPTS[0], max_new_tokens=0, log_probabilities=True)
    assert none.log_probabilities == []


def test_padding_has_no_part_in_log_probabilities(sources: Path, tmp_path: Path) -> None:  # B39
    """Rows that no tokenizer entry stands for are masked, so they do not count in the sum either."""
    for name in ("target", "draft"):
        tiny.f_self(sources / name, tmp_path / name)
        tiny.f_tok(tmp_path / name, size=100)
    engine = bundles.engine(tmp_path / "target", tmp_path / "bundle", draft=str(tmp_path / "draft"), **SHAPE)
    model = tiny.load_hf(tmp_path / "target")
    for seed in range(5):
        result = engine.generate([9, 8, 7], Sampling(1.0, seed=seed), 40, tree=BUSHY, log_probabilities=True)
        assert np.abs(rescored(model, [9, 8, 7], result.ids) - rescored(model, [9, 8, 7], result.ids, 100)).max() > 0.01
        check_scores(model, [9, 8, 7], result, allowed=100)


# ---- penalties


def penalised(model: LlamaForCausalLM, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling) -> Array:
    """The next token's logits by hand: repetition over prompt and answer, the other two over the answer alone."""
    logits: Array = tiny.hf_logits(model, [*prompt, *answer])[-1].astype(np.float64)
    for token in {*prompt, *answer}:
        logits[token] *= sampling.repetition_penalty if logits[token] < 0 else 1 / sampling.repetition_penalty
    for token, count in Counter(answer).items():
        logits[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    logits[list(sampling.banned_ids)] = -np.inf
    return logits


def plain_greedy(rand: Rand, prompt: Sequence[int], kind: str, count: int) -> list[int]:
    return rand.engines["draft"].generate(list(prompt), Sampling(**PENALTIES[kind]), count, speculate=False).ids


@pytest.mark.parametrize("kind", PENALTIES)
def test_plain_greedy_ids_are_the_best_of_penalised_logits(rand: Rand, kind: str) -> None:
    prompt, unlike = PROMPTS[0], 0
    ids = plain_greedy(rand, prompt, kind, 40)
    for place, token in enumerate(ids):
        assert penalised(rand.reference, prompt, ids[:place], Sampling(**PENALTIES[kind])).argmax() == token
        unlike += tiny.hf_logits(rand.reference, [*prompt, *ids[:place]])[-1].argmax() != token
    assert (unlike > 0) == (kind != "none")


@pytest.mark.parametrize("kind", PENALTIES)
def test_speculative_ids_under_penalties_are_the_plain_ones(rand: Rand, kind: str) -> None:
    accepted, drafted = Counter[str](), 0
    for (name, options), prompt in itertools.product(DRAFTS, PROMPTS):
        expected = plain_greedy(rand, prompt, kind, 50)
        result = rand.engines[name].generate(prompt, Sampling(**PENALTIES[kind]), 50, **options)
        assert result.ids == expected
        assert not {*result.ids} & {*PENALTIES[kind].get("banned_ids", ())}
        accepted[name] += result.stats.accepted
        drafted += result.stats.drafted
    assert drafted > accepted["draft"] > 20


@pytest.mark.parametrize("rule", ["point-mass", "coupled"])
@pytest.mark.parametrize("kind", PENALTIES)
def test_sampled_ids_under_penalties_are_the_plain_ones(rand: Rand, kind: str, rule: str) -> None:
    accepted = 0
    for seed, ((name, options), prompt) in enumerate(itertools.product(DRAFTS, PROMPTS[:2])):
        sampling = Sampling(0.8, seed=seed, **PENALTIES[kind])
        plain = rand.engines["draft"].generate(prompt, sampling, 30, speculate=False, rule=rule)
        result = rand.engines[name].generate(prompt, sampling, 30, rule=rule, **options)
        assert result.ids == plain.ids
        assert not {*result.ids} & {*sampling.banned_ids}
        accepted += result.stats.accepted
    assert accepted > 10


@pytest.mark.parametrize("rule", RULES)
def test_banned_ids_never_come_out(rand: Rand, rule: str) -> None:
    """Not even where they are half of the vocabulary, and the likeliest token among them."""
    banned = frozenset(range(0, 128, 2))
    for index, (name, options) in enumerate(DRAFTS):
        if "tree" in options and rule in CHAINS:
            continue
        for temperature in (0.0, 1.5):
            sampling = Sampling(temperature, seed=index, banned_ids=banned)
            result = rand.engines[name].generate([3, 5, 7, 3, 5], sampling, 30, rule=rule, **options)
            assert len(result.ids) == 30 and not banned & {*result.ids}


def test_a_request_counts_only_its_own_tokens(rand: Rand) -> None:  # B35
    expected = plain_greedy(rand, PROMPTS[1], "presence and frequency", 30)
    stream = rand.engines["draft"].stream(PROMPTS[0], Sampling(**PENALTIES["all"]), tree=BUSHY)
    next(stream)
    stream.close()
    sampling = Sampling(**PENALTIES["presence and frequency"])
    assert rand.engines["draft"].generate(PROMPTS[1], sampling, 30, tree=BUSHY).ids == expected
