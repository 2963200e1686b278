"""A model of a bundle: its weight file, its graphs, and their entry in the manifest."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from specedge.devices.device import Device, Form
from specedge.errors import SpecedgeError
from specedge.export import to_onnx
from specedge.export.checkpoint import Checkpoint
from specedge.export.compose import LOGITS, Body, Layout, step
from specedge.export.decoder import IN_PLACE_SPARE, feature_name, padded_head_dim
from specedge.export.families import DecoderConfig, tensor_names
from specedge.export.lower import lower
from specedge.export.plain import preflight
from specedge.export.plan import plan_model
from specedge.export.recipe import Recipe
from specedge.export.request import Request
from specedge.export.rotated import rotate, rotation_shapes
from specedge.export.store import write_weights
from specedge.export.tensors import Tensors
from specedge.export.unroll import Ranks, expand
from specedge.export.weights import Stored
from specedge.manifest import Graph, KVLayout, Role, Rope, Unrolled, Weight
from specedge.progress import Progress

DECODE = "decode"
"""The function of a package that takes one token."""
if TYPE_CHECKING:  # coremltools may be absent
    from specedge.export.to_coreml import PackageWriter

_log = logging.getLogger(__name__)
TYPES = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16}


@dataclass(frozen=True, slots=True)
class Place:
    """What all models of a bundle share: the folder they are written to, the device, the context, the request.

    Graphs become functions of the `package`, where there is one.
    """

    folder: Path
    device: Device
    context: int
    request: Request
    progress: Progress
    documents: Sequence[Sequence[int]] = ()  # token ids of calibration text
    package: "PackageWriter | None" = None


@dataclass(slots=True)
class GraphWriter:
    """Lowers and writes the graphs of one model; `start` begins their names."""

    place: Place
    label: str
    start: str
    weights: Mapping[str, Weight]
    total: int
    _done: int = 0

    def __post_init__(self) -> None:
        self.place.progress(f"{self.label}: graphs", 0, self.total)

    def __call__(self, name: str, model: ir.Model, width: int | None) -> Graph:
        """Write one; its name, its width as the manifest says it."""
        graph = self._as_function(name, model, width) if self.place.package else self._as_file(name, model, width)
        self._done += 1
        self.place.progress(f"{self.label}: graphs", self._done, self.total)
        return graph

    def _as_file(self, name: str, model: ir.Model, width: int | None) -> Graph:
        file = f"{self.start}{name}.onnx"
        device = self.place.device
        lower(model, self.weights, device, file)
        if device.operators and (found := preflight(model.graph, device.operators)).left:
            if not self.place.request.allow_cpu_nodes:
                raise SpecedgeError(f"{file}: {device.provider} {found} to the CPU; allow it (--allow-cpu-nodes)")
            _log.warning("%s: %s %s to the CPU", file, device.provider, found)
        to_onnx.write(model, self.place.folder / file)
        return to_onnx.describe(model, file, width)

    def _as_function(self, name: str, model: ir.Model, width: int | None) -> Graph:
        assert self.place.package is not None
        return self.place.package.add(f"{self.start.rpartition('/')[2]}{name}", model, self.weights, width)


def write_model(
    role: str,
    checkpoint: Checkpoint,
    widths: list[int],
    place: Place,
    recipe: Recipe,
    taps: tuple[int, ...] = (),
    drafts: Sequence[Sequence[Ranks]] = (),
    lent: dict[str, Weight] | None = None,
    vocabulary: Sequence[Stored] = (),
) -> Role:
    """A model's weights and step graphs in `folder/role`; with `taps` they give what a draft head reads.

    `drafts` are the chains and trees that it drafts in one call, by their paths. Graphs that read weights which another model
    `lent`, by names of its own, lie beside the folder. `vocabulary` says what its ids are among the target's.
    """
    lent = lent or {}
    request, device = place.request, place.device
    tensors: Tensors = checkpoint
    config = checkpoint.config
    if recipe.rotation is not None:
        tensors = rotated = rotate(checkpoint, config, recipe.rotation)
        config = rotated.config
    shapes = {name: shape for name, (_, shape) in tensor_names(config).items()} | rotation_shapes(config)
    shapes = {name: shape for name, shape in shapes.items() if name not in lent}
    plan = plan_model(config, tensors, shapes, recipe, place.documents, role, place.progress)
    weights = write_weights(role, tensors, plan, place.folder, device, place.progress, vocabulary)
    chunk = max(min(request.chunk, place.context), *widths)
    steps = sorted({*widths, chunk})
    by_name = {weight.name: weight for weight in weights} | lent
    beside = bool(lent) and place.package is None
    count = (len(steps) if device.static else 1) + len(drafts)
    write = GraphWriter(place, role, f"{role}_" if beside else f"{role}/", by_name, count)
    kv = kv_layout(config, device.form, recipe.dtype, place.context)
    layout = layout_of(config, kv, place, mapped=bool(vocabulary))
    if device.static:
        body = delta_body(config, recipe.dtype, taps)
        names = {width: _function_name(width, widths) if place.package else f"step_{width}" for width in steps}
        graphs = [write(name, step(body, layout.at(width)), width) for width, name in names.items()]
    else:
        graphs = [write("step", to_onnx.trace_in_place(config, place.context, recipe.dtype, taps), None)]
    unrolled: tuple[Unrolled, ...] = ()
    if drafts:
        body = delta_body(config, recipe.dtype)
        unrolled = write_unrolled(write, drafts, layout, place, lambda paths, sized: expand(body, body, paths, sized))
    return Role(
        model_type=config.model_type,
        form=device.form,
        context=place.context,
        chunk=chunk,
        vocab_size=config.head_rows,
        mask_value=device.mask_value,
        rope=Rope(config.inv_freq, config.rope_scaling),
        kv=kv,
        taps=taps,
        rotation=recipe.rotation,
        weights=tuple(weights),
        graphs=tuple(graphs),
        first=(),
        unrolled=unrolled,
    )


def _function_name(width: int, verify: Collection[int]) -> str:
    """What a step of a package is called; the chunk, if nothing of that width is verified, is all that is left."""
    return DECODE if width == 1 else f"verify_{width}" if width in verify else "prefill"


def kv_layout(config: DecoderConfig, form: Form, dtype: str, context: int) -> KVLayout:
    """The KV buffers of a model in one of the forms."""
    slots = context + (IN_PLACE_SPARE if form == "in-place" else 0)
    return KVLayout(config.layers, config.kv_heads, slots, padded_head_dim(config, form), dtype)


def delta_body(config: DecoderConfig, dtype: str, taps: tuple[int, ...] = ()) -> Body:
    """A decoder's step in the delta form, to be composed."""
    kv = tuple(f"{kind}_{layer}" for layer in range(config.layers) for kind in ("key", "value"))
    gives = (LOGITS, feature_name(taps)) if taps else (LOGITS,)
    return Body("step", to_onnx.trace_delta(config, dtype, taps), gives, kv)


def layout_of(
    config: DecoderConfig,
    kv: KVLayout,
    place: Place,
    lm_head: tuple[str, int, int] | None = None,
    features: tuple[str, int] | None = None,
    mapped: bool = False,
) -> Layout:
    """The sizes of composed graphs, all but the width; the LM head is the model's own unless another is given."""
    own = "embed_tokens.weight" if config.tied else "lm_head.weight", config.head_rows, config.hidden
    return Layout(
        width=None,
        slots=place.context if place.device.static else None,
        past=(kv.heads, kv.slots, kv.head_dim),
        head_dim=config.head_dim,
        half=config.head_dim // 2,
        features=features,
        lm_head=lm_head or own,
        embeds=place.device.embeds,
        mapped=mapped,
        dtype=TYPES[kv.dtype],
    )


def write_unrolled(
    write: GraphWriter,
    drafts: Sequence[Sequence[Ranks]],
    layout: Layout,
    place: Place,
    compose: Callable[[Sequence[Ranks], Layout], ir.Model],
) -> tuple[Unrolled, ...]:
    """A graph for every one of `drafts`: static ones read as many rows of text as a round may have emitted."""
    written = []
    for paths in drafts:
        depth = max(map(len, paths))
        width = depth + 1 if place.device.static else None
        name = f"chain_{depth}" if len(paths) == depth else "tree"
        written.append(Unrolled(tuple(paths), write(name, compose(paths, layout.at(width)), width)))
    return tuple(written)
