"""``actoffload demo``: a small GPT with and without offloading, step by step in turn: a case of `rok`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import ConfigError
from . import console
from .environment import find_device
from .rok import HEAD, MEANING, cells, measure_case, points_of
from .rok_points import Case, Point, Variant

VOCAB = 256
VARIANTS = (Variant(series="keep"), Variant(series="hybrid"))
"""Nothing moves; and the defaults of the library."""
WARM_UP = 4
"""Steps of each mode before the timed ones: the planner records and plans in them."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The steps of every mode."""

    steps: Annotated[int, console.option("Timed steps in each mode.", min=1)] = 10
    layers: Annotated[int, console.option("Blocks of the GPT.", min=1)] = 8
    width: Annotated[int, console.option("Width of the GPT, a multiple of 64.", min=1)] = 256
    batch: Annotated[int, console.option("Sequences per step.", min=1)] = 8
    seq: Annotated[int, console.option("Tokens per sequence.", min=2)] = 256


@console.grouped
def command(
    training: Training,
    path: console.PathOption = None,
    target: Annotated[str, console.option("host, nvme, tiered or auto.")] = "nvme",
    profile: Annotated[Path | None, console.option("Write the recorded step here, for `actoffload plan`.")] = None,
    as_json: console.JsonOption = False,
) -> None:
    """Take training steps of a small GPT with and without offloading, in turns, and compare time, memory and bits."""
    console.check_paths(path, target)
    if profile is not None and not profile.parent.is_dir():
        raise ConfigError("profile", str(profile), "its directory does not exist")
    from ..testing.gpt import GPTConfig

    GPTConfig(layers=training.layers, width=training.width, seq=training.seq)  # refuses what cannot work
    sizes: dict[str, Any] = {"hidden": training.width, "layers": training.layers, "seq": training.seq, "vocab": VOCAB}
    case = Case(model="gpt-small", batch=training.batch, **sizes)
    how: dict[str, Any] = {"warm_up": WARM_UP, "steps": training.steps, "path": path, "target": target}
    file = None if profile is None else str(profile.absolute())
    with console.progress_bar(quiet=as_json) as progress:
        progress.add_task(f"keep and {target}, in turns", total=None)
        result = measure_case(case, VARIANTS, **how, profile=file, reports=True)
    samples = [{"case": asdict(case), **sample} for sample in result.get("samples", [])]
    for name, sample in zip(("keep", target), samples or [result], strict=False):
        if "error" in sample:
            console.fail(f"mode {name}: {sample['error']}")
    points, ours = points_of(samples), samples[1]
    equal = all(point.identical for point in points)
    if as_json:
        modes = [{"mode": name, **point.as_dict()} for name, point in zip(("keep", target), points, strict=True)]
        modes[1] |= {name: ours[name] for name in ("statistics", "report")}
        console.print_json({"spec": asdict(training) | how, "identical": equal, "modes": modes})
    else:
        show(points, target, ours["report"], result["others_cpu_share"])
    raise typer.Exit(0 if equal else 1)


def show(points: list[Point], target: str, report: str, busy: float) -> None:
    """Print the table of `rok`, and the report of the library."""
    screen, case = Console(highlight=False), points[0].case
    sizes = f"{case.layers} layers, width {case.hidden}, on {case.batch} × {case.seq} random tokens"
    screen.print(f"GPT of {sizes}, on {find_device()}")
    console.print_rows([(name, *cells(one)) for name, one in zip(("keep", target), points, strict=True)], "mode", *HEAD)
    text = f"{MEANING}. The first {WARM_UP} steps do not count, as the planner looks and plans in them."
    screen.print(text, style="dim")
    console.print_busy(busy)
    screen.print(f"\n{escape(target)}: {escape(report)}\n")
    console.print_bits(all(point.identical for point in points))
