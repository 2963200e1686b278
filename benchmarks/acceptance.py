"""Tokens a round on prompts whose topics no training prompt touches, for bundles side by side.

python benchmarks/acceptance.py BUNDLE ... [--prompts 40] [--tokens 128] [--gamma 4 | --tree FILE] [--json FILE]
"""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np

from specedge.export.topics import written_prompts
from specedge.runtime import Sampling, load
from specedge.runtime.shape import read_shape

_TEMPERATURES = (0.0, 0.7)


@click.command()
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--prompts", type=click.IntRange(min=1), default=40, show_default=True)
@click.option("--tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Of each answer.")
@click.option("--gamma", type=click.IntRange(min=1), default=4, show_default=True, help="Drafted every round.")
@click.option("--tree", type=click.Path(path_type=Path), help="Draft this tree instead.")
@click.option("--json", "json_file", type=click.Path(path_type=Path))
def main(bundles: tuple[Path, ...], prompts: int, tokens: int, gamma: int, tree: Path | None, json_file: Path | None) -> None:
    """Print emitted tokens per round, and how often the draft at each place was accepted once it was judged."""
    asked = written_prompts("held-out")
    asked = [asked[index] for index in np.linspace(0, len(asked) - 1, prompts).round().astype(int)]
    shape = read_shape(tree) if tree else None
    results = []
    for path in bundles:
        engine = load(path, reuse=False)
        for temperature in _TEMPERATURES:
            emitted, lengths = 0, Counter[int]()
            for seed, text in enumerate(asked):
                found = engine.generate(
                    [{"role": "user", "content": text}],
                    Sampling(temperature, seed=seed),
                    tokens,
                    gamma=None if shape else gamma,
                    tree=shape,
                ).stats
                emitted += found.tokens
                lengths.update(accepted for _, accepted in found.per_round)
            rounds = lengths.total()
            got_to = [sum(lengths[length] for length in lengths if length >= place) for place in range(max(lengths) + 1)]
            row: dict[str, Any] = {
                "bundle": path.name,
                "drafter": engine.drafter_name,
                "temperature": temperature,
                "rounds": rounds,
                "tokens_per_round": emitted / rounds,
                "accepted": [after / before for before, after in pairwise(got_to)],
            }
            shares = ", ".join(f"{share:.3f}" for share in row["accepted"])
            results.append(row)
            click.echo(
                f"{path.name} ({engine.drafter_name}) at temperature {temperature}: {emitted / rounds:.3f} tokens a round, "
                f"{rounds} rounds, accepted where all before were: {shares}"
            )
    if json_file is not None:
        settings = {"prompts": prompts, "tokens": tokens, "gamma": None if shape else gamma, "tree": shape and shape.paths}
        json_file.write_text(json.dumps({"settings": settings, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
