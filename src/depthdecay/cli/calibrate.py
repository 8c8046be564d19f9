"""`depthdecay calibrate`: find which layers a model can drop, fit repairs, and save the fastest plan in budget."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from depthdecay.cli import options as opt
from depthdecay.cli.process import settle
from depthdecay.cli.show import going_on, out_console, working

if TYPE_CHECKING:
    from depthdecay.plan.plan import Plan

_goal, _effort = (partial(typer.Option, rich_help_panel=panel) for panel in ("Goal (one of)", "Effort"))

Count = Annotated[int | None, _effort(help="Number of prompts (default: depends on the device).")]


@opt.grouped("compile")
def calibrate(
    *,
    prompts: Annotated[
        str | None,
        typer.Option(help="A .jsonl or .txt file of prompts like yours (default: the model writes some itself)."),
    ] = None,
    out: Annotated[str, typer.Option(help="Folder for the plan and its report; created if missing.")],
    task: Annotated[
        str | None, typer.Option(help="Format the prompts as depthdecay eval does for this task, such as gsm8k.")
    ] = None,
    model: opt.ModelOptions,
    max_kl: Annotated[float | None, _goal(help="Largest mean KL to the full model (default: 0.02).")] = None,
    max_agreement_loss: Annotated[float | None, _goal(help="Largest share of tokens that differ, e.g. 0.01.")] = None,
    speedup: Annotated[str | None, _goal(metavar="NUMBER", help="Layer speed-up, with repair maps counted.")] = None,
    also: Annotated[str | None, _goal(help="More speed-ups, e.g. 1.1,1.5; one plan each, in OUT/speedup-N.")] = None,
    lossless: Annotated[
        bool, _goal("--lossless", help="A drafter for lossless mode; with another goal, it goes to OUT/lossless.")
    ] = False,
    drafter: Annotated[
        str, _goal(help="For --lossless: learned (a trained draft head) or layers (a shallow model with repairs).")
    ] = "learned",
    start: Annotated[
        str | None,
        _goal("--from", metavar="PLAN", help="For --lossless: train this plan's draft head further, on your prompts."),
    ] = None,
    repair_rank: Annotated[int | None, _effort(help="Rank of a repair map (default: chosen by KL).")] = None,
    repair_neurons: Annotated[int | None, _effort(help="MLP neurons kept per map (default: chosen by KL).")] = None,
    variety: Annotated[bool, _effort(help="Mix in prompts of other kinds, to protect quality on other text.")] = True,
    fit_prompts: Count = None,
    held_out_prompts: Count = None,
    new_tokens: Annotated[
        int | None, _effort(*opt.MAX_NEW_TOKENS, help="Tokens per answer, which is the plan's horizon.")
    ] = None,
    beam: Annotated[int | None, _effort(help="Beam width: ladders searched in parallel.")] = None,
    width: Annotated[int | None, _effort(help="Candidate layers tried per ladder and step.")] = None,
    minutes: Annotated[float | None, _effort(help="Approximate total time (default: depends on the device).")] = None,
    learn: Annotated[
        float | None, _effort(metavar="MINUTES", help="Train the repair maps of each plan this long (default: 0).")
    ] = None,
    seed: Annotated[int, _effort(help="For splitting the prompts, and for writing them where none are given.")] = 0,
) -> None:
    """Measure which layers a model can do without, fit repairs for them, and save the fastest plan within budget.

    Run the same command again to resume an interrupted calibration.
    """
    with going_on("resumes where it stopped"), working("calibrating …", lasting=True) as say:
        settle(model.threads)
        from depthdecay.calibration.calibrate import calibrate as make_plan
        from depthdecay.calibration.calibrate import figures_of

        made = make_plan(
            model.model,
            prompts,
            out,
            max_kl=max_kl,
            max_agreement_loss=max_agreement_loss,
            speedup=speedup,
            also=also.split(",") if also else (),
            lossless=lossless,
            drafter=drafter,
            start=start,
            task=task,
            repair_rank=repair_rank,
            repair_neurons=repair_neurons,
            variety=variety,
            fit_prompts=fit_prompts,
            held_out_prompts=held_out_prompts,
            new_tokens=new_tokens,
            beam=beam,
            width=width,
            minutes=minutes,
            learn=learn,
            seed=seed,
            quantize=model.quantize,
            device=model.device,
            dtype=model.dtype,
            trust_remote_code=model.trust_remote_code,
            progress=say,
        )
    _print(made, figures_of(made))


def _print(plan: Plan, figures: dict[str, Any]) -> None:
    if "drafter" in figures:
        _print_drafter(plan, figures["drafter"])
        return
    if "drafting" in figures:
        _print_drafting(plan, figures["drafting"])
        return
    promise, measured, plain = figures["promise"], figures["repaired"], figures["plain"]
    tell = partial(out_console().print, markup=False)
    tell(plan.describe())
    tell(
        f"held out: KL {measured['kl']:.4f} (without repairs {plain['kl']:.4f}), agreement "
        f"{measured['agreement']:.4f}; "
        f"layer speed-up {promise['layer_speedup']:.3f}x ({promise['layer_speedup_with_repairs']:.3f}x with repairs "
        f"counted), cost speed-up {promise['cost_speedup']:.3f}x over {plan.notes['over_tokens']} tokens"
    )
    elsewhere = figures["elsewhere"]
    if elsewhere is not None:
        tell(
            f"other kinds of text: KL {elsewhere['kl']:.4f} (without repairs {elsewhere['plain_kl']:.4f}), agreement "
            f"{elsewhere['agreement']:.4f}"
        )
    if promise["budget"] is not None:
        tell(
            f"promise: {promise['measure']} {promise['held_out']:.4f}, at most {promise['bound']:.4f} with 95% "
            f"confidence; the budget was {promise['budget']:g}"
        )
    tell(f"plan and report: {plan.folder}")


def _print_drafter(plan: Plan, figures: dict[str, Any]) -> None:
    tell = partial(out_console().print, markup=False)
    head = figures["head"]
    tell(plan.describe())
    for kind, found in head["held_out"].items():
        places = ", ".join(f"{share:.1%}" for share in found["right"])
        tell(f"draft accuracy on held-out text ({kind}), by position in the window: {places}")
    tell(
        f"a draft costs {head['cost_of_a_draft']:.2f} of a step; {head['expected_speedup']:.2f}x expected in lossless "
        f"mode; trained on {figures['tokens_written']:,} tokens in {figures['seconds_in_all']:.0f} s"
    )
    tell(f"plan and report: {plan.folder}")


def _print_drafting(plan: Plan, figures: dict[str, Any]) -> None:
    """Nobody decodes with this plan: its KL and its layer speed-up as a decay would mislead."""
    tell = partial(out_console().print, markup=False)
    tell(plan.describe())
    tell(f"draft accuracy on held-out text, at {figures['depth']} layers: {figures['acceptance']:.1%}")
    expected = f"a draft costs {figures['cost']:.2f} of a step; {figures['speedup']:.2f}x expected in lossless mode"
    if figures["pays"]:
        tell(f"{expected}, with windows of {figures['window']}")
    else:
        tell(f"{expected}, so drafts by layers do not pay: prompt lookup alone will run")
    tell(f"plan and report: {plan.folder}")
