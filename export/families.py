"""Which model types are supported, and their settings read into one frozen `DecoderConfig`."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specedge.errors import SpecedgeError

MODEL_TYPES = ("llama",)
_JOINED = ("q_proj", "k_proj", "v_proj")
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What a decoder-only model computes with its tensors."""

    model_type: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_eps: float
    tied: bool  # lm_head is the embedding
    attention_bias: bool  # on q, k, v and o
    mlp_bias: bool  # on gate, up and down
    inv_freq: tuple[float, ...]  # float32 values, head_dim / 2 of them, every RoPE scaling folded in
    rope_scaling: float  # multiplies cos and sin
    rotation: tuple[int, int] | None = None  # of the residual stream, by the sizes of its two factors (`rotated`)
    drafted: int | None = None  # rows of lm_head, where a draft model has fewer than the embedding

    @property
    def head_rows(self) -> int:
        """Rows of lm_head."""
        return self.vocab_size if self.drafted is None else self.drafted

    def __post_init__(self) -> None:
        sizes = {
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_positions,
        }
        for key, value in sizes.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{key}: expected a positive integer, found {value!r}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"num_key_value_heads: {self.kv_heads} does not divide num_attention_heads={self.heads}; "
                "every KV head serves the same number of query heads"
            )
        if self.head_dim % 2 or len(self.inv_freq) != self.head_dim // 2:
            raise ValueError(
                f"head_dim: expected an even number, two per rotary frequency, found {self.head_dim} "
                f"for {len(self.inv_freq)} frequencies"
            )
        if not all(math.isfinite(value) and value >= 0 for value in (*self.inv_freq, self.rope_scaling)):
            raise ValueError(f"rope_parameters: they give frequencies that are no finite positive numbers: {self.inv_freq}")
        if not 0 < self.rms_eps < 1:
            raise ValueError(f"rms_norm_eps: expected a number between 0 and 1, found {self.rms_eps!r}")


def require_supported(model_type: object, source: str, *, remote_code: bool = False) -> None:
    """Refuse, by name, a model type that specedge cannot export."""
    if model_type not in MODEL_TYPES:
        remote = " (its auto_map asks for remote code, which specedge never runs)" if remote_code else ""
        raise SpecedgeError(
            f"{source}: model_type {model_type!r} is not supported{remote}; supported: {', '.join(MODEL_TYPES)}"
        )


def read_config(config: PretrainedConfig, source_name: str, rope_factors: Sequence[float] | None = None) -> DecoderConfig:
    """The decoder that `config` describes.

    `rope_factors` (llama.cpp's `rope_freqs.weight`, head_dim / 2 of them) divide the inverse frequencies.
    """
    require_supported(config.model_type, source_name)
    if config.hidden_act != "silu":
        raise SpecedgeError(f"{source_name}: hidden_act {config.hidden_act!r} is not supported, expected 'silu'")
    inv_freq, rope_scaling = read_rope(config, source_name)
    if rope_factors is not None:
        if len(rope_factors) != len(inv_freq):
            raise SpecedgeError(
                f"{source_name}: rope_freqs.weight: expected {len(inv_freq)} factors from head_dim={config.head_dim}, "
                f"found {len(rope_factors)}"
            )
        inv_freq = inv_freq / torch.tensor(rope_factors, dtype=torch.float32)
    try:
        return DecoderConfig(
            model_type=config.model_type,
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
            rms_eps=config.rms_norm_eps,
            tied=config.tie_word_embeddings,
            attention_bias=config.attention_bias,
            mlp_bias=config.mlp_bias,
            inv_freq=tuple(inv_freq.tolist()),
            rope_scaling=rope_scaling,
        )
    except ValueError as error:
        raise SpecedgeError(f"{source_name}: {error}") from error


def read_rope(config: PretrainedConfig, source: str) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [head_dim / 2] and the factor of cos and sin, bit-equal to what transformers computes.

    transformers has gathered old and new spellings in `rope_parameters`; a nested rope_theta wins over a top-level one.
    """
    parameters: dict[str, Any] = config.rope_parameters
    kind, theta = parameters.get("rope_type"), parameters.get("rope_theta")
    if kind not in ROPE_TYPES:
        raise SpecedgeError(f"{source}: rope_type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if not isinstance(theta, int | float) or not theta > 0:
        raise SpecedgeError(f"{source}: rope_theta: expected a positive number, found {theta!r}")
    if (partial := parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        raise SpecedgeError(f"{source}: partial_rotary_factor {partial!r} is not supported, expected 1.0")
    if kind == "default":
        even = torch.arange(0, config.head_dim, 2, dtype=torch.float)
        return 1.0 / (theta ** (even / config.head_dim)), 1.0
    try:
        return ROPE_INIT_FUNCTIONS[kind](config)
    except (TypeError, ZeroDivisionError) as error:
        raise SpecedgeError(f"{source}: rope_parameters {parameters} give no frequencies ({error})") from error


def tensor_names(config: DecoderConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Canonical name -> (name in a Hugging Face checkpoint, shape); a tied lm_head is absent."""
    hidden, queries, keys = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (config.intermediate, hidden),
        "mlp.up_proj": (config.intermediate, hidden),
        "mlp.down_proj": (hidden, config.intermediate),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.layers):
        for name, shape in linears.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
            if config.attention_bias if name.startswith("self_attn") else config.mlp_bias:
                shapes[f"layers.{layer}.{name}.bias"] = shape[:1]
        shapes[f"layers.{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"layers.{layer}.post_attention_layernorm.weight"] = (hidden,)
    shapes["norm.weight"] = (hidden,)
    names = {name: (f"model.{name}", shape) for name, shape in shapes.items()}
    if not config.tied:
        names["lm_head.weight"] = ("lm_head.weight", (config.head_rows, hidden))
    return names


def joined_layers(names: Iterable[str]) -> list[list[str]]:
    """Canonical names, those of weights that the decoder multiplies with together (q, k, v of a layer) in one list."""
    groups: dict[str, list[str]] = {}
    for name in names:
        layer, _, module = name.removesuffix(".weight").rpartition(".")
        groups.setdefault(layer if module in _JOINED else name, []).append(name)
    return list(groups.values())


def shape_origin(config: DecoderConfig, name: str) -> str:
    """The settings that the shape of a canonical tensor comes from, for an error message."""
    hidden = f"hidden_size={config.hidden}"
    queries = f"num_attention_heads={config.heads} and head_dim={config.head_dim}"
    keys = f"num_key_value_heads={config.kv_heads} and head_dim={config.head_dim}"
    origins = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (f"intermediate_size={config.intermediate}", hidden),
        "up_proj": (f"intermediate_size={config.intermediate}", hidden),
        "down_proj": (hidden, f"intermediate_size={config.intermediate}"),
        "embed_tokens": (f"vocab_size={config.vocab_size}", hidden),
        "lm_head": (f"vocab_size={config.vocab_size}", hidden),
    }
    module, _, kind = name.rpartition(".")
    rows, columns = origins.get(module.rpartition(".")[2], (hidden, ""))
    return f"{rows} by {columns}" if columns and kind == "weight" else rows
