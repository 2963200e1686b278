"""An engine through any sequence of requests: each is that of an engine opened for it alone, ids, text and stats."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

import tiny
from bundles import cheap_drafts, make
from eagles import CHAIN, Chains
from specedge.runtime import Engine, Result, Sampling, TreeShape, load
from specedge.runtime.rules import CHAIN_RULES, RULES
from test_runtime_heads import random_heads

NAMES = ("draft", "eagle1", "some3", "medusa", "lookup")
DEVICES = ("cpu", "cpu-static")
TREES = [TreeShape.from_paths(paths) for paths in ([[0], [1], [0, 0]], [[0], [1], [0, 0], [1, 0], [0, 0, 0]])]
TIMES = {"prefill_seconds", "draft_seconds", "verify_seconds", "decode_seconds", "graph_seconds", "tokens_per_second"}


class Bundles(Chains):
    """Those of the chains, with a tokenizer; Medusa heads and lookup over the same target."""

    def target(self, name: str) -> Path:
        folder = super().target(name)
        if not (folder / "tokenizer.json").exists():
            tiny.f_tok(folder, size=CHAIN)
        return folder

    def of(self, name: str, device: str) -> Path:
        if name in ("draft", "eagle1", "some3"):
            return self.path(name, device, "chain", widths=(1, 4, 6))
        if name == "lookup":
            return self.path("draft", device, "chain", widths=(1, 4, 6), draft=None, one_call=None)
        source = self._place / f"{device} rand"
        tiny.f_rand(source, vocab_size=CHAIN, eos_token_id=None)
        tiny.f_tok(source, size=CHAIN)
        heads = random_heads(self._place / f"{device} heads", False, CHAIN)
        return make(source, self._place / f"medusa {device}", device=device, widths=(1, 4, 6), medusa=str(heads))


@st.composite
def requests(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """What a request asks for besides its prompt."""
    options: dict[str, Any] = {"max_new_tokens": draw(st.integers(0, 20))}
    options["stop"] = draw(st.lists(st.text([chr(byte) for byte in range(CHAIN - 3)], min_size=1, max_size=2), max_size=2))
    options["sampling"] = draw(st.sampled_from([Sampling(), Sampling(0.8, seed=4), Sampling(1.5, top_k=6, seed=9)]))
    options["rule"] = draw(st.sampled_from([None, *RULES]))
    how = draw(st.sampled_from(["gamma", "tree", "adaptive", "plain"]))
    if how == "plain":
        options["speculate"] = False
    elif how == "tree" and name != "lookup" and options["rule"] not in CHAIN_RULES:
        options["tree"] = draw(st.sampled_from(TREES[: 1 if name == "medusa" else 2]))
    elif how != "adaptive":
        options["gamma"] = draw(st.integers(0, 2 if name == "medusa" else 5))
    return options


def counts(result: Result) -> dict[str, object]:
    """All of the stats but times, and what was in the cache already."""
    found = {name: value for name, value in result.stats.as_dict().items() if name not in TIMES | {"reused_tokens"}}
    return found | {"per_round": result.stats.per_round, "outcomes": result.stats.outcomes}


class EnoughError(Exception):
    """Somebody who reads a stream has had enough."""


def machine(bundles: Bundles, name: str, device: str) -> type[RuleBasedStateMachine]:
    path = bundles.of(name, device)

    class Talk(RuleBasedStateMachine):
        lasting: Engine

        @initialize()
        def start(self) -> None:
            self.lasting = load(path, threads=1)
            self.history: list[int] = []

        @rule(new=st.lists(st.integers(3, CHAIN - 1), min_size=1, max_size=5), options=requests(name), data=st.data())
        def turn(self, new: list[int], options: dict[str, Any], data: st.DataObject) -> None:
            """Goes on with the talk, or with a beginning of it."""
            prompt = [*self.history[: data.draw(st.integers(0, len(self.history)))], *new][-40:]
            self.history = [*prompt, *self.check(prompt, options)]

        @rule(new=st.lists(st.integers(3, CHAIN - 1), min_size=1, max_size=20), options=requests(name))
        def another(self, new: list[int], options: dict[str, Any]) -> None:
            self.history = [*new, *self.check(new, options)]

        @rule(options=requests(name), after=st.integers(0, 9), raises=st.booleans())
        def given_up(self, options: dict[str, Any], after: int, raises: bool) -> None:
            prompt = [*self.history[-30:], 5, 7]
            stream, ids = self.lasting.stream(prompt, **options), list[int]()
            try:
                for token in stream:
                    if len(ids) == after:
                        raise EnoughError
                    ids.append(token.id)
            except EnoughError:
                if not raises:
                    stream.close()
            del stream
            self.history = [*prompt, *ids]

        def check(self, prompt: list[int], options: dict[str, Any]) -> list[int]:
            fresh, told = load(path, threads=1), list[str]()
            with cheap_drafts(fresh), cheap_drafts(self.lasting):
                expected = fresh.generate(prompt, **options)
                stream = self.lasting.stream(prompt, **options)
                told = [token.text for token in stream]
            result = stream.result()
            assert (result.ids, result.text, result.finish_reason) == (expected.ids, expected.text, expected.finish_reason)
            assert counts(result) == counts(expected)
            assert "".join(told) == result.text and not any(string in result.text for string in options["stop"])
            assert result.stats.tokens == len(result.ids) <= options["max_new_tokens"]
            return result.ids

    return Talk


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    return Bundles(tmp_path_factory.mktemp("stateful"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_a_request_knows_nothing_of_those_before_it(bundles: Bundles, name: str, device: str) -> None:
    run_state_machine_as_test(
        machine(bundles, name, device),
        settings=settings(
            deadline=None, max_examples=6, stateful_step_count=6, derandomize=True, suppress_health_check=[*HealthCheck]
        ),
    )
