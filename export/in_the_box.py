"""Drafters that come with this package, by name: trained here for a model that `fetch` brings."""

from pathlib import Path

from specedge.errors import UsageError

_FOLDER = Path(__file__).parent / "trained"
NAMES = ("smollm2-135m",)
"""Models that have some: SmolLM2-135M-Instruct."""


def in_the_box(kind: str, source: str) -> str:
    """Where the drafter of a kind (draft, medusa, eagle) lies that `source` names; a source of another name is itself.

    Raises:
        UsageError: It is one of ours, but this install lacks it.
    """
    if source not in NAMES or Path(source).exists():
        return source
    path = _FOLDER / f"{source}-{kind}.gguf"
    if not path.is_file():
        raise UsageError(f"--{kind} {source}: this install has no {path.name}; install specedge again, or train one")
    return str(path)


def tree_in_the_box(kind: str, name: str) -> Path:
    """The best tree of 16 nodes by what was measured of a drafter (`bench --tree`, then `tree`)."""
    return _FOLDER / f"{name}-{kind}-tree.json"
