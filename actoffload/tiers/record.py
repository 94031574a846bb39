"""The life of one saved storage: its states, the one table of legal transitions, and the facts that go with them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import StateError

if TYPE_CHECKING:
    from ..memory.host_pool import Slot
    from ..storage.transfers import Transfer
    from .coalescing import BatchTransfer
    from .copy_streams import Batch
    from .storage_ref import StorageRef


class State(Enum):
    """Where the nearest complete copy of a storage is, and what is under way."""

    __hash__ = object.__hash__  # members are singletons, and Enum's own hash is a Python function

    RESIDENT = "resident"  # on the device
    STAGING = "staging"  # device -> host begun; the device copy is still there
    HOSTED = "hosted"  # in host memory
    SPILLING = "spilling"  # being written to disk; the copy it is written from is still there
    SPILLED = "spilled"  # on disk
    FETCHING = "fetching"  # disk -> memory begun
    RELOADING = "reloading"  # host -> device begun
    RELEASED = "released"  # nobody can ask for it any more


TRANSITIONS: dict[State, frozenset[State]] = {
    State.RESIDENT: frozenset({State.STAGING, State.SPILLING, State.HOSTED, State.SPILLED}),
    State.STAGING: frozenset({State.HOSTED, State.RESIDENT}),
    State.HOSTED: frozenset({State.SPILLING, State.SPILLED, State.RELOADING, State.RESIDENT}),
    State.SPILLING: frozenset({State.SPILLED, State.HOSTED, State.RESIDENT, State.RELOADING}),
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

    All fields are guarded by the store's lock. It has more than fifteen, as it is what the store, the tape and one tier
    know of a storage, and each of them looks at it for each tensor.
    """

    data: torch.UntypedStorage | None  # what views are made of while the bytes are on the device
    address: int  # where the storage lay when it was saved
    begin: int  # its first byte that a view needs
    end: int  # one past the last byte that a view needs
    device: torch.device
    kind: str = field(init=False)  # the type of the device
    nbytes: int = field(init=False)  # of the span
    number: int = field(default_factory=_numbers.__next__)  # of the record in this process, for traces
    state: State = State.RESIDENT
    has_gaps: bool = False  # the first view does not need all bytes of the span, so that others may change them
    data_begin: int = 0  # the byte of the original storage that is the first of `data`
    weak_data: StorageRef | None = None  # the device copy that somebody else may still hold, after we let go of it
    identity: StorageRef | None = None  # pins the storage's identity for as long as the record lives
    probe: Any = None  # an alias that shares the version counter of what was saved
    version: int = 0  # of what was saved
    thread: int = 0  # that saved it
    counters: tuple[Any, ...] = ()  # of the wrapper subclasses around it, see `IdentityMap`
    handles: int = 0
    waiting: int = 0  # handles that were not unpacked in this round of backward
    round: int = 0  # how often backward has begun over (`retain_graph`)
    tape: Any = None  # the forward that it was saved in
    index: int = -1  # its place on the tape
    module: str | None = None  # that saved it, if names are known
    name: str | None = None  # that it was given
    stays: bool = False  # it was decided that it never leaves
    planned_tier: str = ""  # where a plan sends it: "host", "nvme", or "" for the tier's own choice
    release_after: int | None = None  # as a plan says, see `PlanEntry`
    counted: bool = False  # among the resident bytes
    wanted: bool = False  # backward is about to need it
    alive: bool = False  # backward was given the original although it had moved: somebody else held that
    on_disk: bool = False  # a complete copy is in `extent`
    was_resized: bool = False  # its owner was seen to have freed or resized it while it was moved
    extent: Any = None  # its room on disk, which it may share
    transfer: Transfer | BatchTransfer | None = None  # the write or read that it is in
    layout: Any = None  # how a CPU tensor's bytes lie around its direct I/O
    slot: Slot | None = None  # its host memory
    saved_on: Any = None  # the stream whose use of its device memory is reported as that is let go
    outgoing: Batch | None = None  # the copies to the host that it is among, until its device memory is let go
    incoming: Batch | None = None  # the copies to the device that it is among
    filling: Tensor | None = None  # device memory that is filled as the bytes come from disk
    filled_bytes: int = 0  # of them, those whose copies have begun
    error: BaseException | None = None  # why it could not be read; whoever asks next tries again

    def __post_init__(self) -> None:
        self.nbytes = self.end - self.begin
        self.kind = self.device.type

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
        """The storage that was saved, if somebody else than us has it, and its bytes are there.

        Plain PyTorch holds a reference, and reads it as it is by then. So a copy stands for a storage that has died
        alone, as nobody can fill that again.
        """
        identity = self.identity
        if identity is None or identity.gone():
            return None
        if self.data is not None and self.data._cdata == identity.cdata:
            return None
        storage = identity.lock()
        return storage if storage is not None and storage.nbytes() >= self.end else None

    def held_elsewhere(self) -> bool:
        """Whether others than we hold the original, so that moving it frees nothing. A handle is being unpacked."""
        if self.identity is None or self.identity.gone() or self.outgoing is not None:
            return False  # copies out hold it in parts
        ours = 1  # Python's objects for a storage count as one
        if self.stays:
            ours += self.handles + 1  # the alias of each handle, and the one that backward is about to get
        return self.identity.held_by() > ours

    @property
    def lies_elsewhere(self) -> bool:
        """Whether the storage lies at another address than when it was saved; freed, it lies nowhere."""
        return self.data is not None and self.data.data_ptr() != self.address

    def flat(self) -> Tensor:
        """Return the record's bytes on the device as a flat uint8 tensor."""
        assert self.data is not None, "flat() of a record that is not on the device"
        empty = _EMPTY.get(self.device)
        if empty is None:
            empty = _EMPTY[self.device] = torch.empty(0, dtype=torch.uint8, device=self.device)
        return empty.detach().set_(self.data, self.begin - self.data_begin, (self.nbytes,), (1,))
