"""vLLM's worker; its first model runner passes the depth of each row to the model."""

from __future__ import annotations

from typing import Any

from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform

from depthdecay.integrations.vllm.attention import attend_with, check_blocks
from depthdecay.integrations.vllm.depth_graphs import DepthGraphs, install_depth_graphs
from depthdecay.integrations.vllm.layer_rows import Scheduled, Step
from depthdecay.integrations.vllm.layers import DepthStep
from depthdecay.integrations.vllm.metrics import mark_step
from depthdecay.integrations.vllm.settings import ServerDepth
from depthdecay.plan.plan import Plan

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class DepthDecayWorker(PlatformWorker):
    """The second runner asks the model for depths itself (`model_state`), and only needs its graphs."""

    def init_device(self) -> None:
        super().init_device()
        if not self.use_v2_model_runner:
            _tell_depths(self.model_runner)

    def load_model(self, **settings: Any) -> None:
        super().load_model(**settings)
        runner = self.model_runner
        runner.get_model().tell_of_unseen_weights()
        if not self.use_v2_model_runner:
            _tell_of_dummy_runs(runner)
            if self.vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
                runner.depth_graphs = install_depth_graphs(runner)
        # On CPUs without compilation, vLLM skips the dummy run that creates these.
        if not self.use_v2_model_runner and runner.intermediate_tensors is None and _receives_states():
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        check_blocks(self.model_runner.attn_groups)
        if self.use_v2_model_runner:
            from depthdecay.integrations.vllm.second_runner_graphs import install_second_runner_graphs

            installed = install_second_runner_graphs(self.model_runner)
            self.model_runner.depth_graphs = None if installed is None else installed.graphs

    def compile_or_warm_up_model(self) -> Any:
        told = super().compile_or_warm_up_model()
        graphs: DepthGraphs | None = getattr(self.model_runner, "depth_graphs", None)
        if graphs is not None:
            graphs.steps.clear()  # of warm-ups, which are larger than any graph
        return told

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        graphs: DepthGraphs | None = getattr(self.model_runner, "depth_graphs", None)
        if graphs is not None:
            mark_step(output, graphs.last_step, graphs.last_tokens)
        return output

    def depth_steps(self) -> dict[str, int]:
        """Counts of steps by kind, replayed from graphs or not, for `LLM.collective_rpc`."""
        graphs = getattr(self.model_runner, "depth_graphs", None)
        return {} if graphs is None else dict(graphs.steps)


def _receives_states() -> bool:
    from vllm.distributed import get_pp_group

    return not get_pp_group().is_first_rank


def _tell_depths(runner: Any) -> None:
    """`_model_forward` is the runner's hook for such changes; its class is chosen inside vLLM's worker."""
    forward = runner._model_forward

    runner.depth_graphs = None

    def with_depths(*inputs: Any, **named: Any) -> Any:
        depth_step = _depth_step(runner)
        graphs: DepthGraphs | None = runner.depth_graphs
        replay = None if graphs is None else graphs.choose(depth_step.step)
        return replay(*inputs, **named) if replay else forward(*inputs, **named, depth_step=depth_step)

    runner._model_forward = with_depths


def _tell_of_dummy_runs(runner: Any) -> None:
    """They bypass `_model_forward`, also with attention, when kernels are warmed up or captured."""
    dummy_run, model = runner._dummy_run, runner.get_model()

    def told(*settings: Any, **named: Any) -> Any:
        model.in_dummy_run = True
        try:
            return dummy_run(*settings, **named)
        finally:
            model.in_dummy_run = False

    runner._dummy_run = told


def _plan_of(state: Any, depth: ServerDepth) -> Plan:
    """Kept with the runner's state of the request: comparing its settings again costs time in every step."""
    plan: Plan | None = getattr(state, "depth_plan", None)
    if plan is None:
        plan = state.depth_plan = depth.plan_of(state.sampling_params.extra_args)
    return plan


def _depth_step(runner: Any) -> DepthStep:
    batch, depth = runner.input_batch, runner.model.depth
    starts = runner.query_start_loc.np[: batch.num_reqs + 1].tolist()
    scheduled = [
        Scheduled(
            computed=int(batch.num_computed_tokens_cpu[index]),
            tokens=starts[index + 1] - starts[index],
            prompt=int(batch.num_prompt_tokens[index]),
            plan=_plan_of(runner.requests[request], depth),
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
