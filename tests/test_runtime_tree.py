"""Laws of trees: who follows whom, and who sees whom."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specedge.runtime.law import Law
from specedge.runtime.tree import ROOT, Proposal, TokenTree, depths

TREE = TokenTree(tokens=(7, 8, 7, 9, 7), parents=(-1, -1, 0, 0, 2))


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    """Siblings differ in token; elsewhere tokens repeat."""
    nodes: list[tuple[int, int]] = []
    for node in range(draw(st.integers(0, 8))):
        parent = draw(st.integers(ROOT, node - 1))
        taken = {token for other, token in nodes if other == parent}
        nodes.append((parent, draw(st.sampled_from(sorted(set(range(10)) - taken)))))
    return TokenTree(tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes))


def test_children_keep_the_order_of_drafting():
    assert TREE.children(ROOT) == (0, 1)
    assert TREE.children(0) == (2, 3)
    assert TREE.children(4) == ()


def test_a_child_is_found_by_its_token():
    assert TREE.child(ROOT, 8) == 1
    assert TREE.child(0, 7) == 2
    assert TREE.child(0, 8) is None


def test_depths_start_at_the_root():
    assert TREE.depths == (0, 1, 1, 2, 2, 3)


@given(trees())
@settings(deadline=None, derandomize=True)
def test_a_row_sees_exactly_its_path_to_the_root(tree: TokenTree):
    visible = tree.visible
    assert visible.shape == (len(tree.tokens) + 1, len(tree.tokens) + 1)
    for row in range(len(visible)):
        path, node = {0}, row - 1
        while node != ROOT:
            path.add(node + 1)
            node = tree.parents[node]
        assert set(np.flatnonzero(visible[row])) == path
        assert tree.depths[row] == len(path) - 1


@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_a_chain_is_a_tree_whose_mask_is_causal(gamma: int):
    chain = TokenTree.chain(np.arange(gamma, dtype=np.int32))
    assert chain.is_chain
    assert chain.tokens == tuple(range(gamma))
    assert chain.depths == tuple(range(gamma + 1))
    np.testing.assert_array_equal(chain.visible, np.tri(gamma + 1, dtype=bool))


def test_siblings_are_no_chain():
    assert not TREE.is_chain
    assert not TokenTree((1, 2), (-1, -1)).is_chain


@pytest.mark.parametrize(
    ("tokens", "parents", "named"),
    [
        ((1, 2), (-1,), "2 tokens and 1 parents"),
        ((1, 2), (-1, 1), r"parents\[1\].*found 1"),  # its own parent
        ((1, 2), (1, -1), r"parents\[0\].*found 1"),  # a later node
        ((1,), (-2,), r"parents\[0\].*found -2"),
        ((1,), (0.0,), r"parents\[0\].*found 0.0"),
        ((-1,), (-1,), r"tokens\[0\].*found -1"),
        (("a",), (-1,), r"tokens\[0\].*found 'a'"),
        ((3, 4, 4), (-1, 0, 0), r"tokens\[2\].*token 4 twice under node 0"),
    ],
)
def test_bad_trees_are_refused_by_name(tokens: tuple[int, ...], parents: tuple[int, ...], named: str):
    with pytest.raises(ValueError, match=named):
        TokenTree(tokens, parents)


def test_equal_tokens_under_different_parents_are_fine():
    assert TokenTree((3, 4, 3), (-1, -1, 1)).child(1, 3) == 2


# ---- paths


def test_a_path_is_the_tokens_below_the_root() -> None:
    assert TREE.path(ROOT) == ()
    assert [TREE.path(node) for node in range(5)] == [(7,), (8,), (7, 7), (7, 9), (7, 7, 7)]


@given(trees())
@settings(deadline=None, derandomize=True)
def test_a_path_is_its_parent_s_and_one_token(tree: TokenTree) -> None:
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        assert tree.path(node) == (*tree.path(parent), token)
        assert len(tree.path(node)) == tree.depths[node + 1]


def test_follow_goes_as_far_as_there_are_nodes() -> None:
    assert TREE.follow([7, 7, 7, 7]) == (0, 2, 4)
    assert TREE.follow([7, 9]) == (0, 3)
    assert TREE.follow([7, 8]) == (0,)
    assert TREE.follow([8, 7]) == (1,)
    assert TREE.follow([9, 7]) == TREE.follow([]) == ()


@given(trees(), st.lists(st.integers(0, 3), max_size=4))
@settings(deadline=None, derandomize=True)
def test_following_a_node_s_path_leads_to_it(tree: TokenTree, more: list[int]) -> None:
    for node in range(len(tree.tokens)):
        nodes = tree.follow(tree.path(node))
        assert nodes[-1] == node
        assert [tree.tokens[passed] for passed in nodes] == list(tree.path(node))
        further = tree.follow([*tree.path(node), *more])
        assert further[: len(nodes)] == nodes
        assert further == (nodes if not more or tree.child(node, more[0]) is None else tree.follow(tree.path(further[-1])))


@given(trees())
@settings(deadline=None, derandomize=True)
def test_children_and_parents_say_the_same(tree: TokenTree) -> None:
    for node in range(ROOT, len(tree.tokens)):
        children = tree.children(node)
        assert list(children) == [child for child, parent in enumerate(tree.parents) if parent == node]
        assert [tree.child(node, tree.tokens[child]) for child in children] == list(children)
    assert tree.depths == depths(tree.parents)


@given(trees())
@settings(deadline=None, derandomize=True)
def test_depth_first_every_row_is_followed_by_its_first_child(tree: TokenTree) -> None:
    rows = tree.depth_first
    assert sorted(rows) == list(range(len(tree.tokens) + 1)) and rows[0] == 0
    for row in rows:
        for place, child in enumerate(tree.children(row - 1)):  # behind it, its earlier siblings and all that follow those
            before = tree.children(row - 1)[:place]
            between = {other for other in range(len(rows)) if any(tree.visible[other, sibling + 1] for sibling in before)}
            assert rows.index(child + 1) == rows.index(row) + len(between) + 1


@given(trees())
@settings(deadline=None, derandomize=True)
def test_what_parents_tell_is_made_once_for_all_tokens(tree: TokenTree) -> None:
    """A round drafts other tokens under the same parents."""
    other = TokenTree(tuple(token + 1 for token in tree.tokens), tree.parents)
    assert other.depth_first is tree.depth_first and other.depths is tree.depths and other.visible is tree.visible
    assert all(other.children(node) is tree.children(node) for node in range(ROOT, len(tree.tokens)))
    assert not tree.visible.flags.writeable
    assert other == TokenTree(other.tokens, other.parents) and (other != tree or not tree.tokens)


# ---- proposals


@given(trees(), st.integers(0, 9))
@settings(deadline=None, derandomize=True)
def test_the_first_nodes_of_a_proposal_are_a_tree(tree: TokenTree, count: int) -> None:
    laws = {node: Law.certain(node + 1) for node in range(ROOT, len(tree.tokens))}
    kept = Proposal(tree, laws.__getitem__, confidence=tuple(range(9))[: len(tree.tokens)]).first(count)
    assert kept.tree == TokenTree(tree.tokens[:count], tree.parents[:count])
    assert kept.confidence == tuple(range(len(kept.tree.tokens)))
    assert kept.q is not None and all(kept.q(node) is laws[node] for node in range(ROOT, len(kept.tree.tokens)))


def test_all_of_a_proposal_is_the_proposal() -> None:
    proposal = Proposal(TREE)
    assert proposal.first(5) is proposal and proposal.first(99) is proposal
    assert proposal.first(0).tree == TokenTree.chain([])
    assert proposal.first(2).q is None
