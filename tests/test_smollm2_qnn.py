"""The whole model on the emulated NPU: `make slow-qnn`."""

import platform
from pathlib import Path

import numpy as np
import pytest

from specedge.bundle import open_bundle
from specedge.devices.table import get_device
from specedge.export.checkpoint import load_quietly, open_checkpoint
from specedge.export.convert import convert
from specedge.export.fetch import fetch
from specedge.export.quality import reference_logits
from specedge.export.recipe import Recipe
from specedge.export.report import mean_kl
from specedge.export.request import Request
from specedge.progress import silent
from specedge.runtime import Engine, load
from specedge.runtime.agreement import walk
from specedge.runtime.compiled import compile_bundle
from specedge.runtime.probe import find_provider
from specedge.runtime.prompts import PROSE
from specedge.runtime.session import write_contexts
from tiny import Array

pytest.importorskip("onnxruntime_qnn", reason="pip install 'specedge[qnn]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the emulator is in the x86-64 library alone"),
]
RECIPES = {"int4": Recipe(), "float16": Recipe("float16", "float16")}
ROWS = 64  # of real text
COPY = "Repeat word for word: The library opens at nine in the morning and closes at six in the evening."


@pytest.fixture(scope="module")
def model() -> str:
    return str(fetch("smollm2-135m"))


@pytest.fixture(scope="module", params=RECIPES)
def path(request: pytest.FixtureRequest, model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp(request.param) / "bundle"
    return convert(Request(model, place, device="qnn", widths=(1, 5), context=512, recipe=RECIPES[request.param])).path


@pytest.fixture(scope="module")
def engines(path: Path) -> tuple[Engine, Engine]:
    """On the CPU and on the emulated NPU, where every width is compiled as it is opened."""
    return load(path, "cpu-static"), load(path)


def agreement(expected: Array, found: Array) -> tuple[Array, float]:
    """Cosines of the rows, and the share of them whose best token is the same but for near-ties."""
    cosines = (expected * found).sum(1) / np.linalg.norm(expected, axis=1) / np.linalg.norm(found, axis=1)
    best, two = expected.argmax(1), np.partition(expected, -2, axis=1)[:, -2:]
    return cosines, float(((best == found.argmax(1)) | (two[:, 1] - two[:, 0] < 0.1)).mean())


def test_logits_are_the_cpus(model: str, path: Path, engines: tuple[Engine, Engine]) -> None:
    """64 positions in one chunk and some of them five and one at a time; against float32 no worse than the CPU's."""
    here, there = engines
    assert there.nodes.keys() == {"QNNExecutionProvider"} and here.tokenizer
    ids = here.tokenizer.encode(PROSE)[:ROWS]
    expected, found = walk(here.target, ids, ROWS), walk(there.target, ids, ROWS)
    least = 0.999 if here.bundle.role("target").quantised else 0.9999
    for width, rows in ((ROWS, ROWS), (5, 10), (1, 2)):
        cosines, same = agreement(expected[:rows], found if width == ROWS else walk(there.target, ids[:rows], width))
        print(f"{path.parent.name} width {width}: cosine {cosines.mean():.6f}, least {cosines.min():.6f}, top-1 {same:.3f}")
        assert cosines.mean() >= (least if width == ROWS else 0.9995)  # of a few steps, in which the text's first tokens weigh
        assert cosines.min() >= 0.99 and same >= 0.97
    allowed = here.bundle.manifest.allowed_ids
    truth = reference_logits(load_quietly(open_checkpoint(model)), ids, range(ROWS))[:, :allowed]
    lost = [mean_kl(truth, logits[:, :allowed]) for logits in (expected, found)]
    right = [float((truth.argmax(1) == logits[:, :allowed].argmax(1)).mean()) for logits in (expected, found)]
    print(f"{path.parent.name} against float32: KL {lost[0]:.2g} on the CPU, {lost[1]:.2g} on the NPU; top-1 {right}")
    assert right[1] >= right[0] - 0.02
    assert lost[0] <= 1e-4  # the checkpoint's own grids, or its weights in float16


def test_speculation_writes_what_the_cpu_writes(engines: tuple[Engine, Engine]) -> None:
    results = [engine.generate([{"role": "user", "content": COPY}], max_new_tokens=12, gamma=4) for engine in engines]
    assert results[0].ids == results[1].ids and results[0].stats.per_round == results[1].stats.per_round
    assert results[1].stats.accepted > 0


def test_all_widths_take_the_room_of_one(path: Path, tmp_path: Path) -> None:
    bundle = open_bundle(path)
    record = compile_bundle(bundle, get_device("qnn"), "SM8650", silent)
    together = sum(file.bytes for name, file in record.files.items() if name.endswith(".bin"))
    narrow = bundle.file(bundle.role("target").graphs[0].file)
    assert list(write_contexts({narrow: tmp_path / "step_1.onnx"}, find_provider(get_device("qnn"), "SM8650")))
    alone = sum(file.stat().st_size for file in tmp_path.glob("*.bin"))
    print(f"{path.parent.name}: {together} bytes for three widths, {alone} for one: {together / alone:.3f}")
    assert len(record.graphs) == 3 and together <= 1.1 * alone
