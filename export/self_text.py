"""Text that a model writes itself: what it is calibrated on, what it is judged by, what its drafters learn from."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specedge.cachedir import keep, write_whole
from specedge.errors import SpecedgeError
from specedge.export.batched import BatchedDecoder
from specedge.export.checkpoint import Checkpoint
from specedge.export.decoder import KV
from specedge.export.families import tensor_names
from specedge.export.tensors import Tensors, fingerprint
from specedge.export.topics import Part, written_prompts
from specedge.progress import Progress
from specedge.tokenizer import Tokenizer

_VERSION = 2  # of how text is written: another one makes other cache entries
_READ = 16  # prompts at once
_LONGEST = 256  # tokens of an answer
_TRAINED_AT = 0.8  # temperature of what is not greedy there


@dataclass(frozen=True, slots=True)
class _Manner:
    """How a part is written: so many documents at once, at these temperatures in turn."""

    together: int
    temperatures: tuple[float, ...]


_MANNERS: dict[Part, _Manner] = {
    "calibration": _Manner(64, (1.0,)),
    "held-out": _Manner(64, (1.0,)),
    "training": _Manner(256, (0.0, _TRAINED_AT)),
}


@dataclass(frozen=True, slots=True)
class Writer:
    """A model that can write: `model` opens it once it is needed, `fingerprint` says which it is."""

    model: Callable[[], BatchedDecoder]
    fingerprint: Callable[[], str]
    tokenizer: Tokenizer | None
    allowed: int  # ids it may emit
    longest: int  # tokens of a document
    eos_ids: tuple[int, ...]


def writer_of(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    allowed: int,
    longest: int,
    tensors: Tensors | None = None,  # others than the checkpoint's
    device: torch.device = torch.device("cpu"),  # noqa: B008  # a constant
) -> Writer:
    """A checkpoint as a writer."""
    config, tensors = checkpoint.config, tensors or checkpoint

    def key() -> str:
        return f"{fingerprint(tensors, tensor_names(config))} {config}"

    return Writer(lambda: BatchedDecoder(config, tensors.tensor, device), key, tokenizer, allowed, longest, checkpoint.eos_ids)


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids: a prompt of `prompt` tokens and what the model wrote behind it, greedily or sampled."""

    ids: tuple[int, ...]
    prompt: int
    greedy: bool = False


def write_documents(
    writer: Writer, part: Part, tokens: int, seed: int, cache: Path, progress: Progress
) -> tuple[Document, ...]:
    """Documents of at least `tokens` tokens behind their prompts; kept in `cache`, batch by batch.

    They are sampled at temperature 1, but for those of training: every prompt first greedy or at 0.8, then the other way. The
    prompts of parts differ in topic; a checkpoint without tokenizer starts from single ids, likewise.
    """
    manner, prompts = _MANNERS[part], _prompts(writer, part, seed)
    if writer.longest < 2 or not prompts:
        raise SpecedgeError(f"text: a context of {writer.longest} and {writer.allowed} ids leave nothing to write")
    longest = min(writer.longest, max(map(len, prompts)) + _LONGEST)
    said = (_VERSION, writer.fingerprint(), prompts, seed, writer.allowed, longest, writer.eos_ids, manner)
    folder = cache / "text" / hashlib.sha256(repr(said).encode()).hexdigest()[:32]
    keep(folder)
    documents: list[Document] = []
    model: BatchedDecoder | None = None
    written = batch = 0
    progress(f"{part} text", 0, tokens)

    def told(more: int) -> None:
        progress(f"{part} text", min(tokens - 1, written + more), tokens)

    while written < tokens:
        path = folder / f"{batch}.json"
        found = _read(path)
        if found is None:
            places = range(batch * manner.together, (batch + 1) * manner.together)
            together = [prompts[place % len(prompts)] for place in places]
            turns = [place + place // len(prompts) for place in places]
            model = model or writer.model()
            temperatures = [manner.temperatures[turn % len(manner.temperatures)] for turn in turns]
            found = _Writing(model, writer, together, temperatures, (seed << 32) + batch).write(longest, told)
            _write(path, found)
        documents += found
        batch += 1
        written += sum(len(document.ids) - document.prompt for document in found)
        told(0)
    progress(f"{part} text", tokens, tokens)
    return tuple(_first(documents, tokens))


def _first(documents: Sequence[Document], tokens: int) -> Iterator[Document]:
    """As many as hold `tokens` tokens behind their prompts."""
    for document in documents:
        if tokens <= 0:
            return
        tokens -= len(document.ids) - document.prompt
        yield document


def _prompts(writer: Writer, part: Part, seed: int) -> list[list[int]]:
    """The part's prompts in the order of the seed; half of a document at most."""
    if writer.tokenizer is None:
        place = list(_MANNERS).index(part)
        prompts = [[token] for token in range(place, writer.allowed, len(_MANNERS))]
    else:
        prompts = [writer.tokenizer.encode_request(prompt) for prompt in written_prompts(part)]
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(prompts))
    return [prompts[index][: max(1, writer.longest // 2)] for index in order]


class _Writing:
    """Documents in the making, one token of each at a time; those that ended leave."""

    def __init__(
        self,
        model: BatchedDecoder,
        writer: Writer,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        seed: int,
    ) -> None:
        self._model, self._writer, self._prompts, self._given = model, writer, prompts, temperatures
        self._width = max(map(len, prompts))
        device = model.device
        padding = [self._width - len(prompt) for prompt in prompts]
        filled = [[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
        self._ids = torch.tensor(filled, device=device)
        self._seen = torch.tensor([[0] * pad + [1] * (self._width - pad) for pad in padding], device=device)
        self._temperatures = torch.tensor(temperatures, device=device)[:, None]
        self._generator = torch.Generator(device).manual_seed(seed)
        self._alive = torch.arange(len(prompts), device=device)  # rows of the documents that go on
        self._rows: list[list[int]] = [[] for _ in prompts]

    @torch.no_grad()
    def write(self, longest: int, told: Callable[[int], None]) -> list[Document]:
        """Up to the first end of text, `longest` tokens at most; `told` hears how many there are."""
        model, most = self._model, min(_LONGEST, longest - self._width)
        cache, count = model.new_cache(len(self._alive), self._width + most), 0
        hidden = self._read_prompts(cache)
        ends = torch.tensor(self._writer.eos_ids, device=model.device)
        going = torch.ones(len(self._alive), dtype=torch.bool, device=model.device)
        for left in reversed(range(most)):
            fed = self._choose(model.logits(hidden))
            for row, (token,) in zip(self._alive[going].tolist(), fed[going].tolist(), strict=True):
                self._rows[row].append(token)
            count += int(going.sum())
            told(count)
            going = going & ~torch.isin(fed[:, 0], ends)
            self._seen = torch.cat((self._seen, torch.ones_like(self._seen[:, :1])), 1)
            if not going.any() or not left:
                break
            if going.float().mean() < 0.75:  # what ended costs as much as what goes on
                kept = going.nonzero()[:, 0]
                cache = [(key[kept], value[kept]) for key, value in cache]
                fed, self._seen, self._alive = fed[kept], self._seen[kept], self._alive[kept]
                self._temperatures, going = self._temperatures[kept], going[kept]
            hidden = model.extend(fed, self._seen, cache)
        greedy = (temperature == 0 for temperature in self._given)
        return [
            Document((*prompt, *row), len(prompt), best)
            for prompt, row, best in zip(self._prompts, self._rows, greedy, strict=True)
        ]

    def _read_prompts(self, cache: list[KV]) -> Tensor:
        """Hidden states [B, H] behind the prompts, some of them at a time: what they take then stays in the processor."""
        slices = [slice(start, start + _READ) for start in range(0, len(self._ids), _READ)]
        return torch.cat(
            [
                self._model.extend(ids, seen, [(key[rows], value[rows]) for key, value in cache])
                for ids, seen, rows in zip(self._ids.split(_READ), self._seen.split(_READ), slices, strict=True)
            ]
        )

    def _choose(self, logits: Tensor) -> Tensor:
        """A token [B, 1] of each row, the best one at temperature 0."""
        logits = logits[:, : self._writer.allowed]
        if not torch.isfinite(logits.amax(-1)).all():
            raise SpecedgeError(
                "text: the model gives logits that are not finite, so it can write none; give --calibration FILE"
            )
        chosen = logits.argmax(-1, keepdim=True)
        if len(drawn := self._temperatures[:, 0].nonzero()[:, 0]):
            below = torch.softmax(logits[drawn] / self._temperatures[drawn], -1).cumsum(-1)
            u = torch.rand(len(drawn), 1, generator=self._generator, device=logits.device)
            chosen[drawn] = torch.searchsorted(below, u * below[:, -1:], right=True).clamp(max=logits.shape[1] - 1)
        return chosen


def _read(path: Path) -> list[Document] | None:
    """What was written before; a file that does not hold documents is written anew."""
    try:
        return [Document(tuple(ids), prompt, greedy) for ids, prompt, greedy in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return None


def _write(path: Path, documents: Sequence[Document]) -> None:
    write_whole(path, json.dumps([[document.ids, document.prompt, document.greedy] for document in documents]).encode())
