"""The demo: a task in lossless mode, then a question with decay, each compared with full depth."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from depthdecay.cli import options as opt
from depthdecay.cli.depth_picture import save_picture
from depthdecay.cli.generate import stream_text
from depthdecay.cli.show import depth_curve, depth_legend, out_console, working
from depthdecay.engine.plan_choice import guess_is_meant
from depthdecay.errors import DepthDecayError
from depthdecay.plan.plan import Plan

if TYPE_CHECKING:
    from depthdecay.engine.engine import Engine
    from depthdecay.engine.result import Result

# Prompt lookup drafts text that the answer copies from its prompt, so a task that edits text shows lossless mode best.
TASK = (
    "Make a list of the sentences in this text, one a line:\n\n"
    "The committee meets on the first Monday of each month. Members who cannot come write to the secretary by Friday. "
    "The secretary sends the agenda on Wednesday, and the minutes a week after the meeting."
)
QUESTION = "Why is the sky blue?"
# Chosen by reading the answers: at 1.15 over 128 tokens the embedded model repeats itself, at 1.25 it falls apart.
SPEEDUP = "1.1"
WARMUP_TOKENS = 16
NEW_TOKENS = 128
_WARM_UP_STEPS = 8
# Two runs of the same kind can differ by as much as the plan gains. More runs take only seconds on a small model.
_TIMING_SECONDS, _MOST_RUNS = 4.0, 4
# Above the noise of an idle machine; another process on one of our cores costs a factor of two or more.
MOST_SPREAD = 1.15

DRAFTED = "bold cyan"
FULL = "full depth"
NAMES = {"lossless": "lossless", "decay": "depth decay"}

UNSTEADY = (
    "The wall-clock ratio is left out: run times varied too much, or the gain was larger than fewer layers can "
    "explain, so something else was using the machine. Run it again when it is idle, or use depthdecay bench."
)

CALIBRATED = (
    "The two texts differ: with fewer layers, the model may pick another token. Which layers this plan drops was "
    "measured, and repair maps replace them; {how_good}. "
    "Larger models have more layers to spare: depthdecay calibrate makes a plan for yours."
)
MEASURED = "on held-out text it picks the full model's token {agreement:.0%} of the time"
RESCHEDULED = "its quality at this speed was not measured"
CAVEAT = (
    "The two texts differ: with fewer layers, the model may pick other tokens, and a small model soon worse ones. "
    "This plan is uncalibrated: it drops layers from the middle outwards, by a rule of thumb. depthdecay calibrate "
    "measures which layers to drop, and fits repairs for them."
)


def demo(
    model: opt.Model = opt.DEFAULT_MODEL,
    speedup: opt.Speedup = None,
    warmup_tokens: opt.WarmupTokens = None,
    max_new_tokens: opt.MaxNewTokens = NEW_TOKENS,
    question: Annotated[
        str | None, typer.Option(help="Your own prompt for both modes, instead of the built-in ones.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("demo"),
    device: opt.Device = None,
    dtype: opt.Dtype = None,
) -> None:
    """See lossless mode and depth decay next to full depth: answers, speed, and a plot of the depth per token."""
    new_tokens = max_new_tokens if max_new_tokens is not None else NEW_TOKENS
    opt.at_least(1, max_new_tokens=new_tokens)
    if question is not None and not question.strip():
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
    task, question = question or TASK, question or QUESTION
    # Before anything is timed: a process's first passes allocate, choose kernels, and on CUDA capture graphs.
    with working("warming up …") as say:
        # One engine each: on CUDA an engine keeps the graphs of one plan, and changing plans means capturing again.
        with guess_is_meant():
            full, lossless, decay = (
                options.engine(loaded, depth, mode=mode, progress=say)
                for depth, mode in ((None, "full"), (None, "lossless"), (plan, "decay"))
            )
        for engine, prompt in ((full, task), (lossless, task), (decay, question)):
            engine.generate([prompt], _warm_up_tokens(engine, new_tokens), do_sample=False)
    title = f"{loaded.name} on {full.device}"
    show_lossless(full, lossless, task, new_tokens, title)
    result = show_decay(full, decay, question, new_tokens, title)
    console = out_console()
    console.print(Text(caveat(plan, stored), style="yellow"), soft_wrap=False)
    console.print(Text(save_picture(result, plan, loaded.name, out), style="dim"))


def show_lossless(full: Engine, lossless: Engine, task: str, new_tokens: int, title: str) -> None:
    """The same answer twice, which of its tokens were drafted, and how much faster it was."""
    console = out_console()
    _ask(task)
    answer = _answer(full, task, new_tokens)
    drafts = "coloured tokens" if console.is_terminal else "tokens in brackets"
    _heading(f"lossless: the {drafts} were drafted, then verified at full depth")
    with working("drafting and verifying …", quiet=not console.is_terminal):
        (drafted,) = lossless.generate([task], new_tokens, do_sample=False)
    console.print(marked_drafts(drafted, lossless, marks=not console.is_terminal))
    _figures(full, lossless, (answer, drafted), task, new_tokens, title)
    console.print(Text(same_answer(answer, drafted), style="green"), soft_wrap=False)


def show_decay(full: Engine, decay: Engine, question: str, new_tokens: int, title: str) -> Result:
    """Both answers, their cost, and the depth of each token."""
    console = out_console()
    _ask(question)
    answers = _answer(full, question, new_tokens), _answer(decay, question, new_tokens)
    _figures(full, decay, answers, question, new_tokens, title)
    result = answers[1]
    console.print()
    console.print(Text("depth of each token (· saved)", style="bold"))
    shallowest = opt.shallowest_depth(decay, new_tokens)
    console.print(depth_curve(result.depths, result.num_layers, shallowest, min(console.width, 100), height=8))
    console.print(depth_legend(result.depths, result.num_layers, shallowest))
    console.print()
    return result


def marked_drafts(result: Result, engine: Engine, *, marks: bool) -> Text:
    """The answer with its drafted tokens in colour, or in brackets where there are no colours."""
    assert engine.tokenizer is not None  # the prompt was text
    text, tokens, shown = Text(), 0, ""
    for was_drafted, run in groupby(depth is not None for depth in result.draft_depths):
        tokens += len(list(run))
        # Decode from the start each time: a character may span several tokens, and spaces depend on preceding tokens.
        so_far = engine.tokenizer.decode(result.token_ids[:tokens], skip_special_tokens=True).rstrip("\ufffd")
        piece, shown = so_far[len(shown) :], so_far
        if was_drafted and piece:
            text.append(f"[{piece}]" if marks else piece, style="" if marks else DRAFTED)
        else:
            text.append(piece)
    return text


def same_answer(full: Result, lossless: Result) -> str:
    """Whether both answers are the same, and what drafted the tokens."""
    tokens = len(lossless.token_ids)
    if full.token_ids == lossless.token_ids:
        drafted = [depth for depth in lossless.draft_depths if depth is not None]
        said = f"The same answer, token by token. {len(drafted)} of its {tokens} tokens were drafted"
        return f"{said}, {drafted.count(0)} of them by prompt lookup, and verified at full depth."
    pairs = enumerate(zip(full.token_ids, lossless.token_ids, strict=False))
    where = next((index for index, (one, other) in pairs if one != other), min(len(full.token_ids), tokens))
    why = lossless.inexact_because or "here, a pass over several tokens rounds differently from a pass over one"
    return f"The answers diverge at token {where}, at a near-tie: {why}."


def caveat(plan: Plan, stored: Plan | None) -> str:
    """What to expect of the text. Measured figures are given only if the plan runs as stored, as they hold for that."""
    measured = plan.notes.get("calibration")
    if measured is None:
        return CAVEAT
    as_stored = stored is not None and stored.schedule == plan.schedule and "agreement" in measured
    return CALIBRATED.format(how_good=MEASURED.format(**measured) if as_stored else RESCHEDULED)


def _warm_up_tokens(engine: Engine, new_tokens: int) -> int:
    """Graphs are captured for a length and reused up to it, so warm up the full length; otherwise a few steps do."""
    return new_tokens if engine.uses_graphs else min(_WARM_UP_STEPS, new_tokens)


def _ask(prompt: str) -> None:
    out_console().print(Text.assemble(("\n› ", "dim"), (prompt, "bold")))


def _heading(title: str) -> None:
    console = out_console()
    console.print()
    if console.is_terminal:
        console.print(Rule(Text(title, style="bold"), align="left", style="dim"), soft_wrap=False)
    else:
        console.print(f"--- {title}")


def _answer(engine: Engine, question: str, new_tokens: int) -> Result:
    layers = engine.stack.num_layers
    _heading("depth decay: fewer layers for later tokens" if engine.plan else f"full depth: {layers} layers per token")
    stream = engine.stream(question, new_tokens, do_sample=False)
    stream_text(engine, stream, opt.shallowest_depth(engine, new_tokens), show_depth=True)
    return stream.result


def _figures(
    full: Engine, other: Engine, answers: tuple[Result, Result], prompt: str, new_tokens: int, title: str
) -> None:
    """Time both again, in turns, and print the results."""
    with working("timing both again …"):
        again = _timed_in_turns(other, full, prompt, new_tokens)
    timing = Timing(
        (answers[0].ms_per_token, *again[full]),
        (answers[1].ms_per_token, *again[other]),
    )
    console = out_console()
    console.print()
    console.print(results_table(*answers, timing, title), soft_wrap=False)
    if not timing.is_steady(answers[1].layer_speedup):
        console.print(Text(UNSTEADY, style="yellow"), soft_wrap=False)


def _timed_in_turns(first: Engine, second: Engine, question: str, new_tokens: int) -> dict[Engine, list[float]]:
    """Milliseconds per token of further runs, for a few seconds.

    The order alternates, so that a change in machine load favours neither.
    """
    found: dict[Engine, list[float]] = {first: [], second: []}
    started = time.monotonic()
    turns = (first, second)
    while len(found[first]) < _MOST_RUNS and (not found[first] or time.monotonic() - started < _TIMING_SECONDS):
        for engine in turns:
            result = engine.generate([question], new_tokens, do_sample=False)[0]
            found[engine].append(result.ms_per_token)
        turns = turns[::-1]
    return found


@dataclass(frozen=True)
class Timing:
    """Milliseconds per token of at least two runs at full depth, and of as many in the other mode."""

    full: tuple[float, ...]
    other: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return min(self.full) / min(self.other)

    def is_steady(self, layer_speedup: float) -> bool:
        """Whether the best runs of each kind agree, and fewer layers explain the gain; if not, something else ran."""
        runs = (self.full, self.other)
        if not all(min(run) > 0 for run in runs):
            return False
        alike = all(sorted(run)[1] <= MOST_SPREAD * min(run) for run in runs)
        return alike and self.ratio <= MOST_SPREAD * layer_speedup


def results_table(full: Result, other: Result, timing: Timing, title: str) -> Table:
    """Both answers in figures. The ratio is of time per token, since the answers may differ in length.

    A verification is one full pass, however many tokens it covers, so lossless mode's tokens per pass are the ideal.
    """
    table = Table(
        title=f"{title}, greedy, decoding only, best of {len(timing.full)} runs",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    # Line breaks by hand, to fit into 80 columns.
    is_lossless = other.mode == "lossless"
    cost = ("full\npasses", "tokens\nper pass") if is_lossless else ("layers\nexecuted", "layer\nspeed-up")
    for heading in ("", "tokens", "tokens/s", "ms/token", *cost, "wall-clock\nratio"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    steady = timing.is_steady(other.layer_speedup)
    for name, result, runs in ((FULL, full, timing.full), (NAMES[other.mode], other, timing.other)):
        best = min(runs)
        table.add_row(
            name,
            str(len(result.token_ids)),
            f"{1000 / best:.1f}" if best else "-",
            f"{best:.1f}" if best else "-",
            str(result.full_passes if is_lossless else result.layers_executed),
            f"{result.tokens_per_full_pass:.2f}" if is_lossless else f"{result.layer_speedup:.2f}x",
            f"{min(timing.full) / best:.2f}x" if steady else "unsteady",
        )
    return table
