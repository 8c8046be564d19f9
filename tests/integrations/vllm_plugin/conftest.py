"""vLLM engines for the tests, each started once: starting takes longer than all requests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import Answers, our_engine, save_tiny_model, stock_engine, use_masked_passes

from depthdecay.integrations.vllm import is_installed
from depthdecay.model import load as models
from depthdecay.plan.file import EMBEDDED_PLAN

# Only then: without vLLM, these files are collected with all other tests.
if is_installed():
    # One thread, not pinned: pinned threads that wait for each other on a busy machine take minutes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

needs_vllm = pytest.mark.skipif(not is_installed(), reason="vLLM is not installed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and not item.path.name.startswith("test_plain_"):
            item.add_marker(needs_vllm)


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The embedded model as a folder, in 32 bits."""
    import torch

    from depthdecay.model.gguf_cache import converted

    return str(converted(models.embedded_file(), torch.float32, lambda message: None)[0])


@pytest.fixture(scope="session")
def engine_answers(smollm2: str) -> Answers:
    """Our own engine's answers, which every decayed text of vLLM is compared with."""
    return Answers(smollm2)


@pytest.fixture(scope="session")
def stock(smollm2: str) -> Any:
    return stock_engine(smollm2)


@pytest.fixture(scope="session")
def ours(smollm2: str) -> Any:
    """With the embedded model's plan and repair maps; small blocks, a cache for 13 of them, chunked prefill of 64."""
    blocks = 14 * 32 * 30 * 2 * 3 * 64 * 4
    return our_engine(
        smollm2,
        {"plan": str(EMBEDDED_PLAN)},
        block_size=32,
        kv_cache_memory_bytes=blocks,
        max_model_len=320,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
    )


@pytest.fixture
def graphs(ours: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    return use_masked_passes(ours, monkeypatch)


@pytest.fixture(params=["row by row", "masked"])
def way(request: pytest.FixtureRequest) -> str:
    """Each layer on the rows that need it, or all rows masked, as graphs run them."""
    if request.param == "masked":
        request.getfixturevalue("graphs")
    return str(request.param)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-llama"), "llama")
