"""EAGLE checkpoints: what a head computes is the same in every published layout, and as its formulas say."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from eagles import (
    DRAFT_VOCAB,
    HEAD_DIM,
    HIDDEN,
    VOCAB,
    Draft,
    Head,
    Layout,
    changed,
    dropped,
    eagle1,
    eagle3,
    maps,
    plain,
    prefixed,
    reference,
    renamed,
    save,
    speculators,
    target_config,
)
from specedge.errors import SpecedgeError
from specedge.export.decoder import NORMED
from specedge.export.eagle import Eagle
from specedge.export.eagle_checkpoint import EagleCheckpoint, open_eagle
from specedge.export.families import read_config

PAIRS, STEPS = 6, 3
TARGET = target_config()


def borrowed() -> tuple[Tensor, Tensor]:
    """The target's embedding and LM head."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(VOCAB, HIDDEN, generator=generator), 0.25 * torch.randn(VOCAB, HIDDEN, generator=generator)


@torch.no_grad()
def run(found: EagleCheckpoint, features: Tensor, tokens: list[int]) -> Tensor:
    """Logits as the exported head gives them: over a cache, in steps of several widths, the last ones of one row."""
    embedding, lm_head = borrowed()
    state = {name: torch.from_numpy(found.tensor(name)) for name in found.shapes}
    head = state.pop("lm_head.weight", lm_head if found.vocabulary is None else lm_head[found.vocabulary])
    model = Eagle(found.config)
    model.load_state_dict({"embed_tokens.weight": embedding} | state)
    layer = found.config.decoder
    past = (torch.zeros(1, layer.kv_heads, 0, layer.head_dim), torch.zeros(1, layer.kv_heads, 0, layer.head_dim))
    logits, fed, start = [], model.fuse(features[None]), 0
    for width in (4, len(features) - 4, *[1] * (len(tokens) - len(features))):
        rows = torch.arange(start, start + width)
        angles = torch.outer(rows, torch.tensor(layer.inv_freq))[None, None]
        bias = torch.zeros(1, 1, width, start + width).masked_fill(torch.arange(start + width) > rows[:, None], -1e9)
        ids = torch.tensor([tokens[start : start + width]], dtype=torch.int32)
        hidden = fed[:, start : start + width]
        out, back, new = model(ids, hidden, angles.cos(), angles.sin(), bias, past)
        past = (torch.cat((past[0], new[0]), 2), torch.cat((past[1], new[1]), 2))
        logits.append(out[0] @ head.T)
        start += width
        if start >= len(features):
            fed = torch.cat((fed[:, :start], back[:, -1:]), 1)
    return torch.cat(logits)


def drafted(head: Head) -> tuple[Tensor, Draft]:
    """Features of some pairs, and what the formulas make of them."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(PAIRS, (3 if head.generation == 3 else 1) * HIDDEN, generator=generator)
    tokens = torch.randint(VOCAB, (PAIRS,), generator=generator).tolist()
    return features, reference(head, features, tokens, STEPS, *borrowed())


def check(head: Head, path: Path) -> EagleCheckpoint:
    """The head at `path` computes what `head` does."""
    found = open_eagle(str(path), TARGET)
    features, expected = drafted(head)
    logits = run(found, features, expected.tokens)
    assert logits.shape == expected.logits.shape == (PAIRS + STEPS, found.config.draft_vocab_size)
    assert expected.logits.std() > 0.5
    torch.testing.assert_close(logits, expected.logits, atol=1e-4, rtol=0)
    return found


LEFTOVERS = changed(
    midlayer__self_attn__rotary_emb__inv_freq=torch.ones(3), target_model__model__rotary_emb__inv_freq=torch.ones(3)
)
SPECULATORS_1 = renamed(("fc.", "fusion_fc."), ("layers.0.", "transformer."))


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (prefixed(""), plain()),
        (prefixed("model."), plain(model_type="mixtral")),
        (prefixed("model.model."), plain(head_dim=HEAD_DIM, hidden_size=HIDDEN, num_key_value_heads=2, intermediate_size=24)),
        (SPECULATORS_1, speculators("eagle", layernorms=False, fusion_bias=True, norm_before_residual=None)),
    ],
    ids=["SafeAILab", "prefixed", "prefixed twice", "speculators"],
)
def test_eagle_1_in_every_layout(layout: Layout, settings: dict[str, Any], file: str, tmp_path: Path) -> None:
    head = eagle1()
    found = check(head, save(tmp_path / "head", layout(head.tensors), settings, file))
    assert (found.config.generation, found.config.taps, found.config.features) == (1, (NORMED,), HIDDEN)
    assert found.vocabulary is None and found.notes == ()


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (LEFTOVERS, plain(draft_vocab_size=DRAFT_VOCAB, vocab_size=VOCAB, norm_output=None)),
        (prefixed("draft_model."), plain(architectures=["LlamaForCausalLMEagle3"])),
        (prefixed("model.", but=("lm_head.weight", "d2t", "t2d")), plain()),
        (renamed(("midlayer.", "layers.0.")), speculators(eagle_aux_hidden_state_layer_ids=[2, 4, 5], norm_output=False)),
        (
            lambda tensors: dropped("t2d")(renamed(("midlayer.", "layers.0."))(tensors)),
            plain(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}),
        ),
        (renamed(("midlayer.", "midlayer.0.")), plain(bias=False)),
    ],
    ids=["SafeAILab", "SpecForge, raw", "NeMo", "speculators", "ModelOpt", "Megatron"],
)
def test_eagle_3_in_every_layout(layout: Layout, settings: dict[str, Any], file: str, tmp_path: Path) -> None:
    head = eagle3()
    found = check(head, save(tmp_path / "head", layout(head.tensors), settings, file))
    assert (found.config.generation, found.config.taps, found.config.features) == (3, (2, 4, 5), 3 * HIDDEN)
    assert found.vocabulary is not None and found.vocabulary.tolist() == list(range(0, VOCAB, VOCAB // DRAFT_VOCAB))
    assert found.vocabulary.dtype == np.int32
    assert all("assumed" in note for note in found.notes)


@pytest.mark.parametrize(
    ("head", "settings"),
    [
        (eagle1(embedding=False), plain()),
        (eagle1(own_head=True), plain()),
        (eagle1(biases=("q", "k", "v")), plain(qkv_bias=True)),
        (eagle1(biases=("q", "k", "v", "o", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")), plain(mlp_bias=True)),
        (eagle3(embedding=True), plain()),
        (eagle3(own_head=False), plain()),
        (eagle3(drafts=VOCAB), plain(draft_vocab_size=VOCAB)),
        (eagle3(drafts=VOCAB, own_head=False), plain()),
        (eagle3(hidden=24, embedding=True), plain(target_hidden_size=HIDDEN, hidden_size=24)),
        (eagle3(fc_bias=True), plain(bias=True)),
        (eagle3(biases=("q", "k", "v")), plain(attention_bias=True)),
        (eagle3(input_norm=True), plain(norm_before_fc=True)),
        (eagle3(input_norm=True), plain(eagle_config={"norm_before_fc": True})),
        (eagle3(tap_norms=True), plain(use_aux_norm=True)),
        (eagle3(norm_before_residual=True), plain(norm_before_residual=True)),
        (eagle3(norm_before_residual=True, feeds_back_normed=True), speculators(norm_before_residual=True, norm_output=True)),
        (eagle3(feeds_back_normed=True), plain(eagle_config={"return_hidden_post_norm": True})),
        (replace(eagle3(), base=50.0), plain(rope_theta=50.0)),
        (replace(eagle3(), base=50.0), plain(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 50.0})),
        (replace(eagle1(), base=50.0, factor=4.0), plain(rope_theta=50.0, rope_scaling={"type": "linear", "factor": 4.0})),
        (replace(eagle3(), base=50.0), speculators(layer={"rope_theta": 50.0})),
    ],
)
def test_what_a_head_may_have_or_lack_is_computed(head: Head, settings: dict[str, Any], tmp_path: Path) -> None:  # B52
    check(head, save(tmp_path / "head", head.tensors, settings))


def test_old_names_of_the_norms_of_taps(tmp_path: Path) -> None:
    head = eagle3(tap_norms=True)
    old = renamed(*((f"fc_norm.{tap}.", f"aux_norm_{place}.") for tap, place in enumerate(("low", "mid", "high"))))
    check(head, save(tmp_path / "head", old(head.tensors), plain()))


def test_scaled_rope_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    settings: dict[str, Any] = {"rope_theta": 500.0, "rope_scaling": rope | {"original_max_position_embeddings": 16}}
    found = open_eagle(str(save(tmp_path / "head", eagle3().tensors, plain(**settings))), TARGET)
    target = LlamaConfig(**settings, num_attention_heads=4, head_dim=HEAD_DIM, max_position_embeddings=64)
    assert found.config.decoder.inv_freq == read_config(target, "target").inv_freq


def test_sizes_are_those_of_the_tensors_and_the_target(tmp_path: Path) -> None:
    found = open_eagle(str(save(tmp_path / "head", eagle3().tensors, plain(max_position_embeddings=7))), TARGET)
    layer = found.config.decoder
    assert (layer.heads, layer.kv_heads, layer.head_dim, layer.intermediate, layer.layers) == (4, 2, 6, 24, 1)
    assert (layer.hidden, layer.vocab_size, layer.max_positions) == (HIDDEN, VOCAB, TARGET.max_positions)
    assert set(found.names) == set(found.shapes)
    assert (found.names["layer.hidden_norm.weight"], found.stored_type("fc.weight")) == ("midlayer.hidden_norm.weight", "F32")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_float32_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    halves = {name: value.to(dtype) if value.is_floating_point() else value for name, value in eagle3().tensors.items()}
    found = open_eagle(str(save(tmp_path / "head", halves, plain())), TARGET)
    np.testing.assert_array_equal(found.tensor("fc.weight"), halves["fc.weight"].float().numpy())
    assert found.stored_type("fc.weight") == {torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]


@pytest.mark.parametrize("said", [True, False, None])
@pytest.mark.parametrize("there", [True, False])
def test_the_bias_of_fc_is_used_where_it_is_and_never_contradicted(
    there: bool, said: bool | None, tmp_path: Path
) -> None:  # B52
    head = eagle1(fc_bias=there)
    path = save(tmp_path / "head", head.tensors, plain(bias=said))
    if said in (None, there):
        assert check(head, path).config.fc_bias == there
        return
    with pytest.raises(SpecedgeError, match=r"config\.json: bias: (true|false), but model\.safetensors, with(out)? fc\.bias"):
        open_eagle(str(path), TARGET)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dropped("d2t"), "missing tensor: d2t, which says what the 8 draft ids are among the target's 32"),
        (changed(d2t=torch.zeros(8, dtype=torch.int64)), r"d2t\[1\]: makes draft id 1 the token 1, but t2d says 4"),
        (changed(d2t=torch.tensor([0, 3, 6, 100, 12, 15, 18, 21])), r"d2t\[3\]: 100 makes draft id 3 the token 103"),
        (changed(d2t=torch.tensor([0, 3, 6, -4, 12, 15, 18, 21])), r"d2t\[3\]: -4 makes draft id 3 the token -1"),
        (
            changed(d2t=torch.tensor([0, 3, 6, 5, 12, 15, 18, 21])),
            r"d2t\[3\]: 5 makes draft id 3 the token 8, expected one above 8",
        ),
        (changed(t2d=maps(torch.arange(0, 28, 4))["t2d"]), "t2d: expected 8 tokens marked, one per entry of d2t, found 7"),
        (changed(t2d=torch.ones(VOCAB, dtype=torch.bool)), "t2d: expected 8 tokens marked, one per entry of d2t, found 32"),
        (
            changed(t2d=torch.ones(VOCAB - 1, dtype=torch.bool)),
            "t2d: expected 32 entries, one per token of the target, found 31",
        ),
        (changed(**maps(torch.arange(0, 28, 4))), r"lm_head\.weight: expected shape \(7, 16\)"),
        (changed(d2t=torch.zeros(8, dtype=torch.float16)), "d2t: expected a list of integers, found F16"),
        (changed(d2t=torch.zeros(2, 4, dtype=torch.int64)), r"d2t: expected a list of integers, found I64 \(2, 4\)"),
        (dropped("d2t", "t2d", "lm_head.weight"), "missing tensor: d2t, which says what the 8 draft ids"),
    ],
)
def test_a_vocabulary_map_that_is_not_whole_is_refused(change: Layout, named: str, tmp_path: Path) -> None:  # B51
    path = save(tmp_path / "head", change(eagle3().tensors), plain(draft_vocab_size=DRAFT_VOCAB))
    with pytest.raises(SpecedgeError, match=named) as caught:
        open_eagle(str(path), TARGET)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_maps_of_a_whole_vocabulary_are_ignored(tmp_path: Path) -> None:  # B51
    head = eagle3(drafts=VOCAB)
    unfilled = {"d2t": torch.zeros(VOCAB, dtype=torch.int32), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    filled = {"d2t": torch.arange(VOCAB), "t2d": torch.arange(VOCAB) < 8}
    for maps_, notes in (({}, 0), (unfilled, 0), (filled, 2)):
        path = save(tmp_path / "head", head.tensors | maps_, speculators())
        found = check(head, path)
        assert found.vocabulary is None
        assert len([note for note in found.notes if "ignored" in note]) == notes


def test_a_map_without_its_inverse_is_taken_as_it_is(tmp_path: Path) -> None:
    tensors = changed(d2t=torch.zeros(8, dtype=torch.int32))(dropped("t2d")(eagle3().tensors))
    found = open_eagle(str(save(tmp_path / "head", tensors, plain())), TARGET)
    assert found.vocabulary is not None and found.vocabulary.tolist() == list(range(8))
