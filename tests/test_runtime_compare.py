"""Drafters side by side: what a row says is what its requests did."""

import math
from pathlib import Path

import pytest

import tiny
from bundles import make
from specedge.errors import UsageError
from specedge.runtime import load
from specedge.runtime.compare import Way, compare
from specedge.runtime.shape import TreeShape


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that drafts for itself: every draft is right."""
    folder = tmp_path_factory.mktemp("compare")
    tiny.f_rand(folder / "model", eos_token_id=None)
    tiny.f_self(folder / "model", folder / "draft")
    return make(folder / "model", folder / "bundle", draft=str(folder / "draft"))


def test_rows_say_what_the_rounds_did(bundle: Path) -> None:
    draft, lookup = load(bundle, threads=1), load(bundle, drafter="lookup", threads=1)
    tree = TreeShape.from_paths(((0,), (1,), (0, 0)))
    ways = [
        Way("self 3", draft, TreeShape.chain(3)),
        Way("self tree", draft, tree),
        Way("lookup 3", lookup, TreeShape.chain(3)),
    ]
    heard: list[tuple[str, int, int]] = []
    rows = compare(ways, [[3, 4, 5], [7, 8]], 20, lambda *said: heard.append(said))
    assert [row.name for row in rows] == ["plain", "self 3", "self tree", "lookup 3"]
    plain, chain, branches, found = rows
    assert (plain.tokens_per_round, plain.measured, plain.nodes, plain.extra_bytes, plain.accepted) == (1, 1, 0, 0, ())
    assert chain.accepted == (1, 1, 1) and chain.tokens_per_round == 4.0
    assert branches.accepted == (1, 1) and branches.nodes == 3 and 2.5 < branches.tokens_per_round <= 3
    assert chain.extra_bytes == load(bundle).bundle.role("draft").stored_bytes and found.extra_bytes == 0
    for row in rows:
        assert row.predicted == pytest.approx(row.tokens_per_round / (row.d + row.v + row.h)) or row is plain
        assert all(math.isfinite(value) and value >= 0 for value in (row.d, row.v, row.measured, row.tokens_per_s))
    assert heard[0] == ("compare drafters", 0, 2) and heard[-1] == ("compare drafters", 2, 2)


def test_nothing_is_no_comparison() -> None:
    with pytest.raises(UsageError, match="nothing to compare"):
        compare([], [[1]], 8)
