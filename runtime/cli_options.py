"""What the commands that open a bundle have in common."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

BUNDLE = click.argument("bundle", type=click.Path(path_type=Path))


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that say how a bundle is opened, and how far it drafts."""
    for option in reversed(
        (
            click.option("--device", help="Row of the device table (default: the bundle's)."),
            click.option("--draft-device", help="Row that runs the drafter (default: the bundle's, or the target's)."),
            click.option("--drafter", help="Which of the bundle's drafters (default: its first)."),
            click.option("--gamma", type=int, help="Draft exactly this many tokens (default: adaptive)."),
            click.option(
                "--tree", type=click.Path(path_type=Path), help="Draft this tree, a JSON list of paths (default: the bundle's)."
            ),
            click.option("--threads", type=click.IntRange(min=1), help="Threads of the CPU provider (default: its choice)."),
            click.option(
                "--allow-cpu-nodes",
                is_flag=True,
                help="Let a provider leave nodes to the CPU; generate says how many.",
            ),
        )
    ):
        command = option(command)
    return command
