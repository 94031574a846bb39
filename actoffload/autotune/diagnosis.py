"""What a report concludes: the limiting factor, the share of the time spent waiting, and what to do next."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from ..config import OffloadConfig
from ..planning.constants import MORE_BUDGET, MOST_STEPS, MUCH_KEPT, SLOW, SMALL_PART, WORTH_SAYING
from ..planning.explain import BudgetRow, budget_rows, format_time, next_block
from ..planning.plan import Plan
from ..planning.planners.base import Limits, Planner
from ..planning.planners.feedback import Observed
from ..planning.profile import Profile
from ..policy import STATIC
from ..sizes import format_size
from ..statistics import Statistics
from .autopilot import Autopilot

_WHEN_ALL_STAYS = {
    "below min_bytes": "lower min_bytes: every activation is smaller",
    "other device": "CPU tensors move with target='nvme' and path= alone; for other devices pass devices=",
    "module excluded": "widen include=, or name less in exclude=",
    "policy": "have the policy decide Decision.OFFLOAD for larger tensors",
    "no time to move": "set device_budget, so that a step may wait for what leaves",
    "fits the budget": "lower device_budget",
    "pressure": "set device_budget, so that forward waits for what leaves; or raise pending_bytes",
    "last saved layer": "pass keep_last_bytes=0; a deeper model has more that can leave",
}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What ``policy="auto"`` knows: what it planned from and how, the plan, and the steps that were seen under it."""

    profile: Profile
    plan: Plan
    limits: Limits
    planner: Planner
    seen: Observed | None


def known_at_the_end(config: OffloadConfig, s: Statistics, elapsed_s: float, pilot: Autopilot | None) -> dict[str, Any]:
    """What a trace has of the whole run beside the statistics, ready for JSON."""
    planned = planned_by(pilot)
    found: dict[str, Any] = {
        "elapsed_s": elapsed_s,
        "diagnosis": diagnose(config, s, elapsed_s, planned),
        "plans": [] if pilot is None else list(pilot.history),
        "profile": None,
        "limits": None,
        "predicted": None,
        "seen": None,
    }
    if planned is not None:
        plan, seen = planned.plan, planned.seen
        found["profile"] = json.loads(planned.profile.to_json())
        found["limits"] = asdict(planned.limits)
        found["predicted"] = {"step_s": plan.predicted_step_s, "peak_bytes": plan.predicted_peak_bytes}
        if seen is not None:
            found["seen"] = {"step_s": seen.step_s, "wait_s": seen.wait_s, "peak_bytes": seen.peak_bytes}
    return found


def planned_by(pilot: Autopilot | None) -> Planned | None:
    """What an autopilot knows; None before it has a plan."""
    if pilot is None or pilot.profile is None or pilot.plan is None:
        return None
    return Planned(profile=pilot.profile, plan=pilot.plan, limits=pilot.limits, planner=pilot.planner, seen=pilot.seen)


def diagnose(config: OffloadConfig, s: Statistics, elapsed_s: float, planned: Planned | None = None) -> list[str]:
    """Return what limits a step and at most `MOST_STEPS` things to do about it, as lines; none before the first step.

    Args:
        config: the options of the offloader.
        s: what it counted.
        elapsed_s: seconds since the first forward began.
        planned: its plan, where it has one: budgets are only named with what they are predicted to give.
    """
    if not s.packed_tensors:
        return []
    if config.policy == "keep":
        return ["diagnosis: nothing moves, as policy='keep' says"]
    share = _waited_share(s, elapsed_s, planned)
    if s.activation_bytes and not (s.moved_bytes or s.forwarded_bytes or s.cancelled_bytes):
        cause, steps = _nothing_moves(s, planned)
    elif s.degraded:
        cause, steps = _degraded(s)
    elif share >= SLOW:
        cause, steps = _slow(config, s, planned, share)
    else:
        cause, steps = _in_time(config, s, planned, share)
    return [f"diagnosis: {cause}", *(f"  next: {step}" for step in steps[:MOST_STEPS])]


def _waited_share(s: Statistics, elapsed_s: float, planned: Planned | None) -> float:
    """The share of the time that was waited: of the last steps under the plan, else since the first forward."""
    if planned is not None and planned.seen is not None:
        return planned.seen.wait_s / planned.seen.step_s
    return min(1.0, s.wait_s / elapsed_s) if elapsed_s else 0.0


def _nothing_moves(s: Statistics, planned: Planned | None) -> tuple[str, list[str]]:
    kept = {reason: nbytes for reason, nbytes in s.kept_bytes.items() if reason not in STATIC}
    reason = max(kept, key=lambda name: kept[name], default="")
    why = planned.plan.declined if planned is not None and planned.plan.declined else reason
    return f"nothing moves ({why or 'see above'})", [_WHEN_ALL_STAYS[reason]] if reason in _WHEN_ALL_STAYS else []


def _degraded(s: Statistics) -> tuple[str, list[str]]:
    steps = {
        "no room on disk": "free room under path=, raise nvme_budget, or give another path=",
        "write failed": "look at the disk under path= (dmesg), or give another path=",
    }
    told = ", ".join(f"{count} × {reason}" for reason, count in sorted(s.degraded.items()))
    found = [step for reason, step in steps.items() if reason in s.degraded]
    return f"memory is not saved as it could be: {told}", found


def _slow(config: OffloadConfig, s: Statistics, planned: Planned | None, share: float) -> tuple[str, list[str]]:
    medium = "the disk" if s.nvme_written_bytes else "host memory"
    forward = s.pack_wait_s > s.unpack_wait_s
    waits = "forward, for what leaves" if forward else "backward, for what comes back"
    rate = _rate(planned, disk=bool(s.nvme_written_bytes), write=forward)
    cause = f"SLOW: {share:.0%} of the time was spent waiting for {medium}{rate}, most of it in {waits}"
    steps: list[str] = []
    if planned is not None and planned.limits.device_budget is not None:
        steps += _another_budget(planned, planned.limits.device_budget)
        if not planned.profile.blocks:
            steps.append("pass model=, so that blocks can be recomputed where that is cheaper than waiting")
    elif config.policy == "all":
        steps.append("policy='auto' keeps what cannot be moved in time")
    elif config.device_budget is not None:
        steps.append("raise device_budget: forward waits until what is above it has left")
    if s.nvme_written_bytes:
        steps.append("give path= on a faster disk ('actoffload bench' measures one), or several to stripe over")
    return cause, steps


def _rate(planned: Planned | None, *, disk: bool, write: bool) -> str:
    link = None if planned is None else planned.profile.disk if disk else planned.profile.host
    if link is None:
        return ""
    return f" ({(link.write_bytes_per_s if write else link.read_bytes_per_s) / 1e9:.2g} GB/s)"


def _another_budget(planned: Planned, budget: int) -> list[str]:
    """What a budget above the next block, or `MORE_BUDGET` times as large, is predicted to give."""
    block, enough = next_block(planned.profile, budget) if planned.limits.recompute else (0, 0)
    tried = enough or min(int(MORE_BUDGET * budget), planned.profile.baseline_peak_bytes)
    (row,) = budget_rows(planned.profile, planned.limits, planned.planner, [tried])
    now_s = planned.plan.predicted_step_s
    if row.step_s is None or now_s is None or row.step_s > (1 - WORTH_SAYING) * now_s:
        return []
    why = ""
    if block:
        why = f" (device_budget {format_size(budget)} is below one block, {format_size(block)}: none can be recomputed)"
    return [f"{_predicted(row)} instead of {format_time(now_s)}{why}"]


def _in_time(config: OffloadConfig, s: Statistics, planned: Planned | None, share: float) -> tuple[str, list[str]]:
    whole, of = s.device_peak_bytes or s.process_peak_bytes, "device" if s.device_peak_bytes else "process"
    cause = f"OK: {share:.1%} of the time was spent waiting"
    if s.baseline_peak_bytes < SMALL_PART * whole:
        part = s.baseline_peak_bytes / whole
        told = f"saved activations are only {part:.0%} of the {of}'s peak, so moving them lowers it by no more"
        return f"{cause}; {told}", ["look for parameters, gradients, optimizer states and temporaries first"]
    kept = s.plan_peak_bytes / s.baseline_peak_bytes if s.baseline_peak_bytes else 0.0
    if kept < MUCH_KEPT or planned is None or planned.limits.device_budget is not None:
        return cause, []
    cause += f"; {kept:.0%} of the activations' peak stays, as no more can be moved in time"
    (row,) = budget_rows(planned.profile, planned.limits, planned.planner, [s.plan_peak_bytes // 2])
    if row.step_s is None:
        return cause, []
    now_s = planned.plan.predicted_step_s or planned.profile.step_s
    return cause, [f"{_predicted(row)} instead of {format_time(now_s)}"]


def _predicted(row: BudgetRow) -> str:
    assert row.step_s is not None, "the budget can be kept"
    assert row.peak_bytes is not None, "with its step its peak is known"
    budget = f"device_budget={format_size(row.device_budget)!r}"
    peak = format_size(row.peak_bytes)
    return f"{budget} is predicted to peak at {peak} and to take {format_time(row.step_s)} a step"
