"""The engine, compared with transformers' generate and with a plain, slow reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoding import ORDERS, generate, plan_with, tokens
from late_host import lag_behind
from reference import reference_tokens
from tiny_models import LAYERS, PROMPTS, VOCABULARY, tiny_model
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

import depthdecay as dd
from depthdecay.engine import sampling
from depthdecay.errors import DepthDecayError, PlanMismatchError
from depthdecay.runners.contract import LAG_STEPS
from depthdecay.runners.kv_blocks import BLOCK


def test_full_depth_equals_generate(architecture: str) -> None:
    model = tiny_model(architecture)
    engine = dd.Engine(model, plan=dd.Plan.decay(LAYERS, 1))
    assert tokens(engine.generate(PROMPTS[:1], max_new_tokens=24)) == generate(model, PROMPTS[:1], 24)
    assert tokens(engine.generate(PROMPTS, max_new_tokens=24)) == generate(model, PROMPTS, 24)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_decay_equals_the_reference(architecture: str, order: tuple[int, ...] | None) -> None:
    model = tiny_model(architecture)
    plan = plan_with(order)
    results = dd.Engine(model, plan=plan).generate(PROMPTS, max_new_tokens=24)
    for prompt, result in zip(PROMPTS, results, strict=True):
        expected, depths = reference_tokens(model, plan, prompt, 24)
        assert result.token_ids == expected
        assert result.depths == depths


def test_the_reference_is_not_blind() -> None:
    """Tiny models must be sensitive to dropped layers, or the tests above would prove nothing."""
    for name in ("llama", "gemma2", "gemma3_text", "mistral"):
        model = tiny_model(name)
        full = dd.Engine(model).generate(PROMPTS, max_new_tokens=24)
        decayed = dd.Engine(model, plan=plan_with(None)).generate(PROMPTS, max_new_tokens=24)
        assert tokens(full) != tokens(decayed)
        assert len({token for row in tokens(decayed) for token in row}) > 5


def test_batch_equals_single() -> None:
    engine = dd.Engine(tiny_model(), plan=plan_with(None))
    batch = engine.generate(PROMPTS, max_new_tokens=20)
    assert tokens(batch) == [engine.generate([p], max_new_tokens=20)[0].token_ids for p in PROMPTS]


def test_one_token_prompt_runs_at_full_depth() -> None:
    model = tiny_model()
    plan = plan_with(None, alpha=0.8)
    result = dd.Engine(model, plan=plan).generate([[5]], max_new_tokens=8)[0]
    assert (result.token_ids, result.depths) == reference_tokens(model, plan, [5], 8)


def test_result_accounts_for_every_layer() -> None:
    plan = plan_with(None)
    result = dd.Engine(tiny_model(), plan=plan).generate([PROMPTS[0]], max_new_tokens=16)[0]
    assert len(result.depths) == len(result.token_ids) == 16
    assert result.depths == list(plan.depths(16))
    assert result.layers_executed == plan.layers_executed(16)
    assert result.layers_full == LAYERS * 16
    assert result.prompt_tokens == len(PROMPTS[0])
    assert result.finish_reason == "length"
    assert result.overrun_layers == 0
    assert result.seconds > 0


def test_cache_takes_only_the_planned_room() -> None:
    model, new_tokens = tiny_model(), 30
    plan = plan_with(None, alpha=0.9)
    result = dd.Engine(model, plan=plan).generate([PROMPTS[0]], max_new_tokens=new_tokens)[0]
    position_bytes = 2 * 2 * 8 * 4  # keys and values, 2 heads of 8, float32
    positions = 0
    for layer in range(LAYERS):
        passes = sum(layer in plan.layers(plan.depth(i)) for i in range(new_tokens))
        positions += -(-(len(PROMPTS[0]) + passes - 1) // BLOCK) * BLOCK
    assert result.cache_bytes == positions * position_bytes
    full = LAYERS * -(-(len(PROMPTS[0]) + new_tokens - 1) // BLOCK) * BLOCK * position_bytes
    assert result.cache_bytes_saved == full - result.cache_bytes > 0


def test_mode_full_ignores_the_plan() -> None:
    model = tiny_model()
    engine = dd.Engine(model, plan=plan_with(None))
    result = engine.generate([PROMPTS[0]], max_new_tokens=12, mode="full")[0]
    assert result.token_ids == generate(model, PROMPTS[:1], 12)[0]
    assert set(result.depths) == {LAYERS}


def test_eos_ends_a_row_and_is_part_of_it() -> None:
    model = tiny_model()
    free = dd.Engine(model).generate(PROMPTS, max_new_tokens=24)
    eos = free[0].token_ids[6]
    model.generation_config.eos_token_id = [eos, VOCABULARY - 1]
    results = dd.Engine(model).generate(PROMPTS, max_new_tokens=24)
    first = free[0].token_ids.index(eos)
    assert results[0].token_ids == free[0].token_ids[: first + 1]
    assert results[0].finish_reason == "stop"
    assert len(results[0].depths) == first + 1
    for result, row in zip(results, generate(model, PROMPTS, 24), strict=True):
        assert row[: len(result.token_ids)] == result.token_ids
        assert all(token == 0 for token in row[len(result.token_ids) :])  # generate pads finished rows


def test_settings_come_from_the_generation_config() -> None:
    model = tiny_model()
    model.generation_config = GenerationConfig(
        repetition_penalty=1.7, no_repeat_ngram_size=2, pad_token_id=0, max_new_tokens=18, suppress_tokens=[3, 4]
    )
    assert tokens(dd.Engine(model).generate(PROMPTS)) == generate(model, PROMPTS, 18)


def test_logits_processors_and_stopping_criteria_are_accepted() -> None:
    class OnlyEven(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            scores = scores.clone()
            scores[:, 1::2] = -torch.inf
            return scores

    class LongerThan(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 20)

    model = tiny_model()
    result = dd.Engine(model).generate(
        [PROMPTS[0]], max_new_tokens=30, logits_processor=[OnlyEven()], stopping_criteria=[LongerThan()]
    )[0]
    expected = generate(model, PROMPTS[:1], 30, logits_processor=[OnlyEven()], stopping_criteria=[LongerThan()])[0]
    assert result.token_ids == expected
    assert all(token % 2 == 0 for token in result.token_ids)
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("on_gpu", [False, True])
def test_processors_run_once_per_token_beside_criteria(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some count their calls. The criteria get the scores that the token was drawn from."""
    monkeypatch.setattr(sampling, "are_on_gpu", lambda scores: on_gpu)
    calls: list[int] = []
    seen: list[int] = []

    class Counts(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            calls.append(input_ids.shape[1])
            return scores

    def criterion(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(int(scores.isfinite().sum()))
        return torch.zeros(len(ids), dtype=torch.bool)

    asked = {"do_sample": True, "top_k": 4, "temperature": 0.8, "seed": 3, "eos_token_id": None}
    engine = dd.Engine(tiny_model())
    plain = engine.generate(PROMPTS[:1], 6, mode="full", **asked)[0].token_ids
    both = engine.generate(PROMPTS[:1], 6, logits_processor=[Counts()], stopping_criteria=[criterion], **asked)[0]
    assert both.token_ids == plain
    assert len(calls) == len(seen) == 6
    assert set(seen) == {4}


def test_rows_end_where_a_criterion_says_however_late_the_host_learns_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, which the host does not wait for."""
    asked = []

    def by_row(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        asked.append(ids.shape[1])
        return ids.shape[1] - max(map(len, PROMPTS)) >= 2 + torch.arange(len(ids))

    def answered() -> list[tuple[list[int], str | None, int]]:
        asked.clear()
        results = dd.Engine(tiny_model()).generate(PROMPTS, 40, mode="full", stopping_criteria=by_row)
        return [(result.token_ids, result.finish_reason, sum(result.depths)) for result in results]

    at_once, steps = answered(), len(asked)
    lag_behind(monkeypatch)
    assert answered() == at_once
    assert [len(tokens) for tokens, _, _ in at_once] == [2 + row for row in range(len(PROMPTS))]
    assert {reason for _, reason, _ in at_once} == {"stop"}
    assert steps < len(asked) <= steps + LAG_STEPS


def test_seeded_samples_are_the_same_alone_and_in_a_batch() -> None:
    engine = dd.Engine(tiny_model(), plan=plan_with(None))
    settings: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.3, "top_k": 40, "top_p": 0.95, "seed": 11}
    batch = tokens(engine.generate(PROMPTS, **settings))
    assert batch == [engine.generate([p], **settings)[0].token_ids for p in PROMPTS]
    assert batch != tokens(engine.generate(PROMPTS, **{**settings, "seed": 12}))
    twice = tokens(engine.generate([PROMPTS[0], PROMPTS[0]], **settings))
    assert twice[0] == batch[0] != twice[1]


def test_context_limit_ends_the_answer() -> None:
    model = tiny_model(max_position_embeddings=32)
    result = dd.Engine(model).generate([PROMPTS[0]], max_new_tokens=500)[0]
    assert len(PROMPTS[0]) + len(result.token_ids) == 32
    assert result.finish_reason == "length"


def test_half_precision_runs() -> None:
    model = tiny_model().to(torch.bfloat16)
    assert len(dd.Engine(model, plan=plan_with(None)).generate([PROMPTS[0]], max_new_tokens=6)[0].token_ids) == 6


def test_the_model_is_left_as_it_was_found() -> None:
    model = tiny_model()
    before = [dict(module.__dict__) for module in model.modules()]
    engine = dd.Engine(model, plan=plan_with(None))
    engine.generate(PROMPTS, max_new_tokens=4)

    class Fails(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        engine.generate(PROMPTS, max_new_tokens=4, logits_processor=[Fails()])
    for module, attributes in zip(model.modules(), before, strict=True):
        assert module.__dict__.keys() == attributes.keys()
        assert all(module.__dict__[name] is value for name, value in attributes.items())


@pytest.mark.parametrize(
    ("prompts", "settings", "words"),
    [
        ([[]], {}, "empty"),
        ([], {}, "no prompt"),
        ([[VOCABULARY]], {}, f"token id {VOCABULARY}"),
        ([[-1]], {}, "token id -1"),
        (["text"], {}, "tokenizer"),
        ([[5] * 300], {}, "300 tokens"),
        ([[5]], {"max_new_tokens": -3}, "-3"),
        ([[5]], {"max_new_tokens": 0}, "at least 1"),
        ([[5]], {"temperature": -1.0}, "temperature"),
        ([[5]], {"top_p": 1.5}, "top_p"),
        ([[5]], {"mode": "quick"}, "quick"),
        ([[5]], {"mode": "decay"}, "plan"),
        ([[5]], {"beams": 3}, "beams"),
        ([[5]], {"stop": "x"}, "tokenizer"),
        ([[5]], {"seed": "x", "temperature": 1.0}, "seed"),
        ([object()], {}, "token ids"),
    ],
)
def test_bad_input_is_one_clear_line(prompts: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(DepthDecayError, match=words) as caught:
        dd.Engine(tiny_model()).generate(prompts, **settings)
    assert "\n" not in str(caught.value)


def test_a_plan_of_another_depth_is_refused() -> None:
    with pytest.raises(PlanMismatchError, match=r"12 layers.*has 8"):
        dd.Engine(tiny_model(), plan=dd.Plan.decay(12, 0.9))


def test_training_mode_is_refused() -> None:
    with pytest.raises(DepthDecayError, match="eval"):
        dd.Engine(tiny_model().train())


def test_a_model_put_into_training_later_is_refused() -> None:
    model = tiny_model()
    engine = dd.Engine(model)
    model.train()
    with pytest.raises(DepthDecayError, match="eval"):
        engine.generate([[5]], max_new_tokens=2)


class Letters:
    """A tokenizer with one token per letter, enough to stream."""

    chat_template = None

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(33 + i) for i in ids)


def test_a_stream_stops_at_an_applied_block_and_goes_on_behind_it() -> None:
    model, plan = tiny_model(), plan_with(None)
    expected = reference_tokens(model, plan, PROMPTS[0], 12)[0]
    stream = dd.Engine(model, Letters(), plan).stream(PROMPTS[0], 12)
    first = next(stream)
    with dd.applied(model, plan), pytest.raises(DepthDecayError, match="applied"):
        next(stream)
    stream = dd.Engine(model, Letters(), plan).stream(PROMPTS[0], 12)
    pieces = list(stream)
    assert pieces[0] == first
    assert stream.result.token_ids == expected
    assert "".join(pieces) == stream.result.text == Letters().decode(expected)
    assert [piece.depth for piece in pieces] == stream.result.depths


def test_streams_may_interleave_and_leave_gradients_alone() -> None:
    model, plan = tiny_model(), plan_with(None)
    engine = dd.Engine(model, Letters(), plan)
    streams = [engine.stream(prompt, 10) for prompt in PROMPTS]
    for _ in range(10):
        for stream in streams:
            next(stream)
            assert torch.is_grad_enabled()
    assert [s.result.token_ids for s in streams] == [reference_tokens(model, plan, p, 10)[0] for p in PROMPTS]


class Int8Linear(torch.nn.Module):
    """8-bit weights with a scale per row, as in weight-only quantization back-ends."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight * self.scale)


def test_quantised_layers_run_as_they_are() -> None:
    model = tiny_model()
    for layer in model.model.layers:
        layer.mlp.up_proj = Int8Linear(layer.mlp.up_proj)
        layer.self_attn.q_proj = Int8Linear(layer.self_attn.q_proj)
    plan = plan_with(None)
    result = dd.Engine(model, plan=plan).generate([PROMPTS[0]], max_new_tokens=12)[0]
    assert result.token_ids == reference_tokens(model, plan, PROMPTS[0], 12)[0]
