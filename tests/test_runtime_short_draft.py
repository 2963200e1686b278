"""A draft model made for fewer positions than the target: behind them the text goes on without drafts."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bundles
import tiny
from specedge.errors import SpecedgeError
from specedge.runtime import Engine, Sampling, load
from test_export_cli import run

CONTEXT, REACH = 64, 24
PROMPT = [3, 4, 5, 6]


@pytest.fixture(scope="module", params=["cpu", "cpu-static"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    place = tmp_path_factory.mktemp("short")
    tiny.f_rand(place / "target", eos_token_id=None)
    tiny.f_rand(place / "draft", eos_token_id=None, max_position_embeddings=REACH)  # the same weights
    path = bundles.make(place / "target", place / "bundle", draft=str(place / "draft"), device=request.param)
    return load(path, threads=1)


@pytest.mark.parametrize("gamma", [1, 3, 5])
@pytest.mark.parametrize("length", [1, 4, REACH - 2, REACH - 1, REACH, REACH + 1, REACH + 2, 40, CONTEXT - 1])
def test_drafts_end_where_the_draft_does(engine: Engine, length: int, gamma: int) -> None:
    prompt = [int(token) for token in np.random.default_rng(length).integers(3, 128, length)]
    plain = engine.generate(prompt, speculate=False).ids
    result = engine.generate(prompt, gamma=gamma)
    assert result.ids == plain and len(plain) == CONTEXT - length
    for drafted, accepted in result.stats.per_round:
        assert drafted == accepted == min(gamma, max(REACH - length + 1, 0), CONTEXT - length - 1)  # it is the target's copy
        length += accepted + 1


def test_conversations_across_the_end(engine: Engine) -> None:
    """Turns that grow beyond it, and one that is short again."""
    fresh = load(engine.bundle.path, threads=1, reuse=False)
    text = list(PROMPT)
    for turn in (10, 6, 8, 9):
        one, other = (each.generate(text, max_new_tokens=turn, gamma=3) for each in (engine, fresh))
        assert one.ids == other.ids and one.stats.per_round == other.stats.per_round
        text += [*one.ids, 7]
    again = engine.generate(PROMPT, max_new_tokens=10, gamma=3)
    assert again.ids == fresh.generate(PROMPT, max_new_tokens=10).ids and again.stats.accepted == again.stats.drafted > 0


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_sampled_text_goes_on_too(engine: Engine, rule: str) -> None:
    result = engine.generate(PROMPT, Sampling(0.9, seed=5), gamma=3, rule=rule)
    assert len(result.ids) == CONTEXT - len(PROMPT) and result.stats.accepted > 6
    if rule == "coupled":
        assert result.ids == engine.generate(PROMPT, Sampling(0.9, seed=5), speculate=False, rule=rule).ids


def test_convert_says_so_and_validate_passes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny.f_rand(tmp_path / "target", eos_token_id=None)
    tiny.f_rand(tmp_path / "draft", eos_token_id=None, max_position_embeddings=REACH)
    options: dict[str, Any] = {"one_call": True, "context": CONTEXT}
    with caplog.at_level(logging.WARNING):
        path = bundles.make(tmp_path / "target", tmp_path / "bundle", draft=str(tmp_path / "draft"), **options)
    assert f"was made for {REACH} positions" in caplog.text
    made = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    assert (made["context"], made["roles"]["draft"]["context"], made["roles"]["target"]["context"]) == (CONTEXT, REACH, CONTEXT)
    result = run("validate", path, "--reference", tmp_path / "target", "--draft-reference", tmp_path / "draft")
    assert result.exit_code == 0, result.output
    made["roles"]["draft"]["context"] = CONTEXT + 1
    (path / "manifest.json").write_text(json.dumps(made), encoding="utf-8")
    with pytest.raises(SpecedgeError, match=r"roles\.draft\.context"):
        load(path)
