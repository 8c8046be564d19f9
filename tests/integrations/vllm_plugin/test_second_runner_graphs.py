"""Graphs by depth in vLLM's second model runner, with managers that note instead of capturing."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm_engines import Answers, answered, asked, runner_of

from depthdecay.integrations.vllm.layer_rows import Scheduled, Step
from depthdecay.integrations.vllm.settings import server_depth
from depthdecay.model.repairs import Repairs
from depthdecay.plan.file import EMBEDDED_PLAN

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def only_where_it_is_written_for() -> None:
    from depthdecay.integrations.vllm.releases import GRAPHS_IN_SECOND_RUNNER

    if not GRAPHS_IN_SECOND_RUNNER:
        pytest.skip("the second model runner of this release has other graph managers")


class Manager:
    """Stands for vLLM's graph manager: one size of 4 rows for decode batches, or one of 8 for mixed ones."""

    def __init__(self, mode: Any, noted: list[Any]) -> None:
        self.cudagraph_mode = mode
        self.compilation_config = SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4, 8])
        self.max_num_reqs = 4
        self.noted = noted
        self.graphs: set[Any] = set()
        self.hidden_states: Any = None
        self.intermediate_tensors: Any = None

    def capture(self, model: Any, *settings: Any, **named: Any) -> None:
        from vllm.config import CUDAGraphMode
        from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

        self.noted.append(("capture", getattr(model, "kind", None), self.hidden_states))
        mixed = self.cudagraph_mode == CUDAGraphMode.FULL
        self.graphs = {BatchExecutionDescriptor(CUDAGraphMode.FULL, 8 if mixed else 4, 4, None if mixed else 1)}
        self.hidden_states = self.hidden_states or f"buffer of {self.cudagraph_mode.name}"

    def dispatch(self, num_reqs: int, num_tokens: int, uniform_token_count: int | None, num_active_loras: int) -> Any:
        from vllm.config import CUDAGraphMode
        from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, _is_compatible

        for desc in self.graphs:
            if _is_compatible(desc, num_reqs, num_tokens, uniform_token_count, num_active_loras):
                return desc
        return BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, num_tokens, None)

    def _init_candidates(self) -> None:
        assert self.compilation_config.cudagraph_capture_sizes == [1, 2, 4, 8]

    def run_fullgraph(self, desc: Any) -> Any:
        self.noted.append(("replay", self, desc))
        return "states"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.config import CompilationMode, CUDAGraphMode

    from depthdecay.integrations.vllm import second_runner_graphs

    noted: list[Any] = []
    monkeypatch.setattr(second_runner_graphs, "takes_any_batch", lambda runner: True)
    monkeypatch.setattr(
        second_runner_graphs,
        "ModelCudaGraphManager",
        lambda config, device, mode, decode_query_len: Manager(mode, noted),
    )
    model = SimpleNamespace(depth=server_depth({"alpha": "0.9"}, 8), repairs=Repairs(), in_dummy_run=False)
    own = Manager(CUDAGraphMode.FULL_AND_PIECEWISE, noted)
    runner = SimpleNamespace(
        get_model=lambda: model,
        vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(mode=CompilationMode.NONE)),
        max_num_tokens=16,
        device=CPU,
        dp_size=1,
        decode_query_len=1,
        cudagraph_manager=own,
        model_state=SimpleNamespace(any_decayed=lambda scheduler_output: scheduler_output.decayed),
        execute_model=lambda scheduler_output, **named: own.dispatch(*scheduler_output.batch, num_active_loras=0),
    )
    graphs = second_runner_graphs.install_second_runner_graphs(runner)
    own.capture(model, "settings")
    return SimpleNamespace(graphs=graphs, runner=runner, own=own, noted=noted, model=model)


def step_of(made: Any, *generated: int) -> Step:
    """Rows that are so far in their answers to prompts of one token."""
    depth = made.model.depth
    return Step([Scheduled(count, 1, 1, depth.plan) for count in generated], depth.plan.ladder, CPU)


def test_every_kind_is_captured_after_vllms_own_graphs(made: Any) -> None:
    kinds = [kind for what, kind, _ in made.noted if what == "capture"]
    assert kinds == [None, *made.graphs.graphs.passes, made.graphs.mixed_kind]
    buffers = [buffer for _, _, buffer in made.noted]
    # Decode graphs return their states in one buffer; mixed batches, which may be larger, in another.
    assert buffers[1:-1] == ["buffer of FULL_AND_PIECEWISE"] * (len(kinds) - 2)
    assert buffers[-1] is None
    assert made.model.in_dummy_run is made.graphs.capturing_mixed is False


def test_decode_batches_replay_the_graph_of_their_depth(made: Any) -> None:
    desc = made.runner.execute_model(SimpleNamespace(batch=(3, 3, 1), decayed=True))
    assert desc.uniform_token_count == 1
    for generated, masked in (((0, 0, 0), None), ((3, 3, 3), False), ((2, 9, 30), True)):
        step = step_of(made, *generated)
        run = made.graphs.prepare(step, padded=4)
        made.own.run_fullgraph(desc)
        _, manager, _ = made.noted[-1]
        if masked is None:
            assert (run, manager) == (None, made.own)
            continue
        kind = made.graphs.graphs.kind_of(step)
        assert kind.masked == masked
        assert run is made.graphs.graphs.passes[kind]
        assert manager is made.graphs.managers[kind]
        assert made.graphs.graphs.row_depths[:4].tolist() == [*step.depths, 0]
    assert made.graphs.graphs.steps == {"full depth, replayed": 1, "decayed, replayed": 2}


def test_prompts_next_to_decayed_rows_replay_a_masked_graph_and_prompts_alone_run_as_in_stock(made: Any) -> None:
    from vllm.config import CUDAGraphMode

    def found(tokens: int, decayed: bool, **named: Any) -> Any:
        return made.runner.execute_model(SimpleNamespace(batch=(2, tokens, None), decayed=decayed), **named)

    assert found(7, False).cg_mode == CUDAGraphMode.PIECEWISE
    mixed = found(7, True)
    assert mixed.cg_mode == CUDAGraphMode.FULL
    made.graphs.prepare(step_of(made, 0, 9), padded=8)
    made.own.run_fullgraph(mixed)
    assert made.noted[-1][1] is made.graphs.mixed
    assert found(7, True, dummy_run=True).cg_mode == CUDAGraphMode.PIECEWISE
    assert found(9, True).cg_mode == CUDAGraphMode.PIECEWISE  # more than was captured


def test_a_decode_batch_without_a_graph_of_ours_does_not_replay_vllms(made: Any) -> None:
    from vllm.config import CUDAGraphMode

    for manager in made.graphs.managers.values():
        manager.graphs = set()
    batch = (3, 3, 1)
    assert made.runner.execute_model(SimpleNamespace(batch=batch, decayed=False)).cg_mode == CUDAGraphMode.FULL
    found = made.runner.execute_model(SimpleNamespace(batch=batch, decayed=True))
    assert (found.cg_mode, found.num_tokens, found.num_reqs) == (CUDAGraphMode.NONE, 3, 3)


def test_graphs_by_depth_have_few_sizes_that_hold_all_batches() -> None:
    from depthdecay.integrations.vllm.second_runner_graphs import depth_sizes

    many = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    assert depth_sizes(many, 256) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert depth_sizes(many[:10], 48) == many[:10]
    assert depth_sizes([1, 2, 4, *range(8, 97, 8)], 50) == [1, 2, 4, 8, 16, 32, 48, 64, 96]


def test_what_no_graph_was_captured_for_is_counted_and_logged(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import CUDAGraphMode

    from depthdecay.integrations.vllm import second_runner_graphs

    told: list[str] = []
    monkeypatch.setattr(
        second_runner_graphs,
        "logger",
        SimpleNamespace(warning_once=lambda form, *words: told.append(form % words)),
    )
    context = SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE)
    monkeypatch.setattr(second_runner_graphs, "get_forward_context", lambda: context)
    made.graphs.count_without(step_of(made, 0))
    context.cudagraph_runtime_mode = CUDAGraphMode.NONE
    made.graphs.count_without(step_of(made, 0))
    assert not told
    made.graphs.count_without(step_of(made, 0, 9))
    assert "no CUDA graph was captured for 2 rows" in told[0]
    assert set(made.graphs.graphs.steps) == {"full depth, in pieces", "full depth, no graph", "decayed, no graph"}


def test_vllms_manager_has_the_methods_that_are_replaced() -> None:
    """Read in the source of this release, since the runner needs a GPU."""
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

    def names(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)[1:]

    assert names(ModelCudaGraphManager.capture)[:2] == ["model", "model_state"]
    assert "progress_bar_desc" in names(ModelCudaGraphManager.capture)
    asked_for = ["num_reqs", "num_tokens", "uniform_token_count", "num_active_loras"]
    assert names(ModelCudaGraphManager.dispatch) == asked_for
    assert names(ModelCudaGraphManager.run_fullgraph) == ["desc"]
    given = ["vllm_config", "device", "cudagraph_mode", "decode_query_len"]
    assert names(ModelCudaGraphManager.__init__)[:4] == given
    source = inspect.getsource(model_runner.GPUModelRunner.execute_model)
    order = ["dispatch_cg_and_sync_dp(", "self.model_state.prepare_attn(", "self.model_state.prepare_inputs("]
    places = [source.index(call) for call in [*order, "self.cudagraph_manager.run_fullgraph("]]
    assert places == sorted(places)


def test_a_step_without_a_graph_runs_the_masked_pass(
    ours: Any, engine_answers: Answers, graphs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the second runner hands it to the model; here through the first one."""
    from depthdecay.integrations.vllm import worker

    monkeypatch.setattr(runner_of(ours), "depth_graphs", None)
    seen: list[bool] = []
    depth_step = worker._depth_step

    def with_pass(runner: Any) -> Any:
        told = depth_step(runner)
        if not told.step.is_full:
            graphs.write_depths(told.step.depths, len(told.step.depths))
            told.run_instead = graphs.passes[graphs.kind_of(told.step)]
        told.on_run = lambda step: seen.append(step.is_full)
        return told

    monkeypatch.setattr(worker, "_depth_step", with_pass)
    depths: list[Any] = [{"alpha": 0.95}, {"alpha": 0.99, "warmup_tokens": 4}]
    plans = [server_depth({"plan": str(EMBEDDED_PLAN)}, 30).plan_of({"depth_decay": depth}) for depth in depths]
    prompts = [engine_answers.ids(text) for text in ("A graph was not captured", "Nor for this")]
    expected = [engine_answers(prompt, plan, 24) for prompt, plan in zip(prompts, plans, strict=True)]
    assert answered(ours, prompts, [asked(24, depth) for depth in depths]) == expected
    assert set(seen) == {True, False}


def test_layers_outside_the_compiled_model_take_fused_kernels_and_give_them_back(ours: Any) -> None:
    from vllm.config import CompilationMode
    from vllm.ir.op import IrOp

    from depthdecay.integrations.vllm.kernels import FusedKernels

    model = runner_of(ours).get_model()
    norm = model.model.layers[0].input_layernorm
    config = SimpleNamespace(compilation_config=SimpleNamespace(mode=CompilationMode.VLLM_COMPILE))
    before = (norm._forward_method, IrOp.registry["rms_norm"].get_priority())
    with FusedKernels(model, config)():
        assert norm._forward_method == norm.forward_cuda
    assert (norm._forward_method, IrOp.registry["rms_norm"].get_priority()) == before
    config.compilation_config.mode = CompilationMode.NONE
    with FusedKernels(model, config)():
        assert norm._forward_method == before[0]


def test_the_model_state_knows_decayed_rows_before_a_step() -> None:
    from depthdecay.integrations.vllm.model_state import DepthDecayModelState

    state = DepthDecayModelState.__new__(DepthDecayModelState)
    state.model = SimpleNamespace(depth=server_depth({"alpha": "0.9"}, 8))
    state.rope_state = state.prompt_embeds_state = None
    state._plans, state._prompts = {}, {}

    def new(request: str, depth: Any = None) -> Any:
        params = SimpleNamespace(extra_args={"depth_decay": depth} if depth else None)
        return SimpleNamespace(req_id=request, prompt_token_ids=[1] * 5, num_computed_tokens=0, sampling_params=params)

    def output(fresh: list[Any], cached: dict[str, int], tokens: dict[str, int]) -> Any:
        known = SimpleNamespace(req_ids=list(cached), num_computed_tokens=list(cached.values()))
        return SimpleNamespace(scheduled_new_reqs=fresh, scheduled_cached_reqs=known, num_scheduled_tokens=tokens)

    assert not state.any_decayed(output([new("a")], {}, {"a": 5}))
    state.add_request(0, new("a"))
    assert state._prompts == {"a": 5}
    assert state.any_decayed(output([], {"a": 5}, {"a": 1}))
    # One that was preempted comes back as a new one, with its answer so far.
    assert state.any_decayed(output([new("b")], {}, {"b": 9}))
    assert not state.any_decayed(output([new("c", {"alpha": 1})], {}, {"c": 9}))
    assert not state.any_decayed(output([], {"unknown": 9}, {"unknown": 1}))


@dataclass
class Batch:
    num_tokens: int
    num_scheduled_tokens: Any


def test_a_graph_for_mixed_batches_is_captured_for_one_prompt_that_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    from depthdecay.integrations.vllm.model_state import DepthDecayModelState

    longest: list[int] = []
    monkeypatch.setattr(
        DefaultModelState, "prepare_attn", lambda self, batch, *more: longest.append(batch.num_scheduled_tokens.max())
    )
    state = DepthDecayModelState.__new__(DepthDecayModelState)
    state.device = CPU
    state.depth_graphs = SimpleNamespace(capturing_mixed=False)
    for state.depth_graphs.capturing_mixed in (False, True):
        state.prepare_attn(Batch(8, np.full(4, 2)), None, (), [], [])
    assert longest == [2, 8]
