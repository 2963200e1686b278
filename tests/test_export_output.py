"""What a conversion leaves on the disk: pages, the same bytes anywhere, and a bundle whole or not at all."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import tiny
from bundles import SHAPE, Models, engine, files, graphs, locations, make, names
from checkpoints import damaged
from specedge.bundle import open_bundle
from specedge.errors import SpecedgeError
from specedge.export.convert import convert
from specedge.export.recipe import INT4, INT8
from specedge.export.request import Request
from specedge.export.weights import PAGE
from specedge.runtime import load

devices = pytest.mark.parametrize("device", ["cpu", "cpu-static"])
# A large head behind odd small tensors.
BIASES: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "vocab_size": 4096}


@devices
@pytest.mark.parametrize(("body", "head"), [("float32", "float32"), (INT4, INT8)], ids=["float32", "int4"])
def test_weights_lie_beside_small_graphs_on_pages(models: Models, device: str, body: Any, head: Any, tmp_path: Path):
    folder, _ = models(**BIASES)
    path = make(folder, tmp_path / "bundle", device=device, body=body, head=head, **few(device))
    bundle = open_bundle(path)
    role = bundle.role("target")
    extents = sorted((part.offset, part.bytes) for weight in role.weights for part in weight.parts.values())
    ends = [0, *(offset + size for offset, size in extents)]
    assert all(end <= offset for end, (offset, _) in zip(ends, extents, strict=False))  # no two overlap
    assert ends[-1] == bundle.manifest.files["target/weights.bin"].bytes
    large = [offset for offset, size in extents if size >= 64 * 1024]
    assert len(large) == 2 and all(offset % PAGE == 0 for offset in large)
    for file, model in graphs(bundle).items():
        assert bundle.file(file).stat().st_size < 1 << 20
        read = sorted(set(locations(model).values()))
        assert all(offset % 64 == 0 for offset, _ in read)
        assert covered(read) == covered(extents)  # all of them, and nothing else
        if body == INT4:
            assert len(read) < len(extents)  # q, k and v are read as one


def few(device: str) -> dict[str, Any]:
    """Few static graphs are enough."""
    return SHAPE if device == "cpu" else SHAPE | {"chunk": 4}


def covered(extents: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending (offset, size) with what touches merged."""
    merged: list[tuple[int, int]] = []
    for offset, size in extents:
        if merged and sum(merged[-1]) == offset:
            offset, size = merged[-1][0], merged.pop()[1] + size
        merged.append((offset, size))
    return merged


def test_a_conversion_is_the_same_anywhere(models: Models, tmp_path: Path):  # B60, B62
    """Another process, another locale, odd names: the same bytes, nothing beside them, and every command works."""
    source, _ = models()
    odd = tmp_path / "mod é 中文 'q' #1 [b]"
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    for folder in (odd, here, temporary):
        folder.mkdir()
    tiny.f_self(source, odd / source.name)
    shape = ["--weights", "fp32", "--context", "128", "--widths", "1,4", "--chunk", "8"]
    script = (
        "import sys; from specedge.export.cli import main\n"
        "source, bundle, *shape = sys.argv[1:]\n"
        "main(['convert', source, '-o', bundle, *shape], standalone_mode=False)\n"
        "main(['validate', bundle, '--reference', source], standalone_mode=False)\n"
        "main(['generate', bundle, '--ids', '3,4,5', '--max-new-tokens', '8'], standalone_mode=False)\n"
    )
    command = [sys.executable, "-c", script, str(odd / source.name), "../" + odd.name + "/bundle", *shape]
    environment = os.environ | {"LC_ALL": "C", "PYTHONHASHSEED": "7", "TMPDIR": str(temporary)}
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    plain = engine(source, tmp_path / "plain", **SHAPE)
    made = files(odd / "bundle")
    assert made.pop("report/validate.json")
    assert made == files(tmp_path / "plain")
    ids = " ".join(map(str, plain.generate([3, 4, 5], max_new_tokens=8).ids))
    assert done.stdout.decode().splitlines()[-1].strip() == ids
    assert load(odd / "bundle", threads=1).generate([3, 4, 5], max_new_tokens=8).ids == list(map(int, ids.split()))
    assert names(here) == set()
    assert names(temporary) <= {".ses"}  # ONNX Runtime's own
    assert names(odd) == {source.name, "bundle"}


def test_a_bundle_is_replaced_only_by_force_and_as_a_whole(models: Models, tmp_path: Path):  # B60
    source, _ = models()
    path = make(source, tmp_path / "bundle", device="cpu-static", context=128, widths=(1, 4), chunk=8, force=False)
    before = files(path)
    with pytest.raises(SpecedgeError, match=r"bundle: exists already; .*--force"):
        make(source, path, device="cpu-static", context=128, widths=(1,), chunk=1, force=False)
    assert files(path) == before
    make(source, path, device="cpu-static", context=128, widths=(1,), chunk=1)
    assert {name for name in files(path) if name.endswith(".onnx")} == {"target/step_1.onnx"}
    make(source, path, device="cpu-static", **SHAPE)
    assert files(path) == before
    assert names(tmp_path) == {"bundle"}


def test_what_is_no_bundle_is_never_replaced(models: Models, tmp_path: Path):
    source, _ = models()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/diary.txt").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for place in ("notes", "file"):
        with pytest.raises(SpecedgeError, match=f"{place}: exists and is no bundle"):
            make(source, tmp_path / place, **SHAPE)
    assert files(tmp_path) == {"notes/diary.txt": b"precious", "file": b"precious"}


def test_a_manifest_of_something_else_makes_no_bundle(models: Models, tmp_path: Path):
    (tmp_path / "extension").mkdir()
    (tmp_path / "extension/manifest.json").write_text('{"manifest_version": 3}')
    before = files(tmp_path)
    with pytest.raises(SpecedgeError, match="extension: exists and is no bundle"):
        make(models()[0], tmp_path / "extension", **SHAPE)
    assert files(tmp_path) == before


def test_the_slower_of_two_conversions_is_refused(models: Models, tmp_path: Path):
    source, _ = models()
    before = files(make(source, tmp_path / "faster", body=INT4, **SHAPE))

    def finish_elsewhere(task: str, done: int, total: int) -> None:
        if task == "target: graphs" and done == total:
            (tmp_path / "faster").rename(tmp_path / "bundle")

    with pytest.raises(SpecedgeError, match="bundle: exists already"):
        convert(Request(str(source), tmp_path / "bundle", **SHAPE), finish_elsewhere)
    assert files(tmp_path / "bundle") == before
    assert names(tmp_path) == {"bundle"}


def test_a_killed_conversion_is_swept_by_the_next(models: Models, tmp_path: Path):  # B60
    source, _ = models()
    path = make(source, tmp_path / "bundle", **SHAPE)
    old = files(path)
    command = [sys.executable, "-m", "specedge.export", "convert", str(source), "-o", str(path), "--force"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("target: graphs: started" in line for line in process.stderr)
        process.send_signal(signal.SIGKILL)
    assert names(tmp_path) == {"bundle", f".bundle.partial-{process.pid}"}
    assert files(path) == old
    make(source, path, **SHAPE)
    assert names(tmp_path) == {"bundle"}
    # killed between moving the old bundle away and the new one in: the old one comes back, even if the next try fails
    path.rename(tmp_path / f".bundle.replaced-{process.pid}")
    with pytest.raises(SpecedgeError):
        make(damaged(source, tmp_path / "bad", float("nan")), path, **SHAPE)
    assert files(path) == old
    assert names(tmp_path) == {"bundle", "bad"}


def test_strangers_beside_the_output_do_not_matter(models: Models, tmp_path: Path):
    """Nor does what an earlier process of the same number left, which is usual in containers."""
    strangers = {"run-1700000000000", "note-²", "x-0", ".other.partial-99999999", "bundle-7"}
    for name in (*strangers, f".bundle.partial-{os.getpid()}"):
        (tmp_path / name).mkdir()
    make(models()[0], tmp_path / "bundle", **SHAPE)
    assert names(tmp_path) == strangers | {"bundle"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_conversion_that_fails_leaves_nothing(models: Models, value: float, tmp_path: Path):  # B22
    source, _ = models()
    bad = damaged(source, tmp_path / "bad", value)
    (tmp_path / "out").mkdir()
    with pytest.raises(SpecedgeError, match=rf"model\.layers\.1\.mlp\.up_proj\.weight\[5, 7\].*{value}"):
        make(bad, tmp_path / "out/bundle", **SHAPE)
    with pytest.raises(SpecedgeError, match=r"up_proj\.weight\[5, 7\]"):
        make(source, tmp_path / "out/bundle", draft=str(bad), **SHAPE)
    assert names(tmp_path / "out") == set()


def test_a_full_disk_is_an_error_that_leaves_nothing(models: Models, tmp_path: Path):
    resource = pytest.importorskip("resource")
    source, _ = models()
    path = make(source, tmp_path / "bundle", body=INT4, head=INT4, **SHAPE)
    old = files(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # the float weights need 435,456 bytes
    try:
        with pytest.raises(SpecedgeError, match=r"bundle: was not written \(.*File too large"):
            make(source, path, **SHAPE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files(path) == old
    assert names(tmp_path) == {"bundle"}


def test_a_place_that_cannot_be_written_is_named(models: Models, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecedgeError, match="file/bundle: was not written"):
        make(models()[0], tmp_path / "file/bundle", **SHAPE)


def test_a_link_to_a_bundle_stays_a_link(models: Models, tmp_path: Path):
    path = make(models()[0], tmp_path / "bundle", body=INT4, **SHAPE)
    (tmp_path / "latest").symlink_to("bundle")
    make(models()[0], tmp_path / "latest", **SHAPE)
    assert (tmp_path / "latest").is_symlink()
    assert open_bundle(path).role("target").weights[1].scheme == "float32"
    assert names(tmp_path) == {"bundle", "latest"}
