"""A step graph opened on a Device: beside `probe` the only importer of onnxruntime."""

import contextlib
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from specedge.devices.device import Device, Options
from specedge.devices.table import CPU
from specedge.errors import SpecedgeError, first_line
from specedge.manifest import Graph, TensorSpec
from specedge.runtime.kept import kept_folder
from specedge.runtime.probe import Provider, find_provider

Array = npt.NDArray[np.generic]

VERSION: str = ort.__version__
_TYPES = {"float32": "tensor(float)", "float16": "tensor(float16)", "int32": "tensor(int32)", "int64": "tensor(int64)"}
PREPARED_GRAPH, PREPARED_WEIGHTS = "step.onnx", "weights.bin"
_SHARE, _LAST = "ep.share_ep_contexts", "ep.stop_share_ep_contexts"
_RECORD = "session.record_ep_graph_assignment_info"
_ALLOW = "convert for this device, or allow it (--allow-cpu-nodes)"
# Threads go on spinning when a run is over, on the cores that another session's run on: a round of SmolLM2 and an EAGLE head
# took 32 ms, and takes 20 with the head's asleep. The target's stay awake for what the host does between two of its steps.
_SLEEP = ("session.force_spinning_stop", "1")
_SPIN_ON = ("session.intra_op.spin_duration_us", "1000")
_SMALLEST_OUTSIDE = 1024  # bytes of a tensor that is not written into the prepared graph itself


class Session:
    """One graph, checked against what the manifest says of it.

    With `prepared`, the graph is also written to that folder as this machine runs it: optimised, and its weights in the
    order its kernels read them, so that a session opened there maps them instead of copying them. A `context` shares its
    weights with others of its role. A session that is not `alone` takes turns with others, and rests meanwhile.
    """

    def __init__(
        self,
        path: Path,
        graph: Graph,
        device: Device,
        threads: int | None = None,
        prepared: Path | None = None,
        context: bool = False,
        alone: bool = True,
    ) -> None:
        provider = find_provider(device)
        self._copies = provider.name != CPU
        try:
            options = _options(device, threads)
            options.add_session_config_entry(*(_SPIN_ON if alone else _SLEEP))
            if context:
                options.add_session_config_entry(_SHARE, "1")
            if prepared:
                _prepare(options, prepared)
            self._session = open_session(path, options, provider)
        except Exception as error:  # onnxruntime raises its own unrelated exception types
            if prepared:
                raise SpecedgeError(f"{prepared}: could not be written ({first_line(error)})") from error
            if left := nodes_left(path, provider):
                raise SpecedgeError(f"{path}: {device.provider} leaves to the CPU {', '.join(left)}; {_ALLOW}") from error
            remedy = "compile again" if context else "convert again"
            remedy += "" if provider.name == CPU else ", update the driver, or use another device"
            raise SpecedgeError(f"{path}: onnxruntime cannot open it ({first_line(error)}); {remedy}") from error
        if self._session.get_providers()[0] != provider.name:
            raise SpecedgeError(f"device {device.name!r}: onnxruntime fell back to {self._session.get_providers()}")
        if device.whole and (elsewhere := {name: count for name, count in self.nodes.items() if name != provider.name}):
            taken = ", ".join(f"{count} nodes to {name}" for name, count in elsewhere.items())
            raise SpecedgeError(f"{path}: {provider.name} silently left {taken}; {_ALLOW}")
        for kind, found, expected in (
            ("input", self._session.get_inputs(), graph.inputs),
            ("output", self._session.get_outputs(), graph.outputs),
        ):
            _check(path, kind, {node.name: (node.type, tuple(node.shape)) for node in found}, expected)

    @property
    def nodes(self) -> dict[str, int]:
        """How many nodes which provider took; of plug-ins only."""
        return _count_nodes(self._session)

    def bind(self) -> "OrtBinding":
        """Fresh bindings of this graph's inputs and outputs."""
        return OrtBinding(self._session, self._copies)


class OrtBinding:
    """Inputs and outputs tied to the caller's arrays: a run reads and writes them where they lie.

    A provider whose memory is not the CPU's `copies` inputs when they are bound: there they are bound anew before every run.
    """

    def __init__(self, session: ort.InferenceSession, copies: bool = False) -> None:
        self._session, self._copies = session, copies
        self._inputs: dict[str, Array] = {}
        self._io = session.io_binding()
        self._arrays: dict[str, Array] = {}  # the binding holds addresses, so someone must hold the arrays

    def input(self, name: str, array: Array) -> None:
        self._inputs[name] = array
        self._io.bind_input(name, "cpu", 0, array.dtype.type, array.shape, self._address(name, array))

    def output(self, name: str, array: Array) -> None:
        self._io.bind_output(name, "cpu", 0, array.dtype.type, array.shape, self._address(name, array))

    def run(self) -> None:
        for name, array in self._inputs.items() if self._copies else ():
            self.input(name, array)
        self._session.run_with_iobinding(self._io)

    def _address(self, name: str, array: Array) -> int:
        if not array.flags.c_contiguous:
            raise ValueError(f"{name}: only a contiguous array can be bound, found strides {array.strides}")
        self._arrays[name] = array
        address: int = array.__array_interface__["data"][0]  # array.ctypes.data takes three times as long
        return address


def open_session(
    path: Path, options: ort.SessionOptions, provider: Provider, more: Options = (), **values: str
) -> ort.InferenceSession:
    """A session on a provider; `more` are a plug-in's options for this one alone, `values` what the names in them stand for."""
    device = provider.device
    if device.provider == CPU:
        return ort.InferenceSession(str(path), options, providers=[CPU])
    if device.whole:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options.add_session_config_entry(_RECORD, "1")
    if not provider.devices:
        cached = any("{cache}" in value for _, value in device.options)
        cache = kept_folder(path, device.name, provider.version, *map(str, device.options)) if cached else ""
        own = {name: value.format(cache=cache) for name, value in device.options}
        return ort.InferenceSession(str(path), options, providers=[(device.provider, own)])
    options.add_provider_for_devices(list(provider.devices), provider.options(more, **values))
    with _stdout_aside() if provider.emulated else contextlib.nullcontext():
        return ort.InferenceSession(str(path), options)


def write_contexts(paths: Mapping[Path, Path], provider: Provider) -> Iterator[Path]:
    """Compile graphs ahead of time, each into the file it is mapped to, with one file of weights beside the first.

    Raises:
        SpecedgeError: One cannot be compiled, or not as a whole.
    """
    plugin = provider.device.plugin
    assert plugin is not None
    sessions = []  # weights are shared among sessions that live
    for number, (source, path) in enumerate(paths.items(), 1):
        options = _options(provider.device, None)
        for key, value in (
            ("ep.context_enable", "1"),
            ("ep.context_file_path", str(path)),
            ("ep.context_embed_mode", "0"),
            (_SHARE, "1"),
            (_LAST, str(int(number == len(paths)))),
        ):
            options.add_session_config_entry(key, value)
        try:
            sessions.append(open_session(source, options, provider, plugin.compile_options))
        except Exception as error:  # onnxruntime raises its own unrelated exception types
            if left := nodes_left(source, provider):
                raise SpecedgeError(f"{source}: {provider.device.provider} leaves to the CPU {', '.join(left)}") from error
            raise SpecedgeError(f"{source}: {provider.device.provider} cannot compile it ({first_line(error)})") from error
        yield path


def nodes_left(path: Path, provider: Provider) -> list[str]:
    """What a provider leaves to the CPU of a graph that must run on it as a whole, with reasons if a plug-in tells them."""
    plugin = provider.device.plugin
    if provider.name == CPU or not provider.device.whole:
        return []
    options = ort.SessionOptions()
    options.log_severity_level = 4
    with tempfile.TemporaryDirectory() as folder:
        try:
            free = replace(provider, device=replace(provider.device, whole=False))
            session = open_session(path, options, free, plugin.diagnosis if plugin else (), folder=folder)
        except Exception:  # the graph is damaged: the first error says how
            return []
        reasons = _reasons(Path(folder))
        return [
            f"{node.name} ({reasons.get(node.name, node.op_type)})"
            for part in session.get_provider_graph_assignment_info()
            if part.ep_name != provider.name
            for node in part.get_nodes()
        ]


def _reasons(folder: Path) -> dict[str, str]:
    """Why nodes were not taken, by name, as far as the plug-in's trace can be read."""
    found: dict[str, str] = {}
    for file in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            listed = json.loads(file.read_text(encoding="utf-8")).get("unsupported_nodes", ())
            found |= {node["node_name"]: node["reason"] for node in listed}
    return found


def _count_nodes(session: ort.InferenceSession) -> dict[str, int]:
    if len(session.get_providers()) == 1 or session.get_session_options().get_session_config_entry(_RECORD) != "1":
        return {}
    counts: Counter[str] = Counter()
    for part in session.get_provider_graph_assignment_info():
        counts[part.ep_name] += len(part.get_nodes())
    return dict(counts)


_printing = threading.RLock()


@contextlib.contextmanager
def _stdout_aside() -> Iterator[None]:
    """What an emulator prints when it starts is dropped: standard output is for text and JSON."""
    with _printing:
        try:
            kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
        except OSError:  # standard output is closed
            yield
            return
        try:
            if sys.stdout:
                sys.stdout.flush()
            os.dup2(nowhere, 1)
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)
            os.close(nowhere)


def _options(device: Device, threads: int | None) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = (
        4 if device.plugin or device.catalog else 3
    )  # what goes wrong in a plug-in is said in our own line
    # a plan made for one width is useless for the next
    options.enable_mem_pattern = device.static and device.plans_memory
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    if threads:
        options.intra_op_num_threads = threads
    return options


def _prepare(options: ort.SessionOptions, folder: Path) -> None:
    options.log_severity_level = 4  # what goes wrong in a preparation is said in our own line
    options.optimized_model_filepath = str(folder / PREPARED_GRAPH)
    for key, value in (
        ("optimized_model_external_initializers_file_name", PREPARED_WEIGHTS),
        ("optimized_model_external_initializers_min_size_in_bytes", str(_SMALLEST_OUTSIDE)),
        ("save_external_prepacked_constant_initializers", "1"),
    ):
        options.add_session_config_entry(f"session.{key}", value)


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
