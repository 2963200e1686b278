"""Exact laws of what the acceptance rules emit: the rules run on every kind of random number there is, round after round."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import numpy as np

from specedge.runtime.accept import Accepted
from specedge.runtime.law import Floats, Law
from specedge.runtime.philox import Numbers, Purpose
from specedge.runtime.sample import Logits, Sampling
from specedge.runtime.sampler import Sampler
from specedge.runtime.shape import TreeShape
from specedge.runtime.tree import ROOT, Laws, TokenTree

Tokens = tuple[int, ...]
LawOf = Mapping[Tokens, float]  # tokens emitted -> probability
Model = Callable[[Tokens], Logits]  # text -> logits of what follows
Key = tuple[int, Purpose, int]  # position, purpose, index

PROMPT: Tokens = (0,)
LAST = math.nextafter(1.0, 0.0)
SAME = 1e-10

SAMPLINGS = [
    Sampling(1.0),
    Sampling(0.7, top_k=2),
    Sampling(1.3, top_p=0.8),
    Sampling(0.9, top_k=3, top_p=0.9),
    Sampling(1.1, min_p=0.25),
    Sampling(0.8, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),  # p depends on the whole text
]


# Language models.


def logits_of(*p: float) -> Logits:
    with np.errstate(divide="ignore"):
        return np.log(np.array(p)).astype(np.float32)


def always(*p: float) -> Model:
    return lambda text: logits_of(*p)


def language(vocab: int, seed: int, order: int = 9) -> Model:
    """A model in which every text has logits of its own, or only the last `order` tokens count."""

    @cache
    def logits(text: Tokens) -> Logits:
        seen = text[len(text) - min(order, len(text)) :]
        return np.random.default_rng([seed, *seen]).normal(0, 1.5, vocab).astype(np.float32)

    return logits


@cache
def law_after(model: Model, sampling: Sampling, text: Tokens, path: Tokens = ()) -> Law:
    """The law after `text` and a drafted `path`; writing to it is an error."""
    law = Sampler(sampling, len(model(text)), len(PROMPT)).law(model(text + path), text, path)
    law.p.setflags(write=False)
    return law


def random_tree(vocab: int, *seed: int) -> TokenTree:
    rng = np.random.default_rng(seed)
    nodes: list[tuple[int, int]] = []
    for _ in range(rng.integers(0, 8)):
        node = (int(rng.integers(ROOT, len(nodes))), int(rng.integers(vocab)))
        if node not in nodes:
            nodes.append(node)
    return TokenTree(tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes))


# Integration over random numbers.

_TINY = 1e-13  # cuts closer than this are one


@dataclass(frozen=True, slots=True)
class Cell:
    """Where a number lies, and the point that stands for all of it."""

    start: float
    end: float
    point: float


class OpenNumberError(Exception):
    """A number that is not known well enough, and the cells it may be in with their probabilities."""

    def __init__(self, key: Key, cells: Iterable[tuple[Cell, float]]) -> None:
        self.key, self.cells = key, cells


class Line:
    """One way through the random choices of a run."""

    def __init__(self, known: Mapping[Key, Cell]) -> None:
        self._known = known
        self.asked: list[Key] = []

    def number(self, key: Key, cuts: Iterable[float]) -> float:
        """A number uniform in [0, 1), for a decision that changes at `cuts` only.

        Each cell between cuts is represented by points just inside them: were a decision to change anywhere else, the
        law would come out wrong.
        """
        self.asked.append(key)
        cell = self._known.get(key, _WHOLE)
        inner = sorted(cut for cut in cuts if cell.start + _TINY < cut < cell.end - _TINY)
        if inner or key not in self._known:
            raise OpenNumberError(key, _split(cell, inner))
        return cell.point

    def choice(self, key: Key, shares: Sequence[float] | Floats) -> int:
        """An index with these probabilities."""
        self.asked.append(key)
        if key not in self._known:
            raise OpenNumberError(key, [(Cell(i, i, i), float(share)) for i, share in enumerate(shares) if share > 0.0])
        return int(self._known[key].point)


_WHOLE = Cell(0.0, 1.0, 0.5)


def _split(cell: Cell, inner: Sequence[float]) -> Iterable[tuple[Cell, float]]:
    ends = [cell.start, *(b for a, b in pairwise([cell.start, *inner]) if b - a > _TINY), cell.end]
    for start, end in pairwise(ends):
        low, high = start + 1e-9 * (end - start), end - 1e-9 * (end - start)
        points = [point for point, is_cut in ((low, start > 0.0), (high, end < 1.0)) if is_cut] or [low, high]
        for point in points:
            yield Cell(start, end, point), (end - start) / (cell.end - cell.start) / len(points)


def integrate(run: Callable[[Line], Tokens]) -> LawOf:
    """Law of `run` over independent uniform numbers."""
    law: dict[Tokens, float] = defaultdict(float)
    pending: list[tuple[dict[Key, Cell], float]] = [({}, 1.0)]
    while pending:
        known, mass = pending.pop()
        try:
            law[run(Line(known))] += mass
        except OpenNumberError as number:
            pending += [({**known, number.key: cell}, mass * share) for cell, share in number.cells]
    return law


# Where the decisions of a rule change: written from the papers on arrays [V], not from the code.

Table = Mapping[tuple[Purpose, int], Sequence[float]]  # (ACCEPT, node) or (TOKEN, depth) -> cuts
Cuts = Callable[[TokenTree, Laws, Laws, int], Table]  # tree, p, q, vocabulary
Step = Callable[[Floats, Floats, Floats, int], tuple[Floats, Floats]]  # p_1, p_i, q_i, child i -> p_{i+1}, q_{i+1}


def excess(p: Floats, q: Floats) -> Floats:
    """norm(max(0, p - q)), or p."""
    left = np.maximum(p - q, 0.0)
    return left / left.sum() if left.any() else p


def remove(q: Floats, token: int) -> Floats:
    left = np.where(np.arange(len(q)) == token, 0.0, q)
    return left / left.sum() if left.any() else left


def right_step(first: Floats, p: Floats, q: Floats, token: int) -> tuple[Floats, Floats]:
    return excess(p, q), remove(q, token)


def point_mass_cuts(tree: TokenTree, p: Laws, q: Laws, vocab: int) -> Table:
    table: dict[tuple[Purpose, int], list[float]] = defaultdict(list)
    for node, depth in enumerate(tree.depths, start=ROOT):
        table[Purpose.TOKEN, depth] += p(node).dense(vocab).cumsum().tolist()
    return table


def recursive_cuts(tree: TokenTree, p: Laws, q: Laws, vocab: int, step: Step = right_step) -> Table:
    table: dict[tuple[Purpose, int], list[float]] = defaultdict(list)
    for node, depth in enumerate(tree.depths, start=ROOT):
        law = first = p(node).dense(vocab)
        left = q(node).dense(vocab) if tree.children(node) else law
        for child in tree.children(node):
            token = tree.tokens[child]
            table[Purpose.ACCEPT, child].append(float(law[token] / left[token]))
            law, left = step(first, law, left, token)
        table[Purpose.TOKEN, depth] += (law / law.sum()).cumsum().tolist()
    return table


# Rounds of a rule.

Accept = Callable[[TokenTree, Laws, Laws, Numbers], Accepted]
Draft = Callable[[Line, Tokens], tuple[TokenTree, Laws]]  # after a text: the tree, and the q that the rule is told


def no_q(node: int) -> Law:
    raise AssertionError(f"q after node {node} of a point mass")


def drawn(shape: TreeShape, drafter: Model, sampling: Sampling) -> Draft:
    """Children drawn from q without replacement, as many of the shape as q has tokens for."""

    def draft(line: Line, text: Tokens) -> tuple[TokenTree, Laws]:
        tree, drafted = TokenTree.chain([]), {ROOT: ROOT}  # node of the shape -> node of the tree
        for wanted, above in enumerate(shape.parents):
            if above not in drafted:
                continue
            parent = drafted[above]
            left = law_after(drafter, sampling, text, tree.path(parent)).dense(len(drafter(text)))
            for sibling in tree.children(parent):
                left = remove(left, tree.tokens[sibling])
            if left.any():
                token = line.choice((len(text) - 1, Purpose.DRAFT, wanted), left)
                drafted[wanted] = len(tree.tokens)
                tree = TokenTree((*tree.tokens, token), (*tree.parents, parent))
        return tree, lambda node: law_after(drafter, sampling, text, tree.path(node))

    return draft


@dataclass(frozen=True)
class Game:
    """A target, a way to draft, a rule with the places where its decisions change, and where its numbers come from."""

    target: Model
    sampling: Sampling
    draft: Draft
    accept: Accept
    cuts: Cuts
    key: Callable[[int, Key], Key] = lambda root, key: key
    tables: dict[tuple[Tokens, TokenTree], Table] = field(default_factory=dict, compare=False)


def play(game: Game, text: Tokens, line: Line) -> Tokens:
    """What one round after `text` emits."""
    tree, q = game.draft(line, text)
    root, known = len(text) - 1, (text, tree)

    def p(node: int) -> Law:
        return law_after(game.target, game.sampling, text, tree.path(node))

    if known not in game.tables:
        game.tables[known] = game.cuts(tree, p, q, len(game.target(text)))

    def uniform(seed: int, position: int, purpose: Purpose, index: int = 0) -> float:
        at = position - root - 1 if purpose is Purpose.TOKEN else index
        return line.number(game.key(root, (position, purpose, index)), game.tables[known].get((purpose, at), ()))

    accepted = game.accept(tree, p, q, Numbers(0, root, uniform))
    return (*(tree.tokens[node] for node in accepted.nodes), accepted.token)


def round_law(game: Game, text: Tokens) -> LawOf:
    """Law of what one round emits after `text`."""
    root = len(text) - 1

    def run(line: Line) -> Tokens:
        tokens = play(game, text, line)
        # No later round asks for a number of this one, so rounds are independent and laws of rounds may be chained.
        for position, purpose, _ in line.asked:
            assert root < position <= root + len(tokens) if purpose is Purpose.TOKEN else position == root
        return tokens

    return integrate(run)


def next_tokens(law_of_round: Callable[[Tokens], LawOf], text: Tokens, count: int) -> LawOf:
    """Law of the next `count` tokens, over as many rounds as they take."""
    law: dict[Tokens, float] = defaultdict(float)
    for tokens, mass in law_of_round(text).items():
        if len(tokens) >= count:
            law[tokens[:count]] += mass
            continue
        for rest, share in next_tokens(law_of_round, text + tokens, count - len(tokens)).items():
            law[tokens + rest] += mass * share
    return law


def chained_law(game: Game, count: int) -> LawOf:
    return next_tokens(lambda text: round_law(game, text), PROMPT, count)


def joint_law(game: Game, count: int) -> LawOf:
    """The same without a word about independence: all rounds are integrated at once, with the numbers that they share."""

    def run(line: Line) -> Tokens:
        text = PROMPT
        while len(text) < len(PROMPT) + count:
            text += play(game, text, line)
        return text[len(PROMPT) : len(PROMPT) + count]

    return integrate(run)


def plain_law(target: Model, sampling: Sampling, count: int) -> LawOf:
    def one(text: Tokens) -> LawOf:
        return {(token,): float(p) for token, p in enumerate(law_after(target, sampling, text).dense(len(target(text))))}

    return next_tokens(one, PROMPT, count)


def distance(one: LawOf, other: LawOf) -> float:
    return max(abs(one.get(tokens, 0.0) - other.get(tokens, 0.0)) for tokens in {*one, *other})


def first_token(law: LawOf, vocab: int) -> list[float]:
    return [sum(mass for tokens, mass in law.items() if tokens[0] == token) for token in range(vocab)]
