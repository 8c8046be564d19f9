"""Refuse what cannot work with depth decay when the server starts, in one line that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig

from depthdecay.errors import DepthDecayError
from depthdecay.integrations.vllm import ARCHITECTURES
from depthdecay.integrations.vllm.releases import GRAPHS_IN_SECOND_RUNNER
from depthdecay.integrations.vllm.settings import depth_of
from depthdecay.plan.identity import config_identity

_WORKER = "depthdecay.integrations.vllm.worker.DepthDecayWorker"
_SCHEDULER = "depthdecay.integrations.vllm.scheduler.make_scheduler"

# For the first model runner: full graphs and no compiler, whose code would hold all layers.
GRAPHS = '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'


class DepthDecayModelConfig(VerifyAndUpdateConfig):
    """vLLM's hook for one architecture, called once before anything is loaded."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        for reason in _reasons(vllm_config):
            raise DepthDecayError(reason)
        model = vllm_config.model_config
        config = model.hf_config
        stock = {ours: theirs for theirs, ours in ARCHITECTURES.items()}[model.architecture]
        depth = depth_of(config)
        depth.check_shape(config_identity(config, stock))
        vllm_config.parallel_config.worker_cls = _WORKER
        if vllm_config.cache_config.enable_prefix_caching or depth.group_wait_ms:
            vllm_config.scheduler_config.scheduler_cls = _SCHEDULER


def _reasons(vllm_config: Any) -> Iterator[str]:
    from vllm import envs
    from vllm.platforms import current_platform

    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
    if not (current_platform.is_cpu() or current_platform.is_cuda_alike()):
        yield "depth decay inside vLLM supports CPUs and GPUs with CUDA or ROCm, not this device"
    if not model.enforce_eager:
        yield from _reasons_against_graphs(vllm_config)
    if model.runner_type != "generate":
        yield "depth decay only generates text; leave --runner and --convert out"
    if vllm_config.speculative_config is not None:
        yield "depth decay does not support speculative decoding; leave --speculative-config out"
    if vllm_config.lora_config is not None:
        yield "depth decay does not support LoRA, which expects all rows in every layer; leave --enable-lora out"
    if vllm_config.kv_transfer_config is not None:
        yield (
            "depth decay does not write keys and values of dropped layers, so a cache must not leave this engine; "
            "leave --kv-transfer-config and --kv-offloading-size out"
        )
    if model.enable_sleep_mode:
        yield "depth decay's maps would be lost while the server sleeps; leave --enable-sleep-mode out"
    if parallel.use_ubatching:
        yield "depth decay does not support micro-batches; leave --enable-dbo and --ubatch-size out"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "depth decay does not support context parallelism; leave its sizes at 1"
    if getattr(cache, "kv_sharing_fast_prefill", False):
        yield "depth decay runs prompts in all layers; leave --kv-sharing-fast-prefill out"
    if envs.VLLM_USE_RUST_FRONTEND:
        yield "a request's depth is checked in vLLM's Python front end; leave VLLM_USE_RUST_FRONTEND out"
    if parallel.worker_cls not in ("auto", _WORKER):
        yield f"depth decay needs its own worker, but --worker-cls is {parallel.worker_cls}; leave it out"
    if cache.enable_prefix_caching and scheduler.scheduler_cls not in (None, _SCHEDULER):
        yield (
            "a prefix cache must not hold decayed text, which the scheduler of --scheduler-cls does not prevent; "
            "leave it out, or add --no-enable-prefix-caching"
        )
    if scheduler.scheduler_cls not in (None, _SCHEDULER) and depth_of(model.hf_config).group_wait_ms:
        yield "group_wait_ms needs depth decay's scheduler; leave --scheduler-cls out"


def _reasons_against_graphs(vllm_config: Any) -> Iterator[str]:
    """The second runner takes vLLM's compiler and graphs as they come; the first one graphs without the compiler."""
    from vllm import envs
    from vllm.config import CompilationMode, CUDAGraphMode

    compilation = vllm_config.compilation_config
    mode, graphs = compilation.mode, compilation.cudagraph_mode
    # None: vLLM decides after this, for compilation and for full graphs of decode batches.
    if vllm_config.use_v2_model_runner:
        if not GRAPHS_IN_SECOND_RUNNER:
            yield (
                "in this release of vLLM, graphs by depth are written for the first model runner; set "
                "VLLM_USE_V2_MODEL_RUNNER=0, or add --enforce-eager"
            )
        if mode not in (None, CompilationMode.NONE, CompilationMode.VLLM_COMPILE):
            yield f"depth decay cannot run in a model that is compiled as a whole; use mode 0 or 3, not {mode.name}"
        if graphs not in (None, CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY):
            yield (
                f"depth decay replays full CUDA graphs of decode batches, which cudagraph_mode {graphs.name} does not "
                "have; use FULL_AND_PIECEWISE or FULL_DECODE_ONLY, or --enforce-eager"
            )
        if envs.VLLM_USE_BREAKABLE_CUDAGRAPH:
            yield "breakable CUDA graphs would replay the first step's depth; unset VLLM_USE_BREAKABLE_CUDAGRAPH"
    elif mode != CompilationMode.NONE or graphs != CUDAGraphMode.FULL_DECODE_ONLY:
        yield (
            "depth decay chooses layers in each step, which compiled code and CUDA graphs of vLLM's first model runner "
            f"would freeze at the first step's depth; add --enforce-eager, or --compilation-config '{GRAPHS}' for "
            "graphs by depth"
        )
