"""`depthdecay calibrate`: find a model's ladder, repair it, and save the fastest plan within a budget."""

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

Count = Annotated[int | None, _effort()]


@opt.grouped("compile")
def calibrate(
    *,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="A .jsonl or .txt file of prompts like those that will be asked; else the model writes some."
        ),
    ] = None,
    out: Annotated[str, typer.Option(help="A folder for the plan and its report; made where it is not there.")],
    task: Annotated[
        str | None, typer.Option(help="Ask the prompts as depthdecay eval asks this task's, such as gsm8k.")
    ] = None,
    model: opt.ModelOptions,
    max_kl: Annotated[float | None, _goal(help="Mean KL to the full model [0.02].")] = None,
    max_agreement_loss: Annotated[float | None, _goal(help="Share of tokens that may differ, as 0.01.")] = None,
    speedup: Annotated[str | None, _goal(metavar="NUMBER", help="Layer speed-up, repairs counted.")] = None,
    also: Annotated[str | None, _goal(help="Further speed-ups, as 1.1,1.5: a plan each in OUT/speedup-N.")] = None,
    lossless: Annotated[
        bool, _goal("--lossless", help="A plan to draft with in lossless mode; beside another goal in OUT/lossless.")
    ] = False,
    drafter: Annotated[
        str, _goal(help="For --lossless: a learned head, or layers of the model with closed-form maps.")
    ] = "learned",
    repair_rank: Annotated[int | None, _effort(help="Directions of a map; chosen by KL.")] = None,
    repair_neurons: Annotated[int | None, _effort(help="Neurons kept of a dropped layer; chosen by KL.")] = None,
    variety: Annotated[bool, _effort(help="Mix in prompts of other kinds, so that other text is not ruined.")] = True,
    fit_prompts: Count = None,
    held_out_prompts: Count = None,
    new_tokens: Annotated[
        int | None, _effort(*opt.MAX_NEW_TOKENS, help="Tokens per answer: the plan's horizon.")
    ] = None,
    beam: Annotated[int | None, _effort(help="Ladders searched side by side.")] = None,
    width: Annotated[int | None, _effort(help="Layers each tries at a rung.")] = None,
    minutes: Annotated[float | None, _effort(help="For the whole, about; else as suits the device.")] = None,
    learn: Annotated[
        float | None, _effort(metavar="MINUTES", help="Gradient steps for the maps of each plan [0].")
    ] = None,
    seed: Annotated[int, _effort(help="Deals out the prompts, and writes them where none are given.")] = 0,
) -> None:
    """Measure which layers a model can do without, repair what dropping them breaks, and save the fastest plan.

    An interrupted run goes on where it stopped when the same command is given again.
    """
    with going_on("goes on where it stopped"), working("calibrating …", lasting=True) as say:
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
    promise, measured, plain = figures["promise"], figures["repaired"], figures["plain"]
    tell = partial(out_console().print, markup=False)
    tell(plan.describe())
    tell(
        f"held out: KL {measured['kl']:.4f} (plain dropping {plain['kl']:.4f}), agreement {measured['agreement']:.4f}; "
        f"layer speed-up {promise['layer_speedup']:.3f}x ({promise['layer_speedup_with_repairs']:.3f}x with repairs "
        f"counted), cost speed-up {promise['cost_speedup']:.3f}x over {plan.notes['over_tokens']} tokens"
    )
    elsewhere = figures["elsewhere"]
    if elsewhere is not None:
        tell(
            f"on other kinds of text: KL {elsewhere['kl']:.4f} (plain dropping {elsewhere['plain_kl']:.4f}), agreement "
            f"{elsewhere['agreement']:.4f}"
        )
    drafting = figures.get("drafting")
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
    tell(f"plan and report: {plan.folder}")


def _print_drafter(plan: Plan, figures: dict[str, Any]) -> None:
    tell = partial(out_console().print, markup=False)
    head = figures["head"]
    tell(plan.describe())
    for kind, found in head["held_out"].items():
        places = ", ".join(f"{share:.1%}" for share in found["right"])
        tell(f"drafts right on unseen text ({kind}), by place in the window: {places}")
    tell(
        f"a draft costs {head['cost_of_a_draft']:.2f} of a step; {head['expected_speedup']:.2f}x expected in lossless "
        f"mode, learned from {figures['tokens_written']:,} tokens in {figures['seconds_in_all']:.0f} s"
    )
    tell(f"plan and report: {plan.folder}")
