"""The `train` command."""

from pathlib import Path

import click

from specedge.errors import UsageError
from specedge.export.extra import need
from specedge.runtime.terminal import Output, json_option


@click.command("train")
@click.argument("model")
@click.option("--kind", type=click.Choice(["medusa", "eagle", "draft"]), required=True, help="What is trained.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The folder to write; convert takes it.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Text to learn from: lines of JSON with ids (and prompt_length), messages or text, also gzipped; or a text file "
    "(default: what the model writes itself).",
)
@click.option("--tokens", type=click.IntRange(min=1), default=800_000, show_default=True, help="Of the model's own text.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="Of training, text not counted (default: 30).")
@click.option(
    "--steps",
    type=click.IntRange(min=0),
    help="Instead of --minutes: the same weights on every machine's clock; 0 judges and stores the drafter of --start.",
)
@click.option(
    "--draft-vocab", type=click.IntRange(min=1), default=8192, show_default=True, help="Draft the most frequent ids only."
)
@click.option("--gamma", type=click.IntRange(min=1), default=4, show_default=True, help="Tokens ahead; Medusa heads.")
@click.option("--layers", type=click.IntRange(min=1), help="Of a draft model (default: 4), of a Medusa head (default: 1).")
@click.option("--rows", type=click.IntRange(min=1), default=4096, show_default=True, help="Tokens of a step.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), default=1e-3, show_default=True, help="Learning rate.")
@click.option("--seed", type=click.IntRange(min=0, max=(1 << 31) - 1), default=0, show_default=True)
@click.option("--start", help="A drafter of this kind to go on from.")
@click.option(
    "--bundle",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Learn from the target as this bundle stores it (default: as convert would, in INT4).",
)
@click.option(
    "--store",
    type=click.Choice(["float", "int8", "int4"]),
    default="float",
    show_default=True,
    help="bfloat16 safetensors, or a GGUF file on grids that convert keeps.",
)
@click.option("--compute", metavar="DEVICE", help="cpu, cuda ... (default: a GPU where there is one).")
@click.option("--force", is_flag=True, help="Replace an existing drafter.")
@json_option
def train_command(model: str, output: Path, minutes: float | None, json_file: str | None, **given: object) -> None:
    """Train a drafter for MODEL (a GGUF file, a Hugging Face folder or a hub id). An interrupted run goes on where it was."""
    train = need("train")
    if minutes is not None and given["steps"] is not None:
        raise UsageError("--steps: says how long, and so does --minutes; give one of them")
    request = train.Training(model=model, output=output, minutes=minutes or train.MINUTES, **given)
    out = Output(json_file)
    with out.progress() as progress:
        trained = train.train(request, progress)
    facts = trained.facts
    out.console.print(
        f"{trained.path}: {facts.acceptance.tokens_per_round:.2f} tokens a round in validation, after {facts.steps} steps in "
        f"{facts.minutes:.1f} minutes on {facts.tokens:,} tokens of {facts.prompts:,} prompts"
    )
    out.console.print(f"use it: spec-export convert {model} --{facts.kind} {trained.path} -o BUNDLE")
    out.json(trained.as_dict())
