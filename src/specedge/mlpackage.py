"""Where things lie in a Core ML package: a folder with a program and one file of weights."""

import struct
from pathlib import Path

from specedge.errors import SpecedgeError

AUTHOR = "com.apple.CoreML"
MODEL = f"Data/{AUTHOR}/model.mlmodel"
WEIGHTS = f"Data/{AUTHOR}/weights"
WEIGHT_FILE = f"{WEIGHTS}/weight.bin"
MANIFEST = "Manifest.json"
_BLOB = struct.Struct("<IIQQ")  # before an array in the weight file: a sentinel, its type, its bytes and where they lie
_SENTINEL = 0xDEADBEEF


def is_package(path: Path) -> bool:
    """Whether a folder looks like one."""
    return (path / MANIFEST).is_file() and (path / MODEL).is_file()


def find_blob(package: Path, place: int) -> tuple[int, int]:
    """Offset and bytes of the array that the program says is described at `place` of the weight file.

    Raises:
        SpecedgeError: Nothing is described there.
    """
    file = package / WEIGHT_FILE
    try:
        with file.open("rb") as opened:
            opened.seek(place)
            sentinel, _, size, offset = _BLOB.unpack(opened.read(_BLOB.size))
    except (OSError, struct.error) as error:
        raise SpecedgeError(f"{file}: cannot be read at {place} ({error}); convert again") from error
    if sentinel != _SENTINEL or offset + size > file.stat().st_size:
        raise SpecedgeError(f"{file}: no array at {place}; convert again")
    return offset, size
