"""Drawing among the likeliest tokens, against transformers' processors on the whole vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from replays import replay_captures
from tiny_models import LAYERS, PROMPTS, VOCABULARY, tiny_model
from transformers import (
    LogitNormalization,
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

import depthdecay as dd
from depthdecay.cuda.compiled_layers import CompiledLayers
from depthdecay.cuda.kernels.candidate_pick import pick_candidate
from depthdecay.engine import sampling
from depthdecay.engine.candidates import Cut, highest
from depthdecay.engine.sampling import in_turn
from depthdecay.runners.keyed_noise import gumbel_noise
from depthdecay.speculative import chain_pick

LARGE = 8192  # a vocabulary that is searched in pieces
TEMPERATURE = TemperatureLogitsWarper(0.7)


def keys_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2**32, (rows,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("vocabulary", [97, LARGE])
@pytest.mark.parametrize(
    "processors",
    [
        [TopKLogitsWarper(1)],
        [TopKLogitsWarper(20)],
        [TEMPERATURE, TopKLogitsWarper(50), TopPLogitsWarper(0.8)],
        [TEMPERATURE, TopKLogitsWarper(20), TopPLogitsWarper(0.3), MinPLogitsWarper(0.2)],
        [TopKLogitsWarper(200), MinPLogitsWarper(0.05)],
    ],
)
def test_draws_are_those_of_transformers_processors(processors: list[Any], vocabulary: int) -> None:
    torch.manual_seed(0)
    scores, keys, none = 3 * torch.randn(400, vocabulary), keys_of(400), torch.empty(400, 0)
    cut = Cut.of(processors)
    assert cut is not None
    expected = (in_turn(processors, none, scores) + gumbel_noise(keys, vocabulary)).argmax(1)
    found = cut.pick(in_turn(cut.before, none, scores), keys)
    assert torch.equal(found, expected)
    assert found.unique().numel() > 1
    named = torch.arange(vocabulary) * 3 + 1  # the tokens of a shortened head
    expected = (in_turn(processors, none, scores) + gumbel_noise(keys, vocabulary, named)).argmax(1)
    assert torch.equal(cut.pick(in_turn(cut.before, none, scores), keys, named), expected)


def test_a_row_s_draw_depends_on_nothing_but_the_row() -> None:
    """With many ties, as 16 bits give, and whatever candidates are collected of those that tie with the last one."""
    torch.manual_seed(0)
    scores, keys = (2 * torch.randn(64, LARGE)).bfloat16().float(), keys_of(64)
    cut = Cut((), top_k=40, top_p=0.9)
    found = cut.pick(scores, keys)
    assert torch.equal(torch.cat([cut.pick(scores[row : row + 1], keys[row : row + 1]) for row in range(64)]), found)
    turned = torch.randperm(LARGE)
    again = cut.pick(scores[:, turned], keys, turned)
    assert torch.equal(turned[again], found)


def test_a_tie_that_does_not_fit_is_left_out() -> None:
    scores = torch.zeros(1, LARGE)
    scores[0, :3] = 1.0
    cut = Cut((), top_k=5)
    assert {int(cut.pick(scores, keys_of(1, seed))) for seed in range(100)} == {0, 1, 2}
    assert Cut((), top_k=5).pick(torch.zeros(1, LARGE), keys_of(1)).numel() == 1  # all are equal: one of them


def test_top_p_keeps_equal_tokens_together() -> None:
    scores = torch.tensor([[0.5, 0.2, 0.2, 0.1]]).log()
    cut = Cut((), top_k=4, top_p=0.6)
    assert {int(cut.pick(scores, keys_of(1, seed))) for seed in range(100)} == {0, 1, 2}


@pytest.mark.parametrize(
    "processors",
    [
        [],
        [TEMPERATURE],
        [TEMPERATURE, TopPLogitsWarper(0.8)],
        [TopPLogitsWarper(0.8), TopKLogitsWarper(5)],
        [TopKLogitsWarper(5), MinPLogitsWarper(0.1), TopPLogitsWarper(0.8)],
        [TopKLogitsWarper(5), TypicalLogitsWarper(0.9)],
        [TopKLogitsWarper(5, min_tokens_to_keep=3)],
        [TopKLogitsWarper(250)],
        [TopKLogitsWarper(5), LogitNormalization()],
        [TopKLogitsWarper(5), TEMPERATURE, TopKLogitsWarper(9)],
    ],
)
def test_other_processors_are_left_to_transformers(processors: list[LogitsProcessor]) -> None:
    assert Cut.of(processors) is None


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_values_that_are_not_finite_pick_a_token_that_exists(value: float) -> None:
    values, places = torch.zeros(1, 64), torch.arange(64, 128).unsqueeze(0)
    values[0, 0] = value
    assert 64 <= int(pick_candidate(values, places, places, keys_of(1), 50, 1.0, 0.0, False)) < 128


def test_the_highest_are_found_in_pieces_and_at_once() -> None:
    scores = torch.randn(3, LARGE)
    values, places = highest(scores, 64)
    assert torch.equal(values, scores.topk(64).values)
    assert torch.equal(scores.gather(1, places), values)
    odd = torch.randn(2, 1009)  # a prime: no pieces
    assert torch.equal(highest(odd, 64)[0], odd.topk(64).values)


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.2, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 30, "min_p": 0.02, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_steps_windows_and_rows_draw_alike(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they draw in this way; here in float32, with graphs that are replayed by calling them again."""
    drawn: list[int] = []

    def watched(self: Cut, *args: Any) -> torch.Tensor:
        found = pick(self, *args)
        drawn.append(len(found))
        return found

    pick = Cut.pick
    monkeypatch.setattr(Cut, "pick", watched)
    for module in (sampling, chain_pick):
        monkeypatch.setattr(module, "are_on_gpu", lambda scores: True)
    replay_captures(monkeypatch)
    model = tiny_model()
    plan = dd.Plan.constant(LAYERS, LAYERS - 2)
    engine = dd.Engine(model, plan=plan, fast=False)
    given = {"max_new_tokens": 24, "seed": 3, **settings}
    full = engine.generate(PROMPTS, mode="full", **given)
    assert drawn == [len(PROMPTS)] * 24
    rows = engine.generate(PROMPTS, mode="lossless", **given)
    assert [result.token_ids for result in rows] == [result.token_ids for result in full]
    engine.uses_graphs, engine.compiled = True, CompiledLayers()
    windows = engine.generate(PROMPTS[:1], mode="lossless", **given)[0]
    assert windows.token_ids == full[0].token_ids
    assert windows.drafted > 0
    assert len(set(windows.token_ids)) > 5


def test_the_operator_is_one_of_torch_s() -> None:
    values = torch.randn(2, 64).sort(descending=True).values
    places = torch.randint(VOCABULARY, (2, 64))
    torch.library.opcheck(pick_candidate, (values, places, places, keys_of(2), 5, 0.9, 0.0, True))
