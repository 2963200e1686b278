"""A checkpoint's tokenizer, as the files that a bundle holds: the same bytes whatever form the checkpoint has."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from specedge.errors import SpecedgeError, first_line

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_SLOW_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
# How llama.cpp's byte-level vocabularies cut text (its llama-vocab.cpp): names that transformers takes for plain GPT-2,
# rightly, and those whose digits stand alone, which it does not know.
_PLAIN_SPLITS = ("gpt-2", "mpt", "olmo", "jais", "phi-2")
_DIGIT_SPLITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """`tokenizer_json` alone encodes a text as transformers does, a leading BOS included."""

    tokenizer_json: str
    special_tokens: Mapping[str, str]  # bos_token, eos_token, unk_token, pad_token, where there is one
    chat_template: str | None

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and, if there is a template, chat_template.jinja."""
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens}
        config = json.dumps(settings, ensure_ascii=False, indent=2, sort_keys=True)
        (folder / "tokenizer.json").write_text(self.tokenizer_json, encoding="utf-8", newline="\n")
        (folder / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8", newline="\n")
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8", newline="\n")

    def special_ids(self, role: str) -> tuple[int, ...]:
        """The id of `bos_token`, `eos_token`, ...; empty if there is none."""
        token = self.special_tokens.get(role)
        index = None if token is None else Tokenizer.from_str(self.tokenizer_json).token_to_id(token)
        return () if index is None else (index,)


def read_folder(folder: Path) -> TokenizerFiles | None:
    """The tokenizer of a Hugging Face folder; None if it has none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        if slow := [name for name in _SLOW_FILES if (folder / name).is_file()]:
            raise SpecedgeError(
                f"{folder}: {slow[0]} without tokenizer.json, the form a device can read; load the tokenizer with "
                "transformers and save_pretrained it"
            )
        return None
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # tokenizers raises Exception itself
        raise SpecedgeError(f"{path}: not a tokenizer that can be read ({first_line(error)})") from error
    return _files(tokenizer, tokenizer.backend_tokenizer)


def read_gguf(path: Path, metadata: Mapping[str, Any]) -> TokenizerFiles | None:
    """The tokenizer in a GGUF file's metadata; None if it has none."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens or metadata.get("tokenizer.ggml.model") in (None, "none", "no_vocab"):
        return None
    split = metadata.get("tokenizer.ggml.pre")
    known = (*_PLAIN_SPLITS, *_DIGIT_SPLITS, *GGUF_PRE_TOKENIZER_SPLITS)
    if metadata["tokenizer.ggml.model"] == "gpt2" and split not in known:
        raise SpecedgeError(
            f"{path}: tokenizer.ggml.pre {split!r} is not supported, expected one of {', '.join(sorted(known))}; "
            "use the Hugging Face folder of this model"
        )
    try:
        tokenizer = PreTrainedTokenizerFast(name_or_path=str(path.parent), gguf_file=path.name, local_files_only=True)
    except Exception as error:  # tokenizers raises Exception itself
        raise SpecedgeError(f"{path}: its tokenizer cannot be read ({first_line(error)})") from error
    backend = _only_real_tokens(tokenizer.backend_tokenizer, tokens, metadata.get("tokenizer.ggml.token_type"))
    if split in _DIGIT_SPLITS:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return _files(tokenizer, backend)


def _only_real_tokens(backend: Tokenizer, tokens: list[str], kinds: list[int] | None) -> Tokenizer:
    """Drop the fillers: `[PAD120]` of llama.cpp up to the model's rows, and what transformers adds beyond them."""

    def real(token: str, index: int) -> bool:
        unused = kinds is not None and index < len(tokens) and kinds[index] == gguf.TokenType.UNUSED
        return index < len(tokens) and not (unused and token == f"[PAD{index}]")

    content = json.loads(backend.to_str())
    content["added_tokens"] = [added for added in content["added_tokens"] if real(added["content"], added["id"])]
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {token: index for token, index in vocabulary.items() if real(token, index)}
    return Tokenizer.from_str(json.dumps(content))


def _files(tokenizer: PreTrainedTokenizerFast, backend: Tokenizer) -> TokenizerFiles:
    backend.no_truncation()
    backend.no_padding()
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several, by name
        template = template.get("default")
    special = {role: getattr(tokenizer, role) for role in _SPECIAL_TOKENS}
    return TokenizerFiles(
        tokenizer_json=backend.to_str(pretty=True) + "\n",
        special_tokens={role: token for role, token in special.items() if token is not None},
        chat_template=template,
    )
