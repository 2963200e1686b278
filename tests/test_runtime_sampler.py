"""Laws of the sampler: a row's penalties see the text that leads to it, the emitted one and a node's own ancestors, alone."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from specedge.errors import SpecedgeError, UsageError
from specedge.runtime.sample import Logits, Sampling, filtered, log_probability
from specedge.runtime.sampler import Sampler
from specedge.runtime.tree import ROOT, TokenTree

VOCAB = 12
PROMPT = [1, 2, 2, 3]
ROW = np.array([0.5, 2.0, -1.5, 0.0, 3.0, -0.25, 1.0, 2.5, -4.0, 0.75, 1.5, -2.0], np.float32)


def plainly(row: Logits, sampling: Sampling, prompt: Sequence[int], answer: Sequence[int], allowed: int = VOCAB) -> list[float]:
    """The operations one id at a time in the row's own precision, as `Sampling` documents them."""
    real = row.dtype.type
    scores = []
    for token, score in enumerate(row[:allowed]):
        if sampling.repetition_penalty != 1.0 and (token in prompt or token in answer):
            penalty = np.float32(sampling.repetition_penalty)
            score = score / penalty if score > 0 else score * penalty
        count = list(answer).count(token)
        score = score - real(sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0))
        score = score + np.float32(sampling.logit_bias.get(token, 0.0))
        scores.append(-np.inf if token in sampling.banned_ids else float(score))
    return scores


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=8)
samplings = st.builds(
    Sampling,
    st.sampled_from([0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.4, -0.3]),
    frequency_penalty=st.sampled_from([0.0, 0.15, -0.1]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -0.7, 0.3, 2.0]), max_size=4),
    banned_ids=st.sets(st.integers(0, VOCAB - 1), max_size=4).map(tuple),
)
rows = st.lists(st.integers(-32, 32).map(lambda eighths: eighths / 8), min_size=VOCAB, max_size=VOCAB)


@given(samplings, rows, tokens, tokens, tokens, st.sampled_from([np.float32, np.float64]))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_scores_are_what_the_parameters_say(
    sampling: Sampling, row: list[float], prompt: list[int], answer: list[int], path: list[int], kind: type
) -> None:
    logits: Logits = np.array(row, kind)
    before = logits.copy()
    sampler = Sampler(sampling, VOCAB, len(prompt))
    scores = sampler.scores(logits, [*prompt, *answer], path)
    assert scores.tolist() == plainly(logits, sampling, prompt, [*answer, *path])
    law = sampler.law(logits, [*prompt, *answer], path)
    np.testing.assert_array_equal(law.dense(VOCAB), filtered(scores, sampling).dense(VOCAB))
    assert sampler.best(logits, [*prompt, *answer], path) == int(scores.argmax())
    np.testing.assert_array_equal(logits, before)  # the graph's own buffer


def test_a_penalty_counts_what_it_says_it_counts() -> None:
    def changed(path: Sequence[int] = (), **penalty: float) -> dict[int, float]:
        scores = Sampler(Sampling(**penalty), VOCAB, len(PROMPT)).scores(ROW, [*PROMPT, 4, 4, 5], path)  # type: ignore[arg-type]
        return {token: float(scores[token] - ROW[token]) for token in range(VOCAB) if scores[token] != ROW[token]}

    assert changed(repetition_penalty=2.0) == {1: -1.0, 2: -1.5, 4: -1.5, 5: -0.25}  # prompt and answer; 3 has logit 0
    assert changed(frequency_penalty=0.5) == {4: -1.0, 5: -0.5}  # the answer alone, per occurrence
    assert changed(presence_penalty=0.5) == {4: -0.5, 5: -0.5}  # once
    assert changed([6, 6, 1], frequency_penalty=0.5) == {1: -0.5, 4: -1.0, 5: -0.5, 6: -1.0}
    assert changed([6, 6, 1], presence_penalty=0.5) == {1: -0.5, 4: -0.5, 5: -0.5, 6: -0.5}
    assert changed([6, 6, 1], repetition_penalty=2.0) == {1: -1.0, 2: -1.5, 4: -1.5, 5: -0.25, 6: -0.5}


def test_the_operations_come_in_their_order() -> None:
    sampling = Sampling(repetition_penalty=2.0, frequency_penalty=0.5, logit_bias={4: 10.0, 1: -10.0}, banned_ids=[7])
    scores = Sampler(sampling, VOCAB, len(PROMPT)).scores(ROW, [*PROMPT, 4], ())
    assert scores[4] == 3.0 / 2.0 - 0.5 + 10.0  # the penalty divides the logit of the model, not what was added
    assert scores[1] == 2.0 / 2.0 - 10.0
    both = Sampler(Sampling(logit_bias={7: 1000.0}, banned_ids=[7]), VOCAB, 0)
    assert both.scores(ROW, PROMPT, ())[7] == -np.inf  # banned whatever is added


def test_filters_come_after_penalties() -> None:
    sampler = Sampler(Sampling(1.0, top_k=2, presence_penalty=5.0), VOCAB, len(PROMPT))
    assert sampler.law(ROW, [*PROMPT, 4]).ids.tolist() == [1, 7]  # without them 4 and 7


@given(samplings, st.lists(st.tuples(tokens, st.lists(tokens, max_size=4)), max_size=5))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_growing_history_counts_as_a_whole_one_whatever_was_asked_on_the_way(
    sampling: Sampling, rounds: list[tuple[list[int], list[list[int]]]]
) -> None:
    """Each round asks for rows behind several drafted paths, of which the text takes none, some or other tokens."""
    sampler, history = Sampler(sampling, VOCAB, len(PROMPT)), list(PROMPT)
    for emitted, paths in rounds:
        for path in [*paths, []]:
            expected = plainly(ROW, sampling, PROMPT, [*history[len(PROMPT) :], *path])
            assert sampler.scores(ROW, history, path).tolist() == expected
        history += emitted
    fresh = Sampler(sampling, VOCAB, len(PROMPT)).scores(ROW, history, ())
    np.testing.assert_array_equal(sampler.scores(ROW, history, ()), fresh)


def test_a_node_sees_its_own_ancestors_and_no_cousin() -> None:
    tree = TokenTree(tokens=(4, 7, 9, 4, 7), parents=(ROOT, ROOT, 0, 1, 2))
    sampling = Sampling(repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.25)
    sampler = Sampler(sampling, VOCAB, len(PROMPT))
    ancestors: dict[int, tuple[int, ...]] = {ROOT: (), 0: (4,), 1: (7,), 2: (4, 9), 3: (7, 4), 4: (4, 9, 7)}
    for node in (3, ROOT, 4, 0, 2, 1, 4, ROOT):  # in any order, and again
        expected = plainly(ROW, sampling, PROMPT, [6, *ancestors[node]])
        assert sampler.scores(ROW, [*PROMPT, 6], tree.path(node)).tolist() == expected


# ---- what never comes out


@given(st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=VOCAB - 1), st.floats(0.0, 1.0), samplings)
@settings(deadline=None, derandomize=True)
def test_a_banned_id_never_comes_out(banned: set[int], u: float, sampling: Sampling) -> None:
    sampling = Sampling(sampling.temperature, logit_bias=dict.fromkeys(banned, 1000.0), banned_ids=banned)
    sampler = Sampler(sampling, VOCAB, 0)
    assert sampler.best(ROW, PROMPT) not in banned
    assert sampler.law(ROW, PROMPT).draw(u) not in banned


def test_greedy_respects_penalties() -> None:
    def best(sampling: Sampling, answer: Sequence[int] = (4,), path: Sequence[int] = ()) -> int:
        sampler = Sampler(sampling, VOCAB, len(PROMPT))
        token = sampler.best(ROW, [*PROMPT, *answer], path)
        assert sampler.law(ROW, [*PROMPT, *answer], path).draw(0.5) == token
        return token

    assert best(Sampling()) == 4
    assert best(Sampling(repetition_penalty=1.5)) == 7
    assert best(Sampling(repetition_penalty=1.5), (), [4]) == 7
    assert best(Sampling(presence_penalty=0.6)) == 7
    assert best(Sampling(frequency_penalty=0.3), (4, 4)) == 7
    assert best(Sampling(frequency_penalty=0.3), (4,)) == 4
    assert best(Sampling(frequency_penalty=0.3), (4,), [4]) == 7
    assert best(Sampling(logit_bias={9: 3.0})) == 9
    assert best(Sampling(banned_ids=[4, 7])) == 1


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(2.0), Sampling(2.0, top_k=3), Sampling(2.0, top_p=0.9, min_p=0.1)])
@pytest.mark.parametrize("more", [{}, {"presence_penalty": 1.0}, {"logit_bias": {3: 1.0}}, {"banned_ids": [2]}])
def test_padded_rows_are_never_read(sampling: Sampling, more: dict[str, float]) -> None:  # B39
    given_ = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, min_p=sampling.min_p, **more)  # type: ignore[arg-type]
    logits = np.array([-5.0, -4.0, -6.0, -7.0, 0.0, np.nan], np.float32)
    sampler = Sampler(given_, 4, 1)
    law = sampler.law(logits, [1, 0])
    assert law.dense(6)[4:].tolist() == [0.0, 0.0]
    np.testing.assert_array_equal(law.dense(4), Sampler(given_, 4, 1).law(logits[:4], [1, 0]).dense(4))
    assert sampler.best(logits, [1, 0]) == law.ids[law.p.argmax()]
    assert law.draw(1.0) < 4
    assert sampler.log_probability(logits, 1) == log_probability(logits[:4], 1)


# ---- rows of a draft model with fewer ids


@given(samplings, rows, tokens, tokens, st.integers(1, VOCAB - 1))
@settings(deadline=None, derandomize=True)
def test_a_shorter_row_goes_the_way_of_a_whole_one(
    sampling: Sampling, row: list[float], answer: list[int], path: list[int], size: int
) -> None:
    """p and q see the same penalties; what the draft cannot say is not its concern."""
    assume(not set(range(size)) <= set(sampling.banned_ids))
    logits, sampler = np.array(row, np.float32), Sampler(sampling, VOCAB, len(PROMPT))
    whole = sampler.scores(logits, [*PROMPT, *answer], path)
    np.testing.assert_array_equal(sampler.scores(logits[:size], [*PROMPT, *answer], path), whole[:size])
    longer = np.concatenate([logits, np.full(4, 50.0, np.float32)])
    np.testing.assert_array_equal(sampler.scores(longer, [*PROMPT, *answer], path), whole)


# ---- what is refused, and what is left alone


@pytest.mark.parametrize("name", ["logit_bias", "banned_ids"])
def test_ids_that_cannot_be_emitted_are_refused_by_name(name: str) -> None:
    for token in (VOCAB, 10**9, 2**70):
        ids = {0: 1.0, token: 1.0} if name == "logit_bias" else [0, token]
        with pytest.raises(UsageError, match=f"^{name}: id {token}, expected 0..{VOCAB - 1}"):
            Sampler(Sampling(**{name: ids}), VOCAB, 0)  # type: ignore[arg-type]
    Sampler(Sampling(logit_bias={VOCAB - 1: 1.0}, banned_ids=[VOCAB - 1]), VOCAB, 0)


def test_banning_everything_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^banned_ids: all 12 ids are banned"):
        Sampler(Sampling(banned_ids=range(VOCAB)), VOCAB, 0)
    assert Sampler(Sampling(banned_ids=[*range(1, VOCAB), 1, 1]), VOCAB, 0).best(ROW, PROMPT) == 0
    assert Sampler(Sampling(banned_ids=[1] * VOCAB), VOCAB, 0).best(ROW, PROMPT) == 4


def test_the_log_probability_is_the_model_s_own() -> None:
    plain = Sampler(Sampling(), VOCAB, 0)
    changed = Sampler(Sampling(0.3, top_k=2, repetition_penalty=2.0, logit_bias={4: -5.0}, banned_ids=[7]), VOCAB, 0)
    for token in range(VOCAB):
        assert changed.log_probability(ROW, token) == plain.log_probability(ROW, token) == log_probability(ROW, token)


@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "logit_bias": {5: -3.0, 2: 1.0}}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_are_errors_of_the_row_that_is_named(more: dict[str, float], temperature: float, bad: float) -> None:
    sampler = Sampler(Sampling(temperature, **more), VOCAB, len(PROMPT))  # type: ignore[arg-type]
    damaged = ROW.copy()
    damaged[[5, 9]] = bad
    for ask in (sampler.law, sampler.best):
        with pytest.raises(SpecedgeError, match=f"^position 9: {bad} at id 5,"):
            ask(damaged, [*PROMPT, 5], (5, 9), "position 9")
    assert sampler.best(ROW, [*PROMPT, 5]) == sampler.best(ROW, [*PROMPT, 5], ())  # and nothing of it stays behind


def test_a_row_that_nothing_changes_is_not_copied() -> None:
    scores = Sampler(Sampling(0.7, top_k=3, seed=5), 10, 0).scores(ROW, PROMPT, [4])
    assert np.shares_memory(scores, ROW) and scores.tolist() == ROW[:10].tolist()
