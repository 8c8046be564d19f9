"""The charts, each drawn from plain numbers, with the same colours in all of them."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from depthdecay.bench.drawing import INK, Chart

FIRST, SECOND = "#0072b2", "#d55e00"
_SHADES = ("#8fbcdb", "#4a96c9", "#0072b2", "#00456e")  # shades of decay's blue: one rule at several speed-ups
_DROPPED = "#f3cfb0"
# Okabe and Ito's colour-blind-safe palette; each method also has its own marker.
_METHOD_STYLES = {
    "full": ("#7a7f87", "o"),
    "decay": (FIRST, "o"),
    "middle-out": (FIRST, "o"),
    "depthdecay": (SECOND, "*"),
    "repaired": (SECOND, "*"),
    "plain": ("#7e6bc4", "X"),
    "skipdecode": ("#009e73", "s"),
    "constant": ("#e69f00", "^"),
    "unified": ("#cc79a7", "D"),
    "early-exit": ("#56b4e9", "v"),
    "shortgpt": ("#8c564b", "P"),
    "lossless": ("#000000", "h"),
}
_OTHER_STYLES = (("#9a8c00", "<"), ("#117a65", ">"), ("#a0194f", "p"))
THIS_PLAN = "this plan"  # label of the plan that a page is about


@dataclass(frozen=True)
class QualityPoint:
    """One method at one speed: its accuracy difference to full depth, with the confidence interval."""

    panel: str
    method: str
    speedup: float
    accuracy: float
    difference: float
    low: float
    high: float
    n: int


def method_style(method: str) -> tuple[str, str]:
    """Colour and marker of a method: fixed by its name, so that all charts agree."""
    if method in _METHOD_STYLES:
        return _METHOD_STYLES[method]
    return _OTHER_STYLES[zlib.crc32(method.encode()) % len(_OTHER_STYLES)]


def perplexity_chart(perplexity: Sequence[float], entropy: Sequence[float]) -> Chart:
    """Is later text easier? Perplexity of the text and entropy of the distribution, by position."""

    def draw(figure: Any) -> None:
        top, bottom = figure.subplots(2, 1, sharex=True)
        _trend(top, perplexity, FIRST)
        _trend(bottom, entropy, FIRST)
        top.set(ylabel="perplexity", title="Full model on its own greedy text")
        bottom.set(ylabel="entropy (nats)", xlabel="position in the answer (tokens)")
        figure.align_ylabels()

    rows = [(i, *pair) for i, pair in enumerate(zip(perplexity, entropy, strict=True), start=1)]
    return Chart("perplexity_by_position", ("position", "perplexity", "entropy_nats"), rows, draw, height=4.2)


def influence_chart(kl: Sequence[float], dropped: Sequence[int] = ()) -> Chart:
    """The influence of each layer: the KL divergence from dropping it alone. Layers that a plan drops stand out."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for drawn, colour, label in ((False, FIRST, "always run"), (True, SECOND, "dropped by the plan")):
            layers = [layer for layer in range(len(kl)) if (layer in dropped) == drawn]
            if layers:
                axes.bar(layers, _positive(kl, layers), color=colour, label=label, width=0.75)
        axes.set_xlim(-0.7, len(kl) - 0.3)
        _log_scale(axes, kl)
        _whole_ticks(axes.xaxis)
        if dropped:
            axes.legend()
        axes.grid(axis="x", visible=False)
        unit = "nats/token, log scale" if axes.get_yscale() == "log" else "nats/token"
        axes.set(xlabel="layer dropped", ylabel=f"KL to full model ({unit})", title="Influence of each layer")

    return Chart("layer_influence", ("layer", "kl_nats"), list(enumerate(kl)), draw)


def influence_map_chart(kl_by_layer: Sequence[Sequence[float]]) -> Chart:
    """Influence by layer and position: does a layer matter less later in the text?"""
    bin_tokens = max(1, math.ceil(len(kl_by_layer[0]) / 50))

    def draw(figure: Any) -> None:
        from matplotlib.colors import LogNorm

        cells = [_binned(row, bin_tokens) for row in kl_by_layer]
        positive = [value for row in cells for value in row if value > 0] or [1e-6]
        norm = LogNorm(min(positive), max(max(positive), 1.01 * min(positive)))
        shown = [[max(value, min(positive)) for value in row] for row in cells]
        axes = figure.subplots()
        # The last bin may be short; it is drawn full width, so that the ticks stay correct.
        extent = (0.5, len(cells[0]) * bin_tokens + 0.5, -0.5, len(cells) - 0.5)
        image = axes.imshow(
            shown, norm=norm, cmap="cividis", aspect="auto", origin="lower", extent=extent, interpolation="nearest"
        )
        figure.colorbar(image, ax=axes, label="KL to full model (nats, log scale)")
        axes.grid(visible=False)
        _whole_ticks(axes.yaxis)
        title = "Influence of each layer by position"
        if bin_tokens > 1:
            title += f" (means of {bin_tokens} tokens)"
        axes.set(xlabel="position in the answer (tokens)", ylabel="layer dropped", title=title)

    header = ("layer", *(f"position_{i}" for i in range(1, len(kl_by_layer[0]) + 1)))
    return Chart("layer_influence_by_position", header, [(i, *row) for i, row in enumerate(kl_by_layer)], draw, 4.0)


def depth_chart(curves: Mapping[str, Sequence[int]], num_layers: int) -> Chart:
    """Depth by token, one curve per plan, each labelled at its end."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        longest = max(len(depths) for depths in curves.values())
        shades = itertools.cycle(_SHADES)
        ends = _spread([depths[-1] for depths in curves.values()], gap=num_layers / 18)
        for (label, depths), end in zip(curves.items(), ends, strict=True):
            colour = SECOND if label == THIS_PLAN else next(shades)
            axes.step(range(len(depths)), depths, where="post", color=colour)
            axes.annotate(f" {_literal(label)}", (longest, end), color=colour, va="center", annotation_clip=False)
        axes.set_xlim(0, longest)
        axes.set_ylim(0, num_layers * 1.05)
        _whole_ticks(axes.yaxis)
        axes.set(xlabel="token of the answer", ylabel=f"layers run, of {num_layers}", title="Depth by token")

    length = max(len(depths) for depths in curves.values())
    rows = [(i, *(d[i] if i < len(d) else "" for d in curves.values())) for i in range(length)]
    return Chart("depth_by_token", ("token", *curves), rows, draw)


def kl_chart(curves: Mapping[str, Sequence[float]]) -> Chart:
    """KL to the full model at each position, e.g. with and without repairs."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for label, values in curves.items():
            _trend(axes, values, method_style(label)[0], _literal(label))
        axes.set_ylim(bottom=0)
        axes.legend()
        axes.set(
            xlabel="position in the answer (tokens)", ylabel="KL to full model (nats)", title="Divergence by position"
        )

    rows = [(i, *values) for i, values in enumerate(zip(*curves.values(), strict=True), start=1)]
    return Chart("kl_by_position", ("position", *(f"kl_{label}" for label in curves)), rows, draw)


def ladder_chart(num_layers: int, drop_order: Sequence[int], shallowest: int) -> Chart:
    """Which layers run at which depth, from full depth down to the shallowest one used."""
    depths = range(num_layers, shallowest - 1, -1)
    runs = [[int(layer not in drop_order[: num_layers - depth]) for layer in range(num_layers)] for depth in depths]

    def draw(figure: Any) -> None:
        from matplotlib.colors import ListedColormap

        axes = figure.subplots()
        extent = (-0.5, num_layers - 0.5, shallowest - 0.5, num_layers + 0.5)
        colours = ListedColormap([_DROPPED, FIRST])
        axes.imshow(runs, cmap=colours, vmin=0, vmax=1, aspect="auto", extent=extent, interpolation="nearest")
        for edge in range(1, num_layers):
            axes.axvline(edge - 0.5, color="white", linewidth=0.6)
        for depth in depths[:-1]:
            axes.axhline(depth - 0.5, color="white", linewidth=0.6)
        axes.grid(visible=False)
        _whole_ticks(axes.xaxis)
        _whole_ticks(axes.yaxis)
        axes.set(xlabel="layer", ylabel="depth (layers that run)", title="Ladder: blue layers run, pale ones do not")

    rows = [(depth, *row) for depth, row in zip(depths, runs, strict=True)]
    header = ("depth", *(f"layer_{layer}" for layer in range(num_layers)))
    return Chart("ladder", header, rows, draw, height=min(4.5, 1.3 + 0.16 * len(depths)))


def quality_chart(points: Sequence[QualityPoint]) -> Chart:
    """Speed against quality for all methods, one panel per model and task; error bars are the 95% intervals."""
    panels = list(dict.fromkeys(point.panel for point in points))
    methods = sorted({point.method for point in points})
    speeds = [point.speedup for point in points]
    nudge = 0.006 * ((max(speeds) - min(speeds)) or 0.1)

    def draw(figure: Any) -> None:
        all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, panel in zip(all_axes, panels, strict=True):
            axes.axhline(0, color=INK, linewidth=1, linestyle="--", label="full depth")
            for number, method in enumerate(methods):
                colour, marker = method_style(method)
                mine = [p for p in points if p.panel == panel and p.method == method]
                mine.sort(key=lambda point: point.speedup)
                # At the same speed, methods would hide each other's error bars.
                shift = nudge * (number - (len(methods) - 1) / 2)
                axes.errorbar(
                    [point.speedup + shift for point in mine],
                    [100 * point.difference for point in mine],
                    yerr=[
                        [100 * max(0.0, point.difference - point.low) for point in mine],
                        [100 * max(0.0, point.high - point.difference) for point in mine],
                    ],
                    color=colour,
                    marker=marker,
                    markersize=6,
                    linewidth=1.2,
                    elinewidth=1.1,
                    capsize=2.5,
                    label=_literal(method),
                )
            axes.set(title=_literal(panel), ylabel="accuracy difference to\nfull depth (points, 95% CI)")
        all_axes[-1].set_xlabel("layer speed-up as executed (×)")
        handles, labels = all_axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)

    header = ("panel", "method", "layer_speedup", "accuracy", "difference", "low", "high", "n")
    rows = [(p.panel, p.method, p.speedup, p.accuracy, p.difference, p.low, p.high, p.n) for p in points]
    return Chart("speed_and_quality", header, rows, draw, height=1.2 + 2.5 * len(panels))


# Shared by several charts.


def _literal(name: str) -> str:
    """The name with dollar signs escaped: between them, matplotlib would read mathematics."""
    return name.replace("$", r"\$")


def _trend(axes: Any, values: Sequence[float], colour: str, label: str | None = None) -> None:
    """Every position faintly, and the running mean: a single position has few tokens and is noisy."""
    positions = range(1, len(values) + 1)
    half = max(0, min(10, len(values) // 12))
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    axes.plot(positions, values, color=colour, alpha=0.3, linewidth=0.9)
    axes.plot(positions, [sum(window) / len(window) for window in windows], color=colour, label=label)


def _log_scale(axes: Any, values: Sequence[float]) -> None:
    """Logarithmic if the values span more than a bar chart can show; the axis then starts at a power of ten."""
    positive = [value for value in values if value > 0]
    if positive and max(positive) > 30 * min(positive):
        axes.set_yscale("log")
        axes.set_ylim(bottom=10 ** math.floor(math.log10(min(positive) * 0.9)))


def _whole_ticks(axis: Any) -> None:
    """Integer ticks only: no tick at layer 2.5."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))


def _positive(values: Sequence[float], chosen: Sequence[int]) -> list[float]:
    """The chosen values, at least 0: KL is never negative, but rounding can make it so."""
    return [max(0.0, values[index]) for index in chosen]


def _binned(values: Sequence[float], size: int) -> list[float]:
    parts = [values[start : start + size] for start in range(0, len(values), size)]
    return [sum(part) / len(part) for part in parts]


def _spread(places: Sequence[float], gap: float) -> list[float]:
    """The positions, moved up just enough to be `gap` apart, so that labels do not overlap."""
    moved = list(places)
    lowest = -math.inf
    for index in sorted(range(len(places)), key=lambda i: places[i]):
        moved[index] = max(places[index], lowest + gap)
        lowest = moved[index]
    return moved
