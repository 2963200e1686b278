"""The commands a plain install can run: generate, bench, inspect, plan."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import rich.table

from specedge.bundle import Bundle, open_bundle
from specedge.errors import SpecedgeError, UsageError
from specedge.runtime import prompts
from specedge.runtime.bench import Comparison, as_dict, bench
from specedge.runtime.generate import Engine, load
from specedge.runtime.inspect import inspect, tensor_groups
from specedge.runtime.memory import EngineMemory, measure_engines
from specedge.runtime.plan import break_even, expected_tokens, speedup
from specedge.runtime.results import Result
from specedge.runtime.sample import Sampling
from specedge.runtime.terminal import Output, json_option, size
from specedge.runtime.text import Prompt

_PLAIN_TYPES = ("F32", "F16", "BF16")  # of a checkpoint, by the names that safetensors and GGUF have in common
BUNDLE = click.argument("bundle", type=click.Path(path_type=Path))


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that say how a bundle is opened, and how far it drafts."""
    for option in reversed(
        (
            click.option("--device", help="Row of the device table (default: the bundle's)."),
            click.option("--draft-device", help="Row that runs the drafter (default: the target's)."),
            click.option("--drafter", help="Which of the bundle's drafters (default: its first)."),
            click.option("--gamma", type=int, help="Draft exactly this many tokens (default: adaptive)."),
            click.option("--threads", type=click.IntRange(min=1), help="Threads of the CPU provider (default: its choice)."),
        )
    ):
        command = option(command)
    return command


@click.command("generate")
@BUNDLE
@click.option("-p", "--prompt", help="The prompt's text.")
@click.option("--ids", help="The prompt as token ids: 1,2,3.")
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat template, as the user's message.")
@click.option("--max-new-tokens", type=click.IntRange(min=0), default=128, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, show_default=True, help="0 is off.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="1 is off.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--stop", multiple=True, help="End before this text; may be given more than once.")
@click.option("--plain", is_flag=True, help="Do not speculate.")
@click.option("--stats", is_flag=True, help="Print rounds, acceptance and speed afterwards.")
@engine_options
@json_option
def generate_command(
    bundle: Path,
    prompt: str | None,
    ids: str | None,
    chat: bool,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    stop: tuple[str, ...],
    plain: bool,
    stats: bool,
    device: str | None,
    draft_device: str | None,
    drafter: str | None,
    gamma: int | None,
    threads: int | None,
    json_file: str | None,
) -> None:
    """Generate text from a BUNDLE."""
    try:
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None
    if plain and gamma is not None:
        raise UsageError("--plain: drafts nothing, --gamma drafts; give one of them")
    request = _prompt(prompt, ids, chat)
    output = Output(json_file)
    engine = load(bundle, device, draft_device, drafter, threads)
    stream = engine.stream(request, sampling, max_new_tokens, stop, gamma, not plain)
    for token in stream:
        output.write(token.text if engine.tokenizer else f"{token.id} ")
    output.write("\n")
    result = stream.result()
    if stats:
        _show_stats(result, not plain)
    output.json(
        {"ids": result.ids, "text": result.text, "finish_reason": result.finish_reason, "stats": result.stats.as_dict()}
    )


def _show_stats(result: Result, speculated: bool) -> None:
    """Counts and speed on standard error, beside the text."""
    stats = result.stats
    click.echo(
        f"{stats.tokens} tokens in {stats.rounds} rounds ({stats.tokens_per_round:.2f} per round), {stats.accepted} of "
        f"{stats.drafted} drafts accepted, {stats.tokens_per_second:.1f} tokens/s after {stats.prefill_seconds:.2f} s for "
        f"{stats.prompt_tokens} prompt tokens; ended by {result.finish_reason}",
        err=True,
    )
    if speculated and not stats.drafted:
        click.echo("nothing was drafted: it promised no gain here (--gamma N drafts anyway)", err=True)


def _prompt(text: str | None, ids: str | None, chat: bool) -> Prompt:
    if (text is None) == (ids is None):
        raise UsageError("prompt: give either -p TEXT or --ids 1,2,3")
    if ids is not None:
        if chat:
            raise UsageError("--chat: puts text into the template; give -p TEXT, or ids that hold the template already")
        try:
            return [int(part) for part in ids.replace(",", " ").split()]
        except ValueError:
            raise UsageError(f"--ids {ids!r}: expected numbers separated by commas") from None
    assert text is not None
    return [{"role": "user", "content": text}] if chat else text


@click.command("bench")
@BUNDLE
@click.option(
    "--prompts",
    "prompts_file",
    type=click.Path(path_type=Path),
    help="A text file, one prompt a line, as chat messages.",
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=96, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=2, show_default=True)
@engine_options
@json_option
def bench_command(
    bundle: Path,
    prompts_file: Path | None,
    max_new_tokens: int,
    repeats: int,
    device: str | None,
    draft_device: str | None,
    drafter: str | None,
    gamma: int | None,
    threads: int | None,
    json_file: str | None,
) -> None:
    """Time plain and speculative decoding of a BUNDLE in one run."""
    output = Output(json_file)
    engine = load(bundle, device, draft_device, drafter, threads)
    sets = prompt_sets(engine, prompts_file)
    with output.progress() as progress:
        results = bench(engine, sets, max_new_tokens, gamma, repeats, progress)
    show_bench(output, engine.drafter_name, results)
    output.json(as_dict(engine, results))


def prompt_sets(engine: Engine, file: Path | None = None) -> dict[str, list[list[int]]]:
    """Token ids of the built-in chat and copy prompts, or of a file's lines; without a tokenizer, of arbitrary ids."""
    if file is not None:
        try:
            lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise SpecedgeError(f"{file}: cannot be read ({error})") from None
        if not lines:
            raise SpecedgeError(f"{file}: no prompts; expected one a line")
        return {file.stem: [_request_ids(engine, line) for line in lines]}
    if engine.tokenizer is None:
        allowed = min(engine.bundle.manifest.allowed_ids, engine.context // 2)
        return {"ids": [[start % allowed, (start * 7 + 1) % allowed] for start in range(1, 5)]}
    return {name: [_request_ids(engine, text) for text in texts] for name, texts in prompts.SETS.items()}


def _request_ids(engine: Engine, text: str) -> list[int]:
    return engine.encode(engine.tokenizer.encode_request(text) if engine.tokenizer else text)


def show_bench(output: Output, drafter: str, results: Mapping[str, Comparison]) -> None:
    """The comparison as a table."""
    table = rich.table.Table(title=f"drafter: {drafter}", title_justify="left")
    for header in (
        "prompts",
        "plain\ntok/s",
        "spec.\ntok/s",
        "speedup\n(median)",
        "range",
        "tokens\n/round",
        "accepted",
        "same\nids",
    ):
        table.add_column(header, no_wrap=True)
    for name, result in results.items():
        low, high = result.speedup_range
        table.add_row(
            name,
            f"{result.plain_speed:.1f}",
            f"{result.speculative_speed:.1f}",
            f"{result.speedup:.2f}x",
            f"{low:.2f}-{high:.2f}",
            f"{result.tokens_per_round:.2f}",
            f"{result.acceptance:.0%} of {result.drafted}" if result.drafted else "no drafts",
            "yes" if result.identical_greedy else "NO",
        )
    output.console.print(table)


@click.command("inspect")
@BUNDLE
@click.option(
    "--memory",
    type=click.IntRange(min=1),
    metavar="ENGINES",
    help="Open so many engines, fill their contexts and show what each takes.",
)
@json_option
def inspect_command(bundle: Path, memory: int | None, json_file: str | None) -> None:
    """Show what a BUNDLE holds."""
    output = Output(json_file)
    opened = open_bundle(bundle)
    show_bundle(output, opened)
    results = inspect(opened)
    if memory is not None:
        engines = measure_engines(bundle, memory)
        results["memory"] = [asdict(engine) for engine in engines]
        show_memory(output, engines)
    output.json(results)


def show_memory(output: Output, engines: Sequence[EngineMemory]) -> None:
    """What each engine took; mapped pages are the same for all of them."""
    table = rich.table.Table("engine", "weight files", "mapped, shared", "own, context full")
    for number, engine in enumerate(engines, 1):
        table.add_row(str(number), size(engine.file), size(engine.mapped), size(engine.private))
    output.console.print(table)


def show_bundle(output: Output, bundle: Bundle) -> None:
    """A bundle in a few lines."""
    manifest, print_ = bundle.manifest, output.console.print
    print_(f"{bundle.path}: {size(sum(file.bytes for file in manifest.files.values()))} for device {manifest.device}")
    for role, source in manifest.sources.items():
        print_(f"  {role}: {source.name}, licence {source.license or 'not stated'}")
    print_(f"  widths {list(manifest.widths)}, context {manifest.context}, drafters {', '.join(manifest.drafters)}")
    for record in manifest.roles.values():
        for graph in record.graphs:
            width = "any width" if graph.width is None else f"width {graph.width}"
            print_(f"  {graph.file}: {width}, {sum(graph.ops.values())} nodes")
    table = rich.table.Table("role", "part", "tensors", "checkpoint", "stored", "bytes", "exact")
    groups = tensor_groups(bundle)
    for group in groups:
        exact = "yes" if group.exact else "no"
        table.add_row(group.role, group.part, str(group.tensors), group.source, group.scheme, size(group.bytes), exact)
    print_(table)
    if anew := sorted({group.source for group in groups if group.source not in _PLAIN_TYPES and not group.exact}):
        print_(f"  {', '.join(anew)}: dequantised and stored anew")


@click.command("plan")
@click.option("--alpha", type=click.FloatRange(0, 1), required=True, help="Acceptance of one draft.")
@click.option("--gamma", type=click.IntRange(min=0), required=True, help="Drafts per round.")
@click.option(
    "--draft-cost", type=click.FloatRange(min=0), default=0.0, show_default=True, help="One draft, in steps of width 1."
)
@click.option(
    "--verify-cost",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="A verify step, likewise.",
)
@click.option(
    "--host-cost", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Host time of a round, likewise."
)
@json_option
def plan_command(
    alpha: float, gamma: int, draft_cost: float, verify_cost: float, host_cost: float, json_file: str | None
) -> None:
    """Would speculation pay? Expected tokens per round, speedup and break-even acceptance from given costs."""
    for name, value in (("alpha", alpha), ("draft-cost", draft_cost), ("verify-cost", verify_cost), ("host-cost", host_cost)):
        if not math.isfinite(value):  # a range lets NaN through
            raise UsageError(f"--{name} {value}: expected a finite number")
    output = Output(json_file)
    results = {
        "expected_tokens": expected_tokens(alpha, gamma),
        "speedup": speedup(alpha, gamma, draft_cost, verify_cost, host_cost),
        "break_even": break_even(gamma, draft_cost, verify_cost, host_cost),
    }
    limit = results["break_even"]
    output.console.print(f"{results['expected_tokens']:.2f} tokens per round, {results['speedup']:.2f}x plain decoding")
    output.console.print("never pays at these costs" if limit is None else f"pays from acceptance {limit:.2f} on")
    output.json(results)


COMMANDS = (generate_command, bench_command, inspect_command, plan_command)
