"""The acceptance rules: which drafted tokens stay, and the one more token that follows them.

In all of them `logits` has the rows of the verify step (row 0 the root, row n + 1 node n, then padding), of which only
those the path reaches are read; `position` is the absolute position of the round's root in prompt + emitted, from 0;
`numbers` is where random numbers come from, so that tests can integrate over them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from specedge.runtime.philox import Purpose, Uniform, uniform
from specedge.runtime.sample import Law, Sampling, best, draw, probabilities
from specedge.runtime.tree import ROOT, Proposal, Rows, TokenTree


@dataclass(frozen=True, slots=True)
class Accepted:
    """The drafted nodes that stay, from the root down, and the token after them."""

    nodes: tuple[int, ...]
    token: int


# (proposal, logits of the verify rows, position of the root) -> what stays; the loop never asks which rule it calls
Rule = Callable[[Proposal, Rows, int], Accepted]


def greedy(allowed: int | None) -> Rule:
    """The rule of a greedy request, for every drafter."""
    return lambda proposal, logits, position: accept_greedy(proposal.tree, logits, allowed)


def point_mass(sampling: Sampling, allowed: int | None) -> Rule:
    """The rule for drafts that were not drawn at random; it does not look at q."""
    return lambda proposal, logits, position: accept_point_mass(proposal.tree, logits, sampling, position, allowed)


def token(sampling: Sampling, allowed: int | None) -> Rule:
    """The token rule for chains with q; a proposal without q is a point mass and judged as one."""

    def rule(proposal: Proposal, logits: Rows, position: int) -> Accepted:
        if proposal.q is None:
            return accept_point_mass(proposal.tree, logits, sampling, position, allowed)
        return accept_token_rule(proposal.tree, logits, proposal.q, sampling, position, allowed)

    return rule


def accept_greedy(tree: TokenTree, logits: Rows, allowed: int | None) -> Accepted:
    """The longest path the target's argmax takes itself, and its own next token.

    Raises:
        SpecedgeError: A row reached holds NaN or +inf.
    """
    return _follow(tree, logits, lambda row, depth: best(logits[row], allowed, f"logits of verify row {row}"))


def accept_point_mass(
    tree: TokenTree,
    logits: Rows,
    sampling: Sampling,
    position: int,
    allowed: int | None,
    numbers: Uniform = uniform,
) -> Accepted:
    """One draw from p per node reached: a child that carries it is next, else it is the token that ends the round.

    Every token is the plain draw of its position, so the text is the plain text of the seed whatever is drafted. In law
    this equals the token rule with one-hot q and residuals between siblings.

    Raises:
        SpecedgeError: A row reached holds NaN or +inf; the message names the position.
    """

    def pick(row: int, depth: int) -> int:
        drawn_at = position + depth + 1
        p = probabilities(logits[row], sampling, allowed, f"logits for position {drawn_at}")
        return draw(p, numbers(sampling.seed, drawn_at, Purpose.TOKEN, 0))

    return _follow(tree, logits, pick)


def accept_token_rule(
    tree: TokenTree,
    logits: Rows,
    q: Rows,
    sampling: Sampling,
    position: int,
    allowed: int | None,
    numbers: Uniform = uniform,
) -> Accepted:
    """`rejection_sample` down a chain (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).

    Row n of `q` is what token n was drawn from, after every filter. The first rejected token is replaced by one drawn
    from its residual; if all stay, one more is drawn from p.

    Raises:
        SpecedgeError: A row of logits reached holds NaN or +inf; the message names the position.
        ValueError: The tree is not a chain, or a row of q reached is not a distribution its token can come from.
    """
    if not tree.is_chain:
        raise ValueError(f"token rule: expected a chain, found parents {tree.parents}")
    _check_rows(tree, logits)
    kept = 0
    while True:
        drawn_at = position + kept + 1
        law = probabilities(logits[kept], sampling, allowed, f"logits for position {drawn_at}")
        if kept == len(tree.tokens):
            break
        drafted, drafted_from = tree.tokens[kept], _checked(q[kept], f"q for position {drawn_at}")
        if not _at(drafted_from, drafted) > 0.0:
            raise ValueError(f"q for position {drawn_at}: expected q > 0 for the drafted token {drafted}, found 0")
        residual = _reject(law, drafted_from, drafted, numbers(sampling.seed, position, Purpose.ACCEPT, kept))
        if residual is not None:
            law = residual
            break
        kept += 1
    return Accepted(tuple(range(kept)), draw(law, numbers(sampling.seed, drawn_at, Purpose.TOKEN, 0)))


def rejection_sample(p_target: ArrayLike, p_draft: ArrayLike, token: int, u: float) -> Law | None:
    """The textbook operator for one `token` drawn from `p_draft`: None if accepted, else the law of its replacement.

    Accepted iff `u * q(token) < p(token)`: strictly, so that p = 0 is never accepted, and without a division. The law
    of the replacement is norm(max(0, p - q)), or p itself where rounding leaves that without mass. With u uniform in
    [0, 1) what comes out has exactly the law `p_target`. Both [V] and [Vd] sum to 1; beyond its end either is 0.

    Raises:
        ValueError: A probability is NaN or negative (the message names the id), or u or token is out of range.
    """
    if not 0.0 <= u <= 1.0 or token < 0:
        raise ValueError(f"rejection_sample: expected u in [0, 1] and token >= 0, found u {u} and token {token}")
    return _reject(_checked(p_target, "p_target"), _checked(p_draft, "p_draft"), token, u)


def _reject(p: Law, q: Law, token: int, u: float) -> Law | None:
    if u * _at(q, token) < _at(p, token):
        return None
    shared = min(len(p), len(q))
    residual = p.copy()
    residual[:shared] -= q[:shared]
    np.maximum(residual, 0.0, out=residual)
    mass = residual.sum()
    return residual / mass if mass > 0.0 else p


def _at(law: Law, token: int) -> float:
    return float(law[token]) if token < len(law) else 0.0


def _checked(law: ArrayLike, where: str) -> Law:
    values = np.asarray(law, dtype=np.float64)
    if not values.min() >= 0.0:  # NaN fails as well
        first = int((~(values >= 0.0)).argmax())
        raise ValueError(f"{where}: expected probabilities, found {values[first]} at id {first}")
    return values


def _check_rows(tree: TokenTree, logits: Rows) -> None:
    if len(logits) <= len(tree.tokens):
        raise ValueError(f"logits: expected a row for the root and {len(tree.tokens)} nodes, found {len(logits)} rows")


def _follow(tree: TokenTree, logits: Rows, pick: Callable[[int, int], int]) -> Accepted:
    """Go from the root to the child that carries what `pick` (verify row, depth) gives there, until none does."""
    _check_rows(tree, logits)
    node = ROOT
    nodes: list[int] = []
    while True:
        picked = pick(node + 1, len(nodes))
        child = tree.child(node, picked)
        if child is None:
            return Accepted(tuple(nodes), picked)
        nodes.append(child)
        node = child
