"""Existing plans: shipped with the package, or stored next to another plan for other speed-ups or for drafting."""

from __future__ import annotations

from pathlib import Path

from depthdecay.plan.file import PLAN_FILE, SHIPPED_PLANS
from depthdecay.plan.plan import Plan

LOSSLESS_FOLDER = "lossless"  # next to a calibrated plan: the plan for drafting


def shipped_plan(model: str) -> Plan | None:
    """The calibrated plan shipped with the package for a model of this name."""
    folder = SHIPPED_PLANS / model
    return Plan.load(folder) if Path(model).name == model and (folder / PLAN_FILE).is_file() else None


def stored_plan(plan: Plan, speedup: float) -> Plan:
    """The plan calibrated for this speed-up, stored next to the given one; otherwise the given one."""
    return _beside(plan, f"speedup-{speedup:g}")


def drafter_of(plan: Plan) -> Plan:
    """The plan calibrated for drafting, stored next to the given one; otherwise the given one."""
    return _beside(plan, LOSSLESS_FOLDER)


def plan_with_head(plan: Plan) -> Plan | None:
    """The plan whose learned head drafts next to this one: itself, or else the plan calibrated for drafting."""
    return next((found for found in (plan, drafter_of(plan)) if found.draft_head is not None), None)


def _beside(plan: Plan, name: str) -> Plan:
    if plan.folder is None or not (plan.folder / name / PLAN_FILE).is_file():
        return plan
    return Plan.load(plan.folder / name)
