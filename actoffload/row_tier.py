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
from typing import Any

from . import rows
from .cpu_tier import BOUNCE_BYTES, MIN_ALIGNMENT, CpuMover, Layout
from .errors import StateError, StorageError
from .events import now
from .extent_io import Transfer
from .hostpool import HostPool, Slot
from .policy import KeepReason
from .record import Moving, Record, State
from .rows import Joint, Places, Ranges, Row
from .scopes import untraced_hook
from .spool import Spool
from .tiers import Core

SMALL_BYTES = 512 << 10
"""Records of so many bytes go alone: they cost no more for each byte than larger ones."""
ROW_BYTES = 1 << 20
"""A row with so many bytes is full; or with half of ``prefetch_bytes`` or ``pending_bytes``, where the user set one."""
OF_THE_POOL = 4
"""Or with this part of the memory that rows come back to: several have to be there at once."""
LARGE_ROW_BYTES = 4 << 20
OF_WHAT_IS_SAVED = 32
"""Where much is saved at once, a row is full with this part of it, up to `LARGE_ROW_BYTES`: memory hardly feels it."""


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
        self._by_record: Any = rows if self._native is None else self._native
        self._open = Joint()
        """The row that is being filled."""
        size = core.config.size
        self._most_bytes = min(
            LARGE_ROW_BYTES,
            size("prefetch_bytes", 2 * LARGE_ROW_BYTES) // 2,
            size("pending_bytes", 2 * LARGE_ROW_BYTES) // 2,
            pool.capacity_bytes // OF_THE_POOL,
        )
        if pool.capacity_bytes < 2 * ROW_BYTES:  # the last of a row may make it larger by nearly `SMALL_BYTES`
            self._most_bytes = 0
        self._full_bytes = min(ROW_BYTES, self._most_bytes)

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
        share_bytes = self.core.accounts.baseline_peak_bytes // OF_WHAT_IS_SAVED
        self._full_bytes = min(max(ROW_BYTES, share_bytes), self._most_bytes)
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
            self.give_room_back(extent)

    @untraced_hook
    def give_room_back(self, row: Row) -> None:
        """The last of a row needs its room no more."""
        row.records.clear()
        super().give_back(row.extent)

    def fetch(self, record: Record, urgent: bool) -> bool:
        row = record.extent
        if not isinstance(row, Row):
            return super().fetch(record, urgent)
        wanted: list[int] = self._by_record.wanted(row, record)
        first, last = wanted[0], wanted[-1]
        origin = row.starts[first] - row.records[first].io.pad
        end = row.starts[last] + row.records[last].nbytes
        slot = self._pool.acquire(end - origin + self.alignment, force=urgent)
        if slot is None:
            return False
        memory, records, places = self._coming(row, wanted, slot, slot.address - origin)
        joint = Joint()
        assert row.extent is not None, "a row that was written has an extent"
        try:
            self._fetching(joint, records)
            joint.transfer = self._disk.read_ranges(
                row.extent,
                memory,
                skip=row.offsets[first],
                on_done=partial(self._row_fetched, row, joint, records, places, now()),
                keepalive=(slot, places),
            )
        except BaseException:  # an interrupt: all are as they were
            for one in [one for one in records if one.transfer is joint]:
                joint.leave(one)
                one.transfer = None
                self.forget_near(one)
                if one.state is State.FETCHING:
                    one.to(State.SPILLED)
            raise
        return True

    def _coming(self, row: Row, wanted: list[int], slot: Slot, address: int) -> tuple[Ranges, list[Record], Places]:
        """What is read into a slot, where the first byte of the row would lie at ``address``.

        The memory of each body from the first that is wanted to the last; the records that are; and where they lie.
        """
        if self._native is not None:
            found: tuple[Ranges, list[Record], Places] = self._native.coming(row, wanted, slot, address)
            return found
        memory, places = [], []
        for place in range(wanted[0], wanted[-1] + 1):
            one, start = row.records[place], address + row.starts[place]
            memory.append((start + one.io.io_begin, one.io.io_bytes))
            if place in wanted:
                tensor = self._pool.tensor(slot, start - slot.address, one.nbytes, owning=True)
                places.append((tensor.untyped_storage(), start))
        return memory, [row.records[place] for place in wanted], places

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
        joint.places, memory = self._by_record.board(row)
        joint.transfer = self._disk.write_ranges(
            row.extent,
            memory,
            before=None if self._kernel_reads else joint.check_places,
            on_done=partial(self._row_written, joint, now()),
            keepalive=joint.places,
        )

    def _room_for(self, joint: Joint, records: list[Record]) -> Row | None:
        """A row for some records; None when each has to find room alone."""
        row = joint.row = Row(records)
        self._by_record.lay_out(row, max(self.alignment, MIN_ALIGNMENT))
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
            spoiled = transfer.error is not None and joint.lies_elsewhere()

            def end(record: Record) -> None:
                if spoiled:
                    self.stay(record)
                else:
                    dropped.append(self.write_done(record, since_s, transfer, direct=True))

            def end_in_c() -> None:
                self._native.written(joint, self.core, self.core.accounts, dropped)

            self._end_each(joint, end, end_in_c if transfer.error is None else None)
        joint.places = []
        dropped.clear()

    def _row_fetched(
        self,
        row: Row,
        joint: Joint,
        records: list[Record],
        places: Places,
        since_s: float,
        transfer: Transfer,
    ) -> None:
        lies = dict(zip(records, places, strict=True))

        def end(record: Record) -> None:
            self.read_done(record, *lies[record], since_s, transfer.error)
            if not apart:
                record.error = None  # perhaps another's: whoever asks tries it again, alone

        def end_in_c() -> None:
            self._native.fetched(joint, records, places, apart)

        try:
            with self.core.lock:
                apart, row.apart = row.apart, row.apart or transfer.error is not None
                self._end_each(joint, end, end_in_c if transfer.error is None else None)
        finally:
            places.clear()
            lies.clear()

    def _end_each(self, joint: Joint, end: Callable[[Record], None], end_in_c: Callable[[], None] | None) -> None:
        """End a transfer for each record that is still in it; an error with one (a sink's) concerns no other.

        Args:
            joint: what has ended.
            end: what that means for a record.
            end_in_c: has C do it for those for whom it may, before; None: for none of them.
        """
        errors: list[BaseException] = []

        def note_error(do: Callable[..., None], *of: Record) -> None:
            try:
                do(*of)
            except BaseException as error:
                errors.append(error)

        if end_in_c is not None and self._native is not None and self.core.sink is None:
            note_error(end_in_c)
        for record in list(joint.records):
            joint.leave(record)
            note_error(end, record)
        self.core.changed.notify_all()
        try:
            if errors:
                raise errors[0]
        finally:
            errors.clear()  # an error that its own frame holds would hold all that is in it
