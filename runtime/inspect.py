"""What a bundle holds, from its manifest alone."""

import math
from collections import Counter
from dataclasses import asdict, dataclass

from specedge.bundle import Bundle
from specedge.manifest import VOCABULARY, Weight
from specedge.reports import read_report


def inspect(bundle: Bundle) -> dict[str, object]:
    """Device, widths, context, sizes and graphs, as the JSON contract names them (docs/contract.md)."""
    manifest = bundle.manifest
    graphs = [
        {"role": role, "width": graph.width, "file": graph.file, "function": graph.function, "ops": graph.ops}
        for role, record in manifest.roles.items()
        for graph in record.all_graphs
    ]
    graphs += [
        {
            "role": name,
            "width": head.graph.width,
            "file": head.graph.file,
            "function": head.graph.function,
            "ops": head.graph.ops,
        }
        for name, head in manifest.heads.items()
    ]
    return {
        "device": manifest.device,
        "widths": list(manifest.widths),
        "context": manifest.context,
        "bytes": sum(file.bytes for file in manifest.files.values()),
        "graphs": graphs,
        "weights": weight_bytes(bundle),
        "tensors": [asdict(group) for group in tensor_groups(bundle)],
        "drafters": list(manifest.drafters),
        "sources": {role: source.name for role, source in manifest.sources.items()},
        "licenses": {role: source.license for role, source in manifest.sources.items()},
        "eos_ids": list(manifest.eos_ids),
        "validated": read_report(bundle, "validate.json"),
    }


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of a role that serve alike and are stored alike; `exact` if no value of the checkpoint changed."""

    role: str
    part: str  # of the model: embedding, head, attention, mlp, norms
    source: str
    scheme: str
    method: str  # how it came onto its grid: kept, rtn, clip, gptq, or "" for floats
    exact: bool
    tensors: int
    bytes: int
    bits_per_weight: float


def tensor_groups(bundle: Bundle) -> list[TensorGroup]:
    """How every tensor is stored, in the order of the model."""
    counts: dict[tuple[str, str, str, str, str, bool], list[int]] = {}
    for name, weights in _weights(bundle).items():
        for weight in weights:
            key = (name, part_of(weight.name), weight.source, weight.scheme, weight.method, weight.exact)
            total = counts.setdefault(key, [0, 0, 0])
            total[0] += 1
            total[1] += weight.stored_bytes
            total[2] += math.prod(weight.shape)
    return [TensorGroup(*key, tensors, size, 8 * size / max(values, 1)) for key, (tensors, size, values) in counts.items()]


def _weights(bundle: Bundle) -> dict[str, tuple[Weight, ...]]:
    """The tensors of every role and draft head."""
    manifest = bundle.manifest
    weights = {name: role.weights for name, role in manifest.roles.items()}
    return weights | {name: head.weights for name, head in manifest.heads.items()}


def part_of(name: str) -> str:
    """What a tensor of this canonical name is to the model."""
    parts = {"embed_tokens": "embedding", "lm_head": "head", "self_attn": "attention", "mlp": "mlp", "heads": "blocks"}
    parts |= {"rotation": "rotation"}
    parts |= {"fc": "fusion", VOCABULARY: "vocabulary"}
    return next((part for module, part in parts.items() if module in name.split(".")), "norms")


def weight_bytes(bundle: Bundle) -> dict[str, int]:
    """Stored bytes by scheme; what several graphs share counts once."""
    total = Counter[str]()
    for weights in _weights(bundle).values():
        for weight in weights:
            total[weight.scheme] += weight.stored_bytes
    return dict(sorted(total.items()))
