"""Samples in processes of their own: ``python -m module SPEC`` prints JSON objects, and a failure is a result too."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil

from .environment import without_paths

_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_NO_MEMORY = ("MemoryError", "can't allocate memory", "Cannot allocate memory", "OutOfMemoryError")


def run_worker(module: str, spec: dict[str, Any], *, limit_s: float, cwd: Path | None = None) -> dict[str, Any]:
    """Run one sample in a process of its own and return the last JSON object that it prints.

    Args:
        module: what is run.
        spec: its options.
        limit_s: seconds after which it is stopped.
        cwd: where it runs.

    Returns:
        The object, or that of a failure as in `stream_worker`, with ``others_cpu_share``: the share of all cores that
        other processes (and a hypervisor's other guests) took meanwhile, 0 to 1.
    """
    others = OthersShare()
    result: dict[str, Any] = {"error": "status 0: no output", "oom": False}
    for printed in stream_worker(module, spec, limit_s=limit_s, cwd=cwd):
        result = printed
    return {**result, "others_cpu_share": others.share()}


def stream_worker(
    module: str,
    spec: dict[str, Any],
    *,
    limit_s: float,
    cwd: Path | None = None,
    stdin: int | None = None,
    each: bool = False,
) -> Generator[Any]:
    """Run a worker in a process of its own and yield the JSON objects that it prints.

    Lines that are no JSON object are dropped; what a failed worker wrote to its standard error is passed on.

    Args:
        module: what is run.
        spec: its options.
        limit_s: seconds after which it is stopped.
        cwd: where it runs.
        stdin: what it reads: a file descriptor, open until the first object is there. None: what this process reads.
        each: the limit is for each object, from when it is asked for.

    Yields:
        Each object when it is printed; last, when the worker failed, ran too long or out of memory,
        ``{"error": ..., "oom": ...}``.
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
    """Return what is said of a worker that ended with ``status`` and wrote ``errors``."""
    if status in _KILLED:
        return {"error": "out of memory: killed by the system (signal 9)", "oom": True}
    sys.stderr.write(errors)
    last = (errors.strip().splitlines() or ["no output"])[-1]
    memory = any(text in errors for text in _NO_MEMORY)
    text = without_paths(f"status {status}: {last}")
    return {"error": f"out of memory: {text}" if memory else text, "oom": memory}


class OthersShare:
    """Measures, from when it is made, what share of the processors works for others than this process's children."""

    def __init__(self) -> None:
        self._begin = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        """Return the seconds that the cores together worked for others, and the clock."""
        times, children = psutil.cpu_times(), resource.getrusage(resource.RUSAGE_CHILDREN)
        # Guests' time is part of user and nice time, too.
        idle_s = sum(getattr(times, name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))
        return sum(times) - idle_s - children.ru_utime - children.ru_stime, time.monotonic()

    def share(self) -> float:
        """Return the share so far, 0 to 1, of all cores; children that still run count as others."""
        (begin_s, begin_clock_s), (end_s, end_clock_s) = self._begin, self._now()
        passed_s = max(1e-9, end_clock_s - begin_clock_s) * (psutil.cpu_count(logical=True) or 1)
        return round(min(1.0, max(0.0, (end_s - begin_s) / passed_s)), 3)
