"""Default options on the CPU with a throttled disk, and a ``device_budget`` of 40 % against recomputing every block.

    python -m benchmarks.planner_cpu [--rounds N] [--steps N] [--speeds SPEED ...] [--path DIR]

Each sample lies between two of keeping everything and is compared with their mean, as the machine's speed drifts.
The disk's speed is measured first, then a fault engine slows it to a half, a quarter and a tenth of that. What the
simulator calls ideal is the plan for the recorded step, as long as the timed steps computed, and the disk's true speed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from fractions import Fraction
from statistics import median
from typing import Any

from benchmarks import harness

WORKER = "actoffload.testing.planner_worker"
GPT = {"layers": 6, "width": 512, "seq": 512}
BATCH = 4
THREADS = 2
WARM_UP = 18
"""Steps that are not timed: two are recorded, five show how the first plan does, ten how the second one does."""
SPEEDS = (Fraction(1), Fraction(1, 2), Fraction(1, 4), Fraction(1, 10))
BUDGET = 0.4
"""Share of the baseline's peak."""


def variants() -> dict[str, dict[str, Any]]:
    """What is measured, by name: the mode, the disk's speed and whether there is a budget."""
    found: dict[str, dict[str, Any]] = {"keep": {"mode": "keep"}, "recompute": {"mode": "recompute"}}
    for speed in SPEEDS:
        found[f"default, disk × {speed}"] = {"mode": "default", "speed": speed}
    for speed in (SPEEDS[0], SPEEDS[2]):
        found[f"budget {BUDGET:.0%}, disk × {speed}"] = {"mode": "default", "speed": speed, "budget": True}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the result file; 1 when a sample failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="samples of each variant")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each sample")
    speeds = [str(speed) for speed in SPEEDS]
    parser.add_argument("--speeds", nargs="+", choices=speeds, help="only these speeds of the disk, and no budgets")
    parser.add_argument("--path", help="directory of the spool")
    options = parser.parse_args(arguments)
    disk = harness.run_sample(WORKER, {"mode": "disk", "path": options.path}, timeout_s=300)
    if "error" in disk:
        print(f"the disk could not be measured: {disk['error']}", file=sys.stderr)
        return 1
    bytes_per_s = min(disk["write_bytes_per_s"], disk["read_bytes_per_s"])
    baselines: list[int] = []
    keeps: list[harness.Sample] = []
    only = {f"default, disk × {speed}" for speed in options.speeds or ()}
    chosen = {name: how for name, how in variants().items() if not only or name in only | {"keep"}}

    def measure(name: str) -> harness.Sample:
        if name == "keep":
            keeps.append(take(name))
            return keeps[-1]
        sample = take(name)
        keeps.append(take("keep"))
        around = [keep["median_step_s"] for keep in keeps[-2:] if "error" not in keep]
        return sample | ({"keep_step_s": sum(around) / len(around)} if around else {"error": keeps[-1]["error"]})

    def take(name: str) -> harness.Sample:
        variant = chosen[name]
        speed = variant.get("speed", SPEEDS[0])
        spec = {
            "gpt": GPT,
            "batch": BATCH,
            "threads": THREADS,
            "mode": variant["mode"],
            "warm_up": WARM_UP if variant["mode"] == "default" else 2,
            "steps": options.steps,
            "path": options.path,
            "device_budget": int(BUDGET * baselines[0]) if variant.get("budget") else None,
            "bandwidth": None if speed == 1 else float(speed) * bytes_per_s,
        }
        sample = harness.run_sample(WORKER, spec, timeout_s=1200) | {"spec": spec | {"path": None}}
        if "baseline_peak_bytes" in sample:
            baselines.append(sample["baseline_peak_bytes"])
        shown = sample.get("error") or f"{sample['median_step_s']:.3f} s a step"
        print(f"{name}: {shown}", flush=True)
        return sample

    samples = harness.interleave(tuple(chosen), options.rounds, measure)
    configuration = {"gpt": GPT, "batch": BATCH, "threads": THREADS, "warm_up": WARM_UP, "steps": options.steps}
    payload = harness.head("planner_cpu", arguments, configuration, threads=THREADS)
    payload |= {"disk": disk, "samples": samples, "keep_samples": keeps}
    return harness.publish("planner_cpu", payload, summarise, render)


def summarise(samples: dict[str, list[harness.Sample]]) -> dict[str, dict[str, Any]]:
    """One row for each variant: medians over the rounds; ratios to the samples beside (keep) or of the round."""
    losses = {tuple(sample["losses_hex"][:2]) for taken in samples.values() for sample in taken}
    rows: dict[str, dict[str, Any]] = {}
    for name, taken in samples.items():
        row: dict[str, Any] = {
            "step_s": median(s["median_step_s"] for s in taken),
            "ratio_to_keep": median(s["median_step_s"] / s.get("keep_step_s", s["median_step_s"]) for s in taken),
            "identical": len(losses) == 1,
        }
        if "peak_bytes" in taken[0]:
            row["peak_share"] = max(s["peak_bytes"] / s["baseline_peak_bytes"] for s in taken)
            row["written_bytes"] = median(s["written_bytes"] for s in taken)
            row["declined"] = next((s["declined"] for s in taken if s.get("declined")), "")
            row["recomputed_blocks"] = median(len(s.get("recompute", ())) for s in taken)
        if "ideal_bytes" in taken[0]:
            row["ideal_bytes"] = median(s["ideal_bytes"] for s in taken)
            row["of_ideal"] = median(s["written_bytes"] / s["ideal_bytes"] if s["ideal_bytes"] else 1.0 for s in taken)
        budget = taken[0]["spec"]["device_budget"]
        if budget is not None:
            row["within_budget"] = all(s["peak_bytes"] <= budget for s in taken)
            recomputed = samples["recompute"]
            row["ratio_to_recompute"] = median(
                s["median_step_s"] / r["median_step_s"] for s, r in zip(taken, recomputed, strict=True)
            )
        rows[name] = row
    return rows


def render(summary: dict[str, dict[str, Any]]) -> str:
    """The summary as a Markdown table."""
    columns = ("variant", "step", "× keep", "× recompute", "peak", "written", "of ideal", "bits equal")
    rows = []
    for name, row in summary.items():
        ideal = row.get("of_ideal")
        rows.append(
            (
                name,
                f"{row['step_s']:.3f} s",
                f"{row['ratio_to_keep']:.2f}",
                f"{row['ratio_to_recompute']:.2f}" if "ratio_to_recompute" in row else "",
                f"{row['peak_share']:.0%}" if "peak_share" in row else "",
                f"{row['written_bytes'] / 2**20:.0f} MiB" if "written_bytes" in row else "",
                "" if ideal is None else f"{ideal:.0%}",
                "yes" if row["identical"] else "NO",
            )
        )
    head = f"GPT {GPT['layers']} × {GPT['width']}, batch {BATCH} × {GPT['seq']}, {THREADS} threads\n\n"
    return head + harness.markdown_table(columns, rows)


if __name__ == "__main__":
    raise SystemExit(main())
