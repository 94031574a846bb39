"""A recorded step, kept true by the steps that follow: what they show goes into the profile that is planned from. Pure.

A step is compute, recomputing and waits. Its waits are counted and its links are measured, so what is left of it, the
compute, is known in every step, whatever moved in it and whatever bound was set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...policy import Decision
from .. import observed as observed_step
from ..constants import (
    COMPUTE_CHANGE,
    FIT_STEPS,
    LEAST_TRUST,
    LINK_CHANGE,
    MAX_COST_SHARE,
    MOST_TRUST,
    NO_LOSS,
    PLAN_GAIN,
    STEP_CHANGE,
    TRUST_LESS,
    WAIT_SHARE,
)
from ..plan import Plan
from ..profile import Link, Profile, Storage
from ..simulator import Prediction, simulate
from .base import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How fast a link was in one direction; one that was never full is at least as fast as that."""

    bytes_per_s: float
    full: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed(observed_step.Observed):
    """A step as it was, with the links that it used."""

    rates: Mapping[tuple[str, str], Rate] = field(default_factory=dict)


class StepModel:
    """The step that is planned from, as recorded and corrected since.

    Args:
        recorded: the step that was recorded, on the links as they were known then.
        limits: what plans have to respect.

    Attributes:
        profile: the step as it is now, on the links as they are now.
    """

    def __init__(self, recorded: Profile, limits: Limits) -> None:
        self.profile = recorded
        self._limits = limits
        self._recorded_s = recorded.step_s
        self._planned = recorded
        """What the last plan was made from."""
        self._links = {"host": recorded.host, "disk": recorded.disk}
        """As they were measured."""
        self._trust = 1.0
        """The links are taken to be so many times as fast as measured, after waits that nothing predicted."""

    def learn(self, plan: Plan, observed: Observed) -> str:
        """Correct the profile by a step under a plan; say what has changed since the last plan, or nothing."""
        self._learn_rates(observed)
        self._learn_idle(plan, self.predict(plan), observed)
        self._learn_compute(self.predict(plan), observed)
        seen = self.predict(plan)
        waited_s = observed.wait_s - seen.wait_s
        if seen.moved_bytes and abs(waited_s) > WAIT_SHARE * observed.step_s:
            before = self.profile
            self._explain_waits(plan, observed)
            if self.profile != before and waited_s > 0:
                return f"the step waited {observed.wait_s:.3g} of {observed.step_s:.3g} s, {waited_s:.3g} s unforeseen"
            seen = self.predict(plan)
        return self._change(plan, seen, observed)

    def predict(self, plan: Plan) -> Prediction:
        """A step under a plan, as far as is known now."""
        return simulate(self.profile, plan, self._limits, detail=False)

    def planned(self) -> None:
        """A plan was looked for just now; what changes from here on is a reason for another one."""
        self._planned = self.profile

    def gains(self, new: Plan, old: Plan) -> bool:
        """Whether a plan that was made just now is better than the one that is followed by enough to change."""
        budget, before = self._limits.device_budget, self.predict(old)
        longest_s = (1 + self._allowed_share) * self.profile.step_s
        if before.peak_bytes > (budget or float("inf")) or before.step_s > longest_s:
            return True  # the old one breaks a limit
        after = self.predict(new)
        if budget is not None:
            return after.step_s < (1 - PLAN_GAIN) * before.step_s
        return after.peak_bytes < (1 - PLAN_GAIN) * before.peak_bytes

    @property
    def _allowed_share(self) -> float:
        """How much slower than keeping all a step may be."""
        limits = self._limits
        if limits.max_slowdown is not None:
            return limits.max_slowdown
        return NO_LOSS if limits.device_budget is None else float("inf")

    # -- links --------------------------------------------------------------------------------------------------------

    def _learn_rates(self, observed: Observed) -> None:
        for (name, way), rate in observed.rates.items():
            link, key = self._links.get(name), f"{way}_bytes_per_s"
            if link is None:  # one way is as fast as the other until that is known
                self._links[name] = Link(write_bytes_per_s=rate.bytes_per_s, read_bytes_per_s=rate.bytes_per_s)
                continue
            known: float = getattr(link, key)
            change = rate.bytes_per_s / known - 1
            if not rate.full and change < LINK_CHANGE:
                continue  # it is at least as fast, which is known
            self._links[name] = replace(link, **{key: rate.bytes_per_s})
            if abs(change) > LINK_CHANGE:
                self._trust = 1.0  # it is another link than the one that let us wait
        self._use_links()

    def _use_links(self) -> None:
        links = {name: link and link.scaled(self._trust) for name, link in self._links.items()}
        self.profile = replace(self.profile, **links)  # type: ignore[arg-type]

    def _explain_waits(self, plan: Plan, observed: Observed) -> None:
        """The step did not wait as predicted: take the links to be as fast as makes it wait as it did."""
        slower = False
        for (name, way), rate in observed.rates.items():
            link, key = self._links[name], f"{way}_bytes_per_s"
            assert link is not None, "its rate was seen"
            if not rate.full and rate.bytes_per_s < TRUST_LESS * self._trust * getattr(link, key):
                self._links[name] = replace(link, **{key: rate.bytes_per_s})
                slower = True
        if slower:
            self._trust = 1.0
        elif self._waits_at(plan, LEAST_TRUST) < observed.wait_s:  # something else waits: go on slowly
            self._trust = max(LEAST_TRUST, TRUST_LESS * self._trust)
        else:
            least, most = LEAST_TRUST, MOST_TRUST
            for _ in range(FIT_STEPS):
                middle = (least + most) / 2
                if self._waits_at(plan, middle) < observed.wait_s:
                    most = middle
                else:
                    least = middle
            self._trust = least
        self._use_links()

    def _waits_at(self, plan: Plan, trust: float) -> float:
        self._trust, before = trust, self._trust
        self._use_links()
        wait_s = self.predict(plan).wait_s
        self._trust = before
        return wait_s

    # -- compute ------------------------------------------------------------------------------------------------------

    def _learn_compute(self, seen: Prediction, observed: Observed) -> None:
        """Correct the times: what a step did not wait for it computed or recomputed.

        Without a budget a step is never taken to have more time of its own than the recorded one: what moving costs
        looks like compute, and would make room for more of itself without end. Where ``max_slowdown`` bounds that cost,
        it is what a step computes beyond the recorded one, in which nothing moved.
        """
        compute_s = seen.compute_s
        computed_s = observed.step_s - observed.wait_s - observed.idle_s
        if not compute_s or computed_s <= 0:
            return
        cost_s = 0.0 if observed.hooks_s else seen.cost_s  # else it was measured, and is not in what is left
        if self._limits.device_budget is not None:
            factor = computed_s / (compute_s + cost_s)
        elif self._limits.max_slowdown is not None and seen.moved_bytes and not observed.hooks_s:
            self._learn_cost(computed_s - compute_s - cost_s, seen)
            factor = min(1.0, computed_s / compute_s)
        else:
            factor = min(computed_s, self._recorded_s) / compute_s
        self.profile = rescaled(self.profile, factor)

    def _learn_idle(self, plan: Plan, seen: Prediction, observed: Observed) -> None:
        """What moves costs the device what it idles for while hooks keep the host busy, where that was watched.

        A hook takes as long for a small storage as for a large one.
        """
        leave = sum(entry.action == Decision.OFFLOAD.value for entry in plan.entries)
        moves = 2 * leave - len(seen.stayed)  # what stays after all does not come back
        if observed.hooks_s and moves > 0:
            nearest = "host" if self._links["host"] is not None else "disk"
            link = self._links[nearest]
            if link is not None:
                self._links[nearest] = replace(link, cost_s_each=observed.idle_s / moves)
            self._use_links()

    def _learn_cost(self, late_s: float, seen: Prediction) -> None:
        """A step was late by so much against what its bytes were known to cost."""
        each = min(late_s, MAX_COST_SHARE * seen.compute_s) / seen.moved_bytes
        for name, link in self._links.items():
            if link is not None:
                self._links[name] = replace(link, cost_s_per_byte=max(0.0, link.cost_s_per_byte + each))
        self._use_links()

    # -- what has changed ---------------------------------------------------------------------------------------------

    def _change(self, plan: Plan, seen: Prediction, observed: Observed) -> str:
        before, after = self._planned, self.profile
        if seen.cost_s > self._allowed_share * after.step_s and observed.idle_s:
            return (
                f"the device idled for {observed.idle_s:.3g} of {observed.step_s:.3g} s while hooks kept the host busy"
            )
        for name in ("host", "disk"):
            old, new = getattr(before, name), getattr(after, name)
            if old is None and new is not None:
                return f"{name} bandwidth was measured for the first time, {new.write_bytes_per_s / 1e9:.3g} GB/s"
            for way in ("write", "read") if old is not None else ():
                was, now = (getattr(link, f"{way}_bytes_per_s") for link in (old, new))
                if abs(now / was - 1) > LINK_CHANGE:
                    return f"{name} {way} bandwidth went from {was / 1e9:.3g} to {now / 1e9:.3g} GB/s"
        if abs(after.step_s - before.step_s) > COMPUTE_CHANGE * before.step_s:
            return f"the step computes for {after.step_s:.3g} s, not {before.step_s:.3g} s"
        predicted_s = plan.predicted_step_s
        bounded = self._limits.device_budget is not None or self._limits.max_slowdown is not None
        if bounded and predicted_s and abs(seen.step_s - predicted_s) > STEP_CHANGE * predicted_s:
            return f"the step takes {seen.step_s:.3g} s, not {predicted_s:.3g} s"
        return ""


def with_cost(profile: Profile, computed_s: float, moved_bytes: int) -> Profile:
    """The profile of a step that moved nothing, with what moving costs: one that moved bytes computed for longer."""
    if profile.disk is None or not moved_bytes:
        return profile
    cost_s = min(max(0.0, computed_s - profile.step_s), MAX_COST_SHARE * profile.step_s)
    return profile.with_links(disk=replace(profile.disk, cost_s_per_byte=cost_s / moved_bytes))


def rescaled(profile: Profile, factor: float) -> Profile:
    """The profile of a step that computes ``factor`` times as long, everywhere alike."""

    def scaled(part: Storage | Profile, *names: str) -> dict[str, Any]:
        times = {name: getattr(part, name) for name in names}
        return {name: None if seconds is None else seconds * factor for name, seconds in times.items()}

    return replace(
        profile,
        storages=tuple(replace(s, **scaled(s, "birth_s", "need_s", "last_need_s")) for s in profile.storages),
        **scaled(profile, "forward_s", "backward_s", "other_s"),
    )
