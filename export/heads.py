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
from specedge.manifest import EMBEDDING, VOCABULARY, Head, Role, Rope, Weight
from specedge.quant.pack import Quantized

LM_HEAD = "lm_head.weight"


def stored_vocabulary(ids: npt.NDArray[np.int32] | None) -> list[Stored]:
    """What a weight file holds of a draft vocabulary."""
    return [] if ids is None else [Stored(VOCABULARY, ids, "I64", "", exact=True)]


def borrow(target: Role, name: str) -> Weight:
    """The target's weight for a graph that lies beside its folder; a tied head is the embedding."""
    weights = {weight.name: weight for weight in target.weights}
    weight = weights.get(name) or weights[EMBEDDING]
    return replace(weight, name=f"target.{weight.name}")  # a head may have its own by that name


def write_medusa(medusa: MedusaCheckpoint, checkpoint: Checkpoint, target: Role, place: Place, recipe: Recipe) -> Head:
    """Heads' weights in `folder/medusa` and their graph beside it, where it reaches the target's weights too."""
    config, tensors = medusa.config, medusa_tensors(medusa, checkpoint)
    plan, more = plan_head(tensors.shapes, recipe), stored_vocabulary(medusa.vocabulary)
    weights = write_weights("medusa", tensors, plan, place.folder, place.device, place.progress, more)
    by_name = {weight.name: weight for weight in weights}
    if not config.own_head and LM_HEAD not in by_name:
        by_name[LM_HEAD] = borrow(target, LM_HEAD)
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
    tensors = eagle_tensors(eagle, checkpoint)
    plan, more = plan_head(tensors.shapes, recipe), stored_vocabulary(eagle.vocabulary)
    weights = write_weights("eagle", tensors, plan, place.folder, place.device, place.progress, more)
    by_name = {weight.name: weight for weight in weights}
    for name in (EMBEDDING, LM_HEAD):
        if name not in by_name:
            by_name[name] = borrow(target, name)

    gives, names = (LOGITS, FED_BACK), ("key_0", "value_0")
    first = Body("first", to_onnx.trace_eagle(config, False, recipe.dtype), gives, names)
    following = Body("next", to_onnx.trace_eagle(config, True, recipe.dtype), gives, names)
    kv = kv_layout(layer, "delta", recipe.dtype, place.context)
    head = (LM_HEAD, config.draft_vocab_size, layer.hidden)
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


@dataclass(frozen=True, slots=True)
class HeadTensors:
    """What a head stores of its own, `shapes` by canonical names: tensors of its file, and rows of the target's LM head.

    Those are what an LM head of fewer ids is made of that the file lacks.
    """

    opened: EagleCheckpoint | MedusaCheckpoint
    checkpoint: Checkpoint
    shapes: dict[str, tuple[int, ...]]

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        if name in self.opened.names:
            return self.opened.tensor(name)
        rows: npt.NDArray[np.float32] = self.checkpoint.tensor(_in_target(name, self.checkpoint))[self.opened.vocabulary]
        return rows

    def stored_type(self, name: str) -> str:
        own = name in self.opened.names
        return self.opened.stored_type(name) if own else self.checkpoint.stored_type(_in_target(name, self.checkpoint))

    def grid(self, name: str) -> Quantized | None:
        if name in self.opened.names:
            return self.opened.grid(name)
        grid = self.checkpoint.grid(_in_target(name, self.checkpoint))
        return None if grid is None or self.opened.vocabulary is None else grid.rows(self.opened.vocabulary)


def eagle_tensors(eagle: EagleCheckpoint, checkpoint: Checkpoint) -> HeadTensors:
    """Of an EAGLE head: copies of the target's matrices are left to be borrowed."""
    config, shapes = eagle.config, dict(eagle.shapes)
    in_target = checkpoint.config.vocab_size, checkpoint.config.hidden
    for name in (EMBEDDING, LM_HEAD):
        if shapes.get(name) == in_target and np.array_equal(
            eagle.tensor(name), checkpoint.tensor(_in_target(name, checkpoint))
        ):
            del shapes[name]
    if not config.own_head and eagle.vocabulary is not None:
        shapes[LM_HEAD] = (config.draft_vocab_size, config.decoder.hidden)
    return HeadTensors(eagle, checkpoint, shapes)


def medusa_tensors(medusa: MedusaCheckpoint, checkpoint: Checkpoint) -> HeadTensors:
    """Of Medusa heads, with the LM head that they share where it has fewer ids than the target's."""
    config = medusa.config
    shared = {LM_HEAD: (config.vocab_size, config.hidden)} if medusa.vocabulary is not None and not config.own_head else {}
    return HeadTensors(medusa, checkpoint, medusa.shapes | shared)


def _in_target(name: str, checkpoint: Checkpoint) -> str:
    """Where the target keeps its embedding or LM head."""
    return EMBEDDING if checkpoint.config.tied else name
