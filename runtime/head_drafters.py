"""Draft heads as drafters: they read what the target says of its own text."""

from collections.abc import Sequence as Tokens

import numpy as np
from numpy.typing import NDArray

from specedge.runtime.control import Weigh
from specedge.runtime.drafters import MAX_NODES, NOTHING, Draft, draft_tree
from specedge.runtime.eagle import EagleHead
from specedge.runtime.heads import MedusaHeads
from specedge.runtime.rules import Rule
from specedge.runtime.sample import Logits
from specedge.runtime.sequence import Sequence, common_beginning
from specedge.runtime.shape import TreeShape
from specedge.runtime.tree import ROOT, Proposal


class MedusaDrafter:
    """Medusa heads: every token of a proposal from one hidden state of the target, in one call (`heads.MedusaHeads`).

    What a head drafts does not depend on the tokens drafted before it, so all nodes of a level have the same logits.
    """

    def __init__(self, heads: MedusaHeads, rule: Rule) -> None:
        self._heads, self._choose = heads, rule.choose
        self._hidden: NDArray[np.float32] | None = None

    def begin(self, prompt: Tokens[int], known: int = 0) -> int:
        self._hidden = None  # a prompt of one token has none before the first round
        return max(min(known, len(prompt) - 2), 0)  # the row that predicts the root is read again

    def room(self, length: int) -> int:
        return MAX_NODES

    def learn(self, target: Sequence, rows: Tokens[int]) -> None:
        self._hidden = target.hidden(rows[-1])

    def propose(self, history: Tokens[int], shape: TreeShape, weigh: Weigh | None = None) -> Proposal:
        shape = shape.within(self._heads.head.depth, len(shape.parents))
        if self._hidden is None or not shape.parents:
            return NOTHING
        levels = self._heads.logits(self._hidden)

        def grow(draft: Draft, nodes: Tokens[int]) -> list[Logits]:
            return [levels[len(draft.paths[node])] for node in nodes]

        return draft_tree(history, shape, self._choose, levels[0], grow, weigh)


class EagleDrafter:
    """An EAGLE head: its cache holds true features of committed tokens only, those of its own drafts are thrown away.

    So a proposal depends on the text alone, as if the head had been fed all of it afresh. Features are read when a proposal is
    made, or a chunk of them has come.
    """

    def __init__(self, head: EagleHead, rule: Rule) -> None:
        self._head, self._rule = head, rule
        self._text: Tokens[int] = []  # as far as it is known here
        self._features: list[NDArray[np.float32]] = []  # [n, F] of tokens the head has not read

    def begin(self, prompt: Tokens[int], known: int = 0) -> int:
        read = min(common_beginning(self._head.text, prompt), known, len(prompt) - 1)
        self._head.restart(prompt[: max(read, 1)])
        self._text, self._features = prompt, []
        return self._head.cache.length

    def room(self, length: int) -> int:
        return MAX_NODES

    def learn(self, target: Sequence, rows: Tokens[int]) -> None:
        self._features.append(target.hidden(rows))
        length = self._head.cache.length
        count = min(sum(map(len, self._features)), len(self._text) - length - 2)  # the last known one is read to draft
        if count >= self._head.role.chunk:
            self._head.read(*self._take(self._text[: length + count + 1]))

    def propose(self, history: Tokens[int], shape: TreeShape, weigh: Weigh | None = None) -> Proposal:
        self._text = history
        if len(history) < 2 or not shape.parents:  # nothing is known of a prompt of one token
            return NOTHING
        tokens, features = self._take(history)
        head, in_graph = self._head, self._rule.in_graph
        expansion = head.unrolling.covering(shape) if in_graph else None
        if expansion and in_graph:
            noise = in_graph.noise(history, expansion.depths, head.vocabulary.ids, head.role.mask_value)
            drafted = head.draft(expansion, tokens, features, noise)
            return expansion.propose(drafted, shape, history, in_graph, head.vocabulary.widen)
        logits, state = head.read(tokens, features)
        growth = _Growth(head, state)
        proposal = draft_tree(history, shape, self._rule.choose, logits, growth, weigh)
        head.truncate(growth.settled)
        return proposal

    def _take(self, text: Tokens[int]) -> tuple[Tokens[int], NDArray[np.float32]]:
        """The tokens of `text` that the head has not read, and the features of those before them."""
        tokens = text[self._head.cache.length + 1 :]
        features = np.concatenate(self._features)
        self._features = [features[len(tokens) :]]
        return tokens, features[: len(tokens)]


class _Growth:
    """Feeds an EAGLE head its own drafts, level by level, behind the text it has read."""

    def __init__(self, head: EagleHead, state: NDArray[np.float32]) -> None:
        self.settled = head.cache.length
        self._head = head
        self._states = {ROOT: state}
        self._fed: list[int] = []

    def __call__(self, draft: Draft, nodes: Tokens[int]) -> list[Logits]:
        rows: list[Logits] = []
        widest = self._head.widest or len(nodes)
        for start in range(0, len(nodes), widest):
            piece = nodes[start : start + widest]
            self._fed.extend(piece)
            states = np.stack([self._states[draft.parents[node]] for node in piece])
            positions = np.array([self.settled - 1 + len(draft.paths[node]) for node in piece])
            sees = draft.visible(piece, self._fed)
            logits, fed_back = self._head.grow([draft.tokens[node] for node in piece], states, positions, sees)
            self._states |= dict(zip(piece, fed_back, strict=True))
            rows += logits
        return rows
