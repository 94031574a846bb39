"""Memory that is mapped at once and used in pieces: page-locked for a device if possible."""

from __future__ import annotations

import ctypes
import mmap
import os
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .best_fit import ExtentAllocator
from .process_memory import map_private

ALIGNMENT = 4096
"""Slots and slabs are multiples of this many bytes."""
_POPULATE_WRITE = 23  # of madvise, from Linux 5.14 on
_POPULATE_BYTES = 16 << 20
_POPULATE_THREADS = 4

_LOCKED: dict[int, mmap.mmap] = {}
"""Every mapping that may be page-locked, by its address, so that it stays mapped.

The device goes on using the registered pages: copies of memory that is mapped later at the same address would go to the
old pages. In a forked child the mapping is not there, and a mapping of the child at its address must not go with it.
"""


def round_up(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class OwnedMemory(ctypes.c_char * (1 << 46)):  # type: ignore[misc]
    """Memory at an address that holds its ``owner``. One size for all: ctypes would make a class for each."""

    owner: object


@dataclass(frozen=True)
class Device:
    """The device whose copies read and write host memory, by its functions; by default there is none.

    Attributes:
        pin: Page-locks ``(address, nbytes)``; None for memory that needs no pinning.
        unpin: Undoes ``pin``; returns False when it could not. None: nothing undoes it.
        is_done: Returns whether an event of a copy has happened.
        wait_for: Returns when it has.
        bind: Returns its argument, to be called in another thread with the device of the calling thread.
        stay_near: Has the calling thread run near the device from then on.
    """

    pin: Callable[[int, int], bool] | None = None
    unpin: Callable[[int], bool] | None = None
    is_done: Callable[[Any], bool] = lambda event: True
    wait_for: Callable[[Any], object] = lambda event: None
    bind: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda work: work
    stay_near: Callable[[], None] = lambda: None


OF_THE_PARENT = Device(is_done=lambda event: False)
"""The device in a forked child, where no copy is ever known to have ended."""


class Slab:
    """Host memory in one piece, and which parts of it are in use.

    Args:
        nbytes: Its size, a multiple of `ALIGNMENT`.
        page_locked: Memory of PyTorch that is page-locked and belongs to the slab from now on; None to map some.

    Attributes:
        buffer: An object at its address that keeps it alive.
        number: Tells slabs of the same room apart; `Slabs` sets it, and `room`.
        room: The largest slot that it has room for, as it is listed; -1 when it is not.
        locked: Whether it may be page-locked: from before the request until the device has let go of it.
        used: Whether a slot came from it since the last look of `HostPool.trim`.
    """

    def __init__(self, nbytes: int, page_locked: Tensor | None = None) -> None:
        self.buffer: mmap.mmap | OwnedMemory
        if page_locked is None:
            self.buffer = map_private(nbytes)
        else:
            owned = OwnedMemory.from_address(page_locked.data_ptr())
            owned.owner = page_locked
            self.buffer = owned
        self.nbytes = nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        self.extents = ExtentAllocator(nbytes, ALIGNMENT)
        self.number = 0
        self.room = -1
        self.used = True
        self.locked = page_locked is not None
        self._used: list[tuple[int, int, list[object]]] = []  # free ranges that copies use, by where they begin

    @staticmethod
    def page_locked(nbytes: int, pin: Callable[[int, int], bool], most_bytes: int) -> Slab:
        """Return page-locked memory: mapped here and registered by ``pin``, else of PyTorch, which rounds sizes up.

        If neither is possible the memory is pageable. It takes long: call it on a thread of its own.
        """
        slab = Slab(nbytes)
        slab.populate()
        if slab.lock(pin):
            return slab
        rounded = 1 << (nbytes - 1).bit_length()
        if rounded <= most_bytes:
            try:
                memory = torch.empty(rounded, dtype=torch.uint8, pin_memory=True)
            except RuntimeError:  # no such memory for this device
                return slab
            if memory.data_ptr() % ALIGNMENT == 0:
                return Slab(rounded, memory)
        return slab

    def populate(self) -> None:
        """Have the kernel give the pages now, in several threads, as page-locking does it in one."""
        madvise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
        if madvise is None:
            return

        def give(begin: int) -> None:  # where the kernel cannot do so, page-locking does
            nbytes = min(_POPULATE_BYTES, self.nbytes - begin)
            madvise(ctypes.c_void_p(self.address + begin), ctypes.c_size_t(nbytes), _POPULATE_WRITE)

        with ThreadPoolExecutor(min(_POPULATE_THREADS, os.cpu_count() or 1)) as threads:
            list(threads.map(give, range(0, self.nbytes, _POPULATE_BYTES)))

    def lock(self, pin: Callable[[int, int], bool]) -> bool:
        """Page-lock it; return False where that cannot be had. After an error it stays mapped for good.

        A forked child does not get it: pages that a device uses would be copied for each child.
        """
        assert isinstance(self.buffer, mmap.mmap), "memory of PyTorch is page-locked"
        _LOCKED[self.address] = self.buffer
        self.locked = True
        if hasattr(mmap, "MADV_DONTFORK"):
            self.buffer.madvise(mmap.MADV_DONTFORK)
        self.locked = pin(self.address, self.nbytes)
        if not self.locked:
            if hasattr(mmap, "MADV_DOFORK"):
                self.buffer.madvise(mmap.MADV_DOFORK)
            del _LOCKED[self.address]
        return self.locked

    def unlock(self, unpin: Callable[[int], bool] | None) -> bool:
        """Undo `lock`; return False when the device does not let go of the memory, which has to stay mapped then."""
        if self.locked and isinstance(self.buffer, mmap.mmap) and (unpin is None or not unpin(self.address)):
            return False
        self.locked = False
        _LOCKED.pop(self.address, None)
        return True

    @property
    def idle(self) -> bool:
        """It is listed, and free from end to end."""
        return self.room >= 0 and not self.extents.allocated_bytes

    def take(self, nbytes: int) -> tuple[int, list[object]]:
        """Return where a free piece begins, for which there is room, and the events of copies that may still use it."""
        offset = self.extents.allocate(nbytes)
        assert offset is not None, "the slab is listed by its room"
        return offset, self._take_events(offset, offset + round_up(nbytes))

    def give_back(self, offset: int, nbytes: int, events: list[object]) -> None:
        """Make a piece free; the next slot in its memory gets the events of the copies that may still use it."""
        if events:
            insort(self._used, (offset, offset + nbytes, events))
        self.extents.free(offset, nbytes)

    def events(self) -> list[object]:
        """Return the events of the copies that may still use the free part."""
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


class Slabs:
    """The slabs of a pool, listed by the room that they have. The pool's lock guards this.

    Attributes:
        mapped_bytes: Of all slabs, also of those that are not listed.
    """

    def __init__(self) -> None:
        self.mapped_bytes = 0
        self._all: list[Slab] = []
        self._made = 0
        self._by_room: list[tuple[int, int, Slab]] = []

    def __iter__(self) -> Iterator[Slab]:
        return iter(tuple(self._all))  # the caller may remove them meanwhile

    @property
    def idle(self) -> list[Slab]:
        """Those that are idle."""
        return [slab for slab in self._all if slab.idle]

    def add(self, slab: Slab) -> None:
        """Add and list a new slab."""
        self._made += 1
        slab.number = self._made
        self._all.append(slab)
        self.mapped_bytes += slab.nbytes
        self.relist(slab)

    def remove(self, slab: Slab) -> None:
        """Forget a slab, which is unmapped with the last view of it."""
        self._all.remove(slab)
        self.unlist(slab)
        self.mapped_bytes -= slab.nbytes

    def with_room(self, nbytes: int) -> Slab | None:
        """Return the listed slab with the least room for a slot of this size, or None."""
        place = bisect_left(self._by_room, (nbytes,))
        return self._by_room[place][2] if place < len(self._by_room) else None

    def relist(self, slab: Slab) -> None:
        """List a slab by the room that it has now."""
        self.unlist(slab)
        slab.room = slab.extents.largest_free_bytes
        insort(self._by_room, (slab.room, slab.number, slab))

    def unlist(self, slab: Slab) -> None:
        """Have no slot come from a slab, until it is listed again."""
        place = bisect_left(self._by_room, (slab.room, slab.number))
        if place < len(self._by_room) and self._by_room[place][2] is slab:
            del self._by_room[place]
        slab.room = -1

    def unlist_all(self) -> None:
        """Have no slot come from any slab, also where a fork has caught the list amid a change."""
        self._by_room.clear()
        for slab in self._all:
            slab.room = -1
