"""A draft head of a bundle: its weight file, its graphs, and their entry in the manifest."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from specedge.export import to_onnx
from specedge.export.checkpoint import Checkpoint
from specedge.export.compose import FED_BACK, LOGITS, Body, step
from specedge.export.decoder import feature_name
from specedge.export.eagle_checkpoint import EagleCheckpoint
from specedge.export.medusa import MedusaCheckpoint
from specedge.export.plan import plan_head
from specedge.export.recipe import Recipe
from specedge.export.roles import GraphWriter, Place, kv_layout, layout_of, write_unrolled
from specedge.export.store import write_weights
from specedge.export.unroll import Ranks, expand
from specedge.export.weights import Stored
from specedge.manifest import VOCABULARY, Head, Role, Rope, Weight
from specedge.quant.pack import Quantized


def stored_vocabulary(ids: npt.NDArray[np.int32] | None) -> list[Stored]:
    """What a weight file holds of a draft vocabulary."""
    return [] if ids is None else [Stored(VOCABULARY, ids, "I64", "", exact=True)]


def borrow(target: Role, name: str) -> Weight:
    """The target's weight for a graph that lies beside its folder; a tied head is the embedding."""
    weights = {weight.name: weight for weight in target.weights}
    weight = weights.get(name) or weights["embed_tokens.weight"]
    return replace(weight, name=f"target.{weight.name}")  # a head may have its own by that name


def write_medusa(medusa: MedusaCheckpoint, checkpoint: Checkpoint, target: Role, place: Place, recipe: Recipe) -> Head:
    """Heads' weights in `folder/medusa` and their graph beside it, where it reaches the target's weights too."""
    config, tensors = medusa.config, MedusaTensors(medusa, checkpoint)
    plan, more = plan_head(tensors.shapes, recipe), stored_vocabulary(medusa.vocabulary)
    weights = write_weights("medusa", tensors, plan, place.folder, place.device, place.progress, more)
    by_name = {weight.name: weight for weight in weights}
    if not config.own_head and "lm_head.weight" not in by_name:
        by_name["lm_head.weight"] = borrow(target, "lm_head.weight")
    write = GraphWriter(place, "medusa", "", by_name, 1)
    return Head(
        kind="medusa",
        depth=config.heads,
        hidden=config.hidden,
        vocab_size=config.vocab_size,
        weights=tuple(weights),
        graph=write("medusa", to_onnx.trace_medusa(config, recipe.dtype), 1),
    )


def write_eagle(
    eagle: EagleCheckpoint,
    checkpoint: Checkpoint,
    target: Role,
    verify: list[int],
    widths: list[int],
    place: Place,
    recipe: Recipe,
    drafts: Sequence[Sequence[Ranks]],
) -> Role:
    """An EAGLE head's weights in `folder/eagle`, its graphs beside it: they read the target's weights too.

    `verify` are the target's widths, `widths` those of steps over drafts, `drafts` what is drafted in one call.
    """
    config, layer, device = eagle.config, eagle.config.decoder, place.device
    tensors = EagleTensors(eagle, checkpoint)
    plan, more = plan_head(tensors.shapes, recipe), stored_vocabulary(eagle.vocabulary)
    weights = write_weights("eagle", tensors, plan, place.folder, place.device, place.progress, more)
    by_name = {weight.name: weight for weight in weights}
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name not in by_name:
            by_name[name] = borrow(target, name)

    gives, names = (LOGITS, FED_BACK), ("key_0", "value_0")
    first = Body("first", to_onnx.trace_eagle(config, False, recipe.dtype), gives, names)
    following = Body("next", to_onnx.trace_eagle(config, True, recipe.dtype), gives, names)
    kv = kv_layout(layer, "delta", recipe.dtype, place.context)
    head = ("lm_head.weight", config.draft_vocab_size, layer.hidden)
    reads = (feature_name(config.taps), config.features)
    layout = layout_of(layer, kv, place, head, reads, mapped=eagle.vocabulary is not None)
    fed_back = replace(layout, features=("hidden", layer.hidden))
    chunk = max(min(place.request.chunk, place.context), *verify)
    read_widths = sorted({1, max(verify), chunk}) if device.static else [None]
    step_widths = widths if device.static else [None]
    write = GraphWriter(place, "eagle", "eagle_", by_name, len(read_widths) + len(step_widths) + len(drafts))
    return Role(
        model_type=f"eagle-{config.generation}",
        form="delta",
        context=place.context,
        chunk=chunk,
        vocab_size=config.draft_vocab_size,
        mask_value=device.mask_value,
        rope=Rope(layer.inv_freq, layer.rope_scaling),
        kv=kv,
        taps=config.taps,
        rotation=None,
        weights=tuple(weights),
        graphs=tuple(write(_name("next", width), step(following, fed_back.at(width)), width) for width in step_widths),
        first=tuple(
            write(_name("first", width), step(first, layout.at(width), last_only=True), width) for width in read_widths
        ),
        unrolled=write_unrolled(write, drafts, layout, place, lambda paths, sized: expand(first, following, paths, sized)),
    )


def _name(kind: str, width: int | None) -> str:
    return kind if width is None else f"{kind}_{width}"


def in_target(name: str, checkpoint: Checkpoint) -> str:
    """Where the target keeps its embedding or LM head."""
    return "embed_tokens.weight" if checkpoint.config.tied else name


@dataclass(frozen=True, slots=True)
class TargetRows:
    """Rows of the target's LM head (or embedding): those of the draft vocabulary."""

    checkpoint: Checkpoint
    vocabulary: npt.NDArray[np.int32] | None

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        rows: npt.NDArray[np.float32] = self.checkpoint.tensor(in_target(name, self.checkpoint))[self.vocabulary]
        return rows

    def stored_type(self, name: str) -> str:
        return self.checkpoint.stored_type(in_target(name, self.checkpoint))

    def grid(self, name: str) -> Quantized | None:
        grid = self.checkpoint.grid(in_target(name, self.checkpoint))
        return None if grid is None or self.vocabulary is None else grid.rows(self.vocabulary)


@dataclass(frozen=True, slots=True)
class EagleTensors:
    """What an EAGLE head stores of its own: copies of the target's matrices are left to be borrowed.

    An LM head of fewer ids that is not in the file is made of the target's rows.
    """

    eagle: EagleCheckpoint
    checkpoint: Checkpoint

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        config, shapes = self.eagle.config, dict(self.eagle.shapes)
        in_target = self.checkpoint.config.vocab_size, self.checkpoint.config.hidden
        for name in ("embed_tokens.weight", "lm_head.weight"):
            if shapes.get(name) == in_target and self._is_copy(name):
                del shapes[name]
        if not config.own_head and self.eagle.vocabulary is not None:
            shapes["lm_head.weight"] = (config.draft_vocab_size, config.decoder.hidden)
        return shapes

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        return self.eagle.tensor(name) if name in self.eagle.names else self._rows.tensor(name)

    def stored_type(self, name: str) -> str:
        return self.eagle.stored_type(name) if name in self.eagle.names else self._rows.stored_type(name)

    def grid(self, name: str) -> Quantized | None:
        return self.eagle.grid(name) if name in self.eagle.names else self._rows.grid(name)

    @property
    def _rows(self) -> TargetRows:
        return TargetRows(self.checkpoint, self.eagle.vocabulary)

    def _is_copy(self, name: str) -> bool:
        return np.array_equal(self.eagle.tensor(name), self.checkpoint.tensor(in_target(name, self.checkpoint)))


@dataclass(frozen=True, slots=True)
class MedusaTensors:
    """What Medusa heads store of their own: an LM head of fewer ids that they share is made of the target's rows."""

    medusa: MedusaCheckpoint
    checkpoint: Checkpoint

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        config = self.medusa.config
        shared = {"lm_head.weight": (config.vocab_size, config.hidden)}
        return self.medusa.shapes | (shared if self.medusa.vocabulary is not None and not config.own_head else {})

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        return self.medusa.tensor(name) if name in self.medusa.names else self._rows.tensor(name)

    def stored_type(self, name: str) -> str:
        return self.medusa.stored_type(name) if name in self.medusa.names else self._rows.stored_type(name)

    def grid(self, name: str) -> Quantized | None:
        return self.medusa.grid(name) if name in self.medusa.names else self._rows.grid(name)

    @property
    def _rows(self) -> TargetRows:
        return TargetRows(self.checkpoint, self.medusa.vocabulary)
