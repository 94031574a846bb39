"""Engines with faults: the real engine on a real file, with one defect each.

Partially applied, each is an engine factory: ``Spool([path], engine=partial(FullEngine, capacity_bytes=1 << 20))``. The
arguments ``file`` and ``threads`` are those of every engine.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Iterable

from ..storage.engines.base import IoKind, IoRequest, SpoolFile
from ..storage.engines.posix import PosixEngine


class SlowEngine(PosixEngine):
    """A disk with a fixed speed, which all threads share.

    Args:
        bandwidth_bytes_per_s: Bytes per second, reads and writes together.
        latency_s: Seconds that every system call takes in addition.
    """

    def __init__(
        self,
        file: SpoolFile,
        *,
        threads: int | None = None,
        bandwidth_bytes_per_s: float = float("inf"),
        latency_s: float = 0.0,
    ) -> None:
        self._bandwidth = bandwidth_bytes_per_s
        self._latency_s = latency_s
        self._bus_lock = threading.Lock()
        self._bus_free_at_s = 0.0
        # Last, here and in the other engines: it starts the threads, which use the fields above.
        super().__init__(file, threads=threads)

    def _transfer_once(self, kind: IoKind, views: list[memoryview], offset: int) -> int:
        with self._bus_lock:  # one bus: a transfer begins as the previous one ends. The sleep itself holds no lock.
            now = time.monotonic()
            self._bus_free_at_s = max(now, self._bus_free_at_s) + sum(map(len, views)) / self._bandwidth
            wait_s = self._bus_free_at_s - now + self._latency_s
        time.sleep(wait_s)
        return super()._transfer_once(kind, views, offset)


class ShortEngine(PosixEngine):
    """Moves at most ``most_bytes`` in one system call.

    Args:
        most_bytes: Largest transfer of one call, in bytes; rounded up to the alignment of a direct file.
    """

    def __init__(self, file: SpoolFile, *, threads: int | None = None, most_bytes: int = 4096) -> None:
        self._most_bytes = -(-most_bytes // file.alignment) * file.alignment
        super().__init__(file, threads=threads)

    def _transfer_once(self, kind: IoKind, views: list[memoryview], offset: int) -> int:
        return super()._transfer_once(kind, _first_bytes(views, self._most_bytes), offset)


class FailingEngine(PosixEngine):
    """Fails at chosen system calls.

    Args:
        kind: The direction that fails.
        first: The first call that fails, counted from 1 in that direction.
        count: The number of consecutive calls that fail; None for every later one.
        error_number: The ``errno`` of the failure.
    """

    def __init__(
        self,
        file: SpoolFile,
        *,
        threads: int | None = None,
        kind: IoKind = IoKind.WRITE,
        first: int = 1,
        count: int | None = None,
        error_number: int = errno.EIO,
    ) -> None:
        self._kind = kind
        self._failing = range(first, sys.maxsize if count is None else first + count)
        self._error_number = error_number
        self._calls_lock = threading.Lock()
        self.calls = 0
        super().__init__(file, threads=threads)

    def _transfer_once(self, kind: IoKind, views: list[memoryview], offset: int) -> int:
        if kind is self._kind:
            with self._calls_lock:  # several engine threads count, and each number must be seen once
                self.calls += 1
                fails = self.calls in self._failing
            if fails:
                raise OSError(self._error_number, os.strerror(self._error_number))
        return super()._transfer_once(kind, views, offset)


class FullEngine(PosixEngine):
    """A disk that becomes full: one short write, then ``ENOSPC``, as from the kernel.

    Args:
        capacity_bytes: Bytes that fit, over all writes.
    """

    def __init__(self, file: SpoolFile, *, threads: int | None = None, capacity_bytes: int = 0) -> None:
        self._left_bytes = capacity_bytes
        self._left_lock = threading.Lock()
        super().__init__(file, threads=threads)

    def _transfer_once(self, kind: IoKind, views: list[memoryview], offset: int) -> int:
        if kind is IoKind.WRITE:
            with self._left_lock:  # taken before the write: two threads must not both get the last bytes
                room = min(self._left_bytes, sum(map(len, views))) // self._file.alignment * self._file.alignment
                self._left_bytes -= room
            if room == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            views = _first_bytes(views, room)
        return super()._transfer_once(kind, views, offset)


class GateEngine(PosixEngine):
    """Starts requests only as the test permits, in the order of the real engine.

    ``close`` opens the gate, because it waits for all queued requests. Each request goes alone.

    Attributes:
        started: The requests in the order in which they started.
    """

    def __init__(self, file: SpoolFile, *, threads: int | None = None) -> None:
        self._permits = 0
        self._is_open = False
        self.started: list[IoRequest] = []
        super().__init__(file, threads=threads)

    def release(self, count: int = 1) -> None:
        """Let ``count`` more requests start. Cancelled requests use no permit."""
        with self._wake:
            self._permits += count
            self._wake.notify_all()

    def open(self) -> None:
        """Let all requests start, now and later."""
        with self._wake:
            self._is_open = True
            self._wake.notify_all()

    def shut(self) -> None:
        """Let no request start until the next ``release`` or ``open``."""
        with self._wake:
            self._is_open = False
            self._permits = 0

    def _pop(self) -> IoRequest | None:
        free = self._is_open or self._closing
        if not free and self._permits == 0:
            return None
        request = super()._pop()
        if request is not None:  # only now: the queue may have held cancelled requests alone
            self.started.append(request)
            self._permits -= 0 if free else 1
        return request


__all__ = ["FailingEngine", "FullEngine", "GateEngine", "ShortEngine", "SlowEngine"]


def _first_bytes(views: Iterable[memoryview], nbytes: int) -> list[memoryview]:
    """Return views of the first ``nbytes`` bytes."""
    found = []
    for view in views:
        if nbytes > 0:
            found.append(view[:nbytes])
        nbytes -= len(view)
    return found
