"""Laws of the random numbers, of p, and of drawing from it."""

import math
import random
import warnings
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from specedge.errors import SpecedgeError
from specedge.runtime.philox import Purpose, philox4x32, uniform
from specedge.runtime.sample import Law, Logits, Sampling, best, draw, probabilities

LAST = math.nextafter(1.0, 0.0)
NAN = float("nan")


def logits_of(*p: float) -> Logits:
    with np.errstate(divide="ignore"):
        return np.log(np.array(p)).astype(np.float32)


# ---- random numbers


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter: str, key: str, words: str):
    c0, c1, c2, c3 = (int(word, 16) for word in counter.split())
    k0, k1 = (int(word, 16) for word in key.split())
    assert " ".join(f"{word:08x}" for word in philox4x32((c0, c1, c2, c3), (k0, k1))) == words


def test_u_is_the_top_53_bits_of_the_first_two_words_low_word_first():
    assert uniform(0, 0, Purpose.TOKEN) == (0xE169C58D6627E8D5 >> 11) / 2**53
    seed = 0x299F31D0A4093822
    words = philox4x32((9, Purpose.ACCEPT, 4, 0), (0xA4093822, 0x299F31D0))
    assert uniform(seed, 9, Purpose.ACCEPT, 4) == ((words[1] << 32 | words[0]) >> 11) / 2**53


def test_every_part_of_the_key_changes_u():
    keys = product((0, 1, 2**32, 2**64 - 1), (0, 1, 7), Purpose, (0, 1))
    numbers = [uniform(*key) for key in keys]
    assert len(set(numbers)) == len(numbers)
    assert all(0.0 <= u < 1.0 for u in numbers)


def test_numpy_integers_give_the_same_u():
    assert uniform(5, np.int64(3), Purpose.DRAFT, np.int64(2)) == uniform(5, 3, Purpose.DRAFT, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", [(2**64, 0, 0), (-1, 0, 0), (0, -1, 0), (0, 2**32, 0), (0, 0, -1)])
def test_numbers_that_do_not_fit_are_refused(key: tuple[int, int, int]):
    seed, position, index = key
    with pytest.raises(ValueError, match="32-bit words"):
        uniform(seed, position, Purpose.TOKEN, index)


def test_other_generators_are_left_alone():  # B48
    states = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    draw(probabilities(logits_of(0.5, 0.5), Sampling(1.0, seed=3), None), uniform(3, 1, Purpose.TOKEN))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states  # type: ignore[index]


# ---- parameters (B47)


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "seed"])
@pytest.mark.parametrize("value", [NAN, -1, -0.5, math.inf, -math.inf, "abc", None, True, [1]])
def test_illegal_parameters_are_refused_by_name(name: str, value: object):
    with pytest.raises(ValueError, match=f"^{name}: expected .* found "):
        Sampling(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [("top_p", 1.0000001), ("top_p", 2), ("top_k", 1.5), ("seed", 2**64)])
def test_values_beyond_the_end_are_refused_by_name(name: str, value: float):
    with pytest.raises(ValueError, match=f"^{name}: "):
        Sampling(**{name: value})  # type: ignore[arg-type]


GREEDY = [
    Sampling(),
    Sampling(-0.0),
    Sampling(1e-6),
    Sampling(1e-4),
    Sampling(1.0, top_k=1),
    Sampling(1.0, top_p=0.0),
    Sampling(1.0, top_p=1e-9),
]


@pytest.mark.parametrize("sampling", GREEDY)
def test_greedy_is_one_hot_of_the_best(sampling: Sampling):
    assert sampling.greedy
    logits = np.array([1.0, 3.0, 3.0, -2.0], np.float32)
    assert probabilities(logits, sampling, None).tolist() == [0.0, 1.0, 0.0, 0.0]
    assert best(logits, None) == 1


@pytest.mark.parametrize("top_k", [0, 4, 10**7])
def test_top_k_is_off_at_zero_and_from_the_vocabulary_on(top_k: int):
    logits = logits_of(0.1, 0.2, 0.3, 0.4)
    off = probabilities(logits, Sampling(0.9), None)
    np.testing.assert_array_equal(probabilities(logits, Sampling(0.9, top_k=top_k), None), off)
    assert not Sampling(0.9, top_k=top_k).greedy


def test_nothing_overflows_and_nothing_warns():
    extreme = np.array([3e38, -3e38, 2.9e38, -np.inf], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with np.errstate(over="raise", invalid="raise", divide="raise"):
            for temperature in (1.0001e-4, 1.0, 1e30):
                p = probabilities(extreme, Sampling(temperature, top_p=0.9), None)
                assert np.isfinite(p).all()
                assert p.sum() == pytest.approx(1.0, abs=1e-12)


# ---- p


def plainly(logits: Logits, sampling: Sampling) -> Law:
    """The filters one token at a time, as `probabilities` documents them."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / sampling.temperature)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[: sampling.top_k or None]
    order.sort(key=lambda token: (-weights[token], token))
    goal = sampling.top_p * weights[order].sum() if sampling.top_p < 1.0 else np.inf
    kept, mass = [], 0.0
    for token in order:
        if mass < goal:
            kept.append(token)
            mass += weights[token]
    p = np.zeros(len(logits))
    p[kept] = weights[kept] / mass
    return p


@given(
    arrays(np.float32, st.integers(2, 40), elements=st.integers(-40, 40).map(lambda tenths: tenths / 10)),
    st.sampled_from([0.2, 0.7, 1.0, 1.3]),
    st.sampled_from([0, 2, 3, 7]),
    st.sampled_from([0.0513, 0.3719, 0.9013, 0.99901, 1.0]),  # no sum of equal weights is on the line
)
@settings(deadline=None, derandomize=True)
def test_the_filters_are_what_they_say(logits: Logits, temperature: float, top_k: int, top_p: float):
    sampling = Sampling(temperature, top_k, top_p)
    np.testing.assert_allclose(probabilities(logits, sampling, None), plainly(logits, sampling), rtol=1e-12, atol=0)


def test_a_large_vocabulary_is_filtered_the_same_way():
    logits = np.random.default_rng(0).normal(0, 3, 5000).astype(np.float32)
    for sampling in (Sampling(0.8, top_p=0.9), Sampling(1.5, top_k=50, top_p=0.95), Sampling(30.0, top_p=0.9)):
        np.testing.assert_allclose(probabilities(logits, sampling, None), plainly(logits, sampling), rtol=1e-11)


def test_equal_logits_stay_by_lower_id():
    flat = np.zeros(10, np.float32)
    assert np.flatnonzero(probabilities(flat, Sampling(1.0, top_k=3), None)).tolist() == [0, 1, 2]
    assert np.flatnonzero(probabilities(flat, Sampling(1.0, top_p=0.35), None)).tolist() == [0, 1, 2, 3]
    flat[4], flat[9] = 1.0, -1.0
    assert np.flatnonzero(probabilities(flat, Sampling(1.0, top_k=3), None)).tolist() == [0, 1, 4]


def test_top_p_counts_what_top_k_left():
    p = probabilities(logits_of(0.4, 0.3, 0.2, 0.1), Sampling(1.0, top_k=2, top_p=0.5), None)  # 0.4 / 0.7 > 0.5
    assert p.tolist() == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(2.0), Sampling(2.0, top_k=3), Sampling(2.0, top_p=0.9)])
def test_padded_rows_are_never_read(sampling: Sampling):  # B39
    logits = np.array([-5.0, -4.0, -6.0, -7.0, 0.0, np.nan], np.float32)
    p = probabilities(logits, sampling, 4)
    assert len(p) == 6
    assert p[4:].tolist() == [0.0, 0.0]
    np.testing.assert_array_equal(p[:4], probabilities(logits[:4], sampling, None))
    assert best(logits, 4) == 1
    assert draw(p, LAST) < 4


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.5)])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_are_errors_that_name_the_first_id(sampling: Sampling, bad: float):
    logits = np.array([0.0, 1.0, bad, 2.0, np.nan], np.float32)
    with pytest.raises(SpecedgeError, match=f"^row 3: {bad} at id 2,"):
        probabilities(logits, sampling, None, "row 3")
    with pytest.raises(SpecedgeError, match=f"{bad} at id 2,"):
        best(logits, None)


def test_a_row_of_minus_infinity_is_an_error():
    with pytest.raises(SpecedgeError, match="-inf at id 0"):
        probabilities(np.full(3, -np.inf, np.float32), Sampling(1.0), None)


def test_minus_infinity_elsewhere_is_probability_zero():  # B44
    p = probabilities(np.array([-np.inf, 0.5, -np.inf], np.float32), Sampling(1.0, top_k=2, top_p=0.9), None)
    assert p.tolist() == [0.0, 1.0, 0.0]


def test_a_batch_is_not_a_row():
    with pytest.raises(ValueError, match="one row"):
        best(np.zeros((2, 3), np.float32), None)
    with pytest.raises(ValueError, match="allowed >= 1"):
        best(np.zeros(3, np.float32), 0)


# ---- drawing


def test_draw_is_the_inverse_cdf_in_id_order():
    p = np.array([0.25, 0.0, 0.5, 0.25, 0.0])
    assert [draw(p, u) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, LAST)] == [0, 0, 2, 2, 3, 3]


@given(
    arrays(np.float64, st.integers(1, 30), elements=st.sampled_from([0.0, 1e-300, 1e-17, 0.1, 0.3, 1.0])),
    st.one_of(st.sampled_from([0.0, LAST, 1.0, 0.5]), st.floats(0, 1, exclude_max=True)),
)
@settings(deadline=None, derandomize=True)
def test_an_impossible_token_is_never_drawn(p: Law, u: float):
    assume(p.sum() > 0.0)
    assert p[draw(p, u)] > 0.0  # whatever p sums to


def test_the_shares_of_u_are_p():
    """Between two numbers that give the same token lie only numbers that give it: the ends of the runs are the law."""
    p = probabilities(np.random.default_rng(1).normal(0, 2, 5).astype(np.float32), Sampling(1.0), None)
    ends = np.cumsum(p)
    for token, (start, end) in enumerate(zip([0.0, *ends[:-1]], ends, strict=True)):
        assert draw(p, start + 1e-12) == draw(p, end - 1e-12) == token


@pytest.mark.parametrize("p", [[0.0, 0.0], [0.5, NAN], [math.inf, 0.0], [-1.0, 0.5]])
def test_what_cannot_be_drawn_from_is_refused(p: list[float]):
    with pytest.raises(ValueError, match="positive sum"):
        draw(np.array(p), 0.5)


@pytest.mark.parametrize("u", [NAN, -0.1, 1.1])
def test_u_out_of_range_is_refused(u: float):
    with pytest.raises(ValueError, match=r"u in \[0, 1\]"):
        draw(np.array([0.5, 0.5]), u)
