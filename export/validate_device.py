"""Does another provider compute what the CPU makes of the same graphs? Logits, KV columns, and layer by layer."""

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from specedge.bundle import Bundle
from specedge.devices.device import Device
from specedge.devices.table import CPU, twin
from specedge.errors import SpecedgeError
from specedge.export import to_onnx
from specedge.export.checkpoint import Checkpoint
from specedge.export.compose import step
from specedge.export.lower import lower
from specedge.export.report import Check, DeviceAgreement, LayerNoise, Logits, log_softmax
from specedge.export.request import Request
from specedge.export.roles import Place, delta_body, layout_of
from specedge.export.rotated import rotate
from specedge.progress import Progress, silent
from specedge.runtime.agreement import TOKENS_PER_NEAR_TIE, walk
from specedge.runtime.delta import DeltaSequence
from specedge.runtime.embedding import Embedding
from specedge.runtime.model import Model
from specedge.runtime.probe import find_provider
from specedge.runtime.rope import rope_tables
from specedge.runtime.sequence import Sequence as ModelSequence
from specedge.runtime.session import Session

_MEAN = {True: 1e-3, False: 1e-4}  # of 1 - cosine over rows, for quantised and for float weights
_WORST = 1e-2  # of one row
_TOP1 = 0.03  # share of rows with another best token
_KL, _KV = 0.01, 0.05  # nats; largest difference over a buffer's largest value
_NEAR_TIE = 0.1  # of the CPU's two best logits
_ROWS = 64  # of text
PYTORCH = "PyTorch"
_STEPS = 4  # of every narrow width, where steps are emulated


def compare_devices(
    bundle: Bundle, rows: Mapping[str, Device], text: Sequence[int], progress: Progress
) -> list[DeviceAgreement]:
    """Every role that a plug-in or Core ML runs, by its row."""
    elsewhere = {
        role: row for role, row in rows.items() if row.provider != CPU and not (row.package and find_provider(row).emulated)
    }
    roles = [role for role in elsewhere if role in bundle.manifest.roles]
    return [found for role in roles for found in compare_device(bundle, role, rows[role], text, progress)]


def compare_device(bundle: Bundle, role: str, device: Device, text: Sequence[int], progress: Progress) -> list[DeviceAgreement]:
    """Every width of a role over the beginning of a text; narrow ones over a few steps of it, where these are emulated."""
    emulated, against = find_provider(device).emulated, "the evaluator" if device.package else "the CPU"
    here, there = (Model(bundle, role, row).sequence() for row in (twin(device), device))
    allowed = min(bundle.manifest.allowed_ids, here.role.vocab_size)
    widths = sorted(graph.width for graph in here.role.graphs if graph.width)
    found = []
    progress(f"validate: {role} on {device.name}", 0, len(widths))
    for done, width in enumerate(widths, 1):
        count = min(_ROWS, len(text), here.role.context, _STEPS * width if emulated and width < here.role.chunk else _ROWS)
        ids = text[:count]
        expected, logits = (walk(sequence, ids, width)[:, :allowed] for sequence in (here, there))
        found.append(agreement(role, width, expected, logits, against, _kv_error(here, there, count)))
        progress(f"validate: {role} on {device.name}", done, len(widths))
    return found


def device_checks(found: DeviceAgreement, quantised: bool) -> list[Check]:
    """The numbers with their limits; near-ties count only beyond their rate, and not at all against PyTorch."""
    forgiven = found.rows if found.against == PYTORCH else -(-found.rows // TOKENS_PER_NEAR_TIE)
    differs, graph = found.top1_differs - min(found.near_ties, forgiven), f"{found.graph} against {found.against}"
    return [
        Check("device_cosine_loss", graph, 1 - found.cosine_mean, _MEAN[quantised]),
        Check("device_cosine_loss_worst", graph, 1 - found.cosine_min, _WORST),
        Check("device_kl", graph, found.kl_mean, _KL),
        Check("device_top1_differs", graph, differs / found.rows, _TOP1),
        *([] if found.kv_error is None else [Check("device_kv_error", graph, found.kv_error, _KV)]),
    ]


def agreement(
    role: str, width: int, expected: Logits, found: Logits, against: str = PYTORCH, kv_error: float | None = None
) -> DeviceAgreement:
    """How far a device's logits [rows, V] are from those expected, which `against` made."""
    norms = np.linalg.norm(expected, axis=1) * np.linalg.norm(found, axis=1)
    cosines = (expected * found).sum(axis=1, dtype=np.float64) / np.maximum(norms, np.finfo(np.float32).tiny)
    log_p, log_q = log_softmax(expected), log_softmax(found)
    best = expected.argmax(axis=1)
    two = np.partition(expected, -2, axis=1)[:, -2:]
    differs = best != found.argmax(axis=1)
    near = two[:, 1] - two[:, 0] < _NEAR_TIE
    return DeviceAgreement(
        role=role,
        graph=f"{role} width {width}",
        against=against,
        rows=len(expected),
        cosine_mean=float(cosines.mean()),
        cosine_min=float(cosines.min()),
        kl_mean=float((np.exp(log_p) * (log_p - log_q)).sum(axis=1).mean()),
        top1_differs=int(differs.sum()),
        near_ties=int((differs & near).sum()),
        kv_error=kv_error,
    )


def _kv_error(here: ModelSequence, there: ModelSequence, rows: int) -> float:
    """The largest difference of a committed column over the largest value of its buffer; NaN if there is one."""
    errors = []
    for (_, expected), (_, found) in zip(here.cache.buffers(), there.cache.buffers(), strict=True):
        one, other = (buffer[:, :, :rows].astype(np.float32) for buffer in (expected, found))
        errors.append(np.abs(one - other).max() / max(float(np.abs(one).max()), np.finfo(np.float32).tiny))
    return float(np.max(errors))


def compare_layers(bundle: Bundle, role: str, checkpoint: Checkpoint, device: Device, text: Sequence[int]) -> list[LayerNoise]:
    """The signal-to-noise ratio of every residual stream in decibels, over the third step of a text (or the last that fits).

    The graph is written anew with all streams as an output, beside the weight file for as long as that takes.
    """
    record = bundle.role(role)
    widths = sorted(graph.width for graph in record.graphs if graph.width)
    width = next((one for one in widths if one > 1), widths[0])
    steps = min(3, record.context // width)
    config = checkpoint.config if record.rotation is None else rotate(checkpoint, checkpoint.config, record.rotation).config
    taps = tuple(range(config.layers + 1))
    place = Place(bundle.path, device, record.context, Request("", bundle.path), silent)
    model = step(delta_body(config, record.kv.dtype, taps), layout_of(config, record.kv, place).at(width))
    file = f"{role}/.layers-{os.getpid()}.onnx"
    lower(model, {weight.name: weight for weight in record.weights}, device, file)
    path = bundle.path / file
    try:
        to_onnx.write(model, path)
        graph = to_onnx.describe(model, path.name, width)
        tapped = replace(record, graphs=(graph,), taps=taps)
        streams = []
        for row in (twin(device), device):
            session = Session(path, graph, row)
            sequence = DeltaSequence(tapped, rope_tables(record), {width: session}, Embedding.needed(bundle, role))
            walk(sequence, text[: steps * width], width)
            streams.append(sequence.hidden(range(width)).reshape(width, len(taps), -1))
    except OSError as error:
        raise SpecedgeError(f"{path}: cannot be written ({error.strerror}); --layers needs a bundle that can be") from error
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    here, there = streams
    return [LayerNoise(block, _decibels(here[:, block], there[:, block])) for block in taps]


def _decibels(signal: npt.NDArray[np.float32], found: npt.NDArray[np.float32]) -> float:
    """Infinity where nothing differs, minus infinity where something is not finite."""
    noise = float(np.square(signal.astype(np.float64) - found).sum())
    power = float(np.square(signal, dtype=np.float64).sum())
    if noise == 0:
        return math.inf
    return 10 * math.log10(power / noise) if power and math.isfinite(power) and math.isfinite(noise) else -math.inf
