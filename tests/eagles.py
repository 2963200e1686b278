"""Tiny EAGLE heads in every published layout, and what they compute, written from the formulas of docs/head_layouts.md."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from bundles import make
from specedge.export.families import DecoderConfig, read_config
from specedge.runtime import Engine, load
from tiny import LOG_ZERO, Array, deterministic_chain, f_chain, noisy_lm_head, random_chain

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


# ---- heads of an F-CHAIN target of CHAIN ids (and as many hidden values), all of one config per generation

CHAIN = HEADS * HEAD_DIM  # a value of the heads for every id
TAPS = (0, 1, 2)  # all there are: its two layers' inputs and what leaves the last


def chain_target(folder: Path, law: Array, noise: float = 0.0, seed: int = 0) -> Path:
    """F-CHAIN of two layers, which with `noise` also say something, so that the text depends on the cache."""
    f_chain(folder, law, num_hidden_layers=2, num_key_value_heads=KV_HEADS, max_position_embeddings=64)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(seed)
    for name in sorted(tensors):
        if "o_proj" in name or "down_proj" in name:
            tensors[name] += noise * torch.randn(tensors[name].shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def chain_eagle1(target: Array, law: Array, noise: float = 0.0) -> Head:
    """Drafts the token after t from `law`[t], with the LM head of the F-CHAIN target of the law `target`.

    Its fc makes of the embedding, and of nothing else, what that LM head needs; its layer adds nothing.
    """
    shapes = {"fc.weight": (CHAIN, 2 * CHAIN)} | _layer("layers.0.", CHAIN, CHAIN, ())
    drawn = draw(shapes)
    wanted = torch.eye(CHAIN, dtype=torch.float64)
    if law is not target:
        wanted = torch.linalg.solve(_logits(target), _logits(law))
    tensors = {name: noise * value for name, value in drawn.items()}
    tensors["fc.weight"][:, :CHAIN] += wanted.float()
    whole = [f"self_attn.{name}_proj" for name in "qkv"]  # so that it matters where a row stands
    tensors |= {name: drawn[name] for name in (f"layers.0.{part}.weight" for part in (*whole, "post_attention_layernorm"))}
    return Head(1, tensors)


def chain_eagle3(law: Array, ids: Sequence[int] = range(CHAIN), noise: float = 0.0) -> Head:
    """Drafts the token after t from what `law`[t] gives to `ids`, with an LM head of its own.

    The embedding reaches that by way of the values of the cache: a row attends to itself, by its position; with `noise` to
    all rows alike, and to what the target says.
    """
    shapes = {"fc.weight": (CHAIN, len(TAPS) * CHAIN)} | _layer("midlayer.", 2 * CHAIN, CHAIN, ())
    tensors = {name: noise * value for name, value in draw(shapes).items()}
    ones = ("norm.weight", "midlayer.input_layernorm.weight", "midlayer.post_attention_layernorm.weight")
    tensors |= {name: torch.ones(CHAIN) for name in ones} | {"midlayer.hidden_norm.weight": torch.full((CHAIN,), noise)}
    for name in ("q", "k"):
        drawn = tensors.pop(f"midlayer.self_attn.{name}_proj.weight").repeat(1 if name == "q" else HEADS // KV_HEADS, 1)
        real = torch.arange(CHAIN) % HEAD_DIM < HEAD_DIM // 2  # the embedding's values have one sum, whatever the token is
        drawn[real, :CHAIN] += (2.0 if noise else 20.0) / CHAIN**0.5
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = drawn
    drawn = tensors["midlayer.self_attn.v_proj.weight"].repeat(HEADS // KV_HEADS, 1)
    drawn[:, :CHAIN] += torch.eye(CHAIN)
    tensors["midlayer.self_attn.v_proj.weight"] = drawn
    tensors["midlayer.self_attn.o_proj.weight"] += torch.eye(CHAIN)
    tensors["lm_head.weight"] = _logits(law)[list(ids)].float()
    if len(ids) < CHAIN:
        tensors |= maps(torch.tensor(ids), CHAIN)
    return Head(3, tensors, norm_before_residual=True, base=100.0)


SURE = deterministic_chain(CHAIN, {})
EVERY_OTHER = deterministic_chain(CHAIN, [(token + 2) % CHAIN for token in range(CHAIN)])
EVEN = tuple(range(0, CHAIN, 2))
SOME = tuple(token for token in range(CHAIN) if token % 3)
MIXED = (SURE + random_chain(CHAIN, seed=1)) / 2  # of a target that with noise leaves it often
P = random_chain(CHAIN, seed=1, sharpness=1.2)
Q = (P + random_chain(CHAIN, seed=2)) / 2
TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
NOISE = 0.1  # of heads; twice as much of the target


class Chains:
    """Targets, their heads and draft models, bundles of them and engines, each made when it is first asked for."""

    targets: ClassVar[dict[str, tuple[Array, float]]] = {
        "mixed": (MIXED, 2 * NOISE),
        "sure": (SURE, 0.0),
        "even": (EVERY_OTHER, 0.0),
        "drawn": (P, 0.0),
    }
    heads: ClassVar[dict[str, tuple[str, Callable[[], Head]]]] = {
        "eagle1": ("mixed", lambda: chain_eagle1(MIXED, MIXED, NOISE)),
        "eagle3": ("mixed", lambda: chain_eagle3(MIXED, noise=NOISE)),
        "some3": ("mixed", lambda: chain_eagle3(MIXED, SOME, NOISE)),
        "sure1": ("sure", lambda: chain_eagle1(SURE, SURE)),
        "even3": ("even", lambda: chain_eagle3(EVERY_OTHER, EVEN)),
        "drawn1": ("drawn", lambda: chain_eagle1(P, Q)),
        "drawn3": ("drawn", lambda: chain_eagle3(Q, SOME)),
    }
    drafts: ClassVar[dict[str, str]] = {"draft": "mixed", "drawn": "drawn"}

    def __init__(self, place: Path) -> None:
        self._place = place
        self._engines: dict[str, Engine] = {}

    def target(self, name: str) -> Path:
        folder = self._place / name
        if not folder.exists():
            law, noise = self.targets[name]
            chain_target(folder, law, noise)
        return folder

    def head(self, name: str) -> Head:
        return self.heads[name][1]()

    def draft(self, name: str) -> Path:
        folder = self._place / f"{name} draft"
        if not folder.exists() and name == "draft":
            noisy_lm_head(self.target("mixed"), folder, sigma=0.2)
        elif not folder.exists():
            chain_target(folder, Q)
        return folder

    def path(self, name: str, device: str, kind: str, **options: Any) -> Path:
        """The bundle: of `kind` "chain", with a chain of 3 (7 on cpu-static) drafted in one call, or "tree", with TREE."""
        output = self._place / "-".join((name, device, kind, *map(str, options.values())))
        if output.exists():
            return output
        if name in self.heads:
            folder = save_chained(self._place / f"{name} head", self.head(name))
            options |= {"eagle": str(folder), "eagle_taps": TAPS if self.head(name).generation == 3 else None}
        else:
            options = {"draft": str(self.draft(name)), "one_call": True} | options
        chain = (1, 8) if device == "cpu-static" else (1, 4)
        options = ({"widths": (1,), "tree": TREE} if kind == "tree" else {"widths": chain}) | options
        source = self.target(self.heads[name][0] if name in self.heads else self.drafts[name])
        return make(source, output, device=device, context=64, chunk=8, **options)

    def __call__(self, name: str, device: str, kind: str, fresh: bool = False, **options: Any) -> Engine:
        """An engine over it, a new one if `fresh`."""
        path = self.path(name, device, kind, **options)
        if fresh:
            return load(path, threads=1)
        if str(path) not in self._engines:
            self._engines[str(path)] = load(path, threads=1)
        return self._engines[str(path)]


def save_chained(folder: Path, head: Head) -> Path:
    return save(folder, head.tensors, plain(rope_theta=head.base, norm_before_residual=head.norm_before_residual or None))


def _logits(law: Array) -> Tensor:
    """The LM head of the F-CHAIN model of this law."""
    with np.errstate(divide="ignore"):
        return torch.from_numpy(np.maximum(np.log(law), LOG_ZERO).T / len(law) ** 0.5)


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


def reference(
    head: Head,
    features: Tensor,
    tokens: list[int],
    steps: int,
    embedding: Tensor,
    lm_head: Tensor,
    path: Sequence[int] | None = None,
) -> Draft:
    """Logits after every row of `features` [P, .] with its following token, and after `steps` more, fed by the head itself.

    `embedding` and `lm_head` are the target's; `path` is fed in the place of what the head would choose.
    """
    t, tokens = head.tensors, list(tokens)
    embedding = t.get("embed_tokens.weight", embedding)
    ids = torch.arange(len(t["d2t"])) + t["d2t"] if "d2t" in t else torch.arange(len(lm_head))
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
        tokens.append(int(ids[logits[-1].argmax()]) if path is None else path[len(tokens) - len(features)])
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
    q, k, v = (linear(x, f"self_attn.{name}").view(rows, -1, HEAD_DIM).transpose(0, 1) for name in "qkv")  # [heads, rows, D]
    angles = torch.outer(torch.arange(rows), head.base ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)) / head.factor
    q, k = _rotate(q, angles), _rotate(k, angles)
    k, v = (part.repeat_interleave(HEADS // len(part), 0) for part in (k, v))
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
