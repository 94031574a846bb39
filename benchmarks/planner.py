"""Default options in virtual time: how near plans come to the best one, and a host that only just keeps up.

    python -m benchmarks.planner [--part cases|host|planners]

``cases``: those of `tests.planner_cases`, against the best plan that is found for each. ``host``: the steps of
`tests.host_bound` with and without a look at what hooks take of the host. ``planners``: greedy, auto and SSDTrain's cut
on recorded steps in the simulator, and on the models of ``cases`` in virtual time. Nothing depends on the machine.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from actoffload import Profile
from actoffload.planning.profile import Link
from actoffload.planning.search import Limits, Search, plan
from actoffload.planning.simulator import run, simulate
from actoffload.testing import simulated_device
from benchmarks import harness, ssdtrain
from benchmarks.harness import Row
from tests import host_bound, planner_cases
from tests.planner_cases import BUDGET
from tests.planner_rig import MakeRig, Rig, rigs


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
    results.write(cases=rows)
    columns: dict[str, Callable[[Row], object]] = {
        "keep": lambda row: f"{1e3 * row['keep_s']:.2f} ms",
        "longest step × keep": lambda row: f"{row['late']:.3f}",
        "moved": lambda row: f"{row['moved_share']:.0%}",
    }
    results.finish(harness.table_of("from step 12 on", rows, columns))
    return 0 if all(row["late"] <= 1.02 for name, row in rows.items() if "not watched" not in name) else 1


PLANNERS = ("greedy", "auto", "SSDTrain's cut")
LINKS = (0.5, 1.0, 2.0, 4.0)
"""So many times what a step saves passes them while it computes."""


def planners(arguments: Sequence[str] | None) -> int:
    """Compare the planner with its baselines; 1 where one of them wins by more than 2 %."""
    results = harness.Results("planner", arguments, {"links": LINKS, "budget": BUDGET}, variant="planners")
    rows = _recorded() | _virtual()
    wins = {name: sum(_wins(row, name) for row in rows.values()) for name in PLANNERS}
    beaten = [name for name, row in rows.items() if not _wins(row, "auto", 1.02)]
    results.write(cases=rows, wins=wins, auto_beaten_by_2_percent=beaten)
    columns: dict[str, Callable[[Row], object]] = {
        name: functools.partial(lambda name, row: "{step:.3f}, {peak:.3f}".format(**row[name]), name)
        for name in PLANNERS
    }
    table = harness.table_of("step and peak as multiples of keep's", rows, columns)
    counts = ", ".join(f"{name} {count}" for name, count in wins.items())
    results.finish(f"{table}\n\nWithin 0.5 % of the best of the three in {len(rows)} cases: {counts}.")
    return 1 if beaten else 0


def _wins(row: Row, name: str, factor: float = 1.005) -> bool:
    """Whether it is as good as the best: the step under a budget, else the peak of a step that is not longer."""
    valid = {n: seen for n in PLANNERS if (seen := row[n])["valid"]}
    key = "step" if row["budget"] else "peak"
    return name in valid and valid[name][key] <= factor * min(seen[key] for seen in valid.values())


def _seen(step: float, peak: float, budget: float | None) -> Row:
    return {"step": step, "peak": peak, "valid": step <= 1.01 if budget is None else peak <= budget * (1 + 1e-9)}


def _recorded() -> dict[str, Row]:
    """The recorded steps in the simulator, each under what is planned for it."""
    rows: dict[str, Row] = {}
    for file in sorted((harness.ROOT / "tests" / "recorded").glob("*.json")):
        recorded = Profile.load(file)
        keep = simulate(recorded, detail=False)
        for speed, share in itertools.product(LINKS, (None, BUDGET)):
            rate = speed * recorded.saved_bytes / recorded.step_s
            profile = recorded.with_links(disk=Link(write_bytes_per_s=rate, read_bytes_per_s=rate))
            budget = None if share is None else int(share * keep.peak_bytes)
            limits = Limits(device_budget=budget)
            search = Search(profile, limits)
            window = replace(limits, pending_bytes=profile.saved_bytes // 4)
            found = {
                "greedy": run(search.workload, search.offload(search.movable()), window),
                "auto": simulate(profile, plan(profile, limits), limits, detail=False),
                "SSDTrain's cut": ssdtrain.predict(profile, limits),
            }
            rows[f"{file.stem}, link × {speed:g}{'' if share is None else f', budget {share:.0%}'}"] = {
                "budget": share
            } | {
                name: _seen(one.step_s / keep.step_s, one.peak_bytes / keep.peak_bytes, share)
                for name, one in found.items()
            }
    return rows


def _virtual() -> dict[str, Row]:
    """The real offloader in virtual time: the last of twelve steps."""
    rows: dict[str, Row] = {}
    for (model, work), disk, share in itertools.product(
        planner_cases.MODELS.items(), (planner_cases.FAST, planner_cases.SLOW), (None, BUDGET)
    ):
        with (
            tempfile.TemporaryDirectory() as folder,
            pytest.MonkeyPatch.context() as patch,
            rigs(Path(folder), patch) as make_rig,
        ):
            rate = disk * work.saved_bytes / work.step_s
            budget = None if share is None else int(share * work.saved_bytes)
            options = {"bytes_per_s": rate, "sizes": work.blocks, "device_budget": budget, "announce": "none"}

            def last(policy: object, make_rig: MakeRig = make_rig, options: Row = options) -> tuple[Rig, float, int]:
                rig = make_rig(**options | {"policy": policy})
                rig.steps(12)
                return rig, rig.seconds[-1], rig.peaks[-1]

            keep = last("keep")
            plain = make_rig(**options | {"bytes_per_s": 1e12, "device_budget": 1 << 40, "policy": "auto"})
            plain.steps(3)
            profile = plain.offloader.profile
            assert profile is not None, "three steps make one"
            link = Link(write_bytes_per_s=rate, read_bytes_per_s=rate)
            search = Search(profile.with_links(disk=link), Limits(device_budget=budget, tiers=("nvme",)))
            choice = ssdtrain.choose(search)
            fits = search.fits(choice) or budget is None
            found = {"greedy": last("greedy"), "auto": last("auto")}
            found["SSDTrain's cut"] = last(search.finish(choice)) if fits else found["greedy"]
            rows[f"{model}, virtual, disk × {disk:g}{'' if share is None else f', budget {share:.0%}'}"] = {
                "budget": share
            } | {name: _seen(step_s / keep[1], peak / keep[2], share) for name, (_, step_s, peak) in found.items()}
    return rows


PARTS = {"cases": cases, "host": host, "planners": planners}

if __name__ == "__main__":
    raise SystemExit(main())
