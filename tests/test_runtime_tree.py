"""Laws of trees: who follows whom, and who sees whom."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specedge.runtime.tree import ROOT, Proposal, TokenTree

TREE = TokenTree(tokens=(7, 8, 7, 9, 7), parents=(-1, -1, 0, 0, 2))


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    parents = [draw(st.integers(ROOT, node - 1)) for node in range(draw(st.integers(0, 8)))]
    return TokenTree(tuple(range(len(parents))), tuple(parents))


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


def test_a_proposal_has_a_row_of_q_per_node():
    with pytest.raises(ValueError, match="found 1 rows for 2 nodes"):
        Proposal(TokenTree.chain([1, 2]), np.ones((1, 4)) / 4)


@given(trees(), st.integers(0, 9))
@settings(deadline=None, derandomize=True)
def test_the_first_nodes_of_a_proposal_are_a_tree(tree: TokenTree, count: int):
    kept = Proposal(tree, evidence=3).first(count)
    assert kept.tree == TokenTree(tree.tokens[:count], tree.parents[:count])
    assert kept.evidence == 3
