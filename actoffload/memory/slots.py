"""Slots: the pieces of slabs that a pool hands out."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..locks import Mailbox
from .slab import Slab


class Piece(NamedTuple):
    """A range of a slab that became a slot, and the events of the copies that use it or did."""

    address: int
    nbytes: int
    slab: Slab
    offset: int
    events: list[object]
    views: list[Tensor]  # the last tensor from its first byte on, which is mostly needed again


class Slot:
    """A piece of host memory: ``nbytes`` bytes at ``address``, 4096-aligned. It goes back to the pool when it dies.

    A copy may still use the memory when the slot is new: a write to it, on the host or on a stream, must wait for
    ``events`` first. A copy on a stream that has waited for them replaces them by its own event. An I/O thread that
    reads or writes the memory holds the slot meanwhile.
    """

    __slots__ = ("_dropped", "_piece", "address", "events", "nbytes", "offset", "slab", "views")

    def __init__(self, piece: Piece, dropped: Mailbox[Piece]) -> None:
        self.address, self.nbytes, self.slab, self.offset, self.events, self.views = self._piece = piece
        self._dropped = dropped

    def __del__(self) -> None:
        # It may run anywhere, also inside the pool's own lock: only an atomic operation.
        dropped = getattr(self, "_dropped", None)
        if dropped is not None:
            piece = self._piece
            del self._dropped  # no interrupt comes between this and the call, so that it is called once
            dropped.append(piece)
