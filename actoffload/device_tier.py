"""Records of an accelerator's tensors: to page-locked host memory on a side stream, and from there to disk.

All ordering is in `transfer.py`. Only the training thread and backward's threads give streams work; an engine thread
that has read a record back marks it hosted, and whoever comes next begins its copy to the device.
"""

from __future__ import annotations

import contextlib
from collections import deque
from functools import partial

import torch

from .events import EventKind, now
from .extent_io import Extent, Transfer
from .hostpool import COPYING, HostPool
from .policy import KeepReason
from .record import Record, State
from .spool import Spool
from .stream_waits import WaitFor
from .tiers import PENDING_MARGIN, Core, Mover
from .transfer import ReleaseWindow, Transfers

SPILL_ABOVE = 0.75
"""Tiered: the oldest records go to disk while more than this share of the host budget is taken."""


class DeviceMover(Mover):
    """Device ↔ page-locked host memory ↔ NVMe.

    Args:
        spill: ``"never"`` (host only), ``"always"`` (NVMe), ``"overflow"`` (tiered).
        window_bytes: device memory that may wait for its copy at once; None to choose by the copies' sizes.
    """

    def __init__(
        self,
        core: Core,
        spool: Spool | None,
        pool: HostPool,
        transfers: Transfers,
        spill: str,
        window_bytes: int | None,
    ) -> None:
        super().__init__(core, spool)
        self.transfers = transfers
        self.window = ReleaseWindow(transfers, window_bytes, self._source_released)
        self._pool = pool
        self._spill_mode = spill if spool is not None else "never"
        self._hosted: dict[Record, None] = {}
        self._arrived: deque[Record] = deque()
        self._in_child = False
        self.watched = (self._in_place, self._arrived)

    def begin(self, record: Record) -> KeepReason | None:
        slot = self._pool.acquire(record.nbytes)
        while slot is None and self.core.config.device_budget is not None and self._wait_for_slots():
            slot = self._pool.acquire(record.nbytes)
        if slot is None:
            self.window.advance()
            return KeepReason.PRESSURE
        source, destination = record.flat(), self._pool.tensor(slot, 0, record.nbytes)
        slot.events.append(COPYING)  # an interrupt may come before the copy's own event is there
        out = self.transfers.begin_out(source, destination)
        slot.events[-1] = out.event
        record.slot = slot
        record.outgoing = out
        record.to(State.STAGING)
        self._in_place.append(record)
        self.window.hold(record, out)
        self.window.advance()
        return None

    def bring(self, record: Record, *, urgent: bool) -> bool:
        if record.state is State.STAGING:
            self.window.take(record)
            self.forwarded(record)
            record.to(State.RESIDENT)
        elif record.state is State.SPILLED and not self.revive(record):
            return self._fetch(record, urgent)
        elif record.state is State.FETCHING and urgent and record.transfer is not None:
            record.transfer.promote()
        elif record.state in (State.HOSTED, State.SPILLING):
            self._reload(record)
        return True

    def ready(self, record: Record) -> torch.UntypedStorage | None:
        if record.state in (State.HOSTED, State.SPILLING):
            self._reload(record)
        if record.incoming is not None:
            self.transfers.before_use(record.incoming)
        if record.state is State.RELOADING:
            record.to(State.RESIDENT)
        return record.data

    def revive(self, record: Record) -> bool:
        if not self.transfers.on_the_one_compute_stream(record.device.index or 0):
            record.weak_data = None  # another stream than the one that awaited the copy may ask for it
        return super().revive(record)

    def pump(self) -> None:
        while self._arrived and not self.core.inert:
            record = self._arrived[0]
            early = record.state is State.HOSTED and record.wanted
            if early and not self.core.has_room_ahead(record.nbytes):
                return
            self._arrived.popleft()
            if early:
                with contextlib.suppress(torch.OutOfMemoryError):  # it is only early; backward asks again
                    self._reload(record)

    def flush(self) -> None:
        self.window.advance(0)

    def expect_pending(self, nbytes: int | None) -> None:
        self.window.expect(int((nbytes or 0) * PENDING_MARGIN))

    def after_fork_in_child(self) -> None:
        self._in_child = True
        self.transfers.after_fork_in_child()

    def count_waits(self) -> None:
        with self.core.lock:
            waited = self.transfers.waits.take()
            self.core.accounts.pack_wait_s += waited[WaitFor.ROOM]
            self.core.accounts.unpack_wait_s += waited[WaitFor.DATA]

    def capturing(self) -> bool:
        return not self._in_child and self.transfers.device.is_capturing()

    def drop_near(self, record: Record) -> None:
        if record.outgoing is not None:
            self.window.take(record)
            self.transfers.release_source(record.outgoing)
            record.outgoing = None
        if record.incoming is not None:
            self.transfers.drop_unused(record.incoming)
            record.incoming = None

    def release(self, record: Record) -> None:
        self._hosted.pop(record, None)
        super().release(record)

    def wait_for_room(self, nbytes: int, limit_bytes: int) -> None:
        excess = self.core.accounts.resident_bytes + nbytes - limit_bytes
        if excess > 0:  # in stream order: the compute stream waits, the host does not
            self.window.advance(max(0, self.window.held_bytes - excess))

    # -- device → host → disk -----------------------------------------------------------------------------------------

    def _source_released(self, owner: object) -> None:
        record = owner
        assert isinstance(record, Record), "the window holds records"
        record.outgoing = None
        if self.resized(record):
            self.stay(record)
            return
        record.to(State.HOSTED)  # first, as in `settle`: an interrupt must leave no staged record without bytes
        self.forget_near(record)
        self.core.event(EventKind.WRITE, record, "to host")
        if self._spill_mode == "always" or (self._spill_mode == "overflow" and record.tier == "nvme"):
            self._spill(record)
        elif self._spill_mode == "overflow":
            self._hosted[record] = None
            self._spill_overflow()

    def _spill_overflow(self) -> None:
        limit = SPILL_ABOVE * self._pool.capacity_bytes
        while self._hosted and self._pool.allocated_bytes - self.core.pending_bytes > limit:
            record = next(iter(self._hosted))
            del self._hosted[record]
            if record.state is State.HOSTED:
                self._spill(record)

    def _spill(self, record: Record) -> None:
        slot = record.slot
        assert slot is not None, "a hosted record has a slot"
        assert self.spool is not None, "spilling needs a spool"
        if not self.allocate_extent(record, slot.nbytes):
            return
        assert isinstance(record.extent, Extent), "allocate_extent() gave no extent"
        written = [event for event in slot.events if event is not COPYING]  # that one reads it
        since_s = now()

        def host_bytes_complete() -> None:
            for event in written:
                self.transfers.device.synchronize(event)

        self.core.pending_bytes += record.nbytes
        try:
            record.to(State.SPILLING)
            record.transfer = self.spool.write(
                record.extent,
                slot.address,
                slot.nbytes,
                before=host_bytes_complete,
                on_done=partial(self._written, record, since_s),
                keepalive=slot,
            )
        except BaseException:  # an interrupt: it is where it was
            self.core.pending_bytes -= record.nbytes
            self.free_extent(record)
            if record.state is State.SPILLING:
                record.to(State.HOSTED)
            raise

    def _written(self, record: Record, since_s: float, transfer: Transfer) -> None:
        with self.core.lock:
            if record.transfer is not transfer:
                return  # an interrupt came when it was just begun
            if self.write_ended(record, transfer):
                self.core.event(EventKind.WRITE, record, "to disk", since_s)
                if record.state is not State.HOSTED:  # hosted again: unpacked and settled while the write ended
                    record.slot = None  # a copy to the device that reads it has its event on it
                if record.state is State.SPILLING:
                    record.to(State.SPILLED)
            elif record.state is State.SPILLING:
                record.to(State.HOSTED)
            self.core.changed.notify_all()

    def _wait_for_slots(self) -> bool:
        """Wait until something on its way to disk has given host memory back; False when nothing is on its way."""
        core = self.core
        self.window.advance(0)
        if core.pending_bytes == 0 or core.inert:
            return False
        since_s = now()
        core.changed.wait()
        core.accounts.pack_wait_s += now() - since_s
        return True

    # -- disk → host → device -----------------------------------------------------------------------------------------

    def _fetch(self, record: Record, urgent: bool) -> bool:
        slot = self._pool.acquire(record.nbytes, force=urgent)
        if slot is None:
            return False
        assert isinstance(record.extent, Extent), "a spilled record has an extent"
        assert self.spool is not None, "a spilled record has a spool"
        record.slot = slot
        record.wanted = True
        try:
            record.to(State.FETCHING)
            record.transfer = self.spool.read(
                record.extent,
                slot.address,
                slot.nbytes,
                on_done=partial(self._fetched, record, now()),
                keepalive=slot,
            )
        except BaseException:  # an interrupt: it is where it was
            record.slot = None
            if record.state is State.FETCHING:
                record.to(State.SPILLED)
            raise
        return True

    def _fetched(self, record: Record, since_s: float, transfer: Transfer) -> None:
        with self.core.lock:
            if record.transfer is not transfer or record.state is not State.FETCHING:
                return  # dead, or an interrupt came when it was just begun: what is read now goes elsewhere
            record.transfer = None
            if transfer.error is not None:
                record.error = transfer.error
                record.slot = None
                record.to(State.SPILLED)
            else:
                record.to(State.HOSTED)
                self._arrived.append(record)
                self.core.event(EventKind.READ, record, "from disk", since_s)
            self.core.changed.notify_all()

    def _reload(self, record: Record) -> None:
        if record.state is State.HOSTED and self.revive(record):
            return
        if record.state is State.SPILLING:
            self.forwarded(record)
            if self.cancel_write(record):
                record.to(State.HOSTED)
        slot = record.slot
        assert slot is not None, "a hosted record has a slot"
        index = record.device.index or 0
        source = self._pool.tensor(slot, 0, record.nbytes)
        if record.incoming is not None:  # an interrupt came before its memory was the record's
            self.transfers.drop_unused(record.incoming)
            record.incoming = None
        after = next((event for event in slot.events if event is not COPYING), None)
        slot.events.append(COPYING)
        try:
            incoming = self.transfers.begin_in(source, index, after=after)
        except torch.OutOfMemoryError:  # of the memory that it would have been copied to
            slot.events.pop()
            raise
        slot.events[-1] = incoming.event
        record.incoming = incoming
        self.hold_near(record, incoming.tensor.untyped_storage(), record.begin)
        record.to(State.RELOADING)
        self.core.event(EventKind.READ, record, "to device")
        if record.on_disk:
            record.slot = None
