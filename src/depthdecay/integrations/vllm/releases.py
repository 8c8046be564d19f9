"""What differs between the supported releases of vLLM, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import wraps
from typing import Any

import vllm

IS_0_26 = str(vllm.__version__).startswith("0.26.")
# The graph manager of the second model runner is another one in 0.32.
GRAPHS_IN_SECOND_RUNNER = IS_0_26


def watch_beam_search(check: Callable[[Any], None]) -> None:
    """Call `check` with the model's configuration before beam search splits into requests."""
    if IS_0_26:
        _watch_beam_search_of_0_26(check)
        return
    from vllm.sampling_params import BeamSearchParams
    from vllm.v1.engine.input_processor import InputProcessor

    resolve = InputProcessor.resolve_watermarking

    @wraps(resolve)
    def checked(self: Any, params: Any) -> Any:
        """The only method of the processor that beam search calls."""
        if isinstance(params, BeamSearchParams):
            check(self.model_config)
        return resolve(self, params)

    InputProcessor.resolve_watermarking = checked


def _watch_beam_search_of_0_26(check: Callable[[Any], None]) -> None:
    """Its input processor sees only the single requests."""
    from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin

    offline, online = BeamSearchOfflineMixin.beam_search, BeamSearchOnlineMixin.beam_search

    @wraps(offline)
    def checked(self: Any, *inputs: Any, **named: Any) -> Any:
        check(self.model_config)
        return offline(self, *inputs, **named)

    @wraps(online)
    async def checked_online(self: Any, *inputs: Any, **named: Any) -> AsyncIterator[Any]:
        check(self.engine_client.model_config)
        async for output in online(self, *inputs, **named):
            yield output

    BeamSearchOfflineMixin.beam_search = checked
    BeamSearchOnlineMixin.beam_search = checked_online


def configure_logging(arguments: Any) -> None:
    """From the flags of `vllm serve`; 0.26 has none and reads the environment."""
    if not IS_0_26:
        from vllm.logger import configure_logging_from_args

        configure_logging_from_args(arguments)


def run_at_most(scheduler: Any, requests: int) -> None:
    """Run at most so many at a time in an engine that was started for more."""
    name = "max_num_running_reqs" if IS_0_26 else "max_num_active_reqs"
    if not hasattr(scheduler, name):
        raise AttributeError(f"vLLM's scheduler has no {name}")
    setattr(scheduler, name, requests)


def build_metadata(group: Any, about: Any) -> Any:
    """The attention metadata of a group of layers for a batch."""
    if IS_0_26:
        return group.get_metadata_builder().build(common_prefix_len=0, common_attn_metadata=about)
    return group.build_metadata(about)


def split_block_size(group: Any) -> int | None:
    """The size that attention splits cache blocks into; 0.26 splits its block tables earlier."""
    return None if IS_0_26 else group.kernel_block_size
