from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import LAYERS, VOCABULARY, tiny_model

import depthdecay as dd
from depthdecay.calibration import gradient_steps, learned_drafter
from depthdecay.calibration.head_states import StatesOfTexts
from depthdecay.calibration.learned_drafter import DrafterLesson, DrafterSettings, some_behind_others
from depthdecay.errors import DepthDecayError
from depthdecay.model.layers import LayerStack
from depthdecay.speculative.draft_head import HEAD_FILE, PORTABLE_HEAD_FILE, HeadShape, portable_states

SETTINGS = DrafterSettings(epochs=12, drafts=3, rows=8, longest=48, rate=2e-3, first_layers=(0, 1))


def own_texts(model: Any, count: int = 160) -> list[Any]:
    """Greedy answers to random prompts."""
    draw = Random(0)
    prompts = [[draw.randrange(3, VOCABULARY) for _ in range(6)] for _ in range(count)]
    answers = dd.Engine(model).generate(prompts, 24, mode="full", eos_token_id=-1)
    return [
        ((p, r.token_ids), "own" if n % 3 else "given") for n, (p, r) in enumerate(zip(prompts, answers, strict=True))
    ]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def texts(model: Any) -> list[Any]:
    return own_texts(model)


def test_a_head_learns_what_the_model_says(model: Any, texts: list[Any], tmp_path: Path) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lines: list[str] = []
    drafter = DrafterLesson(LayerStack.of(model), texts, SETTINGS, say=lines.append).learn()
    told = drafter.figures["head"]
    assert told["held_out"]["all"]["right"][0] > told["closed_form"]["right"][0]
    assert told["learned"]["best"] < told["learned"]["curve"][0]["judged_loss"]
    assert {"all", "own", "given"} == set(told["held_out"])
    assert len(drafter.figures["tried"]) == 2
    assert any("expected" in line for line in lines)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    drafter.save(tmp_path)
    assert (tmp_path / HEAD_FILE).exists()
    assert drafter.portable is not None
    assert drafter.portable.shape.states == portable_states(LAYERS)
    assert drafter.portable.shape.first_layers == 0
    assert (tmp_path / PORTABLE_HEAD_FILE).exists() == (drafter.portable is not drafter.head)
    engine = dd.Engine(model, draft_head=drafter.head)
    prompt = texts[0][0][0]
    answer = engine.generate([prompt], 40, mode="lossless", lookup=0)[0]
    assert answer.token_ids == dd.Engine(model).generate([prompt], 40, mode="full")[0].token_ids


def test_the_same_seed_gives_the_same_head_also_in_two_goes(
    model: Any, texts: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_steps, "KEEP_EVERY", 0.0)
    settings = DrafterSettings(epochs=4, drafts=2, rows=8, longest=48, first_layers=(0,))
    stack = LayerStack.of(model)
    whole = DrafterLesson(stack, texts, settings).learn()

    def interrupt(line: str) -> None:
        if "step 20 " in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        DrafterLesson(stack, texts, settings, folder=tmp_path, say=interrupt).learn()
    halves = DrafterLesson(stack, texts, settings, folder=tmp_path).learn()
    for name, tensor in whole.head.state_dict().items():
        assert torch.equal(tensor, halves.head.state_dict()[name]), name


def test_heads_are_not_compared_where_that_would_take_the_time_to_train_one(model: Any, texts: list[Any]) -> None:
    settings = DrafterSettings(epochs=1, drafts=2, rows=8, longest=48, first_layers=(0, 1))
    drafter = DrafterLesson(LayerStack.of(model), texts[:32], settings, seconds=200).learn()
    assert drafter.figures["tried"] == []
    assert drafter.head.shape.first_layers == 0
    assert drafter.portable is drafter.head


def test_no_time_leaves_the_closed_form(model: Any, texts: list[Any]) -> None:
    settings = DrafterSettings(epochs=4, drafts=2, rows=8, longest=48, first_layers=(0,))
    drafter = DrafterLesson(LayerStack.of(model), texts, settings, seconds=0.0).learn()
    assert "the time was up" in drafter.figures["head"]["learned"]["ended"]


def test_too_little_text_is_told(model: Any, texts: list[Any]) -> None:
    with pytest.raises(DepthDecayError, match="3 texts are too few"):
        DrafterLesson(LayerStack.of(model), texts[:3], SETTINGS)


def test_some_texts_follow_the_most_similar_of_others() -> None:
    texts = [
        (([10 * kind, text], [10 * kind + 1, 10 * kind + 2]), str(kind)) for kind in range(1, 5) for text in range(8)
    ]
    found = some_behind_others(texts, Random(0))
    assert [answer for (_, answer), _ in found] == [answer for (_, answer), _ in texts]
    behind = [(found_, own) for found_, own in zip(found, texts, strict=True) if found_ != own]
    assert 2 < len(behind) < 20
    for ((prompt, _), kind), ((own, _), _) in behind:
        assert prompt[-2:] == own
        assert len(prompt) % 4 == 2
        assert {token // 10 for token in prompt[0::2]} == {int(kind)}


@pytest.mark.parametrize(("lengths", "expected"), [([2, 3, 3, 4, 4], [2, 2, 1]), ([6, 9, 11, 40], [2, 1, 1])])
def test_a_batch_of_long_texts_has_fewer_rows(lengths: list[int], expected: list[int]) -> None:
    stack = LayerStack.of(tiny_model())
    texts = [([5] * (length - 2), [8, 9]) for length in reversed(lengths)]
    states = StatesOfTexts(stack, [HeadShape.of(stack)], texts, rows=2, most_tokens=20, longest=64, room=2**30)
    assert [len(batch) for batch in states.batches] == expected


def test_a_training_step_takes_fewer_tokens_where_memory_is_short(
    model: Any, texts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lesson = DrafterLesson(LayerStack.of(model), texts, SETTINGS)
    assert lesson._tokens_at_once() == 8 * 512
    monkeypatch.setattr(lesson.stack, "model", SimpleNamespace(device=torch.device("cuda")))
    monkeypatch.setattr(learned_drafter, "free_bytes", lambda device: 64e6)
    assert 48 < lesson._tokens_at_once() < 4096
    monkeypatch.setattr(learned_drafter, "free_bytes", lambda device: 1e6)
    assert lesson._tokens_at_once() == 48


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "mixtral"])
def test_states_are_the_same_kept_or_read_anew(architecture: str) -> None:
    model = tiny_model(architecture)
    stack = LayerStack.of(model)
    shape = HeadShape.of(stack, first_layers=1)
    texts = [([5, 6, 7], [8, 9]), ([10, 11], [12, 13, 14, 15])]
    kept, anew = (StatesOfTexts(stack, [shape], texts, rows=2, longest=5, room=room) for room in (2**30, 0))
    for part in ("tokens", "states", "said", "likeliest", "valid", "answers"):
        assert torch.equal(getattr(kept.batch(0, shape), part), getattr(anew.batch(0, shape), part))
    assert not kept.batch(0, shape).answers[0, 0]
    whole = StatesOfTexts(stack, [shape], texts, rows=2, longest=5, room=0, to_learn_from=True).batch(0, shape)
    assert torch.equal(whole.answers.cpu(), whole.valid.cpu())
    batch = kept.batch(0, shape)
    with torch.no_grad():  # by the longest text, whose prompt was cut to fit
        logits = model(torch.tensor([[11, 12, 13, 14, 15]]), use_cache=False).logits
    assert torch.equal(batch.likeliest[1], logits[0].argmax(-1))
