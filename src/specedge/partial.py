"""Names for what is being written: beside its place until it is whole, and known as abandoned once its process is gone."""

import os
from collections.abc import Iterator
from pathlib import Path


def beside(place: Path, kind: str) -> Path:
    """A sibling of `place` that is this process's own: .NAME.KIND-PROCESS."""
    return place.with_name(f".{place.name}.{kind}-{os.getpid()}")


def abandoned(place: Path, kind: str) -> Iterator[Path]:
    """Siblings of that kind whose process has ended, or had our number: in a container the next one has it again."""
    for sibling in place.parent.iterdir():
        name, _, owner = sibling.name.rpartition("-")
        if name == f".{place.name}.{kind}" and owner.isdecimal() and (int(owner) == os.getpid() or not _alive(int(owner))):
            yield sibling


def _alive(process: int) -> bool:
    if os.name == "nt":  # signal 0 would end the process there
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True
