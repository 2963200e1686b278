"""Trees of drafts: the text is the plain text whatever is drafted, and a request for an impossible tree is refused."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bundles
import tiny
from specedge.bundle import open_bundle
from specedge.errors import UsageError
from specedge.runtime import Engine, Result, Sampling, load
from specedge.runtime.agreement import compare_greedy, tree_agreement
from specedge.runtime.bench import bench
from specedge.runtime.shape import TreeShape

CONTEXT, NODES = 128, 12
SHAPE: dict[str, Any] = {"context": CONTEXT, "chunk": 8, "widths": (1, 4, NODES + 1)}
PROMPTS = [[3, 14, 15, 92, 3, 14], [9, 8, 7], [50], [*range(30, 41)], [77, 77, 5, 77]]
STORED = [[0], [1], [0, 0], [0, 1], [1, 0]]


def random_shape(seed: int) -> TreeShape:
    """2 to 12 nodes, at most 4 deep, at most 4 children each; a child may be any of the first four choices."""
    rng = np.random.default_rng(seed)
    paths: list[tuple[int, ...]] = []
    while len(paths) < 2 + seed % (NODES - 1):
        parent = [(), *paths][rng.integers(len(paths) + 1)]
        child = (*parent, int(rng.choice(4, p=[0.5, 0.25, 0.15, 0.1])))
        if len(child) <= 4 and child not in paths:
            paths.append(child)
    return TreeShape.from_paths(paths)


SHAPES = [random_shape(seed) for seed in range(50)]


@dataclass(frozen=True)
class Rand:
    """F-RAND without EOS: engines by the name of the draft, bundles, and the plain ids of each prompt."""

    engines: dict[str, Engine]
    paths: dict[str, Path]

    def plain(self, prompt: Sequence[int], count: int | None) -> list[int]:
        return self.engines["noisy"].generate(list(prompt), max_new_tokens=count, speculate=False).ids


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("rand")
    tiny.f_rand(place / "target", eos_token_id=None)
    tiny.f_self(place / "target", place / "self")
    tiny.noisy_lm_head(place / "target", place / "noisy", sigma=0.15)
    return place


@pytest.fixture(scope="module", params=["cpu", "cpu-static"])
def rand(request: pytest.FixtureRequest, sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Rand:
    place = tmp_path_factory.mktemp("bundles")
    options: dict[str, Any] = SHAPE | {"device": request.param}
    trees: dict[str, Any] = {"self": {}, "noisy": {}, "stored": {"tree": tuple(map(tuple, STORED))}}
    paths = {}
    for name, tree in trees.items():
        draft = str(sources / ("noisy" if name == "stored" else name))
        paths[name] = bundles.make(sources / "target", place / name, draft=draft, **options, **tree)
    engines = {name: load(path, threads=1) for name, path in paths.items()}
    engines["lookup"] = load(paths["noisy"], drafter="lookup", threads=1)
    return Rand(engines, paths)


def run(engine: Engine, prompt: Sequence[int], count: int | None, shape: TreeShape) -> Result:
    """A greedy request that drafts `shape`, as much of it as there is room for; what it reports of itself must add up."""
    result = engine.generate(list(prompt), max_new_tokens=count, tree=shape)
    stats, left = result.stats, result.stats.tokens
    assert stats.tokens == len(result.ids) == stats.accepted + stats.rounds
    for drafted, accepted in stats.per_round:
        part = shape.within(left - 1, CONTEXT - len(prompt) - stats.tokens + left)
        assert drafted == len(part.parents) and accepted <= part.depth
        left -= accepted + 1
    return result


# ---- the same ids


def test_any_tree_gives_the_plain_ids(rand: Rand) -> None:
    drafted, by_rank = 0, Counter[int]()
    for index, shape in enumerate(SHAPES):
        prompt = PROMPTS[index % len(PROMPTS)]
        result = run(rand.engines["noisy"], prompt, 40, shape)
        assert result.ids == rand.plain(prompt, 40)
        drafted += result.stats.drafted
        by_rank.update(rank for row in result.stats.accepted_by_rank for rank, share in enumerate(row) if share > 0)
    assert drafted > 1000
    assert by_rank[0] > 50 and by_rank[1] > 10 and by_rank[2] > 0  # siblings behind the first were accepted too


def test_every_path_of_a_tree_gives_the_logits_of_single_steps(rand: Rand) -> None:
    text = [(7 * index + 3) % 120 for index in range(40)]
    for shape in SHAPES[::3]:
        assert tree_agreement(rand.engines["noisy"], text, shape) <= 1e-4
        compared = compare_greedy(rand.engines["noisy"], text, 20, None, 1e-6, shape)
        assert compared.passed and compared.drafted > 0 and compared.near_ties == 0


def test_plain_ids_are_those_of_transformers(rand: Rand, sources: Path) -> None:
    model = tiny.load_hf(sources / "target")
    for prompt in PROMPTS:
        assert rand.plain(prompt, 24) == tiny.hf_greedy(model, prompt, 24)


def test_a_copy_of_the_target_is_right_with_its_first_choices(rand: Rand) -> None:  # F-SELF
    """Every round accepts them down to the full depth, whatever stands beside them."""
    for index, shape in enumerate(SHAPES):
        first_choices = [(0,) * depth for depth in range(1, shape.depth + 1)]
        paths = sorted({*first_choices, *shape.paths}, key=lambda path: (path not in first_choices, len(path)))[:NODES]
        shape = TreeShape.from_paths(paths)
        result = run(rand.engines["self"], PROMPTS[index % len(PROMPTS)], 24, shape)
        for parents, nodes, _ in result.stats.outcomes:
            part = TreeShape(parents, shape.ranks[: len(parents)])
            assert [part.paths[node] for node in nodes] == first_choices[: part.depth]


def test_the_context_is_filled_to_its_end(rand: Rand) -> None:  # B25
    for shape in [shape for shape in SHAPES if len(shape.parents) > 10][:3]:
        for length in (CONTEXT - 40, *range(CONTEXT - shape.depth - 2, CONTEXT)):
            prompt = [index % 5 + 3 for index in range(length)]
            result = run(rand.engines["noisy"], prompt, None, shape)
            assert (len(result.ids), result.finish_reason) == (CONTEXT - length, "length")
            assert result.ids == rand.plain(prompt, None)
            assert result.stats.drafted > 0 or length > CONTEXT - 3


@pytest.mark.parametrize("rule", ["point-mass", "coupled"])
def test_the_text_of_a_seed_is_the_same_whatever_is_drafted(rand: Rand, rule: str) -> None:
    """Both rules draw every token by its position alone, so drafts can only save steps."""
    accepted = Counter[str]()
    for seed in range(50):
        prompt, sampling = PROMPTS[seed % 5], Sampling((0.6, 1.0, 1.4)[seed % 3], top_p=(1.0, 0.9)[seed % 2], seed=seed)
        plain = rand.engines["noisy"].generate(prompt, sampling, 14, speculate=False, rule=rule)
        drafts: dict[str, dict[str, Any]] = {
            "noisy": {"tree": SHAPES[seed]},
            "self": {"gamma": 1 + seed % 7},
            "lookup": {"gamma": (None, 1, 4, 12)[seed % 4]},
            "stored": {},
        }
        for name, options in drafts.items():
            text = [*prompt, *plain.ids, *prompt] if name == "lookup" else prompt  # something to look up
            expected = (
                plain if text is prompt else rand.engines["noisy"].generate(text, sampling, 14, speculate=False, rule=rule)
            )
            result = rand.engines[name].generate(text, sampling, 14, rule=rule, **options)
            assert result.ids == expected.ids
            accepted[name] += result.stats.accepted
    assert all(accepted[name] > 50 for name in ("noisy", "self", "stored")) and accepted["lookup"] > 0


def test_characters_come_whole_from_a_tree(tmp_path: Path) -> None:  # B32
    """F-SELF accepts the tree's first choices, so bursts cut through the characters at every place."""
    tiny.f_tok(tmp_path / "tokenizer")
    ids = [tiny.byte_id(byte) for byte in "#é🙂x".encode()]
    successor = dict(zip(ids, [*ids[1:], tiny.SPECIAL_TOKENS.index("<eos>")], strict=True))
    tiny.f_chain(tmp_path / "target", tiny.deterministic_chain(264, successor), tokenizer=tmp_path / "tokenizer")
    engine = bundles.engine(tmp_path / "target", tmp_path / "bundle", draft=str(tmp_path / "target"), widths=(1, 13))
    for shape in SHAPES[:20]:
        stream = engine.stream("#", tree=shape)
        texts = [token.text for token in stream]
        assert texts == ["", "é", "", "", "", "🙂", "x", ""] and stream.result().finish_reason == "stop"
        cut = engine.generate("#", max_new_tokens=5, tree=shape)
        assert cut.text == "é\ufffd" and cut.ids == ids[1:6]


# ---- the bundle's tree


def drafted_first(engine: Engine, **options: Any) -> int:
    """Nodes of the first round's tree; the ids are checked by the way."""
    result = engine.generate(PROMPTS[0], max_new_tokens=20, **options)
    assert result.ids == engine.generate(PROMPTS[0], max_new_tokens=20, speculate=False).ids
    return result.stats.per_round[0][0]


def test_a_bundle_drafts_its_tree_unless_told_otherwise(rand: Rand) -> None:
    engine, shape = rand.engines["stored"], TreeShape.from_paths(STORED)
    assert (
        engine.default_tree == shape
        and engine.default_tree is engine.default_tree
        and rand.engines["noisy"].default_tree is None
    )
    stats = engine.generate(PROMPTS[0], max_new_tokens=20).stats
    assert stats.per_round[0][0] == len(STORED)
    assert any(outcome.parents == shape.parents for outcome in stats.outcomes)
    assert drafted_first(engine, gamma=2) == 2
    assert drafted_first(engine, gamma=0) == 0
    assert drafted_first(engine, tree=SHAPES[10]) == len(SHAPES[10].parents)
    assert drafted_first(engine, speculate=False) == 0
    for rule in ("token", "block"):  # these cannot judge it, so they draft a chain
        sampled = engine.generate(PROMPTS[0], Sampling(1.0), 20, rule=rule).stats
        assert all(TreeShape.chain(len(outcome.parents)).parents == outcome.parents for outcome in sampled.outcomes)
    lookup = load(rand.paths["stored"], drafter="lookup", threads=1)
    assert lookup.default_tree is None and lookup.generate(PROMPTS[0], max_new_tokens=4).stats.rounds


def test_a_stored_tree_brings_its_width(rand: Rand, sources: Path, tmp_path: Path) -> None:
    path = bundles.make(
        sources / "target", tmp_path / "bundle", draft=str(sources / "noisy"), **SHAPE | {"widths": (1,), "tree": ((0,), (1,))}
    )
    assert open_bundle(path).manifest.widths == (1, 3)
    assert open_bundle(path).manifest.tree == ((0,), (1,))


@pytest.mark.parametrize(("paths", "lacks"), [([[0], [3]], [1]), ([[1]], [0]), ([[0], [1], [1, 0], [1, 2]], [1, 1])])
def test_acceptance_by_rank_is_not_measured_across_gaps(
    sources: Path, tmp_path: Path, paths: list[list[int]], lacks: list[int]
) -> None:
    """What bench wrote for rank 3 of [0] and [3] would be planned with as rank 1."""
    stored = tuple(map(tuple, paths))
    path = bundles.make(sources / "target", tmp_path / "b", draft=str(sources / "noisy"), **SHAPE | {"tree": stored})
    engine, sets = load(path, threads=1), {"ids": PROMPTS[:1]}
    with pytest.raises(UsageError, match=re.escape(f"tree: the bundle's lacks path {lacks} before")):
        bench(engine, sets, 8, repeats=1)
    with pytest.raises(UsageError, match=re.escape(f"tree: lacks path {lacks} before")):
        bench(engine, sets, 8, repeats=1, tree=TreeShape.from_paths(paths))
    assert bench(engine, sets, 8, repeats=1, tree=TreeShape.from_paths(STORED))["ids"].drafted > 0
    assert bench(engine, sets, 8, gamma=2, repeats=1)["ids"].drafted > 0
    assert drafted_first(engine) == len(paths)  # to generate with it is fine


# ---- requests that make no sense


def test_impossible_trees_are_refused_by_name(rand: Rand) -> None:
    wide, bush = TreeShape.from_paths([[rank] for rank in range(NODES + 1)]), TreeShape.from_paths(STORED)
    requests: list[tuple[str, dict[str, Any], str]] = [
        ("noisy", {"gamma": 2, "tree": bush}, "tree and gamma"),
        ("stored", {"gamma": 0, "tree": bush}, "tree and gamma"),
        ("lookup", {"tree": bush}, "tree: drafter 'lookup' drafts chains only"),
        ("noisy", {"tree": wide}, f"tree: 13 nodes, expected at most {NODES}"),
        ("noisy", {"tree": TreeShape.chain(NODES + 1)}, f"tree: 13 nodes, expected at most {NODES}"),
        ("noisy", {"tree": TreeShape.from_paths([[0], [128]])}, r"tree: rank 128, expected 0\.\.127"),
        ("noisy", {"tree": TreeShape.from_paths([[10**40]])}, r"tree: rank 10{40}, expected 0\.\.127"),
        ("noisy", {"tree": bush, "rule": "token", "sampling": Sampling(1.0)}, "rule 'token': judges chains only"),
        ("noisy", {"tree": bush, "rule": "block", "sampling": Sampling(1.0)}, "rule 'block': judges chains only"),
        ("noisy", {"rule": "typical"}, "rule 'typical': expected one of token, block, recursive"),
        ("noisy", {"rule": "", "sampling": Sampling(1.0)}, "rule '': expected one of"),
        ("noisy", {"sampling": Sampling(logit_bias={128: 1.0})}, r"logit_bias: id 128, expected 0\.\.127"),
        ("noisy", {"sampling": Sampling(banned_ids=[5, 999])}, r"banned_ids: id 999, expected 0\.\.127"),
        ("noisy", {"sampling": Sampling(banned_ids=range(128))}, "banned_ids: all 128 ids are banned"),
    ]
    for name, options, message in requests:
        with pytest.raises(UsageError, match=f"^{message}"):
            rand.engines[name].stream(PROMPTS[0], **options)


def test_a_tree_is_for_requests_that_draft(rand: Rand) -> None:
    for call in (rand.engines["noisy"].generate, rand.engines["noisy"].stream):
        with pytest.raises(ValueError, match=r"^tree: .*speculate=False"):
            call(PROMPTS[0], max_new_tokens=4, speculate=False, tree=TreeShape.from_paths(STORED))


def test_a_chain_is_a_tree_that_every_drafter_and_rule_takes(rand: Rand) -> None:
    chain = TreeShape.chain(3)
    for name in ("noisy", "self", "lookup", "stored"):
        assert rand.engines[name].generate(PROMPTS[0], max_new_tokens=20, tree=chain).ids == rand.plain(PROMPTS[0], 20)
    for rule in ("token", "block"):
        by_tree, by_gamma = (
            rand.engines["noisy"].generate(PROMPTS[0], Sampling(1.0), 20, rule=rule, **options)
            for options in ({"tree": chain}, {"gamma": 3})
        )
        assert by_tree.ids == by_gamma.ids and by_tree.stats.per_round == by_gamma.stats.per_round


def test_a_greedy_request_takes_any_tree_under_any_rule(rand: Rand) -> None:
    for rule in ("token", "block", "recursive", "point-mass", "coupled", "lossy-typical"):
        result = rand.engines["noisy"].generate(PROMPTS[1], max_new_tokens=20, tree=SHAPES[10], rule=rule)
        assert result.ids == rand.plain(PROMPTS[1], 20) and result.stats.drafted > 0
