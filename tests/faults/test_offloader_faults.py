"""The offloader when the storage below fails, fills up or lies: the step goes on where it can, never with a guess."""

from __future__ import annotations

import contextlib
import errno
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from actoffload import Offloader
from actoffload.errors import ChecksumError, OffloaderClosedError, StorageReadError
from actoffload.storage.engines.base import IoKind
from actoffload.testing.engine_suite import poke_file
from actoffload.testing.faults import FailingEngine, FullEngine, GateEngine, SlowEngine
from tests.harness import (
    ON_EACH_DEVICE,
    WAIT_S,
    Chain,
    MakeOffloader,
    assert_empty,
    assert_same_bits,
    assert_same_gradients,
    batch,
    descriptors,
    flush_autograd,
    forget_failed_backward,
    gradients,
    no_garbage_collection,
    only_engine,
    pool_bytes,
    spool_of,
    spool_statistics,
    train_step,
    wait_until,
)
from tests.unit.saving import HoldEngine

ROW_BYTES = 128 * 64 * 4
"""One activation of `Chain`; it has 4 layers and saves 12 of them and its input."""


def _assert_trains_alike(offloader: Offloader, depth: int = 4, between: Callable[[], object] | None = None) -> None:
    model, x = Chain(depth=depth), batch()
    assert_same_gradients(train_step(model, x, offloader, between=between), train_step(model, x))


def _steps_with_one_warning(offloader: Offloader, words: str, steps: int = 3) -> int:
    """Train with gradients as in plain PyTorch and exactly one warning; returns how often something was degraded."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            _assert_trains_alike(offloader, between=offloader.synchronize)
            assert_empty(offloader)
    messages = [str(warning.message) for warning in caught if issubclass(warning.category, RuntimeWarning)]
    assert len(messages) == 1
    assert messages[0].startswith(f"actoffload: {words}")
    assert "the step goes on" in messages[0]
    degraded = offloader.statistics().degraded
    assert list(degraded) == [words]
    assert words in offloader.report()
    return degraded[words]


def test_a_disk_that_fills_up_in_mid_step(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=partial(FullEngine, capacity_bytes=6 * ROW_BYTES))
    assert _steps_with_one_warning(offloader, "write failed") >= 6
    statistics = offloader.statistics()
    assert 0 < statistics.nvme_written_bytes <= 6 * ROW_BYTES
    assert statistics.nvme_read_bytes > 0


def test_a_small_nvme_budget(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(nvme_budget=6 * ROW_BYTES)
    assert _steps_with_one_warning(offloader, "no room on disk") >= 6
    statistics = offloader.statistics()
    assert 0 < statistics.nvme_peak_bytes <= 6 * ROW_BYTES
    assert statistics.nvme_read_bytes > 0
    assert statistics.kept_bytes["degraded"] >= 6 * ROW_BYTES


@pytest.mark.parametrize(("first", "count"), [(1, 1), (5, 2), (1, None)])
def test_writes_that_fail(make_offloader: MakeOffloader, first: int, count: int | None) -> None:
    offloader = make_offloader(engine=partial(FailingEngine, kind=IoKind.WRITE, first=first, count=count))
    degraded = _steps_with_one_warning(offloader, "write failed", steps=2)
    assert degraded == count if count is not None else degraded >= 24
    assert (offloader.statistics().nvme_read_bytes > 0) == (count is not None)


def test_the_room_of_a_failed_write_is_free_while_its_tensor_lives(make_offloader: MakeOffloader) -> None:
    engine = partial(FailingEngine, kind=IoKind.WRITE, first=1, count=1)
    offloader = make_offloader(engine=engine, nvme_budget=ROW_BYTES * 3 // 2)
    x = batch().requires_grad_()
    losses: list[Tensor] = []

    def forward() -> None:
        for factor in (2.0, 3.0):  # the budget has room for one at a time
            with offloader:
                losses.append((x * factor).sin().sum())
            offloader.synchronize()

    with pytest.warns(RuntimeWarning, match="write failed"):
        forward()
    assert offloader.statistics().degraded == {"write failed": 1}
    assert offloader.statistics().nvme_written_bytes > 0
    for factor, loss in zip((2.0, 3.0), losses, strict=True):
        assert_same_bits(torch.autograd.grad(loss, x), torch.autograd.grad((x * factor).sin().sum(), x))


def test_a_failed_write_under_warnings_as_errors_harms_nothing(make_offloader: MakeOffloader) -> None:
    """The warning is raised where the user's filter applies, and nothing hangs or leaks."""
    offloader = make_offloader(engine=FullEngine)
    model, x = Chain(), batch()
    expected = train_step(model, x)
    raised = 0
    for _ in range(3):
        try:
            found = train_step(model, x, offloader, between=offloader.synchronize)
        except RuntimeWarning as warning:
            raised += "write failed" in str(warning)
            model.zero_grad()
        else:
            assert_same_gradients(found, expected)
    assert raised == 1
    forget_failed_backward()
    assert_empty(offloader)


def test_a_slow_disk_without_a_budget_keeps(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(
        engine=partial(SlowEngine, threads=1, bandwidth_bytes_per_s=1e6), pending_bytes=3 * ROW_BYTES
    )
    _assert_trains_alike(offloader)
    statistics = offloader.statistics()
    assert statistics.kept_bytes["pressure"] >= 6 * ROW_BYTES
    assert statistics.pack_wait_s == 0
    assert_empty(offloader)


def test_a_slow_disk_with_a_budget_is_waited_for(make_offloader: MakeOffloader) -> None:
    budget = 4 * ROW_BYTES
    offloader = make_offloader(
        engine=partial(SlowEngine, threads=1, bandwidth_bytes_per_s=5e6), device_budget=budget, prefetch_bytes=ROW_BYTES
    )
    _assert_trains_alike(offloader, depth=8)
    statistics = offloader.statistics()
    assert statistics.resident_peak_bytes <= budget
    assert statistics.baseline_peak_bytes > 5 * budget
    assert statistics.pack_wait_s > 0
    assert "pressure" not in statistics.kept_bytes


def _backward_of_one(offloader: Offloader) -> tuple[Tensor, Tensor]:
    x = batch(seed=9).requires_grad_()
    with offloader:
        y = x.sin().exp()
    offloader.synchronize()
    return x, y.sum()


def test_a_failed_read_of_the_only_copy_fails_the_step_and_no_other(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=partial(FailingEngine, kind=IoKind.READ, first=1, count=2))
    for _ in range(2):  # two calls fail
        x, loss = _backward_of_one(offloader)
        with pytest.raises(StorageReadError) as caught:
            loss.backward()
        assert caught.value.errno == errno.EIO
        assert "offset" in str(caught.value)
        assert x.grad is None
        del caught, loss
        forget_failed_backward()
        assert_empty(offloader)
    _assert_trains_alike(offloader, between=offloader.synchronize)
    assert offloader.statistics().nvme_read_bytes > 0
    assert offloader.statistics().degraded == {}


def test_a_failed_read_leaves_no_cycle(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=partial(FailingEngine, kind=IoKind.READ, first=1, count=1))
    with no_garbage_collection():
        _, loss = _backward_of_one(offloader)
        with contextlib.suppress(StorageReadError):
            loss.backward()
        del loss
        flush_autograd()
        assert_empty(offloader)


def test_a_read_that_failed_once_may_be_tried_again(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=partial(FailingEngine, kind=IoKind.READ, first=1, count=1))
    x, loss = _backward_of_one(offloader)
    with pytest.raises(StorageReadError):
        loss.backward(retain_graph=True)
    loss.backward()
    assert_same_bits([x.grad], torch.autograd.grad(x.sin().exp().sum(), x))


def test_corruption_on_disk_is_found(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(verify=True)
    _, loss = _backward_of_one(offloader)
    (file,) = spool_of(offloader).files
    poke_file(file, 8192, b"\x55" * 512)
    with pytest.raises(ChecksumError, match="crc32"):
        loss.backward()
    del loss
    forget_failed_backward()
    _assert_trains_alike(offloader, between=offloader.synchronize)


# -- the gate: decisions while I/O waits or runs -----------------------------------------------------------------------


def test_unpack_before_a_write_begins_cancels_the_write(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=partial(GateEngine, threads=1), min_bytes=ROW_BYTES)
    _assert_trains_alike(offloader)
    statistics = offloader.statistics()
    assert statistics.cancelled_bytes == statistics.forwarded_bytes == statistics.baseline_peak_bytes
    assert (statistics.nvme_written_bytes, statistics.nvme_read_bytes) == (0, 0)
    assert_empty(offloader)


def test_a_write_in_flight_at_unpack_is_forwarded_and_its_extent_waits(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=partial(HoldEngine, threads=1))
    engine = only_engine(offloader)
    x = batch().requires_grad_()
    with offloader:
        loss = x.exp().sum()
    assert engine.entered.wait(WAIT_S)
    loss.backward()
    assert_same_bits([x.grad], torch.autograd.grad(x.exp().sum(), x))
    statistics = offloader.statistics()
    assert statistics.forwarded_bytes == ROW_BYTES
    assert statistics.nvme_read_bytes == 0
    assert statistics.live_records == 0
    spool = spool_statistics(offloader)
    assert spool.busy_extents == 1
    assert spool.allocated_bytes > 0
    engine.leave.set()
    assert_empty(offloader)


@pytest.mark.parametrize("kind", [IoKind.WRITE, IoKind.READ])
def test_a_graph_dropped_while_io_runs_leaves_memory_and_extent_alone_until_it_ends(
    make_offloader: MakeOffloader, kind: IoKind
) -> None:
    offloader = make_offloader(engine=partial(HoldEngine, threads=1, kind=kind), prefetch_bytes="1GiB")
    engine = only_engine(offloader)
    x = batch().requires_grad_()
    with offloader:
        loss = x.exp().sin().exp().sum()
    if kind is IoKind.READ:  # the first unpack waits for its own read: prefetch the other one
        offloader.synchronize()
        engine.skip = 1
        node: Any = loss.grad_fn
        first = node.next_functions[0][0]._saved_result.detach()
        assert first.shape == (128, 64)
        del node, first
    assert engine.entered.wait(WAIT_S)
    del loss
    assert offloader.statistics().live_records == 0
    busy = spool_statistics(offloader)
    assert busy.busy_extents >= 1
    assert pool_bytes(offloader) > 0, "its memory is not free yet"
    held = {(transfer.extent.arena, transfer.extent.offset) for transfer in spool_of(offloader)._live}
    taken = [spool_of(offloader).allocate(ROW_BYTES) for _ in range(3)]
    assert not held & {(extent.arena, extent.offset) for extent in taken}
    for extent in taken:
        spool_of(offloader).free(extent)
    engine.leave.set()
    assert_empty(offloader)


# -- close and abort in the middle -------------------------------------------------------------------------------------


def test_abort_in_mid_step(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    model, x = Chain(), batch()
    before = descriptors()
    with offloader:
        loss = model(x).square().sum()
    offloader.synchronize()
    offloader.abort()
    with pytest.raises(OffloaderClosedError, match=r"after abort\(\)"):
        loss.backward()
    assert descriptors() < before
    model.zero_grad()
    del loss
    forget_failed_backward()
    assert offloader.statistics().live_records == 0
    with pytest.raises(OffloaderClosedError):
        offloader.__enter__()


def test_abort_before_anything_was_written_loses_nothing(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(engine=partial(GateEngine, threads=1))
    _assert_trains_alike(offloader, between=offloader.abort)
    assert offloader.statistics().live_records == 0
    assert offloader.statistics().nvme_written_bytes == 0


def test_close_with_a_living_graph(make_offloader: MakeOffloader) -> None:
    model, x = Chain(), batch()
    expected = train_step(model, x)
    before = descriptors()
    offloader = make_offloader()
    with offloader:
        loss = model(x).square().sum()
    offloader.close()
    offloader.close()
    assert descriptors() > before  # backward will need them
    loss.backward()
    assert_same_gradients(gradients(model), expected)
    assert offloader.statistics().nvme_read_bytes > 0
    for thread in threading.enumerate():
        if thread.name == "actoffload-close":
            thread.join(WAIT_S)
    assert offloader.statistics().live_records == 0
    assert descriptors() == before
    offloader.close()


@ON_EACH_DEVICE
@pytest.mark.parametrize("started", [0, 1])
def test_where_the_system_starts_no_more_threads_nothing_moves_and_training_goes_on(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch, where: str, started: int
) -> None:
    start, names = threading.Thread.start, []

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("actoffload"):
            names.append(thread.name)
            if len(names) > started:
                raise RuntimeError("can't start new thread")
        start(thread)

    before = set(threading.enumerate())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    model, x = Chain().to(where), batch().to(where)
    expected = train_step(model, x)
    offloader = make_offloader(engine="posix", policy="all")
    with pytest.warns(RuntimeWarning, match="nothing moves: the system starts no more threads"):
        found = train_step(model, x, offloader)
    assert_same_gradients(found, expected)
    assert offloader.statistics().moved_bytes == 0
    assert "the system starts no more threads" in offloader.report()
    offloader.close()
    wait_until(lambda: set(threading.enumerate()) <= before, "threads are left")
