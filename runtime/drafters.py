"""What proposes tokens: the Drafter protocol, prompt lookup, a draft model, nothing at all; draft heads stand beside it."""

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specedge.runtime.control import Weigh
from specedge.runtime.law import Law
from specedge.runtime.rules import Children, Choose, Rule
from specedge.runtime.sample import Logits
from specedge.runtime.sequence import Sequence, common_beginning
from specedge.runtime.shape import TreeShape
from specedge.runtime.tree import ROOT, Proposal, TokenTree
from specedge.runtime.unrolled import Expansion, Unrolling
from specedge.runtime.vocabulary import DraftVocabulary

MAX_NODES = 1 << 30  # no limit of a drafter's own
NOTHING = Proposal(TokenTree.chain([]))  # made once: between two steps every line of Python runs from cold caches


class Drafter(Protocol):
    """Proposes continuations of a text whose last token is the root; gets the whole text each time, so it misses nothing."""

    def begin(self, prompt: Tokens[int], known: int = 0) -> int:
        """Take in a prompt, of which the target's cache holds the first `known` tokens; how many of these it may leave there.

        Those behind them are read again, and learnt. What the drafter knows of the same beginning it keeps, of another text
        nothing.
        """

    def room(self, length: int) -> int:
        """How many tokens can be drafted after a text of `length`."""

    def learn(self, target: Sequence, rows: Tokens[int]) -> None:
        """The target committed these rows of its last step: what draft heads read can be read (`Sequence.hidden`).

        Said of every token of the text but the root, in order; the last row is the one that predicted the root.
        """

    def propose(self, history: Tokens[int], shape: TreeShape, weigh: Weigh | None = None) -> Proposal:
        """Tokens to follow `history`: a tree of this shape, or a part of it; a drafter of chains takes its depth.

        A drafter that goes token by token ends a chain where `weigh` finds it long enough.
        """


class NoDrafter:
    """Proposes nothing: plain decoding."""

    def begin(self, prompt: Tokens[int], known: int = 0) -> int:
        return known

    def room(self, length: int) -> int:
        return 0

    def learn(self, target: Sequence, rows: Tokens[int]) -> None:
        return

    def propose(self, history: Tokens[int], shape: TreeShape, weigh: Weigh | None = None) -> Proposal:
        return NOTHING


class LookupDrafter:
    """Prompt lookup: what followed the longest earlier occurrence of the text's suffix (Saxena 2023, "Prompt Lookup Decoding").

    Searches prompt and output; of equally long matches the most recent. A token is as sure as matches of such a length, the
    tokens drafted before it included, turned out to be.
    """

    longest = 32
    """Suffixes are compared up to this length: longer ones decide nothing more."""
    rates = (0.15, 0.5, 0.75, 0.9, 0.95, 0.98)
    """Of matches of 1, 2-3, 4-7, 8-15, 16-31 and more tokens, those that went on for one more (SmolLM2-135M on the built-in
    prompts, chat below and copy above, within 0.15)."""

    def __init__(self, context: int) -> None:
        self._ids = np.zeros(context, np.int64)
        self._known = 0

    def begin(self, prompt: Tokens[int], known: int = 0) -> int:
        self._known = 0
        self._extend(prompt)
        return known

    def room(self, length: int) -> int:
        return len(self._ids) - length

    def learn(self, target: Sequence, rows: Tokens[int]) -> None:
        return

    def propose(self, history: Tokens[int], shape: TreeShape, weigh: Weigh | None = None) -> Proposal:
        self._extend(history)
        start, matched = self._longest_match()
        if not matched:
            return NOTHING
        period = self._known - start  # a copy that reaches the end of the text goes on with itself
        tokens = [int(self._ids[start + index % period]) for index in range(shape.depth)]
        lengths = (min((matched + depth).bit_length(), len(self.rates)) for depth in range(len(tokens)))
        return Proposal(TokenTree.chain(tokens), confidence=tuple(self.rates[length - 1] for length in lengths))

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


@dataclass(slots=True)
class Draft:
    """A tree in the making: its nodes so far, and what each follows."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    paths: list[tuple[int, ...]] = field(default_factory=list)
    """Tokens from below the root to each node."""

    def path(self, node: int) -> tuple[int, ...]:
        return () if node == ROOT else self.paths[node]

    def add(self, parent: int, token: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.paths.append((*self.path(parent), token))
        return len(self.tokens) - 1

    def visible(self, nodes: Tokens[int], fed: Tokens[int]) -> NDArray[np.bool_]:
        """[nodes, fed]: a node sees its ancestors, which all are `fed`, and itself."""
        column = {node: index for index, node in enumerate(fed)}
        sees = np.zeros((len(nodes), len(fed)), np.bool_)
        for row, node in enumerate(nodes):
            while node != ROOT:
                sees[row, column[node]] = True
                node = self.parents[node]
        return sees


def draft_tree(
    history: Tokens[int],
    shape: TreeShape,
    choose: Choose,
    after_root: Logits,
    grow: Callable[[Draft, Tokens[int]], Tokens[Logits]],
    weigh: Weigh | None = None,
) -> Proposal:
    """A tree of `shape`, level by level; `grow` gives the drafter's logits after nodes of the last level made.

    It is smaller where the rule finds no more tokens for a node, and a chain ends where `weigh` says so.
    """
    if weigh and shape.is_chain:
        return _draft_chain(history, shape.depth, choose, after_root, grow, weigh)
    rows: dict[int, Logits] = {ROOT: after_root}
    laws: dict[int, Law | None] = {}
    drafted = {ROOT: ROOT}  # node of the shape -> node of the tree
    draft = Draft()
    for level in shape.levels:
        for parent in sorted({shape.parents[node] for node in level} & drafted.keys()):
            wanted, node = shape.children(parent), drafted[parent]
            ranks = [shape.ranks[child] for child in wanted]
            chosen = choose(rows[node], history, draft.path(node), len(draft.tokens), ranks)
            laws[node] = chosen.law
            for child, token in zip(wanted, chosen.tokens, strict=False):
                drafted[child] = draft.add(node, token)
        inner = [drafted[node] for node in level if node in drafted and shape.children(node)]
        if inner:
            rows = dict(zip(inner, grow(draft, inner), strict=True))
    drawn = {node: law for node, law in laws.items() if law is not None}
    tree = TokenTree(tuple(draft.tokens), tuple(draft.parents))
    return Proposal(tree, drawn.__getitem__ if drawn else None)


def _draft_chain(
    history: Tokens[int],
    longest: int,
    choose: Choose,
    row: Logits,
    grow: Callable[[Draft, Tokens[int]], Tokens[Logits]],
    weigh: Weigh,
) -> Proposal:
    """A chain, token by token, as long as `weigh` finds the next one worth it.

    A token that was drawn is left out for the law it was drawn from, never for itself; one that is a point mass stays, for the
    control to learn from.
    """
    draft, laws, confidence = Draft(), dict[int, Law](), list[float]()
    node = ROOT
    while True:
        chosen = choose(row, history, draft.path(node), len(draft.tokens), (0,))
        if not chosen.tokens:
            break
        confidence.append(_confidence(row, chosen))
        worth = weigh(confidence)
        if chosen.law is not None:
            if worth < len(confidence):
                break
            laws[node] = chosen.law
        node = draft.add(node, chosen.tokens[0])
        if len(draft.tokens) >= min(worth, longest):
            break
        (row,) = grow(draft, [node])
    tokens = draft.tokens
    return Proposal(TokenTree.chain(tokens), laws.__getitem__ if laws else None, tuple(confidence[: len(tokens)]))


def _confidence(logits: Logits, chosen: Children) -> float:
    """The largest probability of the law that a token was drawn from; of a token chosen by score, its own."""
    if chosen.law is not None:
        return float(chosen.law.p.max() / chosen.law.mass)
    (token,) = chosen.tokens
    return float(np.exp(logits[token] - logits.max()) / np.exp(logits - logits.max()).sum())


class DraftModel:
    """A smaller model of the same vocabulary: in one call where a graph drafts the shape, else level by level down the tree.

    Its cache holds the text up to the last proposal's root and then the nodes of that proposal that had children. The next
    proposal keeps the columns of the path that was emitted and feeds whatever else is new, so rejected and unseen tokens
    need no bookkeeping.
    """

    def __init__(
        self,
        sequence: Sequence,
        rule: Rule,
        unrolling: Unrolling | None = None,
        vocabulary: DraftVocabulary | None = None,  # where the draft's ids are some of the target's
    ) -> None:
        self._sequence, self._rule, self._unrolling = sequence, rule, unrolling
        self._vocabulary = vocabulary or DraftVocabulary.whole(sequence.role.vocab_size)
        self._tree = TokenTree.chain([])
        self._fed: list[int] = []  # nodes of the tree in the cache, in the order of their columns
        self._settled = 0  # columns before these: so much of the text

    def begin(self, prompt: Tokens[int], known: int = 0) -> int:
        sequence = self._sequence
        self._tree, self._fed = TokenTree.chain([]), []
        text = prompt[:-1] if self.room(len(prompt)) else []
        kept = min(common_beginning(sequence.text, text), known)
        sequence.truncate(kept)
        sequence.prefill(text[kept:])
        self._settled = len(text)
        return known

    def room(self, length: int) -> int:
        return max(self._sequence.role.context - length + 1, 0)

    def learn(self, target: Sequence, rows: Tokens[int]) -> None:
        return

    def propose(self, history: Tokens[int], shape: TreeShape, weigh: Weigh | None = None) -> Proposal:
        if not shape.parents:
            return NOTHING
        self._rewind(history)
        expansion = self._unrolling.covering(shape) if self._unrolling and self._rule.in_graph else None
        if expansion:
            return self._in_one_call(expansion, history, shape)
        proposal = draft_tree(history, shape, self._rule.choose, self._take_in(history), self._grow, weigh)
        self._tree = proposal.tree
        return proposal

    def _in_one_call(self, expansion: Expansion, history: Tokens[int], shape: TreeShape) -> Proposal:
        sequence, in_graph = self._sequence, self._rule.in_graph
        assert in_graph is not None
        unread = history[sequence.length :]
        if len(unread) > (most := expansion.width or sequence.role.chunk):
            sequence.prefill(unread[:-most])
            unread = unread[-most:]
        noise = in_graph.noise(history, expansion.depths, self._vocabulary.ids, sequence.role.mask_value)
        drafted = expansion.draft(unread, noise, {})
        proposal = expansion.propose(drafted, shape, history, in_graph, self._vocabulary.widen)
        self._tree, self._settled = proposal.tree, len(history)
        whole = len(proposal.tree.tokens) == len(shape.parents)
        room = sequence.role.context - len(history)
        fed = [node for node in expansion.fed if node < len(shape.parents)][:room] if whole else []  # else feed them again
        rows = [*range(len(unread)), *(drafted.width + expansion.fed.index(node) for node in fed)]
        sequence.append(drafted.columns, rows, unread)
        self._fed = fed
        return proposal

    def _rewind(self, history: Tokens[int]) -> None:
        """Keep the columns of what was emitted, short of the root, whose logits are always wanted."""
        path = self._tree.follow(history[self._settled : len(history) - 1])
        kept = [node for node in path if node in self._fed]
        columns = [self._fed.index(node) for node in kept]
        self._sequence.keep(self._settled, columns, [self._tree.tokens[node] for node in kept])
        self._tree, self._fed = TokenTree.chain([]), []

    def _take_in(self, history: Tokens[int]) -> Logits:
        """Feed the rest of the text; the logits after the root."""
        row = self._sequence.prefill(history[self._sequence.length :])
        assert row is not None
        self._settled = len(history)
        return self._vocabulary.widen(row)

    def _grow(self, draft: Draft, nodes: Tokens[int]) -> list[Logits]:
        """Feed these nodes, whose parents are in the cache; the logits after each."""
        rows: list[Logits] = []
        widest = self._sequence.widest
        for start in range(0, len(nodes), widest):
            piece = nodes[start : start + widest]
            self._fed.extend(piece)
            positions = [self._settled - 1 + len(draft.paths[node]) for node in piece]
            logits = self._sequence.grow([draft.tokens[node] for node in piece], positions, draft.visible(piece, self._fed))
            rows.extend(self._vocabulary.widen(logits if len(nodes) <= widest else logits.copy()))  # a view until the next step
        return rows
