"""The command that times a bundle: bench."""

from collections.abc import Mapping
from pathlib import Path

import click
import rich.table

from specedge.errors import SpecedgeError
from specedge.runtime import prompts
from specedge.runtime.bench import Comparison, as_dict, bench
from specedge.runtime.cli_options import BUNDLE, Opening, drafting_options, opening_options
from specedge.runtime.generate import Engine
from specedge.runtime.shape import read_shape
from specedge.runtime.terminal import Command, Output, json_option


@click.command("bench", cls=Command)
@BUNDLE
@click.option(
    "--prompts",
    "prompts_file",
    type=click.Path(path_type=Path),
    help="A text file, one prompt a line, as chat messages.",
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=96, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=2, show_default=True)
@opening_options
@drafting_options
@json_option
def bench_command(
    bundle: Path,
    prompts_file: Path | None,
    max_new_tokens: int,
    repeats: int,
    opening: Opening,
    gamma: int | None,
    tree: Path | None,
    json_file: str | None,
) -> None:
    """Time plain and speculative decoding of a BUNDLE in one run."""
    shape = read_shape(tree) if tree else None
    output = Output(json_file)
    engine = opening.open(bundle, reuse=False)
    sets = prompt_sets(engine, prompts_file)
    with output.progress() as progress:
        results = bench(engine, sets, max_new_tokens, gamma, repeats, progress, shape)
    show_bench(output, engine.drafter_name, results)
    output.json(as_dict(engine, results))


def prompt_sets(engine: Engine, file: Path | None = None) -> dict[str, list[list[int]]]:
    """Token ids of the built-in chat and copy prompts, or of a file's lines; without a tokenizer, of arbitrary ids."""
    if file is not None:
        try:
            lines = [line for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
        except OSError as error:
            raise SpecedgeError(f"{file}: cannot be read ({error.strerror})") from None
        except ValueError as error:
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
            _same(result),
        )
    output.console.print(table)


def _same(result: Comparison) -> str:
    """Whether speculative ids are the plain ones; where two logits were closer than the numbers agree, that is said instead."""
    if not result.identical_greedy:
        return "NO"
    return f"near-ties: {result.near_ties}" if result.near_ties else "yes"
