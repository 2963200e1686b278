"""The files of a trained drafter: tensors, settings and a model card."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from specedge.export.gguf_head import write_gguf_head
from specedge.export.starts import Published
from specedge.export.training import Acceptance, Record
from specedge.quant.pack import Quantized
from specedge.quant.rounding import clipped, round_to_nearest
from specedge.quant.scheme import Scheme

Storage = Literal["float", "int8", "int4"]
_GRIDS = {"int8": Scheme(8, 32), "int4": Scheme(4, 32)}
MADE_BY = "Made by `spec-export train"
FILES = {"README.md", "config.json", "model.safetensors", "medusa_lm_head.safetensors", "model.gguf"}
"""What is written of a drafter."""
_OPTIONS = {"medusa": "--medusa", "eagle": "--eagle", "draft": "--draft"}


@dataclass(frozen=True, slots=True)
class Facts:
    """What a training was, and what validation on prompts it never saw found."""

    kind: str
    target: str
    license: str | None
    tokens: int  # of answers that were trained on
    prompts: int
    data: str
    steps: int
    rows: int
    minutes: float
    seed: int
    started_from: str | None
    draft_vocab: int
    coverage: float  # share of validation's tokens that are in the draft vocabulary
    acceptance: Acceptance
    curve: tuple[Record, ...]
    tools: dict[str, str]


def save_drafter(
    folder: Path, published: Published, ids: npt.NDArray[np.int32], vocab_size: int, facts: Facts, storage: Storage
) -> None:
    """Write bfloat16 safetensors with config.json, or a GGUF file on grids of 8 or 4 bits; and README.md."""
    mapped = len(ids) < vocab_size
    if storage == "float":
        tensors = {name: torch.from_numpy(value).to(torch.bfloat16) for name, value in published.tensors.items()}
        if mapped:
            known = torch.zeros(vocab_size, dtype=torch.bool)
            known[torch.from_numpy(ids.astype(np.int64))] = True
            tensors |= {"d2t": torch.from_numpy(ids.astype(np.int64) - np.arange(len(ids))), "t2d": known}
        save_file(tensors, folder / published.file)
        settings = json.dumps(published.settings, indent=2, sort_keys=True)
        (folder / "config.json").write_text(settings + "\n", encoding="utf-8")
    else:
        grids: dict[str, Quantized | npt.NDArray[np.float32] | npt.NDArray[np.int32]] = {}
        for name, value in published.tensors.items():
            fits = value.ndim == 2 and value.shape[1] % 32 == 0
            grids[name] = round_to_nearest(value, _GRIDS[storage], np.float16, clipped) if fits else value
        if mapped:
            grids["d2t"] = (ids - np.arange(len(ids))).astype(np.int32)
        write_gguf_head(folder / "model.gguf", grids, published.settings, facts.license)
    (folder / "README.md").write_text(model_card(facts), encoding="utf-8")


def model_card(facts: Facts) -> str:
    """What a person should know of a drafter, in the form hubs show."""
    front = ["---", *([f"license: {facts.license}"] if facts.license else []), "tags: [speculative-decoding, specedge]", "---"]
    found = facts.acceptance
    places = range(1, len(found.by_position) + 1)
    lines = [
        f"# {facts.kind.capitalize()} drafter for {facts.target}",
        "",
        f"{MADE_BY} --kind {facts.kind}` ({', '.join(f'{k} {v}' for k, v in facts.tools.items())}); "
        f"use it with `spec-export convert MODEL {_OPTIONS[facts.kind]} THIS_FOLDER`.",
        "",
        f"* Data: {facts.tokens:,} answer tokens, {facts.prompts:,} prompts, {facts.data}.",
        f"* Training: {facts.steps:,} steps of {facts.rows:,} tokens, {facts.minutes:.0f} minutes, seed {facts.seed}"
        + (f", from {facts.started_from}." if facts.started_from else "."),
        f"* Draft vocabulary: {facts.draft_vocab:,} ids, {facts.coverage:.1%} of the tokens of validation.",
        f"* Validation on greedy answers to prompts it never saw, in float: {found.tokens_per_round:.2f} tokens a round "
        f"({found.rounds:,} rounds).",
        "",
        "| place | " + " | ".join(map(str, places)) + " |",
        "|---" * (1 + len(found.by_position)) + "|",
        "| accepted, if all before it were | " + " | ".join(f"{share:.3f}" for share in found.by_position) + " |",
        "",
        "| step | loss | tokens a round |",
        "|---|---|---|",
        *(f"| {one.step:,} | {one.loss:.3f} | {one.acceptance.tokens_per_round:.3f} |" for one in facts.curve),
    ]
    return "\n".join([*front, "", *lines]) + "\n"
