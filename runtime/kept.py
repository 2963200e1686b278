"""What providers make of a bundle's files on this machine, in the user's cache."""

import hashlib
from pathlib import Path

from specedge.bundle import MANIFEST, sha256
from specedge.cachedir import cache_dir, keep


def kept_folder(path: Path, *parts: str) -> Path:
    """The folder for what is made of one file or package of a bundle; `parts` are all else that it depends on.

    A file names its weights by their places alone: it is the bundle's manifest that tells them from others. What was not used
    for 60 days goes.

    Raises:
        SpecedgeError: The cache cannot be written.
    """
    manifests = [sha256(folder / MANIFEST) for folder in path.parents[:2] if (folder / MANIFEST).is_file()]
    own = sha256(path) if path.is_file() else path.name
    name = hashlib.sha256("\n".join((*parts, own, *manifests, str(path.parent.name))).encode()).hexdigest()[:32]
    folder = cache_dir().absolute() / "compiled" / name
    keep(folder)
    return folder
