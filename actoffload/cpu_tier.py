"""Records of CPU tensors: written to disk straight from the tensor's memory, read back into reusable aligned memory.

Direct I/O wants aligned memory and lengths, tensors have neither: the aligned body is written where it lies, and the
few bytes before and after it stay in the record. A restored storage has the old address modulo the alignment, so that
kernels see the same alignment and round the same way.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import NamedTuple

import torch

from .events import EventKind, now
from .extent_io import Extent, Transfer
from .hostpool import HostPool, Slot
from .policy import KeepReason
from .record import Record, State
from .spool import Spool
from .tiers import PENDING_MARGIN, Core, Mover

BOUNCE_BYTES = 64 << 10
"""A span smaller than this is copied into aligned memory and written from there: its body would be mostly edges."""
MIN_ALIGNMENT = 512
PENDING_BYTES = 256 << 20


class Layout(NamedTuple):
    """How a span of ``nbytes`` bytes lies around its direct-I/O body.

    Attributes:
        pad: bytes before the span in a slot that keeps the span's address modulo the alignment.
        head: the bytes of the span before the body.
        tail: the bytes of the span after the body.
        io_begin: where the transfer begins, relative to the span.
        io_bytes: the length of the transfer.
    """

    pad: int
    head: bytes
    tail: bytes
    io_begin: int
    io_bytes: int

    @staticmethod
    def around(address: int, nbytes: int, alignment: int) -> Layout:
        """The aligned body of the memory at ``address``, and its edges."""
        head = -address % alignment
        body = (nbytes - head) // alignment * alignment
        tail = nbytes - head - body
        return Layout(
            address % max(alignment, MIN_ALIGNMENT),
            ctypes.string_at(address, head) if head else b"",
            ctypes.string_at(address + nbytes - tail, tail) if tail else b"",
            head,
            body,
        )

    @staticmethod
    def padded(address: int, nbytes: int, alignment: int) -> Layout:
        """A slot of its own, written whole."""
        pad = address % max(alignment, MIN_ALIGNMENT)
        return Layout(pad, b"", b"", -pad, -(-(pad + nbytes) // alignment) * alignment)


class CpuMover(Mover):
    """CPU memory ↔ NVMe."""

    def __init__(self, core: Core, spool: Spool, pool: HostPool) -> None:
        super().__init__(core, spool)
        self._disk = spool
        self._pool = pool
        self._kernel_reads = spool.direct and not core.config.verify
        self.alignment = spool.alignment
        """Of addresses and lengths of what is written and read."""
        self.pending_limit_bytes = core.config.size("pending_bytes", PENDING_BYTES)
        """So much may be on its way out; without a limit of the user's more where a plan expects it."""

    def begin(self, record: Record) -> KeepReason | None:
        if self.crowded(record.nbytes):
            return KeepReason.PRESSURE
        address = record.address + record.begin
        alignment = self.alignment
        bounce = record.nbytes < BOUNCE_BYTES
        layout = (Layout.padded if bounce else Layout.around)(address, record.nbytes, alignment)
        slot = self._pool.acquire(layout.pad + record.nbytes + alignment) if bounce else None
        if bounce and slot is None:
            return KeepReason.PRESSURE
        if not self.allocate_extent(record, layout.io_bytes):
            return KeepReason.DEGRADED
        if slot is not None:
            ctypes.memmove(slot.address + layout.pad, address, record.nbytes)
            record.data = self._storage(slot, layout, record.nbytes)
            record.data_begin = record.begin
            address = slot.address + layout.pad
        else:
            self._in_place.append(record)
        record.io = layout
        record.to(State.SPILLING)
        self.core.pending_bytes += record.nbytes
        try:
            self.write_alone(record, address + layout.io_begin, direct=not bounce)
        except BaseException:  # an interrupt: it stays
            self.stay_after_all(record)
            raise
        return None

    def stay_after_all(self, record: Record) -> None:
        """A write of a record was to be begun and was not."""
        self.core.pending_bytes -= record.nbytes
        record.transfer = None
        self.free_extent(record)
        record.to(State.RESIDENT)

    def crowded(self, nbytes: int) -> bool:
        """Whether so much is on its way out that ``nbytes`` more have to stay."""
        if self.core.device_budget is not None:
            return False  # the offloader waits instead
        return self.core.pending_bytes + nbytes > self.pending_limit_bytes

    def expect_pending(self, nbytes: int | None) -> None:
        if self.core.config.pending_bytes is None:
            self.pending_limit_bytes = max(PENDING_BYTES, int((nbytes or 0) * PENDING_MARGIN))

    def write_alone(self, record: Record, address: int, *, direct: bool) -> None:
        """Write a record that has an extent.

        Args:
            record: what to write.
            address: of its body.
            direct: from where its owner holds it.
        """
        assert isinstance(record.extent, Extent), "allocate_extent() gave no extent"
        record.transfer = self._disk.write(
            record.extent,
            address,
            record.io.io_bytes,
            # The kernel says so where memory is gone; who reads it in this process would crash.
            before=partial(self.check_place, record) if direct and not self._kernel_reads else None,
            on_done=partial(self._written, record, now(), direct),
            keepalive=record.data,
        )

    def bring(self, record: Record, *, urgent: bool) -> bool:
        if record.state is State.SPILLING:
            if not record.wanted:
                self.forwarded(record)
            record.wanted = True
            if self.cancel_write(record):
                record.to(State.RESIDENT)
        elif record.state is State.SPILLED and not self.revive(record):
            return self.fetch(record, urgent)
        elif record.state is State.FETCHING and urgent and record.transfer is not None:
            record.transfer.promote()
        return True

    def ready(self, record: Record) -> torch.UntypedStorage | None:
        return None if record.state is State.FETCHING else record.data

    def drop_near(self, record: Record) -> None:
        """Nothing to order: transfers hold the memory they use."""

    def wait_for_room(self, nbytes: int, limit_bytes: int) -> None:
        core = self.core
        while core.pending_bytes > 0 and core.accounts.resident_bytes + nbytes > limit_bytes and not core.inert:
            core.changed.wait()

    def fetch(self, record: Record, urgent: bool) -> bool:
        """Begin to read a record; False when there is no memory for it now and it is not ``urgent``."""
        layout: Layout = record.io
        slot = self._pool.acquire(layout.pad + record.nbytes + self.alignment, force=urgent)
        if slot is None:
            return False
        assert isinstance(record.extent, Extent), "a spilled record has an extent"
        storage = self._storage(slot, layout, record.nbytes)
        start = slot.address + layout.pad
        try:
            record.to(State.FETCHING)
            self.count_near(record)
            record.transfer = self._disk.read(
                record.extent,
                start + layout.io_begin,
                layout.io_bytes,
                on_done=partial(self._fetched, record, storage, start, now()),
                keepalive=storage,
            )
        except BaseException:  # an interrupt: it is where it was
            self.forget_near(record)
            if record.state is State.FETCHING:
                record.to(State.SPILLED)
            raise
        return True

    def _storage(self, slot: Slot, layout: Layout, nbytes: int) -> torch.UntypedStorage:
        return self._pool.tensor(slot, layout.pad, nbytes, owning=True).untyped_storage()

    def _written(self, record: Record, since_s: float, direct: bool, transfer: Transfer) -> None:
        dropped = None
        with self.core.lock:
            if record.transfer is transfer:  # else an interrupt came when it was just begun, and it stays
                dropped = self.write_done(record, since_s, transfer, direct=direct)
            self.core.changed.notify_all()
        del dropped

    def write_done(self, record: Record, since_s: float, transfer: Transfer, *, direct: bool) -> object:
        """The write that a record was in has ended; what is to be freed once the lock was given back: it takes time."""
        dropped = None
        if direct and self.resized(record):
            self.stay(record)
        elif self.write_ended(record, transfer):
            self.core.event(EventKind.WRITE, record, since_s=since_s)
            if record.wanted and record.waiting:
                record.to(State.RESIDENT)
            else:
                dropped = record.data
                self.forget_near(record)
                record.to(State.SPILLED)
        elif record.state is State.SPILLING:
            record.to(State.RESIDENT)
        return dropped

    def _fetched(
        self, record: Record, storage: torch.UntypedStorage, start: int, since_s: float, transfer: Transfer
    ) -> None:
        with self.core.lock:
            if record.transfer is transfer and record.state is State.FETCHING:
                self.read_done(record, storage, start, since_s, transfer.error)
                self.core.changed.notify_all()

    def read_done(
        self, record: Record, storage: torch.UntypedStorage, start: int, since_s: float, error: BaseException | None
    ) -> None:
        """The read that a record was in has ended, and left its body in ``storage``, which lies at ``start``."""
        record.transfer = None
        if error is not None:
            record.error = error
            self.forget_near(record)
            record.to(State.SPILLED)
            return
        layout: Layout = record.io
        ctypes.memmove(start, layout.head, len(layout.head))
        ctypes.memmove(start + record.nbytes - len(layout.tail), layout.tail, len(layout.tail))
        self.hold_near(record, storage, record.begin)
        record.to(State.RESIDENT)
        self.core.event(EventKind.READ, record, since_s=since_s)
