"""Searches a plan: which checkpointed regions run once, and which saved storages leave."""

from __future__ import annotations

from dataclasses import dataclass

from .plan import Plan
from .planners.auto import Auto
from .planners.base import Limits
from .profile import Profile

__all__ = ["Limits", "Proposal", "plan", "propose"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Which regions should run once, with the step that is predicted: seconds, and bytes of the peak."""

    once: frozenset[int]
    step_s: float
    peak_bytes: int


def plan(profile: Profile, limits: Limits) -> Plan:
    """Plan for a step as it was recorded: what leaves and what stays. Its regions stay as they were recorded.

    Raises:
        BudgetError: no plan keeps ``limits.device_budget``; it has the floor.
    """
    return Auto().plan(profile, limits)


def propose(base: Profile, limits: Limits) -> Proposal:
    """Choose the regions that should run once, from a step in which every region ran again.

    Raises:
        BudgetError: not even the step in which all run again keeps ``limits.device_budget``.
    """
    found = plan(base, limits)
    return Proposal(once=frozenset(), step_s=found.predicted_step_s or 0.0, peak_bytes=found.predicted_peak_bytes or 0)
