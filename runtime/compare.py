"""Drafters side by side on the same prompts in one run: what each adds, costs, promises and brings."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from specedge.errors import UsageError
from specedge.progress import Progress, silent
from specedge.runtime.generate import Engine
from specedge.runtime.profile import host_ms, time_steps, total_of
from specedge.runtime.results import Stats
from specedge.runtime.sample import Sampling
from specedge.runtime.shape import TreeShape


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """An engine and what it drafts every round."""

    name: str
    engine: Engine
    shape: TreeShape


@dataclass(frozen=True, slots=True)
class Row:
    """One way. `extra_bytes` are what its bundle holds beside the target; `accepted` of drafting rounds, by position.

    `d` is drafting, `v` the verifying step and `h` the host's share of a round, over a plain round; `predicted` is
    E / (d + v + h) with steps timed by themselves, `measured` tokens per second over plain decoding of the same prompts.
    """

    name: str
    nodes: int
    extra_bytes: int
    tokens_per_round: float
    accepted: tuple[float, ...]
    d: float
    v: float
    h: float
    predicted: float
    measured: float
    tokens_per_s: float

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def compare(ways: Sequence[Way], prompts: Sequence[Sequence[int]], tokens: int, progress: Progress = silent) -> tuple[Row, ...]:
    """Greedy answers to the prompts, plain and every way in turn; the first row is plain decoding.

    Raises:
        UsageError: There is no way, or a device is emulated.
    """
    if not ways or any(way.engine.emulated for way in ways):
        raise UsageError("compare: nothing to compare, or an emulated device, whose times say nothing")
    plain = ways[0].engine
    engines = list(dict.fromkeys(way.engine for way in ways))
    widths = {way.engine: {1, *(len(one.shape.parents) + 1 for one in ways if one.engine is way.engine)} for way in ways}
    steps = {engine: time_steps(engine, sorted(widths[engine])) for engine in engines}
    for way in ways:  # what is opened when it is first needed is opened now
        way.engine.generate(list(prompts[0]), Sampling(), 8, tree=way.shape)
    found: list[list[Stats]] = [[] for _ in range(1 + len(ways))]
    progress("compare drafters", 0, len(prompts))
    for done, prompt in enumerate(prompts, 1):
        found[0].append(plain.generate(list(prompt), Sampling(), tokens, speculate=False).stats)
        for stats, way in zip(found[1:], ways, strict=True):
            stats.append(way.engine.generate(list(prompt), Sampling(), tokens, tree=way.shape).stats)
        progress("compare drafters", done, len(prompts))
    base = total_of(found[0])
    step_ms, rest_ms = steps[plain][1], host_ms(base)
    round_ms = step_ms + rest_ms
    rows = [Row("plain", 0, 0, 1.0, (), 0.0, step_ms / round_ms, rest_ms / round_ms, 1.0, 1.0, base.tokens_per_second)]
    for stats, way in zip(found[1:], ways, strict=True):
        total = total_of(stats)
        nodes = len(way.shape.parents)
        drafting = sum(drafted > 0 for drafted, _ in total.per_round) / max(total.rounds, 1)
        own = steps[way.engine]
        d = 1e3 * total.draft_seconds / max(total.rounds, 1) / round_ms
        v = (drafting * own[nodes + 1] + (1 - drafting) * own[1]) / round_ms * (step_ms / own[1])
        h = host_ms(total) / round_ms
        rows.append(
            Row(
                name=way.name,
                nodes=nodes,
                extra_bytes=_extra_bytes(way.engine),
                tokens_per_round=total.tokens_per_round,
                accepted=tuple(total.accepted_by_position),
                d=d,
                v=v,
                h=h,
                predicted=total.tokens_per_round / (d + v + h),
                measured=total.tokens_per_second / base.tokens_per_second,
                tokens_per_s=total.tokens_per_second,
            )
        )
    return tuple(rows)


def _extra_bytes(engine: Engine) -> int:
    """Weights of the drafter in use."""
    manifest, name = engine.bundle.manifest, engine.drafter_name
    if name in manifest.roles:
        return manifest.roles[name].stored_bytes
    return manifest.heads[name].stored_bytes if name in manifest.heads else 0
