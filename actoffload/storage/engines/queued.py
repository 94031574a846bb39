"""What all engines with a queue in Python share: the two queues, the worker threads, care about every result.

Small requests that lie one behind the other in the file and wait anyway are carried out together: one system call, and
one turn at the interpreter's lock, for all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from ...errors import (
    OffloaderClosedError,
    StateError,
    StorageReadError,
    StorageWriteError,
)
from .base import (
    EngineCapabilities,
    IoKind,
    IoRequest,
    Range,
    SpoolFile,
    StorageEngine,
)

_RETRY_ERRNOS = frozenset({errno.EINTR, errno.EAGAIN, errno.EWOULDBLOCK})
_MAX_STALLS = 1000  # attempts in a row that moved nothing; with the pause below, about a second
_STALL_PAUSE_S = 0.001
GATHERED_BYTES = 1 << 20
"""Requests are gathered up to this size: a larger call is hardly any faster, and the first of them waits for all."""
_MOST_GATHERED = 64  # requests; the system takes at least so many ranges of memory in one call
_AllMemory = ctypes.c_char * (1 << 46)  # one type for all lengths: ctypes would make a new one for each


def memory_view(address: int, length: int) -> memoryview:
    """Return a writable view of ``length`` bytes at ``address``; the caller keeps them alive."""
    return memoryview(_AllMemory.from_address(address)).cast("B")[:length]


class Cursor:
    """How far some requests have come that are carried out together; judges the result of every system call.

    Args:
        requests: Of one kind, each beginning in the file where the one before it ends.
        file: For messages.
        alignment: A transfer may only be continued at a multiple of this many bytes.

    Attributes:
        done: How many bytes have been moved.
    """

    def __init__(self, requests: Sequence[IoRequest], file: SpoolFile, alignment: int) -> None:
        self.done = 0
        self._requests = requests
        self._kind = requests[0].kind
        self._offset = requests[0].offset
        self._length = sum(request.length for request in requests)
        self._file = file
        self._alignment = alignment
        self._stalls = 0

    @property
    def finished(self) -> bool:
        """Every byte has been moved."""
        return self.done == self._length

    @property
    def ranges(self) -> list[Range]:
        """The memory that is still to be moved."""
        done, found = self.done, []
        for request in self._requests:
            for address, length in request.memory:
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
        return self._offset + self.done

    def advance(self, moved: int) -> None:
        """Take the byte count of one call; a short one continues after it.

        Raises:
            StorageReadError: The file ends before the range does.
            StorageWriteError: Nothing was written, again and again.
        """
        if moved == 0 and self._kind is IoKind.READ:
            raise self._error(errno.EIO, f"the file ends after {self.done} bytes of it")
        if not 0 <= moved <= self._length - self.done:
            raise self._error(errno.EIO, f"the system reports {moved} bytes moved")
        if self.done + moved < self._length:
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
        cls = StorageReadError if self._kind is IoKind.READ else StorageWriteError
        what = f"{self._kind.value} of {self._length} bytes at offset {self._offset} failed: {reason}"
        return cls(number, f"{what} ({errno.errorcode.get(number, 'unknown')})", self._file.path)


class QueuedEngine(StorageEngine):
    """An engine whose requests wait in two queues for worker threads. Subclasses say how one transfer is tried.

    The threads are daemons: an interpreter that exits with work in the queue neither hangs nor crashes.

    Args:
        file: The file to work on.
        capabilities: What the subclass can do.
    """

    gathered_bytes: ClassVar[int] = 0
    """Requests up to so many bytes together are given to one call; 0: each goes alone."""

    def __init__(self, file: SpoolFile, capabilities: EngineCapabilities) -> None:
        self._file = file
        self._capabilities = capabilities
        self._reads: deque[IoRequest] = deque()
        self._writes: deque[IoRequest] = deque()
        self._mutex = threading.RLock()  # guards the queues and what follows; reentrant: see `abort`
        self._wake = threading.Condition(self._mutex)
        self._closing = False
        self._idle_workers = 0  # workers that wait, or are about to take what they were woken for
        self._counter_lock = threading.Lock()
        self._written_bytes = 0
        self._read_bytes = 0
        self._threads: list[threading.Thread] = []

    def start_threads(self, count: int) -> None:
        """Start the workers: the last thing that a subclass's constructor does."""
        for index in range(count):
            self._start_thread(f"actoffload-{self._capabilities.name}-{index}", self._work)

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
        with self._mutex:
            if self._closing:
                raise OffloaderClosedError("the storage engine is closed")
            self._queue(request).append(request)
            self._notify()

    def promote(self, request: IoRequest) -> None:
        """See ``StorageEngine``; searches the queue."""
        with self._mutex:
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
        with self._mutex:
            self._closing = True
            self._notify_all()
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join()

    def abort(self) -> None:
        """See ``StorageEngine``; also where an interrupt has left the lock held by this thread."""
        with contextlib.suppress(RuntimeError):  # it is not ours, or not any more
            while True:
                self._mutex.release()  # the workers need it to end
        with self._mutex:
            self._closing = True
            queued = [*self._reads, *self._writes]
            self._reads.clear()
            self._writes.clear()
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

    def _start_thread(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        try:
            thread.start()
        except BaseException:  # most likely the system has no more threads
            self.abort()
            raise

    def _work(self) -> None:
        while requests := self._next():
            self._carry_out(requests)
            del requests  # an idle thread must not keep the last request alive

    def _next(self) -> list[IoRequest]:
        """Wait for a request and start it, with those that are to go along; empty: closed and nothing is left."""
        with self._mutex:
            while (request := self._pop()) is None:
                if self._closing:
                    return []
                self._idle_workers += 1
                try:
                    self._wake.wait()
                finally:
                    self._idle_workers -= 1
            return [request, *self._gather(request)] if self.gathered_bytes else [request]

    def _pop(self) -> IoRequest | None:
        """Start the next request that was not cancelled. The lock is held."""
        while queue := self._reads or self._writes:
            request = queue.popleft()
            if request.try_start():
                return request
        return None

    def _gather(self, first: IoRequest) -> list[IoRequest]:
        """Start what waits behind ``first`` and lies beside it, but no work of threads that wait. The lock is held.

        A request with a ``before`` goes alone: the others would wait for that as well.
        """
        queue = self._queue(first)
        begin, end = first.offset, first.offset + first.length
        most = min(_MOST_GATHERED, (len(queue) + 1) // (self._idle_workers + 1)) - 1
        found: list[IoRequest] = []
        while first.before is None and len(found) < most and queue and queue is (self._reads or self._writes):
            head = queue[0]
            beside = head.offset == end or head.offset + head.length == begin
            if not beside or head.before is not None or end - begin + head.length > self.gathered_bytes:
                break
            queue.popleft()
            if head.try_start():
                found.append(head)
                begin, end = min(begin, head.offset), max(end, head.offset + head.length)
        return found

    def _carry_out(self, requests: Sequence[IoRequest]) -> None:
        """Carry out one request, or several that lie side by side, of which each gets its own error."""
        if len(requests) == 1:
            requests[0].finish(self._move(requests)[1])
            return
        in_order = sorted(requests, key=lambda request: request.offset)
        done, error = self._move(in_order)
        end = in_order[0].offset + done
        for request in requests:  # the first is the one that was waited for longest
            moved = error is None or request.offset + request.length <= end
            request.finish(None if moved else self._move([request])[1])

    def _move(self, requests: Sequence[IoRequest]) -> tuple[int, BaseException | None]:
        """Move the bytes of some requests that lie in order; return how many bytes were moved and what went wrong."""
        done, kind = 0, requests[0].kind
        try:
            cursor = Cursor(requests, self._file, self._capabilities.alignment)
            if requests[0].before is not None:
                requests[0].before()
            while not cursor.finished:
                try:
                    moved = self._transfer_once(kind, cursor.views, cursor.offset)
                except OSError as exc:
                    cursor.fail(exc)
                    continue
                cursor.advance(moved)
                done = cursor.done
                self._count(kind, moved)
        except BaseException as exc:  # whatever it was, it belongs to the request and not to this thread
            return done, exc
        return done, None

    def _count(self, kind: IoKind, moved: int) -> None:
        with self._counter_lock:
            if kind is IoKind.READ:
                self._read_bytes += moved
            else:
                self._written_bytes += moved

    def _queue(self, request: IoRequest) -> deque[IoRequest]:
        return self._reads if request.kind is IoKind.READ else self._writes

    def _notify(self) -> None:
        """Tell one worker that there is work, unless all are at work and look for more. The lock is held."""
        if self._idle_workers:
            self._wake.notify()

    def _notify_all(self) -> None:
        """Tell every worker that the engine closes. The lock is held."""
        self._wake.notify_all()


def first_bytes(views: Iterable[memoryview], nbytes: int) -> list[memoryview]:
    """Return views of the first ``nbytes`` bytes."""
    found = []
    for view in views:
        if nbytes > 0:
            found.append(view[:nbytes])
        nbytes -= len(view)
    return found


def default_threads(threads: int | None) -> int:
    """Return the thread count: the caller's, or a small default (more only fight for the interpreter's lock)."""
    if threads is None:
        return min(4, max(2, os.cpu_count() or 4))
    if threads < 1:
        raise ValueError(f"threads={threads}: must be at least 1")
    return threads
