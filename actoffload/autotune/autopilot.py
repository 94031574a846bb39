"""Plans from what the steps show, follows the plan, and corrects it: what ``policy="auto"`` does from step to step.

For each shape of inputs: a step is recorded in which every checkpointed region runs again; `propose` says which regions
should run once, and the next step, in which they do, is recorded; `plan` says what leaves. Where the last steps are not
as the plan has it, another step is recorded and planned from.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from ..errors import BudgetError
from ..events import now
from ..interrupts import expected, is_interrupt
from ..memory.process_memory import available_bytes
from ..planning import search
from ..planning.constants import (
    AFTER_A_CHANGE,
    LEAST_TRIES,
    MOST_REASONS,
    MOST_REST,
    MOST_WAITED,
    NO_LOSS,
    PLAN_GAIN,
    PLANNING_SHARE,
    REVIEW_STEPS,
    ROOM_TO_KEEP,
    SHAPES_CHANGED,
    STEP_CHANGE,
    TIGHTER,
    WAIT_SHARE,
    WARM_UP,
)
from ..planning.explain import render_plan
from ..planning.observed import Observed
from ..planning.plan import Plan
from ..planning.profile import Profile
from ..planning.search import Limits
from ..planning.simulator import simulate
from ..runtime.decision import InputShapes
from ..runtime.report import say
from ..runtime.store import ActivationStore
from ..sizes import format_size
from ..tiers.accounts import Accounts
from .agreement import Brought
from .budgets import Budgets
from .following import Following
from .observations import Recording, StepsUnderPlan, surprise
from .shapes import Shape, Shapes

T = TypeVar("T")


class Autopilot:
    """One offloader's planning. Called between steps, when nothing that was saved is alive.

    It has more than fifteen attributes: what it was given, the shape that runs, and when to look for a plan again.

    Args:
        store: is recorded and counted.
        following: follows the plan.

    Attributes:
        history: why each of the last plans was made, oldest first.
        planner: how to plan: has `search.plan` and `search.propose`.
    """

    def __init__(self, store: ActivationStore, following: Following) -> None:
        self.history: deque[str] = deque(maxlen=MOST_REASONS)
        self.planner: Any = search
        self._store, self._shared, self._tiers = store, store.shared, store.tiers
        self._profiler, self._run = store.profiler, store.run
        self._following = following
        following.placement.forward_begins = weakref.WeakMethod(self.forward_begins)
        self._recording = Recording(store)
        self._budgets = Budgets(store)
        self._recorded_shape = self._shape = Shape(())
        """The shape of the step that is or was recorded, and of the one that runs: as the one before, until known."""
        self._settled = False
        """The step that is or was recorded began with all that any step has beside saved tensors."""
        self._shapes = Shapes()
        self._shape_is_known = False
        self._began: tuple[float, Accounts, int] | None = None
        """When the step began, and what was counted and moved by then."""
        self._rest_until_s = 0.0
        """No plan is looked for before."""
        self._count = self._changes = self._record_from = 0
        """Steps so far; changes since all was as planned; the step from which on one is recorded."""
        self._agreed: frozenset[int] | None = None
        """The regions that run once on all ranks; None while each rank is on its own."""
        self._gave_up = self._said = False
        self._unsaid = ""
        """What is to be said of the first plan with regions, once."""

    @property
    def limits(self) -> Limits:
        """What a plan for the step that was recorded has to respect."""
        return self._budgets.limits(self._budgets.of(self._recorded_shape, self._shapes))

    @property
    def plan(self) -> Plan | None:
        """The plan that is followed; None before there is one."""
        return self._shape.plan

    @property
    def profile(self) -> Profile | None:
        """What the plan was made from."""
        return self._shape.profile

    @property
    def seen(self) -> Observed | None:
        """The median of the last steps under the plan."""
        return self._shape.steps.seen

    # -- one step -----------------------------------------------------------------------------------------------------

    def between_steps(self) -> None:
        """A step has ended and the next one begins with the forward that follows.

        Raises:
            BudgetError: no plan keeps the ``device_budget``, and the last step did not keep it either; or what is no
                saved tensor takes more than ``device_memory``.
        """
        if self._gave_up:
            self._profiler.forget()
            return
        try:
            with self._shared.lock:
                self._budgets.begin_step()
                self._finish_step()
                self._begin_step()
        except BudgetError:
            raise
        except Exception as error:  # training does not end because a plan could not be made
            if is_interrupt(error):
                raise
            self._give_up(error)
        if self._unsaid:
            line, self._unsaid = self._unsaid, ""
            say(self._shared.config, line)  # without the lock, on a thread of the user's

    def _give_up(self, error: Exception) -> None:
        self._gave_up = True
        self._following.placement.keep_all = False
        self._following.follow(None, self._agreed or frozenset())  # as the program, or all ranks, have it
        self._profiler.forget()
        self.history.append(f"no plan: {error!r}")
        self._shared.reporter.advise(
            "plan", f"policy='auto' could not plan ({error!r}); what can be moved in time moves"
        )

    def _begin_step(self) -> None:
        self._following.placement.mismatched_bytes = 0
        self._began = now(), copy.copy(self._shared.accounts), self._moved_bytes
        self._shape_is_known = False
        self._begin_shape()

    def forward_begins(self, key: InputShapes) -> None:
        """A forward begins whose inputs have these shapes. The first one of a step decides which plan is followed.

        Where no model is known it is told of the first storage, by its size.
        """
        if self._shape_is_known or self._gave_up:
            return
        self._shape_is_known = True
        with self._shared.lock:
            shape = self._shapes.use(key)
            if shape is not self._shape:
                self._shape = shape
                if self._agreed is not None:
                    shape.once = self._agreed  # whatever the shape: another rank's may be another one
                self._following.follow(shape.plan, shape.once)
                self._begin_shape()

    def _begin_shape(self) -> None:
        """A step of this shape begins: record it or not, and move something to measure a link or not."""
        shape, placement = self._shape, self._following.placement
        placement.keep_all = shape.tries_keeping
        placement.probe = shape.probe if shape.steps.measures else None
        self._shared.watches_host = (
            shape.plan is not None and placement.probe is None and shape.steps.measures and not shape.due
        )
        self._shared.budget.limit_bytes = self._budgets.of(shape, self._shapes)
        if shape.plan is not None:
            due = bool(shape.due) and (self._run.is_settled or not shape.settled)
        else:
            due = not shape.hopeless and (shape.base is not None or self._count >= self._record_from)
        if self._profiler.finished:
            return  # a step that nobody could look at yet, as the device had not come to its end
        if due:
            self._recorded_shape, self._settled = shape, self._run.is_settled
            if not self._profiler.active:
                self._profiler.begin()
        else:
            self._profiler.forget()

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
        if self._is_too_much(shape, observed) or self._is_another(shape):
            return
        if recorded:
            self._look_at_recording(self._recorded_shape, observed, self._moved_bytes - moved_bytes)
        elif shape.plan is not None:
            self._review(shape, observed)

    def _is_too_much(self, shape: Shape, observed: Observed) -> bool:
        """Whether the step ran out of memory, or passed ``device_memory``: the next one of its shape takes less."""
        limit, passed = self._budgets.of(shape, self._shapes), self._budgets.passed_bytes
        ran_out, peak = self._store.out_of_memory.happened(), observed.peak_bytes or 0
        if not ran_out and not (passed and limit):
            return False
        most = peak if limit is None else min(peak, limit)
        if ran_out:
            shape.at_most(TIGHTER * most)
            self._run_once(shape, frozenset(), "the step ran out of memory")
        else:
            shape.at_most(most - passed)
            shape.fewer()
            told = f"the step passed device_memory by {format_size(passed)}"
            self._run_once(shape, shape.latest(shape.once), told)
        return True

    def _is_another(self, shape: Shape) -> bool:
        """Whether the forward saved something else than the plan was made for: then it begins anew."""
        if shape.plan is None or shape.profile is None:
            return False
        if self._following.placement.mismatched_bytes <= SHAPES_CHANGED * max(1, shape.profile.saved_bytes):
            return False
        self._rest()
        shape.base = None
        self._run_once(shape, frozenset(), "the forward saved other sizes than the plan was made for")
        return True

    # -- recorded steps -----------------------------------------------------------------------------------------------

    def _look_at_recording(self, shape: Shape, observed: Observed, moved_bytes: int) -> None:
        """A step was recorded: choose from it which regions run once, plan from it, or try one with nothing moved."""
        if shape.plan is None and self._profiler.has_no_record:  # nothing was large enough to move
            self._profiler.forget()
            self._rest()
            return
        profile = self._recording.profile()
        if profile is None:
            return
        shape.needs_beside(profile, self._run.beside_bytes, self._run.began_bytes, settled=self._settled)
        if shape.plan is not None:
            self._correct(shape, profile, observed, moved_bytes)
            return
        if self._recording.steps <= WARM_UP:
            self._refuse_if_too_low(profile, observed)
        if shape.tries_keeping:
            shape.tries_keeping = False
            self._recording.learn_cost(shape.moving[0] - profile.step_s, shape.moving[1], profile.step_s)
            self._make_plan(shape, self._recording.on_links(profile), observed)
        elif self._may_plan(shape):
            shape.tries_keeping = self._can_try_keeping(profile)
            shape.moving = observed.step_s - observed.wait_s, moved_bytes
            if not shape.tries_keeping and not self._chooses_regions(shape, profile):
                self._make_plan(shape, profile, observed)

    def _may_plan(self, shape: Shape) -> bool:
        late_enough = self._recording.steps > WARM_UP and now() >= self._rest_until_s
        return late_enough and self._budgets.all_is_there(shape, self._count)

    def _can_try_keeping(self, profile: Profile) -> bool:
        """Whether a step moves nothing first: only that shows what moving costs, and only ``max_slowdown`` asks."""
        config = self._shared.config
        if config.max_slowdown is None or config.is_limited or profile.device != "cpu" or profile.regions:
            return False
        return available_bytes() >= ROOM_TO_KEEP * profile.baseline_peak_bytes

    def _chooses_regions(self, shape: Shape, profile: Profile) -> bool:
        """Whether regions should run once that ran again in the step that was recorded; the next one shows it."""
        if shape.once or not profile.regions:
            return False
        shape.base, shape.own_bytes = profile, shape.own_bytes or self._budgets.peak_bytes
        if self._agreed is not None:
            return False
        try:
            found = self._search(self.planner.propose, profile)
        except BudgetError:
            return False  # not even as they are: the plan says by how much
        once = shape.latest(found.once)
        if once:
            self._run_once(shape, once)
        return bool(once)

    def _refuse_if_too_low(self, profile: Profile, observed: Observed) -> None:
        """Raise before another step passes a budget in bytes that the first one did not keep and no plan will.

        Raises:
            BudgetError: of the budget; it names the least that a plan keeps.
        """
        budget, config = self.limits.device_budget, self._shared.config
        if config.device_budget is None or config.device_share is not None or not _passed(observed, budget):
            return  # a share is known from now on: the next step shows whether it can be kept
        if any(region.again_s is not None for region in profile.regions):
            return  # what these hold then may leave if they run once: the choice of regions comes first
        if profile.host is None and profile.disk is None:
            return
        assert budget is not None, "it was passed"
        least, _ = self._least(profile, budget)
        if least > budget:
            raise BudgetError(budget, least)

    def _least(self, profile: Profile, budget: int) -> tuple[int, Plan | None]:
        """Return the least budget from this one up that a plan keeps, and the plan; None where only keep's does."""
        for _ in range(LEAST_TRIES):
            try:
                return budget, self.planner.plan(profile, replace(self.limits, device_budget=budget))
            except BudgetError as error:
                budget = max(budget, error.floor_bytes)
        return profile.baseline_peak_bytes, None

    # -- plans --------------------------------------------------------------------------------------------------------

    def _make_plan(self, shape: Shape, profile: Profile, observed: Observed) -> None:
        """Make the first plan for what was recorded, with fewer regions that run once where none keeps the budget.

        Raises:
            BudgetError: no plan keeps a budget in bytes, nor did the last step; where it is a share the least is taken.
        """
        budget = self.limits.device_budget
        try:
            plan = self._search(self._plan_that_fits, profile)
        except BudgetError as error:
            if self._runs_fewer(shape):
                return
            found, number = None, bool(self._budgets.device_bytes)
            if number or _passed(observed, budget):  # else the last step did keep it: go on as it was
                assert budget is not None, "no plan keeps it"
                least, found = self._least(profile, budget)
                if self._shared.config.device_budget is not None and self._shared.config.device_share is None:
                    raise BudgetError(budget, least) from error
                if not number or self._budgets.passed_bytes:
                    self._take_floor(least)
            if found is None:
                self.history.append(f"no plan: {error}")
                shape.hopeless = True
                return
            plan = found
        self._follow(shape, plan, profile, "first plan")

    def _take_floor(self, least: int) -> None:
        """Follow the least budget that a plan keeps in place of a share or number that is less, and say so once."""
        shared, config = self._shared, self._shared.config
        name, left = ("device_budget", "") if config.device_memory is None else ("device_memory", " for saved tensors")
        share = format_size(self.limits.device_budget or 0)
        told = (
            f"{name}={getattr(config, name)!r} is {share}{left}, less than a step needs: {format_size(least)} "
            f"({least} bytes) holds from now on; to lower it, make the batch or what a block saves smaller"
        )
        if config.device_memory is None:
            shared.budget.floor_bytes = shared.budget.limit_bytes = least
        if "budget" in shared.reporter.advice:
            shared.reporter.advice["budget"] = told  # another shape needs more: the report has the figure that holds
        shared.reporter.advise("budget", told)

    def _runs_fewer(self, shape: Shape) -> bool:
        """Whether fewer regions run once from the next step on, as no plan for so many keeps the budget."""
        if not shape.once or self._agreed is not None:
            return False
        shape.fewer()
        self._run_once(shape, shape.latest(shape.once))
        return True

    def _search(self, find: Callable[..., T], profile: Profile) -> T:
        began_s = now()
        try:
            return expected(find, profile, self.limits)
        finally:
            self._rest_until_s = now() + (now() - began_s) / PLANNING_SHARE

    def _plan_that_fits(self, profile: Profile, limits: Limits) -> Plan:
        """Plan; where a plan without a budget exceeds the device's memory, what there is becomes the budget."""
        shape = self._recorded_shape
        room = self._budgets.room_bytes if limits.device_budget is None else None
        try:
            plan: Plan = self.planner.plan(profile, limits)
            if room is None or (plan.predicted_peak_bytes or 0) <= room:
                return plan
            shape.at_most(room)
            plan = self.planner.plan(profile, self.limits)
            return plan
        except BudgetError as error:
            if room is None:
                raise
            least, found = self._least(profile, error.floor_bytes)
            shape.most_bytes = least  # the next step shows whether the device has that
            plan = found or self.planner.plan(profile, self.limits)
            return plan

    def _run_once(self, shape: Shape, once: frozenset[int], reason: str = "") -> None:
        """Run these regions once from the next step on, which is recorded. Until there is a plan, all may move."""
        if reason:
            self.history.append(reason)
        if self._agreed is None:  # else all ranks decide that together
            shape.once = once
        shape.plan, shape.due = None, ""
        shape.steps = StepsUnderPlan()
        self._shared.accounts.begin_plan()
        self._profiler.forget()
        if shape is self._shape:
            self._following.follow(None, shape.once)

    def _follow(self, shape: Shape, plan: Plan, profile: Profile, reason: str) -> None:
        self.history.append(f"{reason} (inputs {shape})" if len(self._shapes) > 1 else reason)
        shape.steps = StepsUnderPlan(REVIEW_STEPS if shape.profile is None else AFTER_A_CHANGE)
        shape.plan = replace(plan, once=tuple(sorted(shape.once)), regions=shape.regions)
        shape.profile, shape.due = profile, ""
        shape.recorded_at = self._count
        self._shared.accounts.begin_plan()
        if shape.regions and not self._said:
            self._unsaid, self._said = f"actoffload: {shape.in_words(self._budgets.device_bytes)}", True
        if shape is self._shape:
            self._profiler.forget()
            self._following.follow(shape.plan, shape.once)

    # -- steps under a plan -------------------------------------------------------------------------------------------

    def _review(self, shape: Shape, observed: Observed) -> None:
        """Compare the last steps with the plan; have another one recorded where they are not as it says."""
        assert shape.plan is not None, "there is a plan to look at"
        assert shape.profile is not None, "a plan was made from a profile"
        seen = shape.steps.add(observed)
        if seen is None or shape.due:
            return
        late_s = seen.step_s - (shape.plan.predicted_step_s or seen.step_s)
        self._recording.learn_idle(shape.plan, seen)
        self._recording.look_at_links(waited=min(late_s, seen.wait_s) > WAIT_SHARE * seen.step_s)
        reason = surprise(shape.plan, seen, shape.profile, self._recording.on_links(shape.profile), self._loss)
        if not reason:
            self._changes = 0
        elif now() >= self._rest_until_s and self._count >= self._record_from:
            shape.due = reason
            self._rest()

    def _correct(self, shape: Shape, recorded: Profile, observed: Observed, moved_bytes: int) -> None:
        """Follow another plan if one is better now; else know the old one better."""
        assert shape.plan is not None, "it is corrected"
        assert shape.profile is not None, "it was made from a profile"
        old, before, reason, seen = shape.plan, shape.profile, shape.due, shape.steps.seen or observed
        shape.due = ""
        if self.limits.device_budget is None and recorded.step_s > (1 - STEP_CHANGE) * before.step_s:
            # What moving costs looks like compute, and would make room for more of itself without end.
            if self._shared.config.max_slowdown is not None and recorded.device == "cpu":
                self._recording.learn_cost(recorded.step_s - before.step_s, moved_bytes, before.step_s)
            recorded = before
        profile = self._recording.on_links(recorded)
        known = simulate(profile, old, self.limits, detail=False)
        if shape.base is not None and self._has_better_regions(shape, known.step_s, recorded, before):
            return
        try:
            plan = self._search(self._plan_that_fits, profile)
        except BudgetError:
            if self._runs_fewer(shape):
                return
            plan = old  # that keeps the budget, as far as anything does
        if plan is not old and self._gains(profile, plan, old):
            self._follow(shape, plan, profile, reason)
            return
        shape.profile = profile
        shape.plan = replace(old, predicted_step_s=seen.step_s, predicted_peak_bytes=seen.peak_bytes)

    def _has_better_regions(self, shape: Shape, known_s: float, recorded: Profile, before: Profile) -> bool:
        """Whether other regions should run once as the machine is now; the next step then shows it."""
        assert shape.base is not None, "regions were chosen from it"
        if self._agreed is not None:
            return False
        if abs(recorded.step_s - before.step_s) > STEP_CHANGE * before.step_s:
            self._run_once(shape, frozenset())  # the base is of another machine
            return True
        try:
            found = self._search(self.planner.propose, self._recording.on_links(shape.base))
        except BudgetError:
            return False
        better = shape.latest(found.once) != shape.once and found.step_s < (1 - PLAN_GAIN) * known_s
        if better:
            self._run_once(shape, shape.latest(found.once))
        return better

    def _gains(self, profile: Profile, new: Plan, old: Plan) -> bool:
        """Whether a plan that was made just now is better than the one that is followed by enough to change."""
        limits = self.limits
        before, after = (simulate(profile, plan, limits, detail=False) for plan in (old, new))
        if (
            before.peak_bytes > (limits.device_budget or float("inf"))
            or before.step_s > (1 + self._loss) * profile.step_s
        ):
            return True  # the old one breaks a limit
        if limits.device_budget is not None:
            return after.step_s < (1 - PLAN_GAIN) * before.step_s
        return after.peak_bytes < (1 - PLAN_GAIN) * before.peak_bytes

    @property
    def _loss(self) -> float:
        """How much longer than one that keeps all a step may be, as a share."""
        limits = self.limits
        if limits.max_slowdown is not None:
            return limits.max_slowdown
        return NO_LOSS if limits.device_budget is None else float("inf")

    def _rest(self) -> None:
        """Record again: the next step at first, then after more and more steps."""
        self._changes += 1
        self._record_from = self._count + min(MOST_REST, 2**self._changes) - 2

    # -- for all ranks ------------------------------------------------------------------------------------------------

    def brings(self) -> Brought:
        """What this rank brings to `agree`: the regions that it would run once, and what they were chosen for."""
        shape = self._shapes.latest() or self._shape
        base = shape.base
        if self._gave_up or base is None or shape.plan is None:
            return Brought()
        fits = tuple(s.nbytes for s in base.storages), tuple((r.place, r.name) for r in base.regions)
        try:
            found = self.planner.propose(self._recording.on_links(base), replace(self.limits, agreed=True))
        except BudgetError:
            return Brought(once=(), fits=fits)
        return Brought(once=tuple(sorted(shape.latest(found.once))), fits=fits)

    def agreed(self, once: frozenset[int] | None, told: str) -> None:
        """Run these regions once, as all ranks do, until the next call; None: they do not agree, or not any more."""
        with self._shared.lock:
            before, self._agreed = self._agreed, None  # or nothing would change
            for shape in self._shapes if once != before else ():
                self._run_once(
                    shape, once or frozenset(), "the ranks have agreed" if once else "the ranks agree no more"
                )
            self._agreed = once
            self._following.follow(self._shape.plan, self._shape.once)
        if told:
            self._shared.reporter.advise("agree", told)
            self._shared.reporter.warn()

    # -- for people ---------------------------------------------------------------------------------------------------

    def explain(self) -> str:
        """The plan that is followed, by block, with what was predicted beside what was seen; and why it was made."""
        lines = [f"plan {number}: {reason}" for number, reason in enumerate(self.history, start=1)]
        shape = self._shape
        if len(self._shapes) > 1:
            lines[:0] = [f"inputs {other.summary()}" for other in self._shapes if other is not shape]
        if shape.plan is None or shape.profile is None:
            first = f"no plan yet: it is made from what the first {WARM_UP + 1} steps show"
            if not self._count and self._shared.accounts.optimizer_steps > WARM_UP + 1:
                first = "no plan yet: no step has ended, as something that a forward saved is alive all the time, such "
                first += "as a loss that somebody keeps: keep loss.detach() or loss.item() instead"
            elif len(self._shapes) > 1:
                first = f"no plan yet for inputs {shape}: it is made from what a step shows"
            return "\n".join([first, *lines])
        ago = self._count - shape.recorded_at + 1
        age = f"measured: in the step recorded {ago} step{'s' * (ago != 1)} ago"
        if shape.probe is not None:
            age += f"; one storage in {REVIEW_STEPS} steps moves only to be measured"
        regions = [shape.in_words(self._budgets.device_bytes)] if shape.regions else []
        return "\n".join(
            [render_plan(shape.profile, shape.plan, self.limits, seen=shape.steps.seen), *regions, age, *lines]
        )


def _passed(observed: Observed, budget: int | None) -> bool:
    """Whether a step had more on the device than a budget allows."""
    return budget is not None and (observed.peak_bytes or 0) > budget
