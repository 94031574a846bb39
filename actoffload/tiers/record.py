"""The life of one saved storage: its states, the one table of legal transitions, and the facts that go with them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import StateError
from .storage_ref import StorageRef, expired

if TYPE_CHECKING:
    from ..memory.slots import Slot
    from ..planning.plan import PlanEntry
    from ..storage.transfers import Transfer
    from .copy_streams import Batch


class State(Enum):
    """Where the nearest complete copy of a storage is, and which move is under way."""

    __hash__ = object.__hash__  # members are singletons, and Enum's own hash is a Python function

    RESIDENT = "resident"  # on the device
    STAGING = "staging"  # device -> host begun; the device copy is still there
    HOSTED = "hosted"  # in host memory
    SPILLING = "spilling"  # being written to disk; the copy it is written from is still there
    SPILLED = "spilled"  # on disk
    FETCHING = "fetching"  # disk -> memory begun
    RELOADING = "reloading"  # host -> device begun
    RELEASED = "released"  # no handle refers to it any more


TRANSITIONS: dict[State, frozenset[State]] = {
    State.RESIDENT: frozenset({State.STAGING, State.SPILLING, State.HOSTED, State.SPILLED}),
    State.STAGING: frozenset({State.HOSTED, State.RESIDENT}),
    State.HOSTED: frozenset({State.SPILLING, State.SPILLED, State.RELOADING, State.RESIDENT}),
    State.SPILLING: frozenset({State.SPILLED, State.HOSTED, State.RESIDENT}),
    State.SPILLED: frozenset({State.FETCHING, State.RESIDENT}),
    State.FETCHING: frozenset({State.HOSTED, State.RESIDENT, State.SPILLED}),
    State.RELOADING: frozenset({State.RESIDENT}),
    State.RELEASED: frozenset(),
}
"""The one transition table. From every state but RELEASED a record may also go to RELEASED."""

MOVING = (State.STAGING, State.SPILLING)
"""The bytes are being copied from where their owner holds them."""

_numbers = itertools.count(1)
_EMPTY: dict[torch.device, Tensor] = {}
"""A tensor of no bytes on each device: an alias of it costs less than a new one."""


@dataclass(slots=True, eq=False, repr=False)
class Saved:
    """The storage that was saved, the span of it that views need, and the facts of its save. Locking as in `Record`."""

    identity: StorageRef  # pins the storage's identity for as long as the record lives
    address: int  # where the storage lay when it was saved
    begin: int  # its first byte that a view needs
    device: torch.device
    has_gaps: bool = False  # the view that was saved first does not need all bytes of the span, so that some may change
    module: str | None = None  # that saved it, if names are known
    name: str | None = None  # from the user
    planned: PlanEntry | None = None  # of the plan that is followed
    number: int = field(default_factory=_numbers.__next__)  # of the record in this process, for traces
    alive: bool = False  # backward took it although it had moved, as the program held it
    was_resized: bool = False  # its owner was seen to have freed or resized it while it was moved


@dataclass(slots=True, eq=False, repr=False)
class DiskCopy:
    """A record's room on disk, from its allocation on. Locking as in `Record`."""

    extent: Any  # an `Extent`, or the `SharedExtent` of a CPU tensor
    complete: bool = False  # all bytes are there
    transfer: Transfer | None = None  # the write or read that the record needs
    error: BaseException | None = None  # why it could not be read; the next unpack tries again


@dataclass(slots=True, eq=False, repr=False)
class HostCopy:
    """A device record's host memory, and the copies between it and the device. Locking as in `Record`."""

    slot: Slot | None  # the host memory; None once it is given back
    outgoing: Batch | None  # the copies to the host that it is among, until its device memory is let go
    saved_on: Any  # a stream; its use of the device memory is reported as that is released
    incoming: Batch | None = None  # the copies to the device that it is among
    filling: Tensor | None = None  # device memory that is filled as the bytes come from disk
    filled_bytes: int = 0  # its first bytes; their copies have begun

    def memory(self) -> Slot:
        """Return the host memory of a record whose bytes are there, or on their way."""
        assert self.slot is not None, "it was not given back"
        return self.slot


@dataclass(slots=True, eq=False, repr=False)
class Record:
    """One version of one saved storage (or of a span of it), shared by every handle on it.

    The store's lock guards all fields, and those of the parts. A record that never leaves has neither copy.
    """

    saved: Saved
    data: torch.UntypedStorage | None  # views are made of it while the bytes are on the device
    nbytes: int  # of the span
    kind: str  # the type of the device
    state: State = State.RESIDENT
    weak_data: StorageRef | None = None  # the device copy, which the program may still hold after we let go of it
    handles: int = 0
    waiting: int = 0  # handles that were not unpacked in this round of backward
    round: int = 0  # how often backward has begun over (`retain_graph`)
    tape: Any = None  # the forward that it was saved in
    index: int = -1  # its place on the tape
    stays: bool = False  # it was decided that it never leaves
    counted: bool = False  # among the resident bytes
    disk: DiskCopy | None = None
    host: HostCopy | None = None

    def add_handle(self) -> None:
        """Count one more handle, which was not unpacked in this round of backward."""
        self.handles += 1
        self.waiting += 1

    def to(self, state: State) -> None:
        """Change the state.

        Raises:
            StateError: the transition is not in the table.
        """
        if state not in TRANSITIONS[self.state] and (state is not State.RELEASED or self.state is State.RELEASED):
            number = self.saved.number
            raise StateError(f"record {number}: {self.state.value} -> {state.value} is not a legal transition")
        self.state = state

    @property
    def on_device(self) -> bool:
        """Whether the bytes are on the device."""
        return self.data is not None

    @property
    def on_disk(self) -> bool:
        """Whether a complete copy is on disk."""
        return self.disk is not None and self.disk.complete

    def begin_in(self, storage: torch.UntypedStorage) -> int:
        """The byte of the original with which a storage that has the bytes begins: a copy has those of the span."""
        return 0 if storage._cdata == self.saved.identity.cdata else self.saved.begin

    def original(self) -> torch.UntypedStorage | None:
        """The storage that was saved, if the program still holds it, and its bytes are there.

        Plain PyTorch holds a reference, and backward reads the contents of that moment. So a copy may replace a storage
        only after it has died and nothing can fill it again.
        """
        identity = self.saved.identity
        if expired(identity.cdata):  # `gone`, for each tensor that backward takes
            return None
        if self.data is not None and self.data._cdata == identity.cdata:
            return None
        storage = identity.lock()
        return storage if storage is not None and storage.nbytes() >= self.saved.begin + self.nbytes else None

    def held_elsewhere(self) -> bool:
        """Whether the program holds the original, so that moving it frees nothing. A handle is being unpacked."""
        if self.saved.identity.gone():
            return False
        ours = 1  # Python's objects for a storage count as one
        if self.host is not None and self.host.outgoing is not None:
            copy = self.host.outgoing.copies.get(self)
            if copy is None or self.data is None or copy[1].nbytes < self.data.nbytes():
                return False  # copies of other parts may hold it, so the count proves nothing
            ours += 1  # the source of its copy
        if self.stays:
            ours += self.handles + 1  # the alias of each handle, and the alias that backward is about to get
        return self.saved.identity.held_by() > ours

    def flat(self) -> Tensor:
        """Return the record's bytes on the device as a flat uint8 tensor."""
        assert self.data is not None, "flat() of a record that is not on the device"
        device = self.saved.device
        empty = _EMPTY.get(device)
        if empty is None:
            empty = _EMPTY[device] = torch.empty(0, dtype=torch.uint8, device=device)
        return empty.detach().set_(self.data, self.saved.begin - self.begin_in(self.data), (self.nbytes,), (1,))
