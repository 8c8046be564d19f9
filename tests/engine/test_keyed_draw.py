"""Our own draws, against transformers' processors on the whole vocabulary."""

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
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

import depthdecay as dd
from depthdecay.cuda.compiled_layers import CompiledLayers
from depthdecay.cuda.kernels.keyed_pick import Rules, Seen, keyed_pick
from depthdecay.engine import sampling
from depthdecay.engine.keyed_draw import Draw
from depthdecay.engine.sampling import in_turn
from depthdecay.runners.keyed_noise import gumbel_noise
from depthdecay.speculative import chain_pick

LARGE = 8192
TEMPERATURE = TemperatureLogitsWarper(0.7)


def keys_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2**32, (rows,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("vocabulary", [97, LARGE])
@pytest.mark.parametrize(
    "processors",
    [
        [],
        [TEMPERATURE],
        [TopKLogitsWarper(1)],
        [TopKLogitsWarper(20)],
        [TEMPERATURE, TopKLogitsWarper(50), TopPLogitsWarper(0.8)],
        [TEMPERATURE, TopKLogitsWarper(20), TopPLogitsWarper(0.3), MinPLogitsWarper(0.2)],
        [TopKLogitsWarper(190), MinPLogitsWarper(0.05)],
    ],
)
def test_draws_are_those_of_transformers_processors(processors: list[Any], vocabulary: int) -> None:
    torch.manual_seed(0)
    scores, keys, none = 3 * torch.randn(400, vocabulary), keys_of(400), torch.empty(400, 0)
    draw = Draw.of(processors)
    assert draw is not None
    expected = (in_turn(processors, none, scores) + gumbel_noise(keys, vocabulary)).argmax(1)
    found = draw.pick(scores, keys)
    assert torch.equal(found, expected)
    assert found.unique().numel() > 1
    named = torch.arange(vocabulary) * 3 + 1  # the tokens of a shortened head
    expected = (in_turn(processors, none, scores) + gumbel_noise(keys, vocabulary, named)).argmax(1)
    assert torch.equal(draw.pick(scores, keys, named), expected)


def test_a_repetition_penalty_is_for_the_text_and_the_window_before_a_row() -> None:
    torch.manual_seed(0)
    scores, keys = 2 * torch.randn(4, 50), keys_of(4)
    processors = [RepetitionPenaltyLogitsProcessor(1.7), TEMPERATURE, TopKLogitsWarper(30)]
    draw = Draw.of(processors)
    assert draw is not None
    assert draw.penalises
    assert draw.before == ()
    text, window = torch.tensor([3, 9, 11, 9]), torch.tensor([5, 3, 42, 8])
    has = torch.zeros(1, 51, dtype=torch.bool)
    has[0, text] = True
    for upto in ([0, 1, 2, 3], [2, 2, 0, 1]):
        found = draw.pick(scores, keys, seen=Seen(has, window, torch.tensor(upto)))
        for row, last in enumerate(upto):
            seen = torch.cat([text, window[: last + 1]]).unsqueeze(0)
            plain = in_turn(processors, seen, scores[row : row + 1].clone()) + gumbel_noise(keys[row : row + 1], 50)
            assert int(found[row]) == int(plain.argmax())
    named = torch.arange(50).flip(0)
    turned = draw.pick(scores.flip(1), keys, named, Seen(has, window, torch.tensor([0, 1, 2, 3])))
    assert torch.equal(named[turned], draw.pick(scores, keys, seen=Seen(has, window, torch.tensor([0, 1, 2, 3]))))


def test_a_row_s_draw_depends_on_nothing_but_the_row() -> None:
    """With many ties, as 16 bits give."""
    torch.manual_seed(0)
    scores, keys = (2 * torch.randn(64, LARGE)).bfloat16(), keys_of(64)
    draw = Draw((), Rules(top_k=40, top_p=0.9))
    found = draw.pick(scores, keys)
    assert torch.equal(torch.cat([draw.pick(scores[row : row + 1], keys[row : row + 1]) for row in range(64)]), found)
    turned = torch.randperm(LARGE)
    assert torch.equal(turned[draw.pick(scores[:, turned], keys, turned)], found)


def test_top_p_keeps_equal_tokens_together() -> None:
    scores = torch.tensor([[0.5, 0.2, 0.2, 0.1]]).log()
    draw = Draw((), Rules(top_k=4, top_p=0.6))
    assert {int(draw.pick(scores, keys_of(1, seed))) for seed in range(100)} == {0, 1, 2}


@pytest.mark.parametrize(
    "processors",
    [
        [TEMPERATURE, TopPLogitsWarper(0.8)],
        [TopPLogitsWarper(0.8), TopKLogitsWarper(5)],
        [TopKLogitsWarper(5), MinPLogitsWarper(0.1), TopPLogitsWarper(0.8)],
        [TopKLogitsWarper(5), TypicalLogitsWarper(0.9)],
        [TopKLogitsWarper(5, min_tokens_to_keep=3)],
        [TopKLogitsWarper(200)],
        [TopKLogitsWarper(5), LogitNormalization()],
        [TopKLogitsWarper(5), TEMPERATURE, TopKLogitsWarper(9)],
    ],
)
def test_other_processors_are_left_to_transformers(processors: list[LogitsProcessor]) -> None:
    assert Draw.of(processors) is None


def test_processors_before_are_run_first() -> None:
    penalty = RepetitionPenaltyLogitsProcessor(1.3)
    forbidden = SuppressTokensLogitsProcessor([3])
    draw = Draw.of([penalty, forbidden, TEMPERATURE, TopKLogitsWarper(9)])
    assert draw == Draw((penalty, forbidden), Rules(temperature=0.7, top_k=9))
    assert Draw.of([forbidden, penalty, TEMPERATURE]) == Draw((forbidden,), Rules(temperature=0.7, penalty=1.3))


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.1, "top_k": 0},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 30, "min_p": 0.02, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_steps_windows_and_rows_draw_alike(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they draw in this way; here in float32, with graphs that are replayed by calling them again."""
    drawn: list[int] = []

    def watched(self: Draw, scores: torch.Tensor, *args: Any, **given: Any) -> torch.Tensor:
        drawn.append(len(scores))
        return pick(self, scores, *args, **given)

    pick = Draw.pick
    monkeypatch.setattr(Draw, "pick", watched)
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
    has, window, upto = torch.zeros(1, VOCABULARY, dtype=torch.bool), torch.arange(4), torch.tensor([1, 3])
    logits, tokens = torch.randn(2, VOCABULARY), torch.arange(VOCABULARY)
    torch.library.opcheck(keyed_pick, (logits, keys_of(2), None, None, None, None, 0.7, 1.0, 0, 1.0, 0.0))
    torch.library.opcheck(keyed_pick, (logits, keys_of(2), tokens, has, window, upto, 0.7, 1.2, 5, 0.9, 0.1))
