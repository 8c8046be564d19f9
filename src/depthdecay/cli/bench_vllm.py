"""`depthdecay bench-vllm`: the plug-in beside stock vLLM in one process, as a table and a result file."""

from __future__ import annotations

import os
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
    alpha: Annotated[str, typer.Option(help="A decay by hand, beside speed-ups 1.25 and 1.5.")] = "0.99",
    rounds: Annotated[int, typer.Option(help="Interleaved repetitions; medians are shown.")] = 3,
    dtype: Annotated[str, typer.Option(help="As vLLM names it: float32, bfloat16, …")] = "float32",
    json_file: opt.JsonFile = None,
) -> None:
    """Measure vLLM with the plug-in: stock, full depth, layer speed-ups 1.25 and 1.5, and an alpha by hand."""
    opt.at_least(8, max_new_tokens=new_tokens)
    opt.at_least(1, prompt_tokens=prompt_tokens, rounds=rounds)
    exact_alpha(alpha)
    check_version()
    # Both engines in this process, so that their turns are alike.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from depthdecay.integrations.vllm.bench import run_bench

    require_writable(json_file)
    folder = model_folder(model)
    config = model_config(folder)
    stock = (config.architectures or [""])[0]
    if stock not in ARCHITECTURES:
        raise DepthDecayError(f"{stock or model} is not served with depth decay; known are {', '.join(ARCHITECTURES)}")
    layers = config.num_hidden_layers
    plans = {
        "full depth": Plan.decay(layers, 1),
        "1.25x fewer": Plan.for_speedup(layers, "1.25", over_tokens=new_tokens),
        "1.5x fewer": Plan.for_speedup(layers, "1.5", over_tokens=new_tokens),
        f"alpha {alpha}": Plan.decay(layers, alpha),
    }
    settings: dict[str, Any] = {
        "new_tokens": new_tokens,
        "prompt_tokens": prompt_tokens,
        "rounds": rounds,
        "dtype": dtype,
    }
    with working("preparing …") as say:
        rows = run_bench(folder, stock, plans, workloads=workloads.split(","), progress=say, **settings)
    _print_rows(model, rows)
    write_result(json_file, {"model": model, "settings": settings | {"threads": _threads()}, "vllm_rows": rows})


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
    console.print(f"[bold]{model}[/] in vLLM, eager; speed-up against stock vLLM, eager too", highlight=False)
    console.print(table)
