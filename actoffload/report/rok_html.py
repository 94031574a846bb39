"""The recompute-offload-keep curve as one HTML file: inline SVG, a little script for hovering, no network."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from typing import Any

from ..config import format_size
from .rok import SERIES, Point
from .rok_plot import COLOURS, failures_of, lines_of, panels_of, unit_of

WIDTH, HEIGHT = 460, 330
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 14, 46

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5d6b7a; --line: #d5dbe1; --page: #fbfcfd; --card: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6ebf0; --soft: #9aa8b5; --line: #35414d; --page: #12171c; --card: #1a2129; }
}
body { font: 14px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 2rem auto;
  max-width: 1500px; padding: 0 1rem; }
h1 { font-size: 1.35rem; margin: 0 0 .2rem; } p { margin: .3rem 0; color: var(--soft); }
.panels { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1rem 0; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .6rem; }
figcaption { font-weight: 600; font-size: .9rem; } .failed { font-size: .78rem; max-width: 440px; }
svg text { fill: var(--soft); font-size: 11px; } svg .grid { stroke: var(--line); } svg .tag { font-size: 10px; }
svg .point { stroke: var(--card); stroke-width: 1.2; cursor: pointer; } svg .point:hover { stroke: var(--ink); }
.legend button { border: 1px solid var(--line); background: var(--card); color: var(--ink); border-radius: 999px;
  padding: .15rem .8rem; margin-right: .4rem; cursor: pointer; font: inherit; }
.legend button[aria-pressed=false] { opacity: .4; } .dot { display: inline-block; width: .7em; height: .7em;
  border-radius: 50%; margin-right: .4em; }
#tip { position: fixed; pointer-events: none; background: var(--ink); color: var(--page); padding: .4rem .6rem;
  border-radius: 6px; font-size: 12px; white-space: pre-line; display: none; max-width: 340px; z-index: 2; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 12.5px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
tr.best td { font-weight: 600; }
"""

_SCRIPT = """
const tip = document.getElementById("tip");
for (const point of document.querySelectorAll(".point")) {
  const show = (x, y) => {
    tip.textContent = point.dataset.tip; tip.style.display = "block";
    tip.style.left = Math.min(x + 14, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(y + 14, innerHeight - tip.offsetHeight - 8) + "px";
  };
  point.addEventListener("mousemove", event => show(event.clientX, event.clientY));
  point.addEventListener("mouseleave", () => { tip.style.display = "none"; });
  point.addEventListener("focus", () => { const b = point.getBoundingClientRect(); show(b.right, b.bottom); });
  point.addEventListener("blur", () => { tip.style.display = "none"; });
}
for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") === "false";
    button.setAttribute("aria-pressed", shown);
    for (const part of document.querySelectorAll(`[data-series="${button.dataset.name}"]`))
      part.style.display = shown ? "" : "none";
  });
}
"""


def render_html(points: Sequence[Point], title: str, environment: dict[str, Any]) -> str:
    """The whole page.

    Args:
        points: what was measured.
        title: the heading.
        environment: the machine and the software, shown at the end.
    """
    figures = "".join(_figure(name, mine) for name, mine in panels_of(points).items())
    buttons = "".join(_button(series) for series in SERIES)
    facts = escape(json.dumps(environment, indent=None))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1>"
        "<p>Model throughput (algorithmic FLOPs over step time; recomputing is not counted) against the peak of saved "
        "activations. Upper left is better. Hover or tab to a point; click a series to hide it.</p>"
        f'<div class="legend">{buttons}</div><div class="panels">{figures}</div>'
        f'<div class="scroll">{_table(points)}</div><p>{facts}</p><div id="tip" role="status"></div>'
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _button(series: str) -> str:
    dot = f'<span class="dot" style="background:{COLOURS[series]}"></span>'
    return f'<button data-name="{series}" aria-pressed="true">{dot}{series}</button>'


def _figure(name: str, points: Sequence[Point]) -> str:
    unit, unit_name = unit_of(points)
    drawn = [p for p in points if p.measured]
    xs = ticks(max(((p.peak_bytes or 0) / unit for p in drawn), default=1.0))
    ys = ticks(max((p.tflops or 0.0 for p in drawn), default=1.0))
    right, top = xs[-1], ys[-1]

    def place(point: Point) -> tuple[float, float]:
        x = LEFT + (point.peak_bytes or 0) / unit / right * (WIDTH - LEFT - RIGHT)
        return round(x, 1), round(HEIGHT - BOTTOM - (point.tflops or 0.0) / top * (HEIGHT - TOP - BOTTOM), 1)

    parts = [_axes(xs, ys, unit_name)]
    for series, line in lines_of(points):
        path = " ".join(f"{x},{y}" for x, y in map(place, line))
        dash = "" if series == "hybrid" else ' stroke-dasharray="3 3"'
        parts.append(
            f'<polyline data-series="{series}" points="{path}" fill="none" stroke="{COLOURS[series]}"'
            f' stroke-width="1.3"{dash}/>'
        )
        parts += [_dot(point, *place(point)) for point in line]
    failed = "".join(f'<p class="failed">{escape(text)}</p>' for text in failures_of(points))
    return (
        f'<figure><figcaption>{escape(name)}</figcaption><svg width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)}">{"".join(parts)}</svg>{failed}</figure>'
    )


def _dot(point: Point, x: float, y: float) -> str:
    series = point.variant.series
    tip = escape("\n".join(_facts(point)), quote=True)
    tag = f'<text class="tag" data-series="{series}" x="{x + 7}" y="{y - 5}">b{point.case.batch}</text>'
    return (
        f'<circle class="point" tabindex="0" data-series="{series}" cx="{x}" cy="{y}" r="5.5" '
        f'fill="{COLOURS[series]}" data-tip="{tip}"/>{tag if series != "hybrid" else ""}'
    )


def _facts(point: Point) -> list[str]:
    lines = [
        point.label,
        f"{point.tflops or 0.0:.4g} TFLOP/s, {point.step_s or 0.0:.4g} s a step (± {point.spread / 2:.1%})",
        f"activation peak {format_size(point.peak_bytes or 0)}",
    ]
    if point.device_budget is not None:
        lines.append(f"device budget {format_size(point.device_budget)}")
    lines.append({True: "losses equal keep's bit for bit", False: "LOSSES DIFFER", None: "no losses"}[point.identical])
    if point.dominated_by:
        lines.append(f"dominated by {point.dominated_by[0]}")
    return lines


def _axes(xs: Sequence[float], ys: Sequence[float], unit_name: str) -> str:
    bottom, end = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for value in xs:
        x = round(LEFT + value / xs[-1] * (end - LEFT), 1)
        parts.append(f'<line class="grid" x1="{x}" y1="{TOP}" x2="{x}" y2="{bottom}"/>')
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{value:.4g}</text>')
    for value in ys:
        y = round(bottom - value / ys[-1] * (bottom - TOP), 1)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y}" x2="{end}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{value:.4g}</text>')
    middle = (LEFT + end) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">activation peak ({unit_name})</text>')
    height = (TOP + bottom) / 2
    turned = f'transform="rotate(-90 14 {height})"'
    return "".join(parts) + f'<text x="14" y="{height}" text-anchor="middle" {turned}>throughput (TFLOP/s)</text>'


def ticks(most: float, count: int = 5) -> list[float]:
    """Round values from 0 to just above ``most``.

    >>> ticks(3.4)
    [0.0, 1.0, 2.0, 3.0, 4.0]
    """
    most = most or 1.0
    size = 10.0 ** math.floor(math.log10(most / count))
    step = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size * count >= most)
    return [round(number * step, 12) for number in range(math.ceil(1.05 * most / step) + 1)]


def _table(points: Sequence[Point]) -> str:
    columns = ("workload", "series", "peak", "TFLOP/s", "step s", "spread", "bit-identical", "dominated by")
    head = "".join(f"<th>{name}</th>" for name in columns)
    rows = []
    for point in points:
        cells = (point.case.name, point.variant.label, *cells_of(point))
        best = ' class="best"' if point.measured and not point.dominated_by else ""
        rows.append(f"<tr{best}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def cells_of(point: Point) -> tuple[str, ...]:
    """A point's numbers as text: peak, TFLOP/s, step, spread, bit-identical, what dominates it."""
    if not point.measured:
        return ("-", "-", "-", "-", "-", "out of memory" if point.oom else point.error)
    return (
        format_size(point.peak_bytes or 0),
        f"{point.tflops or 0.0:.4g}",
        f"{point.step_s or 0.0:.4g}",
        f"{point.spread:.1%}",
        {True: "yes", False: "NO", None: "-"}[point.identical],
        point.dominated_by[0] if point.dominated_by else "none",
    )
