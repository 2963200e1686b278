"""Core ML packages: several graphs as the functions of one program, which stores their weights once."""

import json
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import onnx_ir as ir

from specedge import mlpackage
from specedge.devices.device import Device
from specedge.errors import SpecedgeError
from specedge.export.mil import Matrix, mil_name, translate
from specedge.export.pieces import split_outputs
from specedge.export.to_onnx import specs
from specedge.export.weights import StoredAt, place_of, read_part, read_quantized
from specedge.manifest import Extent, Graph, Weight
from specedge.quant.scheme import Scheme

import coremltools as ct  # isort: skip  # behind export.mil, which tells its logger to be quiet
from coremltools.converters.mil.backend.mil.load import load as to_spec  # isort: skip
from coremltools.converters.mil.mil import Program, types  # isort: skip

_ITEMS = {"model.mlmodel": "CoreML Model Specification", "weights": "CoreML Model Weights"}
_PARTS = {"val": "values", "data": "codes", "scale": "scales", "offset": "zero_points"}
_RANK = 5  # the most that Core ML knows


class PackageWriter:
    """Collects the functions of one package, `file` in the bundle `folder`, and writes it."""

    def __init__(self, folder: Path, file: str, device: Device) -> None:
        assert device.package is not None
        mlpackage.import_coremltools("libmilstoragepython", f"device {device.name!r}")  # writes weights
        self.file = file
        self._folder, self._widest_output, self._package = folder, device.widest_output, device.package
        self._program = Program()
        self._named: dict[StoredAt, Weight] = {}  # with the names they have in the program
        self._matrices: dict[str, Matrix] = {}

    def add(self, name: str, model: ir.Model, weights: Mapping[str, Weight], width: int | None) -> Graph:
        """Translate a graph whose weights are inputs into the function `name`; its entry in the manifest.

        Raises:
            SpecedgeError: A weight or another tensor has a shape that cannot be stored or run.
        """
        if self._widest_output is not None:
            weights = split_outputs(model.graph, weights, self._widest_output)
        named = {name: self._name(weight) for name, weight in weights.items()}
        function = translate(model, named, self._matrix, self._package.target)
        self._check_shapes(name, function)
        self._program.add_function(name, function)
        ops = Counter(op.op_type for op in function.operations if op.op_type != "const")
        inputs = [value for value in model.graph.inputs if value.name not in weights]
        return Graph(self.file, width, specs(inputs), specs(model.graph.outputs), dict(sorted(ops.items())), name)

    def save(self, default: str) -> dict[StoredAt, Weight]:
        """Write the package; `default` is the function that runs unless another is named.

        The weights as they lie in its weight file, by where they came from: all but arrays of a few elements. The same
        functions give the same bytes.
        """
        package = self._folder / self.file
        weights = package / mlpackage.WEIGHT_FILE
        weights.parent.mkdir(parents=True)
        self._program.default_function_name = default
        self._program.export_as_multifunction = self._program.skip_all_passes = True
        version = getattr(ct.target, self._package.target).value
        spec = to_spec(self._program, str(weights.parent), specification_version=version)
        (package / mlpackage.MODEL).write_bytes(spec.SerializeToString(deterministic=True))
        (package / mlpackage.MANIFEST).write_text(_manifest(), encoding="utf-8")
        return dict(self._stored(spec, package))

    def _name(self, weight: Weight) -> Weight:
        """The weight by the name that it, and no other, has in the program: several models may have one of a kind."""
        if (place := place_of(weight)) not in self._named:
            taken = any(other.name == weight.name for other in self._named.values())
            folder = PurePosixPath(weight.file).parent
            self._named[place] = replace(weight, name=f"{folder}.{weight.name}") if taken else weight
        return self._named[place]

    def _matrix(self, weight: Weight) -> Matrix:
        """A weight as it is written, the same arrays for every function."""
        if weight.name not in self._matrices:
            self._matrices[weight.name] = _matrix(weight, self._folder / weight.file)
        return self._matrices[weight.name]

    def _check_shapes(self, name: str, function: Any) -> None:
        widest = self._package.widest
        for var in (var for op in function.operations for var in op.outputs):
            if len(var.shape) > _RANK or (widest and max(var.shape, default=0) > widest):
                limit = f" of at most {widest}; give a smaller --context, or another device" if widest else ""
                raise SpecedgeError(
                    f"{self.file}: {name}: {var.name} has shape {tuple(var.shape)}, expected at most {_RANK} dimensions{limit}"
                )

    def _stored(self, spec: Any, package: Path) -> Iterator[tuple[StoredAt, Weight]]:
        blobs = dict(_blobs(spec))
        for place, weight in self._named.items():
            if weight.name not in self._matrices:  # no function reads it
                continue
            matrix, name = self._matrices[weight.name], mil_name(weight.name)
            wanted = {part: (name, part) for part in ("values", "codes", "scales", "zero_points")}
            wanted["minima"] = (f"{name}_minima", "values")
            found = {part: blobs[key] for part, key in wanted.items() if key in blobs}
            if found.keys() == matrix.parts.keys():
                parts = {part: _extent(package, at, part, matrix) for part, at in found.items()}
                yield place, replace(weight, parts=parts, file=f"{self.file}/{mlpackage.WEIGHT_FILE}")


def _matrix(weight: Weight, path: Path) -> Matrix:
    """A stored weight in the layout of Core ML: a scale per row or per block, codes of zero behind rows that end within one."""
    if "values" in weight.parts:
        return Matrix(values=np.asarray(read_part(path, weight.parts["values"])))
    stored, scheme = read_quantized(weight, path), Scheme.from_name(weight.scheme)
    codes, blocks = stored.codes.reshape(weight.shape[0], -1), slice(None)
    if scheme.group is None:
        even = -(-weight.shape[1] * scheme.bits // 8) * 8 // scheme.bits
        codes, blocks = codes[:, :even], slice(1)
    signed = "" if scheme.symmetric else "u"
    dtype = types.nptype_from_builtin(types.string_to_builtin(f"{signed}int{scheme.bits}"))
    middle = np.uint8(scheme.middle_code if scheme.symmetric else 0)
    return Matrix(
        bits=scheme.bits,
        codes=(codes - middle).view(np.uint8 if signed else np.int8).astype(dtype),
        scales=stored.scales[:, blocks],
        zeros=None if stored.zero_points is None else stored.zero_points[:, blocks].astype(dtype),
        minima=None if stored.minima is None else stored.minima[:, blocks].astype(stored.scales.dtype),
    )


def _blobs(spec: Any) -> Iterator[tuple[tuple[str, str], int]]:
    """Where the weight file says more of an array: by the name of a constant and its part."""
    for function in spec.mlProgram.functions.values():
        for block in function.block_specializations.values():
            for op in block.operations:
                values = {"val": op.attributes["val"]} if op.type == "const" else {}
                if op.type.startswith("constexpr_"):
                    values = {key: argument.arguments[0].value for key, argument in op.inputs.items()}
                for key, value in values.items():
                    if value.WhichOneof("value") == "blobFileValue":
                        yield (op.outputs[0].name, _PARTS[key]), value.blobFileValue.offset


def _extent(package: Path, place: int, part: str, matrix: Matrix) -> Extent:
    """The extent of an array that a package's program says is described at `place`."""
    offset, size = mlpackage.find_blob(package, place)
    array = matrix.parts[part]
    shape, dtype = array.shape, str(array.dtype)
    if part == "codes":
        assert matrix.scales is not None
        rows, columns = shape
        blocks = matrix.scales.shape[1]
        shape = (rows, blocks, columns // blocks * matrix.bits // 8)
    if part == "zero_points":
        shape = (size,)
    return Extent(offset, size, dtype, shape)


def _manifest() -> str:
    """What names a package's files; Core ML wants identifiers, and no two packages are ever asked to differ in them."""
    ids = {name: str(uuid.uuid5(uuid.NAMESPACE_URL, f"specedge/{name}")) for name in _ITEMS}
    entries = {
        ids[name]: {"author": mlpackage.AUTHOR, "description": said, "name": name, "path": f"{mlpackage.AUTHOR}/{name}"}
        for name, said in _ITEMS.items()
    }
    record = {"fileFormatVersion": "1.0.0", "itemInfoEntries": entries, "rootModelIdentifier": ids["model.mlmodel"]}
    return json.dumps(record, indent=4, sort_keys=True) + "\n"
