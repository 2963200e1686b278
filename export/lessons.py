"""What a drafter learns from: texts, and what the target's residual streams hold at every token of them, kept in the cache."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specedge.cachedir import keep, write_whole
from specedge.export.batched import BatchedDecoder
from specedge.export.decoder import NORMED
from specedge.export.self_text import Document
from specedge.progress import Progress

_VERSION = 1
_CHUNK = 128  # documents a file
_ROWS = 4096  # tokens read through the target at once
_HELD_BACK = 32  # one prompt in so many is for validation


@dataclass(frozen=True, slots=True)
class Batch:
    """Some texts, filled up behind their ends: `ids` [B, T]; `streams` [B, T, H] by tap; `answers` [B, T] marks rows.

    Those are the positions behind which the target's distribution is to be learnt: a token of an answer follows.
    """

    ids: Tensor
    streams: dict[int, Tensor]
    answers: Tensor


@dataclass(frozen=True, slots=True)
class Lessons:
    """Documents with their streams, bfloat16 in a file for every tap and `_CHUNK` documents."""

    documents: tuple[Document, ...]
    chunks: tuple[Path, ...]  # folders
    taps: tuple[int, ...]
    hidden: int

    def split(self) -> tuple[list[int], list[int]]:
        """Documents to train on, and to validate with: no prompt is in both."""
        train, held = list[int](), list[int]()
        for index, document in enumerate(self.documents):
            prompt = repr(document.ids[: document.prompt]).encode()
            number = int.from_bytes(hashlib.sha256(prompt).digest()[:8], "little")
            (train if number % _HELD_BACK else held).append(index)
        return train, held

    def counts(self, indices: Sequence[int], vocab_size: int) -> npt.NDArray[np.int64]:
        """How often each id stands in the answers."""
        answers = [self.documents[index].ids[self.documents[index].prompt :] for index in indices]
        return np.bincount(np.concatenate(answers) if answers else np.array([], np.int64), minlength=vocab_size)

    def batch(self, indices: Sequence[int], device: torch.device) -> Batch:
        documents = [self.documents[index] for index in indices]
        longest = max(len(document.ids) for document in documents)
        ids = torch.zeros(len(indices), longest, dtype=torch.long)
        answers = torch.zeros(len(indices), longest, dtype=torch.bool)
        streams = {tap: torch.zeros(len(indices), longest, self.hidden) for tap in self.taps}
        for row, (index, document) in enumerate(zip(indices, documents, strict=True)):
            length = len(document.ids)
            ids[row, :length] = torch.tensor(document.ids)
            answers[row, document.prompt - 1 : length - 1] = True
            for tap in self.taps:
                streams[tap][row, :length] = self._read(tap, index)
        return Batch(ids.to(device), {tap: stream.to(device) for tap, stream in streams.items()}, answers.to(device))

    def _read(self, tap: int, index: int) -> Tensor:
        """[n, H] of one document."""
        chunk = index // _CHUNK
        start = sum(len(document.ids) for document in self.documents[chunk * _CHUNK : index])
        shape = len(self.documents[index].ids), self.hidden
        offset = start * self.hidden * 2
        values = np.memmap(_file(self.chunks[chunk], tap), np.int16, "r", offset, shape)
        return torch.from_numpy(np.array(values)).view(torch.bfloat16)


def batches(lessons: Lessons, indices: Sequence[int], rows: int, seed: int) -> list[list[int]]:
    """Documents in batches of at most `rows` tokens, filling counted; of like length, in an order that the seed decides."""
    generator = np.random.Generator(np.random.Philox(seed))
    lengths = np.array([len(lessons.documents[index].ids) for index in indices])
    order = np.argsort(lengths + generator.uniform(0, 16, len(indices)), kind="stable")
    found: list[list[int]] = [[]]
    longest = 0
    for place in order:
        longest = max(longest, int(lengths[place]))
        if (len(found[-1]) + 1) * longest > rows and found[-1]:
            found.append([])
            longest = int(lengths[place])
        found[-1].append(indices[place])
    return [found[place] for place in generator.permutation(len(found))]


def read_lessons(
    documents: Sequence[Document],
    key: str,
    target: Callable[[], BatchedDecoder],
    hidden: int,
    taps: Sequence[int],
    cache: Path,
    progress: Progress,
) -> Lessons:
    """Read documents through the target, as far as the cache lacks that; `key` says which target it is."""
    model: BatchedDecoder | None = None
    chunks = []
    for start in range(0, len(documents), _CHUNK):
        progress("hidden states", start, len(documents))
        together = documents[start : start + _CHUNK]
        said = (_VERSION, key, [document.ids for document in together])
        folder = cache / "lessons" / hashlib.sha256(repr(said).encode()).hexdigest()[:32]
        keep(folder)
        chunks.append(folder)
        if lacking := [tap for tap in taps if not _file(folder, tap).is_file()]:
            model = model or target()
            _write(folder, lacking, model, together)
    progress("hidden states", len(documents), len(documents))
    return Lessons(tuple(documents), tuple(chunks), tuple(taps), hidden)


def _write(folder: Path, taps: Sequence[int], model: BatchedDecoder, documents: Sequence[Document]) -> None:
    rows: dict[int, list[Tensor]] = {tap: [torch.empty(0)] * len(documents) for tap in taps}
    for together in _alike(documents):
        longest = max(len(documents[index].ids) for index in together)
        ids = torch.zeros(len(together), longest, dtype=torch.long)
        for row, index in enumerate(together):
            ids[row, : len(documents[index].ids)] = torch.tensor(documents[index].ids)
        streams = model.read(ids.to(model.device))
        for tap in taps:
            for row, index in enumerate(together):
                rows[tap][index] = streams[tap][row, : len(documents[index].ids)].to("cpu", torch.bfloat16)
    for tap in taps:
        write_whole(_file(folder, tap), torch.cat(rows[tap]).view(torch.int16).numpy().tobytes())


def _alike(documents: Sequence[Document]) -> Iterator[list[int]]:
    """Documents of like length together."""
    together: list[int] = []
    for index in sorted(range(len(documents)), key=lambda index: len(documents[index].ids)):
        if together and (len(together) + 1) * len(documents[index].ids) > _ROWS:
            yield together
            together = []
        together.append(index)
    yield together


def _file(folder: Path, tap: int) -> Path:
    return folder / ("normed.bfloat16" if tap == NORMED else f"stream-{tap}.bfloat16")
