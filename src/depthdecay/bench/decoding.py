"""Decoding speed, ours and transformers' in one run, compared with what memory bandwidth allows."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from depthdecay.argument_checks import whole_number
from depthdecay.bench.contenders import (
    Contender,
    Decode,
    decoding,
    measure_in_rounds,
    times_as_fast,
    transformers_decoding,
)
from depthdecay.bench.model_shapes import check_source, load_model_or_shape
from depthdecay.engine.engine import Engine
from depthdecay.engine.plan_choice import DepthSettings, guess_is_meant
from depthdecay.errors import ArgumentError, DepthDecayError
from depthdecay.model.costs import Costs
from depthdecay.model.devices import synchronize
from depthdecay.model.layers import LayerStack
from depthdecay.model.loaded_model import LoadedModel
from depthdecay.plan.plan import Plan
from depthdecay.result_files import require_writable, write_report

USUAL_SPEEDUP = "1.25"
METHODS = ("generate", "generate-static", "full", "decay")
_TITLES = {
    "generate": "transformers generate",
    "generate-static": "transformers generate, compiled static cache",
    "full": "depthdecay, full depth",
    "decay": "depthdecay, decay",
}


@dataclass
class DecodingRow:
    """One method's figures. Times are of decoding only, without prefill and set-up."""

    method: str
    title: str
    ms_per_token: float | None = None  # per step, which yields `batch` tokens
    ms_min: float | None = None
    ms_max: float | None = None
    tokens_per_second: float | None = None
    gb_per_second: float | None = None  # weights read
    bandwidth_share: float | None = None
    layers_executed: int | None = None
    layer_speedup: float | None = None
    cost_speedup: float | None = None  # the ideal: weight bytes at full depth / weight bytes read
    wall_clock_speedup: float | None = None  # over our own full depth
    realised: float | None = None
    memory_gb: float | None = None
    setup_seconds: float | None = None
    error: str | None = None


@dataclass
class DecodingReport:
    """A whole run: its settings and results."""

    model: str
    settings: dict[str, Any]
    copy_gb_per_second: float
    weight_gb: float
    rows: list[DecodingRow] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def depth_to_measure(asked: Plan | DepthSettings | str | os.PathLike[str] | None, new_tokens: int) -> DepthSettings:
    """The depth settings given, with the plan file read, or the default speed-up; averaged over the decoded tokens."""
    depth = DepthSettings.of(asked)
    if not depth.given:
        depth = DepthSettings(speedup=USUAL_SPEEDUP)
    if depth.speedup is not None and depth.over_tokens is None:
        depth = replace(depth, over_tokens=new_tokens)
    return depth.read()


def plan_to_measure(depth: DepthSettings, loaded: LoadedModel) -> Plan:
    plan = depth.choose(LayerStack.of(loaded.model), loaded.name)
    assert plan is not None
    return plan


def benchmark(
    model: str | LoadedModel | None = None,
    plan: Plan | DepthSettings | str | os.PathLike[str] | None = None,
    *,
    shape: str | None = None,
    new_tokens: int = 256,
    prompt_tokens: int = 32,
    batch: int = 1,
    rounds: int = 3,
    methods: Sequence[str] | None = None,
    compile: bool = True,
    result_file: str | os.PathLike[str] | None = None,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    progress: Callable[[str], None] | None = None,
) -> DecodingReport:
    """Measure decoding speed: transformers' generate, our full depth and decay, all in one run.

        report = dd.benchmark("smollm2-135m", "my-plan", new_tokens=128)
        report.ratios["decay against generate"]
        dd.benchmark(shape="llama-2-7b")  # random weights in a real model's shape

    Without a plan, a layer speed-up of 1.25 over the decoded tokens is used. `methods` are some of generate,
    generate-static, full and decay; by default, all that the device supports. The report, with machine and versions,
    is written to `result_file`. `device` and `dtype` apply to a shape, or to a model given by name.

    `depthdecay.bench.lossless` measures lossless mode, `depthdecay.bench.cpu` the precisions on a CPU, and
    `depthdecay.bench.step_costs` the cost of single passes.
    """
    check_source(model, shape)
    whole_number("new_tokens", new_tokens, 2)
    for name, value in (("prompt_tokens", prompt_tokens), ("batch", batch), ("rounds", rounds)):
        whole_number(name, value, 1)
    _check_methods(methods or ())
    depth = depth_to_measure(plan, new_tokens)
    require_writable(result_file)
    say = progress or (lambda message: None)
    loaded = load_model_or_shape(model, shape, device, dtype, say)
    # transformers compiles its static cache only on CUDA; elsewhere the row's name would be wrong.
    fitting = [name for name in METHODS if loaded.model.device.type == "cuda" or name != "generate-static"]
    report = run_bench(
        loaded.model,
        loaded.shown_name,
        plan_to_measure(depth, loaded),
        new_tokens=new_tokens,
        prompt_tokens=prompt_tokens,
        batch=batch,
        rounds=rounds,
        methods=fitting if methods is None else methods,
        compile_layers=compile,
        progress=say,
    )
    write_report(result_file, report)
    return report


def _check_methods(methods: Sequence[str]) -> None:
    unknown = [method for method in methods if method not in METHODS]
    if unknown:
        raise ArgumentError(f"unknown method '{unknown[0]}'; known are {', '.join(METHODS)}", "methods")


def run_bench(
    model: Any,
    name: str,
    plan: Plan,
    *,
    new_tokens: int = 256,
    prompt_tokens: int = 32,
    batch: int = 1,
    rounds: int = 3,
    methods: Sequence[str] = METHODS,
    compile_layers: bool = True,
    progress: Callable[[str], None] = lambda message: None,
) -> DecodingReport:
    """Measure every method at the same lengths, in interleaved rounds; if one fails, its row gives the reason."""
    _check_methods(methods)
    stack = LayerStack.of(model)
    limit = stack.context_limit()
    if limit is not None and prompt_tokens + new_tokens > limit:
        raise DepthDecayError(
            f"a prompt of {prompt_tokens} and {new_tokens} new tokens make {prompt_tokens + new_tokens}, but the "
            f"model's context holds {limit}; reduce them"
        )
    device = stack.model.device
    vocabulary = stack.model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, vocabulary, (batch, prompt_tokens), generator=generator).to(device)
    settings: dict[str, Any] = {
        "new_tokens": new_tokens,
        "prompt_tokens": prompt_tokens,
        "batch": batch,
        "rounds": rounds,
    }
    settings |= {"dtype": str(stack.model.dtype).removeprefix("torch."), "device": device.type, "plan": plan.describe()}
    costs = Costs(stack, plan)
    report = DecodingReport(name, settings, copy_bandwidth(device), costs.full() / 1e9)
    contenders = {}
    for method in methods:
        progress(f"preparing {_TITLES[method]}")
        contenders[method] = Contender(
            _TITLES[method], _decoding(method, model, plan, prompts, new_tokens, compile_layers)
        )
        contenders[method].set_up()
    measure_in_rounds(list(contenders.values()), rounds, progress)
    for method, contender in contenders.items():
        report.rows.append(_row(method, contender, costs, plan, report, contenders.get("full")))
    report.ratios = _ratios(contenders)
    return report


def _decoding(
    method: str, model: Any, plan: Plan, prompts: torch.Tensor, new_tokens: int, compile_layers: bool
) -> Decode:
    if method in ("full", "decay"):
        compile = compile_layers and prompts.device.type == "cuda"
        with guess_is_meant():
            engine = Engine(model, plan=plan if method == "decay" else None, compile=compile)
        return decoding(engine, method, prompts, new_tokens)
    static = {"cache_implementation": "static"} if method == "generate-static" else {}
    return transformers_decoding(model, prompts, new_tokens, **static)


def _row(
    method: str, contender: Contender, costs: Costs, plan: Plan, report: DecodingReport, full: Contender | None
) -> DecodingRow:
    row = DecodingRow(method, contender.title, error=contender.error)
    if contender.error is not None:
        return row
    batch, steps = report.settings["batch"], report.settings["new_tokens"] - 1
    full_plan = Plan.full(plan.num_layers)
    own_plan = plan if method == "decay" else full_plan
    times = [1000 * seconds / steps for seconds in contender.seconds]
    row.ms_per_token = statistics.median(times)
    row.ms_min, row.ms_max = min(times), max(times)
    row.tokens_per_second = batch * 1000 / row.ms_per_token
    bytes_read = costs.per_step(own_plan, report.settings["new_tokens"])
    row.gb_per_second = bytes_read / row.ms_per_token / 1e6
    row.bandwidth_share = row.gb_per_second / report.copy_gb_per_second
    tokens = report.settings["new_tokens"]
    row.layers_executed = contender.layers_executed or plan.num_layers * tokens
    row.layer_speedup = plan.num_layers * tokens / row.layers_executed
    row.cost_speedup = costs.speedup(own_plan, tokens)
    speed = times_as_fast(contender, full) if method in ("full", "decay") else None
    if speed is not None:
        row.wall_clock_speedup = speed[0]
        row.realised = row.wall_clock_speedup / row.cost_speedup
    row.memory_gb = contender.memory / 1e9 if contender.memory else None
    row.setup_seconds = contender.setup_seconds
    return row


def _ratios(contenders: dict[str, Contender]) -> dict[str, float]:
    """Our speed relative to each of transformers' methods."""
    pairs = {
        f"{ours} against {theirs}": times_as_fast(contenders[ours], contenders[theirs])
        for ours in ("full", "decay")
        for theirs in ("generate", "generate-static")
        if ours in contenders and theirs in contenders
    }
    return {name: speed[0] for name, speed in pairs.items() if speed is not None}


def copy_bandwidth(device: torch.device) -> float:
    """GB/s of a large copy on this device, counting bytes read and written."""
    size = 2**32 if device.type == "cuda" else 2**28
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else size * 8
    size = int(min(size, free // 4))
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    best = float("inf")
    for _ in range(10):
        synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    del source, target
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return 2 * size / best / 1e9
