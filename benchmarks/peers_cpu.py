"""Peers on the CPU: the same GPT steps with PyTorch's own means, DeepSpeed's ``aio_handle`` and the library.

    python -m benchmarks.peers_cpu [--rounds N] [--steps N] [--modes NAME ...] [--path DIR] [--tiny]

The GPT of `benchmarks.e2e_cpu` (8 layers, width 512, 8 × 512 tokens, two threads). ``torch.save`` stands for the hooks
of PyTorch's tutorial on saved tensors, ``aio_handle`` for hooks built on DeepSpeed's handle, ``save_on_cpu`` for
PyTorch's own context, which copies nothing on CPU tensors and so shows how far the same work as ``keep``'s lies apart,
``recompute`` for ``torch.utils.checkpoint`` around every block, ``default`` and ``all`` for the library. TRL's
``OffloadActivations`` needs an accelerator: `benchmarks.gpu` has it. All modes take their steps in turns
(`benchmarks.turns`), so that all these processes are alive at once: 11 GB.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

from benchmarks import e2e_cpu, harness, turns
from benchmarks.modes import MODES

NAMES = ("keep", "default", "aio_handle", "torch.save", "all", "recompute", "save_on_cpu")
"""In the order of their turns: those that are compared with each other follow each other."""
OURS = "default"
TORCH_SAVE_BOUND, AIO_BOUND = 1.8, 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the result files; 1 when a sample failed, ours differ in a bit or a bound does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="samples of each mode")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each sample")
    parser.add_argument("--modes", nargs="+", choices=NAMES, default=NAMES, help="only these, and keep")
    parser.add_argument("--path", help="directory of the spool, for every mode that writes")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: only to see that it runs")
    options = parser.parse_args(arguments)
    common = e2e_cpu.cases(options.tiny)[e2e_cpu.HEAD] | e2e_cpu.shared(options)
    payload = harness.head("peers_cpu", arguments, common | {"path": None}, threads=e2e_cpu.THREADS)
    target = harness.results_folder(keep=not options.tiny) / f"peers_cpu_{harness.stamp()}.json"
    group = {name: common | {"mode": name} for name in NAMES if name == "keep" or name in options.modes}
    keep_samples = partial(harness.keep_samples, target, payload)
    samples = turns.take_rounds([group], options.rounds, limit_s=e2e_cpu.LIMIT_S, after_round=keep_samples)
    failed = harness.failures(samples)
    if "keep" in failed:
        print("failed: keep")
        return 1
    payload["summary"] = summary = summarise(samples)
    limits = bounds(summary)
    payload["bounds"] = [bound.as_dict() for bound in limits]
    harness.write_results(target, payload)
    text = f"{render(summary)}\n{harness.bounds_table(limits)}"
    print(text)
    target.with_suffix(".md").write_text(text, encoding="utf-8")
    ours_differ = [name for name, row in summary.items() if MODES[name].ours and row.get("identical") is False]
    broken = failed or ours_differ
    return 1 if broken or not (options.tiny or all(bound.holds for bound in limits)) else 0


def summarise(samples: dict[str, list[harness.Sample]]) -> dict[str, dict[str, Any]]:
    """The medians of each mode against ``keep``; a text under ``why`` for one that was not measured."""
    keep = samples["keep"]
    static = harness.middle(keep, "static_rss_bytes")
    traces = {_trace(sample) for sample in keep}
    ours = samples.get(OURS, [])
    measured = bool(ours) and not any(_missing(sample) for sample in ours)
    summary: dict[str, dict[str, Any]] = {}
    for name, taken in samples.items():
        missing = [_missing(sample) for sample in taken if _missing(sample)]
        if missing:
            summary[name] = {"why": missing[0]}
            continue
        row: dict[str, Any] = {
            "step_s": harness.middle(taken, "median_step_s"),
            "ratio": median(ratios := turns.ratios(taken, keep)),
            "ratio_of_rounds": ratios,
            "to_ours": median(to_ours := turns.ratios(taken, ours)) if measured else None,
            "to_ours_of_rounds": to_ours if measured else None,
            "above_static_bytes": harness.middle(taken, "peak_rss_bytes") - static,
            "identical": len(traces | {_trace(sample) for sample in taken}) == 1,
            "others_cpu_share": max(sample["others_cpu_share"] for sample in taken),
        }
        for key in ("written_bytes_per_step", "read_bytes_per_step", "wait_s_per_step"):
            row[key] = harness.middle(taken, key) if key in taken[0] else None
        summary[name] = row
    return summary


def _missing(sample: harness.Sample) -> str | None:
    """Why it was not measured."""
    return sample.get("unavailable") or sample.get("error")


def _trace(sample: harness.Sample) -> tuple[Any, ...]:
    return (*sample["losses"], sample["first_gradients"], sample["last_parameters"])


def bounds(summary: dict[str, dict[str, Any]]) -> list[harness.Bound]:
    """How many times faster the library's default is than each of the two peers that write to disk."""
    limits = (("torch.save", TORCH_SAVE_BOUND), ("aio_handle", AIO_BOUND))
    return [
        harness.Bound(
            what=f"step time of {peer} hooks / ours", measured=summary[peer]["to_ours"], bound=bound, at_most=False
        )
        for peer, bound in limits
        if peer in summary and "why" not in summary[peer]
    ]


def render(summary: dict[str, dict[str, Any]]) -> str:
    """The summary as a Markdown table, a row for each mode."""
    columns = (
        "8-layer GPT, width 512, two threads",
        "step time / keep's",
        f"/ {OURS}'s",
        "step, s",
        "peak RSS above keep's static",
        "written a step",
        "read a step",
        "waits a step, s",
        "bit-identical",
    )
    return harness.markdown_table(columns, [_row(name, row) for name, row in summary.items()])


def _row(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    if "why" in row:
        return (f"{name} ({row['why']})", *["-"] * 8)

    def moved(key: str) -> str:
        return "-" if row[key] is None else harness.mib(row[key])

    return (
        name,
        turns.spread(row["ratio_of_rounds"]),
        "-" if row["to_ours"] is None else turns.spread(row["to_ours_of_rounds"]),
        f"{row['step_s']:.2f}",
        harness.mib(row["above_static_bytes"]),
        moved("written_bytes_per_step"),
        moved("read_bytes_per_step"),
        "-" if row["wait_s_per_step"] is None else f"{row['wait_s_per_step']:.3f}",
        "yes" if row["identical"] else "NO",
    )


if __name__ == "__main__":
    raise SystemExit(main())
