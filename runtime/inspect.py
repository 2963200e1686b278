"""What a bundle holds, from its manifest alone."""

from collections import Counter

from specedge.bundle import Bundle


def inspect(bundle: Bundle) -> dict[str, object]:
    """Device, widths, context, sizes and graphs; `weights` counts bytes by scheme, shared bytes once."""
    manifest = bundle.manifest
    graphs = [
        {"role": role, "width": graph.width, "file": graph.file, "ops": graph.ops}
        for role, record in manifest.roles.items()
        for graph in record.graphs
    ]
    weights = Counter[str]()
    for record in manifest.roles.values():
        for weight in record.weights:
            weights[weight.scheme] += sum(extent.bytes for extent in weight.parts.values())
    return {
        "device": manifest.device,
        "widths": list(manifest.widths),
        "context": manifest.context,
        "bytes": sum(file.bytes for file in manifest.files.values()),
        "graphs": graphs,
        "weights": dict(sorted(weights.items())),
        "drafters": list(manifest.drafters),
        "sources": {role: source.name for role, source in manifest.sources.items()},
        "licenses": {role: source.license for role, source in manifest.sources.items()},
        "eos_ids": list(manifest.eos_ids),
    }
