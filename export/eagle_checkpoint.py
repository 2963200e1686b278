"""EAGLE checkpoints in every published layout, recognised by their tensors; docs/head_layouts.md says what each project means."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specedge.errors import SpecedgeError
from specedge.export.decoder import NORMED
from specedge.export.eagle import EagleConfig, eagle_shapes
from specedge.export.eagle_names import MAPS, canonical_names
from specedge.export.eagle_settings import EagleSettings, feeds_back_normed, read_decoder, read_settings, settings_notes
from specedge.export.eagle_taps import given_ids, read_taps
from specedge.export.families import DecoderConfig
from specedge.export.head_files import HeadFiles, open_head
from specedge.export.tensors import first_of

_MATRICES = (*(f"layer.self_attn.{name}_proj.weight" for name in "qko"), "layer.mlp.gate_proj.weight")
_FLOATS, _INTEGERS = ("F32", "F16", "BF16"), ("I64", "I32", "BOOL")


@dataclass(frozen=True, slots=True)
class EagleCheckpoint:
    """An open head, checked against its target; tensors by the canonical names of `eagle.eagle_shapes`."""

    files: HeadFiles
    config: EagleConfig
    names: Mapping[str, str]
    vocabulary: npt.NDArray[np.int32] | None
    """[Vd] the target's ids of the draft's, strictly ascending; None: they are the same."""
    notes: tuple[str, ...]
    """What the settings say otherwise than the tensors, which count, and defaults that were assumed."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return eagle_shapes(self.config)

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """The values of a canonical name, read now.

        Raises:
            SpecedgeError: A value is NaN or infinite.
        """
        return self.files.read(self.names[name])

    def stored_type(self, name: str) -> str:
        return self.files.tensors[self.names[name]].dtype


def open_eagle(source: str, target: DecoderConfig, taps: tuple[int, ...] | None = None) -> EagleCheckpoint:
    """Open a head for this target. `taps` (the residual streams entering these blocks) overrides what its settings say.

    Raises:
        SpecedgeError: Tensors are missing, misshapen or unknown, the settings contradict them, or the computation is not
            supported or cannot be known.
    """
    files = open_head(source)
    names = canonical_names(files)
    shapes = {name: files.tensors[stored].shape for name, stored in names.items()}
    _check_matrices(files, names, shapes)
    hidden = shapes["layer.self_attn.o_proj.weight"][0]
    generation = _generation(files, names, shapes, hidden)
    settings = read_settings(files, generation)
    _check_matrices(files, names, shapes, "fc.weight")
    _check_target(files, names, shapes, target, generation, hidden)
    decoder = read_decoder(settings, shapes, target, hidden)
    vocabulary = _read_vocabulary(files, names, settings, target.vocab_size) if generation == 3 else None
    count = shapes["fc.weight"][1] // target.hidden
    config = EagleConfig(
        generation=generation,
        decoder=decoder,
        target_hidden=target.hidden,
        taps=_taps(settings, generation, target.layers, count, taps),
        draft_vocab_size=target.vocab_size if vocabulary is None else len(vocabulary),
        fc_bias="fc.bias" in names,
        output_bias="layer.self_attn.o_proj.bias" in names,
        input_norm="input_norm.weight" in names,
        tap_norms=any(name.startswith("fc_norm.") for name in names),
        norm_before_residual=generation == 3 and bool(settings.flag("norm_before_residual")),
        feeds_back_normed=generation == 3 and feeds_back_normed(settings),
        own_embedding="embed_tokens.weight" in names,
        own_head="lm_head.weight" in names,
    )
    _check_settings(settings, files, names, config)
    _check_tensors(files, names, shapes, config)
    notes = settings_notes(settings, decoder, generation, count)
    if generation == 3 and taps is None and given_ids(settings) is None:
        notes.append(f"{settings.path}: names no taps, the default {config.taps} assumed")
    notes += _vocabulary_notes(files, names, settings, config)
    return EagleCheckpoint(files, config, {name: names[name] for name in eagle_shapes(config)}, vocabulary, tuple(notes))


def _check_matrices(files: HeadFiles, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], *wanted: str) -> None:
    """The matrices that the head's sizes are measured on are there, and matrices."""
    for name in wanted or _MATRICES:
        if name not in names:
            raise SpecedgeError(
                f"{files.path}: missing tensor: {_published(name)}, expected in an EAGLE head, found {first_of(files.tensors)}; "
                "not an EAGLE head, or damaged: download it again"
            )
        if len(shapes[name]) != 2 or 0 in shapes[name]:
            raise SpecedgeError(f"{files.path}: {names[name]}: expected a matrix, found shape {shapes[name]}")


def _generation(files: HeadFiles, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], hidden: int) -> int:
    """1 or 3, by what attention reads; `architectures` is no evidence."""
    query = "layer.self_attn.q_proj.weight"
    inputs = shapes[query][1]
    if inputs not in (hidden, 2 * hidden):
        raise SpecedgeError(
            f"{files.path}: {names[query]}: expected {hidden} inputs (EAGLE-1) or {2 * hidden} (EAGLE-3) beside "
            f"{hidden} rows of o_proj, found {inputs}"
        )
    return 1 if inputs == hidden else 3


def _check_target(
    files: HeadFiles,
    names: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    target: DecoderConfig,
    generation: int,
    hidden: int,
) -> None:
    """The head reads hidden states of this target's size, and has of its own what the target cannot lend it."""
    fused = shapes["fc.weight"]
    if generation == 1:
        fits, expected = fused == (hidden, 2 * hidden) and hidden == target.hidden, (target.hidden, 2 * target.hidden)
    else:
        fits, expected = fused[0] == hidden and fused[1] % target.hidden == 0, (hidden, 3 * target.hidden)
    if not fits:
        raise SpecedgeError(
            f"{files.path}: {names['fc.weight']}: expected shape {expected} in an EAGLE-{generation} head for the target's "
            f"hidden size {target.hidden}, found {fused}; this head is not for this target"
        )
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if hidden != target.hidden and name not in names:
            raise SpecedgeError(
                f"{files.path}: missing tensor: {name}; the head's hidden size {hidden} is not the target's {target.hidden}, "
                "so it cannot take the target's"
            )


def _taps(settings: EagleSettings, generation: int, layers: int, count: int, chosen: tuple[int, ...] | None) -> tuple[int, ...]:
    if generation == 3:
        return read_taps(settings, layers, count, chosen)
    if chosen is not None:
        raise SpecedgeError(
            f"--eagle-taps: {settings.path.parent} is an EAGLE-1 head, which reads what feeds the target's lm_head; leave it out"
        )
    if ids := given_ids(settings):
        raise SpecedgeError(
            f"{settings.path}: names taps {ids}, but the tensors are those of an EAGLE-1 head, which reads none; remove the key"
        )
    return (NORMED,)


def _check_settings(settings: EagleSettings, files: HeadFiles, names: Mapping[str, str], config: EagleConfig) -> None:
    """What tensors decide by being there, the settings may not deny."""
    settings.require(config.fc_bias, f"{files.path.name} ({'a' if config.fc_bias else 'no'} bias of fc)", "bias", "fusion_bias")
    settings.require(config.input_norm, f"{files.path.name} (input_norm.weight)", "norm_before_fc")
    settings.require(config.tap_norms, f"{files.path.name} (fc_norm.0.weight)", "fc_norm", "use_aux_norm")
    if config.input_norm and config.tap_norms:
        raise SpecedgeError(
            f"{files.path}: {names['input_norm.weight']} and {names.get('fc_norm.0.weight', 'fc_norm')}: engines disagree on what "
            "a head with both computes; expected one of them"
        )
    seen = config.own_embedding or "t2d" in names
    if not seen:  # tensors that would show another vocabulary
        settings.require(config.decoder.vocab_size, "the target's vocab_size", "vocab_size")


def _check_tensors(
    files: HeadFiles, names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], config: EagleConfig
) -> None:
    layer = config.decoder
    for name, expected in eagle_shapes(config).items():
        if name not in names:
            raise SpecedgeError(
                f"{files.path}: missing tensor: {_published(name)}, expected in this EAGLE-{config.generation} head; "
                "download it again"
            )
        if shapes[name] != expected:
            raise SpecedgeError(
                f"{files.path}: {names[name]}: expected shape {expected} in an EAGLE-{config.generation} head of hidden size "
                f"{layer.hidden} with {layer.heads} heads of {layer.head_dim} ({layer.kv_heads} of keys and values), "
                f"drafting {config.draft_vocab_size} of the target's {layer.vocab_size} tokens, found {shapes[name]}"
            )
        if (dtype := files.tensors[names[name]].dtype) not in _FLOATS:
            raise SpecedgeError(f"{files.path}: {names[name]}: expected one of {', '.join(_FLOATS)}, found {dtype}")
    allowed = {*eagle_shapes(config), *(MAPS if config.generation == 3 else ())}
    if unused := [stored for name, stored in names.items() if name not in allowed]:
        raise SpecedgeError(
            f"{files.path}: unused tensor: {first_of(unused)}; an EAGLE-{config.generation} head has no place for it, so the "
            "export would not compute what this head does"
        )


def _read_vocabulary(
    files: HeadFiles, names: Mapping[str, str], settings: EagleSettings, vocab_size: int
) -> npt.NDArray[np.int32] | None:
    """The target's id of every draft id, d2t[i] + i; None where the head drafts the whole vocabulary."""
    if "d2t" not in names:
        rows = files.tensors[names["lm_head.weight"]].shape[:1] if "lm_head.weight" in names else ()
        drafted = rows[0] if rows else settings.size("draft_vocab_size") or vocab_size
        if drafted != vocab_size:
            raise SpecedgeError(
                f"{files.path}: missing tensor: d2t, which says what the {drafted} draft ids are among the target's {vocab_size}; "
                "download the head again, or it is for another target"
            )
        return None
    source = f"{files.path}: {names['d2t']}"
    offsets = _integers(files, names["d2t"])
    if len(offsets) == vocab_size:
        return None
    ids = np.arange(len(offsets)) + offsets
    if (strange := np.flatnonzero((ids < 0) | (ids >= vocab_size))).size:
        first = strange[0]
        raise SpecedgeError(
            f"{source}[{first}]: {offsets[first]} makes draft id {first} the token {ids[first]}, expected one from 0 to "
            f"{vocab_size - 1}; the head is damaged, or for another target"
        )
    if (falling := np.flatnonzero(np.diff(ids) <= 0)).size:
        first = falling[0] + 1
        raise SpecedgeError(
            f"{source}[{first}]: {offsets[first]} makes draft id {first} the token {ids[first]}, expected one above "
            f"{ids[first - 1]}, the one before; d2t holds offsets, id = i + d2t[i]"
        )
    if "t2d" in names:
        _check_agreement(files, names, ids, vocab_size)
    return ids.astype(np.int32)


def _check_agreement(files: HeadFiles, names: Mapping[str, str], ids: npt.NDArray[np.int64], vocab_size: int) -> None:
    """t2d marks exactly the tokens that d2t names: trainers that never filled the maps write others."""
    source = f"{files.path}: {names['t2d']}"
    marked = _integers(files, names["t2d"])
    if len(marked) != vocab_size:
        raise SpecedgeError(f"{source}: expected {vocab_size} entries, one per token of the target, found {len(marked)}")
    drafted = np.flatnonzero(marked)
    if len(drafted) != len(ids):
        raise SpecedgeError(f"{source}: expected {len(ids)} tokens marked, one per entry of d2t, found {len(drafted)}")
    if (other := np.flatnonzero(drafted != ids)).size:
        first = other[0]
        raise SpecedgeError(
            f"{files.path}: {names['d2t']}[{first}]: makes draft id {first} the token {ids[first]}, but t2d says "
            f"{drafted[first]}; the maps are damaged, or were never filled"
        )


def _integers(files: HeadFiles, name: str) -> npt.NDArray[np.int64]:
    tensor = files.tensors[name]
    if tensor.dtype not in _INTEGERS or len(tensor.shape) != 1:
        raise SpecedgeError(f"{files.path}: {name}: expected a list of integers, found {tensor.dtype} {tensor.shape}")
    return tensor.read().astype(np.int64)


def _vocabulary_notes(files: HeadFiles, names: Mapping[str, str], settings: EagleSettings, config: EagleConfig) -> list[str]:
    whole = config.draft_vocab_size == config.decoder.vocab_size
    notes = []
    if whole and "d2t" in names and _integers(files, names["d2t"]).any():
        notes.append(f"{files.path}: {names['d2t']}: not zero, ignored, as the head drafts the whole vocabulary")
    if whole and "t2d" in names and len(np.unique(_integers(files, names["t2d"]))) > 1:
        notes.append(f"{files.path}: {names['t2d']}: not all tokens, ignored, as the head drafts the whole vocabulary")
    found = {"draft_vocab_size": config.draft_vocab_size, "vocab_size": config.decoder.vocab_size}
    for key, size in found.items():
        for name, said in settings.said(key).items():
            if said != size:
                notes.append(f"{settings.path}: {name}: {said}, the tensors say {size}")
    return notes


def _published(name: str) -> str:
    """A canonical name as most files spell it, for an error message."""
    return name.replace("layer.", "layers.0.", 1) if name.startswith("layer.") else name
