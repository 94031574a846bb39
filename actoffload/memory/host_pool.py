"""Host memory in exact sizes: page-locked slabs for an accelerator's copies, aligned reusable memory for reads on CPU.

PyTorch's own pinned allocator rounds up to powers of two and allocates on demand; here a slab is mapped once,
page-locked once, ahead of its use, and cut into slots.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ..locks import Mailbox, renewed_in_child
from .slab import ALIGNMENT, OF_THE_PARENT, Device, OwnedMemory, Slab, Slabs, round_up
from .slots import Piece, Slot, Slots, overwrite

T = TypeVar("T")

TRIM_STEPS = 32
"""Page-locked memory that was not used for this many steps is given back. To page-lock it again takes half a second for
each GiB, so an occasional long input should still find it."""


class HostBudget:
    """Most bytes that the pools of one configuration map, all together. Pools do not share mapped memory."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = renewed_in_child(threading.RLock())
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
            if nbytes > self.room():
                return False
            pool.growth_bytes = nbytes  # under the lock: of two pools that ask at once, one sees the other's bytes
            return True

    def room(self) -> int:
        """Return the bytes that may still be mapped."""
        with self._lock:
            return self.capacity_bytes - sum(pool.slabs.mapped_bytes + pool.growth_bytes for pool in self._pools)

    def make_room(self, nbytes: int, asker: HostPool) -> None:
        """Have other pools unmap idle memory, unless there is room. The caller holds no lock: the pools take theirs."""
        with self._lock:
            others = [pool for pool in self._pools if pool is not asker]
        if others and self.room() < nbytes:
            for pool in others:
                pool.unmap_idle()


class SlabThread(Generic[T]):
    """Work on slabs in a thread of its own, as each slab takes milliseconds or more.

    Attributes:
        done: The thread appends the slabs that are ready, and the holder of the pool's lock takes them.
    """

    def __init__(self, name: str) -> None:
        self.done: Mailbox[T] = Mailbox()
        self.thread: threading.Thread | None = None
        self._name = name

    def start(self, work: Callable[[], object]) -> bool:
        """Begin; return False where the system has no more threads."""
        self.thread = threading.Thread(target=work, name=self._name, daemon=True)
        try:
            self.thread.start()
        except RuntimeError:
            return False
        return True

    def join(self) -> None:
        """Wait for the end of the work, except in its own thread."""
        thread = self.thread
        if thread is not None and thread.ident not in (None, threading.get_ident()):
            thread.join()


_CLOSED: set[HostPool] = set()
"""Pools that are closed and hold page-locked memory which a copy may still use."""


class HostPool:
    """Slots of host memory, at most ``capacity_bytes`` of them at once. Thread-safe.

    Page-locking takes long, so a thread does it, one slab at a time and one slab ahead of demand. Memory that is
    mapped beyond the capacity is never page-locked, and is unmapped as soon as it is idle.

    Args:
        budget: Most bytes mapped, by it and by the pools that share the budget; or a number, for it alone.
        slab_bytes: Bytes mapped at a time (a bigger slot gets a slab of its own size).
        device: Page-locks the memory and makes copies of it.
        on_growth: Called in the thread that page-locks when there is more memory, or none to be had.
        poison: Overwrite every slot with 0xFF when it becomes free.

    Attributes:
        slots: Counts the bytes in slots; ``slabs``: those that are mapped; ``growth_bytes``: of the slab on its way.
        growing: More memory is on its way: a refused request may succeed after ``on_growth``.
        pin_failed: Some memory could not be page-locked.
    """

    def __init__(
        self,
        budget: int | HostBudget,
        *,
        slab_bytes: int = 64 << 20,
        device: Device = Device(),  # noqa: B008 - it is frozen
        on_growth: Callable[[], None] = lambda: None,
        poison: bool = False,
    ) -> None:
        self._budget = HostBudget(budget) if isinstance(budget, int) else budget
        self.capacity_bytes = self._budget.capacity_bytes
        self.growth_bytes = 0
        self.growing = False
        self.pin_failed = False
        self._slab_bytes = slab_bytes
        self._device = device
        self._on_growth = on_growth
        self.slabs = Slabs()
        self.slots = Slots(partial(overwrite, device=device) if poison else None)
        self._locker: SlabThread[Slab | None] = SlabThread("actoffload-page-lock")
        self._unlocker: SlabThread[Slab] = SlabThread("actoffload-page-unlock")
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
            self.slots.take_dropped()
            slot = self.slots.again(nbytes) if self.slabs.mapped_bytes <= self.capacity_bytes else None
            if slot is None:
                self._reclaim()
                slot = self._find(nbytes)
            if slot is not None:
                unused_bytes = self.slabs.mapped_bytes - self.slots.allocated_bytes
                if self._device.pin is not None and 2 * unused_bytes < self._slab_bytes:
                    self._grow(1)
                return slot
        _close_closed()  # without our lock, as it takes theirs
        self._budget.make_room(max(nbytes, self._slab_bytes), self)
        with self._lock:
            if not self._grow(nbytes) and force:
                self._add(Slab(round_up(nbytes)))
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
            self.slots.take_dropped()
            return max(0, min(self.slabs.mapped_bytes, self.slots.peak_bytes) - self.slots.allocated_bytes)

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
            if self._device.unpin is None or self._steps % TRIM_STEPS:
                return
            self._reclaim()  # which may find that nothing is growing any more
            if self.growing or (self._unlocker.thread is not None and self._unlocker.thread.is_alive()):
                return
            unused, spare_bytes = [], 0
            for slab in sorted(self.slabs.idle, key=lambda slab: slab.nbytes):
                if slab.locked and not slab.used and self._let_go(slab):
                    if spare_bytes < self._slab_bytes:  # else the next step would page-lock this much again, ahead
                        spare_bytes += slab.nbytes
                    else:
                        unused.append(slab)
            for slab in unused:
                self.slabs.unlist(slab)
            for slab in self.slabs:
                slab.used = not slab.idle
            if unused and not self._unlocker.start(partial(self._unlock, unused, self._device.unpin)):
                self._unlocker.done.extend(unused)

    def unmap_idle(self) -> None:
        """Unmap the slabs without slots, for another pool; does nothing while the pool is at work."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._reclaim()
            for slab in self.slabs.idle:
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
        self._locker.join()
        self._unlocker.join()
        with self._lock:
            self._budget.leave(self)
            self._budget = HostBudget(self.capacity_bytes)  # from now on other pools do not count ours
            self._reclaim()
            for slab in self.slabs:
                if wait:
                    for event in slab.events():
                        self._device.wait_for(event)
                # Not `idle`: an interrupt may have left it unlisted. A slot keeps the mapping that it lies in.
                if not slab.extents.allocated_bytes or not slab.locked:
                    self._unmap(slab)
            if not any(slab.locked for slab in self.slabs):
                _CLOSED.discard(self)

    def after_fork_in_child(self) -> None:
        """Make a new lock, as the old one may have been held when the process forked; leave the parent's device.

        The child has no page-locked memory: a slot there is never read or written.
        """
        self._lock = threading.RLock()
        self._locker.thread, self._unlocker.thread, self.growing = None, None, False
        self.slots.free.clear()
        if self._device.pin is not None:
            self.slabs.unlist_all()
            self.capacity_bytes = 0
            self.slots.overwrite = None
        self._device = OF_THE_PARENT

    def _find(self, nbytes: int) -> Slot | None:
        slab = self.slabs.with_room(nbytes)
        if slab is None:
            return None
        offset, events = slab.take(nbytes)
        self.slabs.relist(slab)
        piece = Piece(slab.address + offset, round_up(nbytes), slab, offset, events, [])
        return self.slots.hand_out(piece)

    def _grow(self, nbytes: int) -> bool:
        """Map a slab with room for ``nbytes``, or begin to; return False when the capacity does not allow it."""
        if self.growing:
            return True
        need = round_up(nbytes)
        self._unmap_idle(need)
        room = min(self.capacity_bytes - self.slabs.mapped_bytes, self._budget.room()) // ALIGNMENT * ALIGNMENT
        size = max(need, min(self._slab_bytes, room))
        if size > room or not self._budget.take(self, size):
            return False
        device = self._device
        if device.pin is None:
            self._add(Slab(size))
            return True
        if device.unpin is not None and not self.slabs.mapped_bytes:
            self._device = replace(device, unpin=device.bind(device.unpin))  # whichever thread closes the pool
        if self._locker.start(device.bind(partial(self._page_lock, size, device.pin, room))):
            self.growing = True
        else:
            self.pin_failed = True
            self.growth_bytes = 0
        return self.growing

    def _page_lock(self, nbytes: int, pin: Callable[[int, int], bool], most_bytes: int) -> None:
        slab: Slab | None = None
        with contextlib.suppress(Exception):  # of a device that is broken, or of a system that has no more memory
            self._device.stay_near()
            slab = Slab.page_locked(nbytes, pin, most_bytes)
        self.pin_failed = self.pin_failed or slab is None or not slab.locked
        self._locker.done.append(slab)
        self._on_growth()

    def _add(self, slab: Slab) -> None:
        self.slabs.add(slab)
        self.growth_bytes = 0

    def _unmap_idle(self, need: int) -> None:
        """Let slabs go that are free from end to end, if that makes room for a slab of ``need`` bytes."""
        if self.slabs.mapped_bytes - sum(slab.nbytes for slab in self.slabs.idle) + need > self.capacity_bytes:
            return
        for slab in self.slabs.idle:
            if self.slabs.mapped_bytes + need <= self.capacity_bytes:
                return
            self._unmap(slab)

    def _unmap(self, slab: Slab) -> None:
        """Forget an idle slab, if the device does not use it any more; its mapping goes with its last view."""
        if self._let_go(slab) and slab.unlock(self._device.unpin):
            self.slabs.remove(slab)

    def _let_go(self, slab: Slab) -> bool:
        """Whether no copy uses the free part of a slab."""
        return not slab.locked or all(map(self._device.is_done, slab.events()))

    def _unlock(self, slabs: list[Slab], unpin: Callable[[int], bool]) -> None:
        """Undo the page-locking of slabs that are not listed, each of which takes milliseconds."""
        for slab in slabs:
            with contextlib.suppress(Exception):  # of a device that is broken: the slab stays as it is
                slab.unlock(unpin)
            self._unlocker.done.append(slab)

    def _reclaim(self) -> None:
        for slab in self._unlocker.done.drain():
            if slab.locked:  # the device has not let go of it
                self.slabs.relist(slab)
            else:
                self.slabs.remove(slab)
        for grown in self._locker.done.drain():
            self.growing = False
            if grown is None:
                self.capacity_bytes = self.slabs.mapped_bytes  # the system has no more
                self.growth_bytes = 0
            else:
                self._add(grown)
        for piece in self.slots.drain():
            slab = piece.slab
            slab.give_back(piece.offset, piece.nbytes, piece.events)
            if slab.room >= 0:
                self.slabs.relist(slab)
                if slab.idle and self.slabs.mapped_bytes > self.capacity_bytes:
                    self._unmap(slab)


def _close_closed() -> None:
    """Close the closed pools again: a copy that used their memory then may have ended."""
    for pool in tuple(_CLOSED):
        with contextlib.suppress(Exception):  # its device is broken: nothing that this pool's caller did
            pool.close()


if hasattr(os, "register_at_fork"):  # a child can copy to no device of the parent's
    os.register_at_fork(after_in_child=_CLOSED.clear)
