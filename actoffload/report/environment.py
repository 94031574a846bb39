"""What every measurement records and needs: the machine, the software, the commit, whole files, and workers."""

from __future__ import annotations

import json
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from .. import native_hooks
from ..version import __version__

ROOT = Path(__file__).resolve().parents[2]
"""The checkout, where the package is used from one."""
CODE = ("actoffload", "integrations", "benchmarks/*.py")
"""What a measurement depends on, below the checkout."""
LOOK_S = 0.2
BUSY_SHARE = 0.15
"""A machine on which others take more of the processors than this is called busy."""
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_NO_MEMORY = ("MemoryError", "can't allocate memory", "Cannot allocate memory", "OutOfMemoryError")


def describe_environment(root: Path = ROOT) -> dict[str, Any]:
    """The machine, how busy it is, and the software. No host name, no path.

    Args:
        root: the checkout whose commit is recorded.

    Returns:
        Plain values; sizes in bytes, ``cpu_busy_share`` from 0 to 1 over all cores, measured while this process waits.
    """
    import torch

    share = psutil.cpu_percent(interval=LOOK_S) / 100
    facts: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": psutil.cpu_count(logical=True),
        "memory_bytes": int(psutil.virtual_memory().total),
        "kernel": platform.release(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "cpu_busy_share": round(share, 3),
        "busy": share > BUSY_SHARE,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "actoffload": __version__,
        "native_hooks": native_hooks.refusal() or "yes",
        "commit": commit_of(root),
        "gpu": None,
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["gpu_memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
        facts["cuda"] = torch.version.cuda
    return facts


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit_of(root: Path = ROOT) -> str | None:
    """The commit that was measured, with ``+changes`` when the code differs from it.

    Returns:
        None without git, and where the package is installed: a repository around it is somebody else's.
    """
    try:
        _git(root, "ls-files", "--error-unmatch", "actoffload/version.py")
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--", *CODE)
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}+changes" if changed else head


def _git(root: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def without_paths(text: str, root: Path = ROOT) -> str:
    """``text`` without this machine's directories."""
    return text.replace(str(root), ".").replace(str(Path.home()), "~")


# -- files ------------------------------------------------------------------------------------------------------------


def write_atomically(file: Path, text: str) -> None:
    """Write in one step, so that a run that is killed leaves the last whole file.

    Raises:
        OSError: it cannot be written.
    """
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def write_json(file: Path, payload: dict[str, Any]) -> None:
    """Write ``payload`` as JSON in one step.

    Raises:
        OSError: it cannot be written.
    """
    write_atomically(file, json.dumps(payload, indent=1) + "\n")


# -- processes --------------------------------------------------------------------------------------------------------


def run_worker(module: str, spec: dict[str, Any], *, limit_s: float, cwd: Path | None = None) -> dict[str, Any]:
    """One sample in a process of its own: ``python -m module SPEC`` prints one JSON object as its last line.

    Args:
        module: what is run.
        spec: its options.
        limit_s: seconds after which it is stopped.
        cwd: where it runs.

    Returns:
        What it printed, with ``others_cpu_share``: the share of all cores that other processes (and a hypervisor's
        other guests) took meanwhile, 0 to 1. When it failed, ran too long or out of memory: ``{"error": ..., "oom":
        ...}``, which is a result too; what it wrote to its standard error is passed on.
    """
    command = [sys.executable, "-m", module, json.dumps(spec)]
    before = Processors.now()
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"stopped after {limit_s:.0f} s", "oom": False}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        result: dict[str, Any] = json.loads(lines[-1])
        return {**result, "others_cpu_share": round(Processors.now().others_since(before), 3)}
    return _failure(done.returncode, done.stderr)


def stream_worker(
    module: str,
    spec: dict[str, Any],
    *,
    limit_s: float,
    cwd: Path | None = None,
    stdin: int | None = None,
    each: bool = False,
) -> Generator[Any]:
    """As `run_worker`, for a worker that prints one JSON object after another.

    Args:
        module: what is run.
        spec: its options.
        limit_s: seconds after which it is stopped.
        cwd: where it runs.
        stdin: what it reads: a file descriptor, open until the first object is there. None: what this process reads.
        each: the limit is for each object, from when it is asked for.

    Yields:
        Each object when it is printed; last, when the worker failed, ``{"error": ..., "oom": ...}``.
    """
    command = [sys.executable, "-m", module, json.dumps(spec)]
    stopped = threading.Event()
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(command, cwd=cwd, stdin=stdin, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):

        def stop() -> None:
            stopped.set()
            process.kill()

        timer = threading.Timer(limit_s, stop)
        timer.start()
        try:
            for line in process.stdout or ():
                if not line.startswith("{"):
                    continue
                if each:
                    timer.cancel()
                yield json.loads(line)
                if each:
                    timer = threading.Timer(limit_s, stop)
                    timer.start()
            status = process.wait()
        finally:
            timer.cancel()
            process.kill()
        if stopped.is_set():
            yield {"error": f"stopped after {limit_s:.0f} s", "oom": False}
        elif status != 0:
            errors.seek(0)
            yield _failure(status, errors.read())


def _failure(status: int, errors: str) -> dict[str, Any]:
    """What is said of a worker that ended with ``status`` and wrote ``errors``."""
    if status in _KILLED:
        return {"error": "out of memory: killed by the system (signal 9)", "oom": True}
    sys.stderr.write(errors)
    last = (errors.strip().splitlines() or ["no output"])[-1]
    memory = any(text in errors for text in _NO_MEMORY)
    text = without_paths(f"status {status}: {last}")
    return {"error": f"out of memory: {text}" if memory else text, "oom": memory}


@dataclass(frozen=True, kw_only=True)
class Processors:
    """Processor time so far.

    Attributes:
        busy_s: seconds that the cores together did not idle.
        children_s: seconds of this process's finished children.
        clock_s: when that was.
        cores: how many there are.
    """

    busy_s: float
    children_s: float
    clock_s: float
    cores: int

    @classmethod
    def now(cls) -> Processors:
        """What the system says."""
        times = psutil.cpu_times()
        waiting_s = times.idle + getattr(times, "iowait", 0.0)
        guests_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # part of user and nice, too
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return cls(
            busy_s=sum(times) - waiting_s - guests_s,
            children_s=children.ru_utime + children.ru_stime,
            clock_s=time.monotonic(),
            cores=psutil.cpu_count(logical=True) or 1,
        )

    def others_since(self, before: Processors) -> float:
        """The share of all cores that neither idled nor worked for this process's children, 0 to 1."""
        others_s = (self.busy_s - before.busy_s) - (self.children_s - before.children_s)
        passed_s = max(1e-9, self.clock_s - before.clock_s)
        return min(1.0, max(0.0, others_s / (self.cores * passed_s)))
