"""The spool: room on disk for saved activations, and transfers to and from it.

An extent lies whole on one path, the one with the shortest queue. Freed room is reused only when nothing reads or
writes it any more: reuse before completion would be silent corruption.

Several spools may share one `Disk`: each has its own counts, and ends alone. ``free``, ``Transfer.cancel`` and the end
of a transfer never wait for the disk's lock, as a finalizer may run while its own thread holds it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import StateError
from ..events import now
from .arena import Disk, Extent, SpoolStatistics
from .engines.base import IoKind, Range, SpoolFile, StorageEngine
from .meters import LinkShare, RateMeter
from .transfers import Callbacks, Transfer, closed_error


class Spool:
    """Room on disk for extents, and transfers between them and memory. Thread-safe.

    Args:
        paths: Directories; each extent lies on one of them.
        verify: Keep a checksum of every write and check it after every read.
        poison: For debugging: overwrite freed extents before they are used again.
        disk: Of another spool, to share: then ``paths`` and ``options`` are ignored.
        options: As for `Disk`, which may raise an error.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        verify: bool = False,
        poison: bool = False,
        disk: Disk | None = None,
        **options: Any,
    ) -> None:
        self._closed = False
        self._inert = False  # in a forked child, to which nothing here belongs
        self._live: dict[Transfer, LinkShare | None] = {}  # None: nothing of it has begun
        self.meters = {IoKind.WRITE: RateMeter(), IoKind.READ: RateMeter()}
        self.on_moved: Callable[[Transfer], None] | None = None
        """Called with each transfer that has moved bytes and is over. The disk's lock is held: it must not call us."""
        self._extents: set[Extent] = set()
        self._moved_bytes = {IoKind.WRITE: 0, IoKind.READ: 0}  # by transfers that are over
        self.allocated_bytes = 0
        """Room that is taken now."""
        self._peak_allocated_bytes = 0
        self._verify = verify
        self._poison = poison
        self.disk = disk = Disk(paths, **options) if disk is None else disk
        with disk.lock:
            disk.users.add(self)
        self.capabilities = disk.capabilities

    @property
    def files(self) -> tuple[SpoolFile, ...]:
        """The arena of each path: for diagnosis and tests."""
        return tuple(arena.file for arena in self.disk.arenas)

    @property
    def engines(self) -> tuple[StorageEngine, ...]:
        """The engine of each path: for diagnosis and tests."""
        return tuple(arena.engine for arena in self.disk.arenas)

    def devices(self) -> frozenset[int]:
        """Return the numbers of the block devices on which the paths lie."""
        return frozenset(os.fstat(file.fd).st_dev for file in self.files if file.fd >= 0)

    def allocate(self, nbytes: int) -> Extent:
        """Return room for ``nbytes`` bytes; nothing may be read from it before something has been written.

        Raises:
            SpoolFullError: No path has room.
            OffloaderClosedError: The spool is closed.
        """
        if nbytes < 1:
            raise ValueError(f"nbytes={nbytes}: must be positive")
        with self.disk.lock:
            if self._closed or self.disk.closed:
                raise closed_error()
            self.disk.work_off()  # first: room that was freed counts at once
            extent = self.disk.take(nbytes)
            self._extents.add(extent)
            self.allocated_bytes += extent.nbytes
            self._peak_allocated_bytes = max(self._peak_allocated_bytes, self.allocated_bytes)
            return extent

    def write(
        self,
        extent: Extent,
        address: int,
        length: int,
        *,
        ranges: Sequence[Range] = (),
        before: Callable[[], None] | None = None,
        on_done: Callable[[Transfer], None] | None = None,
        keepalive: object = None,
        held: bool = False,
        records: Sequence[Any] = (),
    ) -> Transfer:
        """Start to write ``length`` bytes of memory to an extent that nothing else reads or writes.

        Args:
            extent: Destination.
            address: Source, a multiple of ``capabilities.alignment``; must stay valid until the transfer is done (see
                ``keepalive``).
            length: Bytes, a multiple of ``capabilities.alignment``.
            ranges: Several ranges of memory instead, as in ``IoRequest``; only where ``vectored``.
            before: Runs in an engine's thread, before each request touches its memory.
            on_done: Called at most once with the transfer, in an engine's thread, with no lock held.
            keepalive: Kept alive until nothing touches the memory any more.
            held: Submit nothing: the caller calls ``go_on`` as bytes become ready.
            records: The owners of the bytes: ``Transfer.records``.

        Raises:
            OffloaderClosedError: The spool is closed.
            StateError: The extent is freed, too small or in use, or something is not aligned.
        """
        callbacks = Callbacks(before, on_done, None, keepalive)
        transfer = Transfer(IoKind.WRITE, extent, length, self._post, dict.fromkeys(records, True), callbacks)
        return self._start(transfer, ranges or ((address, length),), held)

    def read(
        self,
        extent: Extent,
        address: int,
        length: int,
        *,
        ranges: Sequence[Range] = (),
        skip: int = 0,
        on_done: Callable[[Transfer], None] | None = None,
        keepalive: object = None,
        on_part: Callable[[], None] | None = None,
        held: bool = False,
        records: Sequence[Any] = (),
    ) -> Transfer:
        """Start to read ``length`` bytes, behind ``skip``, that the last successful write left in an extent.

        Arguments and errors as in ``write``; also a StateError when that write has not finished, has failed or was
        shorter. With ``verify`` the length must be the one that was written. ``on_part`` is called as ``on_done`` is,
        after each request but the last: see ``Transfer.arrived_bytes``.
        """
        callbacks = Callbacks(None, on_done, on_part, keepalive)
        transfer = Transfer(IoKind.READ, extent, length, self._post, dict.fromkeys(records, True), callbacks, skip)
        return self._start(transfer, ranges or ((address, length),), held)

    def go_on(self, transfer: Transfer, nbytes: int | None = None) -> None:
        """Submit the requests of a held transfer within its first ``nbytes`` bytes (None: all). One thread at a time.

        Raises:
            OffloaderClosedError: The engine is closed; the caller is to ``Transfer.fail`` the transfer.
        """
        with self.disk.lock:
            if transfer in self._live and self._live[transfer] is None:
                self._live[transfer] = self._begins(transfer)
        transfer.start(nbytes)

    def free(self, extent: Extent) -> None:
        """Free an extent; its room is reused once nothing is in flight on it.

        Never blocks; does nothing after ``close``.

        Raises:
            StateError: It has been freed before.
        """
        if extent.freed:
            if self._closed:  # `abort` has freed it
                return
            raise StateError(f"{extent!r} is freed twice")
        extent.freed = True
        self._post(extent)

    def close(self) -> None:
        """Wait for all transfers, then give the disk space back. Idempotent; not from an engine's thread."""
        self._closed = True
        if self._inert:
            return
        with self.disk.lock:
            last = self._is_last()
            begun = [transfer for transfer, share in self._live.items() if share is not None]
        if last:
            self.disk.close(wait=True)
            return
        for transfer in begun:
            transfer.wait()
        self._free_all()

    def abort(self, *, all_users: bool = False) -> None:
        """Cancel queued requests, then give the disk space back once the running ones have ended. Idempotent.

        It works from any state in which an interrupt may have left this thread. A cancelled transfer wakes the threads
        that wait for it, with an ``OffloaderClosedError`` in its ``error`` and no ``on_done``.

        Args:
            all_users: End the disk for the other spools on it as well: an interrupt may have left the allocators or an
                engine half changed.
        """
        self._closed = True
        if self._inert:
            return
        self.disk.lock.abandon()
        with self.disk.lock:
            last = self._is_last()
            ending = [self, *(other for other in self.disk.users if all_users and other is not self)]
            live = [transfer for spool in ending for transfer in spool._live]
        for transfer in live:
            transfer.cancel(closed_error())
        if last or all_users:
            self.disk.close(wait=False)
        else:
            self._free_all()

    def _is_last(self) -> bool:
        """Return whether no other spool needs the disk. The lock is held: another thread may open or close a spool."""
        return all(other._closed for other in self.disk.users)

    def _free_all(self) -> None:
        """Free every extent: other spools use the room once nothing is in flight on it. The spool is closed."""
        with self.disk.lock:
            held = tuple(self._extents)
        for extent in held:
            self.free(extent)

    def after_fork_in_child(self) -> None:
        """In a forked child: closes our descriptors; the spool is closed. Takes no lock, touches no thread."""
        if self._inert:
            return
        self._closed = self._inert = True
        self.disk.after_fork_in_child()
        for transfer in tuple(self._live):
            transfer.abandon(closed_error())

    def statistics(self) -> SpoolStatistics:
        """Return the room of the disk, and the traffic of this spool so far."""
        with self.disk.lock:
            self.disk.work_off()
            moved = dict(self._moved_bytes)
            for transfer in self._live:
                moved[transfer.kind] += transfer.moved_bytes
            return SpoolStatistics(
                capacity_bytes=self.disk.capacity_bytes,
                arena_bytes=self.disk.arena_bytes,
                allocated_bytes=self.allocated_bytes,
                peak_allocated_bytes=self._peak_allocated_bytes,
                written_bytes=moved[IoKind.WRITE],
                read_bytes=moved[IoKind.READ],
                busy_extents=len({transfer.extent for transfer in self._live}),
            )

    def _start(self, transfer: Transfer, memory: Sequence[Range], held: bool) -> Transfer:
        extent, request_bytes, alignment = transfer.extent, self.disk.request_bytes, self.capabilities.alignment
        transfer.prepare(memory, request_bytes=request_bytes, alignment=alignment, verify=self._verify)
        try:
            with self.disk.lock:
                if self._closed or self.disk.closed:
                    raise closed_error()
                self.disk.work_off()  # first: a transfer of this extent may be over, and not counted as over yet
                if extent.freed:
                    raise StateError(f"{transfer.kind.value}: {extent!r} is freed")
                transfer.check_order()
                self._live[transfer] = None if held else self._begins(transfer)
                extent.transfers += 1
                extent.arena.queued_bytes += transfer.length
                if transfer.kind is IoKind.WRITE:
                    extent.writer, extent.valid_bytes = transfer, 0
            if not held:
                transfer.start()
        except BaseException as exc:  # such as an engine that is closed
            if transfer in self._live:
                transfer.cancel(exc)
            raise
        return transfer

    def _begins(self, transfer: Transfer) -> LinkShare:
        transfer.began_s = now()
        return self.meters[transfer.kind].began(transfer.began_s)

    def _post(self, item: Extent | Transfer) -> None:
        if not self._inert:  # the fork may have caught the allocators in the middle of a change
            self.disk.post(self._work_off, item)

    def _work_off(self, item: Extent | Transfer) -> None:
        """Count a transfer that is over, or release a freed extent. The lock is held; an end may be posted twice."""
        extent = item.extent if isinstance(item, Transfer) else item
        if isinstance(item, Transfer) and item in self._live:
            share = self._live.pop(item)
            if share is not None:
                self.meters[item.kind].ended(item.moved_bytes, now(), share)
                self._moved_bytes[item.kind] += item.moved_bytes
                if self.on_moved is not None and item.moved_bytes:
                    self.on_moved(item)
            extent.transfers -= 1
            extent.arena.queued_bytes -= item.length
        if extent.freed and not extent.transfers and extent in self._extents:  # the end of its transfer may come after
            self._extents.remove(extent)
            self.allocated_bytes -= extent.nbytes
            if self._poison and not self.disk.closed:
                self.disk.poison(extent)
            extent.arena.extents.free(extent.offset, extent.nbytes)  # others may take the room now


__all__ = ["Disk", "Extent", "Spool", "SpoolStatistics", "Transfer"]
