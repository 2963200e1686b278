"""What a request gives back: tokens, counts and the finished result."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from specedge.runtime.decode import Round
from specedge.runtime.tree import ROOT, Nodes, children_of, depths

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Token:
    """One emitted token and the text it released; `round` counts from 0, `drafted` says that it was proposed and accepted.

    `log_probability`, if it was asked for, is the model's own: before penalties, temperature and filters, in nats.
    """

    id: int
    text: str
    round: int
    log_probability: float | None = None
    drafted: bool = False


class Outcome(NamedTuple):
    """What became of a drafted tree: its parents, the accepted nodes, and the tokens emitted, each judged at one node."""

    parents: Nodes
    nodes: Nodes
    tokens: int


@dataclass(slots=True)
class Stats:
    """Counts and seconds of one request; `per_round` holds (drafted, accepted) of every round.

    `reused_tokens` of the prompt were in the cache from the request before. Of those `proposed` by the drafter, control had
    the drafted ones verified; `discarded` ones came out of a judgement, and nobody saw them: the text had ended.

    `decode_seconds` are those of the rounds, of which `graph_seconds` passed inside the graphs; the rest is the host's.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    proposed: int = 0
    discarded: int = 0
    per_round: list[tuple[int, int]] = field(default_factory=list)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    decode_seconds: float = 0.0
    graph_seconds: float = 0.0

    def copy(self) -> "Stats":
        return replace(self, per_round=list(self.per_round), outcomes=Counter(self.outcomes))

    def add(self, round_: Round, emitted: int, whole: bool = True) -> None:
        """Count a round of which the first `emitted` tokens came out; unless it is `whole`, more may come."""
        nodes = round_.nodes[:emitted]
        self.tokens += emitted
        self.proposed += round_.proposed
        self.discarded += round_.judged - emitted if whole else 0
        self.per_round.append((len(round_.tree.parents), len(nodes)))
        self.outcomes[Outcome(round_.tree.parents, nodes, emitted)] += 1
        self.draft_seconds += round_.draft_seconds
        self.verify_seconds += round_.verify_seconds
        self.decode_seconds += round_.seconds

    @property
    def rounds(self) -> int:
        return len(self.per_round)

    @property
    def drafted(self) -> int:
        return sum(drafted for drafted, _ in self.per_round)

    @property
    def accepted(self) -> int:
        return sum(accepted for _, accepted in self.per_round)

    @property
    def tokens_per_second(self) -> float:
        """Prefill left out."""
        return self.tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def accepted_by_position(self) -> list[float]:
        """For every depth of the drafted trees (on a chain: position), the share of rounds that accepted a node of it."""
        drafted, accepted = Counter[int](), Counter[int]()
        for outcome, count in self.outcomes.items():
            drafted.update(dict.fromkeys(range(max(depths(outcome.parents))), count))
            accepted.update(dict.fromkeys(range(len(outcome.nodes)), count))
        return [accepted[position] / drafted[position] for position in sorted(drafted)]

    @property
    def accepted_by_rank(self) -> list[list[float]]:
        """[depth][rank among siblings]: the chance that a reached node's child of that rank is the one accepted (`best_shape`).

        A child is on trial only where none before it was taken, and nodes may have more or fewer children: the chance is its
        share of its own trials, times that of all before it failing. So a row sums to 1 at most.
        """
        tried, taken, there = Counter[tuple[int, int]](), Counter[tuple[int, int]](), set[tuple[int, int]]()
        for outcome, count in self.outcomes.items():
            for depth, node in enumerate((ROOT, *outcome.nodes)[: outcome.tokens]):
                children = children_of(outcome.parents)[node + 1]
                there |= {(depth, rank) for rank in range(len(children))}
                hit = children.index(outcome.nodes[depth]) if depth < len(outcome.nodes) else None
                tried.update({(depth, rank): count for rank in range(len(children) if hit is None else hit + 1)})
                if hit is not None:
                    taken[depth, hit] += count
        table: list[list[float]] = []
        for depth, rank in sorted(there):
            table += [[]] if depth == len(table) else []
            left = 1.0 - sum(table[depth])
            table[depth].append(left * taken[depth, rank] / max(tried[depth, rank], 1))
        return table

    def as_dict(self) -> dict[str, object]:
        names = (
            "prompt_tokens",
            "reused_tokens",
            "tokens",
            "discarded",
            "rounds",
            "proposed",
            "drafted",
            "accepted",
            "tokens_per_round",
            "tokens_per_second",
            "accepted_by_position",
            "accepted_by_rank",
            "prefill_seconds",
            "draft_seconds",
            "verify_seconds",
            "decode_seconds",
            "graph_seconds",
        )
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request. `ids` includes the token that stopped it; `text` ends before a stop string."""

    ids: list[int]
    text: str
    finish_reason: FinishReason
    stats: Stats
    log_probabilities: list[float] | None = None
    """One per id, if they were asked for (`Token.log_probability`)."""
