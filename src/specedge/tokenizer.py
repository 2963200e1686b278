"""Text into token ids: the tokenizer and chat template that came with a model."""

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jinja2
import jinja2.sandbox
import tokenizers

from specedge.bundle import Bundle
from specedge.errors import SpecedgeError

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]


@functools.lru_cache(maxsize=4)
def _open_tokenizer(path: Path, mtime_ns: int, size: int) -> tokenizers.Tokenizer:
    """One for all engines: a vocabulary of 50,000 takes 20 MB, more than all else that an engine keeps for itself."""
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises Exception itself
        raise SpecedgeError(f"{path}: not a tokenizer that can be read ({error}); convert again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class Tokenizer:
    """A tokenizer.json with its settings and chat template; `find` gives the path of a file that is there."""

    def __init__(self, where: Path, find: Callable[[str], Path | None]) -> None:
        path = find("tokenizer.json")
        assert path is not None
        stat = path.stat()
        self._tokenizer = _open_tokenizer(path.resolve(), stat.st_mtime_ns, stat.st_size)
        self._template = _read(find("chat_template.jinja"))
        try:
            config = json.loads(_read(find("tokenizer_config.json")) or "{}")
            self._special = {key: _token_text(config.get(key)) for key in _SPECIAL}
        except (ValueError, AttributeError, KeyError) as error:
            raise SpecedgeError(f"{where}: tokenizer_config.json cannot be read ({error}); convert again") from error

    @classmethod
    def of(cls, bundle: Bundle) -> Self:
        """A bundle's own."""
        files = bundle.manifest.files
        return cls(bundle.path, lambda name: bundle.file(name) if name in files else None)

    @classmethod
    def in_folder(cls, folder: Path) -> Self | None:
        """A folder's, if it has one."""

        def find(name: str) -> Path | None:
            return folder / name if (folder / name).is_file() else None

        return cls(folder, find) if find("tokenizer.json") else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a command line that is not UTF-8 arrives so
            raise SpecedgeError(f"text: lone surrogate at character {error.start}, expected Unicode; give UTF-8") from None
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def render(self, messages: Sequence[Message]) -> str:
        """The chat template over `messages`, ready for the answer; sandboxed, as templates come with models."""
        if self._template is None:
            raise SpecedgeError("chat messages: the bundle has no chat template; pass text or token ids")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        environment.filters["tojson"] = _to_json
        try:
            return environment.from_string(self._template).render(
                messages=list(messages), tools=None, documents=None, add_generation_prompt=True, **self._special
            )
        except Exception as error:  # a template is a foreign program: it can fail in any way
            raise SpecedgeError(f"chat_template.jinja: {error}") from None

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation; the template writes its own special tokens, so none are added."""
        return self.encode(self.render(messages), add_special_tokens=False)

    def encode_request(self, text: str) -> list[int]:
        """Token ids of a user's message, in the chat template if there is one."""
        return self.encode_chat([{"role": "user", "content": text}]) if self._template is not None else self.encode(text)


_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def _read(path: Path | None) -> str | None:
    return path.read_text(encoding="utf-8") if path else None


def _token_text(value: Any) -> str:
    """tokenizer_config.json writes a special token as text or as a record with its text."""
    return str(value["content"]) if isinstance(value, dict) else str(value or "")


# What the templates of Hugging Face checkpoints may call.
def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
