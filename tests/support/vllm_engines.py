"""Shared by the plug-in's tests: vLLM engines, tiny models, and our own engine to compare with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from depthdecay import Plan
from depthdecay.engine.engine import Engine
from depthdecay.integrations.vllm import ARCHITECTURES
from depthdecay.model.load import load

COMMON: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "disable_log_stats": True}
# vLLM's attention on CPUs needs a head size of 32 or more.
TINY: dict[str, Any] = {
    **{"vocab_size": 97, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
WINDOWS = {"mistral": {"sliding_window": 33}}


def save_tiny_model(folder: Path, kind: str, **changes: Any) -> str:
    """A random model whose layers matter, without a tokenizer."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**TINY, **WINDOWS.get(kind, {}), **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.6 if "embed" in name else 0.15)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return str(folder)


def stock_engine(model: str, **settings: Any) -> Any:
    from vllm import LLM

    return LLM(model, **{**COMMON, "kv_cache_memory_bytes": 64 << 20, "max_model_len": 320, **settings})


def our_engine(model: str, depth: dict[str, Any], stock: str = "LlamaForCausalLM", **settings: Any) -> Any:
    overrides = {"architectures": [ARCHITECTURES[stock]], "depth_decay": depth}
    return stock_engine(model, hf_overrides=overrides, **settings)


def asked(tokens: int, depth: Any = None, **settings: Any) -> Any:
    """Greedy, of a fixed length, so that no text ends before its depth has fallen."""
    from vllm import SamplingParams

    extra = None if depth is None else {"depth_decay": depth}
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=extra, **settings)


def answered(engine: Any, prompts: list[list[int]], params: Any) -> list[list[int]]:
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def runner_of(engine: Any) -> Any:
    """The model runner of an engine in this process."""
    return engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


class _Everything:
    def __contains__(self, key: Any) -> bool:
        return True


def use_masked_passes(engine: Any, monkeypatch: Any) -> Any:
    """As on a GPU where graphs of all batches were captured, but the passes themselves are called."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context

    from depthdecay.integrations.vllm import depth_graphs

    def in_full_mode() -> Any:
        slots = next(iter(get_forward_context().slot_mapping.values()))
        descriptor = SimpleNamespace(num_tokens=len(slots))
        return SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode.FULL, batch_descriptor=descriptor)

    monkeypatch.setattr(depth_graphs, "get_forward_context", in_full_mode)
    runner = runner_of(engine)
    made = depth_graphs.DepthGraphs(runner.get_model(), runner.max_num_tokens, runner.device, lambda function: function)
    made.captured = _Everything()  # type: ignore[assignment]
    monkeypatch.setattr(runner, "depth_graphs", made)
    return made


class Answers:
    """Our own engine on the same model, one prompt at a time."""

    def __init__(self, model: str) -> None:
        loaded = load(model, device="cpu")
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self._known: dict[Any, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def __call__(self, prompt: list[int], plan: Plan, tokens: int) -> list[int]:
        key = (tuple(prompt), plan.describe(), tokens)
        if key not in self._known:
            engine = Engine(self.model, None, plan)
            self._known[key] = engine.generate([prompt], tokens, do_sample=False, eos_token_id=-1)[0].token_ids
        return self._known[key]
