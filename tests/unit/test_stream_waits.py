"""Waits of compute streams for our copies: counted, attributed, never awaited by the host, and used by plans."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from actoffload import Offloader
from actoffload.testing.simulated_device import NAME, SimulatedAccelerator, SimulatedDevice
from actoffload.tiers.accelerator import Accelerator
from actoffload.tiers.copy_streams import CopyStreams
from actoffload.tiers.timers import DeviceStopwatch, StreamWaits, WaitFor
from tests.harness import (
    WAIT_S,
    Chain,
    after_fork_in_child,
    assert_same_gradients,
    batch,
    copy_in,
    copy_out,
    gradients,
    hinder,
    recorder_of,
    simulated,
    train_step,
    window_bytes,
)

pytestmark = pytest.mark.simulated

NOTHING = dict.fromkeys(WaitFor, 0.0)
X = batch()


class _Timed(SimulatedAccelerator):
    """Notes the pairs of events that were timed."""

    def __init__(self) -> None:
        super().__init__()
        self.timed: list[tuple[Any, Any]] = []

    def seconds_between(self, begin: Any, end: Any) -> float:
        self.timed.append((begin, end))
        return super().seconds_between(begin, end)


@pytest.fixture
def accelerator(device: SimulatedDevice) -> _Timed:
    """Its kernels take no time, and its copies a second for each megabyte; no copy begins before a wait for it."""
    device.model(
        flops=float("inf"), memory_bytes_per_s=float("inf"), to_device_bytes_per_s=1e6, to_host_bytes_per_s=1e6,
        latency_s=0,
    )  # fmt: skip
    accelerator = _Timed()
    hinder(device, accelerator, "late copies")
    return accelerator


def _on_device(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device=NAME)


def _on_host(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8).pin_memory()


def _model() -> nn.Module:
    return Chain().to(NAME)


def test_waits_for_room_and_for_data_are_counted_apart(
    device: SimulatedDevice, accelerator: SimulatedAccelerator
) -> None:
    copies = CopyStreams(accelerator)
    written, read = _on_host(1_000_000), _on_host(2_000_000)
    copies.release_sources(copy_out(copies, _on_device(1_000_000), written))
    device.synchronize()
    assert copies.waits.take() == pytest.approx(NOTHING | {WaitFor.ROOM: 1.0, WaitFor.DATA: 0.0})
    incoming, filled = copy_in(copies, read)
    copies.before_use(incoming, lambda: filled)
    copies.before_use(incoming, lambda: filled)  # it has been waited for
    device.synchronize()
    assert copies.waits.take() == pytest.approx(NOTHING | {WaitFor.ROOM: 0.0, WaitFor.DATA: 2.0})
    copies.drop_unused(copy_in(copies, read[:500_000])[0])
    device.synchronize()
    assert copies.waits.take() == pytest.approx(NOTHING | {WaitFor.ROOM: 0.5, WaitFor.DATA: 0.0})


def _step(offloader: Offloader, model: nn.Module) -> float:
    """One step; returns the compute stream's seconds, which are all waits."""
    x = X.to(NAME)
    begin, end = (torch.Event(NAME, enable_timing=True) for _ in range(2))
    begin.record()
    with offloader:
        loss = model(x).square().sum()
    loss.backward()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


@pytest.mark.parametrize("traced", [False, True], ids=["", "traced"])
def test_a_forked_child_makes_no_call_to_the_device(
    accelerator: SimulatedAccelerator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, traced: bool
) -> None:
    """The child of a process that used CUDA cannot use it: it has no tensors there, but may enter the parent's context.

    Its steps are not in the trace either, which is the parent's.
    """
    model, x = _model(), X.to(NAME)
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    options = {"target": "nvme", "path": str(tmp_path), "trace": tmp_path / "run.json"} if traced else {}
    with simulated(accelerator, pending_bytes="1MiB", **options) as offloader:
        _step(offloader, model)
        recorder_of(offloader).begin()
        with offloader:
            loss = model(x).square().sum()
        after_fork_in_child(offloader)
        asked: list[str] = []

        def refused(name: str, *_: object) -> Any:
            asked.append(name)
            raise RuntimeError("CUDA error: initialization error")

        for name in ("is_capturing", "done", "timestamp", "record", "synchronize", "wait", "used_on"):
            monkeypatch.setattr(accelerator, name, partial(refused, name))
        del loss
        with offloader:
            pass
        optimizer.step()
        assert offloader.statistics().live_records == 0
        assert offloader.report()
        assert not recorder_of(offloader).active, "it would query the time at which a tensor dies"
        assert asked == []


@pytest.mark.parametrize("what", ["done", "seconds_between", "timestamp"])
def test_a_device_that_breaks_is_not_timed_any_more(
    accelerator: SimulatedAccelerator, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    waits, compute = StreamWaits(accelerator), torch.accelerator.current_stream()
    begin, end = waits.moment(compute), waits.moment(compute)
    assert begin is not None
    assert end is not None
    waits.add(WaitFor.ROOM, 0, begin, end)
    compute.synchronize()

    def broken(*_: object) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(accelerator, what, broken)
    if what == "timestamp":
        assert waits.moment(compute) is None
    assert waits.take() == NOTHING
    assert waits.moment(compute) is None


def test_a_device_without_timed_events_works(
    accelerator: SimulatedAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model()
    asked: list[torch.Stream] = []

    def timestamp(stream: torch.Stream) -> Any:
        asked.append(stream)
        raise RuntimeError("this backend has no timing")

    monkeypatch.setattr(accelerator, "timestamp", timestamp)
    expected = train_step(model, X.to(NAME))
    with simulated(accelerator, pending_bytes=1, policy="all") as offloader:
        for _ in range(3):
            _step(offloader, model)
            assert_same_gradients(gradients(model), expected)
        assert len(asked) == 1, "one attempt"
        assert offloader.statistics().wait_s == 0


@pytest.mark.parametrize("policy", ["all", "auto"])
def test_statistics_have_the_waits_of_streams(accelerator: SimulatedAccelerator, policy: str) -> None:
    model = _model()
    expected = train_step(model, X.to(NAME))
    with simulated(accelerator, pending_bytes=1, policy=policy) as offloader:
        with offloader:
            pass  # a forward without saved tensors
        waited_s = 0.0
        for _ in range(2):
            waited_s += _step(offloader, model)
            assert_same_gradients(gradients(model), expected)
        statistics = offloader.statistics()
        assert statistics.pack_wait_s > 0
        assert statistics.unpack_wait_s > 0
        assert statistics.wait_s == pytest.approx(waited_s)
        assert offloader.statistics().wait_s == statistics.wait_s, "once"


def test_a_sample_of_many_waits_is_timed_and_stands_for_all(accelerator: _Timed) -> None:
    """No planner uses the waits under ``policy="all"``."""
    model = nn.Sequential(nn.Linear(64, 64), *[nn.Hardtanh() for _ in range(150)]).to(NAME)
    with simulated(accelerator, pending_bytes=1, policy="all") as offloader:
        waited_s = _step(offloader, model)
        assert offloader.statistics().wait_s == pytest.approx(waited_s, rel=0.1)
    assert 40 < len(accelerator.timed) < 120


@pytest.mark.parametrize("fixed", [False, True])
def test_a_stream_that_waits_for_data_widens_the_window_while_that_shortens_its_waits(
    accelerator: SimulatedAccelerator, fixed: bool
) -> None:
    """A wait of the host does so, too; the host of a device runs ahead of it, and never waits."""
    model = _model()
    options = {"prefetch_bytes": 64 << 10} if fixed else {}
    with simulated(accelerator, pending_bytes=1, policy="all", **options) as offloader:
        seen = [window_bytes(offloader)]
        for _ in range(8):
            _step(offloader, model)
            seen.append(window_bytes(offloader))
        assert offloader.statistics().unpack_wait_s > 0
    assert seen[-1] == seen[4]
    assert [seen[3] > seen[0], seen[4] > seen[1]] == [not fixed] * 2


class _Given(Accelerator):
    """Its events are the seconds at which they happen, from a list; notes the pairs that were timed."""

    def __init__(self, *seconds: float) -> None:
        super().__init__(NAME)
        self.left = list(seconds)
        self.now_s = 0.0
        self.timed: list[tuple[float, float]] = []

    def timestamp(self, stream: Any) -> float:
        return self.left.pop(0)

    def done(self, event: Any) -> bool:
        return bool(event <= self.now_s)

    def seconds_between(self, begin: Any, end: Any) -> float:
        self.timed.append((begin, end))
        return float(end - begin)


class _StopsAtTheSecond(_Given):
    """A thread is stopped as it makes the second event, which it notes after another thread's."""

    def __init__(self, *seconds: float) -> None:
        super().__init__(*seconds)
        self.held, self.go_on = threading.Event(), threading.Event()

    def timestamp(self, stream: Any) -> float:
        event = super().timestamp(stream)
        if event == 1:
            self.held.set()
            assert self.go_on.wait(WAIT_S)
        return event


def test_a_step_is_not_over_before_the_last_stamp_of_every_thread() -> None:
    """Two threads stamp at once: the stamp that is made first is stored last."""
    device = _StopsAtTheSecond(0, 1, 2)
    device.now_s = 1
    watch = DeviceStopwatch(device, lambda: 0)
    watch.begin()
    other = threading.Thread(target=watch.stamp)
    other.start()
    assert device.held.wait(WAIT_S)
    watch.stamp()
    device.go_on.set()
    other.join()
    assert not watch.end(), "the third event has not happened"


def test_each_copy_of_a_recorded_step_is_timed_once_for_the_rate_of_its_link() -> None:
    """Each later step reads the rates; copies that were under way at the first reading count from then on."""
    device = _Given()
    watch = DeviceStopwatch(device, lambda: None)
    watch.begin()
    assert watch.rate("write") is None
    watch.copied("write", 30, 0.0, 3.0)
    watch.copied("write", 10, 3.0, 4.0)
    device.now_s = 3.5
    assert watch.rate("write") == 10
    device.now_s = 5.0
    assert [watch.rate("write") for _ in range(3)] == [10] * 3
    assert watch.rate("read") is None
    watch.copied("write", 60, 4.0, 6.0)
    device.now_s = 6.0
    assert watch.rate("write") == pytest.approx(100 / 6)
    assert device.timed == [(0.0, 3.0), (3.0, 4.0), (4.0, 6.0)]
    watch.begin()
    assert watch.rate("write") is None, "another step has its own copies"


def test_waits_that_are_over_as_backward_ends_take_no_time_of_the_next_step(
    device: SimulatedDevice, accelerator: _Timed
) -> None:
    """An idle device then waits for the host; as backward ends it mostly has work left."""
    timed = accelerator.timed
    model, x = _model(), X.to(NAME).requires_grad_()
    with simulated(accelerator, pending_bytes=1) as offloader:
        for _ in range(2):
            with offloader:
                loss = model(x * 1).square().sum()
            x.register_hook(lambda _: device.synchronize())  # the last of backward
            timed.clear()
            loss.backward()
            assert timed
            timed.clear()
            assert offloader.statistics().wait_s > 0
            with offloader:
                pass
            assert not timed


def test_idle_time_of_a_device_in_hooks_is_no_part_of_a_recorded_step() -> None:
    """A stamp within a hook stands for the hook's begin.

    A wait for a copy that a hook enqueued counts once, as a wait.
    """
    watch = DeviceStopwatch(_Given(10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 18.0, 20.0, 22.0), lambda: 0)
    watch.begin()
    with watch.hook():
        within = watch.stamp()
    between = watch.stamp()
    with watch.hook():
        watch.waited(15.0, 17.0, 0)
        late = watch.stamp()
    end = watch.stamp()
    assert [watch.seconds(stamp) for stamp in (within, between, late, end)] == [1.0, 2.0, 3.0, 5.0]
    assert watch.hooks_s == 2.0 + 5.0 - 2.0
    watch._last_s = watch._began_s + 7.0
    assert watch.lead_s == 10.0 - 7.0, "by the device's clock the last hook ended three seconds later"
