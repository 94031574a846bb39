"""``actoffload rok``: throughput over activation memory for keep, recompute, offload and the planner's hybrid."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import TimeElapsedColumn
from rich.table import Table

from ..analysis.environment import describe_environment
from ..analysis.plots import draw_rok
from ..analysis.rok import PRESETS, SERIES, Point, Preset, points_of
from ..analysis.rok_run import RokRun, load_results
from ..errors import ConfigError
from ..sizes import format_size, parse_size
from .console import JsonOption, PathOption, explained_errors, print_json, progress_bar, strings

_SELECT = "Select from the preset; repeat for several"
Names = Annotated[list[str] | None, typer.Option(rich_help_panel=_SELECT)]
Numbers = Annotated[list[int] | None, typer.Option(min=1, rich_help_panel=_SELECT)]
Count = Annotated[int | None, typer.Option(min=1, help="Default: the preset's.")]


def command(
    preset: Annotated[str, typer.Option(help="ssdtrain (for a GPU), cpu or tiny.")] = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="Results (JSON); continued if it exists. Default: rok_PRESET.json.")
    ] = None,
    redraw: Annotated[Path | None, typer.Option(help="Measure nothing; draw and compare these results.")] = None,
    model: Names = None,
    hidden: Numbers = None,
    batch: Numbers = None,
    series: Annotated[list[str] | None, typer.Option(help=", ".join(SERIES), rich_help_panel=_SELECT)] = None,
    steps: Count = None,
    repeats: Count = None,
    threads: Count = None,
    device: Annotated[str | None, typer.Option(help="Default: the preset's, else the accelerator.")] = None,
    target: Annotated[str, typer.Option(help="host, nvme, tiered or auto.")] = "auto",
    path: PathOption = None,
    memory_limit: Annotated[str | None, typer.Option(help='Most of a process or of its device, as "40GiB".')] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Take samples that failed again.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the recompute-offload-keep curve: each sample a process of its own, results kept after each one."""
    with explained_errors():
        if redraw is not None:
            raise typer.Exit(finish(load_results(redraw), redraw, as_json))
        counts = {"steps": steps, "repeats": repeats, "threads": threads, "device": device}
        given: dict[str, Any] = {name: value for name, value in counts.items() if value is not None}
        _known("preset", [preset], PRESETS)
        run = RokRun(
            replace(select(PRESETS[preset], model, hidden, batch), **given),
            out or Path(f"rok_{preset}.json"),
            environment=describe_environment(),
            command=shlex.join(["actoffload", *without_folders(sys.argv[1:])]),
            series=_known("series", series or SERIES, SERIES),
            target=target,
            path=strings(path),
            memory_limit=None if memory_limit is None else parse_size("memory_limit", memory_limit),
            retry=retry,
        )
        measure(run, quiet=as_json)
        raise typer.Exit(finish(run.payload, run.file, as_json))


def _known(field: str, names: Sequence[str], known: Iterable[str]) -> tuple[str, ...]:
    for name in names:
        if name not in known:
            raise ConfigError(field, name, f"choose one of {', '.join(map(repr, known))}")
    return tuple(names)


def without_folders(arguments: Sequence[str]) -> list[str]:
    """Return the arguments as results may show them: of a path on this machine only the last part."""
    parts = [argument.rpartition("=") for argument in arguments]  # "--out=FILE" is one argument
    return [f"{head}{sign}{Path(last).name if Path(last).is_absolute() else last}" for head, sign, last in parts]


def select(
    preset: Preset,
    models: Sequence[str] | None = None,
    hidden: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
) -> Preset:
    """Return a preset with every combination of the models and sizes that are named."""
    cases = (
        replace(case, model=name, hidden=width, batch=size)
        for case in preset.cases
        for name in models or [case.model]
        for width in hidden or [case.hidden]
        for size in batches or [case.batch]
    )
    return replace(preset, cases=tuple(dict.fromkeys(cases)))


def measure(run: RokRun, *, quiet: bool) -> None:
    """Take all missing samples behind a progress bar."""
    todo = run.missing()
    with progress_bar(TimeElapsedColumn(), quiet=quiet) as progress:
        if not quiet:
            there = len(run.payload["samples"])
            progress.console.print(f"{len(todo)} samples to take, {there} there; results in {run.file}")
        names = [*(job.label for job in todo), "done"]
        bar = progress.add_task(names[0], total=len(todo))
        for number, (job, sample) in enumerate(run.run(), start=1):
            progress.update(bar, advance=1, description=names[number])
            if "error" in sample:
                progress.console.print(f"{job.label}: {sample['error']}", style="yellow", markup=False)


def finish(payload: dict[str, Any], file: Path, as_json: bool) -> int:
    """Draw and compare; 1 when losses differ or a point failed.

    Running out of memory and a budget below the floor are no failures.
    """
    points = points_of(payload["samples"])
    machine = payload["environment"]
    title = f"Recompute, offload, keep: {machine.get('gpu') or machine.get('cpu')}, torch {machine.get('torch')}"
    picture = file.with_suffix(".png")
    drawn = draw_rok(points, picture, title)
    if as_json:
        print_json({"points": [point.as_dict() for point in points]})
    else:
        show(points)
        typer.echo(f"written beside {file.name}: {picture.name}" if drawn else "a picture needs matplotlib")
    failed = [p for p in points if p.error and not p.oom and not p.below_floor]
    return 1 if failed or any(p.identical is False for p in points) else 0


def show(points: Sequence[Point]) -> None:
    """Print the points, and which of them are efficient."""
    console = Console()
    for panel in dict.fromkeys(point.case.panel for point in points):
        console.print(_point_table(panel, [point for point in points if point.case.panel == panel]))
    different = [point.label for point in points if point.identical is False]
    if different:
        console.print(f"LOSSES DIFFER: {'; '.join(different)}", style="bold red", markup=False)
    elif any(point.identical for point in points):
        console.print("Losses are equal bit for bit in every step of every series.", style="green")


def _point_table(panel: str, points: Sequence[Point]) -> Table:
    table = Table(title=escape(panel), title_justify="left", caption="★ nothing has less memory and more throughput")
    table.caption_justify = "left"
    for name in ("", "batch", "series"):
        table.add_column(name)
    for name in ("peak", "TFLOP/s", "step s", "spread", "identical"):
        table.add_column(name, justify="right")
    table.add_column("problem")
    for point in sorted(points, key=lambda p: (p.case.batch, SERIES.index(p.variant.series), p.peak_bytes or 0)):
        head = "★" if point.efficient else "", str(point.case.batch), point.variant.label
        table.add_row(*head, *map(escape, _cells(point)))
    return table


def _cells(point: Point) -> tuple[str, ...]:
    """Return a point's numbers as text: peak, TFLOP/s, step, spread, bit-identical, why there are none."""
    if not point.measured:
        return ("-", "-", "-", "-", "-", "out of memory" if point.oom else point.error)
    return (
        format_size(point.peak_bytes or 0),
        f"{point.tflops or 0.0:.4g}",
        f"{point.step_s or 0.0:.4g}",
        f"{point.spread:.1%}",
        {True: "yes", False: "NO", None: "-"}[point.identical],
        "",
    )
