"""A config is read into what transformers computes, or refused by name."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specedge.errors import SpecedgeError
from specedge.export.families import DecoderConfig, read_config, tensor_names

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def llama(**overrides: Any) -> LlamaConfig:
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
    return LlamaConfig(**{**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, **overrides})


def read(**overrides: Any) -> DecoderConfig:
    return read_config(llama(**overrides), "config.json")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        LLAMA3,
    ],
)
@pytest.mark.parametrize("head_dim", [16, 66])
def test_rotary_tables_are_transformers_own(rope: dict[str, Any], head_dim: int):
    theirs = LlamaRotaryEmbedding(llama(rope_parameters=dict(rope), head_dim=head_dim))
    config = read(rope_parameters=dict(rope), head_dim=head_dim)
    positions = torch.arange(200)
    angles = positions[:, None].float() * torch.tensor(config.inv_freq)
    cos, sin = theirs(torch.zeros(1), positions[None])
    assert torch.equal(angles.cos() * config.rope_scaling, cos[0, :, : head_dim // 2])
    assert torch.equal(angles.sin() * config.rope_scaling, sin[0, :, : head_dim // 2])


def test_scalings_follow_their_definition():
    plain = torch.tensor(read(rope_parameters={"rope_type": "default", "rope_theta": 500000.0}).inv_freq)
    torch.testing.assert_close(plain, 500000.0 ** -(torch.arange(8) / 8))
    llama3 = torch.tensor(read(rope_parameters=dict(LLAMA3)).inv_freq)
    turns = 32 * plain / (2 * torch.pi)  # of each pair over the original context: above 4 kept, below 1 slowed down
    share = ((turns - 1) / 3).clip(0, 1)
    torch.testing.assert_close(llama3, (1 - share) * plain / 8 + share * plain)


def test_rope_base_is_found_wherever_it_stands():  # B06
    nested = {"rope_type": "default", "rope_theta": 500000.0}
    forms: list[dict[str, Any]] = [
        {"rope_theta": 500000.0},
        {"rope_parameters": nested},
        {"rope_theta": 10000.0, "rope_parameters": nested},  # transformers lets the nested value win
        {"rope_theta": 500000.0, "rope_scaling": {"type": "default"}},
    ]
    tables = {read(**form).inv_freq for form in forms}
    assert len(tables) == 1
    assert tables.pop()[1] == pytest.approx(0.1939, abs=1e-4)


def test_rope_factors_divide_the_frequencies():
    factors = [1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0]
    divided = read_config(llama(), "a.gguf", rope_factors=factors).inv_freq
    assert divided == tuple((torch.tensor(read().inv_freq) / torch.tensor(factors)).tolist())
    with pytest.raises(SpecedgeError, match=r"rope_freqs\.weight: expected 8 factors .* found 3"):
        read_config(llama(), "a.gguf", rope_factors=[1.0, 1.0, 2.0])


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 24, "num_key_value_heads": 1},
    ],
)
def test_names_and_shapes_are_those_of_the_model(overrides: dict[str, Any]):
    config = llama(**overrides)
    state = LlamaForCausalLM(config).state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    names = tensor_names(read_config(config, "config.json"))
    assert dict(names.values()) == {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert all(checkpoint.removeprefix("model.") == canonical for canonical, (checkpoint, _) in names.items())


def test_equal_configs_are_one_key():
    assert len({read(), read(), read(num_hidden_layers=3)}) == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_heads=4"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rot"),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": 0.0}}, "give no frequencies"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0}}, "no finite positive"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
    ],
)
def test_what_cannot_be_computed_is_refused(overrides: dict[str, Any], message: str):
    with pytest.raises(SpecedgeError, match=message) as caught:
        read(**overrides)
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)


def test_other_model_types_are_refused_by_name():
    with pytest.raises(SpecedgeError, match="'qwen2' is not supported"):
        read_config(Qwen2Config(vocab_size=128, hidden_size=64, num_attention_heads=4), "config.json")
