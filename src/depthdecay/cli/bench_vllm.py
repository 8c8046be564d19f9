"""`depthdecay bench-vllm`: vLLM with the plug-in compared with stock vLLM, as a table and a result file."""

from __future__ import annotations

import json
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
    alpha: Annotated[str, typer.Option(help="One more decay, besides speed-ups 1.25 and 1.5.")] = "0.99",
    rounds: Annotated[int, typer.Option(help="Repetitions.")] = 3,
    dtype: Annotated[str, typer.Option(help="As vLLM names it: float32, bfloat16, …")] = "float32",
    ways: Annotated[
        str | None,
        typer.Option(
            help="Instead of --workloads, measure vLLM with its compiler and CUDA graphs, one process per way. Some of "
            "stock, ngram, ngram-gpu, suffix, head, decay, decay-v1, decay-eager, engine, separated by commas."
        ),
    ] = None,
    shape: Annotated[str | None, typer.Option(help="With --ways: random weights of a shape, as llama-2-7b.")] = None,
    head: Annotated[str | None, typer.Option(help="With --ways: a head from export --format eagle3.")] = None,
    plan: Annotated[str | None, typer.Option(help="With --ways: a plan instead of speed-ups 1.25 and 1.5.")] = None,
    prompts: Annotated[str | None, typer.Option(help="With --ways: a file of prompts, not random tokens.")] = None,
    methods: Annotated[str | None, typer.Option(help="With --ways: some of the decay methods, separated by ;.")] = None,
    batches: Annotated[str, typer.Option(help="With --ways: batch sizes in lock-step.")] = "1,16,64",
    rates: Annotated[str, typer.Option(help="With --ways: Poisson arrivals, requests per second.")] = "",
    rate_seconds: Annotated[float, typer.Option(help="With --rates: how long requests arrive.")] = 10,
    graph_depths: Annotated[int | None, typer.Option(help="With --ways: at most so many depths get graphs.")] = None,
    group_wait_ms: Annotated[float | None, typer.Option(help="With --ways: new requests wait for each other.")] = None,
    way_timeout: Annotated[float, typer.Option(help="With --ways: seconds after which a way is stopped.")] = 900,
    resume: Annotated[bool, typer.Option(help="With --ways: measure only what the JSON file does not hold.")] = False,
    json_file: opt.JsonFile = None,
) -> None:
    """Measure vLLM with the plug-in: stock, full depth, layer speed-ups 1.25 and 1.5, and an alpha of your choice."""
    opt.at_least(8, max_new_tokens=new_tokens)
    opt.at_least(1, prompt_tokens=prompt_tokens, rounds=rounds)
    if ways is not None:
        settings: dict[str, Any] = {"new_tokens": new_tokens, "prompt_tokens": prompt_tokens, "rounds": rounds}
        settings |= {"dtype": dtype, "graph_depths": graph_depths, "rate_seconds": rate_seconds}
        settings["group_wait_ms"] = group_wait_ms
        files = {"head": head, "plan": plan, "prompts": prompts}
        run = {"way_timeout": way_timeout, "batches": _numbers("--batches", batches, int)}
        run["rates"] = _numbers("--rates", rates, float)
        run["methods"] = None if methods is None else [method.strip() for method in methods.split(";")]
        _bench_ways(model, shape, [way.strip() for way in ways.split(",")], settings, files, run, resume, json_file)
        return
    exact_alpha(alpha)
    check_version()
    # Both engines in this process, so that they take turns under the same conditions.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from depthdecay.integrations.vllm.bench import run_bench

    require_writable(json_file)
    folder = model_folder(model)
    config = model_config(folder)
    stock = _served_architecture(config, model)
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


def _served_architecture(config: Any, model: str) -> str:
    stock = str((config.architectures or [""])[0])
    if stock not in ARCHITECTURES:
        raise DepthDecayError(f"{stock or model} is not served with depth decay; known are {', '.join(ARCHITECTURES)}")
    return stock


def _bench_ways(
    model: str,
    shape: str | None,
    ways: list[str],
    settings: dict[str, Any],
    files: dict[str, str | None],
    run: dict[str, Any],
    resume: bool,
    json_file: str | None,
) -> None:
    check_version()
    from tempfile import TemporaryDirectory

    from depthdecay.integrations.vllm.bench_ways import run_ways, shape_folder

    target = require_writable(json_file)
    named = {**settings, **{name: value and Path(value).name for name, value in files.items()}}
    before = _before(target, shape or model, named) if resume else None

    def write(found: dict[str, Any]) -> None:
        write_result(json_file, {"model": shape or model, "settings": named, "vllm_ways": found})

    with TemporaryDirectory() as made, working("preparing …", lasting=True) as say:
        folder = model_folder(model) if shape is None else shape_folder(shape, Path(made))
        config = model_config(folder)
        stock = _served_architecture(config, model)
        ids = None if files["prompts"] is None else _prompt_ids(folder, files["prompts"], config.vocab_size)
        found = run_ways(
            folder,
            stock,
            config.num_hidden_layers,
            ways=ways,
            dummy=shape is not None,
            prompts=ids,
            head=files["head"],
            plan=files["plan"],
            before=before,
            log_folder=_log_folder(target),
            on_progress=write,
            progress=say,
            **settings,
            **run,
        )
    write(found)
    _print_ways(shape or model, found)


def _log_folder(target: Path | None) -> Path | None:
    """What vLLM prints lies next to the result file: without it, a way that fails on a borrowed GPU is a riddle."""
    if target is None:
        return None
    folder = target.with_suffix(".logs")
    folder.mkdir(exist_ok=True)
    return folder


def _before(target: Path | None, model: str, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The figures of an interrupted run with the same settings."""
    if target is None:
        raise DepthDecayError("--resume needs --json-file, the file of the interrupted run")
    if not target.exists():
        return None
    try:
        held = json.loads(target.read_text(encoding="utf-8"))
        same = held["model"] == model and held["settings"] == settings
        before = dict(held["vllm_ways"])
    except (OSError, ValueError, KeyError, TypeError):
        raise DepthDecayError(f"'{target}' is not a result of bench-vllm --ways; give another --json-file") from None
    if not same:
        raise DepthDecayError(f"'{target}' was measured with other settings; give another --json-file, or no --resume")
    return before


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
        raise DepthDecayError(f"{flag} is '{words}'; expected numbers above 0, separated by commas")
    return found


def _print_ways(model: str, found: dict[str, Any]) -> None:
    table = figures_table("", "", "ms per token", "speed-up", "first token p95, ms", "tokens/s", "accepted", "differ")
    for row in found["rows"]:
        speedup, first, accepted = (row.get(name) for name in ("speedup", "first_token_p95_ms", "acceptance"))
        differ = row.get("answers_that_differ")
        table.add_row(
            row["workload"],
            row["method"],
            f"{row['ms_per_token']:.2f}",
            "–" if speedup is None else f"{speedup:.2f}x",
            "–" if first is None else f"{first:.0f}",
            f"{row['tokens_per_second']:.0f}",
            "–" if accepted is None else f"{accepted:.1%}",
            "–" if differ is None else f"{differ} of {len(row['answers'])}",
        )
    console = Console()
    console.print(f"[bold]{model}[/] in vLLM; speed-up against stock vLLM with its CUDA graphs", highlight=False)
    console.print(table)
    for way, engine in found["engines"].items():
        facts = [f"failed: {engine['failed']}"] if "failed" in engine else []
        facts += [f"started in {engine['start_seconds']} s"] if "start_seconds" in engine else []
        facts += [f"graphs take {engine['graph_gib']} GiB"] if "graph_gib" in engine else []
        steps = engine.get("steps") or {}
        if sum(steps.values()):
            eager = sum(count for kind, count in steps.items() if kind.endswith("no graph"))
            replayed = 1 - eager / sum(steps.values())
            counts = ", ".join(f"{count} {kind}" for kind, count in sorted(steps.items()))
            facts.append(f"{replayed:.1%} of steps replayed ({counts})")
        console.print(f"{way}: {'; '.join(facts)}", markup=False, highlight=False)


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
