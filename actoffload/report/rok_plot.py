"""The recompute-offload-keep curve as a picture, when matplotlib is installed (``actoffload[plots]``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .rok import SERIES, Point

COLOURS = {"keep": "#7a7a7a", "recompute": "#c77700", "offload": "#2a8a4a", "hybrid": "#0b6fa4"}
MARKERS = {"keep": "s", "recompute": "^", "offload": "D", "hybrid": "o"}
MIB = 1 << 20
GIB = 1 << 30


def unit_of(points: Sequence[Point]) -> tuple[int, str]:
    """What to divide bytes by, and its name."""
    top = max((p.peak_bytes for p in points if p.peak_bytes is not None), default=0)
    return (GIB, "GiB") if top >= GIB else (MIB, "MiB")


def panels_of(points: Sequence[Point]) -> dict[str, list[Point]]:
    """The points by panel, in the order in which they were measured."""
    panels: dict[str, list[Point]] = {}
    for point in points:
        panels.setdefault(point.case.panel, []).append(point)
    return panels


def lines_of(points: Sequence[Point]) -> list[tuple[str, list[Point]]]:
    """Which points of a panel a line joins: a series over its batches; the hybrid, for each batch, over its budgets."""
    lines: dict[tuple[str, int], list[Point]] = {}
    for point in points:
        if point.measured:
            series = point.variant.series
            lines.setdefault((series, point.case.batch if series == "hybrid" else 0), []).append(point)
    return [(series, sorted(mine, key=_place)) for (series, _), mine in lines.items()]


def _place(point: Point) -> tuple[int, float]:
    return point.peak_bytes or 0, point.tflops or 0.0


def failures_of(points: Sequence[Point]) -> list[str]:
    """What of a panel could not be measured, in words."""
    memory = [p.label for p in points if p.oom]
    other = [p.label for p in points if not p.measured and not p.oom]
    lines = [("out of memory", memory), ("not measured", other)]
    return [f"{what}: {'; '.join(labels)}" for what, labels in lines if labels]


def draw_rok(points: Sequence[Point], path: Path, title: str) -> bool:
    """Write the picture: a panel for each model and hidden size; upper left is better.

    Returns:
        False, with nothing written, when matplotlib is not installed or there is nothing to show.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    panels = panels_of(points)
    if not panels:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    size = (5.6 * columns, 4.6 * rows + 0.6)
    figure, grid = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    axes = grid.flatten()
    for axis, (name, mine) in zip(axes, panels.items(), strict=False):
        _draw_panel(axis, name, mine)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _draw_panel(axis: Any, name: str, points: Sequence[Point]) -> None:
    unit, unit_name = unit_of(points)
    for series in SERIES:  # one legend entry for each, also where a panel has none of them
        axis.plot([], [], color=COLOURS[series], marker=MARKERS[series], label=series)
    for series, line in lines_of(points):
        xs = [(p.peak_bytes or 0) / unit for p in line]
        ys = [p.tflops or 0.0 for p in line]
        dash = "-" if series == "hybrid" else ":"
        axis.plot(xs, ys, dash, color=COLOURS[series], marker=MARKERS[series], markersize=6, linewidth=1.1, alpha=0.85)
        named = line if series != "hybrid" else line[-1:]
        for point, x, y in zip(line, xs, ys, strict=True):
            if point in named:
                text = f"b{point.case.batch}"
                axis.annotate(
                    text, (x, y), textcoords="offset points", xytext=(5, 5), fontsize=7, color=COLOURS[series]
                )
    drawn = [p for p in points if p.measured]
    right = max(((p.peak_bytes or 0) / unit for p in drawn), default=1.0)
    top = max((p.tflops or 0.0 for p in drawn), default=1.0)
    axis.set(xlim=(0, 1.12 * right), ylim=(0, 1.15 * top))
    axis.set_title(name, fontsize="small")
    axis.set_xlabel(f"activation peak ({unit_name})", fontsize="small")
    axis.set_ylabel("model throughput (TFLOP/s)", fontsize="small")
    axis.tick_params(labelsize="small")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    for number, text in enumerate(failures_of(points)):
        axis.text(0.02, 0.02 + 0.05 * number, text, transform=axis.transAxes, fontsize=6.5, wrap=True)
