"""Default options in virtual time: how near plans come to the best one, and a host that only just keeps up.

    python -m benchmarks.planner [--part cases|host]

``cases``: those of `tests.planner_cases`, against the best plan that is found for each. ``host``: the steps of
`tests.host_bound` with and without a look at what hooks take of the host. Nothing depends on the machine.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from actoffload.testing import simulated_device
from benchmarks import harness
from benchmarks.harness import Row
from tests import host_bound, planner_cases
from tests.planner_rig import rigs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write the result file; return 1 where something does not hold."""
    parser = harness.make_parser(__doc__)
    # One in a process: the simulated device has to be there before the first backward.
    parser.add_argument("--part", choices=list(PARTS), default="cases")
    return PARTS[parser.parse_args(arguments).part](arguments)


def cases(arguments: Sequence[str] | None) -> int:
    """Run every case, print, write the result file; 1 where one does not hold."""
    results = harness.Results("planner", arguments, {"soon": planner_cases.SOON}, variant="cases")
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
    results = harness.Results("planner", arguments, {"settled": host_bound.SETTLED}, variant="host")
    rows: dict[str, Row] = {}
    for name, launch in host_bound.LAUNCHES.items():
        for watched in (False, True):
            title = f"{name}{'' if watched else ', not watched'}"
            rows[title] = host_bound.run(device, launch, watched=watched)
    for name, host_s in (("measured", host_bound.HOST_S), ("measured, ahead without hooks", host_bound.HOST_S / 5)):
        rows[name] = host_bound.run_measured(device, host_s)
    for row in rows.values():
        del row["watched"]  # no plain data
    results.write(cases=rows)
    columns: dict[str, Callable[[Row], object]] = {
        "keep": lambda row: f"{1e3 * row['keep_s']:.2f} ms",
        "longest step × keep": lambda row: f"{row['late']:.3f}",
        "moved": lambda row: f"{row['moved_share']:.0%}",
        "steps above 1.1 × keep": lambda row: row["slow_steps"],
        "steps without hooks": lambda row: row["unhooked"],
    }
    results.finish(harness.table_of("from step 12 on", rows, columns))
    return 0 if all(row["late"] <= 1.02 for name, row in rows.items() if "not watched" not in name) else 1


PARTS = {"cases": cases, "host": host}

if __name__ == "__main__":
    raise SystemExit(main())
