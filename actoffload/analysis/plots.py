"""Pictures by matplotlib, where it is installed (``pip install actoffload[plots]``).

Each function writes one file (PNG, or what else the name's ending says) and returns False, with nothing written, where
matplotlib is not installed or there is nothing to show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ..planning.simulator import Prediction
from . import rok

MIB, GIB = 1 << 20, 1 << 30
COLOURS = {"keep": "#4d4d4d", "recompute": "#d55e00", "offload": "#009e73", "hybrid": "#0072b2"}
"""Okabe and Ito's, which colour-blind people can tell apart."""
MARKERS = {"keep": "s", "recompute": "^", "offload": "D", "hybrid": "o"}
KEEP_COLOUR, PLAN_COLOUR, BUDGET_COLOUR = "#8c8c8c", "#0b6fa4", "#c23b22"

Item = TypeVar("Item")
Key = TypeVar("Key")


def draw_rok(points: Sequence[rok.Point], path: Path, title: str) -> bool:
    """Draw a panel for each model and size, throughput over activation peak; upper left is better.

    Bars show the middle half and, to the right, the highest peak of a step; one that is very long runs out of the
    panel. A grey band is the A/A noise of keep. Larger markers are larger batches.
    """
    groups = _grouped(points, lambda point: point.case.panel)
    if not groups or not has_matplotlib():
        return False
    width, columns = (3.6, 5) if len(groups) > 1 else (4.8, 3)
    with _panels(groups, path, title, width=width, height=3.1, fontsize=7.5) as axes:
        for (group, mine), axis in zip(groups.items(), axes, strict=True):
            _draw_rok_panel(axis, group, mine)
        axes[0].figure.legend(handles=_rok_legend(points), loc="outside lower center", ncols=columns, frameon=False)
    return True


def _draw_rok_panel(axis: Any, name: str, points: Sequence[rok.Point]) -> None:
    drawn = [(p, p.tflops) for p in sorted(points, key=lambda p: (p.case.batch, p.peak_bytes)) if p.tflops]
    unit, unit_name = _unit_of(p.worst_peak_bytes for p, _ in drawn)
    # A line joins a series over its batches; the hybrid, for each batch, over its budgets.
    lines = _grouped(drawn, lambda d: (d[0].variant.series, d[0].case.batch if d[0].variant.series == "hybrid" else 0))
    for (series, _), line in lines.items():
        xs, ys = [p.peak_bytes / unit for p, _ in line], [tflops.median for _, tflops in line]
        axis.plot(xs, ys, "-" if series == "hybrid" else ":", color=COLOURS[series], linewidth=1)
    sizes = _batch_sizes(points)
    for p, tflops in drawn:
        x, y, series = p.peak_bytes / unit, tflops.median, p.variant.series
        axis.errorbar(
            *(x, y),
            xerr=[[0], [(p.worst_peak_bytes - p.peak_bytes) / unit]],
            yerr=[[y - tflops.low], [tflops.high - y]],
            **{"fmt": MARKERS[series], "color": COLOURS[series], "markersize": sizes[p.case.batch]},
            **{"markeredgecolor": "white", "markeredgewidth": 0.5, "elinewidth": 0.8, "capsize": 1.5},
            zorder=2.5 if series == "hybrid" else 3,  # a hybrid with another's budget lies where that one does
        )
        if series == "keep" and p.ratio is not None:
            axis.axhspan(tflops.low, tflops.high, color=COLOURS["keep"], alpha=0.12, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_ylim(0, 1.25 * max((tflops.median for _, tflops in drawn), default=1.0))
    axis.set_title(name, fontsize="medium")
    axis.set(xlabel=f"activation peak ({unit_name}, logarithmic)", ylabel="model throughput (TFLOP/s)")
    axis.grid(alpha=0.25)
    failed = {
        "out of memory": [p for p in points if p.oom],
        "not measured": [p for p in points if not p.tflops and not p.oom],
    }
    texts = [f"{what}: {'; '.join(p.label for p in mine)}" for what, mine in failed.items() if mine]
    axis.text(0.02, 0.02, "\n".join(texts), transform=axis.transAxes, fontsize="small", wrap=True)


def _batch_sizes(points: Iterable[rok.Point]) -> dict[int, float]:
    """Return a marker's size in points for each batch."""
    batches = sorted({p.case.batch for p in points})
    return {batch: 4.0 + 2.0 * number for number, batch in enumerate(batches)}


def _rok_legend(points: Sequence[rok.Point]) -> list[Any]:
    """Return what explains series, line styles, sizes and the band."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    there = [name for name in rok.SERIES if any(p.variant.series == name for p in points)]
    series = [Line2D([], [], color=COLOURS[name], marker=MARKERS[name], linestyle="none", label=name) for name in there]
    styles = [Line2D([], [], color="black", linestyle=":", linewidth=1, label="a series over batches")]
    if "hybrid" in there:
        styles.append(Line2D([], [], color="black", linestyle="-", linewidth=1, label="hybrid over its budgets"))
    sizes = [
        Line2D([], [], color="black", marker="o", markersize=size, linestyle="none", label=f"batch {batch}")
        for batch, size in _batch_sizes(points).items()
    ]
    noise = Patch(color=COLOURS["keep"], alpha=0.12, label="A/A noise of keep (middle half)")
    return [*series, *styles, *sizes, noise]


def draw_plan(
    keep: Prediction, plan: Prediction, path: Path, title: str, *, forward_s: float, device_budget: int | None = None
) -> bool:
    """Draw bytes on the device over the step.

    Args:
        keep: the step with nothing moved.
        plan: the step under the plan.
        path: the file to write.
        title: what is shown.
        forward_s: when backward begins, with nothing moved.
        device_budget: bytes; None for none.

    Raises:
        OSError: the file cannot be written.
        ValueError: its ending is no format that matplotlib knows.
    """
    if not has_matplotlib():
        return False
    top = max((nbytes for _, nbytes in (*keep.timeline, *plan.timeline)), default=1)
    unit, name = _unit_of([top])
    with _panels([title], path, title, width=9.0) as (axis,):
        for step, colour, label in ((keep, KEEP_COLOUR, "nothing moved"), (plan, PLAN_COLOUR, "the plan")):
            timeline, step_s = step.timeline, step.step_s
            times = [0.0, *(t for t, _ in timeline), max(step_s, timeline[-1][0] if timeline else 0.0)]
            sizes = [0.0, *(nbytes / unit for _, nbytes in timeline), 0.0]
            text = f"{label}: {step_s:.3g} s, peak {max(sizes):.3g} {name}"
            axis.fill_between(times, sizes, step="post", color=colour, alpha=0.18, linewidth=0)
            axis.step(times, sizes, where="post", color=colour, label=text, linewidth=1.4)
        if device_budget is not None:
            budget = device_budget / unit
            axis.axhline(budget, color=BUDGET_COLOUR, linestyle="--", label=f"budget: {budget:.3g} {name}")
        axis.axvline(forward_s, color="black", linestyle=":", label="backward begins (nothing moved)")
        axis.set(xlabel="time in the step (s)", ylabel=f"saved activations on the device ({name})")
        axis.set(xlim=(0, None), ylim=(0, 1.12 * top / unit))
        axis.legend(loc="upper right", framealpha=0.9, fontsize="small")
    return True


def has_matplotlib() -> bool:
    """Return whether pictures can be drawn."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    return True


@contextmanager
def _panels(
    names: Iterable[str], path: Path, title: str, *, width: float = 5.8, height: float = 4.6, fontsize: float = 10.0
) -> Iterator[list[Any]]:
    """Give an axis for each name, three in a row, and write the picture at the end; sizes in inches and points."""
    from matplotlib import pyplot

    count = len(list(names))
    columns = min(3, count)
    rows = -(-count // columns)
    with pyplot.rc_context({"font.size": fontsize, "figure.facecolor": "white", "axes.facecolor": "white"}):
        size = (width * columns, height * rows)
        figure, grid = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
        axes = list(grid.flatten())
        for axis in axes[count:]:
            axis.set_axis_off()
        for axis in axes:
            axis.spines[["top", "right"]].set_visible(False)
        try:
            yield axes[:count]
            figure.suptitle(title, fontsize="medium")
            figure.savefig(path, dpi=200)
        finally:
            pyplot.close(figure)


def _from_zero(axis: Any) -> None:
    """Let both axes begin at zero, with room for labels beyond the last point; call it after drawing."""
    axis.set(xlim=(0, 1.1 * axis.get_xlim()[1]), ylim=(0, 1.1 * axis.get_ylim()[1]))


def _grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _unit_of(sizes: Iterable[int]) -> tuple[int, str]:
    """Return what to divide bytes by, and its name."""
    return (GIB, "GiB") if max(sizes, default=0) >= GIB else (MIB, "MiB")
