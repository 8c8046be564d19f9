"""The depths of a step for vLLM's second model runner, which asks the model for the state it keeps about requests.

That runner needs a GPU. On a CPU, tests call this with made-up batches and compare its methods with the runner's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from depthdecay.integrations.vllm.attention import attend_with
from depthdecay.integrations.vllm.layer_rows import Scheduled, Step
from depthdecay.integrations.vllm.layers import DepthStep
from depthdecay.plan.plan import Plan


class DepthDecayModelState(DefaultModelState):
    # Set by the worker where graphs by depth are captured.
    depth_graphs: Any = None

    def __init__(self, *settings: Any, **named: Any) -> None:
        super().__init__(*settings, **named)
        self._plans: dict[str, Plan] = {}
        self._prompts: dict[str, int] = {}
        self._attend: Any = None

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        super().add_request(req_index, new_req_data)
        self._plans[new_req_data.req_id] = self._plan_of(new_req_data)
        self._prompts[new_req_data.req_id] = len(new_req_data.prompt_token_ids or ())

    def remove_request(self, req_id: str) -> None:
        super().remove_request(req_id)
        self._plans.pop(req_id, None)
        self._prompts.pop(req_id, None)

    def _plan_of(self, new_req_data: Any) -> Plan:
        params = new_req_data.sampling_params
        return self.model.depth.plan_of(params and params.extra_args)

    def any_decayed(self, scheduler_output: Any) -> bool:
        """Whether a row of the next step runs fewer than all layers; asked before the runner knows its new requests."""
        tokens, cached = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_cached_reqs
        parts = [
            (new.num_computed_tokens + tokens[new.req_id] - len(new.prompt_token_ids), self._plan_of(new))
            for new in scheduler_output.scheduled_new_reqs
        ]
        parts += [
            (computed + tokens[request] - self._prompts[request], self._plans[request])
            for request, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            if request in self._plans
        ]
        # The last row of a request is its shallowest.
        return any(plan.depth(max(0, last)) < plan.num_layers for last, plan in parts)

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: Any,
        block_tables: Any,
        slot_mappings: Any,
        attn_groups: Any,
        *settings: Any,
        **named: Any,
    ) -> dict[str, Any]:
        """Keeps what attention to some of the rows will need; the runner calls this before `prepare_inputs`."""
        tokens = input_batch.num_tokens
        self._attend = attend_with(
            attn_groups, list(block_tables), [slots[:tokens] for slots in slot_mappings], self.device
        )
        if self.depth_graphs is not None and self.depth_graphs.capturing_mixed:
            # A graph for mixed batches must serve one prompt that fills it. Only the longest query is read from here.
            input_batch = replace(input_batch, num_scheduled_tokens=np.array([tokens], dtype=np.int32))
        return super().prepare_attn(
            input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, *settings, **named
        )

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        inputs = super().prepare_inputs(input_batch, req_states)
        full = self.model.depth.full_plan  # of the requests of a dummy run
        scheduled = [
            Scheduled(
                computed=int(input_batch.num_computed_tokens_np[index]),
                tokens=int(input_batch.num_scheduled_tokens[index]),
                prompt=int(req_states.prompt_len.np[input_batch.idx_mapping_np[index]]),
                plan=self._plans.get(request, full),
            )
            for index, request in enumerate(input_batch.req_ids)
        ]
        step = Step(scheduled, self.model.depth.plan.ladder, self.device)
        graphs = self.depth_graphs
        if graphs is None:
            return {**inputs, "depth_step": DepthStep(step, self._attend)}
        run = graphs.prepare(step, input_batch.num_tokens_after_padding)
        return {**inputs, "depth_step": DepthStep(step, self._attend, run, graphs.count_without)}
