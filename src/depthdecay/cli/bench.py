"""`depthdecay bench`: decoding speed, ours and transformers' in one run, as a table and a result file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from depthdecay.cli import options as opt
from depthdecay.cli.bench_kinds import LOSSLESS, PASSES, PRECISIONS, SPEED, refuse_ignored
from depthdecay.cli.bench_tables import print_decoding, print_lossless, print_precisions, print_step_costs
from depthdecay.cli.show import working
from depthdecay.errors import DepthDecayError
from depthdecay.result_files import require_writable, write_result

if TYPE_CHECKING:
    from depthdecay.model.load import LoadedModel
    from depthdecay.plan.plan import Plan

_measurement = partial(typer.Option, rich_help_panel="Measurement")


def bench(
    context: typer.Context,
    shape: Annotated[
        str | None,
        typer.Option(help="Random weights in a true shape: llama-2-7b, llama-2-13b, llama-2-70b, qwen2.5-1.5b, tiny."),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Real weights instead of a shape.")] = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    quantize: opt.Quantize = None,
    threads: opt.Threads = None,
    plan: opt.PlanPath = None,
    alpha: opt.Alpha = None,
    speedup: opt.Speedup = None,
    over: opt.Over = None,
    new_tokens: Annotated[int, _measurement(help="Tokens to decode.")] = 256,
    prompt_tokens: Annotated[int, _measurement(help="Length of the prompt.")] = 32,
    batch: Annotated[int, _measurement(help="Sequences in lock-step.")] = 1,
    rounds: Annotated[int, _measurement(help="Interleaved repetitions; medians are shown.")] = 3,
    methods: Annotated[
        str | None, _measurement(help="Some of generate,generate-static,full,decay; all that fit.")
    ] = None,
    compile: Annotated[bool, _measurement(help="Compile the layers, on CUDA.")] = True,
    mode: Annotated[
        str | None, typer.Option(metavar="lossless", help="Lossless mode and its peers, on --prompts.")
    ] = None,
    prompts: Annotated[str | None, _measurement(help="For --mode lossless: a .jsonl or .txt file.")] = None,
    task: Annotated[
        str | None, _measurement(help="Ask the prompts as depthdecay eval asks this task's, such as gsm8k.")
    ] = None,
    limit: Annotated[int, _measurement(help="Prompts of the file.")] = 20,
    compared: Annotated[
        int | None, _measurement(help="Prompts for the peers, which are slower; 0 leaves them out.")
    ] = None,
    peers: Annotated[
        str | None,
        _measurement(help="Some of generate,prompt-lookup,early-exit,assisted of transformers, or none; all that fit."),
    ] = None,
    assistant: Annotated[
        str | None, _measurement(help="A smaller model for transformers' assisted generation.")
    ] = None,
    json_file: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write a result file.")] = None,
) -> None:
    """Measure decoding speed: transformers' generate, full depth and decay in the same run."""
    if any(given is not None for given in (mode, prompts, task, peers, assistant)):
        if mode == "lossless" and shape is not None and prompts is None and model is None:
            refuse_ignored(context, PASSES)
            _bench_step_costs(shape, device, dtype, prompt_tokens, compile, json_file)
            return
        if mode != "lossless" or prompts is None or shape is not None:
            raise DepthDecayError(
                "--mode lossless goes with --prompts and a --model, or with a --shape alone, whose passes it times"
            )
        refuse_ignored(context, LOSSLESS)
        options = opt.ModelOptions(model or opt.DEFAULT_MODEL, device, dtype)
        chosen = None if peers is None else [] if peers.strip() == "none" else [p.strip() for p in peers.split(",")]
        if assistant is not None and chosen is not None and "assisted" not in chosen:
            raise DepthDecayError(f"--assistant is for the peer assisted, which --peers {peers} leaves out")
        _bench_lossless(
            options,
            opt.PlanOptions(plan),
            prompts,
            task,
            limit,
            compared,
            new_tokens,
            chosen,
            assistant,
            compile,
            json_file,
        )
        return
    if shape is not None and model is not None:
        raise DepthDecayError("--shape and --model were given together; bench one of them at a time")
    opt.at_least(2, new_tokens=new_tokens)
    opt.at_least(1, prompt_tokens=prompt_tokens, batch=batch, rounds=rounds)
    require_writable(json_file)
    if plan is None and alpha is None and speedup is None:
        speedup = "1.25"
    plan_options = opt.PlanOptions(plan, alpha, speedup, over)
    if shape is None and methods is None and batch == 1 and dtype is None and _is_cpu(device):
        refuse_ignored(context, PRECISIONS)
        options = opt.ModelOptions(model or opt.DEFAULT_MODEL, "cpu", quantize=quantize, threads=threads)
        _bench_cpu(options, plan_options, new_tokens, prompt_tokens, rounds, json_file)
        return
    refuse_ignored(context, SPEED)
    stored = plan_options.load()
    with working("preparing …") as say:
        from transformers.utils import logging

        from depthdecay.bench.decoding import METHODS, run_bench

        logging.set_verbosity_error()
        if shape is not None:
            network, name = _random_model(shape, device, dtype, say), shape
        else:
            loaded = opt.ModelOptions(model or opt.DEFAULT_MODEL, device, dtype).load(quiet=True)
            network, name = loaded.model, loaded.name
        used: Plan | None = plan_options.choose(network, name, stored, new_tokens)
        assert used is not None
        # Off CUDA transformers does not compile its static cache, so the row would not be what its name says.
        fitting = [method for method in METHODS if network.device.type == "cuda" or method != "generate-static"]
        report = run_bench(
            network,
            name,
            used,
            new_tokens=new_tokens,
            prompt_tokens=prompt_tokens,
            batch=batch,
            rounds=rounds,
            methods=methods.split(",") if methods else fitting,
            compile_layers=compile,
            progress=say,
        )
    print_decoding(report)
    write_result(json_file, report.to_dict())


def _is_cpu(device: str | None) -> bool:
    from depthdecay.model.devices import choose_device

    return choose_device(device).type == "cpu"


def _random_model(shape: str, device: str | None, dtype: str | None, say: Callable[[str], None]) -> Any:
    import torch

    from depthdecay.bench.shapes import random_model
    from depthdecay.model.devices import choose_device, choose_dtype

    place = choose_device(device)
    number_type = choose_dtype(dtype) or (torch.bfloat16 if place.type == "cuda" else torch.float32)
    say(f"making {shape} with random weights")
    return random_model(shape, place, number_type)


def _bench_cpu(
    options: opt.ModelOptions,
    plan_options: opt.PlanOptions,
    new_tokens: int,
    prompt_tokens: int,
    rounds: int,
    json_file: str | None,
) -> None:
    """Every precision, full and by the plan, between transformers and llama.cpp."""
    stored = plan_options.load()
    with working("preparing …", lasting=True) as say:
        from dataclasses import replace

        from depthdecay.bench.cpu import PRECISIONS, run_cpu_bench

        def choose(loaded: LoadedModel) -> Plan:
            chosen = plan_options.choose(loaded.model, loaded.name, stored, new_tokens)
            assert chosen is not None
            return chosen

        one = {"none": PRECISIONS[:2], "int8": ("int8",), "int4": ("int4",)}
        report = run_cpu_bench(
            lambda dtype: replace(options, dtype=dtype).load(quiet=True),
            choose,
            new_tokens=new_tokens,
            prompt_tokens=prompt_tokens,
            rounds=rounds,
            precisions=PRECISIONS if options.quantize is None else one[options.quantize],
            progress=say,
        )
    print_precisions(report)
    write_result(json_file, report.to_dict())


def _bench_step_costs(
    shape: str, device: str | None, dtype: str | None, prompt_tokens: int, compile: bool, json_file: str | None
) -> None:
    """What draft steps and verifications cost in a model of this shape, and the speed that follows from it."""
    opt.at_least(1, prompt_tokens=prompt_tokens)
    require_writable(json_file)
    with working("preparing …") as say:
        from depthdecay.bench.step_costs import run_step_costs

        network = _random_model(shape, device, dtype, say)
        report = run_step_costs(network, shape, prompt_tokens=prompt_tokens, compile_layers=compile, progress=say)
    print_step_costs(report)
    write_result(json_file, report.to_dict())


def _bench_lossless(
    options: opt.ModelOptions,
    plan_options: opt.PlanOptions,
    prompts: str,
    task: str | None,
    limit: int,
    compared: int | None,
    new_tokens: int,
    peers: list[str] | None,
    assistant: str | None,
    compile: bool,
    json_file: str | None,
) -> None:
    """Drafters: layers by guess, the plan's ladder without its maps, and the plan as it is."""
    opt.at_least(1, limit=limit)
    opt.at_least(0, compared=compared)
    opt.at_least(2, new_tokens=new_tokens)
    stored = plan_options.load()
    with working("preparing …", lasting=True) as say:
        from dataclasses import replace

        from depthdecay.bench.lossless import PEERS, run_lossless_bench
        from depthdecay.model.prompts import token_ids
        from depthdecay.plan.shelf import drafter_of

        asked = opt.prompts_of(prompts, task)
        unknown = [peer for peer in peers or () if peer not in PEERS]
        if unknown:
            raise DepthDecayError(f"--peers holds '{unknown[0]}'; known are {', '.join(PEERS)}, or none of them: none")
        stored = stored if stored is None else drafter_of(stored)
        require_writable(json_file)
        loaded = options.load(quiet=True)
        if stored is None and loaded.name == opt.DEFAULT_MODEL:
            stored = opt.PlanOptions("default").load()
        helper = (
            None if assistant is None else opt.ModelOptions(assistant, options.device, options.dtype).load(True).model
        )
        vocabulary = loaded.model.get_input_embeddings().weight.shape[0]
        plans: dict[str, Plan | None] = {"guessed layers": None}
        if stored is not None and stored.repairs is not None:
            plans |= {"calibrated": replace(stored, repairs=None), "calibrated and repaired": stored}
        elif stored is not None:
            plans["calibrated"] = stored
        report = run_lossless_bench(
            loaded.model,
            loaded.tokenizer,
            loaded.name,
            [token_ids(loaded.tokenizer, text, {}, vocabulary) for text in asked(loaded.tokenizer)[:limit]],
            plans,
            new_tokens=new_tokens,
            peers=peers if peers is not None else PEERS if helper is not None else PEERS[:3],
            assistant=helper,
            compile_layers=compile,
            compared=compared,
            progress=say,
            save=lambda part: write_result(json_file, part.to_dict()),
        )
    print_lossless(report)
    write_result(json_file, report.to_dict())
