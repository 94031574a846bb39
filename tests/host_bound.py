"""Steps of a model for which the host only just keeps up with the device, in virtual time on the simulated device.

They are like those of a model of 1 billion parameters at 2,048 tokens on an H100: 8 MiB are saved for each 53 µs of
forward, and 50 GB/s go over the link, all sizes here an eighth of that. The host's time is virtual too: it takes
`LAUNCH_S` for each kernel and copy, and for each tensor that moves what `micro_2026-11-25_device.json` has measured.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from actoffload import OffloadConfig, Offloader
from actoffload.autotune.observations import StepsUnderPlan
from actoffload.planning.observed import Observed
from actoffload.runtime.store import ActivationStore
from actoffload.testing.simulated_device import NAME, SimulatedAccelerator, SimulatedDevice
from actoffload.tiers.device_tier import DeviceTier

TENSORS, NBYTES = 64, 1 << 20
KERNEL_S = 53e-6
GPU = {"memory_bytes_per_s": 2 * NBYTES / KERNEL_S, "to_device_bytes_per_s": 50e9 / 8, "to_host_bytes_per_s": 50e9 / 8}
PACK_S, UNPACK_S = 35e-6, 32e-6
"""What the hooks take of the host for a tensor that moves: 67 µs together."""
LAUNCHES = {"host-bound": 0.9, "device-bound": 0.1}
"""What the host takes to launch a kernel, as a share of what the device takes for it."""
SETTLED = 12
"""Steps after which the plan has been corrected."""


def run(device: SimulatedDevice, launch: float, *, watched: bool = True, budget: int | None = None) -> dict[str, Any]:
    """Train, and compare the last steps with those of a run that keeps all. Seconds of virtual time.

    Args:
        device: the simulated device.
        launch: see `LAUNCHES`.
        watched: whether the library looks at what its hooks take of the host.
        budget: ``device_budget``.
    """
    device.model(flops=1e18, latency_s=0.0, launch_s=launch * KERNEL_S / 2, **GPU)
    keep_s = _steps(device, None, 4)[-1]
    with pytest.MonkeyPatch.context() as patch:
        use_virtual_time(device, patch)
        charge(device, patch)
        if not watched:
            patch.setattr(DeviceTier, "watched", super(DeviceTier, DeviceTier).watched)
        config = OffloadConfig(target="host", min_bytes=1, announce="none", host_budget=1 << 28, device_budget=budget)
        offloader = Offloader(config, accelerator=SimulatedAccelerator())
        observed: list[Observed] = []
        add = StepsUnderPlan.add

        def observe(steps: StepsUnderPlan, one: Observed) -> Observed | None:
            observed.append(one)
            return add(steps, one)

        patch.setattr(StepsUnderPlan, "add", observe)
        try:
            seconds = _steps(device, offloader, SETTLED + 8)
            pilot = offloader.autopilot
            assert pilot is not None
            assert pilot.plan is not None
            moved = pilot.plan.offloaded_bytes
            explained = offloader.explain()
        finally:
            offloader.abort()
    return {
        "keep_s": keep_s,
        "seconds": seconds,
        "late": max(seconds[SETTLED:]) / keep_s,
        "moved_share": moved / (TENSORS * NBYTES),
        "explained": explained,
        "watched": [one for one in observed if one.hooks_s],
    }


def use_virtual_time(device: SimulatedDevice, patch: pytest.MonkeyPatch) -> None:
    """Have the library's clock be the simulated device's."""
    for name, module in list(sys.modules.items()):
        if name.startswith("actoffload") and getattr(module, "now", None) is not None:
            patch.setattr(module, "now", lambda: device.clock_s)


def charge(device: SimulatedDevice, patch: pytest.MonkeyPatch) -> None:
    """Have the hooks take their time of the host: each that moves a tensor, and each that gives backward one."""
    offload, fetch_now = DeviceTier.offload, ActivationStore._fetch_now

    def offload_slowly(tier: DeviceTier, record: Any) -> Any:
        reason = offload(tier, record)
        if reason is None:
            device.keep_host_busy(PACK_S)
        return reason

    def fetch_slowly(store: ActivationStore, record: Any, tier: Any) -> Any:
        device.keep_host_busy(UNPACK_S)
        return fetch_now(store, record, tier)

    patch.setattr(DeviceTier, "offload", offload_slowly)
    patch.setattr(ActivationStore, "_fetch_now", fetch_slowly)


def _steps(device: SimulatedDevice, offloader: Offloader | None, count: int) -> list[float]:
    weight = torch.ones(NBYTES // 4, device=NAME, requires_grad=True)
    seconds = []
    for _ in range(count):
        device.synchronize()
        began_s = device.clock_s
        _step(weight, offloader)
        device.synchronize()
        seconds.append(device.clock_s - began_s)
        weight.grad = None
    return seconds


def _step(weight: Tensor, offloader: Offloader | None) -> None:
    if offloader is None:
        _forward(weight).backward()
        return
    with offloader:
        loss = _forward(weight)
    loss.backward()


def _forward(weight: Tensor) -> Tensor:
    x = weight * 1.0
    for _ in range(TENSORS):
        x = x.sin()
    return x.sum()
