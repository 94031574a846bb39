"""Blocks that communicate, under a budget, on ranks with disks of different speed, before and after they agree."""

from __future__ import annotations

import contextlib
import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import Tensor, nn

from actoffload import OffloadConfig, Offloader, Plan
from actoffload.errors import StateError
from actoffload.planning.constants import REVIEW_STEPS, WARM_UP
from actoffload.planning.plan import PlanEntry
from actoffload.planning.planners.base import Limits
from actoffload.planning.profile import Profile
from actoffload.testing.faults import SlowEngine
from tests.harness import gradients, same_bits
from tests.integration import processes

PLANNED_STEPS = WARM_UP + 2
STEPS = REVIEW_STEPS + 2
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
        return Plan(entries, planner=self.name, recompute=names, predicted_step_s=2.0 if slow else 1.0)


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


def _train(offloader: Offloader | None, model: nn.Module, steps: int) -> list[dict[str, Tensor]]:
    found = []
    for step in range(steps):
        x = torch.randn(256, 64, generator=torch.Generator().manual_seed(step + 10 * dist.get_rank()))
        with offloader or contextlib.nullcontext():
            loss = model(x)
        loss.backward()
        found.append(gradients(model))
    return found


def _offloader(model: nn.Module, **options: Any) -> Offloader:
    slow = partial(SlowEngine, bandwidth_bytes_per_s=SLOW_BYTES_PER_S)
    config = OffloadConfig(
        target="nvme",
        path=processes.scratch(),
        min_bytes=0,
        device_budget="1GiB",  # what lets a plan recompute
        engine=slow if dist.get_rank() == 0 else "auto",
        **{"recompute": True, **options},
    )
    offloader = Offloader(config).use(model)
    if offloader.autopilot is not None:
        offloader.autopilot.planner = _Picky()
    return offloader


def _planned(offloader: Offloader) -> tuple[str, ...]:
    assert offloader.autopilot is not None
    plan = offloader.autopilot.plan
    return ("no plan",) if plan is None else tuple(plan.recompute)


def _in_a_step(offloader: Offloader) -> str:
    """What `agree` says while the second rank has something alive."""
    held = None
    if dist.get_rank() == 1:
        with offloader:
            held = torch.tanh(torch.randn(256, 64, requires_grad=True))
    told = _said(offloader)
    del held
    return told


def _said(offloader: Offloader) -> str:
    """What `agree` raises."""
    try:
        offloader.agree()
    except StateError as error:
        return str(error)
    return ""


def _step(offloader: Offloader, model: nn.Module, batch: int) -> None:
    with offloader:
        loss = model(torch.randn(batch, 64))
    loss.backward()


def _later(offloader: Offloader, model: nn.Module) -> dict[str, Any]:
    """After batches of another size on one rank nobody goes on with the plan; then they can agree anew."""
    pilot = offloader.autopilot
    assert pilot is not None
    _step(offloader, model, 256)
    first = offloader.agree()
    wide = _Model(width=64, depth=2)  # another forward, the same on both ranks, as its blocks communicate
    for _ in range(2):
        _step(offloader, wide, 512)
    still = sorted(pilot.recompute.names)
    gone = offloader.agree()
    return {"later": (first, tuple(still), gone, tuple(pilot.recompute.names))}


def _problems(model: nn.Module) -> dict[str, Any]:
    """A rank that does not plan, one that was closed, and one that may not recompute."""
    rank = dist.get_rank()
    other = _offloader(model, policy="greedy" if rank == 1 else "auto", recompute=rank != 1)
    told = [_said(other)]
    if rank == 1:
        other.close()
    told.append(_said(other))
    other.close()
    unwilling = _offloader(model, recompute=rank == 0)
    for _ in range(PLANNED_STEPS):
        _step(unwilling, model, 256)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        agreed = unwilling.agree()
    found = {"problems": told, "unwilling": (agreed, _planned(unwilling))}
    unwilling.close()
    return found


def _unequal() -> dict[str, Any]:
    """Ranks whose batches differ; nothing communicates."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    offloader = _offloader(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(PLANNED_STEPS + 1):
            agreed = offloader.agree()
            with offloader:
                loss = model(torch.randn(256 + 64 * dist.get_rank(), 64)).square().mean()
            loss.backward()
    found = {"unequal": agreed, "unequal_recompute": _planned(offloader), "told": [str(w.message) for w in told]}
    offloader.close()
    return found


def run() -> dict[str, Any]:
    """The gradients' bits against those without offloading, and what each rank planned."""
    torch.manual_seed(0)
    model = _Model()
    expected = _train(None, model, PLANNED_STEPS), _train(None, model, STEPS)
    offloader = _offloader(model)
    result: dict[str, Any] = {"too_early": offloader.agree()}
    before = _train(offloader, model, PLANNED_STEPS)
    result |= {"alone": _planned(offloader)}
    result |= {"in_a_step": _in_a_step(offloader)}
    result |= {"agreed": offloader.agree()}
    after = _train(offloader, model, STEPS)
    result |= {
        "equal": all(
            same_bits(a[name], b[name])
            for found, wanted in zip((before, after), expected, strict=True)
            for a, b in zip(found, wanted, strict=True)
            for name in b
        ),
        "recompute": _planned(offloader),
        "last": offloader.autopilot.history[-1] if offloader.autopilot else "",
        "live": offloader.statistics().live_records,
    }
    result |= _later(offloader, model)
    offloader.close()
    return result | _problems(model) | _unequal()


if __name__ == "__main__":
    processes.main(run)
