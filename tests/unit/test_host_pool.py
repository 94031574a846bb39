"""Host memory: exact sizes, and every slot is back in the pool exactly when no copy or tensor can use it any more."""

from __future__ import annotations

import ctypes
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from actoffload.memory.best_fit import ExtentAllocator
from actoffload.memory.host_pool import TRIM_STEPS, HostBudget, HostPool
from actoffload.memory.slab import ALIGNMENT, Device, Slab, Slabs
from actoffload.memory.slots import Slot
from tests.harness import WAIT_S, acquire_slot, no_garbage_collection, run_in_threads
from tests.spools import in_child

KIB = 1 << 10
SLAB = 256 * KIB


def _pool(slabs: int = 1, *, poison: bool = False, on_growth: Any = lambda: None, **device: Any) -> HostPool:
    return HostPool(slabs * SLAB, slab_bytes=SLAB, device=Device(**device), on_growth=on_growth, poison=poison)


def _acquire(pool: HostPool, nbytes: int, **options: Any) -> Slot:
    slot = acquire_slot(pool, nbytes, **options)
    assert isinstance(slot, Slot)
    return slot


def _in_use(pool: HostPool) -> int:
    pool.reclaim()
    return pool.slots.allocated_bytes


def test_a_slab_that_is_not_listed_is_mapped_and_not_idle() -> None:
    slabs, slab = Slabs(), Slab(4 * ALIGNMENT)
    slabs.add(slab)
    assert (slabs.with_room(1), slabs.idle) == (slab, [slab])
    slabs.unlist(slab)
    assert (slabs.with_room(1), slabs.mapped_bytes) == (None, slab.nbytes)
    assert slabs.idle == [], "a thread may be giving it back"


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 100_000, SLAB])
def test_sizes_are_exact_to_a_page(nbytes: int) -> None:
    pool = _pool()
    slot = _acquire(pool, nbytes)
    assert slot.address % ALIGNMENT == 0
    assert nbytes <= slot.nbytes < nbytes + ALIGNMENT
    assert pool.slots.allocated_bytes == slot.nbytes
    assert pool.tensor(slot, 0, nbytes).untyped_storage().nbytes() == nbytes
    del slot
    assert _in_use(pool) == 0
    assert pool.slots.peak_bytes == -(-nbytes // ALIGNMENT) * ALIGNMENT


def test_the_capacity_holds_unless_forced() -> None:
    pool = _pool()
    first = _acquire(pool, SLAB)
    assert pool.acquire(1) is None
    forced = _acquire(pool, 5000, force=True)
    assert pool.slabs.mapped_bytes == SLAB + 8192
    del first
    assert _acquire(pool, SLAB // 2).nbytes == SLAB // 2  # in the memory that came back
    del forced
    assert _in_use(pool) == 0
    small = HostPool(10_000, slab_bytes=SLAB)
    assert _acquire(small, 8000) is not None
    assert small.slabs.mapped_bytes == 8192


def test_a_slot_returns_when_the_last_tensor_that_owns_it_dies() -> None:
    pool = _pool()
    with no_garbage_collection():
        slot = _acquire(pool, 1000)
        whole = pool.tensor(slot, 24, 960, owning=True)
        view = whole.view(torch.float32)[10:20]
        storage = view.untyped_storage()
        not_owning = pool.tensor(slot, 0, 1000)
        del slot
        assert _in_use(pool) == 4096
        del whole
        assert _in_use(pool) == 4096
        del view
        assert _in_use(pool) == 4096
        del storage
        assert _in_use(pool) == 0
    assert not_owning.numel() == 1000


def test_memory_comes_with_the_events_of_the_copies_that_used_it() -> None:
    pool = _pool(is_done=lambda event: pytest.fail("nobody has to ask"))
    for step in range(2):
        halves = [_acquire(pool, SLAB // 2) for _ in range(2)]
        assert [half.events for half in halves] == ([[], []] if step == 0 else [["second", "first"]] * 2)
        for half, event in zip(halves, ("first", "second"), strict=True):
            half.events[:] = [event]
        del half, halves
        if step == 0:
            whole = _acquire(pool, SLAB)
            assert sorted(map(str, whole.events)) == ["first", "second"]
            whole.events.sort(key=str, reverse=True)
            del whole
    quarter = _acquire(pool, SLAB // 4)
    three = _acquire(pool, 3 * SLAB // 4)
    assert (quarter.events, sorted(map(str, three.events))) == (["first"], ["first", "second"])


def test_freed_slots_are_poisoned_once_no_copy_uses_them() -> None:
    bytes_seen: list[torch.Tensor] = []

    def copied(event: object) -> None:
        assert bool((bytes_seen[0] == 1).all())

    pool = _pool(wait_for=copied, poison=True)
    slot = _acquire(pool, 8192)
    bytes_seen.append(pool.tensor(slot, 0, 8192).fill_(1))
    slot.events.append("copy")
    del slot
    pool.reclaim()
    assert bool((bytes_seen[0] == 0xFF).all())
    assert bool(bytes_seen[0].view(torch.float32).isnan().all())


class _Pins:
    """The page-locked memory now, by address, and the addresses unlocked, in order; like CUDA it refuses locked memory.

    Attributes:
        fails: Raised by the next `pin`, when the memory is locked.
        holds: Whether `unpin` is refused.
    """

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.unlocked: list[int] = []
        self.fails: BaseException | None = None
        self.holds = False

    def pin(self, address: int, nbytes: int) -> bool:
        ends = {other: other + length for other, length in self.locked.items()}
        assert not any(address < end and other < address + nbytes for other, end in ends.items()), "unmapped and locked"
        self.locked[address] = nbytes
        error, self.fails = self.fails, None
        if error is not None:
            raise error
        return True

    def unpin(self, address: int) -> bool:
        if self.holds:
            return False
        if self.locked.pop(address, None) is not None:
            self.unlocked.append(address)
        return True


def _pinned(slabs: int = 1, **device: Any) -> tuple[_Pins, HostPool]:
    """A pool, and the memory that it has page-locked."""
    pins = _Pins()
    return pins, _pool(slabs, pin=pins.pin, unpin=pins.unpin, **device)


def test_each_slab_is_pinned_once_and_unpinned() -> None:
    pins, pool = _pinned(2)
    slots = [_acquire(pool, SLAB // 2) for _ in range(4)]
    assert list(pins.locked.values()) == [SLAB, SLAB]
    assert not pool.pin_failed
    memory = pool.tensor(slots[0], 0, 100)
    pool.close()
    assert len(pins.locked) == 2  # a copy may still use a slot that is held
    slots.clear()
    pool.close()
    pool.close()
    assert pins.locked == {}
    assert pool.slabs.mapped_bytes == 0
    assert bool((memory.fill_(3) == 3).all())  # a mapping lives as long as a view of it


def test_memory_that_may_be_locked_stays_mapped_after_an_error() -> None:
    """Copies of a later mapping at its address would use the old pages."""
    pins, pool = _pinned(2)
    pins.fails = MemoryError("in this test")
    assert acquire_slot(pool, SLAB) is None
    assert pool.pin_failed
    (address,) = pins.locked
    (ctypes.c_char * SLAB).from_address(address)[0] = b"x"  # would crash the process without the mapping
    assert acquire_slot(pool, SLAB) is None
    assert pins.locked == {address: SLAB}


def test_page_locking_is_done_ahead_in_another_thread_that_is_near_the_device_first() -> None:
    """Pages lie near the thread that writes them first."""
    order: list[str] = []
    me, go_on = threading.get_ident(), threading.Event()

    def pin(address: int, nbytes: int) -> bool:
        assert go_on.wait(WAIT_S)
        assert threading.get_ident() != me
        order.append("page-lock")
        return True

    near, grown = partial(order.append, "near"), partial(order.append, "grown")
    pool = _pool(slabs=3, pin=pin, unpin=lambda address: True, stay_near=near, on_growth=grown)
    assert pool.acquire(SLAB) is None
    assert pool.growing
    go_on.set()
    slots = [_acquire(pool, SLAB)]
    assert (pool.slabs.mapped_bytes, pool.growing) == (SLAB, True)
    slots += [_acquire(pool, SLAB) for _ in range(2)]
    assert not pool.growing
    assert order == ["near", "page-lock", "grown"] * 3
    assert pool.acquire(1) is None
    pool.close()


def test_memory_beyond_the_capacity_is_not_page_locked_and_goes_at_once() -> None:
    pins, pool = _pinned()
    held = _acquire(pool, SLAB)
    beyond = _acquire(pool, SLAB, force=True)
    assert pins.locked == {held.address: SLAB}
    assert pool.slabs.mapped_bytes == 2 * SLAB
    del beyond
    pool.reclaim()
    assert pool.slabs.mapped_bytes == SLAB
    pool.close()


def test_a_forked_child_has_no_page_locked_memory() -> None:
    """A device's pages would be copied for each child as soon as the parent writes to them."""
    (pins, pool), pageable = _pinned(is_done=lambda event: pytest.fail("asked")), _pool()
    slots = [_acquire(pool, SLAB), _acquire(pageable, SLAB)]
    slots[0].events.append("copy")

    def child() -> None:
        found = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        mapped = [any(int(begin, 16) <= slot.address < int(end, 16) for begin, end in found) for slot in slots]
        assert mapped == [False, True]
        pool.after_fork_in_child()
        slots.clear()
        pool.reclaim()
        assert pool.acquire(1) is None
        pool.close(wait=True)

    assert in_child(child) == 0
    pool.tensor(slots[0], 0, SLAB).fill_(1)
    slots[0].events.clear()
    slots.clear()
    pool.close()
    assert pins.locked == {}


def test_memory_that_cannot_be_unpinned_stays_and_is_used_again() -> None:
    pins, pool = _pinned(2)
    address = _acquire(pool, SLAB // 2).address
    pins.holds = True
    assert acquire_slot(pool, 2 * SLAB) is None
    assert _acquire(pool, SLAB // 2).address == address
    pool.close()
    assert pins.locked == {address: SLAB}
    del pool
    pins.holds = False
    assert _acquire(_pool(), 1) is not None  # any mapping takes memory that closed pools have left
    assert pins.locked == {}


def _steps(pool: HostPool, slots: int, count: int = 2 * TRIM_STEPS) -> None:
    """Steps that each take ``slots`` slots of half a slab, and give them back."""
    for _ in range(count):
        pool.trim()
        held = [_acquire(pool, SLAB // 2) for _ in range(slots)]
        del held
        while pool.growing:  # these steps are faster than the thread that page-locks
            pool.reclaim()
    pool._unlocker.join()
    pool.reclaim()


def test_page_locked_memory_that_no_step_uses_any_more_is_given_back() -> None:
    pins, pool = _pinned(9)
    _steps(pool, 16, 2)
    assert pool.slabs.mapped_bytes >= 8 * SLAB
    _steps(pool, 4)
    assert len(pins.locked) <= 3, "two are used, and one is ahead"
    assert pool.slabs.mapped_bytes == sum(pins.locked.values())
    unlocked = len(pins.unlocked)
    _steps(pool, 4)
    assert len(pins.unlocked) == unlocked, "memory that steps use stays"
    _steps(pool, 16, 2)
    assert pool.slabs.mapped_bytes >= 8 * SLAB, "more is mapped again"
    pool.close()
    assert pins.locked == {}


def test_memory_that_a_step_needs_now_and_then_stays() -> None:
    pins, pool = _pinned(9)
    for _ in range(8):
        _steps(pool, 4, TRIM_STEPS // 2)
        _steps(pool, 16, 1)
    assert pins.unlocked == []
    pool.close()


def test_memory_that_a_copy_may_use_is_not_given_back() -> None:
    """Rule 12: copies of a later mapping at its address would use the old pages."""
    done: set[object] = set()
    pins, pool = _pinned(4, is_done=done.__contains__)
    slot, *others = [_acquire(pool, SLAB) for _ in range(4)]
    address = slot.address
    slot.events.append("copy")
    del slot, others
    _steps(pool, 0)
    assert len(pins.locked) == 2, "this one, and one to spare"
    assert address in pins.locked
    done.add("copy")
    _steps(pool, 0)
    assert len(pins.locked) == 1
    assert pool.slabs.mapped_bytes == SLAB


def test_memory_that_trimming_could_not_unpin_is_used_again() -> None:
    pins, pool = _pinned(2)
    addresses = {slot.address for slot in [_acquire(pool, SLAB) for _ in range(2)]}
    pins.holds = True
    _steps(pool, 0)
    assert set(pins.locked) == addresses
    assert {slot.address for slot in [_acquire(pool, SLAB) for _ in range(2)]} == addresses
    pool.close()


def test_a_finalizer_may_run_while_the_pool_is_locked() -> None:
    """The garbage collector runs finalizers anywhere, also inside ``acquire`` of the same thread."""
    pool = _pool()
    tensors = [pool.tensor(_acquire(pool, SLAB), 0, SLAB, owning=True)]
    with pool._lock:
        run_in_threads(tensors.clear)  # it does not wait for the lock
    assert _in_use(pool) == 0


def test_closing_works_where_an_interrupt_left_the_lock_held() -> None:
    pins, pool = _pinned()
    assert _acquire(pool, SLAB) is not None
    assert pool._lock.acquire()
    pool.close()
    assert pins.locked == {}


def test_closing_unlocks_a_slab_that_an_interrupt_left_unlisted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(extents: ExtentAllocator) -> int:
        raise KeyboardInterrupt

    pins, pool = _pinned()
    slots = [_acquire(pool, 4096) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(ExtentAllocator, "largest_free_bytes", property(interrupted))
        slots.pop()
        with pytest.raises(KeyboardInterrupt):
            pool.reclaim()
    slots.clear()
    pool.close()
    assert pins.locked == {}


def test_tensors_that_die_in_many_threads_all_come_back() -> None:
    pool = _pool(slabs=4)
    wrong: list[int] = []

    def use(value: int) -> None:
        for _ in range(200):
            slot = pool.acquire(10_000)
            if slot is None:
                continue
            tensor = pool.tensor(slot, 0, 10_000, owning=True)
            del slot
            tensor.fill_(value)
            if not bool((tensor == value).all()):
                wrong.append(value)

    run_in_threads(*(partial(use, value) for value in range(6)))
    assert wrong == []
    assert _in_use(pool) == 0


def test_a_pool_joins_the_budget_once_other_pools_may_call_it() -> None:
    """Another thread may need memory at this very moment, and has every pool of the budget unmap what is idle."""

    class BusyBudget(HostBudget):
        def join(self, pool: HostPool) -> None:
            super().join(pool)
            self.make_room(2 * SLAB, other)

    other = _pool()
    assert _acquire(HostPool(BusyBudget(SLAB), slab_bytes=SLAB), SLAB).nbytes == SLAB
