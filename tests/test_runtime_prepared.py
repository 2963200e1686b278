"""Prepared weights: made once, whole or not at all, mapped by whoever opens the bundle; loading works without them."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tiny
from bundles import make
from specedge.bundle import MANIFEST, open_bundle
from specedge.errors import UsageError
from specedge.export.recipe import INT4, INT8
from specedge.runtime import Engine, load, prepared
from specedge.runtime.memory import measure_engines
from specedge.runtime.model import Model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared é 中 'q' #1")
    tiny.f_rand(folder / "model")
    return make(folder / "model", folder / "bundle", draft=str(folder / "model"), body=INT4, head=INT8)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    prepared._said.clear()
    monkeypatch.setenv("SPECEDGE_CACHE", str(tmp_path / "cache é 中"))
    return tmp_path / "cache é 中" / "prepared"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What was said since the last look."""

    def since() -> list[str]:
        messages = [record.message for record in caplog.records]
        caplog.clear()
        return messages

    with caplog.at_level(logging.WARNING, logger="specedge"):
        yield since


def open_engine(bundle: Path, drafter: str = "lookup") -> Engine:
    return load(bundle, threads=1, drafter=drafter, prepare=True)


def ids(engine: Engine) -> list[int]:
    return engine.generate(PROMPT, max_new_tokens=24, gamma=3).ids


def entries(cache: Path) -> list[Path]:
    return sorted(path for path in cache.iterdir()) if cache.exists() else []


def test_the_second_load_writes_nothing_and_computes_the_same(bundle: Path, cache: Path, lines):
    truth = ids(load(bundle, threads=1, drafter="draft", prepare=False))
    assert entries(cache) == []
    assert ids(open_engine(bundle, "draft")) == truth
    assert len(entries(cache)) == 2  # target and draft
    made = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.name != "prepared.json"}
    assert ids(open_engine(bundle, "draft")) == truth
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.name != "prepared.json"} == made
    assert lines() == []


def test_the_bundle_is_never_written_to(bundle: Path, cache: Path):
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in bundle.rglob("*") if path.is_file()}
    open_engine(bundle)
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in bundle.rglob("*") if path.is_file()} == before


def test_small_weights_are_not_worth_it(bundle: Path, cache: Path):
    load(bundle, threads=1)
    assert entries(cache) == []


@pytest.mark.parametrize("name", ["weights.bin", "step.onnx", "prepared.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "missing"])
def test_a_damaged_entry_is_made_again(bundle: Path, cache: Path, lines, name: str, damage: str):
    truth = ids(open_engine(bundle))
    (entry,) = entries(cache)
    content = (entry / name).read_bytes()
    middle = len(content) // 2
    if damage == "cut":
        (entry / name).write_bytes(content[:middle])
    elif damage == "flipped":
        (entry / name).write_bytes(content[:middle] + bytes([content[middle] ^ 0x55]) + content[middle + 1 :])
    else:
        (entry / name).unlink()
    assert ids(open_engine(bundle)) == truth
    (said,) = lines()
    assert name in said and "making them again" in said
    assert (entry / name).exists()
    if name != "prepared.json":
        assert (entry / name).read_bytes() == content
    assert ids(open_engine(bundle)) == truth
    assert lines() == []


def test_a_copied_cache_is_recognised_by_its_content(bundle: Path, cache: Path, lines):
    truth = ids(open_engine(bundle))
    (entry,) = entries(cache)
    made = (entry / "weights.bin").stat().st_mtime_ns
    os.utime(entry / "weights.bin", (1, 1))  # copied without its times
    os.utime(entry / "step.onnx", (1, 1))
    assert ids(open_engine(bundle)) == truth
    assert lines() == []
    assert (entry / "weights.bin").stat().st_mtime_ns == made  # the next load need not hash it


@pytest.mark.parametrize("part", ["cpu", "version", "format"])
def test_an_entry_serves_one_cpu_and_one_version(bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, part: str):
    open_engine(bundle)
    if part == "cpu":
        monkeypatch.setattr(prepared, "cpu", lambda: "another one")
    elif part == "version":
        monkeypatch.setattr(prepared, "VERSION", "9.9.9")
    else:
        monkeypatch.setattr(prepared, "_FORMAT", "0")
    open_engine(bundle)
    assert len(entries(cache)) == 2


def test_a_new_bundle_in_the_same_place_takes_the_entry_of_the_old(bundle: Path, cache: Path, tmp_path: Path):
    copied = tmp_path / "bundle"
    shutil.copytree(bundle, copied)
    open_engine(copied)
    (old,) = entries(cache)
    manifest = (copied / MANIFEST).read_text()
    (copied / MANIFEST).write_text(manifest + "\n")
    open_engine(copied)
    assert len(entries(cache)) == 2  # in another container it may still be the bundle of that path
    two_days_ago = time.time() - 2 * 86400
    os.utime(old / "prepared.json", (two_days_ago, two_days_ago))
    open_engine(copied)
    (new,) = entries(cache)
    assert new != old


def test_an_entry_that_cannot_be_opened_is_made_again(bundle: Path, cache: Path, lines):
    """Damage that keeps size and time is found by onnxruntime, or not at all."""
    name = "step.onnx"
    truth = ids(open_engine(bundle))
    (entry,) = entries(cache)
    stat = (entry / name).stat()
    (entry / name).write_bytes(b"\xff" * stat.st_size)
    os.utime(entry / name, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert ids(open_engine(bundle)) == truth
    (said,) = lines()
    assert "prepared weights are damaged" in said
    assert ids(open_engine(bundle)) == truth
    assert lines() == []


@pytest.mark.parametrize("what", ["file", "dangling link", "link to a folder", "record is a folder", "record is a list"])
def test_something_else_in_the_place_of_an_entry_is_replaced(bundle: Path, cache: Path, tmp_path: Path, lines, what: str):
    truth = ids(open_engine(bundle))
    (entry,) = entries(cache)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("")
    if what == "record is a folder":
        (entry / "prepared.json").unlink()
        (entry / "prepared.json").mkdir()
    elif what == "record is a list":
        (entry / "prepared.json").write_text("[1]")
    else:
        shutil.rmtree(entry)
        if what == "file":
            entry.write_text("")
        else:
            entry.symlink_to(tmp_path / ("nowhere" if what == "dangling link" else "precious"))
    assert ids(open_engine(bundle)) == truth
    (said,) = lines()
    assert "making them again" in said
    assert entries(cache) == [entry]
    assert not entry.is_symlink()
    assert (tmp_path / "precious/file").exists()
    assert ids(open_engine(bundle)) == truth
    assert lines() == []


def test_a_cache_that_cannot_be_written_costs_one_line(bundle: Path, tmp_path: Path, monkeypatch, lines):
    truth = ids(load(bundle, threads=1, drafter="lookup", prepare=False))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECEDGE_CACHE", str(tmp_path / "file"))
    assert ids(open_engine(bundle)) == truth
    (said,) = lines()
    assert "opened without prepared weights" in said and "\n" not in said


def test_a_read_only_cache_serves_what_it_holds(bundle: Path, cache: Path, monkeypatch, lines):
    truth = ids(open_engine(bundle))

    def refuse(*_: object) -> None:
        raise PermissionError(1, "read-only")

    for function in ("utime", "mkdir", "rename", "replace"):
        monkeypatch.setattr(os, function, refuse)
    assert ids(open_engine(bundle)) == truth
    assert lines() == []


def test_a_full_disk_leaves_nothing_and_loading_works(bundle: Path, cache: Path, lines):
    resource = pytest.importorskip("resource")
    truth = ids(load(bundle, threads=1, drafter="lookup", prepare=False))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        assert ids(open_engine(bundle)) == truth
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    (said,) = lines()
    assert "opened without prepared weights" in said
    assert entries(cache) == []
    assert ids(open_engine(bundle)) == truth
    assert len(entries(cache)) == 1
    assert lines() == []


def test_too_little_room_is_noticed_before_writing(bundle: Path, cache: Path, monkeypatch, lines):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    open_engine(bundle)
    (said,) = lines()
    assert "0 MB free in the cache, expected" in said
    assert entries(cache) == []


def test_damaged_weights_are_not_kept(bundle: Path, cache: Path, tmp_path: Path, lines):
    copied = tmp_path / "bundle"
    subprocess.run(["cp", "-r", str(bundle), str(copied)], check=True)
    weights = copied / "target/weights.bin"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    open_engine(copied)
    (said,) = lines()
    assert "weights.bin: its SHA-256 is not the manifest's" in said
    assert entries(cache) == []


def test_a_form_that_computes_something_else_is_not_kept(bundle: Path, cache: Path, monkeypatch, lines):
    monkeypatch.setattr(Model, "_same", lambda self, first, second: False)
    open_engine(bundle)
    (said,) = lines()
    assert "the prepared form computes something else" in said
    (entry,) = entries(cache)
    assert [path.name for path in entry.iterdir()] == ["prepared.json"]  # so that the next load does not try again
    prepared._said.clear()
    monkeypatch.undo()
    monkeypatch.setenv("SPECEDGE_CACHE", str(cache.parent))
    open_engine(bundle)
    (again,) = lines()
    assert "the prepared form computes something else" in again
    open_engine(bundle)
    assert lines() == []  # a line is said once per process


PREPARE = (
    "import sys; from specedge.runtime import load\n"
    "print('ready', flush=True); sys.stdin.readline()\n"
    "engine = load(sys.argv[1], threads=1, drafter='lookup', prepare=True)\n"
    "print(engine.generate([3, 1, 4, 1, 5, 9, 2, 6], max_new_tokens=24, gamma=3).ids)\n"
)


def start(bundle: Path, program: str = PREPARE) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", program, str(bundle)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_two_processes_prepare_at_once(bundle: Path, cache: Path):
    truth = ids(load(bundle, threads=1, drafter="lookup", prepare=False))
    processes = [start(bundle) for _ in range(3)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert (out.strip(), err) == (str(truth), "")
    assert len(entries(cache)) == 1


def test_a_killed_preparation_is_swept_by_the_next(bundle: Path, cache: Path, lines):
    truth = ids(load(bundle, threads=1, drafter="lookup", prepare=False))
    slow = PREPARE.replace(
        "print('ready'",
        "import os, time; from specedge.runtime import prepared\n"
        "prepared._write_record = lambda *arguments: time.sleep(60)\nprint('ready'",
    )
    process = start(bundle, slow)
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    deadline = time.monotonic() + 30
    while not list(cache.glob(".*.partial-*/weights.bin")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (left,) = entries(cache)
    assert ".partial-" in left.name
    assert ids(open_engine(bundle)) == truth
    assert len(entries(cache)) == 2  # it may still be somebody's, in another container
    for path in (*left.iterdir(), left):
        os.utime(path, (1, 1))
    assert ids(open_engine(bundle)) == truth
    (entry,) = entries(cache)
    assert not entry.name.startswith(".")
    assert lines() == []


def test_entries_nobody_opens_are_removed(bundle: Path, cache: Path):
    old = cache / "0123456789abcdef"
    old.mkdir(parents=True)
    (old / "prepared.json").write_text("{}")
    os.utime(old / "prepared.json", (1, 1))
    (cache / "stranger").mkdir()
    open_engine(bundle)
    names = {entry.name for entry in entries(cache)}
    assert "stranger" in names and old.name not in names and len(names) == 2


def test_a_sibling_that_cannot_be_read_does_not_matter(bundle: Path, cache: Path, monkeypatch, lines):
    (cache / "another user's").mkdir(parents=True)
    exists = Path.exists

    def refuse(self: Path) -> bool:
        if self.parent.name == "another user's":
            raise PermissionError(13, "not yours")
        return exists(self)

    monkeypatch.setattr(Path, "exists", refuse)
    open_engine(bundle)
    assert lines() == []
    assert len(entries(cache)) == 2


def test_threads_prepare_once(bundle: Path, cache: Path, monkeypatch, lines):
    truth = ids(load(bundle, threads=1, drafter="lookup", prepare=False))
    made = []
    make_entry = prepared._make

    def counted(*arguments: Any, **options: Any) -> None:
        made.append(1)
        make_entry(*arguments, **options)

    monkeypatch.setattr(prepared, "_make", counted)
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda _: ids(open_engine(bundle)), range(6))) == [truth] * 6
    assert (len(made), lines()) == (1, [])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_has_caches_of_its_own(bundle: Path, cache: Path):
    """And can load, even if a thread of its parent was preparing."""
    program = (
        "import os, sys, threading; from specedge.runtime import load, prepared\n"
        "engine = load(sys.argv[1], threads=1, drafter='lookup', prepare=True)\n"
        "prompts = [[number, 3, 1, 4, 1, 5] for number in range(2, 8)]\n"
        "truth = [engine.generate(prompt, max_new_tokens=24).ids for prompt in prompts]\n"
        "held = threading.Event(); let_go = threading.Event()\n"
        "def hold():\n"
        "    with prepared._preparing: held.set(); let_go.wait()\n"
        "threading.Thread(target=hold, daemon=True).start(); held.wait()\n"
        "children = []\n"
        "for child in range(3):\n"
        "    if (pid := os.fork()) == 0:\n"
        "        same = all([engine.generate(p, max_new_tokens=24).ids for p in prompts] == truth for _ in range(5))\n"
        "        other = load(sys.argv[1], threads=1, drafter='lookup', prepare=True)\n"
        "        with prepared._preparing: pass\n"
        "        os._exit(0 if same and other.generate(prompts[0], max_new_tokens=24).ids == truth[0] else 1)\n"
        "    children.append(pid)\n"
        "print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(bundle)], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[0, 0, 0]", done.stderr


def test_no_home_costs_one_line(bundle: Path, monkeypatch, lines):
    for name in ("SPECEDGE_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)

    def nowhere() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", nowhere)
    open_engine(bundle)
    (said,) = lines()
    assert "SPECEDGE_CACHE: not set" in said


@pytest.mark.skipif(sys.platform != "linux", reason="paths of bytes")
def test_a_path_that_is_no_unicode_costs_one_line(bundle: Path, tmp_path: Path):
    environment = os.environb | {b"SPECEDGE_CACHE": os.fsencode(tmp_path) + b"/bad\xff"}
    done = subprocess.run([sys.executable, "-c", PREPARE, str(bundle)], input=b"go", env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert b"opened without prepared weights" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_a_chunk_of_one_token_is_prepared(tmp_path: Path, cache: Path, lines):
    tiny.f_rand(tmp_path / "model")
    open_engine(make(tmp_path / "model", tmp_path / "bundle", body=INT4, head=INT8, chunk=1, widths=(1,)))
    assert lines() == []
    assert len(entries(cache)) == 1


def test_only_a_row_with_a_prepared_form_can_be_asked_for_it(tmp_path: Path, cache: Path):
    tiny.f_rand(tmp_path / "model")
    path = make(tmp_path / "model", tmp_path / "bundle", device="cpu-static", widths=(1,), chunk=1)
    with pytest.raises(UsageError, match="cpu-static"):
        load(path, prepare=True)


MEASURE = (
    "import json, sys; from specedge.bundle import open_bundle; from specedge.devices.table import get_device\n"
    "from specedge.runtime.memory import read_memory; from specedge.runtime.model import Model\n"
    "bundle, prepare, found = open_bundle(sys.argv[1]), sys.argv[2] == 'prepared', []\n"
    "models, before = [], read_memory([])\n"
    "for _ in range(3):\n"
    "    models.append(Model(bundle, 'target', get_device('cpu'), 1, prepare))\n"
    "    models[-1].sequence().step([1, 2, 3, 4])\n"
    "    after = read_memory(models[0].weight_files)\n"
    "    found.append([after.mapped, after.private - before.private])\n"
    "    before = after\n"
    "print(json.dumps(found))\n"
)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_prepared_weights_are_mapped_and_shared(tmp_path: Path, cache: Path):
    """Their pages belong to the file, another session adds next to nothing; without, each has a copy of its own."""
    shape: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "vocab_size": 8192,
        "num_hidden_layers": 6,
        "head_dim": 128,
    }
    tiny.f_rand(tmp_path / "model", **shape)
    path = make(tmp_path / "model", tmp_path / "bundle", body=INT8, head=INT8, context=16)
    size = open_bundle(path).role("target").stored_bytes
    assert size > prepared.WORTH_IT
    load(path, threads=1)
    assert len(entries(cache)) == 1

    def measure(prepare: str) -> list[list[int]]:
        command = [sys.executable, "-c", MEASURE, str(path), prepare]
        return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)

    for number, (mapped, private) in enumerate(measure("prepared"), 1):
        assert 0.5 * size <= mapped <= 2.5 * size  # however many map it
        assert private <= 0.15 * size + 10e6, number  # 10 MB: what the heap keeps of reading a graph, weights or not
    assert all(private > 0.5 * size for _, private in measure("plain"))
    assert measure_engines(path, 2)[1].private <= 0.15 * size + 10e6
