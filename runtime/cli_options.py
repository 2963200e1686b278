"""What the commands that open a bundle have in common."""

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import click

from specedge.runtime.generate import Engine, load

BUNDLE = click.argument("bundle", type=click.Path(path_type=Path))


@dataclass(frozen=True, slots=True)
class Opening:
    """How a command was told to open its bundle (`generate.load`)."""

    device: str | None
    draft_device: str | None
    drafter: str | None
    threads: int | None
    allow_cpu_nodes: bool
    self_check: bool | None

    def open(self, bundle: Path, reuse: bool = True) -> Engine:
        return load(bundle, reuse=reuse, **asdict(self))


_OPENING = (
    click.option("--device", help="Row of the device table (default: the bundle's)."),
    click.option("--draft-device", help="Row that runs the drafter (default: the bundle's, or the target's)."),
    click.option("--drafter", help="Which of the bundle's drafters (default: its first)."),
    click.option("--threads", type=click.IntRange(min=1), help="Threads of the CPU provider (default: its choice)."),
    click.option("--allow-cpu-nodes", is_flag=True, help="Let a provider leave nodes to the CPU; generate says how many."),
    click.option(
        "--self-check/--no-self-check",
        default=None,
        help="Ask the device first whether it computes what the bundle holds (default: any but the CPU and emulators).",
    ),
)
_DRAFTING = (
    click.option("--gamma", type=int, help="Draft exactly this many tokens (default: adaptive)."),
    click.option(
        "--tree", type=click.Path(path_type=Path), help="Draft this tree, a JSON list of paths (default: the bundle's)."
    ),
)


def opening_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that say how a bundle is opened; the command gets them as one `opening`."""
    names = [field.name for field in fields(Opening)]

    @functools.wraps(command)
    def wrapped(**given: Any) -> Any:
        return command(opening=Opening(**{name: given.pop(name) for name in names}), **given)

    return _with(wrapped, _OPENING)


def drafting_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that say how far is drafted."""
    return _with(command, _DRAFTING)


def _with(command: Callable[..., Any], options: tuple[Callable[..., Any], ...]) -> Callable[..., Any]:
    for option in reversed(options):
        command = option(command)
    return command
