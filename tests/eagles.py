"""Tiny EAGLE heads in every published layout, and what they compute, written from the formulas of docs/head_layouts.md."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from specedge.export.families import DecoderConfig, read_config

Tensors = dict[str, Tensor]
Layout = Callable[[Tensors], Tensors]

HIDDEN, VOCAB, LAYERS = 16, 32, 8  # of the target
HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, DRAFT_VOCAB = 4, 2, 6, 24, 8  # of the head: HEADS * HEAD_DIM is not HIDDEN
EPS = 1e-3  # large enough to show


def target_config(layers: int = LAYERS, hidden: int = HIDDEN, vocab: int = VOCAB) -> DecoderConfig:
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "intermediate_size": 2 * hidden,
    }
    return read_config(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=64), "target")


@dataclass(frozen=True)
class Head:
    """A head under SafeAILab's names (`layers.0.` in EAGLE-1, `midlayer.` in EAGLE-3), and what no tensor says."""

    generation: int
    tensors: Tensors
    norm_before_residual: bool = False
    feeds_back_normed: bool = False
    base: float = 10000.0
    factor: float = 1.0
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def layer(self) -> str:
        return "midlayer." if self.generation == 3 else "layers.0."


def draw(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> Tensors:
    """No term is neutral: matrices 0.25 N, norms 1 + 0.3 N, biases 0.5 N, the embedding N."""
    generator, drawn = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        scale = 0.5 if name.endswith("bias") else 1.0 if "embed" in name else 0.25
        drawn[name] = 1 + 0.3 * noise if "norm" in name else scale * noise
    return drawn


def _layer(prefix: str, inputs: int, hidden: int, biases: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    sizes = {"self_attn.q_proj": (queries, inputs), "self_attn.k_proj": (keys, inputs), "self_attn.v_proj": (keys, inputs)}
    sizes |= {"self_attn.o_proj": (hidden, queries), "mlp.down_proj": (hidden, INTERMEDIATE)}
    sizes |= {"mlp.gate_proj": (INTERMEDIATE, hidden), "mlp.up_proj": (INTERMEDIATE, hidden)}
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}{name}.weight": size for name, size in sizes.items()}
    shapes |= {f"{prefix}{name}.bias": size[:1] for name, size in sizes.items() if name[-6] in biases or name in biases}
    return shapes | {f"{prefix}post_attention_layernorm.weight": (hidden,)}


def eagle1(*, fc_bias: bool = True, embedding: bool = True, own_head: bool = False, biases: tuple[str, ...] = ()) -> Head:
    """`biases` names layers: q, k, v, o, or mlp.gate_proj."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, 2 * HIDDEN)} | ({"fc.bias": (HIDDEN,)} if fc_bias else {})
    shapes |= _layer("layers.0.", HIDDEN, HIDDEN, biases)
    shapes |= {"embed_tokens.weight": (VOCAB, HIDDEN)} if embedding else {}
    shapes |= {"lm_head.weight": (VOCAB, HIDDEN)} if own_head else {}
    return Head(1, draw(shapes))


def eagle3(
    *,
    hidden: int = HIDDEN,
    taps: int = 3,
    embedding: bool = False,
    own_head: bool = True,
    drafts: int = DRAFT_VOCAB,
    fc_bias: bool = False,
    input_norm: bool = False,
    tap_norms: bool = False,
    biases: tuple[str, ...] = (),
    norm_before_residual: bool = False,
    feeds_back_normed: bool = False,
) -> Head:
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, taps * HIDDEN), "norm.weight": (hidden,)}
    shapes |= {"fc.bias": (hidden,)} if fc_bias else {}
    shapes |= {"input_norm.weight": (taps * HIDDEN,)} if input_norm else {}
    shapes |= {f"fc_norm.{tap}.weight": (HIDDEN,) for tap in range(taps) if tap_norms}
    shapes |= _layer("midlayer.", 2 * hidden, hidden, biases)
    shapes |= {f"midlayer.{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm")}
    shapes |= {"embed_tokens.weight": (VOCAB, hidden)} if embedding else {}
    shapes |= {"lm_head.weight": (drafts, hidden)} if own_head else {}
    tensors = draw(shapes)
    if drafts < VOCAB:
        tensors |= maps(torch.arange(drafts) * (VOCAB // drafts))
    return Head(3, tensors, norm_before_residual, feeds_back_normed)


def maps(ids: Tensor, vocab: int = VOCAB) -> Tensors:
    """d2t and t2d of a draft vocabulary."""
    return {"d2t": ids - torch.arange(len(ids)), "t2d": torch.isin(torch.arange(vocab), ids)}


# ---- layouts: from SafeAILab's names to the others


def renamed(*pairs: tuple[str, str]) -> Layout:
    def rename(tensors: Tensors) -> Tensors:
        changed = {}
        for name, value in tensors.items():
            old, new = next(((old, new) for old, new in pairs if name.startswith(old)), ("", ""))
            changed[new + name.removeprefix(old)] = value
        return changed

    return rename


def prefixed(prefix: str, but: tuple[str, ...] = ()) -> Layout:
    return lambda tensors: {name if name in but else prefix + name: value for name, value in tensors.items()}


def dropped(*names: str) -> Layout:
    return lambda tensors: {name: value for name, value in tensors.items() if name not in names}


def changed(**others: Tensor) -> Layout:
    """More tensors, or others; `__` stands for a dot."""
    return lambda tensors: tensors | {name.replace("__", "."): value for name, value in others.items()}


def save(folder: Path, tensors: Mapping[str, Any], settings: dict[str, Any] | None, file: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    if file.endswith("safetensors"):
        save_file({name: value.contiguous() for name, value in tensors.items()}, folder / file)
    else:
        torch.save(dict(tensors), folder / file)
    if settings is not None:
        (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def plain(**others: Any) -> dict[str, Any]:
    """config.json as SafeAILab, SpecForge and ModelOpt write it; `None` takes a key away."""
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        **others,
    }
    return {key: value for key, value in settings.items() if value is not None}


def speculators(kind: str = "eagle3", layer: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    """config.json as speculators writes it: the layer's keys nested, without those that are LlamaConfig's defaults."""
    nested = {"model_type": "llama", "num_attention_heads": HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": EPS, **(layer or {})}
    settings = {"speculators_model_type": kind, "transformer_layer_config": nested, "norm_before_residual": False, **others}
    return {key: value for key, value in settings.items() if value is not None}


# ---- what a head computes, every row anew at every step


@dataclass(frozen=True)
class Draft:
    logits: Tensor  # [rows, Vd]
    tokens: list[int]  # fed to the rows


def reference(head: Head, features: Tensor, tokens: list[int], steps: int, embedding: Tensor, lm_head: Tensor) -> Draft:
    """Logits after every row of `features` [P, .] with its following token, and after `steps` more, fed by the head itself.

    `embedding` and `lm_head` are the target's.
    """
    t, tokens = head.tensors, list(tokens)
    embedding = t.get("embed_tokens.weight", embedding)
    ids = torch.arange(len(t["d2t"])) + t["d2t"] if "d2t" in t else torch.arange(VOCAB)
    lm_head = t.get("lm_head.weight", lm_head[ids])
    g = features
    if head.generation == 3:
        if "input_norm.weight" in t:
            g = _norm(g, t["input_norm.weight"])
        if "fc_norm.0.weight" in t:
            g = torch.cat([_norm(tap, t[f"fc_norm.{k}.weight"]) for k, tap in enumerate(g.split(HIDDEN, -1))], -1)
        g = F.linear(g, t["fc.weight"], t.get("fc.bias"))
    while True:
        out = _run_layer(head, g, embedding[tokens])
        normed = _norm(out, t["norm.weight"]) if head.generation == 3 else out
        logits = normed @ lm_head.T
        if len(tokens) == len(features) + steps:
            return Draft(logits, tokens)
        tokens.append(int(ids[logits[-1].argmax()]))
        g = torch.cat((g, (normed if head.feeds_back_normed else out)[-1:]))


def _run_layer(head: Head, g: Tensor, e: Tensor) -> Tensor:
    t, at, rows = head.tensors, head.layer, len(g)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, t[f"{at}{name}_proj.weight"], t.get(f"{at}{name}_proj.bias"))

    if head.generation == 1:
        x = residual = F.linear(torch.cat((e, g), -1), t["fc.weight"], t.get("fc.bias"))
    else:
        normed = _norm(g, t[at + "hidden_norm.weight"])
        x = torch.cat((_norm(e, t[at + "input_layernorm.weight"]), normed), -1)
        residual = normed if head.norm_before_residual else g
    q, k, v = (linear(x, f"self_attn.{name}").view(rows, -1, HEAD_DIM).transpose(0, 1) for name in "qkv")
    angles = torch.outer(torch.arange(rows), head.base ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)) / head.factor
    q, k = _rotate(q, angles), _rotate(k, angles)
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, 0) for part in (k, v))
    scores = (q @ k.transpose(1, 2)) / HEAD_DIM**0.5
    scores = scores.masked_fill(torch.ones(rows, rows).triu(1).bool(), -torch.inf)
    residual = residual + linear((scores.softmax(-1) @ v).transpose(0, 1).reshape(rows, -1), "self_attn.o")
    n = _norm(residual, t[at + "post_attention_layernorm.weight"])
    return residual + linear(F.silu(linear(n, "mlp.gate")) * linear(n, "mlp.up"), "mlp.down")


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Halves of a head as real and imaginary parts."""
    half = HEAD_DIM // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1)
