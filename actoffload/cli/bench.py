"""``actoffload bench``: how fast a path writes, reads and does both, and what training could hide behind it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..config import default_path, format_size, parse_size
from ..engines import ENGINES
from ..errors import ConfigError, SpoolPathError, StorageError
from ..report.bench import DIRECTIONS, Failure, Rates, Sample, Setting, advice, as_dict, best_of, rates_of
from ..report.bench_run import DISK_ENGINES, measure_all
from ..report.environment import write_atomically

Number = TypeVar("Number", int, float)

SIZES = ("256KiB", "1MiB", "8MiB")
DEPTHS = (1, 4, 16)
REGION = "512MiB"


def command(
    path: Annotated[
        list[Path] | None,
        typer.Option(help="Directory to measure; repeat to stripe. Default: $ACTOFFLOAD_PATH, else the temporary one."),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(ENGINES)}; repeat for several. Default: all that use the disk."),
    ] = None,
    size: Annotated[
        list[str] | None, typer.Option(help=f"Block size; repeat for several. Default: {', '.join(SIZES)}.")
    ] = None,
    depth: Annotated[
        list[int] | None,
        typer.Option(min=1, help=f"Transfers at once; repeat. Default: {', '.join(map(str, DEPTHS))}."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Of each sample.")] = 0.3,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each kind, taken in turns; medians count.")] = 2,
    region: Annotated[str, typer.Option(help="How much of the disk to use meanwhile.")] = REGION,
    busy: Annotated[bool, typer.Option("--busy", help="Let the main thread run pure Python meanwhile.")] = False,
    step_time: Annotated[float | None, typer.Option(help="Seconds of your training step.")] = None,
    saved_bytes: Annotated[str | None, typer.Option(help='What your step saves for backward: "8GiB".')] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write JSON here; - prints it and nothing else.")
    ] = None,
) -> None:
    """Measure a path: write, read and both at once, by engine, block size and depth, and what training could hide.

    S bytes that a step of T seconds saves hide where S / (T/2) is at most the slowest of write, read and mixed.
    """
    quiet = json_file is not None and str(json_file) == "-"
    try:
        saved = None if saved_bytes is None else _positive("saved_bytes", parse_size("saved_bytes", saved_bytes))
        if step_time is not None:
            _positive("step_time", step_time)
        settings = settings_of(engine, size, depth)
        results = run(
            [str(p) for p in path] if path else [default_path()],
            settings,
            quiet=quiet,
            region_bytes=_positive("region", parse_size("region", region)),
            seconds=seconds,
            rounds=rounds,
            busy=busy,
        )
    except (ConfigError, SpoolPathError) as error:
        raise typer.BadParameter(str(error)) from error
    except StorageError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    samples = [one for one in results if isinstance(one, Sample)]
    failures = [one for one in results if isinstance(one, Failure)]
    best = best_of(rates_of(samples))
    if json_file is not None:
        _write(as_dict(samples, failures, best, step_time, saved), json_file, quiet)
    if not quiet:
        show(rates_of(samples), failures, best, advice(best, step_time, saved) if best is not None else [])
    raise typer.Exit(0 if best is not None else 1)


def settings_of(
    engines: Sequence[str] | None, sizes: Sequence[str] | None, depths: Sequence[int] | None
) -> list[Setting]:
    """Every combination of what was named, each once.

    Raises:
        ConfigError: there is no such engine, or a size is none.
    """
    for name in engines or ():
        if name not in ENGINES:
            raise ConfigError("engine", name, f"choose one of {', '.join(ENGINES)}")
    blocks = [_positive("size", parse_size("size", text)) for text in sizes or SIZES]
    combinations = product(engines or DISK_ENGINES, depths or DEPTHS, blocks)
    return list(dict.fromkeys(Setting(engine=e, block_bytes=b, depth=d) for e, d, b in combinations))


def run(
    paths: Sequence[str], settings: Sequence[Setting], *, quiet: bool, rounds: int, **options: Any
) -> list[Sample | Failure]:
    """Measure, with a bar on stderr where that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    results: list[Sample | Failure] = []
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        bar = progress.add_task("opening", total=len(settings) * len(DIRECTIONS) * rounds)
        for one in measure_all(paths, settings, DIRECTIONS, rounds=rounds, **options):
            results.append(one)
            steps = 1 if isinstance(one, Sample) else len(DIRECTIONS) * rounds
            name = f"{one.setting.engine} {format_size(one.setting.block_bytes)}"
            progress.update(bar, advance=steps, description=name)
    return results


def show(rates: Sequence[Rates], failures: Sequence[Failure], best: Rates | None, lines: Sequence[str]) -> None:
    """Print the table, what could not run and why, and what training could hide."""
    console = Console()
    table = Table(title="GB/s", title_justify="left")
    for column in ("engine", "block", "at once"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for way in (*DIRECTIONS, "both ways"):
        table.add_column(way, justify="right")
    for one in rates:
        setting = one.setting
        name = setting.engine if one.direct else f"{setting.engine} (page cache)"
        cells = (name, format_size(setting.block_bytes), str(setting.depth))
        numbers = (_gb(rate) for rate in (one.write, one.read, one.mixed, one.sustained))
        table.add_row(*cells, *numbers, style="bold" if one is best or one == best else None)
    if rates:
        console.print(table)
    for engine, problem in dict.fromkeys((one.setting.engine, one.problem) for one in failures):
        console.print(f"{escape(engine)} was not measured: {escape(problem)}", soft_wrap=True)
    for line in lines:
        console.print(escape(line), soft_wrap=True)


def _write(payload: dict[str, Any], file: Path, to_stdout: bool) -> None:
    text = json.dumps(payload, indent=2)
    if to_stdout:
        typer.echo(text)
        return
    try:
        write_atomically(file, text + "\n")
    except OSError as error:
        typer.echo(
            f"Error: --json {file}: {error.strerror}; name a file in a directory that you may write to", err=True
        )
        raise typer.Exit(1) from error


def _positive(field: str, value: Number) -> Number:
    if not value > 0:
        raise ConfigError(field, value, "must be above 0")
    return value


def _gb(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e9:.2f}"
