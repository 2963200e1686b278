"""EAGLE heads: one decoder layer over the target's hidden states and the tokens that follow them.

EAGLE-1 and EAGLE-2 (Li et al. 2024, arXiv 2401.15077 and 2406.16858: the same weights) read the target's hidden state after
its final norm, EAGLE-3 (Li et al. 2025, arXiv 2503.01840) several residual streams. docs/head_layouts.md holds the details.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specedge.export.decoder import KV, Attend, Attention, Gate, Linear, RMSNorm, Step, attend, delta_step
from specedge.export.families import DecoderConfig


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """What an EAGLE head computes.

    Row t takes what the target says of position t and the token of t + 1, at position t. `decoder` describes the layer; its
    `hidden` is the draft's, its `vocab_size` the target's (rows of the embedding), `attention_bias` stands for q, k and v.
    """

    generation: int  # 1 or 3
    decoder: DecoderConfig
    target_hidden: int
    taps: tuple[int, ...]  # residual streams entering these blocks, n: after the last; EAGLE-1: (NORMED,)
    draft_vocab_size: int
    fc_bias: bool
    output_bias: bool  # on o_proj
    input_norm: bool  # EAGLE-3, norm_before_fc: one norm over all taps
    tap_norms: bool  # EAGLE-3, fc_norm: a norm per tap
    norm_before_residual: bool  # EAGLE-3: the residual is the normed hidden state
    feeds_back_normed: bool  # EAGLE-3: what feeds lm_head is also fed back, not the layer's output
    own_embedding: bool
    own_head: bool

    @property
    def features(self) -> int:
        """Size of what the target gives per position."""
        return len(self.taps) * self.target_hidden


def eagle_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor of a head, borrowed ones left out."""
    layer, hidden = config.decoder, config.decoder.hidden
    third = config.generation == 3
    inputs = 2 * hidden if third else hidden
    queries, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, config.features if third else hidden + config.target_hidden)}
    shapes |= {"fc.bias": (hidden,)} if config.fc_bias else {}
    shapes |= {"input_norm.weight": (config.features,)} if config.input_norm else {}
    shapes |= {f"fc_norm.{tap}.weight": (config.target_hidden,) for tap in range(len(config.taps)) if config.tap_norms}
    shapes |= {f"layer.{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm") if third}
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        shapes[f"layer.self_attn.{name}_proj.weight"] = (rows, inputs)
        shapes |= {f"layer.self_attn.{name}_proj.bias": (rows,)} if layer.attention_bias else {}
    shapes["layer.self_attn.o_proj.weight"] = (hidden, queries)
    shapes |= {"layer.self_attn.o_proj.bias": (hidden,)} if config.output_bias else {}
    shapes["layer.post_attention_layernorm.weight"] = (hidden,)
    for name in ("gate_proj", "up_proj", "down_proj"):
        size = (hidden, layer.intermediate) if name == "down_proj" else (layer.intermediate, hidden)
        shapes[f"layer.mlp.{name}.weight"] = size
        shapes |= {f"layer.mlp.{name}.bias": size[:1]} if layer.mlp_bias else {}
    shapes |= {"norm.weight": (hidden,)} if third else {}
    shapes |= {"embed_tokens.weight": (layer.vocab_size, hidden)} if config.own_embedding else {}
    return shapes | ({"lm_head.weight": (config.draft_vocab_size, hidden)} if config.own_head else {})


class Eagle(nn.Module):
    """The head without its LM head. Parameters have the canonical names of `eagle_shapes`, `embed_tokens.weight` always."""

    def __init__(self, config: EagleConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        hidden, eps = config.decoder.hidden, config.decoder.rms_eps
        third = config.generation == 3
        self.config = config
        self.embed_tokens = nn.Embedding(config.decoder.vocab_size, hidden, dtype=dtype)
        self.fc = Linear(config.features if third else hidden + config.target_hidden, hidden, config.fc_bias, dtype)
        self.input_norm = RMSNorm(config.features, eps, dtype) if config.input_norm else None
        norms = [RMSNorm(config.target_hidden, eps, dtype) for _ in config.taps if config.tap_norms]
        self.fc_norm = nn.ModuleList(norms)
        self.layer = _Layer(config, dtype)
        self.norm = RMSNorm(hidden, eps, dtype) if third else None

    def fuse(self, features: Tensor) -> Tensor:
        """What the target says [1, T, features] as the head's own hidden state [1, T, H]; EAGLE-1 takes it as it is."""
        if self.config.generation == 1:
            return features
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm:
            taps = features.split(self.config.target_hidden, -1)
            features = torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)], -1)
        fused: Tensor = self.fc(features)
        return fused

    def forward(
        self,
        input_ids: Tensor,  # int32 [1, T]: the tokens after the positions fed
        hidden: Tensor,  # [1, T, H]: `fuse`d, or what the row's parent fed back
        rope_cos: Tensor,  # [1, 1, T, D / 2]
        rope_sin: Tensor,
        attention_bias: Tensor,  # [1, 1, T, P + T]
        past: KV,  # [1, K, P, D] each
        attend: Attend = attend,
    ) -> tuple[Tensor, Tensor, KV]:
        """(what feeds the LM head, what is fed back, the new columns)."""
        step = delta_step(Step(rope_cos, rope_sin, attention_bias, attend=attend), self.config.decoder)
        embedded = self.embed_tokens(input_ids)
        if self.config.generation == 1:
            out, columns = self.layer(self.fc(torch.cat((embedded, hidden), -1)), None, step, past)
            return out, out, columns
        assert self.norm is not None
        out, columns = self.layer(hidden, embedded, step, past)
        normed = self.norm(out)
        return normed, normed if self.config.feeds_back_normed else out, columns


class _Layer(nn.Module):
    """A decoder layer: EAGLE-1's has no norm before attention, EAGLE-3's attends over embedding and hidden state together."""

    def __init__(self, config: EagleConfig, dtype: torch.dtype) -> None:
        super().__init__()
        layer = config.decoder
        third = config.generation == 3
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(layer.hidden, layer.rms_eps, dtype) if third else None
        self.hidden_norm = RMSNorm(layer.hidden, layer.rms_eps, dtype) if third else None
        inputs = 2 * layer.hidden if third else layer.hidden
        self.self_attn = Attention(layer, "delta", dtype, inputs, config.output_bias)
        self.post_attention_layernorm = RMSNorm(layer.hidden, layer.rms_eps, dtype)
        self.mlp = Gate(layer, dtype)

    def forward(self, hidden: Tensor, embedded: Tensor | None, step: Step, past: KV) -> tuple[Tensor, KV]:
        x = residual = hidden
        if self.hidden_norm is not None and self.input_layernorm is not None:
            normed = self.hidden_norm(hidden)
            x = torch.cat((self.input_layernorm(embedded), normed), -1)
            residual = normed if self.norm_before_residual else hidden
        mixed, columns = self.self_attn(x, step, past)
        residual = residual + mixed
        return residual + self.mlp(self.post_attention_layernorm(residual)), columns
