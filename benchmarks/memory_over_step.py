"""The saved activations in memory over one training step on the CPU, with everything kept and with the defaults.

    python -m benchmarks.memory_over_step [--path DIR] [--steps N] [--tiny]

The GPT of `benchmarks.e2e_cpu`: 8 layers of width 512, 8 × 512 tokens, AdamW, float32, two threads. Each run is a
process of its own and writes a trace; the curve is that of the trace's usual step (`actoffload.analysis.traced_run`):
seconds from the begin of its forward, and bytes of saved activations in memory. `benchmarks.pictures` draws it. Bytes
do not depend on other work of the machine, but seconds do: the file says how much there was.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import actoffload
from actoffload.analysis.trace_file import load
from actoffload.analysis.traced_run import SAVED, look_at
from benchmarks import harness, whole_steps
from benchmarks.harness import Row, mib
from benchmarks.worker import gradients_checksum
from benchmarks.workloads import build

POLICIES = {"keep": "keep", "default": "auto"}
MOMENTS = 240
"""Points of a curve: each is the most of its share of the step."""
LIMIT_S = 1800.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the result files; 1 when a sample failed or a gradient differs."""
    parser = harness.make_parser(__doc__, tiny=True)
    parser.add_argument("--steps", type=int, default=8, help="training steps of each sample")
    options = parser.parse_args(arguments)
    work = whole_steps.TINY if options.tiny else whole_steps.gpt(8, 512, 512)
    common = work | {"dtype": "float32", "threads": whole_steps.THREADS, "steps": options.steps, "tiny": options.tiny}
    results = harness.Results("memory_over_step", arguments, common | POLICIES, keep=not options.tiny)
    rows: dict[str, Row] = {}
    for name, policy in POLICIES.items():
        spec = common | {"policy": policy, "path": options.path}
        rows[name] = harness.run_sample("benchmarks.memory_over_step", spec, timeout_s=LIMIT_S)
        results.write(rows=rows)
    failed = [f"{name}: {row['error']}" for name, row in rows.items() if "error" in row]
    if failed:
        print("\n".join(failed))
        return 1
    columns = {
        "step, s": lambda row: f"{row['step_s']:.2f}",
        "peak": lambda row: mib(row["peak_bytes"]),
        "gradients": lambda row: row["gradients"],
    }
    results.finish(harness.table_of("saved activations in memory", rows, columns))
    return 0 if len({row["gradients"] for row in rows.values()}) == 1 else 1


def sample(spec: dict[str, Any]) -> Row:
    """Train some steps with a trace; the curve of one, and the checksum of the last gradients."""
    torch.set_num_threads(spec["threads"])
    torch.manual_seed(0)
    work = build(spec)
    optimizer = torch.optim.AdamW(work.model.parameters(), lr=1e-4)
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace.json"
        options: dict[str, Any] = {"min_bytes": 0} if spec["tiny"] else {}
        for _ in range(spec["steps"]):
            optimizer.zero_grad()
            with actoffload.offload_activations(
                "nvme", path=spec["path"], policy=spec["policy"], trace=os.fspath(trace), model=work.model, **options
            ) as offloader:
                loss, _ = work.forward()
            loss.backward()
            optimizer.step()
        statistics = offloader.statistics()
        offloader.close()
        return curve(trace) | {
            "peak_bytes": statistics.plan_peak_bytes,
            "saved_bytes": statistics.baseline_peak_bytes,
            "gradients": gradients_checksum(work.model),
        }


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
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        print(json.dumps(sample(json.loads(sys.argv[1]))))
    else:
        raise SystemExit(main())
