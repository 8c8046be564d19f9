"""On a GPU: text from CUDA graphs by depth is our engine's in 32 bits, in mixed batches, with preemption and aborts.

The second model runner is tested, or the first one with VLLM_USE_V2_MODEL_RUNNER=0: vLLM reads that once per process.
"""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

import pytest
import torch

# vLLM's Triton attention multiplies in TF32 unless Triton's default for float32 is another; read at the first import.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(tempfile.gettempdir(), "triton-ieee"))

from vllm_engines import Answers, answered, asked, our_engine, save_tiny_model, stock_engine

from depthdecay import Plan

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PROMPTS = [[5, 17, 33, 8, 61, 12, 40, 3, 77, 21, 9] * 3, [44, 6, 90], [13, 28, 28, 55, 70, 31, 66], [7, 8, 9]]
ALPHAS = ["0.9", "1", "0.97", "0.9"]
TOKENS = 24
# FlashAttention takes 16 bits only.
COMMON: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 200, "attention_backend": "TRITON_ATTN"}
BLOCK = 16
FIRST_RUNNER = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-llama-gpu"), "llama")


@pytest.fixture(scope="module")
def answers(folder: str) -> Answers:
    return Answers(folder)


@pytest.fixture(scope="module")
def captured(folder: str) -> Any:
    from depthdecay.integrations.vllm.refusals import GRAPHS

    graphs = {**(json.loads(GRAPHS) if FIRST_RUNNER else {}), "cudagraph_capture_sizes": [1, 2, 4, 8, 64]}
    layer = 2 * BLOCK * 2 * 32 * 4  # keys and values of a block, two heads of 32 in 32 bits
    return our_engine(
        folder,
        {"alpha": "0.9"},
        enforce_eager=False,
        block_size=BLOCK,
        kv_cache_memory_bytes=16 * 8 * layer,  # 16 blocks: too few for six long requests
        enable_prefix_caching=True,
        compilation_config=graphs,
        **COMMON,
    )


def plan(alpha: str) -> Plan:
    return Plan.decay(8, alpha)


def steps_of(engine: Any) -> dict[str, int]:
    return dict(engine.collective_rpc("depth_steps")[0])


def test_text_from_graphs_is_our_engines(captured: Any, answers: Answers) -> None:
    expected = [answers(prompt, plan(alpha), TOKENS) for prompt, alpha in zip(PROMPTS, ALPHAS, strict=True)]
    params = [asked(TOKENS, {"alpha": alpha}, detokenize=False) for alpha in ALPHAS]
    assert answered(captured, PROMPTS, params) == expected
    alone = [answered(captured, [prompt], [param])[0] for prompt, param in zip(PROMPTS, params, strict=True)]
    assert alone == expected
    steps = steps_of(captured)
    assert steps["decayed, replayed"] > TOKENS
    assert steps.get("decayed, no graph", 0) == 0, steps


def test_full_depth_is_stock_vllm(captured: Any, folder: str) -> None:
    stock = stock_engine(folder, enforce_eager=False, **COMMON)
    full = asked(TOKENS, {"alpha": 1}, detokenize=False)
    assert answered(captured, PROMPTS, full) == answered(stock, PROMPTS, asked(TOKENS, detokenize=False))


def test_requests_that_come_one_after_the_other_and_one_that_is_aborted(captured: Any, answers: Answers) -> None:
    """Each joins while others decode, so that batches hold prompts next to decayed rows."""
    engine = captured.llm_engine
    final: dict[str, list[int]] = {}
    for step in range(200):
        if step % 5 == 0 and step // 5 < len(PROMPTS):
            number = step // 5
            params = asked(TOKENS, {"alpha": ALPHAS[number]}, detokenize=False)
            engine.add_request(str(number), {"prompt_token_ids": PROMPTS[number]}, params)
        if step == 3:
            engine.add_request("aborted", {"prompt_token_ids": PROMPTS[1]}, asked(100, detokenize=False))
        if step == 12:
            engine.abort_request(["aborted"])
        for output in engine.step():
            if output.finished and output.request_id != "aborted":
                final[output.request_id] = list(output.outputs[0].token_ids)
        if len(final) == len(PROMPTS):
            break
    for number, (prompt, alpha) in enumerate(zip(PROMPTS, ALPHAS, strict=True)):
        assert final[str(number)] == answers(prompt, plan(alpha), TOKENS), number


def test_preempted_requests_end_as_if_undisturbed(captured: Any, answers: Answers) -> None:
    """Six requests of 66 tokens in 16 blocks of 16."""
    scheduler = captured.llm_engine.engine_core.engine_core.scheduler
    preempt, preempted = scheduler._preempt_request, []

    def watched(request: Any, *more: Any, **named: Any) -> None:
        preempted.append(request.num_output_tokens)
        preempt(request, *more, **named)

    scheduler._preempt_request = watched
    try:
        prompts = [[3 + number, *range(10, 35)] for number in range(6)]
        alphas = ["0.9", "1", "0.95"] * 2
        got = answered(captured, prompts, [asked(40, {"alpha": alpha}, detokenize=False) for alpha in alphas])
    finally:
        scheduler._preempt_request = preempt
    assert max(preempted) > 1
    assert got == [answers(prompt, plan(alpha), 40) for prompt, alpha in zip(prompts, alphas, strict=True)]


def test_the_prefix_cache_holds_no_decayed_text(captured: Any) -> None:
    prompt = list(range(20, 20 + 2 * BLOCK))
    text = answered(captured, [prompt], asked(40, {"alpha": "0.9"}, detokenize=False))[0]
    again = captured.generate(
        [{"prompt_token_ids": [*prompt, *text]}], asked(2, {"alpha": 1}, detokenize=False), use_tqdm=False
    )[0]
    assert again.num_cached_tokens == 2 * BLOCK
