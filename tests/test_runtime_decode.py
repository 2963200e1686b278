"""Laws of the loop and its requests: speculative ids are plain ids are transformers' ids, wherever a request ends."""

import gc
import itertools
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import bundles
import tiny
from specedge.bundle import changed_files, open_bundle
from specedge.devices.table import get_device
from specedge.errors import SpecedgeError, UsageError
from specedge.runtime import Engine, Result, Sampling, load
from specedge.runtime.control import Fixed, Weigh
from specedge.runtime.decode import Round, decode, prefill
from specedge.runtime.drafters import DraftModel
from specedge.runtime.model import Model
from specedge.runtime.rules import Children, Rule, make_rule
from specedge.runtime.sampler import Sampler
from specedge.runtime.sequence import Logits
from specedge.runtime.shape import TreeShape
from specedge.runtime.tree import ROOT, Proposal
from specedge.tokenizer import Prompt

FORMS = ("cpu", "cpu-static")
CONTEXT, CHUNK = 128, 8
DRAFTERS = ("self", "noisy", "other", "lookup")
SHAPE: dict[str, Any] = {"context": CONTEXT, "chunk": CHUNK, "widths": (1, 4)}  # gamma 4..7 takes the chunk's graph
PROMPT = [3, 14, 15, 92, 3, 14]  # lookup finds something


class Reference:
    """Greedy ids of transformers; asked for again, they are remembered."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model
        self._known: dict[tuple[int, ...], list[int]] = {}

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        known = self._known.setdefault(tuple(prompt), [])
        known += tiny.hf_greedy(self.model, [*prompt, *known], count - len(known))
        return known[:count]


@dataclass(frozen=True)
class Rand:
    """F-RAND without EOS: checkpoint folders, bundles and engines by the name of the draft, and the reference."""

    device: str
    sources: Path
    paths: dict[str, Path]
    engines: dict[str, Engine]
    reference: Reference


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("rand")
    tiny.f_rand(place / "target", eos_token_id=None)
    tiny.f_self(place / "target", place / "self")
    tiny.noisy_lm_head(place / "target", place / "noisy", sigma=0.15)
    tiny.f_rand(place / "other", seed=1, eos_token_id=None)
    tiny.f_self(place / "target", place / "with tokenizer")
    tiny.f_tok(place / "with tokenizer", size=120)
    for vocab in (120, 136):  # smaller in every way, padded or not, and with an EOS of its own
        tiny.f_rand(place / f"{vocab}", vocab_size=vocab, hidden_size=32, num_hidden_layers=1, eos_token_id=7)
        tiny.f_tok(place / f"{vocab}", size=120)
    return place


@pytest.fixture(scope="module")
def reference(sources: Path) -> Reference:
    return Reference(tiny.load_hf(sources / "target"))


@pytest.fixture(scope="module", params=FORMS)
def rand(request: pytest.FixtureRequest, sources: Path, reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Rand:
    place, device = tmp_path_factory.mktemp("bundles"), request.param
    paths = {}
    for name in ("self", "noisy", "other", *(["120", "136"] if device == "cpu" else [])):
        target = "with tokenizer" if name.isdigit() else "target"
        paths[name] = bundles.make(sources / target, place / name, draft=str(sources / name), device=device, **SHAPE)
    engines = {name: load(path, threads=1) for name, path in paths.items()}
    engines["lookup"] = load(paths["self"], drafter="lookup", threads=1)
    return Rand(device, sources, paths, engines, reference)


def run(engine: Engine, prompt: Prompt, count: int | None, gamma: int) -> Result:
    """A greedy request at fixed gamma; what it reports of itself must add up."""
    result = engine.generate(prompt, Sampling(), count, gamma=gamma)
    stats = result.stats
    assert stats.tokens == len(result.ids) == sum(accepted for _, accepted in stats.per_round) + stats.rounds
    left = len(result.ids)
    for drafted, accepted in stats.per_round:
        assert 0 <= accepted <= drafted <= min(gamma, left - 1)
        if engine.drafter_name == "draft":
            assert drafted == min(gamma, left - 1)
        left -= accepted + 1
    return result


# ---- the same ids


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("gamma", [1, 3, 4, 7])
def test_speculative_is_plain_is_transformers(rand: Rand, drafter: str, gamma: int) -> None:
    engine, expected = rand.engines[drafter], rand.reference.greedy(PROMPT, 100)
    result = run(engine, PROMPT, 100, gamma)
    assert result.ids == expected
    assert engine.generate(PROMPT, max_new_tokens=100, speculate=False).ids == expected
    assert result.stats.drafted > 0
    if drafter == "noisy":
        assert 0.1 < result.stats.accepted / result.stats.drafted < 0.9


def test_a_copy_of_the_target_is_always_accepted(rand: Rand) -> None:  # F-SELF, B33 (1)
    for gamma in (1, 4, 7):
        per_round = run(rand.engines["self"], PROMPT, 100, gamma).stats.per_round
        assert all(accepted == drafted for drafted, accepted in per_round)
        assert [drafted for drafted, _ in per_round[:-1]] == [gamma] * (len(per_round) - 1)


def test_adaptive_gamma_gives_the_same_ids(rand: Rand) -> None:
    expected = rand.reference.greedy(PROMPT, 100)
    assert all(rand.engines[drafter].generate(PROMPT, max_new_tokens=100).ids == expected for drafter in DRAFTERS)


def test_gamma_zero_is_plain(rand: Rand) -> None:
    for drafter in DRAFTERS:
        result = run(rand.engines[drafter], PROMPT, 10, 0)
        assert result.ids == rand.reference.greedy(PROMPT, 10)
        assert result.stats.per_round == [(0, 0)] * 10


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 63, 64])
def test_prompts_around_the_edges_of_a_chunk(rand: Rand, length: int) -> None:  # B24
    prompt = [(7 * index + 3) % CONTEXT for index in range(length)]
    expected = rand.reference.greedy(prompt, 16)
    for drafter in ("self", "other"):
        result = run(rand.engines[drafter], prompt, 16, 3)
        assert result.ids == expected and result.stats.drafted > 0
    assert rand.engines["self"].generate(prompt, max_new_tokens=16, speculate=False).ids == expected


def test_an_empty_prompt_starts_from_bos(rand: Rand) -> None:  # B24
    prompts: list[Prompt] = [[], "", ()]
    for empty in prompts:
        assert run(rand.engines["self"], empty, 16, 3).ids == rand.reference.greedy([1], 16)


def test_draft_vocabularies_of_other_sizes(rand: Rand) -> None:  # B40, in one form: two more models to trace
    for name in sorted(set(rand.paths) - set(DRAFTERS)):
        engine, free = rand.engines[name], [token for token in PROMPT if token < 120]
        result = run(engine, free, 60, 4)
        assert result.stats.drafted > 0
        assert engine.bundle.manifest.eos_ids == (2,)  # the draft's own EOS counts for nothing
        assert result.ids == engine.generate(free, max_new_tokens=60, speculate=False).ids
        text = list(free)
        for _ in result.ids:  # transformers, kept from the rows that no tokenizer entry stands for
            text.append(int(tiny.hf_logits(rand.reference.model, text)[-1][:120].argmax()))
        assert result.ids == text[len(free) :]
        tree = engine.generate(free, max_new_tokens=60, tree=BUSHY)
        assert tree.ids == result.ids and tree.stats.drafted > 0
        changed = Sampling(repetition_penalty=1.3, logit_bias={119: 5.0, 118: -5.0}, banned_ids=[117, 119])
        plain = engine.generate(free, changed, 60, speculate=False)
        assert engine.generate(free, changed, 60, tree=BUSHY).ids == plain.ids != result.ids
        with pytest.raises(SpecedgeError, match="id 125 at index 1"):
            engine.generate([3, 125], max_new_tokens=9, gamma=4)


def test_other_vocabularies_are_refused(sources: Path, tmp_path: Path) -> None:  # B40
    changes: dict[str, dict[str, Any]] = {"swapped": {"swap": (40, 41)}, "added": {"extra_tokens": ["<x>"]}}
    for name, change in changes.items():
        tiny.f_self(sources / "with tokenizer", tmp_path / name)
        tiny.f_tok(tmp_path / name, size=120, **change)
        with pytest.raises(SpecedgeError, match=r"^vocabulary: id (40|120) is .* to the target and .* to the draft"):
            bundles.make(sources / "with tokenizer", tmp_path / "bundle", draft=str(tmp_path / name), **SHAPE)
        assert not (tmp_path / "bundle").exists()


# ---- the end of the context, and the number of tokens


def test_a_prompt_that_leaves_no_room_is_refused_before_any_compute(rand: Rand) -> None:  # B23
    engine = rand.engines["self"]
    prompt = [(7 * index + 3) % CONTEXT for index in range(200)]
    result = run(engine, prompt[: CONTEXT - 1], 4, 3)
    assert (result.ids, result.finish_reason) == (rand.reference.greedy(prompt[: CONTEXT - 1], 1), "length")
    before = engine.target.length
    for length in (CONTEXT, CONTEXT + 1, 200):
        with pytest.raises(SpecedgeError, match=rf"^prompt: {length} tokens .* context of {CONTEXT}"):
            engine.stream(prompt[:length])
    assert engine.target.length == before


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_speculation_ends_where_the_context_ends(rand: Rand, drafter: str) -> None:  # B25
    for length in (3, *range(CONTEXT - 6, CONTEXT)):
        prompt = [(index % 5) + 3 for index in range(length)]
        for count in (1000, None):
            result = run(rand.engines[drafter], prompt, count, 4)
            assert (result.ids, result.finish_reason) == (rand.reference.greedy(prompt, CONTEXT - length), "length")
        assert result.stats.drafted > 0 or length > CONTEXT - 2


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("gamma", [1, 4, 7])
def test_exactly_as_many_tokens_as_asked_for(rand: Rand, drafter: str, gamma: int) -> None:  # B31
    longest = rand.reference.greedy(PROMPT, 17)
    for count in (0, 1, 2, gamma, gamma + 1, gamma + 2, 17):
        result = run(rand.engines[drafter], PROMPT, count, gamma)
        assert (result.ids, result.finish_reason) == (longest[:count], "length")
    assert result.stats.drafted > 0


# ---- what the draft has read (B33)


CHAIN = TreeShape.chain(4)
NOTHING = TreeShape.chain(0)
SIBLINGS = TreeShape.from_paths([[0], [1], [2]])  # leaves only: none of them is ever fed before it was accepted
BUSHY = TreeShape.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]])
SKEWED = TreeShape.from_paths([[1], [2], [1, 0], [2, 1], [2, 1, 0]])  # not even the first choices
SCRIPTS = {
    "chain": [CHAIN],
    "siblings": [SIBLINGS],
    "bushy": [BUSHY],
    "skewed": [SKEWED],
    "gamma 0 between": [BUSHY, NOTHING, CHAIN, NOTHING, NOTHING],
    "all shapes in turn": [BUSHY, SIBLINGS, CHAIN, SKEWED],
}


class Script:
    """Asks for one shape after another, again and again."""

    def __init__(self, shapes: Sequence[TreeShape]) -> None:
        self._shapes = itertools.cycle(shapes)

    def ask(self, depth: int, nodes: int) -> TreeShape:
        return next(self._shapes).within(depth, nodes)

    @property
    def weigh(self) -> None:
        return None

    def take(self, confidence: Sequence[float], drafted: int, drawn: bool) -> int:
        return drafted

    def observe(self, confidence: Sequence[float], agreed: int, compared: int) -> None:
        return


def greedy_rule(allowed: int = 128) -> Rule:
    return make_rule(None, Sampler(Sampling(), allowed, len(PROMPT)))


@dataclass
class Diary:
    """What a draft model proposed, what it read of the text before, and every row it chose from."""

    proposals: list[tuple[list[int], TreeShape, Proposal]]  # (text, what was asked for, the answer)
    reads: list[tuple[int, list[int]]]  # (length of the cache, what is read next)
    rows: list[tuple[list[int], Logits]]  # (text and path, the logits after it)


def recorded(rand: Rand, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Diary, list[Round]]:
    """A request of 100 tokens through the loop itself, and what its draft model did meanwhile."""
    bundle, device = open_bundle(rand.paths[name]), get_device(rand.device)
    target, draft = (Model(bundle, role, device, 1).sequence() for role in ("target", "draft"))
    diary, rule, read = Diary([], [], []), greedy_rule(), draft.prefill

    def note(ids: Sequence[int]) -> Logits | None:
        if ids:
            diary.reads.append((draft.length, list(ids)))
        return read(ids)

    def choose(logits: Logits, history: Sequence[int], path: Sequence[int], first: int, ranks: Sequence[int]) -> Children:
        diary.rows.append(([*history, *path], logits.copy()))
        return rule.choose(logits, history, path, first, ranks)

    class Recorder(DraftModel):
        def propose(self, history: Sequence[int], shape: TreeShape, weigh: Weigh | None = None) -> Proposal:
            proposal = super().propose(history, shape, weigh)
            if shape.parents:
                diary.proposals.append((list(history), shape, proposal))
                inner = {parent for parent in proposal.tree.parents if parent != ROOT}
                assert draft.length == len(history) + len(inner)  # nothing is fed whose logits nobody wants
            return proposal

    drafter = Recorder(draft, replace(rule, choose=choose))
    prefill(target, drafter, PROMPT)
    monkeypatch.setattr(draft, "prefill", note)  # one read a round from here on
    return diary, list(decode(target, drafter, Script(SCRIPTS[script]), rule.judge, PROMPT, 100, ()))


READERS = [*itertools.product(("self", "noisy", "other"), ("chain", "all shapes in turn")), *(("noisy", s) for s in SCRIPTS)]


@pytest.mark.parametrize(("name", "script"), sorted(set(READERS)))
def test_the_draft_proposes_what_it_would_after_reading_the_whole_text(
    rand: Rand, name: str, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_reference = tiny.load_hf(rand.sources / name)
    diary, rounds = recorded(rand, name, script, monkeypatch)
    assert len(diary.proposals) == len(diary.reads) >= 15
    for text, row in diary.rows:  # every node's logits, whatever else was in the cache
        assert np.abs(tiny.hf_logits(draft_reference, text)[-1] - row).max() <= 1e-3
    rows = {tuple(text): row for text, row in diary.rows}
    for (history, shape, proposal), (length, ids) in zip(diary.proposals, diary.reads, strict=True):
        tree = proposal.tree
        assert tree.parents == shape.parents
        for node in {*tree.parents}:
            best = rows[*history, *tree.path(node)].argsort()[::-1]
            ranks = [shape.ranks[child] for child in shape.children(node)]
            assert [tree.tokens[child] for child in tree.children(node)] == best[ranks].tolist()
        assert [*history[:length], *ids] == history  # up to the root, and nothing that was rejected
    check_reads(diary, rounds)


def check_reads(diary: Diary, rounds: Sequence[Round]) -> None:
    """Each round reads the root, the leaf accepted before it, and what plain rounds emitted: nothing twice."""
    unread, reads = len(PROMPT[-1:]), iter(diary.reads)
    for found in rounds:
        if found.tree.tokens:
            assert len(next(reads)[1]) == unread
            unread = 1
            if found.nodes and not found.tree.children(found.nodes[-1]):
                unread = 2
        else:
            unread += 1


def test_rounds_of_every_kind_are_among_them(rand: Rand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing accepted, a sibling behind the first, a path to its leaf, one that ends before, and plain rounds between."""
    kinds = set()
    for script in ("bushy", "gamma 0 between", "all shapes in turn"):
        _, rounds = recorded(rand, "noisy", script, monkeypatch)
        for found, following in itertools.pairwise(rounds):
            ranks = [found.tree.children(parent).index(node) for parent, node in itertools.pairwise((ROOT, *found.nodes))]
            ended = bool(found.nodes) and not found.tree.children(found.nodes[-1])
            kind = "plain" if not found.tree.tokens else "nothing" if not ranks else "leaf" if ended else "inner"
            kinds |= {(kind, max(ranks, default=0) > 0), (kind, "then plain" if not following.tree.tokens else "then drafts")}
    assert kinds >= {("nothing", False), ("leaf", False), ("leaf", True), ("inner", False), ("inner", True)}
    assert kinds >= {(kind, then) for kind in ("nothing", "leaf", "inner") for then in ("then plain", "then drafts")}
    assert ("plain", "then plain") in kinds


def test_a_level_wider_than_the_widest_graph_is_read_in_pieces(rand: Rand) -> None:
    """Twenty inner nodes under twenty: each as if it alone had been read."""
    wide = TreeShape.from_paths([path for rank in range(20) for path in ([rank], [rank, 0], [rank, 0, 0])])
    bundle, draft_reference = open_bundle(rand.paths["noisy"]), tiny.load_hf(rand.sources / "noisy")
    draft = Model(bundle, "draft", get_device(rand.device), 1).sequence()
    assert draft.widest < 20
    drafter = DraftModel(draft, greedy_rule())
    drafter.begin(PROMPT)
    history = list(PROMPT)
    for _ in range(2):  # again behind the last child of the last child
        tree = drafter.propose(history, wide).tree
        assert len(tree.tokens) == 60
        for node in {*tree.parents}:
            best = tiny.hf_logits(draft_reference, [*history, *tree.path(node)])[-1].argsort()[::-1]
            children = tree.children(node)
            assert [tree.tokens[child] for child in children] == best[: len(children)].tolist()
        history += [*tree.path(59), 77]


def test_a_drafter_that_begins_anew_has_forgotten(rand: Rand) -> None:  # B35
    for name, shape in (("noisy", CHAIN), ("noisy", BUSHY), ("lookup", CHAIN)):
        used = rand.engines[name].new_drafter(greedy_rule())
        used.begin([5, 6, 7, 8, 5, 6])
        used.propose([5, 6, 7, 8, 5, 6], shape)
        used.begin(PROMPT)
        found = used.propose(PROMPT, shape).tree.tokens
        other = fresh(rand, name).new_drafter(greedy_rule())
        other.begin(PROMPT)
        assert found == other.propose(PROMPT, shape).tree.tokens != ()


# ---- one request after another


def fresh(rand: Rand, name: str) -> Engine:
    return load(rand.paths["self" if name == "lookup" else name], drafter=rand.engines[name].drafter_name, threads=1)


@pytest.mark.parametrize("drafter", ["noisy", "lookup"])
def test_a_request_knows_nothing_of_the_ones_before(rand: Rand, drafter: str) -> None:  # B35
    engine = fresh(rand, drafter)
    long, short = [(5 * index + 3) % 40 for index in range(100)], PROMPT
    middle = [(index % 7) + 3 for index in range(80)]
    for prompt in (long, short, long, *[middle] * 20):
        result, alone = run(engine, prompt, 20, 4), run(fresh(rand, drafter), prompt, 20, 4)
        assert result.ids == alone.ids == rand.reference.greedy(prompt, 20)
        assert result.stats.per_round == alone.stats.per_round
        assert result.stats.drafted > 0


@pytest.fixture
def no_gc() -> Iterator[None]:
    """What is not reachable must be gone at once, not when the collector happens to run."""
    gc.disable()
    yield
    gc.enable()


def leave_early(engine: Engine, how: str, count: int) -> None:
    """Take `count` of 10 tokens from a stream and give it up."""
    if how == "close":
        stream = engine.stream(PROMPT, max_new_tokens=10, gamma=4)
        taken = [next(stream) for _ in range(count)]
        stream.close()
        assert stream.result().ids == [token.id for token in taken] and not list(stream)
        return
    for index, _ in enumerate(engine.stream(PROMPT, max_new_tokens=10, gamma=4)):
        if index == count and how == "break":
            break
        if index == count:
            raise {"error": RuntimeError, "interrupt": KeyboardInterrupt}[how]


@pytest.mark.parametrize("how", ["close", "break", "error", "interrupt"])
def test_a_stream_given_up_leaves_no_trace(rand: Rand, how: str, no_gc: None) -> None:  # B36
    engine, prompt = rand.engines["self"], [9, 8, 7, 3, 5]
    threads = threading.active_count()
    for count in range(10):
        if how in ("error", "interrupt"):
            with pytest.raises((RuntimeError, KeyboardInterrupt)):
                leave_early(engine, how, count)
        else:
            leave_early(engine, how, count)
        result = run(engine, prompt, 10, 4)
        assert result.ids == rand.reference.greedy(prompt, 10)
        assert all(drafted == accepted for drafted, accepted in result.stats.per_round)
    assert threading.active_count() == threads


def test_a_stream_that_never_starts_holds_nothing(rand: Rand) -> None:
    idle = rand.engines["self"].stream(PROMPT, max_new_tokens=5, gamma=4)
    assert run(rand.engines["self"], PROMPT, 5, 4).ids == [token.id for token in idle] == rand.reference.greedy(PROMPT, 5)


def test_a_second_request_at_the_same_time_is_refused_and_harms_nothing(rand: Rand) -> None:
    engine = rand.engines["self"]
    stream = engine.stream(PROMPT, max_new_tokens=30, gamma=4)
    first = [next(stream).id for _ in range(7)]
    with ThreadPoolExecutor(1) as pool, pytest.raises(SpecedgeError, match=r"^engine: busy"):
        pool.submit(run, engine, [5, 6], 10, 4).result()
    assert [*first, *(token.id for token in stream)] == rand.reference.greedy(PROMPT, 30)


def test_threads_get_their_own_answer_or_are_refused(rand: Rand) -> None:
    engine, prompts = rand.engines["noisy"], [[3 + index, 14, 15] for index in range(8)]
    expected = [rand.reference.greedy(prompt, 20) for prompt in prompts]

    def ask(index: int) -> list[int] | str:
        try:
            return engine.generate(prompts[index % 8], max_new_tokens=20, gamma=4).ids
        except SpecedgeError as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(80)))
    answered = [(index, answer) for index, answer in enumerate(answers) if isinstance(answer, list)]
    assert answered and all(answer == expected[index % 8] for index, answer in answered)
    assert all(answer.startswith("engine: busy") for answer in answers if isinstance(answer, str))


def test_memory_does_not_grow(rand: Rand) -> None:
    engine, process = rand.engines["self"], psutil.Process()
    for _ in range(20):
        engine.generate(PROMPT, max_new_tokens=20, gamma=4)
    before = process.memory_info().rss
    for _ in range(200):
        engine.generate(PROMPT, max_new_tokens=20, gamma=4)
    assert process.memory_info().rss - before < 8e6  # the KV buffers of one request are 0.2 MB, its logits half of it


# ---- EOS (B27, B28), padding (B39): exact chains


@pytest.fixture(scope="module", params=FORMS)
def chains(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bundles of chains of 64 tokens in which i is followed by i + 1, unless the name says otherwise."""
    place = tmp_path_factory.mktemp("chains")
    count_up = tiny.deterministic_chain(64, {})
    tiny.f_chain(place / "stop", count_up, eos=8)
    tiny.f_self(place / "stop", place / "stop draft")
    tiny.f_chain(place / "two", count_up, eos=60, generation_eos=[60, 8])
    tiny.f_tok(place / "tok files", size=64)
    tiny.f_chain(place / "tok", tiny.deterministic_chain(64, {8: 2}), tokenizer=place / "tok files")
    tiny.f_chain(place / "none", count_up)
    tiny.f_chain(place / "none draft", tiny.deterministic_chain(64, {token: (token + 2) % 64 for token in range(0, 64, 4)}))
    tiny.f_tok(place / "padded files", size=60)
    for seed, name in enumerate(("padded", "padded draft")):
        tiny.f_chain(place / name, tiny.random_chain(64, seed), tokenizer=place / "padded files")
        tensors = load_file(place / name / "model.safetensors")
        tensors["lm_head.weight"][60:] = 0.0  # a logit of 0 beside logarithms of probabilities: the largest
        save_file(tensors, place / name / "model.safetensors", metadata={"format": "pt"})
    paths = {"hf padded": place / "padded"}
    for name in ("stop", "two", "tok", "none", "padded"):
        draft = place / f"{name} draft"
        options = SHAPE | {"draft": str(draft) if draft.exists() else None, "device": request.param, "widths": (1, 8)}
        paths[name] = bundles.make(place / name, place / f"{name} bundle", **options)
    return paths


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("count", range(1, 8))
def test_a_result_counts_what_was_emitted(chains: dict[str, Path], count: int, closed: bool) -> None:
    """Taken in the middle of a burst of three drafts and one token more, or after a stream was closed there."""
    stream = load(chains["stop"], threads=1).stream([1], max_new_tokens=40, gamma=3)
    taken = [next(stream).id for _ in range(count)]
    if closed:
        stream.close()
    result = stream.result()
    assert result.ids == taken == list(range(2, 2 + count)) and result.stats.tokens == count
    assert result.stats.per_round == [(3, 3), (3, 3)][: count // 4] + [(3, count % 4)] * (count % 4 > 0)
    assert sum(outcome.tokens for outcome in result.stats.outcomes.elements()) == count
    assert result.finish_reason == ("stop" if taken[-1] == 8 else "length")
    before = result.stats.as_dict()
    rest = [token.id for token in stream]
    assert result.stats.as_dict() == before and result.ids == taken  # what was given out does not change
    if not closed:
        assert taken + rest == list(range(2, 9)) == stream.result().ids
        assert stream.result().stats.per_round == [(3, 3), (3, 3)]


@pytest.mark.parametrize("drafter", ["draft", "lookup"])
@pytest.mark.parametrize("place", range(1, 7))
def test_eos_at_any_place_of_a_burst_ends_it(chains: dict[str, Path], drafter: str, place: int) -> None:  # B27
    engine, start = load(chains["stop"], drafter=drafter, threads=1), 8 - place
    prompt = [start] if drafter == "draft" else [*range(start, start + 7), start]
    stream = engine.stream(prompt, max_new_tokens=40, gamma=5)
    streamed = [token.id for token in stream]
    result = stream.result()
    assert streamed == result.ids == list(range(start + 1, 9))
    assert result.finish_reason == "stop"
    assert result.stats.per_round == [(5, min(place, 5))]
    assert result.stats.tokens == place
    plain = engine.generate(prompt, max_new_tokens=40, speculate=False)
    assert (plain.ids, plain.finish_reason) == (result.ids, "stop")
    assert engine.generate([10], max_new_tokens=3, gamma=2).ids == [11, 12, 13]  # and the engine is as good as new


def test_the_loop_itself_ends_at_a_stop_id(chains: dict[str, Path]) -> None:
    """Nothing behind it is emitted, counted or committed."""
    engine = load(chains["none"], threads=1)
    rule, prompt = greedy_rule(64), [5]
    drafter = engine.new_drafter(rule)
    prefill(engine.target, drafter, prompt)
    rounds = list(decode(engine.target, drafter, Fixed(TreeShape.chain(7)), rule.judge, prompt, 40, {6, 7, 8}))
    assert [(found.tokens, len(found.tree.tokens), found.nodes) for found in rounds] == [((6,), 7, (0,))]
    assert engine.target.length == 1


def test_any_emitted_token_may_be_the_eos(rand: Rand, tmp_path: Path) -> None:  # F-EOS trick
    plain = rand.reference.greedy(PROMPT, 30)
    for place in range(11):
        path = tmp_path / str(place)
        shutil.copytree(rand.paths["self"], path)
        tiny.edit_json(path / "manifest.json", eos_ids=[plain[place]])
        result = load(path, threads=1).generate(PROMPT, max_new_tokens=30, gamma=4)
        expected = plain[: plain.index(plain[place]) + 1]
        assert (result.ids, result.finish_reason, result.stats.tokens) == (expected, "stop", len(expected))
        assert result.stats.drafted >= 4 and result.stats.accepted <= len(expected)


def test_eos_wherever_the_checkpoint_names_it(chains: dict[str, Path]) -> None:  # B28
    prompt = [*range(5, 12), 5]  # lookup drafts beyond the EOS
    for name, eos_ids, ids in (("two", {60, 8}, [6, 7, 8]), ("tok", {2}, [6, 7, 8, 2]), ("none", set(), [*range(6, 26)])):
        engine = load(chains[name], drafter="lookup", threads=1)
        assert set(engine.bundle.manifest.eos_ids) == eos_ids
        result = engine.generate(prompt, max_new_tokens=20, gamma=5)
        assert result.ids == ids
        assert result.finish_reason == ("length" if name == "none" else "stop")
        assert result.stats.drafted >= 5


@pytest.mark.parametrize("gamma", [1, 3, 7])
def test_acceptance_goes_by_the_script(chains: dict[str, Path], gamma: int) -> None:
    """The draft goes wrong after every fourth token, so every round's verdict can be foretold."""
    expected, text, count = [], [5], 40
    while len(text) <= count:
        asked, accepted = min(gamma, count - len(text)), 0
        while accepted < asked and (text[-1] + accepted) % 4:
            accepted += 1
        expected.append((asked, accepted))
        text += range(text[-1] + 1, text[-1] + accepted + 2)
    result = run(load(chains["none"], threads=1), [5], count, gamma)
    assert result.stats.per_round == expected
    assert result.ids == text[1:] == [*range(6, 46)]


def test_an_empty_prompt_without_bos_is_refused(chains: dict[str, Path]) -> None:  # B24
    with pytest.raises(SpecedgeError, match=r"^prompt: empty"):
        load(chains["none"]).generate([])


@pytest.mark.parametrize("drafter", ["draft", "lookup"])
def test_padding_is_neither_drafted_nor_emitted(chains: dict[str, Path], drafter: str) -> None:  # B39
    assert min(tiny.hf_greedy(tiny.load_hf(chains["hf padded"]), [5], 3)) >= 60  # without a mask it would win
    engine = load(chains["padded"], drafter=drafter, threads=1)
    for seed in range(5):
        for temperature in (0.0, 2.0):
            sampling = Sampling(temperature, seed=seed)
            result = engine.generate([5, 9, 5], sampling, 100, gamma=3)
            assert max(result.ids) < 60 and result.stats.drafted > 0
            rule = make_rule(None, Sampler(sampling, engine.bundle.manifest.allowed_ids, 3))
            proposer = engine.new_drafter(rule)
            proposer.begin([5, 9, 5])
            proposal = proposer.propose([5, 9, 5], TreeShape.chain(7))
            assert len(proposal.tree.tokens) == 7 and max(proposal.tree.tokens) < 60
            laws = [proposal.q(node) for node in range(ROOT, 6)] if proposal.q else []
            assert not any(law.dense(64)[60:].any() for law in laws)
            assert bool(laws) == (drafter == "draft" and temperature > 0)
    for token in (60, 63):
        with pytest.raises(SpecedgeError, match=rf"id {token} at index 0, expected 0\.\.59"):
            engine.generate([token, 5])


# ---- requests that make no sense, and bundles that are damaged


def test_prompts_of_any_integers(rand: Rand) -> None:
    expected = rand.reference.greedy([3, 5], 5)
    for prompt in ([3, 5], (3, 5), [np.int64(3), np.int32(5)], np.array([3, 5]), range(3, 7, 2), iter([3, 5])):
        assert run(rand.engines["self"], prompt, 5, 3).ids == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [-1, 128, 2**31, 2**70, -(2**70)])
def test_ids_outside_the_vocabulary_are_named(rand: Rand, token: int) -> None:
    with pytest.raises(SpecedgeError, match=rf"^prompt: id {token} at index 1, expected 0\.\.127"):
        rand.engines["self"].generate([3, token])


@pytest.mark.parametrize("prompt", [[3.0], ["a"], None, [[3]], [None]])
def test_what_is_no_prompt_is_a_type_error(rand: Rand, prompt: Any) -> None:
    with pytest.raises(TypeError):
        rand.engines["self"].generate(prompt)


@pytest.mark.parametrize(
    ("name", "value"), [("gamma", -1), ("gamma", CHUNK), ("gamma", 10**6), ("max_new_tokens", -1), ("stop", ["x"])]
)
def test_impossible_requests_are_refused_by_name(rand: Rand, name: str, value: Any) -> None:
    request: dict[str, Any] = {name: value}
    with pytest.raises(UsageError, match=rf"^{name}\b.*{value if name != 'stop' else ''}"):
        rand.engines["self"].stream(PROMPT, **request)


def test_a_drafter_the_bundle_lacks_is_refused(rand: Rand) -> None:
    with pytest.raises(SpecedgeError, match=r"no drafter 'medusa'; it holds draft, lookup"):
        load(rand.paths["self"], drafter="medusa")


def damaged(path: Path, name: str, change: Callable[[bytes], bytes], *, listed: bool = True) -> None:
    """Change a file of a bundle; `listed` means the manifest goes along, as if the damage came before it."""
    file = path / name
    file.write_bytes(change(file.read_bytes()))
    if listed:
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"][name]["bytes"] = file.stat().st_size
        tiny.write_json(path / "manifest.json", manifest)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("what", ["truncated graph", "empty graph", "graph of zeros", "short weights"])
def test_a_damaged_bundle_is_refused_in_one_line(rand: Rand, what: str, listed: bool, tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    shutil.copytree(rand.paths["self"], path)
    graph = sorted(file.name for file in (path / "target").glob("*.onnx"))[-1]
    changes: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
        "truncated graph": (f"target/{graph}", lambda content: content[:500]),
        "empty graph": (f"target/{graph}", lambda content: b""),
        "graph of zeros": (f"target/{graph}", lambda content: bytes(500)),
        "short weights": ("target/weights.bin", lambda content: content[: len(content) // 2]),
    }
    name, change = changes[what]
    damaged(path, name, change, listed=listed)
    with pytest.raises(SpecedgeError, match=r"target/") as caught:
        load(path, threads=1)
    assert "\n" not in str(caught.value)


def test_swapped_weights_of_the_same_size_show_in_the_hashes(rand: Rand, tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    shutil.copytree(rand.paths["noisy"], path)
    assert changed_files(open_bundle(path)) == []
    weights = [path / role / "weights.bin" for role in ("target", "draft")]
    contents = [file.read_bytes() for file in weights]
    for file, content in zip(weights, reversed(contents), strict=True):
        file.write_bytes(content)
    assert sorted(changed_files(open_bundle(path))) == ["draft/weights.bin", "target/weights.bin"]


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_manifest_that_contradicts_its_graphs_is_refused(rand: Rand, role: str, tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    shutil.copytree(rand.paths["self"], path)
    manifest = json.loads((path / "manifest.json").read_text())
    record = manifest["roles"][role]
    kv: list[tuple[str, Any]] = [("layers", 3), ("layers", 1), ("heads", 4), ("slots", 64), ("head_dim", 32)]
    kv += [("dtype", "float16"), ("dtype", "text")]
    own: list[tuple[str, Any]] = [("vocab_size", 64), ("vocab_size", 256), ("graphs", [])]
    changes = [(record["kv"], *change) for change in kv] + [(record, *change) for change in own]
    changes.append((record["rope"], "inv_freq", record["rope"]["inv_freq"][:3]))
    for part, key, value in changes:
        before, part[key] = part[key], value
        tiny.write_json(path / "manifest.json", manifest)
        with pytest.raises(SpecedgeError, match=role):
            load(path, threads=1)
        part[key] = before


@pytest.mark.parametrize("role", ["target", "draft"])
def test_nan_is_an_error_and_the_next_request_is_as_good_as_ever(rand: Rand, role: str, tmp_path: Path) -> None:  # B44
    path = tmp_path / "bundle"
    shutil.copytree(rand.paths["noisy"], path)
    record = open_bundle(path).role(role)
    weight = next(weight for weight in record.weights if weight.name == "embed_tokens.weight")
    place = weight.parts["values"]
    rows = np.memmap(path / weight.file, place.dtype, "r+", place.offset, place.shape)
    rows[77] = np.nan  # one token poisons a text
    rows.flush()
    engine = load(path, threads=1)
    for sampling, shape in itertools.product((Sampling(), Sampling(1.0)), (TreeShape.chain(3), BUSHY)):
        with pytest.raises(SpecedgeError, match=r"nan at id 0"):
            engine.generate([3, 77, *range(10, 40)], sampling, 20, tree=shape)
        result = run(engine, PROMPT, 20, 3)
        assert result.ids == rand.reference.greedy(PROMPT, 20)
        assert result.stats.per_round == run(rand.engines["noisy"], PROMPT, 20, 3).stats.per_round
