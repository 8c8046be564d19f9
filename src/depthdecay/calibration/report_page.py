"""The calibration report: a self-contained page next to a plan, with its promise and the measurements behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from depthdecay.bench.drawing import Chart, can_draw, inline_svg, write_file
from depthdecay.bench.figures import (
    THIS_PLAN,
    depth_chart,
    influence_chart,
    kl_chart,
    ladder_chart,
    perplexity_chart,
)
from depthdecay.errors import DepthDecayError, install

REPORT_FILE = "report.html"

_CSS = """
:root { color-scheme: light dark; --page: #fbfbfa; --ink: #23282f; --soft: #626b76; --grid: #dfe3e8; --good: #0072b2;
  --bad: #c2410c; }
@media (prefers-color-scheme: dark) { :root { --page: #16191d; --ink: #e3e6ea; --soft: #9aa4b0; --grid: #363c45;
  --good: #6ab7e6; --bad: #ff9a62; } }
body { background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; margin: 0; }
main { max-width: 46rem; margin: 0 auto; padding: 3rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.75rem 0 .5rem; }
p.soft, figcaption { color: var(--soft); margin: .25rem 0; font-size: .92rem; }
p.promise { border-left: 4px solid var(--good); padding: .1rem 0 .1rem 1rem; margin: 1.5rem 0; font-size: 1.1rem; }
p.missed { border-color: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .94rem; }
th, td { text-align: right; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th { font-weight: 600; } th[rowspan], td:first-child { text-align: left; } td.wrap { white-space: normal; }
th[colspan] { border-bottom: none; } th[rowspan] { vertical-align: bottom; } tr.parts th { font-weight: 400; }
figure { margin: 1rem 0 1.75rem; } figure svg { display: block; width: 100%; height: auto; }
pre { overflow-x: auto; padding: .8rem 1rem; border: 1px solid var(--grid); border-radius: 6px; font-size: .88rem; }
"""


def write_report(folder: str | Path, data: Mapping[str, Any]) -> Path:
    """Write report.html into the folder of a plan; returns the file.

    `data` can be JSON. Needed are:

        model                  str, the model's name
        plan                   summary (str, one line); num_layers, drop_order and depths (list, by token) for charts

    Everything else is optional:

        promise                measure (str, with its unit), budget, held_out, bound (floats), confidence (e.g. 0.95);
                               layer_speedup, cost_speedup (floats); prompts, tokens (ints, held out)
        full_perplexity        float, of the full model on the held-out text
        fidelity               list of rows, one per speed-up: speedup (float), and plain and repaired, each a mapping
                               of kl, agreement (0 to 1), perplexity; either may be missing
        kl_by_position         mapping of a label (plain, repaired) to a list, from the first decoded position
        layer_influence        list of KL, one per layer
        perplexity_by_position, entropy_by_position
                               lists, from the first decoded position, of the full model; both or none
        drafter                figures of a learned drafter, as in `LearnedDrafter`
        choices                mapping of a name to a value, such as rank, ridge, prompts, tokens, seconds
        command                str
    """
    if not data.get("model") or not isinstance(data.get("plan"), Mapping) or not data["plan"].get("summary"):
        raise DepthDecayError("a report needs at least the model's name and the plan's summary")
    return write_file(Path(folder) / REPORT_FILE, page(data))


def page(data: Mapping[str, Any]) -> str:
    """The whole page as text."""
    title = f"Depth plan for {data['model']}"
    sections = [make(data) for make in _SECTIONS]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<main>\n<h1>{escape(title)}</h1>\n"
        f'<p class="soft">{escape(data["plan"]["summary"])}</p>\n'
        + "".join(section for section in sections if section)
        + "</main>\n</body>\n</html>\n"
    )


def promise_sentence(promise: Mapping[str, Any]) -> str:
    """The budget, the measurement on held-out text, and the speed-up, in one sentence."""
    measure = promise.get("measure", "mean KL to the full model, in nats per token")
    parts = [f"asked for at most {_number(promise['budget'])} ({measure})"]
    if promise.get("held_out") is not None:
        words = f"held-out text measures {_number(promise['held_out'])}"
        if promise.get("bound") is not None:
            confidence = f" with {100 * promise.get('confidence', 0.95):g}% confidence"
            words += f", and at most {_number(promise['bound'])}{confidence}"
        parts.append(words)
    speeds = {"layer_speedup": "layer speed-up", "cost_speedup": "cost speed-up"}
    gained = [f"the {words} is {promise[key]:.2f}×" for key, words in speeds.items() if promise.get(key) is not None]
    if gained:
        parts.append(" and ".join(gained))
    sentence = "; ".join(parts)
    return sentence[0].upper() + sentence[1:] + "."


def _promise(data: Mapping[str, Any]) -> str:
    promise = data.get("promise")
    if not promise:
        return ""
    worst = promise["bound"] if promise.get("bound") is not None else promise.get("held_out")
    is_missed = worst is not None and worst > promise["budget"]
    words = promise_sentence(promise) + (" The budget is not met with that confidence." if is_missed else "")
    lines = f'<p class="promise{" missed" if is_missed else ""}">{escape(words)}</p>\n'
    if promise.get("prompts") and promise.get("tokens"):
        size = f"Held out: {promise['prompts']:,} prompts with {promise['tokens']:,} tokens."
        lines += f'<p class="soft">{escape(size)}</p>\n'
    return lines


def _fidelity(data: Mapping[str, Any]) -> str:
    rows = data.get("fidelity")
    if not rows:
        return ""
    kinds = [kind for kind in ("plain", "repaired") if any(row.get(kind) for row in rows)]
    figures: dict[str, Callable[[Mapping[str, float]], str]] = {
        "KL": lambda cell: _cell(cell.get("kl")),
        "agreement": lambda cell: "–" if cell.get("agreement") is None else f"{100 * cell['agreement']:.1f}%",
        "perplexity": lambda cell: _cell(cell.get("perplexity")),
    }
    body = [
        [f"{row['speedup']:g}×", *(show(row.get(kind) or {}) for show in figures.values() for kind in kinds)]
        for row in rows
    ]
    note = "KL to the full model in nats per token; agreement: how often both would pick the same token."
    if data.get("full_perplexity") is not None:
        note += f" Perplexity of the full model: {_number(data['full_perplexity'])}."
    if kinds == ["plain", "repaired"]:
        note += " Plain: layers are only dropped. Repaired: small maps replace them."
    other = data.get("elsewhere")
    if other:
        figures_there = f"KL {_number(other['kl'])}, plain {_number(other['plain_kl'])}"
        note += f" On {other['prompts']} prompts of other kinds: {figures_there}; nothing is promised about them."
    table = _table("speed-up", list(figures), kinds, body)
    return f'<h2>Fidelity on held-out text</h2>\n{table}<p class="soft">{escape(note)}</p>\n'


def _drafter(data: Mapping[str, Any]) -> str:
    """Draft accuracy by kind of text and position in the window, and the learning curve."""
    figures = data.get("drafter")
    if not figures:
        return ""
    head = figures["head"]
    began = "closed_form" if "closed_form" in head else "trained_before"
    before, held_out = head[began], head["held_out"]
    names = [f"draft {place}" for place in range(1, len(before["right"]) + 1)]
    rows = [[f"{began.replace('_', ' ')}, validation text", *_shares(before)]]
    rows += [[f"learned, unseen text: {kind}", *_shares(found)] for kind, found in held_out.items()]
    for tried in figures.get("tried", ()):
        layers = tried["shape"]["first_layers"]
        rows.append([f"tried on {layers} first layers, short training", *_shares(tried["held_out"]["all"])])
    if figures.get("portable_head"):
        rows.append(["for other engines, unseen text", *_shares(figures["portable_head"]["held_out"]["all"])])
    cost = _number(head["cost_of_a_draft"])
    words = (
        f"Trained on {head['tokens_fitted_on']:,} tokens; a draft costs {cost} of a step, "
        f"so {head['expected_speedup']:.2f}× is expected. {head['learned']['ended'].capitalize()}."
    )
    curve = [
        [f"{point['step']:,}", _cell(point["training_loss"]), _cell(point["judged_loss"])]
        for point in head["learned"]["curve"]
    ]
    return (
        f'<h2>Draft accuracy</h2>\n<p class="soft">{escape(words)}</p>\n'
        + _plain_table(["", *names, "tokens per window"], rows)
        + "<h2>Learning curve</h2>\n"
        + _plain_table(["step", "KL, training text", "KL, validation text"], curve)
    )


def _shares(found: Mapping[str, Any]) -> list[str]:
    return [*(f"{100 * share:.1f}%" for share in found["right"]), f"{found['tokens_a_window']:.2f}"]


def _plain_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n{body}</table></div>\n'


def _pictures(data: Mapping[str, Any]) -> str:
    charts = _charts(data)
    order = data["plan"].get("drop_order")
    dropping = f"Dropped in this order: {', '.join(map(str, order))}." if order else ""
    if not charts:
        return f'<p class="soft">{dropping}</p>\n' if dropping else ""
    if not can_draw():
        note = f"The charts are left out: they need matplotlib ({install('plot')})."
        return f'<h2>Charts</h2>\n<p class="soft">{escape(f"{note} {dropping}".strip())}</p>\n'
    figures = (
        f'<figure role="img" aria-label="{escape(caption)}">\n{inline_svg(chart)}\n'
        f"<figcaption>{escape(caption)}</figcaption>\n</figure>\n"
        for chart, caption in charts
    )
    return "<h2>Pictures</h2>\n" + "".join(figures)


def _charts(data: Mapping[str, Any]) -> list[tuple[Chart, str]]:
    """The charts that there is data for, each with its caption."""
    plan = data["plan"]
    order, depths, layers = plan.get("drop_order"), plan.get("depths"), plan.get("num_layers")
    charts: list[tuple[Chart, str]] = []
    if layers and order and depths:
        caption = f"Which layers run at which depth. Dropped first: {', '.join(map(str, order[:6]))}."
        charts.append((ladder_chart(layers, order, min(depths)), caption))
    if layers and depths:
        caption = "How many layers produce each token of an answer."
        charts.append((depth_chart({THIS_PLAN: depths}, layers), caption))
    if data.get("kl_by_position"):
        caption = "How far the plan's next-token distribution is from the full model's, on held-out text."
        charts.append((kl_chart(data["kl_by_position"]), caption))
    if data.get("layer_influence"):
        dropped = order[: layers - min(depths)] if layers and order and depths else ()
        caption = "The KL from dropping each layer alone."
        charts.append((influence_chart(data["layer_influence"], dropped), caption))
    if data.get("perplexity_by_position") and data.get("entropy_by_position"):
        caption = "How certain the full model is, by position in its text."
        charts.append((perplexity_chart(data["perplexity_by_position"], data["entropy_by_position"]), caption))
    return charts


def _choices(data: Mapping[str, Any]) -> str:
    choices = data.get("choices")
    if not choices:
        return ""
    rows = "".join(
        f'<tr><td>{escape(str(name).replace("_", " "))}</td><td class="wrap">{escape(_value(value))}</td></tr>\n'
        for name, value in choices.items()
    )
    return f'<h2>Choices made</h2>\n<div class="scroll"><table>\n{rows}</table></div>\n'


def _command(data: Mapping[str, Any]) -> str:
    if not data.get("command"):
        return ""
    return f"<h2>Command</h2>\n<pre><code>{escape(data['command'])}</code></pre>\n"


_SECTIONS = (_promise, _fidelity, _drafter, _pictures, _choices, _command)


def _table(first: str, groups: Sequence[str], parts: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A row name, then every group with the same parts: two narrow heading rows instead of one wide one."""
    top = "".join(f'<th colspan="{len(parts)}">{escape(group)}</th>' for group in groups)
    below = "".join(f"<th>{escape(part)}</th>" for _ in groups for part in parts)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    head = f'<tr><th rowspan="2">{escape(first)}</th>{top}</tr>\n<tr class="parts">{below}</tr>\n'
    return f'<div class="scroll"><table>\n{head}{body}</table></div>\n'


def _number(value: float | None) -> str:
    """Three significant digits; more would be noise."""
    return "–" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _cell(value: float | None) -> str:
    """Like `_number`, but with trailing zeros, so that columns align."""
    is_short = value is not None and abs(value) < 1000
    return f"{value:#.3g}".rstrip(".") if is_short else _number(value)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_value, value))
    return "–" if value is None else str(value)
