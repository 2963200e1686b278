"""What was measured, what follows from it, and what control makes of it."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
from bundles import make
from specedge.bundle import open_bundle
from specedge.cachedir import cache_dir
from specedge.devices.table import get_device
from specedge.errors import UsageError
from specedge.runtime import Engine, Sampling, load, plan
from specedge.runtime.kept_profile import read_profile, write_profile
from specedge.runtime.profile import FORMAT, Drafting, Profile, gammas_of, measure
from test_export_cli import refused, run

KEYS = {"t_ms", "d", "h", "acceptance", "break_even", "predicted_speedup", "measured_speedup", "advice"}
ROWS = {"target": get_device("cpu"), "draft": get_device("cpu")}


def profile_of(
    acceptance: float,
    draft_ms: float,
    wide: float = 1.2,
    rest: float = 0.0,
    gammas: tuple[int, ...] = (1, 4),
    drafting: float = 1.0,
) -> Profile:
    """A target of 10 ms a step, `wide` more for the widest, and a drafter of constant acceptance and cost per token."""
    widest = max(gammas)
    steps = {str(gamma + 1): 10 * (1 + (wide - 1) * gamma / widest) for gamma in (0, *gammas)}
    shares = tuple(acceptance**depth for depth in range(1, widest + 1))
    drafts = {
        str(gamma): Drafting(1 + drafting * sum(shares[:gamma]), drafting, gamma * draft_ms, rest, 1.0) for gamma in gammas
    }
    return Profile(FORMAT, "draft", steps, rest, shares, drafts)


@given(
    acceptance=st.floats(0, 1),
    draft=st.floats(0, 10),
    wide=st.floats(1, 4),
    rest=st.floats(0, 3),
    gamma=st.sampled_from([1, 2, 4]),
)
def test_predictions_are_those_of_the_cost_model(acceptance: float, draft: float, wide: float, rest: float, gamma: int) -> None:
    """S = E / (d + v + h), all over a plain round; costs between measured gammas and widths are linear."""
    profile = profile_of(acceptance, draft, wide, rest)
    plain, verify = 10 + rest, 10 * (1 + (wide - 1) * gamma / 4) + rest
    expected = plan.speedup(acceptance, gamma, draft / plain, verify / plain)
    assert gamma == 2 or math.isclose(profile.predicted(gamma), expected, rel_tol=1e-9)
    assert math.isclose(profile.step_cost(1), 1.0) and math.isclose(profile.step_cost(gamma + 1), verify / plain)
    assert math.isclose(profile.draft_cost(gamma), gamma * draft / plain, abs_tol=1e-12)


def test_rounds_that_draft_nothing_cost_a_plain_step() -> None:
    half = profile_of(0.9, 0.0, wide=2.0, drafting=0.5)
    whole = profile_of(0.9, 0.0, wide=2.0)
    tokens = sum(0.9**depth for depth in range(1, 5))
    assert math.isclose(whole.predicted(4), (1 + tokens) / 2) and math.isclose(half.predicted(4), (1 + tokens / 2) / 1.5)


def test_advice_is_not_to_speculate_where_it_loses() -> None:
    good, bad, near = profile_of(0.8, 0.5), profile_of(0.3, 5.0), profile_of(0.1, 0.0)
    assert good.best_gamma == 4 and good.as_dict()["advice"] == {"speculate": True, "gamma": 4}
    assert bad.best_gamma == 0 and bad.as_dict()["advice"] == {"speculate": False, "gamma": 0}
    assert near.best_gamma == 0 and 1 < near.predicted(1) < 1.05  # promises too little
    even = good.as_dict()["break_even"]
    assert isinstance(even, float) and math.isclose(plan.speedup(even, 4, 0.05, 1.2), 1.0, rel_tol=1e-6)
    assert good.as_dict().keys() >= KEYS and json.dumps(good.as_dict())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("profile")
    tiny.f_rand(place / "target", eos_token_id=None)
    tiny.noisy_lm_head(place / "target", place / "draft", sigma=0.05)
    return make(place / "target", place / "bundle", draft=str(place / "draft"))


def engine_with(path: Path, profile: Profile) -> Engine:
    write_profile(profile, open_bundle(path), ROWS, threads=1)
    return load(path, threads=1)


def test_control_rests_on_what_was_measured(path: Path) -> None:
    """The same drafts, told to be cheap and told to be dear: the text is the same, and drafted or not."""
    prompt: list[int] = [3, 4, 5, 6]
    plain = load(path, threads=1).generate(prompt, max_new_tokens=24, speculate=False).ids
    cheap = engine_with(path, profile_of(0.8, 0.01)).generate(prompt, max_new_tokens=24)
    dear = engine_with(path, profile_of(0.8, 100.0)).generate(prompt, max_new_tokens=24)
    assert cheap.ids == dear.ids == plain
    assert cheap.stats.rounds < 20 and dear.stats.drafted <= 2 and dear.stats.rounds >= 22
    sampled = [
        engine_with(path, profile_of(0.8, cost)).generate(prompt, Sampling(0.8, seed=3), 24, rule="coupled").ids
        for cost in (0.01, 100.0)
    ]
    assert sampled[0] == sampled[1]


def test_a_profile_is_of_one_bundle_drafter_and_row(path: Path, tmp_path: Path) -> None:
    bundle, found = open_bundle(path), profile_of(0.5, 1.0)
    place = write_profile(found, bundle, ROWS)
    assert read_profile(bundle, ROWS, "draft") == found
    assert read_profile(bundle, ROWS, "lookup") is None
    assert read_profile(bundle, ROWS | {"draft": get_device("cpu-static")}, "draft") is None
    tiny.f_rand(tmp_path / "other", seed=1)
    assert read_profile(open_bundle(make(tmp_path / "other", tmp_path / "b")), ROWS, "draft") is None
    assert place.parent == cache_dir().absolute() / "profiles"
    whole = dataclasses.asdict(found)
    changed: list[dict[str, Any]] = [{"format": 0}, {"drafts": {}}, {"h_ms": -10.0}]
    changed += [{"t_ms": {"x": 1.0}}, {"t_ms": {"1": 1.0, "x": 2.0}}]
    for damage in ("", "{", "[]", '{"format": 2}', *(json.dumps(whole | change) for change in changed)):
        place.write_text(damage, encoding="utf-8")
        assert read_profile(bundle, ROWS, "draft") is None
    write_profile(found, bundle, ROWS, threads=3)
    assert load(path, threads=3).profile == found and load(path, threads=2).profile is None
    assert load(path, threads=3, profile=False).profile is None


@pytest.mark.parametrize("drafter", ["draft", "lookup"])
def test_measuring_gives_what_the_contract_names(path: Path, drafter: str, tmp_path: Path) -> None:
    result = run(
        "profile", path, "--drafter", drafter, "--max-new-tokens", 12, "--repeats", 1, "--threads", 1, "--json", tmp_path / "p"
    )
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads((tmp_path / "p").read_text(encoding="utf-8"))
    assert found.keys() >= KEYS and found["drafter"] == drafter
    engine = load(path, threads=1, drafter=drafter)
    assert [int(gamma) for gamma in found["predicted_speedup"]] == gammas_of(engine) == [1, 2, 3, 4, 5]
    assert [int(width) for width in found["t_ms"]] == [1, 2, 3, 4, 5, 6] and all(ms > 0 for ms in found["t_ms"].values())
    assert engine.profile is not None and engine.profile.as_dict()["t_ms"] == found["t_ms"]
    assert ("do not speculate here" in result.output) == (not found["advice"]["speculate"])
    assert str(cache_dir()) in result.output.replace("\n", "")


def test_an_emulated_device_is_not_profiled(tmp_path: Path) -> None:
    pytest.importorskip("coremltools", reason="it is the evaluator that is refused")
    tiny.f_rand(tmp_path / "m")
    path = make(tmp_path / "m", tmp_path / "b", device="coreml-ane", widths=(1, 4), body="float16", head="float16")
    assert "is emulated here" in refused(2, "profile", path)
    with pytest.raises(UsageError, match="is emulated here"):
        measure(load(path), [[3, 4]])
