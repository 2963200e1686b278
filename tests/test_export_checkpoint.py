"""Whatever a model comes as, it opens under its own name, with its own ids and licence."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants as hub

import tiny
from checkpoints import WEIGHTS, check_same, refuse
from specedge.export.checkpoint import open_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """F-RAND, fp32, one file."""
    tiny.f_rand(tmp_path / "model")
    return tmp_path / "model"


def test_a_hub_cache_opens_by_path_and_by_id(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = tiny.load_hf(folder)
    repository = tmp_path / "hub" / "models--someone--small"
    snapshot = repository / "snapshots" / "abc123"
    for place in (snapshot, repository / "blobs", repository / "refs"):
        place.mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc123")
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for source in (str(snapshot), "someone/small"):
        checkpoint = open_checkpoint(source)
        assert checkpoint.name == "small"
        check_same(checkpoint, model)


def test_the_name_and_licence_are_the_models_own(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "README.md").write_text("---\nlanguage:\n- en\nlicense: apache-2.0\n---\n# Model\nlicense: mine\n")
    monkeypatch.chdir(folder)
    for source in (".", str(folder)):
        checkpoint = open_checkpoint(source)
        assert (checkpoint.name, checkpoint.license) == ("model", "apache-2.0")


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [  # B28
        ({"eos_token_id": [60, 8]}, {"eos_token_id": 60}, "<eos>", (60, 8)),
        ({"eos_token_id": None}, {"eos_token_id": 60}, "<eos>", (60,)),
        ({}, {}, "<eos>", (2,)),
        ({"eos_token_id": None}, {"eos_token_id": None}, None, ()),
    ],
)
def test_eos_is_found_where_transformers_looks(
    folder: Path, generation: dict[str, Any], config: dict[str, Any], tokenizer: str | None, expected: tuple[int, ...]
):
    tiny.f_tok(folder, size=120)
    tiny.edit_json(folder / "tokenizer_config.json", eos_token=tokenizer)
    for file, values in (("generation_config.json", generation), ("config.json", config)):
        kept = {key: value for key, value in json.loads((folder / file).read_text()).items() if key != "eos_token_id"}
        tiny.write_json(folder / file, kept | values)
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.eos_ids == expected
    assert checkpoint.bos_id == 1


def test_a_strange_eos_is_named(folder: Path):
    tiny.edit_json(folder / "generation_config.json", eos_token_id=[2, "<eos>"])
    refuse(folder, "generation_config.json: eos_token_id", "[2, '<eos>']")


def test_what_is_nowhere_is_one_line(tmp_path: Path):
    refuse(tmp_path / "nothing", "no such file or folder")
    refuse(tmp_path / "model.gguf", "no such file or folder")
    refuse("someone/not-in-the-cache", "someone/not-in-the-cache", "offline")
    (tmp_path / WEIGHTS).write_bytes(b"123")
    refuse(tmp_path / WEIGHTS, "give a GGUF file or a Hugging Face folder")
