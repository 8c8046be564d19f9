"""The README's pictures as hand-written SVG: CI checks that they are up to date before any library is installed."""

from __future__ import annotations

import math
import re
from html import escape

from result_tables.front import TEXT_NAMES, lossless_rows, newest
from result_tables.results import Result, machine

# The `bench --shape` with the sizes of a model that was timed on texts.
SHAPES = {"Qwen2.5-Coder-1.5B-Instruct": "qwen2.5-1.5b"}
# The shape whose schedule the depth picture shows.
DEPTH_SHAPE = "llama-2-7b"

WIDTH = 760
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}.small{font-size:11.5px;fill:#57606a}.title{font-weight:600;"
    "font-size:14.5px}.theirs{fill:#afb8c1}.full{fill:#54aeff}.lossless{fill:#0969da}.saved{fill:#f5b84d}"
    ".line{stroke:#8c959f;fill:none}@media(prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9198a1}"
    ".theirs{fill:#656c76}}"
)


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def _bar(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" class="{kind}"/>'


def _svg(height: float, title: str, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", f"<style>{_STYLE}</style>", *parts, "</svg>"]) + "\n"


def _generate_bars(bench: list[Result], shape: str | None) -> list[tuple[str, float, str, str]]:
    """transformers' `generate`, plain and compiled, on the same shape, if measured."""
    result = next((r for r in bench if r["model"] == shape and r["settings"]["device"] == "cuda"), None)
    names = {"generate": "generate", "generate-static": "generate, compiled"}
    found = [(name, result["rows"].get(method, {})) for method, name in names.items()] if result else []
    return [
        (f"transformers {name}", row["tokens_per_second"], "theirs", "")
        for name, row in found
        if row.get("tokens_per_second")
    ]


def _same(rows: list[tuple[str, Result, Result]]) -> str:
    differ, prompts = (sum(fast[name] for _, _, fast in rows) for name in ("answers_that_differ", "prompts"))
    if not differ:
        return f"all {prompts} lossless answers are identical to full depth"
    return f"{differ} of {prompts} lossless answers differ from full depth"


def speed_picture(bench: list[Result], texts: list[Result]) -> str | None:
    """Tokens per second as bars: transformers, our full depth, and lossless mode by kind of text."""
    result = newest(texts)
    if result is None:
        return None
    rows = lossless_rows(result)
    bars = _generate_bars(bench, SHAPES.get(result["model"]))
    full = max(full["tokens_per_second"] for _, full, _ in rows)
    bars.append(("depthdecay, full depth", full, "full", ""))
    for name, _, fast in rows:
        words = f"{fast['speedup']:.2f}x"
        bars.append((f"lossless, {TEXT_NAMES.get(name, name)}", fast["tokens_per_second"], "lossless", words))
    left, top, step = 270, 62, 27
    scale = (WIDTH - left - 110) / max(speed for _, speed, _, _ in bars)
    settings = next(iter(result["lossless_texts"].values()))["settings"]
    place = machine({**result, "settings": settings})
    title = f"Tokens per second, {result['model']}"
    parts = [_text(8, 22, title, "title")]
    parts += [_text(8, 41, f"{place}, {settings['dtype']}, batch 1; {_same(rows)}", "small")]
    for place_in_row, (name, speed, kind, words) in enumerate(bars):
        y = top + step * place_in_row
        parts += [_text(left - 10, y + 14, name, "", "end"), _bar(left, y, speed * scale, 18, kind)]
        parts += [_text(left + speed * scale + 7, y + 14, f"{speed:,.0f}" + (f" ({words})" if words else ""), "small")]
    return _svg(top + step * len(bars) + 6, title, parts)


def plan_depths(words: str, tokens: int) -> list[int] | None:
    """The depth of each token under floor(L * alpha**i), parsed from a result's description of its plan."""
    found = re.search(r"alpha ([\d.]+).*warmup tokens (\d+).*min layers (\d+).*?(\d+) layers down to (\d+)", words)
    if found is None:
        return None
    alpha, (warmup, least, layers, last) = float(found[1]), map(int, found.groups()[1:])
    decayed = [max(least, math.floor(layers * alpha ** max(0, index - warmup))) for index in range(tokens)]
    return [max(last, depth) for depth in decayed]


def depth_picture(bench: list[Result]) -> str | None:
    """Depth over position: layers that run below the curve, layers saved above it."""
    result = next((r for r in bench if r["model"] == DEPTH_SHAPE and r["settings"]["device"] == "cuda"), None)
    depths = plan_depths(result["settings"]["plan"], result["settings"]["new_tokens"]) if result else None
    if result is None or depths is None:
        return None
    layers, share = max(depths), 1 - sum(depths) / (max(depths) * len(depths))
    left, top, width, height = 50, 56, WIDTH - 70, 170
    across, up = width / len(depths), height / layers
    title = f"Later tokens run fewer layers: {len(depths)} tokens of {layers} layers"
    speedup = result["rows"]["decay"]["wall_clock_speedup"]
    parts = [_text(8, 22, title, "title")]
    words = (
        f"shape of {result['model']}: {share:.0%} of the layers saved, measured {speedup:.2f}x as fast as full depth"
    )
    parts += [_text(8, 41, words, "small"), _bar(left, top, width, height, "saved")]
    corners = [(left, top + height)]
    for index, depth in enumerate(depths):
        y = top + height - depth * up
        corners += [(left + index * across, y), (left + (index + 1) * across, y)]
    corners.append((left + width, top + height))
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    parts.append(f'<polygon points="{points}" class="full"/>')
    parts += [_text(left + width * 0.3, top + height * 0.72, "layers that run", "", "middle")]
    parts += [_text(left + width * 0.84, top + height * 0.22, "saved", "", "middle")]
    parts += [_text(left - 8, top + 10, str(layers), "small", "end")]
    parts += [_text(left - 8, top + height, "0", "small", "end")]
    parts += [_text(left, top + height + 18, "first generated token", "small")]
    parts += [_text(left + width, top + height + 18, f"token {len(depths)}", "small", "end")]
    return _svg(top + height + 30, title, parts)
