"""Programs that checkpoint, in virtual time on the simulated device: the default makes no step longer or larger."""

from __future__ import annotations

import pytest

from tests.limited_memory import SHAPES, run, virtual_time

pytestmark = pytest.mark.simulated

LINK = 52e9, 52e9
STEPS = 8 * len(SHAPES)
SLACK = 1.05
"""Times the peak of checkpointing alone. The allocator rounds sizes, and a batch of copies holds what one of them is
of: a few tensors of the hundred or so that are alive at the peak."""
NOISE = 1.005
"""Times a step of checkpointing alone: events and hooks take microseconds of the host."""


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
