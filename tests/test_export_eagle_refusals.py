"""EAGLE checkpoints that cannot be computed as they were trained are refused by name, never guessed at."""

from pathlib import Path
from typing import Any

import pytest
import torch

from eagles import (
    HEAD_DIM,
    HIDDEN,
    VOCAB,
    Head,
    Layout,
    changed,
    dropped,
    eagle1,
    eagle3,
    plain,
    prefixed,
    renamed,
    save,
    speculators,
    target_config,
)
from specedge.errors import SpecedgeError
from specedge.export.eagle_checkpoint import open_eagle

TARGET = target_config()
ZEROS = torch.zeros(HIDDEN)
SPECULATORS_1 = renamed(("fc.", "fusion_fc."), ("layers.0.", "transformer."))
LAYERS_0 = renamed(("midlayer.", "layers.0."))


def refusal(path: Path, taps: tuple[int, ...] | None = None, layers: int = 8) -> str:
    with pytest.raises(SpecedgeError) as caught:
        open_eagle(str(path), target_config(layers), taps)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def renaming(name: str, other: str) -> Layout:
    return lambda tensors: {other if key == name else key: value for key, value in tensors.items()}


@pytest.mark.parametrize(
    ("head", "change", "named"),
    [
        (eagle3(), changed(layers__1__mlp__gate_proj__weight=ZEROS), r"layers\.1\.mlp.*more than one layer"),
        (eagle3(), changed(midlayer__1__hidden_norm__weight=ZEROS), r"midlayer\.1\.hidden_norm.*more than one layer"),
        (eagle3(), renaming("midlayer.self_attn.q_proj.weight", "midlayer.self_attn.q_a_proj.weight"), r"q_a_proj.*latent"),
        (eagle3(), changed(midlayer__self_attn__kv_a_proj_with_mqa__weight=ZEROS), r"kv_a_proj_with_mqa\.weight; multi-head"),
        (eagle3(), changed(midlayer__self_attn__q_norm__weight=torch.ones(HEAD_DIM)), r"self_attn\.q_norm\.weight; norms of"),
        (eagle3(), changed(mask_hidden=torch.zeros(1, 1, 3 * HIDDEN)), r"mask_hidden; .*P-EAGLE"),
        (eagle3(), changed(fc__weight_scale=ZEROS), r"fc\.weight_scale; use the head that is not quantised"),
        (eagle3(), changed(fc__lora_A__weight=ZEROS), "lora_A"),
        (eagle3(), changed(token_map=torch.arange(8)), "token_map; vocabulary maps other than d2t"),
        (eagle3(), changed(midlayer__mlp__experts__0__weight=ZEROS), r"unused tensor: midlayer\.mlp\.experts\.0\.weight"),
        (eagle1(), changed(enorm__weight=ZEROS), r"enorm\.weight; projects disagree"),
        (eagle1(), changed(hidden_layernorm__weight=ZEROS), r"hidden_layernorm\.weight; projects disagree"),
        (eagle1(), changed(input_norm1__weight=ZEROS), r"input_norm1\.weight; projects disagree"),
        (eagle1(), changed(norm__weight=ZEROS), r"unused tensor: norm\.weight; an EAGLE-1 head"),
        (eagle1(), changed(layers__0__input_layernorm__weight=ZEROS), r"unused tensor: layers\.0\.input_layernorm\.weight"),
        (eagle1(), changed(layers__0__hidden_norm__weight=ZEROS), r"unused tensor: layers\.0\.hidden_norm\.weight"),
        (eagle1(), changed(d2t=torch.zeros(VOCAB, dtype=torch.int64)), "unused tensor: d2t; an EAGLE-1 head"),
        (eagle3(input_norm=True, tap_norms=True), changed(), r"input_norm\.weight: expected no fc_norm beside it"),
        (eagle3(), changed(layers__0__hidden_norm__weight=ZEROS), "the same tensor by two names"),
        (eagle3(), changed(fc__weight=torch.zeros(HIDDEN, 3 * HIDDEN, dtype=torch.int32)), r"fc\.weight: expected one of F32"),
    ],
)
def test_what_has_no_place_is_refused_by_the_tensors_name(head: Head, change: Layout, named: str, tmp_path: Path) -> None:
    path = save(tmp_path / "head", change(head.tensors), plain())
    with pytest.raises(SpecedgeError, match=named):
        open_eagle(str(path), TARGET)
    assert str(path) in refusal(path)


@pytest.mark.parametrize("name", ["embedding_layernorm", "transformer.input_layernorm", "pre_lm_head_layernorm"])
def test_speculators_eagle_1_with_its_norms_is_refused(name: str, tmp_path: Path) -> None:
    tensors = SPECULATORS_1(eagle1(embedding=False).tensors)
    assert name in refusal(save(tmp_path / "head", tensors | {f"{name}.weight": ZEROS}, speculators("eagle")))
    settings = speculators("eagle", layernorms=True, norm_before_residual=None)
    assert "layernorms: true is not supported" in refusal(save(tmp_path / "head", tensors, settings))


@pytest.mark.parametrize("head", [eagle1(), eagle3(embedding=True, biases=("q", "k", "v"), tap_norms=True)], ids=["1", "3"])
def test_no_tensor_is_ever_made_up(head: Head, tmp_path: Path) -> None:
    optional = {"fc.bias", "embed_tokens.weight", "lm_head.weight", "t2d"}  # their absence means something
    for name in sorted(head.tensors.keys() - optional):
        message = refusal(save(tmp_path / "head", dropped(name)(head.tensors), plain()))
        assert f"missing tensor: {name.replace('midlayer.', 'layers.0.')}," in message, name


@pytest.mark.parametrize("head", [eagle1(), eagle3(embedding=True, input_norm=True)], ids=["1", "3"])
def test_every_shape_is_checked(head: Head, tmp_path: Path) -> None:
    for name, value in head.tensors.items():
        for misshapen in (torch.cat((value, value)), value.reshape(1, *value.shape)):
            path = save(tmp_path / "head", head.tensors | {name: misshapen}, plain())
            assert "expected" in refusal(path), name


@pytest.mark.parametrize(
    ("head", "target", "named"),
    [
        (
            eagle1(),
            target_config(hidden=32),
            r"fc\.weight: expected shape \(32, 64\) in an EAGLE-1 head for the target's hidden",
        ),
        (eagle3(), target_config(hidden=32), r"fc\.weight: expected shape \(16, 96\) in an EAGLE-3 head .*not for this target"),
        (eagle3(hidden=24), TARGET, r"missing tensor: embed_tokens\.weight, and the target's has hidden size 16, which is not"),
        (eagle3(hidden=24, embedding=True, own_head=False), TARGET, r"missing tensor: lm_head\.weight, and the target's"),
        (eagle1(), target_config(vocab=34), r"embed_tokens\.weight: expected shape \(34, 16\)"),
        (eagle3(), target_config(vocab=34), "t2d: expected 34 entries"),
        (eagle3(drafts=VOCAB), target_config(vocab=34), "missing tensor: d2t"),
        (eagle1(embedding=False), target_config(vocab=34), r"config\.json: vocab_size: 32, but the target gives 34"),
    ],
)
def test_a_head_of_another_target_is_refused(head: Head, target: Any, named: str, tmp_path: Path) -> None:
    path = save(tmp_path / "head", head.tensors, plain(vocab_size=VOCAB))
    with pytest.raises(SpecedgeError, match=named):
        open_eagle(str(path), target)


@pytest.mark.parametrize(
    ("head", "settings", "named"),
    [
        (eagle3(), plain(eagle_config={"use_aux_hidden_state": False}), r"eagle_config\.use_aux_hidden_state: false is not"),
        (eagle3(), plain(eagle_config={"eh_proj_before_attn": True}), r"eagle_config\.eh_proj_before_attn: true"),
        (eagle3(), plain(eagle_config={"use_mtp_layernorm": True}), "use_mtp_layernorm: true"),
        (eagle3(), plain(eagle_config={"use_last_layernorm": False}), "use_last_layernorm: false"),
        (eagle3(), plain(eagle_config={"parallel_draft_step": 2}), "parallel_draft_step: 2 is not supported"),
        (eagle3(), plain(eagle_config=[]), "eagle_config: expected a JSON object"),
        (eagle3(), plain(hidden_act="gelu"), 'hidden_act: "gelu" is not supported in an EAGLE-3 head, expected "silu"'),
        (eagle3(), plain(logit_scale=0.5), "logit_scale: 0.5 is not supported"),
        (eagle3(), plain(layer_types=["sliding_attention"]), "layer_types"),
        (eagle3(), plain(quantization_config={"quant_method": "fp8"}), "quantization_config"),
        (eagle3(), plain(norm_before_fc=True), r"norm_before_fc: true, but model\.safetensors, without input_norm\.weight,"),
        (
            eagle3(input_norm=True),
            plain(norm_before_fc=False),
            r"norm_before_fc: false, .*, with input_norm\.weight, gives true",
        ),
        (eagle3(), plain(fc_norm=True), "fc_norm: true, but"),
        (eagle3(tap_norms=True), plain(fc_norm=False), "fc_norm: false, but"),
        (eagle3(), plain(bias=True), "bias: true, but"),
        (eagle3(), plain(norm_output=True), "norm_output: true means two things.*return_hidden_post_norm"),
        (eagle3(), plain(norm_output=False), "norm_output: false means two things"),
        (eagle3(), plain(norm_before_residual="yes"), 'norm_before_residual: expected true or false, found "yes"'),
        (eagle3(), plain(num_attention_heads=None), "num_attention_heads: missing, and 24 rows of q_proj do not tell"),
        (eagle3(), None, "num_attention_heads: missing"),
        (eagle3(), plain(num_attention_heads=5), "num_attention_heads: 5 does not divide q_proj"),
        (eagle3(), plain(num_attention_heads=3), r"num_attention_heads: 3 does not divide q_proj \(24 rows\) and k_proj \(12"),
        (eagle3(), plain(num_attention_heads="4"), "num_attention_heads: expected a positive integer"),
        (eagle3(), plain(head_dim=4), "head_dim: 4, but the layer gives 6"),
        (eagle3(), plain(num_key_value_heads=4), "num_key_value_heads: 4, but the layer gives 2"),
        (eagle3(), plain(hidden_size=24), "hidden_size: 24, but the layer gives 16"),
        (eagle3(), plain(intermediate_size=25), "intermediate_size: 25, but the layer gives 24"),
        (eagle3(), plain(target_hidden_size=24), "target_hidden_size: 24, but the target gives 16"),
        (eagle3(), plain(rms_norm_eps="small"), "config.json"),
        (eagle3(), plain(rms_norm_eps=2.0), "rms_norm_eps: expected a number between 0 and 1, found 2.0"),
        (eagle3(), plain(rope_scaling={"type": "mrope", "mrope_section": [1, 1, 1]}), "rope_type 'mrope' is not supported"),
        (eagle3(), plain(rope_scaling={"rope_type": "yarn", "factor": 2.0}), "rope_type 'yarn' is not supported"),
        (eagle3(), plain(rope_scaling={"type": "linear"}), "transformers refuses it"),
        (eagle3(), plain(rope_theta="big"), "rope_theta: expected a positive number, found 'big'"),
        (eagle3(), plain(speculators_model_type="peagle"), 'speculators_model_type: "peagle", but the tensors'),
        (eagle1(), plain(speculators_model_type="eagle3"), "the tensors are those of an EAGLE-1 head"),
        (eagle3(), plain(speculators_model_type="eagle3"), "transformer_layer_config: missing"),
        (
            eagle3(),
            speculators(layer={"model_type": "qwen3"}),
            r'transformer_layer_config\.model_type: "qwen3" is not supported',
        ),
        (eagle3(), speculators(layer={"num_attention_heads": None}), "num_attention_heads: 32 does not divide"),
        (
            eagle3(),
            speculators(eagle_config={"norm_before_residual": True}),
            "eagle_config.norm_before_residual: true, but norm",
        ),
        (
            eagle1(),
            plain(eagle_config={"use_input_layernorm_in_first_layer": True}),
            "use_input_layernorm_in_first_layer: true",
        ),
        (eagle1(), plain(eagle_aux_hidden_state_layer_ids=[2, 4, 5]), r"names taps \[2, 4, 5\], but the tensors .* EAGLE-1"),
        (eagle1(), plain(draft_vocab_size=8), "draft_vocab_size: 8, but the target gives 32"),
    ],
)
def test_settings_of_another_computation_are_refused_by_key(
    head: Head, settings: dict[str, Any] | None, named: str, tmp_path: Path
) -> None:
    path = save(tmp_path / "head", head.tensors, settings)
    with pytest.raises(SpecedgeError, match=named):
        open_eagle(str(path), TARGET)
    assert str(path) in refusal(path)


def test_without_fc_the_key_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "head", dropped("fc.weight")(eagle3().tensors), plain(eagle_config={"use_aux_hidden_state": False}))
    assert "use_aux_hidden_state" in refusal(path)


def test_what_the_settings_say_otherwise_is_noted(tmp_path: Path) -> None:
    settings = plain(num_hidden_layers=40, attention_bias=True, num_aux_hidden_states=4, draft_vocab_size=9, vocab_size=33)
    found = open_eagle(str(save(tmp_path / "head", eagle3().tensors, settings)), TARGET)
    assert [note.split(": ", 1)[1] for note in found.notes] == [
        "num_hidden_layers: 40, the tensors say 1",
        "attention_bias: true, the tensors say false",
        "num_aux_hidden_states: 4, the tensors say 3",
        "names no taps, the default (2, 4, 5) assumed",
        "draft_vocab_size: 9, the tensors say 8",
        "vocab_size: 33, the tensors say 32",
    ]


def test_defaults_that_were_assumed_are_noted(tmp_path: Path) -> None:
    settings = plain(rms_norm_eps=None, rope_theta=None)
    found = open_eagle(str(save(tmp_path / "head", eagle1().tensors, settings)), TARGET)
    assert found.config.decoder.rms_eps == 1e-6
    assert found.config.decoder.inv_freq[1] == pytest.approx(10000 ** (-2 / HEAD_DIM), rel=1e-6)
    assert [note.split(": ", 1)[1] for note in found.notes] == [
        "rms_norm_eps: not there, 1e-06 assumed",
        "rope_theta: not there, 10000 assumed, as engines do",
    ]
    nested = speculators(norm_before_residual=None, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    found = open_eagle(str(save(tmp_path / "head", LAYERS_0(eagle3().tensors), nested)), TARGET)
    assert not found.config.norm_before_residual
    assert len(found.notes) == 1 and "norm_before_residual: not there, false assumed" in found.notes[0]
    scaled = plain(rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0})
    assert "SafeAILab" in open_eagle(str(save(tmp_path / "head", eagle1().tensors, scaled)), TARGET).notes[0]


IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("layers", "settings", "taps"),
    [
        (8, plain(), (2, 4, 5)),
        (7, plain(), (2, 3, 4)),
        (32, plain(), (2, 16, 29)),
        (32, plain(eagle_config={IDS: []}), (2, 16, 29)),
        (8, plain(**{IDS: [1, 3, 4]}), (2, 4, 5)),
        (32, plain(**{IDS: [1, 15, 28]}), (2, 16, 29)),
        (32, plain(eagle_config={IDS: [1, 15, 28]}), (2, 16, 29)),
        (8, plain(**{IDS: [2, 4, 5]}), (2, 4, 5)),
        (32, plain(eagle_config={IDS: [2, 16, 29]}), (2, 16, 29)),
        (32, plain(eagle_config={"layer_ids": [2, 16, 29]}), (2, 16, 29)),
        (36, plain(**{IDS: [24, 30, 36]}), (24, 30, 36)),
        (3, plain(**{IDS: [1, 2, 3]}), (1, 2, 3)),
        (32, speculators(eagle_aux_hidden_state_layer_ids=[3, 17, 30]), (3, 17, 30)),
        (32, plain(aux_hidden_states_layer_ids=[3, 17, 30]), (4, 18, 31)),
    ],
)
def test_taps_that_can_be_known_are(
    layers: int, settings: dict[str, Any], taps: tuple[int, ...], tmp_path: Path
) -> None:  # B52
    path = save(tmp_path / "head", eagle3().tensors, settings)
    assert open_eagle(str(path), target_config(layers)).config.taps == taps


@pytest.mark.parametrize("ids", [[0, 1, 2], [1, 2, 3], None])
@pytest.mark.parametrize("taps", [(0, 1, 2), (1, 2, 3)])
def test_what_the_user_says_of_taps_counts(ids: list[int] | None, taps: tuple[int, ...], tmp_path: Path) -> None:  # B52
    path = save(tmp_path / "head", eagle3().tensors, plain(**{IDS: ids}))
    found = open_eagle(str(path), target_config(3), taps)
    assert found.config.taps == taps
    assert bool(found.notes) == (ids == [1, 2, 3] != list(taps))  # of three layers the third is the stream behind the last


@pytest.mark.parametrize(
    ("layers", "settings", "named"),
    [
        (3, plain(), "missing, and 3 taps of a target of 3 layers have no default; give the residual streams"),
        (6, plain(), "3 taps of a target of 6 layers have no default"),
        (3, plain(**{IDS: [0, 1, 2]}), "0,1,2 can mean .*--eagle-taps 0,1,2.*--eagle-taps 1,2,3"),
        (24, plain(eagle_config={IDS: [1, 11, 21]}), rf"eagle_config\.{IDS}: 1,11,21 can mean .*--eagle-taps 2,12,22"),
        (94, speculators(eagle_aux_hidden_state_layer_ids=[1, 46, 90]), "1,46,90 can mean"),
        (8, plain(aux_hidden_states_layer_ids=[2, 4, 5]), "2,4,5 can mean"),
        (8, plain(**{IDS: [5, 4, 2]}), "expected ascending numbers from 0 to 8, the target's layers, found 5,4,2"),
        (8, plain(**{IDS: [2, 2, 5]}), "expected ascending numbers"),
        (8, plain(**{IDS: [2, 4, 9]}), "expected ascending numbers from 0 to 8"),
        (8, plain(**{IDS: [-1, 4, 5]}), "expected ascending numbers from 0 to 8"),
        (8, plain(aux_hidden_states_layer_ids=[2, 4, 8]), "can mean"),
        (8, plain(**{IDS: [2, 4]}), "expected 3 taps, as fc.weight takes 3 times the target's hidden size, found 2,4"),
        (8, plain(**{IDS: ["2"]}), "expected a list of integers"),
        (8, plain(**{IDS: [2, 4, 5]}, eagle_config={IDS: [1, 3, 4]}), "says .*; remove the wrong one"),
    ],
)
def test_taps_that_cannot_be_known_are_asked_for(layers: int, settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = save(tmp_path / "head", eagle3().tensors, settings)
    with pytest.raises(SpecedgeError, match=named):
        open_eagle(str(path), target_config(layers))


@pytest.mark.parametrize("taps", [(2, 4), (2, 4, 9), (4, 2, 5), (2, 2, 4), (-1, 2, 4), ()])
def test_taps_of_the_user_must_fit(taps: tuple[int, ...], tmp_path: Path) -> None:
    assert refusal(save(tmp_path / "three", eagle3().tensors, plain()), taps).startswith("--eagle-taps: expected")
    assert "is an EAGLE-1 head" in refusal(save(tmp_path / "one", eagle1().tensors, plain()), taps)


def test_a_head_of_more_taps_takes_as_many(tmp_path: Path) -> None:
    path = save(tmp_path / "head", eagle3(taps=4).tensors, plain(num_aux_hidden_states=4))
    assert "4 taps of a target of 8 layers have no default" in refusal(path)
    assert open_eagle(str(path), TARGET, (1, 3, 5, 8)).config.features == 4 * HIDDEN


def test_nan_is_named_where_it_is_read(tmp_path: Path) -> None:
    tensors = eagle3().tensors
    tensors["fc.weight"][1, 2] = torch.nan
    found = open_eagle(str(save(tmp_path / "head", tensors, plain())), TARGET)
    with pytest.raises(SpecedgeError, match=r"fc\.weight\[1, 2\]: expected finite numbers"):
        found.tensor("fc.weight")


class Intruder:
    """Touches a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def test_a_pickle_that_runs_code_is_refused_and_its_code_never_runs(tmp_path: Path) -> None:  # B54
    tensors = dict(eagle3().tensors) | {"norm.weight": Intruder(tmp_path / "marker")}
    message = refusal(save(tmp_path / "head", tensors, plain(), "pytorch_model.bin"))
    assert "a pickle can run code" in message and "pytorch_model.bin" in message
    assert not (tmp_path / "marker").exists()


def test_medusa_heads_are_no_eagle(tmp_path: Path) -> None:
    assert "unused tensor: 0.0.linear.weight" in refusal(save(tmp_path / "head", {"0.0.linear.weight": ZEROS}, plain()))
    lone = prefixed("model.")({"fc.weight": eagle1().tensors["fc.weight"]})
    assert "missing tensor: layers.0.self_attn.q_proj.weight" in refusal(save(tmp_path / "head", lone, plain()))


def test_taps_given_against_the_file_are_taken_and_noted(tmp_path: Path) -> None:
    path = save(tmp_path / "head", eagle3().tensors, plain(eagle_aux_hidden_state_layer_ids=[2, 4, 5]))
    assert open_eagle(str(path), TARGET, (2, 4, 5)).notes == ()
    found = open_eagle(str(path), TARGET, (0, 1, 2))
    assert found.config.taps == (0, 1, 2)
    assert "its ids mean 2,4,5; --eagle-taps 0,1,2 is taken" in found.notes[0]
