"""vLLM's scheduler with a prefix cache of prompts: decayed text lacks keys and values, so it is no prefix."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from depthdecay.vllm.settings import KEY, ServerDepth, server_depth


def make_scheduler(*, vllm_config: Any, **settings: Any) -> Any:
    """Named as the scheduler's class: whether it is the asynchronous one is decided after the name is given."""
    kind = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    scheduler = kind(vllm_config=vllm_config, **settings)
    config = vllm_config.model_config.hf_config
    _cache_prompts_only(scheduler, server_depth(getattr(config, KEY, None), config.num_hidden_layers))
    return scheduler


def _cache_prompts_only(scheduler: Any, depth: ServerDepth) -> None:
    """All that is ever put into the prefix cache passes `cache_blocks` of the coordinator."""
    coordinator = scheduler.kv_cache_manager.coordinator
    cache_blocks = coordinator.cache_blocks

    def capped(request: Any, num_computed_tokens: int) -> None:
        params = request.sampling_params
        plan = depth.plan_of(params and params.extra_args)
        if plan.schedule.final_depth < plan.num_layers:
            num_computed_tokens = min(num_computed_tokens, request.num_prompt_tokens)
        cache_blocks(request, num_computed_tokens)

    coordinator.cache_blocks = capped
