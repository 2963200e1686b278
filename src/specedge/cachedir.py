"""Where files are kept that can be made or fetched again."""

import os
import sys
from pathlib import Path


def cache_dir() -> Path:
    """`$SPECEDGE_CACHE`, or the user's cache folder of the platform; it may not exist yet."""
    if chosen := os.environ.get("SPECEDGE_CACHE"):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "specedge"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "specedge"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specedge"
