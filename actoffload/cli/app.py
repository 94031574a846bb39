"""The commands and their options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..config import OffloadConfig
from ..errors import ActOffloadError, ConfigError, SpoolPathError
from ..version import __version__
from . import bench as bench_module
from . import demo as demo_module
from . import doctor as doctor_module
from . import estimate as estimate_module
from . import plan as plan_module
from . import rok as rok_module

app = typer.Typer(
    name="actoffload",
    help="Saved activations on NVMe or in host memory while the step runs, with bit-identical gradients.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

PathOption = Annotated[
    list[Path] | None,
    typer.Option(help="Directory of the spool; repeat to stripe. Default: $ACTOFFLOAD_PATH, else the temporary one."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


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
    batch: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 16,
    seq: Annotated[int, typer.Option(min=2, help="Bytes per sequence.")] = 256,
    path: PathOption = None,
    target: Annotated[str, typer.Option(help="host, nvme, tiered or auto.")] = "nvme",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of PyTorch. Default: PyTorch's own.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights and the batches.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Train a byte-level GPT on Python's own source text, with and without offloading, and compare."""
    _check(path, target)
    spec = demo_module.DemoSpec(
        steps=steps,
        layers=layers,
        width=width,
        batch=batch,
        seq=seq,
        seed=seed,
        threads=threads,
        paths=None if path is None else tuple(str(p) for p in path),
    )
    try:
        spec.gpt()
        result = demo_module.run_demo(spec, target, quiet=as_json)
    except ValueError as error:  # ConfigError and SpoolPathError are ValueErrors too
        raise typer.BadParameter(str(error)) from error
    except demo_module.WorkerError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    if as_json:
        typer.echo(json.dumps(result.as_dict(), indent=2))
    else:
        demo_module.show(result)
    raise typer.Exit(0 if result.identical else 1)


@app.command()
def doctor(path: PathOption = None, as_json: JsonOption = False) -> None:
    """Look at the device, the link and the disk, and say what offloading could use here."""
    _check(path, "auto")
    paths = None if path is None else [str(p) for p in path]
    findings = doctor_module.examine(paths)
    if as_json:
        typer.echo(json.dumps(findings, indent=2))
    else:
        doctor_module.show(findings)
    raise typer.Exit(0 if doctor_module.healthy(findings) else 1)


app.command(name="bench")(bench_module.command)
app.command(name="estimate")(estimate_module.command)
app.command(name="plan")(plan_module.command)
app.command(name="rok")(rok_module.command)


def _check(path: list[Path] | None, target: str) -> None:
    """Bad options are the user's to mend: say which and how, and leave with exit status 2."""
    try:
        OffloadConfig(target=target, path=path)  # type: ignore[arg-type]
    except (ConfigError, SpoolPathError) as error:
        raise typer.BadParameter(str(error)) from error
    except ActOffloadError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error
    for directory in path or ():
        if not directory.is_dir():
            problem = "is a file" if directory.exists() else "does not exist"
            raise typer.BadParameter(f"path={str(directory)!r}: {problem}; give a directory on a local disk")
