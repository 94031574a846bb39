"""Default options on the CPU with a throttled disk, and a ``device_budget`` of 40 % against recomputing every block.

    python -m benchmarks.planner_cpu [--rounds N] [--steps N] [--speeds SPEED ...] [--path DIR] [--tiny]
    python -m benchmarks.planner_cpu --budgets
    python -m benchmarks.planner_cpu --virtual
    python -m benchmarks.planner_cpu --host

The disk's speed is measured first, then a fault engine slows it to a half, a quarter and a tenth of that. All samples
take their steps in turns with keeping everything. ``--budgets``: at the disk's own speed, with budgets of a fifth to
all of keep's peak. ``--virtual``: the cases of `tests.planner_cases`, against the best plan that is found for each.
``--host``: the steps of `tests.host_bound` with and without a look at what hooks take of the host.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from actoffload.analysis.bench import Rig
from actoffload.testing import simulated_device
from benchmarks import harness, turns, whole_steps
from benchmarks.harness import Row, Sample, Samples, mib, middle
from tests import host_bound, planner_cases
from tests.planner_rig import rigs

KEEP, RECOMPUTE = "keep", "recompute"
WARM_UP = 18
"""Steps that are not timed: two are recorded, five show how the first plan does, ten how the second one does."""
SPEEDS = {str(speed): speed for speed in (Fraction(1), Fraction(1, 2), Fraction(1, 4), Fraction(1, 10))}
WITH_BUDGET = ("1", "1/4")
"""The speeds of the disk at which there is a sample with a budget, too."""
BUDGET = 0.4
"""Share of what saved tensors take when all are kept."""
BUDGETS = (0.2, 0.4, 0.6, 0.8, 1.0)
PROBE_BLOCK, PROBE_BYTES, PROBE_S = 8 << 20, 1 << 30, 2.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the result file; 1 when a sample failed or a budget was not kept."""
    parser = whole_steps.make_parser(__doc__, "--speeds", SPEEDS, steps=6)
    parser.add_argument("--budgets", action="store_true", help="budgets of a fifth to all of keep's peak")
    parser.add_argument("--virtual", action="store_true", help="many cases in virtual time; nothing is measured")
    parser.add_argument("--host", action="store_true", help="a host that only just keeps up, in virtual time")
    options = parser.parse_args(arguments)
    if options.virtual:
        return virtual(arguments)
    if options.host:
        return host(arguments)
    return whole_steps.run("planner_cpu", parser, arguments, groups, judge)


def groups(options: argparse.Namespace) -> list[turns.Group]:
    """All samples in one group, after the disk's speed and what is saved were measured."""
    case = whole_steps.TINY if options.tiny else whole_steps.gpt(6, 512, 512, batch=4)
    if options.budgets and not options.tiny:
        case = whole_steps.gpt(4, 256, 256, batch=4)
    case |= {"warm_up": WARM_UP}  # of all: equal training takes equally many steps
    whole_bytes = baseline_bytes(case, options)
    budget = int(BUDGET * whole_bytes)
    group = {KEEP: case | {"mode": KEEP}, RECOMPUTE: case | {"mode": RECOMPUTE}}
    if options.budgets:
        for share in BUDGETS:
            limited = {"device_budget": int(share * whole_bytes)}
            group[f"budget {share:.0%}"] = case | {"mode": "default", "options": limited}
        options.speeds = []
    bytes_per_s = disk_bytes_per_s(options.path) if options.speeds else 0.0
    for name in options.speeds:
        bandwidth = None if SPEEDS[name] == 1 else float(SPEEDS[name]) * bytes_per_s
        planned = case | {"mode": "default", "bandwidth": bandwidth}
        group[f"default, disk × {name}"] = planned
        if name in WITH_BUDGET:
            group[f"budget {BUDGET:.0%}, disk × {name}"] = planned | {"options": {"device_budget": budget}}
    if options.tiny:
        group = {name: {**spec, "options": {"min_bytes": 0, **spec.get("options", {})}} for name, spec in group.items()}
    return [group]


def disk_bytes_per_s(path: str | None) -> float:
    """The slower of writing and reading through a spool."""
    with Rig([path or tempfile.gettempdir()], "posix", None, PROBE_BLOCK, PROBE_BYTES) as rig:
        return min(rig.measure("write", PROBE_S).bytes_per_s, rig.measure("read", PROBE_S).bytes_per_s)


def baseline_bytes(case: dict[str, Any], options: argparse.Namespace) -> int:
    """What saved tensors take at the peak when all are kept.

    Raises:
        RuntimeError: it could not be measured.
    """
    spec = {"device": "cpu", "dtype": "float32", "threads": whole_steps.THREADS, "path": options.path, **case}
    sample = harness.run_sample(
        turns.WORKER, spec | {"mode": "all", "steps": 1, "warm_up": 0}, timeout_s=whole_steps.LIMIT_S
    )
    if "error" in sample:
        raise RuntimeError(f"what is saved could not be measured: {sample['error']}")
    return int(sample["statistics"]["baseline_peak_bytes"])


def judge(samples: Samples) -> whole_steps.Verdict:
    """A row for each sample; budgets must be kept, and bits be the same."""
    summary = {name: summarise(taken, samples[KEEP], samples[RECOMPUTE]) for name, taken in samples.items()}
    right = all(row["identical"] and row["within_budget"] is not False for row in summary.values())
    return whole_steps.Verdict(summary=summary, table=render(summary), right=right)


def summarise(taken: list[Sample], keep: list[Sample], recompute: list[Sample]) -> Row:
    """Medians over the rounds, and ratios of steps in the same turn. Bytes and seconds."""
    row: Row = {
        "step_s": middle(taken, "median_step_s"),
        "ratio_to_keep": median(turns.ratios(taken, keep)),
        "ratio_to_recompute": median(turns.ratios(taken, recompute)),
        "identical": whole_steps.identical(taken, keep),
        "written_bytes": None,
        "gone_share": None,
        "within_budget": None,
    }
    if "statistics" in taken[0]:
        gone = [
            (other["steady_peak_rss_bytes"] - one["steady_peak_rss_bytes"]) / one["statistics"]["baseline_peak_bytes"]
            for one, other in zip(taken, keep, strict=True)
        ]
        row |= {"written_bytes": middle(taken, "written_bytes_per_step"), "gone_share": median(gone)}
    budget = (taken[0].get("options") or {}).get("device_budget")
    if budget is not None:
        row["within_budget"] = all(one["statistics"]["resident_peak_bytes"] <= budget for one in taken)
    return row


def render(summary: dict[str, Row]) -> str:
    """The summary as a Markdown table."""
    columns: dict[str, Callable[[Row], object]] = {
        "step": lambda row: f"{row['step_s']:.3f} s",
        "× keep": lambda row: f"{row['ratio_to_keep']:.2f}",
        "× recompute": lambda row: f"{row['ratio_to_recompute']:.2f}",
        "gone from peak RSS": lambda row: None if row["gone_share"] is None else f"{row['gone_share']:.0%}",
        "written": lambda row: mib(row["written_bytes"]),
        "bits equal": lambda row: harness.yes(row["identical"]),
    }
    return harness.table_of("one GPT step", summary, columns)


# -- in virtual time --------------------------------------------------------------------------------------------------


def virtual(arguments: Sequence[str] | None) -> int:
    """Run every case, print, write the result file; 1 where one does not hold."""
    results = harness.Results("planner_cpu", arguments, {"soon": planner_cases.SOON}, variant="virtual")
    rows: dict[str, Row] = {}
    for model, scenario, limited in planner_cases.names():
        name = f"{model}, {scenario}{', budget' if limited else ''}"
        with (
            tempfile.TemporaryDirectory() as folder,
            pytest.MonkeyPatch.context() as patch,
            rigs(Path(folder), patch) as make_rig,
        ):
            rows[name] = planner_cases.run(functools.partial(make_rig, announce="none"), model, scenario, limited)
        results.write(cases=rows)
    columns: dict[str, Callable[[Row], object]] = {
        "step × best": lambda row: f"{row['late']:.3f}",
        "peak × best or budget": lambda row: f"{row['high']:.3f}",
        "steps until near": lambda row: row["soon_steps"],
        "plans": lambda row: row["plans"],
        "at rest": lambda row: row["plans_at_rest"],
        "holds": lambda row: harness.yes(row["holds"]),
    }
    results.finish(harness.table_of("200 steps", rows, columns))
    return 0 if all(row["holds"] for row in rows.values()) else 1


def host(arguments: Sequence[str] | None) -> int:
    """Take steps with a host that only just keeps up, and one that runs ahead; 1 where they are 2 % above keep's."""
    device = simulated_device.install()
    results = harness.Results("planner_cpu", arguments, {"settled": host_bound.SETTLED}, variant="host")
    rows: dict[str, Row] = {}
    for name, launch in host_bound.LAUNCHES.items():
        for watched in (False, True):
            title = f"{name}{'' if watched else ', not watched'}"
            rows[title] = host_bound.run(device, launch, watched=watched)
    results.write(cases=rows)
    columns: dict[str, Callable[[Row], object]] = {
        "keep": lambda row: f"{1e3 * row['keep_s']:.2f} ms",
        "longest step × keep": lambda row: f"{row['late']:.3f}",
        "moved": lambda row: f"{row['moved_share']:.0%}",
    }
    results.finish(harness.table_of("from step 12 on", rows, columns))
    return 0 if all(row["late"] <= 1.02 for name, row in rows.items() if "not watched" not in name) else 1


if __name__ == "__main__":
    raise SystemExit(main())
