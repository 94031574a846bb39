"""Typed events, and the callable that receives them.

Callers test ``sink is None`` before they build an event, so this test is the only cost while tracing is off.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple


class EventKind(Enum):
    """The kinds of events of a saved storage, or of the plan."""

    PACK = "pack"  # autograd saved it
    KEEP = "keep"  # it stays where it is; `detail` has the reason
    WRITE = "write"  # device -> host or disk, begin to end
    READ = "read"  # disk or host -> device, begin to end
    FORWARD = "forward"  # unpack found it still in memory
    CANCEL = "cancel"  # its write had not started and was dropped
    UNPACK_WAIT = "unpack_wait"  # backward had to wait for it
    PACK_WAIT = "pack_wait"  # forward had to wait for room, to save it
    DEGRADED = "degraded"  # an operation on disk or memory failed; the step went on
    RELEASE = "release"  # its last handle died
    PLAN = "plan"  # the offloader follows another plan; `record` is 0


class TraceEvent(NamedTuple):
    """One event: its begin (seconds, monotonic), its duration (seconds), its record and its bytes."""

    kind: EventKind
    time_s: float
    record: int
    nbytes: int
    duration_s: float = 0.0
    detail: str = ""
    thread: int = 0
    module: str = ""
    """The module that saved the storage, if names of modules are known."""


EventSink = Callable[[TraceEvent], None]
"""Called from several threads, under the offloader's lock: it must not raise and must not call the offloader."""


now = time.monotonic
