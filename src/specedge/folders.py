"""A folder of results: there whole or not at all, whatever ends the process."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from specedge.errors import SpecedgeError


@contextlib.contextmanager
def new_folder(
    output: Path, force: bool, is_ours: Callable[[Path], bool] = Path.exists, what: str = "bundle"
) -> Iterator[Path]:
    """A temporary sibling that takes the place of `output` when the block succeeds and vanishes when it fails.

    With `force` a folder that is there is replaced, if `is_ours` knows it as such a result, called `what`.
    """
    output = output.resolve()  # a link stays a link
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    replaced = output.with_name(f".{output.name}.replaced-{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _sweep(output)
        _check_free(output, force, is_ours, what)
        partial.mkdir()
        yield partial
        _check_free(output, force, is_ours, what)  # another conversion may have been quicker
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


def _check_free(output: Path, force: bool, is_ours: Callable[[Path], bool], what: str) -> None:
    if output.exists() and not is_ours(output):
        raise SpecedgeError(f"{output}: exists and is no {what}; --force replaces {what}s only, choose another -o")
    if output.exists() and not force:
        raise SpecedgeError(f"{output}: exists already; choose another -o or add --force")


def _sweep(output: Path) -> None:
    """Remove what a killed process left of the same place, and put back the folder it was about to replace."""
    for leftover in output.parent.iterdir():
        name, _, owner = leftover.name.rpartition("-")
        ours = name in (f".{output.name}.partial", f".{output.name}.replaced") and owner.isdecimal()
        if not ours or (int(owner) != os.getpid() and _alive(int(owner))):  # in a container the next one has our number
            continue
        if name == f".{output.name}.replaced" and not output.exists():  # killed between two renames
            leftover.rename(output)
        else:
            shutil.rmtree(leftover, ignore_errors=True)


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
