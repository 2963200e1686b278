"""Laws of text that grows: the stream is the text, characters come whole, stop strings cut it, templates are harmless."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import bundles
from specedge import bundle as bundle_file
from specedge.bundle import Bundle
from specedge.errors import SpecedgeError
from specedge.manifest import File, Manifest
from specedge.runtime import Engine, Sampling, load
from specedge.runtime.text import TextStream
from specedge.tokenizer import Tokenizer
from tiny import CHATML, SPECIAL_TOKENS, byte_id, deterministic_chain, f_chain, f_self, f_tok

BROKEN = "\ufffd"
WHOLE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=BROKEN), max_size=12)
BYTES = st.lists(st.one_of(WHOLE.map(str.encode), st.binary(max_size=4)), max_size=6).map(b"".join)


def ids_of(text: bytes) -> list[int]:
    return [byte_id(byte) for byte in text]


def make_tokenizer(folder: Path, template: str | None = None) -> Tokenizer:
    """The tokenizer of a bundle that holds nothing else."""
    f_tok(folder, extra_tokens=["<|im_start|>", "<|im_end|>"], chat_template=template)
    files = {file.name: File(file.stat().st_size, bundle_file.sha256(file)) for file in folder.iterdir()}
    return Tokenizer.of(
        Bundle(folder, Manifest(1, {}, {}, "cpu", "cpu", (1,), 64, 261, (), None, ("lookup",), (), {}, {}, {}, files))
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def feed(tokenizer: Tokenizer, text: bytes, stop: Sequence[str] = ()) -> tuple[list[str], TextStream]:
    """(what each token released and the end flushed, the stream), up to the token that stops it."""
    stream, released = TextStream(tokenizer, stop), []
    for token in ids_of(text):
        released.append(stream.push(token))
        if stream.stopped:
            break
    released.append(stream.finish())
    return released, stream


# ---- characters (B32)


@given(BYTES)
@example(b"\xff" + "🙂x".encode())  # a broken byte before a character of four
@example("é".encode()[:1] + "🙂".encode())
@example(b"\xff\xff\xff\xff\xff\xffabc")
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_stream_is_the_text_of_all_ids(tokenizer: Tokenizer, text: bytes) -> None:
    released, stream = feed(tokenizer, text)
    assert "".join(released) == stream.text == tokenizer.decode(ids_of(text))


@given(WHOLE)
@settings(deadline=None, derandomize=True)
def test_a_character_comes_with_its_last_byte_and_whole(tokenizer: Tokenizer, text: str) -> None:
    released, _ = feed(tokenizer, text.encode())
    expected = [letter for character in text for letter in [""] * (len(character.encode()) - 1) + [character]]
    assert released == [*expected, ""]


def test_a_broken_byte_does_not_hold_up_what_follows(tokenizer: Tokenizer) -> None:
    released, _ = feed(tokenizer, b"\xffabc")
    assert released == ["", BROKEN + "a", "b", "c", ""]
    assert len("".join(feed(tokenizer, b"\xff" * 40)[0][:-1])) >= 36  # nothing but broken bytes


def test_a_character_cut_off_is_flushed_once(tokenizer: Tokenizer) -> None:
    released, stream = feed(tokenizer, "a🙂".encode()[:-1])
    assert released == ["a", "", "", "", BROKEN]
    assert stream.finish() == "" and stream.text == "a" + BROKEN


def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ())
    assert [stream.push(token) for token in (*ids_of(b"a"), 2, 260, *ids_of(b"b"))] == ["a", "", "", "b"]


# ---- stop strings (B29)

stops = st.lists(st.text("abé🙂", min_size=1, max_size=3), min_size=1, max_size=3)
near_stops = st.text("abé🙂", max_size=14)


def by_hand(tokenizer: Tokenizer, text: bytes, stop: Sequence[str]) -> tuple[str, int]:
    """(text, tokens) of the shortest prefix of the tokens whose text holds a stop string, cut before the first one."""
    for count in range(1, len(text) + 1):
        so_far = tokenizer.decode(ids_of(text[:count]))
        if found := [so_far.index(string) for string in stop if string in so_far]:
            return so_far[: min(found)], count
    return tokenizer.decode(ids_of(text)), len(text)


@given(near_stops, stops)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_stop_strings_cut_at_the_shortest_prefix_that_holds_one(tokenizer: Tokenizer, text: str, stop: list[str]) -> None:
    released, stream = feed(tokenizer, text.encode(), stop)
    expected, tokens = by_hand(tokenizer, text.encode(), stop)
    assert stream.stopped == any(string in text for string in stop)
    assert "".join(released) == stream.text == expected
    assert len(released) - 1 == tokens


@given(near_stops, stops)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_what_may_begin_a_stop_string_waits_and_nothing_else_does(tokenizer: Tokenizer, text: str, stop: list[str]) -> None:
    stream, sent = TextStream(tokenizer, stop), ""
    for count, token in enumerate(ids_of(text.encode()), 1):
        sent += stream.push(token)
        if stream.stopped:
            break
        whole = text.encode()[:count].decode(errors="ignore")
        waiting = max(size for size in range(len(whole) + 1) if not size or any(s.startswith(whole[-size:]) for s in stop))
        assert sent == whole[: len(whole) - waiting]


@given(BYTES, st.lists(st.text(max_size=2), max_size=2))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_stream_is_the_text_whatever_comes(tokenizer: Tokenizer, text: bytes, stop: list[str]) -> None:
    released, stream = feed(tokenizer, text, stop)
    assert "".join(released) == stream.text
    assert not any(string in stream.text for string in stop if string)


# ---- chat templates

CHAT = [{"role": "user", "content": "hi"}]
WITH_BOS = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"


def test_the_template_writes_the_only_bos(tmp_path: Path) -> None:
    assert make_tokenizer(tmp_path / "a", WITH_BOS).encode_chat(CHAT) == [1, *ids_of(b"hi")]
    chatml = make_tokenizer(tmp_path / "b", CHATML)
    assert chatml.encode_chat(CHAT)[:1] == [259]
    assert chatml.render(CHAT) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        pytest.param("{{ raise_exception('no system role') }}", "no system role", id="raises"),
        pytest.param("{{ ''.__class__.__mro__ }}", "unsafe", id="reaches for classes"),
        pytest.param("{{ cycler.__init__.__globals__ }}", "unsafe", id="reaches for globals"),
        pytest.param("{{ messages.append(1) }}", "unsafe", id="changes the messages"),
        pytest.param("{% for i in range(10**9) %}{% endfor %}", "too big", id="endless"),
        pytest.param("{{ 1 + 'a' }}", "unsupported operand", id="type error"),
        pytest.param("{% include '/etc/hostname' %}", "loader", id="reads a file"),
        pytest.param("{{ messages[5].content }}", "no element 5", id="index"),
        pytest.param("{{ unclosed", "unexpected end", id="syntax"),
    ],
)
def test_a_template_that_fails_is_an_error_in_one_line(template: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(SpecedgeError, match=r"chat_template\.jinja") as caught:
        make_tokenizer(tmp_path, template).encode_chat(CHAT)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_chat_without_a_template_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(SpecedgeError, match="no chat template"):
        tokenizer.encode_chat(CHAT)


# ---- end to end, on a chain that spells a text whose bytes all differ

SPELLED = "bc STOPxyz0123456789"
EMOJI = "é🙂x"


@pytest.fixture(scope="module", params=["cpu", "cpu-static"])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    """Engines that spell SPELLED after "a", EMOJI after "#", and a broken byte and "rst" after "$"; F-SELF drafts."""
    place = tmp_path_factory.mktemp("chains")
    f_tok(place / "tokenizer", chat_template=WITH_BOS)
    successor: dict[int, int] = {}
    for text in (b"a" + SPELLED.encode(), b"#" + EMOJI.encode(), b"$\xffrst"):
        successor |= dict(zip(ids_of(text), ids_of(text)[1:], strict=False))
    successor[byte_id(ord("9"))] = SPECIAL_TOKENS.index("<eos>")
    f_chain(place / "target", deterministic_chain(264, successor), tokenizer=place / "tokenizer")
    f_self(place / "target", place / "draft")
    options = {"draft": str(place / "draft"), "device": request.param, "widths": (1, 13), "chunk": 13}
    path = bundles.make(place / "target", place / "bundle", **options)
    return {name: load(path, drafter=name, threads=1) for name in ("draft", "lookup")}


@pytest.mark.parametrize("gamma", [3, 12])
@pytest.mark.parametrize(
    ("stop", "text", "last"),
    [
        ([" STOP"], "bc", "P"),
        (["OPxy"], "bc ST", "y"),  # with gamma 3 over two rounds
        (["zzz", "STOP"], "bc ", "P"),
        (["xy", "Px"], "bc STO", "x"),
        (["STOPQ"], SPELLED, None),
        (["ab"], SPELLED, None),  # half of it in the prompt
    ],
)
def test_a_stop_string_inside_or_across_bursts(
    engines: dict[str, Engine], gamma: int, stop: list[str], text: str, last: str | None
) -> None:
    emitted = SPELLED[: SPELLED.index(last) + 1] if last else SPELLED
    ids = ids_of(emitted.encode()) + ([] if last else [2])
    stream = engines["draft"].stream("a", Sampling(), 40, stop, gamma)
    tokens = list(stream)
    result = stream.result()
    assert result.stats.per_round[0] == (gamma, min(gamma, len(ids)))
    assert (result.ids, result.text, result.finish_reason) == (ids, text, "stop")
    assert [token.id for token in tokens] == ids
    assert "".join(token.text for token in tokens) == text
    assert engines["draft"].generate("a", Sampling(), 40, stop, speculate=False).ids == ids


@pytest.mark.parametrize("gamma", [1, 4, 6])
@pytest.mark.parametrize(("prompt", "text"), [("a", SPELLED), ("#", EMOJI)])
def test_a_stop_string_at_every_offset_of_a_burst(engines: dict[str, Engine], prompt: str, text: str, gamma: int) -> None:
    """A round is gamma + 1 tokens long here, and a stop string up to three characters."""
    for start in range(len(text)):
        for end in range(start + 1, min(start + 4, len(text) + 1)):
            stream = engines["draft"].stream(prompt, Sampling(), 40, [text[start:end]], gamma)
            told = [token.text for token in stream]
            result = stream.result()
            assert (result.text, result.finish_reason) == (text[:start], "stop") and "".join(told) == result.text
            assert result.ids == ids_of(text[:end].encode())


def test_no_part_of_a_stop_string_is_streamed(engines: dict[str, Engine]) -> None:
    for token in engines["draft"].stream("a", Sampling(), 40, ["STOP"], 3):
        assert not set(token.text) & set("STOP")


@pytest.mark.parametrize("gamma", range(1, 7))
def test_a_character_across_bursts_is_whole(engines: dict[str, Engine], gamma: int) -> None:
    """With F-SELF a round is gamma + 1 tokens, so every cut through the characters occurs."""
    stream = engines["draft"].stream("#", Sampling(), 7, (), gamma)
    texts = [token.text for token in stream]
    result = stream.result()
    assert result.stats.accepted == result.stats.drafted >= gamma
    assert texts == ["", "é", "", "", "", "🙂", "x"] and result.text == EMOJI


@pytest.mark.parametrize("gamma", [0, 2, 6])
def test_a_character_cut_by_the_token_limit_is_flushed_with_the_last_token(engines: dict[str, Engine], gamma: int) -> None:
    stream = engines["draft"].stream("#", Sampling(), 5, (), gamma)
    assert [token.text for token in stream] == ["", "é", "", "", BROKEN]
    assert stream.result().text == "é" + BROKEN
    stopped = engines["draft"].generate("$", Sampling(), 4, (), gamma)
    assert (stopped.text, stopped.ids) == (BROKEN + "rst", ids_of(b"\xffrst"))


def test_a_closed_stream_has_the_text_it_gave(engines: dict[str, Engine]) -> None:
    for count in range(1, 9):
        stream = engines["draft"].stream("a", Sampling(), 20, (), 5)
        given_out = [next(stream) for _ in range(count)]
        stream.close()
        result = stream.result()
        assert result.text == "".join(token.text for token in given_out)
        assert result.ids == [token.id for token in given_out]
        assert result.stats.tokens == count


def test_a_text_a_chat_and_its_ids_are_one_prompt(engines: dict[str, Engine]) -> None:
    engine = engines["lookup"]
    by_ids = engine.generate([1, *ids_of(b"a")], max_new_tokens=5)
    assert by_ids.text == SPELLED[:5]
    assert engine.generate([{"role": "user", "content": "a"}], max_new_tokens=5).ids == by_ids.ids
    assert engine.encode("<bos>a") == engine.encode([{"role": "user", "content": "a"}]) == [1, *ids_of(b"a")]
    assert engine.generate("a", max_new_tokens=5).text == SPELLED[:5]


def test_what_is_not_unicode_is_refused(engines: dict[str, Engine]) -> None:
    """A command line that is not UTF-8 arrives as lone surrogates."""
    for prompt in ("a\udcff", [{"role": "user", "content": "a\ud800"}]):
        with pytest.raises(SpecedgeError, match="surrogate"):
            engines["lookup"].generate(prompt, max_new_tokens=3)


def test_a_conversation_longer_than_the_context_is_refused(engines: dict[str, Engine]) -> None:  # B23
    turns = [{"role": "user", "content": "a" * 40}, {"role": "assistant", "content": "b" * 22}]
    engine = engines["lookup"]
    assert len(engine.encode(turns)) == 63
    with pytest.raises(SpecedgeError, match=r"64 tokens .* context of 64"):
        engine.stream([*turns, {"role": "user", "content": "c"}])


def test_one_stop_string_may_come_without_a_list(engines: dict[str, Engine]) -> None:
    assert engines["lookup"].generate("a", max_new_tokens=20, stop="OPx").text == "bc ST"
