"""Does a bundle still compute what its checkpoint says? Weights, logits and greedy ids, against transformers in float32."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from specedge.bundle import Bundle, changed_files, open_bundle
from specedge.devices.device import Device
from specedge.devices.table import CPU, get_device, twin
from specedge.errors import SpecedgeError, UsageError
from specedge.export.checkpoint import Checkpoint, load_quietly, open_checkpoint
from specedge.export.draft_checkpoint import open_draft
from specedge.export.in_the_box import in_the_box
from specedge.export.quality import Judged, measure_quality, read_judged, reference_logits
from specedge.export.report import (
    ACTIVATION_KL_LIMIT,
    LOGITS_LIMIT,
    Check,
    DeviceAgreement,
    GroupError,
    Logits,
    Meter,
    Quality,
    Report,
    mean_kl,
)
from specedge.export.self_text import Document
from specedge.export.validate_device import agreement, compare_devices, compare_layers, device_checks
from specedge.export.validate_eagle import check_eagle
from specedge.export.validate_heads import check_medusa, check_unrolled
from specedge.export.validate_weights import compare_model, load_stored
from specedge.progress import Progress, silent
from specedge.runtime.agreement import TOKENS_PER_NEAR_TIE, Agreement, compare_greedy, tree_rows, walk, width_agreement
from specedge.runtime.generate import Engine, load, rows_of
from specedge.runtime.model import Model
from specedge.runtime.probe import find_provider
from specedge.runtime.prompts import CHAT, PROSE
from specedge.runtime.sample import Sampling
from specedge.runtime.sequence import Sequence as ModelSequence
from specedge.runtime.shape import TreeShape
from specedge.runtime.vocabulary import DraftVocabulary

_QUANTISED_WIDTH_LIMIT = 0.1  # largest |logit difference| of a wide step of a quantised graph to one-token steps
_TREE_STEPS = 40
_EMULATED = {
    False: "{} is emulated here: greedy ids are the CPU's, of the same graphs",
    True: "{} is evaluated op by op here: nothing was run by Core ML",
}
_END = 32  # rows compared at the end of the context


def validate(
    path: Path,
    reference: str,
    draft_reference: str | None = None,
    device: str | None = None,
    draft_device: str | None = None,
    prompts: int = 4,
    tokens: int = 32,
    progress: Progress = silent,
    judged: Judged | None = None,
    layers: bool = False,
) -> Report:
    """Compare a bundle with the checkpoint it was made from.

    Logits of every graph are compared over the first three prefill chunks and at the end of the context, read at every width;
    then greedy answers of `tokens` tokens to `prompts` prompts: plain against transformers (float weights only, teacher-forced)
    and speculative against plain, with every drafter, at every exported gamma. Quality is measured on the text `judged`, or on
    the few hundred tokens that logits are compared over. What a plug-in computes is compared with the CPU's run of the same
    graphs, with `layers` block by block; where it is emulated, all else is what the CPU makes of them.

    Raises:
        SpecedgeError: The bundle or a reference cannot be opened, or they are models of different shape.
    """
    bundle = open_bundle(path)
    rows = rows_of(bundle, device, draft_device)
    emulated = [row.name for row in dict.fromkeys(rows) if find_provider(row).emulated]
    device, draft_device = (twin(row).name if row.name in emulated else row.name for row in rows)
    if layers and (rows[0].provider == CPU or rows[0].package):
        raise UsageError(f"--layers: compares another provider with the CPU, and {rows[0].name} has none; leave it out")
    engine = load(path, device, draft_device, reuse=False, self_check=False)  # what differs is reported below
    checks = [Check("files_changed", "", float(len(changed_files(bundle))), 0.0)]
    notes = [_EMULATED[get_device(name).package is not None].format(name) for name in emulated]
    groups: list[GroupError] = []
    devices: list[DeviceAgreement] = []
    text = _text(engine)
    if draft_reference and bundle.manifest.drafters == ("lookup",):
        raise SpecedgeError(f"{bundle.path}: holds no draft and no heads to compare; leave out --draft-reference")
    source = open_checkpoint(reference)
    draft_reference = draft_reference and in_the_box(bundle.manifest.drafters[0], draft_reference)
    if draft_reference and "draft" in bundle.manifest.roles:
        draft = Model(bundle, "draft", engine.draft_device).sequence()
        other = open_draft(draft_reference, source)
        of_draft = _check_role(bundle, "draft", engine.draft_device, draft, other, text, progress)
        checks += of_draft.checks
        groups += of_draft.groups
        devices += of_draft.devices
    elif not draft_reference and len(bundle.manifest.drafters) > 1:
        notes.append("the drafter's logits were not compared: --draft-reference names its checkpoint")
    documents = functools.partial(read_judged, judged, source, engine, progress) if judged else None
    of_target = _check_role(bundle, "target", engine.device, engine.target, source, text, progress, documents)
    quality, model = of_target.quality, of_target.model
    devices += of_target.devices
    checks += of_target.checks
    groups = of_target.groups + groups
    checks += check_unrolled(engine, text)
    if draft_reference and "medusa" in bundle.manifest.heads:
        of_heads = check_medusa(
            load(path, device, rows[1].name, "medusa", self_check=False), draft_reference, source, model, text
        )
        checks += of_heads.checks
        groups += of_heads.groups
    if draft_reference and "eagle" in bundle.manifest.roles:
        of_heads, said = check_eagle(
            load(path, device, rows[1].name, "eagle", self_check=False), draft_reference, source, model, text
        )
        checks += of_heads.checks
        groups += of_heads.groups
        notes += said
    quantised = bundle.role("target").quantised
    widths = width_agreement(engine, text[: 4 * max(bundle.manifest.widths) + 3])
    limit = _QUANTISED_WIDTH_LIMIT if quantised else LOGITS_LIMIT[engine.target.role.kv.dtype]
    checks += [Check("width_agreement", f"target width {width}", value, limit) for width, value in widths.items()]
    agreement = float(np.max(list(widths.values()), initial=0.0))
    tree_tie = 2 * agreement
    if engine.default_tree:
        check, difference = _check_tree(engine, text, engine.default_tree, None if quantised else limit)
        checks.append(check)
        tree_tie = 2 * max(agreement, difference)
        if quantised and difference:
            notes.append(f"target tree: logits of its branches differ from one-token steps' by up to {difference:.2g}")
    requests = _requests(engine, prompts)
    if not np.isfinite([check.value for check in checks]).all():  # no greedy choice among NaN
        requests = []
        notes.append("greedy ids were not compared: there are weights or logits that are not finite")
    if not quantised:
        checks.append(_check_reference_greedy(engine, model, requests, tokens, 2 * of_target.logits_max_abs))
    greedy = _check_drafters(path, (device, draft_device), requests, tokens, _Ties(2 * agreement, tree_tie), progress)
    devices += compare_devices(bundle, dict(zip(("target", "draft"), rows, strict=True)), text, progress)
    checks += [check for found in devices for check in device_checks(found, bundle.role(found.role).quantised)]
    noise = compare_layers(bundle, "target", source, rows[0], text) if layers else []
    compared = sum(found.tokens for _, found in greedy)
    different = sum(found.near_ties + (found.mismatch is not None) for _, found in greedy)
    notes += [f"{check.graph}: nothing was drafted, so nothing was compared" for check, found in greedy if not found.drafted]
    return Report(
        checks=(*checks, *(check for check, _ in greedy)),
        quality=quality,
        groups=tuple(groups),
        width_agreement=agreement,
        near_ties=sum(found.near_ties for _, found in greedy),
        greedy_match=1.0 - different / compared if compared else float("nan"),
        notes=tuple(notes),
        devices=tuple(devices),
        layers=tuple(noise),
    )


def _check_tree(engine: Engine, text: list[int], tree: TreeShape, limit: float | None) -> tuple[Check, float]:
    """Paths of a tree against one-token steps, and the largest |logit difference|.

    Without a limit for that, quantised, it is the KL that counts: a tree's branches lie in other columns of the cache, sums go
    in another order, and activations of 8 bits make much of a last bit.
    """
    found, expected = tree_rows(engine, text[: _TREE_STEPS + tree.depth], tree)
    difference = float(np.abs(found - expected).max(initial=0.0))
    if limit is not None:
        return Check("tree_agreement", "target tree", difference, limit), difference
    kl = mean_kl(expected, found) if len(found) else 0.0
    return Check("tree_kl", "target tree", kl, ACTIVATION_KL_LIMIT), difference


@dataclass(frozen=True, slots=True)
class _Checked:
    """A role against its checkpoint; `model` is the reference, with the stored weights where they are quantised.

    `devices` hold the logits of a package against that.
    """

    checks: list[Check]
    quality: Quality
    logits_max_abs: float  # of the text that every width reads
    groups: list[GroupError]
    model: PreTrainedModel
    devices: list[DeviceAgreement]


def _check_role(
    bundle: Bundle,
    role: str,
    device: Device,
    sequence: ModelSequence,
    checkpoint: Checkpoint,
    text: list[int],
    progress: Progress,
    documents: Callable[[], Sequence[Document]] | None = None,
) -> _Checked:
    """Stored weights and every graph's logits; quality on the documents, which may take long to write, else on the text."""
    wanted = {1, *bundle.manifest.widths, *(graph.width for graph in sequence.role.graphs if graph.width), sequence.role.chunk}
    widths = sorted(width for width in wanted if width <= sequence.widest)
    progress(f"validate: {role}", 0, 2 + len(widths))
    compared = compare_model(bundle, role, checkpoint)
    checks = compared.checks
    progress(f"validate: {role}", 1, 2 + len(widths))
    allowed = min(bundle.manifest.allowed_ids, bundle.role(role).vocab_size)
    text = text[: sequence.role.context]
    windows = [range(min(3 * sequence.role.chunk, len(text))), range(max(len(text) - _END, 0), len(text))]
    rows = [row for window in windows for row in window]
    model = load_quietly(checkpoint)
    truth = reference_logits(model, text, rows)[:, :allowed]
    quality = measure_quality(model, sequence, documents(), allowed, progress) if documents else None
    quantised, stored, devices = bundle.role(role).quantised, truth, []
    if quantised:
        load_stored(model, bundle, role, checkpoint)
        stored = reference_logits(model, text, rows)[:, :allowed]
    for done, width in enumerate(widths, 2):
        progress(f"validate: {role}", done, 2 + len(widths))
        found = np.concatenate([walk(sequence, text[: window.stop], width, window.start) for window in windows])[:, :allowed]
        graph = f"{role} width {width}"
        if device.package:
            devices.append(agreement(role, width, stored, found))
        if quantised:
            checks.append(Check("kl_to_stored_weights", graph, mean_kl(stored, found), ACTIVATION_KL_LIMIT))
        else:
            limit = LOGITS_LIMIT[sequence.role.kv.dtype]
            checks.append(Check("logits_max_abs", graph, float(np.abs(found - truth).max()), limit))
    progress(f"validate: {role}", 2 + len(widths), 2 + len(widths))
    meter = Meter()
    meter.add(*_in_ids(bundle, role, truth, found, text[1 : windows[0].stop]))
    return _Checked(checks, quality or meter.quality(), float(np.abs(found - truth).max()), compared.groups, model, devices)


def _in_ids(
    bundle: Bundle, role: str, truth: Logits, found: Logits, text: Sequence[int]
) -> tuple[Logits, Logits, Sequence[int]]:
    """Rows and the tokens that follow them, by the role's own ids: what it cannot draft is left out."""
    vocabulary = DraftVocabulary.of(bundle, bundle.role(role))
    if vocabulary.rows is None:
        return truth, found, text
    ids = vocabulary.ids
    known = np.flatnonzero(np.isin(text, ids))
    return truth[known], found[known], np.searchsorted(ids, np.array(text)[known]).tolist()


def _check_reference_greedy(
    engine: Engine, model: PreTrainedModel, requests: list[list[int]], tokens: int, tie: float
) -> Check:
    """Emitted tokens that are not the reference's argmax after the same text; near-ties count only beyond their rate."""
    allowed = engine.bundle.manifest.allowed_ids
    wrong = near_ties = compared = 0
    for prompt in requests:
        emitted = engine.generate(prompt, Sampling(), tokens, speculate=False).ids
        if not emitted:
            continue
        rows = range(len(prompt) - 1, len(prompt) + len(emitted) - 1)
        logits = reference_logits(model, [*prompt, *emitted[:-1]], rows)[:, :allowed]
        gaps = logits.max(axis=1) - logits[np.arange(len(emitted)), emitted]
        near_ties += int(((gaps > 0) & (gaps < tie)).sum())
        wrong += int((~(gaps < tie) & (gaps != 0)).sum())
        compared += len(emitted)
    too_many = near_ties > -(-compared // TOKENS_PER_NEAR_TIE)
    return Check("greedy_unlike_reference", "target", float(wrong + too_many * near_ties), 0.0)


@dataclass(frozen=True, slots=True)
class _Ties:
    """Gaps of two logits below which chains and trees may choose otherwise."""

    chain: float
    tree: float


def _check_drafters(
    path: Path, rows: tuple[str, str], requests: list[list[int]], tokens: int, ties: _Ties, progress: Progress
) -> list[tuple[Check, Agreement]]:
    """Every drafter at every exported gamma, and with the bundle's tree."""
    manifest = open_bundle(path).manifest
    gammas = [width - 1 for width in manifest.widths if width > 1]
    progress("validate: greedy ids", 0, len(manifest.drafters))
    greedy = []
    for done, drafter in enumerate(manifest.drafters, 1):
        engine = load(path, *rows, drafter, reuse=False)
        depths = sorted({min(gamma, engine.deepest) for gamma in gammas})
        drafts = [(f"gamma {gamma}", TreeShape.chain(gamma), ties.chain) for gamma in depths]
        if engine.default_tree:
            drafts.append(("tree", engine.default_tree, ties.tree))
        for name, shape, tie in drafts:
            greedy.append(_check_speculative_greedy(engine, requests, tokens, shape, f"{drafter} {name}", tie))
        progress("validate: greedy ids", done, len(manifest.drafters))
    return greedy


def _check_speculative_greedy(
    engine: Engine, requests: list[list[int]], tokens: int, shape: TreeShape, name: str, tie: float
) -> tuple[Check, Agreement]:
    """Answers whose speculative ids differ from plain ones beyond near-ties."""
    found = [compare_greedy(engine, prompt, tokens, None, tie, shape) for prompt in requests]
    total = Agreement(
        sum(one.tokens for one in found),
        sum(one.drafted for one in found),
        sum(one.near_ties for one in found),
        next((one.mismatch for one in found if one.mismatch), None),
    )
    failed = sum(one.mismatch is not None for one in found) + (total.mismatch is None and not total.passed)
    return Check("greedy_speculative_differs", name, float(failed), 0.0), total


def _text(engine: Engine) -> list[int]:
    """Token ids that fill the context: prose, or arbitrary ids for a bundle without tokenizer."""
    length, allowed = engine.context, engine.bundle.manifest.allowed_ids
    if engine.tokenizer is None:
        return [int(token) for token in np.random.default_rng(0).integers(0, allowed, length)]
    ids = engine.tokenizer.encode(PROSE)
    return (ids * (length // len(ids) + 1))[:length]


def _requests(engine: Engine, count: int) -> list[list[int]]:
    if engine.tokenizer is None:
        text = _text(engine)
        longest = min(16, engine.context // 2)
        return [text[start : start + longest] for start in range(min(count, engine.context - longest))]
    messages = [CHAT[index % len(CHAT)] for index in range(count)]
    room = max(engine.context // 2, 1)  # a small context gets the beginnings
    return [engine.tokenizer.encode_request(text)[:room] for text in messages]
