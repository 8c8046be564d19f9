"""`calibrate`: from a model and prompts to a folder with a plan, its repairs, its measurements and a report."""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthdecay.argument_checks import Number, exact_decimal, whole_number
from depthdecay.calibration.drafter import LOWEST_SHARE
from depthdecay.calibration.goal import Goal
from depthdecay.calibration.learned_plan import learn_plan, usual_time
from depthdecay.calibration.own_questions import Say
from depthdecay.calibration.own_text import TooLittleTime
from depthdecay.calibration.report_page import write_report
from depthdecay.calibration.result import Calibrated
from depthdecay.calibration.run import Calibration
from depthdecay.calibration.settings import CalibrationSettings
from depthdecay.calibration.summary import report_data
from depthdecay.calibration.time_budget import TimeBudget
from depthdecay.calibration.work_folder import WORK_FOLDER
from depthdecay.cpu.dequantized_stack import widen_in_place
from depthdecay.cpu.packed_weights import QUANTIZED, check_setting
from depthdecay.engine.engine import Engine
from depthdecay.errors import ArgumentError, DepthDecayError
from depthdecay.files import make_folder, read_bytes
from depthdecay.model.layers import LayerStack
from depthdecay.model.load import as_loaded
from depthdecay.model.loaded_model import LoadedModel
from depthdecay.plan.plan import Plan
from depthdecay.plan.stored_plans import LOSSLESS_FOLDER, plan_with_head
from depthdecay.prompt_files import Prompts, prompts_for
from depthdecay.result_files import provenance, write_result
from depthdecay.speculative.draft_head import DraftHead, head_of

if TYPE_CHECKING:
    import torch

DEFAULT_MAX_KL = 0.02
DRAFTERS = ("learned", "layers")
FASTEST = 10
FIGURES_FILE = "calibration.json"
_LEAST = {
    **{"fit_prompts": 8, "new_tokens": 8, "held_out_prompts": 4, "beam": 1, "width": 1, "seed": 0},
    **{"repair_rank": 1, "repair_neurons": 0},
}


def calibrate(
    model: str | LoadedModel,
    prompts: Prompts | None,
    out: str | os.PathLike[str],
    *,
    max_kl: float | None = None,
    max_agreement_loss: float | None = None,
    speedup: Number | None = None,
    also: Sequence[Number] = (),
    lossless: bool = False,
    drafter: str = "learned",
    start: str | os.PathLike[str] | None = None,
    task: str | None = None,
    repair_rank: int | None = None,
    repair_neurons: int | None = None,
    variety: bool = True,
    fit_prompts: int | None = None,
    held_out_prompts: int | None = None,
    new_tokens: int | None = None,
    beam: int | None = None,
    width: int | None = None,
    minutes: float | None = None,
    learn: float | None = None,
    seed: int = 0,
    quantize: str | None = None,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Measure which layers a model can do without, fit repairs for them, and save the fastest plan within budget.

        plan = dd.calibrate("smollm2-135m", "prompts.jsonl", "my-plan", max_kl=0.02)
        plan.notes["calibration"]["kl"]  # held out; all measurements are in figures_of(plan)
        dd.Plan.load("my-plan")  # from then on

    `prompts` is a .jsonl or .txt file, or a list of texts, conversations or token ids, similar to those in use; with a
    `task`, such as gsm8k, it is the task's file. With None, the model writes questions of many kinds itself.

    The goal is one of `max_kl` (by default 0.02), `max_agreement_loss` and `speedup`. `also` makes a plan for each
    further speed-up, in out/speedup-N. `lossless` makes a drafter for lossless mode, in out/lossless, or in `out` if it
    is the only goal: a draft head trained on self-generated text, or with drafter="layers" a subset of the layers.
    `start` is a plan with a draft head to train further, on your prompts or for a fine-tuned model of the same shape.

    The rest is effort, by default what suits the device. `minutes` is an approximate limit for everything, kept with
    fewer texts and a shorter search; if it is too short to train a head, a warning says so and layers are used. `learn`
    is the most minutes of gradient steps for the maps of each plan (by default none); Ctrl-C ends them early and keeps
    the best maps so far. `device`, `dtype` and `trust_remote_code` apply to a model given by name.

    Called again with the same values, an interrupted run resumes where it stopped.
    """
    goals = _goals(max_kl, max_agreement_loss, speedup, also, lossless)
    sizes = _given(repair_rank=repair_rank, repair_neurons=repair_neurons)
    effort = _given(
        fit_prompts=fit_prompts,
        held_out_prompts=held_out_prompts,
        new_tokens=new_tokens,
        beam=beam,
        width=width,
        seed=seed,
    )
    if minutes is not None:
        if not minutes > 0:
            raise ArgumentError(f"minutes is {minutes}; expected a number above 0", "minutes")
        effort["whole_minutes"] = minutes
    if learn is not None:
        if not 0 <= learn < math.inf:
            raise ArgumentError(f"learn is {learn}; expected a number of minutes, 0 for none", "learn")
        effort["learning_minutes"] = learn
    if not variety:
        effort["variety"] = 0.0
    if drafter not in DRAFTERS:
        raise ArgumentError(f"drafter is {drafter!r}; expected one of {', '.join(DRAFTERS)}", "drafter")
    head = None if start is None else _head_to_start_from(start, lossless, drafter)
    check_setting(quantize)
    if quantize in QUANTIZED and isinstance(model, LoadedModel):
        raise ArgumentError(
            f"quantize is {quantize}, which would change the weights of your model for good; give it by name",
            "quantize",
        )
    if prompts is None and task is not None:
        raise ArgumentError(
            f"task is {task}, but prompts is None; give the file with its questions as prompts", "task", "prompts"
        )
    asked = None if prompts is None else prompts_for(prompts, task)
    folder = make_folder(out)
    say = progress or (lambda message: None)
    trusted = trust_remote_code or None
    loaded = as_loaded(model, device=device, dtype=dtype, trust_remote_code=trusted, progress=say)
    if quantize in QUANTIZED:
        assert quantize is not None
        widen_in_place(loaded.model, quantize, loaded.origin)
    if head is not None:
        head.shape.check(LayerStack.of(loaded.model))
    texts = None if asked is None else asked(loaded.tokenizer)
    settings = _with_sizes(replace(CalibrationSettings.for_device(loaded.model.device), **effort), sizes)
    filed = loaded.quantize_as_filed()
    in_4_bits = (filed if quantize is None else quantize) == "int4"
    plans = _Plans(loaded, texts, settings, folder, say, filed if quantize is None else None, in_4_bits)
    budget = TimeBudget(minutes)
    learned = {name: goal for name, goal in goals.items() if goal.lossless and drafter == "learned"}
    others = {name: goal for name, goal in goals.items() if name not in learned}
    if others:
        plans.fit(others, folder, budget.part(len(others) / len(goals)))
    for name, goal in learned.items():
        within = make_folder(folder / name)
        budget = budget if budget.is_bounded else usual_time(loaded.model.device.type)
        try:
            plans.learn(within, budget, head)
        except TooLittleTime as reason:
            if head is not None:
                raise
            warnings.warn(f"{reason}; the drafter uses the model's own layers instead", stacklevel=2)
            plans.fit({name: goal}, within, budget)
    return Plan.load(folder)


@dataclass(frozen=True)
class _Plans:
    """What all plans of one call are built from."""

    loaded: LoadedModel
    texts: Sequence[Any] | None
    settings: CalibrationSettings
    folder: Path
    say: Say
    quantize: str | None  # of the engines that write text, where it leaves the weights as they are
    in_4_bits: bool  # the weights that the plans are for

    def opens(self, model: Any, **settings: Any) -> Engine:
        return Engine(model, quantize=self.quantize, origin=self.loaded.origin, **settings)

    def fit(self, goals: dict[str, Goal], within: Path, budget: TimeBudget) -> None:
        """Plans with fitted maps, each in its folder. They share texts and a ladder, which are kept in `within`."""
        run = Calibration(
            self.loaded.model,
            self.loaded.tokenizer,
            self.texts,
            within,
            _deep_enough(self.settings, list(goals.values())),
            name=self.loaded.shown_name,
            time_budget=budget,
            opens=self.opens,
            say=self.say,
        )
        for made, (name, goal) in enumerate(goals.items()):
            run.plans_left = len(goals) - made
            if name:
                self.say("making a plan to draft with" if goal.lossless else f"making a plan for {goal.speedup:g}x")
            _save(run, run.make(goal), self.folder / name)
        run.work.remove()

    def learn(self, folder: Path, budget: TimeBudget, start: DraftHead | None) -> None:
        """Saves a learned drafter, its measurements and a report in a folder."""
        seed, model = self.settings.seed, self.loaded.shown_name
        plan, drafter = learn_plan(
            self.loaded,
            self.texts,
            folder,
            time_budget=budget,
            quantize=self.quantize,
            in_4_bits=self.in_4_bits,
            start=start,
            seed=seed,
            say=self.say,
        )
        figures = {"model": model, "plan": plan.describe(), "drafter": drafter.figures}
        write_result(folder / FIGURES_FILE, figures)
        shown = {"model": model, "plan": {"summary": plan.describe()}, "drafter": drafter.figures}
        write_report(folder, {**shown, "command": provenance()["command"]})
        shutil.rmtree(folder / WORK_FOLDER, ignore_errors=True)


def figures_of(plan: Plan) -> dict[str, Any]:
    """All measurements of a calibrated plan, from the file next to it: its promise, and the basis of its choices."""
    if plan.folder is None:
        raise DepthDecayError("the plan was not loaded from a folder, so there is no file of figures next to it")
    file = plan.folder / FIGURES_FILE
    figures: dict[str, Any] = json.loads(read_bytes(file, f"the figures '{file}' of the plan"))
    return figures


def _goals(
    max_kl: float | None,
    max_agreement_loss: float | None,
    speedup: Number | None,
    also: Sequence[Number],
    lossless: bool,
) -> dict[str, Goal]:
    """The goal of each plan by its folder, relative to that of the main one, which comes first."""
    alone = max_kl is None and max_agreement_loss is None and speedup is None
    if alone and not lossless:
        max_kl = DEFAULT_MAX_KL
    wanted = None if speedup is None else _sensible_speedup("speedup", speedup)
    goals = {"": Goal(max_kl, max_agreement_loss, wanted, lossless=lossless and alone)}
    for value in (_sensible_speedup("also", other) for other in also):
        goals[f"speedup-{value:g}"] = Goal(speedup=value)
    if lossless and not alone:
        goals[LOSSLESS_FOLDER] = Goal(lossless=True)
    return goals


def _head_to_start_from(start: str | os.PathLike[str], lossless: bool, drafter: str) -> DraftHead:
    if not lossless or drafter != "learned":
        raise ArgumentError("start is for a learned drafter; set lossless as well", "start", "lossless")
    drafting = plan_with_head(Plan.load(start))
    found = None if drafting is None else head_of(drafting)
    if found is None:
        raise ArgumentError(f"start is {os.fspath(start)!r}, a plan without a learned drafter", "start")
    return found


def _sensible_speedup(name: str, given: Number) -> float:
    value = exact_decimal(name, given)
    if not 1 < value <= FASTEST:
        raise ArgumentError(f"{name} has the value {value}; expected a number above 1 and at most {FASTEST}", name)
    return float(value)


def _given(**values: int | None) -> dict[str, Any]:
    """The values that were given, each checked against its minimum."""
    return {name: whole_number(name, value, _LEAST[name]) for name, value in values.items() if value is not None}


def _deep_enough(settings: CalibrationSettings, goals: list[Goal]) -> CalibrationSettings:
    """Settings with a ladder deep enough for the requested speed-ups; for a quality budget, that is not known yet."""
    speedups = [goal.speedup for goal in goals if goal.speedup is not None]
    share = settings.lowest_share
    if goals[0].budget is None and speedups:
        share = settings.share_for(max(speedups))
    if any(goal.lossless for goal in goals):
        share = min(share, LOWEST_SHARE)
    return replace(settings, lowest_share=share)


def _with_sizes(settings: CalibrationSettings, sizes: dict[str, Any]) -> CalibrationSettings:
    """Settings in which map sizes given by the user are fixed."""
    fixed = {name.removeprefix("repair_"): value for name, value in sizes.items()}
    return replace(settings, maps=tuple(dict.fromkeys(replace(size, **fixed) for size in settings.maps)))


def _save(run: Calibration, made: Calibrated, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    made.save(folder)
    write_result(folder / FIGURES_FILE, {"model": run.name, "plan": made.plan.describe(), **made.figures})
    write_report(folder, report_data(run, made, provenance()["command"]))
