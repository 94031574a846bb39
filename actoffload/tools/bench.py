"""``actoffload bench``: how fast a path writes, reads and does both, and what training could hide behind it."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import product
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from ..config import default_paths
from ..errors import ConfigError
from ..sizes import format_size, parse_size
from ..storage.engines import ENGINES
from .console import JsonOption, PathOption, explained_errors, print_json, progress_bar, strings
from .disk import (
    BLOCK_BYTES,
    DIRECTIONS,
    DISK_ENGINES,
    REGION_BYTES,
    ROUNDS,
    SECONDS,
    Failure,
    Rates,
    Sample,
    Setting,
    best_of,
    measure_all,
    rates_of,
    training_facts,
)

SIZES = ("256KiB", "1MiB", format_size(BLOCK_BYTES))


def command(
    path: PathOption = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(ENGINES)}; repeat for several. Default: all that use the disk."),
    ] = None,
    size: Annotated[
        list[str] | None, typer.Option(help=f"Block size; repeat for several. Default: {', '.join(SIZES)}.")
    ] = None,
    depth: Annotated[
        list[int] | None, typer.Option(min=1, help="Transfers at once; repeat. Default: the engine's own choice.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Of each sample.")] = SECONDS,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each kind, taken in turns; medians count.")] = ROUNDS,
    region: Annotated[str, typer.Option(help="How much of the disk to use meanwhile.")] = format_size(REGION_BYTES),
    limit: Annotated[float, typer.Option(min=0, help="Seconds after which no sample is begun.")] = 25,
    step_time: Annotated[float | None, typer.Option(min=1e-6, help="Seconds of your training step.")] = None,
    saved_bytes: Annotated[str | None, typer.Option(help='What your step saves for backward: "8GiB".')] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a path: write, read and both at once, by engine, block size and depth, and what training could hide.

    S bytes that a step of T seconds saves hide where S / (T/2) is at most the slowest of write, read and mixed.
    """
    with explained_errors():
        saved = None if saved_bytes is None else parse_size("saved_bytes", saved_bytes)
        settings = settings_of(engine, size, depth)
        paths, region_bytes = strings(path) or list(default_paths()), parse_size("region", region)
        results = measure_all(paths, settings, region_bytes=region_bytes, seconds=seconds, rounds=rounds)
        samples, failures = collect(results, len(settings), len(DIRECTIONS) * rounds, limit, quiet=as_json)
    rates = rates_of(samples)
    best = best_of(rates)
    training = training_facts(best, step_time, saved)
    missing = (len(settings) - len(failures)) * len(DIRECTIONS) * rounds - len(samples)
    if as_json:
        print_json(
            {
                "samples": [asdict(one) for one in samples],
                "failures": [asdict(one) for one in failures],
                "rates": [asdict(one) | {"sustained": one.sustained} for one in rates],
                "best": None if best is None else asdict(best) | {"sustained": best.sustained},
                "training": training,
                "missing_samples": missing,
            }
        )
    else:
        show(rates, failures, best, training)
        if missing:
            typer.echo(f"Stopped after {limit:g} s: {missing} samples are missing; a larger --limit takes them, too.")
    raise typer.Exit(0 if best is not None else 1)


def settings_of(
    engines: Sequence[str] | None, sizes: Sequence[str] | None, depths: Sequence[int] | None
) -> list[Setting]:
    """Return every combination of what was named, each once.

    Raises:
        ConfigError: there is no such engine, or a size is none.
    """
    for name in engines or ():
        if name not in ENGINES:
            raise ConfigError("engine", name, f"choose one of {', '.join(ENGINES)}")
    blocks = [parse_size("size", text) for text in sizes or SIZES]
    known_depths: Sequence[int | None] = depths or [None]
    combinations = product(engines or DISK_ENGINES, known_depths, blocks)
    return list(dict.fromkeys(Setting(engine=e, block_bytes=b, depth=d) for e, d, b in combinations))


def collect(
    results: Generator[Sample | Failure], settings: int, each: int, limit_s: float, *, quiet: bool
) -> tuple[list[Sample], list[Failure]]:
    """Take ``each`` results of every setting behind a progress bar, until the limit."""
    samples: list[Sample] = []
    failures: list[Failure] = []
    deadline_s = time.monotonic() + limit_s
    with progress_bar(quiet=quiet) as progress, closing(results):
        bar = progress.add_task("opening", total=settings * each)
        for one in results:
            name = f"{one.setting.engine} {format_size(one.setting.block_bytes)}"
            if isinstance(one, Failure):
                failures.append(one)
                progress.update(bar, advance=each, description=name)
            else:
                samples.append(one)
                progress.update(bar, advance=1, description=name)
            if time.monotonic() >= deadline_s:
                break
    return samples, failures


def show(
    rates: Sequence[Rates], failures: Sequence[Failure], best: Rates | None, training: dict[str, Any] | None
) -> None:
    """Print the table, what could not run and why, and what training could hide."""
    console = Console()
    names = ("block", "at once", *DIRECTIONS, "both ways")
    table = Table("engine", *(Column(name, justify="right") for name in names), title="GB/s", title_justify="left")
    for one in rates:
        setting = one.setting
        name = setting.engine if one.direct else f"{setting.engine} (page cache)"
        numbers = ("-" if r is None else f"{r / 1e9:.2f}" for r in (one.write, one.read, one.mixed, one.sustained))
        cells = (name, format_size(setting.block_bytes), str(setting.depth), *numbers)
        table.add_row(*cells, style="bold" if one == best else None)
    if rates:
        console.print(table)
    lines = dict.fromkeys(f"{one.setting.engine} was not measured: {one.problem}" for one in failures)
    for line in (*lines, *(advice(best, training) if best is not None and training is not None else ())):
        console.print(escape(line), soft_wrap=True)


def advice(best: Rates, training: dict[str, Any]) -> list[str]:
    """Return sentences on what training could hide, by what `training_facts` says."""
    setting, rate, saved = best.setting, _gb(training["sustained_bytes_per_s"]), training["saved_bytes"]
    lines = [
        f"Best: {setting.engine}, blocks of {format_size(setting.block_bytes)}, {setting.depth} at once: "
        f"{rate} both ways (the slowest of write, read and mixed).",
        f"A step of {training['step_s']:g} s hides {format_size(training['hidden_bytes'])} written and read back: "
        f"half of the step at {rate}, as far as the disk goes.",
    ]
    if training["share_hidden"] is not None:
        lines.append(
            f"Of {format_size(saved)} saved in a step of {training['step_s']:g} s, {training['share_hidden']:.0%} "
            f"hides: all of it would need {_gb(2 * saved / training['step_s'])} both ways."
        )
    if saved is not None:
        lines.append(f"{format_size(saved)} hide in a step of {training['hiding_step_s']:.3g} s or more.")
    if not best.direct:
        lines.append("No engine went past the page cache here: these rates are also those of memory.")
    return lines


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"
