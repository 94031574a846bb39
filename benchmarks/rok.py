"""The recompute-offload-keep curve: what ``actoffload rok`` measures, with results among those of the benchmarks.

    python -m benchmarks.rok [--preset cpu|ssdtrain|tiny] [--path DIR] [--retry]

Continues ``rok_PRESET_DATE.json`` where a run of the same day has left it. ``actoffload rok --redraw FILE`` draws it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from actoffload.report.environment import write_atomically
from actoffload.report.rok import PRESETS, points_of, verdicts
from actoffload.report.rok_html import render_html
from actoffload.report.rok_plot import draw_rok
from actoffload.report.rok_run import RokRun, write_csv
from benchmarks import harness


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, write every file; 1 when losses differ or the hybrid is slower than another series."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="cpu")
    parser.add_argument("--path", action="append", help="directory of the spool; repeat to stripe")
    parser.add_argument("--retry", action="store_true", help="take samples that failed again")
    options = parser.parse_args(arguments)
    folder = harness.results_folder(keep=options.preset != "tiny")
    file = folder / f"rok_{options.preset}_{harness.stamp()}.json"
    run = RokRun(
        PRESETS[options.preset],
        file,
        environment=harness.environment(),
        command=harness.command_line("benchmarks.rok", sys.argv[1:] if arguments is None else arguments),
        path=options.path,
        retry=options.retry,
    )
    for job, sample in run.run():
        print(f"{job.label}: {sample.get('error') or _line(sample)}", flush=True)
    points = points_of(run.payload["samples"])
    machine = run.payload["environment"]
    title = f"Recompute, offload, keep: {machine['gpu'] or machine['cpu']}, torch {machine['torch']}"
    write_csv(points, file.with_suffix(".csv"))
    write_atomically(file.with_suffix(".html"), render_html(points, title, machine))
    draw_rok(points, file.with_suffix(".png"), title)
    slower = [verdict for verdict in verdicts(points) if verdict.holds is False]
    for verdict in slower:
        print(f"slower than {verdict.other.label}: × {verdict.ratio or 0.0:.3f} ({verdict.other.case.panel})")
    different = [point.label for point in points if point.identical is False]
    print(f"results: {file.name}; {len(different)} differ, the hybrid is slower at {len(slower)} memory levels")
    return 1 if different or slower else 0


def _line(sample: harness.Sample) -> str:
    peak = sample["activation_peak_bytes"] / 2**20
    return f"{min(sample['step_s']):.3f} s a step, activation peak {peak:.0f} MiB"


if __name__ == "__main__":
    raise SystemExit(main())
