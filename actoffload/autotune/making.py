"""Makes plans for recorded steps, within the budgets of their shape, in a small share of the training's time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..errors import BudgetError
from ..events import now
from ..planning import search
from ..planning.constants import NOTICEABLE, PLANNING_SHARE, TRIES
from ..planning.observed import Observed
from ..planning.plan import Plan
from ..planning.profile import Profile
from ..planning.search import Proposal
from ..planning.simulator import simulate
from ..runtime.store import ActivationStore
from ..sizes import format_size
from ..tiers.interrupts import expected
from .budgets import Budgets
from .shapes import AGAIN, Shape

T = TypeVar("T")


class Making:
    """Makes the plans of one offloader: ``planner`` has `search.plan` and `search.propose`."""

    def __init__(self, store: ActivationStore, budgets: Budgets) -> None:
        self.planner: Any = search
        self._rest_until_s = 0.0
        self._shared, self._budgets = store.shared, budgets
        self.limits = budgets.limits

    def plan(self, shape: Shape, profile: Profile, once: frozenset[int] | None = None) -> Plan:
        """Plan. If a plan without a budget needs more memory than the device has, the memory it has is the budget.

        ``once``: the regions that run once in these steps, by default those of the shape; the budget depends on them.

        Raises:
            BudgetError: no plan keeps the budget.
        """
        return self._timed(self._plan, shape, profile, once)

    def propose(self, shape: Shape, base: Profile) -> Proposal:
        """Choose the regions that should run once.

        Raises:
            BudgetError: no choice keeps the budget.
        """
        limits = self.limits(shape, AGAIN)  # each set has its own, less what it leaves held
        found: Proposal = self._timed(self.planner.propose, base, limits)
        return found

    def least(
        self, shape: Shape, profile: Profile, budget: int, once: frozenset[int] | None = None
    ) -> tuple[int, Plan | None]:
        """Return the lowest budget from this one up that a plan keeps, and the plan; or keep's peak, and None."""
        # A floor is simulated without any room. A plan for it may pass it, and the next error has that plan's peak.
        for _ in range(TRIES):
            try:
                return budget, self.planner.plan(profile, replace(self.limits(shape, once), device_budget=budget))
            except BudgetError as error:
                budget = max(budget, error.floor_bytes)
        return profile.baseline_peak_bytes, None

    def knows_a_link(self, shape: Shape, profile: Profile) -> bool:
        """Whether a plan can move what the step may move: on paper nothing moves before a transfer has measured a link.

        The first writes may all end after their step, or be cancelled. No budget counts as too low because of that.
        """
        links = {"host": profile.host, "nvme": profile.disk}
        known = any(links[tier] is not None for tier in self.limits(shape).tiers)
        return known or not any(storage.movable for storage in profile.storages)

    def refuse_if_too_low(self, shape: Shape, profile: Profile, observed: Observed) -> None:
        """Raise if the first step has passed a budget in bytes that no plan will keep: later steps would pass it too.

        Raises:
            BudgetError: it names the lowest budget that a plan keeps.
        """
        budget, config = self.limits(shape).device_budget, self._shared.config
        if budget is None or config.device_budget is None or config.device_share is not None:
            return  # a share becomes bytes only now: the next step shows whether it can be kept
        if any(region.again_s is not None for region in profile.regions):
            return  # these regions' storages may leave if the regions run once: choose regions first
        if passed(observed, budget) and self.knows_a_link(shape, profile):
            least, _ = self.least(shape, profile, budget)
            if least > budget:
                raise BudgetError(budget, least)

    def gains(self, shape: Shape, profile: Profile, new: Plan, old: Plan) -> bool:
        """Whether a new plan is better than the followed one by enough to replace it; both are simulated now."""
        limits = self.limits(shape)
        before, after = (simulate(profile, plan, limits, detail=False) for plan in (old, new))
        # First whether the old one breaks a limit.
        if limits.device_budget is not None:
            return before.peak_bytes > limits.device_budget or after.step_s < (1 - NOTICEABLE) * before.step_s
        return profile.is_late(before.step_s) or after.peak_bytes < (1 - NOTICEABLE) * before.peak_bytes

    def take_floor(self, least: int, budget: int) -> None:
        """Replace a share or number that no plan keeps by the lowest budget that one keeps, with one warning."""
        shared, config = self._shared, self._shared.config
        name, left = ("device_budget", "") if config.device_memory is None else ("device_memory", " for saved tensors")
        told = (
            f"{name}={getattr(config, name)!r} is {format_size(budget)}{left}, less than a step needs: "
            f"{format_size(least)} ({least} bytes) holds from now on; to lower it, make the batch or what a block "
            "saves smaller"
        )
        if config.device_memory is None:
            shared.budget.floor_bytes = shared.budget.limit_bytes = least
        if "budget" in shared.reporter.advice:
            shared.reporter.advice["budget"] = told  # another shape needs more: the report has to name that budget
        shared.reporter.advise("budget", told)

    @property
    def has_rested(self) -> bool:
        """Whether another search may begin."""
        return now() >= self._rest_until_s

    def _timed(self, find: Callable[..., T], *args: Any) -> T:
        began_s = now()
        try:
            # The pause is proportional to the search: beside short steps slow searches would cost more than they gain.
            return expected(find, *args)
        finally:
            self._rest_until_s = now() + (now() - began_s) / PLANNING_SHARE

    def _plan(self, shape: Shape, profile: Profile, once: frozenset[int] | None) -> Plan:
        limits = self.limits(shape, once)
        room = self._budgets.room_bytes if limits.device_budget is None else None
        found: Plan | None
        try:
            found = self.planner.plan(profile, limits)
            if room is None or (found.predicted_peak_bytes or 0) <= room:
                return found
            shape.at_most(room)
            found = self.planner.plan(profile, self.limits(shape, once))
        except BudgetError as error:
            if room is None:
                raise
            # The next step shows whether the device has as much.
            shape.most_bytes, found = self.least(shape, profile, error.floor_bytes, once)
            found = found or self.planner.plan(profile, self.limits(shape, once))
        return found


def passed(observed: Observed, budget: int | None) -> bool:
    """Whether a step had more bytes on the device than a budget allows."""
    return budget is not None and (observed.peak_bytes or 0) > budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """One rank's part: the places of the regions that it would run once, its storages, why it cannot agree now."""

    once: tuple[int, ...] | None = None
    fits: tuple[Any, ...] = ()
    problem: str = ""
