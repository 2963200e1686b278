"""The whole path on a real model: `make slow`; needs the package index once, then the cache."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import numpy as np
import pytest

import tiny
from bundles import compute_in_float
from specedge.bundle import open_bundle
from specedge.export.calibration_text import Calibration
from specedge.export.checkpoint import open_checkpoint
from specedge.export.convert import convert
from specedge.export.fetch import fetch
from specedge.export.quality import Judged
from specedge.export.recipe import Method, Recipe
from specedge.export.request import Request
from specedge.export.validate import validate
from specedge.export.weights import read_float32
from specedge.quant.scheme import Scheme
from specedge.runtime import load
from specedge.runtime.agreement import compare_greedy, walk, width_agreement
from specedge.runtime.bench import bench
from specedge.runtime.cli_bench import prompt_sets
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
    request = Request(
        model, tmp_path / "bundle", device=device, widths=(1, 5), context=512, recipe=Recipe("float32", "float32")
    )
    report = validate(convert(request).path, model, prompts=2, tokens=32)
    assert report.passed, [check for check in report.checks if not check.passed]
    assert report.quality.logits_max_abs <= 1e-3


def test_the_int4_bundle_holds_the_gguf_bit_for_bit(model: str, int4: Path):
    bundle, checkpoint = open_bundle(int4), open_checkpoint(model)
    role = bundle.role("target")
    assert all(weight.exact for weight in role.weights)
    for weight in role.weights:
        values, _ = read_float32(weight, bundle.file(weight.file))
        np.testing.assert_array_equal(values.view(np.uint32), checkpoint.tensor(weight.name).view(np.uint32), weight.name)


@pytest.mark.parametrize("device", ["cpu", "cpu-static"])
def test_int4_graphs_compute_the_gguf(model: str, device: str, tmp_path: Path):
    """Without rounded activations the INT4 graph is the float32 model."""
    path = convert(Request(model, tmp_path / "bundle", device=device, widths=(1, 5))).path
    compute_in_float(open_bundle(path))
    engine = load(path, prepare=False)
    ids = engine.encode(PROSE)[:100]
    truth = tiny.hf_logits(open_checkpoint(model).load_reference(), ids)
    for width in (1, 5):
        assert np.abs(walk(engine.target, ids, width) - truth).max() <= 1e-3


def test_rotation_alone_changes_no_logit(model: str, tmp_path: Path):
    rotated = Recipe("float32", "float32", keep=False, rotation=0)
    report = validate(convert(Request(model, tmp_path / "bundle", widths=(1, 5), recipe=rotated)).path, model, tokens=16)
    assert report.passed, [check for check in report.checks if not check.passed]
    assert report.quality.logits_max_abs <= 1e-3


@pytest.mark.parametrize(("body", "head"), [(Scheme(4, 32), Scheme(8, 32)), (Scheme(4, None), Scheme(8, None))], ids=str)
def test_gptq_loses_less_than_half_of_what_rounding_loses(model: str, body: Scheme, head: Scheme, tmp_path: Path):
    """On text of prompts it was not calibrated on."""
    lost: dict[Method, float] = {}
    methods: tuple[Method, Method] = ("rtn", "gptq")
    for method in methods:
        recipe = Recipe(body, head, method, keep=False)
        calibration = Calibration(tokens=8192)
        request = Request(model, tmp_path / method, device="cpu-static", widths=(1,), recipe=recipe, calibration=calibration)
        path = convert(request).path
        lost[method] = validate(path, model, prompts=1, tokens=4, judged=Judged(None, 4096)).quality.kl_mean
    assert lost["gptq"] <= 0.45 * lost["rtn"]


def test_int4_is_what_its_weights_say(model: str, int4: Path):
    report = validate(int4, model, prompts=2, tokens=32)
    assert report.passed, [check for check in report.checks if not check.passed]
    assert report.quality.kl_mean < 0.005
    assert report.quality.top1_agreement > 0.95


def test_host_work_is_a_twentieth_of_a_greedy_round(int4: Path):
    engine = load(int4)
    prompt = [{"role": "user", "content": "Write a long story about a fox and a bear."}]
    engine.generate(prompt, max_new_tokens=16)
    for options in ({"speculate": False}, {"gamma": 4}):
        shares = []
        for _ in range(5):
            stats = engine.generate(prompt, max_new_tokens=96, **options).stats
            shares.append(1 - stats.graph_seconds / stats.decode_seconds)
        assert median(shares) <= 0.05, options


LOAD = (
    "import json, sys, time; from specedge.bundle import open_bundle; from specedge.devices.table import get_device\n"
    "from specedge.runtime import load; from specedge.runtime.memory import read_memory\n"
    "from specedge.runtime.model import Model\n"
    "bundle = open_bundle(sys.argv[1]); before = read_memory([]).private\n"
    "start = time.perf_counter(); model = Model(bundle, 'target', get_device('cpu')); model.sequence().step([1, 2, 3])\n"
    "weights = read_memory(model.weight_files); private = weights.private - before\n"
    "second = Model(bundle, 'target', get_device('cpu')); second.sequence().step([1, 2, 3])\n"
    "added = read_memory([]).private - weights.private\n"
    "load(sys.argv[1]); start = time.perf_counter(); load(sys.argv[1]); seconds = time.perf_counter() - start\n"
    "print(json.dumps([private, added, weights.mapped, seconds]), flush=True); sys.stdin.readline()\n"
)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_weights_are_mapped_and_shared(int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In the process that prepares them, in the next one, and in one beside it; as bytes of the weight file."""
    monkeypatch.setenv("SPECEDGE_CACHE", str(tmp_path))
    size = open_bundle(int4).role("target").stored_bytes
    processes = []
    for _ in range(3):  # the first prepares; each stays alive beside the next
        command = [sys.executable, "-c", LOAD, str(int4)]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert processes[-1].stdout is not None
        private, added, mapped, seconds = json.loads(processes[-1].stdout.readline())
        assert private <= 0.15 * size
        assert added <= 0.15 * size  # a second one in the same process
        assert mapped >= 0.9 * size
        assert seconds <= 1.0
    for process in processes:
        process.communicate("\n")


REQUEST = (
    "import random, sys; from pathlib import Path; from specedge.runtime import load\n"
    "engine, numbers = load(sys.argv[1]), random.Random(0)\n"
    "def request(index):\n"
    "    prompt = [numbers.randrange(300, 40000) for _ in range(numbers.randint(3, 80))]\n"
    "    engine.generate(prompt, max_new_tokens=numbers.randint(4, 24), gamma=(None, 2, 4, 8)[index % 4])\n"
    "def resident():\n"
    "    lines = Path('/proc/self/status').read_text().splitlines()\n"
    "    return int(next(line for line in lines if line.startswith('VmRSS:')).split()[1]) * 1024\n"
    "engine.generate([5] * 110, max_new_tokens=8)\n"
    "for index in range(40): request(index)\n"
    "before = resident()\n"
    "for index in range(200): request(index)\n"
    "print(resident() - before)\n"
)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_two_hundred_requests_leave_nothing(int4: Path):
    grown = subprocess.run([sys.executable, "-c", REQUEST, str(int4)], check=True, capture_output=True, text=True).stdout
    assert int(grown) < 5 << 20


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
