"""What a manifest says of one thing against what it says of another: the runtime divides by it, indexes and relies on it."""

import math
from collections.abc import Collection, Iterator

from specedge import mlpackage
from specedge.errors import SpecedgeError
from specedge.manifest import VOCABULARY, Graph, Head, Manifest, Role, Weight, highest_rank, is_tree

_WIDTHS = {"float32": 4, "float16": 2, "uint8": 1, "int8": 1, "int32": 4}  # bytes of an element of a weight
_LARGEST = 1e6  # of a logit
Spec = tuple[str, tuple[int | str, ...]]  # dtype, shape


def check_values(manifest: Manifest, where: str) -> None:
    """Refuse a manifest that contradicts itself.

    Raises:
        SpecedgeError: It does; the message names the key.
    """
    target = manifest.roles.get("target")
    if target is None or not target.graphs:
        raise SpecedgeError(f"{where}: roles: no target with graphs among {', '.join(manifest.roles)}; convert the model again")
    for key, is_right in _claims(manifest, target):
        if not is_right:
            raise SpecedgeError(f"{where}: {key} contradicts the rest of the manifest; convert the model again")


def _claims(manifest: Manifest, target: Role) -> Iterator[tuple[str, bool]]:
    """Keys, and whether what they say fits the rest."""
    places: dict[str, Collection[str]] = {"draft": manifest.roles, "eagle": manifest.roles, "medusa": manifest.heads}
    yield "drafters", bool(manifest.drafters) and all(name in places.get(name, (name,)) for name in manifest.drafters)
    yield "widths", list(manifest.widths) == sorted({1, *manifest.widths}) and min(manifest.widths) >= 1
    yield "tree", is_tree(manifest.tree) and len(manifest.tree) < target.widest
    yield "allowed_ids (roles.target.vocab_size)", 1 <= manifest.allowed_ids <= target.vocab_size
    yield "tree (allowed_ids)", highest_rank(manifest.tree) < manifest.allowed_ids
    for name, role in manifest.roles.items():
        yield (
            f"roles.{name}.context",
            role.context <= role.kv.slots
            and (role.context == manifest.context or (name == "draft" and 1 <= role.context < manifest.context)),
        )
        yield f"roles.{name}.chunk", 1 <= role.chunk <= role.context
        yield f"roles.{name}.mask_value", -math.inf < role.mask_value < 0
        yield f"roles.{name}.kv.layers", all(_past_inputs(graph) == 2 * role.kv.layers for graph in role.all_graphs)
        yield from _vocabulary_claims(f"roles.{name}", role.weights, role.vocab_size, target)
        for weight in role.weights:
            yield f"roles.{name}.weights ({weight.name} in {weight.file})", _lies_in(weight, manifest)
        yield f"roles.{name}.rotation", (role.rotation is None) == (not any(_of_rotation(weight) for weight in role.weights))
        yield f"roles.{name}.graphs", all(_is_there(graph, manifest) for graph in role.all_graphs)
        for unrolled in role.unrolled:
            fed = len({path[:-1] for path in unrolled.paths})  # the root and the nodes with children
            inputs, outputs = _inputs(unrolled.graph), _outputs(unrolled.graph)
            yield (
                f"roles.{name}.unrolled ({unrolled.graph.file})",
                (
                    is_tree(unrolled.paths)
                    and bool(unrolled.paths)
                    and inputs.get("noise") == ("float32", (fed, role.vocab_size))
                    and outputs.get("draft_ids") == ("int32", (1, len(unrolled.paths)))
                    and outputs.get("draft_logits") == (role.kv.dtype, (fed, role.vocab_size))
                    and _has_cache(unrolled.graph, role)
                    and _is_fed(unrolled.graph, role)
                ),
            )
    for name, check in manifest.checks.items():
        columns = list(check.columns)
        allowed = min(manifest.allowed_ids, manifest.roles[name].vocab_size) if name in manifest.roles else 0
        yield (
            f"checks.{name}",
            name in ("target", "draft")
            and bool(check.ids)
            and columns == sorted({*columns})
            and all(0 <= one < allowed for one in (*check.ids, *columns))
            and all(len(row) == len(columns) > 1 and all(abs(value) < _LARGEST for value in row) for row in check.logits)
            and 0 < check.tolerance < 1,
        )
    features = {_outputs(graph).get("hidden") or _outputs(graph).get("features") for graph in target.graphs}
    yield "roles.target.graphs (hidden)", all(spec is None or len(spec[1]) == 3 for spec in features)
    for name, head in manifest.heads.items():
        yield from _head_claims(f"heads.{name}", head, features, manifest)
    if "eagle" in manifest.roles:
        yield from _eagle_claims(manifest.roles["eagle"], target, features)


def _head_claims(key: str, head: Head, features: set[Spec | None], manifest: Manifest) -> Iterator[tuple[str, bool]]:
    dtypes = {spec[0] for spec in features if spec}
    yield f"{key}.kind", head.kind == "medusa"
    yield f"{key}.hidden", {spec and spec[1][-1] for spec in features} == {head.hidden}
    yield f"{key}.graph", _is_there(head.graph, manifest) and {spec.name for spec in head.graph.inputs} == {"hidden"}
    yield f"{key}.graph (hidden)", _inputs(head.graph)["hidden"] in {(dtype, (1, 1, head.hidden)) for dtype in dtypes}
    given = head.graph.output("head_logits")
    shape = given.shape if given else ()
    yield f"{key}.depth", head.depth >= 1 and shape[:1] == (head.depth,)
    known = head.vocab_size >= manifest.allowed_ids or _mapped(head.weights) is not None
    yield f"{key}.vocab_size", shape[1:] == (head.vocab_size,) and known
    yield from _vocabulary_claims(key, head.weights, head.vocab_size, manifest.roles["target"])
    for weight in head.weights:
        yield f"{key}.weights ({weight.name} in {weight.file})", _lies_in(weight, manifest)
    yield f"tree ({key}.depth)", max(map(len, manifest.tree), default=0) <= head.depth


def _eagle_claims(eagle: Role, target: Role, features: set[Spec | None]) -> Iterator[tuple[str, bool]]:
    given = {spec and spec[1][-1] for spec in features}
    yield "roles.eagle.taps", bool(eagle.taps) and eagle.taps == target.taps
    yield "roles.eagle.form", eagle.form == "delta"
    for graph in (*eagle.first, *(unrolled.graph for unrolled in eagle.unrolled)):
        read = _inputs(graph).get("hidden" if eagle.taps == (-1,) else "features", ("", ()))
        yield f"roles.eagle.first ({graph.file})", {read[1][-1] if read[1] else None} == given and _has_cache(graph, eagle)
    for kind, graphs in (("first", eagle.first), ("graphs", eagle.graphs)):
        logits = [graph.output("logits") for graph in graphs]
        fits = all(spec is not None and spec.shape[-1] == eagle.vocab_size for spec in logits)
        yield (
            f"roles.eagle.{kind}",
            bool(graphs) and fits and all(_has_cache(graph, eagle) and _is_fed(graph, eagle) for graph in graphs),
        )
        widths = {graph.width for graph in graphs}
        yield f"roles.eagle.{kind} (widths)", widths == {None} or None not in widths
    widest = [graph.width for graph in eagle.first if graph.width is not None]
    yield "roles.eagle.chunk (widths)", not widest or eagle.chunk <= max(widest)
    yield "roles.eagle.vocab_size", _mapped(eagle.weights) is not None or eagle.vocab_size == target.vocab_size


def _vocabulary_claims(key: str, weights: tuple[Weight, ...], vocab_size: int, target: Role) -> Iterator[tuple[str, bool]]:
    """Of a drafter's: a stored map holds as many ids as the drafter has, no more than the target."""
    own = _mapped(weights)
    values = own and own.parts.get("values")
    ids = values and (values.bytes, values.dtype, values.shape)
    expected = (4 * vocab_size, "int32", (vocab_size,))
    yield f"{key}.vocab_size", own is None or (own.shape == (vocab_size,) and vocab_size <= target.vocab_size)
    yield f"{key}.weights (vocabulary)", own is None or ids == expected


def _mapped(weights: tuple[Weight, ...]) -> Weight | None:
    return next((weight for weight in weights if weight.name == VOCABULARY), None)


def _is_there(graph: Graph, manifest: Manifest) -> bool:
    """Whether its file is one of the bundle's; a package is a folder of files."""
    file = graph.file if graph.function is None else f"{graph.file}/{mlpackage.MANIFEST}"
    return file in manifest.files


def _has_cache(graph: Graph, role: Role) -> bool:
    """Whether a graph reads the KV buffers of its role."""
    kv = role.kv
    names = {f"past_{kind}_{layer}" for layer in range(kv.layers) for kind in ("key", "value")}
    found = {name: spec for name, spec in _inputs(graph).items() if name.startswith("past_")}
    return found == dict.fromkeys(names, (kv.dtype, (1, kv.heads, kv.slots, kv.head_dim)))


def _is_fed(graph: Graph, role: Role) -> bool:
    """Whether a graph takes as many rows as its width says, and rotary tables of its role's size."""
    inputs = _inputs(graph)
    text = inputs.get("input_ids") or inputs.get("input_embeds") or ("", ())
    cos = inputs.get("rope_cos", ("", ()))[1]
    rows = [*text[1]][1:2]
    return cos[-1:] == (len(role.rope.inv_freq),) and (rows == [graph.width] or (graph.width is None and rows == ["T"]))


def _past_inputs(graph: Graph) -> int:
    return sum(spec.name.startswith("past_") for spec in graph.inputs)


def _of_rotation(weight: Weight) -> bool:
    return weight.name.startswith("rotation.")


def _lies_in(weight: Weight, manifest: Manifest) -> bool:
    size = manifest.files[weight.file].bytes if weight.file in manifest.files else -1
    return size >= 0 and all(
        part.offset >= 0 <= part.bytes <= size - part.offset
        and _WIDTHS.get(part.dtype, -1) * math.prod(part.shape) == part.bytes
        and min(part.shape, default=1) > 0
        for parts in (weight.parts, *weight.pieces)
        for part in parts.values()
    )


def _inputs(graph: Graph) -> dict[str, Spec]:
    return {spec.name: (spec.dtype, spec.shape) for spec in graph.inputs}


def _outputs(graph: Graph) -> dict[str, Spec]:
    return {spec.name: (spec.dtype, spec.shape) for spec in graph.outputs}
