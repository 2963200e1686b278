"""Laws of the random numbers: Philox4x32-10 by counter, one number per decision, the same one by one and in bulk."""

import random
from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chisquare, kstest

from specedge.runtime.in_graph import InGraph, gumbel
from specedge.runtime.law import Law
from specedge.runtime.philox import WORD, Numbers, Purpose, draft_uniforms, philox4x32, uniform, uniforms
from specedge.runtime.sample import Sampling, filtered
from specedge.runtime.sampler import Sampler
from test_runtime_sampling_laws import chi_square

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


# ---- the numbers of drafting in one call


def philox4x64(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x64-10 of Salmon et al. 2011, word by word."""
    mask = 2**64 - 1
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * x0, 0xCA5A826395121157 * x2
        x0, x1, x2, x3 = (second >> 64) ^ x1 ^ k0, second & mask, (first >> 64) ^ x3 ^ k1, first & mask
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return x0, x1, x2, x3


def test_philox_of_64_bits_gives_the_known_answers_of_random123() -> None:
    """So that what follows rests on no other implementation."""
    found = philox4x64((0, 0, 0, 0), (0, 0))
    assert found == (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 37])
@pytest.mark.parametrize("seed", [0, 5, 2**32 + 1, 2**63, 2**64 - 1])
def test_drafts_of_one_call_have_numbers_of_their_own(seed: int, count: int) -> None:
    for root, parent in ((0, 0), (0, 1), (17, 3), (2**31, 60)):
        halves: list[int] = []
        for block in range(1, 2 + count // 8):
            for word in philox4x64((block, root, parent, 0), (seed, 4)):
                halves += [word & WORD, word >> 32]
        found = draft_uniforms(seed, root, parent, count)
        assert found.dtype == np.float32 and len(found) == count
        true = (np.array(halves[:count], np.float64) + 0.5) / 2**32
        np.testing.assert_allclose(found, true, rtol=2e-7, atol=0)  # float32 beside float64
        assert (found > 0).all() and (found <= 1).all()


def test_other_seeds_roots_and_parents_give_other_numbers() -> None:
    drawn = [
        draft_uniforms(seed, root, parent, 16).tolist() for seed in (1, 2, 2**63) for root in (0, 1, 9) for parent in (0, 1, 2)
    ]
    assert len({tuple(numbers) for numbers in drawn}) == len(drawn)
    assert len({number for numbers in drawn for number in numbers}) > 16 * len(drawn) - 3  # nor the same in another order


def test_noise_is_finite_wherever_numbers_lie() -> None:
    """The least and the largest of both kinds of numbers; they are clipped before they are added to logits."""
    least, largest = np.float32(0.5 * 2**-32), np.float32(1.0)
    noise = gumbel(np.array([least, 0.5, largest], np.float32))
    assert (
        noise.dtype == np.float32 and noise[0] == pytest.approx(22.87, abs=0.01) and noise[1] == pytest.approx(0.3665, abs=1e-3)
    )
    assert noise[2] == -np.inf
    assert gumbel(np.array([0.0, 1 - 2**-53]))[0] == np.inf and gumbel(np.array([1 - 2**-53]))[0] > -4
    extremes = np.array([[0.0, 1.0, 2**-53, 1 - 2**-53]])
    in_graph = InGraph(Sampler(Sampling(100.0), 4, 1), lambda history, depths, ids: gumbel(extremes))
    found = in_graph.noise([1], [0], np.arange(4), -30000.0)
    assert np.isfinite(found).all() and found[0, 0] == 1e4 and found[0, 1] == -1e4


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_largest_sum_with_noise_has_the_law_of_the_logits(temperature: float) -> None:
    """As draws without replacement do: the second of two is drawn from what the first left."""
    logits = np.array([1.0, 0.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.0], np.float32)
    scaled = logits.astype(np.float64) / temperature
    law = np.exp(scaled) / np.exp(scaled).sum()
    pairs = np.zeros((8, 8))
    for root in range(5000):
        order = (-(logits + np.float32(temperature) * gumbel(draft_uniforms(3, root, root % 3, 8)))).argsort()
        pairs[order[0], order[1]] += 1
    joint = law[:, None] * law / (1 - law)[:, None]
    np.fill_diagonal(joint, 0)
    assert chisquare(pairs.sum(axis=1), law * 5000).pvalue > 0.001
    assert chi_square(pairs, joint) > 0.001


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
