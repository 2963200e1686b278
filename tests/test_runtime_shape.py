"""Laws of tree shapes: paths closed under prefixes, in one order; and no shape promises more than the best one."""

import random
import time
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specedge.errors import SpecedgeError
from specedge.runtime.plan import expected_tokens
from specedge.runtime.shape import Ranks, TreeShape, best_shape, read_shape, tokens_per_round
from specedge.runtime.tree import ROOT

Table = Sequence[Sequence[float]]


@st.composite
def path_sets(draw: st.DrawFn) -> list[Ranks]:
    """Paths closed under prefixes, ranks with gaps, in any order."""
    paths: list[Ranks] = []
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.sampled_from([(), *paths]))
        path = (*parent, draw(st.integers(0, 6)))
        if path not in paths:
            paths.append(path)
    return draw(st.permutations(paths))


shapes = path_sets().map(TreeShape.from_paths)


# ---- paths and nodes


@given(path_sets())
@settings(deadline=None, derandomize=True)
def test_paths_in_any_order_make_one_shape_level_by_level(paths: list[Ranks]) -> None:
    shape = TreeShape.from_paths(paths)
    assert shape.paths == tuple(sorted(paths, key=lambda path: (len(path), path)))
    assert TreeShape.from_paths(shape.paths) == shape == TreeShape.from_paths([list(path) for path in reversed(paths)])
    for node, path in enumerate(shape.paths):
        assert shape.ranks[node] == path[-1]
        parent = shape.parents[node]
        assert path[:-1] == (shape.paths[parent] if parent != ROOT else ())


@given(shapes)
@settings(deadline=None, derandomize=True)
def test_levels_and_children_tell_the_same_tree(shape: TreeShape) -> None:
    assert [node for level in shape.levels for node in level] == list(range(len(shape.parents)))
    assert shape.depth == max((len(path) for path in shape.paths), default=0) == len(shape.levels)
    for depth, level in enumerate(shape.levels, start=1):
        assert level and all(len(shape.paths[node]) == depth for node in level)
    for node in range(ROOT, len(shape.parents)):
        children = shape.children(node)
        assert all(shape.parents[child] == node for child in children)
        assert [shape.ranks[child] for child in children] == sorted({shape.ranks[child] for child in children})
    assert sum(len(shape.children(node)) for node in range(ROOT, len(shape.parents))) == len(shape.parents)


def test_an_example() -> None:
    shape = TreeShape.from_paths([[0], [0, 0], [1], [0, 2], [0, 0, 0]])
    assert shape == TreeShape(parents=(-1, -1, 0, 0, 2), ranks=(0, 1, 0, 2, 0))
    assert shape.levels == ((0, 1), (2, 3), (4,))
    assert not shape.is_chain


@pytest.mark.parametrize("gamma", [0, 1, 2, 6])
def test_a_chain_is_the_tree_of_first_choices(gamma: int) -> None:
    chain = TreeShape.chain(gamma)
    assert chain == TreeShape.from_paths([[0] * length for length in range(1, gamma + 1)])
    assert chain.is_chain and chain.depth == gamma == len(chain.parents)
    assert chain.levels == tuple((node,) for node in range(gamma))


def test_what_is_no_chain() -> None:
    assert not TreeShape.from_paths([[0], [1]]).is_chain
    assert not TreeShape.from_paths([[1]]).is_chain  # a second choice is not what a drafter of chains gives


@pytest.mark.parametrize(
    ("paths", "named"),
    [
        ([[0], [1], [0]], r"path \[0\] is listed twice"),
        ([[0], [0, 1], [0, 1]], r"path \[0, 1\] is listed twice"),
        ([[0, 0]], r"path \[0, 0\] needs path \[0\], which is not listed"),
        ([[0], [1, 0], [0, 0]], r"path \[1, 0\] needs path \[1\]"),
        ([[0], [0, 0, 2]], r"path \[0, 0, 2\] needs path \[0, 0\]"),
        ([[0], []], "an empty path"),
        ([[0], [-1]], r"path \[-1\]: expected ranks from 0"),
        ([[0], [4]], r"path \[4\]: expected ranks from 0 to 3"),
        ([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], r"path \[0, 0, 0, 0\] is 4 deep, expected at most 3"),
        ([[0], ["a"]], r"path \['a'\]: expected a list of ranks"),
        ([[0], [0.0]], r"path \[0.0\]: expected a list of ranks"),
        ([[0], [None]], r"path \[None\]: expected a list of ranks"),
        ([[0], 1], "path 1: expected a list of ranks"),
        ([[0], "01"], "path '01': expected a list of ranks"),
        ([[0], [[0]]], r"path \[\[0\]\]: expected a list of ranks"),
    ],
)
def test_what_is_no_tree_is_refused_by_name(paths: list[list[int]], named: str) -> None:
    with pytest.raises(ValueError, match=f"^tree: {named}"):
        TreeShape.from_paths(paths, top_k=4, heads=3)


def test_numpy_integers_are_ranks_and_the_limits_are_inclusive() -> None:
    shape = TreeShape.from_paths([[np.int64(0)], np.array([0, 3]).tolist()], top_k=4, heads=2)  # type: ignore[list-item]
    assert shape.paths == ((0,), (0, 3)) and all(type(rank) is int for rank in shape.ranks)


@pytest.mark.parametrize(
    ("parents", "ranks"),
    [((-1, 0), (0,)), ((0,), (0,)), ((-2,), (0,)), ((-1, 1), (0, 0)), ((-1, 0, -1), (0, 0, 1)), ((-1, 0, 1, 0), (0, 0, 0, 1))],
)
def test_nodes_come_after_their_parents_level_by_level(parents: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^tree: expected"):
        TreeShape(parents, ranks)


@pytest.mark.parametrize(
    ("parents", "ranks", "named"),
    [
        ((-1, -1), (0, 0), "rising among siblings"),
        ((-1, -1, 0, 0), (0, 1, 3, 3), "rising among siblings"),
        ((-1, -1), (1, 0), "rising among siblings"),
        ((-1,), (-1,), "from 0 on"),
        ((-1,), (0.0,), "a rank per node"),
        ((-1,), (True,), "a rank per node"),
        ((-1,), ("0",), "a rank per node"),
        ((-1.0,), (0,), "an earlier parent"),
    ],
)
def test_siblings_have_ranks_of_their_own_in_order(parents: tuple[int, ...], ranks: tuple[int, ...], named: str) -> None:
    with pytest.raises(ValueError, match=f"^tree: expected .*{named}"):
        TreeShape(parents, ranks)


def test_what_a_shape_tells_is_made_once() -> None:
    """A round asks some sixty times, on the host."""
    shape = TreeShape.from_paths([[0], [1], [0, 0], [0, 1]])
    assert shape.paths is shape.paths and shape.levels is shape.levels and shape.children(0) is shape.children(0)


# Children per node of the tree that Medusa's authors publish for 7B models as mc_sim_7b_63, ranks without gaps; one each
# after [4] to [9], [0, 3] to [0, 7] and [2, 0].
MEDUSA = {(): 10, (0,): 10, (1,): 7, (2,): 3, (3,): 2, (0, 0): 10, (0, 1): 3, (0, 2): 2, (1, 0): 2, (2, 0): 1, (0, 0, 0): 2}
MEDUSA |= {(rank,): 1 for rank in range(4, 10)} | {(0, rank): 1 for rank in range(3, 8)}


def test_the_published_tree_of_medusa_is_one() -> None:
    paths = [(*parent, rank) for parent, count in MEDUSA.items() for rank in range(count)]
    shape = TreeShape.from_paths(random.Random(0).sample(paths, len(paths)), top_k=10, heads=4)
    assert len(shape.parents) == 63
    assert [len(level) for level in shape.levels] == [10, 28, 23, 2]
    with pytest.raises(ValueError, match="is 4 deep, expected at most 3, a head per depth"):
        TreeShape.from_paths(paths, top_k=10, heads=3)
    with pytest.raises(ValueError, match="expected ranks from 0 to 8"):
        TreeShape.from_paths(paths, top_k=9, heads=4)


@given(shapes)
@settings(deadline=None, derandomize=True)
def test_the_gap_is_a_path_that_a_later_sibling_skips(shape: TreeShape) -> None:
    skipped = {(*path[:-1], rank) for path in shape.paths for rank in range(path[-1])} - {*shape.paths}
    assert shape.gap == min(skipped, key=lambda path: (len(path), path), default=None)
    assert TreeShape.from_paths([[0], [10**40]]).gap == (1,)


# ---- a smaller one


@given(shapes, st.integers(-1, 6), st.integers(-1, 14))
@settings(deadline=None, derandomize=True)
def test_within_is_the_largest_part_that_fits(shape: TreeShape, depth: int, nodes: int) -> None:
    part = shape.within(depth, nodes)
    shallow = [path for path in shape.paths if len(path) <= depth]
    assert part.paths == tuple(shallow[: max(nodes, 0)])  # of a level what comes first: lower ranks under earlier parents
    assert TreeShape.from_paths(part.paths) == part  # a tree
    assert part.depth <= max(depth, 0) and len(part.parents) == min(max(nodes, 0), len(shallow))
    assert shape.within(6, 14) == shape or len(shape.parents) > 14 or shape.depth > 6


def test_a_part_of_a_chain_is_a_chain() -> None:
    assert TreeShape.chain(5).within(3, 9) == TreeShape.chain(5).within(9, 3) == TreeShape.chain(3)
    assert TreeShape.chain(5).within(0, 9) == TreeShape.chain(5).within(-3, 9) == TreeShape.chain(0)


# ---- files


def test_a_file_holds_a_list_of_paths(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text("[[1], [0], [0, 0]]")
    assert read_shape(file) == TreeShape.from_paths([[0], [1], [0, 0]])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[[0], [1]", "delimiter"),
        ("", "Expecting value"),
        ("{}", "expected a JSON list of paths"),
        ("[]", "expected a JSON list of paths"),
        ("3", "expected a JSON list of paths"),
        ("[0, 1]", "expected a JSON list of paths"),
        ("null", "expected a JSON list of paths"),
        ('[["a"]]', "expected a list of ranks"),
        ("[[0], [1, 0]]", r"path \[1, 0\] needs path \[1\]"),
        ("[[0], [0]]", "listed twice"),
        ("[[0.0]]", "expected a list of ranks"),
        ("[[NaN]]", "expected a list of ranks"),
        ("[" * 100_000, "recursion"),
        ("[[0]]\xff", "codec|Extra data"),
    ],
)
def test_a_file_that_is_no_tree_is_an_error_that_names_it(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "tree.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(SpecedgeError, match=rf"tree\.json: .*({named})") as caught:
        read_shape(file)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    for file in (tmp_path / "nowhere.json", tmp_path):
        with pytest.raises(SpecedgeError, match=f"^{file}: "):
            read_shape(file)


# ---- the best shape


@cache
def forests(nodes: int) -> tuple[tuple[Ranks, ...], ...]:
    """All sets of exactly so many paths whose ranks have no gaps."""
    if nodes == 0:
        return ((),)
    return tuple(sorted({tuple(sorted((*forest, new))) for forest in forests(nodes - 1) for new in _next(forest)}))


def _next(forest: tuple[Ranks, ...]) -> Iterator[Ranks]:
    for parent in ((), *forest):
        yield (*parent, sum(path[:-1] == parent for path in forest))


def promised(paths: Sequence[Ranks], table: Table) -> float:
    """1 + the chance of each path, by its definition."""

    def chance(depth: int, rank: int) -> float:
        return table[depth][rank] if depth < len(table) and rank < len(table[depth]) else 0.0

    return 1.0 + sum(float(np.prod([chance(depth, rank) for depth, rank in enumerate(path)])) for path in paths)


def test_all_trees_are_tried() -> None:
    assert [len(forests(nodes)) for nodes in range(7)] == [1, 1, 2, 5, 14, 42, 132]  # Catalan's numbers


@st.composite
def tables(draw: st.DrawFn) -> list[list[float]]:
    """Rows of chances that sum to 1 at most, not falling with the rank, different at every depth."""
    table = []
    for _ in range(draw(st.integers(0, 4))):
        row = draw(st.lists(st.one_of(st.floats(0.0, 1.0), st.sampled_from([0.0, 0.5, 1.0])), max_size=4))
        table.append([chance / max(sum(row), 1.0) for chance in row])
    return table


@given(tables(), st.integers(0, 6))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_no_tree_of_the_budget_promises_more(table: list[list[float]], nodes: int) -> None:
    shape = best_shape(table, nodes)
    assert len(shape.parents) <= nodes
    assert shape.paths in {tuple(sorted(forest, key=lambda path: (len(path), path))) for forest in forests(len(shape.paths))}
    assert tokens_per_round(shape, table) == pytest.approx(promised(shape.paths, table), abs=1e-12)
    for count in range(nodes + 1):
        for forest in forests(count):
            assert promised(forest, table) <= tokens_per_round(shape, table) + 1e-12


@given(shapes, tables())
@settings(deadline=None, derandomize=True)
def test_the_tokens_of_a_round_are_a_sum_over_nodes(shape: TreeShape, table: list[list[float]]) -> None:
    assert tokens_per_round(shape, table) == pytest.approx(promised(shape.paths, table), abs=1e-12)


@given(tables(), st.integers(0, 30))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_a_larger_budget_promises_no_less(table: list[list[float]], nodes: int) -> None:
    smaller, larger = (best_shape(table, count) for count in (nodes, nodes + 3))
    assert len(smaller.parents) <= nodes and len(larger.parents) <= nodes + 3
    assert tokens_per_round(smaller, table) <= tokens_per_round(larger, table) + 1e-12


@pytest.mark.parametrize("acceptance", [0.1, 0.6, 0.8, 1.0])
def test_a_drafter_of_one_choice_gets_the_chain_of_the_cost_model(acceptance: float) -> None:
    for gamma in range(7):
        shape = best_shape([[acceptance]] * 6, gamma)
        assert shape == TreeShape.chain(gamma)
        assert tokens_per_round(shape, [[acceptance]] * 6) == pytest.approx(expected_tokens(acceptance, gamma))
    assert best_shape([[acceptance]] * 6, 50) == TreeShape.chain(6)  # no deeper than was measured


def test_known_trees() -> None:
    """Chances 0.5 and 0.3 at all depths: nodes are worth 0.5, 0.3, 0.25, 0.15 twice, 0.125, ... and come in that order."""
    table = [[0.5, 0.3]] * 4
    assert best_shape(table, 3).paths == ((0,), (1,), (0, 0))
    assert best_shape(table, 5).paths == ((0,), (1,), (0, 0), (0, 1), (1, 0))
    assert tokens_per_round(best_shape(table, 5), table) == pytest.approx(1 + 0.5 + 0.3 + 0.25 + 0.15 + 0.15)
    promises = [tokens_per_round(best_shape(table, nodes), table) for nodes in range(7)]
    gains = [after - before for before, after in pairwise(promises)]
    assert gains == pytest.approx([0.5, 0.3, 0.25, 0.15, 0.15, 0.125])
    assert best_shape([[0.0, 0.9]], 1).parents in ((), (-1,))  # a second choice needs the first
    assert best_shape([[0.0, 0.9]], 2).paths == ((0,), (1,))


def test_without_a_chance_nothing_is_drafted() -> None:
    tables: list[Table] = [[], [[]], [[0.0, 0.0], [1.0]], [[], [1.0]]]
    for table in tables:
        assert best_shape(table, 5) == TreeShape.chain(0)


@pytest.mark.parametrize("row", [[-0.1], [1.1], [0.6, 0.5], [float("nan")], [float("inf")]])
def test_chances_that_are_none_are_refused_by_depth(row: list[float]) -> None:
    with pytest.raises(ValueError, match=r"^acceptance\[1\]: expected chances that sum to 1 at most"):
        best_shape([[0.5], row], 3)
    with pytest.raises(ValueError, match=r"^nodes: expected 0 or more, found -1"):
        best_shape([[0.5]], -1)


def test_a_large_budget_takes_no_time() -> None:
    assert len(best_shape([[0.45 / 2**rank for rank in range(10)]] * 5, 63).parents) == 63


def test_a_wide_and_deep_table_takes_little() -> None:
    """The table of 30 depths and 60 ranks took two minutes while every budget kept its whole split."""
    table = [[0.1 * 0.9**rank for rank in range(60)] for _ in range(30)]
    start = time.perf_counter()
    assert len(best_shape(table, 512).parents) == 512
    assert time.perf_counter() - start < 10.0


@given(tables(), st.integers(1, 6))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_what_no_tree_of_the_budget_reaches_does_not_count(table: list[list[float]], nodes: int) -> None:
    long = [[*row, *[0.0] * (nodes - len(row)), *[(1.0 - min(sum(row), 1.0)) / 2] * 2] for row in table]
    deep = [*long, *[[0.0] * nodes] * (nodes - len(long)), [1.0]]
    assert tokens_per_round(best_shape(deep, nodes), deep) == pytest.approx(
        tokens_per_round(best_shape(table, nodes), table), abs=1e-12
    )
