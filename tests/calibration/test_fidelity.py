"""The simulation matches decoding, and losses are counted by position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calibrations import ORDER, decaying_plan, random_repairs, random_texts, texts_of
from tiny_models import ARCHITECTURES, LAYERS, PROMPTS, tiny_model

import depthdecay as dd
from depthdecay.calibration.continuations import Continuation, continue_prompts
from depthdecay.calibration.drafted_texts import Drafts, can_simulate_drafts
from depthdecay.calibration.fidelity import Simulator
from depthdecay.calibration.recording import Recording
from depthdecay.model.layers import LayerStack
from depthdecay.model.repairs import Repairs
from depthdecay.runners.block_runner import BlockRunner
from depthdecay.runners.contract import Part
from depthdecay.runners.kv_blocks import KVBlocks


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_simulation_equals_decoding(architecture: str) -> None:
    """Teacher-forced on text that the decayed model wrote, the simulation must predict exactly that text."""
    model, plan = tiny_model(architecture), decaying_plan()
    stack = LayerStack.of(model)
    repairs = random_repairs(plan, stack.hidden_size, neurons=3)
    for maps in (None, repairs):
        engine = dd.Engine(model, plan=plan, repairs=maps)
        recording = Recording.of(stack, texts_of(engine))
        (batch,) = recording.batches
        state = Simulator(recording).final_state(batch, plan, maps)
        picked = torch.cat([logits for _, logits in recording.logits(batch, state)]).argmax(-1)
        assert torch.equal(picked, batch.targets)
        full = Simulator(recording).measure(dd.Plan.full(LAYERS))
        assert full.kl == 0
        assert full.agreement == 1
        assert Simulator(recording).measure(plan, maps).kl > 0


def test_the_simulation_gives_the_logits_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = tiny_model("llama"), decaying_plan()
    stack = LayerStack.of(model)
    repairs = random_repairs(plan, stack.hidden_size)
    seen: list[torch.Tensor] = []
    pick = dd.Engine._pick

    def keep(self: Any, decoder: Any, *args: Any) -> Any:
        seen.append(decoder.logits.clone())
        return pick(self, decoder, *args)

    monkeypatch.setattr(dd.Engine, "_pick", keep)
    engine = dd.Engine(model, plan=plan, repairs=repairs)
    recording = Recording.of(stack, texts_of(engine))
    (batch,) = recording.batches
    state = Simulator(recording).final_state(batch, plan, repairs)
    given = torch.cat([logits for _, logits in recording.logits(batch, state)])
    order = sorted(range(len(PROMPTS)), key=lambda i: (len(PROMPTS[i]), tuple(PROMPTS[i])))
    decoded = torch.stack(seen[1:], dim=1)[order]
    torch.testing.assert_close(given, decoded, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text", "gpt2", "mixtral"])
def test_drafts_are_simulated_as_lossless_mode_makes_them(architecture: str) -> None:
    model = tiny_model(architecture)
    stack = LayerStack.of(model)
    assert can_simulate_drafts(stack)
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14]]
    texts = continue_prompts(dd.Engine(model), prompts, 14, batch=2)
    recording = Recording.of(stack, texts)
    Simulator(recording).measure(
        dd.Plan.constant(LAYERS, LAYERS - 2, drop_order=ORDER)
    )  # overwrites the full model's keys with shallow ones
    drafts, plan = Drafts(recording), dd.Plan.constant(LAYERS, LAYERS - 4, drop_order=ORDER)
    (batch,) = recording.batches
    (_, simulated), *_ = list(drafts.logits(batch, Simulator(drafts).final_state(batch, plan)))
    depth = plan.schedule.final_depth
    for row, text in enumerate(sorted(texts, key=lambda text: (len(text.prompt), text.prompt))):
        for column in range(0, len(text.tokens) - 1, 3):
            before = [*text.prompt, *text.tokens[:column]]
            blocks = KVBlocks.of_rows(stack.kept_shapes(), [[len(before) + 1] * LAYERS])
            runner = BlockRunner(stack, blocks, Repairs())
            runner.run([Part(0, 0, before, LAYERS, plan)])
            drafted = runner.run([Part(0, len(before), [text.tokens[column]], depth, plan)]).logits[0]
            torch.testing.assert_close(simulated[row, column], drafted, atol=2e-4, rtol=1e-3)


def test_texts_that_end_at_different_lengths_are_counted_by_position() -> None:
    stack = LayerStack.of(tiny_model("llama"))
    texts = random_texts(6, 12)
    short = [Continuation(text.prompt, text.tokens[: 5 + i % 2]) for i, text in enumerate(texts[:4])]
    long = Recording.of(stack, texts[4:])
    mixed = Recording(stack, Recording.of(stack, short).batches + long.batches, long.columns)
    plan = decaying_plan()
    measured = Simulator(mixed).measure(plan)
    assert measured.tokens == 2 * 4 + 2 * 5 + 2 * 11
    assert measured.tokens_by_position[:6] == [6, 6, 6, 6, 4, 2]
    alone = [Simulator(Recording.of(stack, [text])).measure(plan) for text in [*short, *texts[4:]]]
    assert sorted(measured.kl_by_prompt) == pytest.approx(sorted(f.kl for f in alone), rel=1e-3)
    assert measured.kl == pytest.approx(sum(f.kl * f.tokens for f in alone) / measured.tokens, rel=1e-3)
