"""Laws of the choice of what is drafted, and the cost model it rests on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specedge.runtime.control import Adaptive, Control, Costs, Fixed
from specedge.runtime.plan import break_even, expected_tokens, speedup
from specedge.runtime.shape import TreeShape

WIDEST = 9


def step_cost(width: int) -> float:
    return 1.0 + 0.05 * (width - 1)


def adaptive(
    draft_cost: float = 0.0,
    cost: Callable[[int], float] = step_cost,
    widest: int = WIDEST,
    acceptance: Sequence[float] = (),
    stepwise: bool = False,
) -> Adaptive:
    gammas = range(widest)
    costs = Costs(tuple(gamma * draft_cost for gamma in gammas), tuple(cost(gamma + 1) for gamma in gammas))
    return Adaptive(costs, acceptance, stepwise)


def ask(control: Control, depth: int, nodes: int | None = None) -> int:
    """gamma that is asked for."""
    shape = control.ask(depth, depth if nodes is None else nodes)
    assert shape.is_chain
    return shape.depth


@dataclass(frozen=True)
class Turn:
    """A round: what the drafter took the trouble to draft, what was verified, what came out."""

    drafted: int
    taken: int
    emitted: int


def turn(control: Control, most: int, room: int = 100, sure: float | None = None, drawn: bool = False) -> Turn:
    """A round in which the target would accept `most` of any number of drafts.

    A drafter that is `sure` of its tokens, and may be asked for fewer, goes token by token; what it drew it must not drop.
    """
    asked = drafted = ask(control, room)
    if isinstance(control, Adaptive) and control._stepwise and asked:
        assert sure is not None and control.weigh
        worth = [control.weigh([sure] * length) for length in range(1, asked + 1)]
        drafted = next((length for length, best in enumerate(worth, start=1) if best <= length), asked)
        asked = drafted - (drawn and worth[drafted - 1] < drafted)
    stated = [] if sure is None else [sure] * asked
    taken = control.take(stated, asked, drawn)
    emitted = min(most, taken) + 1
    compared = min(asked, emitted)
    control.observe(stated, min(most, compared), compared)
    return Turn(drafted, taken, emitted)


def play(
    control: Control, accepted: Sequence[int], room: int = 100, sure: float | None = None, drawn: bool = False
) -> list[int]:
    """gamma of round after round."""
    return [turn(control, most, room, sure, drawn).taken for most in accepted]


ALL, NONE = WIDEST, 0


@pytest.mark.parametrize("draft_cost", [0.0, 0.05, 0.2])
def test_it_stops_drafting_when_nothing_is_accepted(draft_cost: float) -> None:
    chosen = play(adaptive(draft_cost), [NONE] * 100)
    assert max(chosen[:1]) > 0  # it has to try
    assert sum(gamma > 0 for gamma in chosen[20:]) <= (0 if draft_cost == 0 else 4)  # a costly drafter is probed
    assert max(chosen[20:]) <= 2


@pytest.mark.parametrize(("draft_cost", "least"), [(0.0, WIDEST - 1), (0.05, WIDEST - 1), (0.2, 4)])
def test_it_drafts_much_when_everything_is_accepted(draft_cost: float, least: int) -> None:
    assert min(play(adaptive(draft_cost), [ALL] * 60)[-20:]) >= least


@pytest.mark.parametrize("draft_cost", [0.0, 0.05, 0.2, 0.3])
@pytest.mark.parametrize("barren", [20, 60, 200])
def test_it_comes_back_when_acceptance_rises(draft_cost: float, barren: int) -> None:
    """A probe that succeeds is followed by another soon, so one chance is enough."""
    control = adaptive(draft_cost, lambda width: 1.0 + 0.2 * (width - 1))
    assert 0 in play(control, [NONE] * barren)[-2:]
    assert min(play(control, [ALL] * 250)[-10:]) >= 3


def test_more_acceptance_means_more_drafts() -> None:
    nothing, little, much, everything = (median(play(adaptive(0.05), [accepted] * 40)[-9:]) for accepted in (0, 2, 4, WIDEST))
    assert 0 == nothing < little < much < everything == WIDEST - 1


def test_a_dearer_verification_means_fewer_drafts() -> None:
    per_row = (0.05, 0.2, 0.5, 1.5)
    controls = [adaptive(cost=lambda width, slope=slope: 1.0 + slope * (width - 1)) for slope in per_row]  # type: ignore[misc]
    settled = [play(control, [2] * 40)[-1] for control in controls]
    assert settled == sorted(settled, reverse=True)
    assert settled[0] > settled[-1] == 0


def test_steps_of_equal_cost_are_filled() -> None:
    """With one static width a round costs the same whatever is drafted: all of it is used, or none."""
    control = adaptive(cost=lambda width: 1.0 if width == 1 else 1.6)
    assert set(play(control, [2] * 30)) <= {0, WIDEST - 1}
    assert play(control, [2] * 30)[-1] == WIDEST - 1


def test_what_a_drafter_says_is_judged_by_its_own_record() -> None:
    control = adaptive()
    for _ in range(30):
        play(control, [NONE], sure=0.2)
        play(control, [ALL], sure=0.95)
    assert play(control, [NONE], sure=0.2) == [0]
    assert play(control, [ALL], sure=0.95) == [WIDEST - 1]


def rising(slope: float) -> Callable[[int], float]:
    return lambda width: 1.0 + slope * (width - 1)


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("draft_cost", [0.0, 0.05, 0.2])
def test_a_drafter_is_believed_until_its_record_speaks_against_it(draft_cost: float, drawn: bool) -> None:
    drawn = drawn and draft_cost > 0  # free drafters draw nothing

    def control() -> Adaptive:
        return adaptive(draft_cost, rising(0.2), stepwise=draft_cost > 0)

    assert play(control(), [ALL], sure=0.98, drawn=drawn)[0] >= 4
    assert play(control(), [ALL], sure=0.6, drawn=drawn)[0] in (1, 2, 3)
    boaster = play(control(), [NONE] * 60, sure=0.98, drawn=drawn)
    assert boaster[0] > 0 and sum(gamma > 0 for gamma in boaster[10:]) <= 3
    modest = play(control(), [ALL] * 60, sure=0.2, drawn=drawn)
    assert modest[0] == 0 and modest[-1] >= 3


def test_few_sure_tokens_among_many_unsure_ones_still_pay() -> None:
    """Acceptance of 0.36 on average is below break-even; where the drafter says so beforehand it is not."""
    control = adaptive(0.02, rising(0.3), stepwise=True)
    turns = [turn(control, *((ALL, 100, 0.97) if index % 3 == 0 else (NONE, 100, 0.05))) for index in range(300)]
    assert sum(each.emitted for each in turns) > 1.3 * sum(1.0 + 0.02 * each.drafted + 0.3 * each.taken for each in turns)


@given(st.floats(0.01, 1.2), st.floats(0.02, 1.0), st.booleans(), st.booleans(), st.sampled_from([0.05, 0.5, 0.99]))
@settings(deadline=None, derandomize=True)
def test_a_drafter_of_no_use_costs_little(draft_cost: float, slope: float, stepwise: bool, drawn: bool, sure: float) -> None:
    """Over 200 tokens 2 %, and what the first tries take: one or two rounds, or a few if it claims much."""
    control = adaptive(draft_cost, rising(slope), stepwise=stepwise)
    turns = [turn(control, NONE, sure=sure if stepwise else None, drawn=drawn) for _ in range(200)]
    lost = [draft_cost * each.drafted + slope * each.taken for each in turns]
    assert sum(lost) <= 4 + 2 * max(lost)
    assert sum(sorted(lost)[:-3]) <= 4 + 0.4


def flat(width: int) -> float:
    """One static width beside that of a token."""
    return 1.0 if width == 1 else 2.1


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("stepwise", [False, True])
@pytest.mark.parametrize("barren", [0, 20, 60])
def test_it_comes_back_where_a_single_draft_cannot_pay(stepwise: bool, drawn: bool, barren: int) -> None:
    """A probe must be as long as a round that pays."""
    control = adaptive(0.05, flat, widest=5, stepwise=stepwise)
    sure = 0.9 if stepwise else None
    for _ in range(barren):
        turn(control, NONE, sure=sure, drawn=drawn)
    turns = [turn(control, ALL, sure=sure, drawn=drawn) for _ in range(500)]
    spent = sum(flat(each.taken + 1) + 0.05 * each.drafted for each in turns)
    assert sum(each.emitted for each in turns) > (1.5 if barren else 2.0) * spent


def test_a_drafter_that_finds_nothing_is_not_asked_for_ever() -> None:
    """None of its tokens may follow, say: no chain comes, and the step that found that out was paid for."""
    for stepwise in (False, True):
        control, asked = adaptive(0.1, rising(0.2), stepwise=stepwise), 0
        for _ in range(300):
            asked += ask(control, 100) > 0
            control.take((), 0, False)
            control.observe((), 0, 0)
        assert asked < 20


def test_one_that_could_never_pay_is_never_asked() -> None:
    for stepwise in (False, True):
        control = adaptive(1.0, rising(0.2), stepwise=stepwise)
        assert {turn(control, ALL, sure=1.0 if stepwise else None).drafted for _ in range(500)} == {0}


def test_a_profile_is_where_acceptance_starts_from() -> None:

    def first(acceptance: Sequence[float], stepwise: bool = False) -> int:
        return ask(adaptive(0.1, rising(0.3), acceptance=acceptance, stepwise=stepwise), 100)

    assert first((0.1, 0.01)) == first((0.1, 0.01), stepwise=True) == 0
    assert first((0.9, 0.8, 0.2)) == 2
    assert first((0.9, 0.81, 0.729)) >= 4
    assert play(adaptive(0.1, rising(0.3), acceptance=(0.0, 0.0)), [ALL] * 200)[-1] >= 4  # but does not stay there


def test_what_was_drawn_is_verified() -> None:
    """Which tokens there are must not depend on which they are."""
    for control in (adaptive(0.1), adaptive(0.1, stepwise=True)):
        for drafted in range(WIDEST):
            ask(control, 100)
            assert control.take([0.01] * drafted, drafted, True) == drafted
    assert adaptive(0.1).weigh is None  # what is drafted in one call cannot ask


histories = st.lists(
    st.tuples(st.integers(0, WIDEST), st.integers(-1, 12), st.integers(-1, 12), st.floats(0.0, 1.0)), max_size=60
)


@given(histories, st.sampled_from([0.0, 0.05, 0.3, 1.0]), st.booleans())
@settings(deadline=None, derandomize=True)
def test_it_stays_within_room_and_widths_and_depends_on_nothing_else(
    history: list[tuple[int, int, int, float]], draft_cost: float, stepwise: bool
) -> None:
    first, second = adaptive(draft_cost, stepwise=stepwise), adaptive(draft_cost, stepwise=stepwise)
    for accepted, depth, nodes, sure in history:
        asked = ask(first, depth, nodes)
        assert 0 <= asked <= max(min(depth, nodes, WIDEST - 1), 0)
        supplied = asked // 2 if sure > 0.8 else asked  # a drafter may have less to offer
        stated = [sure] * supplied if sure > 0.2 else []
        assert ask(second, depth, nodes) == asked
        weighed = [first.weigh([sure] * length) for length in range(1, asked + 1)] if first.weigh else []
        assert weighed == ([second.weigh([sure] * length) for length in range(1, asked + 1)] if second.weigh else [])
        assert all(length - 1 <= worth <= max(min(depth, nodes), asked) for length, worth in enumerate(weighed, start=1))
        taken = first.take(stated, supplied, False)
        assert 0 <= taken <= supplied
        assert second.take(stated, supplied, False) == taken
        for control in (first, second):
            control.observe(stated, min(accepted, supplied), min(accepted + 1, supplied))


def test_a_bundle_of_width_one_never_drafts() -> None:
    for draft_cost in (0.0, 0.1):
        assert play(adaptive(draft_cost, widest=1), [NONE] * 50) == [0] * 50


def test_fixed_is_fixed() -> None:
    for gamma in range(5):
        assert play(Fixed(TreeShape.chain(gamma)), [NONE] * 5 + [ALL] * 5) == [gamma] * 10
        assert play(Fixed(TreeShape.chain(gamma)), [ALL] * 3, room=2) == [min(gamma, 2)] * 3


def test_a_fixed_tree_is_cut_only_where_room_ends() -> None:
    tree = TreeShape.from_paths([[0], [1], [2], [0, 0], [1, 0], [0, 0, 0]])
    control = Fixed(tree)
    for depth, nodes in product(range(-1, 6), range(-1, 9)):
        assert control.ask(depth, nodes) == tree.within(depth, nodes)
        control.observe((), 0, 3)
    assert control.ask(3, 6) == control.ask(99, 99) == tree
    assert [control.take((), drafted, False) for drafted in range(7)] == list(range(7))  # what was drafted is verified


# ---- plan


def test_the_examples_of_the_design() -> None:
    assert expected_tokens(0.8, 5) == pytest.approx(3.69, abs=0.005)
    assert speedup(0.6, 2, draft_cost=0.3, verify_cost=1.7) == pytest.approx(0.85, abs=0.005)


@pytest.mark.parametrize("gamma", range(6))
def test_expected_tokens_are_a_sum_over_positions(gamma: int) -> None:
    for acceptance in (0.0, 0.3, 0.999999, 1.0):
        assert expected_tokens(acceptance, gamma) == pytest.approx(sum(acceptance**depth for depth in range(gamma + 1)))


@pytest.mark.parametrize(
    ("gamma", "draft_cost", "verify_cost", "host_cost"), [*product((1, 3, 8), (0.0, 0.2), (1.2, 2.5), (0.0, 0.1))]
)
def test_break_even_is_where_the_speedup_is_one(gamma: int, draft_cost: float, verify_cost: float, host_cost: float) -> None:
    limit = break_even(gamma, draft_cost, verify_cost, host_cost)
    if limit is None:
        assert speedup(1.0, gamma, draft_cost, verify_cost, host_cost) < 1.0
    else:
        assert 0.0 < limit <= 1.0
        assert speedup(limit, gamma, draft_cost, verify_cost, host_cost) == pytest.approx(1.0, abs=1e-9)


def test_break_even_at_its_ends() -> None:
    assert break_even(1, draft_cost=0.5, verify_cost=2.0) is None
    assert break_even(1, draft_cost=0.5, verify_cost=1.5) == pytest.approx(1.0)
    assert break_even(4, draft_cost=0.0, verify_cost=1.0) == pytest.approx(0.0, abs=1e-12)
