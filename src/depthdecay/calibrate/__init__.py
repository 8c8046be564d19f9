"""Calibration: which layers a model can do without, how to repair what dropping them breaks, plans within a budget."""

from __future__ import annotations

from depthdecay.calibrate.continuations import read_prompts
from depthdecay.calibrate.fidelity import Fidelity, Simulator
from depthdecay.calibrate.fit import FitSettings
from depthdecay.calibrate.goal import Goal
from depthdecay.calibrate.run import Calibrated, Calibration
from depthdecay.calibrate.settings import Settings
from depthdecay.calibrate.summary import report_data

__all__ = [
    "Calibrated",
    "Calibration",
    "Fidelity",
    "FitSettings",
    "Goal",
    "Settings",
    "Simulator",
    "read_prompts",
    "report_data",
]
