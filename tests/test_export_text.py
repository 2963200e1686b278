"""Text for calibration and judgement: a person's file, or the model's own, the same for a seed and never of the same prompt."""

import dataclasses
import gzip
import json
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from specedge.cachedir import keep
from specedge.errors import SpecedgeError
from specedge.export import self_text
from specedge.export.batched import BatchedDecoder
from specedge.export.calibration_text import Calibration, read_calibration, read_documents, read_prompted
from specedge.export.checkpoint import open_checkpoint
from specedge.export.self_text import Document, Writer, write_documents, writer_of
from specedge.export.topics import Part, written_prompts
from specedge.progress import silent
from specedge.runtime.prompts import CHAT
from specedge.tokenizer import Tokenizer
from tiny import Array

VOCAB = 264


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Array]:
    """An exact bigram model with a tokenizer, which may end after any token."""
    folder = tmp_path_factory.mktemp("chain")
    tiny.f_tok(folder / "tokenizer", chat_template=None)
    law = tiny.random_chain(VOCAB, seed=1, sharpness=2.5)
    law[:, 2] += 0.02
    law[:, 259:] = 0
    law /= law.sum(1, keepdims=True)
    tiny.f_chain(folder / "model", law, eos=2, tokenizer=folder / "tokenizer")
    return folder / "model", law


def writer(folder: Path, **changes: Any) -> Writer:
    opened = writer_of(open_checkpoint(str(folder)), Tokenizer.in_folder(folder), 259, 64)
    return dataclasses.replace(opened, **changes)


def write(
    folder: Path, cache: Path, part: Part = "calibration", tokens: int = 600, seed: int = 0, **changes: Any
) -> tuple[Document, ...]:
    return write_documents(writer(folder, **changes), part, tokens, seed, cache, silent)


def refuse_to_open() -> BatchedDecoder:
    raise AssertionError("nothing had to be written")


def test_documents_follow_the_models_law(chain: tuple[Path, Array], tmp_path: Path) -> None:
    folder, law = chain
    documents = write(folder, tmp_path, tokens=6000)
    pairs = [pair for document in documents for pair in pairwise(document.ids[document.prompt - 1 :])]
    assert len(pairs) >= 6000
    expected, found = np.zeros(VOCAB), np.zeros(VOCAB)
    for before, after in pairs:
        expected += law[before]
        found[after] += 1
    likely = expected > 20
    assert np.abs((found - expected)[likely] / np.sqrt(expected[likely])).max() < 5
    assert found[259:].sum() == 0
    ends = [document.ids.index(2, document.prompt) for document in documents if 2 in document.ids[document.prompt :]]
    assert ends and all(len(document.ids) <= 64 for document in documents)
    assert all(2 not in document.ids[document.prompt : -1] for document in documents)


def test_the_seed_decides_and_the_cache_serves(chain: tuple[Path, Array], tmp_path: Path) -> None:
    folder, _ = chain
    first = write(folder, tmp_path / "a")
    assert write(folder, tmp_path / "b") == first
    assert write(folder, tmp_path / "b", seed=1) != first
    assert write(folder, tmp_path / "a", model=refuse_to_open) == first
    more = write(folder, tmp_path / "a", tokens=3000)
    assert more[: len(first)] == first and len(more) > len(first)


def test_a_broken_run_keeps_its_batches(chain: tuple[Path, Array], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = chain
    whole = write(folder, tmp_path / "whole", tokens=4000)
    written: list[Path] = []

    def fail_second(path: Path, content: bytes) -> None:
        written.append(path)
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    with monkeypatch.context() as patch:
        patch.setattr(self_text, "write_whole", fail_second)
        with pytest.raises(OSError, match="No space"):
            write(folder, tmp_path / "broken", tokens=4000)
    assert write(folder, tmp_path / "broken", tokens=4000) == whole


def test_a_damaged_batch_is_written_again(chain: tuple[Path, Array], tmp_path: Path) -> None:
    folder, _ = chain
    first = write(folder, tmp_path)
    next(tmp_path.rglob("*.json")).write_text("[[[1,2")
    assert write(folder, tmp_path) == first


def test_judgement_uses_no_prompt_of_calibration(chain: tuple[Path, Array], tmp_path: Path) -> None:
    folder, _ = chain
    prompts: dict[str, set[tuple[int, ...]]] = {}
    parts: tuple[Part, Part] = ("calibration", "held-out")
    for part in parts:
        found = write(folder, tmp_path, part, tokens=9000, longest=300)
        prompts[part] = {document.ids[: document.prompt] for document in found}
    assert len(prompts["calibration"]) > 100
    assert not prompts["calibration"] & prompts["held-out"]
    bare = [write(folder, tmp_path / "bare", part, tokens=3000, tokenizer=None) for part in parts]
    starts = [{document.ids[0] for document in documents} for documents in bare]
    assert all(document.prompt == 1 for documents in bare for document in documents) and not starts[0] & starts[1]


def test_a_model_that_never_ends_fills_its_documents(chain: tuple[Path, Array], tmp_path: Path) -> None:
    folder, _ = chain
    documents = write(folder, tmp_path, eos_ids=(), longest=24)
    assert {len(document.ids) for document in documents} <= {*range(20, 25)}


# ---- a person's file


@pytest.fixture(scope="module")
def tokenizer(chain: tuple[Path, Array]) -> Tokenizer:
    found = Tokenizer.in_folder(chain[0])
    assert found is not None
    return found


def read(path: Path, tokenizer: Tokenizer | None, tokens: int = 10**6) -> tuple[tuple[int, ...], ...]:
    return read_documents(path, tokenizer, 259, 64, tokens)


def test_a_text_file_is_cut_into_pieces(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = "A long text, and é too. " * 20
    (tmp_path / "mod é.txt").write_text(text, encoding="utf-8")
    found = read(tmp_path / "mod é.txt", tokenizer)
    assert [token for piece in found for token in piece] == tokenizer.encode(text)
    assert {len(piece) for piece in found[:-1]} == {64}
    assert sum(map(len, read(tmp_path / "mod é.txt", tokenizer, tokens=100))) == 128


def test_lines_of_json_hold_ids_or_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"ids": [5, 6, 7]}, {"text": "abc"}])) + "\n\n")
    assert read(path, tokenizer) == ((5, 6, 7), tuple(tokenizer.encode("abc")))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b"{", ":1: not JSON"),
        ("a.jsonl", b'{"ids": [5]}\n{"ids": [259]}', ":2: id 259: expected 0..258"),
        ("a.jsonl", b'{"ids": [true]}', ":1: id True"),
        ("a.jsonl", b'{"prompt": "x"}', ":1: expected an object with ids, messages or text"),
        ("a.jsonl", b"[1, 2]", ":1: expected an object"),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": "x"}]}', "no chat template"),
        ("a.jsonl", b"\n\n", "holds no text"),
        ("a.txt", b"", "holds no text"),
        ("a.txt", b"\xff\xfe", "no text that can be read"),
    ],
)
def test_a_file_that_is_no_text_is_refused(name: str, content: bytes, said: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SpecedgeError) as caught:
        read(tmp_path / name, tokenizer)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_text_without_a_tokenizer_is_refused_and_ids_are_not(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(SpecedgeError, match="no tokenizer"):
        read(tmp_path / "a.txt", None)
    (tmp_path / "a.jsonl").write_text('{"ids": [5, 6]}')
    assert read(tmp_path / "a.jsonl", None) == ((5, 6),)


def test_calibration_reads_the_file_it_is_given(chain: tuple[Path, Array], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"ids": [5, 6]}')
    given = Calibration(tmp_path / "a.jsonl", tokens=10)
    assert read_calibration(given, writer(chain[0], model=refuse_to_open), silent) == ((5, 6),)


def test_entries_of_the_cache_leave_after_sixty_days(tmp_path: Path) -> None:
    old, new, used = (tmp_path / name for name in ("old", "new", "used"))
    for folder in (old, new, used):
        folder.mkdir()
        (folder / "file").write_text("x")
    for folder in (old, used):
        os.utime(folder, (0, time.time() - 61 * 86400))
    keep(used)
    assert {path.name for path in tmp_path.iterdir()} == {"new", "used"}


def test_no_topic_is_in_two_parts_and_no_built_in_prompt_in_training() -> None:
    parts: tuple[Part, ...] = ("calibration", "held-out", "training")
    found = {part: set(written_prompts(part)) for part in parts}
    assert all(not found[one] & found[other] for one in parts for other in parts if one != other)
    assert len(found["held-out"]) >= 200 and len(found["training"]) >= 5000
    assert not found["training"] & set(CHAT)


def test_training_text_is_greedy_and_sampled_by_turns(chain: tuple[Path, Array], tmp_path: Path) -> None:
    folder, law = chain
    documents = write(folder, tmp_path, "training", tokens=6000)
    assert {document.greedy for document in documents} == {True, False}
    for document in documents:
        pairs = pairwise(document.ids[document.prompt - 1 :])
        best = [law[before, :259].argmax() == after for before, after in pairs]
        assert all(best) == document.greedy or len(best) < 6


def test_prompts_are_told_from_answers(chain: tuple[Path, Array], tmp_path: Path) -> None:
    folder, _ = chain
    opened = writer(folder)
    lines = [
        {"ids": [5, 6, 7, 8], "prompt_length": 2, "sampling": "greedy"},
        {"text": "hello"},
        {"ids": [1], "prompt_length": 1},
    ]
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second = read_prompted(path, opened.tokenizer, 259, 64)
    assert first == Document((5, 6, 7, 8), 2, True)
    assert second.prompt == 1 and not second.greedy and len(second.ids) == 5
    packed = tmp_path / "text.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_prompted(packed, opened.tokenizer, 259, 64) == (first, second)
    plain = tmp_path / "text.txt"
    plain.write_text("hello " * 40)
    assert all(document.prompt == 1 for document in read_prompted(plain, opened.tokenizer, 259, 64))
