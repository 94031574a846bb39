"""Rows that are being filled and written: who waits, who leaves, what counts as on its way."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest

from actoffload import Offloader
from actoffload.engines.base import IoKind
from actoffload.record import State
from actoffload.row_tier import LARGE_ROW_BYTES, OF_WHAT_IS_SAVED, ROW_BYTES
from actoffload.rows import Row
from actoffload.testing.faults import GateEngine
from tests.harness import (
    WAIT_S,
    MakeOffloader,
    assert_empty,
    only_engine,
    spool_statistics,
)
from tests.unit.rows import FULL, NBYTES, CountingEngine, Saved, activations, mover_of, records_of, states


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


def test_rows_are_larger_where_more_is_saved(either: str, make_offloader: MakeOffloader) -> None:
    made: list[CountingEngine] = []

    def engine(file: Any) -> CountingEngine:
        made.append(CountingEngine(file))
        return made[-1]

    offloader = make_offloader(engine=engine, pending_bytes="64GiB")
    count = 2 * LARGE_ROW_BYTES * OF_WHAT_IS_SAVED // NBYTES // 4
    saved = Saved(offloader, activations(count))
    offloader.synchronize()
    sizes = [length for kind, length in made[0].requests if kind is IoKind.WRITE]
    assert sizes[0] <= ROW_BYTES + NBYTES
    assert max(sizes) > ROW_BYTES + NBYTES
    assert max(sizes) <= count * NBYTES // OF_WHAT_IS_SAVED + NBYTES
    for index in reversed(range(count)):
        saved.check(index)
    assert_empty(offloader)


@pytest.mark.parametrize("options", [{"prefetch_bytes": "3MiB"}, {"pending_bytes": "3MiB"}])
def test_a_row_is_no_larger_than_half_of_what_the_user_allows(
    options: dict[str, str], make_offloader: MakeOffloader
) -> None:
    offloader = make_offloader(engine="memory", **options)
    mover = mover_of(offloader)
    offloader.core.accounts.baseline_peak_bytes = 1 << 40
    saved = Saved(offloader, activations(ROW_BYTES // NBYTES))
    assert mover._full_bytes == 3 * ROW_BYTES // 2
    for index in reversed(range(ROW_BYTES // NBYTES)):
        saved.check(index)
    assert_empty(offloader)


def test_room_goes_with_the_last_of_a_row_whatever_the_order(either: str, make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine="memory")
    count = ROW_BYTES // NBYTES
    saved = Saved(offloader, [*activations(count), *activations(1)])
    offloader.synchronize()
    spool = offloader.tiers.spool
    assert spool is not None
    row = records_of(offloader)[0].extent
    before = spool.statistics().busy_extents, offloader._lane is not None
    for index in (2, 0, 1, 3):
        assert not row.extent._freed
        saved.check(index)
    assert (row.users, row.records, row.extent._freed) == (0, [], True)
    assert before[0] == 0
    saved.check(count)
    assert_empty(offloader)
