"""The decoder, authored once in torch: every graph this project writes is a trace of it.

T is the width of a step, L the tokens in the cache, C the context, N heads, K KV heads, G = N / K, D the head dimension,
H hidden, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

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

NORMED = -1
"""The tap after the final norm: what feeds lm_head. Other taps k are the residual stream entering block k, n after the last."""


def feature_name(taps: tuple[int, ...]) -> str:
    """The step graph's output that holds `taps`."""
    return "hidden" if taps == (NORMED,) else "features"


def padded_head_dim(config: DecoderConfig, form: Form) -> int:
    """Columns of a cached head: GroupQueryAttention on the CPU takes multiples of 8, the rest is zeros."""
    return -(-config.head_dim // 8) * 8 if form == "in-place" else config.head_dim


class Linear(nn.Module):
    """y = x W^T + b with the checkpoint's own [out, in] layout; lowering turns it into the device's matrix product."""

    compute: torch.dtype | None = None
    """What it multiplies in, where that is another type than x's: training's bfloat16."""

    def __init__(self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        product = self.product(x)
        return product if self.bias is None else product + self.bias

    def product(self, x: Tensor) -> Tensor:
        """x W^T."""
        if self.compute is None:
            return F.linear(x, self.weight)
        return F.linear(x.to(self.compute), self.weight.to(self.compute)).to(x.dtype)


def joined(x: Tensor, *layers: Linear) -> Tensor:
    """What several layers make of the same input, side by side: one matrix product where lowering finds their weights so."""
    product = torch.cat([layer.product(x) for layer in layers], -1)
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    return product + torch.cat(biases) if biases else product


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

    def __init__(
        self,
        config: DecoderConfig,
        form: Form,
        dtype: torch.dtype,
        inputs: int | None = None,  # another size than hidden
        output_bias: bool | None = None,  # another answer than attention_bias
    ) -> None:
        super().__init__()
        self.config, self.form = config, form
        query, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        inputs = config.hidden if inputs is None else inputs
        output_bias = config.attention_bias if output_bias is None else output_bias
        self.q_proj = Linear(inputs, query, config.attention_bias, dtype)
        self.k_proj = Linear(inputs, kv, config.attention_bias, dtype)
        self.v_proj = Linear(inputs, kv, config.attention_bias, dtype)
        self.o_proj = Linear(query, config.hidden, output_bias, dtype)

    def forward(self, x: Tensor, step: "Step", past: KV) -> tuple[Tensor, KV]:
        mixed, kv = self.mix(x, step, past)
        projected: Tensor = self.o_proj(mixed)
        return projected, kv

    def mix(self, x: Tensor, step: "Step", past: KV) -> tuple[Tensor, KV]:
        """What o_proj reads."""
        attend = self._attend_in_place if self.form == "in-place" else self._attend_delta
        return attend(joined(x, self.q_proj, self.k_proj, self.v_proj), step, past)

    def _attend_in_place(self, packed: Tensor, step: "Step", past: KV) -> tuple[Tensor, KV]:
        # packed [1, T, (N + 2 K) D]; past [1, K, C + 1, D] are the same buffers as present
        config, rows = self.config, packed.shape[1]
        head_dim = padded_head_dim(config, self.form)
        if not _rotates(config):
            packed = self._rotated(packed, step, head_dim)
        assert step.spare is not None
        packed = torch.cat((packed, step.spare), 1)
        tables = (step.cos, step.sin, step.positions) if _rotates(config) else (None, None, None)
        attributes = {
            "num_heads": config.heads,
            "kv_num_heads": config.kv_heads,
            "scale": config.head_dim**-0.5,
            "do_rotary": int(_rotates(config)),
        }
        mixed, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::GroupQueryAttention",
            [packed, None, None, *past, *step.lengths, *tables, step.bias],
            attributes,
            dtypes=[packed.dtype] * 3,
            shapes=[(1, rows + IN_PLACE_SPARE, config.heads * head_dim), past[0].shape, past[1].shape],
            version=1,
        )
        mixed = mixed[:, :rows]
        if head_dim != config.head_dim:
            mixed = mixed.view(1, rows, config.heads, head_dim)[..., : config.head_dim]
            mixed = mixed.reshape(1, rows, config.heads * config.head_dim)
        return mixed, (present_key, present_value)

    def _rotated(self, packed: Tensor, step: "Step", head_dim: int) -> Tensor:
        """Queries and keys rotated, heads filled up with zeros to `head_dim`: where GroupQueryAttention cannot rotate."""
        config, rows = self.config, packed.shape[1]
        heads = packed.view(1, rows, config.heads + 2 * config.kv_heads, config.head_dim)
        cos, sin = step.cos.transpose(1, 2), step.sin.transpose(1, 2)  # [1, T, 1, D / 2]
        turned, still = heads[:, :, : -config.kv_heads], heads[:, :, -config.kv_heads :]
        heads = F.pad(torch.cat((rotate(turned, cos, sin), still), 2), (0, head_dim - config.head_dim))
        return heads.reshape(1, rows, (config.heads + 2 * config.kv_heads) * head_dim)

    def _attend_delta(self, packed: Tensor, step: "Step", past: KV) -> tuple[Tensor, KV]:
        # packed [B, T, (N + 2 K) D]; past [B, K, C, D]; step.bias [B or 1, 1, G T, C + T]; graphs have a batch B of 1
        config, (batch, rows) = self.config, packed.shape[:2]
        heads = packed.view(batch, rows, config.heads + 2 * config.kv_heads, config.head_dim).transpose(1, 2)
        query, key, value = heads.split((config.heads, config.kv_heads, config.kv_heads), 1)  # [B, count, T, D]
        query = rotate(query, step.cos, step.sin) * config.head_dim**-0.5
        key = rotate(key, step.cos, step.sin)
        grouped = query.reshape(batch, config.kv_heads, -1, config.head_dim)  # [B, K, G T, D]
        mixed = step.attend(grouped, past, (key, value), step.bias)
        mixed = mixed.reshape(batch, config.heads, rows, config.head_dim).transpose(1, 2)
        return mixed.reshape(batch, rows, config.heads * config.head_dim), (key, value)


class Gate(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden, config.intermediate, config.mlp_bias, dtype)
        self.up_proj = Linear(config.hidden, config.intermediate, config.mlp_bias, dtype)
        self.down_proj = Linear(config.intermediate, config.hidden, config.mlp_bias, dtype)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down_proj(self.gate(x))
        return projected

    def gate(self, x: Tensor) -> Tensor:
        """What down_proj reads."""
        gated: Tensor = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return gated


class Block(nn.Module):
    """Attention and gated MLP, each behind its norm, each added to the residual stream."""

    def __init__(self, config: DecoderConfig, form: Form, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.rms_eps, dtype)
        self.self_attn = Attention(config, form, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.rms_eps, dtype)
        self.mlp = Gate(config, dtype)

    def forward(self, x: Tensor, step: "Step", past: KV) -> tuple[Tensor, KV]:
        mixed, kv = self.self_attn(self.input_layernorm(x), step, past)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), kv


class Turn(nn.Module):
    """The rotation R = diag(signs) (left x right) of a residual stream, and its inverse (`quant/rotate.py`)."""

    def __init__(self, left: int, right: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.signs = nn.Parameter(torch.empty(left * right, dtype=dtype))
        self.left = nn.Parameter(torch.empty(left, left, dtype=dtype))
        self.right = nn.Parameter(torch.empty(right, right, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.left.T @ self._grid(x * self.signs) @ self.right).reshape(x.shape)

    def back(self, x: Tensor) -> Tensor:
        return (self.left @ self._grid(x) @ self.right.T).reshape(x.shape) * self.signs

    def _grid(self, x: Tensor) -> Tensor:
        return x.reshape(1, -1, len(self.left), len(self.right))


class Decoder(nn.Module):
    """A step: token ids in, logits and the new (or present) KV columns out (docs/contract.md).

    Parameter names are the canonical tensor names of `families.tensor_names`. With `taps` there is one more output, what the
    taps hold side by side [1, T, taps H]: a draft head reads it. In the delta form what feeds lm_head comes out instead of
    logits: graphs are composed of such steps (`compose`).
    """

    def __init__(
        self, config: DecoderConfig, form: Form, dtype: torch.dtype = torch.float32, taps: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.config, self.form, self.taps = config, form, taps
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden, dtype=dtype)
        self.layers = nn.ModuleList(Block(config, form, dtype) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.rms_eps, dtype)
        if config.rotation is not None:
            self.rotation = Turn(*config.rotation, dtype)
        if form == "in-place":
            self.lm_head = Linear(config.hidden, config.head_rows, False, dtype)
            if config.tied:
                self.lm_head.weight = self.embed_tokens.weight  # type: ignore[assignment]  # torch calls it a Tensor

    def forward(
        self,
        input_ids: Tensor,  # int32 [1, T]
        rope_cos: Tensor,  # [1, 1, T, D / 2]
        rope_sin: Tensor,
        attention_bias: Tensor,  # [1, 1, T, P + T] in the delta form, [1, 1, T, L + T] in place
        past: list[KV],
        lengths: tuple[Tensor, ...] = (),  # in place: seqlens_k = L + T - 1, total_sequence_length = L + T, logits_rows [R]
    ) -> tuple[Tensor, list[KV]] | tuple[Tensor, Tensor, list[KV]]:
        step = Step(rope_cos, rope_sin, attention_bias)
        step = _in_place(step, self.config, lengths[:2]) if self.form == "in-place" else delta_step(step, self.config)
        x = self.embed_tokens(input_ids)
        if self.config.rotation is not None:
            x = self.rotation(x)
        columns, streams = [], [x]
        for block, kv in zip(self.layers, past, strict=True):
            x, new = block(x, step, kv)
            columns.append(new)
            streams.append(x)
        back = self.rotation.back if self.config.rotation is not None else lambda stream: stream
        hidden = out = self.norm(back(x))
        if self.form == "in-place":
            out = self.lm_head(hidden.index_select(1, lengths[2]))
        if not self.taps:
            return out, columns
        return out, torch.cat([hidden if tap == NORMED else back(streams[tap]) for tap in self.taps], -1), columns


Attend = Callable[[Tensor, KV, KV, Tensor], Tensor]
"""Queries [B, K, G T, D], the past's columns, the rows' own, the bias -> the values they see, mixed [B, K, G T, D]."""


def attend(query: Tensor, past: KV, new: KV, bias: Tensor) -> Tensor:
    """To the past's columns and the new ones behind them."""
    keys, values = torch.cat((past[0], new[0]), 2), torch.cat((past[1], new[1]), 2)
    return torch.softmax(query @ keys.transpose(2, 3) + bias, -1) @ values


@dataclass(frozen=True, slots=True)
class Step:
    """What every layer of a step shares, in the shapes its form wants."""

    cos: Tensor  # [1, 1, T, D / 2]; in place, where GroupQueryAttention rotates, [L + 2 T + 1, D / 2]
    sin: Tensor
    bias: Tensor  # delta [1, 1, G T, C + T]; in place [1, 1, T + 1, L + T + 1]
    lengths: tuple[Tensor, ...] = ()  # in place: seqlens_k and total_sequence_length, the spare row counted
    positions: Tensor | None = None  # [1, T + 1], rows of cos and sin
    spare: Tensor | None = None  # zeros [1, 1, (N + 2 K) D]
    attend: Attend = attend


def delta_step(step: Step, config: DecoderConfig) -> Step:
    """The bias of a KV head's rows: its G query heads in turn."""
    return replace(step, bias=step.bias.repeat(1, 1, config.heads // config.kv_heads, 1))


def _in_place(step: Step, config: DecoderConfig, lengths: tuple[Tensor, ...]) -> Step:
    """Room for the spare row, and rotary tables [L + 2 T + 1, D / 2] as GroupQueryAttention wants them: one row per slot.

    It takes the rows `positions` names, which are the T of this step and one of zeros.
    """
    bias = F.pad(step.bias, (0, IN_PLACE_SPARE, 0, IN_PLACE_SPARE))
    lengths = tuple(length + IN_PLACE_SPARE for length in lengths)
    columns = (config.heads + 2 * config.kv_heads) * padded_head_dim(config, "in-place")
    spare = torch.zeros(1, IN_PLACE_SPARE, columns, dtype=step.bias.dtype)
    step = replace(step, bias=bias, lengths=lengths, spare=spare)
    if not _rotates(config):
        return step
    rows, slots = bias.shape[2], bias.shape[3]
    cos, sin = (F.pad(table[0, 0], (0, 0, 0, slots)) for table in (step.cos, step.sin))
    return replace(step, cos=cos, sin=sin, positions=torch.arange(rows, dtype=torch.int64)[None])


def _rotates(config: DecoderConfig) -> bool:
    """Whether GroupQueryAttention on the CPU can rotate heads of this size."""
    return config.head_dim % 16 == 0


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding over two halves (Su et al. 2021, in the half-split layout of the Hugging Face checkpoints)."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
