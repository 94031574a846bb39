"""Extents of the spool, and the transfers of one extent: several requests seen as one.

Nothing in a ``Transfer`` takes a lock that a caller could hold: ``cancel`` may run in a finalizer, which may interrupt
any thread anywhere. The first entry of a list, whose ``append`` is atomic, decides between "finished" and "cancelled".
"""

from __future__ import annotations

import errno
import io
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ..errors import ChecksumError, OffloaderClosedError, StateError
from .arena import PathArena, Segment
from .engines.base import Completion, IoKind, IoRequest, Range, RequestState, StorageEngine, report_uncaught
from .engines.queued import memory_view

_CHUNK_BYTES = 1 << 20
_MEMORY = "/proc/self/mem"


@dataclass(slots=True, eq=False)
class Extent:
    """Room on the spool for one storage, striped over segments; the spool makes, changes and frees it."""

    segments: tuple[Segment, ...]  # where it lies, in the order of its bytes
    nbytes: int = field(init=False)  # rounded up to the spool's granularity
    checksums: list[int | None] = field(init=False)  # of each segment, where the spool verifies
    valid_bytes: int = 0  # how much the last write left here; 0: nothing that may be read
    transfers: int = 0  # how many are in flight
    writer: Transfer | None = None  # the write that is in flight
    freed: bool = False  # the caller has given it up
    release_due: bool = False  # the spool is to release it when the last transfer has ended

    def __post_init__(self) -> None:
        self.nbytes = sum(segment.nbytes for segment in self.segments)
        self.checksums = [None] * len(self.segments)

    def __repr__(self) -> str:
        return f"<Extent {self.nbytes} bytes in {len(self.segments)} segments>"


class _Cancelled:
    """The outcome of a transfer that was cancelled; each attempt is its own."""


@dataclass(slots=True, eq=False, repr=False)
class Transfer:
    """A write or a read of one extent.

    ``wait`` returns once nothing of it touches memory or disk any more, finished or cancelled; ``on_done`` may run just
    after. It has more attributes than usual: the facts of the transfer, and the callbacks that it lets go of when it
    ends.
    """

    kind: IoKind
    extent: Extent
    length: int
    on_end: Callable[[Transfer], None]  # of the spool, before `on_done`
    skip: int = 0  # bytes of the extent before what is moved
    before: Callable[[], None] | None = None  # as `Spool.write` says, and so on
    on_done: Callable[[Transfer], None] | None = None
    keepalive: object = None
    on_part: Callable[[], None] | None = None
    about: object = None  # what the caller wants to know it by
    began_s: float = 0.0  # when it was given to an engine
    error: BaseException | None = None  # what went wrong; after `Spool.abort` an `OffloaderClosedError`
    done: bool = False  # every segment has finished, or has been cancelled in time
    _ended: Completion = field(default_factory=Completion)
    _requests: list[tuple[StorageEngine, IoRequest]] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)  # of the requests, in bytes of what is moved
    _submitted: int = 0
    _left: set[int] = field(default_factory=set)  # indices of the requests that have not ended
    _outcomes: list[object] = field(default_factory=list)  # the first one stands: cancelled or finished

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most ``timeout`` seconds until nothing of it runs any more, and return whether that is so."""
        return self._ended.wait(timeout)

    def cancel(self, error: BaseException | None = None) -> bool:
        """Take back what has not started. Never blocks; may be called again.

        Args:
            error: What whoever waits is to find.

        Returns:
            True: ``on_done`` will not be called; what had started finishes by itself, and until then the extent stays
            busy and ``keepalive`` alive. False: it has finished, ``on_done`` has been or will be called.
        """
        attempt = _Cancelled()
        self._outcomes.append(attempt)
        if error is not None and self._outcomes[0] is attempt:
            self.error = error
        if self.cancelled:
            for index, (_, request) in enumerate(self._requests):
                if request.cancel():
                    self._left.discard(index)
            self._end_if_last()
        return self.cancelled

    @property
    def cancelled(self) -> bool:
        """``cancel`` came in time, so ``on_done`` is not called."""
        return bool(self._outcomes) and isinstance(self._outcomes[0], _Cancelled)

    @property
    def moved_bytes(self) -> int:
        """What has gone over the link, also of a transfer that was cancelled when part of it had started."""
        return sum(request.length for _, request in self._requests if request.state is RequestState.DONE)

    def promote(self) -> None:
        """Move what is still queued to the front of the queues."""
        for engine, request in reversed(self._requests):
            engine.promote(request)

    def prepare(self, arenas: Sequence[PathArena], memory: Sequence[Range], *, alignment: int, verify: bool) -> None:
        """For the spool: make the requests, one for each segment that is touched.

        Args:
            memory: One range of memory; or several, where the extent has one segment.
            verify: Keep a checksum of what is written, and check what is read.

        Raises:
            StateError: The extent is too small, or has too many segments, or something is not aligned.
        """
        extent, kind, left = self.extent, self.kind, self.length
        self._check_place(memory, alignment)
        address = memory[0][0]
        for index, segment in enumerate(extent.segments):
            arena, length = arenas[segment.arena], min(segment.nbytes, left)
            ranges = memory if len(memory) > 1 else ()
            before = self._before_request(index, ranges or ((address, length),), verify)
            on_done = partial(self._request_done, index, arena.file.path, verify)
            offset = segment.offset + self.skip
            request = IoRequest(kind, address, length, offset, ranges=ranges, before=before, on_done=on_done)
            self._requests.append((arena.engine, request))
            address += length
            left -= length
            self._ends.append(self.length - left)
            if not left:
                break
        self._left = set(range(len(self._requests)))

    def check_order(self, verify: bool) -> None:
        """For the spool: refuses what would be silent corruption, as engines serve reads before writes.

        Raises:
            StateError: What it reads is not written yet, or what it overwrites is in use.
        """
        extent = self.extent
        if self.kind is IoKind.WRITE:
            if extent.transfers:
                raise StateError(f"write: {extent!r} is still being read or written")
            return
        valid = extent.valid_bytes
        if self.skip + self.length > valid or (verify and self.length != valid):
            state = "is being written" if extent.writer is not None else f"holds {valid} valid bytes"
            raise StateError(f"read of {self.length} bytes: {extent!r} {state}")

    def start(self, nbytes: int | None = None) -> None:
        """For the spool: submit the requests within the first ``nbytes`` bytes (None: all) that were not.

        Raises:
            OffloaderClosedError: An engine is closed; the caller is to `fail` or to cancel the transfer.
        """
        until = self.length if nbytes is None else nbytes
        while self._submitted < len(self._requests) and self._ends[self._submitted] <= until:
            engine, request = self._requests[self._submitted]
            engine.submit(request)
            self._submitted += 1

    def fail(self, error: BaseException) -> None:
        """End what has not begun of a held transfer with an error; instead of ``Spool.go_on``, on its thread."""
        for _, request in self._requests[self._submitted :]:
            if request.try_start():
                request.finish(error)

    @property
    def arrived_bytes(self) -> int:
        """How many of the first bytes have been moved, without a gap, so far."""
        left = tuple(self._left)
        return self.length if not left else self._ends[min(left) - 1] if min(left) else 0

    def abandon(self, error: BaseException) -> None:
        """For a forked child, which has no engine threads: nothing will ever run, so wake whoever looks at it."""
        self._outcomes.append(_Cancelled())
        self.error = self.error or error
        self.extent.writer = None
        self.done = True
        self._ended.set()

    def _check_place(self, memory: Sequence[Range], alignment: int) -> None:
        extent, kind, skip = self.extent, self.kind.value, self.skip
        if self.length < 1 or skip < 0 or skip + self.length > extent.nbytes:
            raise StateError(f"{kind} of {self.length} bytes: {extent!r}")
        for address, length in memory:
            if address % alignment or length % alignment:
                raise StateError(f"address {address:#x}, length {length}: not multiples of {alignment} bytes")
        if (len(memory) > 1 or skip) and len(extent.segments) > 1:
            raise StateError(f"{kind} of ranges of memory or of a part: {extent!r} has more than one segment")
        if skip % alignment:
            raise StateError(f"{kind} from byte {skip} of {extent!r}: not a multiple of {alignment} bytes")

    def _before_request(self, index: int, memory: Sequence[Range], verify: bool) -> Callable[[], None] | None:
        check = self.before
        if not verify or self.kind is IoKind.READ:
            return check

        def before() -> None:
            if check is not None:
                check()
            self.extent.checksums[index] = crc32(memory)

        return before

    def _request_done(self, index: int, path: str, verify: bool, request: IoRequest) -> None:
        error = request.error
        if error is None and verify and self.kind is IoKind.READ:
            error = self._check(request, index, path)
        if error is not None and self.error is None:
            self.error = error
        self._left.discard(index)
        if self.on_part is not None and self._left:
            self.on_part()
        self._end_if_last()

    def _check(self, request: IoRequest, index: int, path: str) -> ChecksumError | None:
        expected = self.extent.checksums[index]
        found = crc32(request.memory)
        if expected is None or found == expected:
            return None
        where = f"{request.length} bytes at offset {request.offset}"
        return ChecksumError(errno.EBADMSG, f"{where} read back with crc32 {found:08x}, written {expected:08x}", path)

    def _end_if_last(self) -> None:
        """End it when no request is left: once if finished; cancelled perhaps in two threads, which does no harm."""
        if self._left:
            return
        finish = object()
        self._outcomes.append(finish)
        finished = self._outcomes[0] is finish
        if finished or self.cancelled:  # else another thread finishes it
            self._end(finished)

    def _end(self, finished: bool) -> None:
        if self.extent.writer is self:
            self.extent.valid_bytes = self.length if finished and self.error is None else 0
            self.extent.writer = None
        on_done, keepalive = self.on_done, self.keepalive
        self.on_done = self.on_part = self.before = self.keepalive = None
        self.done = True
        self.on_end(self)  # first: on_done may want to free the extent and find the room
        self._ended.set()
        if finished and on_done is not None:
            try:
                on_done(self)
            except BaseException as exc:  # it must not end the engine's thread, and must not be lost
                report_uncaught(exc)
        del keepalive  # alive until here


def crc32(ranges: Sequence[Range]) -> int:
    """Return the CRC-32 of some ranges of this process's memory, one behind the other.

    It reads through the kernel, which says so where the memory is gone; a load would end the process. Where there is no
    ``/proc`` that may happen.

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
