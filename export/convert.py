"""The whole conversion on one screen: open, check, write every model and head, describe them."""

import logging
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from specedge import bundle as bundles
from specedge.bundle import Bundle
from specedge.devices.device import Device
from specedge.devices.table import get_device
from specedge.errors import UsageError
from specedge.export.calibration_text import read_calibration
from specedge.export.checkpoint import Checkpoint, open_checkpoint
from specedge.export.decoder import NORMED
from specedge.export.draft_checkpoint import DraftCheckpoint, open_draft
from specedge.export.eagle_checkpoint import open_eagle
from specedge.export.heads import borrow, stored_vocabulary, write_eagle, write_medusa
from specedge.export.in_the_box import in_the_box
from specedge.export.medusa import open_medusa
from specedge.export.plan import check_recipe
from specedge.export.request import Request
from specedge.export.roles import DECODE, Place, write_model
from specedge.export.self_checks import ONNXRUNTIME, add_self_checks
from specedge.export.self_text import writer_of
from specedge.export.store import settle
from specedge.export.unroll import Ranks
from specedge.export.vocabulary import compare_vocabularies, token_count
from specedge.folders import new_folder
from specedge.manifest import EMBEDDING, SCHEMA, File, Manifest, Source, highest_rank
from specedge.mlpackage import import_coremltools
from specedge.progress import Progress, silent
from specedge.tokenizer import Tokenizer

if TYPE_CHECKING:  # coremltools may be absent
    from specedge.export.to_coreml import PackageWriter

_log = logging.getLogger(__name__)
_CONTEXT = 1024
_LONGEST = 8  # chains that are unrolled by default: longer ones seldom pay
_TOOLS = ("torch", "transformers", "onnx", "onnxscript")


def convert(request: Request, progress: Progress = silent) -> Bundle:
    """Write a bundle, whole or not at all.

    Raises:
        SpecedgeError: The checkpoint is damaged or unsupported, target and draft differ in vocabulary, the output exists.
    """
    device, draft_device = (_row(request, name) for name in (request.device, request.draft_device or request.device))
    if request.min_target and not (device.package or draft_device.package):
        raise UsageError(f"--min-target: says what a Core ML package runs on, and {device.name} runs none; leave it out")
    recipe = request.recipe.on(device)
    target = open_checkpoint(request.model)
    draft = open_draft(in_the_box("draft", request.draft), target) if request.draft else None
    sizes = target.config.hidden, target.config.vocab_size
    medusa = open_medusa(in_the_box("medusa", request.medusa), *sizes) if request.medusa else None
    if medusa and (deepest := max(map(len, request.tree), default=0)) > medusa.config.heads:
        raise UsageError(f"tree: {deepest} deep, expected at most {medusa.config.heads}, a head per depth")
    eagle = open_eagle(in_the_box("eagle", request.eagle), target.config, request.eagle_taps) if request.eagle else None
    for note in (note for head in (medusa, eagle) if head for note in head.notes):
        _log.warning("%s", note)
    context = _context(request, target)
    reach = min(context, draft.config.max_positions) if draft else context  # behind that nothing is drafted
    verify = _widths(request, device, context)
    ids = eagle.config.draft_vocab_size if eagle else draft.config.head_rows if draft else 0
    drafted, widths = _drafts(request, draft_device, verify, ids), _draft_widths(request.tree, reach)
    draft_recipe = request.drafter.on(draft_device)
    borrows = medusa or eagle or isinstance(draft, DraftCheckpoint)
    if borrows and draft_recipe.dtype != recipe.dtype and draft_device.dtype == "float16":
        raise UsageError(
            f"draft device {draft_device.name!r}: computes in {draft_device.dtype}, and heads in the target's {recipe.dtype}"
        )
    if (medusa or eagle) and device != draft_device and (device.package or draft_device.package):
        raise UsageError(f"draft device {draft_device.name!r}: heads lie in one package with the target; leave it out")
    if borrows:  # a head reads what the target gives, and its matrices
        draft_recipe = request.drafter.on(device)
    if draft and reach < context:
        _log.warning("%s: was made for %d positions; texts longer than that go on without drafts", draft.name, reach)
    with new_folder(request.output, request.force, bundles.is_bundle) as folder:
        has_tokenizer = target.save_tokenizer(folder)
        vocab = target.config.vocab_size
        allowed = min(token_count(folder / "tokenizer.json"), vocab) if has_tokenizer else vocab
        if (rank := highest_rank(request.tree)) >= allowed:
            raise UsageError(f"tree: rank {rank!s:.60}, expected 0..{allowed - 1}, choices among the ids this model can emit")
        if draft:
            _check_vocabulary(folder, has_tokenizer, target, draft)
            check_recipe("draft", draft, draft_recipe)
        check_recipe("target", target, recipe)
        documents = _calibration(request, target, folder, allowed, context, progress)
        place = Place(folder, device, context, request, progress, documents, _package(folder, "target", device))
        package = _package(folder, "draft", draft_device) if draft else place.package
        cut = tuple(document[:reach] for document in documents)
        beside = replace(place, device=draft_device, context=reach, package=package, documents=cut)
        roles = {}
        taps = eagle.config.taps if eagle else (NORMED,) if medusa else ()
        roles["target"] = write_model("target", target, verify, place, recipe, taps)
        if draft:
            one_call = draft_device.one_call if request.one_call is None else request.one_call
            lent, known = {}, []
            if isinstance(draft, DraftCheckpoint):
                lent, known = {EMBEDDING: borrow(roles["target"], EMBEDDING)}, stored_vocabulary(draft.vocabulary)
            roles["draft"] = write_model(
                "draft", draft, widths, beside, draft_recipe, drafts=drafted if one_call else (), lent=lent, vocabulary=known
            )
        if eagle:
            roles["eagle"] = write_eagle(eagle, target, roles["target"], verify, widths, beside, draft_recipe, drafted)
        heads = {"medusa": write_medusa(medusa, target, roles["target"], beside, draft_recipe)} if medusa else {}
        packages = [package for package in dict.fromkeys((place.package, beside.package)) if package]
        packed = {at: weight for package in packages for at, weight in package.save(DECODE).items()}
        roles = {name: replace(role, weights=settle(folder, name, role.weights, packed)) for name, role in roles.items()}
        heads = {name: replace(head, weights=settle(folder, name, head.weights, packed)) for name, head in heads.items()}
        own = [name for name, there in (("draft", draft), ("medusa", medusa), ("eagle", eagle)) if there]
        manifest = Manifest(
            schema=SCHEMA,
            tools={name: version(name) for name in ("specedge", *_TOOLS)} | {"onnxruntime": ONNXRUNTIME},
            sources={
                "target": Source(target.name, target.license),
                **({"draft": Source(draft.name, draft.license)} if draft else {}),
                **{
                    kind: Source(head.files.name, head.files.license)
                    for kind, head in (("medusa", medusa), ("eagle", eagle))
                    if head
                },
            },
            device=device.name,
            draft_device=draft_device.name,
            widths=tuple(verify),
            context=context,
            allowed_ids=allowed,
            eos_ids=target.eos_ids,
            bos_id=target.bos_id,
            drafters=(*own, "lookup"),
            tree=request.tree,
            roles=roles,
            heads=heads,
            checks={},
            files=_hash_files(folder),
        )
        (folder / bundles.MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        add_self_checks(folder, {"target": device, "draft": draft_device}, progress)
    return bundles.open_bundle(request.output)


def _row(request: Request, name: str) -> Device:
    """A row of the table, its packages for the system asked for."""
    row = get_device(name)
    if row.package is None or request.min_target is None:
        return row
    try:
        return replace(row, package=row.package.at_least(request.min_target))
    except ValueError as error:
        raise UsageError(f"--min-target {request.min_target}: {error}; give that or leave it out") from None


def _package(folder: Path, role: str, device: Device) -> "PackageWriter | None":
    """Where the graphs of a role go, on devices that run packages.

    Raises:
        SpecedgeError: coremltools is not installed.
    """
    if device.package is None:
        return None
    import_coremltools("", f"device {device.name!r}")
    from specedge.export.to_coreml import PackageWriter  # reads an extra

    return PackageWriter(folder, f"{role}/model.mlpackage", device)


def _calibration(
    request: Request, target: Checkpoint, folder: Path, allowed: int, context: int, progress: Progress
) -> tuple[tuple[int, ...], ...]:
    """Token ids that target and draft are calibrated on, if a recipe asks for that; `folder` has the tokenizer."""
    if not (request.recipe.calibrated or (request.draft and request.drafter.calibrated)):
        return ()
    return read_calibration(request.calibration, writer_of(target, Tokenizer.in_folder(folder), allowed, context), progress)


def _context(request: Request, target: Checkpoint) -> int:
    """The context asked for, which the target must have been made for; by default the most that it can, up to 1024."""
    most = target.config.max_positions
    context = min(_CONTEXT, most) if request.context is None else request.context
    if context > most:
        raise UsageError(f"context {context}: {target.name} was made for at most {most} positions; use --context {most}")
    return context


def _widths(request: Request, device: Device, context: int) -> list[int]:
    """Widths to decode and verify at, ascending from 1: those asked for, or what fits of the device's own; and the tree's."""
    tree = {len(request.tree) + 1} if request.tree else set()
    asked = set(request.widths or (width for width in device.default_widths if width <= context))
    if max(asked | tree, default=1) > context:
        raise UsageError(f"widths {sorted(asked | tree)}: wider than the context of {context}")
    return sorted({1} | asked | tree)


def _draft_widths(tree: tuple[tuple[int, ...], ...], context: int) -> list[int]:
    """One token, two (after a full acceptance the draft catches up), and the widest level of a tree that has children."""
    levels = Counter(len(path) for path in {path[:-1] for path in tree} if path)
    return sorted({width for width in (1, 2, *levels.values()) if width <= context})


def _drafts(request: Request, device: Device, verify: Iterable[int], ids: int) -> list[tuple[Ranks, ...]]:
    """What is drafted in one call: a chain as long as every width verifies, and the tree; nothing without ids in the graph.

    The tree only if siblings' ranks have no gaps and are not more than the drafter has `ids`.
    """
    if device.embeds:
        if request.one_call:
            raise UsageError(f"one_call: device {device.name!r} takes embeddings, not ids that a graph chose; leave it out")
        return []
    gammas = {width - 1 for width in verify if width > 1 and (request.widths or width - 1 <= _LONGEST)}
    gammas -= {len(request.tree)} if request.tree else set()
    chains = [tuple((0,) * depth for depth in range(1, gamma + 1)) for gamma in sorted(gammas)]
    ranks = set(request.tree)
    whole = all(path[-1] == 0 or (*path[:-1], path[-1] - 1) in ranks for path in ranks)
    return [*chains, request.tree] if ranks and whole and highest_rank(request.tree) < ids else chains


def _check_vocabulary(folder: Path, has_tokenizer: bool, target: Checkpoint, draft: Checkpoint) -> None:
    with tempfile.TemporaryDirectory() as place:
        draft_tokenizer = Path(place) / "tokenizer.json" if draft.save_tokenizer(Path(place)) else None
        target_tokenizer = folder / "tokenizer.json" if has_tokenizer else None
        compare_vocabularies(target_tokenizer, draft_tokenizer, target.config.vocab_size, draft.config.vocab_size)


def _hash_files(folder: Path) -> dict[str, File]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): File(path.stat().st_size, bundles.sha256(path)) for path in files}
