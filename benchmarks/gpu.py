"""The suite for a machine with an accelerator: the tests marked ``gpu``, then stacks of GPT blocks under every mode.

    python -m benchmarks.gpu [--tiny] [--budget-s S] [--steps N] [--path DIR] [--skip-tests]

Each point is a process of its own. Running out of memory is a point too. The result file is written after every point,
so that a run that is stopped keeps what it has. ``--tiny`` runs everything on the CPU with tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from actoffload.report.plots import Point, step_time_against_memory
from benchmarks import harness

MODES = ("keep", "recompute", "host", "save_on_cpu", "tiered", "nvme")
TINY_MODES = ("keep", "recompute", "save_on_cpu", "tiered", "nvme")  # `host` leaves CPU tensors alone
FILL_BYTES = 40 << 30
"""Saved activations that a stack should have on a large device; less where the device is smaller."""
POINT_LIMIT_S = 150
TESTS_LIMIT_S = 200


@dataclass(frozen=True, kw_only=True)
class StackCase:
    """A stack of GPT blocks. ``seq`` in tokens, ``batch`` in sequences."""

    name: str
    width: int
    layers: int
    seq: int
    batch: int
    dtype: str = "bfloat16"


def cases(tiny: bool) -> list[StackCase]:
    """The stacks to measure, their batch chosen to fill the device."""
    if tiny:
        return [StackCase(name="tiny", width=256, layers=3, seq=128, batch=4)]
    return [_filled("w8192x4", 8192, 4), _filled("w4096x16", 4096, 16)]


def _filled(name: str, width: int, layers: int, seq: int = 2048) -> StackCase:
    # A block saves 16 tensors' worth of its width for each token (see testing/gpt.py), two bytes each in bf16.
    sequence_bytes = 16 * 2 * width * layers * seq
    total = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else torch.accelerator.get_memory_info()[1]
    room = min(FILL_BYTES, int(0.4 * total))
    return StackCase(name=name, width=width, layers=layers, seq=seq, batch=max(1, room // sequence_bytes))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests and every point; 1 when a test failed, a point failed or gradients differed."""
    options = _parse(arguments)
    if not options.tiny and not torch.accelerator.is_available():
        print("no accelerator here: nothing was measured (--tiny runs the suite on the CPU)", file=sys.stderr)
        return 2
    suite = Suite(options, sys.argv[1:] if arguments is None else arguments)
    if not options.skip_tests:
        suite.run_tests()
    for case in cases(options.tiny):
        for mode in TINY_MODES if options.tiny else MODES:
            suite.run_point(case, mode)
    return suite.finish()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="on the CPU, with tiny sizes")
    parser.add_argument("--budget-s", type=float, default=500, help="seconds for everything together")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each point")
    parser.add_argument("--path", help="directory of the spool")
    parser.add_argument("--skip-tests", action="store_true", help="only the stacks")
    return parser.parse_args(arguments)


class Suite:
    """Runs the parts within the time budget and keeps the result file up to date."""

    def __init__(self, options: argparse.Namespace, arguments: Sequence[str]) -> None:
        self.options = options
        self.deadline: float = time.monotonic() + options.budget_s
        kind = "tiny" if options.tiny else torch.cuda.get_device_name() if torch.cuda.is_available() else "accelerator"
        name = f"gpu_{kind.replace(' ', '-').lower()}_{harness.stamp()}.json"
        self.file = harness.results_folder(keep=not options.tiny) / name
        self.payload: dict[str, Any] = {
            "benchmark": "gpu",
            "command": harness.command_line("benchmarks.gpu", arguments),
            "environment": harness.environment(),
            "tests": None,
            "points": [],
        }

    def remaining_s(self) -> float:
        """Seconds left of the time budget."""
        return self.deadline - time.monotonic()

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
            tests = {"status": done.returncode, "summary": lines[-1] if lines else done.stderr[-500:]}
        except subprocess.TimeoutExpired:
            tests = {"status": -1, "summary": f"stopped after {limit:.0f} s"}
        self.payload["tests"] = tests
        harness.write_results(self.file, self.payload)

    def run_point(self, case: StackCase, mode: str) -> None:
        """One mode on one stack; skipped, and said so, when no time is left."""
        point: dict[str, Any] = {"case": asdict(case), "mode": mode}
        if self.remaining_s() < 5:
            point["result"] = {"error": "not run: the time budget is spent", "skipped": True}
        else:
            limit = min(POINT_LIMIT_S, self.remaining_s())
            point["result"] = harness.run_sample("benchmarks.worker", self._spec(case, mode), timeout_s=limit)
        point["result"]["identical"] = self._identical(case, point["result"])
        self.payload["points"].append(point)
        harness.write_results(self.file, self.payload)
        print(json.dumps({"case": case.name, "mode": mode} | _short(point["result"])), flush=True)

    def _spec(self, case: StackCase, mode: str) -> dict[str, Any]:
        accelerator = torch.accelerator.current_accelerator() if not self.options.tiny else None
        head_width = min(128, case.width)
        return {
            "model": "stack",
            "gpt": {"layers": case.layers, "width": case.width, "seq": case.seq, "head_width": head_width},
            "batch": case.batch,
            "device": "cpu" if accelerator is None else accelerator.type,
            "dtype": case.dtype,
            "mode": mode,
            "steps": self.options.steps,
            "path": self.options.path,
        }

    def _identical(self, case: StackCase, result: dict[str, Any]) -> bool | None:
        """Whether the first step's gradients are those of ``keep``; None where one of them has none."""
        keep = next((p for p in self.payload["points"] if p["case"]["name"] == case.name), None)
        reference = result if keep is None else keep["result"]
        if "first_gradients" not in result or "first_gradients" not in reference:
            return None
        return bool(result["first_gradients"] == reference["first_gradients"])

    def finish(self) -> int:
        """Write the table and the picture; 0 when all is well."""
        table = render(self.payload["points"])
        print(table)
        self.file.with_suffix(".md").write_text(table, encoding="utf-8")
        picture = self.file.with_suffix(".png")
        if step_time_against_memory(_picture_points(self.payload["points"]), picture, _title(self.payload)):
            print(f"picture: {picture.name}")
        results = [point["result"] for point in self.payload["points"]]
        broken = [r for r in results if "error" in r and not r.get("oom") and not r.get("skipped")]
        different = [r for r in results if r["identical"] is False or r.get("reproducible") is False]
        tests = self.payload["tests"]
        tests_failed = tests is not None and tests["status"] != 0
        print(f"results: {self.file.name}; {len(broken)} failed, {len(different)} differ, tests failed: {tests_failed}")
        return 1 if broken or different or tests_failed else 0


def render(points: Sequence[dict[str, Any]]) -> str:
    """All points as a Markdown table."""
    columns = ("stack / mode", "step s", "activation peak", "moved a step", "stalled s a step", "bit-identical")
    return harness.markdown_table(columns, [_row(point) for point in points])


def _row(point: dict[str, Any]) -> tuple[str, ...]:
    case, result = point["case"], point["result"]
    name = f"{case['name']} ({case['batch']} × {case['seq']}) / {point['mode']}"
    if "error" in result:
        return (name, "out of memory" if result.get("oom") else result["error"], "-", "-", "-", "-")
    statistics = result.get("statistics")
    return (
        name,
        f"{result['median_step_s']:.3f}",
        _gib(activation_peak(result)),
        "-" if statistics is None else _gib(statistics["moved_bytes"] // statistics["steps"]),
        "-" if statistics is None else f"{statistics['wait_s'] / statistics['steps']:.2f}",
        {True: "yes", False: "NO", None: "-"}[result["identical"]],
    )


def activation_peak(result: dict[str, Any]) -> int | None:
    """What the device's allocator saw; on the CPU, what the offloader counted (None for the other modes)."""
    if "activation_peak_bytes" in result:
        return int(result["activation_peak_bytes"])
    statistics = result.get("statistics")
    return None if statistics is None else int(statistics["resident_peak_bytes"])


def _picture_points(points: Sequence[dict[str, Any]]) -> list[Point]:
    drawn = []
    for point in points:
        result = point["result"]
        peak = activation_peak(result)
        step_s = result.get("median_step_s") if peak is not None else None
        peak_gib = None if peak is None else peak / 2**30
        drawn.append(Point(group=point["case"]["name"], label=point["mode"], step_s=step_s, peak_gib=peak_gib))
    return drawn


def _title(payload: dict[str, Any]) -> str:
    environment = payload["environment"]
    return f"{environment['gpu'] or environment['cpu']}, torch {environment['torch']}"


def _short(result: dict[str, Any]) -> dict[str, Any]:
    return {
        key: result[key] for key in ("median_step_s", "activation_peak_bytes", "identical", "error") if key in result
    }


def _gib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 2**30:.2f} GiB"


if __name__ == "__main__":
    raise SystemExit(main())
