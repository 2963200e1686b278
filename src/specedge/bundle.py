"""The bundle's manifest: typed records, their JSON form, and the checks made before anything is opened."""

import dataclasses
import hashlib
import json
import os
import types
import typing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from specedge.errors import SpecedgeError

SCHEMA = 4
MANIFEST = "manifest.json"
VOCABULARY = "vocabulary"
"""The weight int32 [Vd] that says which ids of the target a head's own are, ascending; without it they are the same."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One graph input or output; a symbolic dimension is a name."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """One step graph; `width` is None where the width is symbolic."""

    file: str
    width: int | None
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    ops: dict[str, int]


@dataclass(frozen=True, slots=True)
class Extent:
    """Where an array lies in the weight file."""

    offset: int
    bytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """One checkpoint tensor as stored: its own shape, and parts "values", or "codes", "scales" and what zero needs.

    That is nothing, "zero_points", or "minima" with the "offsets" a graph makes up for them with. `source` is the type it
    had in the checkpoint; `exact` says that no value changed.
    """

    name: str
    scheme: str
    shape: tuple[int, ...]
    parts: dict[str, Extent]
    source: str
    exact: bool


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions, made by the host: angle = position * inv_freq, cos and sin times `scaling`."""

    inv_freq: tuple[float, ...]
    scaling: float


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of each of the 2 x `layers` buffers: [1, heads, slots, head_dim], the last two with what the form pads."""

    layers: int
    heads: int
    slots: int
    head_dim: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Unrolled:
    """A chain or tree that a drafter makes in one call: the paths of its nodes, and the graph (docs/contract.md)."""

    paths: tuple[tuple[int, ...], ...]
    graph: Graph


@dataclass(frozen=True, slots=True)
class Role:
    """A model of the bundle: its graphs and what the host must know to feed them.

    `taps` are what its graphs give (a target) or read (an EAGLE head) besides: the residual streams entering these blocks, -1
    for what feeds the LM head. An EAGLE head reads the text with the graphs `first` and its own drafts with `graphs`.
    """

    model_type: str
    form: str
    context: int
    chunk: int
    vocab_size: int
    mask_value: float
    rope: Rope
    kv: KVLayout
    taps: tuple[int, ...]
    weight_file: str
    weights: tuple[Weight, ...]
    graphs: tuple[Graph, ...]
    first: tuple[Graph, ...]
    unrolled: tuple[Unrolled, ...]

    @property
    def widest(self) -> int:
        """Most tokens one step takes: the widest graph, or the prefill chunk where the width is symbolic."""
        return max(self.chunk if graph.width is None else graph.width for graph in self.graphs)

    @property
    def all_graphs(self) -> tuple[Graph, ...]:
        return (*self.graphs, *self.first, *(unrolled.graph for unrolled in self.unrolled))

    @property
    def quantised(self) -> bool:
        return _quantised(self.weights)

    @property
    def stored_bytes(self) -> int:
        """Bytes a step reads: every stored tensor once."""
        return sum(extent.bytes for weight in self.weights for extent in weight.parts.values())


@dataclass(frozen=True, slots=True)
class Head:
    """A draft head that reads the target's `hidden` output: `depth` tokens far at most, of `vocab_size` ids.

    Its graph lies at the top of the bundle, beside the folders of the weights it reads: its own and the target's.
    """

    kind: str
    depth: int
    hidden: int
    vocab_size: int
    weight_file: str
    weights: tuple[Weight, ...]
    graph: Graph

    @property
    def quantised(self) -> bool:
        return _quantised(self.weights)

    @property
    def stored_bytes(self) -> int:
        """Bytes of its own that a call reads."""
        return sum(extent.bytes for weight in self.weights for extent in weight.parts.values())


@dataclass(frozen=True, slots=True)
class File:
    """Size and SHA-256 of a file that convert wrote."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Source:
    """Where a role came from."""

    name: str
    license: str | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole contract of a bundle. `allowed_ids` is the number of ids the tokenizer knows; rows beyond are masked.

    `tree` lists the paths of the draft tree (docs/contract.md), none for chains.
    """

    schema: int
    tools: dict[str, str]
    sources: dict[str, Source]
    device: str
    widths: tuple[int, ...]
    context: int
    allowed_ids: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    drafters: tuple[str, ...]
    tree: tuple[tuple[int, ...], ...]
    roles: dict[str, Role]
    heads: dict[str, Head]
    files: dict[str, File]

    def to_json(self) -> str:
        """Deterministic text: same records, same bytes."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A folder and its manifest."""

    path: Path
    manifest: Manifest

    def file(self, name: str) -> Path:
        """The path of one of the bundle's files; names and links that lead outside are refused."""
        return _resolve(self.path, name)

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
    bundle = Bundle(folder, _build(Manifest, data, str(manifest_path)))
    _check_values(bundle.manifest, str(manifest_path))
    for name, record in bundle.manifest.files.items():
        file = bundle.file(name)
        if not os.path.isfile(file):  # is_file() raises for a name too long
            raise SpecedgeError(f"{file}: missing, though the manifest lists it; copy the bundle whole or convert again")
        if file.stat().st_size != record.bytes:
            raise SpecedgeError(f"{file}: {file.stat().st_size} bytes, expected {record.bytes}; copy the bundle again")
    return bundle


def changed_files(bundle: Bundle) -> list[str]:
    """Names of the files whose SHA-256 is not the manifest's."""
    return [name for name, record in bundle.manifest.files.items() if sha256(bundle.file(name)) != record.sha256]


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_values(manifest: Manifest, where: str) -> None:
    """Numbers and lists that the runtime divides by, indexes or relies on."""
    target = manifest.roles.get("target")
    if target is None or not target.graphs:
        raise SpecedgeError(f"{where}: roles: no target with graphs among {', '.join(manifest.roles)}; convert the model again")
    wrong = {
        "drafters": not manifest.drafters
        or ("draft" in manifest.drafters and "draft" not in manifest.roles)
        or ("medusa" in manifest.drafters and "medusa" not in manifest.heads)
        or ("eagle" in manifest.drafters and "eagle" not in manifest.roles),
        "widths": list(manifest.widths) != sorted({1, *manifest.widths}) or min(manifest.widths) < 1,
        "tree": not is_tree(manifest.tree) or len(manifest.tree) >= target.widest,
        "allowed_ids (roles.target.vocab_size)": not 1 <= manifest.allowed_ids <= target.vocab_size,
        "tree (allowed_ids)": highest_rank(manifest.tree) >= manifest.allowed_ids,
    }
    for name, role in manifest.roles.items():
        wrong[f"roles.{name}.context"] = role.context != manifest.context or role.context > role.kv.slots
        wrong[f"roles.{name}.chunk"] = role.chunk < 1
        end = max((part.offset + part.bytes for weight in role.weights for part in weight.parts.values()), default=0)
        wrong[f"roles.{name}.weights ({role.weight_file})"] = (
            role.weight_file not in manifest.files or end > manifest.files[role.weight_file].bytes
        )
        wrong[f"roles.{name}.graphs"] = not all(graph.file in manifest.files for graph in role.all_graphs)
    for name, head in manifest.heads.items():
        hidden = [spec.shape[-1] for graph in target.graphs for spec in graph.outputs if spec.name == "hidden"]
        wrong[f"heads.{name}.hidden"] = not hidden or set(hidden) != {head.hidden}
        outputs = [spec.shape for spec in head.graph.outputs]
        wrong[f"heads.{name}.depth"] = head.depth < 1 or outputs != [(head.depth, head.vocab_size)]
        wrong[f"heads.{name}.graph"] = head.graph.file not in manifest.files or head.weight_file not in manifest.files
    for key, is_wrong in wrong.items():
        if is_wrong:
            raise SpecedgeError(f"{where}: {key} contradicts the rest of the manifest; convert the model again")


def _quantised(weights: tuple[Weight, ...]) -> bool:
    return any("codes" in weight.parts for weight in weights)


def is_tree(paths: tuple[tuple[int, ...], ...]) -> bool:
    """Whether these are different paths of ranks, each one's beginning among them."""
    known = {(), *paths}
    return len(known) == len(paths) + 1 and all(path[:-1] in known and min(path) >= 0 for path in paths if path)


def highest_rank(paths: tuple[tuple[int, ...], ...]) -> int:
    """The last choice that any of these paths takes: so many ids and one a model must have."""
    return max((rank for path in paths for rank in path), default=0)


def _resolve(folder: Path, name: str) -> Path:
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


def _build(kind: Any, data: Any, where: str) -> Any:
    """JSON value -> the annotated type, or an error naming the key; unknown keys are ignored."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(data, dict):
        hints = typing.get_type_hints(kind)
        missing = [key for key in hints if key not in data]
        if missing:
            raise SpecedgeError(f"{where}: key {missing[0]!r} is missing; convert the model again")
        return kind(**{key: _build(hint, data[key], f"{where}: {key}") for key, hint in hints.items()})  # type: ignore[operator]
    if origin is tuple and isinstance(data, list):
        return tuple(_build(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(data))
    if origin is dict and isinstance(data, dict):
        return {key: _build(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    if origin is types.UnionType and type(data) in arguments:
        return data
    if kind is float and type(data) in (int, float):
        return float(data)
    if type(data) is kind:
        return data
    raise SpecedgeError(f"{where}: found {data!r:.60}, expected {getattr(kind, '__name__', kind)}; convert the model again")
