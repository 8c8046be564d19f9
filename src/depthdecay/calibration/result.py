"""A calibrated plan: its maps, and its measurements on held-out text."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthdecay.calibration.fidelity import Simulator
from depthdecay.calibration.fit import FitSettings
from depthdecay.calibration.goal import CONFIDENCE, Goal, upper_bound
from depthdecay.calibration.size_and_shape import Shape
from depthdecay.model.costs import Costs
from depthdecay.model.repairs import REPAIRS_FILE, Repairs
from depthdecay.plan.file import PLAN_FILE
from depthdecay.plan.plan import Plan

if TYPE_CHECKING:
    from depthdecay.calibration.run import Calibration


@dataclass
class Calibrated:
    """A plan that keeps its promise on held-out text, its maps, and its measurements."""

    plan: Plan
    repairs: Repairs
    figures: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> Path:
        """Saves repairs first, after removing an older plan, so that a plan in the folder always matches its maps."""
        (folder / PLAN_FILE).unlink(missing_ok=True)
        self.repairs.save(folder / REPAIRS_FILE)
        return self.plan.save(folder)


def with_figures(
    run: Calibration,
    goal: Goal,
    speedup: float,
    plan: Plan,
    repairs: Repairs,
    settings: FitSettings,
    shape: Shape,
    tried: list[dict[str, Any]],
    learned: dict[str, Any] | None = None,
) -> Calibrated:
    """A fitted plan with its figures on held-out text, and those of training its maps, if any."""
    simulator = Simulator(run.held_out)
    run.say("measuring on held-out text")
    measured, plain = simulator.measure(plan, repairs), simulator.measure(plan)
    tokens = run.settings.new_tokens
    bound = upper_bound(goal.losses(measured), measured.tokens_by_prompt, run.settings.seed)
    costs = Costs(run.stack, plan, repairs)
    promise = {
        "measure": goal.measure,
        "budget": goal.budget,
        "held_out": goal.loss(measured),
        "bound": bound,
        "confidence": CONFIDENCE,
        "asked_speedup": speedup,
        "layer_speedup": plan.layer_speedup(tokens),
        "layer_speedup_with_repairs": float(costs.layer_speedup(plan, tokens)),
        "cost_speedup": costs.speedup(plan, tokens),
        "prompts": measured.prompts,
        "tokens": measured.tokens,
    }
    figures: dict[str, Any] = {
        "promise": promise,
        "repaired": measured.to_dict(),
        "plain": plain.to_dict(),
        "elsewhere": _elsewhere(run, plan, repairs),
        "choices": {
            "rank": settings.rank,
            "neurons a layer": settings.neurons,
            "ridge": settings.ridge,
            "least layers": shape.floor,
            "warm-up tokens": int(shape.warmup * tokens),
            "new tokens": tokens,
            "calibration prompts": run.fit.prompts,
            "calibration tokens": run.fit.tokens,
            "prompts to choose by": run.select.prompts,
            "seed": run.settings.seed,
            "dtype": str(run.stack.model.dtype).removeprefix("torch."),
            "device": run.stack.model.device.type,
            "seconds": round(time.monotonic() - run.started, 1),
            **_choices_of(learned),
        },
        "learned": learned,
        "tried": tried,
        "search": {"order": run.found.order, "kls": run.found.kls},
    }
    notes = {
        "calibration": {**promise, "kl": measured.kl, "agreement": measured.agreement} | figures["choices"],
        "block_influence": [round(value, 5) for value in run.influence],
        "over_tokens": tokens,
    }
    return Calibrated(replace(plan, repairs=REPAIRS_FILE, notes=notes), repairs, figures)


def _choices_of(learned: dict[str, Any] | None) -> dict[str, Any]:
    """The figures that get a row in the report's table."""
    if learned is None:
        return {}
    before, after = learned["closed_form"], learned["maps"]
    return {
        "steps of learning": learned["curve"][-1]["step"],
        "KL before learning": before["kl"],
        "KL on text of its own, before learning": before["kl_on_own_text"],
        "KL on text of its own": after["kl_on_own_text"],
    }


def _elsewhere(run: Calibration, plan: Plan, repairs: Repairs) -> dict[str, Any] | None:
    """The plan's figures on other kinds of text than the user's, about which nothing is promised; if there is time."""
    if run.elsewhere is None or run.time.is_over():
        return None
    simulator = Simulator(run.elsewhere)
    measured, plain = simulator.measure(plan, repairs), simulator.measure(plan)
    return {
        "kl": measured.kl,
        "agreement": measured.agreement,
        "plain_kl": plain.kl,
        "prompts": measured.prompts,
        "tokens": measured.tokens,
    }
