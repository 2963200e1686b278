"""Graphs compiled ahead of time for an NPU: contexts in the bundle, never used once anything they rest on changed."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from specedge.bundle import Bundle, build_record, sha256
from specedge.devices.device import Device, Soc
from specedge.errors import SpecedgeError, UsageError
from specedge.manifest import File, Graph
from specedge.progress import Progress
from specedge.runtime.probe import Provider, find_provider
from specedge.runtime.session import VERSION, Session, write_contexts

_SCHEMA = 1
_FOLDER, _RECORD = "compiled", "manifest.json"


@dataclass(frozen=True, slots=True)
class Key:
    """All that contexts rest on; `sources` are the hashes of the bundle's graphs and weight files."""

    schema: int
    device: str
    soc: str
    provider: str
    sdk: str
    onnxruntime: str
    options: dict[str, str]
    sources: dict[str, str]


@dataclass(frozen=True, slots=True)
class Compiled:
    """What contexts were made of and the files they are; `graphs` says which context a graph of the bundle became."""

    key: Key
    graphs: dict[str, str]
    files: dict[str, File]


def compile_bundle(bundle: Bundle, device: Device, soc: str | None, progress: Progress) -> Compiled:
    """Compile every graph of the bundle that a device runs, and keep the contexts in `compiled/DEVICE/SOC`.

    Graphs of a role share one file of weights. Contexts that are there and fresh stay as they are; the folder is replaced
    whole or not at all.

    Raises:
        SpecedgeError: A node is left to the CPU (all are listed, with reasons), or the provider is not here.
    """
    if device.plugin is None:
        raise UsageError(f"device {device.name!r}: runs its graphs as they are, there is nothing to compile")
    groups = _groups(bundle, device)
    if not groups:
        made = bundle.manifest
        raise SpecedgeError(
            f"{bundle.path}: made for {made.device}, its drafter for {made.draft_device}; convert with --device {device.name}"
        )
    provider = find_provider(device, soc or device.plugin.socs[0].name)
    assert provider.soc is not None
    place = _place(bundle, device, provider.soc)
    known = _read(place)
    if known and not why_stale(bundle, known, provider) and _is_whole(place, known):
        return known
    done, total = 0, sum(len(group) for group in groups.values())
    progress(f"compile for {provider.soc.name}", 0, total)
    with _replaced(place) as folder:
        graphs: dict[str, str] = {}
        for name, group in groups.items():
            (folder / name).mkdir()
            paths = {bundle.file(graph.file): folder / name / f"{Path(graph.file).stem}.onnx" for graph in group}
            for _ in write_contexts(paths, provider):
                done += 1
                progress(f"compile for {provider.soc.name}", done, total)
            graphs |= {graph.file: f"{name}/{Path(graph.file).stem}.onnx" for graph in group}
        files = {
            path.relative_to(folder).as_posix(): File(path.stat().st_size, sha256(path))
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        record = Compiled(_key(bundle, provider, groups), graphs, files)
        (folder / _RECORD).write_text(json.dumps(asdict(record), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return record


def read_compiled(bundle: Bundle, device: Device) -> dict[str, Compiled]:
    """What is compiled of a bundle for a device, by SoC."""
    socs = device.plugin.socs if device.plugin else ()
    found = {soc.name: _read(_place(bundle, device, soc)) for soc in socs}
    return {name: record for name, record in found.items() if record}


def why_stale(bundle: Bundle, record: Compiled, provider: Provider) -> str | None:
    """What contexts were made of that is another thing now."""
    was, now = asdict(record.key), asdict(_key(bundle, provider, _groups(bundle, provider.device)))
    if not provider.emulated:  # the device itself is no SoC by name, and compiles with other options
        for name in ("soc", "options"):
            del was[name], now[name]
    for name, value in now.items():
        if was[name] == value:
            continue
        if not isinstance(value, dict):
            return f"{name} was {was[name]}, is {value}"
        keys = value.keys() | was[name].keys()
        return f"{name} changed: {', '.join(sorted(key for key in keys if value.get(key) != was[name].get(key)))}"
    return None


def open_graph(bundle: Bundle, graph: Graph, device: Device, threads: int | None = None) -> Session:
    """A session over a graph: over its context where one is compiled for this machine, else over the graph itself.

    An emulator cannot load contexts, so there it is always the graph.

    Raises:
        SpecedgeError: There is a context, and it was made of something else than what is here.
    """
    if device.plugin is None:
        return Session(bundle.file(graph.file), graph, device, threads)
    provider = find_provider(device)
    if not provider.emulated:
        for soc, record in read_compiled(bundle, device).items():
            place = _place(bundle, device, device.plugin.soc(soc))
            if reason := why_stale(bundle, record, provider):
                raise SpecedgeError(
                    f"{place}: {reason}; spec-export compile {bundle.path} --device {device.name} --soc {soc}, or remove it"
                )
            return Session(place / record.graphs[graph.file], graph, device, threads, context=True)
    return Session(bundle.file(graph.file), graph, device, threads)


def _groups(bundle: Bundle, device: Device) -> dict[str, list[Graph]]:
    """The graphs that a device runs, by role: those of one share their weights."""
    made = bundle.manifest
    groups = {
        name: list(role.all_graphs)
        for name, role in made.roles.items()
        if (made.device if name == "target" else made.draft_device) == device.name
    }
    if made.draft_device == device.name:
        groups |= {name: [head.graph] for name, head in made.heads.items()}
    return groups


def _key(bundle: Bundle, provider: Provider, groups: dict[str, list[Graph]]) -> Key:
    made, plugin = bundle.manifest, provider.device.plugin
    assert plugin is not None
    names = {graph.file for group in groups.values() for graph in group}
    names |= {role.weight_file for role in made.roles.values()} | {head.weight_file for head in made.heads.values()}
    return Key(
        schema=_SCHEMA,
        device=provider.device.name,
        soc=provider.soc.name if provider.soc else "",
        provider=provider.version,
        sdk=provider.sdk,
        onnxruntime=VERSION,
        options=provider.options(plugin.compile_options),
        sources={name: made.files[name].sha256 for name in sorted(names)},
    )


def _place(bundle: Bundle, device: Device, soc: Soc) -> Path:
    return bundle.path / _FOLDER / device.name / soc.name


def _read(place: Path) -> Compiled | None:
    """The record of a folder; None where there is none that can be read."""
    try:
        record: Compiled = build_record(Compiled, json.loads((place / _RECORD).read_text(encoding="utf-8")), str(place))
    except (OSError, RecursionError, ValueError, SpecedgeError):
        return None
    return record


def _is_whole(place: Path, record: Compiled) -> bool:
    return all(
        (place / name).is_file() and (place / name).stat().st_size == file.bytes and sha256(place / name) == file.sha256
        for name, file in record.files.items()
    )


@contextlib.contextmanager
def _replaced(place: Path) -> Iterator[Path]:
    """A folder that takes the place of another when the block succeeds; of two at once, one stays."""
    partial = place.with_name(f".{place.name}.partial-{os.getpid()}")
    old = place.with_name(f".{place.name}.old-{os.getpid()}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        with contextlib.suppress(FileNotFoundError):
            place.rename(old)
        try:
            partial.rename(place)
        except OSError:
            if not place.exists():
                raise  # else another process was quicker
    except OSError as error:
        raise SpecedgeError(f"{place}: was not written ({error}); nothing is left behind") from error
    finally:
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)
