"""The place of a storage that a plan keeps: all that the library knows of it, as it has no record."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from torch import Tensor

from ..tiers.record import Record
from ..tiers.shared import Shared
from .tape import Tape


class Keeper(Protocol):
    """The store, which makes these places and counts them."""

    shared: Shared

    def passed(self, record: KeptPlace, round_: int, /) -> int:
        """Note that backward takes a storage that stays; return the handle's next round."""


class KeptPlace:
    """The place on a tape of a storage that a plan keeps, in the version in which it was saved.

    The handles on the storage share it, and it dies with the last of them.

    Attributes:
        store: the store that counts it.
        tape: of the forward that saved it; ``index``: its place there.
        nbytes: the size of the storage.
        kind: the type of its device.
        module: the name of the module that saved it, if known.
        round: as in a `Record`.
        alias: of the tensor that was saved first, whose version counter it shares; ``version``: as it was saved.
        address: where the storage lay; ``thread``: that saved it.
    """

    __slots__ = (
        "__weakref__", "address", "alias", "index", "kind", "module", "nbytes", "round", "store", "tape", "thread",
        "version",
    )  # fmt: skip

    def __init__(
        self,
        store: Keeper,
        tape: Tape[Record],
        index: int,
        alias: Tensor,
        address: int,
        nbytes: int,
        module: str | None,
    ) -> None:
        self.store = store
        self.tape = tape
        self.index = index
        self.nbytes = nbytes
        self.kind = "cpu" if alias.is_cpu else alias.device.type
        self.module = module
        self.round = 0
        self.alias = alias
        self.version = alias._version
        self.address = address
        self.thread = threading.get_ident()

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


class PlaceRef(weakref.ref[KeptPlace]):
    """Finds a place while it lives, and outlives it with the facts that its end needs.

    Its callback appends it to the store's list of deaths. No code in Python runs as the place dies, so no interrupt can
    arrive there. The reference is cleared before, so nobody finds a place that dies.
    """

    __slots__ = ("index", "nbytes", "number", "tape")

    tape: Tape[Record]
    index: int
    nbytes: int
    number: int  # of the storage
