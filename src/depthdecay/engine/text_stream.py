"""Tokens to text, piece by piece: never half a character, never a part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# What a tokenizer makes of bytes that are no whole character yet. A character has four bytes at most, so up to three
# of these at the end may still become one; earlier ones are really bad bytes.
_INCOMPLETE = "\ufffd"
_MOST_INCOMPLETE = 3


def whole_characters(text: str) -> str:
    """Decoded text without the character at its end that is not all there."""
    return text[: max(len(text.rstrip(_INCOMPLETE)), len(text) - _MOST_INCOMPLETE)]


class TextStream:
    """Decodes one sequence as its tokens arrive. The pieces joined are the whole text."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.text = ""  # decoded so far, cut before a stop string
        self.stopped = False
        self._given = 0  # characters of `text` that were handed out
        self._ids: list[int] = []
        # Only a window of tokens is decoded anew: a tokenizer may need the token before to place a space, not more.
        self._window = 0
        self._boundary = 0  # tokens up to here ended on a whole character
        self._seen = 0  # characters of the window's text that are in `text`

    def push(self, token_id: int) -> str:
        """Take one token, give the text that is now certain."""
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
        """The rest, once no more tokens come; where a limit cut them short, without a character that it cut in two."""
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
        # A stop string may begin in text that came before, so look back by the longest one.
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
