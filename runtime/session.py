"""A step graph opened on a Device: the only importer of onnxruntime."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from specedge.devices.device import Device
from specedge.errors import SpecedgeError
from specedge.manifest import Graph, TensorSpec

Array = npt.NDArray[np.generic]

VERSION: str = ort.__version__
_TYPES = {"float32": "tensor(float)", "float16": "tensor(float16)", "int32": "tensor(int32)", "int64": "tensor(int64)"}
PREPARED_GRAPH, PREPARED_WEIGHTS = "step.onnx", "weights.bin"
_SMALLEST_OUTSIDE = 1024  # bytes of a tensor that is not written into the prepared graph itself


class Session:
    """One graph, checked against what the manifest says of it.

    With `prepared`, the graph is also written to that folder as this machine runs it: optimised, and its weights in the
    order its kernels read them, so that a session opened there maps them instead of copying them.
    """

    def __init__(
        self, path: Path, graph: Graph, device: Device, threads: int | None = None, prepared: Path | None = None
    ) -> None:
        if device.provider not in ort.get_available_providers():
            here = ", ".join(ort.get_available_providers())
            raise SpecedgeError(f"device {device.name!r}: needs {device.provider}, onnxruntime here has {here}")
        try:
            options = _options(device, threads, prepared)
            self._session = ort.InferenceSession(str(path), options, providers=[device.provider])
        except Exception as error:  # onnxruntime raises its own unrelated exception types
            if prepared:
                raise SpecedgeError(f"{prepared}: could not be written ({_first_line(error)})") from error
            raise SpecedgeError(f"{path}: onnxruntime cannot open it ({_first_line(error)}); convert again") from error
        if self._session.get_providers()[0] != device.provider:
            raise SpecedgeError(f"device {device.name!r}: onnxruntime fell back to {self._session.get_providers()}")
        for kind, found, expected in (
            ("input", self._session.get_inputs(), graph.inputs),
            ("output", self._session.get_outputs(), graph.outputs),
        ):
            _check(path, kind, {node.name: (node.type, tuple(node.shape)) for node in found}, expected)

    def bind(self) -> "Binding":
        """Fresh bindings of this graph's inputs and outputs."""
        return Binding(self._session)


class Binding:
    """Inputs and outputs tied to the caller's arrays: a run reads and writes them where they lie."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self._io = session.io_binding()
        self._arrays: dict[str, Array] = {}  # the binding holds addresses, so someone must hold the arrays

    def input(self, name: str, array: Array) -> None:
        self._io.bind_input(name, "cpu", 0, array.dtype.type, array.shape, self._address(name, array))

    def output(self, name: str, array: Array) -> None:
        self._io.bind_output(name, "cpu", 0, array.dtype.type, array.shape, self._address(name, array))

    def run(self) -> None:
        self._session.run_with_iobinding(self._io)

    def _address(self, name: str, array: Array) -> int:
        if not array.flags.c_contiguous:
            raise ValueError(f"{name}: only a contiguous array can be bound, found strides {array.strides}")
        self._arrays[name] = array
        address: int = array.__array_interface__["data"][0]  # array.ctypes.data takes three times as long
        return address


def _options(device: Device, threads: int | None, prepared: Path | None) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 4 if prepared else 3  # what goes wrong in a preparation is said in our own line
    options.enable_mem_pattern = device.static  # a plan made for one width is useless for the next
    if threads:
        options.intra_op_num_threads = threads
    if prepared:
        options.optimized_model_filepath = str(prepared / PREPARED_GRAPH)
        for key, value in (
            ("optimized_model_external_initializers_file_name", PREPARED_WEIGHTS),
            ("optimized_model_external_initializers_min_size_in_bytes", str(_SMALLEST_OUTSIDE)),
            ("save_external_prepacked_constant_initializers", "1"),
        ):
            options.add_session_config_entry(f"session.{key}", value)
    return options


def _check(
    path: Path, kind: str, found: dict[str, tuple[str, tuple[int | str, ...]]], expected: tuple[TensorSpec, ...]
) -> None:
    if unlisted := found.keys() - {spec.name for spec in expected}:
        raise SpecedgeError(f"{path}: {kind} {min(unlisted)}: the manifest does not list it; convert again")
    for spec in expected:
        dtype, shape = found.get(spec.name, ("", "nothing"))
        if shape != spec.shape:
            raise SpecedgeError(f"{path}: {kind} {spec.name}: manifest says {spec.shape}, graph has {shape}; convert again")
        if dtype != _TYPES.get(spec.dtype):
            raise SpecedgeError(
                f"{path}: {kind} {spec.name}: manifest says {spec.dtype!r:.60}, graph has {dtype}; convert again"
            )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300]
