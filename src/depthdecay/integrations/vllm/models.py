"""The models that the plug-in adds: vLLM's own classes, whose layers run only for the rows that need them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.logger import init_logger
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from depthdecay.errors import DepthDecayError
from depthdecay.integrations.vllm.attention import BACKENDS
from depthdecay.integrations.vllm.layers import DepthStep, run_layers
from depthdecay.integrations.vllm.settings import depth_of
from depthdecay.model.repairs import Repairs
from depthdecay.plan.fingerprint import sample_tensor
from depthdecay.plan.identity import config_identity
from depthdecay.plan.plan import Plan

logger = init_logger("vllm.depthdecay")


class DepthDecayMixin:
    """Precedes one of vLLM's classes in the bases. At full depth that class runs unchanged."""

    architecture: str

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        config = vllm_config.model_config.hf_config
        self.depth = depth_of(config)
        self._check_attention()
        self._weights_seen = False
        # Set by the worker: dummy rows have no depth.
        self.in_dummy_run = False
        found = Repairs.of_plan(self.depth.plan)
        if found is not None:
            found.check(self.depth.plan, config.hidden_size)
        self.repairs = Repairs() if found is None else self._own(found, vllm_config)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        depth_step: DepthStep | None = None,
    ) -> Any:
        if depth_step is None and not self.in_dummy_run:
            _refuse_to_guess()
        if depth_step is not None and depth_step.on_run is not None:
            depth_step.on_run(depth_step.step)
        if depth_step is None or depth_step.step.is_full:
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)  # type: ignore[misc]
        if depth_step.run_instead is not None:
            return depth_step.run_instead(input_ids, positions, intermediate_tensors, inputs_embeds)
        inner = self.model  # type: ignore[attr-defined]
        return run_layers(inner, depth_step, self.repairs, input_ids, positions, intermediate_tensors, inputs_embeds)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        self._weights_seen = True
        watched = _WatchedWeights(self.depth.plan)
        loaded = super().load_weights(watched.passing(weights))  # type: ignore[misc]
        config = self.config  # type: ignore[attr-defined]
        watched.check(config_identity(config, self.architecture), self.depth.allow_other_weights)
        return loaded

    def tell_of_unseen_weights(self) -> None:
        """Some formats, such as sharded_state, bypass `load_weights`."""
        if not self._weights_seen:
            shape = config_identity(self.config, self.architecture)  # type: ignore[attr-defined]
            _WatchedWeights(self.depth.plan).check(shape, self.depth.allow_other_weights)

    def get_model_state_cls(self) -> type:
        """Only the second model runner calls this."""
        from depthdecay.integrations.vllm.model_state import DepthDecayModelState

        return DepthDecayModelState

    def _check_attention(self) -> None:
        inner = self.model  # type: ignore[attr-defined]
        for index in range(inner.start_layer, inner.end_layer):
            backend = inner.layers[index].self_attn.attn.attn_backend.get_name()
            if backend not in BACKENDS:
                raise DepthDecayError(
                    f"depth decay does not support the attention backend {backend}; add --attention-backend with one "
                    f"of {', '.join(BACKENDS)}"
                )

    def _own(self, repairs: Repairs, vllm_config: Any) -> Repairs:
        """The maps that start in this pipeline stage, on the model's device and in its precision; each tensor once."""
        inner = self.model  # type: ignore[attr-defined]
        stage = range(inner.start_layer, inner.end_layer)
        device, dtype = vllm_config.device_config.device, vllm_config.model_config.dtype
        moved: dict[int, Any] = {}
        at_depth = {}
        for depth, maps in repairs.at_depth.items():
            own = [repair for repair in maps if repair.start in stage]
            for repair in own:
                moved.setdefault(id(repair), repair.to(torch.device(device), dtype))
            at_depth[depth] = tuple(moved[id(repair)] for repair in own)
        return Repairs(at_depth)


def _refuse_to_guess() -> None:
    """A pass with attention is a real one; without depths it would silently ignore the plan."""
    if is_forward_context_available() and get_forward_context().attn_metadata is not None:
        raise DepthDecayError("this vLLM worker does not pass the depths of rows to the model; leave --worker-cls out")


class _WatchedWeights:
    """Samples the weights of the plan's fingerprint while they load, before vLLM shards and packs them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.names = set((plan.model and plan.model.fingerprint) or ())
        self.samples: dict[str, list[float]] = {}

    def passing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if name in self.names:
                self.samples[name] = sample_tensor(tensor)
            yield name, tensor

    def check(self, shape: Any, allow_other_weights: bool) -> None:
        from dataclasses import replace

        found = replace(shape, fingerprint={name: values for name, values in self.samples.items() if values} or None)
        warning = self.plan.check_model(found, allow_other_weights)
        if warning:
            logger.warning("%s", warning)


class DepthDecayLlamaForCausalLM(DepthDecayMixin, LlamaForCausalLM):
    architecture = "LlamaForCausalLM"


class DepthDecayMistralForCausalLM(DepthDecayMixin, MistralForCausalLM):
    architecture = "MistralForCausalLM"


class DepthDecayQwen2ForCausalLM(DepthDecayMixin, Qwen2ForCausalLM):
    architecture = "Qwen2ForCausalLM"


class DepthDecayQwen3ForCausalLM(DepthDecayMixin, Qwen3ForCausalLM):
    architecture = "Qwen3ForCausalLM"
