"""Incremental detokenization: never splits a character, never emits part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# What a tokenizer decodes incomplete characters to. A character has at most four bytes, so up to three of these at the
# end may still become one; earlier ones are invalid bytes.
_INCOMPLETE = "\ufffd"
_MOST_INCOMPLETE = 3


def whole_characters(text: str) -> str:
    """Decoded text without an incomplete character at its end."""
    return text[: max(len(text.rstrip(_INCOMPLETE)), len(text) - _MOST_INCOMPLETE)]


class TextStream:
    """Decodes one sequence as its tokens arrive. Joined, the pieces are the whole text."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.text = ""  # decoded so far, cut before a stop string
        self.stopped = False
        self._given = 0  # characters of `text` already returned
        self._ids: list[int] = []
        # Only a window of tokens is decoded again: a tokenizer needs at most the previous token, to place a space.
        self._window = 0
        self._boundary = 0  # tokens up to here ended on a whole character
        self._seen = 0  # characters of the window's text that are in `text`

    def push(self, token_id: int) -> str:
        """Add one token and return the text that is now certain."""
        if self.stopped:
            return ""
        self._ids.append(token_id)
        decoded = self._decode(self._ids[self._window :])
        certain = len(whole_characters(decoded))
        self._take(decoded, certain)
        if certain == len(decoded):
            self._window, self._boundary = self._boundary, len(self._ids)
            self._seen = len(self._decode(self._ids[self._window :]))
        return self._release(hold_back=self._possible_stop_prefix())

    def finish(self, cut_short: bool = False) -> str:
        """The rest of the text after the last token; if a limit cut it short, without an incomplete character."""
        if not self.stopped and not cut_short:
            decoded = self._decode(self._ids[self._window :])
            self._take(decoded, len(decoded))
        return self._release(hold_back=0)

    def _take(self, decoded: str, certain: int) -> None:
        if certain > self._seen:
            self._append(decoded[self._seen : certain])
            self._seen = certain

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def _append(self, new: str) -> None:
        # A stop string may begin in earlier text, so look back by the length of the longest.
        look_back = max((len(s) for s in self.stop), default=0)
        start = max(0, len(self.text) - look_back)
        self.text += new
        cuts = [at for at in (self.text.find(s, start) for s in self.stop) if at >= 0]
        if cuts:
            self.text = self.text[: min(cuts)]
            self.stopped = True

    def _possible_stop_prefix(self) -> int:
        """How many characters at the end might be the start of a stop string."""
        if self.stopped:
            return 0
        longest = 0
        for stop in self.stop:
            for length in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _release(self, hold_back: int) -> str:
        end = max(self._given, len(self.text) - hold_back)
        piece = self.text[self._given : end]
        self._given = end
        return piece
