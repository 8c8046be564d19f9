"""The output of `depthdecay bench`: a table for each kind of report."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console

from depthdecay.cli.show import figures_table

if TYPE_CHECKING:
    from rich.table import Table

    from depthdecay.bench.cpu import CpuReport
    from depthdecay.bench.decoding import DecodingReport, DecodingRow
    from depthdecay.bench.lossless_report import LosslessReport
    from depthdecay.bench.step_costs import StepCostReport


def print_precisions(report: CpuReport) -> None:
    settings = report.settings
    # Ranges are below their medians: next to them, they would not fit into 80 columns.
    headings = ("ms/token\n(rounds)", "tokens/s\n", "× generate\n", "× llama.cpp\n", "of\nmemory", "realised\n")
    table = figures_table("", *headings, no_wrap=True)
    for row in report.rows:
        if row.error is not None:
            table.add_row(row.title, f"[red]failed: {row.error}[/]")
            continue
        table.add_row(
            row.title,
            f"{_number(row.ms_per_token, 2)}\n[dim]{_number(row.ms_min, 1)}–{_number(row.ms_max, 1)}[/]",
            _number(row.tokens_per_second, 1),
            _spread(row.times_generate),
            _spread(row.times_llama),
            _number(100 * (row.bandwidth_share or 0), 0, "%"),
            _number(row.realised, 2) if row.title.startswith("decay") else "",
        )
    console = Console()
    console.print(
        f"[bold]{report.model}[/] on {settings['threads']} threads, prompt of {settings['prompt_tokens']}, "
        f"{settings['new_tokens']} new tokens, {settings['rounds']} interleaved rounds",
        highlight=False,
    )
    console.print(f"[dim]memory bandwidth {report.read_gb_per_second:.1f} GB/s (large read); {settings['plan']}[/]\n")
    console.print(table)
    console.print(
        "[dim]× generate: speed relative to transformers' generate in bfloat16, median and range over the rounds. "
        "of memory: weight bytes read per second, as a share of memory bandwidth. realised: the plan's wall-clock "
        "speed-up divided by its cost speed-up (in bytes).[/]"
    )


def _spread(values: list[float] | None) -> str:
    return "–" if values is None else f"{values[0]:.2f}\n[dim]{values[1]:.2f}–{values[2]:.2f}[/]"


def print_decoding(report: DecodingReport) -> None:
    console = Console()
    settings = report.settings
    console.print(
        f"[bold]{report.model}[/], {settings['dtype']} on {settings['device']}, batch {settings['batch']}, prompt of "
        f"{settings['prompt_tokens']}, {settings['new_tokens']} new tokens"
    )
    console.print(
        f"[dim]{report.weight_gb:.2f} GB of weights per step at full depth; copy bandwidth "
        f"{report.copy_gb_per_second:.0f} GB/s; {settings['plan']}[/]\n"
    )
    console.print(_table(report))
    for row in report.rows:
        if row.error:
            console.print(f"[red]{row.title} failed:[/] {row.error}", highlight=False)
    for name, ratio in report.ratios.items():
        console.print(f"{name}: {ratio:.2f}x")
    if report.settings["rounds"] > 1:
        console.print(
            "[dim]Ratios and speed-ups are medians of the per-round values, so they may differ from ratios of the "
            "medians above.[/]"
        )
    if settings["device"] == "cpu":
        console.print("[dim]Compare CPU times only within one run, whose rounds are interleaved for that.[/]")


def _table(report: DecodingReport) -> Table:
    """One column per method, one row per figure: narrow enough for any terminal."""
    table = figures_table("", *(_HEADINGS[row.method] for row in report.rows))
    for label, show in _FIGURES.items():
        table.add_row(label, *("[red]failed[/]" if row.error else show(row) for row in report.rows))
    return table


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "–" if value is None else f"{value:.{digits}f}{unit}"


_HEADINGS = {
    "generate": "transformers\ngenerate",
    "generate-static": "generate,\nstatic cache",
    "full": "depthdecay\nfull depth",
    "decay": "depthdecay\ndecay",
}
_FIGURES: dict[str, Callable[[DecodingRow], str]] = {
    "ms/token": lambda row: _number(row.ms_per_token, 3),
    "  range of rounds": lambda row: f"{_number(row.ms_min, 2)}–{_number(row.ms_max, 2)}",
    "tokens/s": lambda row: _number(row.tokens_per_second, 1),
    "GB/s of weights": lambda row: _number(row.gb_per_second, 1),
    "  of copy bandwidth": lambda row: _number(100 * (row.bandwidth_share or 0), 0, "%"),
    "layers executed": lambda row: str(row.layers_executed),
    "layer speed-up": lambda row: _number(row.layer_speedup, 3, "x"),
    "cost speed-up (ideal)": lambda row: _number(row.cost_speedup, 3, "x"),
    "wall-clock speed-up": lambda row: _number(row.wall_clock_speedup, 3, "x"),
    "realised (share of ideal)": lambda row: _number(row.realised, 3),
    "memory GB": lambda row: _number(row.memory_gb, 1),
    "set-up s": lambda row: _number(row.setup_seconds, 1),
}


def print_step_costs(report: StepCostReport) -> None:
    console = Console()
    console.print(
        f"[bold]{report.model}[/], {report.settings['dtype']} on {report.settings['device']}", highlight=False
    )
    checks = ", ".join(f"{cost:.3f} for {tokens}" for tokens, cost in report.verifications.items())
    console.print(f"in units of a full-depth step, a verification costs {checks} tokens\n", highlight=False)
    accepted = sorted({row["acceptance"] for row in report.speedups})
    table = figures_table("drafts at", "a draft costs", *(f"{p:.0%} accepted" for p in accepted))
    for depth, cost in report.drafts.items():
        speeds = [
            f"{row['speedup']:.2f}x ({row['drafts']:.0f})" for row in report.speedups if str(row["depth"]) == depth
        ]
        table.add_row(f"{depth} layers", f"{cost:.3f}", *speeds)
    console.print(table)
    console.print("[dim]Speed-up by acceptance rate, with the best number of drafts per window in brackets.[/]")


def print_lossless(report: LosslessReport) -> None:
    table = figures_table("", "tokens/s", "speed-up", "ideal", "accepted", "per pass", "differ")
    for row in report.lossless_rows:
        if row.error is not None:
            table.add_row(row.method, f"[red]failed: {row.error}[/]")
            continue
        ideal = None if row.passes_per_token is None else 1 / row.passes_per_token
        table.add_row(
            row.method,
            _number(row.tokens_per_second, 1),
            _number(row.speedup, 2, "x"),
            _number(ideal, 2, "x"),
            _number(row.acceptance, 3),
            _number(row.tokens_per_verification, 2),
            str(row.answers_that_differ),
        )
    console = Console()
    console.print(table)
    for row in report.lossless_rows:
        if row.differences and row.method.startswith("lossless"):
            widest = max(row.differences, key=lambda difference: abs(difference.margin))
            console.print(
                f"{row.method}: where answers diverge, the two logits differ by at most {abs(widest.margin):.3g} "
                f"(one rounding step is {widest.spacing:.3g})",
                highlight=False,
            )
    console.print(
        "[dim]ideal: speed-up by layer passes. accepted: share of drafts. per pass: tokens per verification. differ: "
        "answers that diverge from full depth, as near-ties may in 16 bits.[/]"
    )
