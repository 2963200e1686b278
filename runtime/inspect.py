"""What a bundle holds, from its manifest alone."""

from collections import Counter

from specedge.bundle import Bundle


def inspect(bundle: Bundle) -> dict[str, object]:
    """Device, widths, context, sizes and graphs, as the JSON contract names them (design.md §5)."""
    manifest = bundle.manifest
    graphs = [
        {"role": role, "width": graph.width, "file": graph.file, "ops": graph.ops}
        for role, record in manifest.roles.items()
        for graph in record.graphs
    ]
    return {
        "device": manifest.device,
        "widths": list(manifest.widths),
        "context": manifest.context,
        "bytes": sum(file.bytes for file in manifest.files.values()),
        "graphs": graphs,
        "weights": weight_bytes(bundle),
        "drafters": list(manifest.drafters),
        "sources": {role: source.name for role, source in manifest.sources.items()},
        "licenses": {role: source.license for role, source in manifest.sources.items()},
        "eos_ids": list(manifest.eos_ids),
    }


def weight_bytes(bundle: Bundle) -> dict[str, int]:
    """Stored bytes by scheme; what several graphs share counts once."""
    total = Counter[str]()
    for role in bundle.manifest.roles.values():
        for weight in role.weights:
            total[weight.scheme] += sum(extent.bytes for extent in weight.parts.values())
    return dict(sorted(total.items()))
