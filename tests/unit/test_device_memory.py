"""``device_memory``: one number for everything on the device, kept from the first step on."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import actoffload
from actoffload import OffloadConfig, Offloader
from actoffload.errors import BudgetError, ConfigError
from actoffload.testing.simulated_device import NAME, SimulatedDevice
from tests.harness import MakeOffloader, assert_same_gradients, autopilot_of, gradients

MIB = 1 << 20
WIDTH, ROWS = 64, 2048


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(torch.tanh(self.wide(x)))


def _model(blocks: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(_Block() for _ in range(blocks))).to(NAME)


def _batch(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows)).to(NAME)


def _step(model: nn.Module, rows: int, offloader: Offloader | None = None) -> None:
    x = _batch(rows)
    if offloader is None:
        model(x).square().sum().backward()
        return
    with offloader:
        loss = model(x).square().sum()
    loss.backward()


def _train(
    steps: int, offloader: Offloader | None, *, accumulate: int = 1, rows: Sequence[int] = (ROWS,)
) -> tuple[list[int], nn.Module]:
    """Train with Adam; return the allocator's peak of each step, and the model."""
    model, peaks = _model(), []
    if offloader is not None:
        offloader.use(model)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for step in range(steps):
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        for part in range(accumulate):
            _step(model, rows[(step + part) % len(rows)], offloader)
        optimizer.step()
        optimizer.zero_grad()
        torch.accelerator.synchronize()
        peaks.append(torch.accelerator.max_memory_allocated())
    return peaks, model


def _empty(device: SimulatedDevice) -> None:
    gc.collect()
    device.synchronize()
    torch.accelerator.empty_cache()


@pytest.mark.simulated
@pytest.mark.parametrize("share", [0.5, 0.7, 0.85])
@pytest.mark.parametrize("how", [{}, {"accumulate": 4}, {"rows": (ROWS, ROWS // 2)}], ids=["plain", "accum", "shapes"])
def test_steps_never_pass_the_number_from_the_first_one_on(
    device: SimulatedDevice, tmp_path: Path, share: float, how: dict[str, Any]
) -> None:
    steps = 24 // how.get("accumulate", 1) + 6
    peaks, expected = _train(2, None, **how)
    _empty(device)
    limit = int(share * max(peaks))
    expected = _train(steps, None, **how)[1]
    _empty(device)
    device.limit(limit)
    offloader = Offloader(OffloadConfig(target="host", min_bytes=1, device_memory=limit, announce="none"))
    try:
        found, model = _train(steps, offloader, **how)
        assert max(found) <= limit
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(mine.cpu(), theirs.cpu())
        print(
            share,
            how,
            limit / MIB,
            [round(p / MIB, 2) for p in found],
            offloader.store.shared.budget.limit_bytes / MIB,
            autopilot_of(offloader).history,
        )
        print(offloader.explain()[:800])
    finally:
        offloader.abort()
