"""`depthdecay analyze`: charts about a model, its layers and a plan, and about result files of `eval`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from depthdecay.cli import options as opt
from depthdecay.cli.show import out_console, working
from depthdecay.errors import DepthDecayError
from depthdecay.files import make_folder

if TYPE_CHECKING:
    from depthdecay.bench.drawing import Chart
    from depthdecay.plan.plan import Plan

_measurement = partial(typer.Option, rich_help_panel="Measurement")


@opt.grouped("compile", "quantize", "threads")
def analyze(
    out: Annotated[str, typer.Option(help="Folder for the charts; created if missing.")],
    more_results: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE]...", help="More files for --results, so that *.json works.")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help="A .jsonl or .txt file of prompts to measure on (default: only draw --results).")
    ] = None,
    results: Annotated[
        list[str] | None, typer.Option(help="Result files of depthdecay eval --json-file, for speed against quality.")
    ] = None,
    *,
    model: opt.ModelOptions,
    plan: opt.PlanPath = None,
    allow_other_weights: opt.AllowOtherWeights = False,
    limit: Annotated[int, _measurement(help="Prompts to measure on.")] = 32,
    new_tokens: Annotated[int, _measurement(*opt.MAX_NEW_TOKENS, help="Tokens per answer.")] = 200,
) -> None:
    """Draw charts: a model's layers and predictability by position, what a plan costs, and speed against quality."""
    opt.at_least(1, limit=limit)
    opt.at_least(2, max_new_tokens=new_tokens)
    files = [*(results or []), *(more_results or [])]
    if prompts is None and not files:
        raise DepthDecayError("there is nothing to analyze; give --prompts to measure on, or --results to draw")
    if prompts is None and plan is not None:
        raise DepthDecayError("--plan was given without --prompts; add --prompts to measure it on")

    from depthdecay.bench.analysis import read_quality
    from depthdecay.bench.drawing import require_drawing
    from depthdecay.bench.figures import quality_chart

    require_drawing()
    charts = [quality_chart(read_quality(files))] if files else []
    folder = make_folder(out)
    if prompts is not None:
        stored = opt.PlanOptions(plan).load()
        measured = _measured(model, prompts, stored, limit, new_tokens, folder, allow_other_weights)
        charts = [*measured, *charts]
    _write(folder, charts)


def _measured(
    options: opt.ModelOptions,
    prompts: str,
    plan: Plan | None,
    limit: int,
    new_tokens: int,
    folder: Path,
    allow_other_weights: bool,
) -> list[Chart]:
    """Measure, and write the results next to the charts, with the command and the machine."""
    with working("preparing …", lasting=True) as say:
        from depthdecay.bench.analysis import analyze as measure
        from depthdecay.bench.analysis import charts, fitting_prompts
        from depthdecay.prompt_files import read_prompts
        from depthdecay.result_files import write_result

        texts = read_prompts(prompts)
        say(f"loading {options.model}")
        loaded = options.load(quiet=True)
        engine = options.engine(loaded, plan, allow_other_weights=allow_other_weights, progress=say)
        analysis = measure(engine, fitting_prompts(engine, texts, limit, new_tokens), new_tokens, say)
    settings = {
        "model": loaded.shown_name,
        "plan": None if plan is None else opt.plan_dict(plan),
        "new_tokens": new_tokens,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": loaded.model.device.type,
    }
    write_result(folder / "analysis.json", settings | analysis.to_dict())
    return charts(analysis, plan, new_tokens)


def _write(folder: Path, charts: list[Chart]) -> None:
    from depthdecay.bench.drawing import write_chart

    console = out_console()
    with working("drawing …") as say:
        for chart in charts:
            say(f"drawing {chart.name}")
            for file in write_chart(folder, chart):
                console.print(str(file), markup=False)
