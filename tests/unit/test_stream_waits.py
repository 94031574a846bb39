"""What compute streams wait for our copies: counted, told apart, never waited for, and what plans learn from it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from actoffload import OffloadConfig, Offloader
from actoffload.device_tier import DeviceMover
from actoffload.planners.feedback import Observed
from actoffload.stream_waits import StreamWaits, WaitFor
from actoffload.testing.fakedevice import FakeDevice, FakeEvent, FakeStream
from actoffload.transfer import ReleaseWindow, Transfers
from tests.harness import Chain, assert_same_gradients, batch, gradients

MIB = 1 << 20
NOTHING = {WaitFor.ROOM: 0.0, WaitFor.DATA: 0.0}


def _bytes(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def _copy_out_that_is_waited_for(transfers: Transfers, nbytes: int = 1_000_000) -> torch.Tensor:
    """The host's side, which has to live until the copy is done."""
    host = _bytes(nbytes)
    transfers.release_source(transfers.begin_out(_bytes(nbytes), host))
    return host


def test_waits_for_room_and_for_data_are_counted_apart() -> None:
    device = FakeDevice("lazy", bytes_per_s=1e6)
    transfers = Transfers(device)
    written, read = _copy_out_that_is_waited_for(transfers), _bytes(2_000_000)
    device.before_kernel()
    assert transfers.waits.take() == pytest.approx({WaitFor.ROOM: 1.0, WaitFor.DATA: 0.0})
    incoming = transfers.begin_in(read, 0)
    transfers.before_use(incoming)
    transfers.before_use(incoming)  # it has been waited for
    device.before_kernel()
    assert transfers.waits.take() == pytest.approx({WaitFor.ROOM: 0.0, WaitFor.DATA: 2.0})
    unused = transfers.begin_in(read[:500_000], 0)
    transfers.drop_unused(unused)
    device.before_kernel()
    assert transfers.waits.take() == pytest.approx({WaitFor.ROOM: 0.5, WaitFor.DATA: 0.0})
    assert device.stall_s == pytest.approx(3.5)
    assert bool((incoming.tensor == written[0]).all())


def test_what_is_not_over_is_counted_later() -> None:
    device = FakeDevice("lazy", bytes_per_s=1e6)
    transfers = Transfers(device)
    hosts = [_copy_out_that_is_waited_for(transfers)]
    other = FakeStream("another compute stream")
    with device.on(other):
        hosts.append(_copy_out_that_is_waited_for(transfers, 250_000))
    assert transfers.waits.take() == NOTHING
    with device.on(other):
        device.before_kernel()
    assert transfers.waits.take() == NOTHING, "those of a device in their order"
    device.before_kernel()
    assert transfers.waits.take()[WaitFor.ROOM] == pytest.approx(1.25), "the first copy was before the second"
    assert transfers.waits.take() == NOTHING
    assert len(hosts) == 2


def test_of_several_devices_the_one_that_waited_most_counts() -> None:
    device = FakeDevice("lazy")
    waits = StreamWaits(device)
    for index, why, seconds in ((0, WaitFor.ROOM, 2.0), (1, WaitFor.DATA, 3.0), (0, WaitFor.DATA, 0.5)):
        pending = device.record(FakeStream("a copy"))
        begin = waits.begin(device.compute, pending)
        assert begin is not None
        device.before_kernel()
        device.now_s += seconds
        assert waits.end(why, index, device.compute, begin) is not None
        device.before_kernel()
    assert waits.take() == pytest.approx({WaitFor.ROOM: 0.0, WaitFor.DATA: 3.0})
    assert waits.take() == NOTHING


def test_a_copy_that_is_in_time_costs_no_wait() -> None:
    device = FakeDevice("lazy", bytes_per_s=1e6)
    transfers = Transfers(device)
    host = _bytes(1_000_000)
    incoming = transfers.begin_in(host, 0)
    device.before_kernel()
    device.advance(5.0)
    device.advance(5.0)
    transfers.before_use(incoming)
    device.before_kernel()
    assert len(transfers.waits._open) == 0, "it was over: nothing is timed"
    assert transfers.waits.take() == NOTHING
    assert device.stall_s == 0
    assert len(host) == 1_000_000


def test_a_graph_that_is_captured_takes_no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice("lazy")
    transfers = Transfers(device)
    incoming = transfers.begin_in(_bytes(4096), 0)
    monkeypatch.setattr(device, "timestamp", lambda stream: pytest.fail("an event in a graph"))
    device.capturing = True
    transfers.before_use(incoming)
    assert incoming.awaited_by, "it is waited for all the same"


def test_during_a_capture_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask for an event is refused then, and ends the capture."""
    device = FakeDevice("lazy", bytes_per_s=1e6)
    config = OffloadConfig(target="host", path=tmp_path, min_bytes=0, keep_last_bytes=0, pending_bytes=1)
    offloader = Offloader(config, accelerator=device)
    model = Chain()
    for _ in range(3):
        with device:
            with offloader:
                loss = model(batch()).sum()
            loss.backward()
        del loss
    (mover,) = offloader.tiers.movers.values()
    assert isinstance(mover, DeviceMover)
    assert len(mover.transfers.waits._open) > 0
    with monkeypatch.context() as patch:
        patch.setattr(device, "done", lambda event: pytest.fail("an event was asked for"))
        patch.setattr(device, "timestamp", lambda stream: pytest.fail("an event in a graph"))
        device.capturing = True
        with device:
            with offloader:
                loss = model(batch()).sum()
            loss.backward()
        device.capturing = False
    del loss
    device.finish()
    assert offloader.statistics().wait_s == pytest.approx(device.stall_s)
    offloader.close()


def test_a_forked_child_asks_the_device_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child of a process that used CUDA cannot: it has no tensors there, but may enter a context of the parent."""
    device = FakeDevice("lazy", bytes_per_s=1e6)
    config = OffloadConfig(target="host", path=tmp_path, min_bytes=0, keep_last_bytes=0, pending_bytes=1)
    offloader = Offloader(config, accelerator=device)
    model = Chain()
    with device:
        with offloader:
            loss = model(batch()).sum()
        loss.backward()
        del loss
        device.finish()
        (mover,) = offloader.tiers.movers.values()
        assert isinstance(mover, DeviceMover)
        assert len(mover.transfers.waits._open) > 0
        mover.window._limit_bytes = 1 << 20
        with offloader:
            loss = model(batch()).sum()
    mover.transfers.waits._open.append((WaitFor.DATA, 0, FakeEvent(FakeStream("x")), FakeEvent(FakeStream("x"))))
    assert mover.window.held_bytes > 0
    offloader.recorder.begin()
    offloader.after_fork_in_child()  # as if this were the child
    asked: list[str] = []

    def refused(name: str, *_: object) -> Any:
        asked.append(name)
        raise RuntimeError("CUDA error: initialization error")

    for name in ("is_capturing", "done", "timestamp", "record", "synchronize", "wait", "used_on"):
        monkeypatch.setattr(device, name, partial(refused, name))
    del loss
    assert mover.window.held_bytes == 0
    with offloader:
        pass
    assert offloader.statistics().live_records == 0
    assert offloader.report()
    assert not mover.capturing()
    assert not offloader.recorder.active, "it would ask for the time of what dies"
    assert asked == []


def test_waits_that_nobody_takes_are_not_timed_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actoffload.stream_waits.MOST_OPEN", 2)
    device = FakeDevice("lazy")
    waits, pending = StreamWaits(device), device.record(FakeStream("a copy"))
    for _ in range(2):
        begin = waits.begin(device.compute, pending)
        assert begin is not None
        waits.end(WaitFor.ROOM, 0, device.compute, begin)
    assert waits.begin(device.compute, pending) is None
    device.before_kernel()
    assert waits.take() == NOTHING
    assert waits.begin(device.compute, pending) is not None


@pytest.mark.parametrize("what", ["done", "seconds_between", "timestamp"])
def test_a_device_that_breaks_is_not_timed_any_more(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    device = FakeDevice("lazy")
    waits = StreamWaits(device)
    pending = device.record(FakeStream("a copy"))
    begin = waits.begin(device.compute, pending)
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
    assert waits.begin(device.compute, pending) is None


def test_a_device_without_timed_events_works(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[FakeStream] = []
    waited: list[FakeEvent] = []
    device = FakeDevice("lazy")

    def timestamp(stream: FakeStream) -> Any:
        asked.append(stream)
        raise RuntimeError("this backend has no timing")

    monkeypatch.setattr(device, "timestamp", timestamp)
    real = device.wait

    def wait(stream: FakeStream, event: FakeEvent) -> None:
        waited.append(event)
        real(stream, event)

    monkeypatch.setattr(device, "wait", wait)
    transfers = Transfers(device)
    events = []
    for _ in range(3):
        incoming = transfers.begin_in(_bytes(4096), 0)
        transfers.before_use(incoming)
        events.append(incoming.event)
    assert set(events) <= set(waited)
    assert len(asked) == 1, "asked once"
    assert transfers.waits.take() == NOTHING


@pytest.mark.parametrize("policy", ["all", "auto"])
def test_statistics_tell_what_streams_waited_for(tmp_path: Path, policy: Any) -> None:
    device = FakeDevice("lazy", bytes_per_s=1e6)
    config = OffloadConfig(target="host", path=tmp_path, min_bytes=0, keep_last_bytes=0, pending_bytes=1, policy=policy)
    model = Chain()
    model(batch()).sum().backward()
    expected = gradients(model)
    with Offloader(config, accelerator=device) as offloader:
        pass  # a forward that saves nothing
    for _ in range(2):
        with device:
            with offloader:
                loss = model(batch()).sum()
            loss.backward()
        del loss
        assert_same_gradients(gradients(model), expected)
    device.finish()
    statistics = offloader.statistics()
    assert statistics.pack_wait_s > 0
    assert statistics.unpack_wait_s > 0
    assert statistics.wait_s == pytest.approx(device.stall_s)
    assert offloader.statistics().wait_s == statistics.wait_s, "once"
    offloader.close()


def test_a_step_that_is_looked_at_knows_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a plan that stalls the device would never be corrected."""
    device = FakeDevice("lazy", bytes_per_s=1e6)
    config = OffloadConfig(target="host", path=tmp_path, min_bytes=0, keep_last_bytes=0, pending_bytes=1)
    offloader = Offloader(config, accelerator=device)
    pilot = offloader._autopilot
    assert pilot is not None
    seen: list[float] = []
    observed: list[Observed] = []
    recorded = pilot._recorded

    def look(step: Observed) -> None:
        observed.append(step)
        recorded(step)

    monkeypatch.setattr(pilot, "_recorded", look)
    real = pilot._finish_step

    def finish_step() -> None:
        if pilot._began is not None:
            _, packed_s, unpacked_s, _ = pilot._began
            accounts = offloader.core.accounts
            seen.append(accounts.pack_wait_s + accounts.unpack_wait_s - packed_s - unpacked_s)
        real()

    pilot._finish_step = finish_step  # type: ignore[method-assign]
    model = Chain()
    stalls: list[float] = []
    for _ in range(3):
        before_s = device.stall_s
        with device:
            with offloader:
                loss = model(batch()).sum()
            loss.backward()
        del loss
        device.finish()
        stalls.append(device.stall_s - before_s)
    assert min(stalls) > 0
    assert seen == pytest.approx(stalls[:2])
    for step in observed:  # here the device's clock is not the host's
        waited_s = step.forward_wait_s + step.backward_wait_s
        assert 0 < waited_s <= 0.91 * step.step_s, "a part of a step is not longer than the step"
    assert len(observed) == 2
    offloader.close()


# -- what a plan expects ----------------------------------------------------------------------------------------------


def test_the_window_is_as_large_as_a_plan_expects() -> None:
    device = FakeDevice("lazy")
    transfers = Transfers(device)
    window = ReleaseWindow(transfers, None, lambda owner: None)

    def hold(count: int) -> int:
        for _ in range(count):
            window.hold(object(), transfers.begin_out(_bytes(MIB), _bytes(MIB)))
        window.advance()
        return window.held_bytes

    assert hold(70) == 64 * MIB
    window.expect(100 * MIB)
    assert hold(70) == 100 * MIB
    assert device.stall_s == 0
    window.expect(0)
    assert hold(1) == 64 * MIB
    fixed = ReleaseWindow(transfers, 4 * MIB, lambda owner: None)
    fixed.expect(100 * MIB)
    fixed.hold(object(), transfers.begin_out(_bytes(8 * MIB), _bytes(8 * MIB)))
    fixed.advance()
    assert fixed.held_bytes == 0, "the user's own limit stays"


def test_a_mover_hands_on_what_a_plan_expects(tmp_path: Path) -> None:
    offloader = Offloader(OffloadConfig(target="host", path=tmp_path), accelerator=FakeDevice("lazy"))
    (mover,) = offloader.tiers.movers.values()
    assert isinstance(mover, DeviceMover)
    mover.expect_pending(100 * MIB)
    assert mover.window._expected_bytes == 125 * MIB
    mover.expect_pending(None)
    assert mover.window._expected_bytes == 0
    mover.expect_pending(100 * MIB)
    pilot = offloader._autopilot
    assert pilot is not None
    pilot._start_over("the forward saved other sizes")
    assert mover.window._expected_bytes == 0, "there is no plan any more"
    offloader.close()
    plan = replace(offloader.plan, pending_bytes=200 * MIB)
    of_the_user = Offloader(OffloadConfig(target="host", path=tmp_path, policy=plan), accelerator=FakeDevice("lazy"))
    (mover,) = of_the_user.tiers.movers.values()
    assert isinstance(mover, DeviceMover)
    assert mover.window._expected_bytes == 250 * MIB
    of_the_user.close()
