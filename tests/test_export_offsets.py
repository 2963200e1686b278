"""Zero points on a row whose kernels take symmetric codes only: block sums of x times offsets, and nothing is lost."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from bundles import Models, both_levels, feed, graphs, make, stored
from specedge.bundle import open_bundle
from specedge.devices import table
from specedge.export.validate import validate
from specedge.quant.scheme import Scheme
from specedge.runtime import load
from specedge.runtime.agreement import walk

IDS = [int(token) for token in np.random.default_rng(0).integers(3, 128, 30)]
RAGGED = {"hidden_size": 40, "intermediate_size": 100, "head_dim": 10}  # B17


@pytest.fixture(autouse=True)
def symmetric_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """NPUs' form on the CPU provider, float activations, symmetric kernels."""
    row = dataclasses.replace(table.get_device("cpu-static"), name="symmetric", zero_points=False, accuracy_level=0)
    monkeypatch.setitem(table.DEVICES, "symmetric", row)


@pytest.mark.parametrize("shape", [{}, RAGGED], ids=["whole", "ragged"])
@pytest.mark.parametrize("group", [16, 32, None])
def test_an_asymmetric_model_computes_what_is_stored(
    models: Models, shape: dict[str, Any], group: int | None, tmp_path: Path
) -> None:
    source, model = models(**shape)
    scheme = Scheme(4, group, symmetric=False)
    path = make(source, tmp_path / "bundle", device="symmetric", body=scheme, head=Scheme(8, group, False), widths=(1, 4))
    bundle = open_bundle(path)
    engine = load(path)
    truth = tiny.hf_logits(stored(model, bundle), IDS)
    for width in (1, 4):
        assert np.abs(walk(engine.target, IDS, width) - truth).max() <= 1e-4 * max(1, np.abs(truth).max())
    inputs = feed(bundle.role("target"), IDS[:4], 4)
    optimised, plain = both_levels(path / "target" / "step_4.onnx", inputs)  # B20
    assert np.abs(optimised - plain).max() <= 1e-3
    kernels = [node for graph in graphs(bundle).values() for node in graph.graph.node if node.op_type == "MatMulNBits"]
    assert kernels and all(len(node.input) == 3 for node in kernels)
    assert all({"zero_points", "offsets"} <= weight.parts.keys() for weight in bundle.role("target").weights if weight.method)
    report = validate(path, str(source), prompts=1, tokens=8)
    assert report.passed, [check for check in report.checks if not check.passed]


def test_what_it_costs_is_a_float_per_block(models: Models, tmp_path: Path) -> None:
    source, _ = models()
    sizes = {}
    for device in ("cpu-static", "symmetric"):
        forms = {"body": Scheme(4, 32, False), "head": Scheme(8, 32, False)}
        bundle = open_bundle(make(source, tmp_path / device, device=device, widths=(1, 4), **forms))
        sizes[device] = bundle.role("target").stored_bytes
        blocks = sum(weight.parts["scales"].bytes for weight in bundle.role("target").weights if weight.method)
    assert sizes["symmetric"] - sizes["cpu-static"] == blocks
