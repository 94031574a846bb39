"""Host memory: exact sizes, and every slot back in the pool exactly when nobody can touch it any more."""

from __future__ import annotations

import ctypes
import itertools
import threading
from typing import Any

import pytest
import torch

from actoffload import hostpool
from actoffload.hostpool import ALIGNMENT, HostPool, Slot
from tests.harness import WAIT_S, no_garbage_collection

KIB = 1 << 10
SLAB = 256 * KIB


def _pool(slabs: int = 1, **options: Any) -> HostPool:
    return HostPool(slabs * SLAB, slab_bytes=SLAB, **options)


def _acquire(pool: HostPool, nbytes: int, **options: Any) -> Slot:
    slot = pool.acquire(nbytes, **options)
    assert slot is not None
    return slot


def _in_use(pool: HostPool) -> int:
    pool.settle()
    return pool.allocated_bytes


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 100_000, SLAB])
def test_sizes_are_exact_to_a_page(nbytes: int) -> None:
    pool = _pool()
    slot = _acquire(pool, nbytes)
    assert slot.address % ALIGNMENT == 0
    assert nbytes <= slot.nbytes < nbytes + ALIGNMENT
    assert pool.allocated_bytes == slot.nbytes
    assert pool.tensor(slot, 0, nbytes).untyped_storage().nbytes() == nbytes
    del slot
    assert _in_use(pool) == 0
    assert pool.peak_bytes == -(-nbytes // ALIGNMENT) * ALIGNMENT


def test_slots_do_not_overlap() -> None:
    pool = _pool()
    slots = [_acquire(pool, 10_000) for _ in range(20)]
    ranges = sorted((slot.address, slot.address + slot.nbytes) for slot in slots)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    for value, slot in enumerate(slots):
        pool.tensor(slot, 0, 10_000).fill_(value)
    for value, slot in enumerate(slots):
        assert bool((pool.tensor(slot, 0, 10_000) == value).all())


def test_the_capacity_holds_unless_forced() -> None:
    pool = _pool()
    first = _acquire(pool, SLAB)
    assert pool.acquire(1) is None
    forced = _acquire(pool, 5000, force=True)
    assert pool.mapped_bytes == SLAB + 8192
    del first
    assert _acquire(pool, SLAB // 2).nbytes == SLAB // 2  # in what came back
    del forced
    assert _in_use(pool) == 0


def test_a_request_beyond_the_slab_gets_one_of_its_size_within_the_capacity() -> None:
    pool = _pool(slabs=3)
    slot = _acquire(pool, 2 * SLAB)
    assert pool.mapped_bytes == 2 * SLAB
    assert pool.acquire(2 * SLAB) is None
    del slot
    assert _acquire(pool, 2 * SLAB) is not None


def test_a_small_capacity_maps_no_more_than_that() -> None:
    pool = HostPool(10_000, slab_bytes=SLAB)
    assert _acquire(pool, 8000) is not None
    assert pool.mapped_bytes == 8192
    assert HostPool(0, slab_bytes=SLAB).acquire(1) is None


def test_a_slot_returns_when_the_last_tensor_on_it_dies() -> None:
    pool = _pool()
    with no_garbage_collection():
        slot = _acquire(pool, 1000)
        whole = pool.tensor(slot, 24, 960, owning=True)
        view = whole.view(torch.float32)[10:20]
        storage = view.untyped_storage()
        del slot
        assert _in_use(pool) == 4096
        del whole
        assert _in_use(pool) == 4096
        del view
        assert _in_use(pool) == 4096
        del storage
        assert _in_use(pool) == 0


def test_a_tensor_that_does_not_own_its_slot_does_not_hold_it() -> None:
    pool = _pool()
    slot = _acquire(pool, 1000)
    tensor = pool.tensor(slot, 0, 1000)
    del slot
    assert _in_use(pool) == 0
    assert tensor.numel() == 1000


def test_memory_is_used_again_but_never_while_a_tensor_lives() -> None:
    pool = _pool()
    kept = pool.tensor(_acquire(pool, SLAB // 2), 0, SLAB // 2, owning=True).fill_(7)
    seen = set()
    for value in range(20):
        other = pool.tensor(_acquire(pool, SLAB // 2), 0, SLAB // 2, owning=True)
        seen.add(other.data_ptr())
        other.fill_(value)
        assert pool.acquire(SLAB // 2) is None
        del other
    assert len(seen) == 1
    assert bool((kept == 7).all())


def test_limbo_until_every_event_is_done() -> None:
    done: set[object] = set()
    pool = _pool(is_done=done.__contains__)
    slot = _acquire(pool, SLAB)
    slot.events += ["copy out", "copy in"]
    del slot
    assert pool.acquire(SLAB) is None
    done.add("copy in")
    assert pool.acquire(SLAB) is None
    assert _in_use(pool) == SLAB
    done.add("copy out")
    assert _acquire(pool, SLAB) is not None


def test_one_slot_in_limbo_does_not_hold_up_another() -> None:
    pool = _pool(is_done=lambda event: event == "done")
    late, early = _acquire(pool, SLAB // 2), _acquire(pool, SLAB // 2)
    late.events.append("pending")
    early.events.append("done")
    del late, early
    assert _in_use(pool) == SLAB // 2


def test_freed_slots_are_poisoned_and_only_then() -> None:
    done: set[object] = set()
    pool = _pool(is_done=done.__contains__, poison=True)
    slot = _acquire(pool, 8192)
    bytes_seen = pool.tensor(slot, 0, 8192).fill_(1)
    slot.events.append("copy")
    del slot
    pool.settle()
    assert bool((bytes_seen == 1).all())
    done.add("copy")
    pool.settle()
    assert bool((bytes_seen == 0xFF).all())
    assert bool(bytes_seen.view(torch.float32).isnan().all())


class _Pins:
    """What is page-locked now, by address, and what was unlocked, in order; as CUDA it refuses what is locked already.

    Attributes:
        fails: raised by the next `pin`, when the memory is locked.
        holds: whether `unpin` is refused.
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


def test_pinning_is_asked_for_once_per_slab_and_undone() -> None:
    pins = _Pins()
    pool = _pool(slabs=2, pin=pins.pin, unpin=pins.unpin)
    slots = [_acquire(pool, SLAB // 2) for _ in range(4)]
    assert list(pins.locked.values()) == [SLAB, SLAB]
    assert not pool.pin_failed
    memory = pool.tensor(slots[0], 0, 100)
    pool.close()
    assert len(pins.locked) == 2  # a copy may still use what is held
    slots.clear()
    pool.close()
    pool.close()
    assert pins.locked == {}
    assert pool.mapped_bytes == 0
    assert bool((memory.fill_(3) == 3).all())  # a mapping lives as long as a view of it


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("in this test")], ids=["interrupt", "error"])
def test_memory_that_may_be_locked_does_not_go_without_a_word(error: BaseException) -> None:
    """What is mapped at its address later would be copied from and to where it lay before."""
    pins = _Pins()
    pool = _pool(slabs=2, pin=pins.pin, unpin=pins.unpin)
    pins.fails = error
    with pytest.raises(type(error)):
        pool.acquire(SLAB)
    (address,) = pins.locked
    assert [slab.address for slab in pool._slabs] == [address]
    slot = _acquire(pool, SLAB)
    assert slot.address == address
    del slot
    big = _acquire(pool, 2 * SLAB)
    assert pins.unlocked == [address]
    assert pins.locked == {big.address: 2 * SLAB}


def test_memory_that_the_device_does_not_let_go_stays_and_is_used_again() -> None:
    pins = _Pins()
    gone: list[int] = []
    pool = _pool(slabs=2, pin=pins.pin, unpin=pins.unpin, unmapping=lambda address, nbytes: gone.append(address))
    address = _acquire(pool, SLAB).address
    pins.holds = True
    assert pool.acquire(2 * SLAB) is None
    assert pool.mapped_bytes == SLAB
    assert _acquire(pool, SLAB).address == address
    pool.close()
    assert (gone, pins.locked) == ([], {address: SLAB})
    del pool
    pins.holds = False
    assert _acquire(_pool(), 1) is not None  # whoever maps memory takes what was left of closed pools
    assert (gone, pins.locked) == ([address], {})


def test_what_a_copy_may_use_stays_locked_and_mapped_when_the_pool_is_closed_and_dropped() -> None:
    pins = _Pins()
    done: set[object] = set()
    options: dict[str, Any] = {"pin": pins.pin, "unpin": pins.unpin, "is_done": done.__contains__}
    pool = _pool(**options)
    slot = _acquire(pool, SLAB)
    address, bytes_held = slot.address, (ctypes.c_char * SLAB).from_address(slot.address)
    slot.events.append("copy")
    del slot
    pool.close()
    del pool
    second = _pool(**options)
    assert _acquire(second, SLAB).address != address
    assert address in pins.locked
    bytes_held[0] = b"x"  # would crash the process if it were not mapped
    done.add("copy")
    assert _acquire(second, SLAB).address != address
    assert address in pins.locked, "it is looked at when somebody maps memory, not before"
    assert _acquire(_pool(), SLAB) is not None
    assert address not in pins.locked


def test_closing_waits_for_copies_if_it_shall() -> None:
    pins = _Pins()
    done: set[object] = set()
    pool = _pool(pin=pins.pin, unpin=pins.unpin, is_done=done.__contains__, wait_for=done.add)
    slot = _acquire(pool, SLAB)
    slot.events += ["out", "in"]
    held = _acquire(pool, SLAB, force=True)
    held.events.append("of what somebody holds")
    del slot
    pool.close(wait=True)
    assert done == {"out", "in"}
    assert pins.locked == {held.address: SLAB}


def test_a_broken_device_of_a_closed_pool_is_not_the_trouble_of_others() -> None:
    def broken(event: object) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    pins = _Pins()
    events_done: list[Any] = [lambda event: False]
    pool = _pool(pin=pins.pin, unpin=pins.unpin, is_done=lambda event: events_done[-1](event))
    slot = _acquire(pool, SLAB)
    slot.events.append("copy")
    del slot
    pool.close()
    events_done.append(broken)
    assert _acquire(_pool(), SLAB) is not None
    assert len(pins.locked) == 1
    events_done.append(lambda event: True)
    assert _acquire(_pool(), SLAB) is not None
    assert pins.locked == {}


def test_a_forked_child_leaves_the_device_alone() -> None:
    pins = _Pins()
    pool = _pool(pin=pins.pin, unpin=pins.unpin, is_done=lambda event: pytest.fail("the device was asked"))
    held, other = _acquire(pool, SLAB // 2), _acquire(pool, SLAB // 2)
    other.events.append("copy")
    pool.after_fork_in_child()  # as if this were the child
    del other
    assert _acquire(pool, SLAB, force=True) is not None
    pool.close(wait=True)
    assert (len(pins.locked), pins.unlocked) == (1, [])
    del held
    pool._unpin, pool._is_done = pins.unpin, None  # so that this process has nothing left
    pool.close()
    assert pins.locked == {}


def test_a_copy_that_is_being_begun_is_never_done() -> None:
    pool = _pool(is_done=lambda event: True, wait_for=lambda event: None)
    slot = _acquire(pool, SLAB)
    slot.events.append(hostpool.COPYING)  # and then comes an interrupt
    del slot
    pool.close(wait=True)
    assert (pool.allocated_bytes, pool.mapped_bytes) == (SLAB, SLAB)


def test_closing_that_is_interrupted_forgets_nothing() -> None:
    def interrupted(event: object) -> bool:
        raise KeyboardInterrupt

    pins = _Pins()
    is_done: list[Any] = [interrupted]
    pool = _pool(pin=pins.pin, unpin=pins.unpin, is_done=lambda event: is_done[0](event))
    slot = _acquire(pool, SLAB)
    slot.events.append("copy")
    del slot
    with pytest.raises(KeyboardInterrupt):
        pool.close()
    del pool
    is_done[0] = lambda event: True
    assert _acquire(_pool(), 1) is not None
    assert pins.locked == {}


@pytest.mark.parametrize("what", ["mapped", "unmapping"])
def test_an_interrupt_as_somebody_is_told_loses_nothing(what: str) -> None:
    listed: list[bool] = []
    fails: list[BaseException] = [KeyboardInterrupt()]

    def told(address: int, nbytes: int) -> None:
        listed.append(address in {slab.address for slab in pool._slabs})
        if fails:
            raise fails.pop()

    pool = _pool(slabs=2, **{what: told})
    if what == "unmapping":
        assert pool.acquire(SLAB) is not None
    with pytest.raises(KeyboardInterrupt):
        pool.acquire(SLAB if what == "mapped" else 2 * SLAB)
    assert pool.mapped_bytes == SLAB
    slot = _acquire(pool, SLAB)
    assert pool.mapped_bytes == SLAB
    del slot
    assert _acquire(pool, 2 * SLAB).nbytes == 2 * SLAB
    assert listed == [True, True], "what is told of is in the list; a slab that stays is told of again as it goes"
    assert pool.mapped_bytes == 2 * SLAB


def test_free_slabs_are_unpinned_for_a_bigger_one_and_no_more_of_them_than_needed() -> None:
    pins = _Pins()
    pool = _pool(slabs=4, pin=pins.pin, unpin=pins.unpin)
    slots = [_acquire(pool, SLAB) for _ in range(4)]
    held, *addresses = list(pins.locked)
    assert held == slots[0].address
    bytes_held = pool.tensor(slots[0], 0, SLAB).fill_(7)
    bytes_gone = pool.tensor(slots[1], 0, 100)
    del slots[1:]
    again = _acquire(pool, SLAB)  # there is room for that one
    assert pins.unlocked == []
    del again
    big = _acquire(pool, 2 * SLAB)
    assert pins.unlocked == addresses[:2]
    assert pins.locked == {held: SLAB, addresses[2]: SLAB, big.address: 2 * SLAB}
    assert pool.mapped_bytes == 4 * SLAB
    assert bool((bytes_held == 7).all())
    assert bool((bytes_gone.fill_(3) == 3).all())  # a mapping lives as long as a view of it
    assert _acquire(pool, SLAB).address == addresses[2]
    assert _in_use(pool) == 3 * SLAB


def test_who_wants_to_know_is_told_what_memory_comes_and_goes() -> None:
    told: list[tuple[str, int, int]] = []
    pool = _pool(
        slabs=2,
        mapped=lambda address, nbytes: told.append(("comes", address, nbytes)),
        unmapping=lambda address, nbytes: told.append(("goes", address, nbytes)),
    )
    first, second = _acquire(pool, SLAB), _acquire(pool, SLAB)
    addresses = [first.address, second.address]
    assert told == [("comes", address, SLAB) for address in addresses]
    del first, second
    told.clear()
    big = _acquire(pool, 2 * SLAB)
    assert sorted(told[:2]) == sorted(("goes", address, SLAB) for address in addresses)
    assert told[2:] == [("comes", big.address, 2 * SLAB)]


def test_a_slab_that_a_copy_may_still_use_is_not_unpinned() -> None:
    pins = _Pins()
    done: set[object] = set()
    pool = _pool(slabs=2, pin=pins.pin, unpin=pins.unpin, is_done=done.__contains__)
    slots = [_acquire(pool, SLAB // 2), _acquire(pool, SLAB)]
    for slot in slots:
        slot.events.append("copy")
    del slot
    slots.clear()
    assert pool.acquire(2 * SLAB) is None
    assert pins.unlocked == []
    forced = _acquire(pool, 2 * SLAB, force=True)  # beyond the capacity rather than in what a copy may use
    assert pins.unlocked == []
    assert len(pins.locked) == 3
    del forced
    done.add("copy")
    assert _acquire(pool, 3 * SLAB, force=True) is not None
    assert len(pins.unlocked) == 3


def test_failed_pinning_is_said_once_and_the_memory_works() -> None:
    pool = _pool(slabs=2, pin=lambda address, nbytes: False, unpin=lambda address: pytest.fail("nothing was pinned"))
    with pytest.warns(RuntimeWarning, match="could not be page-locked") as caught:
        slots = [_acquire(pool, SLAB) for _ in range(2)]
    assert len(caught) == 1
    assert pool.pin_failed
    assert bool((pool.tensor(slots[1], 0, 100).fill_(3) == 3).all())
    pool.close()


def test_a_finalizer_may_run_while_the_pool_is_locked() -> None:
    """The garbage collector runs finalizers anywhere, also inside ``acquire`` of the same thread."""
    pool = _pool()
    slot = _acquire(pool, SLAB)
    tensor = pool.tensor(slot, 0, SLAB, owning=True)
    del slot
    with pool._lock:
        del tensor  # would hang if it took the lock
    assert _in_use(pool) == 0


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

    threads = [threading.Thread(target=use, args=(value,)) for value in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert wrong == []
    assert _in_use(pool) == 0
    assert pool._finalizers == {}


def test_an_error_as_memory_is_taken_back_gives_nothing_back_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HostPool(1 << 20, slab_bytes=1 << 20)
    slots = [pool.acquire(4096) for _ in range(3)]
    assert all(slots)
    free, calls = pool._free, 0

    def fails_once(piece: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError("in this test")
        free(piece)

    monkeypatch.setattr(pool, "_free", fails_once)
    slots.clear()
    with pytest.raises(MemoryError, match="in this test"):
        pool.settle()
    pool.settle()
    assert calls == 3
    assert pool.acquire(4096) is not None
