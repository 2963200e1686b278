"""EAGLE checkpoints in every published layout, recognised by their tensors (docs/head_layouts.md)."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specedge.errors import SpecedgeError
from specedge.export.decoder import NORMED
from specedge.export.eagle import EagleConfig, eagle_shapes
from specedge.export.eagle_names import NamedTensors, name_tensors
from specedge.export.eagle_settings import EagleSettings, feeds_back_normed, read_decoder, read_settings, settings_notes
from specedge.export.eagle_taps import given_ids, read_taps, taps_notes
from specedge.export.eagle_vocabulary import read_vocabulary, vocabulary_notes
from specedge.export.families import DecoderConfig
from specedge.export.head_files import HeadFiles, open_head
from specedge.export.tensors import first_of
from specedge.quant.pack import Quantized


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

    def grid(self, name: str) -> Quantized | None:
        return self.files.grid(self.names[name])


def open_eagle(source: str, target: DecoderConfig, taps: tuple[int, ...] | None = None) -> EagleCheckpoint:
    """Open a head for this target. `taps` (the residual streams entering these blocks) overrides what its settings say.

    Raises:
        SpecedgeError: Tensors are missing, misshapen or unknown, the settings contradict them, or the computation is not
            supported or cannot be known.
    """
    files = open_head(source)
    tensors = name_tensors(files)
    generation = _generation(tensors)
    settings = read_settings(files, generation)
    _check_target(tensors, target, generation)
    decoder = read_decoder(settings, tensors, target)
    vocabulary = read_vocabulary(tensors, settings, target.vocab_size) if generation == 3 else None
    count = tensors.shape("fc.weight")[1] // target.hidden
    config = EagleConfig(
        generation=generation,
        decoder=decoder,
        target_hidden=target.hidden,
        taps=read_taps(settings, target.layers, count, taps) if generation == 3 else _no_taps(settings, taps),
        draft_vocab_size=target.vocab_size if vocabulary is None else len(vocabulary),
        fc_bias="fc.bias" in tensors,
        output_bias="layer.self_attn.o_proj.bias" in tensors,
        input_norm="input_norm.weight" in tensors,
        tap_norms=any(name.startswith("fc_norm.") for name in tensors.names),
        norm_before_residual=generation == 3 and bool(settings.flag("norm_before_residual")),
        feeds_back_normed=generation == 3 and feeds_back_normed(settings),
        own_embedding="embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors,
    )
    _check_settings(settings, tensors, config)
    _check_tensors(tensors, config)
    notes = settings_notes(settings, decoder, generation, count)
    if generation == 3:
        notes += taps_notes(settings, target.layers, config.taps, taps)
    notes += vocabulary_notes(tensors, settings, config.draft_vocab_size, decoder.vocab_size)
    names = {name: tensors.names[name] for name in eagle_shapes(config)}
    return EagleCheckpoint(files, config, names, vocabulary, tuple(notes))


def _generation(tensors: NamedTensors) -> int:
    """1 or 3, by what attention reads; `architectures` is no evidence."""
    query = "layer.self_attn.q_proj.weight"
    inputs, hidden = tensors.matrix(query)[1], tensors.matrix("layer.self_attn.o_proj.weight")[0]
    if inputs not in (hidden, 2 * hidden):
        raise SpecedgeError(
            f"{tensors.where(query)}: expected {hidden} inputs (EAGLE-1) or {2 * hidden} (EAGLE-3) beside the {hidden} rows of "
            f"o_proj, found {inputs}"
        )
    return 1 if inputs == hidden else 3


def _check_target(tensors: NamedTensors, target: DecoderConfig, generation: int) -> None:
    """The head reads hidden states of this target's size, and has of its own what the target cannot lend it."""
    fused, hidden = tensors.matrix("fc.weight"), tensors.shape("layer.self_attn.o_proj.weight")[0]
    if generation == 1:
        expected = (target.hidden, 2 * target.hidden)
        fits = fused == expected and hidden == target.hidden
    else:
        expected = (hidden, 3 * target.hidden)
        fits = fused[0] == hidden and fused[1] % target.hidden == 0
    if not fits:
        raise SpecedgeError(
            f"{tensors.where('fc.weight')}: expected shape {expected} in an EAGLE-{generation} head for the target's "
            f"hidden size {target.hidden}, found {fused}; this head is not for this target"
        )
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if hidden != target.hidden and name not in tensors:
            tensors.missing(name, f"and the target's has hidden size {target.hidden}, which is not the head's {hidden}")


def _no_taps(settings: EagleSettings, chosen: tuple[int, ...] | None) -> tuple[int, ...]:
    if chosen is not None:
        raise SpecedgeError(
            f"--eagle-taps: expected none, as {settings.path.parent} is an EAGLE-1 head, which reads what feeds the target's "
            f"lm_head, found {chosen}; leave it out"
        )
    if ids := given_ids(settings):
        raise SpecedgeError(
            f"{settings.path}: names taps {ids}, but the tensors are those of an EAGLE-1 head, which reads none; remove the key"
        )
    return (NORMED,)


def _check_settings(settings: EagleSettings, tensors: NamedTensors, config: EagleConfig) -> None:
    """What tensors decide by being there, the settings may not deny."""
    file = tensors.files.path.name
    settings.require(config.fc_bias, f"{file}, {'with' if config.fc_bias else 'without'} fc.bias,", "bias", "fusion_bias")
    settings.require(
        config.input_norm, f"{file}, {'with' if config.input_norm else 'without'} input_norm.weight,", "norm_before_fc"
    )
    settings.require(
        config.tap_norms, f"{file}, {'with' if config.tap_norms else 'without'} fc_norm.0.weight,", "fc_norm", "use_aux_norm"
    )
    if config.input_norm and config.tap_norms:
        raise SpecedgeError(
            f"{tensors.where('input_norm.weight')}: expected no fc_norm beside it; engines disagree on what a head with both "
            "computes"
        )
    if config.generation == 1:
        settings.require(config.decoder.vocab_size, "the target", "draft_vocab_size", "truncated_vocab_size", "hot_vocab_size")
    whole_head = config.own_head and config.draft_vocab_size == config.decoder.vocab_size
    if not (config.own_embedding or whole_head or "t2d" in tensors):  # no tensor would show another vocabulary
        settings.require(config.decoder.vocab_size, "the target", "vocab_size")


def _check_tensors(tensors: NamedTensors, config: EagleConfig) -> None:
    layer, expected = config.decoder, eagle_shapes(config)
    for name, shape in expected.items():
        if name not in tensors:
            tensors.missing(name, f"expected in this EAGLE-{config.generation} head")
        if tensors.shape(name) != shape:
            raise SpecedgeError(
                f"{tensors.where(name)}: expected shape {shape} in an EAGLE-{config.generation} head of hidden size "
                f"{layer.hidden} with {layer.heads} heads of {layer.head_dim} ({layer.kv_heads} of keys and values), "
                f"drafting {config.draft_vocab_size} of the target's {layer.vocab_size} tokens, found {tensors.shape(name)}"
            )
        tensors.require_floats(name)
    maps = ("d2t", "t2d") if config.generation == 3 else ()
    if unused := [stored for name, stored in tensors.names.items() if name not in (*expected, *maps)]:
        raise SpecedgeError(
            f"{tensors.files.path}: unused tensor: {first_of(unused)}; an EAGLE-{config.generation} head has no place for it, "
            "so the export would not compute what this head does"
        )
