"""New requests that wait for each other, and the counter of steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm_engines import Answers, answered, asked, our_engine

from depthdecay import Plan
from depthdecay.integrations.vllm.settings import server_depth


def request(generated: int, arrived: float = 0.0, depth: Any = None, preempted: bool = False) -> Any:
    from vllm.v1.request import RequestStatus

    return SimpleNamespace(
        sampling_params=SimpleNamespace(extra_args={"depth_decay": depth} if depth else None),
        num_computed_tokens=10 + generated,
        num_prompt_tokens=10,
        arrival_time=arrived,
        status=RequestStatus.PREEMPTED if preempted else RequestStatus.WAITING,
    )


def test_new_requests_wait_only_while_they_would_deepen_the_batch_and_no_longer_than_allowed() -> None:
    from depthdecay.integrations.vllm.scheduler import should_hold

    depth = server_depth({"alpha": "0.9", "group_wait_ms": 200}, 8)

    def held(running: list[Any], waiting: list[Any]) -> bool:
        return should_hold(SimpleNamespace(running=running, waiting=waiting), depth, now=100.1)

    fresh = request(-10, arrived=100.0)
    assert held([request(9)], [fresh])
    assert not held([], [fresh])
    assert not held([request(9)], [])
    assert not held([request(9), request(-5)], [fresh])  # one that is still in its prompt is deep anyway
    assert not held([request(9), request(9, depth={"alpha": 1})], [fresh])
    assert not held([request(9)], [request(-10, arrived=99.8), fresh])
    assert not held([request(9)], [fresh, request(3, arrived=100.0, preempted=True)])


@pytest.fixture(scope="session")
def grouping(tiny: str) -> Any:
    """Kept until the end: in 0.32, the end of an engine may take the process groups of the others along."""
    return our_engine(
        tiny,
        {"alpha": "0.9", "group_wait_ms": 60_000},
        skip_tokenizer_init=True,
        max_model_len=200,
        enable_prefix_caching=False,
    )


def test_held_requests_start_together_and_answers_stay_the_same(grouping: Any, tiny: str) -> None:
    ours = Answers(tiny)
    core = grouping.llm_engine
    prompts = [[5, 17, 33], [44, 6, 90], [13, 28, 28]]
    arrivals = (0, 6, 9)
    first: dict[str, int] = {}
    final: dict[str, list[int]] = {}
    for step in range(80):
        if step in arrivals:
            number = arrivals.index(step)
            core.add_request(str(number), {"prompt_token_ids": prompts[number]}, asked(16, detokenize=False))
        for output in core.step():
            first.setdefault(output.request_id, step)
            final[output.request_id] = list(output.outputs[0].token_ids)
    # The first one had ended before the others began.
    assert first["1"] == first["2"] >= 16
    assert final == {str(n): ours(prompt, Plan.decay(8, "0.9"), 16) for n, prompt in enumerate(prompts)}


@pytest.mark.parametrize("value", [-1, "soon", True])
def test_a_wait_that_cannot_be_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="group_wait_ms is"):
        server_depth({"group_wait_ms": value}, 8)


def test_steps_are_counted_by_kind_where_vllm_counts_its_own(
    ours: Any, engine_answers: Answers, graphs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prometheus_client import REGISTRY
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    from depthdecay.integrations.vllm.metrics import NAME

    def count() -> float:
        return REGISTRY.get_sample_value(f"{NAME}_total", {"depth": "decayed", "run": "graph"}) or 0

    scheduler = ours.llm_engine.engine_core.engine_core.scheduler
    make_stats = scheduler.make_stats
    carried: list[Any] = []

    def watched(*stats: Any, **named: Any) -> Any:
        carried.extend(stat for stat in stats if type(stat).__name__ == "CUDAGraphStat")
        return make_stats(*stats, **named)

    monkeypatch.setattr(scheduler, "make_stats", watched)
    before = count()
    answered(ours, [engine_answers.ids("Steps are counted")], asked(24, {"alpha": 0.95}))
    logger = PrometheusStatLogger.__new__(PrometheusStatLogger)
    for stat in carried:
        with pytest.raises(AttributeError):  # from vLLM's own part, since this logger was never started
            logger.record(SimpleNamespace(cudagraph_stats=stat), None)
    assert count() - before == graphs.steps["decayed, replayed"] > 0
