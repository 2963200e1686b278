"""What a manifest says of one thing against what it says of another: the runtime divides by it, indexes and relies on it."""

from collections.abc import Collection, Iterator

from specedge.errors import SpecedgeError
from specedge.manifest import VOCABULARY, Graph, Head, Manifest, Role, Weight, highest_rank, is_tree

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
        yield f"roles.{name}.context", role.context == manifest.context and role.context <= role.kv.slots
        yield f"roles.{name}.chunk", role.chunk >= 1
        yield f"roles.{name}.weights ({role.weight_file})", _lies_in(role.weights, role.weight_file, manifest)
        yield f"roles.{name}.graphs", all(graph.file in manifest.files for graph in role.all_graphs)
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
                ),
            )
    features = {_outputs(graph).get("hidden") or _outputs(graph).get("features") for graph in target.graphs}
    for name, head in manifest.heads.items():
        yield from _head_claims(f"heads.{name}", head, features, manifest)
    if "eagle" in manifest.roles:
        yield from _eagle_claims(manifest.roles["eagle"], target, features)


def _head_claims(key: str, head: Head, features: set[Spec | None], manifest: Manifest) -> Iterator[tuple[str, bool]]:
    dtypes = {spec[0] for spec in features if spec}
    yield f"{key}.kind", head.kind == "medusa"
    yield f"{key}.hidden", {spec and spec[1][-1] for spec in features} == {head.hidden}
    yield f"{key}.graph", head.graph.file in manifest.files and {spec.name for spec in head.graph.inputs} == {"hidden"}
    yield f"{key}.graph (hidden)", _inputs(head.graph)["hidden"] in {(dtype, (1, 1, head.hidden)) for dtype in dtypes}
    shape = _outputs(head.graph).get("head_logits", ("", ()))[1]
    yield f"{key}.depth", head.depth >= 1 and shape[:1] == (head.depth,)
    yield f"{key}.vocab_size", shape[1:] == (head.vocab_size,) and head.vocab_size >= manifest.allowed_ids
    yield f"{key}.weights ({head.weight_file})", _lies_in(head.weights, head.weight_file, manifest)
    yield f"tree ({key}.depth)", max(map(len, manifest.tree), default=0) <= head.depth


def _eagle_claims(eagle: Role, target: Role, features: set[Spec | None]) -> Iterator[tuple[str, bool]]:
    given = {spec and spec[1][-1] for spec in features}
    yield "roles.eagle.taps", bool(eagle.taps) and eagle.taps == target.taps
    yield "roles.eagle.form", eagle.form == "delta"
    for graph in (*eagle.first, *(unrolled.graph for unrolled in eagle.unrolled)):
        read = _inputs(graph).get("hidden" if eagle.taps == (-1,) else "features", ("", ()))
        yield f"roles.eagle.first ({graph.file})", {read[1][-1] if read[1] else None} == given and _has_cache(graph, eagle)
    for kind, graphs in (("first", eagle.first), ("graphs", eagle.graphs)):
        fits = all(_outputs(graph).get("logits", ("", ()))[1][-1:] == (eagle.vocab_size,) for graph in graphs)
        yield f"roles.eagle.{kind}", bool(graphs) and fits and all(_has_cache(graph, eagle) for graph in graphs)
        widths = {graph.width for graph in graphs}
        yield f"roles.eagle.{kind} (widths)", widths == {None} or None not in widths
    own = next((weight.shape for weight in eagle.weights if weight.name == VOCABULARY), None)
    yield "roles.eagle.vocab_size", (own or (target.vocab_size,)) == (eagle.vocab_size,)


def _has_cache(graph: Graph, role: Role) -> bool:
    """Whether a graph reads the KV buffers of its role."""
    kv = role.kv
    names = {f"past_{kind}_{layer}" for layer in range(kv.layers) for kind in ("key", "value")}
    found = {name: spec for name, spec in _inputs(graph).items() if name.startswith("past_")}
    return found == dict.fromkeys(names, (kv.dtype, (1, kv.heads, kv.slots, kv.head_dim)))


def _lies_in(weights: tuple[Weight, ...], file: str, manifest: Manifest) -> bool:
    end = max((part.offset + part.bytes for weight in weights for part in weight.parts.values()), default=0)
    return file in manifest.files and end <= manifest.files[file].bytes


def _inputs(graph: Graph) -> dict[str, Spec]:
    return {spec.name: (spec.dtype, spec.shape) for spec in graph.inputs}


def _outputs(graph: Graph) -> dict[str, Spec]:
    return {spec.name: (spec.dtype, spec.shape) for spec in graph.outputs}
