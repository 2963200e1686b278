"""The next request reads only what its prompt has behind the beginning it shares with the text before: and writes the same."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from bundles import make
from eagles import CHAIN, Chains
from specedge.errors import SpecedgeError
from specedge.runtime import Engine, Result, load
from specedge.runtime.sequence import common_beginning
from test_runtime_heads import random_heads

NAMES = ("draft", "eagle1", "some3", "medusa", "lookup")
DEVICES = ("cpu", "cpu-static")


class Pairs:
    """Engines by drafter and device: one that lives through all requests, and one that forgets each."""

    def __init__(self, place: Path) -> None:
        self._place, self._chains = place, Chains(place)
        self._made: dict[tuple[str, str], tuple[Engine, Engine]] = {}

    def path(self, name: str, device: str) -> Path:
        if name in ("draft", "eagle1", "some3"):
            return self._chains.path(name, device, "chain")
        path = self._place / f"{name} {device}"
        if not path.exists():
            source = self._place / "rand"
            tiny.f_rand(source, eos_token_id=None)
            heads = str(random_heads(self._place / f"{name} {device} heads", False, 128)) if name == "medusa" else None
            make(source, path, device=device, widths=(1, 4, 8), medusa=heads)
        return path

    def __call__(self, name: str, device: str) -> tuple[Engine, Engine]:
        if (name, device) not in self._made:
            path = self.path(name, device)
            self._made[name, device] = load(path, threads=1), load(path, threads=1, reuse=False)
        return self._made[name, device]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs(tmp_path_factory.mktemp("reuse"))


def same(lasting: Engine, fresh: Engine, prompt: list[int], **options: Any) -> Result:
    """One request to both; what the lasting engine gave."""
    one, other = (engine.generate(prompt, max_new_tokens=8, **options) for engine in (lasting, fresh))
    assert one.ids == other.ids and one.stats.per_round == other.stats.per_round
    assert (one.stats.prompt_tokens, other.stats.reused_tokens) == (len(prompt), 0)
    return one


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_reads_only_what_is_new(pairs: Pairs, name: str, device: str) -> None:
    lasting, fresh = pairs(name, device)
    text, known = [3, 4, 5, 3, 4, 5, 7], 0
    same(lasting, fresh, [9, 8])
    # An EAGLE head reads what the target says when it drafts, or a chunk has come: the last rounds it has not read.
    behind = 2 if lasting.eagle is None else 2 + lasting.eagle.role.chunk
    turns: list[dict[str, int]] = [{"gamma": 3}, {"gamma": 3}, {"gamma": 2}, {}]
    for options in turns:
        result = same(lasting, fresh, text, **options)
        assert known - behind <= result.stats.reused_tokens <= known
        known = len(text) + len(result.ids) - 1
        text = [*text, *result.ids, 6, 2]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_prompt_again(pairs: Pairs, name: str) -> None:
    """And one that ends within it, and one that is a single token."""
    lasting, fresh = pairs(name, "cpu")
    for prompt in ([3, 4, 5, 3, 4], [3, 4, 5, 3, 4], [3, 4, 5], [3], [3], [3, 4, 5, 3, 4, 9]):
        result = same(lasting, fresh, prompt, gamma=3)
        assert result.stats.reused_tokens <= len(prompt) - 1


@pytest.mark.parametrize("name", ["draft", "some3", "medusa"])
def test_an_error_in_the_middle_leaves_nothing_behind(pairs: Pairs, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lasting, fresh = pairs(name, "cpu-static")
    text = [3, 4, 5, 6, 3, 4]
    for broken in ("draft", "target"):
        first = same(lasting, fresh, text, gamma=3)
        sequence = lasting.target if broken == "target" else (lasting._draft or lasting.eagle or lasting._heads)
        with monkeypatch.context() as patch:
            step, count = failing(sequence, broken)
            patch.setattr(sequence, step, count)
            with pytest.raises(SpecedgeError, match="on purpose"):
                lasting.generate([*text, *first.ids, 9], max_new_tokens=12, gamma=3)
        assert lasting.target.text == []
        same(lasting, fresh, [*text, *first.ids, 9, 7], gamma=3)
        same(lasting, fresh, [*text, *first.ids], gamma=3)


def failing(sequence: Any, broken: str) -> tuple[str, Callable[..., Any]]:
    """A method of a model, and one in its place that fails the second time."""
    methods = ("step",) if broken == "target" else ("append", "draft", "logits")  # of a draft model, EAGLE and Medusa heads
    name = next(name for name in methods if hasattr(sequence, name))
    real, calls = getattr(sequence, name), iter(range(100))

    def method(*args: Any, **options: Any) -> Any:
        made = real(*args, **options)
        if next(calls) == 1:
            raise SpecedgeError("on purpose")
        return made

    return name, method


def test_what_others_fed_the_cache_is_not_taken_for_text(pairs: Pairs) -> None:
    lasting, fresh = pairs("draft", "cpu")
    result = same(lasting, fresh, [3, 4, 5, 6], gamma=3)
    lasting.target.truncate(2)
    lasting.target.prefill([9, 9, 9])
    assert lasting.target.text == [3, 4, 9, 9, 9]
    again = same(lasting, fresh, [3, 4, 5, 6, *result.ids, 8], gamma=3)
    assert again.stats.reused_tokens == 2


def test_a_full_context_is_reused_as_far_as_it_goes(pairs: Pairs) -> None:
    lasting, fresh = pairs("draft", "cpu")
    text = [int(token) for token in np.random.default_rng(0).integers(3, CHAIN, lasting.context - 4)]
    same(lasting, fresh, text)
    same(lasting, fresh, text[:-1])
    same(lasting, fresh, [*text[:10], 7])


@pytest.mark.parametrize(("one", "other", "length"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 3], 1), ([4], [5], 0)])
def test_a_common_beginning(one: list[int], other: list[int], length: int) -> None:
    assert common_beginning(one, other) == common_beginning(other, one) == length


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(all="raise", under="ignore"):
        yield
