"""Batch-invariant answers on a CPU: bitwise independent of the other rows, with quantized weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from batches import Windows, random_repairs
from company import answers, check_company, mixed_asks
from tiny_models import tiny_model

import depthdecay as dd
from depthdecay.batching.batcher import Batcher, BatchSettings
from depthdecay.cpu.compiled_rows import CompiledRows
from depthdecay.errors import DepthDecayError

HIDDEN, LAYERS, TOKENS = 128, 6, 500
PLAN = dd.Plan.decay(LAYERS, "0.97")
LENGTHS = (3, 17, 60, 150)
EXACT = BatchSettings(max_batch=16, prefill_tokens=100, cohort_seconds=0, max_positions=512, exact=True)


def engine_of(architecture: str, quantize: str = "int4", **more: Any) -> dd.Engine:
    shape = {"hidden_size": HIDDEN, "intermediate_size": 256, "num_hidden_layers": LAYERS, "vocab_size": TOKENS}
    return dd.Engine(tiny_model(architecture, **shape), quantize=quantize, **more)


@pytest.mark.parametrize(("architecture", "quantize"), [("llama", "int4"), ("qwen2", "int8"), ("qwen3", "int4")])
def test_an_answer_has_the_same_bits_alone_and_in_company(
    architecture: str, quantize: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full, decayed with maps, and lossless with drafts; greedy and seeded; short and long prompts; random arrivals."""
    windows = Windows(monkeypatch)
    batcher = Batcher(engine_of(architecture, quantize, plan=PLAN, repairs=random_repairs(PLAN, HIDDEN)), EXACT)
    assert batcher.inexact is None
    asks = mixed_asks(24, TOKENS, 16, LENGTHS, PLAN, ("full", "decay", "lossless"))
    for ask in asks:
        if ask["mode"] == "lossless":
            ask.pop("logprobs", None)  # such rows decode token by token
    for ask, (tokens, _) in zip(asks, answers(batcher, asks, 1), strict=True):
        if ask["mode"] == "lossless":
            windows.knows(ask["prompt"], tokens)
    alone = check_company(batcher, asks, (3, 16))
    assert 0 < batcher.counters.accepted < batcher.counters.drafted
    assert len({tuple(tokens) for tokens, _ in alone}) > 12  # the answers are not all the same text


def test_the_engine_answers_several_prompts_as_each_alone() -> None:
    engine = engine_of("llama", plan=PLAN)
    prompts = [[3, 7], [11, 12, 13, 14], [5, 9] * 40]
    for mode in ("full", "decay", "lossless"):
        together = engine.generate(prompts, 30, mode=mode, exact=True, eos_token_id=None)
        for prompt, result in zip(prompts, together, strict=True):
            (single,) = engine.generate([prompt], 30, mode=mode, eos_token_id=None)  # in lock-step, not in a batch
            assert single.token_ids == result.token_ids
            assert result.exact


def test_without_quantization_it_is_refused() -> None:
    with pytest.raises(DepthDecayError, match=r"answers cannot be exact here: .*quantized weights on a CPU"):
        Batcher(engine_of("llama", "none"), EXACT)


def test_a_trial_refuses_what_depends_on_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, run = engine_of("llama"), CompiledRows.run

    def depends(self: Any, parts: Any, *more: Any) -> Any:
        said = run(self, parts, *more)
        return replace(said, logits=said.logits + 1e-6 * (len(parts) > 1))

    monkeypatch.setattr(CompiledRows, "run", depends)
    with pytest.raises(DepthDecayError, match="in a trial"):
        Batcher(engine, EXACT)
