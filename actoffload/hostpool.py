"""Host memory in exact sizes: page-locked slabs for an accelerator's copies, aligned reusable memory for reads on CPU.

PyTorch's own pinned allocator rounds up to powers of two and allocates when asked; here a slab is mapped once,
registered once and cut into extents (FIELD_NOTES 18 to 20).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from . import native_hooks
from .extents import ExtentAllocator
from .memory import map_private

ALIGNMENT = 4096
NOT_PAGE_LOCKED = (
    "host memory could not be page-locked (see `ulimit -l`); copies go through pageable memory and block the host"
)

COPYING: object = None
"""Stands in a slot's ``events`` for that of a copy which is being begun: it never happens."""

Place = Callable[[int, int], AbstractContextManager[None]]
Tell = Callable[[int, int], None]


class Slot:
    """A piece of host memory: ``nbytes`` bytes at ``address``, 4096-aligned. It goes back when nobody holds it.

    Whoever copies into or out of a slot on a stream adds the copy's event to ``events``: the memory is reused only
    after all of them have happened. Whoever reads or writes it from an I/O thread holds it meanwhile.
    """

    __slots__ = ("_returned", "address", "events", "nbytes", "offset", "slab")

    def __init__(self, address: int, nbytes: int, slab: _Slab, offset: int, returned: deque[_Returned]) -> None:
        self.address = address
        self.nbytes = nbytes
        self.slab = slab
        self.offset = offset
        self.events: list[object] = []
        self._returned = returned

    def __del__(self) -> None:
        # May run anywhere, also inside the pool's own lock: only a list operation.
        self._returned.append(_Returned(self.address, self.nbytes, self.slab, self.offset, self.events))


class _Returned(NamedTuple):
    address: int
    nbytes: int
    slab: _Slab
    offset: int
    events: list[object]


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

    def lock(self, pin: Callable[[int, int], bool], place: Place | None) -> bool:
        """Page-lock it; False where that cannot be had. An error or an interrupt does not tell how far that came."""
        _LOCKED[self.address] = self.mapping
        self.locked = True
        with place(self.address, self.nbytes) if place is not None else contextlib.nullcontext():
            self.locked = pin(self.address, self.nbytes)
        if not self.locked:
            del _LOCKED[self.address]
        return self.locked

    def unlock(self, unpin: Callable[[int], bool] | None) -> bool:
        """Undo `lock`; False when the device does not let go of the memory, which has to stay mapped then."""
        if self.locked and (unpin is None or not unpin(self.address)):
            return False
        self.locked = False
        _LOCKED.pop(self.address, None)
        return True


_LOCKED: dict[int, mmap.mmap] = {}
"""Every mapping that may be page-locked, by its address. The device goes on using the pages that it was told of: memory
that is mapped later at the same address would be copied from and to where it does not lie."""
_CLOSED: set[HostPool] = set()
"""Pools that are closed and hold page-locked memory which a copy may still use."""


class HostPool:
    """Slots of host memory, at most ``capacity_bytes`` of them at once. Thread-safe.

    Args:
        capacity_bytes: most bytes mapped.
        slab_bytes: bytes mapped at a time (a bigger slot gets a slab of its own size).
        pin: page-locks ``(address, nbytes)``; None for memory that needs no pinning.
        unpin: undoes ``pin``; False when it could not.
        place: told of ``(address, nbytes)`` before the memory is touched, to say where its pages should be; the memory
            is page-locked within the context that it returns.
        mapped: told of ``(address, nbytes)`` when memory is there to be used.
        unmapping: told the same before it goes.
        is_done: whether an event in a slot's ``events`` has happened.
        wait_for: returns when it has.
        poison: overwrite every slot with 0xFF when it becomes free.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        slab_bytes: int = 64 << 20,
        pin: Callable[[int, int], bool] | None = None,
        unpin: Callable[[int], bool] | None = None,
        place: Place | None = None,
        mapped: Tell | None = None,
        unmapping: Tell | None = None,
        is_done: Callable[[object], bool] | None = None,
        wait_for: Callable[[object], None] | None = None,
        poison: bool = False,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.peak_bytes = 0
        self.allocated_bytes = 0
        self.pin_failed = False
        self._slab_bytes = slab_bytes
        self._pin, self._unpin, self._place = pin, unpin, place
        self._is_done, self._wait_for = is_done, wait_for
        self._mapped, self._unmapping = mapped, unmapping
        self._poison = poison
        self._slabs: list[_Slab] = []
        self._limbo: deque[_Returned] = deque()
        self._finalizers: dict[int, weakref.ref[memoryview]] = {}
        self._returned: deque[_Returned] = deque()  # by finalizers, which may run anywhere and so take no lock
        self._lock = threading.Lock()

    @property
    def mapped_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for slab in tuple(self._slabs))

    def acquire(self, nbytes: int, *, force: bool = False) -> Slot | None:
        """A slot of at least ``nbytes`` bytes, or None when the capacity does not allow it now.

        Args:
            force: map memory beyond the capacity rather than return None (backward must be able to go on).
        """
        with self._lock:
            self._settle()
            slot = self._find(nbytes)
        if slot is None:
            _finish_closed()  # without a lock: it takes theirs
            with self._lock:
                slot = self._find(nbytes) or self._grow(nbytes, force)
        return slot

    def tensor(self, slot: Slot, begin: int, nbytes: int, *, owning: bool = False) -> Tensor:
        """The bytes ``[begin, begin + nbytes)`` of a slot as a flat uint8 tensor with a storage of exactly that size.

        Args:
            owning: the slot goes back to the pool when the last tensor on that storage, and on every other one that
                was made so, has died.
        """
        native = native_hooks.loaded()
        if owning and native is not None:
            return torch.frombuffer(native.Piece(slot.address + begin, nbytes, slot), dtype=torch.uint8)
        first = slot.offset + begin
        view = memoryview(slot.slab.mapping)[first : first + nbytes]
        if owning:
            key = slot.address + begin

            def give_back(_: weakref.ref[memoryview], slot: Slot | None = slot) -> None:
                self._finalizers.pop(key, None)  # drops this function and with it the slot

            self._finalizers[key] = weakref.ref(view, give_back)
        return torch.frombuffer(view, dtype=torch.uint8)

    def close(self, *, wait: bool = False) -> None:
        """Give back what is free. What is page-locked and a copy may still use goes later, as others map. Idempotent.

        Args:
            wait: until the copies into and out of what nobody holds any more are done.
        """
        with self._lock:
            _CLOSED.add(self)  # whatever comes: what is locked must not be forgotten
            self._take_returned()
            if wait and self._wait_for is not None:
                for event in [event for piece in self._limbo for event in piece.events if event is not COPYING]:
                    self._wait_for(event)
            self._settle()
            for slab in tuple(self._slabs):
                if slab.extents.allocated_bytes == 0:
                    self._unmap(slab)
            if not any(slab.locked for slab in self._slabs):
                _CLOSED.discard(self)

    def after_fork_in_child(self) -> None:
        """A new lock: the old one may have been held when the process forked. The device is the parent's."""
        self._lock = threading.Lock()
        self._pin = self._unpin = self._wait_for = None
        if self._is_done is not None:
            self._is_done = _never

    def settle(self) -> None:
        """Take back the slots that nobody holds and whose events have happened."""
        with self._lock:
            self._settle()

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
        self._slabs.append(slab)  # first of all: from here on it does not go without a word, whatever comes
        refused = self._pin is not None and not slab.lock(self._pin, self._place)
        if self._mapped is not None:
            self._mapped(slab.address, nbytes)
        if refused and not self.pin_failed:
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
            if self._unmapping is not None:
                self._unmapping(slab.address, slab.nbytes)
            self._slabs.remove(slab)  # last of all

    def _take_returned(self) -> None:
        while self._returned:
            self._limbo.append(self._returned.popleft())

    def _settle(self) -> None:
        self._take_returned()
        for _ in range(len(self._limbo)):
            if not self._all_done(self._limbo[0].events):
                self._limbo.rotate(-1)
            else:
                self._free(self._limbo.popleft())  # off the list first: whatever comes, it is not freed twice

    def _all_done(self, events: list[object]) -> bool:
        return self._is_done is None or all(event is not COPYING and self._is_done(event) for event in events)

    def _carve(self, slab: _Slab, nbytes: int) -> Slot | None:
        offset = slab.extents.allocate(nbytes)
        if offset is None:
            return None
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        slot = Slot(slab.address + offset, size, slab, offset, self._returned)
        self.allocated_bytes += slot.nbytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return slot

    def _free(self, piece: _Returned) -> None:
        if self._poison:
            ctypes.memset(piece.address, 0xFF, piece.nbytes)
        piece.slab.extents.free(piece.offset, piece.nbytes)
        self.allocated_bytes -= piece.nbytes


def _never(event: object) -> bool:
    return False


def _finish_closed() -> None:
    """What closed pools could not give back then may be free by now."""
    for pool in tuple(_CLOSED):
        with contextlib.suppress(Exception):  # its device is broken: nothing that this pool's caller did
            pool.close()


if hasattr(os, "register_at_fork"):  # a child can copy to no device of the parent's
    os.register_at_fork(after_in_child=_CLOSED.clear)
