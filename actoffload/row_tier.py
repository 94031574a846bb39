"""Small records of CPU tensors go to disk several at once, and come back so: in a row, by one transfer.

What a transfer costs besides its bytes (room on the spool, a request, a turn at the interpreter's lock on an I/O
thread) is paid once for a row, and a disk is fastest with large ones. Records that are saved one after the other are
needed one after the other, so backward gets none of them much too early.

A row is begun when it is full. What it still lacks then waits in memory, which is less than `ROW_BYTES`; a record that
backward wants meanwhile is taken out again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from .cpu_tier import BOUNCE_BYTES, MIN_ALIGNMENT, CpuMover, Layout
from .errors import StateError, StorageError
from .events import now
from .extent_io import Extent, Transfer
from .hostpool import HostPool
from .policy import KeepReason
from .record import Moving, Record, State
from .scopes import untraced_hook
from .spool import Spool
from .tiers import Core

SMALL_BYTES = 512 << 10
"""Records of so many bytes go alone: they cost no more for each byte than larger ones."""
ROW_BYTES = 1 << 20
"""A row with so many bytes is full; or with half of ``prefetch_bytes`` or ``pending_bytes``, where the user set one."""
OF_THE_POOL = 4
"""Or with this part of the memory that rows come back to: several have to be there at once."""


class Row:
    """The room on disk that some records share: the body of each behind that of the one before.

    Attributes:
        starts: where each begins in memory that holds all of them, so that each keeps its address modulo the alignment.
        offsets: where the body of each begins on disk.
        users: how many of the records have room here.
        apart: a read of several has failed: each is read alone.
    """

    __slots__ = ("apart", "extent", "io_bytes", "offsets", "records", "starts", "users")

    def __init__(self, records: list[Record], alignment: int) -> None:
        self.records = records
        self.starts: list[int] = []
        self.offsets: list[int] = []
        self.extent: Extent | None = None
        self.users = 0
        self.apart = False
        self.io_bytes = end = 0
        step = max(alignment, MIN_ALIGNMENT)
        for record in records:
            layout: Layout = record.io
            start = -(-end // step) * step + layout.pad
            self.starts.append(start)
            self.offsets.append(self.io_bytes)
            self.io_bytes += layout.io_bytes
            end = start + record.nbytes


class Joint:
    """One transfer of several records, or one that is still to be begun. Guarded by the offloader's lock.

    Attributes:
        records: those that it is for; who needs it no more leaves.
        transfer: None as long as it was not begun.
        row: for a write, the room that was taken for it.
        places: for a write, each storage that is read where its owner holds it, with its address.
        spoiled: one of them was seen to lie elsewhere: its owner has freed or resized it.
        left_bytes: for a write, of those that left it since it was begun, and whose memory it still holds.
    """

    __slots__ = ("left_bytes", "nbytes", "places", "records", "row", "spoiled", "transfer")

    def __init__(self) -> None:
        self.records: dict[Record, None] = {}
        self.nbytes = 0
        self.transfer: Transfer | None = None
        self.row: Row | None = None
        self.places: list[tuple[torch.UntypedStorage, int]] = []
        self.spoiled = False
        self.left_bytes = 0

    def add(self, record: Record) -> None:
        """Have it done for a record as well."""
        self.records[record] = None
        self.nbytes += record.nbytes
        record.transfer = self

    def leave(self, record: Record) -> None:
        """A record needs it no more, if it was in it."""
        if record in self.records:
            del self.records[record]
            self.nbytes -= record.nbytes

    def promote(self) -> None:
        """See `Moving`."""
        if self.transfer is not None:
            self.transfer.promote()

    def check_places(self) -> None:
        """Just before the memory is read, on an engine thread.

        Raises:
            StateError: an owner has freed or resized a storage.
        """
        self.spoiled = any(storage.data_ptr() != address for storage, address in self.places)
        if self.spoiled:
            raise StateError("a storage was resized while it was to be written in a row with others")


class RowMover(CpuMover):
    """CPU memory ↔ NVMe, small records in rows.

    Not under a ``device_budget``, where each is waited for alone; nor with ``verify``, as the checksum of a row would
    be wrong for all of it where one that has left it is changed.

    Args:
        core: see `Mover`.
        spool: one that is ``vectored``.
        pool: for what is read back.
    """

    def __init__(self, core: Core, spool: Spool, pool: HostPool) -> None:
        super().__init__(core, spool, pool)
        self._open = Joint()
        """The row that is being filled."""
        size = core.config.size
        self._full_bytes = min(
            ROW_BYTES,
            size("prefetch_bytes", 2 * ROW_BYTES) // 2,
            size("pending_bytes", 2 * ROW_BYTES) // 2,
            pool.capacity_bytes // OF_THE_POOL,
        )
        if pool.capacity_bytes < 2 * ROW_BYTES:  # the last of a row may make it larger by nearly `SMALL_BYTES`
            self._full_bytes = 0

    def begin(self, record: Record) -> KeepReason | None:
        if not BOUNCE_BYTES <= record.nbytes < SMALL_BYTES:
            return super().begin(record)
        if self.crowded(record.nbytes):
            return KeepReason.PRESSURE
        record.io = Layout.around(record.address + record.begin, record.nbytes, self.alignment)
        self._in_place.append(record)
        # In this order an interrupt leaves nothing counted: it comes when a function is entered.
        self._open.add(record)
        record.to(State.SPILLING)
        self.core.pending_bytes += record.nbytes
        if self._open.nbytes >= self._full_bytes:
            self.flush()
        return None

    def crowded(self, nbytes: int) -> bool:
        if not super().crowded(nbytes):
            return False
        self.flush()  # else what is in the row would be on its way for ever
        return True

    @untraced_hook
    def flush(self) -> None:
        if not self._open.records:
            return
        joint, self._open = self._open, Joint()
        try:
            self._begin_row(joint)
        except BaseException:  # an interrupt: what was not begun stays
            for record in [record for record in joint.records if record.transfer is joint]:
                joint.leave(record)
                self.stay_after_all(record)
            if joint.row is not None and joint.row.extent is not None and joint.row.users == 0:
                with suppress(StateError):  # it was freed with the last of them
                    self._disk.free(joint.row.extent)
            raise

    def take_back(self, record: Record, transfer: Moving) -> bool:
        if not isinstance(transfer, Joint):
            return super().take_back(record, transfer)
        # It has not ended: then the record would be in no transfer. An interrupt leaves it in this one, or out of it.
        begun = transfer.transfer
        if begun is not None and list(transfer.records) == [record] and begun.cancel():
            self.core.accounts.cancelled_bytes += transfer.left_bytes
            self._forget_left(transfer)
        transfer.leave(record)
        return True

    def count_taken_back(self, record: Record, transfer: Moving) -> None:
        if isinstance(transfer, Joint) and transfer.transfer is not None and not transfer.transfer.cancelled:
            transfer.left_bytes += record.nbytes  # its memory is held, and written, as long as the others' is
        else:
            super().count_taken_back(record, transfer)

    def give_back(self, extent: object) -> None:
        if not isinstance(extent, Row):
            super().give_back(extent)
            return
        extent.users -= 1
        if extent.users == 0:
            extent.records.clear()
            super().give_back(extent.extent)

    def fetch(self, record: Record, urgent: bool) -> bool:
        row = record.extent
        if not isinstance(row, Row):
            return super().fetch(record, urgent)
        apart, spilled = row.apart, State.SPILLED
        wanted = [
            n
            for n, one in enumerate(row.records)
            if one is record or (one.state is spilled and one.waiting > 0 and not apart)  # on disk, and asked for
        ]
        first, last = wanted[0], wanted[-1]
        origin = row.starts[first] - row.records[first].io.pad
        end = row.starts[last] + row.records[last].nbytes
        slot = self._pool.acquire(end - origin + self.alignment, force=urgent)
        if slot is None:
            return False
        joint, memory, coming = Joint(), [], []
        for place in range(first, last + 1):
            one, start = row.records[place], row.starts[place] - origin
            layout: Layout = one.io
            memory.append((slot.address + start + layout.io_begin, layout.io_bytes))
            if place in wanted:
                storage = self._pool.tensor(slot, start, one.nbytes, owning=True).untyped_storage()
                coming.append((one, storage, slot.address + start))
        assert row.extent is not None, "a row that was written has an extent"
        try:
            self._fetching(joint, [one for one, _, _ in coming])
            joint.transfer = self._disk.read_ranges(
                row.extent,
                memory,
                skip=row.offsets[first],
                on_done=partial(self._row_fetched, row, joint, coming, now()),
                keepalive=(slot, coming),
            )
        except BaseException:  # an interrupt: all are as they were
            for one in [one for one, _, _ in coming if one.transfer is joint]:
                joint.leave(one)
                one.transfer = None
                self.forget_near(one)
                if one.state is State.FETCHING:
                    one.to(State.SPILLED)
            raise
        return True

    def _resized(self, records: list[Record]) -> list[Record]:
        if self._native is None:
            return [record for record in records if self.resized(record)]
        found: list[Record] = self._native.resized(records)
        return found

    def _fetching(self, joint: Joint, records: list[Record]) -> None:
        """Records that are on disk begin to be read."""
        if self._native is not None:
            self._native.fetching(joint, records, self.core.accounts)
            return
        for record in records:
            joint.add(record)
            record.to(State.FETCHING)
            self.count_near(record)

    def _begin_row(self, joint: Joint) -> None:
        for record in self._resized(list(joint.records)):
            joint.leave(record)
            self.stay(record)
        records = list(joint.records)
        row = self._room_for(joint, records) if len(records) > 1 else None
        if row is None or row.extent is None:
            for record in records:
                self._begin_alone(record)
            return
        for record in records:
            record.extent = row
            row.users += 1
        joint.places = [(_storage_of(record), record.address) for record in records]
        joint.transfer = self._disk.write_ranges(
            row.extent,
            [(record.address + record.begin + record.io.io_begin, record.io.io_bytes) for record in records],
            before=None if self._kernel_reads else joint.check_places,
            on_done=partial(self._row_written, joint, now()),
            keepalive=joint.places,
        )

    def _room_for(self, joint: Joint, records: list[Record]) -> Row | None:
        """A row for some records; None when each has to find room alone."""
        row = joint.row = Row(records, self.alignment)
        try:
            row.extent = self._disk.allocate(row.io_bytes)
        except StorageError:
            return None
        if len(row.extent.segments) > 1:
            self._disk.free(row.extent)
            row.extent = None
        return row

    def _begin_alone(self, record: Record) -> None:
        layout: Layout = record.io
        if self.allocate_extent(record, layout.io_bytes):
            self.write_alone(record, record.address + record.begin + layout.io_begin, direct=True)
            return
        self.stay_after_all(record)
        # It was counted as one that moves, or will be when its `begin` returns.
        self.core.accounts.moved_bytes -= record.nbytes
        self.core.accounts.kept_bytes[KeepReason.DEGRADED.value] += record.nbytes

    def _forget_left(self, joint: Joint) -> None:
        self.core.pending_bytes -= joint.left_bytes
        joint.left_bytes = 0
        self.core.changed.notify_all()

    def _row_written(self, joint: Joint, since_s: float, transfer: Transfer) -> None:
        dropped: list[object] = []  # freed after the lock is given back: unmapping takes time
        with self.core.lock:
            self._forget_left(joint)
            elsewhere = any(storage.data_ptr() != address for storage, address in joint.places)
            noticed = any(record.was_resized for record in joint.records)
            spoiled = transfer.error is not None and (joint.spoiled or elsewhere or noticed)

            def end(record: Record) -> None:
                if spoiled:
                    self.stay(record)
                else:
                    dropped.append(self.write_done(record, since_s, transfer, direct=True))

            self._end_each(joint, end)
        joint.places = []
        dropped.clear()

    def _row_fetched(
        self,
        row: Row,
        joint: Joint,
        coming: list[tuple[Record, torch.UntypedStorage, int]],
        since_s: float,
        transfer: Transfer,
    ) -> None:
        places = {record: (storage, start) for record, storage, start in coming}

        def end(record: Record) -> None:
            self.read_done(record, *places[record], since_s, transfer.error)
            if not apart:
                record.error = None  # perhaps another's: whoever asks tries it again, alone

        try:
            with self.core.lock:
                apart, row.apart = row.apart, row.apart or transfer.error is not None
                self._end_each(joint, end)
        finally:
            coming.clear()
            places.clear()

    def _end_each(self, joint: Joint, end: Callable[[Record], None]) -> None:
        """End a transfer for each record that is still in it; an error with one (a sink's) concerns no other."""
        errors: list[BaseException] = []
        for record in list(joint.records):
            joint.leave(record)
            try:
                end(record)
            except BaseException as error:
                errors.append(error)
        self.core.changed.notify_all()
        try:
            if errors:
                raise errors[0]
        finally:
            errors.clear()  # an error that its own frame holds would hold all that is in it


def _storage_of(record: Record) -> torch.UntypedStorage:
    assert record.data is not None, "what is to be written is in memory"
    return record.data
