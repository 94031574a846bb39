"""Slots: the pieces of slabs that a pool hands out, and the free pieces that stay whole."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor

from ..locks import Mailbox
from .slab import Device, Slab, round_up


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


class Slots:
    """The slots of a pool, whose lock guards this. Free pieces stay whole: a step needs the sizes of the step before.

    Args:
        overwrite: Called with each piece that becomes free, or None.

    Attributes:
        allocated_bytes: Bytes in slots.
        peak_bytes: The most there were.
        free: The free pieces that are not returned to their slabs, by size.
    """

    def __init__(self, overwrite: Callable[[Piece], None] | None) -> None:
        self.allocated_bytes = self.peak_bytes = 0
        self.free: dict[int, list[Piece]] = {}
        self.overwrite = overwrite
        self._dropped: Mailbox[Piece] = Mailbox()  # filled by finalizers

    def hand_out(self, piece: Piece) -> Slot:
        """Return a slot in a piece that is not in use."""
        piece.slab.used = True
        self.allocated_bytes += piece.nbytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return Slot(piece, self._dropped)

    def again(self, nbytes: int) -> Slot | None:
        """Return a slot in a free piece of exactly this size, or None."""
        pieces = self.free.get(round_up(nbytes))
        return self.hand_out(pieces.pop()) if pieces else None

    def take_dropped(self) -> None:
        """Make the pieces of the slots that have died free."""
        while self._dropped:  # not `drain`, as in `Disk.work_off`
            piece = self._dropped.popleft()
            if self.overwrite is not None:
                self.overwrite(piece)
            self.allocated_bytes -= piece.nbytes
            self.free.setdefault(piece.nbytes, []).append(piece)

    def drain(self) -> Iterator[Piece]:
        """Remove and yield each free piece: the caller returns it to its slab, where other sizes find its memory."""
        self.take_dropped()
        while self.free:
            yield from self.free.popitem()[1]


def overwrite(piece: Piece, device: Device) -> None:
    """For debugging: overwrite a free piece, once no copy uses it any more."""
    for event in piece.events:
        device.wait_for(event)
    if all(map(device.is_done, piece.events)):  # one may not even have begun
        piece.events.clear()
        ctypes.memset(piece.address, 0xFF, piece.nbytes)
