"""What is left of the saving under ``torch.compile``: eager, block by block and the whole model, on the CPU.

    python -m benchmarks.compile_cpu [--rounds N] [--steps N] [--cases NAME ...] [--backend NAME] [--path DIR] [--tiny]

Each way of compiling is measured with everything kept and with ``target="nvme"``, every other option at its default.
Prints how much moved, the peaks that the library counts, the process's real peak (without what compiling itself took),
and the step time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from benchmarks import harness, turns, whole_steps
from benchmarks.harness import Sample, Samples, mib, middle

HOWS = {"eager": None, "blocks": "blocks", "whole": "whole"}
MODES = ("keep", "nvme")
Summary = dict[str, float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the result file; 1 when a sample failed."""
    parser = whole_steps.make_parser(__doc__, "--cases", HOWS, steps=3)
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile")
    return whole_steps.run("compile_cpu", parser, arguments, groups, judge)


def groups(options: argparse.Namespace) -> list[turns.Group]:
    """Both modes of one way of compiling are taken in turns."""
    case = whole_steps.TINY if options.tiny else whole_steps.gpt(8, 256, 512)
    return [
        {
            f"{how}/{mode}": case | {"compile": HOWS[how], "backend": options.backend, "mode": mode, "warm_up": 2}
            for mode in MODES
        }
        for how in options.cases
    ]


def judge(samples: Samples) -> whole_steps.Verdict:
    """A column for each way of compiling."""

    def taken(how: str, mode: str) -> list[Sample]:
        # The peak since the model was compiled; the bits of all steps.
        return [
            {**sample, "peak_rss_bytes": sample["steady_peak_rss_bytes"], "gradients": turns.trace(sample)}
            for sample in samples[f"{how}/{mode}"]
        ]

    hows = dict.fromkeys(name.split("/")[0] for name in samples)
    summary = {how: summarise(*(taken(how, mode) for mode in MODES)) for how in hows}
    right = all(row["gradients_identical"] for row in summary.values())
    return whole_steps.Verdict(summary=dict(summary), table=render(summary), right=right)


def summarise(keep: list[Sample], nvme: list[Sample]) -> Summary:
    """The medians of one way of compiling, and what they say about each other."""
    keep_rss, nvme_rss = middle(keep, "peak_rss_bytes"), middle(nvme, "peak_rss_bytes")
    baseline = middle(nvme, "statistics", "baseline_peak_bytes")
    return {
        "baseline_peak_bytes": baseline,
        "resident_peak_bytes": middle(nvme, "statistics", "resident_peak_bytes"),
        "host_peak_bytes": middle(nvme, "statistics", "host_peak_bytes"),
        "written_bytes_per_step": middle(nvme, "written_bytes_per_step"),
        "keep_peak_rss_bytes": keep_rss,
        "nvme_peak_rss_bytes": nvme_rss,
        "saved_share_gone_from_rss": (keep_rss - nvme_rss) / baseline,
        "step_time_ratio": middle(nvme, "median_step_s") / middle(keep, "median_step_s"),
        "gradients_identical": float(len({one["gradients"] for one in keep + nvme}) == 1),
    }


def render(summary: dict[str, Summary]) -> str:
    """The summaries as a Markdown table, a column for each way of compiling."""
    rows: dict[str, Callable[[Summary], object]] = {
        "saved activations, peak": lambda s: mib(s["baseline_peak_bytes"]),
        "written in a step": lambda s: mib(s["written_bytes_per_step"]),
        "resident activation peak": lambda s: f"{s['resident_peak_bytes'] / s['baseline_peak_bytes']:.0%} of it",
        "memory to read back into": lambda s: mib(s["host_peak_bytes"]),
        "peak RSS, keep": lambda s: mib(s["keep_peak_rss_bytes"]),
        "peak RSS, nvme": lambda s: mib(s["nvme_peak_rss_bytes"]),
        "saved bytes gone from peak RSS": lambda s: f"{s['saved_share_gone_from_rss']:.0%}",
        "step time": lambda s: f"{s['step_time_ratio']:.2f} × keep",
        "gradients bit-identical": lambda s: harness.yes(s["gradients_identical"]),
    }
    shown = [(name, *(show(one) for one in summary.values())) for name, show in rows.items()]
    return harness.markdown_table(("compiled", *summary), shown)


if __name__ == "__main__":
    raise SystemExit(main())
