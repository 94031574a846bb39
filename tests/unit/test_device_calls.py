"""Calls of a device's driver, as many in later steps as before; and hooks' cost for a host that just keeps up."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from actoffload.testing.simulated_device import NAME, SimulatedAccelerator, SimulatedDevice
from actoffload.tiers import copy_streams, device_tier
from actoffload.tiers.timers import DeviceStopwatch
from tests import host_bound
from tests.harness import (
    Chain,
    accounts_of,
    assert_same_gradients,
    batch,
    hinder,
    on_stream,
    run_in_threads,
    simulated,
    train_step,
)

pytestmark = pytest.mark.simulated


@pytest.mark.parametrize("options", [{}, {"device_budget": "48KiB"}, {"policy": "auto"}], ids=["all", "budget", "auto"])
def test_no_step_makes_more_events_than_earlier_ones(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Counts PyTorch's constructor, so that an event counts wherever it is held."""
    made: list[object] = []
    plain = torch.Event

    class Counted(torch.Event):
        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            made.append(None)
            return plain(*arguments, **options)

    monkeypatch.setattr(torch, "Event", Counted)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)]).to(NAME)
    x, counts, accelerator = torch.randn(64, 64).to(NAME), [], SimulatedAccelerator()
    hinder(device, accelerator, "late copies")  # each step then has the same copies under way
    with simulated(accelerator, host_budget="8MiB", **options) as offloader:
        for _ in range(20):
            train_step(model, x, offloader)
            offloader.statistics()
            device.synchronize()
            counts.append(len(made))
        moved = offloader.statistics().moved_bytes
    assert moved > 0
    assert counts[19] <= counts[9]


class _Captures(SimulatedAccelerator):
    """Notes the devices whose capture and memory the library queries; PyTorch queries the current device."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[int] = set()

    def is_capturing(self, index: int) -> bool:
        with self.on_device(index):
            self.asked.add(torch.accelerator.current_device_index())
        return False

    def usable_bytes(self, index: int) -> int | None:
        self.asked.add(index)
        return super().usable_bytes(index)


@pytest.mark.parametrize("target", ["host", "nvme"])
@pytest.mark.parametrize("policy", ["all", "auto"])
def test_a_device_that_a_program_does_not_use_is_left_alone_though_it_is_current(
    device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, target: str
) -> None:
    """On CUDA a call would make a context there, which takes hundreds of megabytes."""
    place = torch.device(NAME, 1)
    model, x = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]).to(place), torch.randn(64, 64).to(place)
    expected = train_step(model, x)
    accelerator = _Captures()
    count = accelerator.allocated_bytes
    monkeypatch.setattr(  # other tests have used device 0
        accelerator, "allocated_bytes", lambda index: count(index) if index else (0, 0)
    )
    before = [device.calls(index) for index in range(2)]
    with simulated(accelerator, target=target, path=tmp_path, policy=policy, pending_bytes=1) as offloader:
        for _ in range(6):
            assert_same_gradients(train_step(model, x, offloader), expected)
        offloader.store.shared.watches_host = True  # a plan would, in some steps
        train_step(model, x, offloader)
        assert offloader.statistics().host_read_bytes > 0
        assert offloader.statistics().device_peak_bytes > 0
        with offloader:
            losses = [model(x).square().sum()]
        run_in_threads(losses.clear)  # the last handles die in another thread
        offloader.close()
    assert device.calls(0) == before[0]
    assert device.calls(1) > before[1]
    assert accelerator.asked == {1}


def test_a_backend_whose_allocator_counts_nothing_trains(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch asserts that an accelerator's allocator is a `DeviceAllocator`; that of a `PrivateUse1` need not be."""

    def asserts(*_: object) -> bool:
        raise RuntimeError("Allocator for privateuseone is not a DeviceAllocator.")

    for name in ("isAllocatorInitialized", "getDeviceStats"):
        monkeypatch.setattr(torch._C, f"_accelerator_{name}", asserts)
    model, x = Chain().to(NAME), batch().to(NAME)
    expected = train_step(model, x)
    for policy in ("all", "auto"):
        with simulated(policy=policy) as offloader:
            for _ in range(4):
                assert_same_gradients(train_step(model, x, offloader), expected)
            assert offloader.statistics().moved_bytes > 0
            assert offloader.statistics().device_peak_bytes == 0
            assert offloader.report()


class _Counts(SimulatedAccelerator):
    """Counts the calls that would reach CUDA's driver, without queries for a capture on the default stream.

    Calls by the allocator's ``record_stream`` count as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __getattribute__(self, name: str) -> Any:
        if name in {"record", "wait", "seconds_between", "used_on", "synchronize"}:
            self.calls[name] += 1
        return super().__getattribute__(name)

    def done(self, event: Any) -> bool:
        self.calls["query"] += 1
        with self.hook:  # switches to relaxed, and back at its end
            if self.hook.at_end is None:
                self.calls["exchange the capture mode"] += 2
                self.hook.at_end = lambda: None
            return super().done(event)

    def copy(self, copies: Any, stream: torch.Stream) -> None:
        copies = list(copies)
        self.calls["copy"] += len(copies)
        super().copy(copies, stream)

    def is_capturing(self, index: int) -> bool:
        self.calls["capture"] += self.current_stream(index).stream_id != 0
        return super().is_capturing(index)


@pytest.mark.parametrize("other", [False, True], ids=["default stream", "another stream"])
def test_a_step_makes_few_calls_for_each_tensor_that_moves(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, other: bool
) -> None:
    """Five for each copy: two events, two waits, and the copy; one more for each source, which notifies the allocator.

    A few of the waits are timed: an event before the wait, and a query between steps. A tensor saved again on the
    stream that saved it needs none. The host is ahead and the link is slow, so that no copy has ended when the library
    queries it.
    """
    for module in (copy_streams, device_tier):
        monkeypatch.setattr(module, "BATCH_BYTES", 1)  # each tensor is copied alone, as large ones are
        monkeypatch.setattr(module, "WINDOW_FLOOR_BYTES", 1, raising=False)
    nbytes, tensors, accelerator = 4 << 10, 256, _Counts()
    x = torch.ones(nbytes // 4, device=NAME, requires_grad=True)
    stream = torch.Stream(torch.device(NAME, 0)) if other else torch.accelerator.current_stream()
    device.model(memory_bytes_per_s=2e9, to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, latency_s=0, launch_s=1e-7)
    with simulated(accelerator, prefetch_bytes=2 * nbytes, host_budget="8MiB") as offloader:
        for _ in range(3):
            device.synchronize()
            before, moved = Counter(accelerator.calls), offloader.statistics().moved_bytes
            with on_stream(stream):
                with offloader:
                    y = x
                    for _ in range(tensors):
                        y = y.exp().sin()  # exp() saves its output, and sin() saves the same tensor again
                    loss = y.sum()
                torch.autograd.grad(loss, x)
            calls = accelerator.calls - before
            moved = (offloader.statistics().moved_bytes - moved) // nbytes
    assert moved >= tensors - 1
    assert calls["copy"] >= 1.5 * moved
    assert calls["capture"] <= (4 * tensors + 8 if other else 0)
    assert 0 < calls["seconds_between"] <= moved / 2, calls
    assert calls.total() - calls["capture"] <= 11.6 * moved, calls


def test_a_tensor_that_a_captured_graph_fills_stays(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moving it frees nothing: its memory belongs to the captured graph, which checks its holders at each replay."""
    accelerator = SimulatedAccelerator()
    model, x = Chain().to(NAME), batch().to(NAME)
    expected = train_step(model, x)
    monkeypatch.setattr(accelerator, "is_of_a_graph", lambda tensor: True)
    with simulated(accelerator) as offloader:
        assert_same_gradients(train_step(model, x, offloader), expected)
        assert offloader.statistics().moved_bytes == 0
        assert offloader.statistics().kept_bytes["graph capture"] > 0


# -- hosts that only just keep up with the device ----------------------------------------------------------------------


def test_a_plan_declines_where_hooks_keep_the_host_from_the_device(device: SimulatedDevice) -> None:
    row = host_bound.run(device, host_bound.LAUNCHES["host-bound"], steps=8)
    assert max(row["seconds"][:2]) > 1.1 * row["keep_s"], "the recorded steps"
    assert max(row["seconds"][2:]) <= 1.02 * row["keep_s"], "the first plan declines"
    assert "declined: " in row["explained"]
    assert "why is a step slower:\n" not in row["explained"]


@pytest.mark.parametrize("host_s", [host_bound.HOST_S, host_bound.HOST_S / 5], ids=["the bound", "ahead without hooks"])
def test_the_first_plan_prices_the_hooks_time_of_the_host(device: SimulatedDevice, host_s: float) -> None:
    """On an H100 a recorded step took 292 ms, keep's took 55, and steps were 2 to 5 times as long for 30 steps."""
    row = host_bound.run_measured(device, host_s, steps=6)
    assert max(row["seconds"][:2]) > 4 * row["keep_s"], "a recorded step"
    assert max(row["seconds"][2:]) <= 1.02 * row["keep_s"]
    assert row["history"] == ["first plan"]
    assert row["unhooked"] == 4, "nothing moves"


def test_one_step_corrects_a_price_that_the_recorded_step_did_not_show(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits for copies may hide the time of hooks in the recorded step."""
    monkeypatch.setattr(DeviceStopwatch, "hooks_s", 0.0)
    row = host_bound.run(device, 1.3, link=0.5, steps=10)
    assert [one > 1.02 * row["keep_s"] for one in row["seconds"][2:]] == [True] * 2 + [False] * 6
    assert len(row["history"]) == 2


def test_a_plan_moves_where_the_host_runs_ahead_and_after_a_pause(device: SimulatedDevice) -> None:
    """A plan may lengthen a step by one in a hundred, and a pause makes the recorded one ten times as long."""
    steps = host_bound.SETTLED + 2
    plain = host_bound.run(device, host_bound.LAUNCHES["device-bound"], steps=steps)
    paused = host_bound.run(device, host_bound.LAUNCHES["device-bound"], steps=steps, pauses=[1])
    for row in (plain, paused):
        assert 0 < row["late"] <= 1.02
        assert row["moved_share"] > 0.2
    assert paused["moved_share"] == pytest.approx(plain["moved_share"], rel=0.1)
    assert "hooks that move" in plain["explained"]
    assert "why is a step slower:\n" not in plain["explained"]


@pytest.mark.parametrize("host", list(host_bound.LAUNCHES))
def test_a_step_is_longer_by_the_devices_idle_time_in_hooks(device: SimulatedDevice, host: str) -> None:
    half = host_bound.TENSORS * host_bound.NBYTES // 2  # without a budget a plan declines
    row = host_bound.run(device, host_bound.LAUNCHES[host], budget=half, steps=6)
    one = row["watched"][0]
    late_s = one.step_s - one.wait_s - row["keep_s"]
    assert one.hooks_s > 0.1 * row["keep_s"]
    assert one.idle_s == pytest.approx(late_s, rel=0.3, abs=0.01 * row["keep_s"])


def test_the_first_hook_of_a_watched_step_counts_no_idle_time(device: SimulatedDevice) -> None:
    """Work enqueued by the end of the last watched step, some steps ago, ended long ago."""
    accelerator = SimulatedAccelerator()
    x = torch.ones(1024, device=NAME, requires_grad=True)
    idle_s: list[float] = []
    with simulated(accelerator) as offloader:
        shared = offloader.store.shared
        for watches in (True, False, True):
            shared.watches_host = watches
            if len(idle_s) == 2:
                hinder(device, accelerator, "late kernels")  # the device is busy from here on
            with offloader:
                out = (x * 2.0).sin()
            idle_s.append(accounts_of(offloader).idle_s)
            torch.accelerator.synchronize()
        assert accounts_of(offloader).hooks_s > 0
        assert idle_s[2] == idle_s[1]
        del out


def test_a_hook_during_the_devices_work_counts_once_the_device_has_caught_up(device: SimulatedDevice) -> None:
    accelerator = SimulatedAccelerator()
    x = torch.ones(1024, device=NAME, requires_grad=True)
    with simulated(accelerator) as offloader:
        offloader.store.shared.watches_host = True
        accounts = accounts_of(offloader)
        hinder(device, accelerator, "late kernels")
        with offloader:
            y = (x * 2.0).sin().sin()
            unnoticed_s = accounts.hooks_s
            assert accounts.idle_s == 0
            torch.accelerator.synchronize()
            y.sin()
        assert 0 < unnoticed_s <= accounts.idle_s <= accounts.hooks_s
