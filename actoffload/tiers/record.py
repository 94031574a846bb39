"""The life of one saved storage: its states, the one table of legal transitions, and the facts that go with them."""

from __future__ import annotations

import itertools
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ..errors import StateError

if TYPE_CHECKING:
    from ..memory.host_pool import Slot
    from .copy_streams import Incoming, Outgoing
    from .storage_ref import StorageRef


class Promotable(Protocol):
    """A transfer that a record is in, alone or with others."""

    def promote(self) -> None:
        """Have it done before what was queued earlier."""


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

MOVING = (State.STAGING, State.SPILLING)
"""The bytes are being copied from where their owner holds them."""

_numbers = itertools.count(1)


class Record:
    """One version of one saved storage (or of a span of it), shared by every handle on it.

    All fields are guarded by the store's lock. It has more than fifteen, as it is what the store, the tape and one tier
    know of a storage, and each of them looks at it for each tensor.

    Attributes:
        number: of the record in this process, for traces.
        state: see `State`.
        address: where the storage lay when it was saved.
        begin: its first byte that a view needs.
        end: one past the last byte that a view needs.
        nbytes: bytes of that span.
        has_gaps: the view that was saved first does not need all bytes of the span, so that others may change them.
        device: of the storage; ``kind`` is its type.
        data: the storage that views are made of while the bytes are on the device.
        data_begin: the byte of the original storage that is the first of ``data``.
        weak_data: the device copy that somebody else may still hold, after we let go of it.
        identity: pins the storage's identity for as long as the record lives.
        handles: how many there are.
        waiting: how many of them were not unpacked in this round of backward.
        round: how often backward has begun over (``retain_graph``).
        tape: the forward that it was saved in, and ``index`` its place there.
        module: the module that saved it, if names are known.
        stays: it was decided that it never leaves.
        planned_tier: where a plan sends it: ``"host"``, ``"nvme"``, or ``""`` for the tier's own choice.
        counted: it counts among the resident bytes.
        wanted: backward is about to need it.
        on_disk: a complete copy is on disk, in ``extent``.
        was_resized: its owner was seen to have freed or resized it while it was moved.
        extent: its room on disk, which it may share.
        transfer: the write or read that it is in.
        layout: how a CPU tensor's bytes lie around its direct I/O.
        slot: its host memory.
        outgoing: the copy to the host that was begun.
        incoming: the copy to the device that was begun.
        error: why it could not be read; whoever asks next tries again.
    """

    __slots__ = (
        "address", "begin", "counted", "data", "data_begin", "device", "end", "error", "extent", "handles",
        "has_gaps", "identity", "incoming", "index", "kind", "layout", "module", "nbytes", "number", "on_disk",
        "outgoing", "planned_tier", "round", "slot", "state", "stays", "tape", "transfer", "waiting", "wanted",
        "was_resized", "weak_data",
    )  # fmt: skip

    def __init__(
        self, storage: torch.UntypedStorage | None, address: int, begin: int, end: int, device: torch.device
    ) -> None:
        self.number = next(_numbers)
        self.state = State.RESIDENT
        self.address = address
        self.begin = begin
        self.end = end
        self.nbytes = end - begin
        self.has_gaps = False
        self.device = device
        self.kind = device.type
        self.data: torch.UntypedStorage | None = storage
        self.data_begin = 0
        self.weak_data: StorageRef | None = None
        self.identity: StorageRef | None = None
        self.handles = 0
        self.waiting = 0
        self.round = 0
        self.tape: Any = None
        self.index = -1
        self.module: str | None = None
        self.stays = False
        self.planned_tier = ""
        self.counted = False
        self.wanted = False
        self.on_disk = False
        self.was_resized = False
        self.extent: Any = None
        self.transfer: Promotable | None = None
        self.layout: Any = None
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
    def on_device(self) -> bool:
        """Whether the bytes are on the device."""
        return self.data is not None

    @property
    def lies_elsewhere(self) -> bool:
        """Whether the storage lies at another address than when it was saved; freed, it lies nowhere."""
        return self.data is not None and self.data.data_ptr() != self.address

    def flat(self) -> Tensor:
        """Return the record's bytes on the device as a flat uint8 tensor."""
        assert self.data is not None, "flat() of a record that is not on the device"
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        return empty.set_(self.data, self.begin - self.data_begin, (self.nbytes,), (1,))
