"""What a bundle with Medusa heads holds: logits and hidden rows are PyTorch's, shared matrices lie once, all or nothing."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

import bundles
import tiny
from specedge.bundle import MANIFEST, Bundle, open_bundle
from specedge.errors import SpecedgeError
from specedge.export.weights import read_float32
from specedge.manifest import Weight
from specedge.quant.scheme import Scheme
from specedge.runtime import load
from specedge.runtime.inspect import inspect
from specedge.runtime.sequence import Sequence as Steps
from specedge.runtime.tree import TokenTree
from test_export_cli import refused, run
from test_runtime_heads import save
from tiny import Array

HEADS, VOCAB, HIDDEN = 3, 128, 64
FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float16": {"body": "float16", "head": "float16"},
    "int8": {"body": Scheme(8, 32, symmetric=True), "head": Scheme(8, 32, symmetric=True)},
    "int4": {"body": Scheme(4, 32, symmetric=True), "head": Scheme(8, 32, symmetric=True)},
}
SHAPE: dict[str, Any] = {"context": 64, "widths": (1, 4, 8), "chunk": 8}
TEXT = [(7 * index + 3) % 120 for index in range(40)]
DEVICES = ("cpu", "cpu-static")
CLI = ("--weights", "fp32", "--context", "64", "--widths", "1,4,8", "--chunk", "8")
Tensors = dict[str, torch.Tensor]


def make_heads(own_head: bool = True, bias: bool = True, layers: int = 1, hidden: int = HIDDEN, vocab: int = VOCAB) -> Tensors:
    """Random heads under the published names."""
    generator, tensors = torch.Generator().manual_seed(5), {}
    for head in range(HEADS):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = 0.2 * torch.randn(hidden, hidden, generator=generator)
            if bias:
                tensors[f"{head}.{layer}.linear.bias"] = torch.randn(hidden, generator=generator)
        if own_head:
            tensors[f"{head}.{layers}.weight"] = 0.2 * torch.randn(vocab, hidden, generator=generator)
    return tensors


def head_logits(tensors: Tensors, lm_head: torch.Tensor, hidden: torch.Tensor) -> Array:
    """Medusa in PyTorch, by the published names: [rows, H] -> [rows, heads, V]."""
    logits = []
    for head in range(HEADS):
        x = hidden
        layers = sum(name.startswith(f"{head}.") and name.endswith("linear.weight") for name in tensors)
        for layer in range(layers):
            x = x + F.silu(F.linear(x, tensors[f"{head}.{layer}.linear.weight"], tensors.get(f"{head}.{layer}.linear.bias")))
        logits.append(F.linear(x, tensors.get(f"{head}.{layers}.weight", lm_head)))
    return torch.stack(logits, 1).numpy()


@torch.no_grad()
def true_hidden(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """[T, H]: what feeds the LM head, in one pass."""
    rows: torch.Tensor = model.model(torch.tensor([list(ids)]), use_cache=False).last_hidden_state[0]
    return rows


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> bundles.Models:
    return bundles.Models(tmp_path_factory)


def make(source: Path, place: Path, tensors: Tensors, device: str = "cpu", form: str = "float32", **options: Any) -> Bundle:
    heads = place / "heads" if (place / "heads").exists() else save(place / "heads", tensors)
    settings = SHAPE | FORMS[form] | options
    return open_bundle(bundles.make(source, place / "b", medusa=str(heads), device=device, **settings))


def stored_values(bundle: Bundle) -> tuple[Tensors, torch.Tensor]:
    """The heads by their published names and the target's LM head, as the bundle holds them."""

    def values(weight: Weight) -> torch.Tensor:
        return torch.from_numpy(np.array(read_float32(weight, bundle.file(weight.file))[0]))

    head, role = bundle.manifest.heads["medusa"], bundle.role("target")
    layers = 1 + max(int(weight.name.split(".")[3]) for weight in head.weights if ".layers." in weight.name)
    tensors = {}
    for weight in head.weights:
        _, number, kind, *rest = weight.name.split(".")
        name = f"{number}.{layers}.weight" if kind == "lm_head" else f"{number}.{rest[0]}.linear.{rest[1]}"
        tensors[name] = values(weight)
    matrices = {weight.name: weight for weight in role.weights}
    return tensors, values(matrices.get("lm_head.weight") or matrices["embed_tokens.weight"])


def run_heads(bundle: Bundle, hidden: torch.Tensor) -> Array:
    """[rows, heads, V] from the graph as any host runs it; a quantised one computes in float, so only its weights count."""
    path, dtype = bundle.file("medusa.onnx"), bundle.manifest.heads["medusa"].graph.inputs[0].dtype
    model = onnx.load(path, load_external_data=False)
    for attribute in [attribute for node in model.graph.node for attribute in node.attribute]:
        if attribute.name == "accuracy_level":
            attribute.i = 0
    path.write_bytes(model.SerializeToString())
    rows = hidden.numpy().astype(dtype)
    return np.stack([bundles.run(path, {"hidden": row[None, None]})["head_logits"].astype(np.float32) for row in rows])


CASES = [
    *[("float32", own, bias, layers) for own in (True, False) for bias in (True, False) for layers in (1, 2)],
    *[(form, own, own == (form != "int8"), 1 + own) for form in ("float16", "int8", "int4") for own in (True, False)],
]


@pytest.mark.parametrize(("form", "own_head", "bias", "layers"), CASES)
def test_head_logits_are_those_of_pytorch(
    models: bundles.Models, tmp_path: Path, form: str, own_head: bool, bias: bool, layers: int
) -> None:
    tensors = make_heads(own_head, bias, layers)
    for device in DEVICES:
        for tied in (False, True):
            source, model = models(tie_word_embeddings=tied)
            bundle = make(source, tmp_path, tensors, device, form)
            hidden = true_hidden(model, TEXT[:12])
            checkpoint = tensors, model.get_output_embeddings().weight.detach()
            heads, lm_head = stored_values(bundle) if form.startswith("int") else checkpoint
            expected = head_logits(heads, lm_head, hidden)
            limit = 1e-3 if form != "float16" else 4e-3 * np.abs(expected).max()  # a few units in the last place
            assert np.abs(run_heads(bundle, hidden) - expected).max() <= limit
            assert bundle.manifest.heads["medusa"].quantised == form.startswith("int")
            assert np.abs(expected[:, 0] - expected[:, 1]).max() > 1  # the heads differ


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_shared_lm_head_lies_in_the_target_alone(models: bundles.Models, tmp_path: Path, form: str, tied: bool) -> None:
    tensors = make_heads(own_head=False)
    bundle = make(models(tie_word_embeddings=tied)[0], tmp_path, tensors, form=form)
    head, role = bundle.manifest.heads["medusa"], bundle.role("target")
    assert len(head.weights) == len(tensors)
    parts = [part for weight in head.weights for part in weight.parts.values()]
    assert sum(part.bytes for part in parts) == head.stored_bytes
    assert bundle.file("medusa/weights.bin").stat().st_size <= head.stored_bytes + 64 * len(parts)
    matrix = next(w for w in role.weights if w.name == ("embed_tokens.weight" if tied else "lm_head.weight"))
    places = {(part.offset, part.bytes) for part in matrix.parts.values()}
    found = set()
    for item in onnx.load(bundle.file(head.graph.file), load_external_data=False).graph.initializer:
        record = {entry.key: entry.value for entry in item.external_data}
        if record.get("location") == "target/weights.bin":
            found.add((int(record["offset"]), int(record["length"])))
        assert record.get("location", "medusa/weights.bin") in ("medusa/weights.bin", "target/weights.bin")
        assert record or len(item.raw_data) <= 64  # nothing but small constants in the graph itself
    assert found == places


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["float32", "int8"])
def test_hidden_is_what_feeds_the_lm_head_at_every_width(
    models: bundles.Models, tmp_path: Path, device: str, form: str
) -> None:
    """By a host that knows the contract alone, then by the runtime's sequences."""
    source, model = models()
    bundle = make(source, tmp_path, make_heads(), device, form)
    reference = bundles.stored(model, bundles.compute_in_float(bundle))
    for graph in bundle.role("target").graphs:
        assert [spec.name for spec in graph.outputs][:2] == ["logits", "hidden"]
        for width in [graph.width] if graph.width else range(1, 10):
            for count in {width, max(width - 1, 1)} if graph.width else {width}:
                outputs = bundles.run(bundle.file(graph.file), bundles.feed(bundle.role("target"), TEXT[:count], width))
                assert outputs["hidden"].shape == (1, width, HIDDEN)
                assert np.abs(outputs["hidden"][0, :count] - true_hidden(reference, TEXT[:count]).numpy()).max() <= 1e-4
    sequence, expected = load(bundle.path, threads=1).target, true_hidden(reference, TEXT).numpy()
    for length in (1, 7, 8, 9, 17, 30):  # a prefill ends in a chunk of any width
        sequence.truncate(0)
        sequence.prefill(TEXT[:length])
        assert np.abs(sequence.hidden(-1) - expected[length - 1]).max() <= 1e-4
        for width in range(1, 9):
            sequence.step(TEXT[length : length + width])
            rows = np.stack([sequence.hidden(row) for row in range(width)])
            assert np.abs(rows - expected[length : length + width]).max() <= 1e-4
            assert (sequence.hidden(-1) == rows[-1]).all()


def random_tree(seed: int) -> TokenTree:
    rng = np.random.default_rng(seed)
    tokens, parents = rng.choice(VOCAB, 7, replace=False), [int(rng.integers(-1, node)) for node in range(7)]
    return TokenTree(tuple(int(token) for token in tokens), tuple(parents))


def check_rows(sequence: Steps, model: PreTrainedModel, text: list[int], tree: TokenTree) -> None:
    for node in range(-1, len(tree.tokens)):
        expected = true_hidden(model, [*text, *tree.path(node)])[-1].numpy()
        assert np.abs(sequence.hidden(node + 1) - expected).max() <= 1e-4
    assert (sequence.hidden(-1) == sequence.hidden(len(tree.tokens))).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_branch_has_the_hidden_states_of_its_path(models: bundles.Models, tmp_path: Path, device: str) -> None:
    """In every row, and again after any path of the tree before was accepted."""
    source, model = models()
    sequence = load(make(source, tmp_path, make_heads(), device).path, threads=1).target
    for seed in range(6):
        text, tree = TEXT[: 3 + seed], random_tree(seed)
        sequence.truncate(0)
        sequence.prefill(text[:-1])
        sequence.step([text[-1], *tree.tokens], tree)
        check_rows(sequence, model, text, tree)
        path = tree.follow(tree.path(len(tree.tokens) - 1))
        sequence.commit([0, *(node + 1 for node in path)])
        text = [*text, *tree.path(path[-1]), 99]
        sequence.step([99, *tree.tokens], tree)
        check_rows(sequence, model, text, tree)


@pytest.mark.parametrize("device", DEVICES)
def test_bundles_without_heads_have_no_trace_of_them(models: bundles.Models, tmp_path: Path, device: str) -> None:
    source = models()[0]
    for draft in (None, str(source)):
        bundle = open_bundle(bundles.make(source, tmp_path / "b", device=device, draft=draft, **SHAPE))
        assert bundle.manifest.heads == {} and not any("medusa" in file for file in bundle.manifest.files)
        for role in bundle.manifest.roles.values():
            assert all(spec.name != "hidden" for graph in role.graphs for spec in graph.outputs)


@pytest.mark.parametrize(("device", "form", "own_head"), [("cpu", "int4", False), ("cpu-static", "float32", True)])
def test_converting_twice_gives_the_same_bytes(
    models: bundles.Models, tmp_path: Path, device: str, form: str, own_head: bool
) -> None:
    made = []
    for _ in range(2):
        bundle = make(models()[0], tmp_path, make_heads(own_head), device, form, tree=((0,), (1,), (0, 0)))
        made.append(bundles.files(bundle.path))
    assert made[0] == made[1]


def test_manifest_and_inspect_list_the_heads(models: bundles.Models, tmp_path: Path) -> None:
    bundle = make(models()[0], tmp_path, make_heads(layers=2))
    head, manifest = bundle.manifest.heads["medusa"], bundle.manifest
    assert (head.kind, head.depth, head.hidden, head.vocab_size) == ("medusa", HEADS, HIDDEN, VOCAB)
    assert manifest.drafters == ("medusa", "lookup") and list(manifest.roles) == ["target"] and "medusa" in manifest.sources
    assert [(spec.name, spec.shape) for spec in head.graph.inputs] == [("hidden", (1, 1, HIDDEN))]
    assert [(spec.name, spec.shape) for spec in head.graph.outputs] == [("head_logits", (HEADS, VOCAB))]
    told: Any = inspect(bundle)
    assert [graph["file"] for graph in told["graphs"] if graph["role"] == "medusa"] == ["medusa.onnx"]
    assert sum(group["tensors"] for group in told["tensors"] if group["role"] == "medusa") == HEADS * 5
    printed = run("inspect", bundle.path)
    assert printed.exit_code == 0 and "medusa" in printed.stdout
    (bundle.path / "medusa.onnx").unlink()
    with pytest.raises(SpecedgeError, match=r"medusa\.onnx: missing"):
        open_bundle(bundle.path)


def test_heads_that_do_not_fit_leave_nothing_behind(models: bundles.Models, tmp_path: Path) -> None:
    source, good = models()[0], save(tmp_path / "good", make_heads())
    late = make_heads() | {"2.1.weight": torch.full((VOCAB, HIDDEN), torch.nan)}  # read when the target is written already
    (tmp_path / "deep.json").write_text("[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]", encoding="utf-8")
    out = tmp_path / "made" / "bundle"
    for code, arguments, named in (
        (1, ["--medusa", save(tmp_path / "thin", make_heads(hidden=32))], "0.0.linear.weight: expected shape (64, 64)"),
        (1, ["--medusa", save(tmp_path / "few", make_heads(vocab=VOCAB - 1))], "0.1.weight: expected shape (128, 64)"),
        (1, ["--medusa", save(tmp_path / "late", late)], "2.1.weight[0, 0]: expected finite numbers"),
        (1, ["--medusa", tmp_path / "nowhere"], "nowhere"),
        (2, ["--medusa", good, "--tree", tmp_path / "deep.json"], "tree: 4 deep, expected at most 3"),
        (2, ["--medusa", good, "--draft", source], "leave out --draft or --medusa"),
        (2, ["--medusa", good, "--lookup"], "--lookup"),
    ):
        assert named in refused(code, "convert", source, "-o", out, *CLI, *arguments)
        assert not out.parent.exists() or list(out.parent.iterdir()) == []
    bundles.make(source, out, medusa=str(good), **SHAPE)
    before = bundles.files(out)
    refused(1, "convert", source, "-o", out, *CLI, "--medusa", tmp_path / "late", "--force")
    assert bundles.files(out) == before and bundles.names(out.parent) == {"bundle"}


CONTRADICTIONS = [("hidden", HIDDEN + 1), ("depth", 0), ("graph", None)]
CONTRADICTIONS += [("depth", HEADS + 1), ("depth", HEADS - 1), ("vocab_size", VOCAB - 1)]


@pytest.mark.parametrize(("key", "value"), CONTRADICTIONS)
def test_a_manifest_that_contradicts_its_heads_is_refused(models: bundles.Models, tmp_path: Path, key: str, value: Any) -> None:
    path = make(models()[0], tmp_path, make_heads()).path
    data = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    data["heads"]["medusa"][key] = value
    tiny.write_json(path / MANIFEST, data)
    with pytest.raises(SpecedgeError, match=r"heads: medusa|heads\.medusa") as caught:
        open_bundle(path)
    assert str(path / MANIFEST) in str(caught.value) and "\n" not in str(caught.value)


def test_what_the_settings_say_otherwise_is_said(
    models: bundles.Models, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All heads of the file are used, and a person is told that the settings promise fewer."""
    heads = save(tmp_path / "heads", make_heads())
    (heads / "config.json").write_text('{"medusa_num_heads": 2}', encoding="utf-8")
    made = open_bundle(bundles.make(models()[0], tmp_path / "bundle", medusa=str(heads), **SHAPE))
    assert made.manifest.heads["medusa"].depth == HEADS
    assert "promises 2 heads" in caplog.text
