"""A device that computes something else than the bundle holds is refused before the first token."""

import dataclasses
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from bundles import Models, make
from specedge.bundle import open_bundle
from specedge.cachedir import cache_dir
from specedge.devices.table import get_device
from specedge.errors import SpecedgeError
from specedge.manifest import Graph
from specedge.runtime import compiled, load
from specedge.runtime.probe import find_provider
from specedge.runtime.self_check import difference, make_check
from specedge.runtime.session import Session
from test_export_qnn import FLOAT16, INT4

pytest.importorskip("onnxruntime_qnn", reason="pip install 'specedge[qnn]'")
if platform.machine() not in ("x86_64", "AMD64"):
    pytest.skip("the emulator is in the x86-64 library alone", allow_module_level=True)


@pytest.fixture(autouse=True)
def nothing_asked_yet() -> None:
    shutil.rmtree(cache_dir() / "self_checks", ignore_errors=True)


@pytest.fixture(scope="module")
def made(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(models()[0], tmp_path_factory.mktemp("made") / "bundle", device="qnn", widths=(1, 4), **INT4)


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "bundle")


def wrong(file: Path, name: str, part: str, factor: float) -> type[Session]:
    """A provider that computes with one tensor that is not the bundle's."""
    weight = next(one for one in open_bundle(file).role("target").weights if one.name == name)
    extent, place = weight.parts[part], file / weight.file

    class Wrong(Session):
        def __init__(self, path: Path, graph: Graph, device: Any, *args: Any, **options: Any) -> None:
            kept = place.read_bytes()
            values = np.frombuffer(kept, np.float16, extent.bytes // 2, extent.offset)
            damaged = bytearray(kept)
            damaged[extent.offset : extent.offset + extent.bytes] = (values * np.float16(factor)).tobytes()
            if device.plugin:
                place.write_bytes(damaged)
            try:
                super().__init__(path, graph, device, *args, **options)
            finally:
                place.write_bytes(kept)

    return Wrong


def checked() -> list[Path]:
    return sorted((cache_dir() / "self_checks").glob("*/passed.json"))


def test_a_sound_device_passes_and_is_not_asked_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = checked()
    load(path, self_check=True)
    (kept,) = set(checked()) - set(before)
    found = json.loads(kept.read_text(encoding="utf-8"))
    assert found["device"] == "qnn" and 0 < found["worst"] < 0.05 and found["hardware"]
    monkeypatch.setattr(compiled, "Session", wrong(path, "layers.0.mlp.up_proj.weight", "scales", 0.0))
    load(path, self_check=True)  # the same hardware and driver: asked before
    assert checked() == sorted([*before, kept])
    monkeypatch.setattr("specedge.runtime.self_check.VERSION", "another")
    with pytest.raises(SpecedgeError, match="self-check"):
        load(path, self_check=True)


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("layers.0.self_attn.v_proj.weight", 0.0),
        ("layers.0.self_attn.v_proj.weight", 1.3),
        ("layers.1.mlp.down_proj.weight", 0.5),
    ],
)
def test_one_wrong_layer_is_refused(path: Path, name: str, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "Session", wrong(path, name, "scales", factor))
    with pytest.raises(SpecedgeError, match=r"device 'qnn': computes something else .* step of (1|4|8) differ by") as refused:
        load(path, self_check=True)
    assert "\n" not in str(refused.value)
    load(path, self_check=False)
    load(path)  # an emulator is asked only when that is wanted
    monkeypatch.undo()
    load(path, self_check=True)


def test_real_hardware_is_asked_unless_told_not_to(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = find_provider(get_device("qnn"))
    monkeypatch.setattr(type(real), "emulated", property(lambda provider: False))
    monkeypatch.setattr(compiled, "read_compiled", lambda *args: {})
    monkeypatch.setattr(compiled, "Session", wrong(path, "layers.0.mlp.up_proj.weight", "scales", 0.0))
    with pytest.raises(SpecedgeError, match="self-check"):
        load(path)
    load(path, self_check=False)
    load(path, "cpu-static")  # the CPU is trusted


def test_a_bundle_without_one_is_run_with_a_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["checks"].keys() == {"target"}
    (path / "manifest.json").write_text(json.dumps(manifest | {"checks": {}}), encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        load(path, self_check=True)
    assert "holds no self-check for its target" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"ids": []},
        {"ids": [9999]},
        {"columns": [1, 0]},
        {"logits": [[0.0]]},
        {"logits": [[float("nan"), 1.0]], "columns": [0, 1]},
        {"tolerance": 2.0},
    ],
)
def test_a_check_that_cannot_be_is_refused(path: Path, change: dict[str, Any]) -> None:
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    manifest["checks"]["target"] |= change
    (path / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(SpecedgeError, match=r"checks\.target"):
        load(path, "cpu-static")


@pytest.mark.parametrize("change", [{"ids": [3] * 5}, {"ids": [3] * 100}, {"logits": [[0.0, 1.0]], "columns": [0, 1]}])
def test_a_check_of_other_graphs_is_refused(path: Path, change: dict[str, Any]) -> None:
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    manifest["checks"]["target"] |= change
    (path / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(SpecedgeError, match=r"checks\.target is not of the target's graphs"):
        load(path, self_check=True)


def test_a_cache_that_cannot_be_written_is_no_obstacle(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    monkeypatch.setenv("SPECEDGE_CACHE", str(tmp_path / "file"))
    load(path, self_check=True)


def test_what_passed_is_found_by_another_process() -> None:
    """The name of a result does not depend on the order of sets."""
    code = (
        "from specedge.runtime.self_check import _place; from specedge.runtime.probe import Provider;"
        "from specedge.devices.table import DEVICES; from specedge.bundle import Bundle; from pathlib import Path; import sys;"
        "bundle = Bundle(Path(sys.argv[1]), None);"
        "print(*(_place(bundle, 'target', Provider(row, row.provider, '1', '', None)).name for row in DEVICES.values()))"
    )
    (cache_dir() / "a bundle").mkdir(parents=True, exist_ok=True)
    (cache_dir() / "a bundle" / "manifest.json").write_text("{}", encoding="utf-8")
    names = {
        subprocess.run(
            [sys.executable, "-c", code, str(cache_dir() / "a bundle")],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(names) == 1


def test_a_width_without_room_behind_the_others_is_asked_too(models: Models, tmp_path: Path) -> None:
    path = make(models()[0], tmp_path / "bundle", device="qnn", widths=(1, 4), chunk=8, context=12, **INT4)
    check = open_bundle(path).manifest.checks["target"]
    assert len(check.ids) == 1 + 4 + 8 and len(check.logits) == 1 + 2 + 2
    load(path, self_check=True)


def test_rows_for_the_cpu_store_none(models: Models, tmp_path: Path) -> None:
    bundle = open_bundle(make(models()[0], tmp_path / "bundle", device="cpu-static"))
    assert bundle.manifest.checks == {}


def test_a_draft_on_another_row_has_one_of_its_own(models: Models, tmp_path: Path) -> None:
    source = str(models()[0])
    options = {"draft": source, "device": "cpu-static", "draft_device": "qnn", "widths": (1, 4)}
    path = make(models()[0], tmp_path / "bundle", **(FLOAT16 | options))
    assert open_bundle(path).manifest.checks.keys() == {"draft"}
    load(path, self_check=True)


def test_the_difference_is_blind_to_a_common_shift_and_to_nothing_else(models: Models, tmp_path: Path) -> None:
    engine = load(make(models()[0], tmp_path / "bundle", device="cpu-static"), threads=1)
    check = make_check(engine.target, list(range(3, 100)), 120)
    truth = np.array(check.logits, np.float32)
    assert difference(check, truth).max() < 1e-6
    noise = np.random.default_rng(0).normal(size=truth.shape).astype(np.float32)
    spread = (truth - truth.mean(axis=1, keepdims=True)).std(axis=1, keepdims=True)
    assert difference(check, truth + 0.2 * spread * noise).min() > check.tolerance
    large = dataclasses.replace(check, logits=tuple(tuple(value + 1000 for value in row) for row in check.logits))
    np.testing.assert_allclose(
        difference(large, truth + 1000 + 0.2 * spread * noise), difference(check, truth + 0.2 * spread * noise), rtol=1e-2
    )
    assert np.isnan(difference(check, np.where(truth > truth.mean(), np.nan, truth))).any()


def test_a_model_that_says_nan_cannot_be_held_to_it(tmp_path: Path) -> None:
    model = tiny.f_rand(tmp_path / "source", save=False)
    model.lm_head.weight.data *= 6e4 / model.lm_head.weight.abs().max()  # within float16, and what comes of it is not
    tiny.save_folder(model, tmp_path / "source")
    with pytest.raises(SpecedgeError, match="not finite"):
        make(tmp_path / "source", tmp_path / "bundle", device="qnn", widths=(1, 4), body="float16", head="float16")
