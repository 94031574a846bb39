"""``actoffload rok``: throughput over activation memory for keep, recompute, offload and the planner's hybrid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import TimeElapsedColumn
from rich.table import Table

from ..errors import ConfigError
from ..sizes import format_size
from .console import (
    DarkOption,
    JsonOption,
    PathOption,
    StyleOption,
    explained_errors,
    print_json,
    progress_bar,
    strings,
)
from .environment import describe_environment
from .models import import_function, is_own
from .plots import Look, Style, draw_rok
from .rok_points import OWN, PREDICTED, PRESETS, SERIES, SIMULATED, Case, Point, Preset, points_of
from .rok_prediction import describe_gpu, predict
from .rok_run import RokRun, busy_share, in_a_process, load_results

Count = Annotated[int | None, typer.Option(min=1, help="Default: the preset's.")]
INTERRUPTED = 130
"""Exit status after Ctrl-C."""
OWN_BATCHES = (1, 2, 4)
"""Samples of a batch of a user's own model, unless told otherwise."""


def command(
    preset: Annotated[
        str | None,
        typer.Option(help=f"One of {', '.join(PRESETS)}; default: cpu. simulated is a small GPU in virtual time."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Run nothing: predict from shapes, for this GPU of `estimate --presets`.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Results (JSON); continued if it exists. Default: rok_NAME.json.")
    ] = None,
    redraw: Annotated[Path | None, typer.Option(help="Measure nothing; draw and compare these results.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Your own, FILE.py:FUNCTION; or a name: only the preset's cases of this model.")
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Samples of your own model's batches; repeat. Or only the preset's cases of these."),
    ] = None,
    steps: Count = None,
    repeats: Count = None,
    path: PathOption = None,
    style: StyleOption = Style.PAPER,
    dark: DarkOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the recompute-offload-keep curve: variants take their steps in turns, each round is kept at once.

    FUNCTION returns a model and make_batch(size), which returns the model's arguments; the model returns its loss.
    """
    look = Look(style, dark)
    with explained_errors():
        if redraw is not None:
            raise typer.Exit(finish(load_results(redraw), redraw, look, as_json))
        own = model is not None and is_own(model)
        preset = preset or (OWN if own else "cpu")
        if preset not in PRESETS:
            raise ConfigError("preset", preset, f"choose one of {', '.join(map(repr, PRESETS))}")
        given: dict[str, Any] = {"steps": steps, "repeats": repeats}
        chosen = replace(PRESETS[preset], **{name: value for name, value in given.items() if value is not None})
        name = Path(model).stem if model and own else preset
        environment = describe_environment()
        if gpu is not None:
            environment["gpu"] = describe_gpu(gpu)
            chosen, name = chosen.on_paper(gpu), f"{name}_{gpu}"
        run = RokRun(
            replace(chosen, cases=cases_of(chosen, model, batch)),
            out or Path(f"rok_{name}.json"),
            environment=environment,
            command=f"actoffload rok --preset {preset} "
            + (f"--gpu {gpu}" if gpu else f"--steps {chosen.steps} --repeats {chosen.repeats}"),
            path=strings(path),
            launch=predict if gpu else in_a_process,
        )
        try:
            measure(run, quiet=as_json)
        except KeyboardInterrupt:
            typer.echo(f"Interrupted. {how_to_go_on(run)}", err=True)
            raise typer.Exit(INTERRUPTED) from None
        raise typer.Exit(finish(run.payload, run.file, look, as_json))


def how_to_go_on(run: RokRun) -> str:
    """Return what to do after an interrupt."""
    left = len(run.missing())
    return (
        f"{left} rounds are left; the others are in {run.file}. Go on with the same command and --out {run.file}; "
        f"draw what is there with: actoffload rok --redraw {run.file}"
        if run.file.exists()
        else f"No round was finished; {left} are left. Begin again with the same command."
    )


def cases_of(preset: Preset, model: str | None, batches: Sequence[int] | None) -> tuple[Case, ...]:
    """Return a user's own model in each batch, or the preset's cases of a model and of some batches.

    Raises:
        ConfigError: there are none.
    """
    if model is not None and is_own(model):
        import_function("model", model)  # what is wrong there is said now, not in every round
        return tuple(Case(model=model, batch=size) for size in batches or OWN_BATCHES)
    cases = preset.cases
    for name, wanted in (("model", [model] if model else None), ("batch", batches)):
        if wanted:
            cases = tuple(case for case in cases if getattr(case, name) in wanted)
        if not cases:
            raise ConfigError(name, wanted and wanted[0], "the preset has no such case; your own is FILE.py:FUNCTION")
    return cases


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


def finish(payload: dict[str, Any], file: Path, look: Look, as_json: bool) -> int:
    """Draw and compare; 1 when losses or gradients differ or a point failed.

    Running out of memory and a budget below the floor are no failures.
    """
    points = points_of(payload["samples"])
    measured = payload["measured_with"].get("device") not in (SIMULATED, PREDICTED)
    share = busy_share(payload) if measured else 0.0
    busy = f"the machine was busy: others took up to {share:.0%} of the processors" if share else ""
    pictures = [look.path(file, ending) for ending in (".png", ".svg")]
    drawn = draw_rok(points, pictures, "\n".join(filter(None, (title_of(payload), busy))), look)
    if as_json:
        print_json({"points": [point.as_dict() for point in points], "busy_share": share})
    else:
        show(points, busy)
        names = ", ".join(picture.name for picture in pictures)
        typer.echo(f"written beside {file.name}: {names}" if drawn else "a picture needs matplotlib")
    return 1 if any(p.failed or p.identical is False for p in points) else 0


def title_of(payload: dict[str, Any]) -> str:
    """Return where the results are from; what was not measured says so."""
    machine, how = payload["environment"], payload["measured_with"]
    if how.get("device") == PREDICTED:
        return f"PREDICTED from shapes, nothing was run\n{machine['gpu']}"
    if how.get("device") == SIMULATED:
        return f"SIMULATED GPU, virtual time; torch {machine.get('torch')}"
    return f"{machine.get('gpu') or machine.get('cpu')}, torch {machine.get('torch')}"


def show(points: Sequence[Point], busy: str) -> None:
    """Print the points and what each says next to the noise."""
    console = Console()
    for case in dict.fromkeys(point.case for point in points):
        console.print(_table(case.name, [point for point in points if point.case == case]))
    if busy:
        console.print(f"WARNING: {busy}; trust verdicts, not single figures.", style="bold yellow", markup=False)
    different = [point.label for point in points if point.identical is False]
    if different:
        console.print(f"BITS DIFFER: {'; '.join(different)}", style="bold red", markup=False)
    elif any(point.identical for point in points):
        console.print("Losses and gradients are equal bit for bit in every step of every series.", style="green")


def _table(title: str, points: Sequence[Point]) -> Table:
    """Return the points of a case; it fits 80 columns."""
    caption = "peak: saved activations; × keep: within the same turn (middle half)"
    table = Table(title=escape(title), title_justify="left", caption=caption, caption_justify="left")
    table.box, table.padding = None, (0, 2, 0, 0)
    table.add_column("series", no_wrap=True)
    for name in ("peak", "process", "step", "× keep"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict")
    for point in sorted(points, key=lambda p: (SERIES.index(p.variant.series), p.peak_bytes)):
        table.add_row(point.variant.label, *map(escape, _cells(point)))
    return table


def _cells(point: Point) -> tuple[str, ...]:
    """Return a point's numbers as text, and what they say, or why there are none."""
    if point.step_s is None:
        return ("-", "-", "-", "-", "out of memory" if point.oom else point.error)
    ratio = point.ratio
    return (
        format_size(point.peak_bytes),
        "-" if point.process_peak_bytes is None else format_size(point.process_peak_bytes),
        f"{point.step_s.median:.3g} s",
        "-" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})",
        "BITS DIFFER" if point.identical is False else point.verdict,
    )
