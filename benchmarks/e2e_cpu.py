"""Whole training steps on the CPU: GPT, BERT, T5 and ViT, everything kept and with every option at its default.

    python -m benchmarks.e2e_cpu [--rounds N] [--steps N] [--cases NAME ...] [--path DIR] [--tiny]

The GPT is the 8-layer, width-512 one with 8 × 512 tokens; two more have twice its layers and twice its sequence, so
that growth shows. Everything is kept twice: as PyTorch does, in memory of the C library, which gives large blocks back
and faults them in again; and with the library's hooks and allocator and nothing moved. The step against the first is
what a user sees, against the second what moving costs. Prints both, system time and page faults, how much of what is
saved is resident at the peak, what left the process's peak RSS, bytes moved and waits, and whether every loss and
gradient is the same, bit for bit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

from benchmarks import harness, turns, whole_steps
from benchmarks.harness import Bound, Row, Sample, Samples, mib, middle

KEEP, SAME_MEMORY, OFFLOAD = MODES = ("keep", "keep, same memory", "default")
HEAD = "gpt"
GROWN = ("gpt, layers × 2", "gpt, sequence × 2")
REFERENCES = {"ratio": "keep's", "moving": "keep's in the same memory"}
"""What the step is compared with, by the key of the ratio."""
RATIO_BOUNDS = {"ratio": 1.10, "moving": 1.05}
GONE_BOUND, GROWTH_BOUND = 0.60, 0.05


def cases(tiny: bool) -> dict[str, dict[str, Any]]:
    """What is trained, by name: ``model``, ``batch`` and sizes for `benchmarks.workloads.build`."""
    if tiny:
        layers, width, sequence, batch = 2, 64, 64, 2
        language = {"hidden": 64, "layers": 2, "seq": 32, "vocab": 64}
        vision = {"hidden": 64, "layers": 2, "image": 32, "patch": 8, "classes": 10}
    else:
        layers, width, sequence, batch = 8, 512, 512, 8
        language = {"hidden": 384, "layers": 6, "seq": 256, "vocab": 1024}
        vision = {"hidden": 384, "layers": 8, "image": 224, "patch": 16, "classes": 100}
    return {
        HEAD: whole_steps.gpt(layers, width, sequence, batch=batch),
        GROWN[0]: whole_steps.gpt(2 * layers, width, sequence, batch=batch),
        GROWN[1]: whole_steps.gpt(layers, width, 2 * sequence, batch=batch),
        "bert": {"model": "bert", "batch": 2 * batch, "sizes": language},
        "t5": {"model": "t5", "batch": 2 * batch, "sizes": language},
        "vit": {"model": "vit", "batch": 2 * batch, "sizes": vision},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the result files; 1 when a sample failed or a bound does not hold."""
    parser = whole_steps.make_parser(__doc__, "--cases", cases(False))
    return whole_steps.run("e2e_cpu", parser, arguments, groups, judge)


def groups(options: argparse.Namespace) -> list[turns.Group]:
    """The three modes of a case are taken in turns."""
    made = cases(options.tiny)
    return [{f"{name}/{mode}": made[name] | {"mode": mode} for mode in MODES} for name in options.cases]


def judge(samples: Samples) -> whole_steps.Verdict:
    """A row for each case, and the bounds of the GPTs."""
    names = dict.fromkeys(name.rpartition("/")[0] for name in samples)
    summary = {name: summarise(*(samples[f"{name}/{mode}"] for mode in MODES)) for name in names}
    right = all(row["identical"] for row in summary.values())
    return whole_steps.Verdict(summary=summary, table=render(summary), bounds=bounds(summary), right=right)


def summarise(keep: list[Sample], same_memory: list[Sample], offload: list[Sample]) -> Row:
    """The medians of one case, and what they say about each other. Bytes and seconds."""
    taken = dict(zip(MODES, (keep, same_memory, offload), strict=True))
    baseline = middle(offload, "statistics", "baseline_peak_bytes")
    keep_rss, offload_rss = (middle(samples, "peak_rss_bytes") for samples in (keep, offload))
    return {
        "keep_step_s": middle(keep, "median_step_s"),
        "offload_step_s": middle(offload, "median_step_s"),
        "ratio": median(ratios := turns.ratios(offload, keep)),
        "ratio_of_rounds": ratios,
        "moving": median(moving := turns.ratios(offload, same_memory)),
        "moving_of_rounds": moving,
        "system_s_per_step": {mode: middle(one, "system_s_per_step") for mode, one in taken.items()},
        "page_faults_per_step": {mode: middle(one, "page_faults_per_step") for mode, one in taken.items()},
        "baseline_peak_bytes": baseline,
        "resident_share": middle(offload, "statistics", "resident_peak_bytes") / baseline,
        "keep_above_static_bytes": keep_rss - middle(keep, "static_rss_bytes"),
        "offload_above_static_bytes": offload_rss - middle(offload, "static_rss_bytes"),
        "gone_share": (keep_rss - offload_rss) / baseline,
        "written_bytes_per_step": middle(offload, "written_bytes_per_step"),
        "wait_s_per_step": middle(offload, "wait_s_per_step"),
        "others_cpu_share": max(s["others_cpu_share"] for one in taken.values() for s in one),
        "identical": whole_steps.identical(*taken.values()),
    }


def bounds(summary: dict[str, Row]) -> list[Bound]:
    """What must hold, as far as it was measured."""
    if HEAD not in summary:
        return []
    head = summary[HEAD]
    gone = head["gone_share"]
    found = [Bound(what="gpt: saved bytes gone from peak RSS", measured=gone, bound=GONE_BOUND, at_most=False)]
    for key, reference in REFERENCES.items():
        what = f"step time / {reference}"
        found.append(Bound(what=f"gpt: {what}", measured=head[key], bound=RATIO_BOUNDS[key], unit=" ×"))
        for case in GROWN:
            if case in summary:
                change = abs(summary[case][key] - head[key])
                found.append(Bound(what=f"{case}: change of the {what}", measured=change, bound=GROWTH_BOUND))
    return found


def render(summary: dict[str, Row]) -> str:
    """The summaries as a Markdown table, a row for each case."""
    columns: dict[str, Callable[[Row], object]] = {
        **{f"step time / {REFERENCES[key]}": partial(_spread, key) for key in REFERENCES},
        "keep, s": lambda row: f"{row['keep_step_s']:.2f}",
        **{f"system time, s: {mode}": partial(_system_s, mode) for mode in MODES},
        "page faults: keep": lambda row: f"{row['page_faults_per_step'][KEEP]:,.0f}",
        "saved": lambda row: mib(row["baseline_peak_bytes"]),
        "resident peak": lambda row: f"{row['resident_share']:.0%}",
        "peak RSS above static: keep": lambda row: mib(row["keep_above_static_bytes"]),
        "offload": lambda row: mib(row["offload_above_static_bytes"]),
        "saved bytes gone": lambda row: f"{row['gone_share']:.0%}",
        "moved a step": lambda row: mib(row["written_bytes_per_step"]),
        "waits a step, s": lambda row: f"{row['wait_s_per_step']:.3f}",
        "bit-identical": lambda row: harness.yes(row["identical"]),
    }
    return harness.table_of("two threads, defaults", summary, columns)


def _spread(key: str, row: Row) -> str:
    return turns.spread(row[f"{key}_of_rounds"])


def _system_s(mode: str, row: Row) -> str:
    return f"{row['system_s_per_step'][mode]:.2f}"


if __name__ == "__main__":
    raise SystemExit(main())
