"""Medusa heads: what they compute, and their checkpoint, recognised by its tensors (Cai et al. 2024, arXiv 2401.10774)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specedge.errors import SpecedgeError
from specedge.export.decoder import Linear
from specedge.export.eagle_names import NamedTensors
from specedge.export.eagle_vocabulary import mapped_ids
from specedge.export.head_files import HeadFiles, open_head
from specedge.export.tensors import first_of
from specedge.quant.pack import Quantized

_PREFIXES = ("medusa_head.", "medusa_heads.")
# One pattern per published naming; `layer` of an LM head is the place behind the head's blocks.
_BLOCK = re.compile(
    r"(?P<head>\d+)\.(?P<layer>\d+)\.linear\.(?P<part>weight|bias)|"
    r"blocks\.(?P<head2>\d+)\.layers\.(?P<layer2>\d+)\.(?P<part2>weight|bias)"
)
_MAPS = ("d2t", "t2d")
_LM_HEAD = re.compile(r"(?P<head>\d+)\.(?P<layer>\d+)\.weight|lm_heads\.(?P<head2>\d+)\.weight")


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """What Medusa heads compute: `layers` times x + silu(W x + b), then a matrix of the vocabulary, or of some ids of it.

    All heads read the target's hidden state after its final norm; head i drafts the token i + 2 places on. Without `own_head`
    that matrix is the target's LM head.
    """

    heads: int
    layers: int
    hidden: int
    vocab_size: int
    bias: bool
    own_head: bool


class Medusa(nn.Module):
    """The target's hidden state in, logits of every head out.

    Parameters have the canonical names of `MedusaCheckpoint`; without heads' own matrices, `lm_head.weight` is the target's.
    """

    def __init__(self, config: MedusaConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.heads = nn.ModuleList(_Head(config, dtype) for _ in range(config.heads))
        self.lm_head = None if config.own_head else Linear(config.hidden, config.vocab_size, False, dtype)

    def forward(self, hidden: Tensor) -> Tensor:  # [1, 1, H] -> [heads, V]
        rows = torch.cat([head(hidden) for head in self.heads], 1)
        logits: Tensor = (rows if self.lm_head is None else self.lm_head(rows))[0]
        return logits


class _Head(nn.Module):
    def __init__(self, config: MedusaConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(config.hidden, config.hidden, config.bias, dtype) for _ in range(config.layers))
        self.lm_head = Linear(config.hidden, config.vocab_size, False, dtype) if config.own_head else None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x if self.lm_head is None else self.lm_head(x)


@dataclass(frozen=True, slots=True)
class MedusaCheckpoint:
    """Open heads, checked; their tensors by canonical names such as heads.0.layers.0.weight and heads.0.lm_head.weight."""

    files: HeadFiles
    config: MedusaConfig
    names: Mapping[str, str]
    vocabulary: npt.NDArray[np.int32] | None
    """[Vd] the target's ids of the draft's, strictly ascending; None: they are the same."""
    notes: tuple[str, ...]
    """What the settings say otherwise than the tensors, which count."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape, head after head."""
        return _expected(self.config)

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """The values of a canonical name, read now.

        Raises:
            SpecedgeError: A value is NaN or infinite.
        """
        return self.files.read(self.names[name])

    def stored_type(self, name: str) -> str:
        return self.files.tensors[self.names[name]].dtype

    def grid(self, name: str) -> Quantized | None:
        return self.files.grid(self.names[name])


def open_medusa(source: str, hidden: int, vocab_size: int) -> MedusaCheckpoint:
    """Open heads for a target of this hidden size and vocabulary; their number is counted from the tensors.

    Raises:
        SpecedgeError: Tensors are missing, misshapen or unknown, or the settings promise more heads than there are.
    """
    files = open_head(source)
    names = _canonical_names(files)
    maps = NamedTensors(files, {name: name for name in _MAPS if name in files.tensors})
    vocabulary = mapped_ids(maps, vocab_size) if "d2t" in maps else None
    config = _count(files, names, hidden, vocab_size if vocabulary is None else len(vocabulary))
    for name, shape in _expected(config).items():
        if name not in names:
            raise SpecedgeError(
                f"{files.path}: missing tensor: {_published(name, config)}, expected from {config.heads} heads "
                f"of {config.layers} layers; download the heads again"
            )
        found = files.tensors[names[name]].shape
        if found != shape:
            raise SpecedgeError(
                f"{files.path}: {names[name]}: expected shape {shape} from the target's hidden size {hidden} and vocabulary "
                f"{config.vocab_size}, found {found}; these heads are not for this target"
            )
    return MedusaCheckpoint(files, config, names, vocabulary, _notes(files, config))


def _canonical_names(files: HeadFiles) -> dict[str, str]:
    """Canonical name -> name in the file; a name of no known kind is refused."""
    carried = [name for name in files.tensors if name not in _MAPS]
    prefix = next((prefix for prefix in _PREFIXES if all(name.startswith(prefix) for name in carried)), "")
    names: dict[str, str] = {}
    unknown = []
    for name in carried:
        bare = name.removeprefix(prefix)
        if block := _BLOCK.fullmatch(bare):
            canonical = "heads.{}.layers.{}.{}".format(*_groups(block, "head", "layer", "part"))
        elif head := _LM_HEAD.fullmatch(bare):
            canonical = "heads.{}.lm_head.weight".format(*_groups(head, "head"))
        else:
            unknown.append(name)
            continue
        if canonical in names:
            raise SpecedgeError(f"{files.path}: {names[canonical]} and {name} are the same tensor by two names")
        names[canonical] = name
    if unknown:
        raise SpecedgeError(f"{files.path}: unused tensor: {first_of(unknown)}; Medusa heads have no place for it")
    return names


def _groups(match: re.Match[str], *wanted: str) -> list[str]:
    return [match.group(name) or match.group(f"{name}2") for name in wanted]


def _count(files: HeadFiles, names: Mapping[str, str], hidden: int, vocab_size: int) -> MedusaConfig:
    """Heads and layers as the tensors show them, or as the settings promise if that is more."""
    blocks = [tuple(map(int, re.findall(r"\d+", name))) for name in names if ".layers." in name]
    if not blocks:
        raise SpecedgeError(
            f"{files.path}: no Medusa heads: expected tensors such as 0.0.linear.weight, found {first_of(files.tensors)}"
        )
    heads = 1 + max(int(name.split(".")[1]) for name in names)
    layers = 1 + max(layer for _, layer in blocks)
    return MedusaConfig(
        heads=max(heads, _promised(files, "heads") or 0),
        layers=max(layers, _promised(files, "layers") or 0),
        hidden=hidden,
        vocab_size=vocab_size,
        bias=any(name.endswith(".bias") for name in names),
        own_head=any(name.endswith("lm_head.weight") for name in names),
    )


def _promised(files: HeadFiles, what: str) -> int | None:
    """The number of heads or layers that the settings name, under any of its published keys."""
    nested: Any = files.settings.get("medusa")
    places = [files.settings, nested if isinstance(nested, dict) else {}]
    for key in (f"medusa_num_{what}", f"num_medusa_{what}"):
        for settings in places:
            value = settings.get(key)
            if value is not None and (type(value) is not int or value < 1):
                raise SpecedgeError(f"{files.path.parent / 'config.json'}: {key}: expected a positive integer, found {value!r}")
            if value is not None:
                return int(value)
    return None


def _expected(config: MedusaConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(config.heads):
        for layer in range(config.layers):
            shapes[f"heads.{head}.layers.{layer}.weight"] = (config.hidden, config.hidden)
            if config.bias:
                shapes[f"heads.{head}.layers.{layer}.bias"] = (config.hidden,)
        if config.own_head:
            shapes[f"heads.{head}.lm_head.weight"] = (config.vocab_size, config.hidden)
    return shapes


def _published(name: str, config: MedusaConfig) -> str:
    """A canonical name as the original layout spells it, for an error message."""
    _, head, kind, *rest = name.split(".")
    return f"{head}.{config.layers}.weight" if kind == "lm_head" else f"{head}.{rest[0]}.linear.{rest[1]}"


def _notes(files: HeadFiles, config: MedusaConfig) -> tuple[str, ...]:
    found = {"heads": config.heads, "layers": config.layers}
    return tuple(
        f"{files.path.parent / 'config.json'}: promises {promised} {what}, {files.path.name} holds {found[what]}: all are used"
        for what in found
        if (promised := _promised(files, what)) not in (None, found[what])
    )
