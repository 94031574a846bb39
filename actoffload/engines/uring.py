"""io_uring: one thread keeps many transfers under way, and takes and gives as many as there are at each turn.

What counts is how seldom that thread needs the interpreter's lock: while the training thread runs pure Python, each
time costs it a switch interval (5 ms). Threads that call ``pwritev`` pay that once per transfer, this engine once for
all transfers that ended meanwhile, and the kernel works on the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
import time
from collections import deque
from typing import ClassVar

from ..config import format_size
from ..errors import EngineUnavailableError
from .base import EngineCapabilities, IoKind, IoRequest, SpoolFile
from .queued import Cursor, QueuedEngine
from .registered import Registered
from .ring import Ring

DEPTH = 256
"""Transfers under way at once, at most."""
WINDOW_BYTES = 64 << 20
"""Bytes of them in one direction, where there is more than one: what is started cannot be taken back."""
PREPARED_BYTES = 8 << 20
"""Bytes of those that are started and still wait for their ``before``, likewise."""
_BROKEN = frozenset({errno.EBADF, errno.EBADFD, errno.ENXIO, errno.EOPNOTSUPP})
"""Errors of a ring that takes nothing any more."""
_BROKEN_PAUSE_S = 0.001
_WAKE = 0  # the tag of the read that ends when there is work; transfers count from 1


class UringEngine(QueuedEngine):
    """Transfers by io_uring, in one thread.

    The ``before`` of a request may wait for a device, so it runs in a second thread, which starts with the first one.

    Args:
        file: The file to work on; with ``O_DIRECT`` when ``file.direct``.
        threads: Transfers at the same time; None: up to 256, and up to 64 MiB in each direction.

    Raises:
        EngineUnavailableError: This system has no io_uring, or does not let this process use it.
    """

    default_name: ClassVar[str] = "uring"

    def __init__(self, file: SpoolFile, *, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads={threads}: must be at least 1")
        self._depth = DEPTH if threads is None else threads
        super().__init__(
            file,
            EngineCapabilities(
                self.default_name, direct=file.direct, alignment=file.alignment, threads=self._depth, vectored=True
            ),
        )
        self._heard = ctypes.c_uint64()  # where the reaper's read of the bell puts its count
        # Keeps the interpreter's lock for less than a microsecond; `os.eventfd_write` would let another thread have it.
        self._ring_bell = ctypes.PyDLL(None).eventfd_write
        self._ring_bell.argtypes = (ctypes.c_int, ctypes.c_uint64)
        self._flights: dict[int, tuple[IoRequest, Cursor, object]] = {}  # the reaper's own: what the kernel has
        self._last_tag = _WAKE
        # Under the lock:
        self._asleep = False  # the reaper waits for the kernel: who has work for it rings
        self._finished = self._given_up = False
        self._reaping = self._freed = False
        self._started = 0  # requests that are started and not finished, and their bytes
        self._started_bytes = {IoKind.READ: 0, IoKind.WRITE: 0}
        self._waiting = self._waiting_bytes = 0  # those of them whose `before` has not ended
        self._to_prepare: deque[IoRequest] = deque()
        self._prepared: deque[IoRequest] = deque()
        self._bell = -1
        self._ring = Ring(file.fd, self._depth + 1)
        try:
            self._bell = _bell()
            self._registered = Registered(self._ring)
            self._threads.append(threading.Thread(target=self._prepare, name="actoffload-uring-before", daemon=True))
            self.start_threads(1)
        except BaseException:
            self._give_up()
            raise

    def close(self) -> None:
        """See ``StorageEngine``."""
        super().close()
        self._free()

    def _give_up(self) -> None:
        """It could not be started: its threads end, those that run and those that an interrupt let begin."""
        with self._mutex:
            self._given_up = self._closing = self._finished = True
            self._wake.notify_all()
            self._notify()
            reaping = self._reaping
        if reaping:
            self._threads[-1].join()
        self._free()

    def _free(self) -> None:
        with self._mutex:  # against a second close(), which may be about to ring
            bell, self._bell = self._bell, -1
            freed, self._freed = self._freed, True
        if not freed:
            self._ring.close()
            if bell >= 0:
                os.close(bell)

    def after_fork_in_child(self) -> None:
        """See ``StorageEngine``."""
        bell, self._bell = self._bell, -1
        self._ring.forget()
        if bell >= 0:
            os.close(bell)

    @property
    def remark(self) -> str:
        """See ``StorageEngine``."""
        known = self._registered
        done = f"{format_size(known.nbytes)} of host memory registered with the kernel" if known.nbytes else ""
        return "; ".join(filter(None, (done, known.refusal and f"memory that is not registered: {known.refusal}")))

    def register_memory(self, address: int, nbytes: int) -> None:
        """See ``StorageEngine``."""
        self._registered.told(True, address, nbytes)  # in time for the first transfer, which wakes the reaper

    def unregister_memory(self, address: int, nbytes: int) -> None:
        """See ``StorageEngine``."""
        self._registered.told(False, address, nbytes)
        if self._bell >= 0:  # neither closed nor in a forked child, where the lock may be held for ever
            with self._mutex:
                self._notify()  # the kernel holds its pages until this is carried out

    def _notify(self) -> None:
        if self._asleep and self._bell >= 0:
            self._asleep = False
            self._ring_bell(self._bell, 1)

    _notify_all = _notify

    # -- the reaper ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        with self._mutex:
            if self._given_up:
                return
            self._reaping = True
        ring = self._ring
        with contextlib.suppress(EngineUnavailableError):  # then every request fails, as its `enter` does
            ring.enable()
        self._listen()
        while self._start_some():
            try:
                ring.enter()
            except OSError as exc:
                self._all_failed(exc)
            self._asleep = False
            for tag, result in ring.results():
                if tag == _WAKE:
                    self._listen()
                else:
                    self._landed(tag, result)

    def _listen(self) -> None:
        self._ring.read_other(_WAKE, self._bell, ctypes.addressof(self._heard), ctypes.sizeof(self._heard))

    def _start_some(self) -> bool:
        """Gives the kernel what there is room for; False: closed and nothing is left."""
        with self._mutex:
            launch = list(self._prepared)
            self._prepared.clear()
            while (request := self._pop()) is not None:
                if request.before is None:
                    launch.append(request)
                else:
                    self._waiting += 1
                    self._waiting_bytes += request.length
                    self._to_prepare.append(request)
            self._finished = self._closing and self._started == 0
            if self._to_prepare or self._finished:
                self._wake.notify()
            notes = self._registered.take_notes()
            self._asleep = True
            finished = self._finished
        if not finished:  # else all of it goes with the ring
            self._registered.carry_out(notes)
        for request in launch:
            try:
                self._launch(request, Cursor([request], self._file, self._capabilities.alignment))
            except BaseException as exc:  # as in `_landed`
                self._finish(request, exc)
        return not finished

    def _pop(self) -> IoRequest | None:
        for queue in (self._reads, self._writes):
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
        if request.before is not None and self._waiting:
            crowded = 4 * self._waiting >= self._depth  # the rest of the depth is for what need not wait
            if crowded or self._waiting_bytes + request.length > PREPARED_BYTES:
                return False
        started_bytes = self._started_bytes[request.kind]
        return started_bytes == 0 or started_bytes + request.length <= WINDOW_BYTES

    def _launch(self, request: IoRequest, cursor: Cursor) -> None:
        self._last_tag = tag = self._last_tag + 1
        reads, ranges, offset = request.kind is IoKind.READ, cursor.ranges, cursor.offset
        vectors = Ring.vectors(ranges) if len(ranges) > 1 else None
        self._flights[tag] = request, cursor, vectors  # before the kernel may have it: it stays until that is done
        try:
            if vectors is not None:
                (self._ring.read_ranges if reads else self._ring.write_ranges)(tag, vectors, offset)
            else:
                place = self._registered.place_of(*ranges[0])
                (self._ring.read if reads else self._ring.write)(tag, *ranges[0], offset, place)
        except BaseException:
            del self._flights[tag]
            raise

    def _landed(self, tag: int, result: int) -> None:
        flight = self._flights.pop(tag, None)
        if flight is None:
            return  # it failed with the ring before
        request, cursor, _ = flight
        error: BaseException | None = None
        try:
            if result < 0:
                cursor.fail(OSError(-result, os.strerror(-result)))
            else:
                cursor.advance(result)
                self._count(request.kind, result)
            if not cursor.finished:
                self._launch(request, cursor)
                return
        except BaseException as exc:  # whatever it was, it belongs to the request and not to this thread
            error = exc
        self._finish(request, error)

    def _all_failed(self, error: OSError) -> None:
        """The ring itself is broken (somebody closed its descriptor): nothing hangs, every request fails.

        Any other error is one of the moment: what the kernel has may still touch the memory, so it is asked again.
        """
        if error.errno in _BROKEN:
            for tag in tuple(self._flights):
                self._landed(tag, -(error.errno or errno.EIO))
        time.sleep(_BROKEN_PAUSE_S)

    def _finish(self, request: IoRequest, error: BaseException | None) -> None:
        with self._mutex:
            self._started -= 1
            self._started_bytes[request.kind] -= request.length
            self._notify()
        request.finish(error)

    # -- the thread that waits for devices ----------------------------------------------------------------------------

    def _prepare(self) -> None:
        while (request := self._next_to_prepare()) is not None:
            error: BaseException | None = None
            try:
                if request.before is not None:
                    request.before()
            except BaseException as exc:
                error = exc
            with self._mutex:
                self._waiting -= 1
                self._waiting_bytes -= request.length
                if error is None:
                    self._prepared.append(request)
                    self._notify()
            if error is not None:
                self._finish(request, error)
            del request, error  # an idle thread must not keep them alive

    def _next_to_prepare(self) -> IoRequest | None:
        with self._mutex:
            while not self._to_prepare:
                if self._finished:
                    return None
                self._wake.wait()
            return self._to_prepare.popleft()

    def _transfer_once(self, kind: IoKind, views: list[memoryview], offset: int) -> int:
        raise NotImplementedError("this engine transfers on its ring")


def _bell() -> int:
    try:
        return os.eventfd(0)
    except OSError as exc:
        raise EngineUnavailableError(f"engine='uring': no eventfd ({exc}); use 'posix'") from exc


__all__ = ["DEPTH", "PREPARED_BYTES", "WINDOW_BYTES", "UringEngine"]
