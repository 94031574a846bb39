"""What a trace costs: whole training steps on the CPU with and without one, in turns.

    python -m benchmarks.trace_cpu [--rounds N] [--steps N] [--cases NAME ...] [--path DIR] [--tiny]

The large GPT is the 8-layer, width-512 one with 8 × 512 tokens; the small one, 4 layers of width 128, has half as many
events in a step that is twenty times shorter. No plan is made, so that both move the same. Beside the time of a step
stands the processor time of all threads, which what other programs do changes less.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import harness, turns, whole_steps
from benchmarks.harness import Bound, Row, Samples, middle

OFF, ON = "off", "on"
BOUND = 1.02
CASES = {"large": (8, 512, 512), "small": (4, 128, 128)}
"""Layers, width and sequence."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the result files; 1 when a sample failed or a bound does not hold."""
    parser = whole_steps.make_parser(__doc__, "--cases", CASES, steps=8)
    with tempfile.TemporaryDirectory() as directory:
        return whole_steps.run("trace_cpu", parser, arguments, partial(groups, Path(directory)), judge)


def groups(directory: Path, options: argparse.Namespace) -> list[turns.Group]:
    """Both samples of a case take their steps in turns."""
    made: list[turns.Group] = []
    for case in options.cases:
        work = whole_steps.TINY if options.tiny else whole_steps.gpt(*CASES[case])
        common: dict[str, Any] = {"policy": "greedy", "min_bytes": 0 if options.tiny else None}
        traced = common | {"trace": os.fspath(directory / f"{case}.json")}
        modes = {OFF: common, ON: traced}
        made.append({f"{case}/{name}": work | {"mode": "nvme", "options": given} for name, given in modes.items()})
    return made


def judge(samples: Samples) -> whole_steps.Verdict:
    """A row and a bound for each case."""
    summary: dict[str, Row] = {}
    for case in dict.fromkeys(name.rpartition("/")[0] for name in samples):
        on, off = samples[f"{case}/{ON}"], samples[f"{case}/{OFF}"]
        cpu = [one["cpu_s_per_step"] / other["cpu_s_per_step"] for one, other in zip(on, off, strict=True)]
        summary[case] = {
            "step_s": middle(off, "median_step_s"),
            "ratio": median(ratios := turns.ratios(on, off)),
            "ratio_of_rounds": ratios,
            "cpu_ratio": median(cpu),
            "cpu_ratio_of_rounds": cpu,
            "others_cpu_share": max(sample["others_cpu_share"] for sample in [*on, *off]),
            "identical": whole_steps.identical(on, off),
        }
    columns = {
        "step time, traced / not": lambda row: turns.spread(row["ratio_of_rounds"]),
        "processor time, traced / not": lambda row: turns.spread(row["cpu_ratio_of_rounds"]),
        "step, s": lambda row: f"{row['step_s']:.3f}",
        "bit-identical": lambda row: harness.yes(row["identical"]),
    }
    bounds = [
        Bound(what=f"{case}: step time", measured=row["ratio"], bound=BOUND, unit=" ×") for case, row in summary.items()
    ]
    right = all(row["identical"] for row in summary.values())
    table = harness.table_of("two threads", summary, columns)
    return whole_steps.Verdict(summary=summary, table=table, bounds=bounds, right=right)


if __name__ == "__main__":
    raise SystemExit(main())
