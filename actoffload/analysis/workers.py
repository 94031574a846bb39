"""Samples in processes of their own: ``python -m module SPEC`` prints JSON objects, and a failure is a result too."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import IO, Any, Self

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
    stdin: IO[bytes] | None = None,
    each: bool = False,
) -> Generator[Any]:
    """Run a worker in a process of its own and yield the JSON objects that it prints.

    Lines that are no JSON object are dropped; what a failed worker wrote to its standard error is passed on.

    Args:
        module: what is run.
        spec: its options.
        limit_s: seconds after which it is stopped.
        cwd: where it runs.
        stdin: what it reads, open until the first object is there. None: what this process reads.
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


class TurnWorker:
    """A process that takes a training step whenever it is asked.

    It prints an object with ``turn`` when it is warm, and another one after each line that it reads. When nothing more
    comes, it prints its result, which has no ``turn``, and ends.

    Args:
        module: what is run.
        spec: its options.
        limit_s: seconds after which it is stopped, for what comes before the first step and for each step.
        cwd: where it runs.

    Attributes:
        last: its result, or its failure as in `stream_worker`; None while it lives.
    """

    def __init__(self, module: str, spec: Mapping[str, Any], *, limit_s: float, cwd: Path | None = None) -> None:
        reading, writing = os.pipe()
        self._input, self._prompt = os.fdopen(reading, "rb"), os.fdopen(writing, "wb", buffering=0)
        self._said = stream_worker(module, dict(spec), limit_s=limit_s, cwd=cwd, stdin=self._input, each=True)
        self.last: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self._input.close()
        self._prompt.close()
        self._said.close()

    def start(self) -> dict[str, Any]:
        """Wait until it is warm; return what it said."""
        said = self._listen()
        self._input.close()
        return said

    def step(self) -> dict[str, Any]:
        """Have it take a step; return what it said."""
        with contextlib.suppress(BrokenPipeError):  # it died, and says so next
            self._prompt.write(b"\n")
        return self._listen()

    def finish(self) -> dict[str, Any]:
        """Return its result, or how it failed; it ends."""
        self._prompt.close()
        while self.last is None:
            self._listen()
        return self.last

    def _listen(self) -> dict[str, Any]:
        said: dict[str, Any] = next(self._said, {"error": "it ended and gave no result", "oom": False})
        if "turn" not in said:
            self.last = said
        return said


def take_turns(
    module: str,
    specs: Mapping[str, Mapping[str, Any]],
    steps: int,
    *,
    limit_s: float,
    cwd: Path | None = None,
    on_said: Callable[[str, dict[str, Any]], object] = lambda name, said: None,
) -> dict[str, dict[str, Any]]:
    """Take the steps of several workers in turns, so that what the machine does meanwhile falls on all of them alike.

    All are started and warmed up, one after the other; then only one of them works at a time. The order is turned
    around after each turn: what a mode leaves to the system to do does not always fall on the same other one.

    Args:
        module: what is run; see `TurnWorker`.
        specs: their options, by name.
        steps: how many each takes.
        limit_s: seconds after which one is stopped, for what comes before its first step and for each step.
        cwd: where they run.
        on_said: is given the name and what a worker says when it is warm and after each step; what it raises ends all.

    Returns:
        By name, the result with ``others_cpu_share`` of the whole run as in `run_worker`, or a failure as in
        `stream_worker`: the rest goes on without it.
    """
    others = OthersShare()
    with contextlib.ExitStack() as stack:
        workers = {}
        for name, spec in specs.items():
            workers[name] = stack.enter_context(TurnWorker(module, spec, limit_s=limit_s, cwd=cwd))
            on_said(name, workers[name].start())
        order = list(workers.items())
        for _ in range(steps):
            for name, worker in order:
                if worker.last is None:
                    on_said(name, worker.step())
            order.reverse()
        found = {name: worker.finish() for name, worker in workers.items()}
    share = others.share()
    return {name: said if "error" in said else {**said, "others_cpu_share": share} for name, said in found.items()}


def turn_ratios(taken: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the first's step time over the second's, for each turn.

    Raises:
        ValueError: one of them took fewer turns.
    """
    return [mine / theirs for mine, theirs in zip(taken, others, strict=True)]


def spread(found: Sequence[float]) -> str:
    """Return ratios for a table: their median, and from where to where they go."""
    text = f"{median(found):.3f}"
    return text if len(found) == 1 else f"{text} ({min(found):.2f} to {max(found):.2f})"


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
