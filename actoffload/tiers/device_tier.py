"""Records of an accelerator's tensors: to page-locked host memory on a side stream, and from there to disk.

All ordering is in `copy_streams`. Only the training thread and backward's threads give streams work; an engine thread
that has read a record back marks it hosted, and whoever comes next begins its copy to the device.
"""

from __future__ import annotations

from collections import deque
from functools import partial

import torch

from ..events import EventKind, now
from ..memory.host_pool import HostPool
from ..policy import KeepReason
from ..storage.spool import Spool
from ..storage.transfers import Transfer
from .accelerator import Event
from .copy_streams import CopyStreams, Incoming, Outgoing, ReleaseWindow
from .record import Record, State
from .shared import Shared
from .tier import PENDING_MARGIN, Tier
from .timers import WaitFor

SPILL_ABOVE = 0.75
"""Tiered: the oldest records go to disk while more than this share of the host budget is taken."""


class DeviceTier(Tier):
    """Device ↔ page-locked host memory ↔ NVMe.

    Args:
        shared: see `Tier`.
        spool: the disk; None for host memory alone.
        pool: the host memory.
        copies: the device's side streams.
        spill: ``"never"`` (host only), ``"always"`` (NVMe), ``"overflow"`` (tiered).
        window_bytes: device memory that may wait for its copy at once; None to choose by the copies' sizes.
    """

    def __init__(
        self,
        shared: Shared,
        spool: Spool | None,
        pool: HostPool,
        copies: CopyStreams,
        spill: str,
        window_bytes: int | None,
    ) -> None:
        super().__init__(shared, spool)
        self.copies = copies
        self.window = ReleaseWindow(copies, window_bytes, self._source_released)
        self._pool = pool
        self._spill_mode = spill if spool is not None else "never"
        self._hosted: dict[Record, None] = {}
        self._reading: set[Record] = set()
        self._arrived: deque[Record] = deque()
        """Records that were read from disk and wait for a thread that may begin their copy to the device."""
        self._reloading: dict[Record, None] = {}
        self._unordered: list[tuple[Outgoing | None, Incoming | None]] = []
        """Copies of records that died while a graph was captured; their device memory is held until it was."""
        self._in_child = False

    # -- device → host ------------------------------------------------------------------------------------------------

    def offload(self, record: Record) -> KeepReason | None:
        limited = self.shared.budget.limit_bytes is not None
        slot = self._pool.acquire(record.nbytes)
        while slot is None and (self._pool.growing or limited):
            since_s, growing = now(), self._pool.growing
            if not self._wait_for_host_memory():
                break
            if not growing:  # which happens once, and in no step that is like the others
                self.shared.accounts.pack_wait_s += now() - since_s
            slot = self._pool.acquire(record.nbytes)
        if slot is None:
            self.window.advance()
            return KeepReason.PRESSURE
        out = self.copies.begin_out(record.flat(), self._pool.tensor(slot, 0, record.nbytes), slot.events)
        slot.events[:] = [out.event]
        record.slot = slot
        record.outgoing = out
        record.to(State.STAGING)
        self._copied_in_place.append(record)
        self.window.hold(record, out)
        self.window.advance()
        return None

    def _source_released(self, owner: object) -> None:
        """Go on with a record whose device memory the window has let go of."""
        record = owner
        assert isinstance(record, Record), "the window holds records"
        record.outgoing = None
        if self.resized(record):
            self.stay(record)
            return
        record.to(State.HOSTED)
        self.remove_resident(record)
        self.shared.reporter.event(EventKind.WRITE, record, "to host")
        if self._spill_mode == "always" or (self._spill_mode == "overflow" and record.planned_tier == "nvme"):
            self._spill(record)
        elif self._spill_mode == "overflow":
            self._hosted[record] = None
            self._spill_overflow()

    def _wait_for_host_memory(self) -> bool:
        """Wait until there may be more of it; return False when none is on its way."""
        shared = self.shared
        if not self._pool.growing:
            self.window.advance(0)
        if shared.stopped or not (self._pool.growing or shared.pending_bytes or self._reading):
            return False
        shared.changed.wait()
        return True

    def wait_for_room(self, nbytes: int, limit_bytes: int) -> None:
        excess = self.shared.accounts.resident_bytes + nbytes - limit_bytes
        if excess > 0:  # in stream order: the compute stream waits, the host does not
            self.window.advance(max(0, self.window.held_bytes - excess))

    def flush(self) -> None:
        self._order_what_died_in_capture()
        self.window.advance(0)

    def expect_pending(self, nbytes: int | None) -> None:
        self.window.expect(int((nbytes or 0) * PENDING_MARGIN))

    # -- host → disk --------------------------------------------------------------------------------------------------

    def _spill_overflow(self) -> None:
        limit = SPILL_ABOVE * self._pool.capacity_bytes
        while self._hosted and self._pool.allocated_bytes - self.shared.pending_bytes > limit:
            record = next(iter(self._hosted))
            del self._hosted[record]
            if record.state is State.HOSTED:
                self._spill(record)

    def _spill(self, record: Record) -> None:
        """Begin to write a hosted record, once its bytes are complete in host memory."""
        slot = record.slot
        assert slot is not None, "a hosted record has a slot"
        assert self.spool is not None, "spilling needs a spool"
        extent = record.extent = self.allocate(record, slot.nbytes)
        if extent is None:
            return
        record.transfer = self.spool.write(
            extent,
            slot.address,
            slot.nbytes,
            before=partial(self._wait_for, list(slot.events)),
            on_done=partial(self._written, record, now()),
            keepalive=slot,
        )
        record.to(State.SPILLING)
        self.shared.pending_bytes += record.nbytes

    def _wait_for(self, events: list[Event]) -> None:
        for event in events:
            self.copies.device.synchronize(event)

    def _written(self, record: Record, since_s: float, transfer: Transfer) -> None:
        with self.shared.lock:
            if self.shared.interrupted or record.transfer is not transfer:
                return
            if self.write_ended(record, transfer):
                self.shared.reporter.event(EventKind.WRITE, record, "to disk", since_s)
                if record.state is not State.HOSTED:  # hosted again: unpacked and evicted while the write ended
                    record.slot = None  # a copy to the device that reads it has its event on it
                if record.state is State.SPILLING:
                    record.to(State.SPILLED)
            elif record.state is State.SPILLING:
                record.to(State.HOSTED)
            self.shared.changed.notify_all()

    def cancel(self, record: Record) -> bool:
        transfer = record.transfer
        if not isinstance(transfer, Transfer) or not transfer.cancel():
            return False
        record.transfer = None
        if record.state is State.SPILLING:
            self.write_cancelled(record)
        return True

    def free_extent(self, record: Record) -> None:
        extent, record.extent = record.extent, None
        record.on_disk = False
        if extent is not None and self.spool is not None:
            self.spool.free(extent)

    # -- disk → host → device -----------------------------------------------------------------------------------------

    def fetch(self, record: Record, *, urgent: bool) -> bool:
        if record.state is State.STAGING:
            self.window.take(record)
            self.forwarded(record)
            # The host's copy is given up: nobody watches any more whether the owner resizes what it is made from.
            record.slot = None
            record.to(State.RESIDENT)
        elif record.state is State.SPILLED and not self.recover(record):
            return self._read(record, urgent)
        elif record.state is State.FETCHING and urgent and record.transfer is not None:
            record.transfer.promote()
        elif record.state in (State.HOSTED, State.SPILLING):
            (self._reload_now if urgent else self._reload)(record)
        return True

    def _read(self, record: Record, urgent: bool) -> bool:
        slot = self._pool.acquire(record.nbytes)
        while slot is None and urgent and record.state is State.SPILLED:
            more = self._let_go_of_what_is_ahead() or self._wait_for_host_memory()
            slot = self._pool.acquire(record.nbytes, force=not more)
        if slot is None or record.state is not State.SPILLED:  # another thread has begun to read it meanwhile
            return slot is not None
        assert self.spool is not None, "a spilled record has a spool"
        record.transfer = self.spool.read(
            record.extent,
            slot.address,
            slot.nbytes,
            before=partial(self._wait_for, list(slot.events)) if slot.events else None,
            on_done=partial(self._arrived_on_host, record, now()),
            keepalive=slot,
        )
        record.slot = slot
        record.wanted = True
        record.to(State.FETCHING)
        self._reading.add(record)
        return True

    def _let_go_of_what_is_ahead(self) -> bool:
        """Give back the host memory of the record that was read last, and is still on disk; False: there is none."""
        while self._arrived:
            record = self._arrived.pop()
            if record.state is State.HOSTED and record.on_disk:
                record.slot = None
                record.to(State.SPILLED)
                return True
        return False

    def _arrived_on_host(self, record: Record, since_s: float, transfer: Transfer) -> None:
        with self.shared.lock:
            self._reading.discard(record)
            if self.shared.interrupted or record.transfer is not transfer:
                return
            record.transfer = None
            if record.state is State.RELEASED:  # its last handle died as the read ended
                return
            if transfer.error is not None:
                record.error = transfer.error
                record.slot = None
                record.to(State.SPILLED)
            else:
                record.to(State.HOSTED)
                self._arrived.append(record)
                self.shared.reporter.event(EventKind.READ, record, "from disk", since_s)
            self.shared.changed.notify_all()

    def poll(self) -> None:
        """Begin the copies to the device of what was read from disk and is wanted."""
        self._order_what_died_in_capture()
        while self._arrived and not self.shared.stopped:
            record = self._arrived[0]
            early = record.state is State.HOSTED and record.wanted
            if early and (self.shared.no_memory_ahead or not self.shared.budget.has_room_early(record.nbytes)):
                return
            self._arrived.popleft()
            try:
                if early:
                    self._reload(record)
            except torch.OutOfMemoryError:  # backward asks again
                self.shared.no_memory_ahead = True

    def _reload_now(self, record: Record) -> None:
        """As `_reload`; where the device has no memory what was fetched ahead, and what leaves, makes room."""
        try:
            self._reload(record)
        except torch.OutOfMemoryError:
            self.shared.no_memory_ahead = True
            self.window.advance(0)
            for ahead in tuple(self._reloading):
                del self._reloading[ahead]
                ahead.to(State.RESIDENT)
                self.evict(ahead)
            self._reload(record)

    def _reload(self, record: Record) -> None:
        """Begin the copy of a hosted record to the device."""
        if record.state is State.HOSTED and self.recover(record):
            return
        if record.state is State.SPILLING:
            self.forwarded(record)
            if self.cancel(record):
                self.free_extent(record)
                record.to(State.HOSTED)
        slot = record.slot
        assert slot is not None, "a hosted record has a slot"
        source = self._pool.tensor(slot, 0, record.nbytes)
        incoming = self.copies.begin_in(source, record.device.index or 0, slot.events)
        slot.events[:] = [incoming.event]
        record.incoming = incoming
        self.add_resident(record, incoming.tensor.untyped_storage(), record.begin)
        record.to(State.RELOADING)
        self._reloading[record] = None
        self.shared.reporter.event(EventKind.READ, record, "to device")
        if record.on_disk:
            record.slot = None

    def ready(self, record: Record) -> torch.UntypedStorage | None:
        if record.state in (State.HOSTED, State.SPILLING):
            self._reload_now(record)
        if record.incoming is not None:
            self.copies.before_use(record.incoming)
        if record.state is State.RELOADING:
            del self._reloading[record]
            record.to(State.RESIDENT)
        return record.data

    def recover(self, record: Record) -> bool:
        if not self.copies.on_the_one_compute_stream(record.device.index or 0):
            record.weak_data = None  # another stream than the one that awaited the copy may ask for it
        return super().recover(record)

    # -- the end ------------------------------------------------------------------------------------------------------

    def order_reuse(self, record: Record) -> None:
        outgoing, incoming = record.outgoing, record.incoming
        record.outgoing = record.incoming = None
        if outgoing is not None:
            self.window.take(record)
        if outgoing is not None or incoming is not None:
            self._unordered.append((outgoing, incoming))
            self._order_what_died_in_capture()

    def _order_what_died_in_capture(self) -> None:
        if not self._unordered or self.capturing():
            return
        for outgoing, incoming in self._unordered:
            if outgoing is not None:
                self.copies.release_source(outgoing)
            if incoming is not None:
                self.copies.drop_unused(incoming)
        self._unordered.clear()

    def release(self, record: Record) -> None:
        self._hosted.pop(record, None)
        self._reading.discard(record)
        self._reloading.pop(record, None)
        super().release(record)

    def abandon(self) -> None:
        super().abandon()
        self.copies.order_all_reuse()
        self._unordered.clear()
        self.window.forget()
        self._hosted.clear()
        self._reading.clear()
        self._reloading.clear()
        self._arrived.clear()

    def count_waits(self) -> None:
        if self.capturing():
            return
        with self.shared.lock:
            waited = self.copies.waits.take()
            self.shared.accounts.pack_wait_s += waited[WaitFor.ROOM]
            self.shared.accounts.unpack_wait_s += waited[WaitFor.DATA]

    def capturing(self) -> bool:
        return not self._in_child and self.copies.device.is_capturing()

    def after_fork_in_child(self) -> None:
        self._in_child = True
        self.copies.after_fork_in_child()
