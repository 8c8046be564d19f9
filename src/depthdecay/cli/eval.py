"""`depthdecay eval`: accuracy and cost of a plan and of other methods, as a table and a result file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from depthdecay.cli import options as opt
from depthdecay.cli.process import settle
from depthdecay.cli.show import figures_table, going_on, shown_even_unwritten, working
from depthdecay.errors import DepthDecayError

if TYPE_CHECKING:
    from rich.table import Table

    from depthdecay.evaluation.report import EvaluationReport, EvaluationRow

_task, _compared, _output = (partial(typer.Option, rich_help_panel=panel) for panel in ("Task", "Compared", "Output"))


@opt.grouped("compile")
def eval_command(
    task: Annotated[str, _task(help="gsm8k, bbh, humaneval, mbpp or squad.")],
    data: Annotated[str | None, _task(help="The task's file; for bbh, its folder (default: a package or the Hub).")] = (
        None
    ),
    limit: Annotated[int | None, _task(help="Only the first N questions; for bbh, of each subtask.")] = None,
    shots: Annotated[int | None, _task(help="Few-shot examples for gsm8k (default: 0 with --chat, else 8).")] = None,
    subtasks: Annotated[str | None, _task(help="Subtasks of bbh, comma-separated.")] = None,
    prompts_dir: Annotated[
        str | None, _task(help="Few-shot examples for bbh (default: bbh-cot-prompts next to --data).")
    ] = None,
    chat: Annotated[
        bool | None, _task("--chat/--no-chat", help="Use the chat template (default: if there is one).")
    ] = (None),
    max_new_tokens: Annotated[
        int | None, _task(*opt.MAX_NEW_TOKENS, help="Longest answer, in tokens (default: the task's).")
    ] = None,
    *,
    model: opt.ModelOptions,
    plan: opt.PlanPath = None,
    allow_other_weights: opt.AllowOtherWeights = False,
    methods: Annotated[
        str | None,
        _compared(
            help="Comma-separated: full, lossless, depthdecay, middle-out, skipdecode, unified, shortgpt, early-exit, "
            "constant."
        ),
    ] = None,
    mode: Annotated[str | None, _compared(metavar="lossless", help="Short for --methods full,lossless.")] = None,
    speedups: Annotated[str | None, _compared(help="Layer budgets, e.g. 1.1,1.25 (default: the plan's own).")] = None,
    over: Annotated[int, _compared(help="Average a budget over this many tokens.")] = opt.DEFAULT_OVER,
    batch: Annotated[int, _compared(help="Batch size.")] = 64,
    json_file: Annotated[
        str | None, _output(opt.JSON_FILE, metavar="FILE", help="Write a result file; run again to resume.")
    ] = None,
    answers: Annotated[str | None, _output(metavar="FILE", help="Write every answer, one per line.")] = None,
) -> None:
    """Measure quality: compare methods with full depth, on the same questions and at the same layer budget."""
    if mode is not None:
        if mode != "lossless" or methods is not None:
            raise DepthDecayError(f"--mode is {mode!r}; expected lossless, and no --methods with it")
        methods = "full,lossless"
    from depthdecay.evaluation.task import TaskOptions, open_task

    # Opened here, so that a wrong name or file is reported before the slow import of torch.
    chosen = open_task(task, TaskOptions(data, limit, shots, _listed(subtasks), prompts_dir))
    kept = None if json_file is None else "resumes after the finished batches"
    with going_on(kept), shown_even_unwritten(_print_report), working("preparing …", lasting=True) as say:
        settle(model.threads)
        from depthdecay.evaluation.evaluate import evaluate

        report = evaluate(
            model.model,
            chosen,
            plan,
            methods=_listed(methods),
            speedups=_listed(speedups) or (),
            over_tokens=over,
            chat=chat,
            max_new_tokens=max_new_tokens,
            batch=batch,
            allow_other_weights=allow_other_weights,
            result_file=json_file,
            answers_file=answers,
            quantize=model.quantize,
            device=model.device,
            dtype=model.dtype,
            trust_remote_code=model.trust_remote_code,
            progress=say,
        )
    _print_report(report)


def _listed(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def _print_report(report: EvaluationReport) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 140)  # a file has no terminal width to fit
    settings = report.settings
    console.print(
        f"[bold]{report.model}[/] on [bold]{report.task}[/], {settings['asked']}, {settings['questions']} questions, "
        f"up to {settings['max_new_tokens']} tokens, {settings['dtype']} on {settings['device']}, "
        f"batch {settings['batch']}\n",
        highlight=False,
    )
    console.print(_table(report))
    for found in report.comparisons:
        budget = "" if found["speedup"] is None else f" at {found['speedup']:g}x"
        console.print(f"depthdecay − {found['peer']}{budget}: {_difference(found)}", highlight=False)
    about = _about_layers(settings["over_tokens"], settings["calibrated_over_tokens"])
    console.print(f"[dim]{about}[/]", highlight=False)
    console.print("[dim]Δ is in points, with its paired 95% interval; p is McNemar's exact test.[/]", highlight=False)
    if settings["device"] == "cpu":
        console.print("[dim]Methods ran one after another; on a busy CPU, compare their times with bench instead.[/]")


def _about_layers(over_tokens: int, calibrated: int | None) -> str:
    """Planned and executed layers differ because they depend on the length of the answers."""
    words = f"Layers planned: over {over_tokens} tokens (--over); executed: at the answers' actual lengths."
    if calibrated in (None, over_tokens):
        return words
    return f"{words} The plan was calibrated for {calibrated} tokens; its own speed-up holds over those."


def _table(report: EvaluationReport) -> Table:
    """One row per method and budget; extra measures and the mean over subtasks if the task has them."""
    shown = dict(_COLUMNS)
    if any(row.acceptance is not None for row in report.rows):
        shown["drafts\naccepted"] = lambda row: "–" if row.acceptance is None else f"{row.acceptance:.0%}"
    for name in report.rows[0].measures:
        shown[name] = _measure(name)
    if report.rows[0].group_mean is not None:
        shown["mean of\nsubtasks"] = lambda row: f"{100 * (row.group_mean or 0):.1f}"
    table = figures_table("", *shown, no_wrap=True)
    for row in report.rows:
        table.add_row(row.title, *(show(row) for show in shown.values()))
    return table


def _measure(name: str) -> Callable[[EvaluationRow], str]:
    return lambda row: f"{100 * row.measures[name]['mean']:.1f}"


def _difference(found: dict[str, float] | None) -> str:
    if found is None:
        return "–"
    return f"{100 * found['value']:+.1f} [{100 * found['low']:+.1f}, {100 * found['high']:+.1f}], p {found['p']:.2g}"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"


_COLUMNS: dict[str, Callable[[EvaluationRow], str]] = {
    "right\n%": lambda row: f"{100 * row.accuracy:.1f}",
    "Δ to full\n": lambda row: _difference(row.difference_to_full),
    "tokens\neach": lambda row: f"{row.tokens / row.n:.0f}",
    "layers\nplanned": lambda row: _times(row.planned_layer_speedup),
    "layers\nexecuted": lambda row: _times(row.layer_speedup),
    "cost\nexecuted": lambda row: _times(row.cost_speedup),
    "wall\nclock": lambda row: _times(row.wall_clock_speedup),
    "tokens/s\n": lambda row: "–" if row.tokens_per_second is None else f"{row.tokens_per_second:.0f}",
    "decode\nseconds": lambda row: f"{row.decode_seconds:.1f}",
}
