"""Terminal output: streamed text, depth colours and curves, spinners; all of it plain or silent when piped."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from depthdecay.errors import UnwrittenResultError

if TYPE_CHECKING:
    from depthdecay.engine.result import Piece, Result

# Full depth first. Medium brightness, readable on dark and on light backgrounds.
_GRADIENT = ((59, 130, 246), (20, 160, 140), (202, 138, 4), (220, 80, 40))
SLOW_SECONDS = 3.0  # without a terminal, steps that take longer than this are printed
_EIGHTHS = " ▁▂▃▄▅▆▇█"


def out_console() -> Console:
    return Console(highlight=False, soft_wrap=True)


def err_console() -> Console:
    # The current sys.stderr: it is redirected for a while when a library's own progress bars are hidden.
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def figures_table(*headings: str, no_wrap: bool = False) -> Table:
    """A table without lines. Columns of figures have a heading, columns of names have none."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=no_wrap and bool(heading))
    return table


def depth_style(depth: int, shallowest: int, num_layers: int) -> str:
    """A colour for a depth, on a scale from full depth to the shallowest that the text will reach."""
    span = max(1, num_layers - shallowest)
    place = min(1.0, max(0.0, (num_layers - depth) / span)) * (len(_GRADIENT) - 1)
    low = min(int(place), len(_GRADIENT) - 2)
    mixed = (round(a + (b - a) * (place - low)) for a, b in zip(_GRADIENT[low], _GRADIENT[low + 1], strict=True))
    return f"rgb({','.join(map(str, mixed))})"


class TextPrinter:
    """Writes pieces as they come: raw when piped; in a terminal without control characters, and optionally coloured."""

    def __init__(self, num_layers: int, shallowest: int, *, colour: bool = False) -> None:
        self.console = out_console()
        self.num_layers = num_layers
        self.shallowest = shallowest
        self.colour = colour
        self.at_line_start = False  # an empty answer still gets its newline

    def write(self, piece: Piece) -> None:
        self.at_line_start = piece.endswith("\n")
        if not self.console.is_terminal:
            sys.stdout.write(piece)
            sys.stdout.flush()
            return
        # The model's output must not move the cursor or rename the window.
        safe = "".join(c for c in piece if c in "\n\t" or c.isprintable())
        style = depth_style(piece.depth, self.shallowest, self.num_layers) if self.colour else ""
        self.console.print(Text(safe, style=style), end="")

    def end(self) -> None:
        """Close the line."""
        if not self.at_line_start:
            sys.stdout.write("\n")
        sys.stdout.flush()


def depth_curve(depths: Sequence[int], num_layers: int, shallowest: int, width: int, height: int = 6) -> Text:
    """Depth by position, from 0 up, so that the empty part is what was saved; colours as in the text."""
    label = len(str(num_layers))
    columns = max(1, min(len(depths), width - label - 3))
    # Each column shows the mean of its share of the text.
    bounds = [len(depths) * column // columns for column in range(columns + 1)]
    means = [sum(depths[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    drawing = Text()
    for row in range(height, 0, -1):
        at = {height: str(num_layers), 1: "0"}.get(row, "")
        drawing.append(f"{at:>{label}} │", style="dim")
        for mean in means:
            eighths = round(mean / num_layers * height * 8) - (row - 1) * 8
            if eighths <= 0:
                drawing.append("·", style="dim")
            else:
                style = depth_style(round(mean), shallowest, num_layers)
                drawing.append(_EIGHTHS[min(8, eighths)], style=style)
        drawing.append("\n")
    drawing.append(f"{'':>{label}} └{'─' * columns}\n", style="dim")
    last = str(len(depths) - 1)
    gap = max(1, columns - 1 - len(last))
    drawing.append(
        f"{'':>{label}}  0{' ' * gap}{last}" if columns > len(last) + 1 else f"{'':>{label}}  0", style="dim"
    )
    return drawing


def depth_legend(depths: Sequence[int], num_layers: int, shallowest: int) -> Text:
    """Which colour is which depth, in about eight steps."""
    visited = sorted(set(depths), reverse=True)
    step = -(-len(visited) // 8)
    shown = visited[::step]
    if shown[-1] != visited[-1]:
        shown.append(visited[-1])
    legend = Text.assemble(("layers  ", "dim"))
    for depth in shown:
        legend.append("██", style=depth_style(depth, shallowest, num_layers))
        legend.append(f" {depth}  ", style="dim")
    return legend


def summary(result: Result) -> str:
    """Speed and cost of an answer, on one line. In lossless mode the cost is full passes, otherwise it is layers."""
    speed = [f"{1000 / result.ms_per_token:.1f} tokens/s"] if result.ms_per_token else []
    if result.mode == "lossless":
        return " · ".join([_tokens_by_pass(result), *speed])
    layers = f"{result.layers_executed} of {result.layers_full} layers"
    tokens = f"{len(result.token_ids)} tokens"
    return " · ".join([tokens, *speed, layers, f"layer speed-up {result.layer_speedup:.2f}x"])


def _tokens_by_pass(result: Result) -> str:
    tokens = f"{len(result.token_ids)} token{'' if len(result.token_ids) == 1 else 's'}"
    passes = f"{result.full_passes} full pass{'' if result.full_passes == 1 else 'es'}"
    drafts = f"{result.accepted} of {result.drafted} drafts accepted" if result.drafted else "nothing drafted"
    return f"{tokens} in {passes}: {drafts}, {result.tokens_per_full_pass:.2f} tokens per pass"


def print_account(result: Result, shallowest: int, *, show_depth: bool) -> None:
    """The summary after an answer, on stderr, with the depth curve if requested; unrequested only in a terminal."""
    console = err_console()
    if not result.depths or not (console.is_terminal or show_depth):
        return
    if show_depth:
        console.print()
        console.print(depth_curve(result.depths, result.num_layers, shallowest, console.width), soft_wrap=True)
        console.print(depth_legend(result.depths, result.num_layers, shallowest))
    console.print(Text(summary(result), style="dim"))


@contextmanager
def shown_even_unwritten(show: Callable[[Any], None]) -> Iterator[None]:
    """If the result file cannot be written, show what was measured before the error."""
    try:
        yield
    except UnwrittenResultError as error:
        show(error.report)
        raise


@contextmanager
def going_on(how: str | None) -> Iterator[None]:
    """On Ctrl-C, tell the user how the command can be resumed."""
    try:
        yield
    except KeyboardInterrupt:
        if how is None:
            raise
        raise KeyboardInterrupt(f"the same command {how}") from None


@contextmanager
def working(
    message: str, *, quiet: bool = False, spinner: bool = True, lasting: bool = False
) -> Iterator[Callable[[str], None]]:
    """Shows what is in progress; yields a function that changes the message.

    Without a terminal, jobs of minutes (`lasting`) print every step on a line, for the log. Others print only steps
    that are slow.
    """
    console = err_console()
    if quiet:
        yield lambda message: None
    elif not console.is_terminal:
        print_line = partial(print, file=sys.stderr, flush=True)
        if lasting:
            yield print_line
        else:
            with _SlowSteps(print_line) as steps:
                yield steps.begin
    elif not spinner:
        yield lambda message: console.print(Text(message, style="dim"))
    else:
        with console.status(message, spinner="dots") as status:
            yield lambda message: status.update(message)


class _SlowSteps:
    """Prints a step's line once the step has taken some seconds. After the block, steps are ignored."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self._print_line = print_line
        self._timer: threading.Timer | None = None
        self._is_over = False

    def begin(self, message: str) -> None:
        self._stop()
        if self._is_over:
            return
        self._timer = threading.Timer(SLOW_SECONDS, self._print_line, [message])
        self._timer.daemon = True
        self._timer.start()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def __enter__(self) -> _SlowSteps:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._stop()
