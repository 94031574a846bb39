"""Pictures by matplotlib, where it is installed (``pip install actoffload[plots]``), all in one look.

Each function writes a file for each path (PNG, SVG, or what else its ending says) and returns False, with nothing
written, where matplotlib is not installed or there is nothing to show.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from ..planning.simulator import Prediction
from . import rok_points as rok
from .estimates import Memory

MIB, GIB = 1 << 20, 1 << 30
MARKERS = {"keep": "s", "recompute": "^", "offload": "D", "hybrid": "oPX*hv"}
"""The hybrid has one for each budget."""
LINES = {"keep": ":", "recompute": "--", "offload": "-.", "hybrid": "-"}
HATCHES = ("", "//", "..", "xx")
SEEN = 0.01
"""The least spread that is drawn, as a share."""

Item = TypeVar("Item")
Key = TypeVar("Key")


class Style(StrEnum):
    """What a picture is for."""

    PAPER = "paper"
    """One column of two, 3.3 inches wide, with text of 7 points."""
    SLIDE = "slide"
    """16:9, with large text."""


@dataclass(frozen=True)
class Look:
    """How a picture looks: for paper or a slide, on white or on black. Colours are Okabe and Ito's."""

    style: Style = Style.PAPER
    dark: bool = False

    @property
    def ink(self) -> str:
        """The colour of text, axes and what is kept."""
        return "#f0f0f0" if self.dark else "#262626"

    @property
    def paper(self) -> str:
        """The colour behind."""
        return "#121212" if self.dark else "white"

    @property
    def colours(self) -> dict[str, str]:
        """By series; colour-blind people can tell them apart."""
        bright = {"recompute": "#e69f00", "offload": "#00c08b", "hybrid": "#56b4e9"}
        deep = {"recompute": "#d55e00", "offload": "#009e73", "hybrid": "#0072b2"}
        return {"keep": self.ink, **(bright if self.dark else deep)}

    def path(self, file: Path, ending: str) -> Path:
        """Return the name of a picture of what a file holds: ``run.png``, ``run_slide_dark.png``."""
        parts = ["slide"] * (self.style is Style.SLIDE) + ["dark"] * self.dark
        return file.with_name("_".join([file.stem, *parts]) + ending)


# -- throughput over memory -------------------------------------------------------------------------------------------


def draw_rok(points: Sequence[rok.Point], paths: Sequence[Path], title: str, look: Look) -> bool:
    """Draw a panel for each model and size, throughput over activation peak; upper left is better.

    A line joins a variant's batches. Bars show the middle half and, to the right, the highest peak of a step; one that
    is very long runs out of the panel. A band is the A/A noise of keep. Larger markers are larger batches.
    """
    groups = _grouped(points, lambda point: point.case.panel)
    if not groups or not has_matplotlib():
        return False
    if look.style is Style.SLIDE:  # three in a row: models beside each other, sizes below each other
        groups = dict(sorted(groups.items(), key=lambda group: group[1][0].case.hidden))
    unit, unit_name = _unit_of(point.worst_peak_bytes for point in points)
    with _panels(groups, paths, title, look) as axes:
        for mine, axis in zip(groups.values(), axes, strict=True):
            _draw_rok_panel(axis, mine, unit, _markers(points), _batch_sizes(points, look), look)
            if axis.get_subplotspec().is_last_row():
                axis.set_xlabel(f"activation peak ({unit_name})")
        figure = axes[0].figure
        figure.supylabel("model throughput (TFLOP/s)", fontsize="medium")
        _legend(figure, _rok_legend(points, look))
    return True


def _draw_rok_panel(
    axis: Any,
    points: Sequence[rok.Point],
    unit: int,
    markers: Mapping[rok.Variant, str],
    sizes: Mapping[int, float],
    look: Look,
) -> None:
    drawn = [(p, p.tflops) for p in sorted(points, key=lambda p: p.case.batch) if p.tflops]
    failed = {
        "out of memory": [p for p in points if p.oom],
        "not measured": [p for p in points if not p.tflops and not p.oom],
    }
    texts = [f"{what}: {'; '.join(p.label for p in mine)}" for what, mine in failed.items() if mine]
    for variant, line in _grouped(drawn, lambda d: d[0].variant).items():
        colour, style = look.colours[variant.series], LINES[variant.series]
        xs, ys = [p.peak_bytes / unit for p, _ in line], [tflops.median for _, tflops in line]
        axis.plot(xs, ys, style, color=colour, linewidth=_points(look))
        for x, y, (p, tflops) in zip(xs, ys, line, strict=True):
            axis.plot(x, y, markersize=sizes[p.case.batch], zorder=3, **_marker(variant, markers, look))
            bars: dict[str, Any] = {}
            if _steps_vary(p):
                bars["yerr"] = [[y - tflops.low], [tflops.high - y]]
            if _peaks_vary(p):
                bars["xerr"] = [[0], [(p.worst_peak_bytes - p.peak_bytes) / unit]]
            axis.errorbar(x, y, color=colour, elinewidth=0.8 * _points(look), capsize=1.5 * _points(look), **bars)
        if variant.series == "keep":
            for p, tflops in line:
                if _steps_vary(p) and p.ratio is not None:
                    axis.axhspan(tflops.low, tflops.high, color=look.ink, alpha=0.1, linewidth=0)
    if drawn:
        best = _frontier((p.peak_bytes / unit, tflops.median) for p, tflops in drawn)
        axis.step(*zip(*best, strict=True), where="post", **_frontier_line(look))
        bottom = min(max(tflops.low, 0.7 * tflops.median) for _, tflops in drawn)
        top = max(min(tflops.high, 1.3 * tflops.median) for _, tflops in drawn)
        room = 0.16 * len(texts) * (top - bottom)  # for the texts, below all points
        axis.set_ylim(0.93 * bottom - room, 1.05 * top)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.text(0.02, 0.02, "\n".join(texts), transform=axis.transAxes, wrap=True)


def _frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return where the best throughput rises, by memory, and how far to the right points lie.

    >>> _frontier([(4, 10), (1, 8), (2, 7), (8, 9)])
    [(1, 8), (4, 10), (8, 10)]
    """
    found: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not found or y > found[-1][1]:
            found.append((x, y))
        last = x
    return found if found[-1][0] == last else [*found, (last, found[-1][1])]


def _frontier_line(look: Look) -> dict[str, Any]:
    return {"color": look.ink, "alpha": 0.25, "linewidth": 4 * _points(look), "zorder": 1}


def _marker(variant: rok.Variant, markers: Mapping[rok.Variant, str], look: Look) -> dict[str, Any]:
    """Return how a variant is marked: the hybrid is hollow, so that what lies behind it is seen."""
    colour = look.colours[variant.series]
    face, edge = ("none", colour) if variant.series == "hybrid" else (colour, look.paper)
    style = {"marker": markers[variant], "color": colour, "markerfacecolor": face, "markeredgecolor": edge}
    return {**style, "markeredgewidth": (0.8 if variant.series == "hybrid" else 0.5) * _points(look)}


def _steps_vary(point: rok.Point) -> bool:
    """Return whether its steps differ by so much that a bar can be seen."""
    tflops = point.tflops
    return tflops is not None and tflops.high - tflops.low > SEEN * tflops.median


def _peaks_vary(point: rok.Point) -> bool:
    return point.worst_peak_bytes > (1 + SEEN) * point.peak_bytes


def _markers(points: Iterable[rok.Point]) -> dict[rok.Variant, str]:
    """Return a marker for each variant, in the order of series."""
    found: dict[rok.Variant, str] = {}
    for variant in sorted({p.variant for p in points}, key=lambda v: (rok.SERIES.index(v.series), v.level)):
        number = sum(known.series == variant.series for known in found)
        found[variant] = MARKERS[variant.series][number % len(MARKERS[variant.series])]
    return found


def _batch_sizes(points: Iterable[rok.Point], look: Look) -> dict[int, float]:
    """Return a marker's size in points for each batch."""
    batches = sorted({p.case.batch for p in points if p.tflops})
    return {batch: (2.8 + 1.1 * number) * _points(look) for number, batch in enumerate(batches)}


def _rok_legend(points: Sequence[rok.Point], look: Look) -> list[Any]:
    """Return what explains each mark that is drawn: variants, batches, the frontier, bars and the band."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    drawn = [p for p in points if p.tflops]
    markers, size = _markers(drawn), 4.5 * _points(look)
    handles: list[Any] = []
    for variant in markers:
        line = _marker(variant, markers, look) | {"linestyle": LINES[variant.series], "markersize": size}
        handles.append(Line2D([], [], label=_text_of(variant), **line))
    dot: dict[str, Any] = {"color": look.ink, "linestyle": "none"}
    for batch, diameter in _batch_sizes(points, look).items():
        handles.append(Line2D([], [], marker="o", markersize=diameter, label=f"batch {batch}", **dot))
    noisy = any(map(_steps_vary, drawn))
    if drawn:
        text = "frontier of the medians" if noisy else "frontier"
        handles.append(Line2D([], [], label=text, **_frontier_line(look)))
    if noisy:
        handles.append(Line2D([], [], marker="|", markersize=2 * size, label="middle half of the turns", **dot))
    if any(map(_peaks_vary, drawn)):
        handles.append(Line2D([], [], marker="_", markersize=2 * size, label="up to the highest peak", **dot))
    if any(p.variant.series == "keep" and _steps_vary(p) and p.ratio for p in drawn):
        handles.append(Patch(color=look.ink, alpha=0.1, label="A/A noise of keep"))
    return handles


def _text_of(variant: rok.Variant) -> str:
    """Return a variant in words."""
    if not variant.level:
        return variant.series
    budget = f"{variant.level}'s peak" if variant.level in rok.SERIES else f"{float(variant.level):.0%} of keep"
    return f"{variant.series} at {budget}"


# -- a plan, an estimate ----------------------------------------------------------------------------------------------


def draw_plan(
    keep: Prediction,
    plan: Prediction,
    path: Path,
    title: str,
    *,
    look: Look,
    forward_s: float,
    device_budget: int | None = None,
) -> bool:
    """Draw bytes on the device over the step.

    Args:
        keep: the step with nothing moved.
        plan: the step under the plan.
        path: the file to write.
        title: what is shown.
        look: how it looks.
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
    with _panels([""], [path], title, look) as (axis,):
        for step, series, label in ((keep, "keep", "nothing moved"), (plan, "hybrid", "the plan")):
            timeline, step_s, colour = step.timeline, step.step_s, look.colours[series]
            times = [0.0, *(t for t, _ in timeline), max(step_s, timeline[-1][0] if timeline else 0.0)]
            sizes = [0.0, *(nbytes / unit for _, nbytes in timeline), 0.0]
            text = f"{label}: {step_s:.3g} s, peak {max(sizes):.3g} {name}"
            axis.fill_between(times, sizes, step="post", color=colour, alpha=0.15, linewidth=0)
            axis.step(times, sizes, LINES[series], where="post", color=colour, label=text, linewidth=_points(look))
        if device_budget is not None:
            budget = device_budget / unit
            colour, text = look.colours["recompute"], f"budget: {budget:.3g} {name}"
            axis.axhline(budget, label=text, color=colour, linestyle="--", linewidth=_points(look))
        axis.axvline(forward_s, color=look.ink, linestyle="-.", linewidth=0.8, label="backward begins (nothing moved)")
        axis.set(xlabel="time in the step (s)", ylabel=f"saved activations\non the device ({name})")
        axis.set(xlim=(0, None), ylim=(0, 1.08 * top / unit))
        _legend(axis.figure, axis.get_legend_handles_labels()[0])
    return True


def draw_estimate(memory: Memory, path: Path, title: str, look: Look) -> bool:
    """Draw what a GPU holds at its peak, as bars: model states and activations, against what there is.

    Raises:
        OSError: the file cannot be written.
        ValueError: its ending is no format that matplotlib knows.
    """
    if not has_matplotlib():
        return False
    names = {"all kept": memory.kept, "what hides moves": memory.hidden, "all moves": memory.moved}
    parts = {
        "parameters": [memory.parameter_bytes] * len(names),
        "gradients": [memory.gradient_bytes] * len(names),
        "optimizer states": [memory.optimizer_bytes] * len(names),
        "saved activations": [peak.saved_bytes for peak in names.values()],
    }
    colours = (look.colours["keep"], look.colours["recompute"], look.colours["offload"], look.colours["hybrid"])
    with _panels([""], [path], title, look) as (axis,):
        left = [0.0] * len(names)
        for (part, sizes), colour, hatch in zip(parts.items(), colours, HATCHES, strict=True):
            widths = [nbytes / GIB for nbytes in sizes]
            style = {"color": colour, "edgecolor": look.paper, "hatch": hatch, "linewidth": 0.5}
            axis.barh(list(names), widths, left=left, label=part, height=0.6, **style)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        there = memory.capacity_bytes / GIB
        axis.axvline(there, color=look.ink, linestyle="--", linewidth=_points(look), label=f"there is: {there:.3g} GiB")
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
        axis.set(xlabel="on a GPU at its peak (GiB)", xlim=(0, 1.05 * max(*left, there)))
        _legend(axis.figure, axis.get_legend_handles_labels()[0])
    return True


# -- the look ---------------------------------------------------------------------------------------------------------


def has_matplotlib() -> bool:
    """Return whether pictures can be drawn."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    return True


def _points(look: Look) -> float:
    """Return the width of a line in points."""
    return 1.0 if look.style is Style.PAPER else 2.0


def _legend(figure: Any, handles: Sequence[Any]) -> None:
    """Explain the marks below the panels, in as many columns as there is room for."""
    from matplotlib import rcParams

    longest = max((len(handle.get_label()) for handle in handles), default=0)
    columns = max(1, _letters(figure.get_figwidth(), rcParams["font.size"]) // (longest + 4))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, columnspacing=1.0)


def _letters(inches: float, points: float) -> int:
    """Return how many letters of a size fit in a line."""
    return int(130 * inches / points)


@contextmanager
def _panels(names: Iterable[str], paths: Sequence[Path], title: str, look: Look) -> Iterator[list[Any]]:
    """Give an axis for each name, and write the picture at the end."""
    from matplotlib import pyplot

    titles = list(names)
    count = len(titles)
    if look.style is Style.PAPER:
        columns, fontsize, width = 1 if count <= 3 else 2, 7.0, 3.3
        rows = -(-count // columns)
        height = 1.2 + (1.25 if count > 1 else 1.5) * rows
    else:
        columns, fontsize, width, height = min(3, count), 18.0 if count <= 3 else 15.0, 13.33, 7.5
        rows = -(-count // columns)
    letters = _letters(width, fontsize)
    coloured = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    colours: dict[Any, Any] = dict.fromkeys(coloured, look.ink) | {
        "figure.facecolor": look.paper,
        "axes.facecolor": look.paper,
    }
    sized = ("font.size", "axes.titlesize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize", "figure.titlesize")
    with pyplot.rc_context(colours | dict.fromkeys(sized, fontsize)):
        figure, grid = pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained")
        axes = list(grid.flatten())
        for axis in axes[count:]:
            axis.set_axis_off()
        for axis, name in zip(axes, titles, strict=False):
            room = int(0.85 * letters / columns)
            axis.set_title(_wrapped(name if len(name) <= room else name.replace(" × ", "\n"), room))
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(color=look.ink, alpha=0.15)
            axis.set_axisbelow(True)
        try:
            yield axes[:count]
            figure.suptitle(_wrapped(title, letters))
            for path in paths:
                figure.savefig(path, dpi=300 if look.style is Style.PAPER else 150)
        finally:
            pyplot.close(figure)


def _wrapped(text: str, letters: int) -> str:
    return "\n".join(textwrap.fill(line, letters) for line in text.splitlines())


def _grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _unit_of(sizes: Iterable[int]) -> tuple[int, str]:
    """Return what to divide bytes by, and its name."""
    return (GIB, "GiB") if max(sizes, default=0) >= GIB else (MIB, "MiB")
