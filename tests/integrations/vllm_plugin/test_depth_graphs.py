"""Passes that a CUDA graph can hold, run without one: which is chosen, and what masked rows compute."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_engines import Answers, answered, asked, runner_of

from depthdecay.integrations.vllm.settings import server_depth
from depthdecay.model.repairs import Repairs
from depthdecay.plan.file import EMBEDDED_PLAN

TOKENS = 32
TEXTS = ["The capital of France is", "Once upon a time, in a small village,", "def fibonacci(n):\n", "Water boils"]
DEPTHS: list[Any] = [{"alpha": 0.95}, {"alpha": 1}, {"alpha": "0.99", "warmup_tokens": 4}, {"alpha": 0.9, "horizon": 9}]


def plan_of(depth: Any) -> Any:
    return server_depth({"plan": str(EMBEDDED_PLAN)}, 30).plan_of({"depth_decay": depth})


def test_masked_rows_give_our_engines_text(ours: Any, engine_answers: Answers, graphs: Any) -> None:
    """Four depths in one batch, with prompts and repair maps."""
    prompts = [engine_answers.ids(text) for text in TEXTS]
    expected = [engine_answers(prompt, plan_of(depth), TOKENS) for prompt, depth in zip(prompts, DEPTHS, strict=True)]
    assert answered(ours, prompts, [asked(TOKENS, depth) for depth in DEPTHS]) == expected
    assert graphs.steps["decayed, replayed"] > TOKENS / 2
    assert set(graphs.steps) <= {"decayed, replayed", "full depth, replayed"}


def test_rows_of_one_depth_are_not_masked(ours: Any, engine_answers: Answers, graphs: Any) -> None:
    prompts = [[*reversed(engine_answers.ids(text))] for text in TEXTS[:2]]
    taken: list[Any] = []
    kind_of = graphs.kind_of
    graphs.kind_of = lambda step: taken.append(kind_of(step)) or taken[-1]
    expected = [engine_answers(prompt, plan_of(DEPTHS[0]), TOKENS) for prompt in prompts]
    assert answered(ours, prompts, asked(TOKENS, DEPTHS[0])) == expected
    assert taken
    assert not any(kind.masked for kind in taken)


def test_rows_between_two_captured_depths_take_the_deeper_one(ours: Any, engine_answers: Answers, graphs: Any) -> None:
    from depthdecay.integrations.vllm.depth_passes import PassKind

    graphs.depths = [graphs.depths[0], graphs.depths[-1]]
    assert graphs.kind_of(SimpleNamespace(reached=[26])) == PassKind(30, masked=True)
    assert graphs.kind_of(SimpleNamespace(reached=[24])) == PassKind(24, masked=False)
    prompt = engine_answers.ids("A text that no other test has asked for")
    assert answered(ours, [prompt], asked(TOKENS, DEPTHS[0])) == [engine_answers(prompt, plan_of(DEPTHS[0]), TOKENS)]


def test_nan_in_a_masked_row_does_not_spread(ours: Any, graphs: Any) -> None:
    """Its keys in a dropped layer were never written, and unwritten memory may hold anything."""
    from depthdecay.integrations.vllm.depth_passes import DepthPass, PassKind

    class Layer(torch.nn.Module):
        self_attn = SimpleNamespace(attn=SimpleNamespace(layer_name="any"))

        def forward(self, positions: Any, hidden: torch.Tensor, residual: torch.Tensor) -> Any:
            residual += hidden  # in place, like vLLM's norms
            return hidden.masked_fill_(positions[:, None] == 1, float("nan")), residual

    model = runner_of(ours).get_model()
    depth = server_depth({"drop_order": [2, 1]}, 4)
    inner = SimpleNamespace(
        start_layer=0, end_layer=4, layers=[Layer() for _ in range(4)], norm=lambda hidden, residual: (hidden, None)
    )
    fake = SimpleNamespace(depth=depth, repairs=type(model.repairs)(), model=inner)
    row_depths = torch.tensor([4, 2, 0], dtype=torch.int32)
    run = DepthPass(fake, PassKind(4, masked=True), row_depths)
    run.least = (1, 3, 4, 1)
    run.least_on_device = torch.tensor([1, 3, 4, 1], dtype=torch.int32)
    run.shallowest = 0
    from vllm.forward_context import override_forward_context

    from depthdecay.integrations.vllm import depth_passes

    inner.layers[0] = inner.layers[3] = lambda positions, hidden, residual: (hidden, residual)
    inner.layers[0].self_attn = inner.layers[3].self_attn = Layer.self_attn  # type: ignore[attr-defined]
    with override_forward_context(SimpleNamespace(attn_metadata=None)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(depth_passes, "last_state", lambda model, hidden, residual: (hidden, residual))
        hidden, residual = run(positions=torch.tensor([0, 1, 2]), inputs_embeds=torch.ones(3, 5))
    assert not hidden.isnan().any()
    assert residual[:, 0].tolist() == [2, 0, 0]


def test_captured_depths_are_bounded_and_hold_both_ends() -> None:
    from depthdecay.integrations.vllm.depth_graphs import captured_depths

    every = captured_depths(server_depth({"alpha": 0.9, "graph_depths": 99}, 32))
    assert every[-1] == 32
    assert every == sorted(set(every))
    some = captured_depths(server_depth({"alpha": 0.9, "graph_depths": 4}, 32))
    assert len(some) == 4
    assert (some[0], some[-1]) == (every[0], 32)
    assert set(some) <= set(every)


def test_a_batch_without_a_graph_runs_the_same_pass_eagerly(
    ours: Any, graphs: Any, engine_answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import CUDAGraphMode

    from depthdecay.integrations.vllm import depth_graphs

    context = SimpleNamespace(cudagraph_runtime_mode=None, batch_descriptor="a size")
    monkeypatch.setattr(depth_graphs, "get_forward_context", lambda: context)
    graphs.captured = set()
    step = SimpleNamespace(is_full=False, reached=[24], depths=[24])
    for context.cudagraph_runtime_mode in (CUDAGraphMode.FULL, CUDAGraphMode.NONE):
        assert graphs.choose(step) is graphs.passes[graphs.kind_of(step)]
        # Otherwise vLLM's wrapper would capture here, or replay.
        assert context.cudagraph_runtime_mode == CUDAGraphMode.NONE
    assert graphs.steps == {"decayed, no graph": 2}
    prompts = [engine_answers.ids(text) for text in TEXTS[:2]]
    expected = [engine_answers(prompt, plan_of(depth), TOKENS) for prompt, depth in zip(prompts, DEPTHS, strict=False)]
    assert answered(ours, prompts, [asked(TOKENS, depth) for depth in DEPTHS[:2]]) == expected
    assert set(graphs.steps) == {"decayed, no graph", "full depth, no graph"}


def test_every_kind_of_pass_is_captured_for_decoding_and_one_for_mixed_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With vLLM's own dispatcher and a runner that only records what it would capture."""
    from vllm.config import CompilationConfig, CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    from depthdecay.integrations.vllm import depth_graphs
    from depthdecay.integrations.vllm.depth_passes import PassKind
    from depthdecay.integrations.vllm.refusals import GRAPHS

    compilation = CompilationConfig(**json.loads(GRAPHS), cudagraph_capture_sizes=[1, 2, 4])
    compilation.max_cudagraph_capture_size = 4
    config = SimpleNamespace(
        compilation_config=compilation,
        lora_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=2),
        speculative_config=None,
        num_speculative_tokens=0,
    )
    builder = SimpleNamespace(get_cudagraph_support=lambda config, spec: AttentionCGSupport.ALWAYS)
    backend = type("Backend", (), {"get_builder_cls": staticmethod(lambda: builder)})
    layer = SimpleNamespace(self_attn=SimpleNamespace(attn=SimpleNamespace(attn_backend=backend)))
    model = SimpleNamespace(
        depth=server_depth({"plan": str(EMBEDDED_PLAN)}, 30),
        repairs=Repairs(),
        model=SimpleNamespace(start_layer=0, end_layer=30, layers=[layer] * 30),
    )
    monkeypatch.setattr(depth_graphs, "CUDAGraphWrapper", lambda function, config, runtime_mode: function)
    noted: list[Any] = []

    def note(batch_descriptors: list[Any], cudagraph_runtime_mode: Any, profiler: Any) -> None:
        kind = getattr(runner.model, "kind", None)
        noted.extend((kind, size.uniform, size.num_tokens) for size in batch_descriptors)

    runner = SimpleNamespace(
        vllm_config=config,
        model="vLLM's own",
        get_model=lambda: model,
        max_num_tokens=8,
        device=torch.device("cpu"),
        cudagraph_dispatcher=CudagraphDispatcher(config),
        _capture_cudagraphs=note,
    )
    graphs = depth_graphs.install_depth_graphs(runner)
    runner.cudagraph_dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_DECODE_ONLY, 1)
    for mode, sizes in runner.cudagraph_dispatcher.get_capture_descs():
        runner._capture_cudagraphs(batch_descriptors=sizes, cudagraph_runtime_mode=mode, profiler=None)
    assert runner.model == "vLLM's own"
    kinds = [None, *graphs.passes]
    decoding = {(kind, True, size) for kind in kinds for size in (1, 2)}
    mixed = {(kind, False, size) for kind in (None, PassKind(30, masked=True)) for size in (1, 2, 4)}
    assert set(noted) == decoding | mixed
    assert len(noted) == len(set(noted))
    # And steps find what was captured for them.
    for tokens, uniform in ((2, True), (3, False)):
        mode, found = runner.cudagraph_dispatcher.dispatch(tokens, uniform_decode=uniform)
        assert mode == CUDAGraphMode.FULL
        assert (PassKind(30, masked=True), found) in graphs.captured
