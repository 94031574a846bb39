"""Typed trace events and the sink they go to.

A sink is any callable that takes one `TraceEvent`. With no sink, nothing is built and nothing is called: callers test
``sink is None`` first, which is all that tracing costs when it is off.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class EventKind(Enum):
    """What happened to a saved storage."""

    PACK = "pack"  # autograd saved it
    KEEP = "keep"  # it stays where it is; `detail` says why
    WRITE = "write"  # device -> host or disk, begin to end
    READ = "read"  # disk or host -> device, begin to end
    FORWARD = "forward"  # unpack found it still in memory
    CANCEL = "cancel"  # its write had not started and was dropped
    UNPACK_WAIT = "unpack_wait"  # backward had to wait for it
    PACK_WAIT = "pack_wait"  # forward had to wait for room
    DEGRADED = "degraded"  # something below failed; the step went on
    RELEASE = "release"  # its last handle died


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """One thing that happened: when (seconds, monotonic), for how long (seconds), to which record, how many bytes."""

    kind: EventKind
    time_s: float
    record: int
    nbytes: int
    duration_s: float = 0.0
    detail: str = ""
    thread: int = field(default_factory=threading.get_ident)


EventSink = Callable[[TraceEvent], None]
"""Called from several threads, under the offloader's lock: it must not raise and must not call the offloader."""


class ChromeTraceSink:
    """Writes events as a Chrome / Perfetto trace (JSON array format, microseconds) to ``path``.

    The array is left open on purpose while the run goes on (the format allows it), so that a killed run still has its
    trace.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._lock = threading.Lock()
        self._file = open(self.path, "w", encoding="utf-8")  # noqa: SIM115 - closed by close()
        self._file.write("[\n")

    def __call__(self, event: TraceEvent, /) -> None:
        """Append one event."""
        row: dict[str, Any] = {
            "name": event.detail or event.kind.value,
            "cat": event.kind.value,
            "ph": "X" if event.duration_s else "i",
            "ts": round(event.time_s * 1e6, 3),
            "pid": os.getpid(),
            "tid": event.thread,
            "args": {"record": event.record, "bytes": event.nbytes},
        }
        if event.duration_s:
            row["dur"] = round(event.duration_s * 1e6, 3)
        else:
            row["s"] = "t"
        with self._lock:
            if not self._file.closed:
                self._file.write(json.dumps(row) + ",\n")

    def close(self) -> None:
        """Finish the array; further events are dropped."""
        with self._lock:
            if not self._file.closed:
                self._file.write("{}]\n")
                self._file.close()


def open_sink(trace: str | os.PathLike[str] | Callable[[TraceEvent], None] | None) -> EventSink | None:
    """The sink for a ``trace=`` option: a path becomes a Chrome trace, a callable is used as it is."""
    return trace if trace is None or callable(trace) else ChromeTraceSink(trace)


now = time.monotonic
