"""What the compiled code is worth: whole steps with ``ACTOFFLOAD_NATIVE`` at its default and without it, in turns.

    python -m benchmarks.native_cpu [--rounds N] [--steps N] [--cases NAME ...] [--path DIR] [--tiny]

A GPT of 8 layers of width 512 and one of 4 layers of width 128, whose steps take less than 0.3 s, with 8 sequences.
Each with default options and under a plan that keeps everything, compared with keeping everything in the same memory.
"Allocator only" has the CPU allocator and no compiled hooks.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median

from benchmarks import harness, turns, whole_steps
from benchmarks.harness import Bound, Row, Samples

REFERENCE = "keep, same memory"
SWITCHES = {"native": "1", "allocator only": "cpu_allocator", "nothing native": "0"}
MODES = {"default": tuple(SWITCHES), "plan that keeps": ("native", "allocator only")}
"""Which switches are measured for a mode."""
CASES = {"gpt 8x512": whole_steps.gpt(8, 512, 512), "gpt 4x128": whole_steps.gpt(4, 128, 256)}
RATIO_BOUNDS = {"gpt 8x512": 1.05, "gpt 4x128": 1.10}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the result files; 1 when a sample failed or a bound does not hold."""
    parser = whole_steps.make_parser(__doc__, "--cases", CASES)
    return whole_steps.run("native_cpu", parser, arguments, groups, judge)


def groups(options: argparse.Namespace) -> list[turns.Group]:
    """All samples of a case are taken in turns."""
    found: list[turns.Group] = []
    for name in options.cases:
        case = whole_steps.TINY if options.tiny else CASES[name]
        group = {f"{name}/{REFERENCE}": case | {"mode": REFERENCE}}
        for mode, switches in MODES.items():
            for switch in switches:
                environment = {"ACTOFFLOAD_NATIVE": SWITCHES[switch]}
                group[f"{name}/{mode}/{switch}"] = case | {"mode": mode, "environment": environment}
        found.append(group)
    return found


def judge(samples: Samples) -> whole_steps.Verdict:
    """A row for each switch, beside the reference of its case."""
    summary: dict[str, Row] = {}
    for name, taken in samples.items():
        case = name.split("/")[0]
        reference = samples[f"{case}/{REFERENCE}"]
        if taken is not reference:
            summary[name] = {
                "step_s": harness.middle(taken, "median_step_s"),
                "ratios": turns.ratios(taken, reference),
                "identical": whole_steps.identical(taken, reference),
            }
    bounds = [
        Bound(what=f"{case}, default: step time / {REFERENCE}", measured=median(row["ratios"]), bound=bound)
        for case, bound in RATIO_BOUNDS.items()
        if (row := summary.get(f"{case}/default/native")) is not None
    ]
    columns = ("two threads", "step, s", f"step time / {REFERENCE}", "bit-identical")
    rows = [
        (name, f"{row['step_s']:.3f}", turns.spread(row["ratios"]), harness.yes(row["identical"]))
        for name, row in summary.items()
    ]
    right = all(row["identical"] for row in summary.values())
    table = harness.markdown_table(columns, rows)
    return whole_steps.Verdict(summary=summary, table=table, bounds=bounds, right=right)


if __name__ == "__main__":
    raise SystemExit(main())
