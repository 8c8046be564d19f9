"""The demo: one question at full depth and with decay, both streamed, then what it took in a table and two plots."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from depthdecay.cli import options as opt
from depthdecay.cli.generate import stream_text
from depthdecay.cli.show import depth_curve, depth_legend, out_console, working
from depthdecay.engine.plan_choice import guess_is_meant
from depthdecay.errors import DepthDecayError, install
from depthdecay.plan.plan import Plan

if TYPE_CHECKING:
    from depthdecay.engine.engine import Engine
    from depthdecay.engine.result import Result

QUESTION = "Why is the sky blue?"
# Found by reading its answers: at 1.15 over 128 tokens the embedded model repeats itself, at 1.25 it falls apart.
SPEEDUP = "1.1"
WARMUP_TOKENS = 16
NEW_TOKENS = 128
_WARM_UP_STEPS = 8
# Two runs of each kind differ by as much as the plan gains; more of them take seconds where the model is small.
_TIMING_SECONDS, _MOST_RUNS = 4.0, 4
# Above the noise of a quiet machine; a process that takes a core away from us costs a factor of two or more.
MOST_SPREAD = 1.15

UNSTEADY = (
    "The wall-clock ratio is left out: runs of the same kind took different times, or the gain was more than fewer "
    "layers can bring, so something else was using the machine. Run it again when it is quiet, or use depthdecay bench."
)

CALIBRATED = (
    "The two texts differ: a token that ran fewer layers may be another token. Which layers this plan drops was "
    "measured, and maps repair what dropping them breaks; {how_good}. "
    "A larger model has more layers to spare: depthdecay calibrate makes a plan for yours."
)
MEASURED = "on held-out text it picks the full model's token {agreement:.0%} of the time"
RESCHEDULED = "how good it is at this speed was not measured"
CAVEAT = (
    "The two texts differ: a token that ran fewer layers may be another token, and in a small model soon a worse one. "
    "This plan is uncalibrated: it drops layers from the middle outwards, by guess. depthdecay calibrate measures "
    "which layers to drop, and repairs what that breaks."
)


def demo(
    model: opt.Model = opt.DEFAULT_MODEL,
    speedup: opt.Speedup = None,
    warmup_tokens: opt.WarmupTokens = None,
    max_new_tokens: opt.MaxNewTokens = NEW_TOKENS,
    question: Annotated[str, typer.Option(help="What both are asked.")] = QUESTION,
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("demo"),
    device: opt.Device = None,
    dtype: opt.Dtype = None,
) -> None:
    """The same question at full depth and with decay, side by side in numbers and in a picture."""
    new_tokens = max_new_tokens if max_new_tokens is not None else NEW_TOKENS
    opt.at_least(1, max_new_tokens=new_tokens)
    if not question.strip():
        raise DepthDecayError("the question is empty; give at least one word")
    as_shipped = model == opt.DEFAULT_MODEL and speedup is None and warmup_tokens is None
    warmup = WARMUP_TOKENS if warmup_tokens is None else warmup_tokens
    by_rule = opt.PlanOptions(speedup=speedup or SPEEDUP, warmup_tokens=warmup)
    plan_options = opt.PlanOptions("default") if as_shipped else by_rule
    stored = plan_options.load()
    options = opt.ModelOptions(model, device, dtype)
    loaded = options.load()
    plan = plan_options.choose(loaded.model, loaded.name, stored, new_tokens)
    assert plan is not None
    # Before either is timed: the first passes of a process allocate, choose kernels, and on CUDA capture graphs.
    with working("warming up …") as say:
        # An engine each: on CUDA it keeps the graphs of one plan, and to change plans is to capture anew.
        with guess_is_meant():
            full_engine, decay_engine = (options.engine(loaded, depth, progress=say) for depth in (None, plan))
        for engine in (full_engine, decay_engine):
            engine.generate([question], _warm_up_tokens(engine, new_tokens), mode=engine.step_mode, do_sample=False)
    console = out_console()
    console.print(Text.assemble(("\n› ", "dim"), (question, "bold")))
    full = _answer(full_engine, question, new_tokens)
    decay = _answer(decay_engine, question, new_tokens)
    with working("timing both again …"):
        again = _timed_in_turns(decay_engine, full_engine, question, new_tokens)
    timing = Timing((full.ms_per_token, *again[full_engine]), (decay.ms_per_token, *again[decay_engine]))
    console.print()
    console.print(results_table(full, decay, timing, f"{loaded.name} on {full_engine.device}"), soft_wrap=False)
    if not timing.is_steady(decay.layer_speedup):
        console.print(Text(UNSTEADY, style="yellow"), soft_wrap=False)
    console.print()
    console.print(Text("depth of each token (· saved)", style="bold"))
    shallowest = opt.shallowest_depth(decay_engine, new_tokens)
    console.print(depth_curve(decay.depths, decay.num_layers, shallowest, min(console.width, 100), height=8))
    console.print(depth_legend(decay.depths, decay.num_layers, shallowest))
    console.print()
    console.print(Text(caveat(plan, stored), style="yellow"), soft_wrap=False)
    console.print(Text(save_picture(decay, plan, loaded.name, out), style="dim"))


def caveat(plan: Plan, stored: Plan | None) -> str:
    """What to expect of the text: in figures where the plan runs as it was stored, since they are its own."""
    measured = plan.notes.get("calibration")
    if measured is None:
        return CAVEAT
    as_stored = stored is not None and stored.schedule == plan.schedule and "agreement" in measured
    return CALIBRATED.format(how_good=MEASURED.format(**measured) if as_stored else RESCHEDULED)


def _warm_up_tokens(engine: Engine, new_tokens: int) -> int:
    """Graphs are captured for a length, and kept for what is no longer; elsewhere a few steps do."""
    return new_tokens if engine.uses_graphs else min(_WARM_UP_STEPS, new_tokens)


def _answer(engine: Engine, question: str, new_tokens: int) -> Result:
    layers = engine.stack.num_layers
    title = "depth decay: fewer and fewer layers" if engine.plan else f"full depth: {layers} layers for every token"
    console = out_console()
    console.print()
    if console.is_terminal:
        console.print(Rule(Text(title, style="bold"), align="left", style="dim"), soft_wrap=False)
    else:
        console.print(f"--- {title}")
    stream = engine.stream(question, new_tokens, mode=engine.step_mode, do_sample=False)
    stream_text(engine, stream, opt.shallowest_depth(engine, new_tokens), show_depth=True)
    return stream.result


def _timed_in_turns(first: Engine, second: Engine, question: str, new_tokens: int) -> dict[Engine, list[float]]:
    """Milliseconds per token of further runs, some seconds of them.

    In changing order, so that a machine that grows busier or quieter meanwhile favours neither.
    """
    found: dict[Engine, list[float]] = {first: [], second: []}
    started = time.monotonic()
    turns = (first, second)
    while len(found[first]) < _MOST_RUNS and (not found[first] or time.monotonic() - started < _TIMING_SECONDS):
        for engine in turns:
            result = engine.generate([question], new_tokens, mode=engine.step_mode, do_sample=False)[0]
            found[engine].append(result.ms_per_token)
        turns = turns[::-1]
    return found


@dataclass(frozen=True)
class Timing:
    """Milliseconds per token of some runs at full depth and as many with decay, two at least."""

    full: tuple[float, ...]
    decay: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return min(self.full) / min(self.decay)

    def is_steady(self, layer_speedup: float) -> bool:
        """Whether the best runs of a kind agree, and fewer layers can bring such a gain; else something else ran."""
        runs = (self.full, self.decay)
        if not all(min(run) > 0 for run in runs):
            return False
        alike = all(sorted(run)[1] <= MOST_SPREAD * min(run) for run in runs)
        return alike and self.ratio <= MOST_SPREAD * layer_speedup


def results_table(full: Result, decay: Result, timing: Timing, title: str) -> Table:
    """Both answers in figures. The ratio is of time per token, since the answers may end at different lengths."""
    table = Table(
        title=f"{title}, greedy, decoding only, the best of {len(timing.full)} runs",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    # Broken by hand, so that it fits into 80 columns.
    for heading in ("", "tokens", "tokens/s", "ms/token", "layers\nexecuted", "layer\nspeed-up", "wall-clock\nratio"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    steady = timing.is_steady(decay.layer_speedup)
    for name, result, runs in (("full depth", full, timing.full), ("depth decay", decay, timing.decay)):
        best = min(runs)
        table.add_row(
            name,
            str(len(result.token_ids)),
            f"{1000 / best:.1f}" if best else "-",
            f"{best:.1f}" if best else "-",
            str(result.layers_executed),
            f"{result.layer_speedup:.2f}x",
            f"{min(timing.full) / best:.2f}x" if steady else "unsteady",
        )
    return table


def save_picture(result: Result, plan: Plan, model: str, folder: Path) -> str:
    """Draw depth over position as depth.png; a sentence on where it is, or on what is missing."""
    try:
        import matplotlib
    except ImportError:
        return f"no picture: matplotlib is not installed; {install('plot')} brings it"
    matplotlib.use("Agg")
    file = folder / "depth.png"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draw_depths(result.depths, result.num_layers, plan, model).savefig(file, dpi=160)
    except OSError as error:
        raise DepthDecayError(f"the picture cannot be written to '{file}': {error.strerror or error}") from None
    return f"picture: {file}"


def draw_depths(depths: Sequence[int], num_layers: int, plan: Plan, model: str) -> Any:
    """A step curve from 0 to all layers: the area below is work done, the area above is work saved."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    ink, done, saved = "#1f2937", "#3b82f6", "#f59e0b"
    # Each token is a step one wide, from its index to the next.
    edges = list(range(len(depths) + 1))
    heights = [*depths, depths[-1]]
    share = 1 - sum(depths) / (num_layers * len(depths))
    figure = Figure(figsize=(9, 4.6), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.fill_between(edges, heights, step="post", color=done, alpha=0.16, linewidth=0)
    axes.fill_between(edges, heights, num_layers, step="post", color=saved, alpha=0.30, linewidth=0)
    axes.step(edges, heights, where="post", color=done, linewidth=2.2)
    axes.axhline(num_layers, color=ink, linewidth=1, linestyle=(0, (4, 3)), alpha=0.6)
    axes.annotate(
        f"full depth, {num_layers} layers",
        (0, num_layers),
        xytext=(4, 5),
        textcoords="offset points",
        color=ink,
        fontsize=9,
    )
    axes.text(
        len(depths) * 0.5,
        min(depths) * 0.5,
        f"layers executed: {sum(depths):,} of {num_layers * len(depths):,}",
        ha="center",
        va="center",
        color="#1d4ed8",
        fontsize=11,
    )
    axes.annotate(
        f"saved: {share:.1%}",
        (len(depths) * 0.93, (depths[int(len(depths) * 0.93)] + num_layers) / 2),
        ha="right",
        va="center",
        color="#92400e",
        fontsize=11,
        fontweight="bold",
    )
    axes.set_xlim(0, max(1, len(depths)))
    axes.set_ylim(0, num_layers * 1.08)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    step = max(1, num_layers // 6)
    axes.set_yticks([*range(0, num_layers - step // 2, step), num_layers])
    axes.set_xlabel("position of the generated token", color=ink)
    axes.set_ylabel("decoder layers run", color=ink)
    axes.set_title("The further the text has come, the fewer layers\n", loc="left", color=ink, fontweight="bold")
    axes.text(0, 1.025, _subtitle(plan, model), transform=axes.transAxes, color="#6b7280", fontsize=9)
    axes.tick_params(colors="#6b7280")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#d1d5db")
    return figure


def _subtitle(plan: Plan, model: str) -> str:
    settings = plan.schedule.to_dict()
    words = [model, f"α = {settings['alpha']}"] if "alpha" in settings else [model]
    if settings.get("warmup_tokens"):
        words.append(f"{settings['warmup_tokens']} tokens of warm-up")
    if "calibration" not in plan.notes:
        return " · ".join([*words, "uncalibrated, middle-out"])
    return " · ".join([*words, "calibrated, repaired" if plan.repairs else "calibrated"])
