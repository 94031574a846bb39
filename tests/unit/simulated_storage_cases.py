"""Host memory and disk behind the simulated accelerator; run by test_simulated_device.py in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actoffload.testing.simulated_device import NAME, SimulatedAccelerator, SimulatedDevice
from actoffload.tiers.copy_streams import CopyStreams
from tests.unit.simulated_device_cases import _gradients, _model, _offloader, device

__all__ = ["device"]

NBYTES = 1 << 12


def test_no_thread_of_ours_touches_another_device_than_that_of_its_event(
    device: SimulatedDevice, tmp_path: Path
) -> None:
    """On CUDA that would make a context on device 0 from the process of every rank."""
    model, x = _model(1)
    device.delay(0.002, 1)
    before = [device.calls(index) for index in range(2)]
    with torch.accelerator.device_index(1), _offloader(tmp_path, target="nvme") as offloader:
        for _ in range(2):
            _gradients(model, x, offloader)
        assert offloader.statistics().nvme_read_bytes > 0
        offloader.close()
    assert device.calls(0) == before[0]
    assert device.calls(1) > before[1]


@pytest.mark.parametrize("ordered", [True, False])
def test_host_memory_is_written_again_after_the_copy_that_reads_it(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    accelerator = SimulatedAccelerator()
    copies = CopyStreams(accelerator)
    host = torch.full((NBYTES,), 7, dtype=torch.uint8).pin_memory()
    other = torch.full((NBYTES,), 9, dtype=torch.uint8, device=NAME)
    if not ordered:
        monkeypatch.setattr(CopyStreams, "_order_after_host_copies", lambda *_: None)
    out_stream = accelerator.side_stream(0, "out")
    with device.paused(accelerator.side_stream(0, "in")):
        incoming = copies.begin_in(host, 0)
        out = copies.begin_out(other, host, [incoming.event])
        if not ordered:
            out_stream.synchronize()
    accelerator.synchronize(out.event)
    found = copies.before_use(incoming).cpu()
    assert bool((found == (7 if ordered else 9)).all())
    assert bool((host == 9).all())
