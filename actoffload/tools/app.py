"""The commands."""

from __future__ import annotations

from typing import Annotated

import typer

from ..version import __version__
from . import bench, demo, doctor, estimate, plan, report, rok, run

app = typer.Typer(
    name="actoffload",
    help="Saved activations on NVMe or in host memory while the step runs, with bit-identical gradients.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


for _name, _module in {"demo": demo, "doctor": doctor, "bench": bench, "estimate": estimate, "plan": plan}.items():
    app.command(name=_name)(_module.command)
app.command(name="report")(report.command)
app.command(name="rok")(rok.command)
app.command(name="run", context_settings=run.SETTINGS)(run.command)
app.command(name="top")(report.top)
app.command(name="trace", context_settings=run.SETTINGS)(run.traced)
