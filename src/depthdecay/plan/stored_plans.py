"""Plans that are there already: shipped for a model, and beside another plan, at other speeds or to draft with."""

from __future__ import annotations

from pathlib import Path

from depthdecay.plan.file import PLAN_FILE, SHIPPED_PLANS
from depthdecay.plan.plan import Plan

LOSSLESS_FOLDER = "lossless"  # beside a calibrated plan: one to draft with


def shipped_plan(model: str) -> Plan | None:
    """The calibrated plan that the package carries for a model of this name."""
    folder = SHIPPED_PLANS / model
    return Plan.load(folder) if Path(model).name == model and (folder / PLAN_FILE).is_file() else None


def stored_plan(plan: Plan, speedup: float) -> Plan:
    """The plan that was calibrated for this speed-up and lies beside the given one, else the given one."""
    return _beside(plan, f"speedup-{speedup:g}")


def drafter_of(plan: Plan) -> Plan:
    """The plan that was calibrated to draft with and lies beside the given one, else the given one."""
    return _beside(plan, LOSSLESS_FOLDER)


def _beside(plan: Plan, name: str) -> Plan:
    if plan.folder is None or not (plan.folder / name / PLAN_FILE).is_file():
        return plan
    return Plan.load(plan.folder / name)
