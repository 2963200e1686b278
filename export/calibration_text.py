"""What a model is calibrated on: the text a person gives, or what the model writes itself."""

import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specedge.cachedir import cache_dir
from specedge.errors import SpecedgeError
from specedge.export.self_text import Document, Writer, write_documents
from specedge.progress import Progress
from specedge.tokenizer import Tokenizer

_LINES = (".jsonl", ".jsonl.gz")
_PIECE = 512  # tokens of a document that a longer text is cut into


@dataclass(frozen=True, slots=True)
class Calibration:
    """How much of which text: a file, or None for the model's own, written with the seed."""

    file: Path | None = None
    tokens: int = 32768
    seed: int = 0


def read_calibration(calibration: Calibration, writer: Writer, progress: Progress) -> tuple[tuple[int, ...], ...]:
    """Documents of token ids, about as many tokens as asked for; all of a smaller file.

    Raises:
        SpecedgeError: The file cannot be read, holds no text, or ids that the model does not have.
    """
    if calibration.file is None:
        written = write_documents(writer, "calibration", calibration.tokens, calibration.seed, cache_dir(), progress)
        return tuple(document.ids for document in written)
    return read_documents(calibration.file, writer.tokenizer, writer.allowed, writer.longest, calibration.tokens)


def read_documents(
    path: Path, tokenizer: Tokenizer | None, allowed: int, longest: int, tokens: int
) -> tuple[tuple[int, ...], ...]:
    """Documents of a file: lines of JSON with `ids`, `messages` or `text`, or a text that is cut into pieces."""
    text = _read(path)
    found: list[tuple[int, ...]] = []
    lines = text.split("\n") if path.name.endswith(_LINES) else [text]
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        ids = (
            _line(line, f"{path}:{number}", tokenizer, allowed)
            if path.name.endswith(_LINES)
            else _encode(text, str(path), tokenizer)
        )
        _checked(ids, f"{path}:{number}", allowed)
        step = min(longest, _PIECE)
        found += [tuple(ids[start : start + step]) for start in range(0, len(ids), step)]
    if not found:
        raise SpecedgeError(f"{path}: holds no text to calibrate on")
    return tuple(_first(found, tokens))


def read_prompted(path: Path, tokenizer: Tokenizer | None, allowed: int, longest: int) -> tuple[Document, ...]:
    """All documents of a file as `read_documents` takes them, prompts told from answers by `prompt_length`.

    Where a line has no such key, all behind its first token is answer; greedy answers have `"sampling": "greedy"`.
    """
    if not path.name.endswith(_LINES):
        pieces = read_documents(path, tokenizer, allowed, longest, sys.maxsize)
        return tuple(Document(ids, 1) for ids in pieces if len(ids) > 1)
    found = []
    for number, line in enumerate(_read(path).split("\n"), 1):
        if line.strip():
            where = f"{path}:{number}"
            ids, record = _checked(_line(line, where, tokenizer, allowed), where, allowed)[:longest], json.loads(line)
            prompt = record.get("prompt_length", 1)
            if type(prompt) is not int or prompt < 1:
                raise SpecedgeError(f"{where}: prompt_length: expected a positive number, found {prompt!r:.60}")
            if prompt < len(ids):
                found.append(Document(tuple(ids), prompt, record.get("sampling") == "greedy"))
    if not found:
        raise SpecedgeError(f"{path}: holds no answers to train on")
    return tuple(found)


def _read(path: Path) -> str:
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return content.decode("utf-8")
    except (OSError, ValueError, EOFError) as error:
        raise SpecedgeError(f"{path}: no text that can be read ({error}); give UTF-8, or lines of JSON") from error


def _checked(ids: Sequence[int], where: str, allowed: int) -> Sequence[int]:
    if bad := [token for token in ids if not 0 <= token < allowed]:
        raise SpecedgeError(f"{where}: id {bad[0]}: expected 0..{allowed - 1}, ids that this model can emit")
    return ids


def _line(line: str, where: str, tokenizer: Tokenizer | None, allowed: int) -> Sequence[int]:
    try:
        record = json.loads(line)
    except (RecursionError, ValueError) as error:
        raise SpecedgeError(f"{where}: not JSON ({error})") from None
    match record:
        case {"ids": [*ids]}:
            if bad := [token for token in ids if type(token) is not int]:
                raise SpecedgeError(f"{where}: id {bad[0]!r}: expected a number, an id that this model can emit")
            return ids
        case {"messages": [*messages]} if tokenizer and all(isinstance(one, dict) for one in messages):
            return tokenizer.encode_chat(messages)
        case {"text": str(text)}:
            return _encode(text, where, tokenizer)
    raise SpecedgeError(f"{where}: expected an object with ids, messages or text, found {line!s:.60}")


def _encode(text: str, where: str, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        raise SpecedgeError(f"{where}: the checkpoint has no tokenizer to read text with; give lines of JSON with ids")
    return tokenizer.encode(text)


def _first(documents: Sequence[tuple[int, ...]], tokens: int) -> Iterator[tuple[int, ...]]:
    """As many as hold `tokens` tokens."""
    for document in documents:
        if tokens <= 0:
            return
        tokens -= len(document)
        yield document
