"""Rare moments on the simulated accelerator; run by test_simulated_device.py in a process of its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from actoffload.storage.spool import Spool
from actoffload.testing.simulated_device import NAME, SimulatedDevice
from actoffload.tiers import device_tier, tiers
from actoffload.tiers.device_tier import DeviceTier
from tests.harness import lock_of, records_of, wait_until
from tests.unit.simulated_device_cases import RECORD_BYTES, SIZE, _offloader, device

__all__ = ["device"]

CHUNK = 4096


def test_all_parts_of_a_tensor_may_come_to_the_device_before_its_read_is_seen_to_end(
    device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_tier, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(tiers, "Spool", partial(Spool, stripe_bytes=CHUNK))
    arrived = DeviceTier._arrived_on_host

    def late(tier: DeviceTier, record: Any, *rest: Any) -> None:
        tier._part_arrived()
        wait_until(lambda: record.filled_bytes == RECORD_BYTES, "all parts are on their way to the device")
        arrived(tier, record, *rest)

    monkeypatch.setattr(DeviceTier, "_arrived_on_host", late)
    w = torch.linspace(-1, 1, SIZE * SIZE).to(NAME).requires_grad_()
    with _offloader(tmp_path, target="nvme") as offloader:
        with offloader:
            out = (w * 2).sin()
        offloader.synchronize()
        assert [record.on_disk for record in records_of(offloader)] == [True]
        (found,) = torch.autograd.grad(out.sum(), w)
    assert torch.equal(found.cpu(), (2 * (w * 2).cos()).cpu())
