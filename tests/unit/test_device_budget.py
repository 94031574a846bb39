"""``device_budget`` on the simulated device: what backward fetches ahead stays within it, because of one check.

Every layer saves one storage of the same size, and each read from disk is given the time to end before backward goes
on: what is not held back is then on the device at once.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actoffload import OffloadConfig, Offloader
from actoffload.device_tier import DeviceMover
from actoffload.record import Record, State
from actoffload.schedule import Tape
from actoffload.testing.fakedevice import FakeDevice
from actoffload.tiers import Core
from tests.harness import WAIT_S, same_bits

LAYERS = 12
RECORD_BYTES = 64 << 10
BUDGET_BYTES = 4 * RECORD_BYTES
MODES = [("host", True), ("host", False), ("nvme", True), ("nvme", False)]
"""Targets, and whether everything has left the device when backward begins."""


def _let_reads_end(offloader: Offloader, tape: Tape[Record]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        with offloader.core.lock:
            if not any(record is not None and record.state is State.FETCHING for record in tape.records):
                return
        time.sleep(0.001)
    pytest.fail("a read from disk does not end")


def _peaks(path: Path, target: str, settled: bool) -> tuple[int, int]:
    """The most activation bytes on the device at once, in forward and in backward; gradients are checked."""
    options: dict[str, Any] = {"target": target, "path": str(path), "device_budget": BUDGET_BYTES, "min_bytes": 0}
    device = FakeDevice("lazy")  # no copy is done before it is waited for
    options["prefetch_bytes"] = LAYERS * RECORD_BYTES  # so far ahead that only the budget is in its way
    offloader = Offloader(OffloadConfig(keep_last_bytes=0, debug=True, **options), accelerator=device)
    x = torch.linspace(-1, 1, RECORD_BYTES // 4).requires_grad_()

    def forward(tape: Tape[Record] | None) -> Tensor:
        h = x
        for _ in range(LAYERS):
            h = (h * 1.0001).sin()
            if tape is not None:
                h.register_hook(lambda _: _let_reads_end(offloader, tape))
        return h.sum()

    try:
        with device:
            (expected,) = torch.autograd.grad(forward(None), x)
            with offloader:
                loss = forward(offloader._tape())
            if settled:
                offloader.synchronize()
            accounts = offloader.core.accounts
            in_forward, accounts.resident_peak_bytes = accounts.resident_peak_bytes, accounts.resident_bytes
            (found,) = torch.autograd.grad(loss, x)
        device.finish()
        assert same_bits(found, expected)
        assert not device.violations
        statistics = offloader.statistics()
        assert statistics.moved_bytes == statistics.baseline_peak_bytes == LAYERS * RECORD_BYTES
        assert statistics.live_records == 0
        return in_forward, accounts.resident_peak_bytes
    finally:
        offloader.close()


@pytest.mark.parametrize(("target", "settled"), MODES)
def test_the_budget_bounds_forward_and_backward(tmp_path: Path, target: str, settled: bool) -> None:
    in_forward, in_backward = _peaks(tmp_path, target, settled)
    assert in_forward <= BUDGET_BYTES
    assert 2 * RECORD_BYTES <= in_backward <= BUDGET_BYTES  # something is fetched ahead, too


def test_what_backward_asks_for_out_of_order_has_its_room(tmp_path: Path) -> None:
    """What is fetched ahead leaves room for one storage that was not foreseen."""
    options: dict[str, Any] = {"target": "host", "path": str(tmp_path), "device_budget": BUDGET_BYTES, "min_bytes": 0}
    offloader = Offloader(OffloadConfig(keep_last_bytes=0, **options), accelerator=FakeDevice("eager"))
    x = torch.linspace(-1, 1, RECORD_BYTES // 4).requires_grad_()
    with offloader:
        saved: list[Any] = [(h.sin(), h.cos()) for h in (x * 1.0001 for _ in range(LAYERS))]
    offloader.synchronize()
    accounts = offloader.core.accounts
    accounts.resident_peak_bytes = 0
    _last = saved[-1][0].grad_fn._saved_self  # the cosine has not asked yet, so that it stays
    assert accounts.resident_bytes == BUDGET_BYTES - RECORD_BYTES
    _first = saved[0][0].grad_fn._saved_self
    assert accounts.resident_peak_bytes == BUDGET_BYTES
    offloader.close()


@pytest.mark.parametrize(("target", "settled"), MODES)
def test_without_the_check_backward_exceeds_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, settled: bool
) -> None:
    monkeypatch.setattr(Core, "has_room_ahead", lambda self, nbytes: True)
    in_forward, in_backward = _peaks(tmp_path, target, settled)
    assert in_forward <= BUDGET_BYTES
    assert in_backward > 2 * BUDGET_BYTES


def test_what_has_arrived_from_disk_needs_the_check_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read takes no device memory: there was room when it began, and there may be none when it has ended."""
    plain = DeviceMover.pump

    def hasty(self: DeviceMover) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Core, "has_room_ahead", lambda core, nbytes: True)
            plain(self)

    monkeypatch.setattr(DeviceMover, "pump", hasty)
    assert _peaks(tmp_path, "nvme", settled=True)[1] > 2 * BUDGET_BYTES
