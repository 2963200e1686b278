"""Plain and speculative decoding side by side in one run."""

import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from specedge.errors import UsageError
from specedge.progress import Progress, silent
from specedge.runtime.agreement import agreement_of, compare_greedy
from specedge.runtime.generate import Engine
from specedge.runtime.results import Outcome, Stats
from specedge.runtime.sample import Sampling
from specedge.runtime.session import VERSION
from specedge.runtime.shape import TreeShape

_COMPARED = 64  # tokens over which wide steps and trees are compared with one-token steps


@dataclass(slots=True)
class _Totals:
    """Sums over the requests of one side; host time is what the graphs, the drafter's included, did not take."""

    tokens: int = 0
    seconds: float = 0.0
    host_seconds: float = 0.0
    per_round: list[tuple[int, int]] = field(default_factory=list)
    outcomes: Counter[Outcome] = field(default_factory=Counter)

    def add(self, stats: Stats) -> None:
        self.tokens += stats.tokens
        self.seconds += stats.decode_seconds
        self.host_seconds += stats.decode_seconds - stats.graph_seconds
        self.per_round += stats.per_round
        self.outcomes += stats.outcomes


@dataclass(frozen=True, slots=True)
class Comparison:
    """One drafter on one set of prompts. Speeds in tokens per second without prefill; `host_fraction` is the share of a
    speculative round spent outside the graphs; `speedup` is the median over prompts and repeats, `speedup_range` its extremes.
    """

    plain_speed: float
    speculative_speed: float
    tokens_per_round: float
    acceptance: float
    drafted: int
    accepted_by_position: list[float]
    accepted_by_rank: list[list[float]]
    host_fraction: float
    speedup: float
    speedup_range: tuple[float, float]
    identical_greedy: bool
    near_ties: int

    def as_dict(self) -> dict[str, object]:
        """The keys of the JSON contract (docs/contract.md)."""
        return {
            "plain": {"tokens_per_s": self.plain_speed},
            "speculative": {
                "tokens_per_s": self.speculative_speed,
                "tokens_per_round": self.tokens_per_round,
                "acceptance": self.acceptance,
                "drafted": self.drafted,
                "accepted_by_position": self.accepted_by_position,
                "accepted_by_rank": self.accepted_by_rank,
                "host_fraction": self.host_fraction,
            },
            "speedup": self.speedup,
            "speedup_range": list(self.speedup_range),
            "identical_greedy": self.identical_greedy,
            "near_ties": self.near_ties,
        }


def bench(
    engine: Engine,
    prompt_sets: Mapping[str, Sequence[Sequence[int]]],
    max_new_tokens: int = 96,
    gamma: int | None = None,
    repeats: int = 2,
    progress: Progress = silent,
    tree: TreeShape | None = None,
) -> dict[str, Comparison]:
    """Greedy decoding of every set of prompts, plain and speculative in turn; which comes first alternates.

    Raises:
        UsageError: The tree leaves out ranks, so that acceptance by rank could not be measured; a device is emulated.
    """
    if engine.emulated:
        raise UsageError(f"device {engine.emulated[0]!r}: is emulated here, and an emulator's time says nothing; time it there")
    shape = engine.default_tree if tree is None and gamma is None else tree
    if shape is not None and (gap := shape.gap) is not None:
        whose = "the bundle's lacks" if tree is None else "lacks"
        raise UsageError(
            f"tree: {whose} path {list(gap)} before a sibling; acceptance by rank needs ranks 0, 1, ... without gaps"
        )
    first = next(iter(prompt_sets.values()))[0]
    engine.generate(list(first), Sampling(), 8, speculate=False)
    engine.generate(list(first), Sampling(), 8, gamma=gamma, tree=tree)
    text = (list(first) * _COMPARED)[: min(_COMPARED, engine.context)]
    tie = 2 * agreement_of(engine, text, shape)
    return {
        name: _compare(engine, name, prompts, max_new_tokens, gamma, tree, repeats, tie, progress)
        for name, prompts in prompt_sets.items()
    }


def _compare(
    engine: Engine,
    name: str,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    gamma: int | None,
    tree: TreeShape | None,
    repeats: int,
    tie: float,
    progress: Progress,
) -> Comparison:
    totals = {False: _Totals(), True: _Totals()}
    ratios: list[float] = []
    identical, near_ties = True, 0
    progress(f"bench: {name}", 0, len(prompts) * repeats)
    for prompt in prompts:
        for repeat in range(repeats):
            found = {}
            for speculate in (False, True) if repeat % 2 == 0 else (True, False):
                drafts: dict[str, Any] = {"gamma": gamma, "tree": tree} if speculate else {"speculate": False}
                found[speculate] = engine.generate(list(prompt), Sampling(), max_new_tokens, **drafts)
                totals[speculate].add(found[speculate].stats)
            ratios.append(found[True].stats.tokens_per_second / found[False].stats.tokens_per_second)
            progress(f"bench: {name}", len(ratios), len(prompts) * repeats)
        if found[True].ids != found[False].ids:
            agreement = compare_greedy(engine, prompt, max_new_tokens, gamma, tie, tree)
            identical, near_ties = identical and agreement.passed, near_ties + agreement.near_ties
    plain, speculative = totals[False], totals[True]
    together = Stats(tokens=speculative.tokens, per_round=speculative.per_round, outcomes=speculative.outcomes)
    return Comparison(
        plain_speed=plain.tokens / plain.seconds,
        speculative_speed=speculative.tokens / speculative.seconds,
        tokens_per_round=together.tokens_per_round,
        acceptance=together.accepted / together.drafted if together.drafted else 0.0,
        drafted=together.drafted,
        accepted_by_position=together.accepted_by_position,
        accepted_by_rank=together.accepted_by_rank,
        host_fraction=speculative.host_seconds / speculative.seconds,
        speedup=median(ratios),
        speedup_range=(min(ratios), max(ratios)),
        identical_greedy=identical,
        near_ties=near_ties,
    )


def environment(engine: Engine) -> dict[str, object]:
    """Where the numbers were measured."""
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "onnxruntime": VERSION,
        "device": engine.device.name,
        "drafter": engine.drafter_name,
        "widths": list(engine.bundle.manifest.widths),
        "source": engine.bundle.manifest.sources["target"].name,
    }


def as_dict(engine: Engine, results: Mapping[str, Comparison]) -> dict[str, object]:
    """The JSON of a run: sets by name, then drafters."""
    sets = {name: {engine.drafter_name: result.as_dict()} for name, result in results.items()}
    return {"environment": environment(engine), "sets": sets}
