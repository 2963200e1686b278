"""A bundle's tokenizer files are the same bytes from a folder and from a GGUF file."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

import tiny
from checkpoints import refuse, rewrite_gguf
from specedge.export.checkpoint import open_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """F-RAND, fp32, one file."""
    tiny.f_rand(tmp_path / "model")
    return tmp_path / "model"


def test_gguf_and_folder_give_the_same_tokenizer(tmp_path: Path):
    model = tmp_path / "model"
    tiny.f_rand(model, vocab_size=280)  # more rows than tokens: a GGUF has names for the padding too
    tiny.f_tok(model, chat_template=tiny.CHATML, extra_tokens=["<|im_start|>", "<|im_end|>"])
    tiny.f_gguf(model, tmp_path / "model.gguf")
    written: list[dict[str, str]] = []
    for source in (model, tmp_path / "model.gguf", model):
        place = tmp_path / f"out{len(written)}"
        place.mkdir()
        checkpoint = open_checkpoint(str(source))
        assert checkpoint.save_tokenizer(place)
        assert (checkpoint.eos_ids, checkpoint.bos_id) == ((2,), 1)
        written.append({file.name: file.read_text(encoding="utf-8") for file in place.iterdir()})
    folder, file, again = written
    assert folder == again
    assert sorted(folder) == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert folder["chat_template.jinja"] == tiny.CHATML
    assert file["tokenizer_config.json"] == folder["tokenizer_config.json"]
    tokenizers = [Tokenizer.from_str(files["tokenizer.json"]) for files in (folder, file)]
    text = "<|im_start|>1 é 23<eos>"
    assert tokenizers[0].encode(text).ids == tokenizers[1].encode(text).ids
    known = {token: index for token, index in tokenizers[1].get_vocab().items() if token != "<eos><pad>"}
    assert known == tokenizers[0].get_vocab()
    assert not any(str(tmp_path) in text for files in written for text in files.values())


def test_smollm_digits_stand_alone(tmp_path: Path):
    """What transformers loses in a GGUF: "12" after two spaces is two digits, and the spaces one token."""
    tiny.f_rand(tmp_path / "model", vocab_size=264)
    tiny.f_tok(tmp_path / "model")
    tiny.f_gguf(tmp_path / "model", tmp_path / "a.gguf")
    rewrite_gguf(tmp_path / "a.gguf", tmp_path / "b.gguf", {"tokenizer.ggml.pre": "smollm"})
    open_checkpoint(str(tmp_path / "b.gguf")).save_tokenizer(tmp_path)
    cut = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).pre_tokenizer.pre_tokenize_str("a  12")
    assert [piece for piece, _ in cut] == ["a", "ĠĠ", "1", "2"]
    rewrite_gguf(tmp_path / "a.gguf", tmp_path / "c.gguf", {"tokenizer.ggml.pre": "martian"})
    refuse(tmp_path / "c.gguf", "tokenizer.ggml.pre 'martian'")


def test_without_a_tokenizer_nothing_is_written(folder: Path, tmp_path: Path):
    tiny.f_gguf(folder, tmp_path / "model.gguf")
    (tmp_path / "out").mkdir()
    for source in (folder, tmp_path / "model.gguf"):
        assert not open_checkpoint(str(source)).save_tokenizer(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_slow_tokenizer_is_refused(folder: Path):
    (folder / "tokenizer.model").touch()
    refuse(folder, "tokenizer.model without tokenizer.json")
