"""vLLM's scheduler, which keeps decayed text out of the prefix cache and may admit new requests in groups.

Decayed text lacks keys and values, so it cannot serve as a prefix. And all rows of a batch cost what the deepest one
costs, so requests that start together are cheaper than the same requests one after the other.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from depthdecay.integrations.vllm.settings import ServerDepth, depth_of


def make_scheduler(*, vllm_config: Any, **settings: Any) -> Any:
    """Configured as the scheduler's class: vLLM decides on async scheduling only after the class is named."""
    kind = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    scheduler = kind(vllm_config=vllm_config, **settings)
    depth = depth_of(vllm_config.model_config.hf_config)
    if vllm_config.cache_config.enable_prefix_caching:
        _cache_prompts_only(scheduler.kv_cache_manager, depth)
        _find_prompts_only(scheduler.kv_cache_manager, depth)
    if depth.group_wait_ms:
        _group_new_requests(scheduler, depth)
    return scheduler


def _cacheable(request: Any, tokens: int, depth: ServerDepth) -> int:
    params = request.sampling_params
    plan = depth.plan_of(params and params.extra_args)
    return tokens if plan.schedule.final_depth == plan.num_layers else min(tokens, request.num_prompt_tokens)


def _cache_prompts_only(manager: Any, depth: ServerDepth) -> None:
    """Everything enters the prefix cache through `cache_blocks` of the coordinator."""
    cache_blocks = manager.coordinator.cache_blocks

    def capped(request: Any, num_computed_tokens: int) -> None:
        cache_blocks(request, _cacheable(request, num_computed_tokens, depth))

    manager.coordinator.cache_blocks = capped


def _find_prompts_only(manager: Any, depth: ServerDepth) -> None:
    """A preempted decayed request computes its text again, even if another one wrote the same text at full depth."""
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


def _group_new_requests(scheduler: Any, depth: ServerDepth) -> None:
    """Hold new requests while they would deepen the batch, until the first of them has waited for `group_wait_ms`."""
    schedule = scheduler.schedule

    def grouped(*settings: Any, **named: Any) -> Any:
        before = scheduler._pause_state
        if before != PauseState.UNPAUSED or not should_hold(scheduler, depth, time.time()):
            return schedule(*settings, **named)
        scheduler._pause_state = PauseState.PAUSED_NEW
        try:
            return schedule(*settings, **named)
        finally:
            scheduler._pause_state = before

    scheduler.schedule = grouped


def should_hold(scheduler: Any, depth: ServerDepth, now: float) -> bool:
    """Only where all running rows are decayed: to a batch that has a deep row, another one adds nothing."""
    waiting = list(scheduler.waiting)
    if not waiting or not scheduler.running:
        return False
    # One that was preempted has already begun, and holds nobody up.
    if any(request.status == RequestStatus.PREEMPTED for request in waiting):
        return False
    if now - min(request.arrival_time for request in waiting) >= depth.group_wait_ms / 1e3:
        return False
    return all(_is_decayed(request, depth) for request in scheduler.running)


def _is_decayed(request: Any, depth: ServerDepth) -> bool:
    params = request.sampling_params
    plan = depth.plan_of(params and params.extra_args)
    return plan.depth(max(0, request.num_computed_tokens - request.num_prompt_tokens + 1)) < plan.num_layers
