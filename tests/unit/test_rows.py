"""Small records of CPU tensors go to disk, and come back, several in one transfer."""

from __future__ import annotations

import itertools
import random
import tempfile
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actoffload import OffloadConfig, Offloader
from actoffload.cpu_tier import BOUNCE_BYTES, CpuMover
from actoffload.engines.base import IoKind
from actoffload.engines.posix import PosixEngine
from actoffload.record import State
from actoffload.row_tier import SMALL_BYTES, RowMover
from actoffload.rows import Joint, Row, lay_out
from actoffload.testing.faults import GateEngine
from actoffload.tiers import LOOK_AT
from tests.harness import (
    WAIT_S,
    MakeOffloader,
    assert_empty,
    only_engine,
    same_bits,
)
from tests.unit.rows import FULL, KIB, NBYTES, CountingEngine, Saved, activations, mover_of, records_of, states


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
    edges = 2 * mover_of(offloader).alignment  # before and after the body of each
    assert 2 * FULL * (NBYTES - edges) <= moved <= 2 * FULL * NBYTES


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


def row_being_read(make_offloader: MakeOffloader) -> tuple[Offloader, Saved]:
    """One row, which is on its way back and waits at a gate."""
    offloader = make_offloader(engine=GateEngine)
    saved = Saved(offloader, activations(FULL))
    gate = only_engine(offloader)
    gate.open()
    offloader.synchronize()
    gate.shut()
    with offloader.core.lock:
        assert mover_of(offloader).bring(records_of(offloader)[0], urgent=False)
    assert states(offloader) == [State.FETCHING] * FULL
    return offloader, saved


def test_one_dies_while_its_row_is_read(make_offloader: MakeOffloader) -> None:
    offloader, saved = row_being_read(make_offloader)
    saved.drop(0)
    saved.drop(2)
    only_engine(offloader).open()
    for index in (1, 3):
        saved.check(index)
    assert_empty(offloader)


def test_a_row_that_nobody_wants_read_is_taken_back(make_offloader: MakeOffloader) -> None:
    offloader, saved = row_being_read(make_offloader)
    for index in range(FULL):
        saved.drop(index)
    only_engine(offloader).open()
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
        row = Row(fakes)  # type: ignore[arg-type]
        lay_out(row, step)
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
