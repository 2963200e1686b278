"""Laws of the choice of what is drafted, and the cost model it rests on."""

from collections.abc import Callable, Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specedge.runtime.control import Adaptive, Control, Fixed
from specedge.runtime.plan import break_even, expected_tokens, speedup
from specedge.runtime.shape import TreeShape

WIDEST = 9


def step_cost(width: int) -> float:
    return 1.0 + 0.05 * (width - 1)


def adaptive(draft_cost: float = 0.0, cost: Callable[[int], float] = step_cost, widest: int = WIDEST) -> Adaptive:
    return Adaptive(cost, lambda gamma: gamma * draft_cost, widest)


def ask(control: Control, depth: int, nodes: int | None = None) -> int:
    """gamma that is asked for."""
    shape = control.ask(depth, depth if nodes is None else nodes)
    assert shape.is_chain
    return shape.depth


def play(control: Control, accepted: Sequence[int], room: int = 100, evidence: int = 0) -> list[int]:
    """gamma of round after round, when the target would accept so many of any number of drafts."""
    chosen = []
    for most in accepted:
        asked = ask(control, room)
        taken = control.take(evidence, asked)
        compared = min(asked, min(most, taken) + 1)  # a round emits what is accepted and one token more
        control.observe(evidence, min(most, compared), compared)
        chosen.append(taken)
    return chosen


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
    assert min(play(control, [ALL] * 100)[-10:]) >= 3


def test_more_acceptance_means_more_drafts() -> None:
    nothing, little, much, everything = (play(adaptive(0.05), [accepted] * 40)[-1] for accepted in (0, 2, 4, WIDEST))
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


def test_evidence_is_judged_by_its_own_record() -> None:
    control = adaptive()
    for _ in range(30):
        play(control, [NONE], evidence=1)
        play(control, [ALL], evidence=16)
    assert play(control, [NONE], evidence=1) == [0]
    assert play(control, [ALL], evidence=16) == [WIDEST - 1]


histories = st.lists(
    st.tuples(st.integers(0, WIDEST), st.integers(-1, 12), st.integers(-1, 12), st.integers(0, 3)), max_size=60
)


@given(histories, st.sampled_from([0.0, 0.05, 0.3, 1.0]))
@settings(deadline=None, derandomize=True)
def test_it_stays_within_room_and_widths_and_depends_on_nothing_else(
    history: list[tuple[int, int, int, int]], draft_cost: float
) -> None:
    first, second = adaptive(draft_cost), adaptive(draft_cost)
    for accepted, depth, nodes, evidence in history:
        asked = ask(first, depth, nodes)
        assert 0 <= asked <= max(min(depth, nodes, WIDEST - 1), 0)
        supplied = asked // 2 if evidence == 3 else asked  # a drafter may have less to offer
        taken = first.take(evidence, supplied)
        assert 0 <= taken <= supplied
        assert (ask(second, depth, nodes), second.take(evidence, supplied)) == (asked, taken)
        for control in (first, second):
            control.observe(evidence, min(accepted, supplied), min(accepted + 1, supplied))


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
        control.observe(0, 0, 3)
    assert control.ask(3, 6) == control.ask(99, 99) == tree
    assert [control.take(0, drafted) for drafted in range(7)] == list(range(7))  # what was drafted is verified


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
