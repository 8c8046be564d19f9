"""Benchmark stock vLLM and the plug-in at several depths, in turns within one process, in eager mode."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from depthdecay.errors import DepthDecayError
from depthdecay.integrations.vllm import ARCHITECTURES
from depthdecay.integrations.vllm.settings import KEY
from depthdecay.plan.plan import Plan

SLOTS = 8
WORKLOADS = ("batch-1", "batch-16", "mix")


@dataclass(frozen=True)
class Workload:
    """Requests that arrive together: the lengths of prompts and answers, and how many run at a time."""

    name: str
    prompts: tuple[int, ...]
    answers: tuple[int, ...]
    slots: int

    @classmethod
    def named(cls, name: str, new_tokens: int, prompt_tokens: int) -> Workload:
        if name == "mix":
            # From a quarter of the length to all of it, shuffled.
            answers = [new_tokens // 4 + 3 * new_tokens * number // (4 * 23) for number in range(24)]
            random.Random(0).shuffle(answers)
            return cls(name, (prompt_tokens,) * 24, tuple(answers), SLOTS)
        if name not in WORKLOADS:
            raise DepthDecayError(f"unknown workload '{name}'; known are {', '.join(WORKLOADS)}")
        batch = int(name.removeprefix("batch-"))
        return cls(name, (prompt_tokens,) * batch, (new_tokens,) * batch, batch)


@dataclass
class VllmRow:
    """One method on one workload. Seconds are of whole runs, prompts included."""

    workload: str
    method: str
    tokens: int
    seconds: list[float] = field(default_factory=list)
    layer_speedup: float = 1.0
    median: float = 0.0
    tokens_per_second: float = 0.0
    ratios: list[float] = field(default_factory=list)  # stock's seconds over these, per round
    speedup: float | None = None  # their median: what slows down a whole round affects both


def run_bench(
    folder: str,
    stock: str,
    plans: dict[str, Plan],
    *,
    workloads: Sequence[str] = WORKLOADS,
    new_tokens: int = 128,
    prompt_tokens: int = 32,
    rounds: int = 3,
    dtype: str = "float32",
    progress: Callable[[str], None] = lambda message: None,
) -> list[dict[str, Any]]:
    """Requests choose their plan, so all plans share one engine; stock has another."""
    jobs = [Workload.named(name, new_tokens, prompt_tokens) for name in workloads]
    progress("starting vLLM, stock and with the plug-in")
    longest = prompt_tokens + max(max(job.answers) for job in jobs)
    plain = _engine(folder, dtype, longest, {})
    order = list(next(iter(plans.values())).ladder.drop_order)
    depth = {"architectures": [ARCHITECTURES[stock]], KEY: {"drop_order": order}}
    ours = _engine(folder, dtype, longest, {"hf_overrides": depth})
    rows: list[VllmRow] = []
    for job in jobs:
        methods: dict[str, Plan | None] = {"stock": None, **plans}
        found = {name: VllmRow(job.name, name, sum(job.answers)) for name in methods}
        warm_up = replace(job, answers=(4,) * len(job.answers))
        for plan in methods.values():
            _run(plain if plan is None else ours, warm_up, plan)
        for number in range(rounds):
            for name, plan in methods.items():
                progress(f"{job.name}, round {number + 1} of {rounds}: {name}")
                found[name].seconds.append(round(_run(plain if plan is None else ours, job, plan), 3))
        for name, plan in methods.items():
            _complete(found[name], plan, job, found["stock"])
        rows += found.values()
    return [asdict(row) for row in rows]


def _engine(folder: str, dtype: str, longest: int, settings: dict[str, Any]) -> Any:
    from vllm import LLM

    return LLM(
        folder,
        dtype=dtype,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=longest,
        max_num_seqs=32,
        kv_cache_memory_bytes=1 << 30,
        **settings,
    )


def _run(engine: Any, job: Workload, plan: Plan | None) -> float:
    from vllm import SamplingParams

    from depthdecay.integrations.vllm.releases import run_at_most

    extra = None if plan is None else {KEY: _request(plan)}
    vocabulary = engine.llm_engine.model_config.get_vocab_size()
    draw = random.Random(1)
    prompts = [{"prompt_token_ids": [draw.randrange(3, vocabulary) for _ in range(size)]} for size in job.prompts]
    params = [
        SamplingParams(temperature=0, max_tokens=size, ignore_eos=True, detokenize=False, extra_args=extra)
        for size in job.answers
    ]
    run_at_most(engine.llm_engine.engine_core.engine_core.scheduler, job.slots)
    started = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(job.answers)
    return seconds


def _request(plan: Plan) -> dict[str, Any]:
    values = plan.schedule.to_dict()
    return {name: values[name] for name in ("alpha", "min_layers", "horizon") if values.get(name) is not None}


def _complete(row: VllmRow, plan: Plan | None, job: Workload, stock: VllmRow) -> None:
    row.median = statistics.median(row.seconds)
    row.tokens_per_second = row.tokens / row.median
    row.ratios = [round(theirs / ours, 3) for theirs, ours in zip(stock.seconds, row.seconds, strict=True)]
    row.speedup = statistics.median(row.ratios)
    if plan is not None:
        row.layer_speedup = plan.num_layers * row.tokens / sum(plan.layers_executed(size) for size in job.answers)
