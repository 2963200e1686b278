"""Answers of a form: what a constraint leaves out is never emitted, and speculation writes what plain decoding writes."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from bundles import make
from eagles import CHAIN
from specedge.errors import SpecedgeError, UsageError
from specedge.runtime import Engine, Sampling, TreeShape, load
from specedge.runtime.constraint import Mask
from test_runtime_reuse import NAMES, Pairs

TREE = TreeShape.from_paths([[0], [1], [0, 0], [1, 0], [0, 0, 0]])
PROMPTS = ([3, 4, 5], [7, 1, 9, 7, 1])


class Hopping:
    """Of three ids in a row one is left out, another after every token; it looks at the whole answer, and remembers nothing."""

    def __init__(self, size: int = CHAIN) -> None:
        self.size = size

    def allowed(self, answer: Sequence[int]) -> Mask:
        return (np.arange(self.size) + sum(answer) + len(answer)) % 3 != 0

    def holds(self, answer: Sequence[int]) -> bool:
        return all(self.allowed(answer[:place])[token] for place, token in enumerate(answer))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs(tmp_path_factory.mktemp("constraint"))


def ways(name: str) -> list[dict[str, Any]]:
    drafted: list[dict[str, Any]] = [{"gamma": 3}, {"gamma": 1}, {}]
    return drafted if name == "lookup" else [*drafted, {"tree": TREE}]


@pytest.mark.parametrize(
    ("name", "device"),
    [*((name, "cpu-static") for name in NAMES if name != "eagle1"), ("draft", "cpu"), ("some3", "cpu"), ("lookup", "cpu")],
)
def test_constrained_text_is_the_plain_constrained_text(pairs: Pairs, name: str, device: str) -> None:
    engine = pairs(name, device)[0]
    constraint = Hopping(engine.bundle.manifest.allowed_ids)
    judged: list[dict[str, Any]] = [{"rule": rule, "sampling": Sampling(0.9, seed=2)} for rule in ("coupled", "point-mass")]
    accepted = 0
    for prompt in PROMPTS:
        for options in [{}, *judged]:
            plain = engine.generate(prompt, max_new_tokens=12, speculate=False, constraint=constraint, **options)
            assert constraint.holds(plain.ids)
            for way in ways(name):
                found = engine.generate(prompt, max_new_tokens=12, constraint=constraint, **options, **way)
                assert found.ids == plain.ids
                accepted += found.stats.accepted
    assert accepted > 0 or name == "medusa"  # whose random heads guess nothing
    free = engine.generate(PROMPTS[0], max_new_tokens=12).ids
    assert not constraint.holds(free)


@pytest.mark.parametrize("rule", ["token", "block", "recursive"])
def test_drawn_drafts_keep_to_it_too(pairs: Pairs, rule: str) -> None:
    engine, constraint = pairs("draft", "cpu")[0], Hopping()
    accepted = 0
    for seed in range(12):
        found = engine.generate(PROMPTS[0], Sampling(1.0, seed=seed), 12, gamma=3, rule=rule, constraint=constraint)
        assert constraint.holds(found.ids)
        accepted += found.stats.accepted
    assert accepted > 12


def test_a_drafter_none_of_whose_ids_may_follow_drafts_nothing(pairs: Pairs) -> None:
    """Its own vocabulary has ids that are no multiples of three only."""

    class Threes:
        def allowed(self, answer: Sequence[int]) -> Mask:
            return np.arange(CHAIN) % 3 == 0

    engine = pairs("some3", "cpu")[0]
    for sampling in (Sampling(), Sampling(0.9, seed=1)):
        found = engine.generate(PROMPTS[0], sampling, 8, gamma=3, constraint=Threes())
        assert len(found.ids) == 8 and all(token % 3 == 0 for token in found.ids) and found.stats.drafted == 0


@pytest.mark.parametrize("size", [0, CHAIN])
def test_a_constraint_that_allows_nothing_is_an_error(pairs: Pairs, size: int) -> None:
    class Nothing:
        def allowed(self, answer: Sequence[int]) -> Mask:
            return np.full(size, len(answer) < 2, np.bool_)

    place = 0 if size == 0 else 2
    with pytest.raises(SpecedgeError, match=f"constraint: allows no token after {place} tokens of the answer"):
        pairs("lookup", "cpu")[0].generate(PROMPTS[0], max_new_tokens=8, constraint=Nothing())


def test_nothing_is_asked_behind_an_end_of_text(tmp_path: Path) -> None:
    """Drafts go on behind it, the answer does not; a callback knows nothing of what follows."""
    tiny.f_chain(tmp_path / "m", tiny.deterministic_chain(64, {5: 6, 6: 7, 7: 8}), eos=8)
    engine = load(make(tmp_path / "m", tmp_path / "b", draft=str(tmp_path / "m"), context=64), threads=1)

    class Before:
        def allowed(self, answer: Sequence[int]) -> Mask:
            assert 8 not in answer
            return np.ones(64, np.bool_)

    for shape in ({"gamma": 1}, {"gamma": 5}, {"tree": TREE}, {"speculate": False}):
        options: dict[str, Any] = shape
        assert engine.generate([5], max_new_tokens=9, constraint=Before(), **options).ids == [6, 7, 8]


def test_what_is_banned_besides_is_no_damage(pairs: Pairs) -> None:
    class Seven:
        def allowed(self, answer: Sequence[int]) -> Mask:
            return np.arange(CHAIN) == 7

    with pytest.raises(SpecedgeError, match="constraint: allows no token after 0 tokens"):
        pairs("draft", "cpu")[0].generate([3, 4], Sampling(banned_ids=[7]), 4, gamma=2, constraint=Seven())


# ---- forms

guidance = pytest.importorskip("llguidance", reason="forms need the extra: pip install -e '.[grammar]'")

from specedge.runtime.grammar import Grammar, Kind  # noqa: E402  # once llguidance is known to be there

SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "kind": {"enum": ["cat", "dog", "é🙂"]},
        "sizes": {"type": "array", "items": {"enum": [1, 25]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["ok", "kind", "sizes"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a byte tokenizer whose model, of drawn weights, would never write JSON, and a draft model much like it."""
    place = tmp_path_factory.mktemp("speaking")
    size = tiny.FULL_TOKENIZER
    tiny.f_rand(place / "target", vocab_size=size)
    tiny.f_tok(place / "target")
    tiny.noisy_lm_head(place / "target", place / "draft", sigma=0.05)
    tiny.f_tok(place / "draft")
    return make(place / "target", place / "bundle", draft=str(place / "draft"), context=128, widths=(1, 4, 8))


@pytest.fixture(scope="module")
def engines(speaking: Path) -> list[Engine]:
    return [load(speaking, threads=1, drafter=name) for name in ("draft", "lookup")]


def test_json_of_a_schema_always_parses_and_is_the_plain_answer(engines: list[Engine]) -> None:
    for prompt in ("Say:", "{", "é"):
        for sampling in (Sampling(), *(Sampling(1.0, seed=seed) for seed in range(4))):
            plain = engines[0].generate(prompt, sampling, speculate=False, constraint=Grammar(engines[0], SCHEMA))
            found = json.loads(plain.text)
            assert plain.finish_reason == "stop" and found.keys() == SCHEMA["properties"].keys()  # type: ignore[attr-defined]
            assert found["kind"] in ("cat", "dog", "é🙂") and {*found["sizes"]} <= {1, 25}
            for engine in engines:
                for gamma in (None, 1, 3, 7):
                    rule = None if sampling.greedy else "point-mass"
                    drafted = engine.generate(prompt, sampling, gamma=gamma, rule=rule, constraint=Grammar(engine, SCHEMA))
                    json.loads(drafted.text)
                    expected = engine.generate(prompt, sampling, speculate=False, rule=rule, constraint=Grammar(engine, SCHEMA))
                    assert drafted.ids == expected.ids


@pytest.mark.parametrize(
    ("kind", "form", "pattern"),
    [
        ("regex", "[ab]{3}(x|yz)+", r"[ab]{3}(x|yz)+"),
        ("grammar", 'start: "a" ("b" | "c")~2..4 "!"', r"a[bc]{2,4}!"),
    ],
)
def test_expressions_and_grammars(engines: list[Engine], kind: Kind, form: str, pattern: str) -> None:
    for seed in range(6):
        found = engines[0].generate("x", Sampling(1.0, seed=seed), 60, gamma=3, constraint=Grammar(engines[0], form, kind))
        whole = found.finish_reason == "stop"
        assert re.fullmatch(pattern, found.text) if whole else found.text.startswith(("a", "b"))


def test_one_grammar_serves_request_after_request(engines: list[Engine]) -> None:
    grammar = Grammar(engines[0], "[ab]{3}", "regex")
    answers = {engines[0].generate(prompt, constraint=grammar, gamma=3).text for prompt in ("one", "two", "three")}
    assert all(re.fullmatch("[ab]{3}", answer) for answer in answers)


def test_a_token_that_was_not_allowed_is_an_error(engines: list[Engine]) -> None:
    grammar = Grammar(engines[0], "[ab]{3}", "regex")
    a, z = tiny.byte_id(ord("a")), tiny.byte_id(ord("z"))
    for _ in range(2):  # and the next request is none the worse
        with pytest.raises(SpecedgeError, match=r"regex: token \d+ may not stand at 1 of the answer"):
            grammar.allowed([a, z])
        mask = grammar.allowed([])
        assert mask[a] and not mask[z] and mask.sum() == 2


def test_a_bundle_that_cannot_end_an_answer_is_refused(speaking: Path) -> None:
    engine = load(speaking, threads=1)
    engine.bundle = dataclasses.replace(engine.bundle, manifest=dataclasses.replace(engine.bundle.manifest, eos_ids=()))
    with pytest.raises(UsageError, match="has no EOS token"):
        Grammar(engine, "a", "regex")


@pytest.mark.parametrize(
    ("form", "kind"), [({"type": "nonsense"}, "json"), ("{", "json"), ("(", "regex"), ("start: nowhere", "grammar")]
)
def test_what_is_no_form_is_refused_in_one_line(engines: list[Engine], form: Any, kind: Kind) -> None:
    with pytest.raises(UsageError, match=f"^{kind}: ") as caught:
        Grammar(engines[0], form, kind)
    assert "\n" not in str(caught.value)


def test_forms_need_a_tokenizer(pairs: Pairs) -> None:
    with pytest.raises(UsageError, match=r"regex: forms are of text, and .* has no tokenizer"):
        Grammar(pairs("lookup", "cpu")[0], "a", "regex")
