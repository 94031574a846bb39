"""The base of all engines with queues in Python: two queues, worker threads, a check of every result."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
import time
from abc import abstractmethod
from collections import deque

from ...errors import OffloaderClosedError, StateError, StorageReadError, StorageWriteError
from .base import EngineCapabilities, IoKind, IoRequest, Range, SpoolFile, StorageEngine

_RETRY_ERRNOS = frozenset({errno.EINTR, errno.EAGAIN, errno.EWOULDBLOCK})
_MAX_STALLS = 1000  # attempts in a row that moved nothing; with the pause below, about a second
_STALL_PAUSE_S = 0.001
_AllMemory = ctypes.c_char * (1 << 46)  # one type for all lengths: ctypes would make a new one for each


def memory_view(address: int, length: int) -> memoryview:
    """Return a writable view of ``length`` bytes at ``address``; the caller keeps them alive."""
    return memoryview(_AllMemory.from_address(address)).cast("B")[:length]


class Cursor:
    """How far a request has come; judges the result of every system call."""

    def __init__(self, request: IoRequest, file: SpoolFile, alignment: int) -> None:
        self.done = 0  # bytes that have been moved
        self._request = request
        self._file = file  # for messages
        self._alignment = alignment
        self._stalls = 0

    @property
    def finished(self) -> bool:
        """Every byte has been moved."""
        return self.done == self._request.length

    @property
    def ranges(self) -> list[Range]:
        """The memory that is still to be moved."""
        done, found = self.done, []
        for address, length in self._request.memory:
            if done < length:
                found.append((address + done, length - done))
            done = max(0, done - length)
        return found

    @property
    def views(self) -> list[memoryview]:
        """The memory that is still to be moved, a view of each range."""
        return [memory_view(address, length) for address, length in self.ranges]

    @property
    def offset(self) -> int:
        """Where in the file that belongs."""
        return self._request.offset + self.done

    def advance(self, moved: int) -> None:
        """Take the byte count of one call; a short one continues after it.

        Raises:
            StorageReadError: The file ends before the range does.
            StorageWriteError: Nothing was written, again and again.
        """
        length = self._request.length
        if moved == 0 and self._request.kind is IoKind.READ:
            raise self._error(errno.EIO, f"the file ends after {self.done} bytes of it")
        if not 0 <= moved <= length - self.done:
            raise self._error(errno.EIO, f"the system reports {moved} bytes moved")
        if self.done + moved < length:
            moved -= moved % self._alignment  # a direct transfer may only continue on a boundary
        self.done += moved
        if moved:
            self._stalls = 0
        else:
            self._stall(errno.EIO, None)

    def fail(self, exc: OSError) -> None:
        """Take the error of one call; return when it should be tried again.

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
    """An engine whose requests wait in two queues for worker threads. Subclasses try one transfer.

    The threads are daemons: an interpreter that exits with work in the queue neither hangs nor crashes.
    """

    def __init__(self, file: SpoolFile, capabilities: EngineCapabilities) -> None:
        self._file = file
        self._capabilities = capabilities
        self._queues: dict[IoKind, deque[IoRequest]] = {IoKind.READ: deque(), IoKind.WRITE: deque()}  # reads first
        self._mutex = threading.RLock()  # guards the queues and the next three; reentrant: see `abort`
        self._wake = threading.Condition(self._mutex)
        self._closing = False
        self._idle_workers = 0  # workers that wait, or were woken and have not taken a request yet
        self._threads: list[threading.Thread] = []

    def start_threads(self, count: int) -> None:
        """Start the workers: the last thing that a subclass's constructor does."""
        for index in range(count):
            name = f"actoffload-{self._capabilities.name}-{index}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._threads.append(thread)
            try:
                thread.start()
            except BaseException:  # most likely the system has no more threads
                self.abort()
                raise

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._capabilities

    def submit(self, request: IoRequest) -> None:
        with self._mutex:
            if self._closing:
                raise OffloaderClosedError("the storage engine is closed")
            self._queues[request.kind].append(request)
            self._notify()

    def promote(self, request: IoRequest) -> None:
        with self._mutex:
            queue = self._queues[request.kind]
            if request in queue:
                queue.remove(request)
                queue.appendleft(request)

    def close(self) -> None:
        if threading.current_thread() in self._threads:
            raise StateError("an engine cannot be closed from its own thread (from before() or on_done())")
        with self._mutex:
            self._closing = True
            self._notify_all()
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join()

    def abort(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is not ours, or not any more
            while True:
                self._mutex.release()  # an interrupt may have left it held, and the workers need it to end
        with self._mutex:
            self._closing = True
            queued = [request for queue in self._queues.values() for request in queue]
            for queue in self._queues.values():
                queue.clear()
        for request in queued:
            request.cancel()
        self.close()

    @abstractmethod
    def _transfer_once(self, kind: IoKind, views: list[memoryview], offset: int) -> int:
        """Try one transfer and return how many bytes moved. The seam of the fault tests.

        Args:
            kind: The direction.
            views: The memory: one range, or several whose bytes lie one behind the other in the file.
            offset: Where in the file.
        """

    def _work(self) -> None:
        while (request := self._next()) is not None:
            request.finish(self._carry_out(request))
            del request  # an idle thread must not keep the last request alive

    def _next(self) -> IoRequest | None:
        """Wait for a request and start it; None: closed and nothing is left."""
        with self._mutex:
            while (request := self._pop()) is None:
                if self._closing:
                    return None
                self._idle_workers += 1
                try:
                    self._wake.wait()
                finally:
                    self._idle_workers -= 1
            return request

    def _pop(self) -> IoRequest | None:
        """Start the next request that was not cancelled. The lock is held."""
        for queue in self._queues.values():
            while queue:
                request = queue.popleft()
                if request.try_start():
                    return request
        return None

    def _carry_out(self, request: IoRequest) -> BaseException | None:
        """Move the bytes of a request; return the error, if there is one."""
        try:
            cursor = Cursor(request, self._file, self._capabilities.alignment)
            if request.before is not None:
                request.before()
            while not cursor.finished:
                try:
                    moved = self._transfer_once(request.kind, cursor.views, cursor.offset)
                except OSError as exc:
                    cursor.fail(exc)
                    continue
                cursor.advance(moved)
        except BaseException as exc:  # any error belongs to the request and must not end this thread
            return exc
        return None

    def _notify(self) -> None:
        """Notify one worker, unless all are at work: they look for more by themselves. The lock is held."""
        if self._idle_workers:
            self._wake.notify()

    def _notify_all(self) -> None:
        """Notify every worker that the engine closes. The lock is held."""
        self._wake.notify_all()


def default_threads(threads: int | None) -> int:
    """Return the thread count: the caller's, or a small default (more only fight for the interpreter's lock)."""
    if threads is None:
        return min(4, max(2, os.cpu_count() or 4))
    if threads < 1:
        raise ValueError(f"threads={threads}: must be at least 1")
    return threads
