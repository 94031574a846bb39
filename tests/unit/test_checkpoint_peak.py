"""Programs that checkpoint, in virtual time on the simulated device: the default makes no step longer or larger."""

from __future__ import annotations

import pytest

import actoffload
from actoffload.testing.simulated_device import install
from tests.limited_memory import ACCUMULATION, SHAPES, Training, limited, run, virtual_time

pytestmark = pytest.mark.simulated

LINK = 52e9, 52e9
STEPS = 6 * len(SHAPES)
SLACK = 1.05
"""Times the peak of checkpointing alone.

The allocator rounds sizes, and a batch of copies holds all its tensors until the last is copied: a few of the hundred
or so that are alive at the peak.
"""
NOISE = 1.005
"""Times a step of checkpointing alone: events and hooks take microseconds of the host."""


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
        ours = limited(name, LINK, share, 12 * len(SHAPES), target="host")
    assert "failed" not in ours
    assert max(ours["peaks"]) <= ours["limit_bytes"]
    settled = range(10 * len(SHAPES), len(ours["seconds"]))
    assert all(ours["seconds"][number] <= 1.05 * alone["seconds"][2 + number % len(SHAPES)] for number in settled)
    assert None not in ours["predicted"][len(SHAPES) * 2 :], "a plan is followed all the time"


def test_with_a_disk_too_no_step_passes_a_number_near_the_least() -> None:
    """A plan on paper once let all early reads onto the device; the plan that was followed instead kept too much."""
    with virtual_time():
        ours = limited("conv", LINK, 0.3, 3 * len(SHAPES), target="nvme", engine="memory")
    assert "failed" not in ours
    assert max(ours["peaks"]) <= ours["limit_bytes"]


def test_steps_of_a_device_are_as_long_as_they_are_on_it() -> None:
    """The host enqueues several micro-batches in the time of one, and waits in the last."""
    with virtual_time():
        device = install()
        training = Training(device, "conv", (), LINK)
        attachment = actoffload.attach(training.model, target="host", host_budget=1 << 30, announce="none")
        for _ in range(8):
            training.step(0)
        pilot = attachment.offloader.autopilot
        assert pilot is not None
        seen = pilot.seen
        attachment.detach()
        attachment.offloader.abort()
    assert seen is not None
    assert seen.step_s == pytest.approx(training.seconds[-1] / ACCUMULATION, rel=0.1)
