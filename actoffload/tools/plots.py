"""The picture of a ROK curve by matplotlib, if it is installed (``pip install actoffload[plots]``)."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..sizes import format_size

if TYPE_CHECKING:
    from .rok_points import Point, Variant

LINES = {"keep": (":", "s"), "recompute": ("--", "^"), "offload": ("-.", "D"), "hybrid": ("-", "oPX*hv")}
"""The line and the marker of each series, in the order of the legend. The hybrid has a marker for each budget."""
COLOURS = {"keep": "black", "recompute": "#d55e00", "offload": "#009e73", "hybrid": "#0072b2"}
"""Okabe and Ito's, which colour-blind people can tell apart."""
COLUMN = 3.3
"""The width of a paper's column in inches."""
LETTERS = 60
"""The letters that fit in it."""


def draw_rok(points: Sequence[Point], paths: Sequence[Path], title: str) -> None:
    """Draw a panel for each model and size, throughput over activation peak; upper left is better.

    A line joins a variant's batches, whose numbers stand beside its points. A band is the A/A noise of keep.
    The ending of each of ``paths`` is its format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    # Files need no display, and a machine that measures often has none.
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys(point.case.panel for point in points))
    columns = 1 if len(panels) <= 3 else 2
    rows = -(-len(panels) // columns)
    sizes: dict[str, Any] = {"font.size": 7.0, "axes.titlesize": "medium", "figure.titlesize": "medium"}
    with pyplot.style.context(["default", sizes]):
        shape = (COLUMN, 1.4 + 1.25 * rows)
        figure, grid = pyplot.subplots(rows, columns, figsize=shape, squeeze=False, layout="constrained")
        try:
            known: dict[str, Any] = {}
            for axis, panel in zip_longest(grid.flatten(), panels):
                if panel is None:
                    axis.set_axis_off()
                    continue
                _draw_panel(axis, [p for p in points if p.case.panel == panel])
                axis.set_title(textwrap.fill(panel, LETTERS // columns - 4))
                handles, labels = axis.get_legend_handles_labels()
                known |= dict(zip(labels, handles, strict=True))
            figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=2, frameon=False)
            figure.suptitle("\n".join(textwrap.fill(line, LETTERS) for line in title.splitlines()))
            figure.supylabel("model TFLOP/s (bars: middle half of the turns; numbers: batch)", fontsize="medium")
            for path in paths:
                figure.savefig(path, dpi=300)
        finally:
            pyplot.close(figure)


def _draw_panel(axis: Any, points: Sequence[Point]) -> None:
    axis.grid(alpha=0.15)
    axis.spines[["top", "right"]].set_visible(False)
    order = list(LINES)
    variants = sorted({p.variant for p in points if p.tflops}, key=lambda v: (order.index(v.series), v.level))
    markers = {series: iter(kinds * len(variants)) for series, (_, kinds) in LINES.items()}
    for variant in variants:
        mine = sorted((p for p in points if p.variant == variant), key=lambda p: p.case.batch)
        _draw_variant(axis, variant, mine, next(markers[variant.series]))
    failed = {
        "no room": [p.label for p in points if p.oom],
        "not measured": [p.label for p in points if not p.tflops and not p.oom],
    }
    texts = [f"{reason}: {'; '.join(labels)}" for reason, labels in failed.items() if labels]
    axis.set_xlabel("\n".join(["activation peak", *(textwrap.fill(text, LETTERS) for text in texts)]))
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda nbytes, _: format_size(nbytes).replace(".0 ", " "))


def _draw_variant(axis: Any, variant: Variant, points: Sequence[Point], marker: str) -> None:
    """Draw a line through a variant's points, with batches and bars, and the noise of keep."""
    colour = COLOURS[variant.series]
    drawn = [(float(p.peak_bytes), p.tflops, p) for p in points if p.tflops]
    below, above = [y.median - y.low for _, y, _ in drawn], [y.high - y.median for _, y, _ in drawn]
    axis.errorbar(
        [x for x, _, _ in drawn],
        [y.median for _, y, _ in drawn],
        yerr=[below, above],
        label=variant.label,
        color=colour,
        linestyle=LINES[variant.series][0],
        linewidth=1,
        marker=marker,
        markersize=4,
        markerfacecolor="none" if variant.series == "hybrid" else colour,  # hollow, as several may lie on each other
        elinewidth=0.8,
    )
    for x, y, point in drawn:
        axis.annotate(str(point.case.batch), (x, y.median), (3, 3), textcoords="offset points", fontsize="x-small")
        if variant.series == "keep" and y.high > y.low:
            axis.axhspan(y.low, y.high, color=colour, alpha=0.1, linewidth=0, label="A/A noise of keep")
