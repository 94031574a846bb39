"""Host memory in exact sizes: page-locked slabs for an accelerator's copies, aligned reusable memory for reads on CPU.

PyTorch's own pinned allocator rounds up to powers of two and allocates when asked; here a slab is mapped once,
registered once and cut into extents (FIELD_NOTES 18 to 20).
"""

from __future__ import annotations

import ctypes
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from . import native_hooks
from .extents import ExtentAllocator
from .memory import map_private

ALIGNMENT = 4096

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
    """One mapping, registered with the device if it can be."""

    def __init__(self, nbytes: int, pin: Callable[[int, int], bool] | None, place: Place | None) -> None:
        self.mapping = map_private(nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))
        with place(self.address, nbytes) if place is not None else nullcontext():
            self.pinned = pin is not None and pin(self.address, nbytes)
        self.extents = ExtentAllocator(nbytes, ALIGNMENT)


class HostPool:
    """Slots of host memory, at most ``capacity_bytes`` of them at once. Thread-safe.

    Args:
        capacity_bytes: most bytes mapped.
        slab_bytes: bytes mapped at a time (a bigger slot gets a slab of its own size).
        pin: page-locks ``(address, nbytes)``; None for memory that needs no pinning.
        unpin: undoes ``pin``.
        place: told of ``(address, nbytes)`` before the memory is touched, to say where its pages should be; the memory
            is page-locked within the context that it returns.
        mapped: told of ``(address, nbytes)`` when memory is there to be used.
        unmapping: told the same before it goes.
        is_done: whether an event in a slot's ``events`` has happened.
        poison: overwrite every slot with 0xFF when it becomes free.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        slab_bytes: int = 64 << 20,
        pin: Callable[[int, int], bool] | None = None,
        unpin: Callable[[int], None] | None = None,
        place: Place | None = None,
        mapped: Tell | None = None,
        unmapping: Tell | None = None,
        is_done: Callable[[object], bool] | None = None,
        poison: bool = False,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.peak_bytes = 0
        self.allocated_bytes = 0
        self.mapped_bytes = 0
        self.pin_failed = False
        self._slab_bytes = slab_bytes
        self._pin, self._unpin, self._is_done, self._place = pin, unpin, is_done, place
        self._mapped, self._unmapping = mapped, unmapping
        self._poison = poison
        self._slabs: list[_Slab] = []
        self._limbo: deque[_Returned] = deque()
        self._finalizers: dict[int, weakref.ref[memoryview]] = {}
        self._returned: deque[_Returned] = deque()  # by finalizers, which may run anywhere and so take no lock
        self._lock = threading.Lock()

    def acquire(self, nbytes: int, *, force: bool = False) -> Slot | None:
        """A slot of at least ``nbytes`` bytes, or None when the capacity does not allow it now.

        Args:
            force: map memory beyond the capacity rather than return None (backward must be able to go on).
        """
        with self._lock:
            self._settle()
            for slab in self._slabs:
                slot = self._carve(slab, nbytes)
                if slot is not None:
                    return slot
            need = -(-nbytes // ALIGNMENT) * ALIGNMENT
            self._unmap_idle(need)
            room = self.capacity_bytes - self.mapped_bytes
            size = max(need, min(self._slab_bytes, room - room % ALIGNMENT))
            if size > room and not force:
                return None
            return self._carve(self._map(size), nbytes)

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

    def close(self) -> None:
        """Unregister what was page-locked and is free; memory that a copy may still use stays as it is. Idempotent."""
        with self._lock:
            self._settle()
            for slab in self._slabs:
                if slab.extents.allocated_bytes == 0:  # else a copy may still use it; it ends with the process
                    self._unpin_slab(slab)

    def after_fork_in_child(self) -> None:
        """A new lock: the old one may have been held when the process forked."""
        self._lock = threading.Lock()

    def settle(self) -> None:
        """Take back the slots that nobody holds and whose events have happened."""
        with self._lock:
            self._settle()

    def _map(self, nbytes: int) -> _Slab:
        slab = _Slab(nbytes, self._pin, self._place)
        self._slabs.append(slab)
        self.mapped_bytes += nbytes
        if self._mapped is not None:  # now that it is in the list: what is told of must not go without a word
            self._mapped(slab.address, nbytes)
        if self._pin is not None and not slab.pinned and not self.pin_failed:
            self.pin_failed = True
            warnings.warn(
                "actoffload: host memory could not be page-locked (see `ulimit -l`); copies go through pageable "
                "memory and block the host",
                RuntimeWarning,
                stacklevel=3,
            )
        return slab

    def _unmap_idle(self, need: int) -> None:
        """Let slabs go that are free from end to end, if only that makes room for a slab of ``need`` bytes."""
        for slab in list(self._slabs):
            if self.mapped_bytes + need <= self.capacity_bytes:
                return
            if slab.extents.allocated_bytes == 0:
                if self._unmapping is not None:
                    self._unmapping(slab.address, slab.extents.capacity_bytes)
                self._unpin_slab(slab)
                self._slabs.remove(slab)  # the mapping goes with its last view
                self.mapped_bytes -= slab.extents.capacity_bytes

    def _unpin_slab(self, slab: _Slab) -> None:
        if slab.pinned and self._unpin is not None:
            self._unpin(slab.address)
            slab.pinned = False

    def _settle(self) -> None:
        while self._returned:
            self._limbo.append(self._returned.popleft())
        for _ in range(len(self._limbo)):
            if self._is_done is not None and not all(map(self._is_done, self._limbo[0].events)):
                self._limbo.rotate(-1)
            else:
                self._free(self._limbo.popleft())  # off the list first: whatever comes, it is not freed twice

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
