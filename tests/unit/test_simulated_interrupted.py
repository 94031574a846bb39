"""Rare moments on the simulated accelerator: interrupts, and parts that arrive early."""

from __future__ import annotations

import contextlib
import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from actoffload.memory import host_pool
from actoffload.storage.spool import Spool
from actoffload.testing.simulated_device import NAME, SimulatedAccelerator, SimulatedDevice
from actoffload.tiers import device_tier, tiers
from actoffload.tiers.device_tier import DeviceTier
from tests.harness import pools_of, records_of, wait_until
from tests.unit.simulated_programs import RECORD_BYTES, SIZE, _model, _offloader

pytestmark = pytest.mark.simulated

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


@pytest.mark.parametrize("way", ["in", "out"])
def test_an_interrupted_copy_keeps_no_memory_page_locked(
    device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    plain = SimulatedAccelerator.copy

    def interrupted(accelerator: SimulatedAccelerator, copies: Any, stream: Any) -> None:
        plain(accelerator, copies, stream)
        if stream == accelerator.side_stream(0, way):
            raise KeyboardInterrupt

    model, x = _model()
    with _offloader(tmp_path, target="host", debug=False) as offloader:
        (pool,) = pools_of(offloader)
        monkeypatch.setattr(SimulatedAccelerator, "copy", interrupted)
        loss = None
        with contextlib.suppress(KeyboardInterrupt):
            with offloader:
                loss = model(x).square().sum()
            offloader.synchronize()
            offloader.store.obtain(next(record for record in records_of(offloader) if not record.on_device), 0)
        assert offloader.store.interrupted
        del loss
        monkeypatch.setattr(SimulatedAccelerator, "copy", plain)
        device.synchronize()
        gc.collect()
        host_pool._close_closed()
        assert pool.mapped_bytes == 0
