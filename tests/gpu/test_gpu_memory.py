"""On an accelerator: the allocator's own peak is the one that the budget and the statistics promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import MakeOffloader

pytestmark = pytest.mark.gpu

TENSOR_BYTES = (16 if torch.cuda.is_available() else 2) << 20
LAYERS = 48
SLACK_BYTES = 8 * TENSOR_BYTES
"""The computation's own memory beside saved tensors: the operands and gradients of an operation or two."""

PLAIN: dict[str, Any] = {"policy": "auto", "min_bytes": None, "keep_last_bytes": None, "debug": False}
"""The library's defaults."""


def peak_over(context: Any, steps: int) -> int:
    """The allocator's peak above the bytes allocated before; the chain saves ``LAYERS`` tensors."""
    accelerator = torch.accelerator.current_accelerator()
    x = torch.randn(TENSOR_BYTES // 4, device=accelerator).requires_grad_()
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    for _ in range(steps):
        if context is None:
            out = chain(x)
        else:
            with context:
                out = chain(x)
        out.sum().backward()
        x.grad = None
        del out
    torch.accelerator.synchronize()
    return int(torch.accelerator.max_memory_allocated()) - before


def chain(x: Tensor) -> Tensor:
    """Each operation saves its input."""
    for _ in range(LAYERS):
        x = x.sin()
    return x


@pytest.mark.parametrize("target", ["host", "nvme", "tiered"])
def test_a_device_budget_is_kept_from_the_first_step_on(target: str, make_offloader: MakeOffloader) -> None:
    everything = peak_over(None, 1)
    assert everything >= (LAYERS - 2) * TENSOR_BYTES
    budget = 8 * TENSOR_BYTES
    offloader = make_offloader(**PLAIN, target=target, device_budget=budget)
    peak = peak_over(offloader, 3)
    statistics = offloader.statistics()
    assert statistics.resident_peak_bytes <= budget + TENSOR_BYTES
    assert peak <= budget + SLACK_BYTES, f"{peak} over a budget of {budget}"
    assert peak < everything / 2


def test_the_statistics_agree_with_the_allocator(make_offloader: MakeOffloader) -> None:
    everything = peak_over(None, 1)
    offloader = make_offloader(**PLAIN, target="host")
    peak = peak_over(offloader, 3)
    statistics = offloader.statistics()
    assert abs(statistics.baseline_peak_bytes - everything) <= SLACK_BYTES
    assert peak <= statistics.resident_peak_bytes + SLACK_BYTES


def test_device_memory_returns_when_graphs_are_dropped(make_offloader: MakeOffloader) -> None:
    accelerator = torch.accelerator.current_accelerator()
    x = torch.randn(TENSOR_BYTES // 4, device=accelerator).requires_grad_()
    offloader = make_offloader(**PLAIN, target="host", device_budget=8 * TENSOR_BYTES)
    before = torch.accelerator.memory_allocated()
    for step in range(6):
        with offloader:
            out = chain(x)
        if step % 3 == 0:
            out.sum().backward()
            x.grad = None
        del out
    torch.accelerator.synchronize()
    with offloader:  # the next forward releases memory whose copies have ended
        out = chain(x[:1])
    del out
    torch.accelerator.synchronize()
    assert offloader.statistics().live_records == 0
    assert torch.accelerator.memory_allocated() - before <= 2 * TENSOR_BYTES
