"""Several processes: pipeline stages with a repair across them, tensor parallelism, and the API server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import Answers, answered, asked, our_engine

from depthdecay import Plan
from depthdecay.integrations.vllm.settings import server_depth
from depthdecay.plan.file import EMBEDDED_PLAN

SEVERAL = {"distributed_executor_backend": "mp", "enable_prefix_caching": False}


def test_two_pipeline_stages_with_a_repair_across_them(smollm2: str, engine_answers: Answers) -> None:
    """The map of layers 14 and 15 runs in the first stage; the second one starts with a dropped layer."""
    engine = our_engine(smollm2, {"plan": str(EMBEDDED_PLAN)}, pipeline_parallel_size=2, **SEVERAL)
    try:
        prompts = [engine_answers.ids(text) for text in ("The capital of France is", "Once upon a time", "Water boils")]
        depths = [{"alpha": 0.95}, {"alpha": 1}, {"alpha": 0.98}]
        depth = server_depth({"plan": str(EMBEDDED_PLAN)}, 30)
        plans = [depth.plan_of({"depth_decay": asked_for}) for asked_for in depths]
        expected = [engine_answers(prompt, plan, 24) for prompt, plan in zip(prompts, plans, strict=True)]
        assert answered(engine, prompts, [asked(24, asked_for) for asked_for in depths]) == expected
    finally:
        engine.llm_engine.engine_core.shutdown()


def test_two_tensor_parallel_ranks(tiny: str) -> None:
    ours = Answers(tiny)
    engine = our_engine(tiny, {}, tensor_parallel_size=2, skip_tokenizer_init=True, max_model_len=200, **SEVERAL)
    try:
        prompts = [[5, 17, 33, 8, 61], [44, 6, 90], [13, 28, 28, 55, 70, 31]]
        alphas = ["0.9", "1", "0.95"]
        expected = [ours(prompt, Plan.decay(8, alpha), 24) for prompt, alpha in zip(prompts, alphas, strict=True)]
        params = [asked(24, {"alpha": alpha}, detokenize=False) for alpha in alphas]
        assert answered(engine, prompts, params) == expected
        assert expected[0] != ours(prompts[0], Plan.full(8), 24)
    finally:
        engine.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def server(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `depthdecay vllm serve`, started as a user would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    words = ["vllm", "serve", smollm2, "--plan", "default", "--dtype", "float32", "--max-model-len", "256"]
    more = ["--served-model-name", "m", "--port", str(port), "--kv-cache-memory-bytes", str(64 << 20)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "depthdecay", *words, *more],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        )
        try:
            _wait_for(port, process, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait(60)


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    pytest.fail(f"the server did not start: {log.read_text(errors='replace')[-3000:]}")


def test_the_api_server_with_the_openai_client(server: str, engine_answers: Answers) -> None:
    from openai import BadRequestError, OpenAI

    client = OpenAI(base_url=server, api_key="none", timeout=120)
    text = "Once upon a time, in a small village,"

    def complete(**extra: Any) -> str:
        body = {"ignore_eos": True, **extra}
        answer = client.completions.create(model="m", prompt=text, max_tokens=24, temperature=0, extra_body=body)
        return str(answer.choices[0].text)

    depth = server_depth({"plan": str(EMBEDDED_PLAN)}, 30)
    ids = engine_answers.ids(text)

    def expected(plan: Plan) -> str:
        return str(engine_answers.tokenizer.decode(engine_answers(ids, plan, 24)))

    assert complete() == expected(depth.plan)
    asked_for = json.dumps({"alpha": 0.95})
    decayed = complete(vllm_xargs={"depth_decay": asked_for})
    assert decayed == expected(depth.plan_of({"depth_decay": asked_for}))
    assert decayed != complete(vllm_xargs={"depth_decay": '{"alpha": 1}'}) == expected(Plan.full(30))
    with pytest.raises(BadRequestError, match="alpha is 3; expected a number above 0 and at most 1"):
        complete(vllm_xargs={"depth_decay": '{"alpha": 3}'})
    with pytest.raises(BadRequestError, match="leave use_beam_search out"):
        complete(use_beam_search=True)
    assert complete() == expected(depth.plan)  # and the server goes on
