"""What every benchmark shares: its arguments, samples in turns, bounds, tables, and the files of its results."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from statistics import median
from typing import Any

from actoffload.tools.environment import describe_environment, without_paths, write_json
from actoffload.tools.workers import run_worker, take_turns, turn_ratios

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Sample = dict[str, Any]
Row = dict[str, Any]
"""What the samples of one thing say, by name."""
Samples = dict[str, list[Sample]]
"""Samples by the name of what was measured, in the order of the rounds."""


def make_parser(description: str | None, *, rounds: int | None = None, tiny: bool = False) -> argparse.ArgumentParser:
    """Arguments that benchmarks share: ``--path``, and where asked for ``--rounds`` and ``--tiny``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", help="directory of the spool")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="samples of each kind")
    if tiny:
        parser.add_argument("--tiny", action="store_true", help="tiny sizes: only to see that it runs")
    return parser


# -- samples ----------------------------------------------------------------------------------------------------------


def run_sample(module: str, spec: dict[str, Any], *, timeout_s: float) -> Sample:
    """One sample in a process of its own; see `actoffload.tools.workers.run_worker`."""
    return run_worker(module, spec, limit_s=timeout_s, cwd=ROOT)


def middle(samples: Iterable[Mapping[str, Any]], *keys: str) -> float:
    """The median of a number that every sample has, by its keys from the outside in."""

    def number(sample: Any) -> float:
        return float(reduce(getitem, keys, sample))

    return median(map(number, samples))


WORKER = "benchmarks.worker"
Group = Mapping[str, dict[str, Any]]
"""What `benchmarks.worker` is told, by the name of each sample; ``steps`` of the first is that of all."""


def take_rounds(
    groups: Iterable[Group], rounds: int, *, limit_s: float, after_round: Callable[[Samples], object]
) -> Samples:
    """So many samples of each, those of a group in turns, one group after the other; each is printed when it is there.

    Each is a process of its own, so that its peak memory is its own as well, but a step of one mode lies seconds, not
    minutes, from the same step of another: what a noisy machine does meanwhile falls on both.

    Args:
        groups: as `take_turns` takes them; no name twice.
        rounds: samples of each, in processes of their own.
        limit_s: seconds after which one is stopped, for what comes before its first step and for each step.
        after_round: given all samples so far: a run of an hour that is killed should leave what it has measured.
    """
    groups = list(groups)
    samples: Samples = {name: [] for group in groups for name in group}
    for _ in range(rounds):
        for group in groups:
            steps = next(iter(group.values()))["steps"]
            for name, sample in take_turns(WORKER, group, steps, limit_s=limit_s, cwd=ROOT).items():
                samples[name].append(sample)
                print(f"{name}: {sample.get('error') or sample.get('median_step_s')}", flush=True)
        after_round(samples)
    return samples


def ratios(taken: Iterable[Sample], others: Iterable[Sample]) -> list[float]:
    """Step time of the first over the second's, for each round: the median of the quotients within its turns.

    Turns take out what changes from step to step, not what a process has for life, such as where its pages lie: each
    round is one measurement, and how far they lie apart says how good it is.
    """
    return [median(turn_ratios(one["step_s"], other["step_s"])) for one, other in zip(taken, others, strict=True)]


def identical(*samples: Iterable[Sample]) -> bool:
    """Whether all training went the same way, bit for bit."""
    computed = ("losses", "first_gradients", "last_parameters")
    return len({str([sample[name] for name in computed]) for taken in samples for sample in taken}) == 1


# -- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """One thing that must hold: ``measured`` at most (or at least) ``bound``; None where it could not be measured."""

    what: str
    measured: float | None
    bound: float
    _: KW_ONLY
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


class Results:
    """The result file (JSON) of one run and the Markdown table beside it, in ``$OUT`` or ``benchmarks/results``.

    Args:
        benchmark: its name.
        arguments: what ``main`` was given; None stands for this process's arguments.
        configuration: what was measured, for the file.
        variant: what tells it from other results of the benchmark on the same day.
        keep: False for a result not to keep, which lies in ``build/results`` without ``$OUT``.
    """

    def __init__(
        self,
        benchmark: str,
        arguments: Sequence[str] | None,
        configuration: Mapping[str, Any],
        *,
        variant: str = "",
        keep: bool = True,
    ) -> None:
        folder = Path(os.environ.get("OUT") or (RESULTS if keep else ROOT / "build" / "results"))
        folder.mkdir(parents=True, exist_ok=True)
        day = time.strftime("%Y-%m-%d", time.gmtime())
        self.file = folder / f"{'_'.join(filter(None, (benchmark, variant, day)))}.json"
        self.payload: dict[str, Any] = {
            "benchmark": benchmark,
            "command": command_line(f"benchmarks.{benchmark}", arguments),
            "environment": describe_environment(),
            "configuration": {name: value for name, value in configuration.items() if name != "path"},
        }

    def write(self, **more: Any) -> None:
        """Write the file with all that is known so far, in one step: a run that is killed leaves the last whole one."""
        self.payload |= more
        write_json(self.file, self.payload)

    def finish(self, table: str, bounds: Sequence[Bound] = (), **more: Any) -> bool:
        """Write and print the table and the bounds; whether all of them hold."""
        self.write(bounds=[asdict(bound) | {"holds": bound.holds} for bound in bounds], **more)
        parts = [table]
        if bounds:
            columns = ("bound", "measured", "must be", "holds")
            parts.append(markdown_table(columns, [bound.row() for bound in bounds]))
        text = "\n".join(parts)
        print(f"\n{text}\nFrom `{self.file.name}`.")
        self.file.with_suffix(".md").write_text(text, encoding="utf-8")
        return all(bound.holds for bound in bounds)


def command_line(module: str, arguments: Sequence[str] | None) -> str:
    """The command that repeats this run, with ``DIR`` for folders outside the repository."""
    given = sys.argv[1:] if arguments is None else arguments
    named = [without_paths(argument) for argument in given]
    return " ".join(["python", "-m", module, *("DIR" if name.startswith("/") else name for name in named)])


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; the first column is left-aligned, the others right-aligned; None is a dash."""
    lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
    return "".join("| " + " | ".join("-" if cell is None else str(cell) for cell in line) + " |\n" for line in lines)


def table_of(title: str, rows: Mapping[str, Row], columns: Mapping[str, Callable[[Row], object]]) -> str:
    """A Markdown table of ``rows`` by name; what each column shows of a row is told by its heading."""
    cells = ((name, *(show(row) for show in columns.values())) for name, row in rows.items())
    return markdown_table((title, *columns), cells)


def number(key: str, unit: float, digits: int) -> Callable[[Row], object]:
    """What a column shows of a number in a row."""
    return lambda row: None if row.get(key) is None else f"{row[key] / unit:.{digits}f}"


def mib(nbytes: float | None) -> str:
    """Bytes in MiB, for a table."""
    return "-" if nbytes is None else f"{nbytes / 2**20:.0f} MiB"


def yes(holds: object) -> str:
    """For a table: what must be so stands out where it is not."""
    return "yes" if holds else "NO"
