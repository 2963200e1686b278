"""Step graphs as this machine runs them, made once and kept in the user's cache, so that sessions map their weights.

A kernel reads its weights in an order of its own; left alone, each session puts a copy of them in that order on the heap.
A prepared graph has them in that order in a file, which every engine and every process maps.
"""

import ctypes
import hashlib
import json
import logging
import os
import platform
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from specedge.bundle import MANIFEST, Bundle, Graph, Role, sha256
from specedge.cachedir import cache_dir
from specedge.devices.device import Device
from specedge.errors import SpecedgeError
from specedge.partial import abandoned, beside
from specedge.runtime.session import VERSION, Session

WORTH_IT = 16 << 20  # bytes of weights; fewer are copied as fast as they are mapped
_ROOM = 3  # a prepared graph is 2.2 times as large as its weight file (onnxruntime keeps both orders), plus what others write
_KEPT = 60 * 86400.0  # seconds an entry may go unused before the next preparation removes it
_RECORD = "prepared.json"
_FILES = ("step.onnx", "weights.bin")

_log = logging.getLogger(__name__)
_preparing = threading.Lock()  # one thread of a process at a time: they would share the name of the partial folder

Same = Callable[[Session, Session], bool]


def open_prepared(bundle: Bundle, role: Role, graph: Graph, device: Device, threads: int | None, same: Same) -> Session:
    """A session over the prepared form of a graph, which is made first if it is missing, damaged or of another bundle.

    `same` says whether two sessions compute the same: a form that does not is not kept. Where nothing can be prepared the
    session is one over the bundle's own files, and one line of the log says why.
    """
    place = _place(bundle, graph, device)
    with _preparing:
        try:
            damage = _damage(place)
            if damage:
                if place.exists():
                    _log.warning("%s: prepared weights are damaged (%s); making them again", place, damage)
                _make(place, bundle, role, graph, device, threads, same)
                _return_heap()
            session = Session(place / "step.onnx", graph, device, threads)
        except (OSError, SpecedgeError) as error:
            _log.warning("%s: opened without prepared weights, each engine holds a copy of its own (%s)", bundle.path, error)
            return Session(bundle.file(graph.file), graph, device, threads)
    _touch(place / _RECORD)
    return session


def _place(bundle: Bundle, graph: Graph, device: Device) -> Path:
    """Where the prepared form belongs: the name is a hash of all it depends on."""
    manifest = (bundle.path / MANIFEST).read_bytes()  # which holds the hashes of all files
    parts = (hashlib.sha256(manifest).hexdigest(), graph.file, device.name, cpu(), VERSION)
    return cache_dir() / "prepared" / hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def cpu() -> str:
    """What the choice of kernels depends on: the processor's model and the instruction sets it offers here."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return f"{platform.system()} {platform.machine()} {platform.processor()}"
    first, _, _ = info.read_text(encoding="utf-8", errors="replace").partition("\n\n")
    fields = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
    told = {key.strip(): " ".join(sorted(value.split())) for key, value in fields.items()}
    wanted = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")
    return " ".join([platform.machine(), *(told[key] for key in wanted if key in told)])


def _damage(place: Path) -> str | None:
    """What is wrong with an entry, None if nothing is; hashes are taken of files that changed since they were made."""
    try:
        record = json.loads((place / _RECORD).read_text(encoding="utf-8"))
        for name in _FILES:
            found, wanted = (place / name).stat(), record[name]
            if found.st_size != wanted["bytes"]:
                return f"{name}: {found.st_size} bytes, expected {wanted['bytes']}"
            if found.st_mtime_ns != wanted["mtime_ns"] and sha256(place / name) != wanted["sha256"]:
                return f"{name}: its SHA-256 is not the one it was made with"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name}: missing"
    except (KeyError, RecursionError, TypeError, ValueError):
        return f"{_RECORD}: not understood"
    return None


def _make(place: Path, bundle: Bundle, role: Role, graph: Graph, device: Device, threads: int | None, same: Same) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    _sweep(place)
    _check_source(bundle, role, graph)
    need, free = _ROOM * bundle.manifest.files[role.weight_file].bytes, shutil.disk_usage(place.parent).free
    if free < need:
        raise SpecedgeError(f"{place.parent}: {free} bytes free, expected {need} for the prepared weights")
    partial = beside(place, "partial")
    try:
        partial.mkdir()
        own = Session(bundle.file(graph.file), graph, device, threads, prepared=partial)
        if not same(own, Session(partial / "step.onnx", graph, device, threads)):
            raise SpecedgeError(f"{graph.file}: the prepared form computes something else; it was not kept")
        _write_record(partial)
        _move(partial, place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_source(bundle: Bundle, role: Role, graph: Graph) -> None:
    """Nothing damaged may be kept beyond its repair."""
    for name in (graph.file, role.weight_file):
        if sha256(bundle.file(name)) != bundle.manifest.files[name].sha256:
            raise SpecedgeError(f"{bundle.file(name)}: its SHA-256 is not the manifest's; copy the bundle again")


def _write_record(folder: Path) -> None:
    record = {}
    for name in _FILES:
        with (folder / name).open("rb+") as file:
            os.fsync(file.fileno())
        stat = (folder / name).stat()
        record[name] = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256(folder / name)}
    with (folder / _RECORD).open("w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _move(partial: Path, place: Path) -> None:
    """Put a whole entry in its place, unless another process was quicker."""
    if place.exists() and _damage(place):
        replaced = beside(place, "replaced")
        place.rename(replaced)
        shutil.rmtree(replaced, ignore_errors=True)
    try:
        partial.rename(place)
    except OSError:
        if _damage(place):
            raise


def _sweep(place: Path) -> None:
    """Remove what killed preparations left, and entries nobody has opened for long."""
    for sibling in list(place.parent.iterdir()):
        entry = sibling.with_name(sibling.name.removeprefix(".").partition(".")[0])
        for kind in ("partial", "replaced"):
            for leftover in abandoned(entry, kind):
                shutil.rmtree(leftover, ignore_errors=True)
        record = sibling / _RECORD
        if record.exists() and time.time() - record.stat().st_mtime > _KEPT:
            shutil.rmtree(sibling, ignore_errors=True)


def _return_heap() -> None:
    """Give the copy that the preparation made back to the system; glibc keeps what was freed."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def _touch(record: Path) -> None:
    try:
        os.utime(record)
    except OSError:  # a read-only cache serves as well
        return
