"""Records of an accelerator's tensors: to page-locked host memory on a side stream, and from there to disk.

All ordering is in `copy_streams`. Only the training thread and the threads of backward enqueue work on streams. An
engine thread that has read a record back marks it hosted, and the next hook begins its copy to the device.
"""

from __future__ import annotations

import contextlib
from collections import deque
from functools import partial
from typing import Any

import torch

from ..errors import StateError
from ..events import EventKind, now
from ..memory.host_pool import HostPool
from ..memory.slots import Slot
from ..policy import KeepReason
from ..storage.spool import Spool
from ..storage.transfers import Transfer
from .copy_streams import BATCH_BYTES, BATCH_COPIES, Batch, CopyStreams, ReleaseWindow
from .record import HostCopy, Record, State
from .shared import Shared
from .tier import PENDING_MARGIN, UNWATCHED, Tier
from .timers import HookCosts

CAPTURED = (
    "backward in a captured graph asks for a tensor that was moved before the capture: run the forward in the same "
    "capture, where nothing moves, or run it in no_offload()"
)
CHUNK_BYTES = 64 << 20
"""A larger record that goes to disk, or comes from there, is copied in parts of this size while the disk works."""
SPILL_ABOVE = 0.75
"""Tiered: the oldest records go to disk while more than this share of the host budget is taken."""
BACKLOG_SHARE = 1 / 4
"""Without a plan, this share of the most that a step has saved may wait for its copy ..."""
USABLE_SHARE = 1 / 4
"""... and no more than this share of the device memory that is free as a forward begins."""


def _host(record: Record) -> HostCopy:
    assert record.host is not None, "a copy of it to the host has begun"
    return record.host


class DeviceTier(Tier):
    """Device ↔ page-locked host memory ↔ NVMe. Without a spool there is host memory alone."""

    gathers = True
    copies: CopyStreams

    def __init__(self, shared: Shared, spool: Spool | None, pool: HostPool, copies: CopyStreams) -> None:
        super().__init__(shared, spool, copies)
        window_bytes = None if shared.config.pending_bytes is None else shared.config.size("pending_bytes", 0)
        self.window = ReleaseWindow(copies, window_bytes, self._source_released, self._has_its_source)
        self._pool = pool
        self._hosted: dict[Record, None] = {}
        self._reading: set[Record] = set()
        self._arrived: deque[Record] = deque()
        """Records that were read from disk and wait for a thread that may begin their copy to the device."""
        self._reloading: dict[Record, None] = {}
        self._incoming: Batch | None = None
        """Copies to the device that are about to begin."""
        self._unused: list[tuple[object, Batch]] = []
        """Memory that was filled for records which died before they were used, and the copies that fill it."""
        self._hook_costs = HookCosts(shared.accounts, copies.device, copies.stopwatch)

    # -- device → host ------------------------------------------------------------------------------------------------

    def offload(self, record: Record) -> KeepReason | None:
        nbytes, limited = record.nbytes, self.shared.budget.limit_bytes is not None
        slot = self._pool.acquire(nbytes)
        while slot is None and (self._pool.growing or limited):
            since_s, growing = now(), self._pool.growing
            if not self._wait_for_host_memory():
                break
            if not growing:  # the pool grows once, in a step that is unlike the others
                self.shared.accounts.pack_wait_s += now() - since_s
            slot = self._pool.acquire(nbytes)
        if slot is None:
            self.shared.accounts.refused_bytes += nbytes
            self.window.begin()
            self.window.release_complete()  # so that their host memory goes on to disk
            return KeepReason.PRESSURE
        outs = self._copy_out(record, slot)
        out, _ = outs[-1]
        record.host = HostCopy(slot, out, saved_on=out.stream)
        record.to(State.STAGING)
        self._copied_in_place.append(record)
        if len(outs) > 1 and self._goes_to_disk(record):
            self._spill(record, outs)
        if limited:
            self.window.begin()  # copies that wait for their batch would take room meanwhile
        if out.event is not None:
            self.window.advance(max(self.window.limit_bytes, self._backlog_bytes))
        return None

    @property
    def _backlog_bytes(self) -> int:
        """How many bytes may wait for their copies, if that is more than the window's own limit.

        A plan has an expectation. Before there is a plan, and with ``"greedy"``, it is a share of the bytes that a step
        saves, so that compute waits less, but no more than a share of the free device memory: the first step must not
        run out of memory.
        """
        if self.window.is_fixed:
            return 0
        if self.window.expected_bytes:
            return int(PENDING_MARGIN * self.window.expected_bytes)
        if self.shared.config.policy not in ("auto", "greedy") or self.shared.budget.limit_bytes is not None:
            return 0
        return min(int(BACKLOG_SHARE * self.shared.accounts.baseline_peak_bytes), self.shared.budget.spare_bytes or 0)

    def begin_forward(self) -> None:
        super().begin_forward()
        self._hook_costs.forward_begins()
        if self.copies.inert or self.copies.capturing():
            return
        usable = None if self.window.expected_bytes else self.copies.usable_bytes()
        self.shared.budget.spare_bytes = None if usable is None else int(USABLE_SHARE * usable)

    def _has_its_source(self, owner: object) -> bool:
        """Whether a copy out may begin: its source was not freed or resized while the batch was filled."""
        if not isinstance(owner, Record) or not self.resized(owner):
            return True
        self._leave_batch(owner)
        self.stay(owner)
        return False

    def _copy_out(self, record: Record, slot: Slot) -> list[tuple[Batch, int]]:
        """Have a record copied to the host; return its parts: the batch of each, and how many bytes it completes."""
        nbytes, index, source = record.nbytes, record.saved.device.index or 0, record.flat()
        outs: list[tuple[Batch, int]] = []
        after = None if record.saved.planned is None else record.saved.planned.release_after
        due = 0 if after is None else self.shared.events + after
        part_bytes = CHUNK_BYTES if nbytes > CHUNK_BYTES and self._goes_to_disk(record) else nbytes
        for begin in range(0, nbytes, part_bytes):
            end = min(begin + part_bytes, nbytes)
            owner = record if end == nbytes else (record, begin)  # the last part stands for all
            part = source if nbytes == part_bytes else source[begin:end]
            host = self._pool.tensor(slot, begin, end - begin)
            outs.append((self.window.hold(owner, host, part, index, slot.events, nbytes, due), end))
            if nbytes > part_bytes:
                self.window.begin()  # a thread waits for each
        return outs

    def _source_released(self, record: object) -> None:
        """Go on with a record, not with a part of one, after the window has released its device memory."""
        if not isinstance(record, Record) or record.host is None:
            return
        record.host.outgoing = None
        if record.state is State.RELEASED:
            self.remove_resident(record)
        if record.state is not State.STAGING:  # backward has taken the original
            return
        if self.resized(record):
            self.stay(record)
            return
        record.to(State.HOSTED)
        self.let_go(record)
        self.shared.reporter.event(EventKind.WRITE, record, "to host")
        if record.disk is not None:
            record.to(State.SPILLED if record.disk.complete else State.SPILLING)
        elif self._goes_to_disk(record):
            self._spill(record)
        elif self.spool is not None:
            self._hosted[record] = None
            self._spill_overflow()

    def _goes_to_disk(self, record: Record) -> bool:
        """Whether it goes at once, and not only as host memory gets full."""
        planned = record.saved.planned
        to_disk = self.shared.config.target == "nvme" or (planned is not None and planned.tier == "nvme")
        return self.spool is not None and to_disk

    def _wait_for_host_memory(self) -> bool:
        """Wait until there may be more of it; return False when none is on its way."""
        shared = self.shared
        if not self._pool.growing:
            shared.begin_all()
        if shared.stopped or not (self._pool.growing or shared.pending_bytes or self._reading):
            return False
        shared.changed.wait()
        return True

    def wait_for_room(self, nbytes: int) -> None:
        budget = self.shared.budget
        self.window.advance_for(lambda: budget.excess_bytes(nbytes))
        # Backward may need a tensor whose read from disk ended after those of tensors that it needs later.
        self._evict_ahead(budget.excess_bytes(nbytes))

    def flush(self) -> None:
        if not self.copies.capturing():
            self._drop_unused()
            self.window.advance(0)

    @property
    def leaving_bytes(self) -> int:
        return self.window.held_bytes

    def expect_pending(self, nbytes: int | None) -> None:
        self.window.expected_bytes = nbytes or 0

    # -- host → disk --------------------------------------------------------------------------------------------------

    def _spill_overflow(self) -> None:
        limit = SPILL_ABOVE * self._pool.capacity_bytes
        while self._hosted and self._pool.slots.allocated_bytes - self.shared.pending_bytes > limit:
            record = next(iter(self._hosted))
            del self._hosted[record]
            if record.state is State.HOSTED:
                self._spill(record)

    def _spill(self, record: Record, outs: list[tuple[Any, int]] | None = None) -> None:
        """Have a record written to disk as its bytes come to host memory.

        Args:
            record: its bytes are written.
            outs: its parts, as `_copy_out` returns them, while they are copied; None where the record is hosted.
        """
        slot = _host(record).memory()
        assert self.spool is not None, "spilling needs a spool"
        extent = self.allocate(record, slot.nbytes)
        if extent is None:
            return
        on_done = partial(self._written, now())
        transfer = self.spool.write(
            extent, slot.address, slot.nbytes, on_done=on_done, keepalive=slot, held=True, records=(record,)
        )
        if record.state is State.HOSTED:
            record.to(State.SPILLING)
        self.shared.pending_bytes += record.nbytes
        parts = outs or [(batch, slot.nbytes) for batch in slot.events]
        self.begun(transfer, partial(self._write_as_copied, self.spool, transfer, parts))

    def _write_as_copied(self, spool: Spool, transfer: Transfer, parts: list[tuple[Any, int]]) -> None:
        """Write each part but the last once it is copied; return when the last one is."""
        for batch, nbytes in parts:
            assert batch.event is not None, "the copies have begun"
            self.copies.synchronize(batch)
            if nbytes < parts[-1][1]:
                spool.go_on(transfer, nbytes)

    def _wait_for(self, batches: list[object]) -> None:
        for batch in batches:
            self.copies.synchronize(batch)

    def _written(self, since_s: float, transfer: Transfer) -> None:
        with self.shared.lock:
            for record in self.ended(transfer):
                if self.is_written(record, transfer):
                    self.shared.reporter.event(EventKind.WRITE, record, "to disk", since_s)
                    _host(record).slot = None
                    if record.state is State.SPILLING:  # else it is still STAGING: its device memory is not released
                        record.to(State.SPILLED)
                elif record.state is State.SPILLING:
                    record.to(State.HOSTED)

    # -- disk → host → device -----------------------------------------------------------------------------------------

    def fetch(self, record: Record, *, urgent: bool) -> bool:
        if record.state is State.RELOADING:
            pass  # its copy is under way, or waits in the batch that begins before backward uses it
        elif record.state is State.STAGING:
            self._take_original(record)
        elif record.state not in (State.HOSTED, State.SPILLING):
            return super().fetch(record, urgent=urgent)
        elif self.copies.capturing():
            return False
        elif urgent:
            self._reload_now(record)
        else:
            self._reload(record)
        return True

    def _take_original(self, record: Record) -> None:
        """Discard the copy on the host: from now on we no longer watch whether the owner resizes the original."""
        self._leave_batch(record)
        self.give_up_write(record)
        self.forwarded(record)
        _host(record).slot = None
        record.to(State.RESIDENT)

    def _leave_batch(self, record: Record) -> None:
        """Take a copy out of its batch, unless it has begun: then the window holds the memory until it is complete."""
        host = _host(record)
        events = host.slot.events if host.slot is not None else None
        if host.outgoing is not None and self.window.withdraw(record, host.outgoing, events):
            host.outgoing = None

    def _read(self, record: Record, urgent: bool) -> bool:
        slot = self._pool.acquire(record.nbytes)
        while slot is None and urgent and record.state is State.SPILLED:
            more = self._let_go_of_what_is_ahead() or self._wait_for_host_memory()
            slot = self._pool.acquire(record.nbytes, force=not more)
        if slot is None or record.state is not State.SPILLED:  # another thread has begun to read it meanwhile
            return slot is not None
        assert self.spool is not None, "a spilled record has a spool"
        assert record.disk is not None, "and is there"
        events = [batch for batch in slot.events if not self.copies.done(batch)]
        transfer = self.spool.read(
            record.disk.extent,
            slot.address,
            slot.nbytes,
            on_done=partial(self._arrived_on_host, now()),
            keepalive=slot,
            on_part=self._part_arrived if record.nbytes > CHUNK_BYTES else None,
            held=bool(events),
            records=(record,),
        )
        self.begun(transfer, partial(self._wait_for, events) if events else None)
        host = _host(record)
        host.slot, host.filled_bytes = slot, 0
        record.to(State.FETCHING)
        self._reading.add(record)
        return True

    def _let_go_of_what_is_ahead(self) -> bool:
        """Give back the host memory of the record that was read last, and is still on disk; False: there is none."""
        while self._arrived:
            record = self._arrived.pop()
            if record.state is State.HOSTED and record.on_disk:
                _host(record).slot = None
                record.to(State.SPILLED)
                return True
        return False

    def _part_arrived(self) -> None:
        with self.shared.lock:
            self.shared.changed.notify_all()

    def _arrived_on_host(self, since_s: float, transfer: Transfer) -> None:
        with self.shared.lock:
            self._reading.difference_update(transfer.records)
            for record in self.ended(transfer):
                host = _host(record)
                if not host.filled_bytes:  # no copy of it has begun, and the read has waited for the earlier ones
                    host.memory().events.clear()
                if transfer.error is not None:
                    host.slot = None
                    record.to(State.SPILLED)
                else:
                    record.to(State.HOSTED)
                    self._arrived.append(record)
                    self.shared.reporter.event(EventKind.READ, record, "from disk", since_s)

    def poll(self) -> None:
        """Begin the copies to the device of records that were read from disk."""
        if not (self._arrived or self._unused) or self.copies.capturing():
            return
        self._drop_unused()
        budget = self.shared.budget
        while self._arrived and not self.shared.stopped:
            record = self._arrived[0]
            early = record.state is State.HOSTED
            if early and (budget.no_memory_ahead or not budget.has_room_early(record.nbytes, record)):
                break
            self._arrived.popleft()
            try:
                if early:
                    self._reload(record)
            except torch.OutOfMemoryError:  # backward fetches it again
                budget.no_memory_ahead = True
        self._begin_reloads()

    def _reload_now(self, record: Record) -> None:
        """As `_reload`; if the device has no memory, records that were fetched ahead, or are leaving, make room."""
        try:
            self._reload(record)
        except torch.OutOfMemoryError:
            self.release_ahead()
            self._reload(record)

    def release_ahead(self) -> bool:
        some = bool(self._reloading or self._unused or self.window.held_bytes)
        self.shared.budget.no_memory_ahead = True
        self._evict_ahead(self.shared.accounts.resident_bytes)  # all of them
        self._drop_unused()
        self.window.advance(0)
        return some

    def _evict_ahead(self, nbytes: int) -> None:
        """Evict so many bytes that were fetched ahead; first of forwards before their backward, in order of saving."""
        if nbytes <= 0 or not self._reloading:
            return
        self._begin_reloads()  # first, as it may release host memory of a record, at which `evict` looks
        for ahead in sorted(self._reloading, key=lambda record: (record.tape.in_backward, record.index)):
            if nbytes > 0:
                nbytes -= ahead.nbytes
                del self._reloading[ahead]
                ahead.to(State.RESIDENT)
                self.evict(ahead)
        self._drop_unused()

    def _reload_arrived(self, record: Record) -> None:
        """Begin the copies of the parts of a record that have come from disk; backward waits for it."""
        transfer = None if record.disk is None else record.disk.transfer
        end = 0 if transfer is None else transfer.arrived_bytes // CHUNK_BYTES * CHUNK_BYTES
        if end > _host(record).filled_bytes:
            with contextlib.suppress(torch.OutOfMemoryError):  # then the whole record makes room once it has arrived
                self._fill(record, end)

    def _fill(self, record: Record, end: int) -> None:
        """Copy a record to device memory of its own up to byte ``end``."""
        host = _host(record)
        slot, begin = host.memory(), host.filled_bytes
        self._begin_reloads()
        incoming = self.copies.gather("in", record.saved.device.index or 0, None)
        if host.filling is None or host.incoming is None:
            host.filling = self.copies.device.empty(record.nbytes, incoming.index)
            self.count_resident(record)
        else:
            incoming.stream = host.incoming.stream  # which owns the memory
        part = host.filling[begin:end]
        incoming.add(record, part, self._pool.tensor(slot, begin, end - begin), slot.events)
        self.copies.begin_in(incoming)
        host.incoming, host.filled_bytes = incoming, end

    def _reload(self, record: Record) -> None:
        """Enqueue the copy of a hosted record to the device, in a batch with the records that the same call reloads."""
        if record.weak_data is not None and record.state is State.HOSTED and self.recover(record):
            return
        if record.state is State.SPILLING:
            self.forwarded(record)
            self.give_up_write(record)
            record.to(State.HOSTED)
        host = _host(record)
        if host.filling is not None:
            if host.filled_bytes < record.nbytes:
                self._fill(record, record.nbytes)
            self._reloads(record, host.filling)
            host.filling = None
            if record.on_disk:
                host.slot = None
            return
        slot = host.memory()
        incoming = self.copies.gather("in", record.saved.device.index or 0, self._incoming)
        if incoming is not self._incoming:
            self._begin_reloads()
            self._incoming = incoming
        filled = self.copies.device.empty(record.nbytes, incoming.index)
        incoming.add(record, filled, self._pool.tensor(slot, 0, record.nbytes), slot.events)
        host.incoming = incoming
        self._reloads(record, filled)
        if incoming.nbytes >= BATCH_BYTES or len(incoming.copies) >= BATCH_COPIES:
            self._begin_reloads()

    def _reloads(self, record: Record, filled: torch.Tensor) -> None:
        self.add_resident(record, filled.untyped_storage())
        record.to(State.RELOADING)
        self._reloading[record] = None
        self.shared.reporter.event(EventKind.READ, record, "to device")

    def release_due(self) -> None:
        if 0 < self.window.due <= self.shared.events and not self.copies.capturing():
            self.window.release_due(self.shared.events)

    def release_dead(self) -> None:
        if self.copies.capturing():
            return
        self.copies.waits.look()  # now, as backward ends: the device has work left, and may have none at the next step
        if self.window.held_bytes or self._unused:
            self._drop_unused()
            self.window.release_if(self._is_dead)

    def release_before_region(self) -> None:
        # Backward may have used the logits while they were being copied. A plan releases them at a position. Without a
        # plan they would stay until backward ends. With "greedy" no step has a plan, and each would wait here.
        if self.shared.config.policy == "auto" and not self.window.expected_bytes:
            self.release_dead()

    def _is_dead(self, owner: object) -> bool:
        record = owner[0] if isinstance(owner, tuple) else owner
        return isinstance(record, Record) and record.state is State.RELEASED

    def begin_copies(self) -> None:
        if (self._incoming is not None or self.window.gathering is not None) and not self.copies.capturing():
            self.window.begin()
            self._begin_reloads()

    def _begin_reloads(self) -> None:
        if self._incoming is not None:
            records: list[Any] = list(self._incoming.copies)
            self.copies.begin_in(self._incoming)
            self._incoming = None
            for record in records:
                if record.on_disk:
                    _host(record).slot = None

    def ready(self, record: Record) -> torch.UntypedStorage | None:
        if self.copies.capturing():
            if record.state is State.RESIDENT and (record.host is None or record.host.incoming is None):
                return record.data
            raise StateError(CAPTURED)
        if record.state in (State.HOSTED, State.SPILLING):
            self._reload_now(record)
        elif record.state is State.FETCHING:
            self._reload_arrived(record)
            return None
        incoming = None if record.host is None else record.host.incoming
        if incoming is not None:
            if incoming.event is None:
                self._begin_reloads()
            self.copies.before_use(incoming, record.flat)
        if record.state is State.RELOADING:
            del self._reloading[record]
            record.to(State.RESIDENT)
        return record.data

    # -- the end ------------------------------------------------------------------------------------------------------

    def order_reuse(self, record: Record) -> None:
        """See `Tier`. This may run on any thread, so it makes no call to the device: `poll` does that later.

        A weakly held record keeps the copies that fill it, as a stream that has not waited for them may need it yet.
        """
        if (host := record.host) is not None:
            self._leave_batch(record)
            if host.incoming is not None and host.incoming.stream not in host.incoming.awaited_by:
                self._unused.append((record.data if host.filling is None else host.filling, host.incoming))
            host.filling = None

    def remove_resident(self, record: Record) -> None:
        if record.host is None or record.host.outgoing is None:
            super().remove_resident(record)
        else:  # the window holds the memory until the copy is complete
            record.data = None

    def _drop_unused(self) -> None:
        """Release memory that was filled and not used, in stream order."""
        self._begin_reloads()
        for _, incoming in self._unused:
            self.copies.drop_unused(incoming)
        self._unused.clear()

    def release(self, record: Record) -> None:
        self._hosted.pop(record, None)
        self._reading.discard(record)
        self._reloading.pop(record, None)
        super().release(record)

    def abandon(self) -> None:
        super().abandon()
        gathering = self._incoming, self.window.gathering
        self.copies.order_all_reuse([batch for batch in gathering if batch is not None])
        self._incoming = None
        self._unused.clear()
        self.window.forget()
        self._hosted.clear()
        self._reading.clear()
        self._reloading.clear()
        self._arrived.clear()

    def watched(self) -> contextlib.AbstractContextManager[None]:
        if not self.shared.watches_host:
            return UNWATCHED
        index = self.copies.current_index() if not self.copies.inert else None
        if index is not None and not self.copies.capturing(index):
            return self._hook_costs.watched(index)
        return UNWATCHED
