"""Checkpointed blocks that communicate, on two ranks that plan to run different blocks once, and `agree`."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actoffload import OffloadConfig, Offloader, Plan
from actoffload.errors import StateError
from actoffload.planning.constants import REVIEW_STEPS, WARM_UP
from actoffload.planning.plan import PlanEntry
from actoffload.planning.profile import Profile
from actoffload.planning.search import Limits, Proposal
from tests.harness import assert_same_gradients, gradients
from tests.integration import processes

PLANNED_STEPS = WARM_UP + 3
STEPS = REVIEW_STEPS + 2
WANTED = {0, 2}, {1}
"""The regions that each rank would run once."""


class _Picky:
    """A planner that proposes other regions on each rank, as far as the limits allow."""

    def plan(self, profile: Profile, limits: Limits) -> Plan:
        storages = (s for s in profile.storages if s.index is not None and s.tape == 0)
        entries = tuple(PlanEntry(index=s.index or 0, nbytes=s.nbytes, action="offload") for s in storages)
        shorter_s = profile.step_s / (1 + len(profile.once))  # else a proposal is not followed
        return Plan(entries, predicted_step_s=shorter_s)

    def propose(self, base: Profile, limits: Limits) -> Proposal:
        places = {region.place for region in base.regions if limits.agreed or not region.communicates}
        once = frozenset(places & (WANTED[0] if dist.get_rank() == 0 else WANTED[1]))
        return Proposal(once=once, step_s=0.0, peak_bytes=0)


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
            x = checkpoint(layer, x, use_reentrant=False)
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
    config = OffloadConfig(target="nvme", path=processes.scratch(), min_bytes=0, device_budget="1GiB", **options)
    offloader = Offloader(config).use(model)
    if offloader.autopilot is not None:
        offloader.autopilot.making.planner = _Picky()
    return offloader


def _once(offloader: Offloader) -> list[int]:
    return sorted(offloader.store.regions.once)


def _in_a_step(offloader: Offloader) -> str:
    """The error of `agree` while a forward's tensors are alive on the second rank."""
    held = None
    if dist.get_rank() == 1:
        with offloader:
            held = torch.tanh(torch.randn(256, 64, requires_grad=True))
    reported = _printed(offloader)
    del held
    return reported


def _printed(offloader: Offloader) -> str:
    """The text of the error that `agree` raises, or none."""
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
    """Forwards of any other shape run the agreed regions once, on all ranks."""
    _step(offloader, model, 256)
    first = offloader.agree()
    wide = _Model(width=64, depth=2)  # another shape; both ranks run it, as its blocks communicate
    for _ in range(2):
        _step(offloader, wide, 512)
    still = _once(offloader)
    return {"later": (first, still)}


def _problems(model: nn.Module) -> dict[str, Any]:
    """Errors with a rank that does not plan or is closed, and the result with one that leaves checkpoints alone."""
    rank = dist.get_rank()
    other = _offloader(model, policy="greedy" if rank == 1 else "auto")
    reported = [_printed(other)]
    if rank == 1:
        other.close()
    reported.append(_printed(other))
    other.close()
    unwilling = _offloader(model, checkpoints="plan" if rank == 0 else "leave")
    for _ in range(PLANNED_STEPS):
        _step(unwilling, model, 256)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        agreed = unwilling.agree()
    found = {"problems": reported, "unwilling": (agreed, _once(unwilling))}
    unwilling.close()
    return found


def _unequal() -> dict[str, Any]:
    """Ranks with batches of different sizes, in a model without collectives."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    offloader = _offloader(model, recompute=True)
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        for _ in range(PLANNED_STEPS + 1):
            agreed = offloader.agree()
            with offloader:
                loss = model(torch.randn(256 + 64 * dist.get_rank(), 64)).square().mean()
            loss.backward()
    found = {"unequal": agreed, "unequal_once": _once(offloader), "reported": [str(w.message) for w in reported]}
    offloader.close()
    return found


def run() -> dict[str, Any]:
    """The regions that each rank ran once; fails unless gradients have the bits of a run without offloading."""
    torch.manual_seed(0)
    model = _Model()
    expected = _train(None, model, PLANNED_STEPS), _train(None, model, STEPS)
    offloader = _offloader(model)
    result: dict[str, Any] = {"too_early": offloader.agree()}
    before = _train(offloader, model, PLANNED_STEPS)
    result |= {"alone": _once(offloader), "in_a_step": _in_a_step(offloader), "agreed": offloader.agree()}
    after = _train(offloader, model, STEPS)
    for found, wanted in zip((*before, *after), (*expected[0], *expected[1]), strict=True):
        assert_same_gradients(found, wanted)
    result |= {
        "once": _once(offloader),
        "history": list(offloader.autopilot.history) if offloader.autopilot else [],
        "live": offloader.statistics().live_records,
    }
    result |= _later(offloader, model)
    offloader.close()
    return result | _problems(model) | _unequal()


if __name__ == "__main__":
    processes.main(run)
