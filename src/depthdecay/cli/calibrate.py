"""`depthdecay calibrate`: find a model's ladder, repair it, and save the fastest plan within a budget."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from depthdecay.arguments import exact_decimal
from depthdecay.cli import options as opt
from depthdecay.cli.show import out_console, working
from depthdecay.errors import DepthDecayError
from depthdecay.files import make_folder

if TYPE_CHECKING:
    from depthdecay.calibration.calibration import Calibrated, Calibration
    from depthdecay.calibration.settings import CalibrationSettings

_goal, _effort = (partial(typer.Option, rich_help_panel=panel) for panel in ("Goal (one of)", "Effort"))
DEFAULT_MAX_KL = 0.02

Count = Annotated[int | None, _effort()]


@opt.grouped("compile")
def calibrate(
    prompts: Annotated[str, typer.Option(help="A .jsonl or .txt file of prompts like those that will be asked.")],
    out: Annotated[str, typer.Option(help="A folder for the plan and its report; made where it is not there.")],
    task: Annotated[
        str | None, typer.Option(help="Ask the prompts as depthdecay eval asks this task's, such as gsm8k.")
    ] = None,
    *,
    model: opt.ModelOptions,
    max_kl: Annotated[float | None, _goal(help=f"Mean KL to the full model [{DEFAULT_MAX_KL}].")] = None,
    max_agreement_loss: Annotated[float | None, _goal(help="Share of tokens that may differ, as 0.01.")] = None,
    speedup: Annotated[str | None, _goal(metavar="NUMBER", help="Layer speed-up, repairs counted.")] = None,
    also: Annotated[str | None, _goal(help="Further speed-ups, as 1.1,1.5: a plan each in OUT/speedup-N.")] = None,
    lossless: Annotated[
        bool, _goal("--lossless", help="A plan to draft with in lossless mode; beside another goal in OUT/lossless.")
    ] = False,
    repair_rank: Annotated[int | None, _effort(help="Directions of a map; chosen by KL.")] = None,
    repair_neurons: Annotated[int | None, _effort(help="Neurons kept of a dropped layer; chosen by KL.")] = None,
    variety: Annotated[bool, _effort(help="Mix in prompts of other kinds, so that other text is not ruined.")] = True,
    fit_prompts: Count = None,
    held_out_prompts: Count = None,
    new_tokens: Annotated[int | None, _effort(help="Tokens per answer: the plan's horizon.")] = None,
    beam: Annotated[int | None, _effort(help="Ladders searched side by side.")] = None,
    width: Annotated[int | None, _effort(help="Layers each tries at a rung.")] = None,
    minutes: Annotated[float | None, _effort(help="Time for the search before it is hastened.")] = None,
    seed: Annotated[int, _effort(help="Deals out the prompts.")] = 0,
) -> None:
    """Measure which layers a model can do without, repair what dropping them breaks, and save the fastest plan.

    An interrupted run goes on where it stopped when the same command is given again.
    """
    alone = max_kl is None and max_agreement_loss is None and speedup is None
    if alone and not lossless:
        max_kl = DEFAULT_MAX_KL
    opt.at_least(8, fit_prompts=fit_prompts, new_tokens=new_tokens)
    opt.at_least(4, held_out_prompts=held_out_prompts)
    opt.at_least(1, beam=beam, width=width, repair_rank=repair_rank)
    opt.at_least(0, repair_neurons=repair_neurons, seed=seed)
    if minutes is not None and not minutes > 0:
        raise DepthDecayError(f"--minutes is {minutes}; expected a number above 0")
    wanted = None if speedup is None else sensible_speedup("--speedup", speedup)
    others = [sensible_speedup("--also", part) for part in also.split(",")] if also else []

    from depthdecay.calibration.calibration import Calibration
    from depthdecay.calibration.drafter import LOWEST_SHARE
    from depthdecay.calibration.goal import Goal
    from depthdecay.calibration.settings import CalibrationSettings
    from depthdecay.plan.shelf import LOSSLESS_FOLDER

    goal = Goal(max_kl, max_agreement_loss, wanted, lossless=lossless and alone)
    further = {f"speedup-{value:g}": Goal(speedup=value) for value in others}
    if lossless and not alone:
        further[LOSSLESS_FOLDER] = Goal(lossless=True)
    asked = opt.prompts_of(prompts, task)
    folder = make_folder(out)
    loaded = model.load()
    if model.quantize in ("int8", "int4"):
        from depthdecay.cpu.compiled_stack import widen_in_place

        widen_in_place(loaded.model, model.quantize, loaded.origin)
    given: dict[str, Any] = {
        **{"fit_prompts": fit_prompts, "held_out_prompts": held_out_prompts, "new_tokens": new_tokens},
        **{"beam": beam, "width": width, "minutes": minutes, "variety": None if variety else 0.0, "seed": seed},
    }
    said = {name: value for name, value in given.items() if value is not None}
    settings = replace(CalibrationSettings.for_device(loaded.model.device), **said)
    if goal.speedup is not None or (goal.lossless and others):
        settings = replace(settings, lowest_share=settings.share_for(max([goal.speedup or 1.0, *others])))
    if lossless:
        settings = replace(settings, lowest_share=min(settings.lowest_share, LOWEST_SHARE))
    settings = _with_sizes(settings, repair_rank, repair_neurons)
    with working("calibrating …", lasting=True) as say:
        texts = asked(loaded.tokenizer)
        run = Calibration(loaded.model, loaded.tokenizer, texts, folder, settings, name=loaded.shown_name, say=say)
        made = run.make(goal)
        _save(run, made, folder)
        for name, other in further.items():
            say("a plan to draft with" if other.lossless else f"a plan for {other.speedup:g}x")
            _save(run, run.make(other), folder / name)
        run.work.remove()
    _print(made, folder)


def sensible_speedup(name: str, text: str) -> float:
    value = exact_decimal(name, text)
    if not 1 < value <= 10:
        raise DepthDecayError(f"{name} holds {text.strip()}; expected a number above 1 and at most 10")
    return float(value)


def _with_sizes(settings: CalibrationSettings, rank: int | None, neurons: int | None) -> CalibrationSettings:
    """Sizes that the user fixed are not chosen any more."""
    if rank is None and neurons is None:
        return settings
    fixed: dict[str, Any] = {name: v for name, v in (("rank", rank), ("neurons", neurons)) if v is not None}
    return replace(settings, maps=tuple(dict.fromkeys(replace(size, **fixed) for size in settings.maps)))


def _save(run: Calibration, made: Calibrated, folder: Path) -> None:
    from depthdecay.calibration.report_page import write_report
    from depthdecay.calibration.summary import report_data
    from depthdecay.result_files import provenance, write_result

    folder.mkdir(parents=True, exist_ok=True)
    made.save(folder)
    write_result(folder / "calibration.json", {"model": run.name, "plan": made.plan.describe(), **made.figures})
    write_report(folder, report_data(run, made, provenance()["command"]))


def _print(made: Calibrated, folder: Path) -> None:
    promise, measured, plain = made.figures["promise"], made.figures["repaired"], made.figures["plain"]
    tell = partial(out_console().print, markup=False)
    tell(made.plan.describe())
    tell(
        f"held out: KL {measured['kl']:.4f} (plain dropping {plain['kl']:.4f}), agreement {measured['agreement']:.4f}; "
        f"layer speed-up {promise['layer_speedup']:.3f}x ({promise['layer_speedup_with_repairs']:.3f}x with repairs "
        f"counted), cost speed-up {promise['cost_speedup']:.3f}x over {made.plan.notes['over_tokens']} tokens"
    )
    elsewhere = made.figures["elsewhere"]
    if elsewhere is not None:
        tell(
            f"on other kinds of text: KL {elsewhere['kl']:.4f} (plain dropping {elsewhere['plain_kl']:.4f}), agreement "
            f"{elsewhere['agreement']:.4f}"
        )
    drafting = made.figures.get("drafting")
    if drafting is not None:
        tell(
            f"in lossless mode: {drafting['acceptance']:.1%} of drafts right, each {drafting['cost']:.2f} of a step; "
            f"{drafting['speedup']:.2f}x expected with windows of {drafting['window']}"
        )
    if promise["budget"] is not None:
        tell(
            f"promise: {promise['measure']} {promise['held_out']:.4f}, at most {promise['bound']:.4f} with 95% "
            f"confidence; asked for {promise['budget']:g}"
        )
    tell(f"plan and report: {folder}")
