"""What a Core ML package holds: functions, ops, and every weight with how it is stored and why."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specedge import mlpackage
from specedge.errors import SpecedgeError, first_line
from specedge.mlpackage import import_coremltools

_CODES = ("val", "data", "quantized_data", "indices", "nonzero_data")  # what is looked at first of a compressed constant
_BITS = re.compile(r"[A-Z]+(\d+)")  # of a type's name: UINT4, FLOAT16


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A constant of the weight file: bits of a number, how far a scale reaches, bytes with all that belongs to it.

    `functions` read it; `why` is said where it has more than 4 bits.
    """

    name: str
    shape: tuple[int, ...]
    bits: int
    scales: str
    bytes: int
    functions: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Feature:
    """An input or output of a function."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PackedFunction:
    """A function: what it takes and gives, how many of which ops it has, and in which types these compute."""

    name: str
    inputs: tuple[Feature, ...]
    outputs: tuple[Feature, ...]
    ops: dict[str, int]
    types: dict[str, int]
    rank: int
    widest: int


@dataclass(frozen=True, slots=True)
class PackageContents:
    """All of a package; `specification` is the version of Core ML's format that its reader must know."""

    specification: int
    default: str
    bytes: int
    functions: tuple[PackedFunction, ...]
    weights: tuple[PackedWeight, ...]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def read_package(path: Path) -> PackageContents:
    """What a package holds, from its program and the heads of its weight file's arrays.

    Raises:
        SpecedgeError: It is damaged, holds no program, or coremltools is not installed.
    """
    spec = load_spec(path)
    if spec.WhichOneof("Type") != "mlProgram":
        raise SpecedgeError(f"{path}: holds a {spec.WhichOneof('Type')}, expected a program (mlProgram)")
    described = {function.name: function for function in spec.description.functions} or {"main": spec.description}
    functions, weights = [], dict[tuple[str, int], PackedWeight]()
    for name, function in sorted(spec.mlProgram.functions.items()):
        operations = [op for block in function.block_specializations.values() for op in block.operations]
        functions.append(_function(name, described.get(name, spec.description), operations))
        for found, place in _weights(path, operations, name):
            known = weights.get((found.name, place))
            weights[found.name, place] = _also_read(known, name) if known else found
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    default = spec.description.defaultFunctionName or "main"
    return PackageContents(spec.specificationVersion, default, size, tuple(functions), tuple(weights.values()))


def load_spec(path: Path) -> Any:
    """A package's program as its protocol buffer.

    Raises:
        SpecedgeError: It cannot be read, or coremltools is not installed.
    """
    utils = import_coremltools("models.utils", str(path))
    try:
        return utils.load_spec(str(path))
    except Exception as error:  # whatever its parser raises
        raise SpecedgeError(f"{path}: cannot be read ({first_line(error)}); convert again") from error


def feature(described: Any) -> Feature:
    """An input or output as a package describes it."""
    array = described.type.multiArrayType
    return Feature(described.name, array.ArrayDataType.Name(array.dataType).lower(), tuple(array.shape))


def _function(name: str, described: Any, operations: list[Any]) -> PackedFunction:
    computed = [op for op in operations if op.type != "const"]
    shapes = [_shape(output) for op in operations for output in op.outputs]
    return PackedFunction(
        name=name,
        inputs=tuple(map(feature, described.input)),
        outputs=tuple(map(feature, described.output)),
        ops=dict(sorted(Counter(op.type for op in computed).items())),
        types=dict(sorted(Counter(_type(output) for op in computed for output in op.outputs).items())),
        rank=max(map(len, shapes), default=0),
        widest=max((max(shape, default=0) for shape in shapes), default=0),
    )


def _weights(path: Path, operations: list[Any], function: str) -> Iterator[tuple[PackedWeight, int]]:
    """The constants of a function that lie in the weight file, each with its place there."""
    for op in operations:
        values = {"val": op.attributes["val"]} if op.type == "const" else {}
        if op.type.startswith("constexpr_"):
            values = dict(op.attributes) | {  # up to iOS 17 the ones, then the others
                key: argument.arguments[0].value for key, argument in op.inputs.items() if argument.arguments
            }
        places = {
            key: value.blobFileValue.offset for key, value in values.items() if value.WhichOneof("value") == "blobFileValue"
        }
        if not places:
            continue
        output = op.outputs[0]
        main = next((key for key in _CODES if key in places), min(places))
        bits = int(match[1]) if (match := _BITS.fullmatch(_data_type(values[main].type.tensorType))) else 8
        size = sum(mlpackage.find_blob(path, place)[1] for place in places.values())
        why = "" if bits == 4 else _why(output.name, _shape(output), bits)
        yield PackedWeight(output.name, _shape(output), bits, _scales(values), size, (function,), why), places[main]


def _scales(values: dict[str, Any]) -> str:
    """How far a scale or a table reaches, of quantised weights."""
    if "lut" in values:
        return "a table per " + "x".join(map(str, _dimensions(values["lut"].type.tensorType)[:-2]))
    if "scale" not in values:
        return ""
    _, *blocks = _dimensions(values["scale"].type.tensorType) or (1,)
    columns = _dimensions(values["data"].type.tensorType)[1:] if "data" in values else ()
    reach = f"{columns[0] // blocks[0]} of a row" if columns and set(blocks) != {1} else "row"
    return f"a scale per {reach}" + (", zero points" if "offset" in values else "")


def _why(name: str, shape: tuple[int, ...], bits: int) -> str:
    """Why a weight has more than 4 bits, as far as its name and shape tell."""
    if name.startswith("zeros_"):
        return "the bias that Core ML wants of a product without one"
    if name.endswith("_minima"):
        return "what codes of 4 bits count from, block by block"
    if len(shape) < 2 or min(shape) == 1:
        return "a vector: one number per channel, and no product to speak of"
    if name.startswith(("embed_tokens", "lm_head", "target_lm_head")) or "lm_head_weight" in name:
        return f"the LM head: {bits} bits, as --head-weights says"
    return f"{bits} bits, as --weights or --bits says"


def _also_read(weight: PackedWeight, function: str) -> PackedWeight:
    return replace(weight, functions=(*weight.functions, function))


def _data_type(tensor: Any) -> str:
    name: str = import_coremltools("proto.MIL_pb2", "a package").DataType.Name(tensor.dataType)
    return name


def _type(output: Any) -> str:
    return _data_type(output.type.tensorType).lower()


def _shape(output: Any) -> tuple[int, ...]:
    return _dimensions(output.type.tensorType)


def _dimensions(tensor: Any) -> tuple[int, ...]:
    return tuple(size.constant.size for size in tensor.dimensions)
