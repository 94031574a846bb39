"""Samples in processes of their own: ``python -m module SPEC`` prints JSON objects, and a failure is a result, too."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from ..errors import ActOffloadError, BudgetError
from .environment import without_errno, without_paths

_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_NO_MEMORY = ("MemoryError", "can't allocate memory", "Cannot allocate memory", "OutOfMemoryError", "out of memory")
Prompts = Callable[[], bool]
FAILURES = (ActOffloadError, MemoryError, RuntimeError, OSError)
"""Errors that are a result of a measurement."""


def say(something: dict[str, Any]) -> None:
    """Print a JSON object for the parent process."""
    print(json.dumps(something), flush=True)


def serve(measure: Callable[[dict[str, Any]], dict[str, Any]], argument: str) -> None:
    """Be a worker: measure what ``argument`` describes, and print the result or the failure."""
    try:
        result = measure(json.loads(argument))
    except FAILURES as error:
        result = failure(error)
    say(result)


def run_worker(module: str, spec: dict[str, Any], *, limit_s: float, cwd: Path | None = None) -> dict[str, Any]:
    """Run one sample as `stream_worker` does and return its last object, with the ``others_cpu_share`` meanwhile."""
    others = OthersShare()
    result: dict[str, Any] = {"error": "status 0: no output", "oom": False}
    for printed in stream_worker(module, spec, limit_s=limit_s, cwd=cwd):
        result = printed
    return {**result, "others_cpu_share": others.share()}


def stream_worker(
    module: str, spec: dict[str, Any], *, limit_s: float, cwd: Path | None = None, prompts: Prompts | None = None
) -> Generator[dict[str, Any]]:
    """Run a worker in a process of its own and yield each JSON object that it prints, last a failure if there was one.

    Other lines are dropped; the standard error of a failed worker is passed on.

    Args:
        limit_s: seconds after which it is stopped; with ``prompts``, for each object, from its request on.
        prompts: called after each object: whether the worker gets a line on its standard input, for one more. Then the
            input ends. None: it inherits the standard input.
    """
    command = [sys.executable, "-m", module, json.dumps(spec)]
    stopped = threading.Event()
    stdin = None if prompts is None else subprocess.PIPE
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
                if prompts is not None:  # the limit is for the worker's own time, not for that of others meanwhile
                    timer.cancel()
                yield json.loads(line)
                if prompts is not None:
                    timer = threading.Timer(limit_s, stop)
                    timer.start()
                    _prompt(process, prompts())
            status = process.wait()
        finally:
            # The caller may close this generator while the worker runs; without a kill the exit below would wait.
            timer.cancel()
            process.kill()
            _prompt(process, False)
        if stopped.is_set():
            yield {"error": f"stopped after {limit_s:.0f} s", "oom": False}
        elif status != 0:
            errors.seek(0)
            yield _failure(status, errors.read())


def _prompt(process: subprocess.Popen[str], more: bool) -> None:
    """Send a process a line, or end its standard input."""
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # it died; the caller sees its end next
            if more:
                process.stdin.write("\n")
                process.stdin.flush()
            else:
                process.stdin.close()


def take_turns(
    module: str,
    specs: Mapping[str, dict[str, Any]],
    steps: int,
    *,
    limit_s: float,
    cwd: Path | None = None,
    on_said: Callable[[str, dict[str, Any]], object] = lambda name, said: None,
) -> dict[str, dict[str, Any]]:
    """Take the steps of several workers in turns, so that the load of the machine is the same for all of them.

    A worker prints an object with ``turn`` when it is warm, and another one for each line that it reads, after a step.
    When its input ends it prints its result, which has no ``turn``. Only one works at a time. The order is reversed
    after each turn: work that a mode leaves to the system does not always slow down the same other mode.

    Return by name each worker's result with ``others_cpu_share`` of the whole run, or its failure, after which the
    others go on. ``on_said`` is called with the name and each object or failure; an exception from it ends all.
    """
    others, more = OthersShare(), True
    last: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        order = []
        for name, spec in specs.items():
            worker = stream_worker(module, spec, limit_s=limit_s, cwd=cwd, prompts=lambda: more)
            order.append((name, stack.enter_context(contextlib.closing(worker))))
        for turn in range(steps + 2):  # they start, take their steps and end
            more = turn <= steps
            for name, worker in order:
                last[name] = said = next(worker, last.get(name, {}))
                on_said(name, said)
            if turn:
                order.reverse()
    share = others.share()
    for name, said in last.items():
        if "turn" in said:
            last[name] = {"error": "it ended and gave no result", "oom": False}
        elif "error" not in said:
            last[name] = {**said, "others_cpu_share": share}
    return last


def turn_ratios(taken: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the first's step time over the second's, for each turn."""
    return [mine / theirs for mine, theirs in zip(taken, others, strict=True)]


def failure(error: BaseException) -> dict[str, Any]:
    """Return an error as a result; ``oom``: there was no room, in memory or under a budget."""
    line = next(iter(without_errno(str(error)).splitlines()), type(error).__name__)
    text = f"{type(error).__name__}: {line}"
    if isinstance(error, BudgetError):  # whatever its text names, memory was not the limit
        return {"error": text, "oom": True}
    memory = any(part in f"{type(error).__name__}: {error}" for part in _NO_MEMORY)
    return {"error": f"out of memory: {line}" if memory else text, "oom": memory}


def _failure(status: int, errors: str) -> dict[str, Any]:
    """Return the end of a worker with ``status``, which wrote ``errors``, as a result."""
    if status in _KILLED:
        return {"error": "out of memory: killed by the system (signal 9)", "oom": True}
    sys.stderr.write(errors)
    last = (errors.strip().splitlines() or ["no output"])[-1]
    memory = any(text in errors for text in _NO_MEMORY)
    text = without_paths(f"status {status}: {last}")
    return {"error": f"out of memory: {text}" if memory else text, "oom": memory}


class OthersShare:
    """Measures, from its creation on, the share of all cores that other processes and a hypervisor's guests take."""

    def __init__(self) -> None:
        self._begin = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        """The seconds that the cores together worked for other processes, and the clock."""
        times, children = psutil.cpu_times(), resource.getrusage(resource.RUSAGE_CHILDREN)
        # Guests' time is part of user and nice time, too.
        idle_s = sum(getattr(times, name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))
        return sum(times) - idle_s - children.ru_utime - children.ru_stime, time.monotonic()

    def share(self) -> float:
        """Return the share so far, 0 to 1, of all cores; children that still run count as other processes."""
        (begin_s, begin_clock_s), (end_s, end_clock_s) = self._begin, self._now()
        passed_s = max(1e-9, end_clock_s - begin_clock_s) * (psutil.cpu_count(logical=True) or 1)
        return round(min(1.0, max(0.0, (end_s - begin_s) / passed_s)), 3)
