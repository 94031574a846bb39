"""Extents of the spool, and the transfers of one extent: several requests seen as one.

Nothing in a ``Transfer`` takes a lock: ``cancel`` may run in a finalizer, which may interrupt any thread anywhere. A
list whose ``append`` is atomic decides instead, "finished" or "cancelled", by what came first; and a set of the
segments that have not ended. A cancellation may be interrupted itself: all of its steps may be done again.
"""

from __future__ import annotations

import errno
import threading
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from .engines.base import IoKind, IoRequest, Latch, Range, SpoolFile, StorageEngine, report_uncaught
from .engines.process_memory import crc32
from .engines.queued import memory_view
from .errors import ChecksumError, OffloaderClosedError, StateError


class Segment(NamedTuple):
    """A range of one arena."""

    lane: int
    """Index of the path it lies on."""
    offset: int
    """Where it starts in that arena, in bytes."""
    nbytes: int
    """Its size in bytes."""


class Extent:
    """Room on the spool for one storage, striped over segments; the spool makes and frees it.

    Attributes:
        nbytes: Its size, rounded up to the spool's granularity.
        segments: Where it lies, in the order of its bytes.
    """

    __slots__ = (
        "_busy",
        "_checksums",
        "_freed",
        "_poisoned",
        "_release_due",
        "_valid_bytes",
        "_writer",
        "nbytes",
        "segments",
    )

    def __init__(self, segments: tuple[Segment, ...]) -> None:
        self.segments = segments
        self.nbytes = sum(segment.nbytes for segment in segments)
        self._busy = 0  # transfers in flight; changed under the spool's lock only
        self._freed = False  # the caller has given it up
        self._release_due = False  # and the spool has taken note; changed under the spool's lock only
        self._poisoned = False
        self._writer: Transfer | None = None
        self._valid_bytes = 0  # how much the last write left here; 0: nothing that may be read
        self._checksums: list[int | None] = [None] * len(segments)

    def __repr__(self) -> str:
        return f"<Extent {self.nbytes} bytes in {len(self.segments)} segments>"


_CANCELLED, _FAILED = object(), object()
"""Verdicts on a transfer that did not finish."""


class Transfer:
    """A write or a read of one extent.

    ``wait`` returns once nothing of it touches memory or disk any more, finished or cancelled; ``on_done`` may run just
    after.

    Attributes:
        error: What went wrong, or None. After ``Spool.abort`` an ``OffloaderClosedError``.
        done: Every segment has finished, or has been cancelled in time.
        skip: Bytes of the extent before what is moved.
    """

    __slots__ = (
        "_before",
        "_before_error",
        "_before_lock",
        "_ended",
        "_keepalive",
        "_left",
        "_on_done",
        "_on_end",
        "_parts",
        "_verdict",
        "done",
        "error",
        "extent",
        "kind",
        "length",
        "skip",
    )

    def __init__(
        self,
        kind: IoKind,
        extent: Extent,
        length: int,
        *,
        before: Callable[[], None] | None,
        on_done: Callable[[Transfer], None] | None,
        on_end: Callable[[Transfer], None],
        keepalive: object,
    ) -> None:
        self.kind = kind
        self.extent = extent
        self.length = length
        self.skip = 0
        self.error: BaseException | None = None
        self.done = False
        self._before = before
        self._before_error: BaseException | None = None
        self._before_lock = threading.Lock()
        self._on_done = on_done
        self._on_end = on_end
        self._keepalive = keepalive
        self._ended = Latch()
        self._parts: Parts = ()
        self._left: set[int] = set()  # the parts that have not ended
        self._verdict: list[object] = []  # the first stands

    def wait(self, timeout: float | None = None) -> bool:
        """Waits at most ``timeout`` seconds until nothing of it runs any more, and returns whether that is so."""
        return self._ended.wait(timeout)

    def cancel(self) -> bool:
        """Takes back what has not started. Never blocks; may be called again, as after an interrupt.

        Returns:
            True: ``on_done`` will not be called; what had started finishes by itself, and until then the extent stays
            busy and ``keepalive`` alive. False: it has finished, ``on_done`` has been or will be called.
        """
        self._verdict.append(_CANCELLED)
        if not self.cancelled:
            return False
        self._drop_queued()
        return True

    @property
    def cancelled(self) -> bool:
        """``cancel`` came in time, so ``on_done`` is not called."""
        verdict = self._verdict
        return bool(verdict) and (verdict[0] is _CANCELLED or verdict[0] is _FAILED)

    def promote(self) -> None:
        """Moves what is still queued to the front of the queues."""
        for engine, request in reversed(self._parts):
            engine.promote(request)

    def prepare(self, parts: Parts) -> None:
        """For the spool: takes the requests, one per segment, before anybody else sees the transfer."""
        self._parts = parts
        self._left = set(range(len(parts)))

    def check_order(self, verify: bool) -> None:
        """For the spool: refuses what would be silent corruption, as engines serve reads before writes.

        Args:
            verify: checksums are looked at, which are of all that was written.

        Raises:
            StateError: What it reads is not written yet, or what it overwrites is in use.
        """
        extent = self.extent
        if self.kind is IoKind.WRITE:
            if extent._busy:
                raise StateError(f"write: {extent!r} is still being read or written")
            return
        valid = extent._valid_bytes
        if self.skip + self.length > valid or (verify and self.length != valid):
            state = "is being written" if extent._writer is not None else f"holds {valid} valid bytes"
            raise StateError(f"read of {self.length} bytes: {extent!r} {state}")

    def start(self) -> None:
        """For the spool: submits the requests. After an error it is to `fail`.

        Raises:
            OffloaderClosedError: An engine is closed.
        """
        for engine, request in self._parts:
            engine.submit(request)

    def fail(self, error: BaseException) -> None:
        """For the spool: as ``cancel``, but whoever waits finds ``error``."""
        self._verdict.append(_FAILED)
        if self._verdict[0] is _FAILED:
            self.error = error
        if self.cancelled:
            self._drop_queued()

    def abandon(self, error: BaseException) -> None:
        """For a forked child, which has no engine threads: nothing will ever run, so wake whoever looks at it."""
        self._verdict.append(_FAILED)
        if self._verdict[0] is _FAILED:
            self.error = error
        self.extent._writer = None
        self.done = True
        self._ended.set()

    @property
    def has_before(self) -> bool:
        """There is something to run before the first segment."""
        return self._before is not None

    def run_before(self) -> None:
        """For the requests: runs ``before`` once, before the first segment; the others wait and share its failure."""
        with self._before_lock:
            before, self._before = self._before, None
            if before is not None:
                try:
                    before()
                except BaseException as exc:
                    self._before_error = exc
        if self._before_error is not None:
            raise self._before_error

    def write_checksum(self, index: int, memory: Sequence[Range]) -> None:
        """For the requests: remembers the checksum of what is about to be written.

        Raises:
            OSError: its owner has freed it meanwhile.
        """
        self.extent._checksums[index] = crc32(memory)

    def part_done(self, index: int, path: str, verify: bool, request: IoRequest) -> None:
        """For the requests: one of them has finished."""
        error = request.error
        if error is None and verify and self.kind is IoKind.READ:
            error = self._check(request, index, path)
        if error is not None and self.error is None:
            self.error = error
        self._left.discard(index)
        self._end_if_last()

    def _check(self, request: IoRequest, index: int, path: str) -> ChecksumError | None:
        expected = self.extent._checksums[index]
        found = 0
        for address, length in request.memory:
            found = zlib.crc32(memory_view(address, length), found)
        if expected is None or found == expected:
            return None
        where = f"{request.length} bytes at offset {request.offset}"
        return ChecksumError(errno.EBADMSG, f"{where} read back with crc32 {found:08x}, written {expected:08x}", path)

    def _drop_queued(self) -> None:
        for index, (_, request) in enumerate(self._parts):
            if request.cancel():
                self._left.discard(index)
        self._end_if_last()

    def _end_if_last(self) -> None:
        """Ends it when no part is left: finished once, by one thread; cancelled perhaps more than once, to no harm."""
        if self._left:
            return
        finish = object()
        self._verdict.append(finish)
        finished = self._verdict[0] is finish
        if finished or self.cancelled:  # else another thread finishes it
            self._end(finished)

    def _end(self, finished: bool) -> None:
        if self.extent._writer is self:
            self.extent._valid_bytes = self.length if finished and self.error is None else 0
            self.extent._writer = None
        on_done, keepalive = self._on_done, self._keepalive
        self._on_done = self._before = self._keepalive = None
        self.done = True
        self._on_end(self)  # first: on_done may want to free the extent and find the room
        self._ended.set()
        if finished and on_done is not None:
            try:
                on_done(self)
            except BaseException as exc:  # must not end the engine's thread, and must not be lost
                report_uncaught(exc)
        del keepalive  # alive until here


class Lane(Protocol):
    """What a transfer has to know of a path."""

    engine: StorageEngine
    file: SpoolFile


Parts = tuple[tuple[StorageEngine, IoRequest], ...]


def make_parts(
    transfer: Transfer, lanes: Sequence[Lane], memory: Sequence[Range], *, alignment: int, verify: bool, step: int = 1
) -> Parts:
    """The requests of a transfer, one per segment that it touches.

    Args:
        transfer: What they are of.
        lanes: The paths.
        memory: One range of memory; or several, where the extent has one segment.
        alignment: Addresses and lengths must be multiples of this many bytes.
        verify: Keep a checksum of what is written, and check what is read.
        step: How much further in memory each byte of the extent lies; 0: every segment has the same memory.

    Raises:
        StateError: The extent is too small, or has too many segments, or something is not aligned.
    """
    extent, kind, left = transfer.extent, transfer.kind, transfer.length
    if left < 1 or transfer.skip < 0 or transfer.skip + left > extent.nbytes:
        raise StateError(f"{kind.value} of {left} bytes: {extent!r}")
    for address, length in memory:
        if address % alignment or length % alignment:
            raise StateError(f"address {address:#x}, length {length}: not multiples of {alignment} bytes")
    if (len(memory) > 1 or transfer.skip) and len(extent.segments) > 1:
        raise StateError(f"{kind.value} of ranges of memory or of a part: {extent!r} has more than one segment")
    if transfer.skip % alignment:
        raise StateError(f"{kind.value} from byte {transfer.skip} of {extent!r}: not a multiple of {alignment} bytes")
    parts: list[tuple[StorageEngine, IoRequest]] = []
    address = memory[0][0]
    for index, segment in enumerate(extent.segments):
        length = min(segment.nbytes, left)
        lane = lanes[segment.lane]
        ranges = memory if len(memory) > 1 else ()
        done = partial(transfer.part_done, index, lane.file.path, verify)
        before = _before_part(transfer, index, ranges or ((address, length),), verify)
        offset = segment.offset + transfer.skip
        request = IoRequest(kind, address, length, offset, ranges=ranges, before=before, on_done=done)
        parts.append((lane.engine, request))
        address += step * length
        left -= length
        if not left:
            break
    return tuple(parts)


def _before_part(transfer: Transfer, index: int, memory: Sequence[Range], verify: bool) -> Callable[[], None] | None:
    if transfer.kind is IoKind.READ:
        return None
    if not verify:
        return transfer.run_before if transfer.has_before else None

    def prepare() -> None:
        transfer.run_before()
        transfer.write_checksum(index, memory)

    return prepare


def closed_error() -> OffloaderClosedError:
    """Returns the error of a spool that is closed."""
    return OffloaderClosedError("the spool is closed")


__all__ = ["Extent", "Segment", "Transfer", "closed_error", "make_parts"]
