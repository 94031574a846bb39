"""Moving records between tiers: what every mover shares. `cpu_tier` and `device_tier` are the two kinds.

Every method of a `Mover` is called with the offloader's lock held, and none blocks except `wait_for_room`. Completions
arrive on engine threads and take the lock themselves.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

import torch

from . import native_hooks
from .accounts import Accounts
from .config import OffloadConfig
from .errors import StateError, StorageError
from .events import EventKind, EventSink, TraceEvent, now
from .extent_io import Extent, Transfer
from .identity import StorageRef
from .locks import Changed, new_lock
from .policy import KeepReason
from .record import Moving, Record, State
from .spool import Spool

MOVING = (State.STAGING, State.SPILLING)
PENDING_MARGIN = 1.25
"""What a plan expects on its way out at once may be exceeded by this factor: steps differ a little."""
LOOK_AT = 16
"""How many of the copies under way are looked at on each occasion, as that is on the training thread's way."""


class Core:
    """What the offloader and its movers share: the lock, the counts, the spool and the way to report."""

    def __init__(self, config: OffloadConfig, sink: EventSink | None) -> None:
        self.config = config
        self.sink = sink
        self.lock = new_lock()
        self.changed = Changed(self.lock)
        self.accounts = Accounts()
        self.pending_bytes = 0
        """Bytes of writes that were begun and have not ended."""
        self.device_budget = None if config.device_budget is None else config.size("device_budget", 0)
        self.largest_bytes = 0
        """The largest record so far: what the next one may need."""
        self.largest_moved_bytes = 0
        """The largest that was moved so far: prefetch looks at least twice as far."""
        self.reserved_bytes = 0
        """What backward needs at once where it recomputes a block."""
        self.inert = False
        """Nothing may be started any more: aborted, or a forked child."""
        self.advice: dict[str, str] = {}
        """What was said once about how the library is used, by its key."""
        self._warned: set[str] = set()
        self.to_warn: deque[str] = deque()
        """What `warn` has not said yet."""

    def has_room_ahead(self, nbytes: int) -> bool:
        """Whether ``nbytes`` that backward does not need yet fit the budget, beside what it may need at once."""
        if self.device_budget is None:
            return True
        accounts = self.accounts
        at_once = max(self.largest_bytes, self.reserved_bytes - accounts.recomputed_bytes)
        return accounts.resident_bytes + nbytes + at_once <= self.device_budget

    def after_fork_in_child(self) -> None:
        """A new lock: the old one may have been held when the process forked."""
        self.inert = True
        self.sink = None
        self.to_warn.clear()
        self.lock = new_lock(self.lock.after_release, self.lock.noted)
        self.changed = Changed(self.lock)

    def event(self, kind: EventKind, record: Record, detail: str = "", since_s: float | None = None) -> None:
        """Report to the sink, if there is one."""
        if self.sink is not None:
            time_s = now()
            begin_s = time_s if since_s is None else since_s
            self.sink(
                TraceEvent(
                    kind=kind,
                    time_s=begin_s,
                    record=record.number,
                    nbytes=record.nbytes,
                    duration_s=time_s - begin_s,
                    detail=detail,
                )
            )

    def degrade(self, reason: str, record: Record, error: BaseException) -> None:
        """Something below failed and the step goes on: count it, and have `warn` say so once for each reason."""
        self.accounts.degraded[reason] += 1
        self.event(EventKind.DEGRADED, record, reason)
        if reason not in self._warned:
            self._warned.add(reason)
            self.to_warn.append(
                f"actoffload: {reason}: {error}. The tensor stays in memory and the step goes on; "
                "Statistics.degraded counts such tensors"
            )

    def advise(self, key: str, text: str) -> None:
        """Have `warn` say something once for each ``key``; the report repeats it."""
        if key not in self.advice:
            self.advice[key] = text
            self.to_warn.append(f"actoffload: {text}")

    def warn(self) -> None:
        """Say what went wrong, on a thread of the user's and without the lock: a filter may turn it into an error."""
        while self.to_warn:
            warnings.warn(self.to_warn.popleft(), RuntimeWarning, stacklevel=2)


def _elsewhere(record: Record) -> bool:
    """Whether the storage of a record lies at another address than when it was saved; freed, it lies nowhere."""
    data = record.data
    return data is not None and data.data_ptr() != record.address


class Mover(ABC):
    """Takes the records of one kind of device away and brings them back."""

    def __init__(self, core: Core, spool: Spool | None) -> None:
        self.core = core
        self.spool = spool
        self._native: Any = native_hooks.loaded()
        self._in_place: deque[Record] = deque()
        """Records that are being copied from where their owner holds them, and some that were; looked at in turn."""
        self.watched: tuple[deque[Record], ...] = (self._in_place,)
        """While all of these are empty, neither `notice_resized` nor `pump` has anything to do."""

    @abstractmethod
    def begin(self, record: Record) -> KeepReason | None:
        """Begin to move a resident record away; a reason when it has to stay."""

    @abstractmethod
    def bring(self, record: Record, *, urgent: bool) -> bool:
        """Begin to bring a record back, if it is not near or on its way; False when there is no room now.

        Args:
            urgent: backward waits for it: make room whatever it takes.
        """

    @abstractmethod
    def ready(self, record: Record) -> torch.UntypedStorage | None:
        """The storage with the record's bytes, safe to use on the current stream; None while it is on its way."""

    def make_room(self, nbytes: int) -> float:
        """Before ``nbytes`` come: keep the ``device_budget``, if there is one; the seconds that this thread waited."""
        budget = self.core.device_budget
        if budget is None or self.core.accounts.resident_bytes + nbytes <= budget:
            return 0.0
        if self.core.inert or self.capturing():  # nothing may be ordered then
            return 0.0
        since_s = now()
        self.wait_for_room(nbytes, budget)
        return now() - since_s

    @abstractmethod
    def wait_for_room(self, nbytes: int, limit_bytes: int) -> None:
        """Bring the resident bytes to at most ``limit_bytes - nbytes``, as far as what is on its way out allows."""

    @abstractmethod
    def drop_near(self, record: Record) -> None:
        """Order the reuse of a record's device memory after every copy that touches it, and forget the copies."""

    def expect_pending(self, nbytes: int | None) -> None:  # noqa: B027
        """A plan expects so many bytes on their way out at once; None: no plan says. The user's own limit stays."""

    def count_waits(self) -> None:  # noqa: B027
        """Count what streams have waited for since the last time: the host does not see that."""

    def after_fork_in_child(self) -> None:  # noqa: B027
        """The device is the parent's: it is asked nothing any more."""

    def pump(self) -> None:  # noqa: B027 - a mover may have nothing to do here
        """Make progress that only the training thread can make."""

    def flush(self) -> None:  # noqa: B027
        """Give everything that waits for a later moment its turn now."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph: nothing may move then."""
        return False

    def settle(self, record: Record) -> None:
        """No handle waits for the record: hold its device copy only as long as somebody else does, if it can return."""
        if record.state is not State.RESIDENT or record.data is None:
            return
        if record.slot is None and not record.on_disk:
            return
        self.drop_near(record)
        record.weak_data = StorageRef(record.data)
        # First: an interrupt comes when a function is entered, and what is resident has bytes.
        record.to(State.HOSTED if record.slot is not None else State.SPILLED)
        self.forget_near(record)

    def revive(self, record: Record) -> bool:
        """Take the device copy that somebody still holds, if there is one."""
        storage = record.weak_data.lock() if record.weak_data is not None else None
        record.weak_data = None
        if storage is None:
            return False
        self.hold_near(record, storage, record.data_begin)
        record.to(State.RESIDENT)
        return True

    def release(self, record: Record) -> None:
        """The last handle died: give back everything. In-flight I/O keeps what it needs until it ends."""
        if record.data is not None or record.incoming is not None:
            self.drop_near(record)
        if record.transfer is not None:
            self.cancel(record)
        extent, record.extent = record.extent, None
        if extent is not None:
            self.give_back(extent)
        record.slot = None
        self.forget_near(record)
        record.to(State.RELEASED)

    # -- shared steps -------------------------------------------------------------------------------------------------

    def hold_near(self, record: Record, storage: torch.UntypedStorage, begin: int) -> None:
        """The record's bytes are on the device in ``storage``, whose first byte is byte ``begin`` of the original."""
        record.data = storage
        record.data_begin = begin
        self.count_near(record)

    def count_near(self, record: Record) -> None:
        """The record takes device memory from now on."""
        if not record.counted:
            self.core.accounts.came(record.nbytes)  # first: an interrupt comes when it is entered
            record.counted = True

    def forget_near(self, record: Record) -> None:
        """Drop our reference to the device copy."""
        record.data = None
        if record.counted:
            self.core.accounts.left(record.nbytes)
            record.counted = False

    def forwarded(self, record: Record) -> None:
        """Backward takes the record from a copy nearer than the tier it was heading for."""
        self.core.accounts.forwarded_bytes += record.nbytes
        self.core.event(EventKind.FORWARD, record)

    def cancel(self, record: Record) -> bool:
        """Cancel the transfer under way; False when it is ending just now."""
        transfer = record.transfer
        if transfer is None:
            return False
        try:
            return self._cancel(record, transfer)
        except BaseException:  # an interrupt: nobody else counts what was taken back, and who waits would for ever
            if record.transfer is transfer:
                self._cancel(record, transfer)
            raise

    def _cancel(self, record: Record, transfer: Moving) -> bool:
        """As `cancel`; may be done again when it was interrupted."""
        if not self.take_back(record, transfer):
            return False
        if record.state is State.SPILLING:
            self.count_taken_back(record, transfer)
        record.transfer = None
        return True

    def count_taken_back(self, record: Record, transfer: Moving) -> None:
        """A record is in the write ``transfer`` no more."""
        record.transfer = None  # no call between these: an interrupt finds both done, or none
        self.core.pending_bytes -= record.nbytes
        self.core.accounts.cancelled_bytes += record.nbytes
        self.core.event(EventKind.CANCEL, record)
        self.core.changed.notify_all()

    def take_back(self, record: Record, transfer: Moving) -> bool:
        """Have nothing more done for a record by the transfer that it is in; False when that is ending just now."""
        assert isinstance(transfer, Transfer), "a mover that has others knows them"
        return transfer.cancel()

    def cancel_write(self, record: Record) -> bool:
        """Cancel a write and give its extent back; False when it is ending just now."""
        if not self.cancel(record):
            return False
        self.free_extent(record)
        return True

    def free_extent(self, record: Record) -> None:
        """Give the record's extent back (the spool waits for what is in flight on it)."""
        extent, record.extent = record.extent, None  # first: an interrupt must not have it given back twice
        record.on_disk = False
        if extent is not None:
            self.give_back(extent)

    def give_back(self, extent: object) -> None:
        """A record needs its room on disk no more."""
        assert self.spool is not None, "an extent is a spool's"
        assert isinstance(extent, Extent), "a mover that has other room knows it"
        self.spool.free(extent)

    def allocate_extent(self, record: Record, nbytes: int) -> bool:
        """Give the record room on disk; False, and degraded, when there is none."""
        if self.spool is None:
            raise StateError("a mover without a spool was asked to write to disk")
        try:
            record.extent = self.spool.allocate(nbytes)
        except StorageError as error:
            self.core.degrade("no room on disk", record, error)
            return False
        return True

    def resized(self, record: Record) -> bool:
        """Whether the owner of the storage that is being moved has freed or resized it meanwhile (``resize_(0)``).

        What was copied of it may be another's bytes then. Whoever does so fills it again before backward comes.
        """
        moving = record.state in MOVING and record.data is not None
        return moving and (record.was_resized or _elsewhere(record))

    def check_place(self, record: Record) -> None:
        """Just before a record's memory is read where it lies, on an engine thread.

        Raises:
            StateError: its owner has freed or resized it.
        """
        if record.state is State.SPILLING and _elsewhere(record):
            record.was_resized = True
            raise StateError(f"the storage of {record.nbytes} bytes was resized while it was to be written")

    def notice_resized(self) -> None:
        """Look for such storages on every occasion: one that is filled again at its old address shows nothing later."""
        turn = self._in_place  # with many under way each is seen every few saves
        if not turn:
            return
        if self._native is not None:
            self._native.notice_resized(turn, LOOK_AT, MOVING)
            return
        for _ in range(min(LOOK_AT, len(turn))):
            record = turn.popleft()
            data, state = record.data, record.state
            if data is not None and state in MOVING:
                turn.append(record)
                if data.data_ptr() != record.address:
                    record.was_resized = True

    def stay(self, record: Record) -> None:
        """End the move of a storage that was `resized`: it is what backward will be given, as without offloading."""
        if record.state is State.SPILLING:
            self.core.pending_bytes -= record.nbytes
        record.transfer = None
        record.slot = None
        self.free_extent(record)
        record.to(State.RESIDENT)
        self.core.accounts.moved_bytes -= record.nbytes
        self.core.accounts.kept_bytes[KeepReason.RESIZED.value] += record.nbytes

    def write_ended(self, record: Record, transfer: Transfer) -> bool:
        """Common end of a write, on an engine thread: whether the record is on disk now."""
        self.core.pending_bytes -= record.nbytes
        record.transfer = None
        if record.state is State.RELEASED:
            return False
        if transfer.error is not None:
            self.free_extent(record)
            self.core.degrade("write failed", record, transfer.error)
            return False
        record.on_disk = True
        return True
