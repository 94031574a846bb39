"""The saved activations in memory over one training step on the CPU, with everything kept and with the defaults.

    python -m benchmarks.memory_over_step [--path DIR] [--steps N] [--tiny]

The GPT of `benchmarks.steps_cpu`: 8 layers of width 512, 8 × 512 tokens, AdamW, float32, two threads. Each run writes a
trace; the curve is that of the trace's usual step (`actoffload.tools.traced_run`): seconds from the begin of its
forward, and bytes of saved activations in memory. `benchmarks.pictures` draws it. Bytes do not depend on other work of
the machine, but seconds do.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actoffload.tools.trace_file import load
from actoffload.tools.traced_run import SAVED, look_at
from benchmarks import harness
from benchmarks.harness import Row, mib
from benchmarks.worker import Run, gradients_checksum
from benchmarks.workloads import THREADS, TINY, gpt

POLICIES = {"keep": "keep", "default": "auto"}
MOMENTS = 240
"""Points of a curve: each is the most of its share of the step."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the result files; 1 when a gradient differs."""
    parser = harness.make_parser(__doc__, tiny=True)
    parser.add_argument("--steps", type=int, default=8, help="training steps of each sample")
    options = parser.parse_args(arguments)
    work = (TINY if options.tiny else gpt(8, 512, 512)) | {"device": "cpu", "dtype": "float32", "threads": THREADS}
    configuration = work | {"steps": options.steps, "tiny": options.tiny} | POLICIES
    results = harness.Results("memory_over_step", arguments, configuration, keep=not options.tiny)
    rows: dict[str, Row] = {}
    for name, policy in POLICIES.items():
        given = {"policy": policy} | ({"min_bytes": 0} if options.tiny else {})
        rows[name] = measure(work | {"path": options.path}, options.steps, given)
        results.write(rows=rows)
    columns = {
        "step, s": harness.number("step_s", 1, 2),
        "peak": lambda row: mib(row["peak_bytes"]),
        "gradients": lambda row: row["gradients"],
    }
    results.finish(harness.table_of("saved activations in memory", rows, columns))
    return 0 if len({row["gradients"] for row in rows.values()}) == 1 else 1


def measure(work: dict[str, Any], steps: int, options: dict[str, Any]) -> Row:
    """Train some steps with a trace; its curve, what was counted, and a checksum of the last gradients."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        run = Run(work | {"mode": "nvme", "optimizer": True, "options": {"trace": str(trace), **options}})
        run.timed(steps)
        assert run.offloader is not None
        counted = run.offloader.statistics()
        run.close()
        row = {"peak_bytes": counted.plan_peak_bytes, "saved_bytes": counted.baseline_peak_bytes}
        return curve(trace) | row | {"gradients": gradients_checksum(run.model)}


def curve(trace: Path) -> Row:
    """The usual step of a trace: its seconds, where its forward ends, and its saved activations in memory."""
    run = look_at(load(trace))
    memory, step_s = run.memory(), run.end_s - run.begin_s
    most = [0.0] * MOMENTS
    ends = [*(moment.time_s for moment in memory[1:]), step_s]
    # A value holds until the next one, so it counts in each part of the step in between.
    for moment, end_s in zip(memory, ends, strict=True):
        for part in range(int(MOMENTS * moment.time_s / step_s), min(MOMENTS, int(MOMENTS * end_s / step_s) + 1)):
            most[part] = max(most[part], moment.by_kind[SAVED])
    forward_s = max(phase.end_s for phase in run.phases() if phase.name == "forward")
    return {"step_s": step_s, "forward_s": forward_s, "resident_bytes": most}


if __name__ == "__main__":
    raise SystemExit(main())
