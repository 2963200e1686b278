"""Text that a model writes itself: what it is calibrated on, and what it is judged by, never the same prompts."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from specedge.cachedir import keep, write_whole
from specedge.errors import SpecedgeError
from specedge.export.checkpoint import Checkpoint, load_quietly
from specedge.export.families import tensor_names
from specedge.export.tensors import fingerprint
from specedge.progress import Progress
from specedge.tokenizer import Tokenizer

Part = Literal["calibration", "held-out"]
_TASKS = (
    "Explain in a few sentences how {} works or came to be.",
    "Write a short story in which {} plays a part.",
    "Give me three practical tips about {}.",
    "Write a short dialogue between two friends about {}.",
    "What are common mistakes people make with {}, and how can they be avoided?",
    "Describe {} to a child of eight.",
    "Write a polite e-mail to a colleague about {}.",
    "List five facts about {} with one sentence each.",
    "Write a small Python program that has something to do with {}, and explain it.",
    "Compare {} with something similar and say which you would choose.",
)
_TOPICS = (
    "bread", "bicycles", "the moon", "a lighthouse", "chess", "honey", "train stations", "umbrellas", "the sea",
    "a school garden", "coffee", "old maps", "bees", "winter", "a violin", "football", "glass", "letters", "rivers",
    "the alphabet", "dogs", "a birthday party", "computers", "soap", "mountains", "tea", "numbers", "a library", "shoes",
    "volcanoes", "rain", "clocks", "a small bakery", "dreams", "the number pi", "owls", "paper", "salt", "a used car",
    "languages", "cheese", "electric light", "the dentist", "sorting a list", "apples", "vaccines", "a fire station",
    "photography",
)  # fmt: skip
_VERSION = 1  # of how text is written: another one makes other cache entries
_TOGETHER = 64  # documents written at once
_LONGEST = 256  # tokens of an answer


@dataclass(frozen=True, slots=True)
class Writer:
    """A model that can write: `model` opens it in transformers once it is needed, `fingerprint` says which it is."""

    model: Callable[[], PreTrainedModel]
    fingerprint: Callable[[], str]
    tokenizer: Tokenizer | None
    allowed: int  # ids it may emit
    longest: int  # tokens of a document
    eos_ids: tuple[int, ...]


def writer_of(checkpoint: Checkpoint, tokenizer: Tokenizer | None, allowed: int, longest: int) -> Writer:
    """A checkpoint as a writer."""

    def key() -> str:
        return f"{fingerprint(checkpoint, tensor_names(checkpoint.config))} {checkpoint.config}"

    return Writer(lambda: load_quietly(checkpoint), key, tokenizer, allowed, longest, checkpoint.eos_ids)


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids: a prompt of `prompt` tokens and what the model wrote behind it."""

    ids: tuple[int, ...]
    prompt: int


def write_documents(
    writer: Writer, part: Part, tokens: int, seed: int, cache: Path, progress: Progress
) -> tuple[Document, ...]:
    """Documents of at least `tokens` tokens behind their prompts, sampled at temperature 1; kept in `cache`, batch by batch.

    The prompts of the two parts differ in topic; a checkpoint without tokenizer starts from single ids, likewise.
    """
    prompts = _prompts(writer, part, seed)
    if writer.longest < 2 or not prompts:
        raise SpecedgeError(f"text: a context of {writer.longest} and {writer.allowed} ids leave nothing to write")
    longest = min(writer.longest, max(map(len, prompts)) + _LONGEST)
    said = (_VERSION, writer.fingerprint(), prompts, seed, writer.allowed, longest, writer.eos_ids, _TOGETHER)
    folder = cache / "text" / hashlib.sha256(repr(said).encode()).hexdigest()[:32]
    keep(folder)
    documents: list[Document] = []
    model: PreTrainedModel | None = None
    written = batch = 0
    progress(f"{part} text", 0, tokens)

    def told(more: int) -> None:
        progress(f"{part} text", min(tokens - 1, written + more), tokens)

    while written < tokens:
        path = folder / f"{batch}.json"
        together = [prompts[(batch * _TOGETHER + place) % len(prompts)] for place in range(_TOGETHER)]
        found = _read(path)
        if found is None:
            model = model or writer.model()
            found = _sample(model, writer, together, longest, (seed << 32) + batch, told)
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
    half = 0 if part == "calibration" else 1
    if writer.tokenizer is None:
        prompts = [[token] for token in range(half, writer.allowed, 2)]
    else:
        pairs = product(_TASKS, _TOPICS[half::2])
        prompts = [writer.tokenizer.encode_request(task.format(topic)) for task, topic in pairs]
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(prompts))
    return [prompts[index][: max(1, writer.longest // 2)] for index in order]


@torch.no_grad()
def _sample(
    model: PreTrainedModel,
    writer: Writer,
    prompts: Sequence[Sequence[int]],
    longest: int,
    seed: int,
    told: Callable[[int], None],
) -> list[Document]:
    """What the model writes behind prompts, one token of each at a time; `told` hears how many there are."""
    model.set_attn_implementation("sdpa")  # nothing is compared here, and it takes half the time
    if torch.cpu.get_capabilities().get("amx_bf16"):  # a quarter of the time; elsewhere float32 is as quick
        model.to(torch.bfloat16)  # type: ignore[arg-type]  # its signature says device
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    seen = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    generator = torch.Generator().manual_seed(seed)
    cache, fed = DynamicCache(), ids
    for _ in range(min(_LONGEST, longest - width)):
        positions = (seen.cumsum(1) - 1).clamp(min=0)[:, -fed.shape[1] :]
        out = model(fed, attention_mask=seen, position_ids=positions, cache=cache, use_cache=True, logits_to_keep=1)
        law = torch.softmax(out.logits[:, -1, : writer.allowed].float(), -1)
        if not torch.isfinite(law).all():
            raise SpecedgeError(
                "text: the model gives logits that are not finite, so it can write none; give --calibration FILE"
            )
        fed = torch.multinomial(law, 1, generator=generator)
        ids, seen = torch.cat((ids, fed), 1), torch.cat((seen, torch.ones_like(fed)), 1)
        ended = torch.isin(ids[:, width:], torch.tensor(writer.eos_ids)).int().cumsum(1)
        told(int((ended == 0).sum()))
        if ended[:, -1].all():
            break
    return [
        _document(row[width - len(prompt) :], len(prompt), writer) for row, prompt in zip(ids.tolist(), prompts, strict=True)
    ]


def _document(ids: Sequence[int], prompt: int, writer: Writer) -> Document:
    """Up to the first end of text."""
    ends = [place for place, token in enumerate(ids) if place >= prompt and token in writer.eos_ids]
    return Document(tuple(ids[: min(ends, default=len(ids)) + 1]), prompt)


def _read(path: Path) -> list[Document] | None:
    """What was written before; a file that does not hold documents is written anew."""
    try:
        return [Document(tuple(ids), prompt) for ids, prompt in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return None


def _write(path: Path, documents: Sequence[Document]) -> None:
    write_whole(path, json.dumps([[document.ids, document.prompt] for document in documents]).encode())
