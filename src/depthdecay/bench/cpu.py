"""Decoding speed on a CPU in every precision, with transformers' generate and llama.cpp in the same rounds."""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from depthdecay.argument_checks import whole_number
from depthdecay.bench.contenders import Contender, decoding, measure_in_rounds, times_as_fast, transformers_decoding
from depthdecay.bench.decoding import depth_to_measure, plan_to_measure
from depthdecay.cpu.threads import threads
from depthdecay.engine.engine import Engine
from depthdecay.engine.plan_choice import DepthSettings, guess_is_meant
from depthdecay.errors import ArgumentError, DepthDecayError
from depthdecay.model.costs import Costs
from depthdecay.model.layers import LayerStack
from depthdecay.model.load import load
from depthdecay.model.loaded_model import LoadedModel
from depthdecay.plan.file import EMBEDDED_MODEL
from depthdecay.plan.plan import Plan
from depthdecay.result_files import require_writable, write_report

PRECISIONS = ("float32", "bfloat16", "int8", "int4")
LLAMA = "llama.cpp"
BASELINE = "generate bfloat16"  # ratios are relative to this one, and to llama.cpp


@dataclass
class CpuRow:
    """One contender's figures: decoding only, without the prefill."""

    title: str
    ms_per_token: float | None = None
    ms_min: float | None = None
    ms_max: float | None = None
    tokens_per_second: float | None = None
    gigabytes_per_step: float | None = None  # weights read
    bandwidth_share: float | None = None  # of the bandwidth of a large read
    layer_speedup: float | None = None
    cost_speedup: float | None = None
    wall_clock_speedup: float | None = None  # against full depth in the same precision
    realised: float | None = None
    times_generate: list[float] | None = None  # relative to bfloat16 generate: median, lowest, highest of the rounds
    times_llama: list[float] | None = None
    ms_by_round: list[float] = field(default_factory=list)
    error: str | None = None


@dataclass
class CpuReport:
    model: str
    settings: dict[str, Any]
    read_gb_per_second: float
    rows: list[CpuRow] = field(default_factory=list)
    llama: dict[str, str] | None = None  # llama.cpp's version and build

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _CpuContender(Contender):
    step_bytes: float = 0.0
    full: str | None = None  # the title of the same precision at full depth
    plan: Plan | None = None
    costs: Costs | None = None
    close: Callable[[], None] = lambda: None


def benchmark_precisions(
    model: str = EMBEDDED_MODEL,
    plan: Plan | DepthSettings | str | os.PathLike[str] | None = None,
    *,
    precisions: Sequence[str] = PRECISIONS,
    new_tokens: int = 256,
    prompt_tokens: int = 32,
    rounds: int = 3,
    result_file: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> CpuReport:
    """Measure decoding on a CPU in every precision, at full depth and with a plan, against transformers and llama.cpp.

        report = benchmark_precisions("smollm2-135m", "my-plan")
        {row.title: row.tokens_per_second for row in report.rows}

    The model is given by name, since it is loaded in two dtypes. Without a plan, a layer speed-up of 1.25 is used.
    llama.cpp is included if its package is installed and the model comes from a GGUF file.
    """
    _check_settings(new_tokens, prompt_tokens, rounds, precisions)
    depth = depth_to_measure(plan, new_tokens)
    require_writable(result_file)
    report = run_cpu_bench(
        lambda dtype: load(model, device="cpu", dtype=dtype, progress=progress),
        lambda loaded: plan_to_measure(depth, loaded),
        new_tokens=new_tokens,
        prompt_tokens=prompt_tokens,
        rounds=rounds,
        precisions=precisions,
        progress=progress or (lambda message: None),
    )
    write_report(result_file, report)
    return report


def _check_settings(new_tokens: int, prompt_tokens: int, rounds: int, precisions: Sequence[str]) -> None:
    whole_number("new_tokens", new_tokens, 2)
    whole_number("prompt_tokens", prompt_tokens, 1)
    whole_number("rounds", rounds, 1)
    unknown = [name for name in precisions if name not in PRECISIONS]
    if unknown:
        raise ArgumentError(f"unknown precision '{unknown[0]}'; known are {', '.join(PRECISIONS)}", "precisions")


def run_cpu_bench(
    load: Callable[[str], LoadedModel],
    choose_plan: Callable[[LoadedModel], Plan],
    *,
    new_tokens: int,
    prompt_tokens: int,
    rounds: int,
    precisions: Sequence[str] = PRECISIONS,
    progress: Callable[[str], None] = lambda message: None,
) -> CpuReport:
    """Every precision at full depth and with the plan, and the peers, once per round. `load` gets "fp32" or "bf16"."""
    _check_settings(new_tokens, prompt_tokens, rounds, precisions)
    models = {dtype: load(dtype) for dtype in ("fp32", "bf16")}
    wide = models["fp32"]
    plan = choose_plan(wide)
    stack = LayerStack.of(wide.model)
    limit = stack.context_limit()
    if limit is not None and prompt_tokens + new_tokens > limit:
        raise DepthDecayError(
            f"a prompt of {prompt_tokens} and {new_tokens} new tokens exceed the model's context of {limit}; use fewer"
        )
    vocabulary = wide.model.get_input_embeddings().weight.shape[0]
    prompt = torch.randint(3, vocabulary, (1, prompt_tokens), generator=torch.Generator().manual_seed(0))
    report = CpuReport(
        wide.shown_name,
        {
            **{"new_tokens": new_tokens, "prompt_tokens": prompt_tokens, "rounds": rounds, "threads": threads()},
            **{"plan": plan.describe(), "layers": plan.num_layers},
        },
        read_bandwidth(),
    )
    contenders = [_transformers(name, models[short], prompt, new_tokens) for name, short in _DTYPES.items()]
    for precision in precisions:
        progress(f"preparing {precision}")
        source = models["bf16" if precision == "bfloat16" else "fp32"]
        contenders += _ours(precision, source, plan, prompt, new_tokens)
    gguf = wide.origin.gguf if wide.origin is not None else None
    if gguf is not None and importlib.util.find_spec("llama_cpp") is not None:
        progress(f"preparing {LLAMA}")
        contenders.append(_llama(gguf, prompt, new_tokens))
        report.llama = _llama_facts()
    for contender in contenders:
        progress(f"warming up {contender.title}")
        contender.warm()
    measure_in_rounds(contenders, rounds, progress)
    for contender in contenders:
        contender.close()
    by_title = {contender.title: contender for contender in contenders}
    report.rows = [_row(contender, by_title, report, new_tokens) for contender in contenders]
    return report


_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}


def _transformers(name: str, loaded: LoadedModel, prompt: torch.Tensor, new_tokens: int) -> _CpuContender:
    stack = LayerStack.of(loaded.model)
    decode, warm_up = (transformers_decoding(loaded.model, prompt, count) for count in (new_tokens, _few(new_tokens)))
    step_bytes = sum(stack.layer_bytes()) + stack.head_bytes()
    return _CpuContender(f"generate {name}", decode, warm_up, step_bytes=step_bytes)


def _few(new_tokens: int) -> int:
    """Tokens to warm up with: on a CPU the first few steps do all one-time work."""
    return min(new_tokens, 4)


def _ours(
    precision: str, loaded: LoadedModel, plan: Plan, prompt: torch.Tensor, new_tokens: int
) -> list[_CpuContender]:
    quantize = precision if precision in ("int8", "int4") else "none"
    made = []
    for mode in ("full", "decay"):
        own = plan if mode == "decay" else None
        with guess_is_meant():
            engine = Engine(loaded.model, plan=own, quantize=quantize, origin=loaded.origin)
        own = own or engine.full_plan
        costs = Costs(engine.stack, own, engine.repairs)
        made.append(
            _CpuContender(
                f"{mode} {precision}",
                decoding(engine, mode, prompt, new_tokens),
                decoding(engine, mode, prompt, _few(new_tokens)),
                step_bytes=costs.per_step(own, new_tokens),
                full=f"full {precision}",
                plan=own,
                costs=costs,
            )
        )
    return made


def _llama(gguf: Path, prompt: torch.Tensor, new_tokens: int) -> _CpuContender:
    """llama.cpp on the same file, called as directly as its package allows: one decode and one argmax per token."""
    import llama_cpp
    import numpy as np

    count = threads()
    model = llama_cpp.Llama(
        str(gguf), n_ctx=prompt.shape[1] + new_tokens + 8, n_threads=count, n_threads_batch=count, verbose=False
    )
    ids = prompt[0].tolist()

    def decode() -> tuple[float, int | None]:
        model.reset()
        model.eval(ids)
        token = (llama_cpp.llama_token * 1)(ids[-1])
        started = time.perf_counter()
        for _ in range(new_tokens - 1):
            if llama_cpp.llama_decode(model.ctx, llama_cpp.llama_batch_get_one(token, 1)) != 0:
                raise DepthDecayError("llama.cpp failed to decode")
            logits = llama_cpp.llama_get_logits(model.ctx)
            token[0] = int(np.ctypeslib.as_array(logits, (model.n_vocab(),)).argmax())
        return time.perf_counter() - started, None

    return _CpuContender(LLAMA, decode, step_bytes=_file_bytes(gguf), close=model.close)


def _file_bytes(gguf: Path) -> int:
    """Bytes of the file that a step reads: everything except an embedding matrix that is not also the LM head."""
    from depthdecay.model.gguf_convert import read_checked

    sizes = {tensor.name: int(tensor.n_bytes) for tensor in read_checked(gguf).tensors}
    return sum(sizes.values()) - (sizes["token_embd.weight"] if "output.weight" in sizes else 0)


def _llama_facts() -> dict[str, str]:
    import llama_cpp

    return {"llama-cpp-python": llama_cpp.__version__, "system": llama_cpp.llama_print_system_info().decode().strip()}


def _row(contender: _CpuContender, others: dict[str, _CpuContender], report: CpuReport, new_tokens: int) -> CpuRow:
    row = CpuRow(contender.title, error=contender.error)
    if contender.error is not None:
        return row
    row.ms_by_round = [1000 * seconds / (new_tokens - 1) for seconds in contender.seconds]
    row.ms_per_token = statistics.median(row.ms_by_round)
    row.ms_min, row.ms_max = min(row.ms_by_round), max(row.ms_by_round)
    row.tokens_per_second = 1000 / row.ms_per_token
    row.gigabytes_per_step = contender.step_bytes / 1e9
    row.bandwidth_share = contender.step_bytes / row.ms_per_token / 1e6 / report.read_gb_per_second
    row.times_generate = times_as_fast(contender, others.get(BASELINE))
    row.times_llama = times_as_fast(contender, others.get(LLAMA))
    if contender.plan is not None and contender.costs is not None:
        row.layer_speedup = contender.plan.layer_speedup(new_tokens)
        row.cost_speedup = contender.costs.speedup(contender.plan, new_tokens)
        speed = times_as_fast(contender, others.get(contender.full or ""))
        row.wall_clock_speedup = speed[0] if speed is not None else None
        row.realised = None if row.wall_clock_speedup is None else row.wall_clock_speedup / row.cost_speedup
    return row


def read_bandwidth() -> float:
    """GB/s at which torch reads a large tensor, best of ten."""
    numbers = torch.ones(2**27)
    best = float("inf")
    for _ in range(10):
        started = time.perf_counter()
        numbers.sum()
        best = min(best, time.perf_counter() - started)
    return numbers.nbytes / best / 1e9
