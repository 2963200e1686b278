"""What proposes tokens: the Drafter protocol and its kinds, prompt lookup, a draft model and nothing at all."""

from collections.abc import Sequence as Tokens
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specedge.runtime.model import Sequence
from specedge.runtime.philox import Purpose, uniform
from specedge.runtime.sample import Sampling, best, draw, probabilities
from specedge.runtime.tree import Proposal, TokenTree

NOTHING = Proposal(TokenTree.chain([]))  # made once: between two steps every line of Python runs from cold caches


class Drafter(Protocol):
    """Proposes continuations of a text whose last token is the root; gets the whole text each time, so it misses nothing."""

    drawn: bool
    """Whether proposals are drawn from q by chance; otherwise they are a function of the text."""

    def begin(self, prompt: Tokens[int]) -> None:
        """Forget the previous request and take in a prompt."""

    def room(self, length: int) -> int:
        """How many tokens can be drafted after a text of `length`."""

    def propose(self, history: Tokens[int], gamma: int) -> Proposal:
        """At most `gamma` tokens to follow `history`."""


class NoDrafter:
    """Proposes nothing: plain decoding."""

    drawn = False

    def begin(self, prompt: Tokens[int]) -> None:
        return

    def room(self, length: int) -> int:
        return 0

    def propose(self, history: Tokens[int], gamma: int) -> Proposal:
        return NOTHING


class LookupDrafter:
    """Prompt lookup: what followed the longest earlier occurrence of the text's suffix (Saxena 2023, "Prompt Lookup Decoding").

    Searches prompt and output; of equally long matches the most recent. `Proposal.evidence` is the length of the match.
    """

    drawn = False
    longest = 32
    """Suffixes are compared up to this length: longer ones decide nothing more."""

    def __init__(self, context: int) -> None:
        self._ids = np.zeros(context, np.int64)
        self._known = 0

    def begin(self, prompt: Tokens[int]) -> None:
        self._known = 0
        self._extend(prompt)

    def room(self, length: int) -> int:
        return len(self._ids) - length

    def propose(self, history: Tokens[int], gamma: int) -> Proposal:
        self._extend(history)
        start, matched = self._longest_match()
        if not matched:
            return NOTHING
        period = self._known - start  # a copy that reaches the end of the text goes on with itself
        tokens = [int(self._ids[start + index % period]) for index in range(gamma)]
        return Proposal(TokenTree.chain(tokens), evidence=matched)

    def _extend(self, history: Tokens[int]) -> None:
        self._ids[self._known : len(history)] = history[self._known :]
        self._known = len(history)

    def _longest_match(self) -> tuple[int, int]:
        """(index after the best earlier occurrence of the suffix, its length), length 0 for none."""
        text = self._ids[: self._known]
        ends = np.flatnonzero(text[:-1] == text[-1]) + 1
        matched = 0
        while len(ends):
            best_end, matched = int(ends[-1]), matched + 1
            longer = ends[ends > matched]
            longer = longer[text[longer - matched - 1] == text[-matched - 1]] if matched < len(text) else longer[:0]
            if matched == self.longest or not len(longer):
                return best_end, matched
            ends = longer
        return 0, 0


class DraftModel:
    """A smaller model of the same vocabulary, step by step.

    Its cache keeps the columns of whatever prefix the text still shares with what was fed; the rest, drafted or emitted, is
    fed with the next proposal, so rejected and unseen tokens need no bookkeeping.
    """

    drawn: bool

    def __init__(self, sequence: Sequence, sampling: Sampling, allowed: int) -> None:
        self._sequence, self._sampling = sequence, sampling
        self._allowed = min(allowed, sequence.role.vocab_size)
        self._fed: list[int] = []
        self._settled = 0  # so many fed tokens are known to be the text's
        self.drawn = not sampling.greedy

    def begin(self, prompt: Tokens[int]) -> None:
        self._sequence.truncate(0)
        self._fed, self._settled = [], 0
        self._feed(prompt[: self._sequence.role.context][:-1])

    def room(self, length: int) -> int:
        return max(self._sequence.role.context - length + 1, 0)

    def propose(self, history: Tokens[int], gamma: int) -> Proposal:
        if gamma == 0:
            return NOTHING
        self._rewind(history)
        row = self._feed(history[len(self._fed) :])
        tokens: list[int] = []
        distributions = []
        for index in range(gamma):
            if index:
                row = self._feed(tokens[-1:])
            if self.drawn:
                q = probabilities(row, self._sampling, self._allowed)
                tokens.append(draw(q, uniform(self._sampling.seed, len(history) - 1, Purpose.DRAFT, index)))
                distributions.append(q)
            else:
                tokens.append(best(row, self._allowed))
        return Proposal(TokenTree.chain(tokens), np.stack(distributions) if self.drawn else None)

    def _rewind(self, history: Tokens[int]) -> None:
        """Keep the common prefix of text and cache, short of the root, whose logits are always wanted."""
        end = min(len(self._fed), len(history) - 1)
        shared = self._settled
        while shared < end and self._fed[shared] == history[shared]:
            shared += 1
        del self._fed[shared:]
        self._sequence.truncate(shared)
        self._settled = len(history) - 1

    def _feed(self, ids: Tokens[int]) -> npt.NDArray[np.float32]:
        self._fed.extend(ids)
        row = self._sequence.prefill(ids)
        return np.zeros(0, np.float32) if row is None else row
