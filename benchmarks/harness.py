"""What every benchmark shares: samples in processes of their own, the environment, and files with the results."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

import actoffload

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Sample = dict[str, Any]


def interleave(modes: Sequence[str], rounds: int, measure: Callable[[str], Sample]) -> dict[str, list[Sample]]:
    """Samples of every mode, taken in turns (A B A B), so that a drift of the machine falls on all alike."""
    samples: dict[str, list[Sample]] = {mode: [] for mode in modes}
    for _ in range(rounds):
        for mode in modes:
            samples[mode].append(measure(mode))
    return samples


def run_sample(module: str, spec: dict[str, Any], *, timeout_s: float) -> Sample:
    """One sample in a process of its own: ``python -m module SPEC`` prints JSON as its last line.

    Returns:
        What it printed; or, when it failed or ran too long, ``{"error": ...}``, which is a result too.
    """
    command = [sys.executable, "-m", module, json.dumps(spec)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"stopped after {timeout_s:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        sys.stderr.write(done.stderr)
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        return {"error": _without_paths(f"status {done.returncode}: {last[0]}")}
    sample: Sample = json.loads(lines[-1])
    return sample


def environment() -> dict[str, Any]:
    """The machine and the software. No host name, no path."""
    facts: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(logical=True),
        "memory_bytes": int(psutil.virtual_memory().total),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "actoffload": actoffload.__version__,
        "commit": _commit(),
        "gpu": None,
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["gpu_memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
        facts["cuda"] = torch.version.cuda
    return facts


def results_folder(*, keep: bool = True) -> Path:
    """Where results go: ``$OUT`` where that is set, else ``benchmarks/results``, or ``build`` for those not to keep."""
    folder = Path(os.environ.get("OUT") or (RESULTS if keep else ROOT / "build" / "results"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_results(path: Path, payload: dict[str, Any]) -> None:
    """Write ``payload`` as JSON in one step, so that a run that is killed leaves the last whole file."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(payload, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; the first column is left-aligned, the others right-aligned."""
    lines = [
        "| " + " | ".join(columns) + " |",
        "| " + " | ".join(["---"] + ["---:"] * (len(columns) - 1)) + " |",
    ]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def stamp() -> str:
    """Today, for the name of a result file."""
    return time.strftime("%Y-%m-%d", time.gmtime())


def command_line(module: str, arguments: Sequence[str]) -> str:
    """The command that repeats this run."""
    return _without_paths(" ".join(["python", "-m", module, *arguments]))


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit that was measured, with ``+changes`` when the working tree differs from it; None without git."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", "actoffload", "benchmarks/*.py")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}+changes" if changed else head


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _without_paths(text: str) -> str:
    """``text`` without this machine's directories."""
    return text.replace(str(ROOT), ".").replace(str(Path.home()), "~")
