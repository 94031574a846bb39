"""The commands and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import OffloadConfig
from ..testing.gpt import GPTConfig
from ..version import __version__
from . import bench, estimate, plan, report, rok, run
from . import demo as demo_module
from . import doctor as doctor_module
from .console import JsonOption, PathOption, explained_errors, print_json, strings

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


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps in each mode.")] = 10,
    layers: Annotated[int, typer.Option(min=1, help="Blocks of the GPT.")] = 8,
    width: Annotated[int, typer.Option(min=1, help="Width of the GPT, a multiple of 64.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 8,
    seq: Annotated[int, typer.Option(min=2, help="Bytes per sequence.")] = 256,
    path: PathOption = None,
    target: Annotated[str, typer.Option(help="host, nvme, tiered or auto.")] = "nvme",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of PyTorch. Default: PyTorch's own.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights and the batches.")] = 0,
    profile: Annotated[Path | None, typer.Option(help="Write the recorded step here, for `actoffload plan`.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a byte-level GPT on Python's own source text, with and without offloading, and compare."""
    _check(path, target)
    if profile is not None and not profile.parent.is_dir():
        raise typer.BadParameter(f"profile={str(profile)!r}: its directory does not exist")
    spec: dict[str, Any] = {"steps": steps, "layers": layers, "width": width, "batch": batch, "seq": seq, "seed": seed}
    spec |= {"threads": threads, "paths": strings(path), "profile": None if profile is None else str(profile)}
    try:
        GPTConfig(layers=layers, width=width, seq=seq)  # refuses sizes that do not fit together
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    modes = demo_module.run_demo(spec, target, quiet=as_json)
    if as_json:
        print_json(demo_module.as_dict(spec, modes))
    else:
        demo_module.show(spec, modes)
    raise typer.Exit(0 if demo_module.identical(modes) else 1)


@app.command()
def doctor(path: PathOption = None, as_json: JsonOption = False) -> None:
    """Look at the device, the link and the disk, and say what offloading could use here."""
    _check(path, "auto")
    findings = doctor_module.examine(strings(path))
    if as_json:
        print_json(findings)
    else:
        doctor_module.show(findings)
    raise typer.Exit(0 if doctor_module.healthy(findings) else 1)


app.command(name="bench")(bench.command)
app.command(name="estimate")(estimate.command)
app.command(name="plan")(plan.command)
app.command(name="report")(report.command)
app.command(name="rok")(rok.command)
app.command(name="run", context_settings=run.SETTINGS)(run.command)
app.command(name="top")(report.top)
app.command(name="trace", context_settings=run.SETTINGS)(run.traced)


def _check(path: list[Path] | None, target: str) -> None:
    """Refuse options that cannot work before anything is measured."""
    with explained_errors():
        OffloadConfig(target=target, path=path)  # type: ignore[arg-type]
    for directory in path or ():
        if not directory.is_dir():
            problem = "is a file" if directory.exists() else "does not exist"
            raise typer.BadParameter(f"path={str(directory)!r}: {problem}; give a directory on a local disk")
