"""When device memory is released: in the allocator's time, which is the host's, however far the host runs ahead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from actoffload import Plan
from actoffload.planning.plan import PlanEntry
from actoffload.testing.simulated_device import NAME, SimulatedAccelerator, SimulatedDevice
from actoffload.tiers import copy_streams
from tests.harness import autopilot_of, same_bits, simulated
from tests.host_bound import use_virtual_time

pytestmark = pytest.mark.simulated

NBYTES, COUNT = 1 << 20, 48
KERNEL_S = 1e-3
SAVED = COUNT * NBYTES
AHEAD, BOUND = 1 / 20, 2.0
"""The host's time to launch a kernel, as a multiple of the device's time for it."""


@pytest.fixture
def gpu(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    """A device in virtual time, which the library reads as well, with a sixteenth of the usual window."""
    monkeypatch.setattr(copy_streams, "WINDOW_FLOOR_BYTES", copy_streams.WINDOW_FLOOR_BYTES // 16)
    use_virtual_time(device, monkeypatch)
    yield device
    device.reset()


def _model(device: SimulatedDevice, launch: float, link: float = 1.0) -> None:
    """Kernels that take `KERNEL_S`, and a link over which ``link`` storages go in that time."""
    rate = link * NBYTES / KERNEL_S
    device.model(
        flops=1e18,
        memory_bytes_per_s=2 * NBYTES / KERNEL_S,
        to_device_bytes_per_s=rate,
        to_host_bytes_per_s=rate,
        latency_s=0.0,
        launch_s=launch * KERNEL_S,
    )


def _forward(weight: Tensor) -> Tensor:
    x = weight * 1.0
    for _ in range(COUNT):
        x = x.sin()
    return x.sum()


class Steps:
    """Training steps, and the allocator's peak and the virtual seconds of each."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.weight = torch.linspace(0, 1, NBYTES // 4).to(NAME).requires_grad_()
        self.peaks: list[int] = []
        self.held: list[int] = []
        self.seconds: list[float] = []
        self.gradient: Tensor | None = None

    def run(self, context: AbstractContextManager[object], count: int) -> None:
        for _ in range(count):
            self.device.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            before, began_s = torch.accelerator.memory_allocated(), self.device.clock_s
            with context:
                loss = _forward(self.weight)
            loss.backward()
            del loss
            self.held.append(torch.accelerator.memory_allocated() - before - NBYTES)  # the gradient is there
            self.device.synchronize()
            self.seconds.append(self.device.clock_s - began_s)
            self.peaks.append(torch.accelerator.max_memory_allocated() - before)
            assert self.weight.grad is not None
            self.gradient, self.weight.grad = self.weight.grad.cpu(), None


@pytest.mark.parametrize(("launch", "budget"), [(AHEAD, None), (AHEAD, SAVED // 2), (BOUND, SAVED // 2)])
def test_the_allocators_peak_is_the_plans(gpu: SimulatedDevice, launch: float, budget: int | None) -> None:
    """The allocator's peak is within 4 %, apart from the memory beside saved tensors that keeping all takes as well."""
    _model(gpu, launch, link=0.6)
    keep, run = Steps(gpu), Steps(gpu)
    keep.run(nullcontext(), 2)
    others = keep.peaks[-1] - SAVED
    with simulated(policy="auto", device_budget=budget, pending_bytes=None, prefetch_bytes=None) as offloader:
        run.run(offloader, 4)
        predicted = autopilot_of(offloader).plan.predicted_peak_bytes
    assert predicted <= 0.8 * SAVED
    assert same_bits(run.gradient, keep.gradient)
    assert run.peaks[-1] - others == pytest.approx(predicted, rel=0.04, abs=NBYTES)
    if budget is None:
        assert run.seconds[-1] <= 1.01 * keep.seconds[-1]


@pytest.mark.parametrize("options", [{"policy": "greedy"}, {"policy": "all"}, {}, {"device_budget": SAVED // 3}])
def test_no_device_memory_is_held_after_backward(gpu: SimulatedDevice, options: dict[str, Any]) -> None:
    _model(gpu, AHEAD)
    run = Steps(gpu)
    with simulated(**{"policy": "auto", "pending_bytes": None, **options}) as offloader:
        run.run(offloader, 4)
    assert max(run.held) <= 0


@pytest.mark.parametrize("policy", ["greedy", "all"])
def test_the_end_of_backward_releases_memory_whose_copies_have_not_ended(device: SimulatedDevice, policy: str) -> None:
    """The compute stream waits for them; the host does not, so that it may enqueue the optimizer's step at once."""
    accelerator = SimulatedAccelerator()
    run = Steps(device)
    with simulated(accelerator, policy=policy, pending_bytes=2 * SAVED) as offloader:
        with device.paused(accelerator.side_stream(0, "out")):
            before = torch.accelerator.memory_allocated()
            with offloader:
                loss = _forward(run.weight)
            loss.backward()
            del loss
            assert torch.accelerator.memory_allocated() - before == NBYTES  # the gradient
        device.synchronize()


def _plan(release_after: int | None) -> Plan:
    """Move everything; each storage's memory is released a fixed number of events after its save."""
    return Plan(
        tuple(
            PlanEntry(index=index, nbytes=NBYTES, action="offload", release_after=release_after)
            for index in range(COUNT)
        ),
        pending_bytes=2 * SAVED,
    )


def test_a_plan_releases_by_position_whatever_the_time(gpu: SimulatedDevice) -> None:
    """No copy can end here, and the host enqueues the forward: memory is released at the events that the plan names."""
    accelerator = SimulatedAccelerator()
    run = Steps(gpu)
    expected = torch.autograd.grad(_forward(run.weight), run.weight)[0]

    def allocated_after_forward(release_after: int | None) -> int:
        with simulated(accelerator, policy=_plan(release_after), pending_bytes=None) as offloader:
            gpu.synchronize()
            before = torch.accelerator.memory_allocated()
            with gpu.paused(accelerator.side_stream(0, "out")):
                with offloader:
                    loss = _forward(run.weight)
                held = torch.accelerator.memory_allocated() - before
            (found,) = torch.autograd.grad(loss, run.weight)
            assert same_bits(found, expected)
        return held

    few, more = allocated_after_forward(2), allocated_after_forward(8)
    assert few < 6 * NBYTES
    assert few + 5 * NBYTES <= more < 12 * NBYTES
    assert allocated_after_forward(None) >= COUNT * NBYTES


def test_the_default_trains_from_the_first_step_where_memory_is_short(gpu: SimulatedDevice) -> None:
    _model(gpu, AHEAD, link=0.3)
    keep, run = Steps(gpu), Steps(gpu)
    keep.run(nullcontext(), 1)
    torch.accelerator.memory.empty_cache()
    limit = torch.accelerator.memory_reserved() + int(0.4 * keep.peaks[0])
    gpu.limit(limit)
    with pytest.raises(torch.OutOfMemoryError):
        _forward(run.weight)
    with simulated(policy="auto", pending_bytes=None, prefetch_bytes=None) as offloader:
        run.run(offloader, 4)
        assert "device budget" in offloader.explain()
    assert same_bits(run.gradient, keep.gradient)


def test_the_first_steps_hold_a_part_of_their_saved_tensors(gpu: SimulatedDevice) -> None:
    """A slow link and a host that runs ahead: the steps before any measurement lower memory, too."""
    _model(gpu, AHEAD, link=0.1)
    run = Steps(gpu)
    for policy in ("auto", "greedy"):
        with simulated(policy=policy, pending_bytes=None, prefetch_bytes=None) as offloader:
            run.run(offloader, 1)
        assert run.peaks[-1] <= 0.65 * SAVED


def test_an_old_peak_of_the_allocator_lowers_no_budget(gpu: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large tensor that is freed before training, as when a model is loaded, takes no memory from the steps."""
    _model(gpu, AHEAD, link=0.1)
    keep, run = Steps(gpu), Steps(gpu)
    keep.run(nullcontext(), 2)
    gpu.limit(torch.accelerator.memory_allocated() + 6 * SAVED)
    old = torch.empty(int(5.8 * SAVED), dtype=torch.uint8, device=NAME)
    del old
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda: None)
    with simulated(policy="auto", pending_bytes=None, prefetch_bytes=None) as offloader:
        run.run(offloader, 4)
    assert run.seconds[-1] <= 1.05 * keep.seconds[-1]
