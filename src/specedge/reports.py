"""What a command found out about a bundle, left in its folder `report/` beside what the manifest lists."""

import json
from collections.abc import Mapping
from typing import Any

from specedge.bundle import Bundle
from specedge.cachedir import write_whole

_FOLDER = "report"


def read_report(bundle: Bundle, name: str) -> dict[str, Any] | None:
    """A report by its name; None where there is none that can be read."""
    try:
        found = json.loads((bundle.path / _FOLDER / name).read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_report(bundle: Bundle, name: str, content: Mapping[str, object]) -> bool:
    """Leave a report in the bundle; False where that cannot be written."""
    try:
        write_whole(bundle.path / _FOLDER / name, (json.dumps(content, indent=1) + "\n").encode())
    except OSError:
        return False
    return True
