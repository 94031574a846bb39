"""What all engines with a queue in Python share: the two queues, the worker threads, care about every result."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from abc import abstractmethod
from collections import deque

from ..errors import OffloaderClosedError, StateError, StorageReadError, StorageWriteError
from .base import EngineCapabilities, IoKind, IoRequest, SpoolFile, StorageEngine

_RETRY_ERRNOS = frozenset({errno.EINTR, errno.EAGAIN, errno.EWOULDBLOCK})
_MAX_STALLS = 1000  # attempts in a row that moved nothing; with the pause below, about a second
_STALL_PAUSE_S = 0.001


def memory_view(address: int, length: int) -> memoryview:
    """Returns a writable view of ``length`` bytes at ``address``; the caller keeps them alive."""
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


class Cursor:
    """How far one request has come; judges the result of every system call.

    Args:
        request: The request that is being carried out.
        file: For messages and for the alignment that a continued transfer must keep.
        alignment: Alignment of the engine in bytes.
    """

    def __init__(self, request: IoRequest, file: SpoolFile, alignment: int) -> None:
        self._request = request
        self._file = file
        self._alignment = alignment
        self._view = memory_view(request.address, request.length)
        self._done = 0
        self._stalls = 0

    @property
    def finished(self) -> bool:
        """Every byte has been moved."""
        return self._done == self._request.length

    @property
    def view(self) -> memoryview:
        """The memory that is still to be moved."""
        return self._view[self._done :] if self._done else self._view

    @property
    def offset(self) -> int:
        """Where in the file that belongs."""
        return self._request.offset + self._done

    def advance(self, moved: int) -> None:
        """Takes the byte count of one call; a short one continues after it.

        Raises:
            StorageReadError: The file ends before the range does.
            StorageWriteError: Nothing was written, again and again.
        """
        if moved == 0 and self._request.kind is IoKind.READ:
            raise self._error(errno.EIO, f"the file ends after {self._done} bytes of it")
        if not 0 <= moved <= self._request.length - self._done:
            raise self._error(errno.EIO, f"the system reports {moved} bytes moved")
        if self._done + moved < self._request.length:
            moved -= moved % self._alignment  # a direct transfer may only continue on a boundary
        self._done += moved
        if moved:
            self._stalls = 0
        else:
            self._stall(errno.EIO, None)

    def fail(self, exc: OSError) -> None:
        """Takes the error of one call; returns when it should be tried again.

        Raises:
            StorageReadError: A read failed.
            StorageWriteError: A write failed.
        """
        if exc.errno not in _RETRY_ERRNOS:
            raise self._error(exc.errno or errno.EIO, exc.strerror or str(exc)) from exc
        self._stall(exc.errno, exc)

    def _stall(self, number: int, cause: OSError | None) -> None:
        self._stalls += 1
        if self._stalls > _MAX_STALLS:
            raise self._error(number, f"no progress in {self._stalls} attempts") from cause
        if number != errno.EINTR:
            time.sleep(_STALL_PAUSE_S)

    def _error(self, number: int, reason: str) -> StorageReadError | StorageWriteError:
        request = self._request
        cls = StorageReadError if request.kind is IoKind.READ else StorageWriteError
        what = f"{request.kind.value} of {request.length} bytes at offset {request.offset} failed: {reason}"
        return cls(number, f"{what} ({errno.errorcode.get(number, 'unknown')})", self._file.path)


class QueuedEngine(StorageEngine):
    """An engine whose requests wait in two queues for daemon threads. Subclasses say how one transfer is tried.

    The threads are daemons: an interpreter that exits with work in the queue neither hangs nor crashes.

    Args:
        file: The file to work on.
        capabilities: What the subclass can do.
    """

    def __init__(self, file: SpoolFile, capabilities: EngineCapabilities) -> None:
        self._file = file
        self._capabilities = capabilities
        self._reads: deque[IoRequest] = deque()
        self._writes: deque[IoRequest] = deque()
        self._wake = threading.Condition(threading.Lock())
        self._closing = False
        self._counter_lock = threading.Lock()
        self._written_bytes = 0
        self._read_bytes = 0
        self._threads: list[threading.Thread] = []

    def start_threads(self, count: int) -> None:
        """Starts the workers: the last thing that a subclass's constructor does."""
        for index in range(count):
            name = f"actoffload-{self._capabilities.name}-{index}"
            self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def capabilities(self) -> EngineCapabilities:
        """See ``StorageEngine``."""
        return self._capabilities

    @property
    def written_bytes(self) -> int:
        """See ``StorageEngine``."""
        return self._written_bytes

    @property
    def read_bytes(self) -> int:
        """See ``StorageEngine``."""
        return self._read_bytes

    def submit(self, request: IoRequest) -> None:
        """See ``StorageEngine``."""
        with self._wake:
            if self._closing:
                raise OffloaderClosedError("the storage engine is closed")
            self._queue(request).append(request)
            self._notify()

    def promote(self, request: IoRequest) -> None:
        """See ``StorageEngine``; searches the queue."""
        with self._wake:
            queue = self._queue(request)
            try:
                queue.remove(request)
            except ValueError:
                return
            queue.appendleft(request)

    def close(self) -> None:
        """See ``StorageEngine``."""
        if threading.current_thread() in self._threads:
            raise StateError("an engine cannot be closed from its own thread (from before() or on_done())")
        with self._wake:
            self._closing = True
            self._notify_all()
        for thread in self._threads:
            thread.join()

    def abort(self) -> None:
        """See ``StorageEngine``."""
        with self._wake:
            self._closing = True
            queued = [*self._reads, *self._writes]
            self._reads.clear()
            self._writes.clear()
        for request in queued:
            request.cancel()
        self.close()

    @abstractmethod
    def _transfer_once(self, kind: IoKind, view: memoryview, offset: int) -> int:
        """Tries one transfer and returns how many bytes moved. The seam of the fault tests."""

    def _work(self) -> None:
        while (request := self._next()) is not None:
            self._serve(request)
            del request  # an idle thread must not keep the last request alive

    def _next(self) -> IoRequest | None:
        """Waits for a request and starts it; None: closed and nothing is left."""
        with self._wake:
            while (request := self._pop()) is None:
                if self._closing:
                    return None
                self._wake.wait()
            return request

    def _pop(self) -> IoRequest | None:
        """Starts the next request that was not cancelled. The lock is held."""
        while queue := self._reads or self._writes:
            request = queue.popleft()
            if request.try_start():
                return request
        return None

    def _serve(self, request: IoRequest) -> None:
        error: BaseException | None = None
        try:
            if request.before is not None:
                request.before()
            cursor = Cursor(request, self._file, self._capabilities.alignment)
            while not cursor.finished:
                try:
                    moved = self._transfer_once(request.kind, cursor.view, cursor.offset)
                except OSError as exc:
                    cursor.fail(exc)
                    continue
                cursor.advance(moved)
                self._count(request.kind, moved)
        except BaseException as exc:  # whatever it was, it belongs to the request and not to this thread
            error = exc
        request.finish(error)

    def _count(self, kind: IoKind, moved: int) -> None:
        with self._counter_lock:
            if kind is IoKind.READ:
                self._read_bytes += moved
            else:
                self._written_bytes += moved

    def _queue(self, request: IoRequest) -> deque[IoRequest]:
        return self._reads if request.kind is IoKind.READ else self._writes

    def _notify(self) -> None:
        """Tells one worker that there is work. The lock is held."""
        self._wake.notify()

    def _notify_all(self) -> None:
        """Tells every worker that the engine closes. The lock is held."""
        self._wake.notify_all()


def default_threads(threads: int | None) -> int:
    """Returns the thread count: the caller's, or a small default (more only fight for the interpreter's lock)."""
    if threads is None:
        return min(4, max(2, os.cpu_count() or 4))
    if threads < 1:
        raise ValueError(f"threads={threads}: must be at least 1")
    return threads


__all__ = ["Cursor", "QueuedEngine", "default_threads", "memory_view"]
