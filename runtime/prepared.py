"""Step graphs as this machine runs them, made once and kept in the user's cache, so that sessions map their weights.

A kernel reads its weights in an order of its own; left alone, each session puts a copy of them in that order on the heap.
A prepared graph has them in that order in a file, which every engine and every process maps. It is a convenience: whatever
goes wrong with it costs a line of the log and memory, never the engine.
"""

import contextlib
import ctypes
import hashlib
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specedge.bundle import MANIFEST, Bundle, sha256
from specedge.cachedir import cache_dir
from specedge.devices.device import Device
from specedge.errors import SpecedgeError
from specedge.manifest import Graph, Role
from specedge.runtime.binding import OpenGraph
from specedge.runtime.compiled import open_graph, works_alone
from specedge.runtime.session import PREPARED_GRAPH, PREPARED_WEIGHTS, VERSION, Session

WORTH_IT = 16 << 20  # bytes of weights; fewer are copied as fast as they are mapped
_FORMAT = "1"  # of an entry: part of its key, to be counted up with the options of the session that writes it
_ROOM = 3  # a prepared graph is 2 to 2.5 times as large as its weight file: onnxruntime keeps both orders
_LONG = 3 << 30  # bytes to write at most: above, a person should know why the first load takes its time
_KEPT = 60 * 86400.0  # seconds an entry may go unused
_KEPT_SUPERSEDED = 86400.0  # the same, once another bundle has its path; two containers may have their own at one path
_QUIET = 600.0  # seconds after the last write when a half-made entry counts as abandoned, whoever's it was
_RECORD = "prepared.json"

_log = logging.getLogger(__name__)
_said: set[str] = set()  # lines a process has logged already: it may open the same bundle often

Same = Callable[[OpenGraph, OpenGraph], bool]


@dataclass(frozen=True, slots=True)
class Opened:
    """A session and the files whose pages are its weights."""

    session: OpenGraph
    weight_files: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class _Source:
    """What an entry is made of and for."""

    bundle: Bundle
    role: Role
    graph: Graph
    device: Device
    threads: int | None

    def open(self, path: Path) -> Session:
        return Session(path, self.graph, self.device, self.threads, alone=works_alone(self.bundle, self.graph))


def open_plain(bundle: Bundle, role: Role, graph: Graph, device: Device, threads: int | None) -> Opened:
    """A session over the bundle's own files."""
    return Opened(open_graph(bundle, graph, device, threads), tuple(map(bundle.file, role.weight_files)))


def open_prepared(bundle: Bundle, role: Role, graph: Graph, device: Device, threads: int | None, same: Same) -> Opened:
    """A session over the prepared form of a graph, which is made first if it is missing, damaged or of another bundle.

    `same` says whether two sessions compute the same: a form that does not is not kept. Where nothing can be prepared the
    session is one over the bundle's own files, and one line of the log says why.
    """
    try:
        place = _place(bundle, graph, device)
        session = _open_or_make(place, _Source(bundle, role, graph, device, threads), same)
        _look_after(place)
    except Exception as error:  # onnxruntime's own, too: nothing that a preparation does may keep an engine from opening
        _warn_once(f"{bundle.path}: opened without prepared weights, each engine holds a copy of its own ({error})")
        return open_plain(bundle, role, graph, device, threads)
    return Opened(session, (place / PREPARED_WEIGHTS,))


def _warn_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        _log.warning("%s", message)


def _place(bundle: Bundle, graph: Graph, device: Device) -> Path:
    """Where the prepared form belongs: the name is a hash of all it depends on."""
    parts = (_FORMAT, _manifest_hash(bundle), graph.file, device.name, cpu(), VERSION)
    return cache_dir().absolute() / "prepared" / hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _manifest_hash(bundle: Bundle) -> str:
    return sha256(bundle.path / MANIFEST)  # the manifest holds the hashes of all other files


def cpu() -> str:
    """What the choice of kernels depends on: the processor's model and the instruction sets it offers here."""
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return f"{platform.system()} {platform.machine()} {platform.processor()}"
    first, _, _ = info.read_text(encoding="utf-8", errors="replace").partition("\n\n")
    fields = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
    told = {key.strip(): " ".join(sorted(value.split())) for key, value in fields.items()}
    wanted = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")
    return " ".join([platform.machine(), *(told[key] for key in wanted if key in told)])


def _open_or_make(place: Path, source: _Source, same: Same) -> Session:
    session, _ = _try_to_open(place, source)
    if session:
        return session
    with _preparing:
        session, damage = _try_to_open(place, source)  # another thread may have made it meanwhile
        if session:
            return session
        damaged = os.path.lexists(place)
        if damaged:
            _log.warning("%s: prepared weights are damaged (%s); making them again", place, damage)
        _make(place, source, same, replace=damaged)
        return_heap()
        return source.open(place / PREPARED_GRAPH)


def _try_to_open(place: Path, source: _Source) -> tuple[Session | None, str]:
    """The session over an entry, or what is wrong with the entry."""
    if damage := _damage(place):
        return None, damage
    try:
        return source.open(place / PREPARED_GRAPH), ""
    except SpecedgeError as error:
        return None, str(error)


def _damage(place: Path) -> str | None:
    """What is wrong with an entry, None if nothing is; files that changed since they were made are hashed.

    Raises:
        PermissionError: The entry is another user's.
        SpecedgeError: The entry says that there can be none.
    """
    try:
        record = json.loads((place / _RECORD).read_text(encoding="utf-8"))
        if refused := record["refused"]:
            raise SpecedgeError(f"{place}: {refused}")
        for name in (PREPARED_GRAPH, PREPARED_WEIGHTS):
            found, wanted = (place / name).stat(), record["files"][name]
            if found.st_size != wanted["bytes"]:
                return f"{name}: {found.st_size} bytes, expected {wanted['bytes']}"
            if found.st_mtime_ns != wanted["mtime_ns"]:
                if sha256(place / name) != wanted["sha256"]:
                    return f"{name}: its SHA-256 is not the one it was made with"
                with contextlib.suppress(OSError):  # the next load need not hash it
                    os.utime(place / name, ns=(found.st_atime_ns, wanted["mtime_ns"]))
    except PermissionError:
        raise
    except OSError as error:
        return f"{Path(str(error.filename)).name}: {error.strerror}"
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError):
        return f"{_RECORD}: not understood"
    return None


def _make(place: Path, source: _Source, same: Same, replace: bool) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    _check_source(source)
    need = _ROOM * source.role.stored_bytes
    free = shutil.disk_usage(place.parent).free
    if free < need:
        raise SpecedgeError(
            f"{place.parent}: {free / 1e6:.0f} MB free in the cache, expected {need / 1e6:.0f} MB for the prepared weights"
        )
    level = logging.WARNING if need > _LONG else logging.INFO
    _log.log(level, "%s: preparing weights for this machine, once, in %s", source.bundle.path, place.parent)
    partial = Path(tempfile.mkdtemp(prefix=f".{place.name}.partial-", dir=place.parent))
    try:
        own = Session(source.bundle.file(source.graph.file), source.graph, source.device, source.threads, prepared=partial)
        refused = "" if same(own, source.open(partial / PREPARED_GRAPH)) else "the prepared form computes something else here"
        if refused:  # remembered, or every load would try again
            for name in (PREPARED_GRAPH, PREPARED_WEIGHTS):
                (partial / name).unlink()
        _write_record(partial, source.bundle, refused)
        _move(partial, place, replace)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if refused:
        raise SpecedgeError(f"{place}: {refused}")


def _check_source(source: _Source) -> None:
    """Nothing damaged may be kept beyond its repair."""
    for name in (source.graph.file, *source.role.weight_files):
        if sha256(source.bundle.file(name)) != source.bundle.manifest.files[name].sha256:
            raise SpecedgeError(f"{source.bundle.file(name)}: its SHA-256 is not the manifest's; copy the bundle again")


def _write_record(folder: Path, bundle: Bundle, refused: str) -> None:
    files = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        stat = path.stat()
        files[path.name] = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256(path)}
    record = {"bundle": str(bundle.path.resolve()), "manifest": _manifest_hash(bundle), "refused": refused, "files": files}
    with (folder / _RECORD).open("w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _move(partial: Path, place: Path, replace: bool) -> None:
    """Put a whole entry in its place; unless it has to replace one, another process may have been quicker."""
    if replace and os.path.lexists(place):
        aside = Path(tempfile.mkdtemp(prefix=f".{place.name}.partial-", dir=place.parent))
        try:
            place.rename(aside / place.name)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    try:
        partial.rename(place)
    except OSError:
        if _damage(place):
            raise


def _look_after(place: Path) -> None:
    """Note that an entry was used, and remove what nobody uses: half-made, superseded by a new bundle, or unused for long."""
    with contextlib.suppress(OSError):
        os.utime(place / _RECORD)
    now, own = time.time(), _read_record(place)
    for sibling in _entries(place.parent):
        with contextlib.suppress(OSError):
            if sibling.name.startswith("."):
                stale = ".partial-" in sibling.name and now - _last_write(sibling) > _QUIET
            elif (sibling / _RECORD).exists():
                record = _read_record(sibling)
                superseded = record.get("bundle") == own.get("bundle") and record.get("manifest") != own.get("manifest")
                unused = now - (sibling / _RECORD).stat().st_mtime
                stale = unused > (_KEPT_SUPERSEDED if superseded else _KEPT)
            else:
                stale = False
            if stale:
                shutil.rmtree(sibling, ignore_errors=True)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _read_record(place: Path) -> dict[str, Any]:
    try:
        record = json.loads((place / _RECORD).read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _last_write(folder: Path) -> float:
    return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))


def return_heap() -> None:
    """Give memory that was freed back to the system, which glibc by itself does not."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


_preparing = threading.Lock()  # threads of a process need not prepare the same twice


def _renew_lock() -> None:
    global _preparing
    _preparing = threading.Lock()  # a forked process has nobody who would release the old one


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
