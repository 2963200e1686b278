"""Graphs for DirectML and for what Windows ML finds: their operators, what the CPU makes of them, and how they are opened."""

import dataclasses
import sys
import types
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import tiny
from bundles import Models, graphs, make, stored
from eagles import TREE, Chains
from specedge.bundle import open_bundle
from specedge.devices.operators import FLOATS, Operators
from specedge.devices.table import DEVICES, get_device
from specedge.errors import SpecedgeError, UsageError
from specedge.export.plain import preflight
from specedge.runtime import TreeShape, load, probe
from specedge.runtime.agreement import walk
from specedge.runtime.probe import choose, find_provider
from specedge.runtime.session import _options
from stand_in import Provided, provide
from test_export_cli import refused
from test_export_qnn import ASYMMETRIC, FLOAT16, INT4, RAGGED

ROWS = ("directml", "windowsml", "openvino")
IDS = [int(token) for token in np.random.default_rng(0).integers(3, 128, 24)]
FLOAT32: dict[str, Any] = {"body": "float32", "head": "float32"}


# ---- numbers


@pytest.mark.parametrize("shape", [{}, RAGGED], ids=["whole", "ragged"])
@pytest.mark.parametrize(
    ("device", "form"),
    [*product(("directml", "openvino"), [FLOAT32]), *product(ROWS, [FLOAT16])],
)
def test_the_very_graphs_compute_the_model(
    models: Models, device: str, form: dict[str, Any], shape: dict[str, Any], tmp_path: Path
) -> None:
    """In float16 the CPU rounds after every operator: 0.04 of logits up to 9, with RMSNormalization as an operator too."""
    source, model = models(**shape)
    path = make(source, tmp_path / "b", device=device, widths=(1, 4), **form)
    truth, engine = tiny.hf_logits(model, IDS), load(path, "cpu-static")
    for width in (1, 4, 8):  # one token, gamma + 1, the chunk
        limit = 1e-3 if form is FLOAT32 else 5e-3 * np.abs(truth).max()
        assert np.abs(walk(engine.target, IDS, width) - truth).max() <= limit
    assert engine.target.role.kv.dtype == form["body"]


@pytest.mark.parametrize("device", ROWS)
@pytest.mark.parametrize("form", [INT4, ASYMMETRIC], ids=["symmetric", "asymmetric"])
def test_int4_is_what_is_stored(models: Models, device: str, form: dict[str, Any], tmp_path: Path) -> None:
    source, model = models(**RAGGED)
    path = make(source, tmp_path / "b", device=device, widths=(1, 4), **form)
    truth = tiny.hf_logits(stored(model, open_bundle(path)), IDS)
    assert np.abs(walk(load(path, "cpu-static").target, IDS, 4) - truth).max() <= 0.02 * np.abs(truth).max()


# ---- operators


@pytest.mark.parametrize("device", ROWS)
@pytest.mark.parametrize("form", [INT4, ASYMMETRIC, FLOAT16], ids=["int4", "asymmetric", "float16"])
def test_graphs_hold_only_what_the_provider_takes(models: Models, device: str, form: dict[str, Any], tmp_path: Path) -> None:
    source, _ = models(**RAGGED)
    bundle = open_bundle(make(source, tmp_path / "b", device=device, widths=(1, 4), **form))
    row = get_device(device)
    assert row.operators is not None
    for file, proto in graphs(bundle).items():
        found = preflight(ir.from_proto(proto).graph, row.operators)
        assert (found.left, found.partitions) == ({}, 1)
        assert {domain.domain: domain.version for domain in proto.opset_import}[""] == (20 if device != "openvino" else 23)
        onnx.checker.check_model(str(bundle.file(file)))
        ops = {node.op_type for node in proto.graph.node}
        assert not ops & {"GroupQueryAttention", "RMSNormalization", "GatherBlockQuantized", "ScatterND"}
        assert ("Pad" not in ops) or row.pads
    for graph in bundle.role("target").graphs:
        assert all(isinstance(size, int) for spec in (*graph.inputs, *graph.outputs) for size in spec.shape)
        assert {spec.dtype for spec in (*graph.inputs, *graph.outputs)} == {"float16"}


@pytest.mark.parametrize("name", ["draft", "some3"])
def test_drafters_too(chains: Chains, name: str) -> None:
    bundle = open_bundle(chains.path(name, "directml", "tree", one_call=None, **FLOAT16))
    operators = get_device("directml").operators
    assert operators is not None
    for role in bundle.manifest.roles:
        for proto in graphs(bundle, role).values():
            assert preflight(ir.from_proto(proto).graph, operators).left == {}
    engine = load(bundle.path, "cpu-static")
    for prompt in ([3, 4, 5], [7, 1]):
        plain = engine.generate(prompt, max_new_tokens=20, speculate=False).ids
        assert engine.generate(prompt, max_new_tokens=20, tree=TreeShape.from_paths(TREE)).ids == plain


TYPED = """
<ir_version: 10, opset_import: ["": 20, "com.microsoft": 1]>
main (int64[2] x, float[2] y, float16[2] z) => (int64[2] a, float[2] b, float16[2] c) {
    a = Neg(x)
    b = Neg(y)
    c = com.microsoft.Gelu(z)
}
"""


@pytest.mark.parametrize(
    ("names", "kinds", "left"),
    [
        ({"Neg", "com.microsoft.Gelu"}, (), {}),
        ({"Neg"}, (), {"com.microsoft.Gelu": 1}),
        ({"Neg", "Gelu"}, (), {"com.microsoft.Gelu": 1}),  # another operator
        ({"Neg", "com.microsoft.Gelu"}, (("Neg", FLOATS),), {"Neg of int64": 1}),
        (
            {"Neg", "com.microsoft.Gelu"},
            (("Neg", FLOATS), ("com.microsoft.Gelu", ("float32",))),
            {"Neg of int64": 1, "com.microsoft.Gelu of float16": 1},
        ),
    ],
)
def test_operators_are_known_by_domain_and_type(names: set[str], kinds: Any, left: dict[str, int]) -> None:
    graph = ir.from_proto(onnx.parser.parse_model(TYPED)).graph
    assert preflight(graph, Operators("a test", frozenset(names), kinds)).left == left
    newer = Operators("a test", frozenset(names), kinds, opset=19)
    assert preflight(graph, newer).left == {"opset 20": 3}


def test_what_would_stay_on_the_cpu_is_named(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = get_device("directml")
    assert row.operators is not None
    less = dataclasses.replace(row, operators=dataclasses.replace(row.operators, types=(("Sigmoid", ("float32",)),)))
    monkeypatch.setitem(DEVICES, "directml", less)
    with pytest.raises(SpecedgeError, match=r"DmlExecutionProvider takes .* leaves Sigmoid of float16 \(2\) to the CPU"):
        make(models()[0], tmp_path / "b", device="directml", widths=(1, 4), **FLOAT16)
    make(models()[0], tmp_path / "b", device="directml", widths=(1, 4), allow_cpu_nodes=True, **FLOAT16)


@pytest.mark.parametrize("device", ["directml", "openvino"])
def test_float32_where_the_device_computes_in_it(models: Models, device: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="graphs compute in float16 here"):
        make(models()[0], tmp_path / "b", device="windowsml", **FLOAT32)
    bundle = open_bundle(make(models()[0], tmp_path / "b", device=device, widths=(1, 4), **FLOAT32))
    assert bundle.role("target").kv.dtype == "float32"


# ---- sessions, as far as the vendor's module is asked for anything


def test_session_options_are_those_the_provider_wants() -> None:
    options = _options(get_device("directml"), None)
    assert not options.enable_mem_pattern
    assert options.execution_mode == onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    assert _options(get_device("cpu-static"), None).enable_mem_pattern


@pytest.fixture
def provided(monkeypatch: pytest.MonkeyPatch) -> type[Provided]:
    return provide("DmlExecutionProvider", monkeypatch)


def test_directml_is_asked_for_as_the_row_says(models: Models, tmp_path: Path, provided: type[Provided]) -> None:
    path = make(models()[0], tmp_path / "b", device="directml", widths=(1, 4), **FLOAT32)
    engine = load(path)
    assert engine.generate(IDS[:5], max_new_tokens=6).ids == tiny.hf_greedy(models()[1], IDS[:5], 6)
    assert len(provided.asked) == 3
    for own, options in provided.asked:
        assert own == {"performance_preference": "high_performance"}
        assert options.get_session_config_entry("session.disable_cpu_ep_fallback") == "1"
        assert not options.enable_mem_pattern
    assert engine.nodes == {"DmlExecutionProvider": 9}


def test_a_provider_that_silently_leaves_nodes_is_refused(  # B65
    models: Models, tmp_path: Path, provided: type[Provided], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(models()[0], tmp_path / "b", device="directml", widths=(1, 4), **FLOAT16)
    monkeypatch.setattr(provided, "takes", "CPUExecutionProvider")
    with pytest.raises(SpecedgeError, match="DmlExecutionProvider silently left 3 nodes to CPUExecutionProvider"):
        load(path)
    assert load(path, allow_cpu_nodes=True).nodes == {"CPUExecutionProvider": 9}


def test_elsewhere_they_are_missed_by_name(models: Models, tmp_path: Path) -> None:  # B65
    path = make(models()[0], tmp_path / "b", device="directml", widths=(1, 4), **FLOAT16)
    assert "needs DmlExecutionProvider, onnxruntime here has" in refused(1, "generate", path, "--ids", "3,4,5")
    said = refused(1, "generate", path, "--ids", "3,4,5", "--device", "windowsml")
    assert "needs Windows ML, which is not here" in said and "specedge[windowsml]" in said


# ---- the catalogue of Windows ML


def listed(name: str, kind: str, version: str = "1.0") -> Any:
    """A device as onnxruntime lists it."""
    of_kind = getattr(onnxruntime.OrtHardwareDeviceType, kind)
    hardware = types.SimpleNamespace(type=of_kind, vendor_id=1, device_id=2, metadata={"Description": "a chip"})
    return types.SimpleNamespace(ep_name=name, ep_vendor="a maker", ep_metadata={"version": version}, device=hardware)


QNN, OPENVINO = listed("QNNExecutionProvider", "NPU", "2.1"), listed("OpenVINOExecutionProvider", "GPU")
TENSOR_RT, VITIS = listed("NvTensorRtRtxExecutionProvider", "GPU"), listed("VitisAIExecutionProvider", "NPU")


@pytest.mark.parametrize(
    ("devices", "chosen"),
    [
        ([TENSOR_RT, OPENVINO, QNN], QNN),  # an NPU before a GPU
        ([TENSOR_RT, OPENVINO], OPENVINO),  # in the row's order
        ([TENSOR_RT], TENSOR_RT),  # spelt as its own documentation does
        ([VITIS, OPENVINO], OPENVINO),  # it takes no such models
    ],
)
def test_the_first_kind_and_provider_of_the_row_is_chosen(devices: list[Any], chosen: Any) -> None:
    row = get_device("windowsml")
    assert row.catalog is not None
    found = choose(row, row.catalog, devices)
    assert (found.name, found.devices, found.version) == (chosen.ep_name, (chosen,), chosen.ep_metadata["version"])
    assert "a maker 0x1:0x2" in found.hardware and not found.emulated


def test_nothing_to_choose_from_is_an_error_that_lists_what_there_is() -> None:
    row = get_device("windowsml")
    assert row.catalog is not None
    with pytest.raises(
        SpecedgeError, match=r"no NPU or GPU here for QNN.*; onnxruntime lists CPU.* \(CPU\), VitisAI.* \(NPU\)"
    ):
        choose(row, row.catalog, [listed("CPUExecutionProvider", "CPU"), VITIS])


def test_the_catalogue_is_asked_and_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Providers that are on the machine are made ready and registered, once; absent ones stay so."""
    states = types.SimpleNamespace(NotPresent=0, NotReady=1, Ready=2)
    readied: list[str] = []
    there: list[Any] = []

    def entry(name: str, state: int) -> Any:
        ready = lambda: readied.append(name)  # noqa: E731
        return types.SimpleNamespace(name=name, ready_state=state, ensure_ready=ready, library_path=f"{name}.dll")

    entries = [entry("QNNExecutionProvider", 0), entry("OpenVINOExecutionProvider", 1), entry("VitisAIExecutionProvider", 2)]

    class Catalogue:
        def __enter__(self) -> "Catalogue":
            return self

        def __exit__(self, *args: object) -> None:
            return

        def find_all_providers(self) -> list[Any]:
            return entries

    def register(name: str, library: str) -> None:
        assert library == f"{name}.dll"
        there.append(listed(name, "GPU"))

    module = types.SimpleNamespace(EpCatalog=Catalogue, EpReadyState=states)
    monkeypatch.setitem(sys.modules, "windowsml", module)
    monkeypatch.setattr(onnxruntime, "get_ep_devices", lambda: there)
    monkeypatch.setattr(onnxruntime, "register_execution_provider_library", register)
    monkeypatch.setattr(probe, "_registered", set())
    for _ in range(2):
        found = find_provider(get_device("windowsml"))
        assert found.name == "OpenVINOExecutionProvider" and found.options() == {}
    assert set(readied) == {"OpenVINOExecutionProvider"} and len(there) == 1


def test_a_provider_that_fails_leaves_the_row_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One cannot be loaded, one lists no device; and a catalogue that cannot be asked is one line."""
    there: list[Any] = []

    def entry(name: str) -> Any:
        return types.SimpleNamespace(name=name, ready_state=2, ensure_ready=lambda: None, library_path=f"{name}.dll")

    class Catalogue:
        broken = False

        def __enter__(self) -> "Catalogue":
            if self.broken:
                raise OSError("no such service")
            return self

        def __exit__(self, *args: object) -> None:
            return

        def find_all_providers(self) -> list[Any]:
            return [entry("MIGraphXExecutionProvider"), entry("QNNExecutionProvider"), entry("OpenVINOExecutionProvider")]

    def register(name: str, library: str) -> None:
        if name == "MIGraphXExecutionProvider":
            raise RuntimeError("no such library")
        if name == "OpenVINOExecutionProvider":
            there.append(listed(name, "GPU"))

    module = types.SimpleNamespace(EpCatalog=Catalogue, EpReadyState=types.SimpleNamespace(NotPresent=0))
    monkeypatch.setitem(sys.modules, "windowsml", module)
    monkeypatch.setattr(onnxruntime, "get_ep_devices", lambda: there)
    monkeypatch.setattr(onnxruntime, "register_execution_provider_library", register)
    monkeypatch.setattr(probe, "_registered", set())
    for _ in range(2):
        assert find_provider(get_device("windowsml")).name == "OpenVINOExecutionProvider"
    there.clear()
    with pytest.raises(
        SpecedgeError, match=r"MIGraphXExecutionProvider cannot be loaded \(no such library\); onnxruntime lists none"
    ):
        find_provider(get_device("windowsml"))
    Catalogue.broken = True
    with pytest.raises(SpecedgeError, match=r"Windows ML cannot be asked \(no such service\)"):
        find_provider(get_device("windowsml"))
