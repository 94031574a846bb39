"""Host memory in exact sizes: page-locked slabs for an accelerator's copies, aligned reusable memory for reads on CPU.

PyTorch's own pinned allocator rounds up to powers of two and allocates when asked; here a slab is mapped once,
page-locked once and cut into slots.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import warnings
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .best_fit import ExtentAllocator
from .process_memory import map_private

ALIGNMENT = 4096
NOT_PAGE_LOCKED = (
    "host memory could not be page-locked (see `ulimit -l`); copies go through pageable memory and block the host"
)


class _Piece(NamedTuple):
    """A range of a slab that was handed out as a slot, and the events of the copies that use it or did."""

    address: int
    nbytes: int
    slab: _Slab
    offset: int
    events: list[object]


class Slot:
    """A piece of host memory: ``nbytes`` bytes at ``address``, 4096-aligned. It goes back when nobody holds it.

    A copy may still use the memory when it is handed out again: whoever writes to it, or has a stream do so, waits for
    ``events`` first. Whoever copies into or out of it on a stream that has waited for them puts the copy's event in
    their place. Whoever reads or writes it from an I/O thread holds it meanwhile.
    """

    __slots__ = ("_dropped", "_piece", "address", "events", "nbytes", "offset", "slab")

    def __init__(self, piece: _Piece, dropped: deque[_Piece]) -> None:
        self.address, self.nbytes, self.slab, self.offset, self.events = self._piece = piece
        self._dropped = dropped

    def __del__(self) -> None:
        # It may run anywhere, also inside the pool's own lock: only an atomic operation.
        if hasattr(self, "_dropped"):
            self._dropped.append(self._piece)


class _SlotMemory(ctypes.c_char * (1 << 46)):  # type: ignore[misc]
    """What a tensor holds that owns its slot. It says nothing of the size: ctypes makes a class for each."""

    slot: Slot


class _Slab:
    """One mapping, and what of it is in use.

    Attributes:
        number: Tells slabs of the same room apart.
        room: The largest slot that it has room for, as it is listed; -1 when it is not.
        locked: Whether it may be page-locked: from before that is asked for until the device has let go of it.
    """

    def __init__(self, nbytes: int, number: int) -> None:
        self.mapping = map_private(nbytes)
        self.nbytes = nbytes
        self.number = number
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))
        self.extents = ExtentAllocator(nbytes, ALIGNMENT)
        self.room = -1
        self.locked = False
        self._used: list[tuple[int, int, list[object]]] = []  # free ranges that copies use, by where they begin

    def carve(self, nbytes: int, dropped: deque[_Piece]) -> Slot:
        """Return a slot for which there is room, with the events of the copies that may still use its memory."""
        offset = self.extents.allocate(nbytes)
        assert offset is not None, "the slab is listed by its room"
        size = self.extents.round_up(nbytes)
        return Slot(
            _Piece(self.address + offset, size, self, offset, self._take_events(offset, offset + size)), dropped
        )

    def free(self, piece: _Piece) -> None:
        """Take a slot's memory back."""
        if piece.events:
            insort(self._used, (piece.offset, piece.offset + piece.nbytes, piece.events))
        self.extents.free(piece.offset, piece.nbytes)

    def events(self) -> list[object]:
        """Return the events of the copies that may still use what is free."""
        return [event for _, _, events in self._used for event in events]

    def _take_events(self, begin: int, end: int) -> list[object]:
        first, last = bisect_right(self._used, (begin,)), bisect_left(self._used, (end,))
        if first and self._used[first - 1][1] > begin:
            first -= 1
        found: dict[object, None] = {}
        rest = []
        for used_begin, used_end, events in self._used[first:last]:
            found.update(dict.fromkeys(events))
            if used_begin < begin:
                rest.append((used_begin, begin, events))
            if end < used_end:
                rest.append((end, used_end, events))
        self._used[first:last] = rest
        return list(found)

    def lock(self, pin: Callable[[int, int], bool]) -> bool:
        """Page-lock it; return False where that cannot be had. After an error it counts as locked."""
        _LOCKED[self.address] = self.mapping
        self.locked = True
        self.locked = pin(self.address, self.nbytes)
        if not self.locked:
            del _LOCKED[self.address]
        return self.locked

    def unlock(self, unpin: Callable[[int], bool] | None) -> bool:
        """Undo `lock`; return False when the device does not let go of the memory, which has to stay mapped then."""
        if self.locked and (unpin is None or not unpin(self.address)):
            return False
        self.locked = False
        _LOCKED.pop(self.address, None)
        return True


_LOCKED: dict[int, mmap.mmap] = {}
"""Every mapping that may be page-locked, by its address, so that it stays mapped.

The device goes on using the pages that it was told of: memory that is mapped later at the same address would be copied
from and to where it does not lie.
"""
_CLOSED: set[HostPool] = set()
"""Pools that are closed and hold page-locked memory which a copy may still use."""


class HostPool:
    """Slots of host memory, at most ``capacity_bytes`` of them at once. Thread-safe.

    Args:
        capacity_bytes: Most bytes mapped.
        slab_bytes: Bytes mapped at a time (a bigger slot gets a slab of its own size).
        pin: Page-locks ``(address, nbytes)``; None for memory that needs no pinning.
        unpin: Undoes ``pin``; returns False when it could not.
        is_done: Returns whether an event in a slot's ``events`` has happened.
        wait_for: Returns when it has.
        poison: Overwrite every slot with 0xFF when it becomes free.

    Attributes:
        allocated_bytes: Bytes in slots.
        peak_bytes: The most there were.
        mapped_bytes: Bytes of all slabs.
        pin_failed: Some memory could not be page-locked.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        slab_bytes: int = 64 << 20,
        pin: Callable[[int, int], bool] | None = None,
        unpin: Callable[[int], bool] | None = None,
        is_done: Callable[[object], bool] | None = None,
        wait_for: Callable[[object], None] | None = None,
        poison: bool = False,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.peak_bytes = 0
        self.allocated_bytes = 0
        self.pin_failed = False
        self._slab_bytes = slab_bytes
        self._pin, self._unpin = pin, unpin
        self._is_done, self._wait_for = is_done, wait_for
        self._poison = poison
        self.mapped_bytes = 0
        self._slabs: list[_Slab] = []
        self._slabs_made = 0
        self._by_room: list[tuple[int, int, _Slab]] = []
        self._idle: dict[_Slab, None] = {}  # of which nothing is handed out
        self._dropped: deque[_Piece] = deque()  # filled by finalizers, which take no lock
        self._lock = threading.RLock()  # reentrant: an interrupt may leave it held by the thread that calls `close`

    def acquire(self, nbytes: int, *, force: bool = False) -> Slot | None:
        """Return a slot of at least ``nbytes`` bytes, or None when the capacity does not allow it now.

        Args:
            force: Map memory beyond the capacity rather than return None (backward must be able to go on).
        """
        if nbytes < 1:
            raise ValueError(f"nbytes={nbytes}: must be positive")
        with self._lock:
            self._reclaim()
            slot = self._find(nbytes)
        if slot is None:
            _close_closed()  # without our lock, as it takes theirs
            with self._lock:
                slot = self._find(nbytes) or self._grow(nbytes, force)
        return slot

    def tensor(self, slot: Slot, begin: int, nbytes: int, *, owning: bool = False) -> Tensor:
        """Return ``nbytes`` bytes of a slot, from byte ``begin`` on, as a tensor of bytes.

        Args:
            owning: The tensor's storage holds the slot, which goes back to the pool when the last one that does has
                died; else the caller holds it.
        """
        if not owning:
            return torch.frombuffer(slot.slab.mapping, dtype=torch.uint8, count=nbytes, offset=slot.offset + begin)
        memory = _SlotMemory.from_address(slot.address + begin)
        memory.slot = slot
        return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)

    def reclaim(self) -> None:
        """Take back the slots that nobody holds."""
        with self._lock:
            self._reclaim()

    def close(self, *, wait: bool = False) -> None:
        """Give back what is free, and the rest with its slots. Idempotent.

        Page-locked memory that a copy may still use goes when another pool needs memory.

        Args:
            wait: First wait until the copies into and out of what nobody holds any more are done.
        """
        with self._lock:
            _CLOSED.add(self)  # first, so that page-locked memory is not forgotten after an error
            self._reclaim()
            for slab in tuple(self._slabs):
                if wait and self._wait_for is not None:
                    for event in slab.events():
                        self._wait_for(event)
                if slab in self._idle or not slab.locked:  # a slot keeps the mapping that it lies in
                    self._unmap(slab)
            if not any(slab.locked for slab in self._slabs):
                _CLOSED.discard(self)

    def after_fork_in_child(self) -> None:
        """Make a new lock, as the old one may have been held when the process forked; leave the parent's device."""
        self._lock = threading.RLock()
        self._pin = self._unpin = self._wait_for = None
        if self._is_done is not None:
            self._is_done = _never

    def _find(self, nbytes: int) -> Slot | None:
        place = bisect_left(self._by_room, (nbytes,))
        if place == len(self._by_room):
            return None
        slab = self._by_room[place][2]
        slot = slab.carve(nbytes, self._dropped)
        self._list(slab)
        self.allocated_bytes += slot.nbytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return slot

    def _list(self, slab: _Slab) -> None:
        """List a slab by the room that it has now."""
        self._unlist(slab)
        slab.room = slab.extents.largest_free_bytes
        insort(self._by_room, (slab.room, slab.number, slab))
        if slab.extents.allocated_bytes == 0:
            self._idle[slab] = None

    def _unlist(self, slab: _Slab) -> None:
        self._idle.pop(slab, None)
        place = bisect_left(self._by_room, (slab.room, slab.number))
        if place < len(self._by_room) and self._by_room[place][2] is slab:
            del self._by_room[place]

    def _grow(self, nbytes: int, force: bool) -> Slot | None:
        need = -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._unmap_idle(need)
        room = self.capacity_bytes - self.mapped_bytes
        size = max(need, min(self._slab_bytes, room - room % ALIGNMENT))
        if size > room and not force:
            return None
        self._map(size)
        return self._find(nbytes)

    def _map(self, nbytes: int) -> None:
        self._slabs_made += 1
        slab = _Slab(nbytes, self._slabs_made)
        self._slabs.append(slab)  # before it is locked: after an error `close` must find it
        self.mapped_bytes += nbytes
        self._list(slab)
        if self._pin is not None and not slab.lock(self._pin) and not self.pin_failed:
            self.pin_failed = True
            warnings.warn(f"actoffload: {NOT_PAGE_LOCKED}", RuntimeWarning, stacklevel=3)

    def _unmap_idle(self, need: int) -> None:
        """Let slabs go that are free from end to end, if that makes room for a slab of ``need`` bytes."""
        if self.mapped_bytes - sum(slab.nbytes for slab in self._idle) + need > self.capacity_bytes:
            return
        for slab in tuple(self._idle):
            if self.mapped_bytes + need <= self.capacity_bytes:
                return
            self._unmap(slab)

    def _unmap(self, slab: _Slab) -> None:
        """Let a slab go that nobody uses, if the device does; its mapping goes with its last view."""
        if slab.locked and self._is_done is not None and not all(map(self._is_done, slab.events())):
            return
        if slab.unlock(self._unpin):
            self._slabs.remove(slab)
            self._unlist(slab)
            slab.room = -1
            self.mapped_bytes -= slab.nbytes

    def _reclaim(self) -> None:
        while self._dropped:
            piece = self._dropped.popleft()
            if self._poison:
                self._overwrite(piece)
            self.allocated_bytes -= piece.nbytes
            piece.slab.free(piece)
            if piece.slab.room >= 0:
                self._list(piece.slab)

    def _overwrite(self, piece: _Piece) -> None:
        """For debugging: overwrite what is given back, once no copy uses it any more."""
        if self._wait_for is not None:
            for event in piece.events:
                self._wait_for(event)
            piece.events.clear()
        if not piece.events:
            ctypes.memset(piece.address, 0xFF, piece.nbytes)


def _never(event: object) -> bool:
    return False


def _close_closed() -> None:
    """Close the closed pools again: what a copy used then may be free by now."""
    for pool in tuple(_CLOSED):
        with contextlib.suppress(Exception):  # its device is broken: nothing that this pool's caller did
            pool.close()


if hasattr(os, "register_at_fork"):  # a child can copy to no device of the parent's
    os.register_at_fork(after_in_child=_CLOSED.clear)
