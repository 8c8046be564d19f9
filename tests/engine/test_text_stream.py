"""Streaming text: whole characters, whole stop strings, nothing lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthdecay.engine.text_stream import TextStream


class Bytes:
    """A byte tokenizer; 256 is special. Incomplete characters decode to U+FFFD, as with real tokenizers."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def stream(ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    text = TextStream(Bytes(), stop)
    pieces = [text.push(i) for i in ids]
    return [*pieces, text.finish()], text


@given(st.text())
def test_pieces_join_to_the_text_and_hold_whole_characters(text: str) -> None:
    pieces, _ = stream(list(text.encode()))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(st.binary(max_size=40))
def test_bad_bytes_lose_nothing(data: bytes) -> None:
    pieces, _ = stream(list(data))
    assert "".join(pieces) == data.decode("utf-8", errors="replace")


@given(st.text(alphabet="ab", max_size=30), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    pieces, state = stream(list(text.encode()), tuple(stop))
    cut = text
    for end in range(len(text) + 1):  # tokens arrive one by one, so the stop string that is complete first wins
        found = [at for at in (text[:end].find(s) for s in stop) if at >= 0]
        if found:
            cut = text[: min(found)]
            break
    assert "".join(pieces) == state.text == cut
    assert state.stopped == (cut != text or any(s in text for s in stop))


def test_a_possible_stop_string_is_held_back_until_it_is_none() -> None:
    text = TextStream(Bytes(), ("END",))
    assert [text.push(ord(c)) for c in "aENx"] == ["a", "", "", "ENx"]


def test_special_tokens_are_left_out() -> None:
    pieces, _ = stream([104, 256, 105, 256])
    assert "".join(pieces) == "hi"


@pytest.mark.parametrize("word", ["é", "€", "𝄞", "👩‍👩‍👧"])
def test_a_character_appears_at_once(word: str) -> None:
    pieces, _ = stream(list(word.encode()))
    assert "".join(pieces) == word
    assert all("\ufffd" not in piece for piece in pieces)


@given(st.text(), st.sampled_from("é€𝄞"), st.data())
def test_a_limit_inside_a_character_leaves_no_half_of_it(text: str, last: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(last.encode()) - 1))
    stream = TextStream(Bytes())
    pieces = [stream.push(i) for i in [*text.encode(), ord("."), *last.encode()[:cut]]]
    assert "".join([*pieces, stream.finish(cut_short=True)]) == stream.text == f"{text}."
