"""Many steps of models, disks and machines that change, in virtual time, against the best plan that is found for each.

`run` gives one case's row; ``python -m benchmarks.planner`` makes the table of all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actoffload import Plan
from actoffload.errors import BudgetError
from actoffload.planning import search
from actoffload.planning.constants import LEAST_GAIN_BYTES
from actoffload.planning.profile import Link, Profile
from actoffload.planning.search import Limits, Search
from tests.exhaustive import best_cut, every_choice
from tests.planner_rig import MIB, MakeRig

SOON = 10
"""From this many steps after a change on, a step has to be as good as the best plan's."""
NEAR = 1.05
AT_REST = 30
"""This many steps after the last change, hardly another plan is made."""
NO_LOSS = 1.01
"""Planners allow themselves this much slowdown without a budget, as a multiple of keeping all."""
EVERY = 20_000
"""Up to this number, all choices are tried."""
FAST, SLOW = 4.0, 0.5
"""Disks: the bytes that they can write during a step's compute, as a multiple of the saved bytes."""
BUDGET = 0.4
"""Of the peak with all kept."""


@dataclass(frozen=True)
class Workload:
    """A model: bytes that the operators of each block make; its forward takes 0.1 s a block."""

    blocks: tuple[tuple[int, ...], ...]

    @property
    def saved_bytes(self) -> int:
        return sum(map(sum, self.blocks))

    @property
    def step_s(self) -> float:
        return 0.3 * len(self.blocks)


def _of(count: int, *mebibytes: float) -> tuple[tuple[int, ...], ...]:
    return (tuple(int(each * MIB) for each in mebibytes),) * count


MODELS = {
    "GPT": Workload(_of(8, 1, 3, 1, 1, 4, 4, 1)),
    "BERT": Workload(_of(6, 2, 0.25, 2, 2, 0.5, 4, 4, 2)),
    "conv": Workload((*_of(2, 16, 16), *_of(3, 8, 8), *_of(3, 4, 4, 4), *_of(2, 2, 2, 2))),
    "small inputs": Workload(_of(8, 2, 2, 2, 2, 0.5)),
    "two blocks": Workload(_of(2, 2, 2, 2)),
}


@dataclass(frozen=True)
class Phase:
    """Steps in which nothing changes: how many, how fast the disk and the computer are, the sizes that take turns.

    In the part of a step that ``others`` names, another program takes half of the disk's time, as an optimizer does
    whose states are there.
    """

    steps: int
    disk: float
    speed: float = 1.0
    scales: tuple[float, ...] = (1.0,)
    others: str = ""

    @property
    def shares(self) -> dict[str, float]:
        """The share of the disk's time that another program takes, by part of a step."""
        return {self.others: 0.5} if self.others else {}


SCENARIOS: dict[str, tuple[Phase, ...]] = {
    "fast disk": (Phase(200, FAST),),
    "slow disk": (Phase(200, SLOW),),
    "throttled for a while": (Phase(40, FAST), Phase(33, SLOW), Phase(127, FAST)),
    "slow first steps": (Phase(5, SLOW, speed=0.25), Phase(195, SLOW)),
    "alternating shapes": (Phase(200, SLOW, scales=(1.0, 1.5)),),
    "others in backward": (Phase(30, SLOW), Phase(30, SLOW, others="backward"), Phase(140, SLOW)),
    "others in the optimizer": (Phase(30, SLOW), Phase(30, SLOW, others="optimizer"), Phase(140, SLOW)),
}
FROM_A_FILE = "a plan from a file"


@dataclass(frozen=True)
class Best:
    """The best step under any plan: seconds and peak in bytes."""

    step_s: float
    peak_bytes: int
    plan: Plan


def names() -> Iterator[tuple[str, str, bool]]:
    """Every case: model, scenario, and whether there is a budget."""
    for model in MODELS:
        for scenario in (*SCENARIOS, FROM_A_FILE):
            for limited in (True, False):
                if model not in ("small inputs", "two blocks") or scenario != "alternating shapes":
                    yield model, scenario, limited


def budget_of(work: Workload, limited: bool, scale: float = 1.0) -> int | None:
    return int(BUDGET * work.saved_bytes * scale) if limited else None


def best_plan(make_rig: MakeRig, work: Workload, phase: Phase, scale: float, budget: int | None) -> Best:
    """The best of the plans that the planner and a search through all choices, or cuts, find for steps of a phase."""
    bytes_per_s = phase.disk * work.saved_bytes / work.step_s
    options: dict[str, Any] = {"bytes_per_s": bytes_per_s, "sizes": work.blocks, "device_budget": budget}
    plain = make_rig(**options | {"bytes_per_s": 1e12, "device_budget": 1 << 40, "policy": "auto"})
    plain.clock.speed = phase.speed
    plain.steps(3, scale, phase.shares)
    profile = plain.offloader.profile
    assert profile is not None
    read_bytes_per_s = bytes_per_s * (1 - phase.shares.get("backward", 0.0))  # only backward reads
    profile = profile.with_links(disk=Link(write_bytes_per_s=bytes_per_s, read_bytes_per_s=read_bytes_per_s))
    limits = Limits(device_budget=budget, tiers=("nvme",))
    found = []
    for plan in _plans(profile, limits):
        rig = make_rig(**options | {"policy": plan})
        rig.clock.speed = phase.speed
        rig.steps(3, scale, phase.shares)
        if budget is not None or rig.seconds[-1] <= NO_LOSS * profile.step_s:
            found.append(Best(rig.seconds[-1], rig.peaks[-1], plan))
    if budget is not None:
        return min(found, key=lambda best: best.step_s)
    enough = [best for best in found if best.peak_bytes <= profile.baseline_peak_bytes - LEAST_GAIN_BYTES]
    return min(enough or [best for best in found if not best.plan.offloaded_bytes], key=lambda best: best.peak_bytes)


def _plans(profile: Profile, limits: Limits) -> list[Plan]:
    plans = []
    with contextlib.suppress(BudgetError):
        plans.append(search.plan(profile, limits))
    tried = Search(profile, limits)
    choices = every_choice(tried, EVERY)
    choice = best_cut(tried) if choices is None else min(choices, key=tried.score)
    if tried.fits(choice):
        plans.append(tried.finish(choice))
    return plans


def run(make_rig: MakeRig, model: str, scenario: str, limited: bool) -> dict[str, Any]:
    """One case: the worst step from `SOON` steps after each change on, as multiples of the best plan's."""
    work = MODELS[model]
    phases: Sequence[Phase] = SCENARIOS.get(scenario, (Phase(20, SLOW),))
    scales = sorted({scale for phase in phases for scale in phase.scales})
    budget = budget_of(work, limited, scales[0])
    bests = {
        (phase.disk, phase.speed, phase.others, scale): best_plan(make_rig, work, phase, scale, budget)
        for phase in {replace(phase, steps=0): phase for phase in phases}.values()
        for scale in phase.scales
    }
    first = phases[0]
    options: dict[str, Any] = {"sizes": work.blocks, "device_budget": budget}
    if scenario == FROM_A_FILE:
        options["policy"] = Plan.from_json(bests[first.disk, first.speed, first.others, 1.0].plan.to_json())
    rig = make_rig(bytes_per_s=1.0, **options)
    late: list[float] = []
    high: list[float] = []
    soonest = rest = 0
    for phase in phases:
        rig.disk.bytes_per_s = phase.disk * work.saved_bytes / work.step_s
        rig.clock.speed = phase.speed
        for step in range(phase.steps):
            scale = phase.scales[step % len(phase.scales)]
            rig.step(scale, phase.shares)
            best = bests[phase.disk, phase.speed, phase.others, scale]
            turns = len(phase.scales)
            if step >= SOON * turns:
                late.append(rig.seconds[-1] / best.step_s)
                high.append(rig.peaks[-1] / (best.peak_bytes if budget is None else budget))
            if rig.seconds[-1] > NEAR * best.step_s:
                soonest = max(soonest, step // turns + 1)
            if step == AT_REST * turns:
                rest = rig.plans
    most = NEAR if budget is None else 1.0
    kept = [peak <= budget for peak in rig.peaks[3 * len(scales) :]] if budget is not None else []
    return {
        "late": max(late),
        "high": max(high),
        "soon_steps": soonest,
        "plans": rig.plans,
        "plans_at_rest": rig.plans - rest,
        "budget_kept": all(kept) if budget is not None else None,
        "holds": rig.plans - rest <= 1 and max(late) <= NEAR and max(high) <= most and all(kept),
        "best_s": [round(best.step_s, 4) for best in bests.values()],
    }
