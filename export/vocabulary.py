"""Whether target and draft mean the same token by every id."""

from pathlib import Path

from tokenizers import Tokenizer

from specedge.errors import SpecedgeError


def token_count(tokenizer_json: Path) -> int:
    """One more than the highest id the tokenizer knows: rows of a model from there on are padding."""
    return 1 + max(_tokens(tokenizer_json), default=-1)


def compare_vocabularies(target: Path | None, draft: Path | None, target_size: int, draft_size: int) -> None:
    """Compare two tokenizer.json token by token; the sizes are the rows of the models.

    Padding rows may differ, on either side, and so may EOS, where the target's rule wins. A draft must have a row for
    every token of the target: it reads whatever the target emits.

    Raises:
        SpecedgeError: A token differs (the first id is named), only one model has a tokenizer, or the draft lacks rows.
    """
    if (target is None) != (draft is None):
        without, other = ("target", "draft") if target is None else ("draft", "target")
        raise SpecedgeError(
            f"vocabulary: the {without} has no tokenizer and the {other} has one, so their ids cannot be compared; "
            "use two models with the same tokenizer"
        )
    emitted = target_size
    if target is not None and draft is not None:
        target_tokens, draft_tokens = _tokens(target), _tokens(draft)
        for token in range(target_size):
            if target_tokens.get(token) != draft_tokens.get(token):
                raise SpecedgeError(
                    f"vocabulary: id {token} is {_quoted(target_tokens.get(token))} to the target and "
                    f"{_quoted(draft_tokens.get(token))} to the draft; use a draft with the target's tokenizer"
                )
        emitted = 1 + max((token for token in target_tokens if token < target_size), default=-1)
    if draft_size < emitted:
        raise SpecedgeError(
            f"vocabulary: the draft has vocab_size={draft_size} rows, expected at least {emitted}, one for every token "
            "of the target; use a draft with the target's vocabulary"
        )


def _tokens(tokenizer_json: Path) -> dict[int, str]:
    try:
        vocabulary = Tokenizer.from_file(str(tokenizer_json)).get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers raises Exception itself
        raise SpecedgeError(f"{tokenizer_json}: not a tokenizer that can be read ({error})") from error
    return {index: token for token, index in vocabulary.items()}


def _quoted(token: str | None) -> str:
    return "no token" if token is None else repr(token)
