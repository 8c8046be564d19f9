"""The same for vLLM's second model runner, which asks the model for the state it keeps about requests.

Written against the source of the pinned version. That runner needs a GPU, and this has never run inside it: tests call
it with made-up batches, and hold its methods to the runner's.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from depthdecay.integrations.vllm.attention import attend_with
from depthdecay.integrations.vllm.layer_rows import Scheduled, Step
from depthdecay.integrations.vllm.layers import DepthStep
from depthdecay.plan.plan import Plan


class DepthDecayModelState(DefaultModelState):
    def __init__(self, *settings: Any, **named: Any) -> None:
        super().__init__(*settings, **named)
        self._plans: dict[str, Plan] = {}
        self._attend: Any = None

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        super().add_request(req_index, new_req_data)
        params = new_req_data.sampling_params
        self._plans[new_req_data.req_id] = self.model.depth.plan_of(params and params.extra_args)

    def remove_request(self, req_id: str) -> None:
        super().remove_request(req_id)
        self._plans.pop(req_id, None)

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
        return super().prepare_attn(
            input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, *settings, **named
        )

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        inputs = super().prepare_inputs(input_batch, req_states)
        full = self.model.depth.full_plan  # of the made-up requests of a dummy run
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
        return {**inputs, "depth_step": DepthStep(step, self._attend)}
