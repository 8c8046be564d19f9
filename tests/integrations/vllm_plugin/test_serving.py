"""The plug-in in a running vLLM on the embedded model: full depth is stock vLLM, decayed text is our engine's."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_engines import Answers, answered, asked

from depthdecay import Plan
from depthdecay.integrations.vllm.settings import server_depth
from depthdecay.plan.file import EMBEDDED_PLAN
from depthdecay.plan.ladder import runs_of

TEXTS = ["The capital of France is", "Once upon a time, in a small village,", "def fibonacci(n):\n", "Water boils"]
TOKENS = 32
DEPTHS: list[Any] = [{"alpha": 0.95}, {"alpha": 1}, {"alpha": "0.99", "warmup_tokens": 4}, {"alpha": 0.9, "horizon": 9}]


def plan_of(depth: Any) -> Plan:
    return server_depth({"plan": str(EMBEDDED_PLAN)}, 30).plan_of({"depth_decay": depth})


@pytest.fixture(scope="module")
def prompts(engine_answers: Answers) -> list[list[int]]:
    return [engine_answers.ids(text) for text in TEXTS]


@pytest.mark.usefixtures("way")
def test_full_depth_is_stock_vllm(ours: Any, stock: Any, prompts: list[list[int]]) -> None:
    expected = answered(stock, prompts, asked(TOKENS))
    assert answered(ours, prompts, asked(TOKENS, {"alpha": 1})) == expected
    assert answered(ours, prompts, asked(TOKENS, '{"alpha": 0.95}')) != expected


@pytest.mark.usefixtures("way")
def test_a_decayed_answer_is_our_engines_alone_and_in_a_mixed_batch(
    ours: Any, engine_answers: Answers, prompts: list[list[int]]
) -> None:
    expected = [engine_answers(prompt, plan_of(depth), TOKENS) for prompt, depth in zip(prompts, DEPTHS, strict=True)]
    params = [asked(TOKENS, depth) for depth in DEPTHS]
    assert answered(ours, prompts, params) == expected
    alone = [answered(ours, [prompt], [param])[0] for prompt, param in zip(prompts[:2], params[:2], strict=True)]
    assert alone == expected[:2]
    # The shallowest has maps, and one of them is for a run of layers that two pipeline stages would share.
    assert min(plan_of(DEPTHS[0]).depths(TOKENS)) == 24
    assert (14, 16) in runs_of(plan_of(DEPTHS[0]).dropped(24))


def test_without_a_word_a_request_gets_the_servers_plan(
    ours: Any, engine_answers: Answers, prompts: list[list[int]]
) -> None:
    tokens = 48
    expected = engine_answers(prompts[1], Plan.load(EMBEDDED_PLAN), tokens)
    assert answered(ours, prompts[1:2], asked(tokens)) == [expected]
    assert expected != engine_answers(prompts[1], Plan.full(30), tokens)


@pytest.mark.usefixtures("way")
def test_long_prompts_in_pieces_and_requests_that_are_put_off(
    ours: Any, engine_answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six requests of up to 150 tokens in a cache for about 400: some give up their blocks and begin again."""
    scheduler = ours.llm_engine.engine_core.engine_core.scheduler
    put_off: list[int] = []  # how much text each request had when it gave up its blocks
    preempt = scheduler._preempt_request

    def watched(request: Any, *more: Any, **named: Any) -> None:
        put_off.append(request.num_output_tokens)
        preempt(request, *more, **named)

    monkeypatch.setattr(scheduler, "_preempt_request", watched)
    fox = "The quick brown fox jumps over the lazy dog. " * 9
    long = [engine_answers.ids(f"{number}. {fox}") for number in range(6)]
    assert all(64 < len(prompt) < 130 for prompt in long)
    depths = [{"alpha": 0.97}, {"alpha": 1}] * 3
    got = answered(ours, long, [asked(40, depth) for depth in depths])
    assert max(put_off) > 1
    for number in (0, 1, 4):
        assert got[number] == engine_answers(long[number], plan_of(depths[number]), 40)


def test_the_prefix_cache_holds_prompts_but_no_decayed_text(ours: Any, engine_answers: Answers, way: str) -> None:
    prompt = engine_answers.ids(f"A prefix, {way}, that is long enough to fill blocks of the cache. " * 5)[:64]
    first = answered(ours, [prompt], asked(40, {"alpha": 0.9}))[0]
    text = [*prompt, *first]
    output = ours.generate([{"prompt_token_ids": text}], asked(8, {"alpha": 1}), use_tqdm=False)[0]
    assert output.num_cached_tokens == 64
    assert list(output.outputs[0].token_ids) == engine_answers(text, Plan.full(30), 8)
    # Text at full depth is like a prompt.
    second = answered(ours, [prompt], asked(40, {"alpha": 1}))[0]
    again = ours.generate([{"prompt_token_ids": [*prompt, *second]}], asked(1, {"alpha": 1}), use_tqdm=False)[0]
    assert again.num_cached_tokens == 96


def test_decayed_text_that_is_computed_again_is_not_found_where_another_wrote_it_at_full_depth(
    ours: Any, engine_answers: Answers
) -> None:
    """Its keys and values there are those of full depth, so the request would end otherwise than undisturbed."""
    from vllm.v1.request import Request

    core = ours.llm_engine.engine_core.engine_core
    prompt = engine_answers.ids("Another prefix that fills two blocks of the cache, and is asked for twice. " * 5)[:64]
    text = answered(ours, [prompt], asked(40, {"alpha": 1}))[0]

    def found(depth: Any) -> int:
        """How much of a request that was put off after all of this text would be taken from the cache."""
        request = Request("r", prompt, asked(80, depth), None, block_hasher=core.request_block_hasher)
        request.append_output_token_ids(text)
        return int(core.scheduler.kv_cache_manager.get_computed_blocks(request)[1])

    assert found({"alpha": 1}) == 96
    assert found({"alpha": 0.9}) == 64


@pytest.mark.usefixtures("way")
def test_an_aborted_request_leaves_the_others_as_they_are(
    ours: Any, engine_answers: Answers, prompts: list[list[int]]
) -> None:
    engine = ours.llm_engine
    for number in range(2):
        engine.add_request(f"r{number}", {"prompt_token_ids": prompts[number]}, asked(24, {"alpha": 0.95}))
    final = {}
    for step in range(200):
        if step == 9:
            engine.abort_request(["r0"])
        for output in engine.step():
            if output.finished and output.outputs[0].finish_reason == "length":
                final[output.request_id] = list(output.outputs[0].token_ids)
        if not engine.has_unfinished_requests():
            break
    assert final == {"r1": engine_answers(prompts[1], plan_of({"alpha": 0.95}), 24)}


def test_layers_run_only_for_the_rows_that_need_them(ours: Any, prompts: list[list[int]]) -> None:
    """Counted where they run: every layer's rows are those of the two plans."""
    model = ours.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
    counts = [0] * 30
    hooks = []
    for index, layer in enumerate(model.model.layers):

        def count(module: Any, inputs: Any, index: int = index) -> None:
            counts[index] += inputs[0].shape[0]

        hooks.append(layer.register_forward_pre_hook(count))
    depths = [{"alpha": 0.95}, {"alpha": 0.99}]
    try:
        # Another text than before, so that nothing of it is in the prefix cache.
        own = [[*reversed(prompt)] for prompt in prompts[:2]]
        answered(ours, own, [asked(TOKENS, depth) for depth in depths])
    finally:
        for hook in hooks:
            hook.remove()
    plans = [plan_of(depth) for depth in depths]
    read = sum(len(prompt) for prompt in own)
    for index in range(30):
        steps = sum(plan.last_token_of_layer(index, TOKENS) - 1 for plan in plans)
        assert counts[index] == read + steps, index


@pytest.mark.parametrize(
    ("depth", "message"),
    [
        ({"alpha": 1.5}, "alpha is 1.5; expected a number above 0 and at most 1"),
        ({"alpha": 0.9, "min_layers": 22}, "goes to depth 22, for which the server's plan has no repairs"),
        ({"drop_order": [3], "alpha": 0.9}, "takes the ladder of its server"),
        ({"alpha": 0.9, "speed": 2}, "depth_decay has speed"),
        ({"warmup_tokens": 3}, "lacks alpha"),
        ("0.9 or so", "expected JSON"),
        (0.9, "expected an object"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_in_one_line(
    ours: Any, prompts: list[list[int]], depth: Any, message: str
) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError) as refused:
        answered(ours, prompts[:1], asked(4, depth))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(answered(ours, prompts[:1], asked(4))[0]) == 4  # and the engine goes on


def test_stock_models_say_that_they_have_no_depth(stock: Any, prompts: list[list[int]]) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="runs LlamaForCausalLM without it"):
        answered(stock, prompts[:1], asked(4, {"alpha": 0.9}))
