"""Plans from what the steps show, follows the plan, and corrects it: what ``policy="auto"`` does from step to step."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from dataclasses import replace
from typing import Any

from ..errors import BudgetError
from ..events import now
from ..interrupts import expected, is_interrupt
from ..memory.process_memory import available_bytes
from ..planning.constants import (
    AFTER_A_CHANGE,
    LEAST_TRIES,
    MEMORY_MARGIN,
    MOST_REASONS,
    MOST_REST,
    MOST_WAITED,
    PLANNING_SHARE,
    PROBE_SHARE,
    REVIEW_STEPS,
    ROOM_TO_KEEP,
    SHAPES_CHANGED,
    WARM_UP,
)
from ..planning.explain import render_plan
from ..planning.plan import Plan
from ..planning.planners.auto import Auto
from ..planning.planners.base import Bench, Limits, Planner
from ..planning.planners.feedback import Observed, StepModel, rescaled, with_cost
from ..planning.profile import Profile
from ..runtime.decision import InputShapes
from ..runtime.store import ActivationStore
from ..sizes import format_size
from ..tiers.accounts import Accounts
from .agreement import Proposal, choose, exchange, several_ranks
from .following import Following
from .observations import Recording, StepsUnderPlan
from .shapes import Shape, Shapes


class Autopilot:
    """One offloader's planning. Called between steps, when nothing that was saved is alive.

    It has more than fifteen attributes: what it was given, the shape that runs, and when to look for a plan again.

    Args:
        store: is recorded and counted.
        following: follows the plan.

    Attributes:
        history: why each of the last plans was made, oldest first.
        planner: how to plan.
    """

    def __init__(self, store: ActivationStore, following: Following) -> None:
        self.history: deque[str] = deque(maxlen=MOST_REASONS)
        self.planner: Planner = Auto()
        self._shared, self._tiers, self._profiler, self._run = store.shared, store.tiers, store.profiler, store.run
        self._following = following
        following.placement.forward_begins = weakref.WeakMethod(self.forward_begins)
        self._recording = Recording(store)
        self._recorded_shape = self._shape = Shape(())
        """The shape of the step that is or was recorded, and of the one that runs: as the one before, until known."""
        self._shapes = Shapes()
        self._shape_is_known = False
        self._began: tuple[float, Accounts, int] | None = None
        """When the step began, and what was counted and moved by then."""
        self._rest_until_s = 0.0
        """No plan is looked for before."""
        self._count = self._changes = self._record_from = 0
        """Steps so far; changes of shape since a plan was last reviewed; the step from which on one is recorded."""
        self._gave_up = self._agreed = self._stale = False
        """Plans in a row that recompute, under which the first forward saved something else."""

    @property
    def plan(self) -> Plan | None:
        """The plan that is followed; None before there is one."""
        return self._shape.followed

    @property
    def profile(self) -> Profile | None:
        """What the plan was made from, as later steps have corrected it."""
        return self._shape.profile if self._shape.lender is None else self._shape.lender.profile

    @property
    def seen(self) -> Observed | None:
        """The median of the last steps that were looked at under the plan."""
        return self._shape.steps.seen

    # -- one step -----------------------------------------------------------------------------------------------------

    def between_steps(self) -> None:
        """A step has ended and the next one begins with the forward that follows.

        Raises:
            BudgetError: no plan keeps the ``device_budget``, and the last step did not keep it either.
        """
        if self._gave_up:
            self._profiler.forget()
            return
        try:
            with self._shared.lock:
                self._finish_step()
                self._begin_step()
        except BudgetError:
            raise
        except Exception as error:  # training does not end because a plan could not be made
            if is_interrupt(error):
                raise
            self._gave_up = True
            self._following.placement.keep_all = False
            self._profiler.forget()
            self.history.append(f"no plan: {error!r}")
            self._shared.reporter.advise(
                "plan", f"policy='auto' could not plan ({error!r}); what can be moved in time moves"
            )

    def _begin_step(self) -> None:
        accounts = self._shared.accounts
        self._following.placement.mismatched_bytes = 0
        self._began = now(), copy.copy(accounts), self._moved_bytes
        self._shape_is_known = self._agreed  # on one plan, whatever the shape
        self._begin_shape()

    def forward_begins(self, key: InputShapes) -> None:
        """A forward begins whose inputs have these shapes. The first one of a step decides which plan is followed.

        Where no model is known it is told of the first storage, by its size.
        """
        if self._shape_is_known or self._gave_up:
            return
        self._shape_is_known = True
        with self._shared.lock:
            shape = self._shapes.use(key, self._count)
            if shape is not self._shape:
                self._shape = shape
                self._following.follow(shape.followed, borrowed=shape.lender is not None)
                self._begin_shape()

    def _begin_shape(self) -> None:
        """A step of this shape begins: record it or not, and move something to measure a link or not."""
        shape, placement = self._shape, self._following.placement
        placement.keep_all = shape.tries_keeping
        placement.probe = self._probe if shape.steps.review_begins else None
        self._shared.watches_host = shape.plan is not None and placement.probe is None and shape.steps.review_begins
        if shape.plan is not None:
            due = shape.steps.blocks_are_due
        else:
            due = shape.lender is None and not shape.hopeless and self._count >= self._record_from
        if self._profiler.finished:
            return  # a step that nobody could look at yet, as the device had not come to its end
        if due:
            self._recorded_shape = shape
            if not self._profiler.active:
                self._profiler.begin()
        else:
            self._profiler.forget()

    @property
    def _probe(self) -> int | None:
        """The place of the storage that moves now and then where the plan moves none: what is not used is not measured.

        It is the first that a link brings back in `PROBE_SHARE` of a step, else the smallest.
        """
        plan, profile = self._shape.plan, self._shape.profile
        if plan is None or profile is None or plan.offloaded_bytes:
            return None
        if profile.disk is not None and profile.disk.cost_s_per_byte > 0:
            return None  # moving costs time, which somebody bounds
        links = [link for link in (profile.disk, profile.host) if link is not None]
        most = PROBE_SHARE * profile.step_s * min((link.read_bytes_per_s for link in links), default=float("inf"))
        kept = [entry for entry in plan.entries if not entry.reason]
        found = next((entry for entry in kept if entry.nbytes <= most), None)
        smallest = min(kept, key=lambda entry: entry.nbytes, default=None) if found is None else found
        return None if smallest is None else smallest.index

    @property
    def _moved_bytes(self) -> int:
        """What has gone to the disk and back so far, where somebody bounds what that costs."""
        if self._tiers.spool is None or self._shared.config.max_slowdown is None:
            return 0
        counts = self._tiers.spool.statistics()
        return counts.written_bytes + counts.read_bytes

    def _finish_step(self) -> None:
        if self._began is None:
            return
        accounts = self._shared.accounts
        began_s, before, moved_bytes = self._began
        shape, recorded = self._shape, self._profiler.active or self._profiler.finished
        if accounts.packed_tensors == before.packed_tensors and (shape.plan is not None or not self._profiler.finished):
            if not self._profiler.finished:
                self._profiler.forget()  # what is recorded begins with the step that follows
            return  # a pass without gradients
        self._count += 1
        step_s = max(1e-9, now() - began_s)
        waited_s = accounts.pack_wait_s - before.pack_wait_s, accounts.unpack_wait_s - before.unpack_wait_s
        # The host and a stream may have waited at the same time, and what a stream did is told a step later.
        share = min(1.0, MOST_WAITED * step_s / max(1e-9, sum(waited_s)))
        observed = Observed(
            step_s=step_s,
            forward_wait_s=share * waited_s[0],
            backward_wait_s=share * waited_s[1],
            peak_bytes=accounts.step_peak_bytes,
            hooks_s=accounts.hooks_s - before.hooks_s,
            idle_s=accounts.idle_s - before.idle_s,
        )
        planned = shape.plan is not None
        if recorded:
            self._look_at_recording(self._recorded_shape, observed, self._moved_bytes - moved_bytes)
        if planned:
            self._review(shape, observed)

    def _look_at_recording(self, shape: Shape, observed: Observed, moved_bytes: int) -> None:
        """A step was recorded: time its blocks, or plan from it, or first try one with nothing moved."""
        if shape.plan is not None:
            times = self._recording.block_times()
            if times is not None:
                shape.steps.look_at_blocks(times)
            return
        if self._profiler.has_no_record:  # nothing was large enough to move: to record on would be for nothing
            self._profiler.forget()
            self._rest()
            return
        profile = self._recording.profile()
        if profile is None:
            return
        if self._recording.steps <= WARM_UP:
            self._refuse_if_too_low(profile, observed)
        if shape.tries_keeping:
            shape.tries_keeping = False
            self._make_plan(shape, with_cost(profile, *shape.moving), observed)
        elif self._recording.steps > WARM_UP and now() >= self._rest_until_s:
            shape.tries_keeping = self._can_try_keeping(profile)
            shape.moving = observed.step_s - observed.wait_s, moved_bytes
            if not shape.tries_keeping:
                self._make_plan(shape, profile, observed)

    def _refuse_if_too_low(self, profile: Profile, observed: Observed) -> None:
        """Raise before another step passes a budget in bytes that the first one did not keep and no plan will.

        Raises:
            BudgetError: of the budget; it names the least that a plan keeps.
        """
        budget, config = self.limits.device_budget, self._shared.config
        if config.device_budget is None or config.device_share is not None or not _passed(observed, budget):
            return  # a share is known from now on: the next step shows whether it can be kept
        if _runs_again(profile):
            return
        if profile.host is None and profile.disk is None:
            return
        assert budget is not None, "it was passed"
        if Bench(profile, self.limits).floor()[0] > budget:
            raise BudgetError(budget, self._least(profile)[0])

    def _least(self, profile: Profile) -> tuple[int, Plan | None]:
        """Return the least budget that the planner keeps, and the plan; None where it keeps none but keep's peak."""
        budget = Bench(profile, self.limits).floor()[0]
        for _ in range(LEAST_TRIES):
            try:
                return budget, self.planner.plan(profile, replace(self.limits, device_budget=budget))
            except BudgetError as error:
                budget = max(budget, error.floor_bytes)
        return profile.baseline_peak_bytes, None

    def _can_try_keeping(self, profile: Profile) -> bool:
        """Whether a step moves nothing first: only that shows what moving costs, and only ``max_slowdown`` asks."""
        config = self._shared.config
        if config.max_slowdown is None or config.device_budget is not None or profile.device != "cpu":
            return False
        return available_bytes() >= ROOM_TO_KEEP * profile.baseline_peak_bytes

    def _review(self, shape: Shape, observed: Observed) -> None:
        """Compare steps that ran under the plan with it; correct the plan where enough of them say so."""
        assert shape.plan is not None, "there is a plan to look at"
        assert shape.model is not None, "a plan was made from a profile"
        mismatched_bytes = self._following.placement.mismatched_bytes
        if mismatched_bytes > SHAPES_CHANGED * max(1, shape.model.profile.saved_bytes):
            if self._agreed:
                self._stale = True
                return
            self._start_over(shape, "the forward saved other sizes than the plan was made for")
            return
        self._misled = 0
        seen = shape.steps.add(observed, self._recording)
        if seen is None:
            return
        self._changes = 0
        reason = shape.model.learn(shape.plan, seen)
        self._measured(shape, "times", *(f"{link} {way}" for link, way in seen.rates))
        if reason and not self._agreed and now() >= self._rest_until_s:
            self._correct(shape, shape.model, shape.plan, reason)

    # -- plans --------------------------------------------------------------------------------------------------------

    def _make_plan(self, shape: Shape, profile: Profile, observed: Observed) -> None:
        """Make the first plan for what was recorded.

        Raises:
            BudgetError: no plan keeps a budget in bytes, nor did the last step; where it is a share the least is taken.
        """
        budget = self.limits.device_budget
        try:
            plan = self._search(profile)
        except BudgetError as error:
            if not _passed(observed, budget) or _runs_again(profile):
                self.history.append(f"no plan: {error}")  # but the last step did keep it: go on as it was
                shape.hopeless = True
                return
            least, found = self._least(profile)
            if self._shared.config.device_share is None:
                assert budget is not None, "it was passed"
                raise BudgetError(budget, least) from error
            self._take_floor(least)
            if found is None:
                self.history.append(f"no plan: {error}")
                shape.hopeless = True
                return
            plan = found
        shape.model = StepModel(profile, self.limits)
        shape.measured_at.clear()
        links = [name for name, link in (("host", profile.host), ("disk", profile.disk)) if link is not None]
        ways = (f"{name} {way}" for name in links for way in ("write", "read"))
        self._measured(shape, "saved tensors", "times", *ways)
        self._follow(shape, plan, "first plan")

    def _take_floor(self, least: int) -> None:
        """Follow the least budget that a plan keeps in place of a share that is less, and say so once."""
        shared = self._shared
        share = format_size(shared.budget.limit_bytes or 0)
        told = (
            f"device_budget={shared.config.device_budget!r} is {share}, less than a step needs: {format_size(least)} "
            f"({least} bytes) holds from now on; to lower it, make the batch or what a block saves smaller"
        )
        shared.budget.floor_bytes = shared.budget.limit_bytes = least
        if "budget" in shared.reporter.advice:
            shared.reporter.advice["budget"] = told  # another shape needs more: the report has the figure that holds
        shared.reporter.advise("budget", told)

    def _correct(self, shape: Shape, model: StepModel, old: Plan, reason: str) -> None:
        """Follow another plan if one is better now; else know the old one better."""
        try:
            plan = self._search(model.profile)
        except BudgetError:
            plan = old  # that keeps the budget, as far as anything does
        model.planned()
        if plan is not old and model.gains(plan, old):
            self._follow(shape, plan, reason)
        else:
            known = model.predict(old)
            shape.plan = replace(old, predicted_step_s=known.step_s, predicted_peak_bytes=known.peak_bytes)

    def _search(self, profile: Profile) -> Plan:
        began_s = now()
        try:
            return expected(self._plan_that_fits, profile)
        finally:
            self._rest_until_s = now() + (now() - began_s) / PLANNING_SHARE

    def _plan_that_fits(self, profile: Profile) -> Plan:
        """Plan; where a plan without a budget exceeds the device's memory, what there is becomes the budget."""
        budget = self._shared.budget
        try:
            plan = self.planner.plan(profile, self.limits)
        except BudgetError:
            if self._shared.config.device_budget is not None:
                raise
            budget.limit_bytes, found = self._least(profile)  # the next step shows whether the device has that
            return found or self.planner.plan(profile, self.limits)
        room = self._room_bytes() if budget.limit_bytes is None and self._shared.config.device_budget is None else None
        if room is None or (plan.predicted_peak_bytes or 0) <= room:
            return plan
        budget.limit_bytes = room
        return self._plan_that_fits(profile)

    def _room_bytes(self) -> int | None:
        """Saved bytes for which the device has room beside everything else; None where nothing counts its memory.

        Nothing that was saved is alive now. A step needs more than it saves: gradients and temporaries, which are as
        large as the allocator's peak was beside the saved bytes in the step that was recorded.
        """
        usable = self._tiers.usable_bytes()
        return None if usable is None else max(0, int((1 - MEMORY_MARGIN) * usable) - self._run.other_bytes)

    def _follow(self, shape: Shape, plan: Plan, reason: str) -> None:
        several = len(self._shapes) > 1 and not self._agreed
        self.history.append(f"{reason} (inputs {shape})" if several else reason)
        shape.steps = StepsUnderPlan(REVIEW_STEPS if shape.plan is None else AFTER_A_CHANGE)
        shape.plan = plan
        self._shared.accounts.begin_plan()
        if shape is self._shape:
            self._profiler.forget()
            self._following.follow(plan)

    def _rest(self) -> None:
        """Record again: the next step at first, then after more and more steps."""
        self._changes += 1
        self._record_from = self._count + min(MOST_REST, 2**self._changes) - 2

    def _start_over(self, shape: Shape, reason: str) -> None:
        """Record anew; until there is a plan again, what moves is decided as before the first one."""
        self.history.append(reason)
        self._rest()
        shape.plan = shape.model = None
        shape.steps = StepsUnderPlan()
        self._shared.accounts.begin_plan()
        self._profiler.forget()
        self._following.follow(None)

    def _measured(self, shape: Shape, *names: str) -> None:
        """These parts of the profile were measured in the step that has just ended."""
        shape.measured_at.update(dict.fromkeys(names, self._count))

    # -- for all ranks ------------------------------------------------------------------------------------------------

    def compute_s(self) -> float | None:
        """How long a step of this rank computes, waits for slower ranks included; None without a plan."""
        shape = self._shapes.latest()
        if shape is None or shape.profile is None or self._gave_up or self._stale:
            return None
        return shape.profile.step_s

    def proposal(self, compute_s: float) -> Proposal:
        """The plan that this rank would follow if all ranks did, recomputed blocks included.

        ``compute_s``: how long a step computes on the rank that waits the least for others.
        """
        shape = self._shapes.latest()
        if shape is None or shape.profile is None or self.compute_s() is None:
            return Proposal()
        profile = rescaled(shape.profile, compute_s / shape.profile.step_s)
        try:
            limits = self.limits
            plan = self.planner.plan(profile, limits)
            text = plan.to_json()
        except Exception:  # as without: this rank goes on, and the others must not wait for it
            return Proposal()
        sizes = tuple(storage.nbytes for storage in profile.storages)
        fits = (sizes, limits.device_budget, limits.max_slowdown, limits.tiers, limits.recompute)
        return Proposal(plan=text, fits=fits, step_s=plan.predicted_step_s or profile.step_s)

    def agreed(self, plan: Plan | None, told: str) -> None:
        """Follow a plan that all ranks follow, and stay with it; None: they do not agree, or not any more."""
        with self._shared.lock:
            if plan is not None:
                shape = self._shapes.latest()
                assert shape is not None, "only ranks with a plan agree"
                self._agreed, self._shape = True, shape
                self._follow(shape, plan, told)
            elif self._agreed:  # on every rank, as all know what all have proposed
                self._agreed = self._stale = False
                self._start_over(self._shape, "the ranks agree no more")
        if plan is None and told:
            self._shared.reporter.advise("agree", told)
            self._shared.reporter.warn()

    # -- for people ---------------------------------------------------------------------------------------------------

    def explain(self) -> str:
        """The plan that is followed, by block, with what was predicted beside what was seen; and why it was made."""
        lines = [f"plan {number}: {reason}" for number, reason in enumerate(self.history, start=1)]
        shape = self._shape if self._shape.lender is None else self._shape.lender
        if len(self._shapes) > 1:
            lines[:0] = [f"inputs {other.summary()}" for other in self._shapes if other is not shape]
        if shape is not self._shape:
            lines.insert(0, f"inputs {self._shape} have no plan of their own: they follow this one, for {shape}")
        if shape.plan is None or shape.profile is None:
            first = f"no plan yet: it is made from what the first {WARM_UP + 1} steps show"
            if not self._count and self._shared.accounts.optimizer_steps > WARM_UP + 1:
                first = "no plan yet: no step has ended, as something that a forward saved is alive all the time, such "
                first += "as a loss that somebody keeps: keep loss.detach() or loss.item() instead"
            elif len(self._shapes) > 1:
                first = f"no plan yet for inputs {shape}: it is made from what a step shows"
        else:
            first = f"{render_plan(shape.profile, shape.plan, self.limits, seen=shape.steps.seen)}\n{self._ages(shape)}"
        return "\n".join([first, *lines])

    def _ages(self, shape: Shape) -> str:
        """How long ago each part of the profile was measured."""
        by_age: dict[int, list[str]] = {}
        for name, step in shape.measured_at.items():
            by_age.setdefault(self._count - step + 1, []).append(name)
        parts = (f"{', '.join(names)} {age} step{'s' * (age != 1)} ago" for age, names in sorted(by_age.items()))
        probe = f"; one storage in {REVIEW_STEPS} steps moves only to be measured" if self._probe is not None else ""
        return f"measured: {'; '.join(parts)}{probe}"

    # -- options ------------------------------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        """What a plan has to respect."""
        config = self._shared.config
        tiers = {"host": ("host",), "nvme": ("nvme",)}.get(config.target, ("host", "nvme"))
        if self._tiers.spool is None:
            tiers = ("host",)
        return Limits(
            device_budget=self._shared.budget.limit_bytes,
            host_budget=sum(pool.capacity_bytes for pool in self._tiers.pools) or None,
            nvme_budget=None if config.nvme_budget is None else config.size("nvme_budget", 0),
            pending_bytes=None if config.pending_bytes is None else config.size("pending_bytes", 0),
            max_slowdown=config.max_slowdown,
            tiers=tiers,
        )


def _passed(observed: Observed, budget: int | None) -> bool:
    """Whether a step had more on the device than a budget allows."""
    return budget is not None and (observed.peak_bytes or 0) > budget


def _runs_again(profile: Profile) -> bool:
    """Whether regions ran again: what they hold then can leave if they run once, so this is not the least budget."""
    return any(region.again_s is not None for region in profile.regions)


def agree(pilot: Autopilot | None, group: Any, problem: str) -> bool:
    """`Offloader.agree`: every rank takes part in the collective, also one that can agree on nothing now.

    Args:
        pilot: this rank's, if it plans.
        group: the ranks; None for all.
        problem: why this rank can agree on nothing now, or "".

    Raises:
        StateError: a rank has a problem, or does not plan; on all of them.
    """
    if not several_ranks(group):
        return pilot is not None and pilot.plan is not None
    if pilot is None:
        problem = problem or "its policy is not 'auto'"
    compute_s = pilot.compute_s() if pilot is not None and not problem else None
    known = [each for each in exchange(compute_s, group) if each is not None]
    mine = Proposal(problem=problem)
    if compute_s is not None and pilot is not None:
        mine = pilot.proposal(min(known))  # all compute the same, and what is more is waiting for others
    plan, told = choose(exchange(mine, group))
    assert pilot is not None, "a rank without a planner has a problem, which raises on all ranks"
    pilot.agreed(plan, told)
    return plan is not None
