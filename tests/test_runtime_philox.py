"""Laws of the random numbers: Philox4x32-10 by counter, one number per decision, the same one by one and in bulk."""

import random
from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import kstest

from specedge.runtime.law import Law
from specedge.runtime.philox import WORD, Numbers, Purpose, philox4x32, uniform, uniforms
from specedge.runtime.sample import Sampling, filtered

words = st.one_of(st.integers(0, WORD), st.sampled_from([0, 1, WORD - 1, WORD]))
seeds = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, WORD, 2**32, 2**64 - 1]))


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter: str, key: str, words: str) -> None:
    c0, c1, c2, c3 = (int(word, 16) for word in counter.split())
    k0, k1 = (int(word, 16) for word in key.split())
    assert " ".join(f"{word:08x}" for word in philox4x32((c0, c1, c2, c3), (k0, k1))) == words


def test_u_is_the_top_53_bits_of_the_first_two_words_low_word_first() -> None:
    assert uniform(0, 0, Purpose.TOKEN) == (0xE169C58D6627E8D5 >> 11) / 2**53
    seed = 0x299F31D0A4093822
    found = philox4x32((9, Purpose.ACCEPT, 4, 0), (0xA4093822, 0x299F31D0))
    assert uniform(seed, 9, Purpose.ACCEPT, 4) == ((found[1] << 32 | found[0]) >> 11) / 2**53


def test_the_purposes_have_the_numbers_of_the_contract() -> None:
    assert {purpose.name: purpose.value for purpose in Purpose} == {"TOKEN": 0, "DRAFT": 1, "ACCEPT": 2, "NOISE": 3}


def test_every_part_of_the_key_changes_u() -> None:
    numbers = [uniform(*key) for key in product((0, 1, 2**32, 2**64 - 1), (0, 1, 7), Purpose, (0, 1))]
    assert len(set(numbers)) == len(numbers)
    assert all(0.0 <= u < 1.0 for u in numbers)


def test_numpy_integers_give_the_same_u() -> None:
    assert uniform(5, np.int64(3), Purpose.DRAFT, np.int64(2)) == uniform(5, 3, Purpose.DRAFT, 2)  # type: ignore[arg-type]
    assert uniform(np.int64(2**62 + 1), 3, Purpose.DRAFT) == uniform(2**62 + 1, 3, Purpose.DRAFT)  # type: ignore[arg-type]
    assert uniform(np.uint64(2**64 - 1), 3, Purpose.DRAFT) == uniform(2**64 - 1, 3, Purpose.DRAFT)  # type: ignore[arg-type]


@given(seeds, words, st.sampled_from(Purpose), st.lists(words, max_size=20))
@settings(deadline=None, derandomize=True)
def test_numbers_in_bulk_are_the_numbers_one_by_one(seed: int, position: int, purpose: Purpose, indices: list[int]) -> None:
    found = uniforms(seed, position, purpose, np.array(indices, np.intp))
    assert found.dtype == np.float64
    assert found.tolist() == [uniform(seed, position, purpose, index) for index in indices]


REFUSED = [(2**64, 0, 0), (-1, 0, 0), (0, -1, 0), (0, 2**32, 0), (0, 0, -1), (0, 0, 2**32)]


@pytest.mark.parametrize(("seed", "position", "index"), REFUSED)
def test_numbers_that_do_not_fit_are_refused(seed: int, position: int, index: int) -> None:
    with pytest.raises(ValueError, match="32-bit words"):
        uniform(seed, position, Purpose.TOKEN, index)
    with pytest.raises(ValueError, match="32-bit words"):
        uniforms(seed, position, Purpose.NOISE, np.array([3, index, 5], np.intp))


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("word", [-1, WORD + 1])
def test_philox_refuses_words_that_do_not_fit(place: int, word: int) -> None:
    counter = [0, 0, 0, 0]
    counter[place] = word
    with pytest.raises(ValueError, match=f"found counter .*{word}"):
        philox4x32((counter[0], counter[1], counter[2], counter[3]), (0, 0))
    with pytest.raises(ValueError, match=f"and key .*{word}"):
        philox4x32((0, 0, 0, 0), (word, 0) if place % 2 else (0, word))


def test_the_noise_of_a_vocabulary_is_uniform() -> None:
    noise = uniforms(11, 40, Purpose.NOISE, np.arange(20_000))
    assert kstest(noise, "uniform").pvalue > 0.01
    assert abs(np.corrcoef(noise, uniforms(11, 41, Purpose.NOISE, np.arange(20_000)))[0, 1]) < 0.03


def test_other_generators_are_left_alone() -> None:  # B48
    states = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    law = filtered(np.zeros(2, np.float32), Sampling(1.0, seed=3))
    law.draw(uniform(3, 1, Purpose.TOKEN))
    uniforms(3, 1, Purpose.NOISE, np.arange(9))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states  # type: ignore[index]


# ---- the numbers of a round


Key = tuple[int, int, Purpose, int]


def recorded(seed: int, root: int) -> tuple[Numbers, list[Key]]:
    """A round's numbers, and the keys that it asks for."""
    keys: list[Key] = []

    def one(seed: int, position: int, purpose: Purpose, index: int) -> float:
        keys.append((seed, position, purpose, index))
        return 0.5

    def many(seed: int, position: int, purpose: Purpose, indices: NDArray[np.intp]) -> NDArray[np.float64]:
        keys.extend((seed, position, purpose, int(index)) for index in indices)
        return np.full(len(indices), 0.5)

    return Numbers(seed, root, one, many), keys


@pytest.mark.parametrize("root", [0, 17])
def test_a_token_has_the_position_where_it_lands(root: int) -> None:
    numbers, keys = recorded(9, root)
    for depth in range(3):
        numbers.token(depth)
        numbers.noise(depth, np.array([4, 250]))
    assert keys == [
        key
        for depth in range(3)
        for key in (
            (9, root + depth + 1, Purpose.TOKEN, 0),
            (9, root + depth + 1, Purpose.NOISE, 4),
            (9, root + depth + 1, Purpose.NOISE, 250),
        )
    ]


def test_a_draft_and_its_verdict_have_the_position_of_the_root_and_the_node() -> None:
    numbers, keys = recorded(9, 17)
    for node in range(3):
        numbers.draft(node)
        numbers.accept(node)
    assert keys == [(9, 17, purpose, node) for node in range(3) for purpose in (Purpose.DRAFT, Purpose.ACCEPT)]


def test_the_numbers_are_those_of_philox_unless_told_otherwise() -> None:
    numbers = Numbers(9, 17)
    assert numbers.token(2) == uniform(9, 20, Purpose.TOKEN)
    assert numbers.draft(3) == uniform(9, 17, Purpose.DRAFT, 3)
    assert numbers.accept(3) == uniform(9, 17, Purpose.ACCEPT, 3)
    assert numbers.noise(2, np.array([5])).tolist() == [uniform(9, 20, Purpose.NOISE, 5)]


def test_a_position_has_one_token_number_whichever_round_draws_it() -> None:
    assert {Numbers(9, root).token(20 - root) for root in range(21)} == {uniform(9, 21, Purpose.TOKEN)}


@given(seeds, st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 5))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_a_draft_or_verdict_is_never_decided_by_the_number_of_another(seed: int, emitted: list[int], nodes: int) -> None:
    """Every round emits at least one token, so roots never repeat, and neither do the keys of what is drafted."""
    used: Counter[float] = Counter()
    root = 3
    for tokens in emitted:
        numbers = Numbers(seed, root)
        used.update(numbers.draft(node) for node in range(nodes))
        used.update(numbers.accept(node) for node in range(nodes))
        used.update(numbers.token(depth) for depth in range(tokens))
        root += tokens
    assert max(used.values()) == 1


def test_tokens_of_positions_in_a_row_have_the_law_they_are_drawn_from() -> None:
    law = Law.of([0.1, 0.2, 0.3, 0.4])
    found = Counter(law.draw(Numbers(1, root).token(0)) for root in range(4000))
    np.testing.assert_allclose([found[token] / 4000 for token in range(4)], law.p, atol=0.025)
