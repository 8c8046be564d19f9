"""Plans that lie beside another: at other speeds, and one to draft with."""

from __future__ import annotations

from depthdecay.plan.file import PLAN_FILE
from depthdecay.plan.plan import Plan

LOSSLESS_FOLDER = "lossless"  # beside a calibrated plan: one to draft with


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
