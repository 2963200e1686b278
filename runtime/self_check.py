"""Whether a device computes what the bundle's graphs are known to compute: asked before the first token."""

import contextlib
import hashlib
import json
import logging
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specedge.bundle import MANIFEST, Bundle, sha256
from specedge.cachedir import cache_dir, keep, write_whole
from specedge.errors import SpecedgeError
from specedge.manifest import SelfCheck
from specedge.runtime.model import Model
from specedge.runtime.probe import Provider, find_provider
from specedge.runtime.sequence import Sequence as ModelSequence
from specedge.runtime.session import VERSION

_log = logging.getLogger(__name__)
_FORMAT, _PASSED = 1, "passed.json"
_COLUMNS = 64
_TOLERANCE = 0.1  # of a row: float16 and other orders of sums leave 0.02, one wrong layer several times as much

Rows = npt.NDArray[np.float32]


def text_length(sequence: ModelSequence) -> int:
    """How many tokens a check reads."""
    return sum(_widths(sequence))


def make_check(sequence: ModelSequence, ids: Sequence[int], allowed: int) -> SelfCheck:
    """What `sequence` makes of the beginning of a text, for others to be held against.

    Raises:
        SpecedgeError: Its logits are not finite.
    """
    ids = ids[: text_length(sequence)]
    rows = _read(sequence, ids, list(range(allowed)))
    if not np.isfinite(rows).all():
        raise SpecedgeError("self-check: the graphs' own logits are not finite; no device could be held against them")
    columns = sorted({*np.linspace(0, allowed - 1, min(_COLUMNS, allowed), dtype=int).tolist(), *rows.argmax(1).tolist()})
    logits = tuple(tuple(round(float(value), 4) for value in row) for row in rows[:, columns])
    return SelfCheck(tuple(ids), tuple(columns), logits, _TOLERANCE)


def check_model(bundle: Bundle, role: str, model: Model, sequence: ModelSequence) -> None:
    """Hold a model on its device against the bundle's check; the result is kept for this bundle, provider, driver and hardware.

    Raises:
        SpecedgeError: The device computes something else.
    """
    expected = bundle.manifest.checks.get(role)
    if expected is None:
        _log.warning("%s: holds no self-check for its %s; device %r was not checked", bundle.path, role, model.device.name)
        return
    provider = find_provider(model.device)
    place = None
    with contextlib.suppress(OSError, SpecedgeError):  # no cache, or none that can be read: ask, and do not keep
        place = _place(bundle, role, provider)
        if (place / _PASSED).is_file():
            keep(place)
            return
    ends = [width for width in _widths(sequence) for _ in _ends(width)]
    if len(expected.ids) != text_length(sequence) or len(expected.logits) != len(ends):
        raise SpecedgeError(f"{bundle.path}: checks.{role} is not of the {role}'s graphs; convert the model again")
    by_row = difference(expected, _read(sequence, expected.ids, expected.columns))
    row = int(np.argmax(np.where(np.isnan(by_row), np.inf, by_row)))
    worst, width = float(by_row[row]), ends[row]
    if not worst <= expected.tolerance:  # NaN is no agreement
        raise SpecedgeError(
            f"device {model.device.name!r}: computes something else than the bundle's self-check: logits of a step of {width} "
            f"differ by {worst:.2g}, expected at most {expected.tolerance:.2g} ({provider.hardware}); update the driver, or "
            f"use another device"
        )
    passed = {"role": role, "device": model.device.name, "hardware": provider.hardware, "worst": worst}
    with contextlib.suppress(OSError, SpecedgeError):  # it will be asked again
        if place:
            keep(place)
            write_whole(place / _PASSED, json.dumps(passed, indent=1).encode())


def difference(expected: SelfCheck, found: Rows) -> npt.NDArray[np.float64]:
    """Per row: the norm of the difference over that of the expected row about its mean."""
    truth = np.array(expected.logits, np.float64)
    spread = np.linalg.norm(truth - truth.mean(axis=1, keepdims=True), axis=1)
    found_difference: npt.NDArray[np.float64] = np.linalg.norm(found - truth, axis=1) / np.maximum(spread, 1e-6)
    return found_difference


def _read(sequence: ModelSequence, ids: Sequence[int], columns: Sequence[int]) -> Rows:
    """[rows, columns]: the first and last row of a step of every width, one behind the other while there is room."""
    sequence.truncate(0)
    rows, read = [], 0
    for width in _widths(sequence):
        if sequence.length + width > sequence.role.context:
            sequence.truncate(0)
        logits = sequence.step(ids[read : read + width])
        rows += [logits[end][list(columns)].copy() for end in _ends(width)]
        sequence.commit(range(width))
        read += width
    sequence.truncate(0)
    return np.stack(rows)


def _ends(width: int) -> tuple[int, ...]:
    return (0, width - 1) if width > 1 else (0,)


def _widths(sequence: ModelSequence) -> list[int]:
    """Those of the graphs, ascending."""
    role = sequence.role
    return sorted(graph.width or role.widest for graph in role.graphs)


def _place(bundle: Bundle, role: str, provider: Provider) -> Path:
    """The name is a hash of all that the result depends on."""
    device = replace(provider.device, operators=None)  # of sets, whose order differs from process to process
    compiled = sorted((bundle.path / "compiled" / device.name).glob("*/manifest.json"))
    parts = (
        str(_FORMAT),
        sha256(bundle.path / MANIFEST),
        role,
        repr(device),
        provider.version,
        provider.sdk,
        provider.soc.name if provider.soc else "",
        provider.hardware,
        platform.platform(),
        VERSION,
        *map(sha256, compiled),
    )
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    return cache_dir().absolute() / "self_checks" / name
