"""vLLM's worker, whose first model runner tells the model how deep each row goes."""

from __future__ import annotations

from typing import Any

from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform

from depthdecay.integrations.vllm.attention import attend_with, check_blocks
from depthdecay.integrations.vllm.layer_rows import Scheduled, Step
from depthdecay.integrations.vllm.layers import DepthStep

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class DepthDecayWorker(PlatformWorker):
    """The second runner asks the model itself (`model_state`), so there is nothing to add for it."""

    def init_device(self) -> None:
        super().init_device()
        if not self.use_v2_model_runner:
            _tell_depths(self.model_runner)

    def load_model(self, **settings: Any) -> None:
        super().load_model(**settings)
        runner = self.model_runner
        runner.get_model().tell_of_unseen_weights()
        # The dummy run that makes these is left out on CPUs where nothing is compiled, as with us it never is.
        if not self.use_v2_model_runner and runner.intermediate_tensors is None and _receives_states():
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        check_blocks(self.model_runner.attn_groups)


def _receives_states() -> bool:
    from vllm.distributed import get_pp_group

    return not get_pp_group().is_first_rank


def _tell_depths(runner: Any) -> None:
    """`_model_forward` is the runner's place for such changes; its class is chosen within vLLM's worker."""
    forward = runner._model_forward

    def with_depths(*inputs: Any, **named: Any) -> Any:
        return forward(*inputs, **named, depth_step=_depth_step(runner))

    runner._model_forward = with_depths


def _depth_step(runner: Any) -> DepthStep:
    batch, depth = runner.input_batch, runner.model.depth
    starts = runner.query_start_loc.np[: batch.num_reqs + 1].tolist()
    scheduled = [
        Scheduled(
            computed=int(batch.num_computed_tokens_cpu[index]),
            tokens=starts[index + 1] - starts[index],
            prompt=int(batch.num_prompt_tokens[index]),
            plan=depth.plan_of(runner.requests[request].sampling_params.extra_args),
        )
        for index, request in enumerate(batch.req_ids)
    ]
    slots = get_forward_context().slot_mapping
    attend = attend_with(
        runner.attn_groups,
        [batch.block_table[gid].get_device_tensor(batch.num_reqs) for gid in range(len(runner.attn_groups))],
        [slots[groups[0].layer_names[0]] for groups in runner.attn_groups],
        runner.device,
    )
    return DepthStep(Step(scheduled, depth.plan.ladder, runner.device), attend)
