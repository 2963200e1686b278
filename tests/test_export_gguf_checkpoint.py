"""A GGUF file is read as the model it was written from, or one line says which key or tensor is wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

import tiny
from checkpoints import check_same, refuse, rewrite_gguf
from specedge.export.checkpoint import open_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """F-RAND, fp32, one file."""
    tiny.f_rand(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("overrides", [{}, {"attention_bias": True, "mlp_bias": True}], ids=["plain", "biases"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_is_read_as_the_model_it_was_written_from(tmp_path: Path, tied: bool, overrides: dict[str, Any]):  # B08
    model = tiny.f_rand(tmp_path / "model", tie_word_embeddings=tied, **overrides)
    tiny.f_gguf(tmp_path / "model", tmp_path / "model.gguf", tied=tied)
    checkpoint = open_checkpoint(str(tmp_path / "model.gguf"))
    assert (checkpoint.name, checkpoint.config.tied) == ("model.gguf", tied)
    check_same(checkpoint, model)


def test_gguf_rope_factors_divide_the_frequencies(folder: Path):  # B08
    factors = [1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0]
    tiny.f_gguf(folder, folder / "model.gguf", rope_freqs=factors)
    model = tiny.load_hf(folder)
    rotary = model.model.rotary_emb
    rotary.inv_freq /= torch.tensor(factors)
    checkpoint = open_checkpoint(str(folder / "model.gguf"))
    assert checkpoint.config.inv_freq == tuple(rotary.inv_freq.tolist())
    check_same(checkpoint, model)


def test_quantised_blocks_are_dequantised(folder: Path):
    tiny.f_gguf(folder, folder / "full.gguf")
    rewrite_gguf(folder / "full.gguf", folder / "small.gguf", {}, GGMLQuantizationType.BF16)
    model = tiny.load_hf(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(parameter.bfloat16())
    check_same(open_checkpoint(str(folder / "small.gguf")), model)


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda content: content[: len(content) // 2], "interrupted download"),
        (lambda content: content[:100], "interrupted download"),
        (lambda content: b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (lambda content: b"", "expected b'GGUF'"),
    ],
)
def test_a_damaged_gguf_is_named_with_its_likely_cause(folder: Path, damage: Callable[[bytes], bytes], cause: str):
    path = folder / "model.gguf"
    tiny.f_gguf(folder, path)
    content = damage(path.read_bytes())
    path.write_bytes(content)
    refuse(path, str(path), cause, f"{len(content)} bytes")


@pytest.mark.parametrize(
    ("metadata", "parts"),
    [
        ({"llama.attention.sliding_window": 8}, ["llama.attention.sliding_window=8", "does not know"]),
        ({"llama.expert_count": 8}, ["llama.expert_count=8"]),
        ({"llama.rope.dimension_count": 8}, ["llama.rope.dimension_count=8: expected the head dimension, 16"]),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, ["rope_type 'yarn'"]),
        ({"llama.block_count": None}, ["llama.block_count: missing"]),
        ({"llama.block_count": 1}, ["unused tensor: blk.1."]),
        ({"split.count": 3}, ["split.count 3", "llama-gguf-split --merge"]),
    ],
)
def test_gguf_settings_are_used_or_refused_by_name(folder: Path, metadata: dict[str, Any], parts: list[str]):
    tiny.f_gguf(folder, folder / "a.gguf")
    rewrite_gguf(folder / "a.gguf", folder / "b.gguf", metadata)
    refuse(folder / "b.gguf", str(folder / "b.gguf"), *parts)


def test_gguf_linear_scaling_is_read(folder: Path):
    tiny.f_gguf(folder, folder / "a.gguf")
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    rewrite_gguf(folder / "a.gguf", folder / "b.gguf", scaling)
    tiny.edit_json(folder / "config.json", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0})
    check_same(open_checkpoint(str(folder / "b.gguf")), tiny.load_hf(folder))


def test_other_gguf_architectures_are_refused_by_name(folder: Path):
    tiny.f_gguf(folder, folder / "model.gguf", architecture="qwen2", permuted=False)
    refuse(folder / "model.gguf", "general.architecture 'qwen2'", "supported: llama")
