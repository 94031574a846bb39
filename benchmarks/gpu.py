"""The suite for a machine with an accelerator: the tests marked ``gpu``, then models in every mode, and peers.

    python -m benchmarks.gpu [--tiny] [--budget-s S] [--steps N] [--cases NAME ...] [--resume FILE] [--path DIR]

What is measured is in `benchmarks.gpu_cases`: the modes that goals are about first, in every case, of which each fits
the device (`python -m benchmarks.gpu_needs`). Running out of
memory is a result. The result file is written after every mode, so that a run that is stopped keeps what it has; when
time is short, what is left out is named, and ``--resume`` takes it up from that file in the next command. A peer that
is missing ends the suite at once, unless ``--without-peers`` is given. ``--tiny`` runs the same cases with tiny sizes
on the simulated device.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from actoffload.testing import simulated_device
from actoffload.tools.workers import stream_worker
from benchmarks import gpu_report, harness
from benchmarks.gpu_cases import GOALS, GpuCase, cases
from benchmarks.modes import MODES

BUDGET_S = 510
"""Nine minutes, less what it takes to begin and to end a process with much page-locked memory."""
TESTS_LIMIT_S, CASE_LIMIT_S = 120, 300
HANG_S = 60
"""A test that takes longer has its threads' stacks shown, before all tests are stopped."""
PEERS = ("peft", "transformers", "trl")
"""Packages without which the suite does not say what it is to say."""
ALLOCATOR = "PYTORCH_ALLOC_CONF"
LEAST_S = 15
"""With less time than this left, no case is begun."""
SPARE_S = 5
UNTIMED = 14
"""Steps of each mode before those that are timed, with the one whose bits are compared before them: the second one is
recorded, the plan is made for the third, and corrected by those up to the seventh and the eleventh; where nothing moves
any more, the twelfth or one soon after it runs without hooks.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests and every case; 1 when a test or a mode of the library failed, or gradients differed."""
    options = parse(arguments)
    if not options.tiny and not torch.accelerator.is_available():
        print("no accelerator here: nothing was measured (--tiny simulates one)", file=sys.stderr)
        return 2
    missing = [] if options.tiny or options.without_peers else [name for name in PEERS if find_spec(name) is None]
    if missing:
        raise SystemExit(f"MISSING: {', '.join(missing)}. `make gpu-wheels` collects them; or pass --without-peers.")
    chosen = [case for case in cases(options.tiny) if not options.cases or case.name in options.cases]
    suite = Suite(options, arguments)
    if not (options.tiny or options.skip_tests or suite.tests):
        suite.run_tests()
    for case in chosen:
        suite.run_case(case, [mode for mode in case.modes if mode in GOALS])
    for case in chosen:
        suite.run_case(case, case.modes)
    return suite.finish()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.make_parser(__doc__, tiny=True)
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for everything together")
    parser.add_argument("--steps", type=int, help="timed steps of each mode; 5, with --tiny 1")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in cases(True)], help="only these")
    parser.add_argument("--resume", help="a result file: what it has is not measured again")
    parser.add_argument("--skip-tests", action="store_true", help="only the cases")
    parser.add_argument("--without-peers", action="store_true", help="go on although peers are not installed")
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
        if options.resume:
            past = json.loads(Path(options.resume).read_text(encoding="utf-8"))
            if past["environment"]["gpu"] != self.results.payload["environment"]["gpu"]:
                raise SystemExit(f"--resume: {options.resume} is from {past['environment']['gpu']}, another device")
            self.tests = past["tests"]
            self.points = [point for point in past["points"] if "left_out" not in point["result"]]
        os.environ.setdefault(ALLOCATOR, "expandable_segments:True")  # of every mode's process
        self.results.payload["allocator"] = os.environ[ALLOCATOR]

    def remaining_s(self) -> float:
        """Seconds left of the time budget."""
        return self.deadline - time.monotonic()

    def write(self) -> None:
        self.results.write(tests=self.tests, points=self.points)

    def run_tests(self) -> None:
        """The tests marked ``gpu``."""
        # Warnings are not errors here: this machine's versions are not the ones that are pinned.
        options = ["-m", "gpu", "-q", "-W", "default", "-p", "no:cacheprovider", "-o", f"faulthandler_timeout={HANG_S}"]
        command = [sys.executable, "-m", "pytest", *options, "tests/gpu"]
        limit = max(1.0, min(TESTS_LIMIT_S, self.remaining_s()))
        try:
            done = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True, timeout=limit, check=False)
            print(done.stdout, end="")
            lines = done.stdout.strip().splitlines()
            self.tests = {"status": done.returncode, "summary": lines[-1] if lines else done.stderr[-500:]}
        except subprocess.TimeoutExpired as error:
            print((error.stdout or b"").decode(errors="replace"), (error.stderr or b"").decode(errors="replace"))
            self.tests = {"status": -1, "summary": f"stopped after {limit:.0f} s"}
        self.write()

    def run_case(self, case: GpuCase, modes: Iterable[str]) -> None:
        """Some modes of a case, as far as they are not measured, in as few processes as do not fail."""
        waiting = [mode for mode in (case.reference, *modes) if mode not in self._results(case)]
        while waiting:
            reference = self._results(case).get(case.reference)
            if self.remaining_s() < LEAST_S:
                return self._leave_out(case, waiting, "no time was left")
            if reference is not None and "median_step_s" not in reference:
                return self._leave_out(case, waiting, f"{case.reference} was not measured")
            self._run_process(case, waiting)

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
        results = self._results(case)
        counts = [result["statistics"]["baseline_peak_bytes"] for result in results.values() if "statistics" in result]
        peak = "activation_peak_bytes"
        peaks = {mode: result[peak] for mode, result in results.items() if peak in result}
        return case.spec | {
            "device": simulated_device.NAME if accelerator is None else accelerator.type,
            "reference": case.reference,
            "modes": list(modes),
            "steps": self.options.steps or (1 if tiny else 5),
            "path": self.options.path,
            "untimed": UNTIMED,
            "baseline_bytes": max(counts, default=0),
            "peaks": peaks,
            "optimizer": case.optimizer,
            "threads": 1 if tiny else None,
            "limit_s": limit_s,
        }

    def _results(self, case: GpuCase) -> dict[str, dict[str, Any]]:
        """The results of a case by mode, failures as well."""
        return {point["mode"]: point["result"] for point in self.points if point["case"]["name"] == case.name}

    def _leave_out(self, case: GpuCase, waiting: list[str], why: str) -> None:
        for mode in waiting:
            self._add(case, mode, {"left_out": why})

    def _add(self, case: GpuCase, mode: str, result: dict[str, Any]) -> None:
        about = {"name": case.name, "reference": case.reference, "ssdtrain": case.ssdtrain} | case.spec
        self.points.append({"case": about, "mode": mode, "result": result})
        self.write()
        print(json.dumps({"case": case.name, "mode": mode} | gpu_report.short(result)), flush=True)

    def finish(self) -> int:
        """Write the tables; 0 when all is well."""
        points = self.points
        self.write()
        self.results.finish(gpu_report.render(points), gpu_report.goals(points))
        ours = [p for p in points if MODES[p["mode"]].ours or p["mode"] == p["case"]["reference"]]
        broken = [p for p in ours if "error" in p["result"] and not p["result"].get("oom")]
        different = [p for p in ours if gpu_report.differs(p["result"])]
        peers = [f"{p['case']['name']} / {p['mode']}" for p in points if p not in ours and "error" in p["result"]]
        if peers:
            print(f"PEERS THAT FAILED: {'; '.join(peers)}")
        tests_failed = self.tests is not None and self.tests["status"] != 0
        print(f"{len(broken)} failed, {len(different)} differ, tests failed: {tests_failed}")
        return 1 if broken or different or tests_failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
