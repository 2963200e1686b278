"""The loop: propose, verify, accept, commit (Leviathan et al. 2023; docs/contract.md)."""

import time
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from specedge.runtime.control import Control
from specedge.runtime.drafters import Drafter
from specedge.runtime.rules import Judge
from specedge.runtime.sample import Logits
from specedge.runtime.sequence import Sequence, common_beginning
from specedge.runtime.tree import ROOT, TokenTree


@dataclass(frozen=True, slots=True)
class Round:
    """What one round emitted and what it took: the verified `tree`, its accepted `nodes` as far as they were emitted.

    `proposed` tokens came from the drafter, of which control had some verified; `judged` came out of the judgement, of which an
    end of text cut some off. `log_probabilities` belong to `tokens`, if they were asked for.
    """

    tokens: tuple[int, ...]
    tree: TokenTree
    nodes: tuple[int, ...]
    log_probabilities: tuple[float, ...]
    proposed: int
    judged: int
    draft_seconds: float
    verify_seconds: float
    seconds: float


def prefill(target: Sequence, drafter: Drafter, prompt: Tokens[int], reuse: bool = False) -> int:
    """Take in all of a prompt but its last token, the first root; how many of its tokens were in the cache already.

    With `reuse` what the cache holds of a text that begins like it stays there, as far as the drafter can do without.
    """
    known = drafter.begin(prompt, common_beginning(target.text, prompt[:-1]) if reuse else 0)
    target.truncate(known)
    target.prefill(prompt[known:-1], lambda rows: drafter.learn(target, rows))
    return known


def decode(
    target: Sequence,
    drafter: Drafter,
    control: Control,
    judge: Judge,
    prompt: Tokens[int],
    limit: int,
    stop_ids: Collection[int],
    log_probability: Callable[[Logits, int], float] | None = None,
) -> Iterator[Round]:
    """Rounds of at most `limit` tokens, all fitting the context, after a prefilled `prompt`; one of `stop_ids` ends them."""
    history, end = list(prompt), len(prompt) + limit
    while len(history) < end:
        start = time.perf_counter()
        room = min(target.role.context - len(history), target.widest - 1, drafter.room(len(history)))
        proposal = drafter.propose(history, control.ask(end - len(history) - 1, room), control.weigh)
        guess, confidence = proposal.tree, proposal.confidence
        proposal = proposal.first(control.take(confidence, len(guess.tokens), proposal.q is not None))
        tree = proposal.tree
        drafted = time.perf_counter()

        logits = target.step([history[-1], *tree.tokens], tree)
        verified = time.perf_counter()

        accepted = judge(proposal, logits, history)
        path = [*(tree.tokens[node] for node in accepted.nodes), accepted.token]
        tokens = path[: next((index + 1 for index, token in enumerate(path) if token in stop_ids), len(path))]
        rows = [0, *(node + 1 for node in accepted.nodes)][: len(tokens)]  # each gave the token that follows it
        target.commit(rows)
        drafter.learn(target, rows)
        scores = (
            [log_probability(logits[row], token) for row, token in zip(rows, tokens, strict=True)] if log_probability else ()
        )
        agreed = guess.follow(tokens)
        more = len(agreed) < len(tokens) and bool(guess.children(agreed[-1] if agreed else ROOT))
        control.observe(confidence, len(agreed), len(agreed) + more)
        history += tokens
        nodes = accepted.nodes[: len(tokens)]
        done = time.perf_counter()
        counts = len(guess.tokens), len(path)
        yield Round(tuple(tokens), tree, nodes, tuple(scores), *counts, drafted - start, verified - drafted, done - start)
        if tokens[-1] in stop_ids:
            return
