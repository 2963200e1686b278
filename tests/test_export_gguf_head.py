"""Draft heads in GGUF files: what was written is what is read, bit for bit, and everything else is refused in a line."""

from pathlib import Path

import gguf
import numpy as np
import pytest

import tiny
from specedge.errors import SpecedgeError
from specedge.export.gguf_grid import GRIDS, read_grid, write_grid
from specedge.export.gguf_head import is_gguf_head, read_gguf_head, write_gguf_head
from specedge.export.head_files import open_head
from specedge.export.medusa import open_medusa
from specedge.quant.pack import Quantized
from specedge.quant.rounding import round_to_nearest
from specedge.quant.scheme import Scheme


def matrix(rows: int = 64, columns: int = 64) -> np.ndarray:
    return np.random.default_rng(rows).normal(size=(rows, columns)).astype(np.float32)


def heads(folder: Path, bits: int = 4) -> Path:
    """Two Medusa heads on a grid, over a vocabulary of three ids."""
    tensors: dict[str, Quantized | np.ndarray] = {}
    for head in range(2):
        tensors[f"{head}.0.linear.weight"] = round_to_nearest(matrix(64), Scheme(bits, 32), np.float16)
        tensors[f"{head}.0.linear.bias"] = matrix(1, 64)[0]
    tensors["d2t"] = np.array([1, 5, 9], np.int32) - np.arange(3, dtype=np.int32)
    folder.mkdir()
    write_gguf_head(folder / "model.gguf", tensors, {"medusa_num_heads": 2}, "apache-2.0")
    return folder


@pytest.mark.parametrize("kind", GRIDS)
def test_grids_come_back_bit_for_bit(kind: str) -> None:
    rng = np.random.default_rng(0)
    scheme = GRIDS[kind]
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    stored = rng.integers(0, 256, (8, 3, size), dtype=np.uint8)
    header = 4 if scheme.minima else 2
    stored[..., :header] = rng.normal(size=(8, 3, header // 2)).astype("<f2").view(np.uint8).reshape(8, 3, header)
    stored = stored.reshape(8, -1)
    assert np.array_equal(write_grid(read_grid(kind, stored)), stored)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_head_opens_from_its_folder_or_file_and_keeps_its_codes(bits: int, tmp_path: Path) -> None:
    folder = heads(tmp_path / "heads", bits)
    for source in (folder, folder / "model.gguf"):
        opened = open_medusa(str(source), 64, 128)
        assert (opened.config.heads, opened.config.vocab_size, opened.files.license) == (2, 3, "apache-2.0")
        assert opened.vocabulary is not None and opened.vocabulary.tolist() == [1, 5, 9]
        expected = round_to_nearest(matrix(64), Scheme(bits, 32), np.float16)
        found = opened.grid("heads.1.layers.0.weight")
        assert found is not None and np.array_equal(found.codes, expected.codes)
        assert np.array_equal(opened.tensor("heads.1.layers.0.weight"), expected.dequantize())
        assert opened.grid("heads.1.layers.0.bias") is None
        assert opened.stored_type("heads.0.layers.0.weight") == f"Q{bits}_0"


def test_a_model_is_no_head_and_a_head_no_model(tmp_path: Path) -> None:
    tiny.f_rand(tmp_path / "model")
    model = tmp_path / "model.gguf"
    tiny.f_gguf(tmp_path / "model", model)
    head = heads(tmp_path / "heads") / "model.gguf"
    assert is_gguf_head(head) and not is_gguf_head(model)
    with pytest.raises(SpecedgeError, match="no draft head"):
        open_head(str(model))


def test_damage_is_named(tmp_path: Path) -> None:
    whole = (heads(tmp_path / "heads") / "model.gguf").read_bytes()
    path = tmp_path / "damaged.gguf"
    for content, message in (
        (whole[: len(whole) // 2], "download it again"),
        (b"", "expected b'GGUF'"),
        (b"version https://git-lfs" + whole[:40], "Git LFS pointer"),
        (whole.replace(b'{"medusa', b'["medusa', 1), "no JSON that can be read"),
    ):
        path.write_bytes(content)
        with pytest.raises(SpecedgeError, match=message) as caught:
            read_gguf_head(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_ids_that_are_no_targets_are_refused(tmp_path: Path) -> None:
    for ids, message in (([3, 2, 1], "expected one above"), ([1, 2, 128], "expected one from 0 to 127")):
        folder = tmp_path / f"heads-{ids[0]}"
        folder.mkdir()
        tensors: dict[str, Quantized | np.ndarray] = {
            "0.0.linear.weight": matrix(64),
            "d2t": np.array(ids, np.int32) - np.arange(3, dtype=np.int32),
        }
        write_gguf_head(folder / "model.gguf", tensors, {}, None)
        with pytest.raises(SpecedgeError, match=message):
            open_medusa(str(folder), 64, 128)
