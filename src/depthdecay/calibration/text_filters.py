"""Filters for generated texts: no repetition loops, no near-duplicates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

_HASHES, _BANDS = (
    16,
    4,
)  # four bands of four: texts that share 70% of their n-grams match in some band about half of the time
_DRAWN = np.random.default_rng(20_261).integers(1, 2**63, size=(2, _HASHES), dtype=np.uint64)
_MULTIPLIERS, _OFFSETS = _DRAWN[0] | np.uint64(1), _DRAWN[1]


def repeats_itself(tokens: Sequence[int], *, least_distinct: float = 0.5, longest_run: int = 24) -> bool:
    """Whether a text is stuck in a loop: few distinct 4-grams, or one token many times in a row.

    A text that starts looping half-way has about half as many distinct 4-grams as positions; code and tables, which
    repeat for good reason, have more.
    """
    ids = np.asarray(tokens, dtype=np.uint64)
    if len(ids) < 16:
        return False
    changes = np.flatnonzero(np.diff(ids, prepend=ids[0] + np.uint64(1), append=ids[-1] + np.uint64(1)))
    if np.diff(changes).max() > longest_run:
        return True
    grams = _n_grams(ids, 4)
    return len(np.unique(grams)) < least_distinct * len(grams)


def before_loop(tokens: Sequence[int], *, longest_run: int = 24) -> list[int]:
    """The part of a text before it gets stuck in a loop; all of it if it does not, none if it repeats throughout.

    A loop begins where a 4-gram, and each of the `longest_run` after it, occurred before.
    """
    if not repeats_itself(tokens):
        return list(tokens)
    grams = _n_grams(np.asarray(tokens, dtype=np.uint64), 4)
    is_old = np.ones(len(grams), dtype=bool)
    is_old[np.unique(grams, return_index=True)[1]] = False
    fresh = np.flatnonzero(~is_old)
    gaps = np.diff(fresh, append=len(grams))  # from each new 4-gram to the next
    last = fresh[np.argmax(gaps > longest_run)] if (gaps > longest_run).any() else -1
    kept = list(tokens[: last + 4]) if last >= 0 else []
    return [] if repeats_itself(kept) else kept


class NearDuplicates:
    """Finds texts that share most of their n-grams with an earlier one, using MinHash: four values are kept per text.

    A text is a sequence of integers: token ids, or characters from `letters`.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.seen: set[int] = set()
        self.added: list[int] = []  # since the last call of `take_added`

    def is_new(self, text: Sequence[int]) -> bool:
        """Whether no similar text came before; adds it."""
        keys = _band_keys(np.asarray(text, dtype=np.uint64), self.n)
        if not self.seen.isdisjoint(keys):
            return False
        self.seen.update(keys)
        self.added += keys
        return True

    def take_added(self) -> list[int]:
        """The hashes added since the last call, to be stored for resuming."""
        added, self.added = self.added, []
        return added

    def restore(self, keys: Iterable[int]) -> None:
        self.seen.update(keys)


def letters(text: str) -> list[int]:
    """A text as integers, ignoring case, whitespace, punctuation, and the values of numbers."""
    return [ord("0" if c.isdigit() else c) for c in text.lower() if c.isalnum()]


def _n_grams(ids: np.ndarray, n: int) -> np.ndarray:
    """A hash of each n-gram; for a shorter text, one hash of all of it."""
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
    # The band's number is part of its key, so that only equal bands match.
    return [int(_n_grams(np.append(band, np.uint64(number)), len(band) + 1)[0]) for number, band in enumerate(least)]
