"""The object that the compiled hooks hold for a storage that a plan keeps."""

from __future__ import annotations

from typing import Protocol

from ..tiers.record import Record
from ..tiers.shared import Shared
from .tape import Tape


class Keeper(Protocol):
    """The store, which makes these places and counts them."""

    shared: Shared

    def passed(self, record: KeptPlace, round_: int, /) -> int:
        """Note that backward takes a storage that stays; return the handle's next round."""

    def drop(self, record: KeptPlace, round_: int, /) -> None:
        """Note that the last handle died."""


class KeptPlace:
    """The place on a tape of a storage that a plan keeps, and that has no record.

    The compiled hooks hold it while the storage has handles. They distinguish the versions of a storage.

    Attributes:
        store: the store that counts it.
        tape: of the forward that saved it; ``index``: its place there.
        nbytes: the size of the storage.
        kind: the type of its device.
        module: the name of the module that saved it, if known.
        round: as in a `Record`.
    """

    __slots__ = ("index", "kind", "module", "nbytes", "round", "store", "tape")

    def __init__(
        self, store: Keeper, tape: Tape[Record], index: int, nbytes: int, kind: str, module: str | None
    ) -> None:
        self.tape = tape
        self.index = index
        self.nbytes = nbytes
        self.kind = kind
        self.module = module
        self.round = 0
        self.store = store  # last: its death counts from here on

    def passed(self, round_: int) -> int:
        """Note that backward uses a tensor of the storage; return the handle's next round.

        Args:
            round_: how often this handle was unpacked before, as this method returned it.
        """
        tape, shared = self.tape, self.store.shared
        more = shared.largest_moved_bytes or shared.accounts.recomputed_bytes or not tape.in_backward
        if more or round_ or self.round:
            return self.store.passed(self, round_)
        tape.walk.seen[self.index] = None  # nothing moves under this plan, so there is nothing to fetch or to release
        return 1

    def __del__(self) -> None:
        store = getattr(self, "store", None)
        if store is not None:
            store.drop(self, 0)
            del self.store  # the store's list of deaths holds this object now: if the store is dropped, no cycle
