"""Writes charts as PNG, SVG and CSV files with matplotlib. The same data gives the same bytes."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthdecay.errors import DepthDecayError, install
from depthdecay.files import write_whole

INK, GRID = "#3b4252", "#d8dde6"
_WIDTH = 6.0  # inches: 600 px at 100 dpi, which the font sizes are chosen for
_PNG_DPI = 200
_RC = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so every machine has it
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
    "figure.constrained_layout.use": True,
}


@dataclass(frozen=True)
class Chart:
    """One chart: its file name, its data as a table, and how to draw it on a matplotlib Figure."""

    name: str
    header: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    draw: Callable[[Any], None]
    height: float = 3.3


def can_draw() -> bool:
    """Whether matplotlib is installed; it comes with the extra [plot]."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def require_drawing() -> None:
    if not can_draw():
        raise DepthDecayError(f"charts need matplotlib, which is not installed; {install('plot')}")


def write_chart(folder: Path, chart: Chart) -> list[Path]:
    """Write NAME.csv, NAME.png and NAME.svg, each atomically: never a partial file."""
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([chart.header, *chart.rows])
    contents = {"csv": table.getvalue().encode(), "png": _render(chart, "png"), "svg": _render(chart, "svg")}
    return [write_file(folder / f"{chart.name}.{ending}", content) for ending, content in contents.items()]


def inline_svg(chart: Chart) -> str:
    """The chart as an <svg> element for a page: text in the page's colour, ids distinct from other charts'."""
    text = _render(chart, "svg", transparent=True).decode()
    text = text[text.index("<svg") :].strip()
    text = text.replace(INK, "currentColor").replace(GRID, "var(--grid)")
    text = re.sub(r'( id="|url\(#|href="#)', rf"\1{chart.name}-", text)
    # Without a fixed size it scales to the page's width; the viewBox keeps the proportions.
    return re.sub(r'^(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'^(<svg[^>]*?) height="[^"]*"', r"\1", text))


def write_file(path: Path, content: str | bytes) -> Path:
    try:
        return write_whole(path, content)
    except OSError as error:
        raise DepthDecayError(f"cannot write {path}: {error.strerror or error}") from None


def _render(chart: Chart, ending: str, transparent: bool = False) -> bytes:
    import matplotlib
    from matplotlib.figure import Figure

    # Dates, versions and random ids would change the bytes of every run.
    metadata = {"Software": None} if ending == "png" else dict.fromkeys(("Date", "Creator", "Format", "Type"))
    content = io.BytesIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # the user's own style must not change the charts
        matplotlib.rcParams.update(_RC | {"svg.hashsalt": chart.name})
        figure = Figure(figsize=(_WIDTH, chart.height))
        chart.draw(figure)
        figure.savefig(content, format=ending, dpi=_PNG_DPI, metadata=metadata, transparent=transparent)
    return content.getvalue()
