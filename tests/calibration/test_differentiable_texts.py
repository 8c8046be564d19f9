"""Differentiable texts give the same results as recorded ones."""

from __future__ import annotations

import functools

import pytest
import torch
from calibrations import decaying_plan, random_repairs, random_texts
from tiny_models import ARCHITECTURES, LAYERS, tiny_model

from depthdecay.calibration import differentiable_texts, divergence
from depthdecay.calibration.continuations import Continuation
from depthdecay.calibration.differentiable_texts import DifferentiableTexts, frozen, logits_of
from depthdecay.calibration.divergence import mean_kl
from depthdecay.calibration.fidelity import final_state, first_bypassed
from depthdecay.calibration.recording import Recording
from depthdecay.model.kv_cache import PlannedCache
from depthdecay.model.layers import LayerStack
from depthdecay.plan.plan import Plan

COLUMNS = 19


def both_ways(architecture: str) -> tuple[LayerStack, Recording, DifferentiableTexts]:
    """The same texts, recorded and differentiable; all of one length, so that both have the same order."""
    stack = LayerStack.of(tiny_model(architecture))
    texts = random_texts(6, COLUMNS + 1)
    return stack, Recording.of(stack, texts), DifferentiableTexts(stack, texts, first=1, rows=6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_pass_with_gradients_gives_the_states_of_one_without(architecture: str) -> None:
    stack, recording, texts = both_ways(architecture)
    plan = decaying_plan()
    repairs = random_repairs(plan, stack.hidden_size, neurons=3)
    assert first_bypassed(plan, COLUMNS) == 1
    (recorded,) = recording.batches
    with torch.no_grad():
        wanted = final_state(recording, recorded, plan, repairs)
    given = final_state(texts, texts.batch(0), plan, repairs)
    torch.testing.assert_close(given, wanted, atol=1e-5, rtol=1e-5)
    said = torch.cat([logits for _, logits in recording.logits(recorded, wanted)])
    torch.testing.assert_close(logits_of(stack, wanted.flatten(0, 1)), said.flatten(0, 1), atol=1e-4, rtol=1e-4)


def test_a_short_text_may_drop_only_later_layers() -> None:
    """Deeper drops, of longer texts, may be of earlier layers than the first ones are."""
    stack = LayerStack.of(tiny_model())
    plan = Plan.decay(LAYERS, 0.97, drop_order=[5, 2, 4])
    short, long = random_texts(4, 4), random_texts(4, 30)
    first = first_bypassed(plan, 29)
    assert (first, first_bypassed(plan, 3)) == (2, 5)
    texts = DifferentiableTexts(stack, [*short, *long], first=first, rows=4)
    repairs = random_repairs(plan, stack.hidden_size)
    for number, these in enumerate((short, long)):
        recording = Recording.of(stack, sorted(these, key=lambda text: (len(text.prompt), text.prompt, text.tokens)))
        with torch.no_grad():
            wanted = final_state(recording, recording.batches[0], plan, repairs)
            given = final_state(texts, texts.batch(number), plan, repairs)
        torch.testing.assert_close(given, wanted, atol=1e-5, rtol=1e-5)


def test_texts_without_a_loss_are_left_out() -> None:
    stack = LayerStack.of(tiny_model())
    texts = [*random_texts(2, 4), *random_texts(2, 5), *random_texts(2, 9)]
    read = DifferentiableTexts(stack, texts, first=1, rows=1, judged_from=4)
    assert [len(read.texts[number][0].tokens) for number in range(len(read))] == [9, 9]


def test_layers_that_are_run_again_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    stack, _, texts = both_ways("mistral")
    plan = decaying_plan()
    repairs = random_repairs(plan, stack.hidden_size)
    down = repairs.at_depth[7][0].down.requires_grad_(True)

    def gradient() -> torch.Tensor:
        with frozen(stack.model):
            loss = final_state(texts, texts.batch(0), plan, repairs).pow(2).mean()
            return torch.autograd.grad(loss, down)[0]

    plain = gradient()
    assert plain.abs().max() > 0
    runs: list[int] = []
    checkpoint = differentiable_texts.checkpoint
    monkeypatch.setattr(
        differentiable_texts, "checkpoint", lambda *args, **kwargs: (runs.append(1), checkpoint(*args, **kwargs))[1]
    )
    monkeypatch.setattr(texts, "_free", 0.0)
    torch.testing.assert_close(gradient(), plain)
    assert runs


def test_the_mean_kl_and_its_gradient_are_those_of_all_logits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "ROWS_AT_ONCE", 3)
    stack = LayerStack.of(tiny_model())
    generator = torch.Generator().manual_seed(0)
    full, states = (torch.randn((8, stack.hidden_size), generator=generator) for _ in range(2))
    states.requires_grad_(True)
    said, wanted = (logits_of(stack, each).log_softmax(-1) for each in (states, full))
    said_of = functools.partial(logits_of, stack)
    with frozen(stack.model):
        whole = (wanted.exp() * (wanted - said)).sum(-1).mean()
        (expected,) = torch.autograd.grad(2 * whole, states)
        in_parts = mean_kl(states, said_of, full, said_of)
        (given,) = torch.autograd.grad(2 * in_parts, states)
    torch.testing.assert_close(in_parts, whole)
    torch.testing.assert_close(given, expected)


def test_batches_are_kept_while_the_memory_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = LayerStack.of(tiny_model())
    texts = DifferentiableTexts(stack, random_texts(8, 10), first=1, rows=4)
    assert len(texts) == 2
    assert texts.batch(1) is texts.batch(1)
    monkeypatch.setattr(texts, "_free", 0.0)
    assert texts.batch(0) is not texts.batch(0)
    assert texts.batch(1) is texts.batch(1)


def test_texts_without_a_step_are_left_out_and_short_ones_are_not_padded() -> None:
    stack = LayerStack.of(tiny_model())
    texts = [Continuation((3, 4), (5,)), *random_texts(2, 40), *random_texts(2, 6)]
    read = DifferentiableTexts(stack, texts, first=1, rows=2)
    assert [read.batch(number).inputs.shape for number in range(len(read))] == [(2, 5), (2, 39)]


def test_a_loss_is_taken_within_texts_from_the_column_asked_for() -> None:
    stack = LayerStack.of(tiny_model())
    texts = [*random_texts(2, 10), *random_texts(1, 12)]
    batch = DifferentiableTexts(stack, texts, first=1, rows=3, judged_from=4).batch(0)
    columns = batch.inputs.shape[1]
    within = [(row, column) for row, length in enumerate(batch.valid.sum(1).tolist()) for column in range(4, length)]
    assert sorted(batch.valid.sum(1).tolist()) == [9, 9, 11]
    assert batch.places.tolist() == [row * columns + column for row, column in within]
    (recorded,) = Recording.of(stack, texts).batches
    assert torch.equal(recorded.inputs, batch.inputs)  # in the same order, since so are the prompts
    torch.testing.assert_close(batch.judged(recorded.states[-1]), batch.wanted)


def test_of_layers_that_never_run_again_no_keys_are_kept() -> None:
    stack = LayerStack.of(tiny_model())
    batch = DifferentiableTexts(stack, random_texts(3, 10), first=2, rows=3).batch(0)
    (cache,) = {value for _, kwargs in batch.calls for value in kwargs.values() if isinstance(value, PlannedCache)}
    assert [bool(layer.nbytes) for layer in cache.planned] == [False] * 2 + [True] * (stack.num_layers - 2)


def test_frozen_weights_are_as_they_were_afterwards() -> None:
    model = tiny_model()
    model.lm_head.weight.requires_grad_(False)
    before = [parameter.requires_grad for parameter in model.parameters()]
    with frozen(model):
        assert not any(parameter.requires_grad for parameter in model.parameters())
    assert [parameter.requires_grad for parameter in model.parameters()] == before
    assert any(before)
