"""A tier moves the records of one type of device out and back: `cpu_tier`, `device_tier`, `direct_tier`.

Every method of a `Tier` but `with_room` is called with the store's lock held, and a wait releases it. Completions
arrive on engine threads and take the lock themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch

from ..errors import StorageError
from ..events import EventKind, now
from ..policy import KeepReason
from ..storage.arena import Extent
from ..storage.engines.base import IoKind
from ..storage.spool import Spool
from ..storage.transfers import Transfer
from .copy_streams import CopyStreams
from .record import MOVING, DiskCopy, Record, State
from .shared import Shared
from .storage_ref import StorageRef

PENDING_BYTES = 256 << 20
"""Most bytes on their way out, unless the user or a plan sets another limit."""
PENDING_MARGIN = 1.25
"""The bytes on their way out may exceed the plan's expectation by this factor, as steps differ a little."""
LOOK_AT = 4
"""How many of the copies under way are looked at on each occasion: the training thread pays for it."""

UNWATCHED = nullcontext()


class Tier(ABC):
    """The interface of all tiers, and the steps that they share. Without a spool there is host memory alone."""

    gathers = False
    """Whether the records that one look ahead brings back are copied together."""

    def __init__(self, shared: Shared, spool: Spool | None, copies: CopyStreams | None = None) -> None:
        self.shared = shared
        self.spool = spool
        self.copies = copies
        """The device's side streams, where there is one."""
        self.evicts_first = copies is not None and shared.config.device_memory is not None
        """Backward's record is evicted before the next fetch, as ``device_memory`` counts it beside saved tensors."""
        self.waiter = None if copies is None else ThreadPoolExecutor(1, "actoffload-copies")
        """The one thread that waits for a device."""
        if self.waiter is not None:
            self.waiter.submit(int)  # its thread starts now: in a step it would be an error that there are no more
        self._pending_limit_bytes = shared.config.size("pending_bytes", PENDING_BYTES)
        self._copied_in_place: deque[Record] = deque()
        """Records that are being copied from where their owner holds them, and some that were; looked at in turn."""
        self._left_behind: deque[Record] = deque()
        """Records that have moved out although the program still held the original."""

    # -- the interface ------------------------------------------------------------------------------------------------

    @abstractmethod
    def offload(self, record: Record) -> KeepReason | None:
        """Begin to move a resident record away; return a reason when it has to stay."""

    def fetch(self, record: Record, *, urgent: bool) -> bool:
        """Begin to bring a record back, if it is neither here nor on its way; return False when there is no room now.

        It is False for each move that a graph capture forbids. The caller raises an error if backward waits for it, as
        nothing would end that wait.

        Args:
            urgent: backward waits for it, so make room at any cost.
        """
        if record.state is State.SPILLING:
            self.forwarded(record)
            self.give_up_write(record)
            record.to(State.RESIDENT)
        elif record.state is State.RESIDENT:
            pass
        elif self.capturing():
            return False
        elif record.state is State.SPILLED and not self.recover(record):
            return self._read(record, urgent)
        elif record.state is State.FETCHING and urgent and record.disk is not None and record.disk.transfer is not None:
            record.disk.transfer.promote()
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
            self.copies.saved_again(tensor, None if record.host is None else record.host.saved_on)

    def begun(self, transfer: Transfer, wait: Callable[[], None] | None = None) -> None:
        """Note the transfer of its records. The lock is held since before it was enqueued, so it has not ended yet.

        With ``wait`` it is held, and begins once that has returned, on the thread that waits for the device.
        """
        for record in transfer.records:
            record.disk.transfer, record.disk.error = transfer, None  # of an earlier read
        if wait is not None:
            assert self.waiter is not None, "there is a device"
            self.waiter.submit(self._begin_after, wait, transfer)

    def cancel(self, record: Record) -> None:
        """Take the record out of its transfer, which is cancelled if no other record needs it.

        Else the write goes on. It holds the memory of the record until it ends, so until then that counts as pending.
        """
        disk = record.disk
        if disk is None or disk.transfer is None:
            return
        transfer, disk.transfer = disk.transfer, None
        if transfer.leave(record) and transfer.kind is IoKind.WRITE:
            for left in transfer.records:
                self.write_cancelled(left)

    def ended(self, transfer: Transfer) -> list[Record]:
        """Note a transfer's end; return the records that still need it, none after an interrupt. The lock is held."""
        if self.shared.interrupted:
            return []
        records = [record for record, needs_it in transfer.records.items() if needs_it]
        for record in records:
            record.disk.transfer, record.disk.error = None, transfer.error
            record.disk.complete |= transfer.error is None
        if transfer.kind is IoKind.WRITE:
            self.shared.pending_bytes -= sum(record.nbytes for record in transfer.records)
        self.shared.changed.notify_all()  # now is as good as later: no thread wakes before the lock is free
        return records

    def give_up_write(self, record: Record) -> None:
        """Cancel the record's write and free its extent: the bytes there are not wanted, or may not be the right ones.

        The spool reuses the room only after the transfer is over, cancelled or not.
        """
        self.cancel(record)
        self.free_extent(record)

    def free_extent(self, record: Record) -> None:
        """Free the record's room on disk; the spool reuses it once nothing is in flight on it."""
        disk, record.disk = record.disk, None
        if disk is not None and self.spool is not None:
            self.spool.free(disk.extent)

    def order_reuse(self, record: Record) -> None:  # noqa: B027 - the spool's transfers hold the memory that they use
        """Order the reuse of a record's device memory after every copy that touches it, and forget the copies."""

    def wait_for_room(self, nbytes: int) -> None:
        """Wait until ``nbytes`` more keep the budget, or nothing is on its way out any more."""
        shared = self.shared

        def waits() -> bool:
            return shared.budget.excess_bytes(nbytes) > 0 and shared.pending_bytes > 0 and not shared.stopped

        while waits():
            shared.begin_all()
            if waits():  # not only for what has just been given up
                shared.changed.wait()

    @property
    def leaving_bytes(self) -> int:
        """The resident bytes on their way out: they give room without another move."""
        return self.shared.pending_bytes

    def expect_pending(self, nbytes: int | None) -> None:
        """Adapt to the bytes that a plan expects on their way out at once; None: no plan. The user's limit stays."""
        if self.shared.config.pending_bytes is None:
            self._pending_limit_bytes = max(PENDING_BYTES, int((nbytes or 0) * PENDING_MARGIN))

    def poll(self) -> None:  # noqa: B027 - a tier may have nothing to do here
        """Make progress that only the training thread can make."""

    def release_due(self) -> None:  # noqa: B027
        """Release the device memory that the plan releases at this event, in stream order."""

    def release_dead(self) -> None:  # noqa: B027
        """Release the device memory of records that have died, in stream order."""

    def release_ahead(self) -> bool:
        """Release device memory of records that were fetched ahead, or are leaving; return False if there is none."""
        return False

    def with_room(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a tensor that backward needs, computed on the device. The lock is not held.

        While the device has no memory for it, records that were fetched ahead, or are leaving, make room.
        """
        while True:
            try:
                return compute()
            except torch.OutOfMemoryError:
                with self.shared.lock:
                    if not self.release_ahead():
                        raise

    def release_before_region(self) -> None:  # noqa: B027
        """As `release_dead`, before a checkpointed region runs again and takes its memory."""

    def begin_forward(self) -> None:
        """A forward begins, which may save nothing large."""
        self.release_dead()

    def begin_copies(self) -> None:  # noqa: B027
        """Begin the copies that wait for their batch to fill."""

    def flush(self) -> None:  # noqa: B027
        """Begin everything that waits for a later moment."""

    def abandon(self) -> None:
        """Forget every record after an interrupt. Memory that their copies touch is reused only after the copies."""
        self._copied_in_place.clear()
        self._left_behind.clear()

    def close(self) -> None:
        """End the thread, if there is one. Idempotent."""
        if self.waiter is not None:
            self.waiter.shutdown(wait=False, cancel_futures=True)

    def watched(self) -> AbstractContextManager[None]:
        """Return a context for the work of a hook that moves records.

        With ``Shared.watches_host`` it counts the time, and whether the device had to wait for the host.
        """
        return UNWATCHED

    def stream_of(self, device: torch.device) -> Any:
        """The stream on which the calling thread computes on a device; None where there is none."""
        copies = self.copies
        return None if copies is None or copies.inert else copies.device.current_stream(device.index or 0)

    def capturing(self, index: int | None = None) -> bool:
        """Whether a stream is being captured into a graph, so that nothing may move; see `CopyStreams.capturing`."""
        return self.copies is not None and self.copies.capturing(index)

    def is_of_a_graph(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is made while a graph is captured, or lies in memory of one: it stays."""
        copies = self.copies
        if copies is None or copies.inert:
            return False
        return copies.capturing(tensor.device.index) or copies.device.is_of_a_graph(tensor)

    def make_room(self, nbytes: int) -> float:
        """Keep the ``device_budget`` before ``nbytes`` come; return the seconds that this thread waited."""
        if self.shared.budget.excess_bytes(nbytes) <= 0 or self.shared.stopped or self.capturing():
            return 0.0
        since_s = now()
        self.wait_for_room(nbytes)
        return now() - since_s

    def make_room_to_save(self) -> None:
        """Keep the ``device_budget`` if this thread runs a backward that builds a graph: it may save a tensor next."""
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
            self.make_room(self.shared.budget.largest_bytes)

    def evict(self, record: Record) -> None:
        """Hold the device copy weakly, if a complete copy is elsewhere: no handle waits for the record."""
        on_host = record.host is not None and record.host.slot is not None
        if record.state is not State.RESIDENT or record.data is None or not (on_host or record.on_disk):
            return
        self.order_reuse(record)
        record.weak_data = StorageRef(record.data)
        record.to(State.HOSTED if on_host else State.SPILLED)
        self.remove_resident(record)

    def recover(self, record: Record) -> bool:
        """Take the device copy again if the program still holds it."""
        storage = record.weak_data.lock() if record.weak_data is not None else None
        record.weak_data = None
        if storage is None:
            return False
        self.add_resident(record, storage)
        record.to(State.RESIDENT)
        return True

    def release(self, record: Record) -> None:
        """Release everything, as the last handle died. I/O in flight keeps its memory and extent until it ends."""
        if record.data is not None or record.host is not None:
            self.order_reuse(record)
        if record.disk is not None or record.state is State.SPILLING:  # else no write has it, begun or not
            self.give_up_write(record)
        if record.host is not None:
            record.host.slot = None
        record.weak_data = None
        if record.data is not None or record.counted:
            self.remove_resident(record)
        record.to(State.RELEASED)

    # -- originals that live on ---------------------------------------------------------------------------------------

    def let_go(self, record: Record) -> None:
        """Drop our reference to the original, as it has moved away."""
        # All Python objects for a storage count as one holder, which is us: more means that a tensor holds it.
        if record.saved.identity.held_by() > 1:
            self._left_behind.append(record)
        self.remove_resident(record)

    def original_taken(self, record: Record) -> None:
        """Note that backward takes the original of a record that has moved, or is being written."""
        if record.on_device and record.state in MOVING:
            self.fetch(record, urgent=True)
        elif not record.saved.alive and record.held_elsewhere():
            record.saved.alive = True
            self.shared.accounts.stays_after_all(record.nbytes, KeepReason.ALIVE.value)

    def count_alive(self) -> None:
        """Count originals that the program still holds as resident, and originals that have died since as gone.

        Call it when a forward has ended: before, its local variables hold its tensors.
        """
        for _ in range(len(self._left_behind)):
            record = self._left_behind.popleft()
            if record.data is not None or record.state not in (State.HOSTED, State.SPILLING, State.SPILLED):
                continue  # it is released, or comes back, and is counted there
            if record.original() is None:
                self.remove_resident(record)
            else:
                self.count_resident(record)
                self._left_behind.append(record)

    # -- steps that they share ----------------------------------------------------------------------------------------

    def add_resident(self, record: Record, storage: torch.UntypedStorage) -> None:
        """Note that ``storage`` on the device has the bytes."""
        record.data = storage
        self.count_resident(record)

    def count_resident(self, record: Record) -> None:
        """Count the record's device memory from now on."""
        if not record.counted:
            record.counted = True
            accounts = self.shared.accounts
            accounts.add_resident(record.nbytes)
            if accounts.resident_by_module is not None:
                accounts.resident_by_module[record.saved.module] += record.nbytes

    def remove_resident(self, record: Record) -> None:
        """Drop our reference to the device copy."""
        record.data = None
        if record.counted:
            record.counted = False
            accounts = self.shared.accounts
            accounts.remove_resident(record.nbytes)
            if accounts.resident_by_module is not None:
                accounts.resident_by_module[record.saved.module] -= record.nbytes

    def forwarded(self, record: Record) -> None:
        """Count that backward takes the record from a copy nearer than the tier it was heading for."""
        accounts = self.shared.accounts
        accounts.forwarded_bytes += record.nbytes
        if record.counted:  # a record that is forwarded from host memory has left the device
            accounts.late_bytes += record.nbytes
        self.shared.reporter.event(EventKind.FORWARD, record)

    def write_cancelled(self, record: Record) -> None:
        """Count a write that is not done."""
        self.shared.pending_bytes -= record.nbytes
        self.shared.accounts.cancelled_bytes += record.nbytes
        self.shared.reporter.event(EventKind.CANCEL, record)
        self.shared.changed.notify_all()

    def is_written(self, record: Record, transfer: Transfer) -> bool:
        """Return whether the record is on disk, now that a write of it has ended; count a failure."""
        if transfer.error is not None:
            self.free_extent(record)
            self.shared.reporter.degrade("write failed", record, transfer.error)
        return transfer.error is None

    def leaves_memory(self, record: Record, since_s: float, transfer: Transfer) -> None:
        """End the write of a record from where its owner holds it; the transfer holds the memory a little longer."""
        if self.is_written(record, transfer):
            self.shared.reporter.event(EventKind.WRITE, record, since_s=since_s)
            self.let_go(record)
            record.to(State.SPILLED)
        else:
            record.to(State.RESIDENT)

    def _begin_after(self, wait: Callable[[], None], transfer: Transfer) -> None:
        assert self.spool is not None, "it has the transfer"
        try:
            wait()
            self.spool.go_on(transfer)
        except Exception as error:  # a broken device, or an engine that is closed
            transfer.fail(error)

    def allocate(self, record: Record, nbytes: int) -> Extent | None:
        """Take and return room on disk for a record; None, and degraded, when there is none."""
        assert self.spool is not None, "to write to disk needs one"
        try:
            extent = self.spool.allocate(nbytes)
        except StorageError as error:
            self.shared.reporter.degrade("no room on disk", record, error)
            return None
        record.disk = DiskCopy(extent)
        return extent

    # -- storages that their owner frees or resizes while they are copied ---------------------------------------------

    def resized(self, record: Record) -> bool:
        """Whether the owner of the storage that is being moved has freed or resized it meanwhile (``resize_(0)``).

        The copy may then hold bytes of another tensor. The owner fills the storage again before backward needs it.
        """
        data = record.data
        if data is None or record.state not in MOVING:
            return False
        return record.saved.was_resized or data.data_ptr() != record.saved.address  # freed, it lies nowhere

    def notice_resized(self) -> None:
        """Look for such storages often: one that is filled again at its old address shows no trace later."""
        turn = self._copied_in_place
        if not turn:
            return
        left = LOOK_AT
        for record in tuple(islice(turn, LOOK_AT)):
            data = record.data
            if data is None or record.state not in MOVING:
                turn.remove(record)  # among the first few
                left -= 1
            elif data.data_ptr() != record.saved.address:
                record.saved.was_resized = True
        turn.rotate(-left)  # so that with many under way each is seen every few saves, and none is passed over

    def stay(self, record: Record) -> None:
        """End the move of a storage that was `resized`: backward gets the storage itself, as without offloading."""
        if record.host is not None:
            record.host.slot = None
        self.give_up_write(record)
        record.to(State.RESIDENT)
        self.shared.accounts.stays_after_all(record.nbytes, KeepReason.RESIZED.value)
