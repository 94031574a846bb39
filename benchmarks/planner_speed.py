"""How long a plan takes: transformers on paper with up to 2,000 saved storages, every planner, three kinds of limits.

    python -m benchmarks.planner_speed [--rounds N] [--layers N ...]

Prints and records, for each planner, the median time of a plan, that of the slowest kind (the median over its rounds,
as the machine's speed drifts), and the longest of all.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from actoffload.errors import BudgetError
from actoffload.planners import PLANNERS, Limits, make_planner
from actoffload.profile import Profile
from actoffload.simulator import simulate
from actoffload.testing.profiles import Accelerator, link, transformer_profile
from benchmarks import harness

LAYERS = (25, 250)
LIMIT_S = 1.0
TIERED = Accelerator(name="host and disk", flops=140e12, host=link(20), disk=link(3, 6))
DIRECT = Accelerator(name="disk", flops=140e12, host=None, disk=link(6))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the result file; 1 when a kind of plan of ``auto`` for the largest profile is too slow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="plans of each kind")
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS, help="sizes of the models")
    options = parser.parse_args(arguments)
    profiles = [
        (accelerator.name, transformer_profile(8192, layers, 1, accelerator=accelerator))
        for layers in options.layers
        for accelerator in (TIERED, DIRECT)
    ]
    samples = []
    for round_ in range(options.rounds):
        for links, profile in profiles:
            samples += [{"round": round_, **sample} for sample in measure(profile, links)]
    rows = summarise(samples)
    columns = ("storages", "planner", "median s", "slowest kind s", "longest s")
    table = harness.markdown_table(columns, rows)
    target = harness.results_folder() / f"planner_speed_{harness.stamp()}.json"
    print(f"{table}\nFrom `benchmarks/results/{target.name}`.")
    target.with_suffix(".md").write_text(table, encoding="utf-8")
    payload: dict[str, Any] = {
        "benchmark": "planner_speed",
        "command": harness.command_line("benchmarks.planner_speed", sys.argv[1:] if arguments is None else arguments),
        "environment": harness.environment(),
        "configuration": {"layers": list(options.layers), "rounds": options.rounds, "limit_s": LIMIT_S},
        "samples": samples,
    }
    harness.write_results(target, payload)
    largest = max(sample["storages"] for sample in samples)
    auto = [s for s in samples if s["planner"] == "auto" and s["storages"] == largest]
    return 1 if slowest_kind_s(auto) > LIMIT_S else 0


def measure(profile: Profile, links: str) -> list[dict[str, Any]]:
    """One plan of each planner under each kind of limits, and one simulated step."""
    peak = profile.baseline_peak_bytes
    kinds = {
        "no budget": Limits(),
        "5 % slower": Limits(max_slowdown=0.05),
        "a quarter": Limits(device_budget=peak // 4),
        "a twentieth": Limits(device_budget=peak // 20),
    }
    facts = {"storages": len(profile.storages), "links": links}
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    simulate(profile, None, detail=False)
    cost = {"seconds": time.perf_counter() - begin_s, "processor_s": time.process_time() - begin_cpu_s}
    samples: list[dict[str, Any]] = [{**facts, "planner": "(one simulated step)", "limits": "none", **cost}]
    for kind, limits in kinds.items():
        for name in PLANNERS:
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            try:
                plan = make_planner(name).plan(profile, limits)
                shares: dict[str, float | None] = {
                    "step": (plan.predicted_step_s or 0.0) / profile.step_s,
                    "peak": (plan.predicted_peak_bytes or 0) / peak,
                }
            except BudgetError:
                shares = {"step": None, "peak": None}
            cost = {"seconds": time.perf_counter() - begin_s, "processor_s": time.process_time() - begin_cpu_s}
            samples.append({**facts, "planner": name, "limits": kind, **shares, **cost})
    return samples


def slowest_kind_s(samples: list[dict[str, Any]]) -> float:
    """The median over the rounds of the kind that takes longest."""
    kinds: dict[tuple[str, str], list[float]] = {}
    for sample in samples:
        kinds.setdefault((sample["links"], sample["limits"]), []).append(sample["seconds"])
    return max(median(seconds) for seconds in kinds.values())


def summarise(samples: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each planner and size."""
    rows = []
    for storages, planner in sorted({(sample["storages"], sample["planner"]) for sample in samples}):
        own = [s for s in samples if (s["storages"], s["planner"]) == (storages, planner)]
        seconds = [sample["seconds"] for sample in own]
        values = (median(seconds), slowest_kind_s(own), max(seconds))
        rows.append((str(storages), planner, *(f"{value:.3f}" for value in values)))
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
