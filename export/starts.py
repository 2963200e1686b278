"""Where each kind of training starts, and under which names its result is published."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from specedge.errors import UsageError
from specedge.export.checkpoint import Checkpoint
from specedge.export.decoder import NORMED
from specedge.export.draft_checkpoint import BORROWS, DraftCheckpoint, open_draft
from specedge.export.eagle import EagleConfig
from specedge.export.eagle_checkpoint import EagleCheckpoint, open_eagle
from specedge.export.eagle_taps import default_taps
from specedge.export.families import DecoderConfig
from specedge.export.medusa import MedusaCheckpoint, MedusaConfig, open_medusa
from specedge.export.students import DraftStudent, EagleStudent, MedusaStudent, Student
from specedge.export.tensors import Tensors
from specedge.manifest import EMBEDDING

Ids = npt.NDArray[np.int32]
_SPREAD = 0.02  # standard deviation of weights that start at random
_DRAFT_LAYERS, _MEDUSA_LAYERS = 4, 1


@dataclass(frozen=True, slots=True)
class Published:
    """A drafter by the names its kind is published by."""

    tensors: dict[str, npt.NDArray[np.float32]]
    settings: dict[str, Any]
    file: str


class Start(Protocol):
    """A kind of drafter for one target: new, or one that goes on from an earlier training."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's streams that it learns from."""
        ...

    def vocabulary(self, frequent: Ids) -> Ids:
        """The ids it drafts, ascending: the most frequent ones, or those it knows already."""
        ...

    def student(self, target: Tensors, embedding: Tensor, head: Tensor, quick: torch.dtype) -> Student:
        """In float32; `head` [Vd, H] are the target's rows of its ids."""
        ...

    def publish(self, student: Student) -> Published: ...


class EagleStart:
    """An EAGLE-3 head in SafeAILab's layout, of the target's own sizes."""

    def __init__(self, checkpoint: Checkpoint, layers: int | None, gamma: int, start: str | None) -> None:
        target, self._gamma = checkpoint.config, gamma
        self._opened = open_eagle(start, target) if start else None
        if self._opened is not None and not _is_ours(self._opened):
            raise UsageError(f"start {start}: training goes on from EAGLE-3 heads with an LM head of their own and no extras")
        self._theta = _theta(self._opened.config.decoder if self._opened else target)
        self._config = self._opened.config if self._opened else _new_eagle(target, self._theta)
        if _frequencies(self._config.decoder, self._theta) != self._config.decoder.inv_freq:
            raise UsageError(f"start {start}: a head whose rotary frequencies are scaled; training goes on from plain ones")
        self.taps = (*self._config.taps, NORMED)

    def vocabulary(self, frequent: Ids) -> Ids:
        return _ids(self._opened, frequent, self._config.decoder.vocab_size)

    def student(self, target: Tensors, embedding: Tensor, head: Tensor, quick: torch.dtype) -> Student:
        student = EagleStudent(replace(self._config, draft_vocab_size=len(head)), embedding, self._gamma, quick)
        _begin(student.module, self._opened, {"lm_head.weight": head})
        return student

    def publish(self, student: Student) -> Published:
        layer = self._config.decoder
        tensors = {name.replace("layer.", "midlayer.", 1): value for name, value in _learnt(student).items()}
        settings = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "hidden_act": "silu",
            "hidden_size": layer.hidden,
            "intermediate_size": layer.intermediate,
            "num_attention_heads": layer.heads,
            "num_key_value_heads": layer.kv_heads,
            "num_hidden_layers": 1,
            "head_dim": layer.head_dim,
            "vocab_size": layer.vocab_size,
            "draft_vocab_size": len(tensors["lm_head.weight"]),
            "rms_norm_eps": layer.rms_eps,
            "rope_theta": self._theta,
            "eagle_aux_hidden_state_layer_ids": list(self._config.taps),
        }
        return Published(tensors, settings, "model.safetensors")


class MedusaStart:
    """Medusa heads over the target's LM head, one for each of `gamma` places."""

    def __init__(self, checkpoint: Checkpoint, layers: int | None, gamma: int, start: str | None) -> None:
        target = checkpoint.config
        self._opened = open_medusa(start, target.hidden, target.vocab_size) if start else None
        self._config = MedusaConfig(gamma, layers or _MEDUSA_LAYERS, target.hidden, target.vocab_size, True, False)
        if self._opened is not None:
            self._config = self._opened.config
            if self._config.own_head:
                raise UsageError(f"start {start}: training goes on from heads that share an LM head, these have their own")
            if self._config.heads != gamma:
                raise UsageError(f"gamma {gamma}: {start} holds {self._config.heads} heads; give that many")
        self._vocab_size, self.taps = target.vocab_size, (NORMED,)

    def vocabulary(self, frequent: Ids) -> Ids:
        return _ids(self._opened, frequent, self._vocab_size)

    def student(self, target: Tensors, embedding: Tensor, head: Tensor, quick: torch.dtype) -> Student:
        student = MedusaStudent(self._config, head, quick)
        _begin(student.module, self._opened, {})
        return student

    def publish(self, student: Student) -> Published:
        tensors = {}
        for name, value in _learnt(student).items():
            _, head, _, layer, part = name.split(".")
            tensors[f"{head}.{layer}.linear.{part}"] = value
        settings = {"medusa_num_heads": self._config.heads, "medusa_num_layers": self._config.layers}
        return Published(tensors, settings, "medusa_lm_head.safetensors")


class DraftStart:
    """Some of the target's layers, from the first to the last at even distances, over its embedding."""

    def __init__(self, checkpoint: Checkpoint, layers: int | None, gamma: int, start: str | None) -> None:
        target, count = checkpoint.config, layers or _DRAFT_LAYERS
        opened = open_draft(start, checkpoint) if start else None
        if opened is not None and not isinstance(opened, DraftCheckpoint):
            raise UsageError(f"start {start}: training goes on from drafts that it made, which lack the embedding")
        if opened is None and count > target.layers:
            raise UsageError(f"layers {count}: the target has {target.layers}")
        self._opened, self.taps = opened, (NORMED,)
        self._chosen = np.linspace(0, target.layers - 1, count).round().astype(int).tolist()
        self._config = opened.config if opened else replace(target, layers=count, tied=False)

    def vocabulary(self, frequent: Ids) -> Ids:
        return _ids(self._opened, frequent, self._config.vocab_size)

    def student(self, target: Tensors, embedding: Tensor, head: Tensor, quick: torch.dtype) -> Student:
        student = DraftStudent(replace(self._config, drafted=len(head)), embedding, quick)
        given = {"norm.weight": torch.from_numpy(target.tensor("norm.weight")), "lm_head.weight": head}
        for name, _ in student.module.named_parameters():
            if self._opened is None and name.startswith("layers."):
                _, layer, rest = name.split(".", 2)
                given[name] = torch.from_numpy(target.tensor(f"layers.{self._chosen[int(layer)]}.{rest}"))
        _begin(student.module, self._opened, given)
        return student

    def publish(self, student: Student) -> Published:
        tensors = {name if name == "lm_head.weight" else f"model.{name}": value for name, value in _learnt(student).items()}
        settings = {BORROWS: [EMBEDDING], "num_hidden_layers": self._config.layers}
        return Published(tensors, settings, "model.safetensors")


KINDS: Mapping[str, Callable[[Checkpoint, int | None, int, str | None], Start]] = {
    "medusa": MedusaStart,
    "eagle": EagleStart,
    "draft": DraftStart,
}


def training_taps(layers: int) -> tuple[int, ...]:
    """The default of every project; of a target too shallow for it, its first, middle and last streams."""
    taps = default_taps(layers)
    return taps if list(taps) == sorted(set(taps)) else tuple(sorted({0, layers // 2, layers}))


def _new_eagle(target: DecoderConfig, theta: float) -> EagleConfig:
    plain = {"inv_freq": _frequencies(target, theta), "rope_scaling": 1.0}
    layer = replace(target, layers=1, attention_bias=False, mlp_bias=False, tied=False, **plain)  # type: ignore[arg-type]
    return EagleConfig(
        generation=3,
        decoder=layer,
        target_hidden=target.hidden,
        taps=training_taps(target.layers),
        draft_vocab_size=target.vocab_size,
        fc_bias=False,
        output_bias=False,
        input_norm=False,
        tap_norms=False,
        norm_before_residual=False,
        feeds_back_normed=False,
        own_embedding=False,
        own_head=True,
    )


def _theta(config: DecoderConfig) -> float:
    """The whole number that is the base of a decoder's rotary frequencies, or that of a head for it."""
    return float(round(config.inv_freq[1] ** (-config.head_dim / 2))) if config.head_dim > 2 else 10000.0


def _frequencies(config: DecoderConfig, theta: float) -> tuple[float, ...]:
    even = torch.arange(0, config.head_dim, 2, dtype=torch.float)
    return tuple((1.0 / (theta ** (even / config.head_dim))).tolist())


def _is_ours(eagle: EagleCheckpoint) -> bool:
    config = eagle.config
    extras = (config.fc_bias, config.output_bias, config.input_norm, config.tap_norms, config.norm_before_residual)
    plain = not (any(extras) or config.feeds_back_normed or config.own_embedding)
    return config.generation == 3 and config.own_head and plain


def _ids(opened: EagleCheckpoint | MedusaCheckpoint | DraftCheckpoint | None, frequent: Ids, vocab_size: int) -> Ids:
    if opened is None:
        return frequent
    return np.arange(vocab_size, dtype=np.int32) if opened.vocabulary is None else opened.vocabulary


@torch.no_grad()
def _begin(
    module: nn.Module, opened: EagleCheckpoint | MedusaCheckpoint | DraftCheckpoint | None, given: Mapping[str, Tensor]
) -> None:
    """What is learnt starts from an earlier training, from what is `given`, or at random; norms at one, biases at zero."""
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if opened is not None:
            parameter.copy_(torch.from_numpy(opened.tensor(name)))
        elif name in given:
            parameter.copy_(given[name])
        elif parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
        else:
            parameter.normal_(0.0, _SPREAD)


def _learnt(student: Student) -> dict[str, npt.NDArray[np.float32]]:
    named = student.module.named_parameters()
    return {name: value.detach().cpu().float().numpy() for name, value in named if value.requires_grad}
