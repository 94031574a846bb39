"""Figures of a report and of a trace, each beside a second run that measures it: plain PyTorch, or nothing moved.

The kernel counts the memory of a process (``VmHWM``). A fixed threshold for ``mmap`` keeps glibc's allocator from
holding freed memory, of which it holds another amount in each run.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actoffload.sizes import format_size
from actoffload.tools.trace_file import load
from actoffload.tools.traced_run import Run, look_at
from tests.programs import run_program

PROGRAM = """
import contextlib, ctypes, json, os, sys, time
import torch
import actoffload

assert ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
os.chdir(sys.argv[1])
mode, options, steps = sys.argv[2], json.loads(sys.argv[3]), 6
torch.manual_seed(0)
model = torch.nn.Sequential(*(layer for _ in range(8) for layer in (torch.nn.Linear(128, 128), torch.nn.GELU())))
optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(16384, 128)
offloader = None
if mode != "plain":
    options = {"target": "nvme", "path": ".", "policy": mode, "announce": "none", **options}
    offloader = actoffload.Offloader(actoffload.OffloadConfig(**options)).use(model)
peaks, seconds = [], []


def io():
    with open("/proc/self/io") as file:
        return {name: int(number) for name, number in (line.split(": ") for line in file)}


before = io()
for step in range(steps):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    began_s = time.perf_counter()
    with offloader or contextlib.nullcontext():
        loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    seconds.append(time.perf_counter() - began_s)
    optimizer.zero_grad()
    with open("/proc/self/status") as file:
        peaks.append(next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM:")))
del loss
reported = {"peak": max(peaks[-4:]), "peaks": peaks, "seconds": seconds}
if offloader is not None:
    offloader.synchronize()
    reported |= {"statistics": offloader.statistics().as_dict(), "report": offloader.report()}
    offloader.close()
    reported |= {"written": io()["wchar"] - before["wchar"], "read": io()["rchar"] - before["rchar"]}
print(json.dumps(reported))
"""

pytestmark = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel does not count a peak anew"
)


def run(folder: Path, mode: str, **options: Any) -> dict[str, Any]:
    """Six steps in a process of their own: the highest memory of the last four, and the process's output."""
    done = run_program(PROGRAM, str(folder), mode, json.dumps(options))
    assert done.returncode == 0, done.stderr
    reported: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return reported


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Without an offloader: the peak, and the saved bytes: the inputs of eight GELU, seven layers and the loss."""
    return {"peak": run(tmp_path_factory.mktemp("plain"), "plain")["peak"], "saved": 16 * 16384 * 128 * 4}


def _peaks(run: Run, peaks: list[int]) -> list[tuple[float, float, float]]:
    """Of each step from the third on: the peak of the process, the trace's, and the trace's with nothing moved.

    A trace samples the memory now and then. On a loaded machine it may miss the peak of a step, but not of every one.
    """
    found: list[tuple[float, float, float]] = []
    for number, (begin_s, end_s) in list(enumerate(run.trace.steps()))[2:]:
        numbers = replace(run, shown=number, begin_s=begin_s, end_s=end_s).numbers()
        found.append((peaks[number], numbers["peak_bytes"], numbers["peak_without_bytes"]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "options"), [("all", {}), pytest.param("auto", {"device_budget": "40%"}, marks=pytest.mark.thorough)]
)
def test_a_trace_and_a_report_have_the_gain_of_moving(
    plain: dict[str, Any], tmp_path: Path, policy: str, options: dict[str, Any]
) -> None:
    moved = run(tmp_path, policy, trace="run.json", **options)
    shown, statistics = look_at(load(tmp_path / "run.json")), moved["statistics"]
    numbers = shown.numbers()
    steps = _peaks(shown, moved["peaks"])
    # The step in which the trace missed least: a storage that moves between two samples counts twice, or not at all.
    peak, traced, without = min(steps, key=lambda step: abs(step[1] - step[0]) + abs(step[2] - plain["peak"]))
    assert traced == pytest.approx(peak, rel=0.05)
    assert without == pytest.approx(plain["peak"], rel=0.05)
    # On a slow disk hardly anything has left at the peak: then the gain is next to nothing, and may be negative.
    assert without - traced == pytest.approx(plain["peak"] - peak, rel=0.25, abs=0.1 * plain["saved"])
    assert statistics["baseline_peak_bytes"] == plain["saved"] == numbers["saved_peak_without_bytes"]
    share = f"peak {format_size(statistics['resident_peak_bytes'])} of {format_size(plain['saved'])} with nothing moved"
    assert share in moved["report"]
    last = moved["peaks"][-1]  # the kernel's count starts over with each step
    assert statistics["process_peak_bytes"] == pytest.approx(last, rel=0.05)
    assert statistics["nvme_written_bytes"] == pytest.approx(moved["written"], rel=0.02)
    assert statistics["nvme_read_bytes"] == pytest.approx(moved["read"], rel=0.1)  # Python also reads its modules
    assert numbers["moved_bytes"] == statistics["nvme_written_bytes"] / 6
    assert numbers["wait_s"] == pytest.approx(statistics["wait_s"] / 6, abs=1e-3)
    assert min(moved["seconds"][2:]) <= 1.05 * numbers["step_s"]
    assert numbers["step_s"] <= 1.2 * max(moved["seconds"][2:])
