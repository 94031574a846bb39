"""A tier takes the records of one type of device away and brings them back: `cpu_tier`, `device_tier`, `direct_tier`.

Every method of a `Tier` is called with the store's lock held, and none blocks except `wait_for_room`. Completions
arrive on engine threads and take the lock themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from ..errors import StateError, StorageError
from ..events import EventKind, now
from ..policy import KeepReason
from ..storage.spool import Spool
from ..storage.transfers import Extent, Transfer
from .copy_streams import CopyStreams
from .record import MOVING, Record, State
from .shared import Shared
from .storage_ref import StorageRef

PENDING_BYTES = 256 << 20
"""So much may be on its way out, unless the user or a plan says otherwise."""
PENDING_MARGIN = 1.25
"""What a plan expects to be on its way out at once may be exceeded by this factor: steps differ a little."""
LOOK_AT = 4
"""How many of the copies under way are looked at on each occasion, as that is on the training thread's way."""

UNWATCHED = nullcontext()


class Tier(ABC):
    """What all kinds of tier are, and the steps that they share. Without a spool there is host memory alone."""

    gathers = False
    """Whether what is brought back by one look ahead is copied together."""

    copies: CopyStreams | None = None
    """The device's side streams, where there is one."""

    def __init__(self, shared: Shared, spool: Spool | None) -> None:
        self.shared = shared
        self.spool = spool
        self._pending_limit_bytes = shared.config.size("pending_bytes", PENDING_BYTES)
        self._copied_in_place: deque[Record] = deque()
        """Records that are being copied from where their owner holds them, and some that were; looked at in turn."""
        self._left_behind: deque[Record] = deque()
        """Records that have moved away while somebody else held the original."""

    # -- what a tier does ---------------------------------------------------------------------------------------------

    @abstractmethod
    def offload(self, record: Record) -> KeepReason | None:
        """Begin to move a resident record away; return a reason when it has to stay."""

    def fetch(self, record: Record, *, urgent: bool) -> bool:
        """Begin to bring a record back, if it is neither here nor on its way; return False when there is no room now.

        Args:
            urgent: backward waits for it: make room whatever it takes.
        """
        if record.state is State.SPILLING:
            if not record.wanted:
                self.forwarded(record)
            record.wanted = True
            if self.cancel(record):
                self.free_extent(record)
                record.to(State.RESIDENT)
        elif record.state is State.RESIDENT:
            pass
        elif self.capturing():
            return False
        elif record.state is State.SPILLED and not self.recover(record):
            return self._read(record, urgent)
        elif record.state is State.FETCHING and urgent and record.transfer is not None:
            record.transfer.promote()
        return True

    @abstractmethod
    def _read(self, record: Record, urgent: bool) -> bool:
        """Begin to read a record from disk; arguments and result as for `fetch`."""

    @abstractmethod
    def ready(self, record: Record) -> torch.UntypedStorage | None:
        """Return the storage with the bytes, safe to use on the current stream; None while it is on its way."""

    def saved_again(self, record: Record, tensor: torch.Tensor) -> None:
        """A record's bytes were saved once more, as a part of ``tensor``."""
        if self.copies is not None and not record.stays:
            self.copies.saved_again(tensor, record.saved_on)

    def cancel(self, record: Record) -> bool:
        """Take the record out of its transfer; return False when that is ending just now."""
        transfer = record.transfer
        if not isinstance(transfer, Transfer) or not transfer.cancel():
            return False
        record.transfer = None
        if record.state in MOVING:
            self.write_cancelled(record)
        return True

    def free_extent(self, record: Record) -> None:
        """Give the record's room on disk back; the spool waits for what is in flight on it."""
        extent, record.extent = record.extent, None
        record.on_disk = False
        if extent is not None and self.spool is not None:
            self.spool.free(extent)

    def order_reuse(self, record: Record) -> None:  # noqa: B027 - the spool's transfers hold the memory that they use
        """Order the reuse of a record's device memory after every copy that touches it, and forget the copies."""

    def wait_for_room(self, nbytes: int, limit_bytes: int) -> None:
        """Bring the resident bytes to at most ``limit_bytes - nbytes``, as far as what is on its way out allows."""
        shared = self.shared

        def waits() -> bool:
            over = shared.accounts.resident_bytes + nbytes > limit_bytes
            return over and shared.pending_bytes > 0 and not shared.stopped

        while waits():
            shared.begin_all()
            if waits():  # not only for what has just been given up
                shared.changed.wait()

    def expect_pending(self, nbytes: int | None) -> None:
        """A plan expects so many bytes on their way out at once; None: no plan says. The user's own limit stays."""
        if self.shared.config.pending_bytes is None:
            self._pending_limit_bytes = max(PENDING_BYTES, int((nbytes or 0) * PENDING_MARGIN))

    def poll(self) -> None:  # noqa: B027 - a tier may have nothing to do here
        """Make progress that only the training thread can make."""

    def release_due(self) -> None:  # noqa: B027
        """Release the device memory that the plan releases at this event, in stream order."""

    def release_dead(self) -> None:  # noqa: B027
        """Release the device memory of records that have died, in stream order."""

    def begin_forward(self) -> None:
        """A forward begins, which may save nothing large."""
        self.release_dead()

    def begin_copies(self) -> None:  # noqa: B027
        """Begin the copies that wait for others to go with them."""

    def flush(self) -> None:  # noqa: B027
        """Begin everything that waits for a later moment."""

    def abandon(self) -> None:
        """Forget every record after an interrupt; what their copies touch is used again only after these."""
        self._copied_in_place.clear()
        self._left_behind.clear()

    def close(self) -> None:  # noqa: B027
        """End the threads, if there are any. Idempotent."""

    def watched(self) -> AbstractContextManager[None]:
        """Return a context for what a hook does so that records move.

        Where ``Shared.watches_host`` asks for it, its time is counted, and whether the device had to wait for the host.
        """
        return UNWATCHED

    def count_waits(self) -> None:  # noqa: B027
        """Count what streams have waited for since the last time; the host does not see that."""

    def capturing(self, index: int | None = None) -> bool:
        """Whether a stream is being captured into a graph, so that nothing may move; see `CopyStreams.capturing`."""
        return self.copies is not None and self.copies.capturing(index)

    def is_of_a_graph(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is made while a graph is captured, or lies in memory of one: it stays."""
        if self.copies is None or self.copies.inert:
            return False
        return self.capturing(tensor.device.index) or self.copies.device.is_of_a_graph(tensor)

    def make_room(self, nbytes: int) -> float:
        """Keep the ``device_budget`` before ``nbytes`` come; return the seconds that this thread waited."""
        budget = self.shared.budget
        if not budget.exceeded_by(nbytes) or self.shared.stopped or self.capturing():
            return 0.0
        assert budget.limit_bytes is not None, "only a limit is exceeded"
        since_s = now()
        self.wait_for_room(nbytes, budget.limit_bytes)
        return now() - since_s

    def evict(self, record: Record) -> None:
        """Hold the device copy weakly, if a complete copy is elsewhere: no handle waits for the record."""
        if record.state is not State.RESIDENT or record.data is None or (record.slot is None and not record.on_disk):
            return
        self.order_reuse(record)
        record.weak_data = StorageRef(record.data)
        record.to(State.HOSTED if record.slot is not None else State.SPILLED)
        self.remove_resident(record)

    def recover(self, record: Record) -> bool:
        """Take the device copy that somebody still holds, if there is one."""
        storage = record.weak_data.lock() if record.weak_data is not None else None
        record.weak_data = None
        if storage is None:
            return False
        self.add_resident(record, storage, record.data_begin)
        record.to(State.RESIDENT)
        return True

    def release(self, record: Record) -> None:
        """Give back everything, as the last handle died. I/O in flight keeps what it needs until it ends."""
        if record.data is not None or record.incoming is not None:
            self.order_reuse(record)
        if record.transfer is not None:
            self.cancel(record)
        self.free_extent(record)
        record.slot = None
        record.weak_data = None
        self.remove_resident(record)
        record.to(State.RELEASED)

    # -- originals that live on ---------------------------------------------------------------------------------------

    def let_go(self, record: Record) -> None:
        """Drop our reference to the original, as it has moved away."""
        # Python's objects for a storage count as one, which is ours: more is somebody's tensor.
        if record.identity is not None and record.identity.held_by() > 1:
            self._left_behind.append(record)
        self.remove_resident(record)

    def original_taken(self, record: Record) -> None:
        """Backward is given the original of a record that has moved, or is being written from a copy in memory."""
        if record.on_device and record.state in MOVING:
            self.fetch(record, urgent=True)
        elif not record.alive and record.held_elsewhere():
            record.alive = True
            self.shared.accounts.stays_after_all(record.nbytes, KeepReason.ALIVE.value)

    def count_alive(self) -> None:
        """Count the originals that live on elsewhere as on the device, and those that have died since as gone.

        A forward's own variables hold what it works on; so this is for when it has ended.
        """
        for _ in range(len(self._left_behind)):
            record = self._left_behind.popleft()
            if record.data is not None or record.state not in (State.HOSTED, State.SPILLING, State.SPILLED):
                continue  # it is released, or comes back: others count it
            if record.original() is None:
                self.remove_resident(record)
            else:
                self.count_resident(record)
                self._left_behind.append(record)

    # -- steps that they share ----------------------------------------------------------------------------------------

    def add_resident(self, record: Record, storage: torch.UntypedStorage, begin: int) -> None:
        """Note that ``storage`` on the device has the bytes; ``begin``: the original's byte that is its first."""
        record.data = storage
        record.data_begin = begin
        self.count_resident(record)

    def count_resident(self, record: Record) -> None:
        """Count the record's device memory from now on."""
        if not record.counted:
            record.counted = True
            self.shared.accounts.add_resident(record.nbytes)
            if self.shared.accounts.resident_by_module is not None:
                self.shared.accounts.resident_by_module[record.module] += record.nbytes

    def remove_resident(self, record: Record) -> None:
        """Drop our reference to the device copy."""
        record.data = None
        if record.counted:
            record.counted = False
            self.shared.accounts.remove_resident(record.nbytes)
            if self.shared.accounts.resident_by_module is not None:
                self.shared.accounts.resident_by_module[record.module] -= record.nbytes

    def forwarded(self, record: Record) -> None:
        """Count that backward takes the record from a copy nearer than the tier it was heading for."""
        accounts = self.shared.accounts
        accounts.forwarded_bytes += record.nbytes
        if record.counted:  # what is forwarded from host memory has left the device
            accounts.late_bytes += record.nbytes
        self.shared.reporter.event(EventKind.FORWARD, record)

    def write_cancelled(self, record: Record) -> None:
        """Count a write that is not done."""
        self.shared.pending_bytes -= record.nbytes
        self.shared.accounts.cancelled_bytes += record.nbytes
        self.shared.reporter.event(EventKind.CANCEL, record)
        self.shared.changed.notify_all()

    def write_ended(self, record: Record, transfer: Transfer) -> bool:
        """Count the end of a write, on an engine thread; return whether the record is on disk now."""
        self.shared.pending_bytes -= record.nbytes
        record.transfer = None
        if record.state is State.RELEASED:
            return False
        if transfer.error is not None:
            self.free_extent(record)
            self.shared.reporter.degrade("write failed", record, transfer.error)
            return False
        record.on_disk = True
        return True

    def leaves_memory(self, record: Record, since_s: float, transfer: Transfer) -> torch.UntypedStorage | None:
        """End the write of a record from where its owner holds it; return the memory that it leaves."""
        left = None
        if self.write_ended(record, transfer):
            self.shared.reporter.event(EventKind.WRITE, record, since_s=since_s)
            if record.wanted and record.waiting:
                record.to(State.RESIDENT)
            else:
                left = record.data
                self.let_go(record)
                record.to(State.SPILLED)
        elif record.state is State.SPILLING:
            record.to(State.RESIDENT)
        return left

    def begin_after(self, wait: Callable[[], None], transfer: Transfer) -> None:
        """Begin a transfer that was held once ``wait`` has returned, on the thread that waits for the device."""
        assert self.spool is not None, "it has the transfer"
        try:
            wait()
            self.spool.go_on(transfer)
        except Exception as error:  # a broken device, or an engine that is closed
            transfer.fail(error)

    def allocate(self, record: Record, nbytes: int) -> Extent | None:
        """Return room on disk for a record; None, and degraded, when there is none."""
        if self.spool is None:
            raise StateError("a tier without a spool was asked to write to disk")
        try:
            return self.spool.allocate(nbytes)
        except StorageError as error:
            self.shared.reporter.degrade("no room on disk", record, error)
            return None

    # -- storages that their owner frees or resizes while they are copied ---------------------------------------------

    def resized(self, record: Record) -> bool:
        """Whether the owner of the storage that is being moved has freed or resized it meanwhile (``resize_(0)``).

        What was copied of it may be another's bytes then. Whoever does so fills it again before backward comes.
        """
        moving = record.state in MOVING and record.data is not None
        return moving and (record.was_resized or record.lies_elsewhere)

    def notice_resized(self) -> None:
        """Look for such storages on every occasion: one that is filled again at its old address shows nothing later."""
        turn = self._copied_in_place  # with many under way each is seen every few saves
        for _ in range(min(LOOK_AT, len(turn))):
            record = turn.popleft()
            data = record.data
            if data is not None and record.state in MOVING:
                turn.append(record)
                if data.data_ptr() != record.address:
                    record.was_resized = True

    def stay(self, record: Record) -> None:
        """End the move of a storage that was `resized`: it is what backward will be given, as without offloading."""
        if record.state is State.SPILLING:
            self.shared.pending_bytes -= record.nbytes
        record.transfer = None
        record.slot = None
        self.free_extent(record)
        record.to(State.RESIDENT)
        self.shared.accounts.stays_after_all(record.nbytes, KeepReason.RESIZED.value)
