"""Records of CPU tensors: written to disk straight from the tensor's memory, read back into reusable aligned memory.

Small records are coalesced: they wait until a batch is full, and go to disk by one write. What a batch lacks then waits
in memory, which is less than `BATCH_BYTES`; a record that backward wants meanwhile is taken out again.
"""

from __future__ import annotations

import ctypes
from functools import partial

import torch

from ..errors import StorageError
from ..events import EventKind, now
from ..memory.host_pool import HostPool, Slot
from ..policy import KeepReason
from ..storage.spool import Spool
from ..storage.transfers import Extent, Transfer
from .coalescing import Batch, BatchTransfer, Ranges
from .direct_io import MIN_ALIGNMENT, Layout
from .record import Record, State
from .shared import Shared
from .tier import Tier

BOUNCE_BYTES = 64 << 10
"""A span smaller than this is copied into aligned memory and written from there: its body would be mostly edges."""
SMALL_BYTES = 512 << 10
"""Records of so many bytes go alone: they cost no more for each byte than larger ones."""
BATCH_BYTES = 1 << 20
"""A batch of so many bytes is full; or of half of ``prefetch_bytes`` or ``pending_bytes``, where the user set one."""
LARGE_BATCH_BYTES = 4 << 20
SHARE_OF_SAVED = 32
"""Where much is saved at once, a batch is full with this part of it, up to `LARGE_BATCH_BYTES`."""
SHARE_OF_POOL = 4
"""Nor is it more than this part of the memory that batches come back to: several have to be there at once."""


class CpuTier(Tier):
    """CPU memory ↔ NVMe.

    Nothing is coalesced under a ``device_budget``, where each record is waited for alone; with ``verify``, as the
    checksum would be that of the batch; or with an engine that takes one range of memory at a time. The pool is memory
    for what is read back.
    """

    def __init__(self, shared: Shared, spool: Spool, pool: HostPool) -> None:
        super().__init__(shared, spool)
        config = shared.config
        self._disk = spool
        self._pool = pool
        # With direct I/O the kernel fails a write from memory that is gone; who reads it in this process would crash.
        self._kernel_reads = spool.direct and not config.verify
        self._filling = BatchTransfer()
        coalesces = spool.vectored and not config.is_limited and not config.verify
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
            self.flush()  # else what waits for its batch would be on its way for ever
            return KeepReason.PRESSURE
        # A checksum is of bytes that nobody changes: `unsafe_chunk` lets what lies between those of a view be changed.
        if record.nbytes < BOUNCE_BYTES or (self.shared.config.verify and record.has_gaps):
            return self._offload_copy(record)
        record.layout = Layout.around(record.address + record.begin, record.nbytes, self._disk.alignment)
        if record.nbytes < SMALL_BYTES and self._batch_bytes:
            self._filling.add_in_place(record)
            self._leave(record)
            self._copied_in_place.append(record)
            if self._filling.nbytes >= self._batch_bytes:
                self.flush()
            return None
        batch = self._alone(record)
        if batch is None:
            return KeepReason.DEGRADED
        write = BatchTransfer()
        write.add_in_place(record)
        self._leave(record)
        self._copied_in_place.append(record)
        self._write(write, batch)
        return None

    def _offload_copy(self, record: Record) -> KeepReason | None:
        """Copy a span into aligned memory, which is the record's storage from then on, and write that."""
        source = record.address + record.begin
        layout = record.layout = Layout.padded(source, record.nbytes, self._disk.alignment)
        slot = self._pool.acquire(layout.pad + record.nbytes + self._disk.alignment)
        if slot is None:
            return KeepReason.PRESSURE
        batch = self._alone(record)
        if batch is None:
            return KeepReason.DEGRADED
        address = slot.address + layout.pad
        ctypes.memmove(address, source, record.nbytes)
        record.data, record.data_begin = self._storage(slot, layout.pad, record.nbytes), record.begin
        write = BatchTransfer()
        write.add(record)
        self._leave(record)
        self._begin_write(write, batch, [(address + layout.io_begin, layout.io_bytes)], in_place=False)
        return None

    def _is_crowded(self, nbytes: int) -> bool:
        """Whether too much is on its way out for ``nbytes`` more; with a budget the store waits instead."""
        limited = self.shared.budget.limit_bytes is not None
        limit = self._pending_limit_bytes
        # One that is larger than the limit by itself may go while at most half of the limit is on its way.
        counted = nbytes if nbytes <= limit else (limit + 1) // 2
        return not limited and self.shared.pending_bytes + counted > limit

    def _leave(self, record: Record) -> None:
        record.to(State.SPILLING)
        self.shared.pending_bytes += record.nbytes

    def flush(self) -> None:
        """Write the batch that is being filled."""
        if not self._filling.records:
            return
        write, self._filling = self._filling, BatchTransfer()
        share = self.shared.accounts.baseline_peak_bytes // SHARE_OF_SAVED
        self._batch_bytes = min(max(BATCH_BYTES, share), self._most_batch_bytes)
        for record in [record for record in write.records if self.resized(record)]:
            write.leave(record)
            self.stay(record)
        records = list(write.records)
        batch = self._together(records) if len(records) > 1 else None
        if batch is not None:
            self._write(write, batch)
            return
        for record in records:
            self._write_alone(record)

    def _alone(self, record: Record) -> Batch | None:
        """Return a batch of one record with room on disk; None, and degraded, when there is none."""
        batch = Batch([record], self._step)
        extent = self.allocate(record, batch.io_bytes)
        if extent is not None:
            batch.assign(extent)
        return None if extent is None else batch

    def _together(self, records: list[Record]) -> Batch | None:
        """Return a batch of several records with room in one piece; None when each has to find room alone."""
        batch = Batch(records, self._step)
        try:
            extent = self._disk.allocate(batch.io_bytes)
        except StorageError:
            return None
        if len(extent.segments) > 1:
            self._disk.free(extent)
            return None
        batch.assign(extent)
        return batch

    @property
    def _step(self) -> int:
        """Addresses are kept modulo so many bytes."""
        return max(self._disk.alignment, MIN_ALIGNMENT)

    def _write_alone(self, record: Record) -> None:
        """Write a record whose batch found no room in one piece, or let it stay."""
        batch = self._alone(record)
        write = BatchTransfer()
        write.add_in_place(record)
        if batch is not None:
            self._write(write, batch)
            return
        write.leave(record)
        self._return(record)
        self.shared.accounts.stays_after_all(record.nbytes, KeepReason.DEGRADED.value)

    def _return(self, record: Record) -> None:
        """Undo `_leave`."""
        self.shared.pending_bytes -= record.nbytes
        self.free_extent(record)
        record.to(State.RESIDENT)

    def _write(self, write: BatchTransfer, batch: Batch) -> None:
        """Begin to write records from where their owner holds them."""
        memory: Ranges = []
        for record in batch.records:
            assert record.data is not None, "what is to be written is in memory"
            write.places.append((record.data, record.address))
            memory.append((record.address + record.begin + record.layout.io_begin, record.layout.io_bytes))
        self._begin_write(write, batch, memory, in_place=True)

    def _begin_write(self, write: BatchTransfer, batch: Batch, memory: Ranges, *, in_place: bool) -> None:
        assert batch.extent is not None, "the batch has room"
        try:
            write.transfer = self._disk.write(
                batch.extent,
                memory[0][0],
                batch.io_bytes,
                ranges=memory,
                before=write.check_places if in_place and not self._kernel_reads else None,
                on_done=partial(self._written, write, in_place, now()),
                keepalive=[write.held, *(record.data for record in write.records)],
                about=tuple(write.records),
            )
        except Exception:
            for record in list(write.records):
                write.leave(record)
                self._return(record)
            raise

    def _written(self, write: BatchTransfer, in_place: bool, since_s: float, transfer: Transfer) -> None:
        dropped: list[object] = []  # freed after the lock is given back, as unmapping takes time
        with self.shared.lock:
            if not self.shared.interrupted:
                self._forget_left(write)
                all_resized = transfer.error is not None and write.found_resized()
                for record in list(write.records):
                    write.leave(record)
                    if all_resized or (in_place and self.resized(record)):
                        self.stay(record)
                    else:
                        dropped.append(self.leaves_memory(record, since_s, transfer))
                self.shared.changed.notify_all()
        write.places = []
        dropped.clear()

    def cancel(self, record: Record) -> bool:
        """See `Tier`. What leaves a write that others need, or that runs, counts as pending until the write ends."""
        transfer = record.transfer
        if not isinstance(transfer, BatchTransfer):
            return False
        begun = transfer.transfer
        last = len(transfer.records) == 1
        transfer.leave(record)
        taken_back = begun is None or (last and begun.cancel())
        if record.state is State.SPILLING:
            if taken_back:
                self.shared.accounts.cancelled_bytes += transfer.left_bytes
                self._forget_left(transfer)
                self.write_cancelled(record)
            else:
                transfer.left_bytes += record.nbytes
        return True

    def _forget_left(self, write: BatchTransfer) -> None:
        self.shared.pending_bytes -= write.left_bytes
        write.left_bytes = 0
        self.shared.changed.notify_all()

    def free_extent(self, record: Record) -> None:
        batch, record.extent = record.extent, None
        record.on_disk = False
        if isinstance(batch, Batch):
            batch.users -= 1
            if batch.users == 0 and batch.extent is not None:
                batch.records.clear()
                self._disk.free(batch.extent)

    def abandon(self) -> None:
        super().abandon()
        self._filling = BatchTransfer()

    # -- back ---------------------------------------------------------------------------------------------------------

    def ready(self, record: Record) -> torch.UntypedStorage | None:
        return None if record.state is State.FETCHING else record.data

    def _read(self, record: Record, urgent: bool) -> bool:
        """Begin to read a record, and those of its batch that are wanted as well, into one piece of memory."""
        batch: Batch = record.extent
        wanted = batch.wanted_with(record)
        first, last = wanted[0], wanted[-1]
        origin = batch.starts[first] - batch.records[first].layout.pad
        end = batch.starts[last] + batch.records[last].nbytes
        slot = self._pool.acquire(end - origin + self._disk.alignment, force=urgent)
        if slot is None:
            return False
        assert isinstance(batch.extent, Extent), "a batch that was written has an extent"
        read, memory = BatchTransfer(), []
        arriving: dict[Record, tuple[torch.UntypedStorage, int]] = {}
        for place in range(first, last + 1):
            one = batch.records[place]
            address = slot.address + batch.starts[place] - origin
            memory.append((address + one.layout.io_begin, one.layout.io_bytes))
            if place in wanted:
                arriving[one] = self._storage(slot, address - slot.address, one.nbytes), address
        for one in arriving:
            read.add(one)
            one.to(State.FETCHING)
            self.count_resident(one)
        try:
            read.transfer = self._disk.read(
                batch.extent,
                memory[0][0],
                sum(nbytes for _, nbytes in memory),
                ranges=memory,
                skip=batch.offsets[first],
                on_done=partial(self._arrived, batch, read, arriving, now()),
                keepalive=(slot, *(storage for storage, _ in arriving.values())),
                about=tuple(arriving),
            )
        except Exception:
            for one in list(read.records):
                self._not_read(read, one)
            raise
        return True

    def _not_read(self, read: BatchTransfer, record: Record) -> None:
        read.leave(record)
        self.remove_resident(record)
        record.to(State.SPILLED)

    def _arrived(
        self,
        batch: Batch,
        read: BatchTransfer,
        arriving: dict[Record, tuple[torch.UntypedStorage, int]],
        since_s: float,
        transfer: Transfer,
    ) -> None:
        with self.shared.lock:
            if not self.shared.interrupted:
                failed_alone = batch.read_apart or len(arriving) == 1
                batch.read_apart = batch.read_apart or transfer.error is not None
                for record in list(read.records):
                    if transfer.error is not None:
                        self._not_read(read, record)
                        record.error = transfer.error if failed_alone else None  # perhaps another's: each is tried
                        continue
                    read.leave(record)
                    storage, address = arriving[record]
                    record.layout.restore_edges(address, record.nbytes)
                    self.add_resident(record, storage, record.begin)
                    record.to(State.RESIDENT)
                    self.shared.reporter.event(EventKind.READ, record, since_s=since_s)
                self.shared.changed.notify_all()
        arriving.clear()

    def _storage(self, slot: Slot, begin: int, nbytes: int) -> torch.UntypedStorage:
        return self._pool.tensor(slot, begin, nbytes, owning=True).untyped_storage()
