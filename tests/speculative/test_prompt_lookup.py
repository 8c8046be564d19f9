"""Prompt lookup: what followed the same n-gram earlier."""

from __future__ import annotations

from depthdecay.speculative.prompt_lookup import Lookup


def test_lookup_finds_what_followed_before() -> None:
    assert Lookup([1, 2, 3, 4, 5, 9, 9, 2, 3]).after(3) == [4, 5, 9]
    assert Lookup([1, 2, 3, 7, 1, 2, 3, 8, 2, 3]).after(2) == [8, 2]  # the latest occurrence
    assert Lookup([5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2]).after(1) == [3]  # the longest suffix
    assert Lookup([1, 2, 3]).after(4) == []
    assert Lookup([]).after(4) == []
    grown = Lookup([1, 2, 3, 4])
    for token in (9, 1, 2):
        grown.add([token])
    assert grown.after(2) == [3, 4]
    grown.add([5])
    assert grown.after(2) == []
