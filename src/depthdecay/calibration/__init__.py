"""Calibration: which layers a model can do without, how to repair what dropping them breaks, plans within a budget."""

from __future__ import annotations

from depthdecay.calibration.calibrate import Calibrated, Calibration
from depthdecay.calibration.continuations import read_prompts
from depthdecay.calibration.fidelity import Fidelity, Simulator
from depthdecay.calibration.fit import FitSettings
from depthdecay.calibration.goal import Goal
from depthdecay.calibration.settings import Settings
from depthdecay.calibration.summary import report_data

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
