"""The command that shows a bundle: inspect."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import rich.table

from specedge.bundle import Bundle, open_bundle
from specedge.errors import UsageError
from specedge.manifest import Graph
from specedge.mlpackage import is_package
from specedge.reports import read_report
from specedge.runtime.cli_options import BUNDLE
from specedge.runtime.inspect import inspect, tensor_groups
from specedge.runtime.memory import EngineMemory, measure_engines
from specedge.runtime.package import PackageContents, PackedWeight, read_package
from specedge.runtime.terminal import Command, Output, json_option, size

_PLAIN_TYPES = ("F32", "F16", "BF16")  # of a checkpoint, by the names that safetensors and GGUF have in common


@click.command("inspect", cls=Command)
@BUNDLE
@click.option(
    "--memory",
    type=click.IntRange(min=1),
    metavar="ENGINES",
    help="Open so many engines, fill their contexts and show what each takes.",
)
@json_option
def inspect_command(bundle: Path, memory: int | None, json_file: str | None) -> None:
    """Show what a BUNDLE holds, or a Core ML package (X.mlpackage) of one."""
    output = Output(json_file)
    if is_package(bundle):
        if memory is not None:
            raise UsageError("--memory: opens engines over a bundle; name the bundle that holds this package")
        contents = read_package(bundle)
        show_package(output, bundle, contents)
        output.json(contents.as_dict())
        return
    opened = open_bundle(bundle)
    show_bundle(output, opened)
    results = inspect(opened)
    if memory is not None:
        engines = measure_engines(bundle, memory)
        results["memory"] = [asdict(engine) for engine in engines]
        show_memory(output, engines)
    output.json(results)


def quality_line(report: Mapping[str, Any]) -> str:
    """What validate found a model to be worth, in a line; `report` as it writes it."""
    return (
        f"against float32 on {report['tokens']} tokens: max |logit difference| {report['logits_max_abs']:.3g}, "
        f"KL {report['kl_mean']:.3g}, top-1 agreement {report['top1_agreement']:.1%}, top-5 {report['top5_agreement']:.1%}, "
        f"perplexity {report['perplexity']:.3f} ({report['reference_perplexity']:.3f})"
    )


def show_memory(output: Output, engines: Sequence[EngineMemory]) -> None:
    """What each engine took; mapped pages are the same for all of them."""
    table = rich.table.Table("engine", "weight files", "mapped, shared", "own, context full")
    for number, engine in enumerate(engines, 1):
        table.add_row(str(number), size(engine.file), size(engine.mapped), size(engine.private))
    output.console.print(table)


def _place(graph: Graph) -> str:
    return graph.file if graph.function is None else f"{graph.file} {graph.function}"


def show_package(output: Output, path: Path, contents: PackageContents) -> None:
    """A package's functions, and its weights by how they are stored and why."""
    print_ = output.console.print
    print_(f"{path}: {size(contents.bytes)}, specification {contents.specification}, runs {contents.default} by default")
    functions = rich.table.Table("function", "inputs", "outputs", "ops", "computed in", "rank", "widest")
    for function in contents.functions:
        ops, types = sum(function.ops.values()), ", ".join(function.types)
        counts = (len(function.inputs), len(function.outputs), ops, types, function.rank, function.widest)
        functions.add_row(function.name, *map(str, counts))
    print_(functions)
    groups: dict[tuple[int, str, str], list[PackedWeight]] = {}
    for weight in contents.weights:
        groups.setdefault((weight.bits, weight.scales, weight.why), []).append(weight)
    table = rich.table.Table("bits", "stored with", "weights", "bytes", "of float16", "why not 4 bits")
    for (bits, scales, why), weights in sorted(groups.items()):
        total = sum(weight.bytes for weight in weights)
        share = total / sum(2 * math.prod(weight.shape) for weight in weights)
        table.add_row(str(bits), scales or "-", str(len(weights)), size(total), f"{share:.3f}x", why or "-")
    print_(table)


def show_bundle(output: Output, bundle: Bundle) -> None:
    """A bundle in a few lines."""
    manifest, print_ = bundle.manifest, output.console.print
    print_(f"{bundle.path}: {size(sum(file.bytes for file in manifest.files.values()))} for device {manifest.device}")
    for role, source in manifest.sources.items():
        print_(f"  {role}: {source.name}, licence {source.license or 'not stated'}")
    print_(f"  widths {list(manifest.widths)}, context {manifest.context}, drafters {', '.join(manifest.drafters)}")
    if manifest.tree:
        print_(f"  draft tree of {len(manifest.tree)} nodes, {max(map(len, manifest.tree))} deep")
    for record in manifest.roles.values():
        for graph in record.all_graphs:
            width = "any width" if graph.width is None else f"width {graph.width}"
            print_(f"  {_place(graph)}: {width}, {sum(graph.ops.values())} nodes")
    for head in manifest.heads.values():
        print_(f"  {_place(head.graph)}: {head.depth} tokens far, {sum(head.graph.ops.values())} nodes")
    table = rich.table.Table("role", "part", "tensors", "checkpoint", "stored", "method", "bits", "bytes", "exact")
    groups = tensor_groups(bundle)
    for group in groups:
        exact = "yes" if group.exact else "no"
        bits = f"{group.bits_per_weight:.2f}"
        stored = (group.source, group.scheme, group.method or "-", bits, size(group.bytes), exact)
        table.add_row(group.role, group.part, str(group.tensors), *stored)
    print_(table)
    if anew := sorted({group.source for group in groups if group.source not in _PLAIN_TYPES and not group.exact}):
        print_(f"  {', '.join(anew)}: dequantised and stored anew")
    if validated := read_report(bundle, "validate.json"):
        said = "passed" if validated.get("passed") else "FAILED"
        with contextlib.suppress(KeyError, TypeError, ValueError):  # another version's report
            print_(f"  validate {said}; {quality_line(validated)}")
