"""Text that grows token by token."""

from collections.abc import Sequence

from specedge.tokenizer import Tokenizer

_UNFINISHED = 3  # bytes of a UTF-8 character short of its last; a tokenizer shows them as one to three broken characters


class TextStream:
    """Text of a growing id list: only characters that can no longer change, nothing of a stop string's possible beginning.

    A byte-level token may end inside a character: its text is held back until the character is whole or shown to be
    broken. `push` returns the new text; `stopped` turns true at the token whose text completes a stop string, and the text
    ends right before it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, [text for text in stop if text]
        self._ids: list[int] = []
        self._read = self._prefix = 0  # ids[prefix:read] is context: a token's text may depend on the one before
        self._taken = 0  # characters of the text of ids[prefix:] that are in `text` already
        self._text = ""
        self._sent = 0
        self.stopped = False

    @property
    def text(self) -> str:
        return self._text

    def push(self, token: int) -> str:
        """Add a token; returns the text it releases."""
        self._ids.append(token)
        return self._release(self._take(_UNFINISHED), final=False)

    def finish(self) -> str:
        """The text still held back, at the end of the request."""
        if self.stopped:
            return ""
        return self._release(self._take(0), final=True)

    def _take(self, unfinished: int) -> str:
        """The text not taken yet; up to so many broken characters at its end may still become one whole, and wait."""
        text = self._tokenizer.decode(self._ids[self._prefix :])
        broken = len(text) - len(text.rstrip("\ufffd"))
        end = max(len(text) - min(broken, unfinished), self._taken)
        taken = text[self._taken : end]
        self._taken = end
        if not broken:
            self._prefix, self._read = self._read, len(self._ids)
            self._taken = len(self._tokenizer.decode(self._ids[self._prefix :]))
        return taken

    def _release(self, new: str, final: bool) -> str:
        self._text += new
        found = [index for index in (self._text.find(stop, self._sent) for stop in self._stop) if index >= 0]
        if found:
            self.stopped = True
            self._text = self._text[: min(found)]
        end = len(self._text) if final or found else len(self._text) - self._possible_stop()
        released = self._text[self._sent : end]
        self._sent = max(end, self._sent)
        return released

    def _possible_stop(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for size in range(min(longest, len(self._text) - self._sent), 0, -1):
            if any(stop.startswith(self._text[-size:]) for stop in self._stop):
                return size
        return 0
