"""The spool: room on disk for saved activations, and transfers to and from it.

An extent is striped over the paths. Freed room is only handed out again when nothing reads or writes it any more: reuse
before completion would be silent corruption.

Locking: one lock guards the allocators and the books. ``free``, ``Transfer.cancel`` and the end of a transfer never
wait for it (a finalizer may run while its own thread holds the lock): they leave a note in ``_inbox``, which whoever
gets the lock works off.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence

from .arena import ArenaSet, SpoolStatistics
from .engines import EngineFactory
from .engines.base import IoKind, Range, SpoolFile, StorageEngine
from .errors import ConfigError, SpoolFullError, StateError
from .events import now
from .extent_io import Extent, Parts, Transfer, closed_error, make_parts
from .locks import new_lock
from .meters import Mark, RateMeter

_POISON_BYTE = b"\xff"
_POISON_WAIT_S = 30.0


class Spool:
    """Room on disk for extents, and transfers between them and memory. Thread-safe.

    Args:
        paths: Directories; extents are striped over them.
        engine: Name of an engine, ``"auto"``, or a factory that makes one for a file.
        capacity_bytes: Most bytes on disk, all paths together; None: what the file systems have free, less a reserve.
        processes: How many processes open a spool like this one on the machine: without ``capacity_bytes`` each takes
            at most its share of what is free when it begins, so that none fills the disk of the others.
        stripe_bytes: Largest segment of an extent, thus of a request.
        grow_bytes: How much an arena is grown at a time; the first step is taken at once.
        threads: Threads per engine; None: the engine's own choice.
        verify: Keep a checksum of every write and check it after every read.
        poison: For debugging: overwrite freed extents before they are used again.
        allow_any_filesystem: Also take memory, network and FUSE file systems.

    Raises:
        ConfigError: An option has a value that cannot work.
        SpoolPathError: A directory cannot hold a spool.
        SpoolFullError: There is no room for the first step.
        EngineUnavailableError: The engine cannot run here.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        engine: str | EngineFactory = "auto",
        capacity_bytes: int | None = None,
        processes: int = 1,
        stripe_bytes: int = 8 << 20,
        grow_bytes: int = 256 << 20,
        threads: int | None = None,
        verify: bool = False,
        poison: bool = False,
        allow_any_filesystem: bool = False,
    ) -> None:
        _check_options(
            paths,
            capacity_bytes=capacity_bytes,
            processes=processes,
            stripe_bytes=stripe_bytes,
            grow_bytes=grow_bytes,
            threads=threads,
        )
        self._lock = new_lock()
        self._closed = False
        self._inert = False
        self._inbox: deque[Extent | Transfer] = deque()
        self._live: dict[Transfer, Mark] = {}
        self.meters = {IoKind.WRITE: RateMeter(), IoKind.READ: RateMeter()}
        self._verify = verify
        self._to_poison: list[Extent] = []
        self._arenas = ArenaSet(
            paths,
            engine=engine,
            threads=threads,
            allow_any_filesystem=allow_any_filesystem,
            stripe_bytes=stripe_bytes,
            grow_bytes=grow_bytes,
            capacity_bytes=capacity_bytes,
            processes=processes,
        )
        self._poison = _poison_block(self._arenas.stripe_bytes) if poison else None
        self.alignment = self._arenas.alignment
        self.direct = self._arenas.direct
        self.vectored = all(lane.engine.capabilities.vectored for lane in self._arenas.lanes)
        self.engine_name = self._arenas.engine_name
        self.engine_reason = self._arenas.engine_reason

    @property
    def files(self) -> tuple[SpoolFile, ...]:
        """The arena of each path: for diagnosis and tests."""
        return tuple(lane.file for lane in self._arenas.lanes)

    @property
    def engines(self) -> tuple[StorageEngine, ...]:
        """The engine of each path: for diagnosis and tests."""
        return tuple(lane.engine for lane in self._arenas.lanes)

    def allocate(self, nbytes: int) -> Extent:
        """Returns room for ``nbytes`` bytes; nothing may be read from it before something has been written.

        Raises:
            SpoolFullError: No path has room.
            OffloaderClosedError: The spool is closed.
        """
        if nbytes < 1:
            raise ValueError(f"nbytes={nbytes}: must be positive")
        self._start_poison()
        try:
            return self._allocate(nbytes)
        except SpoolFullError:
            if not self._await_poison():
                raise
            return self._allocate(nbytes)

    def write(
        self,
        extent: Extent,
        address: int,
        length: int,
        *,
        before: Callable[[], None] | None = None,
        on_done: Callable[[Transfer], None] | None = None,
        keepalive: object = None,
    ) -> Transfer:
        """Starts to write ``length`` bytes of memory to an extent that nothing else reads or writes.

        Args:
            extent: Where to.
            address: Where from, a multiple of ``alignment``; must stay valid until the transfer is done (see
                ``keepalive``).
            length: Bytes, a multiple of ``alignment``.
            before: Runs once, in an engine's thread, before the first byte is read from memory.
            on_done: Called at most once with the transfer, in an engine's thread, with no lock held.
            keepalive: Kept alive until nothing touches the memory any more.

        Raises:
            OffloaderClosedError: The spool is closed.
            StateError: The extent is freed, too small or in use, or something is not aligned.
        """
        return self.write_ranges(extent, ((address, length),), before=before, on_done=on_done, keepalive=keepalive)

    def write_ranges(
        self,
        extent: Extent,
        memory: Sequence[Range],
        *,
        before: Callable[[], None] | None = None,
        on_done: Callable[[Transfer], None] | None = None,
        keepalive: object = None,
    ) -> Transfer:
        """As ``write``, from several ranges of memory to one segment, one behind the other; only where ``vectored``."""
        length = sum([nbytes for _, nbytes in memory])
        transfer = self._transfer(IoKind.WRITE, extent, length, before, on_done, keepalive)
        return self._start(transfer, self._parts(transfer, memory))

    def read(
        self,
        extent: Extent,
        address: int,
        length: int,
        *,
        on_done: Callable[[Transfer], None] | None = None,
        keepalive: object = None,
    ) -> Transfer:
        """Starts to read the first ``length`` bytes of what the last successful write left in an extent.

        Arguments and errors as in ``write``; also a StateError when that write has not finished, has failed or was
        shorter. With ``verify`` the length must be the one that was written.
        """
        return self.read_ranges(extent, ((address, length),), on_done=on_done, keepalive=keepalive)

    def read_ranges(
        self,
        extent: Extent,
        memory: Sequence[Range],
        *,
        skip: int = 0,
        on_done: Callable[[Transfer], None] | None = None,
        keepalive: object = None,
    ) -> Transfer:
        """As ``read``, behind ``skip`` bytes of the extent, into several ranges of memory; as ``write_ranges``."""
        length = sum([nbytes for _, nbytes in memory])
        transfer = self._transfer(IoKind.READ, extent, length, None, on_done, keepalive)
        transfer.skip = skip
        return self._start(transfer, self._parts(transfer, memory))

    def free(self, extent: Extent) -> None:
        """Gives an extent up; its room is used again once nothing is in flight on it.

        Never blocks; does nothing after ``close``.

        Raises:
            StateError: It has been freed before.
        """
        if extent._freed:
            raise StateError(f"{extent!r} is freed twice")
        extent._freed = True
        self._note(extent)

    def close(self) -> None:
        """Waits for all transfers, then gives the disk space back. Idempotent; not from an engine's thread."""
        self._closed = True
        if self._inert:
            return
        for engine in self.engines:
            engine.close()
        self._arenas.close_files()

    def abort(self) -> None:
        """Cancels what has not started, waits only for what runs, then gives the disk space back. Idempotent.

        A cancelled transfer wakes whoever waits for it, with an ``OffloaderClosedError`` in its ``error`` and no
        ``on_done``.
        """
        self._closed = True
        if self._inert:
            return
        with self._lock:
            live = tuple(self._live)
        for transfer in live:
            transfer.fail(closed_error())
        for engine in self.engines:
            engine.abort()
        self._arenas.close_files()

    def after_fork_in_child(self) -> None:
        """In a forked child: closes our descriptors; the spool is closed. Takes no lock, touches no thread."""
        if self._inert:
            return
        self._closed = self._inert = True
        self._lock = new_lock()  # the other one may be held by a thread that this process does not have
        for engine in self.engines:
            engine.after_fork_in_child()
        self._arenas.close_files()
        self._inbox.clear()
        for transfer in tuple(self._live):
            transfer.abandon(closed_error())

    def statistics(self) -> SpoolStatistics:
        """Returns what the spool is and has done so far."""
        self._start_poison()
        with self._lock:
            self._drain()
            return SpoolStatistics(
                engine=self.engine_name,
                direct=self.direct,
                alignment=self.alignment,
                paths=tuple(file.path for file in self.files),
                capacity_bytes=self._arenas.capacity_bytes,
                arena_bytes=self._arenas.arena_bytes,
                allocated_bytes=self._arenas.allocated_bytes,
                peak_allocated_bytes=self._arenas.peak_allocated_bytes,
                written_bytes=sum(lane.written_bytes for lane in self._arenas.lanes),
                read_bytes=sum(lane.read_bytes for lane in self._arenas.lanes),
                busy_extents=len({transfer.extent for transfer in self._live}),
            )

    def _allocate(self, nbytes: int) -> Extent:
        with self._lock:
            if self._closed:
                raise closed_error()
            self._drain()
            return Extent(self._arenas.take(nbytes))

    def _transfer(
        self,
        kind: IoKind,
        extent: Extent,
        length: int,
        before: Callable[[], None] | None,
        on_done: Callable[[Transfer], None] | None,
        keepalive: object,
    ) -> Transfer:
        return Transfer(kind, extent, length, before=before, on_done=on_done, on_end=self._note, keepalive=keepalive)

    def _parts(self, transfer: Transfer, memory: Sequence[Range], step: int = 1) -> Parts:
        """Makes one request per segment that the transfer touches."""
        return make_parts(
            transfer, self._arenas.lanes, memory, alignment=self.alignment, verify=self._verify, step=step
        )

    def _start(self, transfer: Transfer, parts: Parts, poisoning: bool = False) -> Transfer:
        transfer.prepare(parts)
        extent = transfer.extent
        try:
            with self._lock:
                if self._closed:
                    raise closed_error()
                self._drain()
                if extent._freed and not poisoning:
                    raise StateError(f"{transfer.kind.value}: {extent!r} is freed")
                extent._poisoned = extent._release_due = poisoning
                transfer.check_order(self._verify)
                mark = self.meters[transfer.kind].began(now())
                extent._busy += 1  # no call from here on: an interrupt finds all of it done, or none
                if transfer.kind is IoKind.WRITE:
                    extent._writer, extent._valid_bytes = transfer, 0
                self._live[transfer] = mark
            transfer.start()
        except BaseException as exc:  # an engine is closed, no memory, or an interrupt
            if transfer in self._live:
                transfer.fail(exc)
            raise
        return transfer

    def _note(self, item: Extent | Transfer) -> None:
        """Leaves a note for the books, and keeps them if nobody else does. Never blocks."""
        if self._inert:  # the fork may have caught the allocators in the middle of a change
            return
        self._inbox.append(item)
        while self._inbox and self._lock.run_if_free(self._drain) is not None:
            pass

    def _drain(self) -> bool:
        """Works off the notes; True. The lock is held."""
        while self._inbox:
            item = self._inbox[0]  # taken away below: an interrupt before that leaves it to whoever comes next
            if isinstance(item, Transfer):
                extent = item.extent
                if item in self._live:  # else it is noted twice, as its end was interrupted
                    moved = item.done and not item.cancelled and item.error is None
                    self.meters[item.kind].ended(item.length if moved else 0, now(), self._live[item])
                    extent._busy -= 1  # no call between these: an interrupt finds both done, or none
                    del self._live[item]
            else:
                extent = item
                extent._release_due = True
            self._inbox.popleft()
            if extent._release_due and not extent._busy:
                self._release(extent)
        return True

    def _release(self, extent: Extent) -> None:
        extent._release_due = False  # once: an end may be noted twice
        if self._poison is None or extent._poisoned or self._closed:
            self._arenas.give_back(extent.segments)
        else:
            self._to_poison.append(extent)

    def _start_poison(self) -> None:
        """Starts to overwrite what has been freed. Not in ``free``: that is safe in a finalizer, and this submits."""
        if self._poison is None or self._closed:
            return
        with self._lock:
            self._drain()
            extents, self._to_poison = self._to_poison, []
        anchor = ctypes.c_char.from_buffer(self._poison)
        for extent in extents:
            transfer = self._transfer(IoKind.WRITE, extent, extent.nbytes, _alone, None, anchor)
            memory = ((ctypes.addressof(anchor), extent.nbytes),)
            parts = self._parts(transfer, memory, step=0)  # the same bytes for every segment
            self._start(transfer, parts, poisoning=True)

    def _await_poison(self) -> bool:
        """Waits for freed room that is still being overwritten; returns whether there was any."""
        with self._lock:
            poisoning = [transfer for transfer in self._live if transfer.extent._poisoned]
        return bool(poisoning) and all(transfer.wait(_POISON_WAIT_S) for transfer in poisoning)


def _alone() -> None:
    """Before poison is written: with that, it is not gathered with what may want a lock that who awaits it holds."""


def _poison_block(nbytes: int) -> mmap.mmap:
    block = mmap.mmap(-1, nbytes)
    block[:] = _POISON_BYTE * nbytes
    return block


def _check_options(paths: object, **sizes: int | None) -> None:
    if isinstance(paths, str | bytes | os.PathLike) or not paths:
        raise ConfigError("paths", paths, "give a list with at least one directory")
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ConfigError(name, value, "must be at least 1")


__all__ = ["Extent", "Spool", "SpoolStatistics", "Transfer"]
