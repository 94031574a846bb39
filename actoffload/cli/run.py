"""``actoffload run [options] -- train.py``: a program that was not changed, with ``ACTOFFLOAD`` set for it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from typing import Annotated

import typer

from ..config import SWITCH, OffloadConfig
from .console import PathOption, explained_errors, strings

SETTINGS = {"allow_interspersed_args": False}
"""Of the command: what follows the first word that is no option is the program's."""
NOT_FOUND = 127
"""The exit status of a shell that finds no such program."""


def command(
    program: Annotated[
        list[str], typer.Argument(help="A script (train.py), Python's options (-m trainer) or a command (torchrun).")
    ],
    target: Annotated[str, typer.Option(help="host, nvme, tiered or auto.")] = "auto",
    path: PathOption = None,
    device_budget: Annotated[
        str | None, typer.Option(help="Most bytes of saved activations on the device: 8GiB, 40%.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", metavar="NAME=VALUE", help="Any other field of OffloadConfig.")
    ] = None,
) -> None:
    """Run a program, and offload what it trains with transformers, TRL, Accelerate or DeepSpeed."""
    given = {"target": target, "path": os.pathsep.join(strings(path) or ()), "device_budget": device_budget}
    for text in option or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"option={text!r}: give NAME=VALUE, such as min_bytes=1MiB")
        given[name] = value
    variables = {SWITCH if name == "target" else f"{SWITCH}_{name.upper()}": value for name, value in given.items()}
    environment = {**os.environ, **{name: value for name, value in variables.items() if value}}
    with explained_errors():
        OffloadConfig.options_from_environment(environment)
    words = [sys.executable, *program] if program[0].endswith(".py") or program[0].startswith("-") else program
    found = shutil.which(words[0])
    if found is None:
        print(f"actoffload run: {words[0]}: there is no such program", file=sys.stderr)
        raise typer.Exit(NOT_FOUND)
    if importlib.util.find_spec("_actoffload_start") is None:
        raise typer.BadParameter("this is no installed actoffload: pip installs what Python loads at its start")
    os.execve(found, words, environment)
