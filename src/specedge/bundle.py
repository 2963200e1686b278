"""A bundle on disk: its manifest read and checked, its files found, before anything is opened."""

import dataclasses
import hashlib
import json
import os
import sys
import types
import typing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from specedge.errors import SpecedgeError
from specedge.manifest import SCHEMA, Manifest, Role
from specedge.manifest_checks import check_values

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A folder and its manifest."""

    path: Path
    manifest: Manifest

    def file(self, name: str) -> Path:
        """The path of one of the bundle's files; names and links that lead outside are refused."""
        return resolve(self.path, name)

    def role(self, name: str) -> Role:
        if name not in self.manifest.roles:
            raise SpecedgeError(f"{self.path}: has no {name!r}; it holds {', '.join(self.manifest.roles)}")
        return self.manifest.roles[name]


def open_bundle(path: str | Path) -> Bundle:
    """Read a manifest and check schema version, presence and size of every file; hashes are `changed_files`' work."""
    folder = Path(path)
    manifest_path = folder / MANIFEST
    try:
        data = json.loads(manifest_path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecedgeError(f"{manifest_path}: not found; expected a bundle made by spec-export convert") from None
    except (OSError, RecursionError, ValueError) as error:
        raise SpecedgeError(f"{manifest_path}: cannot be read ({error}); convert the model again") from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise SpecedgeError(f"{manifest_path}: schema {schema!r}, expected {SCHEMA}; convert the model with this version")
    bundle = Bundle(folder, build_record(Manifest, data, str(manifest_path)))
    check_values(bundle.manifest, str(manifest_path))
    for name, record in bundle.manifest.files.items():
        file = bundle.file(name)
        if not os.path.isfile(file):  # is_file() raises for a name too long
            raise SpecedgeError(f"{file}: missing, though the manifest lists it; copy the bundle whole or convert again")
        if file.stat().st_size != record.bytes:
            raise SpecedgeError(f"{file}: {file.stat().st_size} bytes, expected {record.bytes}; copy the bundle again")
    return bundle


def is_bundle(folder: Path) -> bool:
    """Whether a folder was once written by a conversion, of whatever version."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and {"schema", "roles"} <= manifest.keys()


def changed_files(bundle: Bundle) -> list[str]:
    """Names of the files whose SHA-256 is not the manifest's."""
    return [name for name, record in bundle.manifest.files.items() if sha256(bundle.file(name)) != record.sha256]


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def resolve(folder: Path, name: str) -> Path:
    """A file of a bundle's folder; names and links that lead outside are refused."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or ":" in name or not name.isprintable():
        raise SpecedgeError(f"{folder / MANIFEST}: file name {name!r} leads outside the bundle; expected a relative name")
    root = folder.resolve()
    target = Path(os.path.realpath(root / pure))  # resolve() raises where links go in circles
    inside = [root]
    if root.parent.name == "snapshots":  # a hub cache keeps files as links into the repository's blobs/
        inside.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(place) for place in inside):
        raise SpecedgeError(f"{folder / name}: is a link to {target}, outside the bundle; expected a file of the bundle")
    return folder / pure


def build_record(kind: Any, data: Any, where: str) -> Any:
    """JSON value -> the annotated type; unknown keys are ignored.

    Raises:
        SpecedgeError: A value is of another type; names the key.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(data, dict):
        hints = typing.get_type_hints(kind)
        missing = [key for key in hints if key not in data]
        if missing:
            raise SpecedgeError(f"{where}: key {missing[0]!r} is missing; convert the model again")
        return kind(**{key: build_record(hint, data[key], f"{where}: {key}") for key, hint in hints.items()})  # type: ignore[operator]
    if origin is tuple and isinstance(data, list):
        return tuple(build_record(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(data))
    if origin is dict and isinstance(data, dict):
        return {key: build_record(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    if origin is types.UnionType and type(data) in arguments:
        return data
    if kind is float and (type(data) is float or (type(data) is int and abs(data) < sys.float_info.max)):
        return float(data)
    if type(data) is kind:
        return data
    raise SpecedgeError(f"{where}: found {data!r:.60}, expected {getattr(kind, '__name__', kind)}; convert the model again")
