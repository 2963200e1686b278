"""What the host does in a round at a large vocabulary: laws of p and q, drafting draws, acceptance.

    python benchmarks/host_cost.py BUNDLE [--vocabulary 151936] [--gamma 5] [--top-p 0.9] [--json FILE]

The rows are the bundle's own logits over prose. A model of fewer ids is filled up to the vocabulary with copies of its own
less likely logits, so that head and tail keep their shape; q is p with noise on the logits.
"""

import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import click
import numpy as np
import numpy.typing as npt

from specedge.runtime import Engine, Sampling, load
from specedge.runtime.agreement import walk
from specedge.runtime.law import Law
from specedge.runtime.prompts import PROSE
from specedge.runtime.rules import make_rule
from specedge.runtime.sampler import Sampler
from specedge.runtime.tree import Proposal, TokenTree

Rows = npt.NDArray[np.float32]
RULES = ("token", "block", "point-mass", "coupled", "greedy")


def recorded(engine: Engine, rows: int, vocabulary: int) -> Rows:
    """Logits [rows, vocabulary] of prose."""
    ids = engine.encode(PROSE)[:rows]
    found = walk(engine.target, ids, min(8, engine.target.widest))
    missing = vocabulary - found.shape[1]
    if missing <= 0:
        return np.ascontiguousarray(found[:, :vocabulary])
    rng = np.random.default_rng(0)
    tails = [rng.choice(np.partition(row, len(row) // 2)[: len(row) // 2], missing) for row in found]
    return np.hstack([found, np.stack(tails)])


def milliseconds(work: Callable[[int], object], repeats: int) -> list[float]:
    """Of each of `repeats` calls, after one that does not count."""
    work(0)
    times = []
    for index in range(repeats):
        start = time.perf_counter()
        work(index)
        times.append(1e3 * (time.perf_counter() - start))
    return times


def measure(p: Rows, q: Rows, gamma: int, sampling: Sampling, rule_name: str, repeats: int) -> dict[str, float]:
    """Median times of a row and of a round under one rule, and of the part of a round that judges drafts made before."""
    sampler = Sampler(sampling, p.shape[1], 1)
    rule = make_rule(None if rule_name == "greedy" else rule_name, sampler)
    history = list(range(100))

    def draft(index: int) -> Proposal:
        start = first_row(index)
        tokens: list[int] = []
        laws: list[Law] = []
        for depth in range(gamma):
            chosen = rule.choose(q[start + depth], history, tokens, depth, [0])
            tokens += chosen.tokens
            laws += [chosen.law] if chosen.law else []
        return Proposal(TokenTree.chain(tokens), (lambda node: laws[node + 1]) if laws else None)

    def first_row(index: int) -> int:
        return (index * (gamma + 1)) % (len(p) - gamma)

    def judge(index: int, proposal: Proposal) -> int:
        return len(rule.judge(proposal, p[first_row(index) :][: gamma + 1], history).nodes)

    proposals = [draft(index) for index in range(repeats)]
    accepted = [judge(index, proposal) for index, proposal in enumerate(proposals)]
    judged = milliseconds(lambda index: judge(index, proposals[index]), repeats)
    rounds = milliseconds(lambda index: judge(index, draft(index)), repeats)
    rows = milliseconds(lambda index: sampler.law(p[index % len(p)], history), repeats)
    kept = [len(sampler.law(row, history).ids) for row in p]
    return {
        "row_ms": median(rows),
        "round_ms": median(rounds),
        "judge_ms": median(judged),
        "accepted": float(np.mean(accepted)),
        "kept_ids": median(kept),
    }


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--vocabulary", type=click.IntRange(min=100), default=151_936, show_default=True)
@click.option("--gamma", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--temperature", type=float, default=1.0, show_default=True)
@click.option("--top-p", type=float, default=0.9, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=60, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path))
def main(
    bundle: Path, vocabulary: int, gamma: int, temperature: float, top_p: float, repeats: int, json_file: Path | None
) -> None:
    """Print milliseconds of a row and of a round for every rule."""
    p = recorded(load(bundle), 128, vocabulary)
    q = p + np.random.default_rng(1).normal(0, 0.5, p.shape).astype(np.float32)
    results = {}
    for rule in RULES:
        sampling = Sampling() if rule == "greedy" else Sampling(temperature, top_p=top_p, seed=1)
        results[rule] = found = measure(p, q, gamma, sampling, rule, repeats)
        click.echo(
            f"{rule:>10}: {found['row_ms']:.2f} ms a row, {found['round_ms']:.2f} ms a round ({found['judge_ms']:.2f} of them "
            f"to judge it), {found['accepted']:.1f} of {gamma} accepted, {found['kept_ids']:.0f} ids kept of a row"
        )
    if json_file is not None:
        environment = {"machine": platform.machine(), "cpus": os.cpu_count(), "numpy": np.__version__}
        settings = {"vocabulary": vocabulary, "gamma": gamma, "temperature": temperature, "top_p": top_p, "repeats": repeats}
        json_file.write_text(json.dumps({"environment": environment, "settings": settings, "rules": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
