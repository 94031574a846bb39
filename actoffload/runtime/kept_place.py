"""What the compiled hooks hold of a storage that a plan keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..tiers.record import Record
from .tape import Tape

if TYPE_CHECKING:
    from .store import ActivationStore


class KeptPlace:
    """The place on its tape of a storage that a plan keeps, and that has no record.

    The compiled hooks hold it for as long as the storage has handles, and tell one version of a storage from another.

    Attributes:
        store: counts it.
        tape: the forward that it was saved in; ``index``: its place there.
        nbytes: the size of the storage.
        kind: the type of its device.
        module: that saved it, if that is known.
        round: as of a `Record`.
    """

    __slots__ = ("index", "kind", "module", "nbytes", "round", "store", "tape")

    def __init__(
        self, store: ActivationStore, tape: Tape[Record], index: int, nbytes: int, kind: str, module: str | None
    ) -> None:
        self.tape = tape
        self.index = index
        self.nbytes = nbytes
        self.kind = kind
        self.module = module
        self.round = 0
        self.store = store  # last: its death counts from here on

    def passed(self, round_: int) -> int:
        """Note that backward takes a tensor of the storage; return the handle's next round.

        Args:
            round_: how often this handle was unpacked before, as this said.
        """
        tape, shared = self.tape, self.store.shared
        more = shared.largest_moved_bytes or shared.accounts.recomputed_bytes or not tape.in_backward
        if more or round_ or self.round:
            return self.store.passed(self, round_)
        tape.see(self.index)  # nothing moves under this plan
        return 1

    def __del__(self) -> None:
        store = getattr(self, "store", None)
        if store is not None:
            store.drop(self, 0)
            del self.store  # else a store that has noted this, and that nobody holds, would hold itself for ever
