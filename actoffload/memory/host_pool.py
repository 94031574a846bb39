"""Host memory in exact sizes: page-locked slabs for an accelerator's copies, aligned reusable memory for reads on CPU.

PyTorch's own pinned allocator rounds up to powers of two and allocates on demand; here a slab is mapped once,
page-locked once, ahead of its use, and cut into slots.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..locks import Mailbox, renewed_in_child
from .slab import ALIGNMENT, OwnedMemory, Slab

TRIM_STEPS = 32
"""Page-locked memory that was not used for this many steps is given back. To page-lock it again takes half a second for
each GiB, so an occasional long input should still find it."""


class _Piece(NamedTuple):
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

    def __init__(self, piece: _Piece, dropped: Mailbox[_Piece]) -> None:
        self.address, self.nbytes, self.slab, self.offset, self.events, self.views = self._piece = piece
        self._dropped = dropped

    def __del__(self) -> None:
        # It may run anywhere, also inside the pool's own lock: only an atomic operation.
        dropped = getattr(self, "_dropped", None)
        if dropped is not None:
            piece = self._piece
            del self._dropped  # no interrupt comes between this and the call, so that it is called once
            dropped.append(piece)


class HostBudget:
    """Most bytes that the pools of one configuration map, all together. A pool shares its mapped memory with no other.

    Args:
        capacity_bytes: the bytes.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = renewed_in_child(threading.Lock())
        self._pools: weakref.WeakSet[HostPool] = weakref.WeakSet()

    def join(self, pool: HostPool) -> None:
        """Count a pool from now on."""
        with self._lock:
            self._pools.add(pool)

    def leave(self, pool: HostPool) -> None:
        """Count a pool no more: it is closed."""
        with self._lock:
            self._pools.discard(pool)

    def take(self, pool: HostPool, nbytes: int) -> bool:
        """Let a pool map so many more bytes; return False where there is no room for them."""
        with self._lock:
            if nbytes > self._room():
                return False
            pool.growth_bytes = nbytes  # under the lock: of two pools that ask at once, one sees the other's bytes
            return True

    def room(self) -> int:
        """Return the bytes that may still be mapped."""
        with self._lock:
            return self._room()

    def _room(self) -> int:
        return self.capacity_bytes - sum(pool.mapped_bytes + pool.growth_bytes for pool in self._pools)

    def make_room(self, nbytes: int, asker: HostPool) -> None:
        """Have other pools unmap idle memory, unless there is room. The caller holds no lock: the pools take theirs."""
        with self._lock:
            others = [pool for pool in self._pools if pool is not asker]
        if others and self.room() < nbytes:
            for pool in others:
                pool.unmap_idle()


_CLOSED: set[HostPool] = set()
"""Pools that are closed and hold page-locked memory which a copy may still use."""


class HostPool:
    """Slots of host memory, at most ``capacity_bytes`` of them at once. Thread-safe.

    Page-locking takes long, so a thread does it, one slab at a time and one slab ahead of demand. Memory that is
    mapped beyond the capacity is never page-locked, and is unmapped as soon as it is idle.

    Args:
        budget: Most bytes mapped, by it and by the pools that share the budget; or a number, for it alone.
        slab_bytes: Bytes mapped at a time (a bigger slot gets a slab of its own size).
        pin: Page-locks ``(address, nbytes)``; None for memory that needs no pinning.
        unpin: Undoes ``pin``; returns False when it could not.
        is_done: Returns whether an event in a slot's ``events`` has happened.
        wait_for: Returns when it has.
        bind: Returns its argument, to be called in another thread with the device of the calling thread.
        stay_near: Has the thread that takes memory run near the device from then on.
        on_growth: Called in that thread when there is more memory, or none to be had.
        poison: Overwrite every slot with 0xFF when it becomes free.

    Attributes:
        allocated_bytes: Bytes in slots.
        peak_bytes: The most there were.
        mapped_bytes: Bytes of all slabs; ``growth_bytes``: of the one that is on its way.
        growing: More memory is on its way: a refused request may succeed after ``on_growth``.
        pin_failed: Some memory could not be page-locked.
    """

    def __init__(
        self,
        budget: int | HostBudget,
        *,
        slab_bytes: int = 64 << 20,
        pin: Callable[[int, int], bool] | None = None,
        unpin: Callable[[int], bool] | None = None,
        is_done: Callable[[object], bool] | None = None,
        wait_for: Callable[[object], None] | None = None,
        bind: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda work: work,
        stay_near: Callable[[], None] = lambda: None,
        on_growth: Callable[[], None] = lambda: None,
        poison: bool = False,
    ) -> None:
        self._budget = HostBudget(budget) if isinstance(budget, int) else budget
        self.capacity_bytes = self._budget.capacity_bytes
        self.peak_bytes = 0
        self.allocated_bytes = 0
        self.mapped_bytes = self.growth_bytes = 0
        self.growing = False
        self.pin_failed = False
        self._slab_bytes = slab_bytes
        self._pin, self._unpin = pin, unpin
        self._is_done, self._wait_for = is_done, wait_for
        self._bind, self._stay_near, self._on_growth = bind, stay_near, on_growth
        self._poison = poison
        self._slabs: list[Slab] = []
        self._slabs_made = 0
        self._by_room: list[tuple[int, int, Slab]] = []
        self._idle: dict[Slab, None] = {}  # without slots
        self._kept: dict[int, list[_Piece]] = {}  # free, but not returned to their slabs, by size
        self._dropped: Mailbox[_Piece] = Mailbox()  # filled by finalizers
        self._grown: Mailbox[Slab | None] = Mailbox()  # filled by the thread that page-locks
        self._gone: Mailbox[Slab] = Mailbox()  # filled by the thread that gives memory back
        self._thread: threading.Thread | None = None
        self._trimmer: threading.Thread | None = None
        self._steps = 0
        self._lock = threading.RLock()  # reentrant: an interrupt may leave it held by the thread that calls `close`
        self._budget.join(self)  # last: from now on other pools, on other threads, have it unmap idle memory

    def acquire(self, nbytes: int, *, force: bool = False) -> Slot | None:
        """Return a slot of at least ``nbytes`` bytes, or None when there is none now; see ``growing``.

        Args:
            force: Map memory beyond the capacity rather than return None (backward must be able to go on).
        """
        if nbytes < 1:
            raise ValueError(f"nbytes={nbytes}: must be positive")
        with self._lock:
            slot = self._find_again(nbytes)
            if slot is None:
                self._reclaim()
                slot = self._find(nbytes)
            if slot is not None:
                if self._pin is not None and 2 * (self.mapped_bytes - self.allocated_bytes) < self._slab_bytes:
                    self._grow(1)
                return slot
        _close_closed()  # without our lock, as it takes theirs
        self._budget.make_room(max(nbytes, self._slab_bytes), self)
        with self._lock:
            if not self._grow(nbytes) and force:
                self._add(Slab(-(-nbytes // ALIGNMENT) * ALIGNMENT))
            return self._find(nbytes)

    def tensor(self, slot: Slot, begin: int, nbytes: int, *, owning: bool = False) -> Tensor:
        """Return ``nbytes`` bytes of a slot, from byte ``begin`` on, as a tensor of bytes.

        Args:
            owning: The tensor's storage holds the slot, which goes back to the pool when the last one that does has
                died; else the caller holds it.
        """
        if not owning:
            if begin == 0 and slot.views and slot.views[0].numel() == nbytes:
                return slot.views[0]
            view = torch.frombuffer(slot.slab.buffer, dtype=torch.uint8, count=nbytes, offset=slot.offset + begin)
            if begin == 0:
                slot.views[:] = [view]
            return view
        memory = OwnedMemory.from_address(slot.address + begin)
        memory.owner = slot
        return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)

    def idle_bytes(self) -> int:
        """Return how many mapped bytes have pages and are in no slot; the peak of slots bounds the pages."""
        with self._lock:
            self._take_dropped()
            return max(0, min(self.mapped_bytes, self.peak_bytes) - self.allocated_bytes)

    def reclaim(self) -> None:
        """Take back the slots that have died."""
        with self._lock:
            self._reclaim()

    def trim(self) -> None:
        """A step begins: give page-locked memory back that none of the last `TRIM_STEPS` has used, but for one slab.

        Another thread does it. Free pieces are joined first, so that steps use as few slabs as they need.
        """
        with self._lock:
            self._steps += 1
            if self._unpin is None or self._steps % TRIM_STEPS:
                return
            self._reclaim()  # which may find that nothing is growing any more
            if self.growing or (self._trimmer is not None and self._trimmer.is_alive()):
                return
            unused, spare_bytes = [], 0
            for slab in sorted(self._idle, key=lambda slab: slab.nbytes):
                if slab.locked and not slab.used and self._let_go(slab):
                    if spare_bytes < self._slab_bytes:  # else the next step would page-lock this much again, ahead
                        spare_bytes += slab.nbytes
                    else:
                        unused.append(slab)
            for slab in unused:
                self._unlist(slab)  # no slot comes from it from now on
                slab.room = -1
            for slab in self._slabs:
                slab.used = slab not in self._idle
            if unused:
                work = partial(self._unlock, unused, self._unpin)
                self._trimmer = threading.Thread(target=work, name="actoffload-page-unlock", daemon=True)
                try:
                    self._trimmer.start()
                except RuntimeError:  # the system has no more threads
                    self._gone.extend(unused)

    def unmap_idle(self) -> None:
        """Unmap the slabs without slots, for another pool; does nothing while the pool is at work."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._reclaim()
            for slab in tuple(self._idle):
                self._unmap(slab)
        finally:
            self._lock.release()

    def close(self, *, wait: bool = False) -> None:
        """Unmap free memory, and the rest with its slots. Idempotent.

        Page-locked memory that a copy may still use goes when another pool needs memory.

        Args:
            wait: First wait until the copies into and out of free memory are done.
        """
        _CLOSED.add(self)  # first, so that page-locked memory is not forgotten after an error
        for thread in (self._thread, self._trimmer):
            if thread is not None and thread.ident is not None and thread is not threading.current_thread():
                thread.join()
        with self._lock:
            self._budget.leave(self)
            self._budget = HostBudget(self.capacity_bytes)  # from now on other pools do not count ours
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
        """Make a new lock, as the old one may have been held when the process forked; leave the parent's device.

        The child has no page-locked memory: a slot there is never read or written.
        """
        self._lock = threading.RLock()
        self._thread, self._trimmer, self.growing = None, None, False
        self._kept.clear()
        if self._pin is not None:
            self._by_room.clear()
            for slab in self._slabs:
                slab.room = -1
            self.capacity_bytes = 0
            self._poison = False
        self._pin = self._unpin = self._wait_for = None
        if self._is_done is not None:
            self._is_done = _never

    def _find_again(self, nbytes: int) -> Slot | None:
        """Return a free piece of exactly this size: a step needs the sizes of the step before."""
        self._take_dropped()
        kept = self._kept.get(-(-nbytes // ALIGNMENT) * ALIGNMENT)
        return self._hand_out(kept.pop()) if kept and self.mapped_bytes <= self.capacity_bytes else None

    def _find(self, nbytes: int) -> Slot | None:
        place = bisect_left(self._by_room, (nbytes,))
        if place == len(self._by_room):
            return None
        slab = self._by_room[place][2]
        offset, events = slab.take(nbytes)
        self._list(slab)
        return self._hand_out(_Piece(slab.address + offset, slab.extents.round_up(nbytes), slab, offset, events, []))

    def _hand_out(self, piece: _Piece) -> Slot:
        piece.slab.used = True
        self.allocated_bytes += piece.nbytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return Slot(piece, self._dropped)

    def _list(self, slab: Slab) -> None:
        """List a slab by the room that it has now."""
        self._unlist(slab)
        slab.room = slab.extents.largest_free_bytes
        insort(self._by_room, (slab.room, slab.number, slab))
        if slab.extents.allocated_bytes == 0:
            self._idle[slab] = None

    def _unlist(self, slab: Slab) -> None:
        self._idle.pop(slab, None)
        place = bisect_left(self._by_room, (slab.room, slab.number))
        if place < len(self._by_room) and self._by_room[place][2] is slab:
            del self._by_room[place]

    def _grow(self, nbytes: int) -> bool:
        """Map a slab with room for ``nbytes``, or begin to; return False when the capacity does not allow it."""
        if self.growing:
            return True
        need = -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._unmap_idle(need)
        room = min(self.capacity_bytes - self.mapped_bytes, self._budget.room()) // ALIGNMENT * ALIGNMENT
        size = max(need, min(self._slab_bytes, room))
        if size > room or not self._budget.take(self, size):
            return False
        if self._pin is None:
            self._add(Slab(size))
        else:
            if self._unpin is not None and not self.mapped_bytes:
                self._unpin = self._bind(self._unpin)  # whichever thread closes the pool
            work = self._bind(partial(self._page_lock, size, self._pin, room))
            self._thread = threading.Thread(target=work, name="actoffload-page-lock", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the system has no more threads
                self.pin_failed = True
                self.growth_bytes = 0
                return False
            self.growing = True
        return True

    def _page_lock(self, nbytes: int, pin: Callable[[int, int], bool], most_bytes: int) -> None:
        slab: Slab | None = None
        with contextlib.suppress(Exception):  # of a device that is broken, or of a system that has no more memory
            self._stay_near()
            slab = Slab.page_locked(nbytes, pin, most_bytes)
        self.pin_failed = self.pin_failed or slab is None or not slab.locked
        self._grown.append(slab)
        self._on_growth()

    def _add(self, slab: Slab) -> None:
        self._slabs_made += 1
        slab.number = self._slabs_made
        self._slabs.append(slab)
        self.mapped_bytes += slab.nbytes
        self.growth_bytes = 0
        self._list(slab)

    def _unmap_idle(self, need: int) -> None:
        """Let slabs go that are free from end to end, if that makes room for a slab of ``need`` bytes."""
        if self.mapped_bytes - sum(slab.nbytes for slab in self._idle) + need > self.capacity_bytes:
            return
        for slab in tuple(self._idle):
            if self.mapped_bytes + need <= self.capacity_bytes:
                return
            self._unmap(slab)

    def _unmap(self, slab: Slab) -> None:
        """Forget an idle slab, if the device does not use it any more; its mapping goes with its last view."""
        if self._let_go(slab) and slab.unlock(self._unpin):
            self._forget(slab)

    def _let_go(self, slab: Slab) -> bool:
        """Whether no copy uses the free part of a slab."""
        return not slab.locked or self._is_done is None or all(map(self._is_done, slab.events()))

    def _forget(self, slab: Slab) -> None:
        self._slabs.remove(slab)
        self._unlist(slab)
        slab.room = -1
        self.mapped_bytes -= slab.nbytes

    def _unlock(self, slabs: list[Slab], unpin: Callable[[int], bool]) -> None:
        """Undo the page-locking of slabs that are not listed, in a thread of its own, as each takes milliseconds."""
        for slab in slabs:
            with contextlib.suppress(Exception):  # of a device that is broken: the slab stays as it is
                slab.unlock(unpin)
            self._gone.append(slab)

    def _reclaim(self) -> None:
        for slab in self._gone.drain():
            if slab.locked:  # the device has not let go of it
                self._list(slab)
            else:
                self._forget(slab)
        for grown in self._grown.drain():
            self.growing = False
            if grown is None:
                self.capacity_bytes = self.mapped_bytes  # the system has no more
                self.growth_bytes = 0
            else:
                self._add(grown)
        self._take_dropped()
        while self._kept:
            for piece in self._kept.popitem()[1]:
                slab = piece.slab
                slab.give_back(piece.offset, piece.nbytes, piece.events)
                if slab.room >= 0:
                    self._list(slab)
                    if slab in self._idle and self.mapped_bytes > self.capacity_bytes:
                        self._unmap(slab)

    def _take_dropped(self) -> None:
        while self._dropped:  # not `drain`, as in `Disk.work_off`
            piece = self._dropped.popleft()
            if self._poison:
                self._overwrite(piece)
            self.allocated_bytes -= piece.nbytes
            self._kept.setdefault(piece.nbytes, []).append(piece)

    def _overwrite(self, piece: _Piece) -> None:
        """For debugging: overwrite a free piece, once no copy uses it any more."""
        if self._wait_for is not None:
            for event in piece.events:
                self._wait_for(event)
        if self._is_done is None or all(map(self._is_done, piece.events)):  # one may not even have begun
            piece.events.clear()
            ctypes.memset(piece.address, 0xFF, piece.nbytes)


def _never(event: object) -> bool:
    return False


def _close_closed() -> None:
    """Close the closed pools again: a copy that used their memory then may have ended."""
    for pool in tuple(_CLOSED):
        with contextlib.suppress(Exception):  # its device is broken: nothing that this pool's caller did
            pool.close()


if hasattr(os, "register_at_fork"):  # a child can copy to no device of the parent's
    os.register_at_fork(after_in_child=_CLOSED.clear)
