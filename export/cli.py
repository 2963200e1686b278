"""The `spec-export` command: parse, build a request, call, print. The runtime's commands stand beside the exporting ones."""

import time
from pathlib import Path
from typing import Any

import click
import rich.table

from specedge import __version__
from specedge.bundle import Bundle, open_bundle
from specedge.devices.table import get_device
from specedge.errors import UsageError
from specedge.export.cli_train import train_command
from specedge.export.extra import need
from specedge.quant.scheme import BITS, GROUPS
from specedge.reports import write_report
from specedge.runtime.cli import COMMANDS
from specedge.runtime.cli_compare import show_rows
from specedge.runtime.cli_inspect import quality_line, show_bundle
from specedge.runtime.cli_options import BUNDLE
from specedge.runtime.inspect import inspect
from specedge.runtime.shape import read_shape
from specedge.runtime.terminal import Group, Output, json_option, peak_rss

_JUDGED = 20000  # tokens of a text that quality is judged on


@click.group(cls=Group)
@click.version_option(__version__, prog_name="spec-export")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def main(debug: bool) -> None:
    """Export a language model and its drafter, prove the result, and run speculative decoding on it."""


@main.command("fetch")
@click.argument("name")
def fetch_command(name: str) -> None:
    """Put a small real model into the cache and print its path: smollm2-135m."""
    with Output(None).progress() as progress:
        path = need("fetch").fetch(name, progress)
    click.echo(path)


@main.command("convert")
@click.argument("model")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The bundle to write.")
@click.option("--draft", help="A draft model of the same vocabulary.")
@click.option("--medusa", help="Medusa heads for this model: a folder, a file of tensors or a hub id.")
@click.option("--eagle", help="An EAGLE-1, EAGLE-2 or EAGLE-3 head for this model, likewise.")
@click.option(
    "--eagle-taps",
    metavar="K,K,K",
    help="What an EAGLE-3 head reads where its file leaves that open: the residual streams entering these blocks.",
)
@click.option("--lookup", is_flag=True, help="Draft by prompt lookup only; every bundle can do that.")
@click.option("--device", default="cpu", show_default=True, help="Row of the device table.")
@click.option("--draft-device", help="The drafter's, where that is another (default: --device).")
@click.option("--gamma", type=click.IntRange(min=1), help="Verify this many drafts: widths 1 and gamma + 1.")
@click.option("--widths", help="Widths to verify at, instead of --gamma: 1,5,9 (default: the device's).")
@click.option(
    "--tree", type=click.Path(path_type=Path), help="Draft this tree: a JSON list of paths of ranks, [[0], [1], [0, 0]]."
)
@click.option(
    "--one-call/--single-steps",
    "one_call",
    default=None,
    help="How a draft model drafts (default: as is faster on the device; EAGLE heads do in one call).",
)
@click.option("--context", type=int, help="Tokens a text may have (default: 1024, or what the model was made for).")
@click.option("--chunk", type=int, default=64, show_default=True, help="Tokens of a prefill step.")
@click.option(
    "--weights",
    type=click.Choice(["int4", "int8", "fp16", "fp32"]),
    help="At most so many bits per weight: a tensor on a grid of fewer stays there, see --method (default: int4, or fp32 "
    "where a device runs floats only).",
)
@click.option("--group", type=click.Choice(list(GROUPS)), help="Weights per scale of a new grid (default: 32, or channel).")
@click.option("--asymmetric", is_flag=True, help="A zero point per group of a new grid.")
@click.option(
    "--method",
    type=click.Choice(["keep", "rtn", "clip", "gptq"]),
    help="keep: tensors that GGUF's Q4_0, Q4_1 or Q8_0, GPTQ or AWQ put on a grid stay there, exactly, unless it has more bits "
    "than --weights; the rest as with clip. Others put everything on new grids. rtn: of the largest weight. clip: of least "
    "squared error. gptq: calibrated (default: keep, or clip with --group, --asymmetric, --rotate or --bits; gptq "
    "for 4 bits where a device takes one scale per row only).",
)
@click.option("--rotate", is_flag=True, help="Spread outliers over all columns by a Hadamard rotation folded into the weights.")
@click.option(
    "--bits",
    type=click.FloatRange(min=4, min_open=True, max=16),
    help="Average bits per weight: the layers that suffer most from --weights int4 get 8 bits as far as this reaches.",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Text for --method gptq and --bits: a text file, or lines of JSON with ids, messages or text (default: what the "
    "model writes itself).",
)
@click.option("--calibration-tokens", type=click.IntRange(min=1), help="How much of it (default: 32768).")
@click.option(
    "--seed", type=click.IntRange(min=0, max=(1 << 31) - 1), help="Of the model's own text and of --rotate (default: 0)."
)
@click.option(
    "--head-weights",
    type=click.Choice(["int4", "int8", "fp16", "fp32"]),
    help="Embedding and head (default: int8 or the float type).",
)
@click.option(
    "--draft-weights",
    type=click.Choice(["int4", "int8", "fp16", "fp32"]),
    help="The drafter's, with grids of their own: a coarser drafter costs acceptance only (default: as the target's).",
)
@click.option("--draft-group", type=click.Choice(list(GROUPS)), help="Likewise (default: 32).")
@click.option("--draft-method", type=click.Choice(["keep", "rtn", "clip", "gptq"]), help="Likewise (default: keep, or clip).")
@click.option("--draft-head-weights", type=click.Choice(["int4", "int8", "fp16", "fp32"]), help="Likewise.")
@click.option("--min-target", metavar="SYSTEM", help="The oldest system that runs a Core ML package: iOS18, macOS15 or later.")
@click.option("--allow-cpu-nodes", is_flag=True, help="Write graphs of which a provider is known to leave nodes to the CPU.")
@click.option("--force", is_flag=True, help="Replace an existing bundle.")
@json_option
def convert_command(
    model: str,
    output: Path,
    draft: str | None,
    medusa: str | None,
    eagle: str | None,
    eagle_taps: str | None,
    lookup: bool,
    device: str,
    draft_device: str | None,
    gamma: int | None,
    widths: str | None,
    tree: Path | None,
    one_call: bool | None,
    context: int | None,
    chunk: int,
    weights: str | None,
    group: str | None,
    asymmetric: bool,
    method: str | None,
    rotate: bool,
    bits: float | None,
    calibration: Path | None,
    calibration_tokens: int | None,
    seed: int | None,
    head_weights: str | None,
    draft_weights: str | None,
    draft_group: str | None,
    draft_method: str | None,
    draft_head_weights: str | None,
    min_target: str | None,
    allow_cpu_nodes: bool,
    force: bool,
    json_file: str | None,
) -> None:
    """Convert MODEL (a GGUF file, a Hugging Face folder or a hub id) and its drafter into a bundle."""
    other = next((name for name, given in (("draft", draft), ("medusa", medusa), ("eagle", eagle)) if given), None)
    if lookup and other:
        raise UsageError(f"--lookup: means no other drafter; leave out --lookup or --{other}")
    if gamma is not None and widths is not None:
        raise UsageError("--widths: says what --gamma would; give one of them")
    recipes = need("cli_recipe")
    row = get_device(device)
    if draft_device and not other:
        raise UsageError("--draft-device: says where a drafter runs; give --draft, --medusa or --eagle")
    draft_row = get_device(draft_device) if draft_device and draft else row  # heads compute in the target's type
    weights = weights or ("int4" if row.contrib else "fp32")
    recipe = recipes.Options("", weights, head_weights, group, asymmetric, method, rotate, bits, seed).recipe(row)
    drafters = recipes.Options(
        "draft-", draft_weights, draft_head_weights, draft_group, False, draft_method, calibrates=bool(draft)
    )
    if drafters.given and not other:
        raise UsageError(f"{drafters.given[0]}: says how a drafter is stored; give --draft, --medusa or --eagle")
    own = drafters.given or (draft_row.blocks, draft_row.contrib) != (row.blocks, row.contrib)
    of_draft = weights if draft_row.contrib == row.contrib else "int4" if draft_row.contrib else "fp32"
    draft_recipe = drafters.recipe(draft_row, of_draft) if own else None
    request = need("request").Request(
        model=model,
        output=output,
        draft=draft,
        medusa=medusa,
        eagle=eagle,
        eagle_taps=_numbers("--eagle-taps", eagle_taps),
        device=device,
        draft_device=draft_device,
        widths=_numbers("--widths", widths) if gamma is None else (1, gamma + 1),
        context=context,
        chunk=chunk,
        one_call=one_call,
        tree=read_shape(tree).paths if tree else (),
        recipe=recipe,
        draft_recipe=draft_recipe,
        calibration=recipes.calibration(calibration, calibration_tokens, seed, recipe, draft_recipe),
        min_target=min_target,
        allow_cpu_nodes=allow_cpu_nodes,
        force=force,
    )
    out = Output(json_file)
    out.json(_convert(request, out))
    if tree and row.accuracy_level == 4 and weights in BITS:
        out.console.print(
            f"note: {row.name} rounds activations to 8 bits here, so a tree's branches give slightly other logits than a "
            "chain's steps; validate says how much that is"
        )


def _convert(request: Any, output: Output) -> dict[str, object]:
    start = time.perf_counter()
    with output.progress() as progress:
        bundle: Bundle = need("convert").convert(request, progress)
    seconds = time.perf_counter() - start
    show_bundle(output, bundle)
    return inspect(bundle) | {"seconds": seconds, "peak_rss_bytes": peak_rss()}


@main.command("validate")
@BUNDLE
@click.option("--reference", required=True, help="The checkpoint the bundle was made from.")
@click.option("--draft-reference", help="The draft's checkpoint.")
@click.option("--device", help="Row of the device table (default: the bundle's).")
@click.option("--draft-device", help="Row that runs the drafter (default: the target's).")
@click.option(
    "--prompts", type=click.IntRange(min=1), default=4, show_default=True, help="Prompts whose greedy ids are compared."
)
@click.option("--tokens", type=click.IntRange(min=1), default=32, show_default=True, help="Tokens of each answer.")
@click.option(
    "--text",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Judge quality on this text: a text file, or lines of JSON with ids, messages or text.",
)
@click.option(
    "--held-out",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="Judge quality on so many tokens: of --text, or written by the model itself on prompts that calibration never uses.",
)
@click.option("--layers", is_flag=True, help="Also compare a plug-in's residual streams with the CPU's, block by block.")
@json_option
def validate_command(
    bundle: Path,
    reference: str,
    draft_reference: str | None,
    device: str | None,
    draft_device: str | None,
    prompts: int,
    tokens: int,
    text: Path | None,
    held_out: int | None,
    layers: bool,
    json_file: str | None,
) -> None:
    """Prove that a BUNDLE computes what its checkpoint says; exit code 0 only if everything passed."""
    output = Output(json_file)
    with output.progress() as progress:
        judged = need("quality").Judged(text, held_out or _JUDGED) if text or held_out else None
        report = need("validate").validate(
            bundle, reference, draft_reference, device, draft_device, prompts, tokens, progress, judged, layers
        )
    _show_report(output, bundle, report)
    output.json(report.as_dict())
    if not report.passed:
        raise click.exceptions.Exit(1)


def _show_report(output: Output, bundle: Path, report: Any) -> None:
    table = rich.table.Table("check", "graph", "value", "limit", "")
    for check in report.checks:
        table.add_row(check.name, check.graph, f"{check.value:.3g}", f"{check.limit:.3g}", "ok" if check.passed else "FAIL")
    output.console.print(table)
    groups = rich.table.Table("role", "part", "tensors", "stored", "method", "bits", "relative error")
    for group in report.groups:
        stored = (group.scheme, group.method or "-", f"{group.bits_per_weight:.2f}", f"{group.relative_error:.3g}")
        groups.add_row(group.role, group.part, str(group.tensors), *stored)
    output.console.print(groups)
    if report.devices:
        columns = ("on the device", "against", "rows", "cosine", "least", "KL", "top-1 differs", "near-ties", "KV error")
        devices = rich.table.Table(*columns)
        for found in report.devices:
            numbers = (f"{number:.6f}" for number in (found.cosine_mean, found.cosine_min, found.kl_mean))
            kv = "-" if found.kv_error is None else f"{found.kv_error:.2g}"
            counts = (str(found.top1_differs), str(found.near_ties))
            devices.add_row(found.graph, found.against, str(found.rows), *numbers, *counts, kv)
        output.console.print(devices)
    for layer in report.layers:
        output.console.print(f"stream entering block {layer.block}: {layer.snr_db:.1f} dB above the device's noise")
    output.console.print(quality_line(report.as_dict()))
    for note in report.notes:
        output.console.print(f"note: {note}")
    if not write_report(open_bundle(bundle), "validate.json", report.as_dict()):
        output.console.print(f"note: {bundle} cannot be written to, so inspect will not show this")
    output.console.print("PASS" if report.passed else "FAIL")


@main.command("demo")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default="demo",
    show_default=True,
    help="The folder of the bundles.",
)
@json_option
def demo_command(output: Path, json_file: str | None) -> None:
    """Fetch SmolLM2-135M-Instruct, convert it to INT4 with every drafter, compare them and validate the best."""
    out = Output(json_file)
    with out.progress() as progress:
        found = need("demo").demo(output, progress)
    show_bundle(out, found.bundles[found.best])
    _show_report(out, found.bundles[found.best].path, found.report)
    show_rows(out, found.rows)
    out.console.print(f"best: {found.bundles[found.best].path}; try: spec-export chat {found.bundles[found.best].path}")
    converted = {name: inspect(bundle) for name, bundle in found.bundles.items()}
    out.json({"convert": converted, "validate": found.report.as_dict(), "compare": [row.as_dict() for row in found.rows]})
    if not found.report.passed:
        raise click.exceptions.Exit(1)


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{option} {text!r}: expected numbers separated by commas, such as 1,5,9") from None


for _command in (train_command, *COMMANDS):
    main.add_command(_command)
