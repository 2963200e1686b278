"""A bundle computes what its checkpoint computes, in both graph forms and every way to store weights."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from gguf import GGMLQuantizationType
from onnx import numpy_helper
from transformers import LlamaForCausalLM, PreTrainedModel

import tiny
from bundles import (
    SHAPE,
    Models,
    both_levels,
    compute_in_float,
    engine,
    external,
    feed,
    graphs,
    locations,
    make,
    names,
    run,
    stored,
)
from checkpoints import any_blocks, damaged, rewrite_gguf
from specedge.bundle import Bundle, open_bundle
from specedge.devices.table import get_device
from specedge.errors import SpecedgeError, UsageError
from specedge.export.checkpoint import open_checkpoint
from specedge.export.recipe import INT4, INT8
from specedge.export.weights import block_size
from specedge.manifest import Weight
from specedge.quant.scheme import GROUPS, Scheme
from specedge.runtime import load
from specedge.runtime.agreement import walk
from tiny import Array

DEVICES = ("cpu", "cpu-static")
devices = pytest.mark.parametrize("device", DEVICES)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True, "vocab_size": 4096},
    "biases": {"attention_bias": True, "mlp_bias": True, "vocab_size": 4096},  # a large head behind odd small tensors
    "ragged": {"hidden_size": 40, "intermediate_size": 100, "head_dim": 10},
    "one KV head": {"num_key_value_heads": 1},
    "as many KV heads": {"num_key_value_heads": 4},
}
variants = pytest.mark.parametrize("variant", VARIANTS)
TEXT = [int(token) for token in np.random.default_rng(0).integers(0, 50, 128)]


@contextlib.contextmanager
def int8_activations(model: PreTrainedModel, weights: Sequence[Weight]) -> Iterator[None]:
    """What accuracy_level 4 may do: every linear layer reads 8-bit codes, one scale per block of a row."""
    blocks = {weight.name.removesuffix(".weight"): block_size(weight) for weight in weights if "codes" in weight.parts}

    def hook(block: int) -> Callable[..., torch.Tensor]:
        def rounded(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
            x = inputs[0]
            padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))
            scale = padded.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
            return (torch.round(padded / scale) * scale).flatten(-2)[..., : x.shape[-1]]

        return rounded

    linears = {name.removeprefix("model."): part for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    blocks.setdefault("lm_head", blocks.get("embed_tokens", 0))  # tied
    handles = [part.register_forward_pre_hook(hook(blocks[name])) for name, part in linears.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---- the same numbers


def settings(variant: str, device: str) -> dict[str, Any]:
    """Few static graphs are enough for a variant; the plain model has those of the other tests."""
    few: dict[str, Any] = {"plain": {}, "as many KV heads": {"chunk": 1, "widths": (1,)}}
    return SHAPE if device == "cpu" else SHAPE | few.get(variant, {"chunk": 4})


@devices
@variants
def test_logits_are_those_of_transformers(models: Models, variant: str, device: str, tmp_path: Path):
    folder, model = models(**VARIANTS[variant])
    target = engine(folder, tmp_path / "bundle", device=device, **settings(variant, device)).target
    truth = tiny.hf_logits(model, TEXT[:40])
    for width in {1, min(4, target.widest)}:
        assert np.abs(walk(target, TEXT[:40], width) - truth).max() <= 1e-3


@devices
@variants
@pytest.mark.parametrize(("body", "head"), [(INT4, INT8), (Scheme(4, 16, False), Scheme(4, 16, False))], ids=["32", "16"])
def test_quantised_graphs_compute_with_the_stored_weights(
    models: Models, variant: str, body: Scheme, head: Scheme, device: str, tmp_path: Path
):  # B01 b, B05, B17
    folder, model = models(**VARIANTS[variant])
    path = make(folder, tmp_path / "bundle", device=device, body=body, head=head, **settings(variant, device))
    bundle = compute_in_float(open_bundle(path))
    truth = tiny.hf_logits(stored(model, bundle), TEXT[:40])
    target = load(path, threads=1).target
    for width in {1, min(4, target.widest)}:
        assert np.abs(walk(target, TEXT[:40], width) - truth).max() <= 1e-3


@devices
@pytest.mark.parametrize(("body", "head"), [("float32", "float32"), (INT4, INT4), (INT4, INT8), (INT4, "float32")])
def test_a_tied_matrix_is_stored_once(models: Models, body: Any, head: Any, device: str, tmp_path: Path):  # B01
    folder, _ = models(**VARIANTS["tied"])
    path = make(folder, tmp_path / "bundle", device=device, body=body, head=head, **settings("tied", device))
    bundle = open_bundle(path)
    weights = {weight.name: weight for weight in bundle.role("target").weights}
    assert "lm_head.weight" not in weights
    if body == "float32":
        assert bundle.manifest.files["target/weights.bin"].bytes <= 1.1 * (folder / "model.safetensors").stat().st_size
    matrix = [extent for extent in weights["embed_tokens.weight"].parts.values() if extent.bytes > 4096]
    bits = {"float32": 32, INT8: 8, INT4: 4}[head]
    assert matrix[0].bytes == 4096 * 64 * bits // 8
    for model in graphs(bundle).values():
        big = {name: np.prod(dims) for name, dims in external(model).items() if np.prod(dims) >= 4096 * 64 * min(bits, 8) // 8}
        inline = [item.name for item in model.graph.initializer if not item.external_data and np.prod(item.dims) > 4096]
        places = {place for name, place in locations(model).items() if name in big}
        assert inline == []
        assert places == {(matrix[0].offset, matrix[0].bytes)}  # however many views, the same bytes
        if head == "float32":
            assert list(external(model).values()).count((4096, 64)) == 1


@devices
@pytest.mark.parametrize("body", ["float32", INT4], ids=str)
def test_every_bias_is_kept_in_float(models: Models, body: Any, device: str, tmp_path: Path):  # B05
    folder, _ = models(**VARIANTS["biases"])
    bundle = open_bundle(make(folder, tmp_path / "bundle", device=device, body=body, **settings("biases", device)))
    biases = {weight.name: weight.scheme for weight in bundle.role("target").weights if weight.name.endswith(".bias")}
    assert set(biases.values()) == {"float32"}
    assert len(biases) == 2 * 7
    for model in graphs(bundle).values():
        read = {name for node in model.graph.node for name in node.input}
        assert {item.name for item in model.graph.initializer if item.name.endswith(".bias")} == set(biases) & read
        assert set(biases) <= read


def test_ragged_rows_are_padded_to_whole_blocks(models: Models, tmp_path: Path):  # B17
    folder, _ = models(**VARIANTS["ragged"])
    for group, column_blocks in ((32, {40: 2, 100: 4}), (16, {40: 3, 100: 7})):
        path = make(folder, tmp_path / "bundle", body=Scheme(4, group), head=Scheme(4, group), **SHAPE)
        for weight in open_bundle(path).role("target").weights:
            if "codes" in weight.parts:
                rows, columns = weight.shape
                assert weight.parts["codes"].shape == (rows, column_blocks[columns], group // 2), weight.name


# ---- positions


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
BASE = {"rope_type": "default", "rope_theta": 500000.0}


def test_the_rope_base_is_found_wherever_it_stands(models: Models, tmp_path: Path):  # B06
    folder, model = models(eos_token_id=None, rope_parameters=BASE)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    forms = [{"rope_theta": 500000}, {"rope_parameters": BASE}, {"rope_parameters": BASE, "rope_theta": 10000}]
    truth = tiny.hf_greedy(model, TEXT[:60], 16)
    ropes = []
    for index, form in enumerate(forms):
        source = tmp_path / f"source-{index}"
        tiny.f_self(folder, source)
        tiny.write_json(source / "config.json", config | form)
        assert tiny.hf_greedy(tiny.load_hf(source), TEXT[:60], 16) == truth
        bundle = engine(source, tmp_path / "bundle", draft=str(source), **SHAPE)
        assert bundle.generate(TEXT[:60], max_new_tokens=16, speculate=False).ids == truth
        result = bundle.generate(TEXT[:60], max_new_tokens=16, gamma=3)
        assert result.ids == truth
        assert result.stats.accepted == result.stats.drafted > 0
        ropes += [role.rope for role in bundle.bundle.manifest.roles.values()]
    assert len(set(ropes)) == 1 and len(ropes) == 6
    np.testing.assert_allclose(ropes[0].inv_freq, 500000.0 ** (-np.arange(8) / 8), rtol=1e-6)
    assert ropes[0].inv_freq[1] == pytest.approx(0.1939, abs=1e-4)


@pytest.mark.parametrize(
    ("rope", "device", "chunk"),
    [(LINEAR, "cpu", 8), (LLAMA3, "cpu-static", 1)],
    ids=["linear", "llama3"],
)
def test_scaled_positions_are_those_of_transformers(
    models: Models, rope: dict[str, Any], device: str, chunk: int, tmp_path: Path
):
    folder, model = models(rope_parameters=rope)
    target = engine(folder, tmp_path / "bundle", device=device, context=128, widths=(1,), chunk=chunk).target
    truth = tiny.hf_logits(model, TEXT)
    assert np.abs(truth - tiny.hf_logits(models()[1], TEXT)).max() > 1  # the scaling shows
    assert np.abs(walk(target, TEXT, chunk) - truth).max() <= 1e-3


@devices
def test_no_position_is_frozen(models: Models, device: str, tmp_path: Path):  # B13
    folder, model = models()
    target = engine(folder, tmp_path / "bundle", device=device, **SHAPE).target
    truth = tiny.hf_logits(model, TEXT[:127])
    for width in (1, 4, 8):
        found = walk(target, TEXT[:127], width)
        for position in (7, 8, 9, 63, 64, 126):
            assert np.abs(found[position] - truth[position]).max() <= 1e-3, (width, position)


@devices
@pytest.mark.parametrize("body", ["float32", INT4], ids=str)
def test_four_tokens_at_once_are_four_single_steps(models: Models, device: str, body: Any, tmp_path: Path):  # B15
    folder, model = models()
    target = engine(folder, tmp_path / "bundle", device=device, body=body, **SHAPE).target
    truth = tiny.hf_logits(model, TEXT)
    for past in (0, 1, 7, 31, SHAPE["context"] - 4):
        target.truncate(0)
        target.prefill(TEXT[:past])
        wide = target.step(TEXT[past : past + 4]).copy()
        rows = []
        for token in TEXT[past : past + 4]:
            rows.append(target.step([token])[0].copy())
            target.commit([0])
        if device == "cpu":  # one graph serves every width with the same bits: int8 activations would blow up the last one
            np.testing.assert_array_equal(wide, rows)
        assert np.abs(wide - rows).max() <= 1e-3
        if body == "float32":
            assert np.abs(wide - truth[past : past + 4]).max() <= 1e-3


# ---- half precision


@devices
def test_half_precision_writes_what_float_writes(models: Models, device: str, tmp_path: Path):  # B16
    folder, _ = models(eos_token_id=None)
    half = engine(folder, tmp_path / "half", device=device, body="float16", head="float16", **SHAPE)
    full = engine(folder, tmp_path / "full", device=device, **SHAPE)
    for length in (5, 8, 1):  # 3 padding rows, none, 7
        expected = full.generate(TEXT[:length], max_new_tokens=20, speculate=False).ids
        assert half.generate(TEXT[:length], max_new_tokens=20, speculate=False).ids == expected
        assert np.isfinite(walk(half.target, TEXT[:length], 8)).all()


@devices
def test_padding_is_finite_and_never_attended(models: Models, device: str, tmp_path: Path):  # B16
    folder, _ = models(eos_token_id=None)
    path = make(folder, tmp_path / "bundle", device=device, body="float16", head="float16", **SHAPE)
    bundle = open_bundle(path)
    role = bundle.role("target")
    rng = np.random.default_rng(1)
    committed = {kind: rng.standard_normal((1, 2, 20, role.kv.head_dim)) for kind in ("clean", "dirty")}

    def past(garbage: float) -> Callable[..., Array]:
        def make_buffer(shape: tuple[int, ...]) -> Array:
            buffer = garbage * np.random.default_rng(2).standard_normal(shape)
            buffer[:, :, :20] = committed["clean"]
            return buffer

        return make_buffer

    for graph in role.graphs:
        width = graph.width or 8
        for count, length in ((min(5, width), 20), (width, 20), (1, 0)):
            rows = width if role.form == "delta" else count  # in place the padding row is the graph's own
            clean, dirty = (run(path / graph.file, feed(role, TEXT[:count], rows, past(g), length)) for g in (0.0, 10.0))
            assert all(np.isfinite(output).all() for output in (*clean.values(), *dirty.values()))
            np.testing.assert_array_equal(clean["logits"][:, :count], dirty["logits"][:, :count])


@devices
def test_no_constant_exceeds_half_precision(models: Models, device: str, tmp_path: Path):  # B16
    folder, _ = models(eos_token_id=None)
    bundle = open_bundle(make(folder, tmp_path / "bundle", device=device, body="float16", head="float16", **SHAPE))
    assert -65504 <= bundle.role("target").mask_value < 0
    for model in graphs(bundle).values():
        tensors = [item for item in model.graph.initializer if not item.external_data]
        tensors += [part.t for node in model.graph.node for part in node.attribute if part.type == onnx.AttributeProto.TENSOR]
        floats = [array for array in map(numpy_helper.to_array, tensors) if array.dtype.kind == "f"]
        numbers = [part.f for node in model.graph.node for part in node.attribute if part.type == onnx.AttributeProto.FLOAT]
        assert floats or numbers  # the attention scale at least: the walk finds constants
        for values in (*floats, np.asarray(numbers)):
            assert (np.abs(values.astype(np.float64)) <= 65504).all()


def test_a_weight_beyond_half_precision_is_named(models: Models, tmp_path: Path):
    bad = damaged(models()[0], tmp_path / "bad", 70000.0)
    with pytest.raises(SpecedgeError, match=r"layers\.1\.mlp\.up_proj\.weight: holds 70000, more than float16"):
        make(bad, tmp_path / "bundle", body="float16", head="float16", **SHAPE)
    assert names(tmp_path) == {"bad"}


# ---- quantised layouts


@devices
@pytest.mark.parametrize("head", [Scheme(4, 32), Scheme(8, 32), Scheme(4, None, False), Scheme(8, 16, False)], ids=str)
def test_zero_and_tiny_blocks_stay_so(head: Scheme, device: str, tmp_path: Path):  # B18
    model = tiny.f_rand(tmp_path / "source", save=False)
    layer = model.model.layers[0]
    with torch.no_grad():
        model.lm_head.weight[100:] = 0
        layer.mlp.down_proj.weight[0] = 0
        layer.self_attn.q_proj.weight[3, 32:] = 0
        layer.self_attn.k_proj.weight[3] *= 1e-6
    tiny.save_folder(model, tmp_path / "source")
    body = Scheme(4, head.group, head.symmetric)
    opened = engine(tmp_path / "source", tmp_path / "bundle", device=device, body=body, head=head, **SHAPE)
    logits = walk(opened.target, TEXT[:20], 4)
    assert np.isfinite(logits).all()
    assert (logits[:, 100:] == 0).all()  # exactly, with int8 activations as well
    assert (logits[:, :100] != 0).all()
    kept = stored(model, opened.bundle)
    assert not kept.lm_head.weight[100:].any() and not kept.model.layers[0].mlp.down_proj.weight[0].any()
    tiny_row = kept.model.layers[0].self_attn.k_proj.weight[3]
    assert (tiny_row - layer.self_attn.k_proj.weight[3]).abs().max() <= layer.self_attn.k_proj.weight[3].abs().max()
    if head.group is not None:
        assert not kept.model.layers[0].self_attn.q_proj.weight[3, 32:].any()


BODIES = [Scheme(bits, group, symmetric) for bits in (4, 8) for group in GROUPS.values() for symmetric in (True, False)]
LAYOUTS = [("cpu", body, bits) for body in BODIES for bits in (4, 8)] + [("cpu-static", body, 8) for body in BODIES[::7]]


@pytest.mark.parametrize(("device", "body", "head_bits"), LAYOUTS, ids=lambda value: str(value))
def test_every_layout_is_computed_right(models: Models, device: str, body: Scheme, head_bits: int, tmp_path: Path):  # B20
    """With and without ONNX Runtime's optimiser; off from the stored weights by what the row's activations explain."""
    folder, model = models()
    head = Scheme(head_bits, body.group, body.symmetric)
    path = make(folder, tmp_path / "bundle", device=device, body=body, head=head, **SHAPE)
    check_layout(open_bundle(path), model)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hidden", [64, 1024])
@pytest.mark.parametrize("tied", [True, False])
def test_the_layout_of_minima_is_computed_right(hidden: int, tied: bool, device: str, tmp_path: Path):  # B20
    """Block 32, as every Q4_1 file has it: products and gathered rows, offsets added to both."""
    shape: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "tie_word_embeddings": tied,
    }
    tiny.f_rand(tmp_path / "source", **shape, head_dim=16)
    tiny.f_gguf(tmp_path / "source", tmp_path / "full.gguf", tied=tied)
    rewrite_gguf(tmp_path / "full.gguf", tmp_path / "model.gguf", {}, GGMLQuantizationType.Q4_1, any_blocks)
    few = {"widths": (1,)} if device == "cpu-static" else {}
    bundle = open_bundle(
        make(tmp_path / "model.gguf", tmp_path / "bundle", device=device, body=INT4, head=INT8, **(SHAPE | few))
    )
    assert {weight.scheme for weight in bundle.role("target").weights} == {"int4/32/minima", "float32"}
    check_layout(bundle, open_checkpoint(str(tmp_path / "model.gguf")).load_reference())


def check_layout(bundle: Bundle, model: PreTrainedModel) -> None:
    role = bundle.role("target")
    graph = role.graphs[-1]
    reference = stored(model, bundle)
    truth = tiny.hf_logits(reference, TEXT[:8])
    inputs = feed(role, TEXT[:8], 8)
    default, plain = both_levels(bundle.path / graph.file, inputs)
    assert np.abs(default - plain).max() <= 1e-3
    if get_device(bundle.manifest.device).accuracy_level == 4:
        with int8_activations(reference, role.weights):
            explained = rms(tiny.hf_logits(reference, TEXT[:8]) - truth)
        assert rms(default - truth) <= 2 * explained + 1e-3
        compute_in_float(bundle)
        default, plain = both_levels(bundle.path / graph.file, inputs)
    assert np.abs(default - truth).max() <= 1e-3
    assert np.abs(plain - truth).max() <= 1e-3


def rms(values: Array) -> float:
    return float(np.sqrt(np.square(values.astype(np.float64)).mean()))


# ---- odd shapes and requests


ODD = {
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "hidden_size": 12,
    "intermediate_size": 7,
    "vocab_size": 50,
}


@devices
@pytest.mark.parametrize(
    ("widths", "chunk", "context", "steps"),
    [((1,), 1, 16, {1}), ((2, 2, 1, 2), 400, 2, {1, 2})],
    ids=["one by one", "duplicates, context 2, chunk beyond it"],
)
def test_odd_shapes(
    models: Models, device: str, widths: tuple[int, ...], chunk: int, context: int, steps: set[int], tmp_path: Path
):
    folder, model = models(**ODD)
    path = make(folder, tmp_path / "bundle", device=device, widths=widths, chunk=chunk, context=context)
    role = open_bundle(path).role("target")
    assert open_bundle(path).manifest.widths == tuple(sorted({1, *widths}))
    assert {graph.width for graph in role.graphs} == (steps if role.form == "delta" else {None})
    for body in ("float32", INT4):
        opened = engine(
            folder, tmp_path / "bundle", device=device, widths=widths, chunk=chunk, context=context, body=body, head=body
        )
        for width in sorted({1, *widths}):
            found = walk(opened.target, TEXT[:context], width)
            assert np.isfinite(found).all()
            if body == "float32":
                assert np.abs(found - tiny.hf_logits(model, TEXT[:context])).max() <= 1e-3


@pytest.mark.parametrize(
    ("options", "error", "parts"),
    [
        ({"context": 129}, UsageError, ["context 129", "at most 128"]),
        ({"context": 1}, UsageError, ["context 1"]),
        ({"context": 64, "widths": (1, 65)}, UsageError, ["65", "64"]),
        ({"widths": (0, 4)}, UsageError, ["widths (0, 4)"]),
        ({"widths": ()}, UsageError, ["widths ()"]),
        ({"chunk": 0}, UsageError, ["chunk 0"]),
        ({"body": "float16", "head": "float32"}, UsageError, ["float16", "float32"]),
        ({"body": INT4, "head": "float16"}, UsageError, ["int4/32", "float16"]),
        ({"tree": ((0,),)}, UsageError, ["tree", "--draft"]),
        ({"device": "gpu-9"}, SpecedgeError, ["gpu-9", "cpu-static"]),
        ({"draft": "no/such/draft"}, SpecedgeError, ["no/such/draft"]),
    ],
)
def test_bad_requests_name_the_value(
    models: Models, options: dict[str, Any], error: type[SpecedgeError], parts: list[str], tmp_path: Path
):
    with pytest.raises(error) as caught:
        make(models()[0], tmp_path / "bundle", **options)
    assert all(part in str(caught.value) for part in parts) and "\n" not in str(caught.value)
    assert names(tmp_path) == set()


# ---- two models


FAN = tuple((rank,) for rank in range(5)) + tuple((rank, 0) for rank in range(5))  # a level of five inner nodes


@devices
def test_a_tree_brings_the_widths_it_needs(models: Models, device: str, tmp_path: Path):
    """One to verify it whole, one to draft each of its levels at once."""
    folder, _ = models(eos_token_id=None)
    path = make(folder, tmp_path / "bundle", draft=str(folder), device=device, tree=FAN, **SHAPE)
    bundle = open_bundle(path)
    assert bundle.manifest.tree == FAN and bundle.manifest.widths == (1, 4, len(FAN) + 1)
    if device == "cpu-static":
        widths = {role: {graph.width for graph in bundle.role(role).graphs} for role in ("target", "draft")}
        assert widths == {"target": {1, 4, 11}, "draft": {1, 2, 5, 8}}  # and the chunk's
    opened = load(path, threads=1)
    result = opened.generate(TEXT[:6], max_new_tokens=30)
    assert result.ids == opened.generate(TEXT[:6], max_new_tokens=30, speculate=False).ids
    assert result.stats.per_round[0] == (len(FAN), 2)  # F-SELF: the first choice of the first choice


SHARED = 120  # tokens of the tokenizer; rows beyond are padding


def padded(model: LlamaForCausalLM, rows: int, folder: Path) -> LlamaForCausalLM:
    """The same model with `rows` rows in embedding and head; those that no token has shout."""
    state = model.state_dict()
    result = tiny.f_rand(folder, save=False, seed=1, vocab_size=rows, eos_token_id=None)
    with torch.no_grad():
        result.lm_head.weight[SHARED:] *= 20
        for name, parameter in result.named_parameters():
            shared = slice(SHARED) if len(parameter) == rows else slice(None)
            parameter[shared] = state[name][shared]
    tiny.save_folder(result, folder)
    tiny.f_tok(folder, size=SHARED)
    return result


@pytest.mark.parametrize("rows", [120, 128, 136])
def test_padding_rows_of_target_and_draft_may_differ(models: Models, rows: int, tmp_path: Path):  # B40
    model = models(eos_token_id=None)[1]
    target = padded(model, 128, tmp_path / "target")
    padded(model, rows, tmp_path / "draft")
    tiny.edit_json(tmp_path / "draft/generation_config.json", eos_token_id=7)  # the target's rule wins: it has none
    tiny.edit_json(tmp_path / "target/tokenizer_config.json", eos_token=None)
    opened = engine(tmp_path / "target", tmp_path / "bundle", draft=str(tmp_path / "draft"), **SHAPE)
    assert opened.bundle.manifest.allowed_ids == SHARED and opened.bundle.manifest.eos_ids == ()
    assert opened.bundle.role("draft").vocab_size == rows
    text = TEXT[:6]
    while len(text) < 46:
        row = tiny.hf_logits(target, text)[-1]
        assert row.argmax() >= SHARED  # unmasked, a padding row would win
        text.append(int(row[:SHARED].argmax()))
    plain = opened.generate(TEXT[:6], max_new_tokens=40, speculate=False)
    speculative = opened.generate(TEXT[:6], max_new_tokens=40, gamma=3)
    assert plain.ids == speculative.ids == text[6:]
    assert speculative.stats.accepted == speculative.stats.drafted >= 25  # and a draft that proposed padding would lose


def test_swapped_tokens_are_refused(models: Models, tmp_path: Path):  # B40
    model = models(eos_token_id=None)[1]
    padded(model, 128, tmp_path / "target")
    padded(model, 128, tmp_path / "draft")
    tiny.f_tok(tmp_path / "draft", size=SHARED, swap=(50, 70))
    first, second = (repr(chr(token - 3 + 32)) for token in (50, 70))
    with pytest.raises(SpecedgeError, match=f"id 50 is {first} to the target and {second} to the draft"):
        make(tmp_path / "target", tmp_path / "bundle", draft=str(tmp_path / "draft"), **SHAPE)
    assert names(tmp_path) == {"target", "draft"}
