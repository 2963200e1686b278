"""What an EAGLE-3 head's draft ids are among the target's: d2t holds offsets, not ids (docs/head_layouts.md, section 3.1)."""

import numpy as np
import numpy.typing as npt

from specedge.errors import SpecedgeError
from specedge.export.eagle_names import NamedTensors
from specedge.export.eagle_settings import EagleSettings


def read_vocabulary(tensors: NamedTensors, settings: EagleSettings, vocab_size: int) -> npt.NDArray[np.int32] | None:
    """[Vd] the target's id of every draft id, i + d2t[i]; None where the head drafts the whole vocabulary.

    Raises:
        SpecedgeError: The head drafts fewer tokens than the target has and does not say which, or its maps disagree.
    """
    if "d2t" not in tensors:
        rows = tensors.shape("lm_head.weight")[:1] if "lm_head.weight" in tensors else ()
        drafted = rows[0] if rows else settings.size("draft_vocab_size") or vocab_size
        if drafted != vocab_size:
            tensors.missing("d2t", f"which says what the {drafted} draft ids are among the target's {vocab_size}")
        return None
    return None if len(tensors.integers("d2t")) == vocab_size else mapped_ids(tensors, vocab_size)


def mapped_ids(tensors: NamedTensors, vocab_size: int) -> npt.NDArray[np.int32]:
    """[Vd] the target's id of every draft id, as d2t says it.

    Raises:
        SpecedgeError: They are not ascending ids of the target, or t2d says otherwise.
    """
    offsets = tensors.integers("d2t")
    source, ids = tensors.where("d2t"), np.arange(len(offsets)) + offsets
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
    if "t2d" in tensors:
        _check_agreement(tensors, ids, vocab_size)
    return ids.astype(np.int32)


def _check_agreement(tensors: NamedTensors, ids: npt.NDArray[np.int64], vocab_size: int) -> None:
    """t2d marks exactly the tokens that d2t names: trainers that never filled the maps write others."""
    marked = tensors.integers("t2d")
    if len(marked) != vocab_size:
        raise SpecedgeError(
            f"{tensors.where('t2d')}: expected {vocab_size} entries, one per token of the target, found {len(marked)}; "
            "the head is for another target"
        )
    drafted = np.flatnonzero(marked)
    if len(drafted) != len(ids):
        raise SpecedgeError(
            f"{tensors.where('t2d')}: expected {len(ids)} tokens marked, one per entry of d2t, found {len(drafted)}; "
            "the maps are damaged, or were never filled"
        )
    if (other := np.flatnonzero(drafted != ids)).size:
        first = other[0]
        raise SpecedgeError(
            f"{tensors.where('d2t')}[{first}]: makes draft id {first} the token {ids[first]}, but t2d says {drafted[first]}; "
            "the maps are damaged, or were never filled"
        )


def vocabulary_notes(tensors: NamedTensors, settings: EagleSettings, draft_size: int, vocab_size: int) -> list[str]:
    """Maps that are ignored although they say something, and sizes in the settings that are not those of the tensors."""
    notes = []
    if draft_size == vocab_size:
        whole = "ignored, as this head drafts the whole vocabulary"
        if "d2t" in tensors and tensors.integers("d2t").any():
            notes.append(f"{tensors.where('d2t')}: offsets other than 0, {whole}")
        if "t2d" in tensors and len(np.unique(tensors.integers("t2d"))) > 1:
            notes.append(f"{tensors.where('t2d')}: marks some tokens only, {whole}")
    for key, size in {"draft_vocab_size": draft_size, "vocab_size": vocab_size}.items():
        notes += settings.otherwise(key, size)
    return notes
