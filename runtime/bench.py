"""Plain and speculative decoding side by side in one run."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from statistics import median

from specedge.progress import Progress, silent
from specedge.runtime.agreement import compare_greedy, width_agreement
from specedge.runtime.generate import Engine, Stats
from specedge.runtime.sample import Sampling


@dataclass(slots=True)
class _Totals:
    """Sums over the requests of one side."""

    tokens: int = 0
    seconds: float = 0.0
    host_seconds: float = 0.0
    per_round: list[tuple[int, int]] = field(default_factory=list)

    def add(self, stats: Stats, drafter_computes: bool) -> None:
        self.tokens += stats.tokens
        self.seconds += stats.decode_seconds
        self.host_seconds += stats.decode_seconds - stats.verify_seconds - drafter_computes * stats.draft_seconds
        self.per_round += stats.per_round

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def bench(
    engine: Engine,
    prompt_sets: Mapping[str, Sequence[Sequence[int]]],
    max_new_tokens: int = 96,
    gamma: int | None = None,
    repeats: int = 2,
    progress: Progress = silent,
) -> dict[str, object]:
    """Greedy tokens per second of every prompt set, plain and speculative in turn, prefill left out.

    `speedup` is the median over prompts and repeats of speculative over plain speed, `speedup_range` its extremes;
    `identical_greedy` says whether the ids were the same, near-ties aside (design.md §4.4).
    """
    first = next(iter(prompt_sets.values()))[0]
    for speculate in (False, True):
        engine.generate(list(first), Sampling(), 8, gamma=gamma, speculate=speculate)
    tie = 2 * max(width_agreement(engine, list(first)[:64]).values(), default=0.0)
    total = sum(len(prompts) for prompts in prompt_sets.values()) * repeats
    done = 0
    results: dict[str, object] = {}
    for name, prompts in prompt_sets.items():
        plain, speculative, ratios = _Totals(), _Totals(), []
        identical, near_ties = True, 0
        for prompt in prompts:
            for repeat in range(repeats):
                progress(f"bench: {name}", done, total)
                pair = {}
                for speculate in (False, True) if repeat % 2 == 0 else (True, False):
                    pair[speculate] = engine.generate(
                        list(prompt), Sampling(), max_new_tokens, gamma=gamma, speculate=speculate
                    )
                plain.add(pair[False].stats, False)
                speculative.add(pair[True].stats, engine.drafter_name != "lookup")
                ratios.append(_speed(pair[True].stats) / _speed(pair[False].stats))
                done += 1
                if repeat == 0 and pair[True].ids != pair[False].ids:
                    agreement = compare_greedy(engine, prompt, max_new_tokens, gamma, tie)
                    identical, near_ties = identical and agreement.passed, near_ties + agreement.near_ties
        results[name] = {
            engine.drafter_name: {
                "plain": {"tokens_per_s": plain.speed},
                "speculative": _describe(speculative),
                "speedup": median(ratios),
                "speedup_range": [min(ratios), max(ratios)],
                "identical_greedy": identical,
                "near_ties": near_ties,
            }
        }
        progress(f"bench: {name}", done, total)
    return {"environment": environment(engine), "sets": results}


def environment(engine: Engine) -> dict[str, object]:
    """Where the numbers were measured."""
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "onnxruntime": version("onnxruntime"),
        "device": engine.device.name,
        "widths": list(engine.bundle.manifest.widths),
        "source": engine.bundle.manifest.sources["target"].name,
    }


def _describe(totals: _Totals) -> dict[str, object]:
    drafted, accepted = (sum(counts) for counts in zip(*totals.per_round, strict=True))
    merged = Stats(per_round=totals.per_round)
    return {
        "tokens_per_s": totals.speed,
        "tokens_per_round": totals.tokens / len(totals.per_round),
        "acceptance": accepted / drafted if drafted else 0.0,
        "drafted": drafted,
        "accepted_by_position": merged.accepted_by_position,
        "host_fraction": totals.host_seconds / totals.seconds,
    }


def _speed(stats: Stats) -> float:
    return stats.tokens / stats.decode_seconds
