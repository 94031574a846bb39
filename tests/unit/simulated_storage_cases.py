"""Host memory and disk behind the simulated accelerator; run by test_simulated_device.py in a process of its own."""

from __future__ import annotations

from pathlib import Path

import torch

from actoffload.testing.simulated_device import SimulatedDevice
from tests.unit.simulated_device_cases import _gradients, _model, _offloader, device

__all__ = ["device"]


def test_no_thread_of_ours_touches_another_device_than_that_of_its_event(
    device: SimulatedDevice, tmp_path: Path
) -> None:
    """On CUDA that would make a context on device 0 from the process of every rank."""
    model, x = _model(1)
    device.delay(0.002, 1)
    before = [device.calls(index) for index in range(2)]
    with torch.accelerator.device_index(1):
        with _offloader(tmp_path, target="nvme") as offloader:
            for _ in range(2):
                _gradients(model, x, offloader)
            assert offloader.statistics().nvme_read_bytes > 0
            offloader.close()
    assert device.calls(0) == before[0]
    assert device.calls(1) > before[1]
