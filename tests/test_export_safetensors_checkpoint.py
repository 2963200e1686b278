"""A Hugging Face folder is read as transformers reads it, or one line says which file, tensor or key is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from checkpoints import INDEX, WEIGHTS, check_same, refuse
from specedge.errors import SpecedgeError
from specedge.export.checkpoint import open_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """F-RAND, fp32, one file."""
    tiny.f_rand(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    tiny.f_rand(tmp_path / "model", max_shard_size="20KB")
    return tmp_path / "model"


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 24, "num_key_value_heads": 1},
    ],  # B05 (b)
    ids=["plain", "tied", "biases", "head_dim"],
)
def test_a_folder_is_read_as_transformers_reads_it(tmp_path: Path, overrides: dict[str, Any]):
    model = tiny.f_rand(tmp_path / "model", **overrides)
    check_same(open_checkpoint(str(tmp_path / "model")), model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_becomes_float32_exactly(tmp_path: Path, dtype: torch.dtype):
    model = tiny.f_rand(tmp_path, save=False)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(tmp_path)
    check_same(open_checkpoint(str(tmp_path)), tiny.load_hf(tmp_path))


def test_shards_are_read_by_their_index(sharded: Path):
    model = tiny.load_hf(sharded)
    tiny.f_rand(sharded.parent / "stray", seed=1)
    shutil.copy(sharded.parent / "stray" / WEIGHTS, sharded / WEIGHTS)  # which transformers would load
    check_same(open_checkpoint(str(sharded)), model)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_named(folder: Path, bad: float):  # B22
    edit_tensors(folder, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"][5].__setitem__(7, bad))
    checkpoint = open_checkpoint(str(folder))
    with pytest.raises(SpecedgeError, match=rf"model\.layers\.1\.mlp\.up_proj\.weight\[5, 7\].* {bad}"):
        checkpoint.tensor("layers.1.mlp.up_proj.weight")
    assert np.isfinite(checkpoint.tensor("layers.0.mlp.up_proj.weight")).all()


def test_missing_shards_and_tensors_are_listed(sharded: Path):  # B56
    index = json.loads((sharded / INDEX).read_text())
    places: dict[str, str] = index["weight_map"]
    shards = list(places.values())
    dropped = next(name for name, shard in places.items() if shards.count(shard) > 1)
    kept = {name: shard for name, shard in places.items() if name != dropped}
    tiny.edit_json(sharded / INDEX, weight_map=kept)
    refuse(sharded, INDEX, f"does not list {dropped}", places[dropped])
    tiny.edit_json(sharded / INDEX, weight_map=places | {"model.extra.weight": places[dropped]})
    refuse(sharded, f"missing tensor: model.extra.weight, named in {INDEX}")
    tiny.edit_json(sharded / INDEX, weight_map=places | {dropped: "../model.safetensors"})
    refuse(sharded, "'../model.safetensors' is not the name of a file")
    tiny.write_json(sharded / INDEX, index)
    second = sorted(set(shards))[1]
    (sharded / second).unlink()
    refuse(sharded, f"missing {second}, named in {INDEX}")


@pytest.mark.parametrize(
    ("settings", "parts"),
    [  # B56, B05
        ({"num_hidden_layers": 3}, ["missing tensor: model.layers.2.", "and 8 more", "num_hidden_layers=3"]),
        ({"num_hidden_layers": 1}, ["unused tensor: model.layers.1.", "and 8 more", "num_hidden_layers=1"]),
        ({"attention_bias": True}, ["missing tensor: model.layers.0.self_attn.q_proj.bias", "attention_bias=True"]),
        (
            {"head_dim": 32},
            [
                "model.layers.0.self_attn.q_proj.weight: expected shape (128, 64)",
                "from num_attention_heads=4 and head_dim=32 by hidden_size=64, found (64, 64)",
            ],
        ),
        ({"vocab_size": 130}, ["embed_tokens.weight: expected shape (130, 64) from vocab_size=130"]),
    ],
)
def test_tensors_and_config_must_fit(folder: Path, settings: dict[str, Any], parts: list[str]):
    tiny.edit_json(folder / "config.json", **settings)
    refuse(folder, *parts)


def test_every_tensor_is_used_or_known(folder: Path):
    known = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in (0, 1)}
    edit_tensors(folder, lambda tensors: tensors.update(known))
    open_checkpoint(str(folder))
    edit_tensors(folder, lambda tensors: tensors.update({"model.layers.1.self_attn.q_norm.weight": torch.ones(16)}))
    refuse(folder, "unused tensor: model.layers.1.self_attn.q_norm.weight")


def test_a_tied_head_may_be_there_twice_if_equal(tmp_path: Path):
    model = tiny.f_rand(tmp_path, tie_word_embeddings=True)
    head = model.model.embed_tokens.weight.detach().clone()
    edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": head}))
    check_same(open_checkpoint(str(tmp_path)), model)
    edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": head * 1.5}))
    refuse(tmp_path, "lm_head.weight differs from model.embed_tokens.weight", "tie_word_embeddings")


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"model_type": "gemma2"}, ["model_type 'gemma2' is not supported", "supported: llama"]),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, ["model_type 'own'", "never runs"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification", "text-classification"]),
        ({"architectures": ["LlamaModel"]}, ["LlamaModel", "feature-extraction", "expected one for text-generation"]),
        ({"architectures": ["NoSuchModel"]}, ["NoSuchModel is a model for an unknown task"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config: quant_method 'fp8'"]),
        ({"num_attention_heads": 0}, ["config.json"]),
        ({"hidden_size": "64"}, ["config.json", "hidden_size"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, ["config.json", "'yarn'"]),
    ],
)
def test_other_configs_are_refused_by_name(folder: Path, settings: dict[str, Any], parts: list[str]):
    tiny.edit_json(folder / "config.json", **settings)
    refuse(folder, *parts)


def test_pickles_are_never_loaded(folder: Path):
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    refuse(folder, "pytorch_model.bin: pickled weights can run code")
    (folder / "pytorch_model.bin").unlink()
    refuse(folder, f"neither {WEIGHTS} nor {INDEX}")
    (folder / "config.json").unlink()
    refuse(folder, "config.json: missing")


def test_an_adapter_is_no_model(folder: Path):
    (folder / "adapter_config.json").write_text("{}")
    refuse(folder, "a PEFT adapter")
