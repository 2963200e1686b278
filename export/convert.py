"""The whole conversion on one screen: read, quantise, write weights, trace, lower, write graphs."""

import tempfile
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specedge import bundle as bundles
from specedge.bundle import Bundle, File, Graph, Head, KVLayout, Manifest, Role, Rope, Source, Weight
from specedge.devices.device import Device
from specedge.devices.table import get_device
from specedge.errors import SpecedgeError, UsageError
from specedge.export import to_onnx
from specedge.export.checkpoint import Checkpoint, open_checkpoint
from specedge.export.decoder import IN_PLACE_SPARE, padded_head_dim
from specedge.export.families import joined_layers, tensor_names
from specedge.export.lower import lower
from specedge.export.medusa import MedusaCheckpoint, open_medusa
from specedge.export.output import new_folder
from specedge.export.vocabulary import compare_vocabularies, token_count
from specedge.export.weights import Stored, WeightWriter
from specedge.progress import Progress, silent
from specedge.quant.pack import Quantized
from specedge.quant.rounding import round_to_nearest
from specedge.quant.scheme import Scheme

WEIGHT_FILE = "weights.bin"
_CONTEXT = 1024
INT4 = Scheme(4, 32, symmetric=True)
INT8 = Scheme(8, 32, symmetric=True)
_TOOLS = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True, slots=True)
class Request:
    """What `spec-export convert` was asked for. `body` and `head` are a Scheme or a float type's name.

    With `keep`, tensors the checkpoint holds on a grid of no more bits than their Scheme has stay on it, exactly.
    """

    model: str
    output: Path
    draft: str | None = None
    medusa: str | None = None
    device: str = "cpu"
    widths: tuple[int, ...] | None = None  # the device's own
    context: int | None = None  # 1024, or fewer where a model was made for fewer
    chunk: int = 64
    tree: tuple[tuple[int, ...], ...] = ()  # paths of the draft tree (docs/contract.md); none: chains
    body: Scheme | str = INT4
    head: Scheme | str = INT8
    keep: bool = True
    force: bool = False

    def __post_init__(self) -> None:
        if self.context is not None and self.context < 2:
            raise UsageError(f"context {self.context}: expected at least 2, a prompt token and an emitted one")
        if self.chunk < 1:
            raise UsageError(f"chunk {self.chunk}: expected a positive number of tokens")
        if self.widths is not None and min(self.widths, default=0) < 1:
            raise UsageError(f"widths {self.widths}: expected positive numbers")
        if not bundles.is_tree(self.tree):
            raise UsageError(f"tree: {self.tree} is no list of different paths of ranks, each one's beginning among them")
        if self.draft and self.medusa:
            raise UsageError("medusa: a bundle has one drafter beside prompt lookup; leave out --medusa or --draft")
        if self.tree and not (self.draft or self.medusa):
            raise UsageError("tree: prompt lookup drafts chains only; give --draft or --medusa or leave the tree out")
        if "float16" in (self.body, self.head) and self.body != self.head:
            raise UsageError(
                f"weights {self.body} with head weights {self.head}: fp16 is a whole graph's type; use it for both"
            )

    @property
    def dtype(self) -> str:
        """Type of the graph's activations, inputs, outputs and KV."""
        return "float16" if self.body == "float16" else "float32"


def convert(request: Request, progress: Progress = silent) -> Bundle:
    """Write a bundle, whole or not at all.

    Raises:
        SpecedgeError: The checkpoint is damaged or unsupported, target and draft differ in vocabulary, the output exists.
    """
    device = get_device(request.device)
    target = open_checkpoint(request.model)
    draft = open_checkpoint(request.draft) if request.draft else None
    medusa = open_medusa(request.medusa, target.config.hidden, target.config.vocab_size) if request.medusa else None
    if medusa and (deepest := max(map(len, request.tree), default=0)) > medusa.config.heads:
        raise UsageError(f"tree: {deepest} deep, expected at most {medusa.config.heads}, a head per depth")
    context = _context(request, [checkpoint for checkpoint in (target, draft) if checkpoint])
    verify = _widths(request, device, context)
    with new_folder(request.output, request.force) as folder:
        has_tokenizer = target.save_tokenizer(folder)
        vocab = target.config.vocab_size
        allowed = min(token_count(folder / "tokenizer.json"), vocab) if has_tokenizer else vocab
        if (rank := bundles.highest_rank(request.tree)) >= allowed:
            raise UsageError(f"tree: rank {rank!s:.60}, expected 0..{allowed - 1}, choices among the ids this model can emit")
        roles = {}
        if draft:
            _check_vocabulary(folder, has_tokenizer, target, draft)
            widths = _draft_widths(request.tree, context)
            roles["draft"] = _write_role("draft", draft, folder, device, widths, context, request, progress)
        hidden = medusa is not None
        roles["target"] = _write_role("target", target, folder, device, verify, context, request, progress, hidden)
        heads = {"medusa": _write_medusa(medusa, folder, roles["target"], device, request, progress)} if medusa else {}
        own = [name for name, there in (("draft", draft), ("medusa", medusa)) if there]
        manifest = Manifest(
            schema=bundles.SCHEMA,
            tools={name: version(name) for name in ("specedge", *_TOOLS)},
            sources=_sources(target, draft, medusa),
            device=device.name,
            widths=tuple(verify),
            context=context,
            allowed_ids=allowed,
            eos_ids=target.eos_ids,
            bos_id=target.bos_id,
            drafters=(*own, "lookup"),
            tree=request.tree,
            roles=roles,
            heads=heads,
            files=_hash_files(folder),
        )
        (folder / bundles.MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return bundles.open_bundle(request.output)


def _write_role(
    role: str,
    checkpoint: Checkpoint,
    folder: Path,
    device: Device,
    widths: list[int],
    context: int,
    request: Request,
    progress: Progress,
    hidden: bool = False,
) -> Role:
    """Write one model's weight file and graphs into `folder/role`; with `hidden` they give what feeds a draft head."""
    config, place = checkpoint.config, folder / role
    place.mkdir()
    weights = _write_weights(role, checkpoint, place / WEIGHT_FILE, request, progress)
    chunk = max(min(request.chunk, context), *widths)
    graphs: list[Graph] = []
    steps = sorted({*widths, chunk}) if device.static else [None]
    progress(f"{role}: graphs", 0, len(steps))
    for done, width in enumerate(steps, 1):
        model = to_onnx.trace(config, device.form, width, context, request.dtype, hidden)
        lower(model, {weight.name: weight for weight in weights}, WEIGHT_FILE, device)
        file = "step.onnx" if width is None else f"step_{width}.onnx"
        to_onnx.write(model, place / file)
        graphs.append(to_onnx.describe(model, f"{role}/{file}", width))
        progress(f"{role}: graphs", done, len(steps))
    slots = context + (IN_PLACE_SPARE if device.form == "in-place" else 0)
    head_dim = padded_head_dim(config, device.form)
    return Role(
        model_type=config.model_type,
        form=device.form,
        context=context,
        chunk=chunk,
        vocab_size=config.vocab_size,
        mask_value=device.mask_value,
        rope=Rope(config.inv_freq, config.rope_scaling),
        kv=KVLayout(config.layers, config.kv_heads, slots, head_dim, request.dtype),
        weight_file=f"{role}/{WEIGHT_FILE}",
        weights=tuple(weights),
        graphs=tuple(graphs),
    )


def _write_medusa(
    medusa: MedusaCheckpoint, folder: Path, target: Role, device: Device, request: Request, progress: Progress
) -> Head:
    """Write heads' weights into `folder/medusa` and their graph beside it, where it reaches the target's weights too."""
    config, place = medusa.config, folder / "medusa"
    place.mkdir()
    shapes = medusa.shapes
    weights: list[Weight] = []
    progress("medusa: weights", 0, len(shapes))
    with WeightWriter(place / WEIGHT_FILE) as writer:
        for name, shape in shapes.items():
            values, form = medusa.tensor(name), _form(name, shape, request)
            stored = round_to_nearest(values, form) if isinstance(form, Scheme) else _as_float(name, values, form)
            exact = stored.equals(values) if isinstance(stored, Quantized) else np.array_equal(stored, values)
            weights += writer.add([Stored(name, stored, medusa.stored_type(name), exact)])
            progress("medusa: weights", len(weights), len(shapes))
    by_name = {weight.name: weight for weight in weights}
    elsewhere: dict[str, str] = {}
    if not config.own_head:
        shared = {weight.name: weight for weight in target.weights}
        head = shared.get("lm_head.weight") or shared["embed_tokens.weight"]
        by_name["lm_head.weight"] = head
        elsewhere[head.name] = target.weight_file
    progress("medusa: graphs", 0, 1)
    model = to_onnx.trace_medusa(config, request.dtype)
    lower(model, by_name, f"medusa/{WEIGHT_FILE}", device, elsewhere)
    to_onnx.write(model, folder / "medusa.onnx")
    progress("medusa: graphs", 1, 1)
    return Head(
        kind="medusa",
        depth=config.heads,
        hidden=config.hidden,
        vocab_size=config.vocab_size,
        weight_file=f"medusa/{WEIGHT_FILE}",
        weights=tuple(weights),
        graph=to_onnx.describe(model, "medusa.onnx", 1),
    )


def _sources(target: Checkpoint, draft: Checkpoint | None, medusa: MedusaCheckpoint | None) -> dict[str, Source]:
    sources = {role: Source(c.name, c.license) for role, c in (("target", target), ("draft", draft)) if c}
    return sources | ({"medusa": Source(medusa.files.name, medusa.files.license)} if medusa else {})


def _write_weights(role: str, checkpoint: Checkpoint, path: Path, request: Request, progress: Progress) -> list[Weight]:
    """Store every tensor, one in float32 at a time: matrices as asked for, vectors in the graph's own type."""
    names = tensor_names(checkpoint.config)
    weights: list[Weight] = []
    progress(f"{role}: weights", 0, len(names))
    with WeightWriter(path) as writer:
        for group in joined_layers(names):
            stored = []
            for name in group:
                stored.append(_store(name, checkpoint, _form(name, names[name][1], request), request.keep))
                progress(f"{role}: weights", len(weights) + len(stored), len(names))
            alike = len({tensor.scheme for tensor in stored}) == 1
            for together in [stored] if alike else [[tensor] for tensor in stored]:
                weights += writer.add(together)
    return weights


def _store(name: str, checkpoint: Checkpoint, form: Scheme | str, keep: bool) -> Stored:
    """A tensor in the form it is stored in: on its own grid where that may be kept, else rounded."""
    values = checkpoint.tensor(name)
    stored: Quantized | npt.NDArray[np.generic]
    if isinstance(form, Scheme):
        own = checkpoint.grid(name) if keep else None
        stored = own if own and own.scheme.bits <= form.bits else round_to_nearest(values, form)
        exact = stored.equals(values)
    else:
        stored = _as_float(name, values, form)
        exact = np.array_equal(stored, values)
    return Stored(name, stored, checkpoint.stored_type(name), exact)


def _form(name: str, shape: tuple[int, ...], request: Request) -> Scheme | str:
    if len(shape) == 1:
        return request.dtype
    return request.head if name == "embed_tokens.weight" or name.endswith("lm_head.weight") else request.body


def _as_float(name: str, values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.generic]:
    largest = float(np.abs(values).max())
    if largest > float(np.finfo(dtype).max):
        raise SpecedgeError(f"{name}: holds {largest:g}, more than {dtype} can; use --weights fp32 or int8")
    return values.astype(dtype)


def _context(request: Request, checkpoints: list[Checkpoint]) -> int:
    """The context asked for, which every model must have been made for; by default the most that all can, up to 1024."""
    least = min(checkpoints, key=lambda checkpoint: checkpoint.config.max_positions)
    most = least.config.max_positions
    context = min(_CONTEXT, most) if request.context is None else request.context
    if context > most:
        raise UsageError(f"context {context}: {least.name} was made for at most {most} positions; use --context {most}")
    return context


def _widths(request: Request, device: Device, context: int) -> list[int]:
    """Widths to decode and verify at, ascending from 1: those asked for, or what fits of the device's own; and the tree's."""
    tree = {len(request.tree) + 1} if request.tree else set()
    asked = set(request.widths or (width for width in device.default_widths if width <= context))
    if max(asked | tree, default=1) > context:
        raise UsageError(f"widths {sorted(asked | tree)}: wider than the context of {context}")
    return sorted({1} | asked | tree)


def _draft_widths(tree: tuple[tuple[int, ...], ...], context: int) -> list[int]:
    """One token, two (after a full acceptance the draft catches up), and the widest level of a tree that has children."""
    levels = Counter(len(path) for path in {path[:-1] for path in tree} if path)
    return sorted({width for width in (1, 2, *levels.values()) if width <= context})


def _check_vocabulary(folder: Path, has_tokenizer: bool, target: Checkpoint, draft: Checkpoint) -> None:
    with tempfile.TemporaryDirectory() as place:
        draft_tokenizer = Path(place) / "tokenizer.json" if draft.save_tokenizer(Path(place)) else None
        target_tokenizer = folder / "tokenizer.json" if has_tokenizer else None
        compare_vocabularies(target_tokenizer, draft_tokenizer, target.config.vocab_size, draft.config.vocab_size)


def _hash_files(folder: Path) -> dict[str, File]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): File(path.stat().st_size, bundles.sha256(path)) for path in files}
