"""Typed events and the callable that they go to.

With no sink, nothing is built and nothing is called: callers test ``sink is None`` first, which is all that tracing
costs when it is off.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple


class EventKind(Enum):
    """What happened to a saved storage, or to the plan."""

    PACK = "pack"  # autograd saved it
    KEEP = "keep"  # it stays where it is; `detail` says why
    WRITE = "write"  # device -> host or disk, begin to end
    READ = "read"  # disk or host -> device, begin to end
    FORWARD = "forward"  # unpack found it still in memory
    CANCEL = "cancel"  # its write had not started and was dropped
    UNPACK_WAIT = "unpack_wait"  # backward had to wait for it
    PACK_WAIT = "pack_wait"  # forward had to wait for room, to save it
    DEGRADED = "degraded"  # something below failed; the step went on
    RELEASE = "release"  # its last handle died
    PLAN = "plan"  # another plan is followed; `record` is 0


class TraceEvent(NamedTuple):
    """One thing that happened: when (seconds, monotonic), for how long (seconds), to which record, how many bytes."""

    kind: EventKind
    time_s: float
    record: int
    nbytes: int
    duration_s: float = 0.0
    detail: str = ""
    thread: int = 0
    module: str = ""
    """That saved the storage, where modules' names are known."""


EventSink = Callable[[TraceEvent], None]
"""Called from several threads, under the offloader's lock: it must not raise and must not call the offloader."""


now = time.monotonic
