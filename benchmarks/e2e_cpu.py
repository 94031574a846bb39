"""Whole training steps on the CPU: GPT, BERT, T5 and ViT, everything kept and with every option at its default.

    python -m benchmarks.e2e_cpu [--rounds N] [--steps N] [--cases NAME ...] [--path DIR] [--tiny]

Two threads, AdamW, float32. The GPT is the 8-layer, width-512 one with 8 × 512 tokens; two more have twice its layers
and twice its sequence, so that growth shows. Everything is kept twice: as PyTorch does, in memory of the C library,
which gives large blocks back and faults them in again; and with the library's hooks and allocator and nothing moved.
The step against the first is what a user sees, against the second what moving costs. Steps of all modes are taken in
turns (`benchmarks.turns`). Prints both, system time and page faults, how much of what is saved is resident at the peak,
what left the process's peak RSS, bytes moved and waits, and whether every loss and gradient is the same, bit for bit.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

from benchmarks import harness, turns
from benchmarks.modes import WARM_UP

THREADS = 2
LIMIT_S = 1200.0
"""Seconds for what a worker does before its first step, and for each step."""
KEEP, SAME_MEMORY, OFFLOAD = MODES = ("keep", "keep, same memory", "default")
HEAD = "gpt"
GROWN = ("gpt, layers × 2", "gpt, sequence × 2")
REFERENCES = {"ratio": "keep's", "moving": "keep's in the same memory"}
"""What the step is compared with, by the key of the ratio."""
RATIO_BOUND, GONE_BOUND, GROWTH_BOUND = 1.10, 0.60, 0.05


def cases(tiny: bool) -> dict[str, dict[str, Any]]:
    """What is trained, by name: ``model``, ``batch`` and sizes for `benchmarks.workloads.build`."""
    if tiny:
        gpt = {"layers": 2, "width": 64, "seq": 64}
        language = {"hidden": 64, "layers": 2, "seq": 32, "vocab": 64}
        vision, batch = {"hidden": 64, "layers": 2, "image": 32, "patch": 8, "classes": 10}, 2
    else:
        gpt = {"layers": 8, "width": 512, "seq": 512}
        language = {"hidden": 384, "layers": 6, "seq": 256, "vocab": 1024}
        vision, batch = {"hidden": 384, "layers": 8, "image": 224, "patch": 16, "classes": 100}, 8
    return {
        HEAD: {"model": "gpt", "batch": batch, "gpt": gpt},
        GROWN[0]: {"model": "gpt", "batch": batch, "gpt": {**gpt, "layers": 2 * gpt["layers"]}},
        GROWN[1]: {"model": "gpt", "batch": batch, "gpt": {**gpt, "seq": 2 * gpt["seq"]}},
        "bert": {"model": "bert", "batch": 2 * batch, "sizes": language},
        "t5": {"model": "t5", "batch": 2 * batch, "sizes": language},
        "vit": {"model": "vit", "batch": 2 * batch, "sizes": vision},
    }


def shared(options: argparse.Namespace) -> dict[str, Any]:
    """What `benchmarks.worker` is told of every sample on the CPU."""
    return {
        "threads": THREADS,
        "device": "cpu",
        "dtype": "float32",
        "steps": options.steps,
        "warm_up": WARM_UP,
        "path": options.path,
        "optimizer": True,
        "options": {"min_bytes": 0} if options.tiny else {},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the result files; 1 when a sample failed or a bound does not hold."""
    options = _parse(arguments)
    chosen = {name: case for name, case in cases(options.tiny).items() if not options.cases or name in options.cases}
    common = shared(options)
    payload = harness.head("e2e_cpu", arguments, {"cases": chosen, **common, "path": None}, threads=THREADS)
    target = harness.results_folder(keep=not options.tiny) / f"e2e_cpu_{harness.stamp()}.json"
    groups = [{f"{name}/{mode}": common | case | {"mode": mode} for mode in MODES} for name, case in chosen.items()]
    keep_samples = partial(harness.keep_samples, target, payload)
    samples = turns.take_rounds(groups, options.rounds, limit_s=LIMIT_S, after_round=keep_samples)
    failed = harness.failures(samples)
    if failed:
        print(f"failed: {', '.join(failed)}")
        harness.write_results(target, payload)
        return 1
    payload["summary"] = summary = {case: summarise(*(samples[f"{case}/{mode}"] for mode in MODES)) for case in chosen}
    limits = bounds(summary)
    payload["bounds"] = [bound.as_dict() for bound in limits]
    harness.write_results(target, payload)
    text = f"{render(summary)}\n{harness.bounds_table(limits)}"
    print(text)
    target.with_suffix(".md").write_text(text, encoding="utf-8")
    same = all(row["identical"] for row in summary.values())
    return 0 if same and (options.tiny or all(bound.holds for bound in limits)) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="samples of each case and mode")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each sample")
    parser.add_argument("--cases", nargs="+", choices=list(cases(False)), help="only these")
    parser.add_argument("--path", help="directory of the spool")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: only to see that it runs")
    return parser.parse_args(arguments)


def summarise(
    keep: list[harness.Sample], same_memory: list[harness.Sample], offload: list[harness.Sample]
) -> dict[str, Any]:
    """The medians of one case, and what they say about each other. Bytes and seconds."""
    taken = dict(zip(MODES, (keep, same_memory, offload), strict=True))
    baseline = harness.middle(offload, "statistics", "baseline_peak_bytes")
    keep_rss, offload_rss = (harness.middle(samples, "peak_rss_bytes") for samples in (keep, offload))
    traces = {(*s["losses"], s["first_gradients"], s["last_parameters"]) for one in taken.values() for s in one}
    return {
        "keep_step_s": harness.middle(keep, "median_step_s"),
        "offload_step_s": harness.middle(offload, "median_step_s"),
        "ratio": median(ratios := turns.ratios(offload, keep)),
        "ratio_of_rounds": ratios,
        "moving": median(moving := turns.ratios(offload, same_memory)),
        "moving_of_rounds": moving,
        "system_s_per_step": {mode: harness.middle(one, "system_s_per_step") for mode, one in taken.items()},
        "page_faults_per_step": {mode: harness.middle(one, "page_faults_per_step") for mode, one in taken.items()},
        "baseline_peak_bytes": baseline,
        "resident_share": harness.middle(offload, "statistics", "resident_peak_bytes") / baseline,
        "keep_above_static_bytes": keep_rss - harness.middle(keep, "static_rss_bytes"),
        "offload_above_static_bytes": offload_rss - harness.middle(offload, "static_rss_bytes"),
        "gone_share": (keep_rss - offload_rss) / baseline,
        "written_bytes_per_step": harness.middle(offload, "written_bytes_per_step"),
        "wait_s_per_step": harness.middle(offload, "wait_s_per_step"),
        "others_cpu_share": max(s["others_cpu_share"] for one in taken.values() for s in one),
        "identical": len(traces) == 1,
    }


def bounds(summary: dict[str, dict[str, Any]]) -> list[harness.Bound]:
    """What must hold, as far as it was measured."""
    if HEAD not in summary:
        return []
    head = summary[HEAD]
    gone = head["gone_share"]
    found = [harness.Bound(what="gpt: saved bytes gone from peak RSS", measured=gone, bound=GONE_BOUND, at_most=False)]
    for key, reference in REFERENCES.items():
        what = f"step time / {reference}"
        found.append(harness.Bound(what=f"gpt: {what}", measured=head[key], bound=RATIO_BOUND, unit=" ×"))
        for case in GROWN:
            if case in summary:
                change = abs(summary[case][key] - head[key])
                found.append(harness.Bound(what=f"{case}: change of the {what}", measured=change, bound=GROWTH_BOUND))
    return found


def render(summary: dict[str, dict[str, Any]]) -> str:
    """The summaries as a Markdown table, a row for each case."""
    columns = (
        "two threads, defaults",
        *(f"step time / {name}" for name in REFERENCES.values()),
        "keep, s",
        *(f"system time, s: {mode}" for mode in MODES),
        "page faults: keep",
        "saved",
        "resident peak",
        "peak RSS above static: keep",
        "offload",
        "saved bytes gone",
        "moved a step",
        "waits a step, s",
        "bit-identical",
    )
    return harness.markdown_table(columns, [_row(name, row) for name, row in summary.items()])


def _row(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    return (
        name,
        *(turns.spread(row[f"{key}_of_rounds"]) for key in REFERENCES),
        f"{row['keep_step_s']:.2f}",
        *(f"{row['system_s_per_step'][mode]:.2f}" for mode in MODES),
        f"{row['page_faults_per_step'][KEEP]:,.0f}",
        harness.mib(row["baseline_peak_bytes"]),
        f"{row['resident_share']:.0%}",
        harness.mib(row["keep_above_static_bytes"]),
        harness.mib(row["offload_above_static_bytes"]),
        f"{row['gone_share']:.0%}",
        harness.mib(row["written_bytes_per_step"]),
        f"{row['wait_s_per_step']:.3f}",
        "yes" if row["identical"] else "NO",
    )


if __name__ == "__main__":
    raise SystemExit(main())
