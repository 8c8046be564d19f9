"""The kind of a text, by simple heuristics, for reports on where a drafter is good."""

from __future__ import annotations

import re

SUMS, CODE, CHAT, OTHER_LANGUAGES = "sums", "code", "chat", "other languages"

_CODE = re.compile(r"```|^\s*(def|class|import|from|return|public|func|fn|SELECT|#include)\b|[;{]\s*$", re.MULTILINE)
_SUM = re.compile(r"\d\s*[-+*/×÷=]\s*\$?\\?\(?\d|\\frac|\\times|=\s*\$?\d")
_ENGLISH = frozenset(
    (
        *("the", "of", "and", "to", "is", "in", "a", "that", "for", "it", "with", "as", "are"),
        *("on", "this", "be", "by", "or", "you", "i", "an", "not", "can"),
    )
)
_LEAST_ENGLISH = 0.1  # share of common English words; they are rare in other languages
_LINES_OF_CODE = 3
_SUMS = 3


def kind_of(text: str) -> str:
    """Checks for code first, since it may contain anything else; then language; then maths."""
    if "```" in text or len(_CODE.findall(text)) >= _LINES_OF_CODE:
        return CODE
    if len(_SUM.findall(text)) >= _SUMS:
        return SUMS
    letters = [c for c in text if c.isalpha()]
    words = re.findall(r"[a-z']+", text.lower())
    foreign = sum(not c.isascii() for c in letters) > 0.1 * max(1, len(letters))
    if foreign or sum(word in _ENGLISH for word in words) < _LEAST_ENGLISH * len(words):
        return OTHER_LANGUAGES
    return CHAT
