"""Every runner returns the same hidden states after layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import random_repairs
from tiny_models import LAYERS, PROMPTS, tiny_model

import depthdecay as dd
from depthdecay.model.layers import LayerStack
from depthdecay.model.repairs import Repairs
from depthdecay.runners.block_runner import BlockRunner
from depthdecay.runners.contract import Ask, Part
from depthdecay.runners.kv_blocks import KVBlocks

PLAN = dd.Plan.constant(LAYERS, LAYERS - 3, drop_order=[3, 4, 6])
ASKED = (0, 3, 4, LAYERS - 1)


def runner_of(stack: Any, repairs: Repairs, positions: int = 32) -> BlockRunner:
    return BlockRunner(stack, KVBlocks.of_rows(stack.kept_shapes(), [[positions] * LAYERS] * len(PROMPTS)), repairs)


def prompts() -> list[Part]:
    return [Part(row, 0, prompt, LAYERS, PLAN) for row, prompt in enumerate(PROMPTS)]


def later() -> list[Part]:
    """A verification at full depth, and one token of each other text at the plan's depth."""
    first, *others = PROMPTS
    return [
        Part(0, len(first), [7, 8, 9], LAYERS, PLAN, wanted=3),
        *(Part(row, len(prompt), [11 + row], LAYERS - 3, PLAN) for row, prompt in enumerate(others, start=1)),
    ]


def test_they_are_the_model_s_own(architecture: str) -> None:
    model = tiny_model(architecture)
    said = runner_of(LayerStack.of(model), Repairs()).run(prompts(), Ask(states=ASKED[:-1]))
    with torch.no_grad():
        own = [model(torch.tensor([prompt]), output_hidden_states=True).hidden_states for prompt in PROMPTS]
    for layer, states in said.states.items():
        expected = torch.cat([states[layer + 1][0] for states in own])
        torch.testing.assert_close(states, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3"])
def test_a_compiled_call_hands_out_the_same(architecture: str) -> None:
    """At any depth, with repair maps replacing layers; requesting states does not change the logits."""
    engine = dd.Engine(tiny_model(architecture), plan=PLAN)
    if not engine.stack.has_compiled_pass:
        pytest.skip("no compiled pass here")
    repairs = random_repairs(PLAN)
    ours, plain, eager = (runner_of(engine.stack, repairs) for _ in range(3))
    for parts in (prompts(), later()):
        assert ours.compiled is not None
        assert plain.compiled is not None
        said, unasked = ours.compiled.run(parts, Ask(states=ASKED)), plain.compiled.run(parts)
        expected = eager.forward.run(parts, Ask(states=ASKED))
        assert torch.equal(said.logits, unasked.logits)
        torch.testing.assert_close(said.logits, expected.logits, atol=1e-3, rtol=1e-3)
        assert tuple(said.states) == ASKED
        for layer in ASKED:
            torch.testing.assert_close(said.states[layer], expected.states[layer], atol=1e-3, rtol=1e-3)
        assert said.tokens_run == expected.tokens_run
