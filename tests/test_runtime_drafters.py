"""Laws of prompt lookup: what it proposes is what a search by hand, position after position, finds."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specedge.runtime.drafters import NOTHING, LookupDrafter, NoDrafter
from specedge.runtime.shape import TreeShape

CONTEXT = 256
LONGEST = LookupDrafter.longest


def fresh(text: Sequence[int], gamma: int) -> tuple[list[int], tuple[float, ...]]:
    """(tokens, confidence) of a drafter that has seen nothing before `text`."""
    drafter = LookupDrafter(CONTEXT)
    drafter.begin(text)
    proposal = drafter.propose(text, TreeShape.chain(gamma))
    assert proposal.q is None and proposal.tree.is_chain  # a point mass
    return list(proposal.tree.tokens), proposal.confidence


def sure(matched: int, gamma: int) -> tuple[float, ...]:
    """What matches of 1, 2-3, 4-7, ... tokens are worth, each drafted one making it longer by one."""
    rates, least = LookupDrafter.rates, (1, 2, 4, 8, 16, 32)
    lengths = range(matched, matched + gamma) if matched else ()
    return tuple(max(rate for rate, shortest in zip(rates, least, strict=True) if length >= shortest) for length in lengths)


def by_hand(text: Sequence[int], gamma: int) -> tuple[list[int], tuple[float, ...]]:
    """The longest common suffix of the text and its beginnings, the latest of equals, then a copy that reads its own output."""
    start, matched = 0, 0
    for end in range(1, len(text)):
        length = 0
        while length < min(end, LONGEST) and text[end - length - 1] == text[len(text) - length - 1]:
            length += 1
        if length and length >= matched:
            start, matched = end, length
    copied = list(text)
    for offset in range(gamma if matched else 0):
        copied.append(copied[start + offset])
    return copied[len(text) :], sure(matched, gamma)


texts = st.one_of(
    st.lists(st.integers(0, 3), min_size=1, max_size=90),
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=7), st.integers(1, 20), st.lists(st.integers(0, 2), max_size=4)
    ).map(lambda parts: [*parts[0] * parts[1], *parts[2], *parts[0]]),
)


@given(texts, st.integers(0, 12))
@example([7] * (LONGEST + 5), 4)
@example([*range(50), 99, *range(50)], 4)  # more than LONGEST in common
@settings(max_examples=400, deadline=None, derandomize=True)
def test_it_proposes_what_a_search_by_hand_finds(text: list[int], gamma: int) -> None:
    assert fresh(text, gamma) == by_hand(text, gamma)


@pytest.mark.parametrize(
    ("text", "expected", "matched"),
    [
        pytest.param([1, 2, 3, 8, 2, 3, 9, 1, 2, 3], [8, 2, 3], 3, id="the longest suffix, though a shorter is nearer"),
        pytest.param([5, 6, 1, 5, 7, 2, 5], [7, 2, 5], 1, id="the most recent of equals"),
        pytest.param([1, 2, 1, 2], [1, 2, 1], 2, id="a copy that overlaps the end goes on with itself"),
        pytest.param([4, 4], [4, 4, 4], 1, id="one token over and over"),
        pytest.param([1, 2, 3], [], 0, id="nothing found"),
        pytest.param([1], [], 0, id="nothing to search in"),
    ],
)
def test_what_is_proposed(text: list[int], expected: list[int], matched: int) -> None:
    assert fresh(text, 3) == (expected, sure(matched, 3))


def test_output_is_searched_as_well_as_the_prompt() -> None:
    drafter = LookupDrafter(CONTEXT)
    drafter.begin([1, 2, 3])
    two = TreeShape.chain(2)
    assert drafter.propose([1, 2, 3], two).tree.tokens == ()
    assert drafter.propose([1, 2, 3, 9, 8, 7, 9], two).tree.tokens == (8, 7)  # found in the output
    assert drafter.propose([1, 2, 3, 9, 8, 7, 9, 2], two).tree.tokens == (3, 9)  # in the prompt, running on into the output


def test_of_a_tree_it_drafts_a_chain_as_deep() -> None:
    text = [1, 2, 3, 8, 2, 3, 9, 1, 2, 3]
    drafter = LookupDrafter(CONTEXT)
    drafter.begin(text)
    tree = TreeShape.from_paths([[0], [1], [2], [0, 0], [2, 0]])
    assert drafter.propose(text, tree).tree == drafter.propose(text, TreeShape.chain(2)).tree
    assert drafter.propose(text, tree).tree.tokens == (8, 2)


@given(texts, st.data())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_growing_text_is_searched_as_a_whole_one(text: list[int], data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, len(text)), min_size=1, max_size=6, unique=True).map(sorted))
    drafter = LookupDrafter(CONTEXT)
    drafter.begin(text[: lengths[0]])
    for length in lengths:
        proposal = drafter.propose(text[:length], TreeShape.chain(5))
        assert (list(proposal.tree.tokens), proposal.confidence) == fresh(text[:length], 5)


@given(texts, texts)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_new_request_forgets_the_one_before(before: list[int], text: list[int]) -> None:  # B35
    drafter = LookupDrafter(CONTEXT)
    drafter.begin(before)
    drafter.propose(before, TreeShape.chain(5))
    drafter.begin(text)
    proposal = drafter.propose(text, TreeShape.chain(5))
    assert (list(proposal.tree.tokens), proposal.confidence) == fresh(text, 5)


def test_the_room_is_what_the_context_leaves() -> None:
    drafter = LookupDrafter(8)
    drafter.begin([3] * 7)
    assert [drafter.room(length) for length in (1, 7, 8)] == [7, 1, 0]
    assert drafter.propose([3] * 8, TreeShape.chain(drafter.room(8))).tree.tokens == ()


def test_no_drafter_drafts_nothing() -> None:
    drafter = NoDrafter()
    drafter.begin([1, 2, 3])
    assert drafter.room(3) == drafter.room(0) == 0
    assert drafter.propose([1, 2, 1], TreeShape.chain(4)) is NOTHING
    assert NOTHING.tree.tokens == () and NOTHING.q is None and NOTHING.confidence == ()
