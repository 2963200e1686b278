"""Answers of a form: JSON of a schema, a regular expression, a grammar, as llguidance reads them (the extra `grammar`)."""

import functools
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np

from specedge.errors import SpecedgeError, UsageError, first_line
from specedge.runtime.constraint import Mask
from specedge.runtime.sequence import common_beginning

if TYPE_CHECKING:
    from specedge.runtime.generate import Engine

Kind = Literal["json", "regex", "grammar"]


class Grammar:
    """A constraint over one engine's tokens; `kind` says how `form` is read: a JSON schema, a regular expression, Lark.

    Beginnings are asked for in any order: the matcher goes back to where they part and on from there. One request at a time.

    Raises:
        UsageError: The form is none, or the bundle has no tokenizer, or no end-of-text token to end an answer by.
        SpecedgeError: llguidance is not installed, or cannot read the tokenizer.
    """

    def __init__(self, engine: "Engine", form: str | Mapping[str, Any], kind: Kind = "json") -> None:
        guidance = _llguidance()
        if engine.tokenizer is None:
            raise UsageError(f"{kind}: forms are of text, and {engine.bundle.path} has no tokenizer")
        if not engine.bundle.manifest.eos_ids:
            raise UsageError(f"{kind}: an answer of a form has to end, and {engine.bundle.path} has no EOS token")
        matcher = guidance.LLMatcher
        text = form if isinstance(form, str) else json.dumps(form)
        make = {
            "json": matcher.grammar_from_json_schema,
            "regex": matcher.grammar_from_regex,
            "grammar": matcher.grammar_from_lark,
        }[kind]
        made, vocab_size = engine.bundle.manifest, engine.bundle.role("target").vocab_size
        self._size, file = made.allowed_ids, engine.bundle.file("tokenizer.json")
        tokens = _vocabulary(file, file.stat().st_mtime_ns, vocab_size, made.eos_ids)
        try:
            self._fresh = matcher(tokens, make(text), log_level=0)
            failure = self._fresh.get_error()
        except Exception as error:  # llguidance raises what its parsers do
            raise UsageError(f"{kind}: {first_line(error)}") from None
        if failure:
            raise UsageError(f"{kind}: {first_line(Exception(failure))}")
        self._kind = kind
        self._begin()
        self._words = guidance.numpy.allocate_token_bitmask(1, vocab_size)

    def allowed(self, answer: Sequence[int]) -> Mask:
        """[allowed ids] what may follow `answer`.

        Raises:
            SpecedgeError: A token of `answer` was not allowed, or the form is too complex for llguidance.
        """
        same = common_beginning(self._read, answer)
        if same < len(self._read) and self._matcher.rollback(len(self._read) - same):
            del self._read[same:]
        elif same < len(self._read):
            self._begin()
        for token in answer[len(self._read) :]:
            if not self._matcher.consume_token(token):
                self._fail(f"token {token} may not stand at {len(self._read)} of the answer")
            self._read.append(token)
        _llguidance().numpy.fill_next_token_bitmask(self._matcher, self._words, 0)
        if self._matcher.is_error():  # its mask would be an end of text
            self._fail(f"llguidance gave up after {len(self._read)} tokens of the answer")
        bits = np.unpackbits(self._words[0].view(np.uint8), bitorder="little")
        return bits[: self._size].astype(np.bool_)

    def _begin(self) -> None:
        self._matcher, self._read = self._fresh.deep_copy(), list[int]()

    def _fail(self, what: str) -> NoReturn:
        """A matcher never leaves its error: the next request needs another."""
        said = first_line(Exception(self._matcher.get_error() or "no reason given"))
        self._begin()
        raise SpecedgeError(f"{self._kind}: {what} ({said})")


def _llguidance() -> Any:
    try:
        importlib.import_module("llguidance.numpy")
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise SpecedgeError(
            f"grammar: needs llguidance, which is not installed here ({error}); pip install 'specedge[grammar]'"
        ) from error


@functools.lru_cache(maxsize=4)
def _vocabulary(tokenizer: Path, mtime_ns: int, vocab_size: int, eos_ids: tuple[int, ...]) -> Any:
    """A tokenizer as llguidance knows it: a tenth of a second for 50,000 tokens."""
    try:
        return _llguidance().LLTokenizer(str(tokenizer), n_vocab=vocab_size, eos_token=list(eos_ids))
    except ValueError as error:
        raise SpecedgeError(f"{tokenizer}: llguidance cannot read it ({first_line(error)})") from error
