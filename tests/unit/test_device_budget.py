"""``device_budget`` on the simulated device: tensors that backward fetches ahead stay within it, because of one check.

Every layer saves one storage of the same size, and each read from disk gets the time to end before backward goes on. So
a read without the check is on the device at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actoffload import Offloader
from actoffload.testing.simulated_device import NAME, SimulatedAccelerator, SimulatedDevice
from actoffload.tiers.device_tier import DeviceTier
from actoffload.tiers.shared import DeviceBudget
from tests.harness import accounts_of, hinder, same_bits, simulated, states_of, wait_until

pytestmark = pytest.mark.simulated

LAYERS = 12
RECORD_BYTES = 64 << 10
BUDGET_BYTES = 4 * RECORD_BYTES
MODES = [("host", True), ("host", False), ("nvme", True), ("nvme", False)]
"""Targets, and whether everything has left the device when backward begins."""


def _peaks(device: SimulatedDevice, path: Path, target: str, settled: bool) -> tuple[int, int]:
    """The most activation bytes on the device at once, in forward and in backward; gradients are checked."""
    accelerator = SimulatedAccelerator()
    hinder(device, accelerator, "late copies")
    x = torch.linspace(-1, 1, RECORD_BYTES // 4).to(NAME).requires_grad_()

    def forward(offloader: Offloader | None) -> Tensor:
        h = x
        for _ in range(LAYERS):
            h = (h * 1.0001).sin()
            if offloader is not None:
                h.register_hook(lambda _: wait_until(lambda: "fetching" not in states_of(offloader)))
        return h.sum()

    with simulated(
        accelerator,
        target=target,
        path=path,
        device_budget=BUDGET_BYTES,
        debug=True,
        prefetch_bytes=LAYERS * RECORD_BYTES,  # far enough ahead that only the budget stops it
    ) as offloader:
        (expected,) = torch.autograd.grad(forward(None), x)
        with offloader:
            loss = forward(offloader)
        if settled:
            offloader.synchronize()
        accounts = accounts_of(offloader)
        in_forward, accounts.resident_peak_bytes = accounts.resident_peak_bytes, accounts.resident_bytes
        (found,) = torch.autograd.grad(loss, x)
        assert same_bits(found, expected)
        statistics = offloader.statistics()
        assert statistics.moved_bytes == statistics.baseline_peak_bytes == LAYERS * RECORD_BYTES
        assert statistics.live_records == 0
        return in_forward, accounts.resident_peak_bytes


@pytest.mark.parametrize(("target", "settled"), MODES)
def test_the_budget_bounds_forward_and_backward(
    device: SimulatedDevice, tmp_path: Path, target: str, settled: bool
) -> None:
    in_forward, in_backward = _peaks(device, tmp_path, target, settled)
    assert in_forward <= BUDGET_BYTES
    assert 2 * RECORD_BYTES <= in_backward <= BUDGET_BYTES  # something is fetched ahead, too


def test_a_storage_that_backward_needs_out_of_order_has_room(device: SimulatedDevice) -> None:
    x = torch.linspace(-1, 1, RECORD_BYTES // 4).to(NAME).requires_grad_()
    with simulated(device_budget=BUDGET_BYTES) as offloader:
        with offloader:
            saved: list[Any] = [(h.sin(), h.cos()) for h in (x * 1.0001 for _ in range(LAYERS))]
        offloader.synchronize()
        accounts = accounts_of(offloader)
        accounts.resident_peak_bytes = 0
        _last = saved[-1][0].grad_fn._saved_self  # the cosine has not been unpacked yet, so the storage stays
        assert accounts.resident_bytes == BUDGET_BYTES - RECORD_BYTES
        _first = saved[0][0].grad_fn._saved_self
        assert accounts.resident_peak_bytes == BUDGET_BYTES


@pytest.mark.parametrize(("target", "settled"), MODES)
def test_without_the_check_backward_exceeds_the_budget(
    device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, settled: bool
) -> None:
    monkeypatch.setattr(DeviceBudget, "has_room_early", lambda self, nbytes: True)
    in_forward, in_backward = _peaks(device, tmp_path, target, settled)
    assert in_forward <= BUDGET_BYTES
    assert in_backward > 2 * BUDGET_BYTES


def test_a_storage_read_from_disk_needs_the_check_too(
    device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read takes no device memory: there was room when it began, and there may be none when it has ended."""
    plain = DeviceTier.poll

    def hasty(self: DeviceTier) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(DeviceBudget, "has_room_early", lambda budget, nbytes: True)
            plain(self)

    monkeypatch.setattr(DeviceTier, "poll", hasty)
    assert _peaks(device, tmp_path, "nvme", settled=True)[1] > 2 * BUDGET_BYTES
