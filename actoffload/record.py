"""The life of one saved storage: its states, the one table of legal transitions, and the facts that go with them."""

from __future__ import annotations

import itertools
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from .errors import StateError

if TYPE_CHECKING:
    from .hostpool import Slot
    from .identity import StorageRef
    from .schedule import Tape
    from .transfer import Incoming, Outgoing


class Moving(Protocol):
    """A transfer that a record is in, alone or with others: the mover's."""

    def promote(self) -> None:
        """Have it done before what came earlier."""


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
    State.HOSTED: frozenset({State.SPILLING, State.RELOADING, State.RESIDENT}),
    State.SPILLING: frozenset({State.SPILLED, State.HOSTED, State.RESIDENT, State.RELOADING}),
    State.SPILLED: frozenset({State.FETCHING, State.RESIDENT}),
    State.FETCHING: frozenset({State.HOSTED, State.RESIDENT, State.SPILLED}),
    State.RELOADING: frozenset({State.RESIDENT}),
    State.RELEASED: frozenset(),
}
"""The one transition table. From every state but RELEASED a record may also go to RELEASED."""

numbers = itertools.count(1)
"""Of the records of this process."""


class Record:
    """One version of one saved storage (or of a span of it), shared by every handle on it.

    All fields are guarded by the offloader's lock. ``data`` is the storage that views are made of while the bytes are
    on the device; byte ``data_begin`` of the original storage is its first byte.
    """

    __slots__ = (
        "address",
        "begin",
        "counted",
        "data",
        "data_begin",
        "device",
        "end",
        "error",
        "extent",
        "handles",
        "identity",
        "incoming",
        "index",
        "io",
        "kind",
        "module",
        "nbytes",
        "number",
        "on_disk",
        "outgoing",
        "round",
        "slot",
        "state",
        "stays",
        "tape",
        "tier",
        "transfer",
        "waiting",
        "wanted",
        "was_resized",
        "weak_data",
    )

    def __init__(
        self, storage: torch.UntypedStorage | None, address: int, begin: int, end: int, device: torch.device
    ) -> None:
        self.number = next(numbers)
        self.state = State.RESIDENT
        self.address = address
        self.begin = begin
        self.end = end
        self.nbytes = end - begin
        self.device = device
        self.kind = device.type
        self.data: torch.UntypedStorage | None = storage
        self.data_begin = 0
        self.weak_data: StorageRef | None = None
        self.identity: StorageRef | None = None
        self.handles = 0
        self.waiting = 0
        self.round = 0
        self.tape: Tape[Record] | None = None
        self.index = -1
        self.module: str | None = None
        self.stays = False  # it was decided that it never leaves
        self.tier = ""  # where a plan sends it: "host", "nvme", or "" for the mover's choice
        self.counted = False  # in the meter of resident bytes
        self.wanted = False  # backward is about to need it
        self.on_disk = False
        self.was_resized = False  # its owner was seen to have freed or resized it while it was moved
        self.extent: object | None = None  # its room on disk, which it may share; belongs to the mover
        self.transfer: Moving | None = None
        self.io: Any = None  # how the bytes lie in memory and on disk; belongs to the mover
        self.slot: Slot | None = None
        self.outgoing: Outgoing | None = None
        self.incoming: Incoming | None = None
        self.error: BaseException | None = None

    def to(self, state: State) -> None:
        """Change the state.

        Raises:
            StateError: the transition is not in the table.
        """
        if state not in TRANSITIONS[self.state] and (state is not State.RELEASED or self.state is State.RELEASED):
            raise StateError(f"record {self.number}: {self.state.value} -> {state.value} is not a legal transition")
        self.state = state

    @property
    def near(self) -> bool:
        """Whether the bytes are on the device."""
        return self.data is not None

    def flat(self) -> Tensor:
        """The record's bytes on the device as a flat uint8 tensor."""
        assert self.data is not None, "flat() of a record that is not on the device"
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        return empty.set_(self.data, self.begin - self.data_begin, (self.nbytes,), (1,))
