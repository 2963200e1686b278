"""Drafting in one call: what a graph drafts is what single steps draft, of EAGLE heads and draft models alike."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from transformers import LlamaForCausalLM

import tiny
from bundles import cheap_drafts
from eagles import CHAIN, Chains
from specedge.devices.table import get_device
from specedge.runtime import Engine, Sampling, TreeShape
from specedge.runtime.control import Weigh
from specedge.runtime.decode import decode, prefill
from specedge.runtime.drafters import DraftModel
from specedge.runtime.model import Model
from specedge.runtime.rules import RULES, make_rule
from specedge.runtime.sampler import Sampler
from specedge.runtime.tree import Proposal, TokenTree
from specedge.runtime.unrolled_agreement import unrolled_agreement
from test_runtime_eagle import (
    CHAINS,
    CONTEXT,
    DEEP,
    DEVICES,
    NOTHING,
    PROMPT,
    SIBLINGS,
    SKEWED,
    STORED,
    Script,
    is_greedy,
    largest_difference,
    run,
    text,
)

KINDS = ("chain", "tree")
LENGTHS = (2, 3, 7, 8, 9, 10, 17, 30, 50, 61, 62, 63)


@pytest.fixture(scope="module")
def model(chains: Chains) -> LlamaForCausalLM:
    return tiny.load_hf(chains.target("mixed"))


@pytest.fixture(scope="module")
def draft(chains: Chains) -> LlamaForCausalLM:
    return tiny.load_hf(chains.draft("draft"))


def shape_of(engine: Engine) -> TreeShape:
    (shape,) = engine.expansions
    return shape


# ---- one call is many steps


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["draft", "eagle1", "eagle3", "some3"])
def test_one_call_drafts_what_steps_draft(chains: Chains, name: str, kind: str, device: str) -> None:
    """Behind texts shorter than a row of the graph, longer than a chunk, and with hardly any room left."""
    engine = chains(name, device, kind)
    shape = shape_of(engine)
    for seed in range(2):
        fits = [length for length in LENGTHS if length + shape.depth <= CONTEXT]
        found = unrolled_agreement(engine, [text(length, seed) for length in fits], shape, seed)
        assert (found.different, found.drafted) == (0, len(fits) * len(shape.parents))
        assert found.q_max_abs <= 1e-4
    for length in LENGTHS[-3:]:  # as many nodes as there is room for
        left = shape.within(CONTEXT - length, CONTEXT - length)
        found = unrolled_agreement(engine, [text(length)], left)
        assert (found.different, found.drafted) == (0, len(left.parents)) and found.q_max_abs <= 1e-4


def test_half_precision_drafts_what_its_steps_draft(chains: Chains) -> None:
    """As far as float16 rounds alike."""
    engine = chains("eagle1", "cpu", "tree", body="float16", head="float16")
    texts = [text(length, seed) for length in LENGTHS[:8] for seed in range(4)]
    found = unrolled_agreement(engine, texts, STORED)
    assert found.different <= found.drafted / 50
    assert found.q_max_abs <= 5e-3
    result = run(engine, PROMPT, STORED)
    assert result.ids == engine.generate(PROMPT, speculate=False).ids and result.stats.accepted > 0


# ---- a draft model


@pytest.mark.parametrize("device", DEVICES)
def test_a_draft_model_in_one_call_leaves_the_text_alone(chains: Chains, model: LlamaForCausalLM, device: str) -> None:
    """On chains and trees that graphs draft, and such as are left to steps."""
    for kind, shapes in (("chain", CHAINS), ("tree", (STORED, SKEWED, SIBLINGS, DEEP, CHAINS[3]))):
        engine = chains("draft", device, kind)
        for length in (1, 7, 8, 9, 25, 60, 63):
            plain = engine.generate(text(length), speculate=False).ids
            assert is_greedy(model, text(length), plain)
            for shape in shapes if length == 25 else shapes[:3]:
                result = engine.generate(text(length), tree=shape)
                assert result.ids == plain
                assert result.stats.per_round[0][0] == len(shape.within(len(plain) - 1, len(plain)).parents)
                assert result.stats.accepted > 0 or len(plain) < 8
        with cheap_drafts(engine):
            adaptive = engine.generate(PROMPT)
        assert adaptive.ids == engine.generate(PROMPT, speculate=False).ids and adaptive.stats.drafted > 0


class Compared(DraftModel):
    """A draft model every proposal of which must be that of one that reads the whole text afresh."""

    def __init__(self, engine: Engine, rule: str | None, sampling: Sampling, model: LlamaForCausalLM) -> None:
        self._new_rule = lambda: make_rule(rule, Sampler(sampling, CHAIN, len(PROMPT)))
        opened = Model(engine.bundle, "draft", get_device(engine.device.name), 1)
        self.mine, self.afresh = opened.sequence(), opened.sequence()
        self._other = opened.unrolling(self.afresh)
        self._model, self._sampling = model, sampling
        self._before: tuple[list[int], TreeShape, TokenTree] | None = None
        self.checked = 0
        super().__init__(self.mine, self._new_rule(), opened.unrolling(self.mine))

    def propose(self, history: Sequence[int], shape: TreeShape, weigh: Weigh | None = None) -> Proposal:
        found = super().propose(history, shape, weigh)
        if not shape.parents:
            return found
        self._before = list(history), shape, found.tree
        other = DraftModel(self.afresh, self._new_rule(), self._other)
        other.begin(history)
        expected = other.propose(list(history), shape)
        assert found.tree == expected.tree
        for node in {*found.tree.parents} if found.q and expected.q else ():
            assert found.q and expected.q
            law = found.q(node).dense(CHAIN)
            np.testing.assert_allclose(law, expected.q(node).dense(CHAIN), atol=1e-4)
            true = tiny.hf_logits(self._model, [*history, *found.tree.path(node)])[-1].astype(np.float64)
            true[list(self._sampling.banned_ids)] = -np.inf
            true /= self._sampling.temperature
            np.testing.assert_allclose(law, np.exp(true - true.max()) / np.exp(true - true.max()).sum(), atol=1e-3)
            self.checked += 1
        assert largest_difference(self.mine.cache, self.afresh.cache, len(history)) <= 1e-5
        return found

    def _rewind(self, history: Sequence[int]) -> None:
        """Nothing that was drafted and then emitted is read again, but for leaves, which were never fed."""
        super()._rewind(history)
        if self._before is None or len(self._before[2].tokens) < len(self._before[1].parents):
            return
        text, _, tree = self._before
        fed = [node for node in tree.follow(history[len(text) : -1]) if tree.children(node)]
        assert self.mine.length >= len(text) + len(fed)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_proposal_is_that_of_a_draft_that_reads_the_whole_text(
    chains: Chains, draft: LlamaForCausalLM, kind: str, device: str
) -> None:
    """Calls and steps in turn, whatever was accepted, plain rounds and ids left out among it; and q is the draft's law."""
    engine = chains("draft", device, kind)
    settings: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 1.5}, {"banned_ids": [3, 4, 5, 6]}]
    settings += [{"temperature": 5.0, "banned_ids": [token for token in range(CHAIN) if token not in (3, 9)]}]
    lengths = set()
    for seed, sampling in enumerate(Sampling(seed=seed, **each) for seed, each in enumerate(settings)):
        drafter = Compared(engine, None, sampling, draft)
        few = len(sampling.banned_ids) > 4
        script = Script(seed, [STORED] if few else [*CHAINS[:4], NOTHING, STORED, STORED, SKEWED, SIBLINGS, DEEP])
        rule = make_rule(None, Sampler(sampling, CHAIN, len(PROMPT)))
        prefill(engine.target, drafter, PROMPT)
        rounds = list(decode(engine.target, drafter, script, rule.judge, PROMPT, CONTEXT - len(PROMPT), ()))
        assert sum(len(each.tokens) for each in rounds) == CONTEXT - len(PROMPT)
        lengths |= {len(each.nodes) for each in rounds if each.tree.tokens}
        assert (drafter.checked > 10) == (not sampling.greedy)
    assert lengths >= {0, 1, 2, 3}


@pytest.mark.parametrize("device", DEVICES)
def test_a_draft_model_never_drafts_banned_ids(chains: Chains, device: str) -> None:
    """Nor when siblings outnumber what is left: a node then has fewer children, and what follows them is left out."""
    for kind, temperature in ((kind, temperature) for kind in KINDS for temperature in (0.0, 1.0)):
        engine = chains("draft", device, kind)
        shape = shape_of(engine)
        for banned in ([5, 6, 7, 8], [token for token in range(CHAIN) if token not in (3, 9)]):
            sampling = Sampling(temperature, banned_ids=banned, logit_bias={9: 1.0})
            rule = make_rule(None, Sampler(sampling, CHAIN, len(PROMPT)))
            drafter = engine.new_drafter(rule)
            prefill(engine.target, drafter, PROMPT)
            tree = drafter.propose(PROMPT, shape).tree
            assert tree.tokens and not {*tree.tokens} & {*banned}
            assert len(tree.children(-1)) == min(len(shape.children(-1)), CHAIN - len(banned))
            ids = engine.generate(PROMPT, sampling, 30, tree=shape).ids
            assert not {*ids} & {*banned}
            if temperature == 0:
                assert ids == engine.generate(PROMPT, sampling, 30, speculate=False).ids


# ---- what only the host can choose


@pytest.mark.parametrize("name", ["draft", "eagle1"])
def test_what_a_graph_cannot_choose_is_left_to_steps(chains: Chains, name: str) -> None:
    """Penalties depend on drafts, and float32 has no places for noise at odd temperatures; seeds still give q's own draws."""

    def in_graph(rule: str | None, **settings: Any) -> bool:
        return make_rule(rule, Sampler(Sampling(**settings), CHAIN, 3)).in_graph is not None

    assert in_graph(None) and in_graph(None, temperature=1e-5) and not in_graph(None, repetition_penalty=1.1)
    for rule in RULES:
        chance = rule not in ("point-mass", "lossy-typical")
        for temperature, possible in ((0.04, not chance), (0.05, True), (100.0, True), (101.0, not chance)):
            assert in_graph(rule, temperature=temperature) == possible
            assert in_graph(rule, temperature=temperature, top_k=3, top_p=0.5, min_p=0.1, logit_bias={3: 1.0}) == possible
        for penalty in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
            assert not in_graph(rule, temperature=1.0, **{penalty: 0.5})
    engine = chains(name, "cpu", "tree")
    others: list[dict[str, Any]] = [{"temperature": 0.02}, {"temperature": 200.0}]
    for hot in (*others, {"temperature": 1.0, "repetition_penalty": 1.2}):
        sampling = Sampling(seed=7, **hot)
        ids = engine.generate(PROMPT, sampling, 24, tree=STORED).ids
        assert ids == engine.generate(PROMPT, sampling, 24, tree=STORED).ids and len(ids) == 24
        plain = engine.generate(PROMPT, sampling, 24, speculate=False).ids
        result = run(engine, PROMPT, STORED, 24, **{"seed": 7, **hot})
        assert result.ids == ids
        assert engine.generate(PROMPT, sampling, 24, tree=STORED, rule="point-mass").ids == plain


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["draft", "eagle1", "some3"])
def test_rules_that_follow_the_plain_text_do_so_in_one_call(chains: Chains, name: str, device: str) -> None:
    """Point mass and coupled: the text of a seed is the plain one; filters change what is drafted as little."""
    accepted = 0
    for kind in KINDS:
        engine = chains(name, device, kind)
        filters: dict[str, Any] = {"top_k": 4, "top_p": 0.9, "logit_bias": {3: 2.0}}
        for rule, settings in (("point-mass", {}), ("coupled", {}), ("coupled", filters)):
            for seed in range(6):
                sampling = Sampling(0.8, seed=seed, **settings)
                plain = engine.generate(PROMPT, sampling, 24, speculate=False, rule=rule).ids
                result = engine.generate(PROMPT, sampling, 24, tree=shape_of(engine), rule=rule)
                assert result.ids == plain
                accepted += result.stats.accepted
    assert accepted > 100
