"""``actoffload report`` and ``top``: a traced run as text and as a page, at its end and while it runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from ..analysis.report_page import comparison, sections, write_page
from ..analysis.trace_file import load
from ..analysis.traced_run import Run, look_at, verdict_of
from ..errors import ActOffloadError, TraceFileError, printable
from .console import JsonOption, plain, print_json, table_of

READING_SHARE = 0.1
"""Following a trace takes at most this share of the time: it is read anew each time."""

TraceArgument = Annotated[Path, typer.Argument(help="The trace of a run, as trace= or `actoffload trace` write it.")]


def command(
    run: TraceArgument,
    html: Annotated[Path | None, typer.Option(help="Write a page with pictures here.")] = None,
    compare: Annotated[Path | None, typer.Option(help="Another trace, put before this one, to compare with.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a traced run did: memory, links, waits, what was predicted, and what to do next."""
    with _sound(run if compare is None else f"{compare} or {run}"):
        runs = [look_at(load(path)) for path in (compare, run) if path is not None]
        shown = [each.as_dict() for each in runs] if as_json else render(runs)
    if html is not None:
        write_page(runs, html)
    if as_json:
        print_json(shown)
        return
    console = Console()
    console.print(shown)
    if html is not None:
        console.print(f"\nThe page: {html}", markup=False)


def top(
    run: TraceArgument,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 2.0,
) -> None:
    """Follow the trace of a run while it is written: the report of what is there so far. Ctrl-C leaves."""
    with Live(console=Console(), auto_refresh=False) as live:
        while True:
            began_s = time.monotonic()
            found = _so_far(run)
            live.update("waiting for the first step" if found is None else render([found]), refresh=True)
            if found is not None and not found.trace.truncated:
                return  # the trace has its end, so the run is over
            try:
                time.sleep(max(every, (time.monotonic() - began_s) / READING_SHARE))
            except KeyboardInterrupt:
                return


def _so_far(path: Path) -> Run | None:
    """Return the run so far; None before its first forward has ended."""
    try:
        with _sound(path):
            return look_at(load(path, truncated_ok=True))
    except TraceFileError as error:
        if ": empty: " in str(error):
            return None
        raise


@contextmanager
def _sound(file: Path | str) -> Iterator[None]:
    """Refuse a trace with other notes on the run than the library writes: they have no schema."""
    try:
        yield
    except ActOffloadError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise TraceFileError(printable(f"{file}: broken ({error!r}): trace the run again")) from error


def render(runs: list[Run]) -> RenderableType:
    """Return the report on runs, one after the other, for a terminal."""
    head, *numbers = comparison(runs)
    parts: list[RenderableType] = [table_of(numbers, *head)]
    parts += [f"[bold]{plain(verdict_of(*runs))}[/bold]"] if runs[1:] else []
    for run in runs:
        parts += [f"\n[bold]{plain(run.name)}[/bold]: {plain(run.summary())}", plain(run.about())]
        for section in sections(run):
            head, *rows = section.table
            if rows:
                parts += [f"\n[bold]{section.title}[/bold]: {plain(section.meaning)}", table_of(rows, *head)]
        parts += [f"\n{plain(run.what_limits())}"]
        steps = Table.grid(padding=(0, 1))
        for number, step in enumerate(run.next_steps, start=1):
            steps.add_row(f"{number}.", plain(step))
        parts += ["\n[bold]What to do next[/bold]", steps] if steps.rows else []
    return Group(*parts)
