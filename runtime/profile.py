"""What decoding costs on this machine, measured: whether speculation pays, and with which gamma."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from specedge.errors import UsageError
from specedge.progress import Progress, silent
from specedge.runtime.plan import break_even
from specedge.runtime.results import Stats
from specedge.runtime.sample import Sampling

if TYPE_CHECKING:
    from specedge.runtime.generate import Engine

FORMAT = 2
_PAST = 128  # tokens before the steps that are timed
_STEPS, _BLOCKS = 6, 5  # of every width, in turn; the median of all
_GAMMAS = (1, 2, 4, 8)
_MARGIN = 1.05  # speculation must promise this much, as `control` asks


@dataclass(frozen=True, slots=True)
class Drafting:
    """Rounds of one gamma: tokens each emitted, share of them that drafted anything, milliseconds of drafting and of the host.

    `h_ms` is what a round takes beside drafting and its step. `speedup` is that over plain decoding of the same prompts in the
    same run, all together.
    """

    tokens_per_round: float
    drafting: float
    d_ms: float
    h_ms: float
    speedup: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Milliseconds of a target's step by width `t_ms`, of the host in a plain round `h_ms`, and what drafting does by gamma.

    Steps are timed by themselves, the rest while prompts are answered.

    `acceptance` is, of the longest chain, the share of drafting rounds that accepted each position.
    """

    format: int
    drafter: str
    t_ms: dict[str, float]
    h_ms: float
    acceptance: tuple[float, ...]
    drafts: dict[str, Drafting]

    def __post_init__(self) -> None:
        numbers = [int(key) for key in (*self.t_ms, *self.drafts)]  # a ValueError if one is none
        if self.format != FORMAT or not self.drafts or min(numbers) < 1 or "1" not in self.t_ms or not self.plain_ms > 0:
            raise ValueError(f"not a profile of format {FORMAT}: steps {self.t_ms}, drafts {list(self.drafts)}")

    def step_ms(self, width: int) -> float:
        """Of a step of `width` tokens: linear between the widths timed."""
        widths = sorted(map(int, self.t_ms))
        return float(np.interp(width, widths, [self.t_ms[str(one)] for one in widths]))

    def step_cost(self, width: int) -> float:
        """A round of a step of so many tokens, drafting left out, over a plain round."""
        rest = self.h_ms if width == 1 else self._by_gamma(width - 1, "h_ms")
        return (self.step_ms(width) + rest) / self.plain_ms

    def draft_cost(self, gamma: int) -> float:
        """Drafting a chain of `gamma`, over a plain round."""
        return self._by_gamma(gamma, "d_ms") / self.plain_ms

    def predicted(self, gamma: int) -> float:
        """S = E / (d + v + h), with steps timed by themselves (docs/contract.md): whether these tell what rounds take."""
        drafting = self._by_gamma(gamma, "drafting")
        step = drafting * self.step_ms(gamma + 1) + (1 - drafting) * self.step_ms(1)
        expected = self._by_gamma(gamma, "tokens_per_round")
        return expected * self.plain_ms / (self._by_gamma(gamma, "d_ms") + step + self._by_gamma(gamma, "h_ms"))

    @property
    def plain_ms(self) -> float:
        """Of a plain round."""
        return self.t_ms["1"] + self.h_ms

    @property
    def gammas(self) -> list[int]:
        return sorted(map(int, self.drafts))

    @property
    def best_gamma(self) -> int:
        """The gamma of the best prediction, 0 where none promises enough."""
        best = max(self.gammas, key=self.predicted, default=0)
        return best if best and self.predicted(best) >= _MARGIN else 0

    def as_dict(self) -> dict[str, object]:
        """The keys of the JSON contract (docs/contract.md)."""
        best = self.best_gamma
        shown = best or max(self.gammas, key=self.predicted, default=0)
        plain = self.plain_ms
        even = break_even(shown, self.draft_cost(shown) / shown, self.step_cost(shown + 1)) if shown else None
        return {
            "drafter": self.drafter,
            "t_ms": self.t_ms,
            "d": {gamma: drafted.d_ms / plain for gamma, drafted in self.drafts.items()},
            "h": {"0": self.h_ms / plain} | {gamma: drafted.h_ms / plain for gamma, drafted in self.drafts.items()},
            "acceptance": list(self.acceptance),
            "tokens_per_round": {gamma: drafted.tokens_per_round for gamma, drafted in self.drafts.items()},
            "break_even": even,
            "predicted_speedup": {str(gamma): self.predicted(gamma) for gamma in self.gammas},
            "measured_speedup": {gamma: drafted.speedup for gamma, drafted in self.drafts.items()},
            "advice": {"speculate": best > 0, "gamma": best},
        }

    def _by_gamma(self, gamma: int, name: str) -> float:
        """Linear between the gammas measured."""
        values = [getattr(self.drafts[str(one)], name) for one in self.gammas]
        return float(np.interp(gamma, self.gammas, values)) if values else 0.0


def measure(
    engine: "Engine", prompts: Sequence[Sequence[int]], tokens: int = 48, repeats: int = 2, progress: Progress = silent
) -> Profile:
    """Time steps of every width in turn, then greedy answers to the prompts, plain and at every gamma in turn.

    Raises:
        UsageError: A device is emulated, or nothing can be drafted.
    """
    if engine.emulated:
        raise UsageError(f"device {engine.emulated[0]!r}: is emulated here, and an emulator's time says nothing; time it there")
    gammas = gammas_of(engine)
    if not gammas or not prompts:
        raise UsageError(f"profile: {engine.bundle.path} verifies no drafts, or there are no prompts; nothing to compare")
    total = len(prompts) * repeats
    progress("profile: steps", 0, 1)
    t_ms = time_steps(engine, sorted({1, *(gamma + 1 for gamma in gammas)}))
    progress("profile: steps", 1, 1)
    stats: dict[int, list[Stats]] = {gamma: [] for gamma in (0, *gammas)}
    for gamma in stats:  # what is opened when it is first needed is opened now
        engine.generate(list(prompts[0]), Sampling(), 8, **_asked(gamma))
    progress("profile: prompts", 0, total)
    for done in range(total):
        prompt, turn = list(prompts[done % len(prompts)]), done // len(prompts)
        order = [0, *gammas] if turn % 2 == 0 else [*reversed(gammas), 0]
        for gamma in order:
            stats[gamma].append(engine.generate(prompt, Sampling(), tokens, **_asked(gamma)).stats)
        progress("profile: prompts", done + 1, total)
    totals = {gamma: total_of(each) for gamma, each in stats.items()}
    return Profile(
        FORMAT,
        engine.drafter_name,
        {str(width): ms for width, ms in t_ms.items()},
        host_ms(totals[0]),
        tuple(totals[gammas[-1]].accepted_by_position),
        {str(gamma): _drafting(totals[gamma], totals[0]) for gamma in gammas},
    )


def _asked(gamma: int) -> dict[str, Any]:
    return {"gamma": gamma} if gamma else {"speculate": False}


def gammas_of(engine: "Engine") -> list[int]:
    """The chains that are profiled: of one token, as long as can be, what is exported, and as usual where that is every width.

    The bundle's tree is no chain; static graphs pad shorter ones.
    """
    made = engine.bundle.manifest
    tree = {len(made.tree) + 1} if made.tree else set()
    widths = {*made.widths} - tree
    longest = min(max(widths) - 1, engine.deepest)
    any_width = any(graph.width is None for graph in engine.target.role.graphs)
    asked = {1, longest, *(width - 1 for width in widths), *(_GAMMAS if any_width else ())}
    return sorted(gamma for gamma in asked if 1 <= gamma <= longest)


def time_steps(engine: "Engine", widths: Sequence[int]) -> dict[int, float]:
    """Milliseconds of a target's step by width, medians of blocks in turn."""
    target = engine.target
    past = min(_PAST, engine.context - max(widths))
    ids = [index % engine.bundle.manifest.allowed_ids for index in range(past + max(widths))]
    target.truncate(0)
    target.prefill(ids[:past])
    times: dict[int, list[float]] = {width: [] for width in widths}
    for _ in range(_BLOCKS):
        for width in widths:
            target.step(ids[past : past + width])  # the first after another width is not like the others
            for _ in range(_STEPS):
                start = time.perf_counter()
                target.step(ids[past : past + width])
                times[width].append(1e3 * (time.perf_counter() - start))
    target.truncate(0)
    return {width: median(found) for width, found in times.items()}


def _drafting(total: Stats, plain: Stats) -> Drafting:
    drafting = sum(drafted > 0 for drafted, _ in total.per_round) / max(total.rounds, 1)
    return Drafting(
        tokens_per_round=total.tokens_per_round,
        drafting=drafting,
        d_ms=1e3 * total.draft_seconds / max(total.rounds, 1),
        h_ms=host_ms(total),
        speedup=total.tokens_per_second / plain.tokens_per_second if plain.tokens else float("nan"),
    )


def host_ms(total: Stats) -> float:
    """Milliseconds that a round takes beside drafting and its step."""
    return 1e3 * (total.decode_seconds - total.draft_seconds - total.verify_seconds) / max(total.rounds, 1)


def total_of(stats: Sequence[Stats]) -> Stats:
    """Requests together."""
    total = Stats()
    for one in stats:
        total.tokens += one.tokens
        total.per_round += one.per_round
        total.outcomes += one.outcomes
        total.draft_seconds += one.draft_seconds
        total.verify_seconds += one.verify_seconds
        total.decode_seconds += one.decode_seconds
    return total
