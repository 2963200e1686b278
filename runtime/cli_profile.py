"""The command that measures whether speculation pays here: profile."""

from pathlib import Path

import click
import rich.table

from specedge.runtime.cli_bench import prompt_sets
from specedge.runtime.cli_options import BUNDLE, Opening, opening_options
from specedge.runtime.kept_profile import write_profile
from specedge.runtime.profile import Profile, measure
from specedge.runtime.terminal import Command, Output, json_option


@click.command("profile", cls=Command)
@BUNDLE
@click.option(
    "--prompts", "prompts_file", type=click.Path(path_type=Path), help="A text file, one prompt a line, as chat messages."
)
@click.option("--max-new-tokens", type=click.IntRange(min=8), default=48, show_default=True, help="Of every answer.")
@click.option("--repeats", type=click.IntRange(min=1), default=2, show_default=True)
@opening_options
@json_option
def profile_command(
    bundle: Path,
    prompts_file: Path | None,
    max_new_tokens: int,
    repeats: int,
    opening: Opening,
    json_file: str | None,
) -> None:
    """Measure what decoding a BUNDLE costs here, and whether to speculate; engines use what is found from now on."""
    output = Output(json_file)
    engine = opening.open(bundle, reuse=False)
    prompts = [prompt for prompts in prompt_sets(engine, prompts_file).values() for prompt in prompts]
    with output.progress() as progress:
        profile = measure(engine, prompts, max_new_tokens, repeats, progress)
    _show(output, profile)
    if engine.default_tree:
        output.console.print("the bundle has a tree, which is drafted unless a request names a gamma")
    output.json(profile.as_dict())
    kept = write_profile(profile, engine.bundle, engine.rows, opening.threads)
    output.console.print(f"kept for the engines of this machine: {kept}")


def _show(output: Output, profile: Profile) -> None:
    steps = rich.table.Table("step of", "ms", "over one token")
    for width, ms in profile.t_ms.items():
        steps.add_row(f"{width} tokens", f"{ms:.2f}", f"{ms / profile.t_ms['1']:.2f}")
    output.console.print(steps)
    table = rich.table.Table("gamma", "drafting ms", "host ms", "rounds that draft", "tokens/round", "predicted", "measured")
    for gamma in profile.gammas:
        found = profile.drafts[str(gamma)]
        times = (f"{found.d_ms:.2f}", f"{found.h_ms:.2f}", f"{found.drafting:.0%}", f"{found.tokens_per_round:.2f}")
        table.add_row(str(gamma), *times, f"{profile.predicted(gamma):.2f}x", f"{found.speedup:.2f}x")
    output.console.print(table)
    output.console.print(_advice(profile))


def _advice(profile: Profile) -> str:
    best = profile.best_gamma
    found = profile.as_dict()
    even = found["break_even"]
    needs = f"; it breaks even at an acceptance of {even:.2f} a token" if isinstance(even, float) else ""
    if not best:
        return f"{profile.drafter}: do not speculate here: no gamma promises 5 % over plain decoding{needs}"
    return f"{profile.drafter}: speculate with gamma {best}: {profile.predicted(best):.2f}x plain decoding{needs}"
