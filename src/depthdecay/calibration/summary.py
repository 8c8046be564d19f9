"""The results of a calibration, in the schema of the report page."""

from __future__ import annotations

import time
from typing import Any

from depthdecay.calibration.fidelity import Simulator, shown_positions
from depthdecay.calibration.result import Calibrated
from depthdecay.calibration.run import Calibration
from depthdecay.plan.plan import Plan


def report_data(run: Calibration, made: Calibrated, command: str) -> dict[str, Any]:
    """The figures of one plan in the schema of `report.write_report`."""
    figures = made.figures
    repaired, plain = figures["repaired"], figures["plain"]
    shown = shown_positions(repaired["tokens_by_position"])
    promise = dict(figures["promise"])
    return {
        "model": run.name,
        "plan": {
            "summary": made.plan.describe(),
            "num_layers": made.plan.num_layers,
            "drop_order": list(made.plan.dropped(made.plan.schedule.final_depth)),
            "depths": list(made.plan.depths(run.settings.new_tokens)),
        },
        "promise": promise if promise["budget"] is not None else None,
        "full_perplexity": repaired["full_perplexity"],
        "elsewhere": figures["elsewhere"],
        "fidelity": [{"speedup": promise["asked_speedup"], "plain": _means(plain), "repaired": _means(repaired)}],
        "kl_by_position": {
            "plain": plain["kl_by_position"][:shown],
            "repaired": repaired["kl_by_position"][:shown],
        },
        "layer_influence": layer_influence(run),
        "perplexity_by_position": repaired["full_perplexity_by_position"][:shown],
        "entropy_by_position": repaired["entropy_by_position"][:shown],
        "choices": figures["choices"],
        "command": command,
    }


def _means(fidelity: dict[str, Any]) -> dict[str, float]:
    return {name: fidelity[name] for name in ("kl", "agreement", "perplexity")}


def layer_influence(run: Calibration) -> list[float]:
    """KL when only one layer is dropped, without repair; kept, since all plans of a run share it.

    Empty if there is no time: a chart is the first thing to leave out.
    """
    kept: list[float] | None = run.work.read("influence")
    if kept is None:
        if run.time.is_over():
            return []
        layers = run.stack.num_layers
        simulator = Simulator(run.select)

        def cost_of(layer: int) -> float:
            return simulator.measure(Plan.constant(layers, layers - 1, drop_order=[layer])).kl

        started = time.monotonic()
        kept = [cost_of(0)]
        if run.time.affordable(layers, time.monotonic() - started) < layers:
            return []
        kept += [cost_of(layer) for layer in range(1, layers)]
        run.work.write("influence", kept)
    return kept
