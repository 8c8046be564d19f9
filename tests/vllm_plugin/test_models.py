"""Every architecture that the plug-in adds, as tiny random models; and what is refused before anything is loaded."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest

from depthdecay import Plan
from depthdecay.cli.options import DEFAULT_PLAN
from depthdecay.vllm import ARCHITECTURES

from .engines import Answers, answered, asked, our_engine, save_tiny_model

PROMPTS = [[5, 17, 33, 8, 61, 12, 40, 3, 77, 21, 9] * 3, [44, 6, 90], [13, 28, 28, 55, 70, 31, 66]]
ALPHAS = ["0.9", "1", "0.97"]


@pytest.mark.parametrize("stock", ARCHITECTURES)
def test_each_architecture_says_what_our_engine_says(stock: str, tmp_path: Path) -> None:
    kind = stock.removesuffix("ForCausalLM").lower()
    folder = save_tiny_model(tmp_path, kind)
    answers = Answers(folder)
    engine = our_engine(folder, {}, stock, skip_tokenizer_init=True, max_model_len=200)
    expected = [answers(prompt, Plan.decay(8, alpha), 24) for prompt, alpha in zip(PROMPTS, ALPHAS, strict=True)]
    params = [asked(24, {"alpha": alpha}, detokenize=False) for alpha in ALPHAS]
    assert answered(engine, PROMPTS, params) == expected
    assert expected[0] != answers(PROMPTS[0], Plan.full(8), 24)
    del engine
    gc.collect()


def configured(model: str, **settings: Any) -> Any:
    """As an engine is configured, without starting it."""
    from vllm.engine.arg_utils import EngineArgs

    depth = settings.pop("depth_decay", {})
    overrides = {"architectures": ["DepthDecayLlamaForCausalLM"], "depth_decay": depth}
    given = {"enforce_eager": True, "hf_overrides": overrides, "dtype": "float32", "skip_tokenizer_init": True}
    return EngineArgs(model, **{**given, **settings}).create_engine_config()


def test_a_server_is_given_our_worker_and_where_prefixes_are_cached_our_scheduler(tiny: str) -> None:
    config = configured(tiny)
    assert config.parallel_config.worker_cls == "depthdecay.vllm.worker.DepthDecayWorker"
    assert config.scheduler_config.scheduler_cls == "depthdecay.vllm.scheduler.make_scheduler"
    assert configured(tiny, enable_prefix_caching=False).scheduler_config.scheduler_cls is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enforce_eager": False}, "freeze at the first step's depth; add --enforce-eager"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "leave --speculative-config out"),
        ({"enable_lora": True}, "leave --enable-lora out"),
        ({"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}, "--worker-cls is vllm.v1.worker.cpu_worker.CPUWorker"),
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "must not hold decayed text"),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "a cache must not leave this engine",
        ),
        ({"depth_decay": {"plan": str(DEFAULT_PLAN)}}, "the plan is for 30 layers, but the model has 8"),
        ({"depth_decay": {"alpha": 2}}, "alpha is 2"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(
    tiny: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        configured(tiny, **settings)


def test_a_plan_with_maps_for_other_weights_is_refused_when_weights_are_loaded(smollm2: str, tmp_path: Path) -> None:
    """The same shape with other numbers, as another training run would have."""
    import shutil

    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    shutil.copytree(smollm2, other)
    weights = load_file(other / "model.safetensors")
    save_file({name: -tensor for name, tensor in weights.items()}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="other weights"):
        our_engine(str(other), {"plan": str(DEFAULT_PLAN)})
