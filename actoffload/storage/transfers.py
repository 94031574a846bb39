"""The transfer of one extent: a write or a read for one or several records, made of one or several requests.

Nothing in a ``Transfer`` takes a lock that a caller could hold: ``cancel`` may run in a finalizer, which may interrupt
any thread anywhere. A `Claim` decides between "finished" and "cancelled".
"""

from __future__ import annotations

import errno
import io
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ..errors import ChecksumError, OffloaderClosedError, StateError
from ..locks import Claim
from .arena import Extent
from .engines.base import Completion, IoKind, IoRequest, Range, RequestState, call_back
from .engines.queued import memory_view

_CHUNK_BYTES = 1 << 20
_MEMORY = "/proc/self/mem"
_CANCELLED = object()


class Callbacks(NamedTuple):
    """The functions that a transfer calls for its caller, and the objects that it keeps alive: see `Spool.write`."""

    before: Callable[[], None] | None = None
    on_done: Callable[[Transfer], None] | None = None
    on_part: Callable[[], None] | None = None
    keepalive: object = None


@dataclass(slots=True, eq=False, repr=False)
class Transfer:
    """A write or a read of one extent.

    ``wait`` returns once nothing of it touches memory or disk any more, finished or cancelled; ``on_done`` may run just
    after. It drops its callbacks when it ends, so that it keeps nothing alive.
    """

    kind: IoKind
    extent: Extent
    length: int
    on_end: Callable[[Transfer], None]  # of the spool, before `on_done`
    records: dict[Any, bool]  # the owners of the bytes, and whether each still needs it; the caller's lock guards it
    callbacks: Callbacks
    skip: int = 0  # bytes at the beginning of the extent that are not moved
    began_s: float = 0.0  # when it was enqueued
    error: BaseException | None = None  # why it failed; after `Spool.abort` an `OffloaderClosedError`
    _claim: Claim = field(default_factory=Claim)  # of `_CANCELLED`, or of the thread that finishes it
    _ended: Completion = field(default_factory=Completion)
    _requests: list[IoRequest] = field(default_factory=list)  # in the order of their bytes
    _submitted: int = 0
    _left: set[IoRequest] = field(default_factory=set)  # those that have not ended

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most ``timeout`` seconds until nothing of it runs any more, and return whether that is so."""
        return self._ended.wait(timeout)

    def cancel(self, error: BaseException | None = None) -> bool:
        """Take back the requests that have not started. Never blocks; may be called again.

        Args:
            error: Becomes ``error``, which a thread that waits looks at.

        Returns:
            True: ``on_done`` will not be called; requests that had started finish by themselves, and until then the
            extent stays busy and ``keepalive`` alive. False: it has finished, ``on_done`` has been or will be called.
        """
        self._claim.take(_CANCELLED)
        if not self.cancelled:
            return False
        self.error = self.error or error
        for request in self._requests:
            if request.cancel():
                self._left.discard(request)
        self._end_if_last()
        return True

    def leave(self, record: object) -> bool:
        """Note that a record no longer needs the transfer; return whether it is cancelled, as no other one does."""
        assert self.records[record], "a record leaves once, else its bytes would no longer count as pending"
        self.records[record] = False
        return not any(self.records.values()) and self.cancel()

    @property
    def cancelled(self) -> bool:
        """``cancel`` came in time, so ``on_done`` is not called."""
        return self._claim.is_by(_CANCELLED)

    @property
    def moved_bytes(self) -> int:
        """The bytes that went over the link, also of a transfer that was cancelled when part of it had started."""
        return sum(request.length for request in self._requests if request.state is RequestState.DONE)

    def promote(self) -> None:
        """Move its queued requests to the front of the queue."""
        for request in reversed(self._requests):
            self.extent.arena.engine.promote(request)

    def prepare(self, memory: Sequence[Range], *, request_bytes: int, alignment: int, verify: bool) -> None:
        """For the spool: make the requests.

        Args:
            memory: One range of memory; or several, which go by one request.
            request_bytes: Most bytes of a request for one range.
            verify: Keep a checksum of every request that writes; the read of an extent that has checksums checks them.

        Raises:
            StateError: The extent is too small, or something is not aligned.
        """
        self._check_place(memory, alignment)
        address, several = memory[0][0], len(memory) > 1
        request_bytes = self.length if several else request_bytes
        for begin in range(0, self.length, request_bytes):
            length = min(request_bytes, self.length - begin)
            offset = self._offset + begin
            request = IoRequest(self.kind, address + begin, length, offset, ranges=memory if several else ())
            request.before = self.callbacks.before
            if verify and self.kind is IoKind.WRITE:
                request.before = partial(self._before_verified, offset, request.memory)
            request.on_done = self._request_done
            self._requests.append(request)
        self._left.update(self._requests)

    def check_order(self) -> None:
        """For the spool: refuse silent corruption, as engines serve reads before writes.

        Raises:
            StateError: A read of bytes that are not written yet, or a write over bytes that are in use.
        """
        extent = self.extent
        if self.kind is IoKind.WRITE:
            if extent.transfers:
                raise StateError(f"write: {extent!r} is still being read or written")
            return
        valid = extent.valid_bytes
        if self.skip + self.length > valid or (extent.checksums and self.length != valid):
            state = "is being written" if extent.writer is not None else f"holds {valid} valid bytes"
            raise StateError(f"read of {self.length} bytes: {extent!r} {state}")

    def start(self, nbytes: int | None = None) -> None:
        """For the spool: submit the requests within the first ``nbytes`` bytes (None: all) that were not submitted.

        Raises:
            OffloaderClosedError: The engine is closed; the caller is to `fail` or to cancel the transfer.
        """
        until = self._offset + (self.length if nbytes is None else nbytes)
        while self._submitted < len(self._requests):
            request = self._requests[self._submitted]
            if request.offset + request.length > until:
                return
            self.extent.arena.engine.submit(request)
            self._submitted += 1

    def fail(self, error: BaseException) -> None:
        """End the rest of a held transfer with an error; instead of ``Spool.go_on``, on its thread."""
        for request in self._requests[self._submitted :]:
            if request.try_start():
                request.finish(error)

    @property
    def arrived_bytes(self) -> int:
        """How many of the first bytes have been moved, without a gap, so far."""
        left = tuple(self._left)
        return min(request.offset for request in left) - self._offset if left else self.length

    @property
    def _offset(self) -> int:
        return self.extent.offset + self.skip

    def abandon(self, error: BaseException) -> None:
        """For a forked child, which has no engine threads: nothing will ever run, so wake every thread that waits."""
        self._claim.take(_CANCELLED)
        self.error = self.error or error
        self.extent.writer = None
        self._ended.set()

    def _check_place(self, memory: Sequence[Range], alignment: int) -> None:
        extent, kind, skip = self.extent, self.kind.value, self.skip
        if self.length < 1 or skip < 0 or skip + self.length > extent.nbytes:
            raise StateError(f"{kind} of {self.length} bytes: {extent!r}")
        for address, length in memory:
            if address % alignment or length % alignment:
                raise StateError(f"address {address:#x}, length {length}: not multiples of {alignment} bytes")
        if skip % alignment:
            raise StateError(f"{kind} from byte {skip} of {extent!r}: not a multiple of {alignment} bytes")

    def _before_verified(self, offset: int, memory: Sequence[Range]) -> None:
        before = self.callbacks.before  # once: another thread may end it meanwhile
        if before is not None:
            before()
        self.extent.checksums[offset] = crc32(memory)

    def _request_done(self, request: IoRequest) -> None:
        error = request.error
        if error is None and self.kind is IoKind.READ and self.extent.checksums:
            error = self._check(request)
        if error is not None and self.error is None:
            self.error = error
        self._left.discard(request)
        on_part = self.callbacks.on_part
        if on_part is not None and self._left:
            on_part()
        self._end_if_last()

    def _check(self, request: IoRequest) -> ChecksumError | None:
        expected = self.extent.checksums.get(request.offset, -1)  # -1 is no checksum: no write began there
        found = crc32(request.memory)
        if found == expected:
            return None
        where = f"{request.length} bytes at offset {request.offset}"
        text = f"{where} read back with crc32 {found:08x}, written {expected:08x}"
        return ChecksumError(errno.EBADMSG, text, self.extent.arena.file.path)

    def _end_if_last(self) -> None:
        """End it when no request is left: once if finished; cancelled perhaps in two threads, which does no harm."""
        if self._left:
            return
        finished = self._claim.take(object())
        if finished or self.cancelled:  # else another thread finishes it
            self._end(finished)

    def _end(self, finished: bool) -> None:
        if self.extent.writer is self:
            self.extent.valid_bytes = self.length if finished and self.error is None else 0
            self.extent.writer = None
        callbacks, self.callbacks = self.callbacks, Callbacks()
        self.on_end(self)  # first: on_done may want to free the extent and find the room
        self._ended.set()
        if finished and callbacks.on_done is not None:
            call_back(callbacks.on_done, self)
        del callbacks  # `keepalive` lives until here, so that memory is freed with no lock held


def crc32(ranges: Sequence[Range]) -> int:
    """Return the CRC-32 of some ranges of this process's memory, one behind the other.

    It reads through the kernel, which reports an error if the memory was unmapped; a load would end the process. On a
    system without ``/proc`` that may happen.

    Raises:
        OSError: The memory is not there (any more).
    """
    found = 0
    try:
        memory = io.FileIO(_MEMORY)
    except OSError:
        for address, length in ranges:
            found = zlib.crc32(memory_view(address, length), found)
        return found
    with memory:
        for address, length in ranges:
            memory.seek(address)
            while length > 0:
                chunk = memory.read(min(length, _CHUNK_BYTES))
                if not chunk:
                    raise OSError(errno.EFAULT, "the memory cannot be read")
                found = zlib.crc32(chunk, found)
                length -= len(chunk)
    return found


def closed_error() -> OffloaderClosedError:
    """Return the error of a spool that is closed."""
    return OffloaderClosedError("the spool is closed")
