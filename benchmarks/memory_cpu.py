"""Memory and time on the CPU: an 8-layer, width-512 GPT, batch 8 × 512, two threads, every option at its default.

    python -m benchmarks.memory_cpu [--rounds N] [--steps N] [--path DIR]

Prints the resident activation peak against the baseline, the step time against keeping everything, and the share of the
saved bytes that left the process's peak RSS.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median

from benchmarks import harness
from benchmarks.modes import WARM_UP

GPT = {"layers": 8, "width": 512, "seq": 512}
BATCH = 8
THREADS = 2
MODES = ("keep", "nvme")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the result file; 1 when a sample failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="samples of each mode")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each sample")
    parser.add_argument("--path", help="directory of the spool")
    options = parser.parse_args(arguments)

    def measure(mode: str) -> harness.Sample:
        spec = {
            "model": "gpt",
            "gpt": GPT,
            "batch": BATCH,
            "threads": THREADS,
            "device": "cpu",
            "dtype": "float32",
            "mode": mode,
            "steps": options.steps,
            "warm_up": WARM_UP,
            "path": options.path,
            "optimizer": True,
        }
        sample = harness.run_sample("benchmarks.worker", spec, timeout_s=1200)
        print(f"{mode}: {sample.get('error') or _line(sample)}", flush=True)
        return sample

    samples = harness.interleave(MODES, options.rounds, measure)
    configuration = {"gpt": GPT, "batch": BATCH, "threads": THREADS, "steps": options.steps}
    payload = harness.head("memory_cpu", arguments, configuration, threads=THREADS) | {"samples": samples}
    return harness.publish("memory_cpu_gpt8x512", payload, summarise, render)


def summarise(samples: dict[str, list[harness.Sample]]) -> dict[str, float]:
    """The numbers that the README shows, each the median over the rounds."""

    def middle(mode: str, key: str) -> float:
        return float(median(sample[key] for sample in samples[mode]))

    def counted(key: str) -> float:
        return float(median(sample["statistics"][key] for sample in samples["nvme"]))

    baseline = counted("baseline_peak_bytes")
    keep_rss, nvme_rss = middle("keep", "peak_rss_bytes"), middle("nvme", "peak_rss_bytes")
    hashes = {sample["first_gradients"] for mode in MODES for sample in samples[mode]}
    return {
        "baseline_peak_bytes": baseline,
        "resident_peak_bytes": counted("resident_peak_bytes"),
        "resident_share": counted("resident_peak_bytes") / baseline,
        "keep_step_s": middle("keep", "median_step_s"),
        "nvme_step_s": middle("nvme", "median_step_s"),
        "step_time_ratio": middle("nvme", "median_step_s") / middle("keep", "median_step_s"),
        "keep_peak_rss_bytes": keep_rss,
        "nvme_peak_rss_bytes": nvme_rss,
        "saved_share_gone_from_rss": (keep_rss - nvme_rss) / baseline,
        "gradients_identical": float(len(hashes) == 1),
    }


def render(summary: dict[str, float]) -> str:
    """The summary as a Markdown table, each number beside what it should be."""
    rows = [
        ("resident activation peak", f"{summary['resident_share']:.1%} of baseline", "≤ 25 %"),
        ("step time", f"{summary['step_time_ratio']:.2f} × keep", "≤ 1.25 ×"),
        ("saved bytes gone from peak RSS", f"{summary['saved_share_gone_from_rss']:.1%}", "≥ 50 %"),
        ("gradients bit-identical", "yes" if summary["gradients_identical"] else "NO", "yes"),
        ("baseline activation peak", _mib(summary["baseline_peak_bytes"]), ""),
        ("peak RSS of keep", _mib(summary["keep_peak_rss_bytes"]), ""),
        ("peak RSS of nvme", _mib(summary["nvme_peak_rss_bytes"]), ""),
        ("step time keep / nvme", f"{summary['keep_step_s']:.2f} s / {summary['nvme_step_s']:.2f} s", ""),
    ]
    return harness.markdown_table(("8-layer GPT, width 512, batch 8 × 512, two threads", "measured", "must be"), rows)


def _line(sample: harness.Sample) -> str:
    return f"{sample['median_step_s']:.2f} s a step, peak RSS {_mib(sample['peak_rss_bytes'])}"


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.0f} MiB"


if __name__ == "__main__":
    raise SystemExit(main())
