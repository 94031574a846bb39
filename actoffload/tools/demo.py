"""``actoffload demo``: the same training run in several modes, each in its own process, step by step in turn."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import TextColumn
from rich.table import Column, Table

from ..sizes import format_size
from .console import fail, progress_bar
from .environment import BUSY_SHARE, find_device
from .workers import spread, take_turns, turn_ratios

WORKER = "actoffload.tools.demo_worker"
STEP_LIMIT_S = 3600.0
"""A step that takes longer is taken for a hang."""
PLANNING_STEPS = 3
"""The first steps, in which the planner looks and plans; they are left out of the times."""

Mode = dict[str, Any]
"""What one mode's worker measured, and how that compares with the first mode."""


def run_demo(spec: dict[str, Any], target: str, *, quiet: bool) -> list[Mode]:
    """Run every mode, step by step in turn, behind a progress bar; return them, ``keep`` first.

    Raises:
        BadParameter: an option that only the worker could refuse, such as a directory on tmpfs.
        Exit: a mode failed; what it said is printed.
    """
    names = dict.fromkeys(["keep", *(["host"] if find_device() != "cpu" else []), target])
    with progress_bar(TextColumn("{task.fields[loss]}"), quiet=quiet) as progress:
        bars = {name: progress.add_task(name, total=spec["steps"], loss="") for name in names}

        def on_said(name: str, said: dict[str, Any]) -> None:
            if said.get("kind") == "option":
                raise typer.BadParameter(said["error"])
            if "error" in said:
                fail(f"mode {name}: {said['error']}")
            if said.get("turn"):
                progress.update(bars[name], advance=1, loss=f"loss {said['loss']:.3f}")

        specs = {name: spec | {"mode": name} for name in names}
        results = take_turns(WORKER, specs, spec["steps"], limit_s=STEP_LIMIT_S, on_said=on_said)
    for name, result in results.items():
        on_said(name, result)
    return compare(results)


def compare(results: dict[str, dict[str, Any]]) -> list[Mode]:
    """Return each mode's result with its median step time, and its ratios to the first mode's, turn by turn."""
    first = _planned(next(iter(results.values()))["step_s"])
    return [
        {"mode": name, **result}
        | {
            "median_step_s": median(times := _planned(result["step_s"])),
            "ratio_to_keep": median(ratios := turn_ratios(times, first)),
            "ratios_to_keep": ratios,
            "losses_hex": [loss.hex() for loss in result["losses"]],
        }
        for name, result in results.items()
    ]


def _planned(step_s: Sequence[float]) -> Sequence[float]:
    return step_s[min(PLANNING_STEPS, len(step_s) - 1) :]


def identical(modes: Sequence[Mode]) -> bool:
    """Return whether every mode had the same loss in every step, bit for bit."""
    return all(mode["losses_hex"] == modes[0]["losses_hex"] for mode in modes)


def as_dict(spec: dict[str, Any], modes: Sequence[Mode]) -> dict[str, Any]:
    """Return everything, ready for JSON; the first mode is what the others are compared with."""
    falls = all(mode["losses"][-1] < mode["losses"][0] for mode in modes)
    return {"spec": spec, "identical": identical(modes), "loss_falls": falls, "modes": modes}


def show(spec: dict[str, Any], modes: Sequence[Mode]) -> None:
    """Print the table and what it means."""
    console = Console()
    console.print(
        f"GPT of {spec['layers']} layers, width {spec['width']}, on {spec['batch']} × {spec['seq']} bytes of Python's "
        f"standard library, {spec['steps']} steps on {modes[0]['device']}"
    )
    console.print(_table(modes))
    console.print(
        f"The modes took their steps in turns. Times are of the steps after the first {PLANNING_STEPS}, in which the "
        "planner looks and plans. Written and read: what the storage engine counted, and in brackets the kernel.",
        style="dim",
    )
    if (share := modes[0]["others_cpu_share"]) > BUSY_SHARE:
        console.print(f"The machine was busy: others took {share:.0%} of the processors. Times are rough.", style="red")
    for mode in modes:
        if "report" in mode["end"]:
            console.print(f"\n{escape(mode['mode'])}: {escape(mode['end']['report'])}\n", highlight=False)
    if identical(modes):
        console.print("Losses are equal bit for bit in every step of every mode.", style="green")
    else:
        console.print("LOSSES DIFFER between the modes: this is a bug; please report it.", style="bold red")


def _table(modes: Sequence[Mode]) -> Table:
    """Give each mode a column, so that it fits a terminal of 80 columns."""
    moved = [mode["end"]["statistics"] for mode in modes if "statistics" in mode["end"]]
    unmoved = {"resident_peak_bytes": moved[0]["baseline_peak_bytes"]} if moved else {}
    columns = [_column(mode, mode["end"].get("statistics", unmoved)) for mode in modes]
    table = Table("", *(Column(escape(mode["mode"]), justify="right") for mode in modes))
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def _column(mode: Mode, counted: dict[str, int]) -> dict[str, str]:
    losses, end = mode["losses"], mode["end"]
    what, key = ("process", "peak_rss_bytes") if mode["device"] == "cpu" else ("device", "peak_device_bytes")
    return {
        "loss, first → last step": f"{losses[0]:.4f} → {losses[-1]:.4f}",
        "step time (median)": f"{mode['median_step_s']:.2f} s",
        "step time / keep's": "1" if mode["mode"] == "keep" else spread(mode["ratios_to_keep"]),
        "saved activations, peak": _size(counted.get("resident_peak_bytes")),
        f"{what} memory, peak": _size(end[key]),
        "written": f"{_size(counted.get('nvme_written_bytes'))} ({_size(end.get('kernel_written_bytes'))})",
        "read": f"{_size(counted.get('nvme_read_bytes'))} ({_size(end.get('kernel_read_bytes'))})",
    }


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_size(nbytes)
