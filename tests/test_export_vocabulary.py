"""Target and draft must mean the same token by every id; padding rows mean nothing."""

from pathlib import Path

import pytest

import tiny
from specedge.errors import SpecedgeError
from specedge.export.vocabulary import compare_vocabularies, token_count

SIZE = 120


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny.f_tok(folder, size=SIZE)
    return folder / "tokenizer.json"


def test_token_count_is_one_more_than_the_highest_id(target: Path, tmp_path: Path):
    tiny.f_tok(tmp_path, size=SIZE, extra_tokens=["<a>", "<b>"])
    assert token_count(target) == SIZE
    assert token_count(tmp_path / "tokenizer.json") == SIZE + 2


@pytest.mark.parametrize("draft_size", [SIZE, 128, 136])
def test_padding_rows_may_differ(target: Path, draft_size: int):
    compare_vocabularies(target, target, 128, draft_size)


def test_a_draft_needs_a_row_for_every_token_of_the_target(target: Path):
    with pytest.raises(SpecedgeError, match=f"vocab_size=119 rows, expected at least {SIZE}"):
        compare_vocabularies(target, target, 128, SIZE - 1)
    with pytest.raises(SpecedgeError, match="vocab_size=100 rows, expected at least 128"):
        compare_vocabularies(None, None, 128, 100)


def test_the_first_differing_token_is_named(target: Path, tmp_path: Path):
    tiny.f_tok(tmp_path, size=SIZE, swap=(50, 70))
    here, there = (repr(chr(token - 3 + 32)) for token in (50, 70))
    with pytest.raises(SpecedgeError, match=f"id 50 is {here} to the target and {there} to the draft"):
        compare_vocabularies(target, tmp_path / "tokenizer.json", 128, 128)


def test_added_tokens_count(target: Path, tmp_path: Path):
    tiny.f_tok(tmp_path, size=SIZE, extra_tokens=["<extra>"])
    with pytest.raises(SpecedgeError, match=f"id {SIZE} is no token to the target and '<extra>' to the draft"):
        compare_vocabularies(target, tmp_path / "tokenizer.json", 128, 128)


def test_another_eos_is_no_difference(target: Path, tmp_path: Path):
    tiny.f_tok(tmp_path, size=SIZE)
    tiny.edit_json(tmp_path / "tokenizer_config.json", eos_token="<pad>")
    compare_vocabularies(target, tmp_path / "tokenizer.json", 128, 128)


def test_both_or_neither_have_a_tokenizer(target: Path):
    compare_vocabularies(None, None, 128, 128)
    with pytest.raises(SpecedgeError, match="the draft has no tokenizer and the target has one"):
        compare_vocabularies(target, None, 128, 128)
    with pytest.raises(SpecedgeError, match="the target has no tokenizer and the draft has one"):
        compare_vocabularies(None, target, 128, 128)


def test_a_damaged_tokenizer_is_named(target: Path, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(target.read_bytes()[:100])
    with pytest.raises(SpecedgeError, match=r"tokenizer\.json: not a tokenizer"):
        compare_vocabularies(target, path, 128, 128)
