"""OpenVINO on its CPU device, with the graphs that its NPU would get: the text of the CPU, and nothing left to it."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import tiny
from bundles import Models, make
from eagles import TREE, Chains
from specedge.bundle import open_bundle
from specedge.devices.table import get_device
from specedge.errors import SpecedgeError
from specedge.export.validate import validate
from specedge.runtime import Sampling, TreeShape, load
from specedge.runtime.agreement import walk
from specedge.runtime.compiled import open_graph
from specedge.runtime.probe import find_provider
from test_export_cli import refused, run
from test_export_qnn import ASYMMETRIC, CHANNEL, FLOAT16, INT4, RAGGED
from test_export_windows import FLOAT32
from test_runtime_qnn import same_text

pytest.importorskip("onnxruntime_ep_openvino", reason="pip install 'specedge[openvino]'")

IDS = [int(token) for token in np.random.default_rng(0).integers(3, 128, 24)]
TAKEN = {"OpenVINOExecutionProvider"}


@pytest.fixture(autouse=True)
def its_device(request: pytest.FixtureRequest) -> None:
    """The plug-in knows Intel's hardware only, processors included."""
    rows = getattr(request.node, "callspec", None)
    if rows and "device" in rows.params and "openvino" not in rows.params.values():
        return  # a pair of other rows
    try:
        find_provider(get_device("openvino"))
    except SpecedgeError as error:
        if "finds no device of its own" not in str(error):
            raise
        pytest.skip(f"no Intel processor: {error}")


@pytest.mark.parametrize("shape", [{}, RAGGED], ids=["whole", "ragged"])
@pytest.mark.parametrize(
    "form", [INT4, ASYMMETRIC, CHANNEL, FLOAT16, FLOAT32], ids=["int4", "asymmetric", "channel", "float16", "float32"]
)
def test_it_computes_what_the_cpu_does(models: Models, shape: dict[str, Any], form: dict[str, Any], tmp_path: Path) -> None:
    path = make(models(**shape)[0], tmp_path / "bundle", device="openvino", widths=(1, 4), **form)
    here, there = load(path, "cpu-static"), load(path)
    assert there.emulated == () and there.nodes.keys() == TAKEN
    for width in (1, 4, 8):
        expected, found = walk(here.target, IDS, width), walk(there.target, IDS, width)
        assert np.abs(found - expected).max() <= (1e-4 if form is FLOAT32 else 0.01) * np.abs(expected).max()


def test_a_second_run_reads_its_inputs_anew(models: Models, tmp_path: Path) -> None:
    """onnxruntime copies inputs for it when they are bound: without binding anew every step is that of the first zeros."""
    path = make(models()[0], tmp_path / "bundle", device="openvino", widths=(1, 4), **FLOAT16)
    target = load(path).target
    first = target.step([5]).copy()
    assert not np.array_equal(first, target.step([9]))
    stuck = load(path, self_check=False).target
    for step in stuck._steps.values():  # type: ignore[attr-defined]
        step.binding._copies = False
    first = stuck.step([5]).copy()
    assert np.array_equal(first, stuck.step([9]))


@pytest.mark.parametrize("name", ["draft", "some3"])
@pytest.mark.parametrize("draft_device", ["openvino", "cpu"])
def test_drafted_text_is_the_cpus(chains: Chains, name: str, draft_device: str) -> None:
    path = chains.path(name, "openvino", "tree", one_call=None, draft_device=draft_device, **FLOAT16)
    here = load(path, "cpu-static", "cpu-static" if draft_device == "openvino" else None)
    there = load(path)
    assert same_text(here, there, gamma=3) + same_text(here, there, tree=TreeShape.from_paths(TREE)) > 10
    same_text(here, there, sampling=Sampling(0.8, seed=5), rule="coupled")


def test_validate_and_the_commands(models: Models, tmp_path: Path) -> None:
    path = make(models()[0], tmp_path / "bundle", device="openvino", widths=(1, 4), **INT4)
    report = validate(path, str(models()[0]), prompts=1, tokens=8)
    assert report.passed, [check for check in report.checks if not check.passed]
    assert all(found.cosine_min >= 0.9999 for found in report.devices) and len(report.devices) == 3
    assert (
        "nodes on OpenVINOExecutionProvider" in run("generate", path, "--ids", "3,4,5", "--max-new-tokens", 4, "--stats").output
    )
    assert "there is nothing to compile" in refused(2, "compile", path, "--device", "openvino")
    found = json.loads(run("devices", "--json", "-").stdout)["openvino"]
    assert found["available"] and not found["emulated"] and found["version"]


def test_a_node_it_leaves_is_an_error(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # B65
    """Qualcomm's graphs have RMSNormalization as an operator, which it does not take; told so, or silently."""
    path = make(models()[0], tmp_path / "bundle", device="qnn", widths=(1, 4), **FLOAT16)
    with pytest.raises(SpecedgeError, match=r"OpenVINOExecutionProvider leaves to the CPU .*RMSNormalization"):
        load(path, "openvino")
    assert load(path, "openvino", allow_cpu_nodes=True).nodes.keys() > TAKEN
    real = onnxruntime.SessionOptions.add_session_config_entry

    def forgetful(options: Any, key: str, value: str) -> None:
        if key != "session.disable_cpu_ep_fallback":
            real(options, key, value)

    monkeypatch.setattr(onnxruntime.SessionOptions, "add_session_config_entry", forgetful)
    with pytest.raises(SpecedgeError, match="OpenVINOExecutionProvider silently left 5 nodes to CPUExecutionProvider"):
        open_graph(open_bundle(path), open_bundle(path).role("target").graphs[0], get_device("openvino"))


def test_the_hardware_is_named() -> None:
    provider = find_provider(get_device("openvino"))
    assert provider.hardware.startswith("Intel 0x") and provider.version in provider.hardware
    assert provider.options()["load_config"].startswith('{"CPU": {"INFERENCE_PRECISION_HINT": "f32"')


# ---- target and drafter on rows of their own: every pair that runs here


PAIRS = [pair for pair in product(("cpu", "cpu-static", "qnn", "openvino", "coreml-gpu"), repeat=2) if pair[0] != pair[1]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of two layers, a draft model much like it, and both in one bundle for the CPU."""
    place = tmp_path_factory.mktemp("two")
    tiny.f_rand(place / "target", eos_token_id=None)
    tiny.noisy_lm_head(place / "target", place / "draft", sigma=0.05)
    make(place / "target", place / "cpu", draft=str(place / "draft"), device="cpu", widths=(1, 4), **FLOAT16)
    return place


@pytest.mark.parametrize(("device", "draft_device"), PAIRS)
def test_a_draft_model_on_any_row_leaves_the_text_alone(device: str, draft_device: str, two: Path, tmp_path: Path) -> None:
    """The ids are all-CPU's, and drafts are accepted."""
    if "coreml-gpu" in (device, draft_device):
        pytest.importorskip("coremltools", reason="pip install 'specedge[coreml]'")
    options = {"draft": str(two / "draft"), "widths": (1, 4), **FLOAT16}
    expected = load(two / "cpu", threads=1)
    mixed = load(make(two / "target", tmp_path / "mixed", device=device, draft_device=draft_device, **options), threads=1)
    assert (mixed.device.name, mixed.draft_device.name) == (device, draft_device)
    for prompt in ([3, 4, 5, 6], [9, 7]):
        plain = expected.generate(prompt, max_new_tokens=12, speculate=False).ids
        result = mixed.generate(prompt, max_new_tokens=12, gamma=3)
        assert result.ids == plain and result.stats.accepted > 0
