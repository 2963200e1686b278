"""What is trained: EAGLE heads, Medusa heads and draft models, as modules that read a batch of lessons."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specedge.export.decoder import KV, NORMED, Attend, Block, Linear, RMSNorm, Step, attend, delta_step
from specedge.export.distil import Teacher, distil
from specedge.export.eagle import Eagle, EagleConfig
from specedge.export.families import DecoderConfig
from specedge.export.lessons import Batch
from specedge.export.medusa import Medusa, MedusaConfig

_MASKED = -30000.0
_LATER = 0.8  # the weight of a drafted token beside that of the one before it


@dataclass(frozen=True, slots=True)
class Drafted:
    """Rows that draft one place: `x` [n, H] feeds the LM head, `places` are text and position of the tokens drafted."""

    x: Tensor
    places: tuple[Tensor, Tensor]


class Student(Protocol):
    """A drafter in training; its parameters have the names they are published by."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def taps(self) -> tuple[int, ...]:
        """The target's streams that it reads or learns from."""
        ...

    def draft(self, batch: Batch) -> list[Drafted]:
        """What is drafted 1, 2 ... places ahead of every position whose target's distribution is known, teacher-forced."""
        ...

    def head(self) -> Tensor:
        """The LM head [Vd, H]."""
        ...


def loss_of(student: Student, batch: Batch, teacher: Teacher, quick: torch.dtype) -> Tensor:
    """Weighted mean over the places ahead."""
    laws = teacher.laws(batch.streams[NORMED][batch.answers])
    order = batch.answers.flatten().cumsum(0).reshape(batch.answers.shape) - 1  # of the laws
    drafts, losses = student.draft(batch), []
    for drafted in drafts:
        text, place = drafted.places
        losses.append(distil(drafted.x, student.head(), laws, order[text, place - 1], quick))
    weights = [_LATER**ahead for ahead in range(len(drafts))]
    return sum((weight * loss for weight, loss in zip(weights, losses, strict=True)), torch.zeros(())) / sum(weights)


class EagleStudent:
    """An EAGLE-3 head, unrolled as it will draft (training-time test; Li et al. 2025, arXiv 2503.01840, section 3.2).

    Pass k reads at every position what pass k - 1 gave at the position before, and attends to true features up to k positions
    back, to the passes' own columns from there on.
    """

    def __init__(self, config: EagleConfig, embedding: Tensor, gamma: int, quick: torch.dtype) -> None:
        self.module = Eagle(config)
        self.module.embed_tokens.weight = nn.Parameter(embedding, requires_grad=False)
        self._lm_head = Linear(config.decoder.hidden, config.draft_vocab_size, False, torch.float32)
        self.module.lm_head = self._lm_head
        self.config, self.taps, self._gamma = config, (*config.taps, NORMED), gamma
        _quicken(self.module, quick)

    def head(self) -> Tensor:
        return self._lm_head.weight

    def draft(self, batch: Batch) -> list[Drafted]:
        eagle, layer = self.module, self.config.decoder
        count, rows = batch.ids.shape[0], batch.ids.shape[1] - 1
        known = batch.answers[:, 1:]  # row t drafts the token of t + 2, from what the target says at t + 1
        start = max(int(known.any(0).int().argmax()) - self._gamma, 0)  # nothing is drafted before, in later passes
        cos, sin = _rope(layer, rows, batch.ids.device)
        hidden = eagle.fuse(torch.cat([batch.streams[tap][:, :-1] for tap in self.config.taps], -1))
        nothing = hidden.new_zeros(count, layer.kv_heads, 0, layer.head_dim)
        passes: list[KV] = []
        drafts = []
        for ahead in range(self._gamma):
            first = start if ahead else 0
            bias = _visible(rows, ahead, hidden.device)[:, :, first:]
            how = _unrolled(passes) if passes else attend
            ids, tables = batch.ids[:, first + 1 :], (cos[:, :, first:], sin[:, :, first:])
            x, fed_back, new = eagle(ids, hidden, *tables, bias, (nothing, nothing), how)
            passes.append(new)
            behind = fed_back if ahead else fed_back[:, start:]
            hidden = torch.cat((torch.zeros_like(behind[:, :1]), behind[:, :-1]), 1)
            text, row = known[:, max(first, ahead) :].nonzero(as_tuple=True)
            row = row + max(first, ahead)
            drafts.append(Drafted(x[text, row - first], (text, row + 2)))
        return drafts


class MedusaStudent:
    """Medusa heads, each for one place ahead, over an LM head that all share."""

    def __init__(self, config: MedusaConfig, lm_head: Tensor, quick: torch.dtype) -> None:
        self.module = Medusa(replace(config, own_head=False, vocab_size=len(lm_head)))
        assert self.module.lm_head is not None
        self.module.lm_head.weight = nn.Parameter(lm_head, requires_grad=False)
        self.config, self.taps = config, (NORMED,)
        _quicken(self.module, quick)

    def head(self) -> Tensor:
        assert self.module.lm_head is not None
        return self.module.lm_head.weight

    def draft(self, batch: Batch) -> list[Drafted]:
        hidden, drafts = batch.streams[NORMED], []
        for ahead, head in enumerate(self.module.heads, 1):
            places = batch.answers[:, ahead:].nonzero(as_tuple=True)
            drafts.append(Drafted(head(hidden[places]), (places[0], places[1] + ahead + 1)))
        return drafts


class DraftStudent:
    """A shallow copy of the target: embedding and some of its layers, with a final norm and an LM head of fewer ids."""

    def __init__(self, config: DecoderConfig, embedding: Tensor, quick: torch.dtype) -> None:
        self.config, self.taps, self._embedding = config, (NORMED,), embedding
        self.module = Shallow(config)
        _quicken(self.module, quick)

    def head(self) -> Tensor:
        return self.module.lm_head.weight

    def draft(self, batch: Batch) -> list[Drafted]:
        config, rows = self.config, batch.ids.shape[1]
        cos, sin = _rope(config, rows, batch.ids.device)
        x = self._embedding[batch.ids]
        nothing = x.new_zeros(len(x), config.kv_heads, 0, config.head_dim)
        step = delta_step(Step(cos, sin, _visible(rows, 0, x.device)), config)
        for block in self.module.layers:
            x, _ = block(x, step, (nothing, nothing))
        places = batch.answers.nonzero(as_tuple=True)
        return [Drafted(self.module.norm(x[places]), (places[0], places[1] + 1))]


class Shallow(nn.Module):
    """The parameters of a draft model that borrows its embedding, by their canonical names."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(config, "delta", torch.float32) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.rms_eps, torch.float32)
        self.lm_head = Linear(config.hidden, config.head_rows, False, torch.float32)


def _quicken(module: nn.Module, dtype: torch.dtype) -> None:
    for layer in module.modules():
        if isinstance(layer, Linear) and dtype != torch.float32:
            layer.compute = dtype


def _rope(config: DecoderConfig, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(rows, device=device), torch.tensor(config.inv_freq, device=device))
    return angles.cos()[None, None] * config.rope_scaling, angles.sin()[None, None] * config.rope_scaling


def _visible(rows: int, back: int, device: torch.device) -> Tensor:
    """The bias [1, 1, T, T] of rows that see columns at least `back` positions behind them."""
    places = torch.arange(rows, device=device)
    return torch.where(places[:, None] - places >= back, 0.0, _MASKED)[None, None]


def _unrolled(passes: list[KV]) -> Attend:
    """Attention of a pass behind these: of the first one, columns as the bias says, of each since and its own, one a row.

    Row t of pass k sees column t - k + j of pass j: what it would have drafted on its way to t.
    """

    def attend(query: Tensor, past: KV, new: KV, bias: Tensor) -> Tensor:
        keys, values = passes[0]
        batch, heads, columns, size = keys.shape
        rows = new[0].shape[2]
        grouped = query.reshape(batch, heads, -1, rows, size)  # [B, K, G, T, D]
        since = [*passes[1:], new]
        shifted = [
            tuple(F.pad(part, (0, 0, shift, 0))[:, :, None, :rows] for part in column)
            for shift, column in zip(reversed(range(len(since))), since, strict=True)
        ]
        own = [(grouped * key).sum(-1).reshape(batch, heads, -1, 1) for key, _ in shifted]
        weights = torch.softmax(torch.cat((query @ keys.transpose(2, 3) + bias, *own), -1), -1)
        mixed = (weights[..., :columns] @ values).reshape(grouped.shape)
        for (_, value), weight in zip(shifted, weights[..., columns:].unbind(-1), strict=True):
            mixed = mixed + weight.reshape(grouped.shape[:-1])[..., None] * value
        return mixed.reshape(query.shape)

    return attend
