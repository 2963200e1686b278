"""The decoder, authored once in torch: every graph this project writes is a trace of it.

T is the width of a step, L the tokens in the cache, C the context, N heads, K KV heads, G = N / K, D the head dimension,
H hidden, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specedge.devices.device import Form
from specedge.export.families import DecoderConfig

KV = tuple[Tensor, Tensor]

# GroupQueryAttention sums a single row in another order than several, and int8 activations (accuracy_level 4) turn that last
# bit into logits that differ by 1. So its step always has one row of zeros more, behind the text and seen by nobody: every
# width then gives the same bits. The KV buffers have a column to spare for it.
IN_PLACE_SPARE = 1


def padded_head_dim(config: DecoderConfig, form: Form) -> int:
    """Columns of a cached head: GroupQueryAttention on the CPU takes multiples of 8, the rest is zeros."""
    return -(-config.head_dim // 8) * 8 if form == "in-place" else config.head_dim


class Linear(nn.Module):
    """y = x W^T + b with the checkpoint's own [out, in] layout; lowering turns it into the device's matrix product."""

    def __init__(self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.weight.shape[0],), self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention over the cache and the new columns, in one of the two forms of the step graph."""

    def __init__(self, config: DecoderConfig, form: Form, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.form = config, form
        query, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden, query, config.attention_bias, dtype)
        self.k_proj = Linear(config.hidden, kv, config.attention_bias, dtype)
        self.v_proj = Linear(config.hidden, kv, config.attention_bias, dtype)
        self.o_proj = Linear(query, config.hidden, config.attention_bias, dtype)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor, past: KV, lengths: tuple[Tensor, ...]
    ) -> tuple[Tensor, KV]:
        attend = self._attend_in_place if self.form == "in-place" else self._attend_delta
        mixed, kv = attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), cos, sin, bias, past, lengths)
        projected: Tensor = self.o_proj(mixed)
        return projected, kv

    def _attend_in_place(
        self,
        query: Tensor,  # [1, T, N D]
        key: Tensor,  # [1, T, K D]
        value: Tensor,
        cos: Tensor,  # [1, 1, T, D / 2]
        sin: Tensor,
        bias: Tensor,  # [1, 1, T, L + T]
        past: KV,  # [1, K, C, D], the same buffers as present
        lengths: tuple[Tensor, ...],  # seqlens_k = L + T - 1, total_sequence_length = L + T
    ) -> tuple[Tensor, KV]:
        config, rows = self.config, query.shape[1]
        cos, sin = cos.transpose(1, 2), sin.transpose(1, 2)  # [1, T, 1, D / 2]
        padding = padded_head_dim(config, self.form) - config.head_dim

        def split(x: Tensor, count: int) -> Tensor:
            return x.view(1, rows, count, x.shape[-1] // count)

        def join(x: Tensor) -> Tensor:
            padded = F.pad(x, (0, padding)) if padding else x
            return F.pad(padded.reshape(1, rows, padded.shape[2] * padded.shape[3]), (0, 0, 0, IN_PLACE_SPARE))

        query = join(rotate(split(query, config.heads), cos, sin))
        key = join(rotate(split(key, config.kv_heads), cos, sin))
        value = join(split(value, config.kv_heads))
        inputs = [query, key, value, *past, *lengths, None, None, None, bias]
        attributes = {"num_heads": config.heads, "kv_num_heads": config.kv_heads, "scale": config.head_dim**-0.5}
        mixed, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::GroupQueryAttention",
            inputs,
            attributes,
            dtypes=[query.dtype] * 3,
            shapes=[query.shape, past[0].shape, past[1].shape],
            version=1,
        )
        mixed = mixed[:, :rows]
        if padding:
            mixed = split(mixed, config.heads)[..., : config.head_dim].reshape(1, rows, config.heads * config.head_dim)
        return mixed, (present_key, present_value)

    def _attend_delta(
        self,
        query: Tensor,  # [1, T, N D]
        key: Tensor,  # [1, T, K D]
        value: Tensor,
        cos: Tensor,  # [1, 1, T, D / 2]
        sin: Tensor,
        bias: Tensor,  # [1, 1, G T, C + T]
        past: KV,  # [1, K, C, D]
        lengths: tuple[Tensor, ...],  # ()
    ) -> tuple[Tensor, KV]:
        config, rows = self.config, query.shape[1]

        def heads(x: Tensor, count: int) -> Tensor:
            return x.view(1, rows, count, config.head_dim).transpose(1, 2)  # [1, count, T, D]

        query = rotate(heads(query, config.heads), cos, sin) * config.head_dim**-0.5
        key, value = rotate(heads(key, config.kv_heads), cos, sin), heads(value, config.kv_heads)
        grouped = query.reshape(1, config.kv_heads, -1, config.head_dim)  # [1, K, G T, D]
        keys, values = torch.cat((past[0], key), 2), torch.cat((past[1], value), 2)
        weights = torch.softmax(grouped @ keys.transpose(2, 3) + bias, -1)
        mixed = (weights @ values).reshape(1, config.heads, rows, config.head_dim).transpose(1, 2)
        return mixed.reshape(1, rows, config.heads * config.head_dim), (key, value)


class Gate(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden, config.intermediate, config.mlp_bias, dtype)
        self.up_proj = Linear(config.hidden, config.intermediate, config.mlp_bias, dtype)
        self.down_proj = Linear(config.intermediate, config.hidden, config.mlp_bias, dtype)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


class Block(nn.Module):
    """Attention and gated MLP, each behind its norm, each added to the residual stream."""

    def __init__(self, config: DecoderConfig, form: Form, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.rms_eps, dtype)
        self.self_attn = Attention(config, form, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.rms_eps, dtype)
        self.mlp = Gate(config, dtype)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor, past: KV, lengths: tuple[Tensor, ...]
    ) -> tuple[Tensor, KV]:
        mixed, kv = self.self_attn(self.input_layernorm(x), cos, sin, bias, past, lengths)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), kv


class Decoder(nn.Module):
    """A step: token ids in, logits of every row and the new (or present) KV columns out (design.md §4.1).

    Parameter names are the canonical tensor names of `families.tensor_names`.
    """

    def __init__(self, config: DecoderConfig, form: Form, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.form = form
        self.groups = config.heads // config.kv_heads
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden, dtype=dtype)
        self.layers = nn.ModuleList(Block(config, form, dtype) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.rms_eps, dtype)
        self.lm_head = Linear(config.hidden, config.vocab_size, False, dtype)
        if config.tied:
            self.lm_head.weight = self.embed_tokens.weight  # type: ignore[assignment]  # torch calls it a Tensor

    def forward(
        self,
        input_ids: Tensor,  # int32 [1, T]
        rope_cos: Tensor,  # [1, 1, T, D / 2]
        rope_sin: Tensor,
        attention_bias: Tensor,  # [1, 1, T, C + T] in the delta form, [1, 1, T, L + T] in place
        past: list[KV],
        lengths: tuple[Tensor, ...] = (),
    ) -> tuple[Tensor, list[KV]]:
        if self.form == "in-place":
            attention_bias = F.pad(attention_bias, (0, IN_PLACE_SPARE, 0, IN_PLACE_SPARE))
            lengths = tuple(length + IN_PLACE_SPARE for length in lengths)
        else:
            attention_bias = attention_bias.repeat(1, 1, self.groups, 1)  # rows of a KV head: its G query heads in turn
        x = self.embed_tokens(input_ids)
        columns = []
        for block, kv in zip(self.layers, past, strict=True):
            x, new = block(x, rope_cos, rope_sin, attention_bias, kv, lengths)
            columns.append(new)
        return self.lm_head(self.norm(x)), columns


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding over two halves (Su et al. 2021, in the half-split layout of the Hugging Face checkpoints)."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
