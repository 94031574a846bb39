"""``actoffload run [options] -- train.py``: a program that was not changed, with ``ACTOFFLOAD`` set for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..config import SWITCH, OffloadConfig, variable_of
from .console import HELP, PathOption

NOT_FOUND = 127
"""The exit status of a shell that finds no such program."""


Program = Annotated[
    list[str], typer.Argument(help="A script (train.py), Python's options (-m trainer) or a command (torchrun).")
]
Target = Annotated[str, typer.Option(envvar=SWITCH, help="host, nvme, tiered or auto.")]
DeviceBudget = Annotated[str | None, typer.Option(help=f"{HELP['device_budget']}.")]
OTHER = "Any other field of OffloadConfig."


def command(
    program: Program,
    target: Target = "auto",
    path: PathOption = None,
    device_budget: DeviceBudget = None,
    option: Annotated[list[str] | None, typer.Option("--option", "-o", metavar="NAME=VALUE", help=OTHER)] = None,
) -> None:
    """Run a program, and offload what it trains with transformers, TRL, Accelerate or DeepSpeed."""
    _become("run", program, target, path, device_budget, option or [])


def traced(
    program: Program,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The trace; with several ranks, one file for each.")
    ] = Path("trace.json"),
    target: Target = "auto",
    path: PathOption = None,
    device_budget: DeviceBudget = None,
    option: Annotated[list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help=OTHER)] = None,
) -> None:
    """As `run`, and write a trace of it; with --option policy=keep nothing moves, and it shows the step as it is."""
    _become("trace", program, target, path, device_budget, [*(option or []), f"trace={output.absolute()}"])


def _become(
    name: str, program: list[str], target: str, path: list[str] | None, device_budget: str | None, options: list[str]
) -> None:
    """Replace this process by the program, with the options in its environment."""
    given = {"target": target, "path": os.pathsep.join(path or ()), "device_budget": device_budget}
    twice = {"target", *(field for field, value in given.items() if value)}
    for text in options:
        field, _, value = text.partition("=")
        if not value:
            raise typer.BadParameter(f"option={text!r}: give NAME=VALUE, such as min_bytes=1MiB")
        if field in twice:
            raise typer.BadParameter(f"option={text!r}: {field} is given twice, or has an option of its own")
        twice.add(field)
        given[field] = value
    variables = {variable_of(field): value for field, value in given.items()}
    environment = {**os.environ, **{variable: value for variable, value in variables.items() if value}}
    OffloadConfig.options_from_environment(environment)
    words = [sys.executable, *program] if program[0].endswith(".py") or program[0].startswith("-") else program
    found = shutil.which(words[0])
    if found is None:
        print(f"actoffload {name}: {words[0]}: there is no such program", file=sys.stderr)
        raise typer.Exit(NOT_FOUND)
    # Only an interpreter that starts in this environment shows whether Python loads the switch at its start.
    loaded = "import sys; sys.exit('_actoffload_start' not in sys.modules)"
    if subprocess.run([sys.executable, "-c", loaded], env=environment, check=False).returncode:
        raise typer.BadParameter("this is no installed actoffload: pip installs what Python loads at its start")
    os.execve(found, words, environment)
