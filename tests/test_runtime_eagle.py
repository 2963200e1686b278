"""EAGLE heads end to end: text drafted by one is the text without it, and a proposal depends on the text alone."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import tiny
from bundles import cheap_drafts
from eagles import CHAIN, EVEN, SOME, TREE, Chains, Draft, Head, reference
from specedge.runtime import Engine, Result, Sampling, TreeShape
from specedge.runtime.cache import KVCache
from specedge.runtime.control import Weigh
from specedge.runtime.decode import decode, prefill
from specedge.runtime.head_drafters import EagleDrafter
from specedge.runtime.rules import Rule, make_rule
from specedge.runtime.sampler import Sampler
from specedge.runtime.sequence import Sequence as Target
from specedge.runtime.tree import Proposal, TokenTree
from tiny import Array

DEVICES = ("cpu", "cpu-static")
HEADS = ("eagle1", "eagle3", "some3")
CONTEXT = 64
STORED = TreeShape.from_paths(TREE)
SKEWED = TreeShape.from_paths([[1], [2], [1, 0], [2, 1], [2, 1, 0]])  # not even the first choices
SIBLINGS = TreeShape.from_paths([[0], [1], [2]])
DEEP = TreeShape.from_paths([[0], [0, 0], [0, 1], [0, 1, 0]])  # no beginning of the stored one
NOTHING = TreeShape.chain(0)
CHAINS = tuple(TreeShape.chain(gamma) for gamma in range(1, 8))  # on cpu three are drafted in one call, more by steps
PROMPT = [2, 4, 6]


@pytest.fixture(scope="module")
def model(chains: Chains) -> LlamaForCausalLM:
    """In transformers, the target of which every token depends on all of the text."""
    return tiny.load_hf(chains.target("mixed"))


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(CHAIN, size=length).tolist()


def is_greedy(model: LlamaForCausalLM, prompt: Sequence[int], ids: Sequence[int]) -> bool:
    """Whether each of `ids` is what transformers takes for the likeliest there."""
    rows = tiny.hf_logits(model, [*prompt, *ids[:-1]])[len(prompt) - 1 :]
    return bool(rows.argmax(axis=1).tolist() == list(ids))


def run(engine: Engine, prompt: Sequence[int], shape: TreeShape, count: int | None = None, **settings: Any) -> Result:
    """A request, which must have drafted the whole shape in every round with room for it."""
    result = engine.generate(prompt, Sampling(**settings), count, tree=shape)
    length, end = len(prompt), len(prompt) + len(result.ids)
    for drafted, accepted in result.stats.per_round:
        assert drafted == (len(shape.within(end - length - 1, CONTEXT - length).parents) if length > 1 else 0)
        length += accepted + 1
    return result


# ---- the same ids


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head", HEADS)
def test_speculative_is_plain_is_transformers(chains: Chains, model: LlamaForCausalLM, head: str, device: str) -> None:
    """To the end of the context, drafting in one call what the bundle has graphs for, and by steps what it has none for."""
    shares = []
    for kind, shapes in (("chain", CHAINS), ("tree", (STORED, SKEWED, SIBLINGS, DEEP, CHAINS[3]))):
        engine = chains(head, device, kind)
        plain = engine.generate(PROMPT, speculate=False).ids
        assert len(plain) == CONTEXT - len(PROMPT) and is_greedy(model, PROMPT, plain)
        for shape in shapes:
            result = run(engine, PROMPT, shape)
            assert result.ids == plain
            shares.append(result.stats.accepted / result.stats.rounds)
        with cheap_drafts(engine):
            adaptive = engine.generate(PROMPT)
        assert adaptive.ids == plain and adaptive.stats.drafted > 0
    assert all(0.1 < share < 2 for share in shares)
    in_one_call = {"cpu": 3, "cpu-static": 7}[device]
    assert chains(head, device, "chain").expansions == (TreeShape.chain(in_one_call),)
    assert chains(head, device, "tree").expansions == (STORED,)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head", ["eagle1", "some3"])
def test_prompts_of_every_length(chains: Chains, model: LlamaForCausalLM, head: str, device: str) -> None:  # B24, B25
    """Around the edges of a chunk, which is 8, and up to the last token that there is room for; one engine after another."""
    for length in (1, 2, 7, 8, 9, 25, *range(57, 64)):
        prompt = text(length)
        for kind, shape in (("chain", CHAINS[2]), ("tree", STORED)):
            count = min(12, CONTEXT - length)
            result = run(chains(head, device, kind), prompt, shape, 12)
            assert len(result.ids) == count and result.finish_reason == "length" and is_greedy(model, prompt, result.ids)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("head", "kind", "shape"), [("eagle1", "chain", CHAINS[2]), ("some3", "tree", STORED)])
def test_a_request_knows_nothing_of_the_ones_before(
    chains: Chains, head: str, kind: str, shape: TreeShape, device: str
) -> None:  # B35, B36
    """Not of a longer one, nor of one whose stream was closed inside a round."""
    engine, settings = chains(head, device, kind), {"temperature": 1.0, "seed": 5}
    alone = {}
    for prompt in (text(40), text(9)):
        result = run(chains(head, device, kind, fresh=True), prompt, shape, 20, **settings)
        alone[len(prompt)] = result.ids, result.stats.per_round
    for taken in (0, 1, 2, 3, 7):
        for length in (40, 9, 9):
            result = run(engine, text(length), shape, 20, **settings)
            assert (result.ids, result.stats.per_round) == alone[length]
        stream = engine.stream(text(30), Sampling(1.0, seed=taken), tree=shape)
        for _ in range(taken):
            next(stream)
        stream.close()


# ---- heads that know (F-CHAIN)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("head", "step"), [("sure1", 1), ("even3", 2)])
def test_a_head_that_knows_is_always_right(chains: Chains, head: str, step: int, device: str) -> None:
    """It reads the token that follows a feature and drafts the one after that: off by one, nothing would be accepted."""
    ids = [(2 + step * index) % CHAIN for index in range(1, 41)]
    for kind, shapes in (("chain", CHAINS), ("tree", (STORED, CHAINS[4]))):
        for shape in shapes:
            result = run(chains(head, device, kind), [(2 - step) % CHAIN, 2], shape, 40)
            assert result.ids == ids
            *rounds, last = result.stats.per_round
            assert rounds == [(len(shape.parents), shape.depth)] * len(rounds) and last[1] == 40 - 1 - len(rounds) * (
                shape.depth + 1
            )


# ---- a proposal depends on the text alone


class Script:
    """Asks for one shape after another, at random."""

    def __init__(self, seed: int, shapes: Sequence[TreeShape]) -> None:
        self._random, self._shapes = random.Random(seed), shapes

    def ask(self, depth: int, nodes: int) -> TreeShape:
        return self._random.choice(self._shapes).within(depth, nodes)

    @property
    def weigh(self) -> None:
        return None

    def take(self, confidence: Sequence[float], drafted: int, drawn: bool) -> int:
        return drafted

    def observe(self, confidence: Sequence[float], agreed: int, compared: int) -> None:
        return


class Compared:
    """An engine's drafter, whose every proposal must be that of another engine, which has just read the whole text."""

    def __init__(self, engine: Engine, fresh: Engine, rule: str | None, sampling: Sampling) -> None:
        self._engine, self._fresh = engine, fresh
        self._rule = lambda: new_rule(rule, sampling)
        self._drafter = engine.new_drafter(self._rule())
        self.proposals: list[tuple[TreeShape, Proposal]] = []

    def begin(self, prompt: Sequence[int], known: int = 0) -> int:
        return self._drafter.begin(prompt, known)

    def room(self, length: int) -> int:
        return self._drafter.room(length)

    def learn(self, target: Target, rows: Sequence[int]) -> None:
        self._drafter.learn(target, rows)

    def propose(self, history: Sequence[int], shape: TreeShape, weigh: Weigh | None = None) -> Proposal:
        found = self._drafter.propose(history, shape, weigh)
        if not shape.parents:
            return found
        drafter = self._fresh.new_drafter(self._rule())
        prefill(self._fresh.target, drafter, list(history))
        expected = drafter.propose(list(history), shape)
        assert found.tree == expected.tree
        for node in {*found.tree.parents} if found.q and expected.q else ():
            assert found.q and expected.q
            np.testing.assert_allclose(found.q(node).dense(CHAIN), expected.q(node).dense(CHAIN), atol=1e-4)
        assert self._engine.eagle and self._fresh.eagle
        one, other = self._engine.eagle.cache, self._fresh.eagle.cache
        assert one.length == other.length == len(history) - 1  # the text and none of the drafts
        assert largest_difference(one, other, one.length) <= 1e-5
        self.proposals.append((shape, found))
        return found


def largest_difference(one: KVCache, other: KVCache, length: int) -> float:
    """Of the first `length` columns of two caches."""
    pairs = zip(one.buffers(), other.buffers(), strict=True)
    columns = [(mine[:, :, :length].astype(float), true[:, :, :length].astype(float)) for (_, mine), (_, true) in pairs]
    return max(float(np.abs(mine - true).max()) for mine, true in columns)


def new_rule(rule: str | None, sampling: Sampling) -> Rule:
    return make_rule(rule, Sampler(sampling, CHAIN, len(PROMPT)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize("head", ["eagle1", "some3"])
def test_a_proposal_is_that_of_a_head_that_reads_the_whole_text(chains: Chains, head: str, kind: str, device: str) -> None:
    """Whatever was asked for and accepted before, plain rounds among it."""
    engine, fresh = chains(head, device, kind), chains(head, device, kind, fresh=True)
    kinds = set()
    settings: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 0.7, "frequency_penalty": 0.5}]
    for seed, sampling in enumerate(Sampling(seed=seed, **each) for seed, each in enumerate(settings)):
        rule, drafter = new_rule(None, sampling), Compared(engine, fresh, None, sampling)
        script = Script(seed, [*CHAINS, NOTHING, NOTHING, STORED, STORED, SKEWED, SIBLINGS, DEEP])
        prefill(engine.target, drafter, PROMPT)
        rounds = list(decode(engine.target, drafter, script, rule.judge, PROMPT, CONTEXT - len(PROMPT), ()))
        assert sum(len(each.tokens) for each in rounds) == CONTEXT - len(PROMPT)
        for each in rounds:
            ranks = [each.tree.children(each.tree.parents[node]).index(node) for node in each.nodes]
            kinds |= {"plain" if not each.tree.tokens else "nothing" if not ranks else "first" if not any(ranks) else "other"}
        if head == "some3":  # B51
            for _, proposal in drafter.proposals:
                assert {*proposal.tree.tokens} <= {*SOME}
                laws = [proposal.q(node).dense(CHAIN) for node in {*proposal.tree.parents}] if proposal.q else []
                assert all(set(np.flatnonzero(law)) <= {*SOME} for law in laws)
    assert kinds == {"plain", "nothing", "first", "other"}


# ---- what the target gives, and what the head makes of it


@torch.no_grad()
def streams(model: LlamaForCausalLM, ids: Sequence[int]) -> Tensor:
    """[T, 4 H]: what enters the two blocks, what leaves the last, and what that is after the final norm."""
    outputs: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda _, __, out: outputs.append(out[0])) for layer in model.model.layers]
    last = model.model(torch.tensor([list(ids)]), use_cache=False).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    return torch.cat([model.model.embed_tokens(torch.tensor(list(ids))), *outputs, last], -1)


def seen_by(head: Head, rows: Tensor) -> Tensor:
    """What such a head reads of `streams`."""
    return rows[..., -CHAIN:] if head.generation == 1 else rows[..., :-CHAIN]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["eagle1", "some3"])
def test_features_are_the_residual_streams(chains: Chains, model: LlamaForCausalLM, name: str, device: str) -> None:
    """Of a prompt, of a chain and of all of a tree, also behind a branch that was accepted."""
    head, target = chains.head(name), chains(name, device, "tree").target
    known: list[Array] = []
    history = text(19)
    target.truncate(0)
    target.prefill(history, lambda rows: known.append(target.hidden(rows)))
    np.testing.assert_allclose(np.concatenate(known), seen_by(head, streams(model, history)), atol=1e-4)
    for seed, (shape, accepted) in enumerate(
        [(STORED, (2,)), (STORED, (0, 4)), (CHAINS[2], (0, 1)), (SKEWED, (1, 3, 4)), (NOTHING, ())]
    ):
        root, *tokens = np.random.default_rng(seed).permutation(CHAIN)[: 1 + len(shape.parents)].tolist()
        tree = TokenTree(tuple(tokens), shape.parents)
        target.step([root, *tokens], tree)
        for node in range(-1, len(tokens)):
            true = seen_by(head, streams(model, [*history, root, *tree.path(node)]))[-1]
            np.testing.assert_allclose(target.hidden(node + 1), true, atol=1e-4)
        rows = [0, *(node + 1 for node in accepted)]
        found = target.hidden(rows)
        target.commit(rows)
        history += [root, *(tokens[node] for node in accepted)]
        np.testing.assert_allclose(found, seen_by(head, streams(model, history))[-len(rows) :], atol=1e-4)


def true_draft(model: LlamaForCausalLM, head: Head, history: Sequence[int], path: Sequence[int]) -> Draft:
    """What the formulas make of a text and drafts behind it."""
    features = seen_by(head, streams(model, history[:-1]))
    embedding, lm_head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    return reference(head, features, list(history[1:]), len(path), embedding, lm_head, path)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", HEADS)
def test_one_call_computes_the_head(chains: Chains, model: LlamaForCausalLM, name: str, device: str) -> None:
    """Logits and choices against the formulas, behind texts that fill less than a row, many chunks, and all of the context."""
    head = chains.head(name)
    for kind in ("chain", "tree"):
        engine = chains(name, device, kind)
        (shape,) = engine.expansions
        expansion, eagle = engine.expansion(shape), engine.eagle
        assert expansion and eagle
        for length in (2, 3, 8, 9, 10, 26, 60, 63):
            history = text(length, seed=1)
            features = seen_by(head, streams(model, history[:-1])).numpy()
            eagle.cache.truncate(0)
            noise = np.zeros((len(expansion.depths), len(eagle.vocabulary.ids)), np.float32)
            drafted = eagle.draft(expansion, history[1:], features, noise)
            tree = TokenTree(drafted.ids, shape.parents)
            for row, (node, depth) in enumerate(zip((-1, *expansion.fed), expansion.depths, strict=True)):
                if length + depth >= CONTEXT:  # no round has room for children there
                    continue
                true = true_draft(model, head, history, tree.path(node)).logits[-1].numpy()
                np.testing.assert_allclose(drafted.logits[row], true, atol=1e-3)
                best = eagle.vocabulary.ids[(-true).argsort()[: len(shape.children(node))]]
                assert [drafted.ids[child] for child in shape.children(node)] == best.tolist()


# ---- what is left out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "kind"), [("eagle1", "chain"), ("some3", "tree")])
def test_banned_ids_are_never_drafted(chains: Chains, name: str, kind: str, device: str) -> None:
    """Nor when siblings outnumber what is left; biases move drafts in one call as they do by steps."""
    engine = chains(name, device, kind)
    (shape,) = engine.expansions
    few = [token for token in range(CHAIN) if token not in (4, 10)]  # two ids left for three siblings
    for banned in ([5, 6, 7, 8], few):
        for temperature in (0.0, 1.0):
            sampling = Sampling(temperature, banned_ids=banned, logit_bias={10: 1.5, 4: -0.5})
            result = engine.generate(PROMPT, sampling, 30, tree=shape)
            assert not {*result.ids} & {*banned}
            rule = new_rule(None, sampling)
            assert rule.in_graph
            drafter = engine.new_drafter(rule)
            prefill(engine.target, drafter, PROMPT)
            proposal = drafter.propose(PROMPT, shape)
            assert proposal.tree.tokens and not {*proposal.tree.tokens} & {*banned}
            assert len(proposal.tree.children(-1)) == min(len(shape.children(-1)), CHAIN - len(banned))
            if temperature == 0:
                assert result.ids == engine.generate(PROMPT, sampling, 30, speculate=False).ids
                drafter = engine.new_drafter(Rule(rule.name, rule.choose, rule.judge, None))
                prefill(engine.target, drafter, PROMPT)
                assert drafter.propose(PROMPT, shape).tree == proposal.tree


def test_a_tree_wider_than_the_draft_vocabulary_is_drafted_by_steps(chains: Chains) -> None:
    """As far as there are ids: no graph could choose fourteen of twelve."""
    wide = tuple((rank,) for rank in range(len(EVEN) + 2))
    engine = chains("even3", "cpu", "tree", tree=wide)
    assert engine.expansions == ()
    for sampling in (Sampling(), Sampling(1.0)):
        result = engine.generate([0, 2], sampling, 12)
        assert result.ids == [(4 + 2 * index) % CHAIN for index in range(12)]
        assert result.stats.per_round == [(len(EVEN), 1)] * 6


# ---- recorded log-probabilities (F-RESCORE)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["eagle1", "some3"])
def test_recorded_log_probabilities_are_those_of_the_text(
    chains: Chains, model: LlamaForCausalLM, name: str, device: str
) -> None:
    for kind, shape in (("chain", CHAINS[2]), ("tree", STORED)):
        for rule in (None, "coupled"):
            sampling = Sampling(0.8, seed=3)
            result = chains(name, device, kind).generate(text(10), sampling, tree=shape, rule=rule, log_probabilities=True)
            assert 0 < result.stats.accepted < result.stats.drafted
            rows = torch.from_numpy(tiny.hf_logits(model, [*text(10), *result.ids[:-1]])[9:]).log_softmax(-1)
            true = rows[torch.arange(len(result.ids)), torch.tensor(result.ids)]
            assert result.log_probabilities is not None
            np.testing.assert_allclose(result.log_probabilities, true, atol=1e-3)


def test_features_do_not_pile_up_while_nothing_is_drafted(chains: Chains) -> None:
    """Of rounds without drafts a chunk and a round are kept at most; the proposal behind them is that of a fresh head."""
    engine = chains("eagle1", "cpu", "chain")
    rule = make_rule(None, Sampler(Sampling(), engine.bundle.manifest.allowed_ids, 1))
    drafter, history = engine.new_drafter(rule), list(PROMPT)
    assert isinstance(drafter, EagleDrafter)
    prefill(engine.target, drafter, history)
    chunk = engine.bundle.role("eagle").chunk
    for token in range(3 * chunk):
        drafter.propose(history, TreeShape.chain(0))
        engine.target.step([history[-1]])
        engine.target.commit([0])
        drafter.learn(engine.target, [0])
        history.append(token % 20)
        assert sum(map(len, drafter._features)) <= chunk + 2
    late = drafter.propose(history, TreeShape.chain(3))
    fresh = engine.new_drafter(rule)
    prefill(engine.target, fresh, history)
    assert late.tree == fresh.propose(history, TreeShape.chain(3)).tree
