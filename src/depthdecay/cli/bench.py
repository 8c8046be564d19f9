"""`depthdecay bench`: our decoding speed and transformers' in one run, as a table and a result file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from depthdecay.cli import options as opt
from depthdecay.cli.bench_kinds import LOSSLESS, PASSES, PRECISIONS, SPEED, Kind, refuse_ignored
from depthdecay.cli.bench_tables import print_decoding, print_lossless, print_precisions, print_step_costs
from depthdecay.cli.process import settle
from depthdecay.cli.show import shown_even_unwritten, working
from depthdecay.errors import DepthDecayError

_measurement = partial(typer.Option, rich_help_panel="Measurement")


@dataclass(frozen=True)
class SourceOptions:
    """What is benchmarked: a model or a shape, and on which device."""

    shape: Annotated[
        str | None,
        typer.Option(help="Random weights in the shape of llama-2-7b, llama-2-13b, llama-2-70b, qwen2.5-1.5b or tiny."),
    ] = None
    model: Annotated[str | None, typer.Option("--model", "-m", help="A real model instead of a shape.")] = None
    device: opt.Device = None
    dtype: opt.Dtype = None
    quantize: opt.Quantize = None
    threads: opt.Threads = None

    def __post_init__(self) -> None:
        opt.ModelOptions(quantize=self.quantize, threads=self.threads)  # which checks them

    @property
    def model_or_default(self) -> str:
        return self.model or opt.DEFAULT_MODEL


@dataclass(frozen=True)
class MeasurementOptions:
    """What is measured, and how much."""

    new_tokens: Annotated[int, _measurement(*opt.MAX_NEW_TOKENS, help="Tokens to decode.")] = 256
    prompt_tokens: Annotated[int, _measurement(help="Length of the prompt.")] = 32
    batch: Annotated[int, _measurement(help="Batch size.")] = 1
    rounds: Annotated[int, _measurement(help="Interleaved repetitions; medians are shown.")] = 3
    methods: Annotated[
        str | None,
        _measurement(help="Comma-separated: generate, generate-static, full, decay (default: all that apply)."),
    ] = None
    compile: Annotated[bool, _measurement(help="Compile the layers, on CUDA.")] = True


@dataclass(frozen=True)
class LosslessOptions:
    """Lossless mode, what it is measured on, and what it is compared with."""

    mode: Annotated[
        str | None, typer.Option(metavar="lossless", help="Benchmark lossless mode on --prompts, or for a --shape.")
    ] = None
    prompts: Annotated[str | None, _measurement(help="For --mode lossless: a .jsonl or .txt file.")] = None
    task: Annotated[
        str | None, _measurement(help="Format the prompts as depthdecay eval does for this task, such as gsm8k.")
    ] = None
    limit: Annotated[int, _measurement(help="How many prompts of the file to use.")] = 20
    compared: Annotated[
        int | None,
        _measurement(help="How many prompts for transformers' methods, which are slower; 0: leave them out."),
    ] = None
    peers: Annotated[
        str | None,
        _measurement(
            help="Methods of transformers, comma-separated: generate, prompt-lookup, early-exit, assisted; or none "
            "(default: all that apply)."
        ),
    ] = None
    assistant: Annotated[str | None, _measurement(help="A smaller model for transformers' assisted generation.")] = None
    temperature: Annotated[
        float, _measurement(help="For --mode lossless: above 0, seeded sampling, without transformers' methods.")
    ] = 0.0

    @property
    def given(self) -> bool:
        return any(value is not None for value in (self.mode, self.prompts, self.task, self.peers, self.assistant))


@opt.grouped()
def bench(
    context: typer.Context,
    *,
    source: SourceOptions,
    plan: opt.PlanPath = None,
    alpha: opt.Alpha = None,
    speedup: opt.Speedup = None,
    over: opt.Over = None,
    measured: MeasurementOptions,
    lossless: LosslessOptions,
    json_file: opt.JsonFile = None,
) -> None:
    """Measure decoding speed: transformers' generate, our full depth and decay, all in one run."""
    kind = _kind(source, measured, lossless)
    refuse_ignored(context, kind)
    if over is not None and plan is None and alpha is None and speedup is None:
        from depthdecay.bench.decoding import USUAL_SPEEDUP

        speedup = USUAL_SPEEDUP
    plans = opt.PlanOptions(plan, alpha, speedup, over)
    if kind is SPEED:
        _bench_decoding(source, plans, measured, json_file)
    elif kind is PRECISIONS:
        _bench_precisions(source, plans, measured, json_file)
    elif kind is LOSSLESS:
        _bench_lossless(source, plans, measured, lossless, json_file)
    else:
        _bench_step_costs(source, measured, json_file)


def _kind(source: SourceOptions, measured: MeasurementOptions, lossless: LosslessOptions) -> Kind:
    if lossless.given:
        shape_alone = source.shape is not None and source.model is None and lossless.prompts is None
        if lossless.mode == "lossless" and shape_alone:
            return PASSES
        if lossless.mode != "lossless" or lossless.prompts is None or source.shape is not None:
            raise DepthDecayError(
                "a benchmark of lossless mode needs --mode lossless, and --prompts with a --model or a --shape alone"
            )
        return LOSSLESS
    plain = source.shape is None and source.dtype is None and measured.methods is None and measured.batch == 1
    return PRECISIONS if plain and _is_cpu(source.device) else SPEED


def _is_cpu(device: str | None) -> bool:
    from depthdecay.model.devices import choose_device

    return choose_device(device).type == "cpu"


def _bench_decoding(
    source: SourceOptions, plans: opt.PlanOptions, measured: MeasurementOptions, json_file: str | None
) -> None:
    plan = plans.read()
    with shown_even_unwritten(print_decoding), working("preparing …") as say:
        settle()
        from depthdecay.bench.decoding import benchmark

        report = benchmark(
            source.model,
            plan,
            shape=source.shape,
            new_tokens=measured.new_tokens,
            prompt_tokens=measured.prompt_tokens,
            batch=measured.batch,
            rounds=measured.rounds,
            methods=[name.strip() for name in measured.methods.split(",")] if measured.methods else None,
            compile=measured.compile,
            result_file=json_file,
            device=source.device,
            dtype=source.dtype,
            progress=say,
        )
    print_decoding(report)


def _bench_precisions(
    source: SourceOptions, plans: opt.PlanOptions, measured: MeasurementOptions, json_file: str | None
) -> None:
    """Every precision, at full depth and with the plan, compared with transformers and llama.cpp."""
    plan = plans.read()
    with shown_even_unwritten(print_precisions), working("preparing …", lasting=True) as say:
        settle(source.threads)
        from depthdecay.bench.cpu import PRECISIONS as ALL
        from depthdecay.bench.cpu import benchmark_precisions

        some = {None: ALL, "none": ALL[:2], "int8": ("int8",), "int4": ("int4",)}
        report = benchmark_precisions(
            source.model_or_default,
            plan,
            precisions=some[source.quantize],
            new_tokens=measured.new_tokens,
            prompt_tokens=measured.prompt_tokens,
            rounds=measured.rounds,
            result_file=json_file,
            progress=say,
        )
    print_precisions(report)


def _bench_lossless(
    source: SourceOptions,
    plans: opt.PlanOptions,
    measured: MeasurementOptions,
    lossless: LosslessOptions,
    json_file: str | None,
) -> None:
    stored = plans.load()
    peers = lossless.peers
    assert lossless.prompts is not None
    with shown_even_unwritten(print_lossless), working("preparing …", lasting=True) as say:
        settle()
        from depthdecay.bench.lossless import benchmark_lossless

        report = benchmark_lossless(
            source.model_or_default,
            lossless.prompts,
            stored,
            task=lossless.task,
            limit=lossless.limit,
            compared=lossless.compared,
            new_tokens=measured.new_tokens,
            peers=None if peers is None else [] if peers.strip() == "none" else [p.strip() for p in peers.split(",")],
            assistant=lossless.assistant,
            temperature=lossless.temperature,
            compile=measured.compile,
            quantize=source.quantize,
            result_file=json_file,
            device=source.device,
            dtype=source.dtype,
            progress=say,
        )
    print_lossless(report)


def _bench_step_costs(source: SourceOptions, measured: MeasurementOptions, json_file: str | None) -> None:
    """The cost of draft steps and verifications in a model of this shape, and the speed-up that follows."""
    with shown_even_unwritten(print_step_costs), working("preparing …") as say:
        settle()
        from depthdecay.bench.step_costs import benchmark_step_costs

        report = benchmark_step_costs(
            shape=source.shape,
            prompt_tokens=measured.prompt_tokens,
            compile=measured.compile,
            result_file=json_file,
            device=source.device,
            dtype=source.dtype,
            progress=say,
        )
    print_step_costs(report)
