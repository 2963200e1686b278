"""Bundles of tiny models for the tests: float32 and small unless a test says otherwise."""

from pathlib import Path
from typing import Any

from specedge.export.convert import Request, convert
from specedge.runtime import Engine, load


def make(source: Path, output: Path, **options: Any) -> Path:
    """Convert `source` with the options of `Request`, in float32, widths 1, 4 and 6, context 64, chunk 8 by default."""
    settings: dict[str, Any] = {
        "body": "float32",
        "head": "float32",
        "widths": (1, 4, 6),
        "context": 64,
        "chunk": 8,
        "force": True,
        **options,
    }
    return convert(Request(str(source), output, **settings)).path


def engine(source: Path, output: Path, **options: Any) -> Engine:
    """The engine over a bundle made as `make` does; drafts with the draft model where there is one."""
    return load(make(source, output, **options), threads=1)
