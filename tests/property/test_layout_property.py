"""A plan's places are those at which a real forward saves, whatever is recomputed and whatever its blocks are given."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from actoffload import OffloadConfig, Offloader, Plan
from actoffload.planning.planners.base import Limits
from actoffload.planning.profile import Profile
from actoffload.planning.workload import KEEP, NVME, Choice, Workload
from tests.harness import assert_empty, assert_same_gradients, gradients, plan_with

ROW_BYTES = 64 * 4


class _Block(nn.Module):
    """Takes an input, what all blocks share, and what nobody saves; ``first`` is what it does with its input."""

    def __init__(self, first: str, side: str) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(64, 256), nn.Linear(256, 64)
        self.first, self.side = first, side

    def forward(self, x: Tensor, bias: Tensor, *, scale: Tensor) -> Tensor:
        given = x
        if self.first == "add":
            x = x + 1.0
        elif self.first == "tanh":
            x = torch.tanh(x)
        if "bias" in self.side:
            x = x + bias
        h = torch.sigmoid(self.linear(x))
        if "scale" in self.side:
            h = h * scale
        out: Tensor = given + self.out(h)
        return out


class _Model(nn.Module):
    def __init__(self, kinds: list[tuple[str, str]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(64, 64)
        self.layers = nn.ModuleList(_Block(*kind) for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        bias, scale = x.detach() * 0.5, torch.sigmoid(x.mean(0)).repeat(x.shape[0], 4)
        for layer in self.layers:
            x = layer(x, bias, scale=scale)
        return x


@dataclass
class _Chosen:
    """A planner that moves and recomputes what it is told."""

    recompute: list[bool]
    moves: list[bool]
    name: str = "chosen"
    plans: list[Plan] = field(default_factory=list)

    def plan(self, profile: Profile, limits: Limits) -> Plan:
        workload = Workload(profile)
        flags = zip(range(len(workload.groups)), self.recompute, strict=False)
        recompute = frozenset(number for number, flag in flags if flag)
        there = set(workload.layout(recompute))
        tiers = [
            NVME if number in there and item.movable and self.moves[number % len(self.moves)] else KEEP
            for number, item in enumerate(workload.items)
        ]
        entries = workload.to_entries(Choice(tuple(tiers), recompute), [""] * len(tiers), [0] * len(workload.nbytes))
        names = tuple(workload.groups[number].name for number in recompute)
        saved = {block.name: block.arguments for block in profile.blocks}
        arguments = tuple(saved[name] for name in names)
        self.plans.append(Plan(entries, recompute=names, arguments=arguments, predicted_step_s=1.0))
        return self.plans[-1]


def _step(model: nn.Module, x: Tensor, offloader: Offloader) -> Any:
    with offloader:
        loss = model(x).square().sum()
    loss.backward()
    return gradients(model)


KINDS = st.tuples(st.sampled_from(("linear", "add", "tanh")), st.sampled_from(("", "bias", "scale", "bias scale")))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kinds=st.lists(KINDS, min_size=2, max_size=4),
    recompute=st.lists(st.booleans(), min_size=4, max_size=4),
    moves=st.lists(st.booleans(), min_size=3, max_size=7),
    least_rows=st.sampled_from((0, 33, 100)),
)
def test_a_forward_saves_at_the_places_of_its_plan(
    kinds: list[tuple[str, str]], recompute: list[bool], moves: list[bool], least_rows: int
) -> None:
    """``least_rows``: inputs of blocks have 32 rows, so that they are too small to move where it is more."""
    model, x = _Model(kinds), torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    plain = _reference(model, x)
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"target": "nvme", "path": folder, "engine": "memory", "tune_malloc": False}
        offloader = Offloader(OffloadConfig(min_bytes=least_rows * ROW_BYTES, device_budget="1GiB", **options))
        planner = _Chosen(recompute, moves)
        plan_with(offloader.use(model), planner)
        for _ in range(4):
            assert_same_gradients(_step(model, x, offloader), plain)
        assert offloader.autopilot is not None
        assert list(offloader.autopilot.history) == ["first plan"], "no step was found to be another one"
        expected = [entry.nbytes for entry in planner.plans[0].entries]
        if expected:  # a forward that saves nothing leaves what is known of the one before
            assert [entry.nbytes for entry in offloader.plan.entries] == expected
        assert_empty(offloader)
        offloader.close()


def _reference(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model(x).square().sum().backward()
    return gradients(model)
