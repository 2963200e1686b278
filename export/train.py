"""A drafter for any target, trained here: text, hidden states, training, and the files that `convert` takes."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from specedge.bundle import open_bundle
from specedge.cachedir import cache_dir, keep
from specedge.errors import UsageError
from specedge.export.batched import BatchedDecoder, quick_type
from specedge.export.calibration_text import read_prompted
from specedge.export.checkpoint import Checkpoint, open_checkpoint
from specedge.export.distil import Teacher
from specedge.export.families import tensor_names
from specedge.export.lessons import Lessons, read_lessons
from specedge.export.self_text import Document, write_documents, writer_of
from specedge.export.shipped import shipped
from specedge.export.starts import KINDS, Start
from specedge.export.students import Student
from specedge.export.tensors import Tensors, fingerprint
from specedge.export.trained_files import FILES, MADE_BY, Facts, Storage, save_drafter
from specedge.export.training import Acceptance, Schedule, Trainer
from specedge.export.vocabulary import token_count
from specedge.folders import new_folder
from specedge.progress import Progress, silent
from specedge.tokenizer import Tokenizer

Kind = Literal["medusa", "eagle", "draft"]
MINUTES = 30.0
_EVERY = 60.0  # seconds of training that a kill may cost
_STATE = "state.pt"


@dataclass(frozen=True, slots=True)
class Training:
    """What `spec-export train` was asked for."""

    model: str
    kind: Kind
    output: Path
    data: Path | None = None  # None: text that the target writes itself
    tokens: int = 800_000  # of it
    minutes: float = MINUTES  # of training, unless steps are given
    steps: int | None = None
    draft_vocab: int = 8192
    gamma: int = 4  # tokens that are drafted in training; a Medusa head each
    layers: int | None = None  # of a draft model, or of each Medusa head
    rows: int = 4096  # tokens of a step
    rate: float = 1e-3
    seed: int = 0
    start: str | None = None  # a drafter of this kind to go on from
    bundle: Path | None = None  # whose weights the target has; None: as convert would store them
    store: Storage = "float"
    compute: str | None = None  # cpu, cuda ...; None: a GPU where there is one
    force: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"kind {self.kind!r}: expected one of {', '.join(KINDS)}")
        if self.steps == 0 and self.start is None:
            raise UsageError("steps 0: stores a drafter that there is; give --start or train some")
        positive = {"tokens": self.tokens, "minutes": self.minutes, "gamma": self.gamma, "rate": self.rate, "rows": self.rows}
        for name, value in positive.items():
            if not value > 0:
                raise UsageError(f"{name} {value}: expected a positive number")
        if self.rate > 1:
            raise UsageError(f"rate {self.rate}: expected at most 1, and a thousandth of that as a rule")
        if self.kind == "eagle" and self.layers is not None:
            raise UsageError("layers: an EAGLE head has one; leave it out")


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of it."""

    path: Path
    facts: Facts

    def as_dict(self) -> dict[str, object]:
        return {"path": str(self.path), **asdict(self.facts)}


def train(request: Training, progress: Progress = silent) -> Trained:
    """Train a drafter and write it, whole or not at all; a run that was interrupted goes on where it was.

    Raises:
        SpecedgeError: The target or the text cannot be read, the output exists, or nothing is left to train on.
    """
    checkpoint = open_checkpoint(request.model)
    target = shipped(checkpoint, open_bundle(request.bundle) if request.bundle else None)
    device = torch.device(request.compute or ("cuda" if torch.cuda.is_available() else "cpu"))
    with new_folder(request.output, request.force, is_drafter, "drafter") as folder:
        has_tokenizer = checkpoint.save_tokenizer(folder)
        tokenizer = Tokenizer.in_folder(folder)
        vocab = checkpoint.config.vocab_size
        allowed = min(token_count(folder / "tokenizer.json"), vocab) if has_tokenizer else vocab
        for path in folder.iterdir():
            path.unlink()
        key = f"{fingerprint(target, tensor_names(checkpoint.config))} {checkpoint.config}"
        documents = _documents(request, checkpoint, target, tokenizer, allowed, device, progress)
        start = KINDS[request.kind](checkpoint, request.layers, request.gamma, request.start)
        config = checkpoint.config
        lessons = read_lessons(
            documents,
            key,
            lambda: BatchedDecoder(config, target.tensor, device),
            config.hidden,
            start.taps,
            cache_dir(),
            progress,
        )
        counts = lessons.counts(lessons.split()[0], config.vocab_size)
        ids = start.vocabulary(frequent(counts, min(request.draft_vocab, allowed), checkpoint.eos_ids))
        student, facts = _train(request, key, checkpoint, target, start, lessons, ids, device, progress)
        save_drafter(folder, start.publish(student), ids, config.vocab_size, facts, request.store)
    _state(request, key, documents).unlink(missing_ok=True)
    return Trained(request.output, facts)


def is_drafter(path: Path) -> bool:
    """Whether a folder holds what `train` writes, and nothing else."""
    card = path / "README.md"
    if not card.is_file() or {one.name for one in path.iterdir()} - FILES:
        return False
    return MADE_BY in card.read_text(encoding="utf-8", errors="replace")


def _documents(
    request: Training,
    checkpoint: Checkpoint,
    target: Tensors,
    tokenizer: Tokenizer | None,
    allowed: int,
    device: torch.device,
    progress: Progress,
) -> tuple[Document, ...]:
    longest = min(checkpoint.config.max_positions, 1024)
    if request.data is not None:
        return read_prompted(request.data, tokenizer, allowed, longest)
    writer = writer_of(checkpoint, tokenizer, allowed, longest, target, device)
    return write_documents(writer, "training", request.tokens, request.seed, cache_dir(), progress)


def _train(
    request: Training,
    key: str,
    checkpoint: Checkpoint,
    target: Tensors,
    start: Start,
    lessons: Lessons,
    ids: npt.NDArray[np.int32],
    device: torch.device,
    progress: Progress,
) -> tuple[Student, Facts]:
    torch.manual_seed(request.seed)
    train, held = lessons.split()
    name = "embed_tokens.weight" if checkpoint.config.tied else "lm_head.weight"
    head = torch.from_numpy(target.tensor(name)[ids])
    embedding = torch.from_numpy(target.tensor("embed_tokens.weight"))
    student = start.student(target, embedding.to(device), head, quick_type(device))
    teacher = Teacher(head.to(device), torch.from_numpy(ids.astype(np.int64)).to(device))
    state = _state(request, key, lessons.documents)
    keep(state.parent)
    trainer = Trainer(student, teacher, lessons, device, request.gamma, state)

    def schedule() -> Schedule:
        steps = request.steps
        if steps is None:
            steps = max(1, round(60 * request.minutes / trainer.time_step(request.rows)))
        return Schedule(steps, request.rows, request.rate, request.seed)

    told = [len(trainer.records)]

    def show(step: int, steps: int) -> None:
        progress(f"train {request.kind}", step, steps)
        for record in trainer.records[told[0] :]:
            said = f"{record.acceptance.tokens_per_round:.3f} tokens a round in validation, loss {record.loss:.3f}"
            progress(f"after {record.step} steps: {said}", 1, 1)
        told[0] = len(trainer.records)

    plan = trainer.run(schedule, _EVERY, show)
    counts, in_held = (lessons.counts(part or train, checkpoint.config.vocab_size) for part in (train, held))
    facts = Facts(
        kind=request.kind,
        target=checkpoint.name,
        license=checkpoint.license,
        tokens=int(counts.sum()),
        prompts=len({document.ids[: document.prompt] for document in lessons.documents}),
        data=request.data.name if request.data else "written by the target itself",
        steps=plan.steps,
        rows=plan.rows,
        minutes=trainer.records[-1].seconds / 60 if trainer.records else 0.0,
        seed=request.seed,
        started_from=Path(request.start).name if request.start else None,
        draft_vocab=len(ids),
        coverage=float(in_held[ids].sum() / max(in_held.sum(), 1)),
        acceptance=trainer.records[-1].acceptance if trainer.records else Acceptance((), 0),
        curve=tuple(trainer.records),
        tools={name: version(name) for name in ("specedge", "torch")},
    )
    return student, facts


def frequent(counts: npt.NDArray[np.int64], size: int, eos_ids: Sequence[int]) -> npt.NDArray[np.int32]:
    """[size] the most frequent ids, ascending; ends of text are always among them."""
    order = np.argsort(-counts, kind="stable")
    ends = [token for token in eos_ids if token < len(counts)]
    chosen = [*ends, *(token for token in order.tolist() if token not in ends)][:size]
    return np.sort(np.array(chosen, np.int32))


def _state(request: Training, key: str, documents: Sequence[Document]) -> Path:
    """Where an interrupted training waits: it depends on all that decides its course."""
    settings = [value for name, value in asdict(request).items() if name not in ("model", "output", "force", "data", "store")]
    text = hashlib.sha256(repr([document.ids for document in documents]).encode()).hexdigest()
    started = _content(request.start)
    return cache_dir() / "training" / hashlib.sha256(repr((key, settings, text, started)).encode()).hexdigest()[:32] / _STATE


def _content(source: str | None) -> str:
    """The hash of a drafter's files."""
    if source is None or not Path(source).exists():
        return ""
    path = Path(source)
    files = sorted(path.glob("*")) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
