"""Records of CPU tensors: written to disk straight from the tensor's memory, read back into reusable aligned memory.

Small records are coalesced: they wait until a batch is full, and go to disk by one write. A batch that is not full
waits in memory; it is less than `LARGE_BATCH_BYTES`. A record that backward wants meanwhile is taken out again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import partial

import torch

from ..errors import StorageError
from ..events import EventKind, now
from ..memory.cpu_allocator import HeldBlock
from ..memory.host_pool import HostPool
from ..memory.slots import Slot
from ..policy import KeepReason
from ..storage.engines.base import Range
from ..storage.spool import Spool
from ..storage.transfers import Transfer
from .coalescing import MIN_ALIGNMENT, Layout, SharedExtent, Sources
from .record import Record, State
from .shared import Shared
from .tier import Tier

BOUNCE_BYTES = 64 << 10
"""A span smaller than this is copied into aligned memory and written from there: its body would be mostly edges."""
SMALL_BYTES = 512 << 10
"""Records of this size or more go alone: they cost no more for each byte than larger ones."""
BATCH_BYTES = 1 << 20
"""A batch of this size is full; or of half of ``prefetch_bytes`` or ``pending_bytes``, if the user set one."""
LARGE_BATCH_BYTES = 4 << 20
SHARE_OF_SAVED = 32
"""Where much is saved at once, a batch is full with this part of it, up to `LARGE_BATCH_BYTES`."""
SHARE_OF_POOL = 4
"""Nor is it more than this part of the memory that batches come back to: several have to be there at once."""

Arriving = dict[Record, tuple[torch.UntypedStorage, Layout, int]]
"""Records that are read: the storage that gets the bytes, how they lie there, and their address."""


class CpuTier(Tier):
    """CPU memory ↔ NVMe.

    Nothing is coalesced under a ``device_budget``, where each record is waited for alone; with ``verify``, as the
    checksum would be for the whole batch; or with an engine that takes one range of memory at a time. Records are read
    back into memory of the pool.
    """

    spool: Spool

    def __init__(self, shared: Shared, spool: Spool, pool: HostPool) -> None:
        super().__init__(shared, spool)
        config = shared.config
        self._alignment = spool.capabilities.alignment
        self._pool = pool
        # With direct I/O the kernel fails a write from unmapped memory; a load in this process would crash instead.
        self._kernel_reads = spool.capabilities.direct and not config.verify
        self._filling: dict[Record, tuple[Layout, HeldBlock]] = {}  # the batch that is being filled
        coalesces = spool.capabilities.vectored and not config.is_limited and not config.verify
        # The last record of a batch may make it larger by nearly `SMALL_BYTES`.
        coalesces = coalesces and pool.capacity_bytes >= 2 * BATCH_BYTES
        most = (
            LARGE_BATCH_BYTES,
            config.size("prefetch_bytes", 2 * LARGE_BATCH_BYTES) // 2,
            config.size("pending_bytes", 2 * LARGE_BATCH_BYTES) // 2,
            pool.capacity_bytes // SHARE_OF_POOL,
        )
        self._most_batch_bytes = min(most) if coalesces else 0
        self._batch_bytes = min(BATCH_BYTES, self._most_batch_bytes)

    # -- out ----------------------------------------------------------------------------------------------------------

    def offload(self, record: Record) -> KeepReason | None:
        if self._is_crowded(record.nbytes):
            self.flush()  # else a batch that is not full would stay on its way for ever
            return KeepReason.PRESSURE
        # A checksum needs bytes that do not change, but `unsafe_chunk` allows changes between the bytes of a view.
        if record.nbytes < BOUNCE_BYTES or (self.shared.config.verify and record.saved.has_gaps):
            return self._offload_copy(record)
        saved = record.saved
        layout = Layout.around(saved.address + saved.begin, record.nbytes, self._alignment)
        hold = partial(HeldBlock, saved.address, dense=not saved.has_gaps)
        if record.nbytes < SMALL_BYTES and self._batch_bytes:
            self._leave(record)
            self._filling[record] = layout, hold()
            self._copied_in_place.append(record)
            if sum(one.nbytes for one in self._filling) >= self._batch_bytes:
                self.flush()
            return None
        extent = self._room({record: layout})
        if extent is None:
            return KeepReason.DEGRADED
        self._leave(record)
        self._copied_in_place.append(record)
        self._write_sources(extent, [hold()])  # only now: to hold a block makes its pages huge
        return None

    def _offload_copy(self, record: Record) -> KeepReason | None:
        """Copy a span into aligned memory, which is the record's storage from then on, and write that."""
        source = record.saved.address + record.saved.begin
        layout = Layout.padded(source, record.nbytes, self._alignment)
        slot = self._pool.acquire(layout.pad + record.nbytes + self._alignment)
        if slot is None:
            return KeepReason.PRESSURE
        extent = self._room({record: layout})
        if extent is None:
            return KeepReason.DEGRADED
        address = slot.address + layout.pad
        ctypes.memmove(address, source, record.nbytes)
        record.data = self._storage(slot, layout.pad, record.nbytes)
        self._leave(record)
        self._write(extent, [address], None)
        return None

    def _is_crowded(self, nbytes: int) -> bool:
        """Whether too much is on its way out for ``nbytes`` more; with a budget the store waits instead."""
        limited = self.shared.budget.limit_bytes is not None
        limit = self._pending_limit_bytes
        # A record larger than the limit may go while at most half of the limit is on its way.
        counted = nbytes if nbytes <= limit else (limit + 1) // 2
        return not limited and self.shared.pending_bytes + counted > limit

    def _leave(self, record: Record) -> None:
        record.to(State.SPILLING)
        self.shared.pending_bytes += record.nbytes

    def flush(self) -> None:
        """Write the batch that is being filled."""
        filling, self._filling = self._filling, {}
        if not filling:
            return
        share = self.shared.accounts.baseline_peak_bytes // SHARE_OF_SAVED
        self._batch_bytes = min(max(BATCH_BYTES, share), self._most_batch_bytes)
        for record in [record for record in filling if self.resized(record)]:
            del filling[record]
            self.shared.pending_bytes -= record.nbytes
            self.stay(record)
        layouts = {record: layout for record, (layout, _) in filling.items()}
        extent = self._room(layouts) if len(layouts) > 1 else None
        if extent is not None:
            self._write_sources(extent, [held for _, held in filling.values()])
            return
        for record, (layout, held) in filling.items():  # each finds room alone, or stays
            extent = self._room({record: layout})
            if extent is not None:
                self._write_sources(extent, [held])
            else:
                self._return(record)
                self.shared.accounts.stays_after_all(record.nbytes, KeepReason.DEGRADED.value)

    def _room(self, layouts: dict[Record, Layout]) -> SharedExtent | None:
        """Return room on disk for some records; None when there is none in one piece: a record alone has degraded."""
        try:
            return SharedExtent(layouts, max(self._alignment, MIN_ALIGNMENT), self.spool.allocate)
        except StorageError as error:
            if len(layouts) == 1:
                self.shared.reporter.degrade("no room on disk", next(iter(layouts)), error)
            return None

    def _return(self, record: Record) -> None:
        """Undo `_leave`."""
        self.shared.pending_bytes -= record.nbytes
        self.free_extent(record)
        record.to(State.RESIDENT)

    def _write_sources(self, extent: SharedExtent, held: Iterable[HeldBlock]) -> None:
        """Begin to write the records of an extent from where their owners hold them."""
        addresses = [record.saved.address + record.saved.begin for record in extent.records]
        self._write(extent, addresses, Sources(extent.records, held))

    def _write(self, extent: SharedExtent, addresses: list[int], sources: Sources | None) -> None:
        """Begin a write; without ``sources`` the memory is a copy of ours."""
        places = zip(addresses, extent.layouts, strict=True)
        memory = [(address + layout.io_begin, layout.io_bytes) for address, layout in places]
        records = tuple(extent.records)  # the extent's own list changes as it loses its last record
        try:
            transfer = self.spool.write(
                extent.extent,
                memory[0][0],
                extent.io_bytes,
                ranges=memory,
                before=sources.check if sources is not None and not self._kernel_reads else None,
                on_done=partial(self._written, sources, now()),
                keepalive=sources if sources is not None else [record.data for record in records],
                records=records,
            )
        except Exception:
            for record in records:
                self._return(record)
            raise
        self.begun(transfer)

    def _written(self, sources: Sources | None, since_s: float, transfer: Transfer) -> None:
        with self.shared.lock:
            records = self.ended(transfer)
            # A write fails as a whole if the memory of one record was gone: none of its records has degraded.
            all_resized = transfer.error is not None and sources is not None and sources.moved()
            all_resized = all_resized or (transfer.error is not None and any(one.saved.was_resized for one in records))
            for record in records:
                if all_resized or (sources is not None and self.resized(record)):
                    self.stay(record)
                else:
                    self.leaves_memory(record, since_s, transfer)

    def cancel(self, record: Record) -> None:
        if self._filling.pop(record, None) is not None:
            self.write_cancelled(record)
        super().cancel(record)

    def free_extent(self, record: Record) -> None:
        disk, record.disk = record.disk, None
        if disk is not None:
            shared: SharedExtent = disk.extent
            shared.users -= 1
            if shared.users == 0:
                shared.records.clear()  # they refer to it
                self.spool.free(shared.extent)

    def abandon(self) -> None:
        super().abandon()
        self._filling = {}

    # -- back ---------------------------------------------------------------------------------------------------------

    def ready(self, record: Record) -> torch.UntypedStorage | None:
        return None if record.state is State.FETCHING else record.data

    def _read(self, record: Record, urgent: bool) -> bool:
        """Begin to read a record, and all of its extent that are wanted too, into one piece of memory."""
        assert record.disk is not None, "it is on disk"
        shared: SharedExtent = record.disk.extent
        wanted = shared.wanted_with(record)
        first, last = wanted[0], wanted[-1]
        origin = shared.starts[first] - shared.layouts[first].pad
        end = shared.starts[last] + shared.records[last].nbytes
        slot = self._pool.acquire(end - origin + self._alignment, force=urgent)
        if slot is None:
            return False
        memory: list[Range] = []
        arriving: Arriving = {}
        for place in range(first, last + 1):  # also the ones in between, as one request is one range of the file
            one, layout = shared.records[place], shared.layouts[place]
            address = slot.address + shared.starts[place] - origin
            memory.append((address + layout.io_begin, layout.io_bytes))
            if place in wanted:
                arriving[one] = self._storage(slot, address - slot.address, one.nbytes), layout, address
        for one in arriving:
            one.to(State.FETCHING)
            self.count_resident(one)
        try:
            transfer = self.spool.read(
                shared.extent,
                memory[0][0],
                sum(nbytes for _, nbytes in memory),
                ranges=memory,
                skip=shared.offsets[first],
                on_done=partial(self._arrived, arriving, now()),
                keepalive=(slot, *(storage for storage, _, _ in arriving.values())),
                records=tuple(arriving),
            )
        except Exception:
            for one in arriving:
                self._not_read(one)
            raise
        self.begun(transfer)
        return True

    def _not_read(self, record: Record) -> None:
        self.remove_resident(record)
        record.to(State.SPILLED)

    def _arrived(self, arriving: Arriving, since_s: float, transfer: Transfer) -> None:
        with self.shared.lock:
            for record in self.ended(transfer):
                if transfer.error is not None:
                    self._not_read(record)
                    continue
                storage, layout, address = arriving[record]
                layout.restore_edges(address, record.nbytes)
                self.add_resident(record, storage)
                record.to(State.RESIDENT)
                self.shared.reporter.event(EventKind.READ, record, since_s=since_s)
        arriving.clear()

    def _storage(self, slot: Slot, begin: int, nbytes: int) -> torch.UntypedStorage:
        return self._pool.tensor(slot, begin, nbytes, owning=True).untyped_storage()
