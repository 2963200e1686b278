"""What another provider than the CPU's will be held against: the graphs' own logits, where they can be trusted."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from specedge.bundle import MANIFEST, open_bundle
from specedge.devices.device import Device
from specedge.devices.table import CPU, twin
from specedge.manifest import SelfCheck
from specedge.progress import Progress
from specedge.runtime.model import Model
from specedge.runtime.prompts import PROSE
from specedge.runtime.self_check import make_check, text_length
from specedge.runtime.session import VERSION
from specedge.tokenizer import Tokenizer

ONNXRUNTIME = VERSION
"""Of the module, whichever of its packages that came in."""


def add_self_checks(folder: Path, rows: Mapping[str, Device], progress: Progress) -> None:
    """Run the step graphs of a bundle in the making on the CPU, or in the evaluator, and note what they say of a text."""
    bundle = open_bundle(folder)
    manifest = bundle.manifest
    tokenizer = Tokenizer.in_folder(folder)
    roles = [role for role in ("target", "draft") if role in manifest.roles and rows[role].provider != CPU]
    checks: dict[str, SelfCheck] = {}
    for done, role in enumerate(roles):
        progress("convert: self-check", done, len(roles))
        sequence = Model(bundle, role, twin(rows[role])).sequence()
        allowed = min(manifest.allowed_ids, sequence.role.vocab_size)
        checks[role] = make_check(sequence, _text(tokenizer, text_length(sequence), allowed), allowed)
        progress("convert: self-check", done + 1, len(roles))
    if checks:
        (folder / MANIFEST).write_text(replace(manifest, checks=checks).to_json(), encoding="utf-8")


def _text(tokenizer: Tokenizer | None, length: int, allowed: int) -> list[int]:
    """Prose, or ids far from one another."""
    ids = [token for token in tokenizer.encode(PROSE) if token < allowed] if tokenizer else []
    ids = ids or [7919 * index % allowed for index in range(length)]
    return (ids * (length // len(ids) + 1))[:length]
