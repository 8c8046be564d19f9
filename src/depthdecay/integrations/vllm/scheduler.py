"""vLLM's scheduler with a prefix cache of prompts: decayed text lacks keys and values, so it is no prefix."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from depthdecay.integrations.vllm.settings import ServerDepth, depth_of


def make_scheduler(*, vllm_config: Any, **settings: Any) -> Any:
    """Named as the scheduler's class: whether it is the asynchronous one is decided after the name is given."""
    kind = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    scheduler = kind(vllm_config=vllm_config, **settings)
    depth = depth_of(vllm_config.model_config.hf_config)
    _cache_prompts_only(scheduler.kv_cache_manager, depth)
    _find_prompts_only(scheduler.kv_cache_manager, depth)
    return scheduler


def _cacheable(request: Any, tokens: int, depth: ServerDepth) -> int:
    params = request.sampling_params
    plan = depth.plan_of(params and params.extra_args)
    return tokens if plan.schedule.final_depth == plan.num_layers else min(tokens, request.num_prompt_tokens)


def _cache_prompts_only(manager: Any, depth: ServerDepth) -> None:
    """All that is ever put into the prefix cache passes `cache_blocks` of the coordinator."""
    cache_blocks = manager.coordinator.cache_blocks

    def capped(request: Any, num_computed_tokens: int) -> None:
        cache_blocks(request, _cacheable(request, num_computed_tokens, depth))

    manager.coordinator.cache_blocks = capped


def _find_prompts_only(manager: Any, depth: ServerDepth) -> None:
    """A decayed request that was put off runs its text again as before, also where another wrote it at full depth."""
    coordinator = manager.coordinator
    get_computed_blocks, find = manager.get_computed_blocks, coordinator.find_longest_cache_hit

    def capped(request: Any) -> Any:
        # The search itself does not see the request.
        coordinator.find_longest_cache_hit = lambda hashes, most: find(hashes, _cacheable(request, most, depth))
        try:
            return get_computed_blocks(request)
        finally:
            coordinator.find_longest_cache_hit = find

    manager.get_computed_blocks = capped
