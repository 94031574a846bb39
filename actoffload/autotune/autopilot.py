"""Makes plans from recorded steps, follows and corrects them: ``policy="auto"``, from step to step.

Each shape of inputs is in one `Stage`. From a recorded step in which every checkpointed region runs again, the base,
`propose` chooses the regions that should run once. The next step follows a plan for them made on paper, and is
recorded; `plan` chooses the storages that leave. Then measured steps decide between plans. If the last steps differ
from their plan, another step is recorded and planned from.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import replace

from ..errors import BudgetError
from ..planning.constants import MOST_REASONS, NO_LOSS, NOTICEABLE, PEAK_CHANGE, SHAPES_CHANGED, TIGHTER, WARM_UP
from ..planning.observed import Observed, PlanFacts, ShapeFacts
from ..planning.plan import Plan
from ..planning.profile import Profile
from ..planning.regions import with_regions
from ..planning.search import Limits
from ..planning.simulator import simulate
from ..runtime.decision import InputShapes
from ..runtime.store import ActivationStore
from ..sizes import format_size
from ..tiers.interrupts import is_interrupt
from .budgets import Budgets
from .following import Following
from .making import Brought, Making, passed
from .observations import Pauses, Recording, StepsUnderPlan, Watch, at_pace, had_stall, pace_of, surprise
from .shapes import AGAIN, UNRECORDED, Codes, Shape, Shapes, Stage, Tried


class Autopilot:
    """One offloader's planning. Called between steps, when no saved tensor is alive.

    The ``history`` has the reasons of the last plans, oldest first.
    """

    def __init__(self, store: ActivationStore, following: Following) -> None:
        self.history: deque[str] = deque(maxlen=MOST_REASONS)
        self._store, self._shared, self._profiler = store, store.shared, store.profiler
        self._following = following
        store.decision.forward_begins = weakref.WeakMethod(self.forward_begins)
        store.shared.coded = False  # a plan for steps that are not coded comes first
        self._shape = Shape(())
        """Of the running step; the shape of the step before until that is known."""
        self._recording = Recording(store, self._shape)
        self._shapes = Shapes()
        self._budgets = Budgets(store, self._shapes)
        self.making = Making(store, self._budgets)
        self._watch: Watch[Shape] = Watch(store)
        self._pauses = Pauses()
        self._agreed: frozenset[int] | None = None
        """The regions that run once on all ranks; None while each rank decides alone."""
        self._gave_up = self._announced = False

    @property
    def limits(self) -> Limits:
        """The limits of a plan for the recorded step."""
        return self.making.limits(self._recording.shape)

    @property
    def plan(self) -> Plan | None:
        """The followed plan; None before there is one."""
        return self._shape.plan

    @property
    def profile(self) -> Profile | None:
        """The step that the plan was made from."""
        return self._shape.profile

    def model_begins(self, key: InputShapes, signature: Callable[[], Hashable]) -> bool:
        """Begin a forward, as `forward_begins`; return whether it needs no hooks. ``signature``: see `ModelInputs`."""
        self.forward_begins(key)
        if self._shape.nothing_moves:  # otherwise no forward rests, and a signature takes time
            self._watch.signatures.add(signature())
        known = self._shape.rest.signatures
        return self._shape.stage is Stage.RESTING and self._watch.signatures == known and not self._gave_up

    # -- one step -----------------------------------------------------------------------------------------------------

    def between_steps(self) -> ShapeFacts | None:
        """End a step. Once, as soon as steps under a plan have shown their peak, return their regions to announce.

        Raises:
            BudgetError: neither a plan nor the last step keeps the ``device_budget``; or memory beside saved tensors
                passes ``device_memory``.
        """
        if self._gave_up:
            self._profiler.forget()
            return None
        try:
            with self._shared.lock:
                self._budgets.begin_step()
                self._finish_step()
                self._store.decision.mismatched_bytes = 0
                self._watch.begin()
                self._begin_shape()
        except BudgetError:
            raise
        except Exception as error:  # training must not end because planning failed
            if is_interrupt(error):
                raise
            self._give_up(error)
        shape = self._shape
        followed = shape.regions and shape.stage is Stage.FOLLOWED and self._budgets.peak_is_known(shape)
        if self._announced or not followed:
            return None
        self._announced = True  # by the caller, after the lock is released, on a thread of the user's
        return shape.facts(self._budgets.device_bytes)

    def _give_up(self, error: Exception) -> None:
        self._gave_up, self._store.run.times_backward = True, False
        self._following.follow(None, self._agreed or frozenset())  # regions run as in the program, or as ranks agreed
        self._profiler.forget()
        self.history.append(f"no plan: {error!r}")
        advice = f"policy='auto' could not plan ({error!r}); what can be moved in time moves"
        self._shared.reporter.advise("plan", advice)

    def forward_begins(self, key: InputShapes) -> None:
        """Begin a forward whose inputs have these shapes; the first forward of a step decides on the plan.

        If no model is known, the size of the forward's first storage stands for the shapes.
        """
        if self._watch.shape_is_known or self._gave_up:
            return
        self._watch.shape_is_known = True
        with self._shared.lock:
            shape = self._shapes.use(key)
            if shape is not self._shape:
                self._shape = shape
                if self._agreed is not None:
                    shape.once = self._agreed  # for every shape: another rank's step may have another shape
                self._following.follow(shape.plan, shape.once, coded=shape.codes.used)
                self._begin_shape()

    def _begin_shape(self) -> None:
        """Begin a step of this shape: record it or not, and move a storage to measure a link or not."""
        shape, measures = self._shape, self._shape.steps.measures
        self._store.decision.probe = probe = shape.probe if measures else None
        self._shared.watches_host = shape.stage is Stage.FOLLOWED and probe is None and measures
        self._budgets.bound(shape)
        self._budgets.begin_peak(shape)
        if self._profiler.finished:
            return  # the device has not ended the recorded step yet, so its times are not known
        if self._is_recorded(shape):
            self._recording.shape, self._recording.settled = shape, self._store.run.optimizer.settled
            self._shared.watches_host = True
            if not self._profiler.active:
                self._recording.begin()
        else:
            self._profiler.forget(timed=self._shared.watches_host)

    def _is_recorded(self, shape: Shape) -> bool:
        """Whether the step that begins is recorded."""
        settled = self._store.run.optimizer.settled
        if shape.stage in (Stage.PAPER, Stage.DUE):
            return settled or not shape.need.settled
        if shape.stage in UNRECORDED or (shape.base is None and not self._pauses.over):
            return False
        found = settled or self._recording.steps <= WARM_UP or self._budgets.all_is_there(shape)
        shape.need.unsettled += not found
        return found

    def _finish_step(self) -> None:
        watch, rested, plan = self._watch, self._shape.stage is Stage.RESTING, self._shape.plan  # a review changes them
        for reviewed, followed, ended in watch.ended():
            if reviewed.plan is followed:
                self._review(reviewed, ended)
        if not watch.began:
            return
        shape, recorded = self._shape, self._profiler.active or self._profiler.finished
        if rested:  # a pass without gradients has no signature, and saves nothing: it is no step
            if not self._is_too_much(shape, watch.end()) and (watch.saved or watch.signatures):
                self._pauses.steps += 1
                shape.rested(watch.saved)
            return
        if not watch.saved and (shape.plan is not None or not self._profiler.finished):  # a pass without gradients
            if not self._profiler.finished:
                self._profiler.forget()  # the recording begins with the next step instead
            return
        self._pauses.steps += 1
        shape.rest.signatures = frozenset(watch.signatures) or shape.rest.signatures
        observed = watch.end()
        if self._is_too_much(shape, observed) or self._is_another(shape):
            return
        if recorded:
            self._look_at_recording(self._recording.shape, observed)
        elif shape.plan is not None and shape.plan is plan:
            shape.steps.count += 1
            shape.note_peak(self._store.run.beside.at_peak_bytes)
            if not watch.later(shape, shape.plan, observed):
                self._review(shape, observed)

    def _begin_rest(self, shape: Shape, step_s: float) -> None:
        """Have the next steps of a shape run without hooks, if nobody needs these and they take too much of a step."""
        # With `fp8` hooks make tensors smaller that stay, too. A trace has to show each tensor.
        needed = self._agreed is not None or self._shared.config.fp8 or self._store.trace is not None
        if not needed and self.making.limits(shape).device_budget is None and shape is self._shape:
            shape.begin_rest(self._watch.saved, step_s)

    def _is_too_much(self, shape: Shape, observed: Observed) -> bool:
        """Whether the step ran out of memory or passed ``device_memory``. Then the next one of its shape saves less."""
        ran_out, passed = self._store.out_of_memory.happened(), self._budgets.passed_bytes
        limit = self._budgets.of(shape) if ran_out or passed else None
        if not ran_out and not limit:
            return False
        peak = observed.peak_bytes or (0 if shape.profile is None else shape.profile.baseline_peak_bytes)
        most = peak if limit is None else min(peak, limit)
        shape.tried.forget()  # these plans were made for a larger budget
        if ran_out and most:
            self._budgets.at_most(shape, TIGHTER * most)
        if ran_out:
            shape.codes = Codes()
            self._run_once(shape, AGAIN, "the step ran out of memory")
        else:
            self._budgets.at_most(shape, most - passed)
            again, shape.passed = shape.passed == shape.once, shape.once
            self._choose(shape, f"the step passed device_memory by {format_size(passed)}", once_more=not again)
        return True

    def _is_another(self, shape: Shape) -> bool:
        """Whether the forward saved other storages than the plan lists. Then planning begins anew for its shape."""
        if shape.plan is None or shape.profile is None or shape.stage is Stage.PAPER:  # places on paper are a guess
            return False
        if self._store.decision.mismatched_bytes <= SHAPES_CHANGED * max(1, shape.profile.saved_bytes):
            return False
        self._pauses.back_off()
        shape.base, shape.confirmed, shape.codes = None, False, Codes()
        shape.tried.forget()
        self._run_once(shape, AGAIN, "the forward saved other sizes than the plan was made for")
        return True

    # -- recorded steps -----------------------------------------------------------------------------------------------

    def _look_at_recording(self, shape: Shape, observed: Observed) -> None:
        """Use a recorded step: choose the regions that run once, or make or correct a plan."""
        if shape.plan is None and self._profiler.has_no_record:  # no storage was large enough to move
            self._profiler.forget()
            self._pauses.back_off()
            self._begin_rest(shape, observed.step_s)
            return
        profile = self._recording.profile(everything_moved=shape.plan is None)
        if profile is None:
            return
        shape.need.take(profile, self._store.run.beside.recorded, once=shape.once, settled=self._recording.settled)
        if shape.stage is Stage.PAPER:
            self._make_real(shape, profile)
            return
        if shape.plan is not None:
            self._correct(shape, profile)
            return
        if shape.codes.new:
            shape.codes.new = False
            return  # this step compared each tensor with its form, so it was longer than later ones
        if self._recording.steps <= WARM_UP and not self._may_code(shape, profile):
            self.making.refuse_if_too_low(self._recording.shape, profile, observed)
        if self._may_plan(shape) and not self._chooses_regions(shape, profile):
            self._make_plan(shape, profile, observed)

    def _may_plan(self, shape: Shape) -> bool:
        # Regions or forms chosen just now are planned for without a pause: until then the step moves everything.
        rested = bool(shape.once) or (shape.codes.used and shape.codes.open) or self.making.has_rested
        return self._recording.steps > WARM_UP and rested and self._budgets.all_is_there(shape)

    def _chooses_regions(self, shape: Shape, profile: Profile) -> bool:
        """Whether regions that ran again may run once. Then follow the best choice."""
        if shape.once or not profile.regions:
            return False
        shape.base = profile
        return self._agreed is None and self._choose(shape, "first plan")

    def _may_code(self, shape: Shape, profile: Profile) -> bool:
        # With checkpoints only regions that run once are coded, in all steps.
        return self._shared.config.codec == "exact" and shape.codes.open and not profile.regions

    def _chooses_codes(self, shape: Shape, plan: Plan | None, profile: Profile) -> bool:
        """Choose whether tensors are saved in exact forms; return whether the next steps do not follow this plan.

        ``plan``: for steps like the profile's; None: no such plan keeps the budget.
        """
        if not self._may_code(shape, profile):
            return False
        other, why = shape.codes.choose(plan, profile)
        if other is not None:
            self._follow(shape, *other, why)
        elif why:
            before = shape.codes.before  # which `_run_once` drops, as other reasons to run it make plans invalid
            self._run_once(shape, AGAIN, why)
            shape.codes.before = before
        return bool(why)

    def _choose(self, shape: Shape, reason: str, *, once_more: bool = False) -> bool:
        """Whether the next step follows a plan, with all regions run again or with others on paper.

        Otherwise all regions run again, everything moves, and the next step is recorded.
        """
        base = None if shape.base is None else self._recording.on_links(shape.base)
        if base is None or self._agreed is not None:
            self._run_once(shape, AGAIN, reason)
            return False
        try:
            plan: Plan | None = self.making.plan(shape, base, AGAIN)
        except BudgetError as error:
            plan, config = None, self._shared.config
            if config.device_memory is not None and config.device_budget is None and not self._budgets.passed_bytes:
                # The recorded step kept the number, so a simulation that passes it is too careful.
                _, plan = self.making.least(shape, base, error.floor_bytes, AGAIN)
        step_s = float("inf")
        if plan is not None:
            step_s = plan.predicted_step_s or 0.0
            self._know(shape, plan, base, AGAIN)
        sure = self._recording.calm or plan is None
        # Those that ran once are not tried with less memory, but `once_more`.
        if sure and self._tries_others(shape, step_s, reason, AGAIN if once_more else shape.once):
            return True
        if plan is None:
            if shape.plan is not None:
                self._run_once(shape, AGAIN, reason)
            return False
        self._follow(shape, plan, base, reason, AGAIN)
        if not sure:
            shape.have_recorded("the allocator had to give its cache back in the step that was recorded")
        return True

    def _choose_with_less(self, shape: Shape) -> None:
        self._budgets.at_most(shape, TIGHTER * (self._budgets.of(shape) or 0))
        self._choose(shape, "no plan keeps the budget")

    def _know(
        self, shape: Shape, plan: Plan, profile: Profile, once: frozenset[int], measured_s: float | None = None
    ) -> None:
        """Remember the length of a step with these regions run once, under this plan."""
        budget = self._budgets.of(shape, AGAIN)  # whatever runs once, so that budgets compare
        shape.tried.know(Tried(once, plan, profile, budget, shape.need.beside, measured_s))

    def _tries_others(self, shape: Shape, than_s: float, reason: str, known: frozenset[int]) -> bool:
        """Whether, on paper, a step with other regions than the known ones is shorter. Then the next step proves it."""
        assert shape.base is not None, "its regions are known, and this rank decides alone"
        base, budget = self._recording.on_links(shape.base), self._budgets.of(shape, AGAIN)
        try:
            once = self.making.propose(shape, base).once
        except BudgetError:
            return False  # no choice keeps the budget, and the plan's own error names the shortfall
        if once in (known, AGAIN):
            return False
        budgets = (tried.budget or 0 for tried in shape.tried if tried.once == once)
        if any(budget is None or budget <= (1 + PEAK_CHANGE) * before for before in budgets):
            return False  # this choice was no better with as large a budget
        profile = with_regions(base, once)
        try:
            plan = self.making.plan(shape, profile, once)
        except BudgetError:
            return False
        if (plan.predicted_step_s or 0.0) >= (1 - NO_LOSS) * than_s:
            return False
        self._follow(shape, plan, profile, reason, once)
        shape.have_recorded("other regions run once", on_paper=True)
        return True

    def _make_real(self, shape: Shape, recorded: Profile) -> None:
        """Plan anew from the step that was recorded under a plan made on paper, for the storages that it really saved.

        If it saved what the paper predicts, the paper's times hold too, because they come from a calmer step: under
        each new plan near the device's limit the allocator gives its cache back once, and the device idles meanwhile.
        """
        _, paper = shape.followed
        recorded = recorded.with_other(paper.other_s)  # to compare it with other choices
        # On the CPU other programs may have made this one step longer.
        recorded = recorded.lasting(paper.step_s) if recorded.device == "cpu" else recorded
        profile = self._recording.on_links(recorded if self._store.decision.mismatched_bytes else paper)
        try:
            plan = self.making.plan(shape, profile)
        except BudgetError:
            self._choose_with_less(shape)
            return
        best = shape.tried.best
        if self._recording.calm and best and (plan.predicted_step_s or 0.0) > (1 - NO_LOSS) * best.step_s:
            self._know(shape, plan, profile, shape.once)
            self._follow_known(shape, best, f"a step with {len(shape.once)} regions run once is no shorter")
            return
        self._follow(shape, plan, profile, shape.why)

    # -- plans --------------------------------------------------------------------------------------------------------

    def _make_plan(self, shape: Shape, profile: Profile, observed: Observed) -> None:
        """Make the first plan for a recorded step, or take the lowest budget if no plan keeps a share.

        Raises:
            BudgetError: no plan keeps a budget in bytes, and the last step did not keep it either.
        """
        budget = self.limits.device_budget
        if budget is not None and not self.making.knows_a_link(shape, profile):
            return  # the next step is recorded as well
        try:
            plan = self.making.plan(shape, profile)
        except BudgetError as error:
            if self._chooses_codes(shape, None, profile):
                return
            found, number = None, bool(self._budgets.device_bytes)
            if number or passed(observed, budget):  # otherwise the last step kept the budget: go on without a plan
                assert budget is not None, "no plan keeps it"
                least, found = self.making.least(self._recording.shape, profile, budget)
                if self._shared.config.device_budget is not None and self._shared.config.device_share is None:
                    if profile.computes_again and self._shared.budget.allows_codes:
                        self._shared.budget.allows_codes = False  # regions that run once need less room then
                        shape.tried.forget()
                        self._run_once(shape, AGAIN, "no plan keeps the budget with tensors in exact forms")
                        return
                    raise BudgetError(budget, least) from error
                if not number or self._budgets.passed_bytes:
                    self.making.take_floor(least, budget)
            if found is None:
                self.history.append(f"no plan: {error}")
                shape.stage = Stage.HOPELESS
                return
            plan = found
        if not self._chooses_codes(shape, plan, profile):
            forms = ", with tensors in exact forms" if shape.codes.used else ""
            self._follow(shape, plan, profile, f"first plan{forms}")

    def _follow_known(self, shape: Shape, known: Tried, reason: str) -> None:
        shape.need.beside = known.beside
        self._follow(shape, replace(known.plan, predicted_step_s=known.step_s), known.profile, reason, known.once)

    def _run_once(self, shape: Shape, once: frozenset[int], reason: str = "") -> None:
        """Run these regions once from the next step on, which is recorded. Without a plan, everything may move."""
        if reason:
            self.history.append(reason)
        if self._agreed is None:  # otherwise all ranks decide together
            shape.once = once
        shape.plan, shape.stage, shape.codes.before = None, Stage.SAFE, None
        shape.steps = StepsUnderPlan()
        self._shared.accounts.begin_plan()
        self._profiler.forget()
        if shape is self._shape:
            self._following.follow(None, shape.once, coded=shape.codes.used)

    def _follow(
        self, shape: Shape, plan: Plan, profile: Profile, reason: str, once: frozenset[int] | None = None
    ) -> None:
        """Follow a plan; ``once``: with these regions run once, by default with the shape's."""
        shape.once = shape.once if once is None else once
        self.history.append(f"{reason} (inputs {shape})" if len(self._shapes) > 1 else reason)
        shape.steps = StepsUnderPlan(plan.predicted_step_s, self._pauses.steps)
        shape.plan = replace(plan, once=tuple(sorted(shape.once)), regions=shape.regions, coded=shape.codes.used)
        shape.profile, shape.stage = profile, Stage.FOLLOWED
        self._shared.accounts.begin_plan()
        if shape is self._shape:
            self._profiler.forget()
            self._following.follow(shape.plan, shape.once)
        if profile.host is not None or profile.disk is not None:  # else it declined what nobody has measured
            self._begin_rest(shape, plan.predicted_step_s or profile.step_s)

    # -- steps under a plan -------------------------------------------------------------------------------------------

    def _review(self, shape: Shape, observed: Observed) -> None:
        """Compare the last steps with the plan; have another one recorded if they differ."""
        (plan, profile), limited = shape.followed, self.limits.device_budget is not None
        seen = shape.steps.add(observed, limited=limited)
        if seen is None or shape.stage is not Stage.FOLLOWED:
            return
        late_s = seen.as_recorded(profile).step_s - (plan.predicted_step_s or seen.step_s)
        self._recording.learn_idle(plan, seen)
        self._recording.look_at_links(waited=min(late_s, seen.wait_s) > NO_LOSS * seen.step_s)
        present = self._recording.on_links(profile)
        reason = surprise(plan, seen, profile, present, limited=limited)
        if not reason:
            self._pauses.changes, shape.confirmed = 0, True
        # If a plan's measured length has changed, the machine has, and the lengths of other plans prove nothing.
        if (not reason or not shape.tried.has_measured(shape.once, plan)) and self._goes_back(shape, seen):
            return
        if not reason or not self._may_change:  # nothing changes for the moment
            self._begin_rest(shape, seen.step_s)
        # Once: if a second recorded step is as long, recording itself takes the host so long.
        elif self._agreed is None and not shape.confirmed and had_stall(seen, profile):
            shape.confirmed, shape.base = True, None
            shape.tried.forget()
            self._run_once(shape, AGAIN, reason)
        else:
            self._pauses.back_off()
            pace = pace_of(seen, profile, limited=limited)
            if not surprise(plan, seen.as_recorded(profile), profile, present, limited=limited):
                pace = profile.step_s  # only the part after backward has changed, which needs no recording
            if pace is None:
                shape.have_recorded(reason)
            else:
                shape.why = reason
                self._correct(shape, profile.lasting(pace))

    @property
    def _may_change(self) -> bool:
        return self.making.has_rested and self._pauses.over

    def _goes_back(self, shape: Shape, seen: Observed) -> bool:
        """Whether a plan that was followed before had shorter steps. Then it is followed again."""
        if self._agreed is not None or not shape.regions:
            return False
        plan, profile = shape.followed
        step_s = at_pace(seen, profile)
        self._know(shape, plan, profile, shape.once, step_s)
        best = shape.tried.best
        if best is None or best.step_s >= (1 - NOTICEABLE) * step_s or not self._may_change:
            return False
        self._pauses.back_off()
        seconds = f"takes {step_s:.3g} s, with {len(best.once)} {best.step_s:.3g} s"
        self._follow_known(shape, best, f"a step with {len(shape.once)} regions run once {seconds}")
        return True

    def _correct(self, shape: Shape, recorded: Profile) -> None:
        """Follow another plan if one is better now; otherwise update the old one's profile and prediction."""
        (old, before), reason, seen = shape.followed, shape.why, shape.steps.seen
        shape.stage = Stage.FOLLOWED
        profile = self._recording.corrected(recorded, before, seen, self.limits)
        shape.take_other(profile.other_s)
        if self._agreed is None:
            shape.renew_base(before, profile, calm=self._recording.calm)
        try:
            plan = self.making.plan(shape, profile)
        except BudgetError:
            if shape.once and self._agreed is None:
                self._choose_with_less(shape)
                return
            plan = old  # no plan keeps the budget better
        if self._chooses_codes(shape, plan, profile):
            return
        better = plan is not old and self.making.gains(shape, profile, plan, old)
        if shape.regions and self._agreed is None:
            known = plan if better else replace(old, predicted_step_s=simulate(profile, old, self.limits).step_s)
            self._know(shape, known, profile, shape.once, None if better or seen is None else at_pace(seen, profile))
            if self._tries_others(shape, min(tried.step_s for tried in shape.tried), reason, shape.once):
                return
        if better:
            self._follow(shape, plan, profile, reason)
            return
        shape.profile = profile
        if seen is not None:
            shape.plan = replace(old, predicted_step_s=seen.step_s, predicted_peak_bytes=seen.peak_bytes)

    # -- for all ranks ------------------------------------------------------------------------------------------------

    def brings(self) -> Brought:
        """This rank's part in `agree`: the regions that it would run once, and the step that they were chosen for."""
        shape = self._shapes.latest() or self._shape
        if self._gave_up or shape.base is None or shape.plan is None:
            return Brought()
        base = self._recording.on_links(shape.base)
        fits = tuple(s.nbytes for s in base.storages), tuple((r.place, r.name) for r in base.regions)
        try:
            once = self.making.planner.propose(base, replace(self.limits, agreed=True)).once
        except BudgetError:
            once = AGAIN  # no choice keeps the budget, so it proposes what the program does
        return Brought(once=tuple(sorted(once)), fits=fits)

    def agreed(self, once: frozenset[int] | None, told: str) -> None:
        """Run these regions once, as all ranks do, until the next call; None: the ranks do not agree, or no longer."""
        reason = "the ranks have agreed" if once else "the ranks agree no more"
        with self._shared.lock:
            before, self._agreed = self._agreed, None  # `_run_once` changes no regions that ranks have agreed on
            for shape in self._shapes if once != before else ():
                self._run_once(shape, once or AGAIN, reason)
            self._agreed = once
            self._following.follow(self._shape.plan, self._shape.once, coded=self._shape.codes.used)
        if told:
            self._shared.reporter.advise("agree", told)
            self._shared.reporter.warn()

    # -- for explanations ---------------------------------------------------------------------------------------------

    def facts(self) -> PlanFacts:
        """The plans of all shapes, for an explanation."""
        shape, nbytes = self._shape, self._budgets.device_bytes
        return PlanFacts(
            history=list(self.history),
            limits=self.limits,
            shape=shape.facts(nbytes),
            others=[other.facts(nbytes) for other in self._shapes if other is not shape],
            recorded_ago=self._pauses.steps - shape.steps.recorded_at + 1,
            probes=shape.probe is not None,
            rest=shape.rest.left if shape.stage is Stage.RESTING else 0,
            stuck=not self._pauses.steps and self._shared.accounts.optimizer_steps > WARM_UP + 1,
        )
