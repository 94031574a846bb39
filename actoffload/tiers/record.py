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
class Record:
    """One version of one saved storage (or of a span of it), shared by every handle on it.

    All fields are guarded by the store's lock. The store, the tape and one tier keep their facts about a storage here,
    and each of them reads it for each tensor.
    """

    data: torch.UntypedStorage | None  # views are made of it while the bytes are on the device
    address: int  # where the storage lay when it was saved
    begin: int  # its first byte that a view needs
    end: int  # one past the last byte that a view needs
    device: torch.device
    shape: tuple[int, ...] = ()  # of the view that was saved first, for traces
    kind: str = field(init=False)  # the type of the device
    nbytes: int = field(init=False)  # of the span
    number: int = field(default_factory=_numbers.__next__)  # of the record in this process, for traces
    state: State = State.RESIDENT
    has_gaps: bool = False  # the first view does not need all bytes of the span, so that some may change
    data_begin: int = 0  # the byte of the original storage that is the first of `data`
    weak_data: StorageRef | None = None  # the device copy, which the program may still hold after we let go of it
    identity: StorageRef | None = None  # pins the storage's identity for as long as the record lives
    probe: Any = None  # an alias that shares the version counter of the saved tensor
    version: int = 0  # of the saved tensor
    thread: int = 0  # that saved it
    counters: tuple[Any, ...] = ()  # of the wrapper subclasses around it, see `IdentityMap`
    handles: int = 0
    waiting: int = 0  # handles that were not unpacked in this round of backward
    round: int = 0  # how often backward has begun over (`retain_graph`)
    tape: Any = None  # the forward that it was saved in
    index: int = -1  # its place on the tape
    module: str | None = None  # that saved it, if names are known
    name: str | None = None  # from the user
    stays: bool = False  # it was decided that it never leaves
    planned_tier: str = ""  # where a plan sends it: "host", "nvme", or "" for the tier's own choice
    release_after: int | None = None  # of a plan, see `PlanEntry`
    counted: bool = False  # among the resident bytes
    wanted: bool = False  # backward is about to need it
    alive: bool = False  # backward took the original although it had moved, as the program held it
    on_disk: bool = False  # a complete copy is in `extent`
    was_resized: bool = False  # its owner was seen to have freed or resized it while it was moved
    extent: Any = None  # its room on disk: an `Extent`, or the `SharedExtent` of a CPU tensor
    transfer: Transfer | None = None  # the write or read that it needs
    layout: Any = None  # how a CPU tensor's bytes lie around its direct I/O
    slot: Slot | None = None  # its host memory
    saved_on: Any = None  # a stream; its use of the device memory is reported as that is released
    outgoing: Batch | None = None  # the copies to the host that it is among, until its device memory is let go
    incoming: Batch | None = None  # the copies to the device that it is among
    filling: Tensor | None = None  # device memory that is filled as the bytes come from disk
    filled_bytes: int = 0  # its first bytes; their copies have begun
    error: BaseException | None = None  # why it could not be read; the next unpack tries again

    def __post_init__(self) -> None:
        self.nbytes = self.end - self.begin
        self.kind = self.device.type

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
            raise StateError(f"record {self.number}: {self.state.value} -> {state.value} is not a legal transition")
        self.state = state

    @property
    def on_device(self) -> bool:
        """Whether the bytes are on the device."""
        return self.data is not None

    def original(self) -> torch.UntypedStorage | None:
        """The storage that was saved, if the program still holds it, and its bytes are there.

        Plain PyTorch holds a reference, and backward reads the contents of that moment. So a copy may replace a storage
        only after it has died and nothing can fill it again.
        """
        identity = self.identity
        if identity is None or expired(identity.cdata):  # `gone`, for each tensor that backward takes
            return None
        if self.data is not None and self.data._cdata == identity.cdata:
            return None
        storage = identity.lock()
        return storage if storage is not None and storage.nbytes() >= self.end else None

    def held_elsewhere(self) -> bool:
        """Whether the program holds the original, so that moving it frees nothing. A handle is being unpacked."""
        if self.identity is None or self.identity.gone():
            return False
        ours = 1  # Python's objects for a storage count as one
        if self.outgoing is not None:
            copy = self.outgoing.copies.get(self)
            if copy is None or self.data is None or copy[1].nbytes < self.data.nbytes():
                return False  # copies of other parts may hold it, so the count proves nothing
            ours += 1  # the source of its copy
        if self.stays:
            ours += self.handles + 1  # the alias of each handle, and the alias that backward is about to get
        return self.identity.held_by() > ours

    def flat(self) -> Tensor:
        """Return the record's bytes on the device as a flat uint8 tensor."""
        assert self.data is not None, "flat() of a record that is not on the device"
        empty = _EMPTY.get(self.device)
        if empty is None:
            empty = _EMPTY[self.device] = torch.empty(0, dtype=torch.uint8, device=self.device)
        return empty.detach().set_(self.data, self.begin - self.data_begin, (self.nbytes,), (1,))
