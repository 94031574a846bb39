"""One self-contained HTML page on a traced run, or on two side by side. It has no script, and loads nothing.

The colours are Okabe and Ito's, which colour-blind readers can distinguish, and each thing has one. Text and lines
follow the reader's colour scheme.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import floor, log10
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..policy import KeepReason
from ..sizes import format_size, format_time
from .trace_file import Moved, Wait
from .traced_run import (
    AWAY,
    KINDS,
    LABELS,
    LINKS,
    MOST_WAITS,
    MOVED,
    NOT_AWAY,
    SAVED,
    SAVED_SUM,
    Moment,
    Run,
    difference,
    format_number,
    verdict_of,
)

GREEN = "#009e73"
COLOURS = {
    **{"before training": "#8c8c8c", "optimizer state": "#cc79a7", "kept free": "#c9c9c9", "temporaries": "#f0e442"},
    **{"gradients": "#e69f00", SAVED: GREEN, AWAY: GREEN, "write": "#0072b2", "read": "#56b4e9", "wait": "#d55e00"},
}
MOST_BARS = 2000
"""The most transfers that are drawn for a run. The longest are drawn."""
NAMED = 0.12
"""A phase with this share of the step has room for its name."""
MIB, GIB = 1 << 20, 1 << 30

Rows = list[tuple[str, ...]]


def write_page(runs: Sequence[Run], path: Path) -> None:
    """Write the page for one run or for two.

    Raises:
        ConfigError: jinja2 is not installed.
        OSError: the file cannot be written.
    """
    try:  # an optional package, which only this page needs
        import jinja2
    except ImportError as error:
        remedy = f"{error.name} is not installed: pip install 'actoffload[plots]'"
        raise ConfigError("html", str(path), remedy) from error

    names = [os.path.basename(run.trace.path) for run in runs]
    # One scale for both runs, so that a reader can compare their charts by eye.
    length_s = max(run.end_s - run.begin_s for run in runs)
    moments = [run.memory() for run in runs]
    top = [
        max(sum(moment.by_kind[kind] for kind in kinds) for memory in moments for moment in memory)
        for kinds in (KINDS, (SAVED, AWAY))
    ]
    source = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    shown = [
        {
            "summary": run.summary(),
            "tiles": tiles(run),
            "steps": run.next_steps,
            "whole": _chart(run, memory, KINDS, top[0], length_s),
            "only": _chart(run, memory, (SAVED, AWAY), top[1], length_s),
            "bands": _bands(run, length_s),
        }
        for run, memory in zip(runs, moments, strict=True)
    ]
    text = (
        jinja2.Environment(autoescape=True)  # a trace is untrusted, and its texts go into the page
        .from_string(source)
        .render(
            names=names,
            title=verdict_of(*runs) if len(runs) > 1 else f"{names[0]}: {runs[0].summary()}",
            runs=shown,
            head=["", *names, "difference"],
            numbers=comparison(runs),
            sections=_sections(runs),
            colours=COLOURS,
            most_spans=MOST_BARS,
            saved_sum=SAVED_SUM,
        )
    )
    path.write_text(text, encoding="utf-8")


def tiles(run: Run) -> list[tuple[str, str, str]]:
    """Return name, value and note of the figures that answer at a glance. They are those of `Offloader.report`."""
    numbers, statistics = run.numbers(), run.known("statistics")
    saved, before = numbers["saved_peak_bytes"], numbers["saved_peak_without_bytes"]
    device, process = (statistics.get(f"{of}_peak_bytes") for of in ("device", "process"))
    note = "all that PyTorch had allocated" if device else "of the step shown"
    if process and not device:
        note = f"{format_size(statistics['process_before_bytes'])} before training"
    limits = run.what_limits() or "not known before the run ends"
    waits = f"waits {format_time(numbers['wait_s'])} in the mean, planning steps included"
    return [
        ("activations, peak", format_size(saved), f"{format_size(before)} with nothing moved"),
        (f"{'device' if device else 'process'}, peak", format_size(device or process or numbers["peak_bytes"]), note),
        ("a step", format_time(numbers["step_s"]), waits),
        ("what limits", limits, ""),
    ]


def comparison(runs: Sequence[Run]) -> Rows:
    """Return a row for each of the runs' numbers, with a column for each run, and for two the difference."""
    numbers = [run.numbers() for run in runs]
    rows: Rows = []
    for name, label in LABELS.items():
        values = [each[name] for each in numbers]
        last = (difference(name, *values),) if values[1:] else ()
        rows.append((label, *(format_number(name, value) for value in values), *last))
    return rows


def links_table(run: Run) -> Rows:
    """Return the links as rows of text, under a heading."""
    rows: Rows = [("link", "moved", "can do", "forward", "backward")]
    for link in run.links():
        used = (f"{share:.0%}" for share in link.used.values())
        rows.append((link.name, format_size(link.nbytes), f"{link.can_do / 1e9:.3g} GB/s", *used))
    return rows


def waits_table(run: Run) -> Rows:
    """Return the longest waits as rows of text, under a heading."""
    rows: Rows = [("module", "for", "waited", "times", "tensor")]
    for wait in run.dearest_waits():
        rows.append((wait.module, wait.reason, format_time(wait.total_s), str(wait.count), format_size(wait.nbytes)))
    return rows


def predictions_table(run: Run) -> Rows:
    """Return predicted and observed numbers as rows of text, under a heading."""
    names = {"step_s": run.planned_for, "peak_bytes": "saved activations, peak"}
    rows: Rows = [("", "predicted", "seen")]
    for name, predicted, seen in run.predictions():
        rows.append((names[name], format_number(name, predicted), format_number(name, seen)))
    return rows


def saved_table(run: Run) -> Rows:
    """Return the bytes that a step saves as rows of text under a heading: moved, or why they stayed, and their sum."""
    meanings = {reason.value: reason.meaning for reason in KeepReason}
    meanings |= {MOVED: "left the device", NOT_AWAY: "needed again before it had left", SAVED_SUM: ""}
    rows: Rows = [("", "in a step", "why")]
    return rows + [(name, format_size(nbytes), meanings.get(name, "")) for name, nbytes in run.saved().items()]


def _sections(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the sections with tables. One without data is folded."""

    def section(title: str, meaning: str, nothing: str, make: Callable[[Run], Rows | str]) -> dict[str, Any]:
        parts = []
        for found in map(make, runs):
            head, *rows = [()] if isinstance(found, str) else found
            parts.append({"head": head, "rows": rows, "text": found if isinstance(found, str) else ""})
        filled = any(part["rows"] or part["text"] for part in parts)
        return {"title": title, "meaning": meaning, "nothing": nothing, "parts": parts, "filled": filled}

    static = "Parameters, buffers and inputs live anyway, and are not among them."
    missed = " ".join(dict.fromkeys(filter(None, (run.machine_changed for run in runs))))
    links = "Bytes of the whole run, and the share of what it can do that it used within each phase of the step shown."
    waits = "Of the whole run. Data: backward waited for the tensor. Room: forward waited until memory had left."
    planned = "A step under the plan that was followed last, and the median and the peak of the steps under it."
    return [
        section("What stayed, and why", f"Bytes that a step saves (mean). {static}", "not known", saved_table),
        section("Links", links, "nothing moved", links_table),
        section(f"The {MOST_WAITS} dearest waits", waits, "nothing waited", waits_table),
        section("Predicted and seen", f"{planned} {missed}", "nothing was planned", predictions_table),
        section("SSD wear", "", "nothing was written to a drive", lambda run: run.wear()),
        section("The run", "", "", lambda run: run.about()),
        section("All numbers", "", "", lambda run: [("", ""), *comparison([run])]) | {"filled": False},
    ]


def _chart(run: Run, memory: list[Moment], kinds: Sequence[str], top: float, length_s: float) -> dict[str, Any]:
    """Return the parts of a chart of memory over the step that is shown, in per cent of its width and height."""
    unit, name = (GIB, "GiB") if top >= GIB else (MIB, "MiB")
    top = max(1.0, 1.08 * top)
    ends = [*(moment.time_s for moment in memory), run.end_s - run.begin_s]
    lower, layers = [0.0] * len(memory), []
    for kind in kinds:
        upper = [below + moment.by_kind[kind] for below, moment in zip(lower, memory, strict=True)]
        if any(moment.by_kind[kind] for moment in memory):
            layers.append((kind, _area(ends, lower, upper, length_s, top, as_polygon=kind == AWAY)))
        lower = upper
    moments = [
        (f"{1000 * (after - before) / length_s:.2f}", _told(moment, kinds))
        for (before, after), moment in zip(pairwise(ends), memory, strict=True)
    ]
    rest = length_s - ends[-1] + ends[0]
    return {
        "unit": name,
        "layers": layers,
        "ticks": [(f"{100 - 100 * at * unit / top:.2f}", f"{at:g} {name}") for at in _ticks(top / unit)],
        "times": [(f"{100 * at / 1e3 / length_s:.2f}", f"{at:g} ms") for at in _ticks(900 * length_s, most=3)],
        "phases": _phases(run, length_s),
        "moments": [*moments, *([(f"{1000 * rest / length_s:.2f}", "")] if rest > 0.001 * length_s else [])],
    }


def _phases(run: Run, length_s: float) -> list[tuple[str, str, str]]:
    found = []
    for phase in run.phases():
        share = phase.duration_s / length_s
        name = phase.name if share > NAMED else ""
        found.append((f"{100 * phase.begin_s / length_s:.2f}", f"{100 * share:.2f}", name))
    return found


def _told(moment: Moment, kinds: Sequence[str]) -> str:
    lines = [f"{kind}: {format_size(moment.by_kind[kind])}" for kind in reversed(kinds) if moment.by_kind[kind]]
    return "\n".join([f"{format_time(moment.time_s)}", *lines, *moment.blocks])


def _area(
    ends: Sequence[float], lower: Sequence[float], upper: Sequence[float], width: float, top: float, *, as_polygon: bool
) -> str:
    """Return the area between two stepped lines, as a path on 1000 × 1000 or as a polygon in per cent.

    A value holds from its moment to the next.
    """
    steps = list(zip(pairwise(ends), lower, upper, strict=True))
    corners = [(x, high) for (begin, end), _, high in steps for x in (begin, end)]
    corners += [(x, low) for (begin, end), low, _ in reversed(steps) for x in (end, begin)]
    if as_polygon:
        return ", ".join(f"{100 * x / width:.2f}% {100 - 100 * y / top:.2f}%" for x, y in corners)
    return "M" + "L".join(f"{1000 * x / width:.1f} {1000 - 1000 * y / top:.1f}" for x, y in corners) + "Z"


def _ticks(top: float, most: int = 5) -> list[float]:
    """Return up to ``most`` round numbers below ``top``, from 0 on."""
    rough = top / most
    power = 10.0 ** floor(log10(rough))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough)
    return [step * number for number in range(int(top / step) + 1)]


def _bands(run: Run, length_s: float) -> list[tuple[str, str, list[tuple[str, str, str]]]]:
    """Return label, class and bars of a band for each way of each link, writes first, and for the waits."""
    spans = sorted(run.spans(), key=lambda span: -span.duration_s)
    drawn = [span for span in spans if isinstance(span, (Moved, Wait))][:MOST_BARS]
    labels = {}
    for link in run.links():
        used = " and ".join(f"{share:.0%} in {phase}" for phase, share in link.used.items())
        labels[link.name] = f"{link.name}: of {link.can_do / 1e9:.3g} GB/s it used {used}"
    bands: dict[str, list[tuple[str, str, str]]] = {name: [] for name in (*LINKS, "wait")}
    for span in drawn:
        took = f"{format_time(span.duration_s)} from {format_time(span.begin_s)}"
        name = f"{span.link} {span.way}" if isinstance(span, Moved) else "wait"
        what = f"for {span.reason}: {span.module or 'a tensor'}" if isinstance(span, Wait) else span.name
        place = (f"{1000 * max(0.0, span.begin_s) / length_s:.1f}", f"{1000 * span.duration_s / length_s:.1f}")
        bands[name].append((*place, f"{what}, {format_size(span.nbytes)}, {took}"))
    waited = sum(span.duration_s for span in spans if isinstance(span, Wait))
    labels["wait"] = f"waits: {format_time(waited)} in this step"
    return [(labels.get(name, name), name.split()[-1], bars) for name, bars in bands.items() if bars]
