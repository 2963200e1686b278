"""What control makes of a drafter: plain, adaptive and every fixed gamma in turns, by kind of prompt and temperature.

    python benchmarks/control.py BUNDLE [--drafter NAME] [--gammas 1,2,4,8] [--tokens 64] [--repeats 3] [--json FILE]

Two numbers a cell: speed over that of plain decoding, all prompts together, and the median over prompts of the same. Sampled
requests repeat a seed, so all gammas of a prompt write texts of one law, and prompt lookup the very same text.
"""

import json
from pathlib import Path
from statistics import median
from typing import Any

import click

from specedge.runtime import Engine, Sampling, load
from specedge.runtime.bench import environment
from specedge.runtime.prompts import SETS
from specedge.runtime.results import Stats

_TEMPERATURES = (0.0, 0.7, 1.0)


@click.command()
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option("--drafter", help="One of the bundle's; its first.")
@click.option("--gammas", default="1,2,4,8", show_default=True)
@click.option("--tokens", default=64, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--profile/--no-profile", default=True, help="Rest on a stored profile, if there is one.")
@click.option("--json", "file", type=click.Path(path_type=Path))
def main(bundle: Path, drafter: str | None, gammas: str, tokens: int, repeats: int, profile: bool, file: Path | None) -> None:
    engine = load(bundle, drafter=drafter, profile=profile)
    modes: dict[str, dict[str, Any]] = {"plain": {"speculate": False}, "adaptive": {}}
    modes |= {f"gamma {gamma}": {"gamma": int(gamma)} for gamma in gammas.split(",")}
    print(f"{engine.drafter_name}, {'a stored profile' if engine.profile else 'no profile'}: speed over plain, all and median")
    print("".join(f"{name:>16}" for name in ("", *modes)))
    cells = {
        f"{kind} {temperature}": _cell(engine, kind, temperature, modes, tokens, repeats)
        for kind in SETS
        for temperature in _TEMPERATURES
    }
    if file:
        found = {"environment": environment(engine), "profile": engine.profile is not None, "cells": cells}
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _cell(
    engine: Engine, kind: str, temperature: float, modes: dict[str, dict[str, Any]], tokens: int, repeats: int
) -> dict[str, dict[str, float]]:
    prompts = [engine.encode([{"role": "user", "content": prompt}]) for prompt in SETS[kind]]
    stats: dict[str, list[Stats]] = {name: [] for name in modes}
    for options in modes.values():
        engine.generate(prompts[0], Sampling(), 8, **options)
    for turn in range(len(prompts) * repeats):
        order = [*modes] if turn // len(prompts) % 2 == 0 else [*modes][::-1]
        for name in order:
            sampling = Sampling(temperature, seed=turn)
            stats[name].append(engine.generate(prompts[turn % len(prompts)], sampling, tokens, **modes[name]).stats)
    plain = stats["plain"]
    found = {
        name: {
            "speedup": _speed(each) / _speed(plain),
            "median": median(one.tokens_per_second / other.tokens_per_second for one, other in zip(each, plain, strict=True)),
            "tokens_per_round": sum(one.tokens for one in each) / sum(one.rounds for one in each),
        }
        for name, each in stats.items()
    }
    row = [f"{cell['speedup']:.3f} {cell['median']:.3f}" for cell in found.values()]
    print(f"{kind + ' ' + str(temperature):>16}" + "".join(f"{cell:>16}" for cell in row), flush=True)
    return found


def _speed(stats: list[Stats]) -> float:
    return sum(one.tokens for one in stats) / sum(one.decode_seconds for one in stats)


if __name__ == "__main__":
    main()
