"""The whole model as Core ML packages, on the evaluator: `make slow`."""

import math
from pathlib import Path

import numpy as np
import pytest

from specedge.bundle import open_bundle
from specedge.export.checkpoint import load_quietly, open_checkpoint
from specedge.export.convert import convert
from specedge.export.fetch import fetch
from specedge.export.quality import reference_logits
from specedge.export.recipe import Recipe
from specedge.export.report import mean_kl
from specedge.export.request import Request
from specedge.export.validate_device import agreement
from specedge.export.validate_weights import load_stored
from specedge.quant.scheme import Scheme
from specedge.runtime import load
from specedge.runtime.agreement import walk
from specedge.runtime.package import read_package
from specedge.runtime.prompts import PROSE

pytest.importorskip("coremltools", reason="Core ML packages need the extra: pip install -e '.[coreml]'")
pytestmark = pytest.mark.slow
RECIPES = {  # rounded without calibration: what is compared has the same weights
    "coreml-ane": Recipe(Scheme(4, None), Scheme(8, None), keep=False),
    "coreml-gpu": Recipe(keep=False),
}
ROWS, WIDTH = 32, 5  # of real text; of a verify step


@pytest.fixture(scope="module")
def model() -> str:
    return str(fetch("smollm2-135m"))


@pytest.fixture(scope="module", params=RECIPES)
def path(request: pytest.FixtureRequest, model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place, recipe = tmp_path_factory.mktemp(request.param) / "bundle", RECIPES[request.param]
    return convert(Request(model, place, device=request.param, widths=(1, WIDTH), context=256, recipe=recipe)).path


def test_the_evaluator_computes_what_pytorch_does_with_the_same_weights(model: str, path: Path) -> None:
    engine, checkpoint = load(path), open_checkpoint(model)
    assert engine.tokenizer is not None
    text = engine.tokenizer.encode(PROSE)[:ROWS]
    reference = load_quietly(checkpoint)
    exact = reference_logits(reference, text, range(ROWS))
    load_stored(reference, open_bundle(path), "target", checkpoint)
    expected, found = reference_logits(reference, text, range(ROWS)), walk(engine.target, text, WIDTH)
    same = agreement("target", WIDTH, expected, found)
    print(f"\n{same}\nKL to float32 {mean_kl(exact, found):.4f}, of the same weights in PyTorch {mean_kl(exact, expected):.4f}")
    assert same.cosine_min >= 0.999 and (same.top1_differs - same.near_ties) / ROWS <= 0.03
    assert mean_kl(exact, found) == pytest.approx(mean_kl(exact, expected), rel=0.02)
    assert np.isfinite(found).all()


def test_linear_weights_are_in_4_bits_and_stored_once(model: str, path: Path, tmp_path: Path) -> None:
    whole = read_package(path / "target/model.mlpackage")
    made = open_bundle(path).manifest
    linear = [weight for weight in whole.weights if weight.bits == 4]
    assert len(linear) == 7 * 30 and all(len(weight.functions) == len(whole.functions) == 3 for weight in linear)
    assert sum(weight.bytes for weight in linear) <= 0.3 * sum(2 * math.prod(weight.shape) for weight in linear)
    if made.device == "coreml-ane":
        assert all(function.widest <= 16384 and function.rank <= 5 for function in whole.functions)
    alone = Request(model, tmp_path / "one", device=made.device, widths=(1,), context=256, chunk=1, recipe=RECIPES[made.device])
    one = read_package(convert(alone).path / "target/model.mlpackage")
    assert len(one.functions) == 1 and whole.bytes <= 1.15 * one.bytes
