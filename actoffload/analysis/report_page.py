"""One self-contained HTML page on a traced run, or on two side by side, by plotly (``pip install actoffload[plots]``).

The colours are Okabe and Ito's, which colour-blind readers can distinguish. Text and lines follow the reader's colour
scheme.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..policy import KeepReason
from ..sizes import format_size, format_time
from .trace_file import PHASES, Moved, Phase, Span, Wait
from .traced_run import KINDS, LABELS, MOST_WAITS, SAVED, Run, format_number

MIB, GIB = 1 << 20, 1 << 30
BLUE, SKY, GREEN, ORANGE, VERMILLION, PURPLE = "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7"
COLOURS = {
    **{"parameters": BLUE, "gradients": ORANGE, "optimizer state": PURPLE, "other": "#999999", SAVED: GREEN},
    **{"forward": GREEN, "backward": ORANGE, "optimizer": PURPLE, "write": BLUE, "read": SKY, "wait": VERMILLION},
}
SCHEMES = {"light": ("#1b1b1b", "#e2e2e2", "#ffffff"), "dark": ("#ececec", "#3d3d3d", "#262626")}
"""Colours of text, of the grid and of the labels under the pointer."""
MOST_SPANS = 3000
"""The most bars in a figure. The longest are drawn."""
LEGEND = {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"}

Drawn = tuple[Any, int]
"""A figure of plotly's and its height in pixels."""


def write_page(runs: Sequence[Run], path: Path) -> None:
    """Write the page for one run or for two.

    Raises:
        ConfigError: plotly or jinja2 is not installed.
        OSError: the file cannot be written.
    """
    try:  # optional packages, which only this page needs
        import jinja2
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        remedy = f"{package} is not installed: pip install 'actoffload[plots]'"
        raise ConfigError("html", str(path), remedy) from error

    page = _Page(runs)
    names = [os.path.basename(run.trace.path) for run in runs]
    source = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    text = (
        jinja2.Environment(autoescape=True)  # a trace is untrusted, and its texts go into the page
        .from_string(source)
        .render(
            names=names,
            about=[run.about() for run in runs],
            numbers=comparison(runs),
            sections=page.sections(),
            plotly_js=get_plotlyjs(),
            # Names of modules come from the program: an escaped `<` cannot end the page's script element.
            figures=json.dumps({"figures": page.figures, "templates": _templates()}).replace("<", "\\u003c"),
        )
    )
    path.write_text(text, encoding="utf-8")


def comparison(runs: Sequence[Run]) -> list[list[str]]:
    """Return a row for each of the runs' numbers, with a column for each run."""
    numbers = [run.numbers() for run in runs]
    return [[label, *(format_number(name, each[name]) for each in numbers)] for name, label in LABELS.items()]


def waits_table(run: Run) -> list[tuple[str, ...]]:
    """Return the longest waits as rows of text, under a heading."""
    rows: list[tuple[str, ...]] = [("module", "for", "waited", "times", "tensor")]
    for wait in run.dearest_waits():
        rows.append((wait.module, wait.reason, format_time(wait.total_s), str(wait.count), format_size(wait.nbytes)))
    return rows


def predictions_table(run: Run) -> list[tuple[str, ...]]:
    """Return predicted and observed numbers as rows of text, under a heading."""
    names = {"step_s": run.planned_for, "peak_bytes": "saved activations, peak"}
    rows: list[tuple[str, ...]] = [("", "predicted", "seen")]
    for name, predicted, seen in run.predictions():
        rows.append((names[name], format_number(name, predicted), format_number(name, seen)))
    return rows


def kept_table(run: Run) -> list[tuple[str, ...]]:
    """Return the bytes that stayed, by reason, as rows of text under a heading."""
    rows: list[tuple[str, ...]] = [("", "bytes", "why")]
    meanings = {reason.value: reason.meaning for reason in KeepReason}
    for reason, nbytes in run.kept().items():
        rows.append((reason, format_size(nbytes), meanings.get(reason, "")))
    return rows


class _Page:
    """Makes the sections of the page, and collects their figures by the names of their places."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.figures: dict[str, Any] = {}
        # One scale for both runs, so that a reader can compare their figures by eye.
        peak = max(max(*memory.total, *memory.without) for memory in (run.memory() for run in runs))
        self._length_ms = 1e3 * max(run.end_s - run.begin_s for run in runs)
        self._unit, self._unit_name = (GIB, "GiB") if peak >= GIB else (MIB, "MiB")
        self._top = 1.1 * peak / self._unit

    def sections(self) -> list[dict[str, Any]]:
        """Return the sections for the template. A section without data has a sentence in its place."""
        over_time = "Of the step of median length after the last plan; shaded: its phases."
        return [
            self._section("What to do next", "Predicted by the planner from this run, or counted in it.", _next_steps),
            self._section(
                "Memory over one step",
                f"{over_time} The line is what there would be with nothing moved.",
                lambda run: self._figure("memory", run, self._memory(run)),
            ),
            self._section(
                "What the links do",
                f"{over_time} The dotted line is what the link does while something is under way; used is the share of "
                "that in the phase that counts: what leaves has to leave in forward, and comes back in backward.",
                lambda run: self._figure("links", run, self._links(run)) if run.links() else {"text": "Nothing moved."},
            ),
            self._section(
                "Transfers and waits",
                f"Each bar is a transfer, named by the module that saved what moves. At most {MOST_SPANS} are drawn.",
                lambda run: self._figure("lanes", run, self._lanes(run)),
            ),
            self._section(
                f"The {MOST_WAITS} dearest waits",
                "Over the whole run, by the module that saved the tensor. Data: backward waited for it. Room: forward "
                "waited until memory had left.",
                lambda run: _rows(waits_table(run), "Nothing waited."),
            ),
            self._section(
                "Predicted and seen",
                "A step under the plan that was followed last, and the median and the peak of the steps under it.",
                lambda run: _rows(
                    predictions_table(run), "Nothing was planned: that takes policy='auto', and 3 steps."
                ),
            ),
            self._section(
                "What stayed, and why",
                "Bytes that autograd saved in the whole run and that did not move.",
                lambda run: _rows(kept_table(run), "Not known, or nothing stayed."),
            ),
            self._section("SSD wear", "", lambda run: {"text": run.wear() or "Nothing was written to a drive."}),
        ]

    def _section(self, title: str, meaning: str, make: Callable[[Run], dict[str, Any]]) -> dict[str, Any]:
        return {"title": title, "meaning": meaning, "parts": [make(run) for run in self.runs]}

    def _figure(self, name: str, run: Run, drawn: Drawn) -> dict[str, Any]:
        """Store a figure, and return its place for the template."""
        figure, height = drawn
        # The page sets plotly's template itself, by the reader's colour scheme.
        figure.update_layout(template=None, height=height, margin={"l": 8, "r": 8, "t": 32, "b": 8})
        figure.update_xaxes(automargin=True)
        figure.update_yaxes(automargin=True)
        place = f"{name}-{self.runs.index(run) + 1}"
        self.figures[place] = json.loads(figure.to_json())
        return {"figure": place, "height": height}

    def _memory(self, run: Run) -> Drawn:
        from plotly import graph_objects

        memory, figure, name = run.memory(), graph_objects.Figure(), self._unit_name
        x = _ms(memory.times_s)
        for kind in KINDS:
            extra = ["".join(f"<br>{block}" for block in blocks) if kind == SAVED else "" for blocks in memory.blocks]
            label = f"%{{y:.4g}} {name}%{{customdata}}<extra>{kind}</extra>"
            y = [nbytes / self._unit for nbytes in memory.by_kind[kind]]
            # "hv": a value holds until the next moment.
            line = {"shape": "hv", "width": 0.5, "color": COLOURS[kind]}
            figure.add_scatter(
                x=x,
                y=y,
                name=kind,
                line=line,
                stackgroup="kinds",
                fillcolor=COLOURS[kind],
                customdata=extra,
                hovertemplate=label,
            )
        without = [nbytes / self._unit for nbytes in memory.without]
        line = {"shape": "hv", "width": 2.5, "color": VERMILLION, "dash": "dash"}
        label = f"%{{y:.4g}} {name}<extra>with nothing moved</extra>"
        figure.add_scatter(x=x, y=without, name="with nothing moved", line=line, mode="lines", hovertemplate=label)
        _shade(figure, run.phases(), self._length_ms)
        figure.update_layout(hovermode="x unified", hoverdistance=-1, legend=LEGEND)
        figure.update_yaxes(title=name, range=[0, self._top])
        figure.update_xaxes(title="ms", range=[0, self._length_ms], unifiedhovertitle_text="%{x:.4g} ms")
        return figure, 440

    def _links(self, run: Run) -> Drawn:
        from plotly import subplots

        links = run.links()
        titles = [f"{link.name}: {link.used:.0%} used in {link.phase}" for link in links]
        # plotly limits the spacing by the number of rows.
        figure = subplots.make_subplots(len(links), 1, subplot_titles=titles, vertical_spacing=0.25 / len(links))
        for row, link in enumerate(links, start=1):
            x, y = _ms(link.times_s), [rate / 1e9 for rate in link.bytes_per_s]
            colour = COLOURS[link.name.split()[1]]
            label = f"{link.name}, %{{y:.3g}} GB/s<extra></extra>"
            line = {"shape": "hv", "width": 1, "color": colour}
            figure.add_scatter(x=x, y=y, line=line, mode="lines", fill="tozeroy", hovertemplate=label, row=row, col=1)
            figure.add_hline(y=link.can_do / 1e9, line={"dash": "dot", "width": 2, "color": VERMILLION}, row=row, col=1)
            figure.update_yaxes(title="GB/s", range=[0, 1.4 * max(*y, link.can_do / 1e9)], row=row, col=1)
            _shade(figure, run.phases(), self._length_ms, row=row, col=1)
            figure.update_xaxes(range=[0, self._length_ms], row=row, col=1)
        figure.update_annotations(font_size=13)
        figure.update_layout(showlegend=False, hovermode="x", hoverdistance=-1)
        figure.update_xaxes(title="ms", row=len(links), col=1)
        return figure, 70 + 150 * len(links)

    def _lanes(self, run: Run) -> Drawn:
        from plotly import graph_objects

        spans = sorted(run.spans(), key=lambda span: -span.duration_s)[:MOST_SPANS]
        # Reversed, as plotly draws categories from the bottom up.
        tracks = sorted({span.track for span in spans}, key=_lane_order, reverse=True)
        figure = graph_objects.Figure()
        groups: dict[str, list[Span]] = {}
        # One trace of plotly's for each kind, so that the legend can hide a kind.
        for span in spans:
            groups.setdefault(_kind(span), []).append(span)
        for kind in (*PHASES, "write", "read", "wait"):
            mine = groups.get(kind, [])
            figure.add_bar(
                **{"name": kind, "orientation": "h", "marker": {"color": COLOURS[kind]}},
                x=_ms(span.duration_s for span in mine),
                y=[span.track for span in mine],
                base=_ms(span.begin_s for span in mine),
                customdata=[_about(span) for span in mine],
                hovertemplate=f"{kind}, %{{customdata}}<extra></extra>",
                # The outline keeps even the shortest wait visible.
                marker_line={"width": 2 if kind == "wait" else 0, "color": COLOURS[kind]},
            )
        # Overlay, because bars of all kinds share the row of their track.
        figure.update_layout(barmode="overlay", bargap=0.15, legend=LEGEND)
        figure.update_yaxes(categoryorder="array", categoryarray=tracks, tickfont_size=11)
        figure.update_xaxes(title="ms", range=[0, self._length_ms])
        return figure, 130 + 24 * len(tracks)


def _next_steps(run: Run) -> dict[str, Any]:
    limits, steps = run.what_limits(), run.next_steps
    told = [f"{limits}."] if limits else []
    told += [] if steps else ["No option is known that would change much."]
    return {"text": " ".join(told), "steps": steps}


def _rows(rows: Sequence[Sequence[str]], nothing: str) -> dict[str, Any]:
    head, *others = rows
    return {"head": head, "rows": others} if others else {"text": nothing}


def _shade(figure: Any, phases: Sequence[Phase], length_ms: float, **place: int) -> None:
    """Shade the phases behind the lines. Only long phases have room for their names."""
    for phase in phases:
        x0, x1 = _ms([phase.begin_s, phase.end_s])
        name = phase.name if x1 - x0 > 0.15 * length_ms else ""
        label = {"text": name, "textposition": "top left", "font": {"size": 11}}
        colour = COLOURS[phase.name]
        figure.add_vrect(x0, x1, fillcolor=colour, opacity=0.1, line_width=0, layer="below", label=label, **place)


def _kind(span: Span) -> str:
    return span.way if isinstance(span, Moved) else "wait" if isinstance(span, Wait) else span.name


def _lane_order(track: str) -> tuple[int, str, int]:
    """Return the sort key of a track: phases, then waits, then each link, with its lanes by their numbers."""
    name, _, number = track.partition(" #")
    return (0 if "phases" in name else 1 if "waits" in name else 2, name, int(number or 0))


def _about(span: Span) -> str:
    took = f"{format_time(span.duration_s)} from {format_time(span.begin_s)}"
    if isinstance(span, Phase):
        return f"micro-batch {span.microbatch}<br>{took}"
    if isinstance(span, Wait):
        return f"for {span.reason}: {span.module or 'a tensor'}, {format_size(span.nbytes)}<br>{took}"
    assert isinstance(span, Moved), "there is nothing else"
    rate = f"{span.nbytes / span.duration_s / 1e9:.3g} GB/s" if span.duration_s else ""
    return f"{span.name}, {format_size(span.nbytes)}<br>{took}, {rate}"


def _ms(times_s: Iterable[float]) -> list[float]:
    return [1e3 * time_s for time_s in times_s]


def _templates() -> dict[str, Any]:
    """Return the light and the dark template of plotly's figures."""
    found = {}
    for scheme, (text, grid, label) in SCHEMES.items():
        axis = {"gridcolor": grid, "linecolor": grid, "zerolinecolor": grid, "tickcolor": grid}
        # Transparent, so that the page's own background shows in both schemes.
        clear = {"paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)"}
        hover = {"bgcolor": label, "bordercolor": grid, "font": {"color": text}, "namelength": -1}
        layout = {**clear, "font": {"color": text, "family": "system-ui, sans-serif"}, "hoverlabel": hover}
        found[scheme] = {"layout": {**layout, "xaxis": axis, "yaxis": axis}}
    return found
