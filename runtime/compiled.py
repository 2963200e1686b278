"""Graphs compiled ahead of time for an NPU: contexts in the bundle, never used once anything they rest on changed."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from specedge.bundle import Bundle, build_record, changed_files, resolve, sha256
from specedge.devices.device import Device, Soc
from specedge.errors import SpecedgeError, UsageError
from specedge.folders import new_folder
from specedge.manifest import File, Graph
from specedge.progress import Progress
from specedge.runtime.binding import OpenGraph
from specedge.runtime.compiler import compile_graphs
from specedge.runtime.coreml import PackageFunction
from specedge.runtime.probe import Provider, find_provider
from specedge.runtime.session import VERSION, Session

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
        SpecedgeError: A node is left to the CPU (all are listed, with reasons), the provider is not here, a file of the
            bundle is not what its manifest says.
    """
    if device.plugin is None or not device.plugin.socs:
        raise UsageError(f"device {device.name!r}: runs its graphs as they are, there is nothing to compile")
    groups = _groups(bundle, device)
    if not groups:
        made = bundle.manifest
        raise SpecedgeError(
            f"{bundle.path}: made for {made.device}, its drafter for {made.draft_device}; convert with --device {device.name}"
        )
    if soc is None and not find_provider(device).emulated:
        raise UsageError(f"soc: say which chip this is; one of {', '.join(one.name for one in device.plugin.socs)}")
    provider = find_provider(device, soc or device.plugin.socs[0].name)
    assert provider.soc is not None
    if changed := changed_files(bundle):
        raise SpecedgeError(f"{bundle.file(changed[0])}: is not what the manifest says; copy the bundle again or convert anew")
    place = _place(bundle, device, provider.soc)
    if known := _fresh(bundle, place, provider):
        return known
    try:
        with new_folder(place, force=True) as folder:
            record = _compile(bundle, groups, provider, folder, progress)
    except SpecedgeError:
        if known := _fresh(bundle, place, provider):  # another process was quicker
            return known
        raise
    return record


def _compile(bundle: Bundle, groups: dict[str, list[Graph]], provider: Provider, folder: Path, progress: Progress) -> Compiled:
    """Fill a folder."""
    assert provider.soc is not None
    task, done, total = f"compile for {provider.soc.name}", 0, sum(len(group) for group in groups.values())
    progress(task, 0, total)
    graphs: dict[str, str] = {}
    for name, group in groups.items():
        (folder / name).mkdir()
        contexts = {graph.file: f"{name}/{Path(graph.file).stem}.onnx" for graph in group}
        paths = {bundle.file(graph).resolve(): folder / context for graph, context in contexts.items()}
        for _ in compile_graphs(paths, provider.device, provider.soc.name):
            done += 1
            progress(task, done, total)
        graphs |= contexts
    files = {
        path.relative_to(folder).as_posix(): File(path.stat().st_size, sha256(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    record = Compiled(_key(bundle, provider, groups), graphs, files)
    (folder / _RECORD).write_text(json.dumps(asdict(record), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return record


def _fresh(bundle: Bundle, place: Path, provider: Provider) -> Compiled | None:
    """Contexts that need not be made anew."""
    try:
        record = _read(place)
    except SpecedgeError:
        return None
    if record is None or why_stale(bundle, record, provider):
        return None
    whole = all(
        (place / name).is_file() and (place / name).stat().st_size == file.bytes and sha256(place / name) == file.sha256
        for name, file in record.files.items()
    )
    return record if whole else None


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


def works_alone(bundle: Bundle, graph: Graph) -> bool:
    """Whether a graph is the one that does nearly all the work: of several that take turns none is."""
    target = bundle.role("target")
    return target.graphs == (graph,)


def open_graph(bundle: Bundle, graph: Graph, device: Device, threads: int | None = None) -> OpenGraph:
    """A session over a graph: over its context where one is compiled for this machine, else over the graph itself.

    Functions of packages are Core ML's, or the evaluator's.

    An emulator cannot load contexts, so there it is always the graph.

    Raises:
        SpecedgeError: There is a context, and it was made of something else than what is here, or is damaged; or there are
            contexts for several chips, and nothing says which this one is. Or the bundle holds another kind of graph than the
            device runs.
    """
    if (device.package is None) != (graph.function is None):
        held = "ONNX graphs" if graph.function is None else "Core ML packages"
        raise SpecedgeError(f"device {device.name!r}: {bundle.path} holds {held}; convert with --device {device.name}")
    made_for = bundle.manifest.draft_device if graph.file.startswith("draft/") else bundle.manifest.device
    if device.package and not device.blocks and device.name != made_for:
        raise SpecedgeError(f"device {device.name!r}: {graph.file} was made for {made_for}; convert for this device")
    if device.package:
        return PackageFunction(bundle.file(graph.file), graph, device)
    alone = works_alone(bundle, graph)
    if device.plugin is None or (provider := find_provider(device)).emulated:
        return Session(bundle.file(graph.file), graph, device, threads, alone=alone)
    found = read_compiled(bundle, device)
    if len(found) > 1:
        raise SpecedgeError(f"{bundle.path / _FOLDER / device.name}: for {', '.join(found)}; leave the one of this device")
    for soc, record in found.items():
        if graph.file in record.graphs:
            place = _place(bundle, device, device.plugin.soc(soc))
            if reason := why_stale(bundle, record, provider) or _damage(place, record):
                remedy = f"spec-export compile {bundle.path} --device {device.name} --soc {soc}"
                raise SpecedgeError(f"{place}: {reason}; {remedy}, or remove it")
            return Session(resolve(place, record.graphs[graph.file]), graph, device, threads, context=True, alone=alone)
    return Session(bundle.file(graph.file), graph, device, threads, alone=alone)


def _damage(place: Path, record: Compiled) -> str | None:
    """A file that is not there whole."""
    for name, file in record.files.items():
        path = resolve(place, name)
        if not path.is_file() or path.stat().st_size != file.bytes:
            return f"{name} is not whole"
    return None


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
    names |= {weight.file for role in made.roles.values() for weight in role.weights}
    names |= {weight.file for head in made.heads.values() for weight in head.weights}
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
    """The record of a folder; None where there is none.

    Raises:
        SpecedgeError: It cannot be read.
    """
    if not (place / _RECORD).exists():
        return None
    try:
        data = json.loads((place / _RECORD).read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise SpecedgeError(f"{place / _RECORD}: cannot be read ({error}); remove {place} or compile again") from error
    record: Compiled = build_record(Compiled, data, str(place / _RECORD))
    return record
