"""The suite for a machine with an accelerator: the tests marked ``gpu``, then SSDTrain's shapes and a Llama.

    python -m benchmarks.gpu [--tiny] [--budget-s S] [--steps N] [--cases NAME ...] [--path DIR] [--skip-tests]

What is measured is in `benchmarks.gpu_cases`: the library's modes, full recompute and peers, on the same work. Running
out of memory is a result, and so is a peer that is not to be had. The result file is written after every mode, so that
a run that is stopped keeps what it has; when time is short, the cases and modes that are left out are named. ``--tiny``
runs everything on the CPU with tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from actoffload.analysis.plots import step_time_against_memory
from actoffload.analysis.workers import stream_worker
from benchmarks import gpu_report, harness
from benchmarks.gpu_cases import GpuCase, cases
from benchmarks.modes import MODES

BUDGET_S = 510
"""Nine minutes, less what it takes to begin, to end a process with much page-locked memory and to draw."""
TESTS_LIMIT_S, CASE_LIMIT_S = 120, 150
LEAST_S = 15
"""With less time than this left, no case is begun."""
SPARE_S = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests and every case; 1 when a test or a mode of the library failed, or gradients differed."""
    options = parse(arguments)
    if not options.tiny and not torch.accelerator.is_available():
        print("no accelerator here: nothing was measured (--tiny runs the suite on the CPU)", file=sys.stderr)
        return 2
    suite = Suite(options, arguments)
    if not options.skip_tests:
        suite.run_tests()
    for case in cases(options.tiny):
        if not options.cases or case.name in options.cases:
            suite.run_case(case)
    return suite.finish()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of a run."""
    parser = harness.make_parser(__doc__, tiny=True)
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for everything together")
    parser.add_argument("--steps", type=int, help="timed steps of each mode; 3, with --tiny 1")
    parser.add_argument("--cases", nargs="+", help="only these, by name")
    parser.add_argument("--skip-tests", action="store_true", help="only the cases")
    return parser.parse_args(arguments)


class Suite:
    """Runs the parts within the time budget and keeps the result file up to date."""

    def __init__(self, options: argparse.Namespace, arguments: Sequence[str] | None) -> None:
        self.options = options
        self.deadline: float = time.monotonic() + options.budget_s
        kind = "tiny" if options.tiny else torch.cuda.get_device_name() if torch.cuda.is_available() else "accelerator"
        variant = kind.replace(" ", "-").lower()
        self.results = harness.Results("gpu", arguments, vars(options), variant=variant, keep=not options.tiny)
        self.tests: dict[str, Any] | None = None
        self.points: list[dict[str, Any]] = []

    def remaining_s(self) -> float:
        """Seconds left of the time budget."""
        return self.deadline - time.monotonic()

    def write(self) -> None:
        """Write what there is."""
        self.results.write(tests=self.tests, points=self.points)

    def run_tests(self) -> None:
        """The tests marked ``gpu``; without an accelerator each of them is skipped, but still imported."""
        # Warnings are not errors here: this machine's versions are not the ones that are pinned.
        options = ["-m", "gpu", "-q", "-W", "default", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *options, "tests/gpu"]
        limit = max(1.0, min(TESTS_LIMIT_S, self.remaining_s()))
        try:
            done = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True, timeout=limit, check=False)
            print(done.stdout, end="")
            lines = done.stdout.strip().splitlines()
            self.tests = {"status": done.returncode, "summary": lines[-1] if lines else done.stderr[-500:]}
        except subprocess.TimeoutExpired:
            self.tests = {"status": -1, "summary": f"stopped after {limit:.0f} s"}
        self.write()

    def run_case(self, case: GpuCase) -> None:
        """All modes of a case, in as few processes as do not fail."""
        waiting = [case.reference, *case.modes]
        while waiting:
            if self.remaining_s() < LEAST_S:
                return self._leave_out(case, waiting, "no time was left")
            self._run_process(case, waiting)
            if case.reference in waiting or "error" in self._reference(case):
                return self._leave_out(case, waiting, f"{case.reference} was not measured")

    def _run_process(self, case: GpuCase, waiting: list[str]) -> None:
        """One process; takes from ``waiting`` what it measured, and at least one mode."""
        limit_s = min(CASE_LIMIT_S, self.remaining_s() - SPARE_S)
        spec = self._spec(case, [mode for mode in waiting if mode != case.reference], limit_s - SPARE_S)
        measured_reference = False
        for result in stream_worker("benchmarks.gpu_worker", spec, limit_s=limit_s, cwd=harness.ROOT):
            mode = result.setdefault("mode", waiting[0] if waiting else case.reference)
            measured_reference = measured_reference or mode == case.reference
            if mode in waiting:  # else it is the reference again, in a process that takes the rest
                self._add(case, mode, result)
                waiting.remove(mode)
        if not measured_reference and waiting:
            self._add(case, waiting.pop(0), {"error": "the process said nothing", "oom": False})

    def _spec(self, case: GpuCase, modes: Sequence[str], limit_s: float) -> dict[str, Any]:
        tiny = self.options.tiny
        accelerator = None if tiny else torch.accelerator.current_accelerator()
        return case.spec | {
            "device": "cpu" if accelerator is None else accelerator.type,
            "reference": case.reference,
            "modes": list(modes),
            "steps": self.options.steps or (1 if tiny else 3),
            "path": self.options.path,
            "threads": 1 if tiny else None,
            "limit_s": limit_s,
        }

    def _reference(self, case: GpuCase) -> dict[str, Any]:
        points = [p for p in self.points if p["case"]["name"] == case.name and p["mode"] == case.reference]
        found: dict[str, Any] = points[0]["result"]
        return found

    def _leave_out(self, case: GpuCase, waiting: list[str], why: str) -> None:
        for mode in waiting:
            self._add(case, mode, {"left_out": why})

    def _add(self, case: GpuCase, mode: str, result: dict[str, Any]) -> None:
        about = {"name": case.name, "reference": case.reference, "ssdtrain": case.ssdtrain} | case.spec
        self.points.append({"case": about, "mode": mode, "result": result})
        self.write()
        print(json.dumps({"case": case.name, "mode": mode} | gpu_report.short(result)), flush=True)

    def finish(self) -> int:
        """Write the tables and the picture; 0 when all is well."""
        points = self.points
        self.write()
        self.results.finish(gpu_report.render(points), gpu_report.goals(points))
        picture = self.results.file.with_suffix(".png")
        if step_time_against_memory(gpu_report.drawn(points), picture, gpu_report.title(self.results.payload)):
            print(f"picture: {picture.name}")
        ours = [p for p in points if MODES[p["mode"]].ours or p["mode"] == p["case"]["reference"]]
        broken = [p for p in ours if "error" in p["result"] and not p["result"].get("oom")]
        different = [p for p in ours if gpu_report.differs(p["result"])]
        tests_failed = self.tests is not None and self.tests["status"] != 0
        print(f"{len(broken)} failed, {len(different)} differ, tests failed: {tests_failed}")
        return 1 if broken or different or tests_failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
