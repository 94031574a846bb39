"""``actoffload rok``: throughput over activation memory for keep, recompute, offload and the planner's hybrid."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
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
from ..analysis.rok_run import RokRun, busy_share, load_results
from ..errors import ConfigError
from ..sizes import format_size
from .console import JsonOption, PathOption, explained_errors, print_json, progress_bar, strings

_SELECT = "Select from the preset; repeat for several"
Names = Annotated[list[str] | None, typer.Option(rich_help_panel=_SELECT)]
Numbers = Annotated[list[int] | None, typer.Option(min=1, rich_help_panel=_SELECT)]
Count = Annotated[int | None, typer.Option(min=1, help="Default: the preset's.")]
INTERRUPTED = 130
"""Exit status after Ctrl-C."""


def command(
    preset: Annotated[str, typer.Option(help="ssdtrain (for a GPU), cpu or tiny.")] = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="Results (JSON); continued if it exists. Default: rok_PRESET.json.")
    ] = None,
    redraw: Annotated[Path | None, typer.Option(help="Measure nothing; draw and compare these results.")] = None,
    model: Names = None,
    hidden: Numbers = None,
    batch: Numbers = None,
    steps: Count = None,
    repeats: Count = None,
    path: PathOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the recompute-offload-keep curve: variants take their steps in turns, each round is kept at once."""
    with explained_errors():
        if redraw is not None:
            raise typer.Exit(finish(load_results(redraw), redraw, as_json))
        if preset not in PRESETS:
            raise ConfigError("preset", preset, f"choose one of {', '.join(map(repr, PRESETS))}")
        given: dict[str, Any] = {"steps": steps, "repeats": repeats}
        chosen = replace(PRESETS[preset], **{name: value for name, value in given.items() if value is not None})
        run = RokRun(
            select(chosen, model, hidden, batch),
            out or Path(f"rok_{preset}.json"),
            environment=describe_environment(),
            command=shlex.join(["actoffload", *without_folders(sys.argv[1:])]),
            path=strings(path),
        )
        try:
            measure(run, quiet=as_json)
        except KeyboardInterrupt:
            typer.echo(f"Interrupted. {how_to_go_on(run)}", err=True)
            raise typer.Exit(INTERRUPTED) from None
        raise typer.Exit(finish(run.payload, run.file, as_json))


def how_to_go_on(run: RokRun) -> str:
    """Return what to do after an interrupt."""
    left = len(run.missing())
    return (
        f"{left} rounds are left; the others are in {run.file}. Go on with the same command and --out {run.file}; "
        f"draw what is there with: actoffload rok --redraw {run.file}"
        if run.file.exists()
        else f"No round was finished; {left} are left. Begin again with the same command."
    )


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
    """Take all missing rounds behind a progress bar."""
    todo = run.missing()
    with progress_bar(TimeElapsedColumn(), quiet=quiet) as progress:
        if not quiet:
            there = len(run.payload["samples"])
            progress.console.print(f"{len(todo)} rounds to take, {there} samples there; results in {run.file}")
        names = [*(job.label for job in todo), "done"]
        bar = progress.add_task(names[0], total=len(todo))
        for number, (job, samples) in enumerate(run.run(), start=1):
            progress.update(bar, advance=1, description=names[number])
            for sample in samples:
                if "error" in sample:
                    text = f"{job.label}: {sample['series']} {sample['level']}: {sample['error']}"
                    progress.console.print(text, style="yellow", markup=False)


def finish(payload: dict[str, Any], file: Path, as_json: bool) -> int:
    """Draw and compare; 1 when losses or gradients differ or a point failed.

    Running out of memory and a budget below the floor are no failures.
    """
    points = points_of(payload["samples"])
    machine = payload["environment"]
    title = f"Recompute, offload, keep: {machine.get('gpu') or machine.get('cpu')}, torch {machine.get('torch')}"
    share = busy_share(payload)
    busy = f"the machine was busy: others took up to {share:.0%} of the processors" if share else ""
    picture = file.with_suffix(".png")
    drawn = draw_rok(points, picture, f"{title}\n{busy}" if busy else title)
    if as_json:
        print_json({"points": [point.as_dict() for point in points], "busy_share": share})
    else:
        show(points, busy)
        typer.echo(f"written beside {file.name}: {picture.name}" if drawn else "a picture needs matplotlib")
    return 1 if any(p.failed or p.identical is False for p in points) else 0


def show(points: Sequence[Point], busy: str) -> None:
    """Print the points, what each says next to the noise, and which of them are efficient."""
    console = Console()
    for panel in dict.fromkeys(point.case.panel for point in points):
        console.print(_point_table(panel, [point for point in points if point.case.panel == panel]))
    if busy:
        console.print(f"WARNING: {busy}; trust verdicts, not single figures.", style="bold yellow", markup=False)
    different = [point.label for point in points if point.identical is False]
    if different:
        console.print(f"BITS DIFFER: {'; '.join(different)}", style="bold red", markup=False)
    elif any(point.identical for point in points):
        console.print("Losses and gradients are equal bit for bit in every step of every series.", style="green")


def _point_table(panel: str, points: Sequence[Point]) -> Table:
    caption = "± middle half of the steps; ★ nothing with as little memory is faster by more than that"
    table = Table(title=escape(panel), title_justify="left", caption=caption, caption_justify="left")
    for name in ("", "batch", "series"):
        table.add_column(name)
    for name in ("peak", "worst", "process", "TFLOP/s", "step", "× keep in turn"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for point in sorted(points, key=lambda p: (p.case.batch, SERIES.index(p.variant.series), p.peak_bytes)):
        head = "★" if point.efficient else "", str(point.case.batch), point.variant.label
        table.add_row(*head, *map(escape, _cells(point)))
    return table


def _cells(point: Point) -> tuple[str, ...]:
    """Return a point's numbers as text: peaks, TFLOP/s, step, ratio; and what they say, or why there are none."""
    if point.step_s is None or point.tflops is None:
        return (*["-"] * 6, "out of memory" if point.oom else point.error)
    ratio = point.ratio
    return (
        format_size(point.peak_bytes),
        format_size(point.worst_peak_bytes),
        "-" if point.process_peak_bytes is None else format_size(point.process_peak_bytes),
        f"{point.tflops.median:.4g}",
        f"{point.step_s.median:.3g} s ± {point.step_s.width / 2:.0%}",
        "-" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})",
        "BITS DIFFER" if point.identical is False else point.verdict,
    )
