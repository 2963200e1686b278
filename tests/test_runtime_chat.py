"""The talk at the terminal: turns, what is shown of them, and how it ends."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import tiny
from bundles import make
from specedge.export.cli import main
from specedge.runtime import Engine, load

SPECIAL = ["<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("chat")
    tiny.f_rand(place / "target", vocab_size=tiny.FULL_TOKENIZER + 2)
    tiny.f_tok(place / "target", extra_tokens=SPECIAL, chat_template=tiny.CHATML)
    tiny.noisy_lm_head(place / "target", place / "draft", sigma=0.05)
    tiny.f_tok(place / "draft", extra_tokens=SPECIAL, chat_template=tiny.CHATML)
    return make(place / "target", place / "bundle", draft=str(place / "draft"), context=128, widths=(1, 4))


def talk(path: Path, said: str, *options: object) -> Result:
    return CliRunner().invoke(main, ["chat", str(path), "--max-new-tokens", "10", *map(str, options)], input=said)


def answers(engine: Engine, *turns: str, system: str | None = None) -> list[str]:
    messages, texts = [{"role": "system", "content": system}] if system else [], []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        texts.append(engine.generate(messages, max_new_tokens=10).text)
        messages.append({"role": "assistant", "content": texts[-1]})
    return texts


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_talk_is_the_conversation_that_python_has(path: Path, system: str | None) -> None:
    result = talk(path, "hi\n\nmore\n/reset\nhi\n", "--gamma", 3, *(["--system", system] if system else []))
    assert result.exit_code == 0, result.output
    first, second = answers(load(path, reuse=False), "hi", "more", system=system)
    expected = [first, second, first]
    place = 0
    for text in expected:
        place = result.stdout.index(text, place) + len(text)
    assert (result.stdout.count("per round"), result.stderr.count("per round")) == (0, 3)


def test_accepted_drafts_are_coloured_unless_told_not_to(path: Path) -> None:
    coloured, plain = (talk(path, "hi\n", "--gamma", 3, option).stdout for option in ("--color", "--no-color"))
    assert "\x1b[32m" in coloured and "\x1b[" not in plain
    assert "\x1b[32m" not in talk(path, "hi\n", "--plain", "--color").stdout


def test_a_talk_that_fills_the_context_says_so_and_can_begin_anew(path: Path) -> None:
    result = talk(path, f"{'x' * 200}\n/reset\nhi\n")
    assert result.exit_code == 0 and "leave no room in a context of 128" in result.output
    assert answers(load(path), "hi")[0] in result.output


def test_an_option_that_no_message_can_have_ends_it(path: Path) -> None:
    result = talk(path, "hi\nhi\n", "--gamma", 99)
    assert result.exit_code == 2 and result.stderr.count("expected 0..") == 1


def test_exit_ends_it(path: Path) -> None:
    result = talk(path, "/exit\nhi\n")
    assert (result.exit_code, result.output) == (0, "")


def test_nobody_to_talk_to(tmp_path: Path) -> None:
    tiny.f_rand(tmp_path / "m")
    result = talk(make(tmp_path / "m", tmp_path / "b"), "hi\n")
    assert result.exit_code == 2 and "has no tokenizer to talk with" in result.output
