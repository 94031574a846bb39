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

import actoffload
from actoffload import Offloader
from actoffload.testing.simulated_device import NAME, SimulatedAccelerator, SimulatedDevice, install
from tests import limited_memory
from tests.harness import accounts_of, hinder, same_bits, simulated, states_of, wait_until
from tests.limited_memory import SHAPES, Training, limited, run, virtual_time

pytestmark = pytest.mark.simulated

LAYERS = 12
RECORD_BYTES = 64 << 10
BUDGET_BYTES = 4 * RECORD_BYTES


@pytest.mark.parametrize("target", ["host", "nvme"])
@pytest.mark.parametrize("settled", [True, False], ids=["all has left as backward begins", "some has not"])
def test_the_budget_bounds_forward_and_backward(
    device: SimulatedDevice, tmp_path: Path, target: Any, settled: bool
) -> None:
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
        path=str(tmp_path),
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
        assert accounts.resident_peak_bytes <= BUDGET_BYTES
        accounts.resident_peak_bytes = accounts.resident_bytes
        (found,) = torch.autograd.grad(loss, x)
        assert 2 * RECORD_BYTES <= accounts.resident_peak_bytes <= BUDGET_BYTES, "something is fetched ahead, too"
        assert same_bits(found, expected)
        statistics = offloader.statistics()
        assert statistics.moved_bytes == statistics.baseline_peak_bytes == LAYERS * RECORD_BYTES
        assert statistics.live_records == 0


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


# -- the peak with checkpoints -----------------------------------------------------------------------------------------


LINK = 52e9, 52e9
STEPS = 4 * len(SHAPES)
SLACK = 1.05
"""Times the peak of checkpointing alone.

The allocator rounds sizes, and a batch of copies holds all its tensors until the last is copied: a few of the hundred
or so that are alive at the peak.
"""
NOISE = 1.005
"""Times a step of checkpointing alone: events and hooks take microseconds of the host."""


@pytest.fixture
def _two_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for gradients to add up."""
    monkeypatch.setattr(limited_memory, "ACCUMULATION", 2)


@pytest.mark.usefixtures("_two_micro_batches")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_the_default_runs_regions_once_in_no_more_memory_than_checkpointing_takes(name: str) -> None:
    with virtual_time():
        alone = run(name, LINK, STEPS)
        ours = run(name, LINK, STEPS, target="host")
    assert ours["bits"] == alone["bits"], "the weights were trained with other gradients"
    for number, (peak, of_alone) in enumerate(zip(ours["peaks"], alone["peaks"], strict=True)):
        assert peak <= SLACK * of_alone, f"step {number}"
    assert ours["once"]
    last = list(zip(ours["seconds"][-2:], alone["seconds"][-2:], strict=True))
    assert all(one <= NOISE * other for one, other in last), "no shape's step is longer"
    assert sum(one for one, _ in last) < sum(other for _, other in last), "a region that runs once takes less time"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "share"), [("conv", 0.5), ("gpt", 0.3)])
def test_in_little_memory_no_plan_is_longer_than_the_programs_own_checkpoints(name: str, share: float) -> None:
    """The checkpoints fit, or nearly: a region that runs once or a storage that moves has to shorten each step."""
    with virtual_time():
        alone = run(name, LINK, 4)
        ours = limited(name, LINK, share, 7 * len(SHAPES), target="host")
    assert "failed" not in ours
    assert max(ours["peaks"]) <= ours["limit_bytes"]
    times = [one / alone["seconds"][2 + number % len(SHAPES)] for number, one in enumerate(ours["seconds"])]
    assert max(times[5 * len(SHAPES) :]) <= 1.05, times
    assert None not in ours["predicted"][len(SHAPES) * 2 :], "a plan is followed all the time"


@pytest.mark.usefixtures("_two_micro_batches")
def test_with_a_disk_too_no_step_passes_a_number_near_the_least() -> None:
    """A plan on paper once let all early reads onto the device; the plan that was followed instead kept too much."""
    with virtual_time():
        ours = limited("conv", LINK, 0.3, 3 * len(SHAPES), target="nvme", engine="memory")
    assert "failed" not in ours
    assert max(ours["peaks"]) <= ours["limit_bytes"]


def test_steps_of_a_device_are_as_long_as_they_are_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host enqueues several micro-batches in the time of one, and waits in the last."""
    monkeypatch.setattr(limited_memory, "ACCUMULATION", 3)
    with virtual_time():
        device = install()
        training = Training(device, "conv", (), LINK)
        attachment = actoffload.attach(training.model, target="host", host_budget=1 << 30, announce="none")
        for _ in range(6):
            training.step(0)
        pilot = attachment.offloader.autopilot
        assert pilot is not None
        seen = pilot.facts().shape.seen
        attachment.detach()
        attachment.offloader.abort()
    assert seen is not None
    assert seen.step_s == pytest.approx(training.seconds[-1] / 3, rel=0.1)
