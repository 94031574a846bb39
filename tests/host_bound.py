"""Steps of a model for which the host only just keeps up with the device, in virtual time on the simulated device.

They are like those of a model of 1 billion parameters at 2,048 tokens on an H100: 8 MiB are saved for each 53 µs of
forward, and 50 GB/s go over the link, all sizes here an eighth of that. The host's time is virtual too: it takes
`LAUNCH_S` for each kernel and copy, and for each tensor that moves what `micro_2026-11-25_device.json` has measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actoffload import OffloadConfig, Offloader
from actoffload.autograd.in_part import Caching, Noting, Passing, Replaying
from actoffload.autotune.observations import StepsUnderPlan
from actoffload.planning.constants import DISPATCH_S
from actoffload.planning.observed import Observed
from actoffload.runtime.profiler import Profiler
from actoffload.runtime.store import ActivationStore
from actoffload.testing.simulated_device import NAME, SimulatedAccelerator, SimulatedDevice
from actoffload.tiers.device_tier import DeviceTier

TENSORS, NBYTES = 64, 1 << 20
KERNEL_S = 53e-6
GPU = {"memory_bytes_per_s": 2 * NBYTES / KERNEL_S, "to_device_bytes_per_s": 50e9 / 8, "to_host_bytes_per_s": 50e9 / 8}
PACK_S, UNPACK_S = 35e-6, 32e-6
"""What the hooks take of the host for a tensor that moves: 67 µs together."""
MODES = (Caching, Replaying, Noting, Passing)
"""What is active while a region runs in part, and while calls in it are noted: each takes `DISPATCH_S` an operator."""
LAUNCHES = {"host-bound": 0.9, "device-bound": 0.1}
"""What the host takes to launch a kernel, as a share of what the device takes for it."""
SETTLED = 12
"""Steps after which the plan has been corrected."""


def run(
    device: SimulatedDevice,
    launch: float,
    *,
    watched: bool = True,
    budget: int | None = None,
    recording_s: float = 0.0,
    staying_s: float = 0.0,
    steps: int = SETTLED + 8,
) -> dict[str, Any]:
    """Train, and compare the last steps with those of a run that keeps all. Seconds of virtual time.

    Args:
        device: the simulated device.
        launch: see `LAUNCHES`.
        watched: whether the library looks at what its hooks take of the host.
        budget: ``device_budget``.
        recording_s: what the host takes more for each tensor in a recorded step.
        staying_s: what it takes for each tensor that stays.
        steps: how many.
    """
    device.model(flops=1e18, latency_s=0.0, launch_s=launch * KERNEL_S / 2, **GPU)
    model = _Sines()
    keep_s = _steps(device, model, None, 4)[-1]
    with pytest.MonkeyPatch.context() as patch:
        use_virtual_time(device, patch)
        charge(device, patch, recording_s, staying_s)
        if not watched:
            patch.setattr(DeviceTier, "watched", super(DeviceTier, DeviceTier).watched)
        config = OffloadConfig(target="host", min_bytes=1, announce="none", host_budget=1 << 28, device_budget=budget)
        offloader = Offloader(config, accelerator=SimulatedAccelerator()).use(model)
        observed: list[Observed] = []
        add = StepsUnderPlan.add

        def observe(steps: StepsUnderPlan, one: Observed) -> Observed | None:
            observed.append(one)
            return add(steps, one)

        patch.setattr(StepsUnderPlan, "add", observe)
        try:
            seconds = _steps(device, model, offloader, steps)
            pilot = offloader.autopilot
            assert pilot is not None
            assert pilot.plan is not None
            moved = pilot.plan.offloaded_bytes
            explained, unhooked = offloader.explain(), offloader.statistics().unhooked
        finally:
            offloader.abort()
    return {
        "keep_s": keep_s,
        "seconds": seconds,
        "late": max(seconds[SETTLED:]) / keep_s,
        "moved_share": moved / (TENSORS * NBYTES),
        "explained": explained,
        "unhooked": unhooked,
        "watched": [one for one in observed if one.hooks_s],
    }


def use_virtual_time(device: SimulatedDevice, patch: pytest.MonkeyPatch) -> None:
    """Have the library's clock be the simulated device's."""
    for name, module in list(sys.modules.items()):
        if name.startswith("actoffload") and getattr(module, "now", None) is not None:
            patch.setattr(module, "now", lambda: device.clock_s)


def charge(
    device: SimulatedDevice, patch: pytest.MonkeyPatch, recording_s: float = 0.0, staying_s: float = 0.0
) -> None:
    """Have the hooks take their time of the host: each that moves a tensor, and each that gives backward one.

    ``recording_s`` and ``staying_s`` are as `run` has them.
    """
    offload, fetch_now = DeviceTier.offload, ActivationStore._fetch_now
    admit, saved = ActivationStore.admit, Profiler.saved

    def offload_slowly(tier: DeviceTier, record: Any) -> Any:
        reason = offload(tier, record)
        if reason is None:
            device.keep_host_busy(PACK_S)
        return reason

    def fetch_slowly(store: ActivationStore, record: Any, tier: Any) -> Any:
        device.keep_host_busy(UNPACK_S)
        return fetch_now(store, record, tier)

    def admit_slowly(*args: Any) -> Any:
        device.keep_host_busy(staying_s)
        return admit(*args)

    def record_slowly(*args: Any) -> Any:
        device.keep_host_busy(recording_s)
        return saved(*args)

    for mode in MODES:
        patch.setattr(mode, "__torch_dispatch__", _slowly(mode.__torch_dispatch__, device, DISPATCH_S))
    patch.setattr(DeviceTier, "offload", offload_slowly)
    patch.setattr(ActivationStore, "_fetch_now", fetch_slowly)
    if staying_s:
        patch.setattr(ActivationStore, "admit", admit_slowly)
    if recording_s:
        patch.setattr(Profiler, "saved", record_slowly)


def _slowly(method: Callable[..., Any], device: SimulatedDevice, seconds: float) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        device.keep_host_busy(seconds)
        return method(*args, **options)

    return call


class _Sines(nn.Module):
    """Saves `TENSORS` tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(NBYTES // 4, device=NAME))

    def forward(self, x: Tensor) -> Tensor:
        x = self.weight * x
        for _ in range(TENSORS):
            x = x.sin()
        return x.sum()


def _steps(device: SimulatedDevice, model: nn.Module, offloader: Offloader | None, count: int) -> list[float]:
    x = torch.ones(1, device=NAME)
    seconds = []
    for _ in range(count):
        device.synchronize()
        began_s = device.clock_s
        with offloader or nullcontext():
            loss = model(x)
        loss.backward()
        del loss
        device.synchronize()
        seconds.append(device.clock_s - began_s)
        model.zero_grad(set_to_none=True)
    return seconds
