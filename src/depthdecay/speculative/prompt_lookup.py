"""Prompt lookup: what followed the same words before is a draft for nothing."""

from __future__ import annotations

from collections.abc import Iterable

LOOKUP = 8  # the longest end of a text that is looked for in the text before: the longer, the surer what follows


class Lookup:
    """What followed the last place where the text's end stood before.

    The longest end that is found decides, of at most `size` tokens and at least 2. Every end is kept with the place
    behind it, so that a look costs the same however long the text is.
    """

    def __init__(self, text: Iterable[int] = (), size: int = LOOKUP) -> None:
        self.size = size
        self.text: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}
        self.add(text)

    def add(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            place = len(self.text)  # an end is known once something follows it
            for length in range(2, min(self.size, place) + 1):
                self._behind[tuple(self.text[place - length :])] = place
            self.text.append(token)

    def after(self, longest: int) -> list[int]:
        for length in range(min(self.size, len(self.text) - 1), 1, -1):
            place = self._behind.get(tuple(self.text[-length:]))
            if place is not None:
                return self.text[place : place + longest]
        return []
