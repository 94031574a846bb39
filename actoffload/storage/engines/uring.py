"""io_uring: one thread keeps many transfers under way, and takes and gives as many as there are at each turn.

That thread should need the interpreter's lock as seldom as possible: while the training thread runs pure Python, each
acquisition costs it a switch interval (5 ms). Threads that call ``pwritev`` pay once per transfer, this engine once
for all transfers that ended meanwhile, and the kernel works on the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import time
from typing import ClassVar

from ...errors import EngineUnavailableError
from .base import EngineCapabilities, IoKind, IoRequest, SpoolFile
from .queued import Cursor, QueuedEngine, default_threads
from .ring import Ring

DEPTH = 256
"""Transfers under way at once, at most."""
WINDOW_BYTES = 64 << 20
"""Bytes of them in one direction, unless a single one is larger: a started transfer cannot be cancelled."""
_BROKEN = frozenset({errno.EBADF, errno.EBADFD, errno.ENXIO, errno.EOPNOTSUPP})
"""Errors of a ring that takes nothing any more."""
_BROKEN_PAUSE_S = 0.001
_WAKE = 0  # the tag of the read of the eventfd, which ends when there is work; transfers count from 1


class UringEngine(QueuedEngine):
    """Transfers by io_uring, in one thread, which sleeps in the kernel until a transfer ends or an eventfd is written.

    Args:
        threads: Transfers at the same time; None: up to 256, and up to 64 MiB in each direction.

    Raises:
        EngineUnavailableError: This system has no io_uring, or does not let this process use it.
    """

    default_name: ClassVar[str] = "uring"

    def __init__(self, file: SpoolFile, *, threads: int | None = None) -> None:
        self._depth = DEPTH if threads is None else default_threads(threads)
        capabilities = EngineCapabilities(
            self.default_name, file.direct, file.alignment, threads=self._depth, vectored=True
        )
        super().__init__(file, capabilities)
        self._event_count = ctypes.c_uint64()  # where the ring's read of the eventfd puts its count
        # Keeps the interpreter's lock for less than a microsecond; `os.eventfd_write` would let another thread have it.
        self._write_eventfd = ctypes.PyDLL(None).eventfd_write
        self._write_eventfd.argtypes = (ctypes.c_int, ctypes.c_uint64)
        # Only for the ring's thread: the transfers in the kernel, with the memory that it reads their vectors from.
        self._in_kernel: dict[int, tuple[IoRequest, Cursor, object]] = {}
        self._last_tag = _WAKE
        # Under the lock:
        self._asleep = False  # the ring's thread waits in the kernel: `_notify` has to write the eventfd
        self._started = 0  # requests that are started and not finished, and their bytes
        self._started_bytes = {IoKind.READ: 0, IoKind.WRITE: 0}
        self._ring = Ring(file.fd, self._depth + 1)
        try:
            self._eventfd = os.eventfd(0)
        except OSError as error:
            self._ring.close()
            raise EngineUnavailableError(f"engine='uring': no eventfd ({error}); use 'posix'") from error
        self.start_threads(1)

    def close(self) -> None:
        super().close()
        with self._mutex:  # against a second close(), which may be about to write to the descriptor
            self._ring.close()
            self._close_eventfd()

    def after_fork_in_child(self) -> None:
        self._ring.forget()
        self._close_eventfd()

    def _close_eventfd(self) -> None:
        eventfd, self._eventfd = self._eventfd, -1
        if eventfd >= 0:
            os.close(eventfd)

    def _notify(self) -> None:
        if self._asleep:
            self._notify_all()

    def _notify_all(self) -> None:
        self._asleep = False
        if self._eventfd >= 0:
            self._write_eventfd(self._eventfd, 1)

    # -- the ring's thread --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        ring = self._ring
        with contextlib.suppress(EngineUnavailableError):  # then every request fails, as its `enter` does
            ring.enable()
        self._read_eventfd()
        while self._start_some():
            try:
                ring.enter()
            except OSError as exc:
                self._enter_failed(exc)
            self._asleep = False
            for tag, result in ring.results():
                if tag == _WAKE:
                    self._read_eventfd()
                else:
                    self._completed(tag, result)

    def _read_eventfd(self) -> None:
        self._ring.read_other(
            _WAKE, self._eventfd, ctypes.addressof(self._event_count), ctypes.sizeof(self._event_count)
        )

    def _start_some(self) -> bool:
        """Submit requests to the kernel until it is full; False: closed and nothing is left."""
        ready = []
        with self._mutex:
            while (request := self._pop()) is not None:
                ready.append(request)
            finished = self._closing and self._started == 0
            self._asleep = True
        for request in ready:
            try:
                if request.before is not None:
                    request.before()
                self._submit_to_kernel(request, Cursor(request, self._file, self._capabilities.alignment))
            except BaseException as exc:  # any error belongs to the request and must not end this thread
                self._finish(request, exc)
        return not finished

    def _pop(self) -> IoRequest | None:
        for queue in self._queues.values():
            while queue and self._has_room_for(queue[0]):
                request = queue.popleft()
                if request.try_start():
                    self._started += 1
                    self._started_bytes[request.kind] += request.length
                    return request
        return None

    def _has_room_for(self, request: IoRequest) -> bool:
        if self._started >= self._depth:
            return False
        started_bytes = self._started_bytes[request.kind]
        return started_bytes == 0 or started_bytes + request.length <= WINDOW_BYTES

    def _submit_to_kernel(self, request: IoRequest, cursor: Cursor) -> None:
        self._last_tag = tag = self._last_tag + 1
        vectors = Ring.vectors(cursor.ranges)
        self._in_kernel[tag] = request, cursor, vectors  # first: the memory must stay for as long as the kernel has it
        try:
            (self._ring.read if request.kind is IoKind.READ else self._ring.write)(tag, vectors, cursor.offset)
        except BaseException:
            del self._in_kernel[tag]
            raise

    def _completed(self, tag: int, result: int) -> None:
        entry = self._in_kernel.pop(tag, None)
        if entry is None:
            return  # it failed with the ring before
        request, cursor, _ = entry
        error: BaseException | None = None
        try:
            if result < 0:
                cursor.fail(OSError(-result, os.strerror(-result)))
            else:
                cursor.advance(result)
            if not cursor.finished:
                self._submit_to_kernel(request, cursor)
                return
        except BaseException as exc:  # as in `_start_some`
            error = exc
        self._finish(request, error)

    def _enter_failed(self, error: OSError) -> None:
        """Fail every request if the ring itself is broken (its descriptor was closed), so that nothing hangs.

        Any other error is temporary: transfers in the kernel may still touch the memory, so `enter` is tried again.
        """
        if error.errno in _BROKEN:
            for tag in tuple(self._in_kernel):
                self._completed(tag, -(error.errno or errno.EIO))
        time.sleep(_BROKEN_PAUSE_S)

    def _finish(self, request: IoRequest, error: BaseException | None) -> None:
        with self._mutex:
            self._started -= 1
            self._started_bytes[request.kind] -= request.length
            self._notify()
        request.finish(error)

    def _transfer_once(self, kind: IoKind, views: list[memoryview], offset: int) -> int:
        raise NotImplementedError("this engine transfers on its ring")
