"""Peers on the CPU: the same GPT steps with PyTorch's own means and the library.

    python -m benchmarks.peers_cpu [--rounds N] [--steps N] [--modes NAME ...] [--path DIR] [--tiny]

The GPT of `benchmarks.e2e_cpu`. ``torch.save`` stands for the hooks of PyTorch's tutorial on saved tensors,
``save_on_cpu`` for PyTorch's own context, which copies nothing on CPU tensors and so shows how far the same work as
``keep``'s lies apart, ``recompute`` for ``torch.utils.checkpoint`` around every block, ``default`` and ``all`` for the
library. TRL's ``OffloadActivations`` needs an accelerator: `benchmarks.gpu` has it. All modes take their steps in
turns, so that all these processes are alive at once: 10 GB.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import median

from benchmarks import e2e_cpu, harness, turns, whole_steps
from benchmarks.harness import Bound, Row, Sample, Samples, mib, middle
from benchmarks.modes import MODES

KEEP, OURS = "keep", "default"
NAMES = (KEEP, OURS, "torch.save", "all", "recompute", "save_on_cpu")
"""In the order of their turns: those that are compared with each other follow each other."""
BOUNDS = {"torch.save": 1.8}
"""How many times the step time of the library's default that of the peer that writes to disk must be, at least."""
COUNTED = ("written_bytes_per_step", "read_bytes_per_step", "wait_s_per_step")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the result files; 1 when a sample failed, ours differ in a bit or a bound does not hold."""
    parser = whole_steps.make_parser(__doc__, "--modes", NAMES)
    return whole_steps.run("peers_cpu", parser, arguments, groups, judge, may_fail=NAMES[1:])


def groups(options: argparse.Namespace) -> list[turns.Group]:
    """All modes in one group; ``keep`` always."""
    case = e2e_cpu.cases(options.tiny)[e2e_cpu.HEAD]
    return [{name: case | {"mode": name} for name in NAMES if name == KEEP or name in options.modes}]


def judge(samples: Samples) -> whole_steps.Verdict:
    """A row for each mode. That a peer computes other bits is its own affair, and in the table."""
    summary = summarise(samples)
    right = not any(MODES[name].ours and row.get("identical") is False for name, row in summary.items())
    return whole_steps.Verdict(summary=summary, table=render(summary), bounds=bounds(summary), right=right)


def summarise(samples: Samples) -> dict[str, Row]:
    """The medians of each mode against ``keep``; a text under ``why`` for one that was not measured."""
    keep = samples[KEEP]
    static = middle(keep, "static_rss_bytes")
    ours = samples.get(OURS, [])
    measured = bool(ours) and not any(map(_missing, ours))
    summary: dict[str, Row] = {}
    for name, taken in samples.items():
        missing = list(filter(None, map(_missing, taken)))
        if missing:
            summary[name] = {"why": missing[0]}
            continue
        to_ours = turns.ratios(taken, ours) if measured else None
        summary[name] = {
            "step_s": middle(taken, "median_step_s"),
            "ratio": median(ratios := turns.ratios(taken, keep)),
            "ratio_of_rounds": ratios,
            "to_ours": to_ours and median(to_ours),
            "to_ours_of_rounds": to_ours,
            "above_static_bytes": middle(taken, "peak_rss_bytes") - static,
            "identical": whole_steps.identical(taken, keep),
            "others_cpu_share": max(sample["others_cpu_share"] for sample in taken),
            **{key: middle(taken, key) if key in taken[0] else None for key in COUNTED},
        }
    return summary


def _missing(sample: Sample) -> str | None:
    """Why it was not measured."""
    return sample.get("unavailable") or sample.get("error")


def bounds(summary: dict[str, Row]) -> list[Bound]:
    """How many times faster the library's default is than the peer that writes to disk."""
    return [
        Bound(what=f"step time of {peer} hooks / ours", measured=summary[peer]["to_ours"], bound=bound, at_most=False)
        for peer, bound in BOUNDS.items()
        if peer in summary and "why" not in summary[peer]
    ]


def render(summary: dict[str, Row]) -> str:
    """The summary as a Markdown table, a row for each mode."""
    columns: dict[str, Callable[[Row], object]] = {
        "step time / keep's": lambda row: turns.spread(row["ratio_of_rounds"]),
        f"/ {OURS}'s": lambda row: row["to_ours_of_rounds"] and turns.spread(row["to_ours_of_rounds"]),
        "step, s": lambda row: f"{row['step_s']:.2f}",
        "peak RSS above keep's static": lambda row: mib(row["above_static_bytes"]),
        "written a step": lambda row: mib(row["written_bytes_per_step"]),
        "read a step": lambda row: mib(row["read_bytes_per_step"]),
        "waits a step, s": lambda row: None if row["wait_s_per_step"] is None else f"{row['wait_s_per_step']:.3f}",
        "bit-identical": lambda row: harness.yes(row["identical"]),
    }
    measured = {name: row for name, row in summary.items() if "why" not in row}
    missing = [f"\nNot measured: {name}: {row['why']}\n" for name, row in summary.items() if "why" in row]
    return harness.table_of("8-layer GPT, width 512, two threads", measured, columns) + "".join(missing)


if __name__ == "__main__":
    raise SystemExit(main())
