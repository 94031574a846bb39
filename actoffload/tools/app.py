"""The commands. Each is imported when it is called, and imports torch when it has read its options."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..errors import ActOffloadError, ConfigError, SpoolPathError
from ..version import __version__
from .console import option
from .environment import without_errno

COMMANDS = ["demo", "doctor", "bench", "estimate", "plan", "report", "rok", "run", "top", "trace", "try"]
ELSEWHERE = {"top": ("report", "top"), "trace": ("run", "traced"), "try": ("trial", "command")}
"""The module and the function of a command; the others are each the ``command`` of the module of their name."""
OF_PROGRAMS = {"allow_interspersed_args": False}
"""For `run` and `trace`: the first word that is no option and all words after it belong to the program."""


class _Command(TyperCommand):
    """Ends with a line of text in place of a traceback, in which options have the names of their flags.

    Exit status 2 for an option that cannot work, 1 for anything else that this library or the system refuses. So any
    function of a command raises `ConfigError` for such an option, without a word on it in its docstring.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ConfigError, SpoolPathError, typer.BadParameter) as error:
            raise typer.BadParameter(self._with_flags(error), ctx) from error
        except BrokenPipeError:  # the reader has left, as `head` does
            raise
        except (ActOffloadError, OSError) as error:
            typer.echo(f"Error: {self._with_flags(error)}", err=True)
            raise typer.Exit(1) from error

    def _with_flags(self, error: Exception) -> str:
        flags = {each.name: max(each.opts, key=len) for each in self.params}
        flags |= {each.name: each.name.upper() for each in self.params if each.param_type_name == "argument"}
        names = re.compile(r"\b(\w+)=")
        text = names.sub(lambda found: f"{flags[found[1]]} " if found[1] in flags else found[0], str(error))
        return without_errno(text)


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return COMMANDS

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, function = ELSEWHERE.get(cmd_name, (cmd_name, "command"))
        one = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        settings = OF_PROGRAMS if module == "run" else None
        called = getattr(import_module(f".{module}", __package__), function)
        one.command(name=cmd_name, cls=_Command, context_settings=settings)(called)
        return typer.main.get_command(one)


app = typer.Typer(
    name="actoffload",
    cls=_Commands,
    help="Saved activations on NVMe or in host memory while the step runs, with bit-identical gradients.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, option("Print the version and leave.", "--version", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit
