"""Which texts are worth keeping: none that repeats itself, and none that is nearly another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

_HASHES, _BANDS = 16, 4  # four bands of four: texts that share 70% of their n-grams meet in one at even odds
_DRAWN = np.random.default_rng(20_261).integers(1, 2**63, size=(2, _HASHES), dtype=np.uint64)
_MULTIPLIERS, _OFFSETS = _DRAWN[0] | np.uint64(1), _DRAWN[1]


def repeats_itself(tokens: Sequence[int], *, least_distinct: float = 0.5, longest_run: int = 24) -> bool:
    """Whether a text is stuck: few of its 4-grams are different, or one token comes many times in a row.

    A text that falls into a loop half-way has about half as many different 4-grams as places; code and tables, which
    repeat themselves with reason, have more.
    """
    ids = np.asarray(tokens, dtype=np.uint64)
    if len(ids) < 16:
        return False
    changes = np.flatnonzero(np.diff(ids, prepend=ids[0] + np.uint64(1), append=ids[-1] + np.uint64(1)))
    if np.diff(changes).max() > longest_run:
        return True
    grams = _n_grams(ids, 4)
    return len(np.unique(grams)) < least_distinct * len(grams)


class NearDuplicates:
    """Finds texts that share most of their n-grams with an earlier one, by MinHash: four numbers are kept of each.

    A text is a sequence of whole numbers: token ids, or characters as `letters` gives them.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.seen: set[int] = set()
        self.added: list[int] = []  # since the last call of `take_added`

    def is_new(self, text: Sequence[int]) -> bool:
        """Whether nothing like it came before; from then on it has."""
        keys = _band_keys(np.asarray(text, dtype=np.uint64), self.n)
        if not self.seen.isdisjoint(keys):
            return False
        self.seen.update(keys)
        self.added += keys
        return True

    def take_added(self) -> list[int]:
        """What an interrupted run needs to know of the texts that came since the last call."""
        added, self.added = self.added, []
        return added

    def restore(self, keys: Iterable[int]) -> None:
        self.seen.update(keys)


def letters(text: str) -> list[int]:
    """A text as numbers in which case, spaces, punctuation and which number is named make no difference."""
    return [ord("0" if c.isdigit() else c) for c in text.lower() if c.isalnum()]


def _n_grams(ids: np.ndarray, n: int) -> np.ndarray:
    """A number for each n-gram, the same for the same n-gram; of a shorter text one for all of it."""
    n = min(n, len(ids))
    grams = np.zeros(len(ids) - n + 1, dtype=np.uint64)
    for place in range(n):
        grams = (grams + ids[place : len(ids) - n + 1 + place] + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        grams ^= grams >> np.uint64(29)
    return grams


def _band_keys(ids: np.ndarray, n: int) -> list[int]:
    if not len(ids):
        return [0]
    grams = np.unique(_n_grams(ids, n))
    mixed = grams[:, None] * _MULTIPLIERS + _OFFSETS
    mixed ^= mixed >> np.uint64(31)
    least = (mixed * np.uint64(0xBF58476D1CE4E5B9)).min(axis=0).reshape(_BANDS, -1)
    # The number of the band is part of its key, so that only the same bands meet.
    return [int(_n_grams(np.append(band, np.uint64(number)), len(band) + 1)[0]) for number, band in enumerate(least)]
