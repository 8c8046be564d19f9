"""Our part of the second model runner, with made-up batches: the runner itself needs a GPU."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from depthdecay.integrations.vllm.settings import server_depth


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    from depthdecay.integrations.vllm.model_state import DepthDecayModelState

    def prepared(self: Any, *settings: Any, **named: Any) -> dict[str, Any]:
        return {}

    monkeypatch.setattr(DefaultModelState, "prepare_attn", prepared)
    made = DepthDecayModelState.__new__(DepthDecayModelState)
    made.model = SimpleNamespace(depth=server_depth({"alpha": 0.9}, 8))
    made.device = torch.device("cpu")
    made.rope_state = made.prompt_embeds_state = made._attend = None
    made._plans, made._prompts = {}, {}
    return made


class Group:
    """Stands for a group of attention layers, and returns what it is given."""

    layer_names = ("a", "b")

    def build_metadata(self, about: Any) -> Any:
        return about

    def get_metadata_builder(self) -> Any:
        """By which 0.26 builds it."""
        return SimpleNamespace(build=lambda common_prefix_len, common_attn_metadata: common_attn_metadata)


def test_rows_go_as_deep_as_their_requests_ask_and_dummies_all_the_way(state: Any) -> None:
    params = SimpleNamespace(extra_args={"depth_decay": {"alpha": 0.5}})
    state.add_request(3, SimpleNamespace(req_id="fast", sampling_params=params, prompt_token_ids=[1] * 7))
    plain = SimpleNamespace(extra_args=None)
    state.add_request(1, SimpleNamespace(req_id="plain", sampling_params=plain, prompt_token_ids=[1] * 10))
    batch = SimpleNamespace(
        req_ids=["plain", "fast", "made up"],
        idx_mapping_np=np.array([1, 3, 0]),
        num_computed_tokens_np=np.array([12, 6, 0]),
        num_scheduled_tokens=np.array([1, 3, 2]),
        num_tokens=6,
    )
    # "fast" was preempted: of its prompt of 7 and its text, positions 6 to 8 are computed again.
    lengths = SimpleNamespace(prompt_len=SimpleNamespace(np=np.array([2, 10, 0, 7])))
    tables = (torch.arange(12).reshape(3, 4),)
    state.prepare_attn(batch, None, tables, torch.arange(100, 108).reshape(1, 8), [[Group()]], None)
    depth_step = state.prepare_inputs(batch, lengths)["depth_step"]
    step = depth_step.step
    assert step.depths.tolist() == [5, 8, 4, 4, 8, 8]  # floor(8 · 0.9³); 8, floor(8 · 0.5), the least of 4; all, all
    rows = step.runs(next(layer for layer, least in enumerate(step.least) if least == 5))
    metadata, slots = depth_step._attend(rows)
    assert rows.index.tolist() == [0, 1, 4, 5]
    assert metadata["b"].query_start_loc.tolist() == [0, 1, 2, 4]
    assert metadata["b"].seq_lens.tolist() == [13, 7, 2]
    assert metadata["b"].block_table_tensor.tolist() == tables[0].tolist()
    assert slots["a"].tolist() == [100, 101, 104, 105]
    state.remove_request("fast")
    assert list(state._plans) == ["plain"]


def test_the_runner_calls_it_as_it_is_written() -> None:
    """The overridden methods have vLLM's names and order of parameters."""
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    from depthdecay.integrations.vllm.model_state import DepthDecayModelState

    for name in ("add_request", "remove_request", "prepare_inputs", "prepare_attn"):
        theirs = list(inspect.signature(getattr(DefaultModelState, name)).parameters)
        ours = list(inspect.signature(getattr(DepthDecayModelState, name)).parameters)
        shared = [parameter for parameter in ours if parameter not in ("settings", "named")]
        assert shared == theirs[: len(shared)]
