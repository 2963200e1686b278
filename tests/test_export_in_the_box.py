"""Drafters that come with the package: there, small, whole, and named."""

from pathlib import Path

import numpy as np
import pytest

from sources import ROOT
from specedge.errors import UsageError
from specedge.export import in_the_box as box
from specedge.export.gguf_head import read_gguf_head
from specedge.runtime.shape import read_shape

KINDS = ("draft", "medusa", "eagle")


def test_all_of_them_take_25_megabytes_at_most() -> None:
    files = [path for path in (ROOT / "export" / "trained").iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 25_000_000
    expected = {f"smollm2-135m-{kind}.gguf" for kind in KINDS} | {"smollm2-135m-eagle-tree.json", "README.md"}
    assert {path.name for path in files} == expected


@pytest.mark.parametrize("kind", KINDS)
def test_each_is_whole_and_for_that_model(kind: str) -> None:
    head = read_gguf_head(Path(box.in_the_box(kind, "smollm2-135m")))
    assert head.license == "apache-2.0"
    offsets = head.tensors["d2t"].read().astype(np.int64)
    ids = np.arange(len(offsets)) + offsets
    assert (np.diff(ids) > 0).all() and ids[0] >= 0 and ids[-1] < 49152
    for name, tensor in head.tensors.items():
        assert np.isfinite(tensor.read()).all()
        assert len(tensor.shape) == 1 or (tensor.grid() is not None and tensor.shape[1] % 576 == 0) or "down_proj" in name


def test_the_tree_has_sixteen_nodes_without_gaps() -> None:
    shape = read_shape(box.tree_in_the_box("eagle", "smollm2-135m"))
    assert len(shape.parents) == 16 and shape.gap is None


def test_other_names_and_folders_are_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert box.in_the_box("eagle", "owner/name") == "owner/name"
    monkeypatch.chdir(tmp_path)
    Path("smollm2-135m").mkdir()
    assert box.in_the_box("eagle", "smollm2-135m") == "smollm2-135m"


def test_an_install_without_them_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box, "_FOLDER", tmp_path)
    with pytest.raises(UsageError, match=r"--draft smollm2-135m: this install has no smollm2-135m-draft\.gguf"):
        box.in_the_box("draft", "smollm2-135m")
