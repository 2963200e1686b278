"""What an EAGLE head's config.json says that its tensors cannot: attention heads, RoPE, and flags of the computation.

docs/head_layouts.md, section 3.3, has every key with the projects that write and read it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig

from specedge.errors import SpecedgeError
from specedge.export.eagle_names import NamedTensors
from specedge.export.families import DecoderConfig, read_rope
from specedge.export.head_files import HeadFiles

DEFAULT_EPS = 1e-6  # of SafeAILab's EConfig and of LlamaConfig
DEFAULT_ROPE_BASE = 10000.0
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
_LAYER = "transformer_layer_config."  # where speculators keeps the layer's settings, without those that are LlamaConfig's
_KINDS = {"eagle": 1, "eagle3": 3}  # speculators_model_type

# Keys that change the computation without changing a shape, and the only value supported, by generation (None: not read).
_ONLY: dict[str, tuple[Any, Any]] = {
    "hidden_act": ("silu", "silu"),
    "logit_scale": (1.0, 1.0),
    "use_aux_hidden_state": (False, True),
    "use_input_layernorm_in_first_layer": (False, True),
    "use_last_layernorm": (False, True),
    "use_mtp_layernorm": (False, False),
    "eh_proj_before_attn": (False, False),
    "parallel_draft_step": (1, 1),
    "use_sliding_window": (False, False),
    "layernorms": (False, None),
    "norm_before_residual": (False, None),
    "norm_output": (False, None),
    "return_hidden_post_norm": (False, None),
}


@dataclass(frozen=True, slots=True)
class EagleSettings:
    """config.json, its layer's part found. A key that is null is one that is not there."""

    path: Path
    places: Mapping[str, Mapping[str, Any]]  # "" for the top
    speculators: bool

    def said(self, *keys: str) -> dict[str, Any]:
        """Every key as it is written, with its value, wherever it may stand."""
        return {
            place + key: content[key] for place, content in self.places.items() for key in keys if content.get(key) is not None
        }

    def one(self, *keys: str) -> Any:
        """The value of a key by any of its names; None where nobody says."""
        found = self.said(*keys)
        (first, value), *others = found.items() or [("", None)]
        for key, other in others:
            if other != value:
                raise SpecedgeError(
                    f"{self.path}: {key}: {_shown(other)}, but {first} says {_shown(value)}; remove the wrong one"
                )
        return value

    def flag(self, *keys: str) -> bool | None:
        value = self.one(*keys)
        if value is not None and type(value) is not bool:
            raise SpecedgeError(f"{self.path}: {next(iter(self.said(*keys)))}: expected true or false, found {_shown(value)}")
        return value

    def size(self, *keys: str) -> int | None:
        value = self.one(*keys)
        if value is not None and (type(value) is not int or value < 1):
            name = next(iter(self.said(*keys)))
            raise SpecedgeError(f"{self.path}: {name}: expected a positive integer, found {_shown(value)}")
        return value

    def require(self, found: Any, where: str, *keys: str) -> None:
        """Refuse a key that says otherwise than the tensors; one that is not there says nothing."""
        for key, value in self.said(*keys).items():
            if value != found or type(value) is not type(found):
                raise SpecedgeError(
                    f"{self.path}: {key}: {_shown(value)}, but {where} gives {_shown(found)}; correct the key, or use a head "
                    "made for this target whose files agree"
                )

    def otherwise(self, key: str, found: Any) -> list[str]:
        """Notes on a key that says otherwise than the tensors, which count."""
        said = {name: value for name, value in self.said(key).items() if value != found}
        return [f"{self.path}: {name}: {_shown(value)}, the tensors say {_shown(found)}" for name, value in said.items()]


def read_settings(files: HeadFiles, generation: int) -> EagleSettings:
    """Raises a `SpecedgeError` for settings of another kind of head, or for keys that ask for what is not supported."""
    path, top = files.path.parent / "config.json", files.settings
    kind = top.get("speculators_model_type")
    if kind is not None and (not isinstance(kind, str) or _KINDS.get(kind) != generation):
        raise SpecedgeError(
            f"{path}: speculators_model_type: {_shown(kind)}, but the tensors are those of an EAGLE-{generation} head; "
            f"expected one of {', '.join(_KINDS)}"
        )
    if top.get("quantization_config"):
        raise SpecedgeError(f"{path}: quantization_config: use the head that is not quantised")
    places: dict[str, Mapping[str, Any]] = {"": top}
    for place in ("eagle_config.", _LAYER):
        content = top.get(place.removesuffix("."))
        if content is not None and not isinstance(content, dict):
            raise SpecedgeError(f"{path}: {place.removesuffix('.')}: expected a JSON object, found {_shown(content)}")
        places |= {} if content is None else {place: content}
    if kind is not None and _LAYER not in places:
        raise SpecedgeError(f"{path}: transformer_layer_config: missing, expected with speculators_model_type {_shown(kind)}")
    settings = EagleSettings(path, places, kind is not None)
    _check_supported(settings, generation)
    return settings


def _check_supported(settings: EagleSettings, generation: int) -> None:
    if settings.speculators:  # what is missing there is a default of this type's
        kind = settings.places[_LAYER].get("model_type") or "llama"
        if kind != "llama":
            raise SpecedgeError(f'{settings.path}: {_LAYER}model_type: {_shown(kind)} is not supported, expected "llama"')
    for key, by_generation in _ONLY.items():
        expected = by_generation[generation == 3]
        for name, value in settings.said(key).items():
            if expected is not None and value != expected:
                raise SpecedgeError(
                    f"{settings.path}: {name}: {_shown(value)} is not supported in an EAGLE-{generation} head, "
                    f"expected {_shown(expected)}"
                )
    for name, kinds in settings.said("layer_types").items():
        if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
            raise SpecedgeError(f"{settings.path}: {name}: {_shown(kinds)} is not supported, expected full_attention")


def read_decoder(settings: EagleSettings, tensors: NamedTensors, target: DecoderConfig) -> DecoderConfig:
    """The head's layer: sizes from its tensors, which the settings may not contradict, the rest from the settings."""
    queries, keys, hidden = (tensors.matrix(f"layer.self_attn.{name}_proj.weight")[0] for name in "qko")
    heads = settings.size("num_attention_heads")
    if heads is None and not settings.speculators:
        raise SpecedgeError(
            f"{settings.path}: num_attention_heads: missing, and {queries} rows of q_proj do not tell; add it, "
            "or download the head again with its config.json"
        )
    heads = heads or LlamaConfig().num_attention_heads
    head_dim = queries // heads
    if queries % heads or not head_dim or keys % head_dim:
        raise SpecedgeError(
            f"{settings.path}: num_attention_heads: {heads} does not divide q_proj ({queries} rows) and k_proj ({keys} rows) "
            "into heads of one size; correct it"
        )
    intermediate = tensors.matrix("layer.mlp.gate_proj.weight")[0]
    measured = {"hidden_size": hidden, "head_dim": head_dim, "intermediate_size": intermediate}
    for key, size in (measured | {"num_key_value_heads": keys // head_dim}).items():
        settings.require(size, "the layer", key)
    settings.require(target.hidden, "the target", "target_hidden_size")
    rope = {key: value for key in _ROPE_KEYS if (value := settings.one(key)) is not None}
    try:
        llama = LlamaConfig(
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=keys // head_dim,
            head_dim=head_dim,
            max_position_embeddings=target.max_positions,
            **rope,
        )
    except (StrictDataclassError, ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise SpecedgeError(f"{settings.path}: transformers refuses it: {' '.join(str(error).split())}") from error
    inv_freq, rope_scaling = read_rope(llama, str(settings.path))
    try:
        return DecoderConfig(
            model_type="llama",
            layers=1,
            hidden=hidden,
            intermediate=intermediate,
            heads=heads,
            kv_heads=keys // head_dim,
            head_dim=head_dim,
            vocab_size=target.vocab_size,
            max_positions=target.max_positions,
            rms_eps=DEFAULT_EPS if (eps := settings.one("rms_norm_eps")) is None else eps,
            tied=False,
            attention_bias=any(f"layer.self_attn.{name}_proj.bias" in tensors for name in "qkv"),
            mlp_bias=any(name.startswith("layer.mlp.") and name.endswith(".bias") for name in tensors.names),
            inv_freq=tuple(inv_freq.tolist()),
            rope_scaling=rope_scaling,
        )
    except (TypeError, ValueError) as error:
        raise SpecedgeError(f"{settings.path}: {error}") from error


def feeds_back_normed(settings: EagleSettings) -> bool:
    """EAGLE-3: whether what feeds the LM head is also fed back."""
    if (said := settings.flag("return_hidden_post_norm")) is not None:
        settings.require(said, "return_hidden_post_norm", "norm_output")
        return said
    said = settings.flag("norm_output")
    if said is not None and not settings.speculators:
        raise SpecedgeError(
            f"{settings.path}: norm_output: {_shown(said)} means two things: that the head's norm comes before lm_head "
            "(SpecForge), or that what it gives is fed back (vLLM, sglang, speculators, TensorRT-LLM); replace it by "
            "return_hidden_post_norm: true if that is fed back, by false if the layer's output is"
        )
    return bool(said)


def settings_notes(settings: EagleSettings, config: DecoderConfig, generation: int, taps: int) -> list[str]:
    """Defaults that were assumed, and what the settings say otherwise than the tensors, which count."""
    notes, differing = [], list[str]()
    if settings.speculators and generation == 3 and settings.flag("norm_before_residual") is None:
        notes.append("norm_before_residual: not there, false assumed, speculators' own default (vLLM assumes true)")
    if not settings.speculators and settings.one("rms_norm_eps") is None:
        notes.append(f"rms_norm_eps: not there, {DEFAULT_EPS} assumed")
    base = settings.one("rope_theta")
    if not settings.speculators and base is None and settings.one("rope_parameters") is None:
        notes.append(f"rope_theta: not there, {DEFAULT_ROPE_BASE:.0f} assumed, as engines do")
    if generation == 1 and settings.one("rope_scaling") and base not in (None, DEFAULT_ROPE_BASE):
        notes.append(f"rope_theta: {_shown(base)} taken with rope_scaling; SafeAILab's own code takes 10000 there")
    found: dict[str, Any] = {
        "num_hidden_layers": 1,
        "attention_bias": config.attention_bias,
        "qkv_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }
    if generation == 3:
        found |= {"num_aux_hidden_states": taps, "num_aux_layers": taps}
    for key, value in found.items():
        differing += settings.otherwise(key, value)
    return [f"{settings.path}: {note}" for note in notes] + differing


def _shown(value: Any) -> str:
    return json.dumps(value)
