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
    """A range of a slab that was handed out as a slot, and the events of the copies that use it."""

    address: int
    nbytes: int
    slab: _Slab
    offset: int
    events: list[object]


class Slot:
    """A piece of host memory: ``nbytes`` bytes at ``address``, 4096-aligned. It goes back when nobody holds it.

    Whoever copies into or out of a slot on a stream adds the copy's event to ``events``: the memory is reused only
    after all of them have happened. Whoever reads or writes it from an I/O thread holds it meanwhile.
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
        locked: Whether it may be page-locked: from before that is asked for until the device has let go of it.
    """

    def __init__(self, nbytes: int) -> None:
        self.mapping = map_private(nbytes)
        self.nbytes = nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))
        self.extents = ExtentAllocator(nbytes, ALIGNMENT)
        self.locked = False

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
        self._slabs: list[_Slab] = []
        self._in_copy: deque[_Piece] = deque()  # a copy may still use them
        self._dropped: deque[_Piece] = deque()  # filled by finalizers, which take no lock
        self._lock = threading.RLock()  # reentrant: an interrupt may leave it held by the thread that calls `close`

    @property
    def mapped_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for slab in tuple(self._slabs))

    def acquire(self, nbytes: int, *, force: bool = False) -> Slot | None:
        """Return a slot of at least ``nbytes`` bytes, or None when the capacity does not allow it now.

        Args:
            force: Map memory beyond the capacity rather than return None (backward must be able to go on).
        """
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
        """Take back the slots that nobody holds and whose events have happened."""
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
            self._take_dropped()
            if wait and self._wait_for is not None:
                for event in [event for piece in self._in_copy for event in piece.events]:
                    self._wait_for(event)
            self._reclaim()
            for slab in tuple(self._slabs):
                if slab.extents.allocated_bytes == 0 or not slab.locked:  # a slot keeps the mapping that it lies in
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
        for slab in self._slabs:
            slot = self._carve(slab, nbytes)
            if slot is not None:
                return slot
        return None

    def _grow(self, nbytes: int, force: bool) -> Slot | None:
        need = -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._unmap_idle(need)
        room = self.capacity_bytes - self.mapped_bytes
        size = max(need, min(self._slab_bytes, room - room % ALIGNMENT))
        return self._carve(self._map(size), nbytes) if force or size <= room else None

    def _map(self, nbytes: int) -> _Slab:
        slab = _Slab(nbytes)
        self._slabs.append(slab)  # before it is locked: after an error `close` must find it
        if self._pin is not None and not slab.lock(self._pin) and not self.pin_failed:
            self.pin_failed = True
            warnings.warn(f"actoffload: {NOT_PAGE_LOCKED}", RuntimeWarning, stacklevel=3)
        return slab

    def _unmap_idle(self, need: int) -> None:
        """Let slabs go that are free from end to end, if only that makes room for a slab of ``need`` bytes."""
        for slab in tuple(self._slabs):
            if self.mapped_bytes + need <= self.capacity_bytes:
                return
            if slab.extents.allocated_bytes == 0:
                self._unmap(slab)

    def _unmap(self, slab: _Slab) -> None:
        """Let a slab go that nobody uses, if the device does; its mapping goes with its last view."""
        if slab.unlock(self._unpin):
            self._slabs.remove(slab)

    def _take_dropped(self) -> None:
        while self._dropped:
            self._in_copy.append(self._dropped.popleft())

    def _reclaim(self) -> None:
        self._take_dropped()
        for _ in range(len(self._in_copy)):
            if not self._all_done(self._in_copy[0].events):
                self._in_copy.rotate(-1)
            else:
                self._free(self._in_copy.popleft())  # off the list first: after an error it is not freed twice

    def _all_done(self, events: list[object]) -> bool:
        return self._is_done is None or all(map(self._is_done, events))

    def _carve(self, slab: _Slab, nbytes: int) -> Slot | None:
        offset = slab.extents.allocate(nbytes)
        if offset is None:
            return None
        slot = Slot(_Piece(slab.address + offset, slab.extents.round_up(nbytes), slab, offset, []), self._dropped)
        self.allocated_bytes += slot.nbytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return slot

    def _free(self, piece: _Piece) -> None:
        if self._poison:
            ctypes.memset(piece.address, 0xFF, piece.nbytes)
        piece.slab.extents.free(piece.offset, piece.nbytes)
        self.allocated_bytes -= piece.nbytes


def _never(event: object) -> bool:
    return False


def _close_closed() -> None:
    """Close the closed pools again: what a copy used then may be free by now."""
    for pool in tuple(_CLOSED):
        with contextlib.suppress(Exception):  # its device is broken: nothing that this pool's caller did
            pool.close()


if hasattr(os, "register_at_fork"):  # a child can copy to no device of the parent's
    os.register_at_fork(after_in_child=_CLOSED.clear)
