"""What quantisation costs a model, on text that it was not calibrated on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from specedge.cachedir import cache_dir
from specedge.errors import SpecedgeError
from specedge.export.calibration_text import read_documents
from specedge.export.checkpoint import Checkpoint
from specedge.export.report import Logits, Meter, Quality
from specedge.export.self_text import Document, write_documents, writer_of
from specedge.progress import Progress
from specedge.runtime.agreement import walk
from specedge.runtime.generate import Engine
from specedge.runtime.sequence import Sequence as ModelSequence


@dataclass(frozen=True, slots=True)
class Judged:
    """The text that quality is measured on: a file, or what the model writes itself on prompts that calibration never uses."""

    file: Path | None
    tokens: int


def read_judged(judged: Judged, checkpoint: Checkpoint, engine: Engine, progress: Progress) -> tuple[Document, ...]:
    """Its documents, cut to the bundle's context."""
    longest, allowed = engine.context, engine.bundle.manifest.allowed_ids
    if judged.file:
        found = read_documents(judged.file, engine.tokenizer, allowed, longest, judged.tokens)
        return tuple(Document(ids, 1) for ids in found)
    writer = writer_of(checkpoint, engine.tokenizer, allowed, longest)
    return write_documents(writer, "held-out", judged.tokens, 0, cache_dir(), progress)


def measure_quality(
    model: PreTrainedModel, sequence: ModelSequence, documents: Sequence[Document], allowed: int, progress: Progress
) -> Quality:
    """A graph against the reference, teacher-forced, at every token behind a document's prompt."""
    meter = Meter()
    progress("validate: quality", 0, len(documents))
    for done, document in enumerate(documents, 1):
        ids = document.ids[: sequence.role.context]
        rows = range(document.prompt - 1, len(ids) - 1)
        if rows:
            truth = reference_logits(model, ids, rows)[:, :allowed]
            found = walk(sequence, ids[:-1], sequence.role.chunk)[rows.start :, :allowed]
            meter.add(truth, found, ids[document.prompt :])
        progress("validate: quality", done, len(documents))
    if not meter.rows:
        raise SpecedgeError("text: no document has a token behind its first or its prompt, so there is nothing to judge by")
    return meter.quality()


@torch.no_grad()
def reference_logits(model: PreTrainedModel, ids: Sequence[int], rows: Sequence[int]) -> Logits:
    """Logits [len(rows), V] after these positions, in one pass."""
    logits = model(torch.tensor([list(ids)]), use_cache=False, logits_to_keep=torch.tensor(list(rows))).logits[0]
    found: Logits = np.asarray(logits.float().numpy())
    return found
