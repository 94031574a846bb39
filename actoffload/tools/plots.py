"""The picture of a ROK curve by matplotlib, if it is installed (``pip install actoffload[plots]``)."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..sizes import format_size

if TYPE_CHECKING:
    from .rok_points import Point, Variant

LINES = {"keep": (":", "s"), "recompute": ("--", "^"), "offload": ("-.", "D"), "hybrid": ("-", "oPX*hv")}
"""The line and the marker of each series, in the order of the legend. The hybrid has a marker for each budget."""
BRIGHT = {"keep": "white", "recompute": "#e69f00", "offload": "#00c08b", "hybrid": "#56b4e9"}
DEEP = {"keep": "black", "recompute": "#d55e00", "offload": "#009e73", "hybrid": "#0072b2"}
"""On white. Both are Okabe and Ito's colours, which colour-blind people can tell apart."""
COLUMN = 3.3
"""The width of a paper's column in inches."""
LETTERS = 60
"""The letters that fit in it."""
SEEN = 0.01
"""The least spread that is drawn, as a share."""


def draw_rok(points: Sequence[Point], paths: Sequence[Path], title: str, *, dark: bool = False) -> None:
    """Draw a panel for each model and size, throughput over activation peak; upper left is better.

    A line joins a variant's batches, whose numbers stand beside its points. Bars show the middle half and, to the
    right, the highest peak of a step; one that is very long runs out of the panel. A band is the A/A noise of keep.

    Args:
        points: the points of all panels.
        paths: files; the ending of each is its format.
        title: the text above the panels.
        dark: draw on black.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: a file cannot be written.
    """
    import matplotlib

    # Files need no display, and a machine that measures often has none.
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys(point.case.panel for point in points))
    columns = 1 if len(panels) <= 3 else 2
    rows = -(-len(panels) // columns)
    sizes: dict[Any, Any] = {"font.size": 7.0, "axes.titlesize": "medium", "figure.titlesize": "medium"}
    with pyplot.style.context(["dark_background" if dark else "default", sizes]):
        shape = (COLUMN, 1.4 + 1.25 * rows)
        figure, grid = pyplot.subplots(rows, columns, figsize=shape, squeeze=False, layout="constrained")
        try:
            known: dict[str, Any] = {}
            for place, axis in enumerate(grid.flatten()):
                axis.set_axis_off()
                if place < len(panels):
                    _draw_panel(axis, [p for p in points if p.case.panel == panels[place]], BRIGHT if dark else DEEP)
                    axis.set_title(textwrap.fill(panels[place], LETTERS // columns - 4))
                    handles, labels = axis.get_legend_handles_labels()
                    known |= dict(zip(labels, handles, strict=True))
                    if place + columns >= len(panels):
                        axis.set_xlabel("activation peak (numbers: batch)")
            place_below: dict[str, Any] = {"loc": "outside lower center", "ncols": 2, "frameon": False}
            figure.legend(known.values(), known.keys(), **place_below)
            figure.suptitle("\n".join(textwrap.fill(line, LETTERS) for line in title.splitlines()))
            figure.supylabel("model throughput (TFLOP/s)", fontsize="medium")
            for path in paths:
                figure.savefig(path, dpi=300)
        finally:
            pyplot.close(figure)


def _draw_panel(axis: Any, points: Sequence[Point], colours: dict[str, str]) -> None:
    axis.set_axis_on()
    axis.grid(alpha=0.15)
    axis.spines[["top", "right"]].set_visible(False)
    drawn = sorted((p for p in points if p.tflops), key=lambda p: p.case.batch)
    order = list(LINES)
    variants = sorted({p.variant for p in drawn}, key=lambda v: (order.index(v.series), v.level))
    for variant in variants:
        _draw_variant(axis, variant, [p for p in drawn if p.variant == variant], variants, colours)
    if drawn:
        best = _frontier([_xy(p) for p in drawn])
        label = "frontier of the medians" if any(map(_steps_vary, drawn)) else "frontier"
        faint = {"color": colours["keep"], "alpha": 0.25, "linewidth": 4, "zorder": 1}
        axis.step(*zip(*best, strict=True), where="post", label=label, **faint)
    failed = {
        "out of memory": [p.label for p in points if p.oom],
        "not measured": [p.label for p in points if not p.tflops and not p.oom],
    }
    texts = [f"{reason}: {'; '.join(labels)}" for reason, labels in failed.items() if labels]
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda nbytes, _: format_size(nbytes).replace(".0 ", " "))
    if drawn:
        bottom = min(max(p.tflops.low, 0.7 * p.tflops.median) for p in drawn if p.tflops)
        top = max(min(p.tflops.high, 1.3 * p.tflops.median) for p in drawn if p.tflops)
        axis.set_ylim(0.93 * bottom - 0.16 * len(texts) * (top - bottom), 1.05 * top)  # texts lie below all points
    axis.text(0.02, 0.02, "\n".join(texts), transform=axis.transAxes, wrap=True)


def _draw_variant(
    axis: Any, variant: Variant, points: Sequence[Point], variants: Sequence[Variant], colours: dict[str, str]
) -> None:
    """Draw a line through a variant's points, their batches, their bars and the noise of keep."""
    line, markers = LINES[variant.series]
    marker = markers[[v for v in variants if v.series == variant.series].index(variant) % len(markers)]
    colour = colours[variant.series]
    fill = "none" if variant.series == "hybrid" else colour  # hollow, as several of them may lie on each other
    style = {"linestyle": line, "marker": marker, "markersize": 4, "markerfacecolor": fill, "linewidth": 1}
    axis.plot(*zip(*map(_xy, points), strict=True), label=variant.label, color=colour, **style)
    for point in points:
        x, y = _xy(point)
        axis.annotate(str(point.case.batch), (x, y), (3, 3), textcoords="offset points", fontsize="x-small")
        bars: dict[str, Any] = {"fmt": "none", "ecolor": colour, "elinewidth": 0.8, "capsize": 1.5}
        if point.tflops and _steps_vary(point):
            low, high = point.tflops.low, point.tflops.high
            axis.errorbar(x, y, yerr=[[y - low], [high - y]], label="middle half of the turns", **bars)
            if variant.series == "keep" and point.ratio:
                axis.axhspan(low, high, color=colour, alpha=0.1, linewidth=0, label="A/A noise of keep")
        if point.worst_peak_bytes > (1 + SEEN) * point.peak_bytes:
            bar = [[0], [point.worst_peak_bytes - x]]
            axis.errorbar(x, y, xerr=bar, label="up to the highest peak", **bars)


def _xy(point: Point) -> tuple[float, float]:
    return float(point.peak_bytes), point.tflops.median if point.tflops else 0.0


def _steps_vary(point: Point) -> bool:
    """Return whether its steps differ by so much that a bar can be seen."""
    return point.tflops is not None and point.tflops.high - point.tflops.low > SEEN * point.tflops.median


def _frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points at which the best throughput rises with memory, and the last point on the right.

    >>> _frontier([(4, 10), (1, 8), (2, 7), (8, 9)])
    [(1, 8), (4, 10), (8, 10)]
    """
    found: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not found or y > found[-1][1]:
            found.append((x, y))
    last = max(x for x, _ in points)
    return found if found[-1][0] == last else [*found, (last, found[-1][1])]
