"""What every benchmark shares: samples in turns, statistics of them, bounds, tables, and files with the results."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from actoffload.report.environment import describe_environment, run_worker, without_paths, write_json

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Sample = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Bound:
    """One thing that must hold: ``measured`` at most (or at least) ``bound``; None where it could not be measured."""

    what: str
    measured: float | None
    bound: float
    at_most: bool = True
    unit: str = ""

    @property
    def holds(self) -> bool:
        """Whether it was measured and keeps the bound."""
        if self.measured is None:
            return False
        return self.measured <= self.bound if self.at_most else self.measured >= self.bound

    def row(self) -> tuple[str, str, str, str]:
        """For a table: what, measured, must be, holds."""
        measured = "-" if self.measured is None else f"{self.measured:.3f}{self.unit}"
        sign = "≤" if self.at_most else "≥"
        return self.what, measured, f"{sign} {self.bound:g}{self.unit}", "yes" if self.holds else "NO"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"holds": self.holds}


def interleave(modes: Sequence[str], rounds: int, measure: Callable[[str], Sample]) -> dict[str, list[Sample]]:
    """Samples of every mode, taken in turns (A B A B), so that a drift of the machine falls on all alike."""
    samples: dict[str, list[Sample]] = {mode: [] for mode in modes}
    for _ in range(rounds):
        for mode in modes:
            samples[mode].append(measure(mode))
    return samples


def run_sample(module: str, spec: dict[str, Any], *, timeout_s: float) -> Sample:
    """One sample in a process of its own; see `actoffload.report.environment.run_worker`."""
    return run_worker(module, spec, limit_s=timeout_s, cwd=ROOT)


def middle(samples: Iterable[Sample], *keys: str) -> float:
    """The median of a number that every sample has, by its keys from the outside in."""

    def number(sample: Any) -> float:
        for key in keys:
            sample = sample[key]
        return float(sample)

    return float(median(number(sample) for sample in samples))


def failures(samples: dict[str, list[Sample]]) -> list[str]:
    """The names of those of which a sample failed."""
    return [name for name, taken in samples.items() if any("error" in sample for sample in taken)]


def environment() -> dict[str, Any]:
    """The machine and the software. No host name, no path."""
    return describe_environment(ROOT)


def results_folder(*, keep: bool = True) -> Path:
    """Where results go: ``$OUT`` where that is set, else ``benchmarks/results``, or ``build`` for those not to keep."""
    folder = Path(os.environ.get("OUT") or (RESULTS if keep else ROOT / "build" / "results"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_results(path: Path, payload: dict[str, Any]) -> None:
    """Write ``payload`` as JSON in one step, so that a run that is killed leaves the last whole file."""
    write_json(path, payload)


def keep_samples(target: Path, payload: dict[str, Any], samples: dict[str, list[Sample]]) -> None:
    """Take the samples into ``payload`` and write it: after each round, what there is."""
    payload["samples"] = samples
    write_results(target, payload)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; the first column is left-aligned, the others right-aligned."""
    lines = [
        "| " + " | ".join(columns) + " |",
        "| " + " | ".join(["---"] + ["---:"] * (len(columns) - 1)) + " |",
    ]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def bounds_table(bounds: Sequence[Bound]) -> str:
    """The bounds as a Markdown table."""
    return markdown_table(("bound", "measured", "must be", "holds"), [bound.row() for bound in bounds])


def mib(nbytes: float) -> str:
    """Bytes in MiB, for a table."""
    return f"{nbytes / 2**20:.0f} MiB"


def stamp() -> str:
    """Today, for the name of a result file."""
    return time.strftime("%Y-%m-%d", time.gmtime())


def head(benchmark: str, arguments: Sequence[str] | None, configuration: dict[str, Any], *, threads: int) -> Sample:
    """What every result begins with: the benchmark, the command, the environment and the configuration."""
    return {
        "benchmark": benchmark,
        "command": command_line(f"benchmarks.{benchmark}", arguments),
        "environment": environment() | {"torch_threads": threads},
        "configuration": configuration,
    }


def publish(
    name: str, payload: Sample, summarise: Callable[[Any], dict[str, Any]], render: Callable[[Any], str]
) -> int:
    """Write ``payload``, with its summary as a table where no sample failed; 1 when one did."""
    failed = any("error" in sample for taken in payload["samples"].values() for sample in taken)
    target = results_folder() / f"{name}_{stamp()}.json"
    if not failed:
        payload["summary"] = summarise(payload["samples"])
        table = render(payload["summary"])
        print(f"{table}\nFrom `benchmarks/results/{target.name}`.")
        target.with_suffix(".md").write_text(table, encoding="utf-8")
    write_results(target, payload)
    return 1 if failed else 0


def command_line(module: str, arguments: Sequence[str] | None) -> str:
    """The command that repeats this run; None stands for this process's arguments. ``DIR`` stands for other folders."""
    given = sys.argv[1:] if arguments is None else arguments
    named = [without_paths(argument, ROOT) for argument in given]
    return " ".join(["python", "-m", module, *("DIR" if name.startswith("/") else name for name in named)])
