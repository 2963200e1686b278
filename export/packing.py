"""What `quantization_config` says of a checkpoint's packed matrices; whatever is not supported is refused by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specedge.errors import SpecedgeError
from specedge.quant.scheme import GROUPS, Scheme

WORD = 32  # bits of the integers that codes and zero points are packed into


@dataclass(frozen=True, slots=True)
class Packing:
    """How every matrix that is stored in parts is stored."""

    name: str  # GPTQ4, GPTQ8, AWQ4
    scheme: Scheme
    parts: tuple[str, ...]  # the tensors of a matrix
    packs_inputs: bool  # an integer holds codes of neighbouring inputs, else of neighbouring outputs
    order: tuple[int, ...] | None  # which of its outputs each field of an integer holds; None: in order
    zero_offset: int  # what must be added to a stored zero point
    centred: str | None  # the setting by which every zero point is the middle code


def read_packing(settings: Mapping[str, Any], source: str) -> Packing | None:
    """The packing that a config.json describes, None for one of plain tensors.

    The keys are those of transformers' GPTQConfig and AwqConfig. `desc_act` is not among them: a matrix's own `g_idx` says
    which columns share a scale.
    """
    config = settings.get("quantization_config")
    if not config:
        return None
    given: Mapping[str, Any] = config if isinstance(config, dict) else {"quant_method": config}
    match given.get("quant_method"):
        case "gptq":
            return _read_gptq(given, source)
        case "awq":
            return _read_awq(given, source)
        case method:
            raise _refused(source, "quant_method", method, "'gptq' or 'awq'")


def _read_gptq(config: Mapping[str, Any], source: str) -> Packing:
    bits = _number(config, source, "bits", (4, 8))
    key = _first_key(config, "checkpoint_format", "format")
    if (layout := config.get(key) or "gptq") not in ("gptq", "gptq_v2"):
        raise _refused(source, key, layout, "'gptq' or 'gptq_v2'")
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(pattern.startswith("-:") for pattern in dynamic):
        raise _refused(source, "dynamic", dynamic, "only modules left out ('-:...'), and the same bits and group for the rest")
    return Packing(
        name=f"GPTQ{bits}",
        scheme=_scheme(bits, config, source),
        parts=("qweight", "qzeros", "scales", "g_idx"),
        packs_inputs=True,
        order=None,
        zero_offset=1 if layout == "gptq" else 0,
        centred="sym=True" if config.get("sym") is True else None,
    )


def _read_awq(config: Mapping[str, Any], source: str) -> Packing:
    bits = _number(config, source, "bits", (4,))
    key = _first_key(config, "version", "checkpoint_format", "format")
    if str(version := config.get(key) or "gemm").lower() != "gemm":
        raise _refused(source, key, version, "'gemm'")
    return Packing(
        name=f"AWQ{bits}",
        scheme=_scheme(bits, config, source),
        parts=("qweight", "qzeros", "scales"),
        packs_inputs=False,
        order=(0, 2, 4, 6, 1, 3, 5, 7),
        zero_offset=0,
        centred="zero_point=False" if config.get("zero_point") is False else None,
    )


def _scheme(bits: int, config: Mapping[str, Any], source: str) -> Scheme:
    group = _number(config, source, "group_size", [-1 if group is None else group for group in GROUPS.values()])
    return Scheme(bits, None if group == -1 else group, symmetric=False)


def _number(config: Mapping[str, Any], source: str, key: str, known: Sequence[int]) -> int:
    value = config.get(key)
    if type(value) is not int or value not in known:
        raise _refused(source, key, value, " or ".join(map(str, known)))
    return value


def _first_key(config: Mapping[str, Any], *keys: str) -> str:
    """Of several spellings of one setting, the one that is there and counts for transformers."""
    return next((key for key in keys if config.get(key) is not None), keys[0])


def _refused(source: str, key: str, found: object, expected: str) -> SpecedgeError:
    return SpecedgeError(
        f"{source}: quantization_config: {key} {found!r} is not supported, expected {expected}; use the unquantised checkpoint"
    )
