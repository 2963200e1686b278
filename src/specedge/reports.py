"""What a command found out about a bundle, left in its folder `report/` beside what the manifest lists."""

import json
import math
from collections.abc import Mapping
from typing import Any

from specedge.bundle import MANIFEST, Bundle, sha256
from specedge.cachedir import write_whole

_FOLDER = "report"


def read_report(bundle: Bundle, name: str) -> dict[str, Any] | None:
    """A report by its name; None where there is none that can be read, or it is of another manifest."""
    try:
        found = json.loads((bundle.path / _FOLDER / name).read_text(encoding="utf-8"))
        of_this = isinstance(found, dict) and found.get("manifest") == sha256(bundle.path / MANIFEST)
    except (OSError, RecursionError, ValueError):
        return None
    results = found.get("results") if of_this else None
    return results if isinstance(results, dict) else None


def write_report(bundle: Bundle, name: str, results: Mapping[str, object]) -> bool:
    """Leave a report in the bundle; False where that cannot be written."""
    content = {"manifest": sha256(bundle.path / MANIFEST), "results": finite(results)}
    try:
        write_whole(bundle.path / _FOLDER / name, (json.dumps(content, indent=1) + "\n").encode())
    except OSError:
        return False
    return True


def finite(value: object) -> object:
    """Results with null for NaN and infinity, which JSON cannot hold."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
