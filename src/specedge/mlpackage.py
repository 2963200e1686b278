"""Core ML packages: where things lie in these folders of a program and one file of weights, and the library that reads them."""

import importlib
import logging
import struct
from pathlib import Path
from typing import Any

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


def import_coremltools(module: str, wanted_by: str) -> Any:
    """A module of coremltools, or with no name all of it.

    Raises:
        SpecedgeError: It is not there; says what to install for what.
    """
    logging.getLogger("coremltools").setLevel(logging.ERROR)  # it warns of what only a Mac has, and of versions
    try:
        return importlib.import_module(f"coremltools.{module}".rstrip("."))
    except ImportError as error:
        raise SpecedgeError(
            f"{wanted_by}: needs coremltools, which is not here or not whole ({error}); pip install 'specedge[coreml]'"
        ) from error
