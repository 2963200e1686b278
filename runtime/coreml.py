"""A function of a Core ML package, opened: by Core ML on a Mac, by the evaluator elsewhere."""

import contextlib
import platform
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specedge.devices.device import Device
from specedge.errors import SpecedgeError, first_line
from specedge.manifest import Graph
from specedge.mlpackage import import_coremltools
from specedge.runtime.kept import kept_folder
from specedge.runtime.package import feature, load_spec
from specedge.runtime.probe import find_provider

Array = npt.NDArray[Any]
Predict = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""Inputs by name to outputs by name."""


class PackageFunction:
    """One function of a package, checked against what the manifest says of it."""

    def __init__(self, package: Path, graph: Graph, device: Device) -> None:
        emulated = find_provider(device).emulated  # says what to install where coremltools is missing
        _check(package, graph)
        assert graph.function is not None
        self._predict = (_evaluated if emulated else _opened)(package, graph.function, device)
        self.nodes: dict[str, int] = {}
        """Core ML keeps to itself which unit takes an op."""

    def bind(self) -> "PackageBinding":
        return PackageBinding(self._predict)


class PackageBinding:
    """Inputs and outputs tied to the caller's arrays; they are copied in and out, as Core ML takes no others' memory."""

    def __init__(self, predict: Predict) -> None:
        self._predict = predict
        self._inputs: dict[str, Array] = {}
        self._outputs: dict[str, Array] = {}

    def input(self, name: str, array: Array) -> None:
        self._inputs[name] = array

    def output(self, name: str, array: Array) -> None:
        self._outputs[name] = array

    def run(self) -> None:
        made = self._predict(self._inputs)
        for name, array in self._outputs.items():
            np.copyto(array, made[name].reshape(array.shape), casting="same_kind")


def _evaluated(package: Path, function: str, device: Device) -> Predict:
    from specedge.runtime.evaluator import open_program

    program = open_program(package)
    return lambda inputs: program.run(function, inputs)


def _opened(package: Path, function: str, device: Device) -> Predict:
    assert device.package is not None
    coremltools = import_coremltools("", f"device {device.name!r}")
    units = coremltools.ComputeUnit[device.package.compute_units]
    try:
        compiled = _compile_once(package, coremltools)
        model = coremltools.models.CompiledMLModel(str(compiled), units, function)
    except Exception as error:  # Core ML's own errors come as what its bindings make of them
        raise SpecedgeError(f"{package}: {function}: Core ML cannot open it ({first_line(error)})") from error

    def predict(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        try:
            made: Mapping[str, Array] = model.predict(dict(inputs))
        except Exception as error:  # likewise
            raise SpecedgeError(f"{package}: {function}: Core ML cannot run it ({first_line(error)})") from error
        return made

    return predict


def _compile_once(package: Path, coremltools: Any) -> Path:
    """What Core ML makes of a package, all of its functions: kept, for each of them would compile the whole anew."""
    folder = kept_folder(package, str(coremltools.__version__), platform.mac_ver()[0])
    place = folder / "model.mlmodelc"
    if not place.exists():
        with tempfile.TemporaryDirectory(dir=folder) as partial:
            made = coremltools.models.utils.compile_model(str(package), str(Path(partial) / place.name))
            with contextlib.suppress(OSError):  # another process was quicker
                Path(made).rename(place)
    return place


def _check(package: Path, graph: Graph) -> None:
    """Names, types and shapes of a function, as the package itself describes them.

    Raises:
        SpecedgeError: They are not the manifest's, or the package cannot be read.
    """
    functions = {function.name: function for function in load_spec(package).description.functions}
    if graph.function not in functions:
        raise SpecedgeError(f"{package}: has no function {graph.function!r}, but {', '.join(functions)}; convert again")
    described = functions[graph.function]
    for kind, features, expected in (("input", described.input, graph.inputs), ("output", described.output, graph.outputs)):
        found = {one.name: (one.dtype, one.shape) for one in map(feature, features)}
        wanted = {spec.name: (spec.dtype, spec.shape) for spec in expected}
        for name in sorted(found.keys() | wanted.keys()):
            if found.get(name) != wanted.get(name):
                raise SpecedgeError(
                    f"{package}: {graph.function}: {kind} {name}: manifest says {wanted.get(name)}, package has "
                    f"{found.get(name)}; convert again"
                )
