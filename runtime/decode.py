"""The loop: propose, verify, accept, commit (Leviathan et al. 2023; docs/contract.md)."""

import time
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from specedge.runtime.accept import Rule
from specedge.runtime.control import Control
from specedge.runtime.drafters import Drafter
from specedge.runtime.model import Sequence


@dataclass(frozen=True, slots=True)
class Round:
    """What one round emitted and what it took. `drafted` and `accepted` count verified drafts, `accepted` only emitted ones."""

    tokens: tuple[int, ...]
    drafted: tuple[int, ...]
    accepted: int
    draft_seconds: float
    verify_seconds: float
    seconds: float


def prefill(target: Sequence, drafter: Drafter, prompt: Tokens[int]) -> None:
    """Take in all of a prompt but its last token, the first root."""
    target.truncate(0)
    target.prefill(prompt[:-1])
    drafter.begin(prompt)


def decode(
    target: Sequence,
    drafter: Drafter,
    control: Control,
    rule: Rule,
    prompt: Tokens[int],
    limit: int,
    stop_ids: Collection[int],
) -> Iterator[Round]:
    """Rounds of at most `limit` tokens, all fitting the context, after a prefilled `prompt`; one of `stop_ids` ends them."""
    history, end = list(prompt), len(prompt) + limit
    while len(history) < end:
        start = time.perf_counter()
        root = len(history) - 1
        room = min(end - len(history) - 1, drafter.room(len(history)))
        proposal = drafter.propose(history, control.ask(room))
        guess = proposal.tree.tokens
        proposal = proposal.first(control.take(proposal.evidence, len(guess)))
        drafted = time.perf_counter()

        logits = target.step([history[root], *proposal.tree.tokens], proposal.tree)
        verified = time.perf_counter()

        accepted = rule(proposal, logits, root)
        path = [*(proposal.tree.tokens[node] for node in accepted.nodes), accepted.token]
        tokens = path[: next((index + 1 for index, token in enumerate(path) if token in stop_ids), len(path))]
        target.commit([0, *(node + 1 for node in accepted.nodes)][: len(tokens)])
        control.observe(proposal.evidence, agreement(guess, tokens), min(len(guess), len(tokens)))
        history += tokens
        kept = min(len(accepted.nodes), len(tokens))
        done = time.perf_counter()
        yield Round(tuple(tokens), proposal.tree.tokens, kept, drafted - start, verified - drafted, done - start)
        if tokens[-1] in stop_ids:
            return


def agreement(guess: Tokens[int], tokens: Tokens[int]) -> int:
    """Length of the common prefix."""
    matches = 0
    for guessed, token in zip(guess, tokens, strict=False):
        if guessed != token:
            break
        matches += 1
    return matches
