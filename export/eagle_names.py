"""The names under which projects publish an EAGLE head's tensors (docs/head_layouts.md), and those they must not carry."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from specedge.errors import SpecedgeError
from specedge.export.head_files import HeadFiles
from specedge.export.tensors import first_of

_FLOATS, _INTEGERS = ("F32", "F16", "BF16"), ("I64", "I32", "BOOL")
_PREFIXES = ("model.", "draft_model.", "eagle_module.")
_BESIDE = ("lm_head.weight", "d2t", "t2d")  # stay without the prefix in some files
_CARRIES_NOTHING = re.compile(
    r"(?:.*\.)?(?:rotary_emb|rotary_pos_emb)\.(?:inv_freq|original_inv_freq|cos_cached|sin_cached)|"
    r"(?:(?:model|draft_model|eagle_module)\.)*(?:verifier|target_model\.).*"
)
_RENAMED = (
    (re.compile(r"(?:midlayer|layers)\.0\.|midlayer\.(?!\d)|transformer\."), "layer."),
    (re.compile(r"fusion_fc\."), "fc."),
    *((re.compile(rf"aux_norm_{place}\."), f"fc_norm.{tap}.") for tap, place in enumerate(("low", "mid", "high"))),
)
_KNOWN = re.compile(
    r"fc\.(?:weight|bias)|input_norm\.weight|fc_norm\.\d+\.weight|norm\.weight|embed_tokens\.weight|lm_head\.weight|"
    r"layer\.(?:input_layernorm|hidden_norm|post_attention_layernorm)\.weight|"
    r"layer\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)\.(?:weight|bias)|d2t|t2d"
)
_REFUSED = (
    (r"(?:layers|midlayer)\.[1-9]\d*\.", "a head of more than one layer is not supported"),
    (r"\.(?:q_a|q_b|kv_a|kv_b)_", "multi-head latent attention is not supported"),
    (r"\.[qk]_norm\.", "norms of queries and keys are not supported"),
    (r"mask_hidden", "a head for parallel drafting (P-EAGLE) is not supported"),
    (r"_scales?$|\.scales$|\.(?:qweight|qzeros|weight_packed)$|zero_point", "use the head that is not quantised"),
    (r"lora_", "merge the adapter into its head first"),
    (r"token_map|hot_token_id", "vocabulary maps other than d2t are not supported"),
    (
        r"enorm|hnorm|eh_proj|(?:embed|embedding|hidden|lm_head)_layernorm|input_norm\d",
        "projects disagree on what this norm does",
    ),
)


@dataclass(frozen=True, slots=True)
class NamedTensors:
    """A head's tensors by their canonical names: those of `eagle.eagle_shapes`, and the vocabulary maps d2t and t2d."""

    files: HeadFiles
    names: Mapping[str, str]  # canonical -> in the file

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def shape(self, name: str) -> tuple[int, ...]:
        return self.files.tensors[self.names[name]].shape

    def where(self, name: str) -> str:
        """File and name in it, for an error message."""
        return f"{self.files.path}: {self.names[name]}"

    def matrix(self, name: str) -> tuple[int, int]:
        """Rows and columns of a tensor that every head has."""
        shape = self.shape(name) if name in self else self.missing(name, f"found {first_of(self.files.tensors)}")
        if len(shape) != 2 or 0 in shape:
            raise SpecedgeError(f"{self.where(name)}: expected a matrix, found shape {shape}; not an EAGLE head, or damaged")
        return shape[0], shape[1]

    def integers(self, name: str) -> npt.NDArray[np.int64]:
        """The values of a vocabulary map."""
        tensor = self.files.tensors[self.names[name]]
        if tensor.dtype not in _INTEGERS or len(tensor.shape) != 1 or 0 in tensor.shape:
            raise SpecedgeError(f"{self.where(name)}: expected a list of integers, found {tensor.dtype} {tensor.shape}")
        return tensor.read().astype(np.int64)

    def require_floats(self, name: str) -> None:
        if (dtype := self.files.tensors[self.names[name]].dtype) in _INTEGERS:
            raise SpecedgeError(f"{self.where(name)}: expected one of {', '.join(_FLOATS)}, found {dtype}")

    def missing(self, name: str, why: str) -> NoReturn:
        published = name.replace("layer.", "layers.0.", 1) if name.startswith("layer.") else name
        raise SpecedgeError(f"{self.files.path}: missing tensor: {published}, {why}; not a whole EAGLE head: download it again")


def name_tensors(files: HeadFiles) -> NamedTensors:
    """A head's tensors, leftovers without meaning dropped.

    Raises:
        SpecedgeError: A tensor belongs to no head that is supported.
    """
    carried = [name for name in files.tensors if not _CARRIES_NOTHING.fullmatch(name)]
    prefix = _prefix(carried)
    names: dict[str, str] = {}
    unknown = []
    for name in carried:
        bare = name.removeprefix(prefix)
        if reason := next((reason for pattern, reason in _REFUSED if re.search(pattern, bare)), None):
            raise SpecedgeError(f"{files.path}: unsupported tensor: {name}; {reason}")
        for pattern, place in _RENAMED:
            if match := pattern.match(bare):
                bare = place + bare[match.end() :]
        if not _KNOWN.fullmatch(bare):
            unknown.append(name)
        elif bare in names:
            raise SpecedgeError(f"{files.path}: {names[bare]} and {name} are the same tensor by two names")
        else:
            names[bare] = name
    if unknown:
        raise SpecedgeError(f"{files.path}: unused tensor: {first_of(unknown)}; an EAGLE head has no place for it")
    return NamedTensors(files, names)


def _prefix(names: Iterable[str]) -> str:
    """What all names start with, layer upon layer."""
    found = ""
    while prefix := next((prefix for prefix in _PREFIXES if _all_have(found + prefix, names)), ""):
        found += prefix
    return found


def _all_have(prefix: str, names: Iterable[str]) -> bool:
    inner = [name for name in names if name not in _BESIDE]
    return bool(inner) and all(name.startswith(prefix) for name in inner)
