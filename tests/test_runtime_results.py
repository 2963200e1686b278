"""Laws of the counts of a request: what was drafted and accepted, by depth and by rank, from rounds made by hand."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specedge.runtime.decode import Round
from specedge.runtime.results import Stats
from specedge.runtime.shape import TreeShape
from specedge.runtime.tree import ROOT, TokenTree

TREE = (-1, -1, 0, 0, 1, 2)  # two under the root, two under the first, one under the second; one more under node 2


def round_of(parents: Sequence[int], nodes: Sequence[int], seconds: float = 0.0) -> Round:
    """A round that drafted this tree and accepted these nodes."""
    tree = TokenTree(tuple(range(len(parents))), tuple(parents))
    tokens = (*(tree.tokens[node] for node in nodes), 99)
    return Round(tokens, tree, tuple(nodes), (), len(parents) + 2, len(tokens) + 1, seconds, 2 * seconds, 4 * seconds)


def stats_of(*rounds: tuple[Sequence[int], Sequence[int]]) -> Stats:
    stats = Stats()
    for parents, nodes in rounds:
        stats.add(round_of(parents, nodes), len(nodes) + 1)
    return stats


CHAIN = (-1, 0, 1)


def test_counts_and_seconds_add_up() -> None:
    stats = stats_of((CHAIN, (0, 1)), (CHAIN, ()), ((), ()), (TREE, (0, 3)))
    assert stats.per_round == [(3, 2), (3, 0), (0, 0), (6, 2)]
    assert (stats.rounds, stats.proposed, stats.drafted, stats.accepted) == (4, 20, 12, 4)
    assert (stats.tokens, stats.discarded) == (8, 4)
    assert stats.tokens_per_round == 2.0
    timed = Stats()
    for _ in range(2):
        timed.add(round_of(CHAIN, (0, 1, 2), seconds=0.5), 4)
    assert (timed.draft_seconds, timed.verify_seconds, timed.decode_seconds) == (1.0, 2.0, 4.0)
    assert timed.tokens_per_second == 2.0


def test_nothing_done_is_nothing_counted() -> None:
    stats = Stats()
    assert (stats.rounds, stats.drafted, stats.accepted) == (0, 0, 0)
    assert stats.tokens_per_second == stats.tokens_per_round == 0.0
    assert (stats.accepted_by_position, stats.accepted_by_rank) == ([], [])
    plain = stats_of(((), ()), ((), ()))
    assert (plain.accepted_by_position, plain.accepted_by_rank) == ([], [])
    assert plain.tokens_per_round == 1.0


def test_acceptance_by_position_on_a_chain() -> None:
    stats = stats_of((CHAIN, (0, 1, 2)), (CHAIN, (0,)), (CHAIN, ()), ((-1, 0), (0, 1)))
    assert stats.accepted_by_position == [3 / 4, 2 / 4, 1 / 3]  # of the rounds that drafted so far


def test_acceptance_by_rank_on_a_chain_counts_where_the_parent_was_reached() -> None:
    stats = stats_of((CHAIN, (0, 1, 2)), (CHAIN, (0,)), (CHAIN, ()), ((-1, 0), (0, 1)))
    assert stats.accepted_by_rank == [[3 / 4], [2 / 3], [1 / 1]]


def test_acceptance_on_a_tree() -> None:
    stats = stats_of((TREE, (0, 2, 5)), (TREE, (0, 3)), (TREE, (1,)), (TREE, ()))
    assert stats.accepted_by_position == [3 / 4, 2 / 4, 1 / 4]
    # The root was reached 4 times; node 0 twice with two children, node 1 once with one; node 2 once. A second child has its
    # trial where the first failed: of two such at the root one stayed, at node 0 the only one.
    assert stats.accepted_by_rank == [[2 / 4, 2 / 4 * 1 / 2], [1 / 3, (1 - 1 / 3) * 1 / 1], [1 / 1]]


def test_ranks_count_among_siblings_however_nodes_are_numbered() -> None:
    parents = TreeShape.from_paths([[0], [1], [2], [1, 0], [2, 0], [2, 1]]).parents
    stats = stats_of((parents, (2, 5)), (parents, (1,)))
    assert stats.accepted_by_rank == [[0.0, 1 / 2, 1 / 2], [0 / 2, 1 / 1]]


def test_what_was_cut_off_does_not_count() -> None:
    """A stop inside a burst: three nodes stayed, two tokens were emitted."""
    stats = Stats()
    stats.add(round_of(CHAIN, (0, 1, 2)), 2)
    assert stats.per_round == [(3, 2)]
    assert stats.accepted_by_position == [1.0, 1.0, 0.0]
    assert stats.outcomes == {(CHAIN, (0, 1), 2): 1}
    assert stats.accepted_by_rank == [[1.0], [1.0]]  # what would have followed was never judged


@st.composite
def outcomes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A tree and a path of it."""
    count = draw(st.integers(0, 7))
    parents = tuple(draw(st.integers(ROOT, node - 1)) for node in range(count))
    nodes: list[int] = []
    while children := [child for child, parent in enumerate(parents) if parent == (nodes[-1] if nodes else ROOT)]:
        child = draw(st.sampled_from([None, *children]))
        if child is None:
            break
        nodes.append(child)
    return parents, tuple(nodes)


@given(st.lists(outcomes(), max_size=8))
@settings(deadline=None, derandomize=True)
def test_by_rank_and_by_position_are_what_counting_by_hand_gives(
    rounds: list[tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    stats = stats_of(*rounds)
    trials: dict[tuple[int, int], list[bool]] = {}
    positions: dict[int, list[bool]] = {}
    for parents, nodes in rounds:
        tree = TokenTree(tuple(range(len(parents))), parents)
        for depth in range(max(tree.depths)):
            positions.setdefault(depth, []).append(depth < len(nodes))
        for depth, parent in enumerate((ROOT, *nodes)):
            for rank, child in enumerate(tree.children(parent)):
                before = tree.children(parent)[:rank]
                trials.setdefault((depth, rank), []).extend([] if {*before} & {*nodes} else [child in nodes])
    assert [(depth, rank) for depth, row in enumerate(stats.accepted_by_rank) for rank, _ in enumerate(row)] == sorted(trials)
    for depth, row in enumerate(stats.accepted_by_rank):
        failed = 1.0
        for rank, chance in enumerate(row):
            passed = trials[depth, rank]
            share = sum(passed) / len(passed) if passed else 0.0
            assert chance == pytest.approx(failed * share, abs=1e-12)
            failed *= 1.0 - share
        assert sum(row) <= 1.0 + 1e-12  # what `best_shape` takes
    assert stats.accepted_by_position == [sum(positions[at]) / len(positions[at]) for at in sorted(positions)]
    assert stats.accepted == sum(len(nodes) for _, nodes in rounds)


def test_all_of_it_goes_into_the_record() -> None:
    stats = stats_of((TREE, (0, 2, 5)), ((), ()))
    record = stats.as_dict()
    assert {name: record[name] for name in ("rounds", "drafted", "accepted", "tokens")} == {
        "rounds": 2,
        "drafted": 6,
        "accepted": 3,
        "tokens": 5,
    }
    assert record["tokens_per_round"] == 2.5
    assert record["accepted_by_position"] == [1.0, 1.0, 1.0]
    assert record["accepted_by_rank"] == [[1.0, 0.0], [1.0, 0.0], [1.0]]
    assert {name for name in record if name.endswith("_seconds")} == {
        f"{name}_seconds" for name in ("prefill", "draft", "verify", "decode", "graph")
    }


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_a_round_of_nodes_and_one_token_more_is_all_there_is(tokens: int) -> None:
    stats = Stats()
    stats.add(round_of(CHAIN, (0, 1, 2)), tokens)
    assert stats.accepted == min(tokens, 3)
