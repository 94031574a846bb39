"""What the commands share: options, errors, tables, a progress bar and JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from ..analysis.plots import Style
from ..config import OffloadConfig
from ..errors import ActOffloadError, ConfigError, SpoolPathError, printable

HELP = {name: kind.help for name, kind in OffloadConfig.flags().items()}
"""Of each option."""
PathOption = Annotated[
    list[Path] | None,
    typer.Option(help=f"{HELP['path']}. Default: $ACTOFFLOAD_PATH, else the temporary one."),
]
LEAST = 1e-6
"""The least of an option that must be above 0."""
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
PictureOption = Annotated[Path | None, typer.Option(help="Draw it here (PNG, SVG).")]
StyleOption = Annotated[Style, typer.Option(help="Draw for a column of a paper, 3.3 inches, or for a slide, 16:9.")]
DarkOption = Annotated[bool, typer.Option("--dark", help="Draw on black.")]


@contextmanager
def explained_errors() -> Iterator[None]:
    """Say what went wrong instead of showing a traceback.

    Exit status 2 for an option that cannot work, 1 for anything else that this library or the system refuses.
    """
    try:
        yield
    except (ConfigError, SpoolPathError) as error:
        raise typer.BadParameter(str(error)) from error
    except (ActOffloadError, OSError) as error:
        fail(str(error), error)


def fail(message: str, cause: BaseException | None = None) -> NoReturn:
    """Print an error and leave with exit status 1."""
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(1) from cause


def draw_or_fail(draw: Callable[[], bool]) -> None:
    """Draw a picture, or say why not and leave with exit status 1."""
    try:
        drawn = draw()
    except (OSError, ValueError) as error:
        fail(f"nothing could be written: {error}", error)
    if not drawn:
        fail("--picture needs matplotlib: pip install actoffload[plots]")


def strings(paths: list[Path] | None) -> list[str] | None:
    """Return paths as text; None stays None."""
    return None if paths is None else [str(path) for path in paths]


def plain(text: str) -> str:
    """Return a text, perhaps from elsewhere, as one that rich prints as it is and no terminal obeys."""
    return escape(printable(text))


def print_json(payload: object) -> None:
    """Print plain values as JSON."""
    typer.echo(json.dumps(payload, indent=2))


def print_facts(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print a table of names and values."""
    table = Table(title=plain(title), show_header=False, title_justify="left")
    for row in rows:
        table.add_row(*map(plain, row))
    Console().print(table)


class _LinesOrBar(Progress):
    """A progress bar; where standard error is no terminal, a line at most every second instead."""

    _line_s = 0.0

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Update the bar, or print what is done."""
        super().update(task_id, **changes)
        task = self.tasks[task_id]
        late = task.finished or time.monotonic() >= self._line_s + 1
        if late and not (self.disable or self.console.is_terminal):
            self._line_s = time.monotonic()
            self.console.print(f"{task.description}: {task.completed:g} of {task.total:g}", markup=False)


def progress_bar(*columns: ProgressColumn, quiet: bool = False) -> Progress:
    """Return a progress bar on stderr: description, bar, count, ``columns`` and the time that is left."""
    console = Console(stderr=True)
    shown: tuple[Any, ...] = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *columns)
    options: dict[str, Any] = {"console": console, "disable": quiet, "transient": not console.is_terminal}
    return _LinesOrBar(*shown, TimeRemainingColumn(), **options)
