"""Repetition loops and near-duplicates are found; other texts pass."""

from __future__ import annotations

from random import Random

import pytest

from depthdecay.calibration.text_filters import NearDuplicates, before_loop, letters, repeats_itself


def drawn(count: int, seed: int = 0) -> list[int]:
    random = Random(seed)
    return [random.randrange(1000) for _ in range(count)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (drawn(200), False),
        (drawn(120) + drawn(10, 1) * 8, False),  # a refrain
        (drawn(60) + drawn(7, 1) * 20, True),
        ([5, 6] * 50, True),
        (drawn(100) + [9] * 30 + drawn(100, 2), True),
        ([7] * 10, False),  # too short to tell
        ([], False),
    ],
)
def test_a_loop_is_found(text: list[int], expected: bool) -> None:
    assert repeats_itself(text) is expected


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (drawn(200), 200),
        (drawn(120) + drawn(10, 1) * 8, 200),  # a refrain
        (drawn(60) + drawn(7, 1) * 20, 60 + 7 + 3),  # the last new 4-grams are those that enter the second round
        (drawn(100) + [9] * 30 + drawn(100, 2), 104),
        ([5, 6] * 50, 5),
        (drawn(8) * 2 + drawn(8, 1) * 2 + drawn(8, 2) * 2 + [7] * 300, None),
        ([], 0),
    ],
)
def test_a_text_is_kept_up_to_its_loop(text: list[int], kept: int | None) -> None:
    found = before_loop(text)
    assert found == text[: len(found)]
    assert not repeats_itself(found)
    assert kept is None or len(found) == kept


def test_a_text_that_repeats_throughout_is_not_kept() -> None:
    changing = [token for number in range(60) for token in (*drawn(20, 1), number)]
    assert repeats_itself(changing)
    assert before_loop(changing) == []


def test_a_question_with_other_numbers_or_spelling_is_the_same_question() -> None:
    asked = NearDuplicates(n=6)
    assert asked.is_new(letters("Mary has 12 apples and gives away 5. How many are left?"))
    assert not asked.is_new(letters("mary has 47 apples, and gives away 9: how many are left"))
    assert asked.is_new(letters("Why is the sky blue in the morning and red in the evening?"))
    assert asked.is_new(letters("为什么天空是蓝色的?"))
    assert not asked.is_new(letters("为什么天空是蓝色的。"))


def test_texts_with_most_n_grams_in_common_meet_and_others_do_not() -> None:
    found = {}
    for changed in (4, 150):
        met = 0
        for seed in range(100):
            text, other = drawn(300, seed), drawn(300, 1000 + seed)
            index = NearDuplicates(n=5)
            assert index.is_new(text)
            met += not index.is_new(text[:-changed] + other[-changed:])
        found[changed] = met
    assert found[4] > 95
    assert found[150] < 15


def test_what_was_seen_can_be_handed_on() -> None:
    first, second = NearDuplicates(n=5), NearDuplicates(n=5)
    assert first.is_new(drawn(50))
    added = first.take_added()
    assert first.take_added() == []
    second.restore(added)
    assert not second.is_new(drawn(50))
    assert second.is_new(drawn(50, 1))
