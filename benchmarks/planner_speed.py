"""How long a plan takes: transformers on paper with up to 2,000 saved storages, every planner, four kinds of limits.

    python -m benchmarks.planner_speed [--rounds N] [--layers N ...]

Prints and records, for each planner, the median time of a plan, that of the slowest kind (the median over its rounds,
as the machine's speed drifts), and the longest of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

from actoffload.errors import BudgetError
from actoffload.planning.planners import PLANNERS, Limits, make_planner
from actoffload.planning.profile import Profile
from actoffload.planning.simulator import simulate
from benchmarks import harness
from benchmarks.harness import Bound, Row, Sample
from tests.profiles import Accelerator, link, transformer_profile

LAYERS = (25, 250)
LIMIT_S = 1.0
TIERED = Accelerator(name="host and disk", flops=140e12, host=link(20), disk=link(3, 6))
DIRECT = Accelerator(name="disk", flops=140e12, host=None, disk=link(6))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the result file; 1 when a kind of plan of ``auto`` for the largest profile is too slow."""
    parser = harness.make_parser(__doc__, rounds=9)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS, help="sizes of the models")
    options = parser.parse_args(arguments)
    results = harness.Results("planner_speed", arguments, vars(options))
    profiles = [
        (accelerator.name, transformer_profile(8192, layers, 1, accelerator=accelerator))
        for layers in options.layers
        for accelerator in (TIERED, DIRECT)
    ]
    samples = [
        {"round": number, **sample}
        for number in range(options.rounds)
        for links, profile in profiles
        for sample in measure(profile, links)
    ]
    summary = summarise(samples)
    columns = ("median s", "slowest kind s", "longest s")
    rows = [(name, *(f"{row[column]:.3f}" for column in columns)) for name, row in summary.items()]
    largest = max(sample["storages"] for sample in samples)
    slowest_s = summary[f"{largest}, auto"]["slowest kind s"]
    bound = Bound(what=f"auto, {largest} storages: slowest kind", measured=slowest_s, bound=LIMIT_S, unit=" s")
    table = harness.markdown_table(("storages, planner", *columns), rows)
    return 0 if results.finish(table, [bound], samples=samples) else 1


def measure(profile: Profile, links: str) -> list[Sample]:
    """One plan of each planner under each kind of limits, and one simulated step."""
    peak = profile.baseline_peak_bytes
    kinds = {
        "no budget": Limits(),
        "5 % slower": Limits(max_slowdown=0.05),
        "a quarter": Limits(device_budget=peak // 4),
        "a twentieth": Limits(device_budget=peak // 20),
    }

    def sample(planner: str, kind: str, work: Callable[[], dict[str, Any]]) -> Sample:
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        found = work()
        cost = {"seconds": time.perf_counter() - begin_s, "processor_s": time.process_time() - begin_cpu_s}
        return {"storages": len(profile.storages), "links": links, "planner": planner, "limits": kind, **found, **cost}

    def simulated() -> dict[str, Any]:
        simulate(profile, None, detail=False)
        return {}

    def planned(name: str, limits: Limits) -> dict[str, Any]:
        try:
            plan = make_planner(name).plan(profile, limits)
        except BudgetError:
            return {"step": None, "peak": None}
        step_s, peak_bytes = plan.predicted_step_s or 0.0, plan.predicted_peak_bytes or 0
        return {"step": step_s / profile.step_s, "peak": peak_bytes / peak}

    samples = [sample("(one simulated step)", "none", simulated)]
    for kind, limits in kinds.items():
        samples += [sample(name, kind, partial(planned, name, limits)) for name in PLANNERS]
    return samples


def summarise(samples: Sequence[Sample]) -> dict[str, Row]:
    """A row for each planner and size. Seconds."""
    summary: dict[str, Row] = {}
    for storages, planner in sorted({(sample["storages"], sample["planner"]) for sample in samples}):
        kinds: dict[tuple[str, str], list[float]] = {}
        for sample in samples:
            if (sample["storages"], sample["planner"]) == (storages, planner):
                kinds.setdefault((sample["links"], sample["limits"]), []).append(sample["seconds"])
        seconds = [one for taken in kinds.values() for one in taken]
        summary[f"{storages}, {planner}"] = {
            "median s": median(seconds),
            "slowest kind s": max(median(taken) for taken in kinds.values()),
            "longest s": max(seconds),
        }
    return summary


if __name__ == "__main__":
    raise SystemExit(main())
