"""Depth decay inside transformers' own generate."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from decoding import ORDERS, generate, plan_with
from reference import reference_tokens
from tiny_models import LAYERS, PROMPTS, tiny_config, tiny_model
from transformers import (
    AutoModelForImageTextToText,
    DynamicCache,
    Gemma3Config,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
)

import depthdecay as dd
from depthdecay.errors import DepthDecayError, MissingNameError, PlanMismatchError


def everything(model: Any) -> list[dict[str, Any]]:
    return [dict(module.__dict__) for module in model.modules()]


def assert_same(model: Any, before: list[dict[str, Any]]) -> None:
    for module, attributes in zip(model.modules(), before, strict=True):
        assert module.__dict__.keys() == attributes.keys()
        assert all(module.__dict__[name] is value for name, value in attributes.items())


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_generate_equals_the_reference(architecture: str, order: tuple[int, ...] | None) -> None:
    model = tiny_model(architecture)
    plan = plan_with(order)
    before = everything(model)
    with dd.applied(model, plan) as account:
        batch = generate(model, PROMPTS, 20)
        single = generate(model, PROMPTS[:1], 20)
    assert account.depths == list(plan.depths(20))
    assert_same(model, before)
    assert batch == [reference_tokens(model, plan, prompt, 20)[0] for prompt in PROMPTS]
    assert single == batch[:1]


def test_alpha_one_changes_nothing(architecture: str) -> None:
    model = tiny_model(architecture)
    expected = generate(model, PROMPTS, 12)
    with dd.applied(model, dd.Plan.decay(LAYERS, 1)):
        assert generate(model, PROMPTS, 12) == expected


def test_sampling_follows_the_seed() -> None:
    model, plan = tiny_model(), plan_with(None)
    samples = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with dd.applied(model, plan):
            samples.append(generate(model, PROMPTS, 16, do_sample=True, temperature=1.5))
    assert samples[0] == samples[1] != samples[2]


def test_one_token_prompt_and_chunked_prefill() -> None:
    model, plan = tiny_model(), plan_with(None, alpha=0.8)
    with dd.applied(model, plan) as account:
        single = generate(model, [[5]], 8)[0]
        # 11 tokens in chunks of 5: the last chunk is one token but still part of the prompt.
        chunked = generate(model, PROMPTS[:1], 8, prefill_chunk_size=5)[0]
    assert single == reference_tokens(model, plan, [5], 8)[0]
    assert chunked == reference_tokens(model, plan, PROMPTS[0], 8)[0]
    assert account.depths == list(plan.depths(8))


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "mistral"])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_static_cache_works(architecture: str, order: tuple[int, ...] | None) -> None:
    model, plan = tiny_model(architecture), plan_with(order)
    with dd.applied(model, plan):
        tokens = generate(model, PROMPTS[:1], 16, cache_implementation="static")
    assert tokens[0] == reference_tokens(model, plan, PROMPTS[0], 16)[0]


def test_a_loop_by_hand_works() -> None:
    model, plan = tiny_model(), plan_with(None)
    cache, ids, tokens = DynamicCache(config=model.config), torch.tensor([PROMPTS[0]]), []
    with dd.applied(model, plan), torch.no_grad():
        for _ in range(12):
            output = model(ids, past_key_values=cache, use_cache=True)
            ids = output.logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(int(ids))
    assert tokens == reference_tokens(model, plan, PROMPTS[0], 12)[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_beams": 2}, "beam"),
        ({"generation_config": GenerationConfig(num_beams=3, pad_token_id=0)}, "beam"),
        ({"prompt_lookup_num_tokens": 3}, "assisted"),
        ({"use_cache": False}, "use_cache=True"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], words: str) -> None:
    model = tiny_model()
    with dd.applied(model, plan_with(None)), pytest.raises(DepthDecayError, match=words):
        model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=4, **settings)


def test_assisted_generation_is_refused() -> None:
    model = tiny_model()
    with dd.applied(model, plan_with(None)), pytest.raises(DepthDecayError, match="assisted"):
        model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=4, assistant_model=tiny_model(num_hidden_layers=2))


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_going_on_from_a_decayed_cache_is_refused(kind: Any) -> None:
    model, plan = tiny_model(), plan_with(None, alpha=0.7)
    cache = kind(config=model.config, **({"max_cache_len": 64} if kind is StaticCache else {}))
    ids = torch.tensor([PROMPTS[0]])
    with dd.applied(model, plan):
        text = model.generate(ids, max_new_tokens=8, past_key_values=cache, do_sample=False)
        with pytest.raises(DepthDecayError, match="below full depth"):
            model.generate(torch.cat([text, ids], dim=1), max_new_tokens=4, past_key_values=cache)
    with dd.applied(model, plan), pytest.raises(DepthDecayError, match="below full depth"):
        model.generate(torch.cat([text, ids], dim=1), max_new_tokens=4, past_key_values=cache)


def test_going_on_from_a_whole_cache_works() -> None:
    model, plan = tiny_model(), plan_with(None)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([PROMPTS[0][:6]]), past_key_values=cache, use_cache=True)
    with dd.applied(model, plan):
        output = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=10, past_key_values=cache, do_sample=False)
    assert output[0, len(PROMPTS[0]) :].tolist() == reference_tokens(model, plan, PROMPTS[0], 10)[0]


def test_a_decayed_cache_refuses_to_go_on_outside_too() -> None:
    model, ids = tiny_model(), torch.tensor([PROMPTS[0]])
    cache = StaticCache(config=model.config, max_cache_len=64)
    with dd.applied(model, plan_with(None, alpha=0.7)):
        text = model.generate(ids, max_new_tokens=8, past_key_values=cache, do_sample=False)
    with pytest.raises(DepthDecayError, match="below full depth"):
        model.generate(text, max_new_tokens=4, past_key_values=cache)
    cache.reset()
    assert model.generate(ids, max_new_tokens=4, past_key_values=cache, do_sample=False).shape[1] == ids.shape[1] + 4


def test_a_cache_that_was_reset_starts_anew() -> None:
    model, plan, ids = tiny_model(), plan_with(None, alpha=0.7), torch.tensor([PROMPTS[0]])
    cache = StaticCache(config=model.config, max_cache_len=64)
    with dd.applied(model, plan):
        first = model.generate(ids, max_new_tokens=8, past_key_values=cache, do_sample=False)
        cache.reset()
        second = model.generate(ids, max_new_tokens=8, past_key_values=cache, do_sample=False)
    assert first.tolist() == second.tolist()


def test_threads_take_turns() -> None:
    model, plan = tiny_model(), plan_with(None)
    before = everything(model)
    expected = [reference_tokens(model, plan, prompt, 16)[0] for prompt in PROMPTS] * 2
    with dd.applied(model, plan), ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda prompt: generate(model, [prompt], 16)[0], PROMPTS * 2))
    assert answers == expected
    engine = dd.Engine(model, plan=plan)
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda prompt: engine.generate([prompt], 16)[0].token_ids, PROMPTS * 2))
    assert results == expected
    assert_same(model, before)


def test_leaving_while_a_thread_generates_is_told() -> None:
    model, begun, go = tiny_model(), threading.Event(), threading.Event()

    def wait(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        begun.set()
        assert go.wait(60)
        return scores

    slow = LogitsProcessorList([wait])
    settings: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "logits_processor": slow}
    with ThreadPoolExecutor(1) as pool:
        block = contextlib.ExitStack()
        block.enter_context(dd.applied(model, dd.Plan.decay(LAYERS, 1)))
        running = pool.submit(model.generate, torch.tensor([PROMPTS[0]]), **settings)
        assert begun.wait(60)
        with pytest.warns(UserWarning, match=r"left while other threads were generating \(1\)"):
            block.close()
        go.set()
        running.result()


def test_a_copy_made_inside_is_refused() -> None:
    model = tiny_model()
    with dd.applied(model, plan_with(None)), pytest.raises(DepthDecayError, match="copied"):
        copy.deepcopy(model)
    copy.deepcopy(model)


def test_generate_batch_is_refused() -> None:
    model = tiny_model()
    with dd.applied(model, plan_with(None)), pytest.raises(DepthDecayError, match="generate_batch"):
        model.generate_batch([PROMPTS[0]])


def test_arguments_by_position() -> None:
    model, plan, ids = tiny_model(), plan_with(None), torch.tensor([PROMPTS[0]])
    config = GenerationConfig(max_new_tokens=10, do_sample=False, pad_token_id=0)
    cache, tokens, step = DynamicCache(config=model.config), [], ids
    with dd.applied(model, plan), torch.no_grad():
        output = model.generate(ids, config, None)
        for _ in range(10):
            states = model.model(step, None, None, cache)
            step = model.lm_head(states.last_hidden_state[:, -1]).argmax(-1, keepdim=True)
            tokens.append(int(step))
    assert output[0, ids.shape[1] :].tolist() == tokens == reference_tokens(model, plan, PROMPTS[0], 10)[0]


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_model_whose_outer_part_builds_the_masks(order: tuple[int, ...] | None) -> None:
    """Gemma 3's multimodal class builds masks one level above the module that loops over the layers."""
    text = tiny_config("gemma3_text")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(Gemma3Config(text_config=text, vision_config=vision)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.1 if "embed" in name else 0.25)
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    plan = plan_with(order)
    with dd.applied(model, plan):
        batch = generate(model, PROMPTS, 16)
    assert batch == [r.token_ids for r in dd.Engine(model, plan=plan).generate(PROMPTS, max_new_tokens=16)]
    assert batch == [[*generate_alone(model, plan, prompt)] for prompt in PROMPTS]


def generate_alone(model: Any, plan: dd.Plan, prompt: list[int]) -> list[int]:
    with dd.applied(model, plan):
        return generate(model, [prompt], 16)[0]


@pytest.mark.parametrize("plan", [None, "plan.json"])
def test_something_else_than_a_plan_is_refused(plan: Any) -> None:
    with pytest.raises(DepthDecayError, match="Plan"), dd.applied(tiny_model(), plan):
        raise AssertionError("never entered")


def test_repairs_that_cannot_run_are_refused() -> None:
    plan = dataclasses.replace(plan_with(None), repairs="repairs.safetensors")
    with pytest.raises(DepthDecayError, match="repair"), dd.applied(tiny_model(), plan):
        raise AssertionError("never entered")
    with pytest.raises(DepthDecayError, match="repair"):
        dd.Engine(tiny_model(), plan=plan)


def test_nesting_is_refused_and_harmless() -> None:
    model, plan = tiny_model(), plan_with(None)
    before = everything(model)
    with dd.applied(model, plan):
        with pytest.raises(DepthDecayError, match="already"), dd.applied(model, plan):
            raise AssertionError("never entered")
        with pytest.raises(DepthDecayError, match="applied"):
            dd.Engine(model).generate([[5]], max_new_tokens=2)
        assert generate(model, PROMPTS[:1], 8)[0] == reference_tokens(model, plan, PROMPTS[0], 8)[0]
    assert_same(model, before)


def test_two_blocks_left_in_the_wrong_order_restore_the_model() -> None:
    model, other = tiny_model(), tiny_model(seed=1)
    before, before_other = everything(model), everything(other)
    first, second = dd.applied(model, plan_with(None)), dd.applied(other, plan_with(None))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert_same(model, before)
    assert_same(other, before_other)


def test_an_exception_restores_the_model() -> None:
    model = tiny_model()
    before = everything(model)

    def interrupted() -> None:
        with dd.applied(model, plan_with(None)):
            generate(model, PROMPTS, 3)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert_same(model, before)


@pytest.mark.parametrize("name", ["_prefill", "get_compiled_call"])
def test_a_version_of_transformers_without_a_name_that_we_need_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the first, prompt chunks would run below full depth; without the second, the depth would never change."""
    model = tiny_model()
    before = everything(model)
    monkeypatch.delattr(GenerationMixin if hasattr(GenerationMixin, name) else PreTrainedModel, name)
    with (
        pytest.raises(MissingNameError, match=rf"transformers 5\S+ has no LlamaForCausalLM\.{name}"),
        dd.applied(model, plan_with(None)),
    ):
        raise AssertionError("never entered")
    assert_same(model, before)


def test_a_version_of_transformers_that_reads_prompts_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def sample(self: Any, input_ids: torch.Tensor, *_args: Any, **kwargs: Any) -> Any:
        return self(input_ids, past_key_values=kwargs["past_key_values"])

    model = tiny_model()
    monkeypatch.setattr(type(model), "_sample", sample)
    with (
        dd.applied(model, plan_with(None)),
        pytest.raises(MissingNameError, match="no longer reads a prompt in _prefill"),
    ):
        generate(model, PROMPTS[:1], 3)
    with dd.applied(model, plan_with(None)):  # a pass outside generate is the caller's own business
        model(torch.tensor(PROMPTS[:1]))


def test_a_plan_of_another_model_is_refused() -> None:
    with pytest.raises(PlanMismatchError, match="12 layers"), dd.applied(tiny_model(), dd.Plan.decay(12, 0.9)):
        raise AssertionError("never entered")


def test_peft_adapter_works() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_model(), config).eval()
    plan = plan_with(None)
    before = everything(model)
    expected = reference_tokens(model.get_base_model(), plan, PROMPTS[0], 12)[0]
    ids = torch.tensor([PROMPTS[0]])
    with dd.applied(model, plan):
        output = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)
    assert output[0, ids.shape[1] :].tolist() == expected
    assert dd.Engine(model, plan=plan).generate([PROMPTS[0]], max_new_tokens=12)[0].token_ids == expected
    assert_same(model, before)


def test_device_map_hooks_go_on_working() -> None:
    """accelerate replaces every layer's forward to move its inputs, as for models on several GPUs."""
    accelerate = pytest.importorskip("accelerate")
    model, plan = tiny_model(), plan_with(None)
    expected = reference_tokens(model, plan, PROMPTS[0], 12)[0]
    offloaded = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    before = everything(offloaded)
    with dd.applied(offloaded, plan):
        output = offloaded.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=12, do_sample=False)
    assert output[0, len(PROMPTS[0]) :].tolist() == expected
    assert [m.__dict__.keys() for m in offloaded.modules()] == [b.keys() for b in before]
    assert all(m.__dict__.get("forward") is b.get("forward") for m, b in zip(offloaded.modules(), before, strict=True))
