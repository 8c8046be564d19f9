"""Batches of texts: greedy ones match the model, sampled ones follow its probabilities, and none waits long."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from tiny_models import PROMPTS, tiny_model

import depthdecay as dd
from depthdecay.calibration import text_batches
from depthdecay.calibration.text_batches import MostHaveEnded, TextBatches, Written
from depthdecay.errors import DepthDecayError


@pytest.fixture(scope="module")
def batches() -> TextBatches:
    return TextBatches(dd.Engine(tiny_model("llama")))


def test_greedy_texts_are_those_of_generate(batches: TextBatches) -> None:
    texts = batches.write(PROMPTS, 12, ends=(), rows=8)
    alone = [batches.engine.generate([prompt], 12, mode="full", do_sample=False)[0].token_ids for prompt in PROMPTS]
    assert texts == alone


def test_drawn_texts_are_the_same_for_a_seed_and_differ_within_a_batch(batches: TextBatches) -> None:
    def drawn(seed: int) -> list[list[int]]:
        return batches.write([PROMPTS[0], PROMPTS[1], PROMPTS[0]], 12, ends=(), rows=4, temperature=1.0, seed=seed)

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
    assert drawn(3)[0] != drawn(3)[2]


def test_tokens_are_drawn_by_their_probability(batches: TextBatches) -> None:
    count, temperature = 600, 2.0
    texts = batches.write([PROMPTS[0]] * count, 1, ends=(), rows=count, temperature=temperature, seed=1)
    with torch.no_grad():
        logits = batches.engine.stack.model(torch.tensor([PROMPTS[0]])).logits[0, -1]
    kept = (logits / temperature).topk(50)
    expected = dict(zip(kept.indices.tolist(), kept.values.softmax(-1).tolist(), strict=True))
    tokens = [text[0] for text in texts]
    assert set(tokens) <= set(expected)
    for token, share in expected.items():
        deviation = (share * (1 - share) / count) ** 0.5
        assert abs(tokens.count(token) / count - share) < 5 * deviation + 1e-3


def test_a_batch_stops_when_most_rows_have_ended(batches: TextBatches) -> None:
    free = batches.write(PROMPTS * 2, 40, ends=(), rows=6)
    ends = {text[4] for text in free[:2]}  # of four rows in six, at the fifth token or before
    assert not ends & set(free[2][:20])
    texts = batches.write([*PROMPTS[:2] * 4, PROMPTS[2]], 40, ends=ends, rows=9)
    assert all(text[-1] in ends for text in texts[:8])
    assert len(texts[8]) <= max(map(len, texts[:8]))
    assert texts[8] == free[2][: len(texts[8])]


def test_at_its_time_a_batch_stops_with_what_it_has(batches: TextBatches, monkeypatch: pytest.MonkeyPatch) -> None:
    free = batches.write(PROMPTS, 20, ends=(), rows=4)
    now = itertools.count(100.0)  # every look at the clock takes a second
    monkeypatch.setattr(text_batches, "time", SimpleNamespace(monotonic=lambda: next(now)))
    before = batches.written
    texts = batches.write(PROMPTS, 20, ends=(), rows=4, until=106.0)
    assert [len(text) for text in texts] == [6] * len(PROMPTS)
    assert texts == [text[:6] for text in free]
    wrote = batches.written - before
    assert wrote == Written(6 * len(PROMPTS), 7.0)
    assert wrote.tokens_a_second == 6 * len(PROMPTS) / 7


def test_rows_that_have_ended_are_counted_once() -> None:
    criterion = MostHaveEnded(5, {7}, torch.device("cpu"))
    assert not criterion(torch.tensor([[7], [7], [7], [1], [2]]), None).any()
    assert not criterion(torch.tensor([[7], [7], [1], [1], [2]]), None).any()
    assert criterion(torch.tensor([[1], [1], [1], [7], [2]]), None).tolist() == [True] * 5


@pytest.mark.parametrize(("free", "expected"), [(1e12, 64), (200_000, 8), (30_000, 1)])
def test_a_batch_is_as_large_as_the_memory_allows(monkeypatch: pytest.MonkeyPatch, free: float, expected: int) -> None:
    monkeypatch.setattr(text_batches, "free_bytes", lambda device: free)
    made = TextBatches(dd.Engine(tiny_model("llama")))
    a_text = 8 * sum(shape.nbytes for shape in made.engine.stack.kept_shapes()) + 97 * 16
    rows = made.rows(8)
    assert rows == expected
    assert rows == 64 or rows * a_text <= 0.4 * free < 2 * rows * a_text


def test_no_room_for_one_text_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_batches, "free_bytes", lambda device: 100.0)
    with pytest.raises(DepthDecayError, match="is too small for one text of 8 tokens"):
        TextBatches(dd.Engine(tiny_model("llama"))).rows(8)
