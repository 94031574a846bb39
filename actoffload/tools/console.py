"""Shared by the commands: options, errors, tables, a progress bar and JSON."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_type_hints

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, ProgressColumn
from rich.table import Table

from ..config import OffloadConfig
from ..errors import printable
from .environment import BUSY_SHARE, without_errno

HELP = {name: kind.help for name, kind in OffloadConfig.flags().items()}
"""Of each option."""
PathOption = Annotated[
    list[Path] | None,
    typer.Option(help=f"{HELP['path']}. Default: $ACTOFFLOAD_PATH, else the temporary one."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take dataclasses in place of many parameters: their fields with an option become its options.

    A parameter of type ``D``, a dataclass, gets an object. One of type ``Annotated[dict[str, Any], D]`` gets a dict of
    the options that the user gave; a preset has the other values.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Any, list[str]]] = {}

    def add(name: str, hint: Any, default: Any) -> None:
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint))

    for name, parameter in inspect.signature(command).parameters.items():
        hint = hints[name]
        kind: Any = next((part for part in (hint, *getattr(hint, "__metadata__", ())) if is_dataclass(part)), None)
        if kind is None:
            add(name, hint, parameter.default)
            continue
        options = get_type_hints(kind, include_extras=True).items()
        inner: dict[str, Any] = {field: option for field, option in options if hasattr(option, "__metadata__")}
        groups[name] = (kind if kind is hint else None, list(inner))
        for field, option in inner.items():
            if kind is hint:
                add(field, option, getattr(kind, field))
            else:
                add(field, Annotated[option.__origin__ | None, *option.__metadata__], None)

    @wraps(command)
    def flat(**options: Any) -> None:
        for name, (kind, fields) in groups.items():
            values = {field: options.pop(field) for field in fields}
            options[name] = kind(**values) if kind else {k: v for k, v in values.items() if v is not None}
        command(**options)

    # Typer reads the options of a command from both.
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {each.name: each.annotation for each in parameters}
    return flat


def fail(message: str, cause: BaseException | None = None) -> NoReturn:
    """Print an error and leave with exit status 1."""
    typer.echo(f"Error: {without_errno(message)}", err=True)
    raise typer.Exit(1) from cause


def check_paths(paths: list[Path] | None, target: str = "auto") -> None:
    """Refuse options that cannot work before anything is measured."""
    OffloadConfig(target=target, path=paths)  # type: ignore[arg-type]
    for directory in paths or ():
        if not directory.is_dir():
            problem = "is a file" if directory.exists() else "does not exist"
            raise typer.BadParameter(f"path={str(directory)!r}: {problem}; give a directory on a local disk")


def strings(paths: list[Path] | None) -> list[str] | None:
    """Return paths as text; None stays None."""
    return None if paths is None else [str(path) for path in paths]


def plain(text: str) -> str:
    """Return a text, perhaps from elsewhere, that rich prints as it is and that no terminal obeys."""
    return escape(printable(text))


def print_busy(share: float) -> None:
    """Print a warning if other processes took much of the processors."""
    if share > BUSY_SHARE:
        text = f"The machine was busy: others took {share:.0%} of the processors. Times are rough."
        Console().print(text, style="red", highlight=False)


def print_json(payload: object) -> None:
    """Print plain values as JSON."""
    typer.echo(json.dumps(payload, indent=2))


def print_rows(rows: Iterable[Sequence[str]], *head: str, title: str | None = None) -> None:
    """Print a table."""
    Console().print(table_of(rows, *head, title=title))


def table_of(rows: Iterable[Sequence[str]], *head: str, title: str | None = None) -> Table:
    """Return a table; without a head, of names and values. Columns of numbers are aligned right."""
    cells = [[plain(cell) for cell in row] for row in rows]
    table = Table(
        title=title and plain(title), title_justify="left", box=SIMPLE_HEAD, show_header=bool(head), pad_edge=False
    )
    for number, name in enumerate(head):
        are_numbers = all(row[number][:1].isdigit() or row[number] == "-" for row in cells)
        table.add_column(plain(name), justify="right" if are_numbers else "left", overflow="fold")
    for row in cells:
        table.add_row(*row)
    return table


def progress_bar(*columns: ProgressColumn, quiet: bool = False) -> Progress:
    """Return a progress bar on stderr, with more columns."""
    return Progress(*Progress.get_default_columns(), *columns, console=Console(stderr=True), disable=quiet)
