"""Rows when owners free memory, disks fail or are full, and sinks raise."""

from __future__ import annotations

import errno
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from actoffload import Offloader
from actoffload.engines.base import IoKind
from actoffload.engines.posix import PosixEngine
from actoffload.errors import OffloaderClosedError, StorageReadError
from actoffload.record import State
from actoffload.row_tier import ROW_BYTES, SMALL_BYTES
from actoffload.rows import Row
from actoffload.testing.faults import FailingEngine, FullEngine, GateEngine, ShortEngine
from tests.harness import (
    WAIT_S,
    MakeOffloader,
    assert_empty,
    forget_failed_backward,
    only_engine,
)
from tests.unit.rows import FULL, KIB, NBYTES, Saved, activations, mover_of, records_of, states


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
