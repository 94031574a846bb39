"""Default options in virtual time: the cases of `tests.planner_cases`, against the best plan that is found for each.

    python -m benchmarks.planner

Nothing depends on the machine.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import Row
from tests import planner_cases
from tests.planner_rig import rigs

COLUMNS: dict[str, Callable[[Row], object]] = {
    "step × best": harness.number("late", 1, 3),
    "peak × best or budget": harness.number("high", 1, 3),
    "steps until near": lambda row: row["soon_steps"],
    "plans": lambda row: row["plans"],
    "at rest": lambda row: row["plans_at_rest"],
    "holds": lambda row: harness.yes(row["holds"]),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every case, print, write the result file; 1 where one does not hold."""
    harness.make_parser(__doc__).parse_args(arguments)
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
    results.finish(harness.table_of("200 steps", rows, COLUMNS))
    return 0 if all(row["holds"] for row in rows.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
