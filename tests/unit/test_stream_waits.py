"""What compute streams wait for our copies: counted, told apart, never waited for, and what plans learn from it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from actoffload import Offloader
from actoffload.testing.fakedevice import FakeDevice, FakeStream
from actoffload.tiers.copy_streams import CopyStreams
from actoffload.tiers.timers import StreamWaits, WaitFor
from tests.harness import (
    Chain,
    after_fork_in_child,
    assert_same_gradients,
    batch,
    copy_in,
    copy_out,
    gradients,
    recorder_of,
    simulated,
    train_step,
)

MIB = 1 << 20
NOTHING = {WaitFor.ROOM: 0.0, WaitFor.DATA: 0.0}


def _bytes(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def _copy_out_that_is_waited_for(transfers: CopyStreams, nbytes: int = 1_000_000) -> torch.Tensor:
    """The host's side, which has to live until the copy is done."""
    host = _bytes(nbytes)
    transfers.release_sources(copy_out(transfers, _bytes(nbytes), host))
    return host


def test_waits_for_room_and_for_data_are_counted_apart() -> None:
    device = FakeDevice("lazy", bytes_per_s=1e6)
    transfers = CopyStreams(device)
    written, read = _copy_out_that_is_waited_for(transfers), _bytes(2_000_000)
    device.before_kernel()
    assert transfers.waits.take() == pytest.approx({WaitFor.ROOM: 1.0, WaitFor.DATA: 0.0})
    incoming, filled = copy_in(transfers, read)
    transfers.before_use(incoming, lambda: filled)
    transfers.before_use(incoming, lambda: filled)  # it has been waited for
    device.before_kernel()
    assert transfers.waits.take() == pytest.approx({WaitFor.ROOM: 0.0, WaitFor.DATA: 2.0})
    unused, _ = copy_in(transfers, read[:500_000])
    transfers.drop_unused(unused)
    device.before_kernel()
    assert transfers.waits.take() == pytest.approx({WaitFor.ROOM: 0.5, WaitFor.DATA: 0.0})
    assert device.stall_s == pytest.approx(3.5)
    assert bool((filled == written[0]).all())


def _step(device: FakeDevice, offloader: Offloader, model: nn.Module) -> None:
    with device:
        with offloader:
            loss = model(batch()).square().sum()
        loss.backward()


def test_during_a_capture_nothing_is_asked_nor_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask for an event is refused then, and ends the capture; an event would be a part of the graph."""
    device, model = FakeDevice("lazy", bytes_per_s=1e6), Chain()
    with simulated(device, pending_bytes=1) as offloader:
        for _ in range(3):
            _step(device, offloader, model)
        with monkeypatch.context() as patch:
            patch.setattr(device, "done", lambda event: pytest.fail("an event was asked for"))
            patch.setattr(device, "timestamp", lambda stream: pytest.fail("an event in a graph"))
            device.capturing = True
            _step(device, offloader, model)
            device.capturing = False
        device.finish()
        assert offloader.statistics().wait_s == pytest.approx(device.stall_s)


def test_a_forked_child_asks_the_device_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child of a process that used CUDA cannot: it has no tensors there, but may enter a context of the parent."""
    device, model = FakeDevice("lazy", bytes_per_s=1e6), Chain()
    with simulated(device, pending_bytes="1MiB") as offloader:
        _step(device, offloader, model)
        recorder_of(offloader).begin()
        with device, offloader:
            loss = model(batch()).square().sum()
        after_fork_in_child(offloader)
        asked: list[str] = []

        def refused(name: str, *_: object) -> Any:
            asked.append(name)
            raise RuntimeError("CUDA error: initialization error")

        for name in ("is_capturing", "done", "timestamp", "record", "synchronize", "wait", "used_on"):
            monkeypatch.setattr(device, name, partial(refused, name))
        del loss
        with offloader:
            pass
        assert offloader.statistics().live_records == 0
        assert offloader.report()
        assert not recorder_of(offloader).active, "it would ask for the time of what dies"
        assert asked == []


def test_waits_that_nobody_takes_are_not_timed_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actoffload.tiers.timers.MOST_OPEN", 2)
    device = FakeDevice("lazy")
    waits = StreamWaits(device)
    for _ in range(2):
        begin = waits.begin(device.compute)
        assert begin is not None
        waits.end(WaitFor.ROOM, 0, device.compute, begin)
    assert waits.begin(device.compute) is None
    device.before_kernel()
    assert waits.take() == NOTHING
    assert waits.begin(device.compute) is not None


@pytest.mark.parametrize("what", ["done", "seconds_between", "timestamp"])
def test_a_device_that_breaks_is_not_timed_any_more(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    device = FakeDevice("lazy")
    waits = StreamWaits(device)
    begin = waits.begin(device.compute)
    assert begin is not None
    device.before_kernel()
    if what != "timestamp":
        assert waits.end(WaitFor.ROOM, 0, device.compute, begin) is not None
        device.before_kernel()

    def broken(*_: object) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(device, what, broken)
    if what == "timestamp":
        assert waits.end(WaitFor.ROOM, 0, device.compute, begin) is None
    assert waits.take() == NOTHING
    assert waits.begin(device.compute) is None


def test_a_device_without_timed_events_works(monkeypatch: pytest.MonkeyPatch) -> None:
    device, model = FakeDevice("lazy"), Chain()
    asked: list[FakeStream] = []

    def timestamp(stream: FakeStream) -> Any:
        asked.append(stream)
        raise RuntimeError("this backend has no timing")

    monkeypatch.setattr(device, "timestamp", timestamp)
    expected = train_step(model, batch())
    with simulated(device, pending_bytes=1, policy="all") as offloader:
        for _ in range(3):
            _step(device, offloader, model)
            assert_same_gradients(gradients(model), expected)
        device.finish()
        assert device.violations == []
        assert len(asked) == 1, "asked once"
        assert offloader.statistics().wait_s == 0


@pytest.mark.parametrize("policy", ["all", "auto"])
def test_statistics_tell_what_streams_waited_for(policy: str) -> None:
    device, model = FakeDevice("lazy", bytes_per_s=1e6), Chain()
    expected = train_step(model, batch())
    with simulated(device, pending_bytes=1, policy=policy) as offloader:
        with offloader:
            pass  # a forward that saves nothing
        for _ in range(2):
            _step(device, offloader, model)
            assert_same_gradients(gradients(model), expected)
        device.finish()
        statistics = offloader.statistics()
        assert statistics.pack_wait_s > 0
        assert statistics.unpack_wait_s > 0
        assert statistics.wait_s == pytest.approx(device.stall_s)
        assert offloader.statistics().wait_s == statistics.wait_s, "once"
