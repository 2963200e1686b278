"""The commands that compute what to expect: plan and tree."""

import json
import math
from pathlib import Path
from typing import Any

import click

from specedge.errors import SpecedgeError, UsageError
from specedge.runtime.plan import break_even, expected_tokens, speedup
from specedge.runtime.shape import TreeShape, best_shape, read_json, tokens_per_round
from specedge.runtime.terminal import Command, Output, json_option

_MEASURED = "what bench --json writes, or a table [[0.6, 0.2], [0.5, 0.1]]"


@click.command("plan", cls=Command)
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
    output.console.print(
        f"costs in one-token steps: a draft {draft_cost:g}, a verify step {verify_cost:g}, host work {host_cost:g}"
    )
    if (draft_cost, verify_cost, host_cost) == (0.0, 1.0, 0.0):
        output.console.print("so speculation is free: an upper bound, give --draft-cost, --verify-cost and --host-cost")
    output.console.print(f"{results['expected_tokens']:.2f} tokens per round, {results['speedup']:.2f}x plain decoding")
    output.console.print("never pays at these costs" if limit is None else f"pays from acceptance {limit:.2f} on")
    output.json(results)


@click.command("tree", cls=Command)
@click.argument("measured", type=click.Path(path_type=Path))
@click.option("--nodes", type=click.IntRange(1, 512), required=True, help="Drafts a round may verify.")
@click.option("--prompts", help="Which of the prompt sets in MEASURED (default: its only one).")
@click.option("--drafter", help="Which of the drafters in MEASURED (default: its only one).")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the paths here, for convert --tree.")
@json_option
def tree_command(
    measured: Path, nodes: int, prompts: str | None, drafter: str | None, output: Path | None, json_file: str | None
) -> None:
    """The best draft tree of so many nodes, from MEASURED acceptance.

    MEASURED is what bench --json wrote (with a wide --tree, so that there are ranks to compare), or a JSON table
    acceptance[depth][rank].
    """
    table = _acceptance(measured, prompts, drafter)
    try:
        shape = best_shape(table, nodes)
    except ValueError as error:
        raise SpecedgeError(f"{measured}: {error!s:.300}") from None
    if not shape.parents:
        raise SpecedgeError(f"{measured}: nothing was ever accepted, so no tree pays")
    expected = tokens_per_round(shape, table)
    out = Output(json_file)
    paths = [list(path) for path in shape.paths]
    out.console.print(f"{expected:.2f} tokens per round expected of {len(paths)} nodes, depth {shape.depth}")
    out.console.print(json.dumps(paths))
    if output is not None:
        try:
            output.write_text(json.dumps(paths) + "\n", encoding="utf-8")
        except OSError as error:
            raise SpecedgeError(f"{output}: cannot be written ({error.strerror})") from None
    out.json({"paths": paths, "depth": shape.depth, "expected_tokens": expected})


def _acceptance(file: Path, prompts: str | None, drafter: str | None) -> list[list[float]]:
    """The table acceptance[depth][rank] in a JSON file."""
    found = read_json(file)
    if _is_tree(found):
        raise SpecedgeError(f"{file}: is a list of paths, a tree already; expected {_MEASURED}")
    for option, name in (("prompts", prompts), ("drafter", drafter)):
        if isinstance(found, list) and name is not None:
            raise UsageError(f"--{option}: {file} is a table, which has no names; leave --{option} out")
        if isinstance(found, dict):
            found = _choose(file, option, name, found.get("sets") if option == "prompts" else found)
    for key in ("speculative", "accepted_by_rank"):
        found = found.get(key) if isinstance(found, dict) else found
    numbers = isinstance(found, list) and all(isinstance(row, list) for row in found)
    if not numbers or not all(type(chance) in (int, float) for row in found for chance in row):
        raise SpecedgeError(f"{file}: expected {_MEASURED}")
    table: list[list[float]] = found
    return table


def _is_tree(found: Any) -> bool:
    """Whether these are the paths of a tree; acceptance has fractions, and 1.0 for 1."""
    if not isinstance(found, list) or not all(isinstance(path, list) for path in found):
        return False
    try:
        return bool(TreeShape.from_paths(found).parents)
    except ValueError:
        return False


def _choose(file: Path, option: str, name: str | None, named: Any) -> Any:
    """The entry of this name, or the only one; None where there are none."""
    if not isinstance(named, dict) or not named:
        return None
    if name is None and len(named) == 1:
        return next(iter(named.values()))
    if name is None:
        raise UsageError(f"{file}: holds {', '.join(named):.300}; add --{option} {next(iter(named)):.300}")
    if name not in named:
        raise UsageError(f"--{option} {name}: {file} holds {', '.join(named):.300}; name one of them")
    return named[name]
