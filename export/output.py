"""A bundle's folder: there whole or not at all, whatever ends the process."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from specedge import bundle as bundles
from specedge.errors import SpecedgeError
from specedge.partial import abandoned, beside


@contextlib.contextmanager
def new_folder(output: Path, force: bool) -> Iterator[Path]:
    """A temporary sibling that takes the place of `output` when the block succeeds and vanishes when it fails."""
    output = output.resolve()  # a link stays a link
    partial, replaced = beside(output, "partial"), beside(output, "replaced")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _sweep(output)
        _check_free(output, force)
        partial.mkdir()
        yield partial
        _check_free(output, force)  # another conversion may have been quicker
        if output.exists():
            output.rename(replaced)
        partial.rename(output)
    except OSError as error:
        raise SpecedgeError(f"{output}: was not written ({error}); nothing is left behind") from error
    finally:
        if replaced.exists() and not output.exists():
            replaced.rename(output)
        for leftover in (partial, replaced):
            shutil.rmtree(leftover, ignore_errors=True)


def _check_free(output: Path, force: bool) -> None:
    if output.exists() and not _is_bundle(output):
        raise SpecedgeError(f"{output}: exists and is no bundle; --force replaces bundles only, choose another -o")
    if output.exists() and not force:
        raise SpecedgeError(f"{output}: exists already; choose another -o or add --force")


def _is_bundle(folder: Path) -> bool:
    """Whether a folder was once written by a conversion, of whatever version."""
    try:
        manifest = json.loads((folder / bundles.MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and {"schema", "roles"} <= manifest.keys()


def _sweep(output: Path) -> None:
    """Remove what a killed conversion to the same place left, and put back the bundle it was about to replace."""
    for leftover in list(abandoned(output, "replaced")):
        if not output.exists():  # killed between two renames
            leftover.rename(output)
    for leftover in [*abandoned(output, "partial"), *abandoned(output, "replaced")]:
        shutil.rmtree(leftover, ignore_errors=True)
