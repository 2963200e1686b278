"""The acceptance rules, as pure functions: which drafted tokens stay, and the one more token that follows them.

In all of them `p` and `q` give the target's and the drafter's law after a node (-1: the root), and are asked only for nodes
that are reached: rows off the path are never normalised. `numbers` are the round's. What each rule keeps exactly is shown by
integration over the numbers in tests/test_runtime_accept.py, test_runtime_block.py and test_runtime_coupled.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from specedge.runtime.law import Floats, Law
from specedge.runtime.philox import Numbers
from specedge.runtime.tree import ROOT, Laws, TokenTree

TYPICAL_EPSILON, TYPICAL_DELTA = 0.09, 0.3  # the values of Medusa's own code


@dataclass(frozen=True, slots=True)
class Accepted:
    """The drafted nodes that stay, from the root down, and the token after them."""

    nodes: tuple[int, ...]
    token: int


def accept_greedy(tree: TokenTree, best: Callable[[int], int]) -> Accepted:
    """The longest path the target's argmax takes itself, and its own next token; `best` gives the argmax after a node."""
    return _follow(tree, lambda node, depth: best(node))


def accept_point_mass(tree: TokenTree, p: Laws, numbers: Numbers) -> Accepted:
    """One draw from p per node reached: a child that carries it is next, else it is the token that ends the round.

    For drafts that were not drawn at random. Every token is the plain draw of its position, so the text is the plain text of
    the seed whatever is drafted. In law this equals the token rule with one-hot q and residuals between siblings.
    """
    return _follow(tree, lambda node, depth: p(node).draw(numbers.token(depth)))


def accept_coupled(tree: TokenTree, p: Laws, numbers: Numbers) -> Accepted:
    """The winner of `race` under p and the position's noise per node reached (Daliri et al. 2024, arXiv 2408.07978, Alg. 2).

    A drafter that races under q with the same noise often has the same winner. Every token is a function of the text before
    it and the seed, so the text is the same with any drafter, tree and gamma, and with none.
    """

    def pick(node: int, depth: int) -> int:
        law = p(node)
        return race(law, numbers.noise(depth, law.ids))[0]

    return _follow(tree, pick)


def accept_token(tree: TokenTree, p: Laws, q: Laws, numbers: Numbers) -> Accepted:
    """`rejection_sample` down a chain (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).

    The first rejected token is replaced by one drawn from its residual; if all stay, one more is drawn from p.

    Raises:
        ValueError: The tree is not a chain, or a token cannot come from q.
    """
    _need_chain(tree, "token")
    return accept_recursive(tree, p, q, numbers)


def accept_recursive(tree: TokenTree, p: Laws, q: Laws, numbers: Numbers) -> Accepted:
    """Children drawn without replacement are tried in turn, each against what the ones before left of p and q.

    With p_1 = p and q_1 = q, child i stays iff u * q_i < p_i; else p_{i+1} = norm(max(0, p_i - q_i)) and q_{i+1} is q_i
    without that child, normalised. If none stays, the token is drawn from the last p. On a chain it is the token rule.
    (Jeon et al. 2024, "Recursive Speculative Decoding", arXiv 2402.14160, section 3; Chen et al. 2024, "Sequoia", arXiv
    2402.12374, Alg. 2.)

    Raises:
        ValueError: A token cannot come from q.
    """
    node, nodes = ROOT, list[int]()
    while True:
        law, left, stays = p(node), None, None
        for child in tree.children(node):
            token = tree.tokens[child]
            left = q(node) if left is None else left.normalised()
            if left is None or not left.at(token) > 0.0:
                raise ValueError(f"q after node {node}: expected q > 0 for the drafted token {token}, found 0")
            residual = reject(law, left, token, numbers.accept(child))
            if residual is None:
                stays = child
                break
            law, left = residual, left.without(token)
        if stays is None:
            return Accepted(tuple(nodes), law.draw(numbers.token(len(nodes))))
        nodes.append(stays)
        node = stays


def accept_block(tree: TokenTree, p: Laws, q: Laws, numbers: Numbers) -> Accepted:
    """The whole chain judged at once (Sun et al. 2024, arXiv 2403.10444, Alg. 2).

    What it accepts is never shorter in expectation than what the token rule does, and the same at one draft.
    With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)), prefix i stays iff u_i < h_i: at the end of the chain h_i = w_i,
    before it m / (m + 1 - w_i) with m = sum of max(0, w_i p - q) over the laws after x_i. The longest prefix that stays wins;
    the token after it is drawn from norm(max(0, w p - q)) there, or from p at the end of the chain.

    Raises:
        ValueError: The tree is not a chain, or a token cannot come from q.
    """
    _need_chain(tree, "block")
    end = len(tree.tokens)
    if not end:
        return Accepted((), p(ROOT).draw(numbers.token(0)))
    weight, law = 1.0, p(ROOT)
    drawn_from = q(ROOT)
    kept, rest = 0, law.excess(drawn_from)
    fallback = law
    for length in range(1, end + 1):
        node, token = length - 1, tree.tokens[length - 1]
        chance = drawn_from.at(token)
        if not chance > 0.0:
            raise ValueError(f"q after node {node - 1}: expected q > 0 for the drafted token {token}, found 0")
        weight = min(1.0, weight * law.at(token) / chance)
        if weight == 0.0:  # no longer prefix can stay
            break
        law = p(node)
        if length == end:
            stays, residual = numbers.accept(node) < weight, law
        else:
            drawn_from = q(node)
            residual = law.excess(drawn_from, weight)
            mass = residual.mass
            stays = numbers.accept(node) * (mass + 1.0 - weight) < mass
        if stays:
            kept, rest, fallback = length, residual, law
    return Accepted(tuple(range(kept)), (rest if rest.mass > 0.0 else fallback).draw(numbers.token(kept)))


def accept_typical(tree: TokenTree, p: Laws, numbers: Numbers) -> Accepted:
    """Not lossless: drafts stay that the target finds typical (Cai et al. 2024, "Medusa", arXiv 2401.10774, section 2.3.1).

    A token stays iff p(token) > min(epsilon, delta * exp(-entropy of p)). Of the paths of such tokens the longest wins, of
    equally long ones the first; one more token is drawn from p after it. This moves mass to drafted tokens: the text no
    longer has the target's law.
    """
    depths = tree.depths
    typical: dict[int, int] = {ROOT: ROOT}  # node -> its parent
    laws: dict[int, Law] = {}
    last = ROOT
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if parent not in typical:
            continue
        law = laws[parent] if parent in laws else laws.setdefault(parent, p(parent))
        if law.at(token) > min(TYPICAL_EPSILON, TYPICAL_DELTA * np.exp(-_entropy(law))):
            typical[node] = parent
            last = node if depths[node + 1] > depths[last + 1] else last
    nodes = []
    node = last
    while node != ROOT:
        nodes.append(node)
        node = typical[node]
    law = laws[last] if last in laws else p(last)
    return Accepted(tuple(reversed(nodes)), law.draw(numbers.token(len(nodes))))


def rejection_sample(p_target: ArrayLike, p_draft: ArrayLike, token: int, u: float) -> Floats | None:
    """The textbook operator for one `token` drawn from `p_draft`: None if accepted, else the law of its replacement.

    Accepted iff `u * q(token) < p(token)`: strictly, so that p = 0 is never accepted, and without a division. The law
    of the replacement is norm(max(0, p - q)), or p itself where rounding leaves that without mass. With u uniform in
    [0, 1) what comes out has exactly the law `p_target`. Both [V] and [Vd] sum to 1; beyond its end either is 0.

    Raises:
        ValueError: A probability is NaN or negative (the message names the id), or u or token is out of range.
    """
    if not 0.0 <= u <= 1.0 or token < 0:
        raise ValueError(f"rejection_sample: expected u in [0, 1] and token >= 0, found u {u} and token {token}")
    residual = reject(_checked(p_target, "p_target"), _checked(p_draft, "p_draft"), token, u)
    return None if residual is None else residual.p


def reject(p: Law, q: Law, token: int, u: float) -> Law | None:
    """`rejection_sample` on laws: None if `token` is accepted."""
    if u * q.at(token) < p.at(token):
        return None
    return p.excess(q).normalised() or p


def race(law: Law, u: Floats, count: int = 1) -> tuple[int, ...]:
    """The first `count` tokens to arrive when that of id i needs the time -log(1 - u_i) / p_i; of equal times the lower id.

    With u uniform in [0, 1) the first has exactly the law p, and all of them are draws without replacement: arrival in this
    order is falling log p + Gumbel noise (Kool et al. 2019, arXiv 1903.06059). Fewer tokens if the law has fewer.
    """
    possible = np.flatnonzero(law.p > 0.0)
    with np.errstate(over="ignore"):  # a token of hardly any p takes forever, which is what inf says
        times = -np.log1p(-u[possible]) / law.p[possible]
    if count == 1:
        return (int(law.ids[possible[times.argmin()]]),)
    order = np.argsort(times, kind="stable")[:count]
    return tuple(int(token) for token in law.ids[possible[order]])


def _entropy(law: Law) -> float:
    p = law.p[law.p > 0.0]
    return float(-(p * np.log(p)).sum())


def _need_chain(tree: TokenTree, rule: str) -> None:
    if not tree.is_chain:
        raise ValueError(f"{rule} rule: expected a chain, found parents {tree.parents}")


def _checked(law: ArrayLike, where: str) -> Law:
    values = np.array(law, dtype=np.float64)  # a copy: what comes out is never the caller's own array
    if not values.min() >= 0.0:  # NaN fails as well
        first = int((~(values >= 0.0)).argmax())
        raise ValueError(f"{where}: expected probabilities, found {values[first]} at id {first}")
    return Law.of(values)


def _follow(tree: TokenTree, pick: Callable[[int, int], int]) -> Accepted:
    """Go from the root to the child that carries what `pick` (node, depth) gives there, until none does."""
    node, nodes = ROOT, list[int]()
    while True:
        picked = pick(node, len(nodes))
        child = tree.child(node, picked)
        if child is None:
            return Accepted(tuple(nodes), picked)
        nodes.append(child)
        node = child
