"""What a request gives back: tokens, counts and the finished result."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from specedge.runtime.decode import Round

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Token:
    """One emitted token and the text it released; `round` counts from 0."""

    id: int
    text: str
    round: int


@dataclass(slots=True)
class Stats:
    """Counts and seconds of one request; `per_round` holds (drafted, accepted) of every round.

    `decode_seconds` are those of the rounds, of which `graph_seconds` passed inside the graphs; the rest is the host's.
    """

    prompt_tokens: int = 0
    tokens: int = 0
    per_round: list[tuple[int, int]] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    decode_seconds: float = 0.0
    graph_seconds: float = 0.0

    def add(self, round_: Round, emitted: int) -> None:
        self.per_round.append((len(round_.drafted), min(round_.accepted, emitted)))
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
        """Share of the drafts at each chain position that were accepted."""
        drafted, accepted = Counter[int](), Counter[int]()
        for drafted_count, accepted_count in self.per_round:
            drafted.update(range(drafted_count))
            accepted.update(range(accepted_count))
        return [accepted[position] / drafted[position] for position in sorted(drafted)]

    def as_dict(self) -> dict[str, object]:
        names = (
            "prompt_tokens",
            "tokens",
            "rounds",
            "drafted",
            "accepted",
            "tokens_per_round",
            "tokens_per_second",
            "accepted_by_position",
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
