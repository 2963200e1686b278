"""Repositories of the Hugging Face hub: their names, and their files in the cache."""

import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from specedge.errors import SpecedgeError

_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_FILES = (".gguf", ".safetensors", ".pt", ".bin")


def is_hub_id(name: str) -> bool:
    """Whether a name that is no file or folder here can be OWNER/NAME."""
    return bool(_ID.fullmatch(name)) and not name.startswith(".") and Path(name).suffix not in _FILES


def download(repository: str, patterns: Sequence[str]) -> Path:
    """The folder of a repository's files of these patterns, in the hub cache.

    Raises:
        SpecedgeError: It does not exist, is gated, or cannot be reached.
    """
    try:
        return Path(snapshot_download(repository, allow_patterns=list(patterns), ignore_patterns=["*/*", "consolidated*"]))
    except GatedRepoError as error:
        raise SpecedgeError(
            f"{repository}: a gated repository; accept its terms on the hub and log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise SpecedgeError(f"{repository}: no such folder here, and no such repository on the hub") from error
    except LocalEntryNotFoundError as error:
        raise SpecedgeError(
            f"{repository}: no such folder here, not in the hub cache, and the hub cannot be reached (offline); "
            "connect once, or give a folder"
        ) from error
    except HFValidationError as error:
        raise SpecedgeError(f"{repository}: no such folder here, and no valid hub id") from error
    except HfHubHTTPError as error:
        raise SpecedgeError(f"{repository}: the hub refused it: {' '.join(str(error).split())}") from error


def folder_name(folder: Path) -> str:
    """The folder's name; in a hub cache (models--OWNER--NAME/snapshots/REVISION) the repository's."""
    folder = folder.absolute()
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.rpartition("--")[2]
    return folder.resolve().name if folder.name in ("", "..") else folder.name
