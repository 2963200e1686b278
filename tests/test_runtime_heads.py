"""Medusa heads end to end: what the graph computes, and that text drafted by it is the text without it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import bundles
import tiny
from specedge.bundle import open_bundle
from specedge.devices.table import get_device
from specedge.errors import SpecedgeError, UsageError
from specedge.export.validate import validate
from specedge.export.weights import read_float32
from specedge.quant.scheme import Scheme
from specedge.runtime import Engine, Sampling, TreeShape, load
from specedge.runtime.heads import MedusaHeads
from specedge.runtime.tree import TokenTree
from test_runtime_sampling_laws import chi_square
from tiny import Array

HEADS, VOCAB, HIDDEN = 3, 64, 64
PROMPT = [3, 14, 15, 9]
TREE = TreeShape.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
P = tiny.random_chain(VOCAB, 1, sharpness=3.0)
INT = {"body": Scheme(4, 32, symmetric=True), "head": Scheme(8, 32, symmetric=True)}
SHAPE: dict[str, Any] = {"context": 96, "widths": (1, 4, 8), "chunk": 8}


def random_heads(folder: Path, own_head: bool = True, vocab: int = VOCAB, layers: int = 1) -> Path:
    generator, tensors = torch.Generator().manual_seed(3), {}
    for head in range(HEADS):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = 0.2 * torch.randn(HIDDEN, HIDDEN, generator=generator)
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(HIDDEN, generator=generator)
        if own_head:
            tensors[f"{head}.{layers}.weight"] = 0.3 * torch.randn(vocab, HIDDEN, generator=generator)
    return save(folder, tensors)


def scripted_heads(folder: Path, transition: Array) -> Path:
    """Head k knows the law of the token k + 2 places on: its block adds nothing, its matrix is that step of the chain."""
    tensors, ahead = {}, transition
    for head in range(HEADS):
        ahead = ahead @ transition
        tensors[f"{head}.0.linear.weight"] = torch.zeros(VOCAB, VOCAB)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(VOCAB)
        with np.errstate(divide="ignore"):
            logits = np.maximum(np.log(ahead), tiny.LOG_ZERO).T / VOCAB**0.5
        tensors[f"{head}.1.weight"] = torch.from_numpy(logits).float().contiguous()
    return save(folder, tensors)


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("heads")
    tiny.f_rand(place / "rand", vocab_size=VOCAB, eos_token_id=None)
    tiny.f_rand(place / "tied", vocab_size=VOCAB, eos_token_id=None, tie_word_embeddings=True)
    tiny.f_chain(place / "chain", P)
    tiny.f_chain(place / "certain", tiny.deterministic_chain(VOCAB, {}))
    random_heads(place / "own")
    random_heads(place / "shared", own_head=False, layers=2)
    scripted_heads(place / "scripted", P)
    scripted_heads(place / "sure", tiny.deterministic_chain(VOCAB, {}))
    return place


def reference(tensors: dict[str, torch.Tensor], shared: torch.Tensor, layers: int) -> Callable[[Array], Array]:
    """Medusa in a few lines of torch: blocks x + silu(W x + b), then each head's matrix or the target's."""

    def logits(hidden: Array) -> Array:
        rows = []
        for head in range(HEADS):
            x = torch.from_numpy(hidden)
            for layer in range(layers):
                x = x + F.silu(tensors[f"{head}.{layer}.weight"] @ x + tensors[f"{head}.{layer}.bias"])
            rows.append((tensors.get(f"{head}.lm_head.weight", shared) @ x).numpy())
        return np.stack(rows)

    return logits


@pytest.mark.parametrize("device", ["cpu", "cpu-static"])
@pytest.mark.parametrize(("heads", "target"), [("own", "rand"), ("shared", "rand"), ("shared", "tied"), ("own", "tied")])
@pytest.mark.parametrize("options", [{}, INT], ids=["float32", "int"])
def test_the_graph_computes_the_heads(
    sources: Path, tmp_path: Path, device: str, heads: str, target: str, options: dict[str, Any]
) -> None:
    """In float32 against the checkpoint; quantised, with float activations, against what the bundle holds."""
    path = bundles.make(sources / target, tmp_path / "b", medusa=str(sources / heads), device=device, **SHAPE, **options)
    bundle = open_bundle(path)
    head, role = bundle.manifest.heads["medusa"], bundle.role("target")
    stored = {w.name: torch.from_numpy(np.array(read_float32(w, bundle.file(w.file))[0])) for w in head.weights}
    tensors = {name.removeprefix("heads.").replace(".layers.", "."): tensor for name, tensor in stored.items()}
    matrix = {w.name: w for w in role.weights}
    shared = matrix.get("lm_head.weight") or matrix["embed_tokens.weight"]
    shared_values = torch.from_numpy(np.array(read_float32(shared, bundle.file(shared.file))[0]))
    expected = reference(tensors, shared_values, 1 if heads == "own" else 2)
    engine = load(path, threads=1)
    opened = MedusaHeads(bundle, head, get_device(device), 1)
    rounded = bool(options) and device == "cpu"  # activations to 8 bits
    for token in PROMPT:
        engine.target.step([token])
        hidden = engine.target.hidden(0)
        engine.target.commit([0])
        found, true = opened.logits(hidden), expected(hidden)
        assert np.abs(found - true).max() <= (0.05 * np.abs(true).max() if rounded else 1e-3)
    if heads == "shared":  # the matrix is borrowed, not stored again
        assert not any("lm_head" in weight.name for weight in head.weights)
        assert bundle.manifest.files["medusa/weights.bin"].bytes < HEADS * 2 * (HIDDEN + 2) * HIDDEN * 4


@pytest.mark.parametrize("device", ["cpu", "cpu-static"])
def test_hidden_rows_are_what_feeds_the_head(sources: Path, tmp_path: Path, device: str) -> None:
    """Of a prefill, of chains and of every branch of a tree."""
    engine = load(
        bundles.make(sources / "rand", tmp_path / "b", medusa=str(sources / "own"), device=device, **SHAPE), threads=1
    )
    model = tiny.load_hf(sources / "rand")

    def true_hidden(ids: list[int]) -> Array:
        with torch.no_grad():
            hidden: Array = model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0, -1].numpy()
        return hidden

    text = [*PROMPT, *range(20, 30)]
    engine.target.prefill(text)
    np.testing.assert_allclose(engine.target.hidden(-1), true_hidden(text), atol=1e-4)
    tokens = np.random.default_rng(7).permutation(VOCAB)[: len(TREE.parents)]
    tree = TokenTree(tuple(int(token) for token in tokens), TREE.parents)
    engine.target.step([5, *tree.tokens], tree)
    for node in range(-1, len(tree.tokens)):
        expected = true_hidden([*text, 5, *tree.path(node)])
        np.testing.assert_allclose(engine.target.hidden(node + 1), expected, atol=1e-4)


@pytest.fixture(scope="module", params=["cpu", "cpu-static"])
def engines(request: pytest.FixtureRequest, sources: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    place = tmp_path_factory.mktemp("engines")
    made = {}
    for name, target, heads in (("rand", "rand", "own"), ("chain", "chain", "scripted"), ("sure", "certain", "sure")):
        options = {"medusa": str(sources / heads), "device": request.param, **SHAPE}
        made[name] = load(bundles.make(sources / target, place / name, **options), threads=1)
    return made


@pytest.mark.parametrize("name", ["rand", "chain"])
def test_greedy_ids_are_the_plain_ones(engines: dict[str, Engine], name: str) -> None:  # B46
    plain = engines[name].generate(PROMPT, max_new_tokens=60, speculate=False).ids
    shapes = [TreeShape.chain(gamma) for gamma in (1, 2, 3)] + [TREE, TreeShape.from_paths([[1], [3], [1, 2], [3, 0]])]
    for shape in shapes:
        result = engines[name].generate(PROMPT, max_new_tokens=60, tree=shape)
        assert result.ids == plain
        assert result.stats.per_round[0][0] == len(shape.parents)
    assert engines[name].generate(PROMPT, max_new_tokens=60).ids == plain
    for prompt in ([5], [5, 6]):  # before a first token there is no hidden state: a plain round
        assert (
            engines[name].generate(prompt, max_new_tokens=9, gamma=3).ids
            == engines[name].generate(prompt, max_new_tokens=9, speculate=False).ids
        )


def test_heads_that_know_are_always_right(engines: dict[str, Engine]) -> None:
    stats = engines["sure"].generate([3, 4, 5], max_new_tokens=40, gamma=3).stats  # a text this target would write itself
    assert stats.per_round == [(3, 3)] * 10


@pytest.mark.parametrize("rule", ["point-mass", "coupled"])
def test_the_text_of_a_seed_is_the_plain_one(engines: dict[str, Engine], rule: str) -> None:
    accepted = 0
    for seed in range(20):
        sampling = Sampling(1.0, seed=seed)
        plain = engines["chain"].generate(PROMPT, sampling, 24, speculate=False, rule=rule).ids
        for shape in (TreeShape.chain(3), TREE):
            result = engines["chain"].generate(PROMPT, sampling, 24, tree=shape, rule=rule)
            assert result.ids == plain
            accepted += result.stats.accepted
    assert accepted > 0


@pytest.mark.parametrize(("rule", "shape"), [("token", TreeShape.chain(2)), ("block", TreeShape.chain(3)), ("recursive", TREE)])
def test_drawn_drafts_keep_the_law(engines: dict[str, Engine], rule: str, shape: TreeShape) -> None:
    """The first two tokens over 2,000 seeds; the law of what heads draft would be noticed."""
    counts = np.zeros((VOCAB, VOCAB))
    for seed in range(2000):
        stream = engines["chain"].stream(PROMPT, Sampling(1.0, seed=seed), 5, tree=shape, rule=rule)
        counts[next(stream).id, next(stream).id] += 1
        stream.close()
    first = P[PROMPT[-1]]
    assert chi_square(counts, first[:, None] * P) > 0.001
    assert chi_square(counts.sum(axis=1), first) > 0.001
    assert chi_square(counts.sum(axis=1), (P @ P)[PROMPT[-2]]) < 1e-9


def test_what_heads_cannot_do_is_refused_by_name(engines: dict[str, Engine], sources: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gamma 4: expected 0\.\.3, the drafts this bundle can make"):
        engines["rand"].generate(PROMPT, gamma=4)
    with pytest.raises(UsageError, match="tree: 4 deep, expected at most 3"):
        engines["rand"].generate(PROMPT, tree=TreeShape.chain(4))
    random_heads(tmp_path / "other", vocab=VOCAB - 4)
    for options, named in (
        ({"medusa": str(tmp_path / "other")}, r"0\.1\.weight: expected shape \(64, 64\)"),
        ({"medusa": str(sources / "own"), "tree": TreeShape.chain(4).paths}, "tree: 4 deep, expected at most 3"),
        ({"medusa": str(sources / "own"), "draft": str(sources / "rand")}, "leave out --draft or --medusa"),
    ):
        with pytest.raises(SpecedgeError, match=named):
            bundles.make(sources / "rand", tmp_path / "b", **options)
    assert {path.name for path in tmp_path.iterdir()} == {"other"}


@pytest.mark.parametrize("options", [{}, INT], ids=["float32", "int"])
@pytest.mark.parametrize("heads", ["own", "shared"])
def test_validate_knows_heads(sources: Path, tmp_path: Path, heads: str, options: dict[str, Any]) -> None:
    path = bundles.make(sources / "rand", tmp_path / "b", medusa=str(sources / heads), tree=TREE.paths, **SHAPE, **options)
    report = validate(path, str(sources / "rand"), str(sources / heads), tokens=16)
    assert report.passed, [check for check in report.checks if not check.passed]
    name = "head_kl_to_stored_weights" if options else "head_logits_max_abs"
    assert [check.graph for check in report.checks if check.name == name] == ["medusa"]
    assert {group.role for group in report.groups} == {"target", "medusa"}
    other = "shared" if heads == "own" else "own"
    with pytest.raises(SpecedgeError, match="its heads have other tensors than"):
        validate(path, str(sources / "rand"), str(sources / other), tokens=4)
