"""On a GPU: decayed text from CUDA graphs by depth is our engine's, in 32 bits, alone and in mixed batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm_engines import Answers, answered, asked, our_engine, save_tiny_model

from depthdecay import Plan

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PROMPTS = [[5, 17, 33, 8, 61, 12, 40, 3, 77, 21, 9] * 3, [44, 6, 90], [13, 28, 28, 55, 70, 31, 66], [7, 8, 9]]
ALPHAS = ["0.9", "1", "0.97", "0.9"]
TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-llama-gpu"), "llama")


@pytest.fixture(scope="module")
def captured(folder: str) -> Any:
    import json
    import os

    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    from depthdecay.integrations.vllm.refusals import GRAPHS

    return our_engine(
        folder,
        {"alpha": "0.9"},
        skip_tokenizer_init=True,
        max_model_len=200,
        enforce_eager=False,
        attention_backend="TRITON_ATTN",  # the one that takes 32 bits
        compilation_config={**json.loads(GRAPHS), "cudagraph_capture_sizes": [1, 2, 4, 8, 64]},
    )


def test_text_from_graphs_is_our_engines(captured: Any, folder: str) -> None:
    answers = Answers(folder)
    expected = [answers(prompt, Plan.decay(8, alpha), TOKENS) for prompt, alpha in zip(PROMPTS, ALPHAS, strict=True)]
    params = [asked(TOKENS, {"alpha": alpha}, detokenize=False) for alpha in ALPHAS]
    assert answered(captured, PROMPTS, params) == expected
    alone = [answered(captured, [prompt], [param])[0] for prompt, param in zip(PROMPTS, params, strict=True)]
    assert alone == expected
    steps = captured.collective_rpc("depth_steps")[0]
    assert steps["decayed, replayed"] >= 0.95 * sum(steps.values()) - steps["full depth, replayed"], steps


def test_requests_that_come_one_after_the_other(captured: Any, folder: str) -> None:
    """Each joins while others decode, so that batches hold prompts beside decayed rows."""
    answers = Answers(folder)
    engine = captured.llm_engine
    final: dict[str, list[int]] = {}
    for step in range(200):
        if step % 5 == 0 and step // 5 < len(PROMPTS):
            number = step // 5
            params = asked(TOKENS, {"alpha": ALPHAS[number]}, detokenize=False)
            engine.add_request(str(number), {"prompt_token_ids": PROMPTS[number]}, params)
        for output in engine.step():
            if output.finished:
                final[output.request_id] = list(output.outputs[0].token_ids)
        if len(final) == len(PROMPTS):
            break
    for number, (prompt, alpha) in enumerate(zip(PROMPTS, ALPHAS, strict=True)):
        assert final[str(number)] == answers(prompt, Plan.decay(8, alpha), TOKENS), number
