"""Prompt lookup: what followed the same n-gram earlier in the text is a free draft."""

from __future__ import annotations

from collections.abc import Iterable

LOOKUP = 8  # longest suffix that is looked up in the preceding text: the longer the match, the likelier the draft


class Lookup:
    """Finds what followed the last earlier occurrence of the text's suffix.

    The longest matching suffix wins, of 2 to `size` tokens. Every n-gram is indexed with the position after it, so a
    lookup costs the same however long the text is.
    """

    def __init__(self, text: Iterable[int] = (), size: int = LOOKUP) -> None:
        self.size = size
        self.text: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}
        self.add(text)

    def add(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            place = len(self.text)  # an n-gram is indexed once something follows it
            for length in range(2, min(self.size, place) + 1):
                self._behind[tuple(self.text[place - length :])] = place
            self.text.append(token)

    def after(self, longest: int) -> list[int]:
        for length in range(min(self.size, len(self.text) - 1), 1, -1):
            place = self._behind.get(tuple(self.text[-length:]))
            if place is not None:
                return self.text[place : place + longest]
        return []
