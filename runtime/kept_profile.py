"""Profiles in the user's cache: what was measured here, for the engines that open the same."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from specedge.bundle import MANIFEST, Bundle, build_record, sha256
from specedge.cachedir import cache_dir, write_whole
from specedge.devices.device import Device
from specedge.errors import SpecedgeError
from specedge.runtime.prepared import cpu
from specedge.runtime.profile import FORMAT, Profile
from specedge.runtime.session import VERSION


def write_profile(profile: Profile, bundle: Bundle, rows: Mapping[str, Device], threads: int | None = None) -> Path:
    """Keep a profile for the engines of this machine that open this bundle on these rows, with so many threads."""
    path = _place(bundle, rows, profile.drafter, threads)
    write_whole(path, json.dumps(asdict(profile), indent=1).encode())
    return path


def read_profile(bundle: Bundle, rows: Mapping[str, Device], drafter: str, threads: int | None = None) -> Profile | None:
    """What was measured here for this bundle on these rows; None if nothing was, or it cannot be read."""
    try:
        path = _place(bundle, rows, drafter, threads)
        found: Profile = build_record(Profile, json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError, RecursionError, SpecedgeError):
        return None
    return found


def _place(bundle: Bundle, rows: Mapping[str, Device], drafter: str, threads: int | None) -> Path:
    """The name is a hash of bundle, rows, drafter, threads, processor and onnxruntime's version."""
    names = [f"{role}={row.name}" for role, row in sorted(rows.items())]
    parts = (str(FORMAT), sha256(bundle.path / MANIFEST), *names, drafter, str(threads), cpu(), VERSION)
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    return cache_dir().absolute() / "profiles" / f"{name}.json"
