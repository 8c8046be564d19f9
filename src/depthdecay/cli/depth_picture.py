"""The demo's picture: depth by position, with work done below the curve and work saved above it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthdecay.errors import DepthDecayError, install
from depthdecay.plan.plan import Plan

if TYPE_CHECKING:
    from depthdecay.engine.result import Result


def save_picture(result: Result, plan: Plan, model: str, folder: Path) -> str:
    """Plot depth by position to depth.png. Returns a sentence: where the file is, or what is missing."""
    try:
        import matplotlib
    except ImportError:
        return f"no picture: matplotlib is not installed; {install('plot')} adds it"
    matplotlib.use("Agg")
    file = folder / "depth.png"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draw_depths(result.depths, result.num_layers, plan, model).savefig(file, dpi=160)
    except OSError as error:
        raise DepthDecayError(f"the picture cannot be written to '{file}': {error.strerror or error}") from None
    return f"picture: {file}"


def draw_depths(depths: Sequence[int], num_layers: int, plan: Plan, model: str) -> Any:
    """A step curve from 0 to all layers: the area below it is work done, the area above is work saved."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    ink, done, saved = "#1f2937", "#3b82f6", "#f59e0b"
    # Each token is a step from its index to the next.
    edges = list(range(len(depths) + 1))
    heights = [*depths, depths[-1]]
    share = 1 - sum(depths) / (num_layers * len(depths))
    figure = Figure(figsize=(9, 4.6), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.fill_between(edges, heights, step="post", color=done, alpha=0.16, linewidth=0)
    axes.fill_between(edges, heights, num_layers, step="post", color=saved, alpha=0.30, linewidth=0)
    axes.step(edges, heights, where="post", color=done, linewidth=2.2)
    axes.axhline(num_layers, color=ink, linewidth=1, linestyle=(0, (4, 3)), alpha=0.6)
    axes.annotate(
        f"full depth, {num_layers} layers",
        (0, num_layers),
        xytext=(4, 5),
        textcoords="offset points",
        color=ink,
        fontsize=9,
    )
    axes.text(
        len(depths) * 0.5,
        min(depths) * 0.5,
        f"layers executed: {sum(depths):,} of {num_layers * len(depths):,}",
        ha="center",
        va="center",
        color="#1d4ed8",
        fontsize=11,
    )
    axes.annotate(
        f"saved: {share:.1%}",
        (len(depths) * 0.93, (depths[int(len(depths) * 0.93)] + num_layers) / 2),
        ha="right",
        va="center",
        color="#92400e",
        fontsize=11,
        fontweight="bold",
    )
    axes.set_xlim(0, max(1, len(depths)))
    axes.set_ylim(0, num_layers * 1.08)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    step = max(1, num_layers // 6)
    axes.set_yticks([*range(0, num_layers - step // 2, step), num_layers])
    axes.set_xlabel("position of the generated token", color=ink)
    axes.set_ylabel("decoder layers run", color=ink)
    axes.set_title("Later tokens run through fewer layers\n", loc="left", color=ink, fontweight="bold")
    axes.text(0, 1.025, _subtitle(plan, model), transform=axes.transAxes, color="#6b7280", fontsize=9)
    axes.tick_params(colors="#6b7280")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#d1d5db")
    return figure


def _subtitle(plan: Plan, model: str) -> str:
    settings = plan.schedule.to_dict()
    words = [model, f"α = {settings['alpha']}"] if "alpha" in settings else [model]
    if settings.get("warmup_tokens"):
        words.append(f"{settings['warmup_tokens']} warm-up tokens")
    if "calibration" not in plan.notes:
        return " · ".join([*words, "uncalibrated, middle-out"])
    return " · ".join([*words, "calibrated, repaired" if plan.repairs else "calibrated"])
