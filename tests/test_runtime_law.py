"""Laws of `Law`: dense or sparse it is one function of the token, and its arithmetic is that of arrays."""

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from specedge.runtime.law import Floats, Ids, Law

LAST = math.nextafter(1.0, 0.0)
NAN = float("nan")

chances = st.one_of(st.sampled_from([0.0, 0.0, 1e-300, 1e-17, 0.1, 0.3, 0.5, 1.0]), st.floats(0.0, 1.0))
rows = st.lists(chances, min_size=1, max_size=14)
us = st.one_of(st.sampled_from([0.0, LAST, 1.0, 0.5]), st.floats(0.0, 1.0))


def listed(p: Sequence[float], extra: Sequence[bool] = ()) -> Law:
    """The sparse law of an array: the ids with p > 0, and those zeros that `extra` marks."""
    ids = [token for token, chance in enumerate(p) if chance > 0.0 or (token < len(extra) and extra[token])]
    return Law(np.array(ids, np.intp), np.array([p[token] for token in ids], np.float64))


@st.composite
def laws(draw: st.DrawFn) -> tuple[list[float], Law]:
    """An array and a law that says the same, dense or sparse."""
    p = draw(rows)
    if draw(st.booleans()):
        return p, Law.of(p)
    return p, listed(p, draw(st.lists(st.booleans(), max_size=len(p))))


def padded(p: Sequence[float], size: int) -> Floats:
    return np.pad(np.array(p, np.float64), (0, max(size - len(p), 0)))[:size]


id_sets = st.sets(st.integers(0, 20)).map(lambda ids: np.array(sorted(ids), np.intp))


# ---- one function of the token


@given(laws(), st.integers(1, 20))
@settings(deadline=None, derandomize=True)
def test_a_law_says_what_its_array_says(pair: tuple[list[float], Law], vocabulary: int) -> None:
    p, law = pair
    np.testing.assert_array_equal(law.dense(vocabulary), padded(p, vocabulary))
    assert [law.at(token) for token in range(20)] == padded(p, 20).tolist()
    assert law.mass == pytest.approx(sum(p), rel=1e-14)


@given(laws(), id_sets)
@settings(deadline=None, derandomize=True)
def test_the_chances_of_some_ids_are_those_of_each(pair: tuple[list[float], Law], ids: Ids) -> None:
    p, law = pair
    np.testing.assert_array_equal(law.on(ids), padded(p, 21)[ids])
    np.testing.assert_array_equal(law.on(law.ids), law.p)
    np.testing.assert_array_equal(law.on(law.ids.copy()), law.p)  # the same ids, another array


def test_certainty_is_all_mass_on_one_token() -> None:
    law = Law.certain(3)
    assert law.dense(5).tolist() == [0.0, 0.0, 0.0, 1.0, 0.0]
    assert [law.draw(u) for u in (0.0, 0.5, 1.0)] == [3, 3, 3]
    assert law.mass == 1.0


def test_a_law_of_nothing_has_nothing() -> None:
    nothing = Law(np.array([], np.intp), np.array([]))
    assert nothing.dense(3).tolist() == [0.0, 0.0, 0.0]
    assert nothing.at(0) == nothing.mass == 0.0
    assert nothing.normalised() is None
    assert nothing.excess(Law.certain(0)).normalised() is None
    with pytest.raises(ValueError, match="positive sum"):
        nothing.draw(0.5)


# ---- drawing


def plainly_drawn(p: Sequence[float], u: float) -> int:
    """The first id whose running sum exceeds u x mass, else the last one that adds to it."""
    sums = list(accumulate(p))
    above = [token for token, total in enumerate(sums) if total > u * sums[-1]]
    return above[0] if above else max(token for token, total in enumerate(sums) if total > (sums[token - 1] if token else 0.0))


@given(laws(), us)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_a_draw_is_the_inverse_cdf_in_id_order_dense_or_sparse(pair: tuple[list[float], Law], u: float) -> None:
    p, law = pair
    assume(sum(p) > 0.0)
    assert law.draw(u) == Law.of(p).draw(u) == listed(p).draw(u) == plainly_drawn(p, u)


@given(laws(), us)
@settings(deadline=None, derandomize=True)
def test_an_impossible_token_is_never_drawn(pair: tuple[list[float], Law], u: float) -> None:
    p, law = pair
    assume(sum(p) > 0.0)
    assert p[law.draw(u)] > 0.0  # whatever p sums to


@pytest.mark.parametrize("law", [Law.of([0.25, 0.0, 0.5, 0.25, 0.0]), Law(np.array([0, 2, 3]), np.array([0.25, 0.5, 0.25]))])
def test_an_end_belongs_to_the_token_behind_it(law: Law) -> None:
    assert [law.draw(u) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, LAST, 1.0)] == [0, 0, 2, 2, 3, 3, 3]


def test_u_takes_a_share_of_whatever_the_law_sums_to() -> None:
    for scale in (0.125, 1.0, 64.0):
        law = Law.of(np.array([0.25, 0.0, 0.5, 0.25]) * scale)
        assert [law.draw(u) for u in (0.0, 0.25, 0.74, 0.75)] == [0, 2, 2, 3]


def test_the_shares_of_u_are_p() -> None:
    """Between two numbers that give the same token lie only numbers that give it: the ends of the runs are the law."""
    p = np.random.default_rng(1).dirichlet(np.ones(5))
    ends = np.cumsum(p)
    for token, (start, end) in enumerate(zip([0.0, *ends[:-1]], ends, strict=True)):
        assert Law.of(p).draw(start + 1e-12) == Law.of(p).draw(end - 1e-12) == token


def test_the_sum_is_taken_one_by_one() -> None:
    """Pairwise summation, numpy's own `sum`, would put the ends elsewhere; a host in another language adds in a loop."""
    p = np.random.default_rng(2).dirichlet(np.full(3000, 0.3))
    sums = list(accumulate(p.tolist()))
    assert sums[-1] != p.sum()
    for token in range(0, 2999, 7):
        u = sums[token] / sums[-1]
        above = next(index for index, total in enumerate(sums) if total > u * sums[-1])
        assert Law.of(p).draw(u) == above


@pytest.mark.parametrize("p", [[0.0, 0.0], [0.5, NAN], [NAN, 0.5], [math.inf, 0.0], [-1.0, 0.5]])
def test_what_cannot_be_drawn_from_is_refused(p: list[float]) -> None:  # B44
    for law in (Law.of(p), Law(np.array([3, 8]), np.array(p))):
        with pytest.raises(ValueError, match="positive sum"):
            law.draw(0.5)


@pytest.mark.parametrize("u", [NAN, -0.1, 1.1, math.inf])
def test_u_out_of_range_is_refused(u: float) -> None:
    with pytest.raises(ValueError, match=r"u in \[0, 1\]"):
        Law.of([0.5, 0.5]).draw(u)


# ---- arithmetic


@given(laws(), laws(), st.one_of(st.just(1.0), st.floats(0.0, 1.0)))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_what_exceeds_another_law(pair: tuple[list[float], Law], other: tuple[list[float], Law], weight: float) -> None:
    (p, law), (q, drawn_from) = pair, other
    left = law.excess(drawn_from, weight)
    np.testing.assert_array_equal(left.dense(21), np.maximum(padded(p, 21) * weight - padded(q, 21), 0.0))


@given(laws(), st.integers(0, 20))
@settings(deadline=None, derandomize=True)
def test_a_token_is_left_out(pair: tuple[list[float], Law], token: int) -> None:
    p, law = pair
    expected = padded(p, 21)
    expected[token] = 0.0
    np.testing.assert_array_equal(law.without(token).dense(21), expected)


@given(laws())
@settings(deadline=None, derandomize=True)
def test_normalising_keeps_the_shares(pair: tuple[list[float], Law]) -> None:
    p, law = pair
    found = law.normalised()
    if sum(p) > 0.0:
        assert found is not None
        np.testing.assert_allclose(found.dense(21), padded(p, 21) / sum(p), rtol=1e-14)
        assert found.mass == pytest.approx(1.0, abs=1e-14)
    else:
        assert found is None


@given(laws(), laws(), st.integers(0, 20), us)
@settings(deadline=None, derandomize=True)
def test_laws_never_change(pair: tuple[list[float], Law], other: tuple[list[float], Law], token: int, u: float) -> None:
    (p, law), (q, drawn_from) = pair, other
    law.excess(drawn_from)
    law.excess(drawn_from, 0.5)
    law.without(token)
    law.normalised()
    law.dense(21)
    if sum(p) > 0.0:
        law.draw(u)
    np.testing.assert_array_equal(law.dense(21), padded(p, 21))
    np.testing.assert_array_equal(drawn_from.dense(21), padded(q, 21))


def test_nan_is_an_error_that_names_its_id_and_never_passes_unseen() -> None:  # B44
    ids = np.array([2, 5, 9])
    for law in (Law(ids, np.array([0.5, NAN, 0.5])), Law(ids, np.array([0.5, NAN, NAN]))):
        with pytest.raises(ValueError, match=r"nan at id 5$"):
            law.normalised()
    with pytest.raises(ValueError, match=r"nan at id 1$"):
        Law.of([0.5, NAN]).normalised()
    for p, q in ((Law.of([NAN, 0.5]), Law.of([0.2, 0.2])), (Law.of([0.2, 0.5]), Law.of([NAN, 0.2]))):
        with pytest.raises(ValueError, match=r"nan at id 0$"):
            p.excess(q).normalised()
        with pytest.raises(ValueError, match="positive sum"):
            p.excess(q).draw(0.5)
        with pytest.raises(ValueError, match=r"nan at id 0$"):
            p.excess(q).without(1).normalised()


def test_arrays_of_any_kind_become_laws_in_float64() -> None:
    for law in (Law.of([0.25, 0.75]), Law.of(np.array([0.25, 0.75], np.float32)), Law.of((0.25, 0.75))):
        assert law.p.dtype == np.float64
        assert law.ids.tolist() == [0, 1]
        assert law.p.tolist() == [0.25, 0.75]
