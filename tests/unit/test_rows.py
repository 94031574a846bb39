"""Small records of CPU tensors go to disk, and come back, several in one transfer."""

from __future__ import annotations

import errno
import gc
import itertools
import random
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actoffload import OffloadConfig, Offloader
from actoffload.cpu_tier import BOUNCE_BYTES, CpuMover
from actoffload.engines.base import IoKind, SpoolFile
from actoffload.engines.posix import PosixEngine
from actoffload.errors import OffloaderClosedError, StorageReadError
from actoffload.record import State
from actoffload.row_tier import ROW_BYTES, SMALL_BYTES, Joint, Row, RowMover
from actoffload.testing.faults import FailingEngine, FullEngine, GateEngine, ShortEngine
from actoffload.tiers import LOOK_AT
from tests.harness import (
    WAIT_S,
    MakeOffloader,
    assert_empty,
    forget_failed_backward,
    only_engine,
    same_bits,
    spool_statistics,
)

KIB = 1 << 10
NBYTES = 256 * KIB
"""Of one record of most tests: four fill a row."""
FULL = ROW_BYTES // NBYTES


class Save(torch.autograd.Function):
    """Saves one tensor; its backward asks for it and has `seen` look at it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor, seen: Callable[[Tensor], None]) -> Tensor:
        ctx.save_for_backward(saved)
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.seen(ctx.saved_tensors[0])
        return grads[0], None, None


class Saved:
    """Tensors that were saved one after the other, each in a graph of its own, and copies of what was in them."""

    def __init__(self, offloader: Offloader, tensors: list[Tensor]) -> None:
        self.expected: list[Tensor | None] = [t.clone() for t in tensors]
        self.graphs: list[Tensor | None] = []
        self.handles: list[Any] = []
        with offloader:
            for tensor in tensors:
                x = torch.ones(1, requires_grad=True)
                self.graphs.append(Save.apply(x, tensor, self.handles.append))

    def check(self, index: int, *, again: bool = False) -> Tensor:
        """Unpack one; it has the bits that it had."""
        graph = self.graphs[index]
        assert graph is not None
        graph.backward(retain_graph=again)
        found: Tensor = self.handles.pop()
        expected = self.expected[index]
        assert expected is not None
        assert same_bits(found, expected), f"tensor {index}"
        if not again:
            self.drop(index)
        return found

    def drop(self, index: int) -> None:
        """Let one go without having asked for it."""
        self.graphs[index] = self.expected[index] = None


def activations(count: int, nbytes: int = NBYTES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(nbytes // 4, generator=generator) for _ in range(count)]


def mover_of(offloader: Offloader) -> RowMover:
    mover = offloader.tiers.movers["cpu"]
    assert isinstance(mover, RowMover)
    return mover


def records_of(offloader: Offloader) -> list[Any]:
    entries = offloader._identities.entries.values()
    return sorted((entry.record for found in entries for entry in found), key=lambda record: record.index)


def states(offloader: Offloader) -> list[State]:
    return [record.state for record in records_of(offloader)]


@pytest.fixture(params=["memory", "posix", "uring", "aiofiles"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_all_come_back_as_they_were(engine: str, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=engine)
    saved = Saved(offloader, activations(3 * FULL + 1))
    offloader.synchronize()
    assert states(offloader) == [State.SPILLED] * (3 * FULL + 1)
    for index in reversed(range(3 * FULL + 1)):
        saved.check(index)
    assert not offloader.statistics().degraded
    assert_empty(offloader)


class CountingEngine(PosixEngine):
    """Counts the requests of each kind."""

    def __init__(self, file: SpoolFile) -> None:
        self.requests: list[tuple[IoKind, int]] = []
        super().__init__(file)

    def submit(self, request: Any) -> None:
        self.requests.append((request.kind, request.length))
        super().submit(request)


def test_a_row_is_one_request_each_way(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=CountingEngine)
    saved = Saved(offloader, activations(2 * FULL))
    offloader.synchronize()
    for index in reversed(range(2 * FULL)):
        saved.check(index)
    kinds = [kind for kind, _ in only_engine(offloader).requests]
    assert (kinds.count(IoKind.WRITE), kinds.count(IoKind.READ)) == (2, 2)
    statistics = offloader.statistics()
    moved = sum(nbytes for kind, nbytes in only_engine(offloader).requests if kind is IoKind.WRITE)
    assert statistics.nvme_written_bytes == statistics.nvme_read_bytes == moved
    assert 2 * FULL * (NBYTES - 1024) <= moved <= 2 * FULL * NBYTES


@settings(max_examples=20)
@given(data=st.data())
def test_any_sizes_any_order(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 1 << 20), "seed")
    kind = data.draw(st.sampled_from(["memory", "posix"]), "engine")
    chance = random.Random(seed)
    spans = []
    for _ in range(chance.randrange(1, 14)):
        nbytes = chance.choice([4 * KIB, BOUNCE_BYTES, 100_000, NBYTES, SMALL_BYTES - 4, SMALL_BYTES, 900_000])
        spans.append((chance.randrange(0, 300) * 4, nbytes // 4 * 4))
    offloader = Offloader(_config(kind))
    try:
        tensors = []
        for skipped, nbytes in spans:
            # A view that begins anywhere, and is less than half of its storage: its own span moves.
            base = torch.randint(0, 256, (skipped + 2 * nbytes + 4096,), dtype=torch.uint8)
            tensors.append(base[skipped : skipped + nbytes].view(torch.int32))
        saved = Saved(offloader, tensors)
        addresses = [tensor.data_ptr() % 512 for tensor in tensors]
        del tensors
        if chance.random() < 0.7:
            offloader.synchronize()
        order = list(range(len(spans)))
        if chance.random() < 0.5:
            chance.shuffle(order)
        else:
            order.reverse()
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
                held.append((found, found.clone()))  # it outlives its record, and perhaps its row
            del found
        assert all(same_bits(one, other) for one, other in held)
        del held
        assert not offloader.statistics().degraded
        assert_empty(offloader)
    finally:
        offloader.abort()


def _config(engine: Any) -> Any:
    return OffloadConfig(
        target="nvme", engine=engine, path=tempfile.gettempdir(), min_bytes=1, keep_last_bytes=0, policy="greedy"
    )


def test_what_is_wanted_before_its_row_is_full_never_left(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=GateEngine)
    saved = Saved(offloader, activations(FULL - 1))
    assert states(offloader) == [State.SPILLING] * (FULL - 1)
    for index in reversed(range(FULL - 1)):
        saved.check(index)
    statistics = offloader.statistics()
    assert only_engine(offloader).started == []
    assert statistics.nvme_written_bytes == 0
    assert statistics.forwarded_bytes == statistics.cancelled_bytes == (FULL - 1) * NBYTES, "none was written"
    assert offloader.core.pending_bytes == 0
    assert_empty(offloader)


def test_what_dies_before_its_row_is_full_is_in_no_row(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=CountingEngine)
    saved = Saved(offloader, activations(FULL - 1))
    saved.drop(0)
    assert mover_of(offloader)._open.nbytes == (FULL - 2) * NBYTES
    offloader.synchronize()
    ((kind, nbytes),) = only_engine(offloader).requests
    assert kind is IoKind.WRITE
    assert nbytes <= (FULL - 2) * NBYTES
    for index in range(1, FULL - 1):
        saved.check(index)
    assert_empty(offloader)


def test_who_waits_for_all_has_the_row_begun_that_is_not_full(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=GateEngine)
    first = Saved(offloader, activations(2))
    waiting = threading.Thread(target=offloader.synchronize)
    waiting.start()
    while not offloader.core.changed.waiters:
        pass
    second = Saved(offloader, activations(1))  # nothing more comes that would fill its row
    only_engine(offloader).open()
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    assert states(offloader) == [State.SPILLED] * 3
    for index in (1, 0):
        first.check(index)
    second.check(0)
    assert_empty(offloader)


def test_a_row_begun_between_a_waiter_s_waking_and_its_looking(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever was told is not among those who wait, and has not looked yet: a save in between fills no row."""
    offloader = make_offloader(engine=GateEngine)
    first = Saved(offloader, activations(2))
    changed = offloader.core.changed
    seconds: list[Saved] = []
    wait = changed.wait

    def told(timeout: float | None = None) -> bool:
        if seconds:
            return wait(timeout)
        offloader.core.lock.release()
        only_engine(offloader).open()
        seconds.append(Saved(offloader, activations(1)))
        offloader.core.lock.acquire()
        return True

    monkeypatch.setattr(changed, "wait", told)
    waiting = threading.Thread(target=offloader.synchronize, daemon=True)
    waiting.start()
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    seconds[0].check(0)
    for index in (1, 0):
        first.check(index)
    assert_empty(offloader)


def test_what_is_in_a_row_does_not_crowd_out_all_others(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine="memory", pending_bytes=4 * NBYTES)
    saved = Saved(offloader, [*activations(1), *activations(1, 4 * NBYTES)])  # the second is too much beside the first
    assert states(offloader)[1] is State.RESIDENT
    deadline_s = time.monotonic() + WAIT_S
    while offloader.core.pending_bytes and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert states(offloader)[0] is State.SPILLED
    more = Saved(offloader, activations(1, 4 * NBYTES))
    offloader.synchronize()
    assert states(offloader).count(State.SPILLED) == 2
    more.check(0)
    for index in (1, 0):
        saved.check(index)
    assert_empty(offloader)


def test_one_alone_in_its_row_is_written_as_itself(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine="memory")
    saved = Saved(offloader, activations(1))
    offloader.synchronize()
    (record,) = records_of(offloader)
    assert not isinstance(record.extent, Row)
    assert record.state is State.SPILLED
    saved.check(0)
    assert_empty(offloader)


def test_room_on_disk_goes_with_the_last_of_a_row(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine="memory")
    saved = Saved(offloader, activations(FULL))
    offloader.synchronize()
    room = spool_statistics(offloader).allocated_bytes
    assert room >= FULL * (NBYTES - 1024)
    for index in range(FULL - 1):
        saved.drop(index) if index % 2 else saved.check(index)
        gc.collect()
        assert spool_statistics(offloader).allocated_bytes == room
    others = Saved(offloader, activations(2 * FULL))  # would lie there if it had been given back
    offloader.synchronize()
    saved.check(FULL - 1)
    assert_empty_but(offloader, 2 * FULL)
    for index in reversed(range(2 * FULL)):
        others.check(index)
    assert_empty(offloader)


def assert_empty_but(offloader: Offloader, records: int) -> None:
    assert offloader.statistics().live_records == records
    room = spool_statistics(offloader).allocated_bytes
    assert records * (NBYTES - 1024) <= room <= records * (NBYTES + 4096)


def test_one_that_is_wanted_while_its_row_is_written_stays_and_the_others_go(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=GateEngine)
    saved = Saved(offloader, activations(FULL))
    saved.check(0)
    saved.drop(2)
    assert states(offloader) == [State.SPILLING] * (FULL - 2)
    only_engine(offloader).open()
    offloader.synchronize()
    assert states(offloader) == [State.SPILLED] * (FULL - 2)
    assert len(only_engine(offloader).started) == 1
    for index in (3, 1):
        saved.check(index)
    assert_empty(offloader)


def test_memory_that_a_row_still_holds_counts_as_pending(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=GateEngine)
    saved = Saved(offloader, activations(FULL))
    for index in range(FULL - 1):
        saved.drop(index)
        assert offloader.core.pending_bytes == FULL * NBYTES
        assert offloader.statistics().cancelled_bytes == 0
    saved.drop(FULL - 1)
    assert offloader.core.pending_bytes == 0
    assert offloader.statistics().cancelled_bytes == FULL * NBYTES
    again = Saved(offloader, activations(FULL))
    again.drop(1)
    only_engine(offloader).open()
    offloader.synchronize()
    assert offloader.core.pending_bytes == 0
    for index in (3, 2, 0):
        again.check(index)
    assert_empty(offloader)


def test_a_row_that_nobody_wants_written_is_taken_back(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=GateEngine)
    saved = Saved(offloader, activations(FULL))
    for index in range(FULL):
        saved.check(index) if index % 2 else saved.drop(index)
    only_engine(offloader).open()
    assert_empty(offloader)
    assert only_engine(offloader).started == []


def test_backward_waits_for_the_row_that_holds_what_it_wants(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine="posix")
    saved = Saved(offloader, activations(2 * FULL))
    offloader.synchronize()
    saved.check(1)
    # The others of its row came with it; they are in memory without a transfer.
    found = [(record.state, record.transfer) for record in records_of(offloader)[: FULL - 1]]
    assert found == [(State.RESIDENT, None)] * (FULL - 1)
    for index in (0, *range(2, 2 * FULL)):
        saved.check(index)
    assert_empty(offloader)


def test_what_was_brought_with_others_can_be_asked_for_twice(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine="posix")
    saved = Saved(offloader, activations(FULL))
    read = []
    for _ in range(3):
        offloader.synchronize()
        before = offloader.statistics().nvme_read_bytes
        for index in reversed(range(FULL)):
            saved.check(index, again=True)
        read.append(offloader.statistics().nvme_read_bytes - before)
        assert all(state in (State.SPILLED, State.RESIDENT) for state in states(offloader))
    assert min(read) > 0
    assert max(read) <= FULL * NBYTES, "nothing is read more than once"
    for index in range(FULL):
        saved.check(index)
    assert_empty(offloader)


def test_one_dies_while_its_row_is_read(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=GateEngine)
    saved = Saved(offloader, activations(FULL))
    gate = only_engine(offloader)
    gate.open()
    offloader.synchronize()
    gate.shut()
    first = records_of(offloader)[0]
    with offloader.core.lock:
        assert mover_of(offloader).bring(first, urgent=False)
    assert states(offloader) == [State.FETCHING] * FULL
    saved.drop(0)
    saved.drop(2)
    gate.open()
    for index in (1, 3):
        saved.check(index)
    assert_empty(offloader)


def test_a_row_that_nobody_wants_read_is_taken_back(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=GateEngine)
    saved = Saved(offloader, activations(FULL))
    gate = only_engine(offloader)
    gate.open()
    offloader.synchronize()
    gate.shut()
    with offloader.core.lock:
        assert mover_of(offloader).bring(records_of(offloader)[0], urgent=False)
    for index in range(FULL):
        saved.drop(index)
    gate.open()
    assert_empty(offloader)
    assert offloader.statistics().nvme_read_bytes == 0


def test_what_somebody_still_holds_is_not_read_again(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine="posix")
    saved = Saved(offloader, activations(FULL))
    offloader.synchronize()
    held = saved.check(0, again=True)
    before = offloader.statistics().nvme_read_bytes
    again = saved.check(0, again=True)
    assert again.data_ptr() == held.data_ptr()
    assert offloader.statistics().nvme_read_bytes == before
    for index in range(FULL):
        saved.check(index)
    del held, again
    assert_empty(offloader)


class BufferedGateEngine(GateEngine):
    """Its system calls go through the page cache, so memory is looked at before it is read."""

    calls = 0

    @property
    def capabilities(self) -> Any:
        return replace(super().capabilities, direct=False)

    def _transfer_once(self, kind: IoKind, views: list[memoryview], offset: int) -> int:
        self.calls += 1
        return super()._transfer_once(kind, views, offset)


@pytest.mark.parametrize("engine", [GateEngine, BufferedGateEngine])
def test_a_storage_that_its_owner_frees_meanwhile(engine: Any, make_offloader: MakeOffloader) -> None:
    """Its row may hold another's bytes: all of it stays, as without offloading."""
    offloader = make_offloader(engine=engine)
    tensors = activations(FULL)
    saved = Saved(offloader, tensors)
    storage, contents = tensors[1].untyped_storage(), tensors[1].clone()
    storage.resize_(0)
    only_engine(offloader).open()
    offloader.synchronize()
    assert engine is GateEngine or only_engine(offloader).calls == 0, "memory that is gone was read"
    storage.resize_(NBYTES)
    tensors[1].data.copy_(contents)
    assert not offloader.statistics().degraded
    assert offloader.statistics().kept_bytes["resized"] >= NBYTES
    for index in range(FULL):
        saved.check(index)
    assert_empty(offloader)


@pytest.mark.parametrize("engine", ["posix", "memory"])
def test_a_storage_that_its_owner_frees_before_its_row_is_full(engine: str, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=engine)
    tensors = activations(2)
    saved = Saved(offloader, tensors)
    storage, contents = tensors[0].untyped_storage(), tensors[0].clone()
    storage.resize_(0)
    offloader.synchronize()
    assert states(offloader) == [State.RESIDENT, State.SPILLED]
    assert offloader.statistics().kept_bytes["resized"] == NBYTES
    storage.resize_(NBYTES)
    tensors[0].data.copy_(contents)
    for index in (1, 0):
        saved.check(index)
    assert_empty(offloader)


def test_one_that_left_and_was_freed_spoils_its_row_but_no_bytes(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=BufferedGateEngine)
    tensors = activations(FULL)
    saved = Saved(offloader, tensors)
    saved.check(0)
    tensors[0].untyped_storage().resize_(0)
    only_engine(offloader).open()
    offloader.synchronize()
    assert not offloader.statistics().degraded
    for index in range(1, FULL):
        saved.check(index)
    assert_empty(offloader)


def test_a_write_that_fails(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=partial(FailingEngine, kind=IoKind.WRITE, count=1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saved = Saved(offloader, activations(2 * FULL))
        offloader.synchronize()
    assert len(caught) == 1
    assert offloader.statistics().degraded == {"write failed": FULL}
    assert sorted(state.value for state in states(offloader)) == ["resident"] * FULL + ["spilled"] * FULL
    for index in reversed(range(2 * FULL)):
        saved.check(index)
    assert_empty(offloader)


def test_a_disk_that_fills_up_within_a_row(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=partial(FullEngine, capacity_bytes=NBYTES + 8192))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saved = Saved(offloader, activations(FULL))
        offloader.synchronize()
    assert ["write failed" in str(warning.message) for warning in caught] == [True]
    for index in reversed(range(FULL)):
        saved.check(index)
    assert_empty(offloader)


def test_short_transfers_are_continued(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=partial(ShortEngine, most_bytes=100_000))
    saved = Saved(offloader, activations(FULL))
    offloader.synchronize()
    assert only_engine(offloader).calls > 8
    for index in reversed(range(FULL)):
        saved.check(index)
    assert_empty(offloader)


@pytest.mark.parametrize("times", [1, None])
def test_a_read_that_fails(times: int | None, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=partial(FailingEngine, kind=IoKind.READ, count=times))
    saved = Saved(offloader, activations(FULL))
    offloader.synchronize()
    for index in reversed(range(FULL)):
        if times is None:
            with pytest.raises(StorageReadError):
                saved.check(index, again=True)
        else:
            saved.check(index)  # it was tried again, alone
    saved.graphs.clear()
    forget_failed_backward()
    assert_empty(offloader)


def test_a_spool_without_room_for_a_row(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine="memory", nvme_budget=2 * NBYTES)
    with pytest.warns(RuntimeWarning, match="no room on disk"):
        saved = Saved(offloader, activations(FULL))
    offloader.synchronize()
    assert states(offloader).count(State.SPILLED) == 2
    statistics = offloader.statistics()
    assert statistics.kept_bytes == {"degraded": (FULL - 2) * NBYTES}
    assert offloader.core.accounts.moved_bytes == 2 * NBYTES
    for index in reversed(range(FULL)):
        saved.check(index)
    assert_empty(offloader)


@pytest.mark.parametrize(("nbytes", "hole"), [(NBYTES, NBYTES + 4096), (SMALL_BYTES - 4096, 800 * KIB)])
def test_room_in_pieces_is_no_room_for_a_row(nbytes: int, hole: int, make_offloader: MakeOffloader) -> None:
    """A row of 1.5 MiB would be given two pieces; one of 1 MiB none."""
    offloader = make_offloader(engine="memory", nvme_budget="8MiB")
    spool = offloader.tiers.spool
    assert spool is not None
    pieces = [spool.allocate(hole) for _ in range(8 * KIB * KIB // hole)]
    for piece in pieces[::2]:
        spool.free(piece)
    count = -(-ROW_BYTES // nbytes)
    saved = Saved(offloader, activations(count, nbytes))
    offloader.synchronize()
    assert states(offloader) == [State.SPILLED] * count
    assert not any(isinstance(record.extent, Row) for record in records_of(offloader))
    for index in reversed(range(count)):
        saved.check(index)
    for piece in pieces[1::2]:
        spool.free(piece)
    assert_empty(offloader)


@pytest.mark.parametrize("kind", ["write", "read"])
def test_a_sink_that_raises_concerns_one_record(
    kind: str, make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[Any] = []
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", told.append)

    def sink(event: Any) -> None:
        if event.kind.value == kind and not raised:
            raised.append(event)
            raise RuntimeError("the sink is full")

    offloader = make_offloader(engine="memory", trace=sink)
    saved = Saved(offloader, activations(FULL))
    offloader.synchronize()
    for index in reversed(range(FULL)):
        saved.check(index)
    assert len(raised) == len(told) == 1
    told.clear()  # with the error's frames
    assert_empty(offloader)


def test_an_interrupt_while_a_row_is_fetched_leaves_all_of_it_on_disk(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloader = make_offloader(engine="memory")
    saved = Saved(offloader, activations(FULL))
    offloader.synchronize()
    spool = offloader.tiers.spool
    assert spool is not None

    def interrupted(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(spool, "read_ranges", interrupted)
        with pytest.raises(KeyboardInterrupt):
            saved.check(FULL - 1, again=True)
    assert states(offloader) == [State.SPILLED] * FULL
    assert offloader.core.accounts.resident_bytes == 0
    for index in reversed(range(FULL)):
        saved.check(index)
    forget_failed_backward()
    assert_empty(offloader)


class BadBlockEngine(PosixEngine):
    """Cannot read what lies at a place."""

    bad = -1

    def _transfer_once(self, kind: IoKind, views: list[memoryview], offset: int) -> int:
        if kind is IoKind.READ and offset <= self.bad < offset + sum(map(len, views)):
            raise OSError(errno.EIO, "bad block")
        return super()._transfer_once(kind, views, offset)


def test_a_bad_block_is_an_error_of_the_record_that_it_belongs_to(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=BadBlockEngine)
    saved = Saved(offloader, activations(FULL))
    offloader.synchronize()
    only_engine(offloader).bad = 1 * NBYTES + 4096  # in the second
    for index in (3, 2, 0):
        saved.check(index)
    with pytest.raises(StorageReadError, match="bad block"):
        saved.check(1, again=True)
    only_engine(offloader).bad = -1
    saved.check(1)
    forget_failed_backward()
    assert_empty(offloader)


@pytest.mark.parametrize("nbytes", [NBYTES, 2 * SMALL_BYTES])
def test_what_is_in_memory_is_handed_out_after_abort(nbytes: int, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine="memory")
    saved = Saved(offloader, activations(2 * FULL, nbytes))
    offloader.synchronize()
    last = records_of(offloader)[-1]
    with offloader.core.lock:
        assert mover_of(offloader).bring(last, urgent=True)
    offloader_wait(offloader, lambda: last.near)
    offloader.abort()
    saved.check(2 * FULL - 1)  # it would fetch what comes next
    with pytest.raises(OffloaderClosedError):
        saved.check(0, again=True)
    saved.graphs.clear()
    forget_failed_backward()


def offloader_wait(offloader: Offloader, holds: Callable[[], bool]) -> None:
    with offloader.core.lock:
        while not holds():
            assert offloader.core.changed.wait(WAIT_S)


OURS = ("row_tier.py", "cpu_tier.py", "record.py", "spool.py", "arena.py", "extents.py")
"""Where rows, and those that go alone, are begun."""


def test_an_interrupt_at_any_function_while_writes_are_begun(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine="memory")
    for at in itertools.count(1):
        calls = 0

        def interrupt(frame: Any, event: str, _: Any) -> None:
            nonlocal calls
            if event == "call" and frame.f_code.co_filename.endswith(OURS):
                calls += 1
                if calls == at:  # noqa: B023 - it is over before the next
                    raise KeyboardInterrupt

        tensors = [*activations(2), *activations(1, SMALL_BYTES), *activations(FULL - 2)]
        handles: list[Any] = []
        x = torch.ones(1, requires_grad=True)
        sys.setprofile(interrupt)
        try:
            with offloader:
                graphs = [Save.apply(x, tensor, handles.append) for tensor in tensors]
        except KeyboardInterrupt:
            graphs = []
        finally:
            sys.setprofile(None)
        done = calls < at
        waiting = threading.Thread(target=offloader.synchronize, daemon=True)
        waiting.start()
        waiting.join(WAIT_S)
        assert not waiting.is_alive(), f"interrupted at call {at}"
        assert offloader.core.pending_bytes == 0, f"interrupted at call {at}"
        for graph, tensor in reversed(list(zip(graphs, tensors, strict=False))):
            graph.backward()
            assert same_bits(handles.pop(), tensor)
        graph = None
        del graphs, x
        assert offloader.statistics().live_records == 0, f"interrupted at call {at}"
        if done:
            break
    assert at > 60
    assert_empty(offloader)


@pytest.mark.parametrize("last", ["allocate", "write_ranges"])
def test_an_interrupt_while_a_row_is_begun_leaves_all_of_it_in_memory(
    last: str, make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloader = make_offloader(engine="memory")
    saved = Saved(offloader, activations(FULL - 1))
    spool = offloader.tiers.spool
    assert spool is not None

    def interrupted(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(spool, last, interrupted)
        with pytest.raises(KeyboardInterrupt):
            offloader.synchronize()
    assert offloader.core.pending_bytes == 0
    assert states(offloader) == [State.RESIDENT] * (FULL - 1)
    for index in reversed(range(FULL - 1)):
        saved.check(index)
    assert_empty(offloader)


class Interrupting(tuple[Any, ...]):
    """The pieces of an extent, as they are when an interrupt comes just after it was taken."""

    __slots__ = ()

    def __len__(self) -> int:
        raise KeyboardInterrupt


def test_an_interrupt_between_taking_room_and_using_it(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloader = make_offloader(engine="memory")
    saved = Saved(offloader, activations(FULL - 1))
    spool = offloader.tiers.spool
    assert spool is not None
    allocate = spool.allocate

    def interrupted(nbytes: int) -> Any:
        extent = allocate(nbytes)
        extent.segments = Interrupting(extent.segments)
        return extent

    with monkeypatch.context() as patched:
        patched.setattr(spool, "allocate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            offloader.synchronize()
    assert offloader.core.pending_bytes == 0
    assert spool_statistics(offloader).allocated_bytes == 0
    for index in reversed(range(FULL - 1)):
        saved.check(index)
    assert_empty(offloader)


class OneRangeEngine(PosixEngine):
    """As an engine of somebody else's that knows no rows."""

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
def test_where_each_goes_alone(options: dict[str, Any], make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(**({"engine": "memory"} | options))
    assert isinstance(offloader.tiers.movers["cpu"], CpuMover)
    in_rows_of_one = not {"prefetch_bytes", "host_budget", "pending_bytes"}.isdisjoint(options)
    assert isinstance(offloader.tiers.movers["cpu"], RowMover) == in_rows_of_one
    saved = Saved(offloader, activations(2 * FULL))
    offloader.synchronize()
    assert offloader.core.accounts.moved_bytes > 0
    assert not any(isinstance(record.extent, Row) for record in records_of(offloader))
    for index in reversed(range(2 * FULL)):
        saved.check(index)
    assert_empty(offloader)


def test_the_next_step_begins_its_own_rows(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine="memory")
    for count in (FULL + 1, 2 * FULL - 1, 1, 3):
        saved = Saved(offloader, activations(count))
        for index in reversed(range(count)):
            saved.check(index)
    assert mover_of(offloader)._open.records == {}
    assert_empty(offloader)


def test_bodies_of_a_row_lie_apart_in_memory_and_side_by_side_on_disk() -> None:
    class Fake:
        def __init__(self, nbytes: int, pad: int, head: int, io_bytes: int) -> None:
            self.nbytes = nbytes
            self.io = type("Io", (), {"pad": pad, "io_begin": head, "io_bytes": io_bytes})

    chance = random.Random(3)
    for alignment in (1, 512, 4096):
        step = max(alignment, 512)
        fakes = []
        for _ in range(20):
            pad = chance.randrange(step)
            head = -pad % alignment
            nbytes = chance.randrange(BOUNCE_BYTES, SMALL_BYTES)
            fakes.append(Fake(nbytes, pad, head, (nbytes - head) // alignment * alignment))
        row = Row(fakes, alignment)  # type: ignore[arg-type]
        assert row.io_bytes == sum(fake.io.io_bytes for fake in fakes)  # type: ignore[attr-defined]
        ends = [start + fake.nbytes for start, fake in zip(row.starts, fakes, strict=True)]
        for (_, end), (start, _) in itertools.pairwise(zip(row.starts, ends, strict=True)):
            assert end <= start
        bodies = [fake.io.io_bytes for fake in fakes]  # type: ignore[attr-defined]
        assert row.offsets == [0, *itertools.accumulate(bodies[:-1])]
        for start, fake in zip(row.starts, fakes, strict=True):
            assert start % step == fake.io.pad  # type: ignore[attr-defined]
            assert (start + fake.io.io_begin) % alignment == 0  # type: ignore[attr-defined]


def test_many_that_are_copied_are_looked_at_in_turn(either: str, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=GateEngine)
    tensors = activations(LOOK_AT + 6, BOUNCE_BYTES)
    saved = Saved(offloader, tensors)
    mover, records = mover_of(offloader), records_of(offloader)
    saved.check(1)  # looks at the first ones; this one is not being copied any more
    turn = list(mover._in_place)
    assert len(turn) == LOOK_AT + 6
    storage = tensors[4].untyped_storage()
    storage.resize_(0)
    mover.notice_resized()
    seen = [record.index for record in turn[:LOOK_AT] if record.index != 1]
    assert [record.index for record in mover._in_place][-len(seen) :] == seen
    assert 1 not in [record.index for record in mover._in_place]
    mover.notice_resized()
    assert [record.was_resized for record in records] == [record.index == 4 for record in records]
    storage.resize_(BOUNCE_BYTES)
    saved.graphs.clear()
    only_engine(offloader).open()
    assert_empty(offloader)


def test_a_joint_is_not_promoted_before_it_is_begun() -> None:
    Joint().promote()


def test_many_threads(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine="memory")
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            chance = random.Random(seed)
            for _ in range(6):
                count = chance.randrange(1, 10)
                saved = Saved(offloader, activations(count, chance.choice([BOUNCE_BYTES, 100 * KIB, NBYTES])))
                for index in reversed(range(count)):
                    saved.drop(index) if chance.random() < 0.3 else saved.check(index)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not failed
    assert_empty(offloader)
