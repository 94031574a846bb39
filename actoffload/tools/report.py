"""``actoffload report`` and ``top``: a traced run as text and as a page, at its end and while it runs.

The page has no script, and loads nothing. Its colours are Okabe and Ito's and three of Tol's, which colour-blind
readers can distinguish, and each thing has one. Text and lines follow the reader's colour scheme.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import floor, log10
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live

from ..errors import ActOffloadError, ConfigError, TraceFileError, printable
from ..sizes import format_size, format_time
from .console import JsonOption, option, plain, print_json, table_of
from .trace_file import LINKS, load
from .traced_run import AWAY, KINDS, LABELS, MOST_WAITS, SAVED, Moment, Run, format_number, look_at

READING_SHARE = 0.1
"""Following a trace takes at most this share of the time: it is read anew each time."""
GREEN = "#009e73"
COLOURS = {
    **{"before training": "#8c8c8c", "optimizer state": "#cc79a7", "kept free": "#c9c9c9", "temporaries": "#f0e442"},
    **{"parameters": "#6a6ac8", "others": "#aa4499", "processors": "#999933"},
    **{"gradients": "#e69f00", SAVED: GREEN, "write": "#0072b2", "read": "#56b4e9", "wait": "#d55e00"},
    AWAY: f"repeating-linear-gradient(45deg, {GREEN} 0 2px, transparent 2px 7px)",
}
"""The background of each thing in CSS. That of `AWAY` lies behind all of a chart, and shows where nothing covers it."""
MOST_BARS = 2000
"""The most transfers that are drawn for a run. The longest are drawn."""
PARTS = 120
"""The parts of the step of which the use of processors and links by others is drawn."""
NAMED = 0.12
"""A phase with this share of the step has room for its name."""
MIB, GIB = 1 << 20, 1 << 30

Rows = list[tuple[str, ...]]

TraceArgument = Annotated[Path, typer.Argument(help="The trace of a run, as trace= or `actoffload trace` write it.")]


def command(
    run: TraceArgument,
    html: Annotated[Path | None, option("Write a page with pictures here.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a traced run did: memory, links, waits, what was predicted, and what to do next."""
    with _sound(run):
        found = look_at(load(run))
        shown = found.as_dict() if as_json else render(found)
    if html is not None:
        write_page(found, html)
    if as_json:
        print_json(shown)
        return
    console = Console()
    console.print(shown)
    if html is not None:
        console.print(f"\nThe page: {html}", markup=False)


def top(
    run: TraceArgument,
    every: Annotated[float, option("Seconds between looks.", min=0.1)] = 2.0,
) -> None:
    """Follow the trace of a run while it is written: the report of what is there so far. Ctrl-C leaves."""
    with Live(console=Console(), auto_refresh=False) as live:
        while True:
            began_s = time.monotonic()
            try:
                with _sound(run):
                    found = look_at(load(run, truncated_ok=True))
            except TraceFileError as error:
                if ": empty: " not in str(error):
                    raise
                live.update("waiting for the first step", refresh=True)
            else:
                live.update(render(found), refresh=True)
                if not found.trace.truncated:
                    return  # the trace has its end, so the run is over
            try:
                time.sleep(max(every, (time.monotonic() - began_s) / READING_SHARE))
            except KeyboardInterrupt:
                return


@contextmanager
def _sound(file: Path) -> Iterator[None]:
    """Refuse a trace with other notes on the run than the library writes: they have no schema."""
    try:
        yield
    except ActOffloadError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise TraceFileError(printable(f"{file}: broken ({error!r}): trace the run again")) from error


def render(run: Run) -> RenderableType:
    """Return the report on a run for a terminal."""
    head, *numbers = numbers_of(run)
    parts: list[RenderableType] = [table_of(numbers, *head)]
    parts += [f"\n[bold]{plain(run.name)}[/bold]: {plain(run.about())}\n", *map(plain, run.report.splitlines())]
    for section in sections(run):
        head, *rows = section.table
        parts += [f"\n[bold]{section.title}[/bold]: {plain(section.meaning)}", table_of(rows, *head)]
    return Group(*parts)


# -- tables, in a terminal and on the page ----------------------------------------------------------------------------


class Section(NamedTuple):
    """A table of the report under a heading, and its meaning."""

    title: str
    meaning: str
    table: Rows


def numbers_of(run: Run) -> Rows:
    """Return a run's numbers under a heading."""
    numbers = run.numbers()
    return [("", run.name), *((label, format_number(name, numbers[name])) for name, label in LABELS.items())]


def sections(run: Run) -> list[Section]:
    """Return the tables of a run that have rows, on the page and in a terminal."""
    links: Rows = [("link", "moved", "by others", "can do", "in use")]
    for link in run.links():
        rate = f"{link['can_do'] / 1e9:.3g} GB/s" if link["can_do"] else "-"
        sizes = (format_size(link[name]) for name in ("nbytes", "others_bytes"))
        links.append((link["name"], *sizes, rate, f"{link['used']:.0%}"))
    used_is = "Bytes of the whole run, and the part of the step shown with a transfer under way. By others: on a disk "
    used_is += "all programs', by the kernel's count; on a device's link DeepSpeed's."
    phases: Rows = [("phase", "time", "used", "idle", "links")]
    for use in run.uses():
        moved = [f"{link} {format_size(nbytes)}" for link, nbytes in use["moved"].items() if nbytes]
        moved += [f"{link}, by others {format_size(nbytes)}" for link, nbytes in use["by_others"].items() if nbytes]
        length_s = use["length_s"]
        figures = (format_time(length_s), f"{use['processor_s'] / length_s:.2f}", f"{use['idle_s'] / length_s:.0%}")
        phases.append((use["name"], *figures, "; ".join(moved)))
    uses_are = "Of the step shown. Used: processors, by all threads of this process. Idle: the share of the time in "
    uses_are += "which the device computes nothing."
    waits: Rows = [("module", "for", "waited", "times", "tensor")]
    for wait in run.dearest_waits():
        figures = (format_time(wait["total_s"]), str(wait["count"]), format_size(wait["nbytes"]))
        waits.append((wait["module"], wait["reason"], *figures))
    reasons = "Of the whole run. Data: backward waited for the tensor. Room: forward waited until memory had left."
    names = {"step_s": run.planned_for, "peak_bytes": "saved activations, peak"}
    planned: Rows = [("", "predicted", "seen")]
    for name, *both in run.predictions():
        planned.append((names[name], *(format_number(name, each) for each in both)))
    last = f"A step under the last plan; the median and the peak of the steps under it. {run.machine_changed}"
    found = [
        Section("Phases", uses_are, phases),
        Section("Links", used_is, links),
        Section(f"The {MOST_WAITS} dearest waits", reasons, waits),
        Section("Predicted and seen", last, planned),
    ]
    return [section for section in found if section.table[1:]]


# -- the page ---------------------------------------------------------------------------------------------------------


def write_page(run: Run, path: Path) -> None:
    """Write the page for a run."""
    try:  # an optional package, which only this page needs
        import jinja2
    except ImportError as error:
        remedy = f"{error.name} is not installed: pip install 'actoffload[plots]'"
        raise ConfigError("html", str(path), remedy) from error

    page = jinja2.Environment(autoescape=True)  # a trace is untrusted, and its texts go into the page
    page.filters["percent"] = lambda share: f"{100 * share:.2f}%"
    text = page.from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8")).render(
        title=f"{run.name}: {run.report.splitlines()[0]}",
        about=run.about(),
        tiles=tiles(run),
        next_steps=run.next_steps,
        chart=_chart(run, run.memory()),
        bands=_bands(run),
        report=run.report,
        numbers=numbers_of(run),
        sections=sections(run),
        colours=COLOURS,
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
        ("what limits", "", limits),  # a sentence, which would not fit in the letters of a figure
    ]


def _chart(run: Run, memory: list[Moment]) -> dict[str, Any]:
    """Return the parts of a chart of memory over the step that is shown. Sizes are shares of its width and height."""
    length_s, top = run.end_s - run.begin_s, max(1.0, 1.08 * max(sum(moment.by_kind.values()) for moment in memory))
    ends = [*(moment.time_s for moment in memory[1:]), length_s]
    unit, name = (GIB, "GiB") if top >= GIB else (MIB, "MiB")
    labels = [("y", "bottom", at * unit / top, f"{at:g} {name}") for at in _ticks(top / unit)]
    labels += [("x", "left", at / 1e3 / length_s, f"{at:g} ms") for at in _ticks(800 * length_s, most=3)]
    for phase in run.phases():
        text = phase.name if phase.duration_s > NAMED * length_s else ""
        labels.append(("phase", "left", phase.begin_s / length_s, text))
    moments = []
    for moment, end_s in zip(memory, ends, strict=True):
        parts = [(kind, nbytes) for kind, nbytes in moment.by_kind.items() if nbytes]
        lines = [f"{kind}: {format_size(nbytes)}" for kind, nbytes in reversed(parts)]
        figures = "\n".join([format_time(moment.time_s), *lines])
        width = (end_s - moment.time_s) / length_s
        moments.append((width, figures, [(kind, nbytes / top) for kind, nbytes in parts]))
    kinds = [kind for kind in KINDS if any(moment.by_kind[kind] for moment in memory)]
    return {"kinds": kinds, "labels": labels, "moments": moments}


def _ticks(top: float, most: int = 5) -> list[float]:
    """Return up to ``most`` round numbers below ``top``, from 0 on."""
    rough = top / most
    power = 10.0 ** floor(log10(rough))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough)
    return [step * number for number in range(int(top / step) + 1)]


Bars = list[tuple[float, float, float, str]]
"""Left, width and height of each bar in shares of its band, and its text."""


def _bands(run: Run) -> list[tuple[str, str, Bars]]:
    """Return label, class and bars of a band for each way of each link, writes first, for waits and for processors."""
    length_s = run.end_s - run.begin_s
    waits, transfers = run.of_step(run.trace.waits), run.of_step(run.trace.transfers)
    labels = {"wait": f"waits: {format_time(sum(wait.duration_s for wait in waits))} in this step"}
    for link in run.links():
        rate, used = f"{link['can_do'] / 1e9:.3g} GB/s", f"in use for {link['used']:.0%} of the step"
        labels[link["name"]] = f"{link['name']}: {rate}, {used}"
    bands: dict[str, Bars] = {name: [] for name in (*LINKS, "wait")}
    named = [(one.link, one.name, one) for one in transfers if one.ours]
    named += [("wait", f"for {one.reason}: {one.module or 'a tensor'}", one) for one in waits]
    for name, what, span in sorted(named, key=lambda each: -each[2].duration_s)[:MOST_BARS]:
        when = f"{format_time(span.duration_s)} from {format_time(span.begin_s)}"
        begin_s = max(0.0, span.begin_s)
        place = (begin_s / length_s, (span.end_s - begin_s) / length_s)
        bands[name].append((*place, 1.0, f"{what}, {format_size(span.nbytes)}, {when}"))
    found = [(labels.get(name, name), name.split()[-1], bars) for name, bars in bands.items() if bars]
    step = (run.begin_s, run.end_s, PARTS)
    levels: list[tuple[str, str, list[float], Callable[[float], str]]] = [
        (f"{name}, by others", "others", run.moved(name, *step, ours=False), format_size) for name in LINKS
    ]
    label = f"processor time, of {run.threads} threads of PyTorch"
    levels.append((label, "processors", run.processor_s(*step), format_time))
    for label, kind, parts, text in levels:
        top = max(parts) if kind == "others" else max(run.threads * length_s / PARTS, *parts)
        bars = [(at / PARTS, 1 / PARTS, part / top, text(part)) for at, part in enumerate(parts) if part > 0]
        found += [(f"{label}: {text(sum(parts))} in this step", kind, bars)] if bars else []
    return found
