"""`depthdecay bench-vllm`: vLLM with our plug-in compared with stock vLLM, as a table and a result file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from depthdecay.cli import options as opt
from depthdecay.cli.show import figures_table, working
from depthdecay.cli.vllm import model_config, model_folder
from depthdecay.errors import DepthDecayError
from depthdecay.integrations.vllm import ARCHITECTURES, check_version
from depthdecay.plan.plan import Plan
from depthdecay.plan.schedule import exact_alpha
from depthdecay.result_files import require_writable, write_result


def bench_vllm(
    model: opt.Model = opt.DEFAULT_MODEL,
    workloads: Annotated[str, typer.Option(help="Some of batch-1,batch-16,mix.")] = "batch-1,batch-16,mix",
    new_tokens: Annotated[int, typer.Option(*opt.MAX_NEW_TOKENS, help="Tokens to decode.")] = 128,
    prompt_tokens: Annotated[int, typer.Option(help="Length of a prompt.")] = 32,
    alpha: Annotated[str, typer.Option(help="An alpha to measure besides speed-ups 1.25 and 1.5.")] = "0.99",
    rounds: Annotated[int, typer.Option(help="Interleaved repetitions; medians are shown.")] = 3,
    dtype: Annotated[str, typer.Option(help="As vLLM names it: float32, bfloat16, …")] = "float32",
    ways: Annotated[
        str | None,
        typer.Option(help="Some of stock,ngram,head,decay: with vLLM's CUDA graphs, one process each."),
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="With --ways: random weights in this shape, e.g. llama-2-7b.")
    ] = None,
    head: Annotated[str | None, typer.Option(help="With --ways: a draft head from export --format eagle3.")] = None,
    plan: Annotated[str | None, typer.Option(help="With --ways: a plan instead of speed-ups.")] = None,
    prompts: Annotated[
        str | None, typer.Option(help="With --ways: a file of prompts instead of random tokens.")
    ] = None,
    batches: Annotated[str, typer.Option(help="With --ways: batch sizes.")] = "1,16,64",
    rates: Annotated[str, typer.Option(help="With --ways: Poisson arrivals, requests per second.")] = "",
    json_file: opt.JsonFile = None,
) -> None:
    """Measure vLLM with our plug-in: stock, full depth, layer speed-ups 1.25 and 1.5, and one alpha."""
    opt.at_least(8, max_new_tokens=new_tokens)
    opt.at_least(1, prompt_tokens=prompt_tokens, rounds=rounds)
    if ways is not None:
        settings: dict[str, Any] = {"new_tokens": new_tokens, "prompt_tokens": prompt_tokens, "rounds": rounds}
        settings |= {"dtype": dtype, "head": head, "plan": plan}
        settings |= {"batches": _numbers("--batches", batches, int), "rates": _numbers("--rates", rates, float)}
        _bench_ways(model, shape, prompts, ways.split(","), settings, json_file)
        return
    exact_alpha(alpha)
    check_version()
    # Both engines in this process, so that they run under the same conditions.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from depthdecay.integrations.vllm.bench import run_bench

    require_writable(json_file)
    folder = model_folder(model)
    config = model_config(folder)
    stock = (config.architectures or [""])[0]
    if stock not in ARCHITECTURES:
        raise DepthDecayError(f"{stock or model} does not support decay in vLLM; supported: {', '.join(ARCHITECTURES)}")
    layers = config.num_hidden_layers
    plans = {
        "full depth": Plan.decay(layers, 1),
        "1.25x fewer": Plan.for_speedup(layers, "1.25", over_tokens=new_tokens),
        "1.5x fewer": Plan.for_speedup(layers, "1.5", over_tokens=new_tokens),
        f"alpha {alpha}": Plan.decay(layers, alpha),
    }
    settings = {
        "new_tokens": new_tokens,
        "prompt_tokens": prompt_tokens,
        "rounds": rounds,
        "dtype": dtype,
    }
    with working("preparing …") as say:
        rows = run_bench(folder, stock, plans, workloads=workloads.split(","), progress=say, **settings)
    _print_rows(model, rows)
    write_result(json_file, {"model": model, "settings": settings | {"threads": _threads()}, "vllm_rows": rows})


def _bench_ways(
    model: str, shape: str | None, prompts: str | None, ways: list[str], settings: dict[str, Any], json_file: Any
) -> None:
    check_version()
    from tempfile import TemporaryDirectory

    from depthdecay.integrations.vllm.bench_ways import run_ways, shape_folder

    require_writable(json_file)
    with TemporaryDirectory() as made, working("preparing …") as say:
        folder = model_folder(model) if shape is None else shape_folder(shape, Path(made))
        config = model_config(folder)
        stock = (config.architectures or [""])[0]
        if stock not in ARCHITECTURES:
            raise DepthDecayError(f"{stock or model} has no decay in vLLM; supported: {', '.join(ARCHITECTURES)}")
        ids = None if prompts is None else _prompt_ids(folder, prompts, config.vocab_size)
        layers = config.num_hidden_layers
        dummy = shape is not None
        found = run_ways(folder, stock, layers, ways=ways, dummy=dummy, prompts=ids, progress=say, **settings)
    named = {name: value for name, value in settings.items() if name not in ("head", "plan")}
    # Written before it is printed, so that no measurement is lost.
    write_result(json_file, {"model": shape or model, "settings": named, "vllm_ways": found})
    _print_ways(shape or model, found)


def _prompt_ids(folder: str, file: str, vocabulary: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    from depthdecay.model.prompts import token_ids
    from depthdecay.prompt_files import read_prompts

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [token_ids(tokenizer, prompt, {}, vocabulary) for prompt in read_prompts(file)]


def _numbers(flag: str, words: str, kind: type) -> list[Any]:
    try:
        found = [kind(word) for word in words.split(",") if word.strip()]
    except ValueError:
        found = [0]
    if any(number <= 0 for number in found):
        raise DepthDecayError(f"{flag} is '{words}'; expected comma-separated numbers above 0")
    return found


def _print_ways(model: str, found: dict[str, Any]) -> None:
    table = figures_table("", "", "ms/token", "speed-up", "first token, p95 ms", "tokens/s")
    for row in found["rows"]:
        speedup, first = row["speedup"], row.get("first_token_p95_ms")
        table.add_row(
            row["workload"],
            row["method"],
            f"{row['ms_per_token']:.2f}",
            "–" if speedup is None else f"{speedup:.2f}x",
            "–" if first is None else f"{first:.0f}",
            f"{row['tokens_per_second']:.0f}" if "tokens_per_second" in row else "–",
        )
    console = Console()
    console.print(f"[bold]{model}[/] in vLLM; speed-up over stock vLLM", highlight=False)
    console.print(table)
    for way, engine in found["engines"].items():
        if "failed" in engine:
            console.print(f"{way} failed: {engine['failed']}", markup=False, highlight=False)
        else:
            steps = ", ".join(f"{count} {kind}" for kind, count in sorted(engine["steps"].items()))
            console.print(f"{way}: started in {engine['start_seconds']} s{'; steps: ' + steps if steps else ''}")


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _print_rows(model: str, rows: list[dict[str, Any]]) -> None:
    table = figures_table("", "", "median s", "tokens/s", "speed-up", "range", "ideal by layers")
    for row in rows:
        ratios = row["ratios"]
        table.add_row(
            row["workload"],
            row["method"],
            f"{row['median']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup']:.2f}x",
            f"{min(ratios):.2f}–{max(ratios):.2f}",
            f"{row['layer_speedup']:.2f}x",
        )
    console = Console()
    console.print(f"[bold]{model}[/] in vLLM, eager; speed-up over stock vLLM, also eager", highlight=False)
    console.print(table)
