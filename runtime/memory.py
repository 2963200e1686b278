"""What an engine costs in memory: bytes of its files that are mapped, and bytes of its own."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from specedge.errors import SpecedgeError, UsageError
from specedge.runtime.generate import Engine, load
from specedge.runtime.prepared import return_heap
from specedge.runtime.sample import Sampling

_SMAPS = Path("/proc/self/smaps")
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ (?P<offset>\S+) \S+ \S+\s*(?P<path>.*)")


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes of this process: `mapped` pages of the files asked for, and `private` pages that belong to no file."""

    mapped: int
    private: int


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """What one more engine took: bytes of its weight files, how many of them all engines have resident, private bytes added."""

    file: int
    mapped: int
    private: int


def measure_engines(path: Path, count: int) -> list[EngineMemory]:
    """Open `count` engines on a bundle, one after the other, each kept and made to fill its context.

    Private bytes are the growth of the process: weights that are not mapped, the session, the whole KV cache, buffers.

    Raises:
        SpecedgeError: The bundle cannot be opened, or the system is not Linux.
    """
    engines: list[Engine] = []
    found = []
    if emulated := load(
        path, self_check=False
    ).emulated:  # prepares the weights, if nobody has yet, and loads what a process needs once
        raise UsageError(f"--memory: device {emulated[0]!r} is emulated here, and its memory is not what an engine takes")
    return_heap()
    before = read_memory([])
    for _ in range(count):
        engine = load(path, reuse=False, self_check=False)
        engines.append(engine)
        for context in {engine.draft_context, engine.context}:  # a draft model reads no text beyond its own
            engine.generate([0] * (context - 1), Sampling(), 1)
        return_heap()
        after = read_memory(engine.weight_files)
        size = sum(file.stat().st_size for file in engine.weight_files)
        found.append(EngineMemory(size, after.mapped, after.private - before.private))
        before = after
    return found


def read_memory(files: Iterable[Path]) -> Memory:
    """What is resident now, as the kernel counts it.

    Pages of a file are there once for all who map it, whatever their number.

    Raises:
        SpecedgeError: The system has no /proc/self/smaps: it is not Linux.
    """
    if not _SMAPS.exists():
        raise SpecedgeError(f"{_SMAPS}: not here; how memory is divided can be read on Linux only")
    wanted = {str(path.resolve()) for path in files}
    mapped: dict[tuple[str, str], int] = {}  # the same piece of a file may be mapped many times
    private = 0
    path = offset = ""
    for line in _SMAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        if start := _MAPPING.fullmatch(line):
            path, offset = start["path"], start["offset"]
        elif line.startswith("Rss:") and path in wanted:
            mapped[path, offset] = max(_bytes(line), mapped.get((path, offset), 0))
        elif line.startswith(("Private_Dirty:", "Private_Clean:")) and not path.startswith("/"):
            private += _bytes(line)
    return Memory(sum(mapped.values()), private)


def _bytes(line: str) -> int:
    return int(line.split()[1]) * 1024
