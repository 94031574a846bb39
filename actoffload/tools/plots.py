"""Pictures by matplotlib, if it is installed (``pip install actoffload[plots]``), all in one look.

Each function writes a file for each path (PNG, SVG, or another format by its ending).

Raises:
    ImportError: matplotlib is not installed.
    OSError: a file cannot be written.
    ValueError: matplotlib does not know the format.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from .rok_points import Point, Variant

MARKERS = {"keep": "s", "recompute": "^", "offload": "D", "hybrid": "oPX*hv"}
"""The hybrid has one for each budget."""
LINES = {"keep": ":", "recompute": "--", "offload": "-.", "hybrid": "-"}
BRIGHT = {"recompute": "#e69f00", "offload": "#00c08b", "hybrid": "#56b4e9"}
DEEP = {"recompute": "#d55e00", "offload": "#009e73", "hybrid": "#0072b2"}
SEEN = 0.01
"""The least spread that is drawn, as a share."""


@dataclass(frozen=True)
class Look:
    """A picture for a column of a paper, with text of 7 points, or for a slide, with large text; on white or black."""

    style: Annotated[
        Literal["paper", "slide"], typer.Option(help="Draw for a column of a paper, 3.3 inches, or for a slide, 16:9.")
    ] = "paper"
    dark: Annotated[bool, typer.Option("--dark", help="Draw on black.")] = False

    @property
    def colours(self) -> dict[str, str]:
        """By series. Okabe and Ito's, which colour-blind people can tell apart."""
        return {"keep": "white", **BRIGHT} if self.dark else {"keep": "black", **DEEP}

    @property
    def point(self) -> float:
        """The width of a line in points."""
        return 1.0 if self.style == "paper" else 2.0

    def path(self, file: Path, ending: str) -> Path:
        """Return the name of a picture beside a results file: ``run.png``, ``run_slide_dark.png``."""
        parts = ["slide"] * (self.style == "slide") + ["dark"] * self.dark
        return file.with_name("_".join([file.stem, *parts]) + ending)


# -- throughput over memory -------------------------------------------------------------------------------------------


def draw_rok(points: Sequence[Point], paths: Sequence[Path], title: str, look: Look) -> None:
    """Draw a panel for each model and size, throughput over activation peak; upper left is better.

    A line joins a variant's batches. Bars show the middle half and, to the right, the highest peak of a step; one that
    is very long runs out of the panel. A band is the A/A noise of keep. Larger markers are larger batches.
    """
    if look.style == "slide":  # three in a row: models beside each other, sizes below each other
        points = sorted(points, key=lambda point: point.case.hidden)
    panels = list(dict.fromkeys(point.case.panel for point in points))
    large = max((point.worst_peak_bytes for point in points), default=0) >= 1 << 30
    unit, unit_name = (1 << 30, "GiB") if large else (1 << 20, "MiB")
    batches = sorted({point.case.batch for point in points if point.tflops})
    sizes = {batch: (2.8 + 1.1 * number) * look.point for number, batch in enumerate(batches)}
    styles = _styles([point for point in points if point.tflops], look)
    with _panels(panels, paths, title, look) as axes:
        for panel, axis in zip(panels, axes, strict=True):
            _draw_rok_panel(axis, [p for p in points if p.case.panel == panel], unit, styles, sizes, look)
            if axis.get_subplotspec().is_last_row():
                axis.set_xlabel(f"activation peak ({unit_name})")
        for batch, size in sizes.items():
            dot = {"color": look.colours["keep"], "marker": "o", "markersize": size, "linestyle": "none"}
            axes[0].plot([], [], label=f"batch {batch}", **dot)
        axes[0].figure.supylabel("model throughput (TFLOP/s)", fontsize="medium")


def _draw_rok_panel(
    axis: Any,
    points: Sequence[Point],
    unit: int,
    styles: Mapping[Variant, dict[str, Any]],
    sizes: Mapping[int, float],
    look: Look,
) -> None:
    drawn = sorted((p for p in points if p.tflops), key=lambda p: p.case.batch)
    ink = look.colours["keep"]
    for variant, style in styles.items():
        line = [p for p in drawn if p.variant == variant]
        if not line:
            continue
        axis.plot(*_xy(line, unit), **style, markevery=[], linewidth=look.point)
        for p in line:
            mark = style | {"linestyle": "none", "markersize": sizes[p.case.batch], "label": None}
            axis.plot(*_xy([p], unit), zorder=3, **mark)
            _draw_bars(axis, p, unit, look)
    if drawn:
        best = _frontier(zip(*_xy(drawn, unit), strict=True))
        steady = not any(map(_steps_vary, drawn))
        faint = {"color": ink, "alpha": 0.25, "linewidth": 4 * look.point, "zorder": 1}
        label = "frontier" if steady else "frontier of the medians"
        axis.step(*zip(*best, strict=True), where="post", label=label, **faint)
    failed = {
        "out of memory": [p.label for p in points if p.oom],
        "not measured": [p.label for p in points if not p.tflops and not p.oom],
    }
    texts = [f"{reason}: {'; '.join(labels)}" for reason, labels in failed.items() if labels]
    if drawn:
        bottom = min(max(p.tflops.low, 0.7 * p.tflops.median) for p in drawn if p.tflops)
        top = max(min(p.tflops.high, 1.3 * p.tflops.median) for p in drawn if p.tflops)
        axis.set_ylim(0.93 * bottom - 0.16 * len(texts) * (top - bottom), 1.05 * top)  # texts lie below all points
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.text(0.02, 0.02, "\n".join(texts), transform=axis.transAxes, wrap=True)


def _xy(points: Sequence[Point], unit: int) -> tuple[list[float], list[float]]:
    return [p.peak_bytes / unit for p in points], [p.tflops.median for p in points if p.tflops]


def _steps_vary(point: Point) -> bool:
    """Return whether its steps differ by so much that a bar can be seen."""
    return point.tflops is not None and point.tflops.high - point.tflops.low > SEEN * point.tflops.median


def _draw_bars(axis: Any, point: Point, unit: int, look: Look) -> None:
    """Draw the middle half of a point's throughput, its highest peak, and of keep the band of A/A noise."""
    (x,), (y,) = _xy([point], unit)
    style: dict[str, Any] = {"elinewidth": 0.8 * look.point, "capsize": 1.5 * look.point, "fmt": "none"}
    style["ecolor"] = look.colours[point.variant.series]
    if _steps_vary(point) and point.tflops:
        bars = [[y - point.tflops.low], [point.tflops.high - y]]
        axis.errorbar(x, y, yerr=bars, label="middle half of the turns", **style)
        if point.variant.series == "keep" and point.ratio:
            band = {"color": look.colours["keep"], "alpha": 0.1, "linewidth": 0}
            axis.axhspan(point.tflops.low, point.tflops.high, label="A/A noise of keep", **band)
    if point.worst_peak_bytes > (1 + SEEN) * point.peak_bytes:
        bars = [[0], [point.worst_peak_bytes / unit - x]]
        axis.errorbar(x, y, xerr=bars, label="up to the highest peak", **style)


def _frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points at which the best throughput rises with memory, and the last point on the right.

    >>> _frontier([(4, 10), (1, 8), (2, 7), (8, 9)])
    [(1, 8), (4, 10), (8, 10)]
    """
    found: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not found or y > found[-1][1]:
            found.append((x, y))
        last = x
    return found if found[-1][0] == last else [*found, (last, found[-1][1])]


def _styles(points: Iterable[Point], look: Look) -> dict[Variant, dict[str, Any]]:
    """Return the line and marker of each variant, in the order of series; the hybrid's are hollow."""
    found: dict[Variant, dict[str, Any]] = {}
    for variant in sorted({p.variant for p in points}, key=lambda v: (list(MARKERS).index(v.series), v.level)):
        markers, colour = MARKERS[variant.series], look.colours[variant.series]
        number = sum(known.series == variant.series for known in found)
        style = {"marker": markers[number % len(markers)], "linestyle": LINES[variant.series], "color": colour}
        if variant.series == "hybrid":
            edge: dict[str, Any] = {"markerfacecolor": "none", "markeredgewidth": 0.8 * look.point}
        else:
            edge = {"markeredgecolor": "black" if look.dark else "white", "markeredgewidth": 0.5 * look.point}
        found[variant] = {**style, **edge, "label": variant.label, "markersize": 4.5 * look.point}
    return found


# -- the look ---------------------------------------------------------------------------------------------------------


@contextmanager
def _panels(names: Iterable[str], paths: Sequence[Path], title: str, look: Look) -> Iterator[list[Any]]:
    """Yield an axis for each name; at the end explain all labels below the panels, and write the picture."""
    import matplotlib

    # Files need no display, and a machine that measures often has none.
    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = list(names)
    count = len(titles)
    if look.style == "paper":
        columns, fontsize, width = 1 if count <= 3 else 2, 7.0, 3.3
        rows = -(-count // columns)
        height = 1.2 + (1.25 if count > 1 else 1.5) * rows
    else:
        columns, fontsize, width, height = min(3, count), 18.0 if count <= 3 else 15.0, 13.33, 7.5
        rows = -(-count // columns)
    letters = int(130 * width / fontsize)  # that fit in a line
    sizes: dict[Any, Any] = {"font.size": fontsize, "axes.titlesize": "medium", "figure.titlesize": "medium"}
    with pyplot.style.context(["dark_background" if look.dark else "default", sizes]):
        figure, grid = pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained")
        axes = list(grid.flatten())
        for axis in axes[count:]:
            axis.set_axis_off()
        for axis, name in zip(axes, titles, strict=False):
            room = int(0.85 * letters / columns)
            axis.set_title(_wrapped(name if len(name) <= room else name.replace(" × ", "\n"), room))
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(color=look.colours["keep"], alpha=0.15)
            axis.set_axisbelow(True)
        try:
            yield axes[:count]
            _legend(figure, axes[:count], letters)
            figure.suptitle(_wrapped(title, letters))
            for path in paths:
                figure.savefig(path, dpi=300 if look.style == "paper" else 150)
        finally:
            pyplot.close(figure)


def _legend(figure: Any, axes: Sequence[Any], letters: int) -> None:
    """Explain each label once, lines and markers first, in as many columns as there is room for."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    columns = max(1, letters // (max(map(len, found), default=0) + 4))
    place = {"loc": "outside lower center", "ncols": columns, "frameon": False, "columnspacing": 1.0}
    figure.legend(found.values(), found.keys(), **place)


def _wrapped(text: str, letters: int) -> str:
    return "\n".join(textwrap.fill(line, letters) for line in text.splitlines())
