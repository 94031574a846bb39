"""``actoffload demo``: the same training run in several modes, each in its own process, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import TextColumn
from rich.table import Table

from ..analysis.environment import find_device
from ..analysis.workers import stream_worker
from ..sizes import format_size
from .console import progress_bar

STEP_LIMIT_S = 3600.0
"""A step that takes longer is taken for a hang."""


class WorkerError(RuntimeError):
    """A mode's process failed; the message is what it said."""


@dataclass(frozen=True, kw_only=True)
class ModeResult:
    """What one mode's process reported."""

    mode: str
    device: str
    losses: tuple[float, ...]
    step_s: tuple[float, ...]
    end: dict[str, Any]

    @property
    def median_step_s(self) -> float:
        """Median of the steps after the first, which also warms up."""
        return median(self.step_s[1:] or self.step_s)

    @property
    def peak_bytes(self) -> int:
        """Peak device memory, or peak resident memory of the process when the device is the CPU."""
        device_bytes = self.end["peak_device_bytes"]
        return int(self.end["peak_rss_bytes"] if device_bytes is None else device_bytes)

    def statistic(self, name: str) -> int | None:
        """Return a field of the offloader's statistics; None in the mode that offloads nothing."""
        statistics = self.end.get("statistics")
        return None if statistics is None else int(statistics[name])


def identical(modes: Sequence[ModeResult]) -> bool:
    """Return whether every mode had the same loss in every step, bit for bit."""
    return len({tuple(loss.hex() for loss in mode.losses) for mode in modes}) == 1


def as_dict(spec: dict[str, Any], modes: Sequence[ModeResult]) -> dict[str, Any]:
    """Return everything, ready for JSON; the first mode is what the others are compared with."""
    rows = [
        asdict(mode)
        | {
            "median_step_s": mode.median_step_s,
            "ratio_to_keep": mode.median_step_s / modes[0].median_step_s,
            "losses_hex": [loss.hex() for loss in mode.losses],
        }
        for mode in modes
    ]
    falls = all(mode.losses[-1] < mode.losses[0] for mode in modes)
    return {"spec": spec, "identical": identical(modes), "loss_falls": falls, "modes": rows}


def run_demo(spec: dict[str, Any], target: str, *, quiet: bool) -> list[ModeResult]:
    """Run every mode, one after the other, behind a progress bar; ``keep`` first.

    Raises:
        ValueError: an option that only the worker could refuse, such as a directory on tmpfs.
        WorkerError: a mode failed.
    """
    modes = list(dict.fromkeys(["keep", *(["host"] if find_device() != "cpu" else []), target]))
    with progress_bar(TextColumn("{task.fields[loss]}"), quiet=quiet) as progress:
        bars = {mode: progress.add_task(mode, total=spec["steps"], loss="") for mode in modes}

        def on_step(mode: str, loss: float) -> None:
            progress.update(bars[mode], advance=1, loss=f"loss {loss:.3f}")

        return [_run_mode(mode, spec, on_step) for mode in modes]


def _run_mode(mode: str, spec: dict[str, Any], on_step: Callable[[str, float], None]) -> ModeResult:
    device, losses, times_s = "", [], []
    for event in stream_worker("actoffload.cli.demo_worker", spec | {"mode": mode}, limit_s=STEP_LIMIT_S, each=True):
        if event.get("event") == "begin":
            device = event["device"]
        elif event.get("event") == "step":
            losses.append(float(event["loss"]))
            times_s.append(event["step_s"])
            on_step(mode, event["loss"])
        elif event.get("event") == "done":
            return ModeResult(mode=mode, device=device, losses=tuple(losses), step_s=tuple(times_s), end=event)
        elif event.get("kind") == "option":
            raise ValueError(event["message"])
        else:
            what = event.get("message") or event["error"]
            raise WorkerError(f"mode {mode}: {event.get('kind', 'its process')}: {what}")
    raise WorkerError(f"mode {mode}: its process ended without a result")


def show(spec: dict[str, Any], modes: Sequence[ModeResult]) -> None:
    """Print the table and what it means."""
    console = Console()
    console.print(
        f"GPT of {spec['layers']} layers, width {spec['width']}, on {spec['batch']} × {spec['seq']} bytes of Python's "
        f"standard library, {spec['steps']} steps on {modes[0].device}"
    )
    console.print(_table(modes))
    for mode in modes:
        if "report" in mode.end:
            console.print(f"\n{mode.mode}: {mode.end['report']}", markup=False, highlight=False)
    console.print()
    if identical(modes):
        console.print("Losses are equal bit for bit in every step of every mode.", style="green")
    else:
        console.print("LOSSES DIFFER between the modes: this is a bug; please report it.", style="bold red")
    console.print(
        "Written and read: what the storage engine counted, and what the kernel counted for the whole process. Reads "
        "that the page cache answers (buffered engines) never reach the kernel's count.",
        style="dim",
    )


def _table(modes: Sequence[ModeResult]) -> Table:
    """Give each mode a column, so that it fits a terminal of 80 columns."""
    keep = modes[0]
    baseline = next((b for mode in modes if (b := mode.statistic("baseline_peak_bytes"))), None)
    rows: dict[str, Callable[[ModeResult], str]] = {
        "loss, first → last step": lambda m: f"{m.losses[0]:.4f} → {m.losses[-1]:.4f}",
        "step time (median)": lambda m: f"{m.median_step_s:.2f} s",
        "ratio to keep": lambda m: f"{m.median_step_s / keep.median_step_s:.2f}",
        "resident activation peak": lambda m: _size(
            m.statistic("resident_peak_bytes") if "statistics" in m.end else baseline
        ),
        "  with nothing moved": lambda m: _size(baseline),
        "peak RSS" if keep.device == "cpu" else "peak device memory": lambda m: _size(m.peak_bytes),
        "written (engine)": lambda m: _size(m.statistic("nvme_written_bytes")),
        "written (kernel)": lambda m: _size(m.end.get("kernel_written_bytes")),
        "read (engine)": lambda m: _size(m.statistic("nvme_read_bytes")),
        "read (kernel)": lambda m: _size(m.end.get("kernel_read_bytes")),
    }
    table = Table()
    table.add_column("")
    for mode in modes:
        table.add_column(mode.mode, justify="right")
    for name, cell in rows.items():
        table.add_row(name, *(cell(mode) for mode in modes))
    return table


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_size(nbytes)
