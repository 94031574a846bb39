"""Steps of a model for which the host only just keeps up with the device, in virtual time on the simulated device.

They are like those of a model of 1 billion parameters at 2,048 tokens on an H100. `run` has 8 MiB saved for each 53 µs
of forward, and 50 GB/s on the link, all sizes here an eighth of that. The host's time is virtual too: it takes some for
each kernel and copy, and for each tensor that moves the time that `micro_2026-11-25_device.json` has. `run_measured`
has the figures of 2026-11-27: `MEASURED`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actoffload import OffloadConfig, Offloader
from actoffload.autograd.handles import Handle
from actoffload.autograd.packing import Packer
from actoffload.autotune.observations import StepsUnderPlan
from actoffload.planning.observed import Observed
from actoffload.runtime.profiler import Profiler
from actoffload.runtime.store import ActivationStore
from actoffload.testing.simulated_device import NAME, SimulatedAccelerator, SimulatedDevice
from actoffload.tiers.accelerator import Accelerator
from actoffload.tiers.device_tier import DeviceTier
from tests.harness import use_clock

TENSORS, NBYTES = 64, 1 << 20
KERNEL_S = 53e-6
GPU = {"memory_bytes_per_s": 2 * NBYTES / KERNEL_S, "to_device_bytes_per_s": 50e9 / 8, "to_host_bytes_per_s": 50e9 / 8}


@dataclass(frozen=True)
class Host:
    """The seconds that hooks take of the host.

    Attributes:
        pack_s: for a tensor that moves; ``unpack_s``: likewise in backward.
        outside: the share of them that passes before the store is called, and after it.
        recording_s: how much more for each tensor in a recorded step.
        staying_s: for each tensor that stays.
    """

    pack_s: float = 35e-6
    unpack_s: float = 32e-6
    outside: float = 0.0
    recording_s: float = 0.0
    staying_s: float = 0.0


MEASURED = Host(pack_s=0.3e-3, unpack_s=0.3e-3, outside=0.3, recording_s=0.3e-3, staying_s=50e-6)
"""On an H100, on 2026-11-27."""
MOVABLE, SMALL, SMALL_BYTES = 228, 425, 1 << 10
"""The tensors of that step that may move, and the small ones."""
HOST_S, DEVICE_S = 52e-3, 48e-3
"""Seconds of the host and of the device with everything kept: 55 ms together."""
LAUNCHES = {"host-bound": 0.9, "device-bound": 0.1}
"""The host's time to launch a kernel, as a share of the device's time for it."""
SETTLED = 12
"""Steps after which the plan has been corrected."""


def run(
    device: SimulatedDevice,
    launch: float,
    *,
    budget: int | None = None,
    host: Host = Host(),
    link: float = 1.0,
    steps: int,
    pauses: Collection[int] = (),
) -> dict[str, Any]:
    """Train, and compare the last steps with those of a run that keeps all. Seconds of virtual time.

    Args:
        device: the simulated device.
        launch: see `LAUNCHES`.
        budget: ``device_budget``.
        host: the seconds that hooks take.
        link: the share of the link's bandwidth.
        steps: how many.
        pauses: after these steps, counted from 0, the host is busy for as long as ten steps.
    """
    rates = {name: rate * (1.0 if name == "memory_bytes_per_s" else link) for name, rate in GPU.items()}
    device.model(flops=1e18, latency_s=0.0, launch_s=launch * KERNEL_S / 2, **rates)
    return _train(device, _Sines(), host, budget, steps, pauses)


def run_measured(device: SimulatedDevice, host_s: float = HOST_S, *, steps: int) -> dict[str, Any]:
    """As `run`, for the step that was measured; ``host_s``: the host's seconds with everything kept."""
    model, fast = _Sines(MOVABLE, NBYTES // 4, SMALL), {"flops": 1e18, "latency_s": 0.0}
    device.model(**fast, memory_bytes_per_s=1e18, launch_s=1.0)
    launches = round(_steps(device, model, None, 1)[-1])
    device.model(**fast, memory_bytes_per_s=1e12)
    memory = 1e12 * _steps(device, model, None, 1)[-1] / DEVICE_S
    link = 50e9 * MOVABLE * (NBYTES // 4) / (4.3 * (1 << 30))
    rates = {"memory_bytes_per_s": memory, "to_device_bytes_per_s": link, "to_host_bytes_per_s": link}
    device.model(**fast, launch_s=host_s / launches, **rates)
    return _train(device, model, MEASURED, None, steps)


def _train(
    device: SimulatedDevice,
    model: _Sines,
    host: Host,
    budget: int | None,
    steps: int,
    pauses: Collection[int] = (),
) -> dict[str, Any]:
    keep_s = _steps(device, model, None, 2)[-1]
    with pytest.MonkeyPatch.context() as patch:
        use_virtual_time(device, patch)
        charge(device, patch, host)
        least = SMALL_BYTES + 1 if model.small else 1
        config = OffloadConfig(
            target="host", min_bytes=least, announce="none", host_budget=1 << 28, device_budget=budget
        )
        offloader = Offloader(config, accelerator=SimulatedAccelerator()).use(model)
        observed: list[Observed] = []
        add = StepsUnderPlan.add

        def observe(steps: StepsUnderPlan, one: Observed, *, limited: bool) -> Observed | None:
            observed.append(one)
            return add(steps, one, limited=limited)

        patch.setattr(StepsUnderPlan, "add", observe)
        try:
            seconds = _steps(device, model, offloader, steps, dict.fromkeys(pauses, 10 * keep_s))
            pilot = offloader.autopilot
            assert pilot is not None
            assert pilot.plan is not None
            moved = pilot.plan.offloaded_bytes
            explained, unhooked = offloader.explain(), offloader.statistics().unhooked
            history = list(pilot.history)
        finally:
            offloader.abort()
    return {
        "keep_s": keep_s,
        "seconds": seconds,
        "late": max(seconds[SETTLED:], default=0.0) / keep_s,
        "moved_share": moved / (model.count * model.nbytes),
        "history": history,
        "explained": explained,
        "unhooked": unhooked,
        "watched": [one for one in observed if one.hooks_s],
    }


def use_virtual_time(device: SimulatedDevice, patch: pytest.MonkeyPatch) -> None:
    """Have the library's clock be the simulated device's."""
    use_clock(lambda: device.clock_s, patch)


@contextmanager
def highest_allocated() -> Iterator[list[int]]:
    """Collect the peaks of the device's allocator in the context: the last one, and each that the library resets."""
    found: list[int] = []
    reset = Accelerator.reset_peak

    def note(accelerator: Accelerator, index: int) -> None:
        found.append(torch.accelerator.max_memory_allocated(index))
        reset(accelerator, index)

    torch.accelerator.reset_peak_memory_stats()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Accelerator, "reset_peak", note)
        yield found
    found.append(torch.accelerator.max_memory_allocated())


def charge(device: SimulatedDevice, patch: pytest.MonkeyPatch, host: Host = Host()) -> None:
    """Have the hooks take their time of the host: each that moves a tensor, and each that gives backward one."""
    offload, fetch_now = DeviceTier.offload, ActivationStore.fetch_now

    def offload_slowly(tier: DeviceTier, record: Any) -> Any:
        reason = offload(tier, record)
        if reason is None:
            device.keep_host_busy(host.pack_s * (1 - host.outside))
        return reason

    def fetch_slowly(store: ActivationStore, record: Any, tier: Any) -> Any:
        device.keep_host_busy(host.unpack_s * (1 - host.outside))
        return fetch_now(store, record, tier)

    def slowly(owner: Any, name: str, seconds: float) -> None:
        plain = getattr(owner, name)

        def slow(*args: Any, **options: Any) -> Any:
            device.keep_host_busy(seconds)
            return plain(*args, **options)

        if seconds:
            patch.setattr(owner, name, slow)

    patch.setattr(DeviceTier, "offload", offload_slowly)
    patch.setattr(ActivationStore, "fetch_now", fetch_slowly)
    slowly(Packer, "_save", host.pack_s * host.outside)
    slowly(Handle, "unpack", host.unpack_s * host.outside)
    slowly(Profiler, "saved", host.recording_s / 2)
    slowly(Profiler, "needed", host.recording_s / 2)
    for name in ("keep_planned", "passed"):
        slowly(ActivationStore, name, host.staying_s / 2)


class _Sines(nn.Module):
    """Saves ``count`` tensors of ``nbytes``, and a number of ``small`` ones."""

    def __init__(self, count: int = TENSORS, nbytes: int = NBYTES, small: int = 0) -> None:
        super().__init__()
        self.count, self.nbytes, self.small = count, nbytes, small
        self.weight = nn.Parameter(torch.ones(nbytes // 4, device=NAME))
        self.scale = nn.Parameter(torch.ones(SMALL_BYTES // 4, device=NAME))

    def forward(self, x: Tensor) -> Tensor:
        x, y = self.weight * x, self.scale * x
        for number in range(self.count):
            x = x.sin()
            for _ in range(self.small * (number + 1) // self.count - self.small * number // self.count):
                y = y.sin()
        return x.sum() + y.sum()


def _steps(
    device: SimulatedDevice, model: nn.Module, offloader: Offloader | None, count: int, pauses: Mapping[int, float] = {}
) -> list[float]:
    x = torch.ones(1, device=NAME)
    seconds = []
    for step in range(count):
        device.synchronize()
        began_s = device.clock_s
        with offloader or nullcontext():
            loss = model(x)
        loss.backward()
        del loss
        device.synchronize()
        seconds.append(device.clock_s - began_s)
        model.zero_grad(set_to_none=True)
        device.keep_host_busy(pauses.get(step, 0.0))
    return seconds
