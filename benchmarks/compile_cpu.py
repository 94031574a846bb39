"""What is left of the saving under ``torch.compile``: eager, block by block and the whole model, on the CPU.

    python -m benchmarks.compile_cpu [--rounds N] [--steps N] [--backend NAME] [--path DIR]

Each way of compiling is measured with everything kept and with ``target="nvme"``, every other option at its default.
Prints how much moved, the peaks that the library counts, the process's real peak (without what compiling itself took),
and the step time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

import actoffload
from actoffload.testing.measure import peak_rss_bytes
from benchmarks import harness, worker

GPT = {"layers": 8, "width": 256, "seq": 512}
BATCH = 8
THREADS = 2
HOWS = ("eager", "blocks", "whole")
MODES = ("keep", "nvme")
WARM_UP_STEPS = 2
"""Steps that compile, and after which the order of backward is known; not counted."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the result file; 1 when a sample failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="samples of each mode")
    parser.add_argument("--steps", type=int, default=3, help="steps of each sample that count")
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile")
    parser.add_argument("--path", help="directory of the spool")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: only to see that it runs")
    parser.add_argument("spec", nargs="?", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.spec:
        print(json.dumps(sample(json.loads(options.spec))))
        return 0
    spec = {
        "model": "gpt",
        "gpt": {"layers": 2, "width": 32, "seq": 32} if options.tiny else GPT,
        "batch": 2 if options.tiny else BATCH,
        "threads": THREADS,
        "device": "cpu",
        "dtype": "float32",
        "steps": options.steps,
        "path": options.path,
        "backend": options.backend,
        "options": {"min_bytes": 0} if options.tiny else {},
    }

    def measure(name: str) -> harness.Sample:
        how, mode = name.split("/")
        found = harness.run_sample("benchmarks.compile_cpu", spec | {"compile": how, "mode": mode}, timeout_s=1200)
        print(f"{name}: {found.get('error') or _line(found)}", flush=True)
        return found

    samples = harness.interleave([f"{how}/{mode}" for how in HOWS for mode in MODES], options.rounds, measure)
    failed = any("error" in one for taken in samples.values() for one in taken)
    payload: dict[str, Any] = {
        "benchmark": "compile_cpu",
        "command": harness.command_line("benchmarks.compile_cpu", sys.argv[1:] if arguments is None else arguments),
        "environment": harness.environment() | {"torch_threads": THREADS},
        "configuration": spec | {"path": None},
        "samples": samples,
    }
    target = harness.results_folder(keep=not options.tiny) / f"compile_cpu_{options.backend}_{harness.stamp()}.json"
    if not failed:
        payload["summary"] = {how: summarise(samples[f"{how}/keep"], samples[f"{how}/nvme"]) for how in HOWS}
        table = render(payload["summary"])
        print(table)
        target.with_suffix(".md").write_text(table, encoding="utf-8")
    harness.write_results(target, payload)
    return 1 if failed else 0


def sample(spec: dict[str, Any]) -> dict[str, Any]:
    """One process's steps. Bytes and seconds."""
    torch.set_num_threads(spec["threads"])
    torch.use_deterministic_algorithms(True)  # else Inductor adds an embedding's gradients up in any order
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    run = worker.Run(spec)
    if spec["compile"] == "whole":
        run.model.compile(backend=spec["backend"])
    elif spec["compile"] == "blocks":
        for block in run.model.stack.blocks:  # type: ignore[union-attr]
            block.compile(backend=spec["backend"])
    for _ in range(WARM_UP_STEPS):
        run.clear_gradients()
        run.step()
    before = _statistics(run)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    times_s = []
    for _ in range(spec["steps"]):
        run.clear_gradients()
        begin_s = time.perf_counter()
        run.step()
        times_s.append(time.perf_counter() - begin_s)
    after = _statistics(run)
    facts = {"step_s": times_s, "median_step_s": median(times_s), "peak_rss_bytes": peak_rss_bytes()}
    if after:
        written = after["nvme_written_bytes"] - before["nvme_written_bytes"]
        facts |= {"written_bytes_per_step": written / spec["steps"], "statistics": after}
    return facts | {"gradients": worker.gradients_checksum(run.model)}


def _statistics(run: worker.Run) -> dict[str, Any]:
    offloader = run.offloader
    return offloader.statistics().as_dict() if isinstance(offloader, actoffload.Offloader) else {}


def summarise(keep: list[harness.Sample], nvme: list[harness.Sample]) -> dict[str, float]:
    """The medians of one way of compiling, and what they say about each other."""

    def middle(samples: list[harness.Sample], key: str) -> float:
        return float(median(one[key] for one in samples))

    def counted(key: str) -> float:
        return float(median(one["statistics"][key] for one in nvme))

    keep_rss, nvme_rss = middle(keep, "peak_rss_bytes"), middle(nvme, "peak_rss_bytes")
    return {
        "baseline_peak_bytes": counted("baseline_peak_bytes"),
        "resident_peak_bytes": counted("resident_peak_bytes"),
        "host_peak_bytes": counted("host_peak_bytes"),
        "written_bytes_per_step": middle(nvme, "written_bytes_per_step"),
        "keep_peak_rss_bytes": keep_rss,
        "nvme_peak_rss_bytes": nvme_rss,
        "saved_share_gone_from_rss": (keep_rss - nvme_rss) / counted("baseline_peak_bytes"),
        "step_time_ratio": middle(nvme, "median_step_s") / middle(keep, "median_step_s"),
        "gradients_identical": float(len({one["gradients"] for one in keep + nvme}) == 1),
    }


def render(summary: dict[str, dict[str, float]]) -> str:
    """The summaries as a Markdown table, a column for each way of compiling."""
    rows: list[tuple[str, Any]] = [
        ("saved activations, peak", lambda s: _mib(s["baseline_peak_bytes"])),
        ("written in a step", lambda s: _mib(s["written_bytes_per_step"])),
        ("resident activation peak", lambda s: f"{s['resident_peak_bytes'] / s['baseline_peak_bytes']:.0%} of it"),
        ("memory to read back into", lambda s: _mib(s["host_peak_bytes"])),
        ("peak RSS, keep", lambda s: _mib(s["keep_peak_rss_bytes"])),
        ("peak RSS, nvme", lambda s: _mib(s["nvme_peak_rss_bytes"])),
        ("saved bytes gone from peak RSS", lambda s: f"{s['saved_share_gone_from_rss']:.0%}"),
        ("step time", lambda s: f"{s['step_time_ratio']:.2f} × keep"),
        ("gradients bit-identical", lambda s: "yes" if s["gradients_identical"] else "NO"),
    ]
    return harness.markdown_table(
        ("compiled", *summary), [(name, *(show(summary[how]) for how in summary)) for name, show in rows]
    )


def _line(found: harness.Sample) -> str:
    return f"{found['median_step_s']:.2f} s a step, peak RSS {_mib(found['peak_rss_bytes'])}"


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.0f} MiB"


if __name__ == "__main__":
    raise SystemExit(main())
