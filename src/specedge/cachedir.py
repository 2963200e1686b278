"""Where files are kept that can be made or fetched again."""

import contextlib
import os
import secrets
import shutil
import sys
import time
from pathlib import Path

from specedge.errors import SpecedgeError

_KEPT = 60 * 86400.0  # seconds


def cache_dir() -> Path:
    """`$SPECEDGE_CACHE`, or the user's cache folder of the platform; it may not exist yet.

    Raises:
        SpecedgeError: Neither is set, and this user has no home directory.
    """
    if chosen := os.environ.get("SPECEDGE_CACHE"):
        return Path(chosen)
    if sys.platform == "darwin":
        return _home() / "Library" / "Caches" / "specedge"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or _home() / "AppData" / "Local") / "specedge"
    return Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "specedge"


def keep(entry: Path) -> None:
    """Note that an entry of the cache is in use, and drop its neighbours that were not for 60 days."""
    try:
        entry.mkdir(parents=True, exist_ok=True)
        os.utime(entry)
    except OSError as error:
        raise SpecedgeError(f"{entry}: cannot be written ({error}); set SPECEDGE_CACHE to a folder that can") from error
    for other in entry.parent.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process may have been here
            if other.stat().st_mtime < time.time() - _KEPT:
                shutil.rmtree(other, ignore_errors=True)


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise SpecedgeError("SPECEDGE_CACHE: not set, and this user has no home directory; set it to a folder") from None


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all, its folder first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
