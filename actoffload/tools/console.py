"""Shared by the commands: options, tables, a progress bar and JSON."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, ProgressColumn
from rich.table import Table

from ..config import OffloadConfig
from ..errors import printable
from ..storage.spool_files import check_directory
from .environment import BUSY_SHARE


def option(help: str | None = None, *flags: str, panel: str | None = None, **more: Any) -> Any:
    """Return an option of a command, under the heading ``panel`` of its help."""
    return typer.Option(*flags, help=help, rich_help_panel=panel, **more)


HELP = {name: kind.help for name, kind in OffloadConfig.flags().items()}
"""Of each option."""
PathOption = Annotated[
    list[str] | None, option(f"{HELP['path']}. Default: $ACTOFFLOAD_PATH, else the temporary one.", metavar="<path>")
]
JsonOption = Annotated[bool, option("Print JSON and nothing else.", "--json")]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take dataclasses in place of many parameters: their fields with an option become its options.

    A parameter of type ``D``, a dataclass, gets an object. One of type ``Annotated[dict[str, Any], D]`` gets a dict of
    the options that the user gave; a preset has the other values.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Any, list[str]]] = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        hint = parameter.annotation
        kind: Any = next((part for part in (hint, *getattr(hint, "__metadata__", ())) if is_dataclass(part)), None)
        if kind is None:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(kind, include_extras=True).items()
        options: dict[str, Any] = {field: option for field, option in hints if hasattr(option, "__metadata__")}
        groups[name] = (kind if kind is hint else None, list(options))
        for field, option in options.items():
            if kind is not hint:
                option = Annotated[option.__origin__ | None, *option.__metadata__]
            default = getattr(kind, field) if kind is hint else None
            of = inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)
            parameters.append(of)

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


def check_paths(paths: list[str] | None, target: str = "auto") -> None:
    """Refuse options that cannot work before anything is measured."""
    OffloadConfig(target=target, path=paths)  # type: ignore[arg-type]
    for directory in paths or ():
        check_directory(directory)


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
