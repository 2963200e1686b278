"""The records of a bundle's manifest, and their JSON form."""

import dataclasses
import json
from dataclasses import dataclass

SCHEMA = 8
PIECED = ("logits", "head_logits")
"""Outputs that may come in pieces of their last dimension, `logits_0`, `logits_1` ..."""
EMBEDDING = "embed_tokens.weight"
"""The weight [V, H] whose rows graphs with `input_embeds` are fed with: a role's own, else the target's."""
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
    """One step graph: a file, or a `function` of a Core ML package; `width` is None where the width is symbolic."""

    file: str
    width: int | None
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    ops: dict[str, int]
    function: str | None

    def output(self, name: str) -> TensorSpec | None:
        """An output by its name, pieces of it put together."""
        pieces = self.pieces(name)
        if not pieces or len(pieces) == 1:
            return pieces[0] if pieces else None
        columns = [piece.shape[-1] for piece in pieces if isinstance(piece.shape[-1], int)]
        alike = {(piece.dtype, piece.shape[:-1]) for piece in pieces}
        if len(columns) < len(pieces) or len(alike) > 1:
            return None
        return TensorSpec(name, pieces[0].dtype, (*pieces[0].shape[:-1], sum(columns)))

    def pieces(self, name: str) -> list[TensorSpec]:
        """The outputs that hold `name`: itself, or its pieces in order."""
        found = {spec.name: spec for spec in self.outputs}
        if name in found:
            return [found[name]]
        count = sum(known.startswith(f"{name}_") for known in found) if name in PIECED else 0
        pieces = [found.get(f"{name}_{index}") for index in range(count)]
        return [piece for piece in pieces if piece] if all(pieces) else []


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
    had in the checkpoint, `method` how it came onto its grid: "kept", "rtn", "clip", "gptq", or "" for floats; `exact` says
    that no value changed. `file` holds the parts; a package may hold them in `pieces`, some rows after the other.
    """

    name: str
    scheme: str
    shape: tuple[int, ...]
    parts: dict[str, Extent]
    source: str
    method: str
    exact: bool
    file: str
    pieces: tuple[dict[str, Extent], ...] = ()

    @property
    def stored_bytes(self) -> int:
        return sum(extent.bytes for parts in (self.parts, *self.pieces) for extent in parts.values())


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
    for what feeds the LM head. With a `rotation`, which is its seed, the weights of the layers are those of the rotated model;
    what the graphs give is not rotated. An EAGLE head reads the text with the graphs `first` and its own drafts with `graphs`.
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
    rotation: int | None
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
    def weight_files(self) -> tuple[str, ...]:
        """The files its own weights lie in."""
        return weight_files(self.weights)

    @property
    def quantised(self) -> bool:
        return _quantised(self.weights)

    @property
    def stored_bytes(self) -> int:
        """Bytes a step reads: every stored tensor once."""
        return sum(weight.stored_bytes for weight in self.weights)


@dataclass(frozen=True, slots=True)
class Head:
    """A draft head that reads the target's `hidden` output: `depth` tokens far at most, of `vocab_size` ids.

    Its graph lies at the top of the bundle, beside the folders of the weights it reads: its own and the target's.
    """

    kind: str
    depth: int
    hidden: int
    vocab_size: int
    weights: tuple[Weight, ...]
    graph: Graph

    @property
    def quantised(self) -> bool:
        return _quantised(self.weights)

    @property
    def stored_bytes(self) -> int:
        """Bytes of its own that a call reads."""
        return sum(weight.stored_bytes for weight in self.weights)


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
class SelfCheck:
    """A text, and what a role's graphs make of it on a device that is trusted: `logits[row][column]` of these `columns`.

    It is read in steps of every width that the graphs have, narrow ones first, one behind the other; one for which the context
    has no room left starts from an empty cache. Rows are the first and the last of each. A row differs by the norm of its
    difference over that of the expected row about its mean, on a sound device by `tolerance` at most.
    """

    ids: tuple[int, ...]
    columns: tuple[int, ...]
    logits: tuple[tuple[float, ...], ...]
    tolerance: float


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole contract of a bundle; target and drafter were made for the rows `device` and `draft_device`.

    `allowed_ids` is the number of ids the tokenizer knows; rows beyond are masked. `tree` lists the paths of
    the draft tree (docs/contract.md), none for chains. `checks` are of the roles that were made for another provider than the
    CPU's.
    """

    schema: int
    tools: dict[str, str]
    sources: dict[str, Source]
    device: str
    draft_device: str
    widths: tuple[int, ...]
    context: int
    allowed_ids: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    drafters: tuple[str, ...]
    tree: tuple[tuple[int, ...], ...]
    roles: dict[str, Role]
    heads: dict[str, Head]
    checks: dict[str, SelfCheck]
    files: dict[str, File]

    def to_json(self) -> str:
        """Deterministic text: same records, same bytes."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"


def weight_files(weights: tuple[Weight, ...]) -> tuple[str, ...]:
    """The files that these weights lie in, each once."""
    return tuple(dict.fromkeys(weight.file for weight in weights))


def _quantised(weights: tuple[Weight, ...]) -> bool:
    return any("codes" in parts for weight in weights for parts in (weight.parts, *weight.pieces))


def is_tree(paths: tuple[tuple[int, ...], ...]) -> bool:
    """Whether these are different paths of ranks, each one's beginning among them."""
    known = {(), *paths}
    return len(known) == len(paths) + 1 and all(path[:-1] in known and min(path) >= 0 for path in paths if path)


def highest_rank(paths: tuple[tuple[int, ...], ...]) -> int:
    """The last choice that any of these paths takes: so many ids and one a model must have."""
    return max((rank for path in paths for rank in path), default=0)
