"""Blocks that communicate, under a budget, on ranks with disks of different speed: all recompute the same ones."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import Tensor, nn

from actoffload import OffloadConfig, Offloader, Plan
from actoffload.autopilot import AGREE_STEPS, WARM_UP
from actoffload.planner import PlanEntry
from actoffload.planners.base import Limits
from actoffload.profile import Profile
from actoffload.testing.faults import SlowEngine
from tests.harness import gradients, same_bits
from tests.integration import processes

STEPS = WARM_UP + 1 + AGREE_STEPS + 3
SLOW_BYTES_PER_S = 2e7
"""The disk of the first rank; the other rank's is as fast as it is."""


class _Picky:
    """Recomputes every block where the disk is slow, and none where it is not."""

    name = "picky"

    def plan(self, profile: Profile, limits: Limits) -> Plan:
        slow = profile.disk is not None and profile.disk.write_bytes_per_s < 2 * SLOW_BYTES_PER_S
        names = tuple(block.name for block in profile.blocks) if slow and limits.recompute else ()
        entries = tuple(
            PlanEntry(index=s.index, nbytes=s.nbytes, action="offload")
            for s in profile.storages
            if s.index is not None and not names
        )
        return Plan(entries, planner=self.name, recompute=names, predicted_step_s=profile.step_s)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(x)) * torch.sigmoid(self.inner(x))
        shared: Tensor = collectives.all_reduce(self.out(hidden))
        return x + shared / dist.get_world_size()


class _Model(nn.Module):
    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _train(offloader: Offloader | None, model: nn.Module) -> list[dict[str, Tensor]]:
    found = []
    for step in range(STEPS):
        x = torch.randn(256, 64, generator=torch.Generator().manual_seed(step + 10 * dist.get_rank()))
        with offloader or contextlib.nullcontext():
            loss = model(x)
        loss.backward()
        found.append(gradients(model))
    return found


def run() -> dict[str, Any]:
    """The gradients' bits against those without offloading, and what each rank planned."""
    torch.manual_seed(0)
    model = _Model()
    expected = _train(None, model)
    slow = partial(SlowEngine, bandwidth_bytes_per_s=SLOW_BYTES_PER_S)
    config = OffloadConfig(
        target="nvme",
        path=processes.scratch(),
        min_bytes=0,
        device_budget="1GiB",  # what lets a plan recompute
        engine=slow if dist.get_rank() == 0 else "auto",
    )
    offloader = Offloader(config).use(model)
    pilot = offloader._autopilot
    assert pilot is not None
    pilot._planner = _Picky()
    found = _train(offloader, model)
    plan = pilot.plan
    equal = all(same_bits(a[name], b[name]) for a, b in zip(found, expected, strict=True) for name in b)
    result = {
        "equal": equal,
        "recompute": None if plan is None else plan.recompute,
        "history": pilot.history,
        "live": offloader.statistics().live_records,
    }
    offloader.close()
    return result


if __name__ == "__main__":
    processes.main(run)
