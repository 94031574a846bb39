"""Pictures, when matplotlib is installed (``pip install actoffload[plots]``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PANELS_IN_A_ROW = 3


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measured mode: seconds a step and GiB of activations at the peak; None where it ran out of memory."""

    group: str
    label: str
    step_s: float | None
    peak_gib: float | None


def step_time_against_memory(points: Sequence[Point], path: Path, title: str) -> bool:
    """One panel for each group, three in a row, step time over activation peak; lower left is better.

    Args:
        points: what was measured; those without numbers are named in the panel's corner.
        path: the PNG file to write.
        title: what is shown, and where it was measured.

    Returns:
        False, with nothing written, when matplotlib is not installed or there is nothing to show.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    groups = list(dict.fromkeys(point.group for point in points))
    if not groups:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(PANELS_IN_A_ROW, len(groups))
    rows = -(-len(groups) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(6 * columns, 4.5 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(groups) :]:
        axis.set_axis_off()
    for axis, group in zip(axes.flat, groups, strict=False):
        mine = [point for point in points if point.group == group]
        right = top = 1e-9
        for point in mine:
            if point.step_s is not None and point.peak_gib is not None:
                axis.scatter(point.peak_gib, point.step_s, label=point.label, alpha=0.8)
                right, top = max(right, point.peak_gib), max(top, point.step_s)
        failed = [point.label for point in mine if point.step_s is None]
        if failed:
            axis.text(0.02, 0.02, f"no peak measured: {', '.join(failed)}", transform=axis.transAxes)
        if len(failed) < len(mine):
            axis.legend(loc="best")
        axis.set(title=group, xlabel="activation peak (GiB)", ylabel="step time (s)")
        axis.set(xlim=(0, 1.25 * right), ylim=(0, 1.25 * top))
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
