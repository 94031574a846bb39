"""What the compiled hooks hold of a storage that a plan keeps."""

from __future__ import annotations

from typing import Any, Protocol

from ..tiers.record import Record
from ..tiers.shared import Shared
from .tape import Tape


class Counting(Protocol):
    """What a place needs of the store that it is of."""

    shared: Shared

    def passed_place(self, place: KeptPlace, again: bool) -> None:
        """Backward takes a tensor of the storage."""

    def drop(self, record: Any, round_: int) -> None:
        """The last handle died."""


class KeptPlace:
    """The place on its tape of a storage that a plan keeps, and that has no record.

    The compiled hooks hold it for as long as the storage has handles, and tell one version of a storage from another.

    Attributes:
        store: counts it.
        tape: the forward that it was saved in; ``index``: its place there.
        nbytes: the size of the storage.
        kind: the type of its device.
        module: that saved it, if that is known.
    """

    __slots__ = ("index", "kind", "module", "nbytes", "store", "tape")

    round = 0
    """As of a `Record`; here it is never passed, as the hooks know who asks again."""

    def __init__(
        self, store: Counting, tape: Tape[Record], index: int, nbytes: int, kind: str, module: str | None
    ) -> None:
        self.tape = tape
        self.index = index
        self.nbytes = nbytes
        self.kind = kind
        self.module = module
        self.store = store  # last: its death counts from here on

    def passed(self, again: bool) -> None:
        """Note that backward takes a tensor of the storage; ``again``: it has taken the same one before."""
        tape, shared = self.tape, self.store.shared
        if again or not tape.in_backward or shared.largest_moved_bytes or shared.accounts.recomputed_bytes:
            self.store.passed_place(self, again)
        else:  # nothing moves under this plan
            tape.see(self.index)

    def __del__(self) -> None:
        store = getattr(self, "store", None)
        if store is not None:
            store.drop(self, 0)
