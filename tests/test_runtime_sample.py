"""Laws of the parameters, and of the filters that turn a row of logits into the law a token is drawn from."""

import math
import warnings
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import log_softmax

from specedge.errors import SpecedgeError
from specedge.runtime.law import Floats, Ids
from specedge.runtime.sample import Logits, Sampling, best, filtered, likeliest, log_probability, top

NAN = float("nan")


def logits_of(*p: float) -> Logits:
    with np.errstate(divide="ignore"):
        return np.log(np.array(p)).astype(np.float32)


def dense(logits: Logits, sampling: Sampling) -> Floats:
    return filtered(logits, sampling).dense(len(logits))


# ---- parameters (B47)

NUMBERS = ["temperature", "top_k", "top_p", "seed", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf, -101, 1 + 2j, "abc", None, True, [1], np.ones(1)])
def test_illegal_parameters_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected .* found "):
        Sampling(**{name: value})  # type: ignore[arg-type]


BEYOND = [
    *product(NUMBERS[:6], (-1, -0.5)),
    *product(("top_p", "min_p"), (1.0000001, math.nextafter(1.0, 2.0), 2)),
    *product(("top_k", "seed"), (1.5, 1.0, Fraction(3))),
    *product(("presence_penalty", "frequency_penalty"), (100.1, -100.1)),
    *product(("repetition_penalty",), (0.0, 0.0099, 100.1)),
    ("seed", 2**64),
]


@pytest.mark.parametrize(("name", "value"), BEYOND)
def test_values_beyond_the_end_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected .* found "):
        Sampling(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [int, Fraction, np.int64, np.float64, np.float32])
def test_the_ends_are_legal_in_every_kind_of_number(kind: Callable[[int], float]) -> None:
    ends = {"temperature": (0, 1000), "top_p": (0, 1), "min_p": (0, 1), "repetition_penalty": (1, 100)}
    ends |= dict.fromkeys(("presence_penalty", "frequency_penalty"), (-100, 100))
    for name, pair in ends.items():
        for end in pair:
            Sampling(**{name: kind(end)})  # type: ignore[arg-type]


def test_more_ends_are_legal() -> None:
    Sampling(seed=2**64 - 1, top_k=10**7, repetition_penalty=0.01, temperature=1e300)
    Sampling(seed=np.uint64(2**64 - 1), top_k=np.int32(5))  # type: ignore[arg-type]
    Sampling(logit_bias={0: -1000, np.int64(7): 1000.0}, banned_ids={0, np.int64(5)})  # type: ignore[dict-item, arg-type]


BIASES: list[object] = [None, "abc", 5, [1, 2], [(1, 2.0)], {-1: 1.0}, {1.5: 1.0}, {"a": 1.0}, {True: 1.0}, {None: 1.0}]
BIASES += [{1: 0.0, 3: bad} for bad in (NAN, math.inf, -math.inf, 1000.1, -1000.1, None, True, "a", [1])]


@pytest.mark.parametrize("value", BIASES)
def test_illegal_biases_are_refused_by_name(value: object) -> None:
    with pytest.raises(ValueError, match=r"^logit_bias: expected .* found "):
        Sampling(logit_bias=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, "ab", b"ab", 5, iter([1]), [-1], [1, 1.5], [True], ["a"], [None], {NAN}, [[1]]])
def test_illegal_bans_are_refused_by_name(value: object) -> None:
    with pytest.raises(ValueError, match=r"^banned_ids: expected .* found "):
        Sampling(banned_ids=value)  # type: ignore[arg-type]


def test_a_sampling_is_a_value() -> None:
    one, same = (Sampling(0.5, logit_bias={3: 1.0}, banned_ids=(4,)) for _ in range(2))
    assert one == same and hash(one) == hash(same)
    assert one != Sampling(0.5, logit_bias={3: 2.0}, banned_ids=(4,))
    assert len({one, same, Sampling(0.5)}) == 2


GREEDY = [Sampling(), Sampling(-0.0), Sampling(1e-6), Sampling(1e-4)]
GREEDY += [Sampling(1.0, top_k=1), Sampling(1.0, top_p=0.0), Sampling(1.0, top_p=1e-9)]
both = pytest.mark.parametrize("kind", [np.float32, np.float64])


@pytest.mark.parametrize("sampling", GREEDY)
@both
def test_greedy_is_one_hot_of_the_best(sampling: Sampling, kind: type) -> None:
    assert sampling.greedy
    logits: Logits = np.array([1.0, 3.0, 3.0, -2.0], kind)
    assert dense(logits, sampling).tolist() == [0.0, 1.0, 0.0, 0.0]
    assert best(logits) == 1


def test_just_beyond_greedy_a_tie_is_drawn() -> None:
    for sampling in (Sampling(1.0001e-4), Sampling(1.0001e-4, top_p=0.9), Sampling(1.0, top_k=2, min_p=1.0)):
        assert not sampling.greedy
        assert dense(np.array([1.0, 3.0, 3.0, -2.0], np.float32), sampling).tolist() == [0.0, 0.5, 0.5, 0.0]
    assert not Sampling(1.0, top_p=1.1e-9).greedy and not Sampling(1.0, top_k=2).greedy and not Sampling(1.0, min_p=1.0).greedy


@pytest.mark.parametrize("top_k", [0, 4, 10**7])
def test_top_k_is_off_at_zero_and_from_the_vocabulary_on(top_k: int) -> None:
    logits = logits_of(0.1, 0.2, 0.3, 0.4)
    np.testing.assert_array_equal(dense(logits, Sampling(0.9, top_k=top_k)), dense(logits, Sampling(0.9)))
    assert not Sampling(0.9, top_k=top_k).greedy


# ---- the filters


def plainly(logits: Logits, sampling: Sampling) -> Floats:
    """The filters one token at a time, as `filtered` documents them."""
    weights = np.exp((logits.astype(np.float64) - float(logits.max())) / sampling.temperature)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[: sampling.top_k or None]
    order.sort(key=lambda token: (-weights[token], token))
    goal = sampling.top_p * weights[order].sum() if sampling.top_p < 1.0 else np.inf
    kept, mass = [], 0.0
    for token in order:
        if mass < goal:
            kept.append(token)
            mass += weights[token]
    kept = [token for token in kept if weights[token] >= sampling.min_p]
    p = np.zeros(len(logits))
    p[kept] = weights[kept] / weights[kept].sum()
    return p


tenths = st.integers(-40, 40).map(lambda tenths: tenths / 10)
samplings = st.builds(
    Sampling,
    st.sampled_from([0.2, 0.7, 1.0, 1.3]),
    st.sampled_from([0, 2, 3, 7]),
    st.sampled_from([0.0513, 0.3719, 0.9013, 0.99901, 1.0]),  # no sum of equal weights is on the line
    min_p=st.sampled_from([0.0, 0.0137, 0.2113, 0.7151, 1.0]),
)
lines = arrays(np.float32, st.integers(1, 40), elements=tenths)


@given(st.one_of(lines, lines.map(lambda row: row.astype(np.float64))), samplings)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_the_filters_are_what_they_say(logits: Logits, sampling: Sampling) -> None:
    if not sampling.greedy:
        before = logits.copy()
        np.testing.assert_allclose(dense(logits, sampling), plainly(logits, sampling), rtol=1e-12, atol=0)
        np.testing.assert_array_equal(logits, before)


levels = st.lists(st.tuples(st.sampled_from([0.0, -0.5, -2.0, -4.5, -9.0, -30.0, -np.inf]), st.integers(1, 400)), max_size=5)


@given(levels, samplings)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_rows_with_shelves_of_equals_are_filtered_the_same_way(levels: list[tuple[float, int]], sampling: Sampling) -> None:
    """Most of the mass may lie in the many: the narrowing must not trust that the likeliest have it."""
    logits = np.concatenate([np.zeros(1), *(np.full(count, level) for level, count in levels)]).astype(np.float32)[::-1]
    if not sampling.greedy:
        np.testing.assert_allclose(dense(logits, sampling), plainly(logits, sampling), rtol=1e-9, atol=0)


def test_a_line_that_only_min_p_keeps_anyone_above_is_no_error() -> None:
    """One likely token before thousands that fall just short of min-p, together far more likely."""
    logits = np.full(5000, np.log(0.0099), np.float32)
    logits[7] = 0.0
    for top_p in (0.5, 0.9, 0.999):
        assert np.flatnonzero(dense(logits, Sampling(1.0, top_p=top_p, min_p=0.01))).tolist() == [7]


@both
def test_a_large_vocabulary_is_filtered_the_same_way(kind: type) -> None:
    logits: Logits = np.random.default_rng(0).normal(0, 3, 5000).astype(kind)
    samplings = [Sampling(0.8, top_p=0.9), Sampling(1.5, 50, 0.95), Sampling(30.0, top_p=0.9), Sampling(1.2, min_p=0.003)]
    for sampling in (*samplings, Sampling(1.2, 300, 0.95, min_p=0.01)):
        np.testing.assert_allclose(dense(logits, sampling), plainly(logits, sampling), rtol=1e-11)


@both
def test_equal_logits_stay_by_lower_id(kind: type) -> None:
    flat: Logits = np.zeros(10, kind)
    assert np.flatnonzero(dense(flat, Sampling(1.0, top_k=3))).tolist() == [0, 1, 2]
    assert np.flatnonzero(dense(flat, Sampling(1.0, top_p=0.35))).tolist() == [0, 1, 2, 3]
    assert np.flatnonzero(dense(flat, Sampling(1.0, min_p=1.0))).tolist() == list(range(10))
    flat[4], flat[9] = 1.0, -1.0
    assert np.flatnonzero(dense(flat, Sampling(1.0, top_k=3))).tolist() == [0, 1, 4]


def test_each_filter_counts_what_the_one_before_left() -> None:
    row = logits_of(0.4, 0.3, 0.2, 0.1)
    assert dense(row, Sampling(1.0, top_k=2, top_p=0.5)).tolist() == [1.0, 0.0, 0.0, 0.0]  # 0.4 / 0.7 > 0.5
    assert np.flatnonzero(dense(row, Sampling(1.0, top_p=0.69, min_p=0.6))).tolist() == [0, 1]  # min-p first would leave 0
    assert np.flatnonzero(dense(row, Sampling(0.5, min_p=0.5))).tolist() == [0, 1]  # after temperature: 1, 0.56, 0.25


def test_the_token_that_crosses_the_line_stays_also_exactly_on_it() -> None:
    for quarters in (np.zeros(4, np.float32), np.zeros(4)):
        assert np.flatnonzero(dense(quarters, Sampling(1.0, top_p=0.5))).tolist() == [0, 1]
        assert np.flatnonzero(dense(quarters, Sampling(1.0, top_p=0.500001))).tolist() == [0, 1, 2]


@pytest.mark.parametrize("sampling", [*GREEDY[:1], Sampling(1.0), Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.5, min_p=0.1)])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@both
def test_nan_and_infinity_are_errors_that_name_the_first_id(sampling: Sampling, bad: float, kind: type) -> None:  # B44
    logits: Logits = np.array([0.0, 1.0, bad, 2.0, np.nan], kind)
    with pytest.raises(SpecedgeError, match=f"^row 3: {bad} at id 2,"):
        filtered(logits, sampling, "row 3")
    with pytest.raises(SpecedgeError, match=f"^logits: {bad} at id 2,"):
        best(logits)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.9)])
def test_a_row_of_minus_infinity_is_an_error(sampling: Sampling) -> None:
    with pytest.raises(SpecedgeError, match="-inf at id 0"):
        filtered(np.full(3, -np.inf, np.float32), sampling)


@pytest.mark.parametrize("more", [{}, {"top_k": 2}, {"top_k": 2, "top_p": 0.9}, {"min_p": 0.01}, {"top_p": 0.9}])
@both
def test_minus_infinity_elsewhere_is_probability_zero(more: dict[str, float], kind: type) -> None:  # B44
    logits: Logits = np.array([-np.inf, 0.5, -np.inf], kind)
    assert dense(logits, Sampling(1.0, **more)).tolist() == [0.0, 1.0, 0.0]  # type: ignore[arg-type]


EXTREME = [[3e38, -3e38, 2.9e38, -np.inf], [-3e38] * 3, [0.0, -104.0, -745.0, -1e9], [1e-45, 0.0, -1e-45]]
FILTERS = [{}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}, {"top_p": 0.999999, "min_p": 1e-300}, {"min_p": 1e-44}]


@pytest.mark.parametrize("row", EXTREME)
@pytest.mark.parametrize("under", ["ignore", "raise"])  # numpy's own default, and a caller who wants to hear of everything
@both
def test_nothing_overflows_and_nothing_warns(row: list[float], under: Literal["ignore", "raise"], kind: type) -> None:
    logits: Logits = np.array(row).astype(kind)
    with warnings.catch_warnings(), np.errstate(all="raise", under=under):
        warnings.simplefilter("error")
        for temperature, filters in product((1.0001e-4, 1.0, 1e30, 1e300), FILTERS):
            law = filtered(logits, Sampling(temperature, **filters))  # type: ignore[arg-type]
            assert np.isfinite(law.p).all() and law.mass == pytest.approx(1.0, abs=1e-12)
            assert law.at(best(logits)) == law.p.max()


def test_a_batch_is_not_a_row_and_neither_is_nothing() -> None:
    for shape in ((2, 3), (0,), (), (1, 3)):
        for ask in (best, lambda row: filtered(row, Sampling(1.0))):
            with pytest.raises(ValueError, match="one row"):
                ask(np.zeros(shape, np.float32))


@given(st.one_of(lines, lines.map(lambda row: row.astype(np.float64))), st.integers(1, 45))
@settings(deadline=None, derandomize=True)
def test_the_top_are_the_first_of_the_falling_order(logits: Logits, count: int) -> None:
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    assert top(logits, count).tolist() == sorted(order[:count])
    assert best(logits) == order[0]


@given(st.lists(st.sampled_from([0.0, 1.0, 2.5, -3.0, -math.inf]), min_size=1, max_size=9), st.integers(1, 11))
@settings(deadline=None, derandomize=True)
def test_the_likeliest_are_in_falling_order_and_possible(row: list[float], count: int) -> None:
    possible = [token for token in sorted(range(len(row)), key=lambda token: (-row[token], token)) if row[token] > -math.inf]
    if possible:
        assert likeliest(np.array(row, np.float32), count) == possible[:count]
    else:
        with pytest.raises(SpecedgeError, match=r"^row 7: -inf at id 0"):
            likeliest(np.array(row, np.float32), count, "row 7")


@given(lines, st.data())
@settings(deadline=None, derandomize=True)
def test_the_log_probability_is_that_of_the_whole_softmax(logits: Logits, data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(logits) - 1))
    expected = log_softmax(logits.astype(np.float64))[token]
    assert log_probability(logits, token) == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_log_probabilities_of_the_extreme() -> None:
    row = np.array([3e38, 3e38, -3e38, -np.inf], np.float32)
    assert log_probability(row, 0) == pytest.approx(-math.log(2.0))
    assert log_probability(row, 2) < -1e38
    assert log_probability(row, 3) == -math.inf


# ---- long rows, narrowed in float32


@cache
def long_row(vocabulary: int, kind: str) -> Logits:
    """Peaked as a language model's: a few likely tokens and a tail that grows thinner."""
    rng = np.random.default_rng([vocabulary, len(kind)])
    ranks = rng.permutation(vocabulary) + 1.0
    match kind:
        case "zipf":
            row = -1.3 * np.log(ranks) + rng.normal(0, 0.4, vocabulary) + 18.0
        case "sure":
            row = np.where(ranks <= 3, 30.0 - 2.0 * ranks, 8.0 + rng.normal(0, 2.5, vocabulary))
        case "unsure":
            row = rng.normal(0, 2.2, vocabulary)
        case _:  # few different values, long ties
            row = np.round(rng.normal(0, 2.5, vocabulary) * 4) / 4
    return row.astype(np.float32)


def in_float64(logits: Logits, sampling: Sampling) -> tuple[Ids, Floats, Floats]:
    """The filters in float64 throughout: kept ids, their probabilities, and the share of every prefix of the falling order."""
    weights = np.exp((logits.astype(np.float64) - float(logits.max())) / sampling.temperature)
    order = np.argsort(-weights, kind="stable")
    shares = np.cumsum(weights[order]) / weights.sum()
    count = int((shares < sampling.top_p).sum()) + 1 if sampling.top_p < 1.0 else len(order)
    kept = np.sort(order[:count])
    kept = kept[weights[kept] >= sampling.min_p]
    return kept, weights[kept] / weights[kept].sum(), shares


@pytest.mark.parametrize("vocabulary", [20_000, 151_936])
@pytest.mark.parametrize("kind", ["zipf", "sure", "unsure", "coarse"])
@pytest.mark.parametrize("min_p", [0.0, 0.003])
def test_narrowing_a_long_row_in_float32_changes_nothing(vocabulary: int, kind: str, min_p: float) -> None:
    row = long_row(vocabulary, kind)
    for temperature, top_p in product((0.3, 0.8, 1.0, 1.7), (0.5, 0.9, 0.95, 0.999, 1.0)):
        sampling = Sampling(temperature, top_p=top_p, min_p=min_p)
        kept, p, shares = in_float64(row, sampling)
        law = filtered(row, sampling)
        if np.array_equal(law.ids, kept):
            np.testing.assert_allclose(law.p, p, rtol=1e-12)
        else:  # only where the line runs through the rounding of the mass
            near = shares[min(len(kept), len(law.ids)) - 1 : max(len(kept), len(law.ids)) - 1]
            assert len(near) and np.abs(near - top_p).max() < 1e-6 and min_p == 0.0
            np.testing.assert_allclose(law.on(kept), p, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("min_p", [1e-4, 0.0137, 0.3])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_what_is_hardly_min_p_is_judged_in_float64(min_p: float, top_p: float) -> None:
    """Thousands of tokens nearer to the line than a float32 weight can tell."""
    for temperature in (0.3, 1.0, 1.7):
        row = (math.log(min_p) + np.linspace(-2e-5, 2e-5, 5000)) * temperature
        row[100] = 0.0
        logits, sampling = row.astype(np.float32), Sampling(temperature, top_p=top_p, min_p=min_p)
        kept, p, _ = in_float64(logits, sampling)
        assert 1000 < len(kept) < 4000 or top_p < 1.0
        law = filtered(logits, sampling)
        assert law.ids.tolist() == kept.tolist()
        np.testing.assert_allclose(law.p, p, rtol=1e-12)
