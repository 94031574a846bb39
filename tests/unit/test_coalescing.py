"""Small CPU tensors go to disk, and come back, several in one transfer; each is released alone."""

from __future__ import annotations

import gc
import random
import tempfile
import threading
import warnings
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actoffload import OffloadConfig, Offloader
from actoffload.errors import OffloaderClosedError, StateError, StorageReadError
from actoffload.storage.engines.base import IoKind
from actoffload.testing.faults import FailingEngine, FullEngine, GateEngine
from actoffload.testing.simulated_device import NAME
from actoffload.tiers.coalescing import Sources
from actoffload.tiers.record import Record
from actoffload.tiers.record import Saved as SavedStorage
from actoffload.tiers.storage_ref import StorageRef
from tests.harness import (
    WAIT_S,
    MakeOffloader,
    accounts_of,
    assert_empty,
    budget_of,
    forget_failed_backward,
    only_engine,
    pending_bytes,
    run_in_threads,
    same_bits,
    spool_of,
    spool_statistics,
    states_of,
    wait_until,
)
from tests.unit.saving import FULL, KIB, NBYTES, BufferedGateEngine, CountingEngine, Saved, activations, freed

MIB = 1024 * KIB
ALONE = 512 * KIB
"""A tensor of this size is written alone."""
BATCH = FULL * NBYTES


def _saved(make_offloader: MakeOffloader, count: int, nbytes: int = NBYTES, **options: Any) -> tuple[Offloader, Saved]:
    """An offloader in which so many tensors of this size were saved."""
    offloader = make_offloader(**options)
    return offloader, Saved(offloader, activations(count, nbytes))


@pytest.mark.parametrize("engine", ["memory", "posix", "uring", "aiofiles"])
def test_all_come_back_as_they_were(engine: str, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=engine)
    for count in (3 * FULL + 1, 1, FULL - 1):
        saved = Saved(offloader, activations(count))
        offloader.synchronize()
        assert states_of(offloader) == ["spilled"] * count
        saved.check_rest()
    assert not offloader.statistics().degraded
    assert_empty(offloader)


def test_a_batch_is_one_request_each_way(make_offloader: MakeOffloader) -> None:
    offloader, saved = _saved(make_offloader, 2 * FULL, engine=CountingEngine)
    offloader.synchronize()
    saved.check_rest()
    engine, statistics = only_engine(offloader), offloader.statistics()
    assert (len(engine.written), len(engine.read)) == (2, 2)
    assert statistics.nvme_written_bytes == statistics.nvme_read_bytes == sum(engine.written)
    edges = 2 * 4096  # before and after the aligned body of each
    assert 2 * FULL * (NBYTES - edges) <= sum(engine.written) <= 2 * BATCH


def test_a_plan_that_bounds_the_memory_waits_for_no_batch_that_is_never_full(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine="memory")  # without a budget of the user's, small tensors wait for each other
    budget_of(offloader).limit_bytes = 2 * NBYTES
    saved = Saved(offloader, activations(3))
    assert states_of(offloader).count("spilled") >= 1
    saved.check_rest()


def test_a_wait_for_room_ends_if_its_batch_is_given_up(make_offloader: MakeOffloader) -> None:
    """The storage is freed before its batch began: then no transfer is under way that could end the wait."""
    offloader = make_offloader(engine="memory", min_bytes=64 * KIB)
    (tensor,) = activations(1)
    saved = Saved(offloader, [tensor])
    assert pending_bytes(offloader) == NBYTES
    tensor.untyped_storage().resize_(0)
    budget_of(offloader).limit_bytes = 1
    with offloader:
        x = torch.ones(1024, requires_grad=True)
        _ = x.exp()
    assert pending_bytes(offloader) == 0
    forget_failed_backward()
    del saved


@pytest.mark.simulated
def test_a_wait_for_host_memory_begins_the_batch_of_another_devices_tensors() -> None:
    """The wait would last for ever if an open batch of CPU tensors waited for more of them meanwhile."""
    options: dict[str, Any] = {"target": "nvme", "engine": "memory", "host_budget": "8MiB", "policy": "all"}
    with Offloader(OffloadConfig(devices=("cpu", NAME), min_bytes=1, announce="none", **options)) as offloader:
        pass
    budget_of(offloader).limit_bytes = 1 << 30
    try:
        saved = Saved(offloader, [*activations(1), torch.ones(16 * MIB // 4).to(NAME)])
        assert pending_bytes(offloader) == 0
        saved.check_rest()
    finally:
        offloader.abort()


@settings(max_examples=20)
@given(seed=st.integers(0, 1 << 20), engine=st.sampled_from(["memory", "posix"]))
def test_any_sizes_in_any_order(seed: int, engine: Any) -> None:
    chance = random.Random(seed)
    offloader = Offloader(
        OffloadConfig(
            target="nvme", engine=engine, path=tempfile.gettempdir(), min_bytes=1, keep_last_bytes=0, policy="greedy"
        )
    )
    try:
        tensors = []
        for _ in range(chance.randrange(1, 14)):
            nbytes = chance.choice([4 * KIB, 64 * KIB, 100_000, NBYTES, ALONE - 4, ALONE, 900_000])
            skipped = chance.randrange(0, 300) * 4
            # A view that begins anywhere, and is less than half of its storage: its own span moves.
            base = torch.randint(0, 256, (skipped + 2 * nbytes + 4096,), dtype=torch.uint8)
            tensors.append(base[skipped : skipped + nbytes].view(torch.int32))
        saved = Saved(offloader, tensors)
        addresses = [tensor.data_ptr() % 512 for tensor in tensors]
        del tensors
        if chance.random() < 0.7:
            offloader.synchronize()
        order = list(reversed(range(len(addresses))))
        if chance.random() < 0.5:
            chance.shuffle(order)
        held = []
        for index in order:
            what = chance.random()
            if what < 0.2:
                saved.drop(index)
                continue
            if what < 0.4:
                saved.check(index, again=True)
                if chance.random() < 0.5:
                    offloader.synchronize()
            found = saved.check(index)
            assert found.data_ptr() % 512 == addresses[index]
            if what > 0.8:
                held.append((found, found.clone()))  # it outlives its record, and perhaps its batch
            del found
        assert all(same_bits(one, other) for one, other in held)
        del held
        assert not offloader.statistics().degraded
        assert_empty(offloader)
    finally:
        offloader.abort()


class OneRangeEngine(CountingEngine):
    """Another project's engine, which takes one range of memory for a request."""

    @property
    def capabilities(self) -> Any:
        return replace(super().capabilities, vectored=False)


@pytest.mark.parametrize(
    "options",
    [
        {"device_budget": "8MiB"},
        {"engine": OneRangeEngine},
        {"verify": True},
        {"pending_bytes": 2 * NBYTES},
        {"prefetch_bytes": 2 * NBYTES},
        {"host_budget": 4 * NBYTES},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_write_each_record_alone(options: dict[str, Any], make_offloader: MakeOffloader) -> None:
    offloader, saved = _saved(make_offloader, 2 * FULL, **({"engine": CountingEngine} | options))
    offloader.synchronize()
    assert 0 < max(only_engine(offloader).written) <= NBYTES + 4096
    saved.end()


@pytest.mark.parametrize("option", ["prefetch_bytes", "pending_bytes"])
def test_a_batch_is_no_larger_than_half_of_the_users_limit(option: str, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=CountingEngine, **{option: "3MiB"})
    accounts_of(offloader).baseline_peak_bytes = 1 << 40  # as if this many bytes had been saved at once
    saved = Saved(offloader, activations(4 * FULL))
    offloader.synchronize()
    assert max(only_engine(offloader).written) <= 3 * BATCH // 2
    saved.end()


# -- on the way out ----------------------------------------------------------------------------------------------------


def test_a_record_that_backward_needs_before_its_batch_is_full_never_leaves(make_offloader: MakeOffloader) -> None:
    offloader, saved = _saved(make_offloader, FULL - 1, engine=GateEngine)
    saved.check_rest()
    statistics = offloader.statistics()
    assert only_engine(offloader).started == []
    assert statistics.nvme_written_bytes == 0
    assert statistics.forwarded_bytes == statistics.cancelled_bytes == (FULL - 1) * NBYTES
    assert pending_bytes(offloader) == 0
    assert_empty(offloader)


def test_synchronize_also_begins_the_batch_of_tensors_saved_meanwhile(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=GateEngine)
    first = Saved(offloader, activations(2))
    waiting = threading.Thread(target=offloader.synchronize, daemon=True)
    waiting.start()
    wait_until(lambda: spool_statistics(offloader).busy_extents)
    second = Saved(offloader, activations(1))  # no later tensor fills its batch
    only_engine(offloader).open()
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    offloader.synchronize()
    assert states_of(offloader) == ["spilled"] * 3
    first.check_rest()
    second.end()


def test_synchronize_ends_while_another_thread_saves(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine="memory")
    tensors = activations(3, 64 * KIB)
    done = threading.Event()

    def wait_over_and_over() -> None:
        try:
            for _ in range(150):
                offloader.synchronize()
        finally:  # also after an error, which would else look like a hang of the other thread
            done.set()

    def save_meanwhile() -> None:
        while not done.is_set():
            Saved(offloader, tensors[: random.randrange(1, 4)]).check_rest()

    try:
        run_in_threads(wait_over_and_over, save_meanwhile)
    finally:  # after a hang, the other thread would save until the process ends
        done.set()
    assert_empty(offloader)


def test_an_open_batch_does_not_keep_later_tensors_from_moving(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine="memory", pending_bytes=4 * NBYTES)
    saved = Saved(offloader, [*activations(1), *activations(1, 4 * NBYTES)])  # the second is too large beside the first
    assert states_of(offloader)[1] == "resident"
    wait_until(lambda: not pending_bytes(offloader))
    assert states_of(offloader)[0] == "spilled"
    more = Saved(offloader, activations(1, 4 * NBYTES))
    offloader.synchronize()
    assert states_of(offloader).count("spilled") == 2
    more.check_rest()
    saved.end()


def test_a_record_needed_while_its_batch_is_written_stays_and_the_rest_leaves(make_offloader: MakeOffloader) -> None:
    offloader, saved = _saved(make_offloader, FULL, engine=GateEngine)
    saved.check(0)
    saved.drop(2)
    assert states_of(offloader) == ["spilling"] * (FULL - 2)
    only_engine(offloader).open()
    offloader.synchronize()
    assert states_of(offloader) == ["spilled"] * (FULL - 2)
    assert len(only_engine(offloader).started) == 1
    saved.end()


def test_memory_that_a_batch_still_holds_counts_as_pending(make_offloader: MakeOffloader) -> None:
    offloader, saved = _saved(make_offloader, FULL, engine=GateEngine)
    for index in range(FULL):
        assert pending_bytes(offloader) == BATCH
        assert offloader.statistics().cancelled_bytes == 0
        saved.check(index) if index == 1 else saved.drop(index)
    assert pending_bytes(offloader) == 0
    assert offloader.statistics().cancelled_bytes == BATCH
    only_engine(offloader).open()
    assert_empty(offloader)
    assert only_engine(offloader).started == [], "a write that no record needs is cancelled"


def test_a_write_that_ends_after_an_interrupt_changes_no_record(make_offloader: MakeOffloader) -> None:
    """The interrupt may have left them half changed."""
    offloader, saved = _saved(make_offloader, FULL, engine=GateEngine)
    offloader.store.shared.interrupted = True
    only_engine(offloader).open()
    spool_of(offloader).close()
    assert states_of(offloader) == ["spilling"] * FULL
    assert pending_bytes(offloader) == BATCH
    saved.graphs.clear()


def test_room_on_disk_goes_with_the_last_of_a_batch(make_offloader: MakeOffloader) -> None:
    offloader, saved = _saved(make_offloader, FULL, engine="memory")
    offloader.synchronize()
    room = spool_statistics(offloader).allocated_bytes
    assert room >= FULL * (NBYTES - 1024)
    for index in (2, 0, 1):
        saved.drop(index) if index else saved.check(index)
        gc.collect()
        assert spool_statistics(offloader).allocated_bytes == room
    others = Saved(offloader, activations(2 * FULL))  # would lie there if the room had been released
    offloader.synchronize()
    saved.check_rest()
    room = spool_statistics(offloader).allocated_bytes
    assert 2 * FULL * (NBYTES - 1024) <= room <= 2 * FULL * (NBYTES + 4096)
    others.end()


# -- on the way back ---------------------------------------------------------------------------------------------------


def test_records_of_one_read_can_be_unpacked_again(make_offloader: MakeOffloader) -> None:
    offloader, saved = _saved(make_offloader, FULL, engine="posix")
    for _ in range(3):
        offloader.synchronize()
        before = offloader.statistics().nvme_read_bytes
        for index in reversed(range(FULL)):
            saved.check(index, again=True)
        assert 0 < offloader.statistics().nvme_read_bytes - before <= BATCH, "nothing is read more than once"
    saved.end()


@pytest.mark.parametrize("wanted", [(1, 3), ()], ids=["by some", "by nobody"])
def test_a_batch_that_is_still_needed_while_it_is_read(make_offloader: MakeOffloader, wanted: tuple[int, ...]) -> None:
    offloader = make_offloader(engine=partial(GateEngine, threads=1), prefetch_bytes=4 * BATCH)
    gate = only_engine(offloader)
    gate.open()
    saved = Saved(offloader, activations(2 * FULL))
    offloader.synchronize()
    gate.shut()
    gate.release()
    saved.check(2 * FULL - 1)  # its own batch is read, and the one before it is fetched ahead
    wait_until(lambda: "fetching" in states_of(offloader)[:FULL])
    for index in {0, 1, 2, 3} - set(wanted):
        saved.drop(index)
    if not wanted:
        for index in range(FULL, 2 * FULL - 1):
            saved.drop(index)
    gate.open()
    saved.end()
    assert (offloader.statistics().nvme_read_bytes <= BATCH) == (not wanted), "a batch that no record needs is not read"


# -- owners that free memory, disks that fail or are full, sinks that raise --------------------------------------------


@pytest.mark.pairs
@pytest.mark.parametrize(("count", "nbytes"), [(FULL, NBYTES), (1, 4 * KIB * KIB)], ids=["a batch", "alone"])
@pytest.mark.parametrize(
    "options", [{}, {"verify": True}, {"engine": BufferedGateEngine}], ids=["", "verify", "buffered"]
)
@pytest.mark.parametrize("filled_again", [False, True])
def test_a_storage_freed_by_its_owner_during_the_write_stays(
    filled_again: bool, options: dict[str, Any], count: int, nbytes: int, make_offloader: MakeOffloader
) -> None:
    """The whole batch stays, as the written bytes may be another owner's. Freed memory of 4 MiB leaves the process."""
    offloader = make_offloader(**({"engine": GateEngine} | options))
    tensors = activations(count, nbytes)
    saved = Saved(offloader, tensors)
    with freed(tensors[0]):
        if filled_again:
            Saved(offloader, activations(1)).check_rest()  # the library checks at any save
        else:
            only_engine(offloader).open()
            offloader.synchronize()
    only_engine(offloader).open()
    offloader.synchronize()
    assert "engine" not in options or filled_again or only_engine(offloader).calls == 0, "freed memory was read"
    statistics = offloader.statistics()
    assert statistics.kept_bytes["resized"] >= nbytes
    assert statistics.degraded == {}
    saved.end()


def test_a_storage_freed_once_counts_as_freed_though_refilled_at_its_old_address() -> None:
    storage, moved = torch.arange(16).untyped_storage(), Mock()
    record = Record(SavedStorage(StorageRef(storage), storage.data_ptr(), 0, torch.device("cpu")), storage, 16, "cpu")
    untouched = Sources([record], [])
    record.data = moved
    sources = Sources([record], [])
    moved.data_ptr.return_value = 0
    with pytest.raises(StateError, match="freed or resized"):
        sources.check()
    moved.data_ptr.return_value = record.saved.address
    assert sources.moved()
    assert not untouched.moved()


def test_records_under_way_are_checked_in_turn(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=GateEngine)
    tensors = activations(80, 64 * KIB)
    saved = Saved(offloader, tensors)
    with freed(tensors[40]):
        for _ in range(20):  # each checks some records
            Saved(offloader, activations(1, 64 * KIB)).check_rest()
    only_engine(offloader).open()
    offloader.synchronize()
    assert offloader.statistics().kept_bytes["resized"] >= 64 * KIB
    saved.end()


def test_a_storage_freed_by_its_owner_before_its_batch_begins_stays_alone(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine="posix")
    tensors = activations(2)
    saved = Saved(offloader, tensors)
    with freed(tensors[0]):
        offloader.synchronize()
    assert states_of(offloader) == ["resident", "spilled"]
    assert offloader.statistics().kept_bytes["resized"] == NBYTES
    saved.end()


def test_a_record_that_left_its_batch_and_was_freed_spoils_no_other(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=BufferedGateEngine)
    tensors = activations(FULL)
    saved = Saved(offloader, tensors)
    saved.check(0)
    tensors[0].untyped_storage().resize_(0)
    only_engine(offloader).open()
    offloader.synchronize()
    assert not offloader.statistics().degraded
    saved.end()


@pytest.mark.parametrize(
    "engine",
    [partial(FailingEngine, kind=IoKind.WRITE, count=1), partial(FullEngine, capacity_bytes=NBYTES + 8192)],
    ids=["an error", "a full disk"],
)
def test_a_write_that_fails_leaves_its_batch_in_memory(engine: Any, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=engine)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saved = Saved(offloader, activations(FULL))
        offloader.synchronize()
    assert ["write failed" in str(warning.message) for warning in caught] == [True]
    assert offloader.statistics().degraded == {"write failed": FULL}
    assert states_of(offloader) == ["resident"] * FULL
    saved.end()


def test_a_read_that_fails_is_an_error_of_all_that_it_reads_and_is_tried_again(make_offloader: MakeOffloader) -> None:
    offloader, saved = _saved(make_offloader, FULL, engine=partial(FailingEngine, kind=IoKind.READ, count=1))
    offloader.synchronize()
    with pytest.raises(StorageReadError):
        saved.check(FULL - 1, again=True)
    for index in reversed(range(FULL)):
        saved.check(index)
    forget_failed_backward()
    assert_empty(offloader)


def test_a_spool_without_room_for_a_batch_takes_the_records_that_fit(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine="memory", nvme_budget=2 * NBYTES)
    with pytest.warns(RuntimeWarning, match="no room on disk"):
        saved = Saved(offloader, activations(FULL))
    offloader.synchronize()
    assert states_of(offloader).count("spilled") == 2
    assert offloader.statistics().kept_bytes == {"degraded": (FULL - 2) * NBYTES}
    assert accounts_of(offloader).moved_bytes == 2 * NBYTES
    saved.end()


@pytest.mark.parametrize("kind", ["write", "read"])
@pytest.mark.filterwarnings("ignore:actoffload:RuntimeWarning")
def test_a_sink_that_raises_harms_no_record(kind: str, make_offloader: MakeOffloader) -> None:
    raised: list[Any] = []

    def sink(event: Any) -> None:
        if event.kind.value == kind and not raised:
            raised.append(event)
            raise RuntimeError("the sink is full")

    offloader, saved = _saved(make_offloader, FULL, engine="memory", trace=sink)
    offloader.synchronize()
    saved.check_rest()
    assert len(raised) == 1
    assert "the sink is full" in offloader.report()
    assert_empty(offloader)


@pytest.mark.parametrize("nbytes", [NBYTES, 2 * ALONE])
def test_a_tensor_in_memory_can_be_unpacked_after_abort(nbytes: int, make_offloader: MakeOffloader) -> None:
    offloader, saved = _saved(make_offloader, 4 * FULL, nbytes, engine="memory", prefetch_bytes=nbytes)
    offloader.synchronize()
    held = saved.check(4 * FULL - 1, again=True)
    offloader.abort()
    assert saved.check(4 * FULL - 1).data_ptr() == held.data_ptr()  # prefetch would fetch the next batch
    with pytest.raises(OffloaderClosedError):
        saved.check(0, again=True)
    saved.graphs.clear()
    forget_failed_backward()


def test_a_tensor_that_is_larger_than_the_limit_by_itself_moves(make_offloader: MakeOffloader) -> None:
    """The tensor moves while at most half of the limit is under way."""
    offloader, saved = _saved(make_offloader, 2, 6 * NBYTES, engine=GateEngine, pending_bytes=4 * NBYTES)
    assert states_of(offloader) == ["spilling", "resident"]
    only_engine(offloader).open()
    offloader.synchronize()
    assert states_of(offloader) == ["spilled", "resident"]
    saved.end()
