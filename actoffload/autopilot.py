"""Plans from what the steps show, follows the plan, and corrects it: what ``policy="auto"`` does from step to step."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from torch import nn

from .agreement import Proposal, several_ranks
from .assembly import Tiers
from .config import OffloadConfig
from .errors import BudgetError, ConfigError
from .events import now
from .memory import available_bytes
from .placement import Placement
from .plan_report import render_plan
from .planner import Plan
from .planners.auto import Auto
from .planners.base import Limits, Planner
from .planners.feedback import Observed, correct, needs_replan
from .planners.hiding import correct_hiding
from .prefetch import Prefetch
from .profile import Link, Profile
from .recompute import Meter, Recompute
from .recorder import Recorder
from .simulator import Conditions
from .tiers import Core

WARM_UP = 1
"""Steps before the one that is planned from: the first one allocates what the later ones use again."""
REVIEW_STEPS = 5
"""A plan is compared with the median of so many steps at first, as single ones are noisy; then of ever more."""
REVIEW_GROWTH = 2
MAX_PLANS = 12
"""After so many plans the last one stays: what the steps show does not settle."""
SHAPES_CHANGED = 0.1
"""A forward that saves this share of its bytes at other places, or in other sizes, is not the one that was planned."""
LOOK_AT_STEP = 3
"""The step under a new plan in which the blocks' times are taken."""
MOST_WAITED = 0.9
"""Of a step that waits are taken to be at most: something was computed."""
ROOM_TO_KEEP = 1.5
"""A step that keeps all is tried only where so many times its peak is free."""


class Autopilot:
    """One offloader's planning. Called between steps, when nothing that was saved is alive.

    Args:
        core: the counts and the options.
        tiers: spool and movers, whose links are measured.
        placement: follows the plan.
        prefetch: reads as far ahead as the plan says.
        recorder: makes profiles.
        blocks: the blocks of the models by name, as they are known at any time.
        meter: counts what recomputed blocks hold.
        planner: how to plan.
    """

    def __init__(
        self,
        core: Core,
        tiers: Tiers,
        placement: Placement,
        prefetch: Prefetch,
        recorder: Recorder,
        blocks: Mapping[str, nn.Module],
        meter: Meter | None = None,
        planner: Planner | None = None,
    ) -> None:
        self.recompute = Recompute(meter)
        weakref.finalize(self, self.recompute.undo).atexit = False  # dropped without close(): the model is as it was
        self.profile: Profile | None = None
        self.plan: Plan | None = None
        self.seen: Observed | None = None
        """The median of the last steps that were looked at under the plan."""
        self.history: list[str] = []
        """Why each plan was made, oldest first."""
        self._core = core
        self._config: OffloadConfig = core.config
        self._tiers = tiers
        self._placement = placement
        self._prefetch = prefetch
        self._recorder = recorder
        self._blocks = blocks
        self._planner: Planner = planner or Auto()
        self._steps = 0
        self._recorded_s = 0.0
        self._began: tuple[float, float, float, int] | None = None
        self._observed: list[Observed] = []
        self._keeping = False
        self._gave_up = False
        self._made = 0
        """Plans made, and begun anew."""
        self._agreed = self._stale = False
        self._seen_blocks: tuple[tuple[str, float], ...] = ()
        self._review_steps = REVIEW_STEPS
        self._known_rates: dict[tuple[str, str], float] = {}

    def between_steps(self) -> None:
        """A step has ended and the next one begins with the forward that follows.

        Raises:
            BudgetError: no plan keeps the ``device_budget``, and the last step did not keep it either.
        """
        if self._gave_up or self._made >= MAX_PLANS:
            self._forget_recording()
            return
        try:
            with self._core.lock:
                self._finish_step()
                self._begin_step()
        except BudgetError:
            raise
        except Exception as error:  # training does not end because a plan could not be made
            self._gave_up = True
            self._placement.keep_all = False
            self._forget_recording()
            self.history.append(f"no plan: {error!r}")
            self._core.advise("plan", f"policy='auto' could not plan ({error!r}); what can be moved in time moves")

    def forgot_blocks(self) -> None:
        """Some blocks are not ours any more: leave them as they were."""
        self.recompute.follow(self._blocks, self.recompute.names)

    def proposal(self) -> Proposal:
        """The plan that this rank would follow if all ranks did, recomputed blocks included."""
        profile = self.profile
        if profile is None or self.plan is None or self._gave_up or self._stale:
            return Proposal()
        try:
            limits = replace(self._limits, recompute=self._config.recompute and self._bounded)
            plan = self._planner.plan(profile, limits)
            text = plan.to_json()
        except Exception:  # as without: this rank goes on, and the others must not wait for it
            return Proposal()
        sizes = tuple(storage.nbytes for storage in profile.storages)
        names = tuple(block.name for block in profile.blocks if block.name in self._blocks)
        fits = (sizes, names, limits.device_budget, limits.max_slowdown, limits.tiers, limits.recompute)
        return Proposal(plan=text, fits=fits, step_s=plan.predicted_step_s or profile.step_s)

    def settled(self, plan: Plan | None, told: str) -> None:
        """Follow a plan that all ranks follow, and stay with it; None: they do not agree, or not any more."""
        with self._core.lock:
            if plan is not None:
                assert self.profile is not None, "only ranks with a profile agree"
                self._keeping = self._placement.keep_all = False
                self._agreed = True
                self._follow(self.profile, plan, told)
            elif self._agreed:  # on every rank, as all know what all have proposed
                self._agreed = self._stale = False
                self._start_over("the ranks agree no more")
        if plan is None and told:
            self._core.advise("agree", told)
            self._core.warn()

    def explain(self) -> str:
        """The plan that is followed, by block, with what was predicted beside what was seen; and why it was made."""
        why = "".join(f"\nplan {number}: {reason}" for number, reason in enumerate(self.history, start=1))
        if self.plan is None or self.profile is None:
            return f"no plan yet: it is made from what the first {WARM_UP + 1} steps show{why}"
        return render_plan(self.profile, self.plan, None, self.seen, limits=self._limits) + why

    # -- one step -----------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        accounts = self._core.accounts
        accounts.recomputed(0)
        accounts.step_peak_bytes = accounts.resident_bytes
        self._placement.mismatched_bytes = 0
        self._began = (now(), accounts.pack_wait_s, accounts.unpack_wait_s, accounts.packed_tensors)
        if not self._recorder.finished and (self.plan is None or self._blocks_are_due):
            self._recorder.begin()

    def _finish_step(self) -> None:
        if self._began is None:
            return
        accounts = self._core.accounts
        began_s, packed_s, unpacked_s, tensors = self._began
        if accounts.packed_tensors == tensors and (self.plan is not None or not self._recorder.finished):
            return  # a pass without gradients
        step_s = max(1e-9, now() - began_s)
        waited_s = accounts.pack_wait_s - packed_s, accounts.unpack_wait_s - unpacked_s
        # The host and a stream may have waited at the same time, and what a stream did is told a step later.
        share = min(1.0, MOST_WAITED * step_s / max(1e-9, sum(waited_s)))
        observed = Observed(
            step_s=step_s,
            forward_wait_s=share * waited_s[0],
            backward_wait_s=share * waited_s[1],
            peak_bytes=accounts.step_peak_bytes,
        )
        if self.plan is not None and self.profile is not None:
            self._look_at_blocks()
            self._review(observed)
        elif self._recorder.active or self._recorder.finished:
            self._recorded(observed)

    def _recorded(self, observed: Observed) -> None:
        if not self._recorder.useful:
            return  # a forward without a backward: the next one
        profile = self._recorder.profile(device=next(iter(self._tiers.movers), "cpu"))
        if profile is None:
            return  # the device has not come to the end of that step: asked again before the next one
        profile = replace(profile, **self._links(), prefetch_bytes=self._prefetch.window.nbytes)
        self._steps += 1
        self._recorded_s = profile.step_s
        if self._keeping:
            self._keeping = self._placement.keep_all = False
            self._make_plan(replace(profile, keep_step_s=observed.step_s), observed, "first plan")
        elif self._steps > WARM_UP and not self._try_keeping(profile):
            self._make_plan(profile, observed, "first plan")

    @property
    def _blocks_are_due(self) -> bool:
        """Whether the next step shows how long each block takes under the plan: once for each plan, when it is used."""
        return not self._seen_blocks and len(self._observed) == min(LOOK_AT_STEP, self._review_steps - 1)

    def _look_at_blocks(self) -> None:
        if not self._recorder.active and not self._recorder.finished:
            return
        if not self._recorder.useful:
            self._forget_recording()  # a forward without a backward: another step shows it
            return
        times: dict[str, float] = {}
        try:
            profile = self._recorder.profile()
        except ConfigError:  # a step that was interrupted; a plan does not end because its blocks could not be timed
            self._forget_recording()
        else:
            if profile is None:
                return  # the device has not come to the end of that step: asked again after the next one
            for block in profile.blocks:
                times[block.name] = times.get(block.name, 0.0) + block.forward_s + block.backward_s
        self._seen_blocks = tuple(times.items()) or (("", 0.0),)
        if self.seen is not None:
            self.seen = replace(self.seen, blocks=self._seen_blocks)

    def _forget_recording(self) -> None:
        self._recorder.active = self._recorder.finished = False

    def _try_keeping(self, profile: Profile) -> bool:
        """Begin a step with nothing moved: only that shows what moving costs, and only ``max_slowdown`` asks for it."""
        config = self._config
        if config.max_slowdown is None or config.device_budget is not None or profile.device != "cpu":
            return False
        if available_bytes() < ROOM_TO_KEEP * profile.baseline_peak_bytes:
            return False
        self._keeping = self._placement.keep_all = True
        return True

    def _review(self, observed: Observed) -> None:
        assert self.plan is not None, "there is a plan to look at"
        assert self.profile is not None, "a plan was made from a profile"
        if self._agreed:
            self.seen = replace(observed, blocks=self._seen_blocks)
            self._observed = [*self._observed, observed][-REVIEW_STEPS:]
            self._stale |= self._mismatched
            return
        if self._mismatched:
            self._start_over("the forward saved other sizes than the plan was made for")
            return
        self._observed.append(observed)
        if len(self._observed) < self._review_steps:
            return
        self.seen = replace(_median(self._observed), blocks=self._seen_blocks, **self._rates())
        self._observed.clear()
        if self._bounded:
            profile, reason = self._judged(self.profile, self.plan, self.seen)
        else:
            profile, reason = correct_hiding(self.profile, self.seen, self._recorded_s)
        if reason:
            self._review_steps *= REVIEW_GROWTH
            self._make_plan(profile, self.seen, reason)

    @property
    def _mismatched(self) -> bool:
        saved_bytes = 0 if self.profile is None else self.profile.saved_bytes
        return self._placement.mismatched_bytes > SHAPES_CHANGED * max(1, saved_bytes)

    def _judged(self, profile: Profile, plan: Plan, seen: Observed) -> tuple[Profile, str]:
        """Where the user has set a bound: the step as a whole counts, and what moving costs the compute."""
        conditions = Conditions(device_budget=self._limits.device_budget)
        corrected = correct(profile, plan, seen, conditions)
        return corrected, needs_replan(profile, plan, seen, corrected, conditions)

    # -- plans --------------------------------------------------------------------------------------------------------

    def _make_plan(self, profile: Profile, observed: Observed, reason: str) -> None:
        budget = self._limits.device_budget
        try:
            plan = self._planner.plan(profile, self._limits)
        except BudgetError as error:
            if budget is None or observed.peak_bytes is None or observed.peak_bytes > budget:
                raise
            self.history.append(f"no plan: {error}")  # but the last step did keep it: go on as it was
            self._gave_up = True
            return
        self._made += 1
        self._follow(profile, plan, reason)

    def _follow(self, profile: Profile, plan: Plan, reason: str) -> None:
        self.history.append(reason)
        self.profile, self.plan = profile, plan
        self._seen_blocks = ()
        self._forget_recording()
        self._observed.clear()
        self._core.reserved_bytes = _largest_recomputation(profile, plan)
        self._core.largest_moved_bytes = 0  # what moved before there was this plan says nothing of what it moves
        self._placement.follow(plan)
        # A plan that names no window was made for the profile's.
        self._prefetch.window.follow(plan.prefetch_bytes or profile.prefetch_bytes)
        for mover in self._tiers.movers.values():
            mover.expect_pending(plan.pending_bytes)
        self.recompute.follow(self._blocks, plan.recompute)

    def _start_over(self, reason: str) -> None:
        """Record anew; until there is a plan again, what moves is decided as before the first one."""
        self.history.append(reason)
        self._made += 1
        self.plan = None
        self._forget_recording()
        self._observed.clear()
        self._placement.follow(None)
        self._prefetch.window.start_over()
        self._core.reserved_bytes = self._core.largest_moved_bytes = 0
        for mover in self._tiers.movers.values():
            mover.expect_pending(None)
        self.recompute.undo()

    @property
    def _bounded(self) -> bool:
        return self._config.device_budget is not None or self._config.max_slowdown is not None

    @property
    def _limits(self) -> Limits:
        config = self._config
        tiers = {"host": ("host",), "nvme": ("nvme",)}.get(config.target, ("host", "nvme"))
        if self._tiers.spool is None:
            tiers = ("host",)
        return Limits(
            device_budget=None if config.device_budget is None else config.size("device_budget", 0),
            host_budget=sum(pool.capacity_bytes for pool in self._tiers.pools) or None,
            nvme_budget=None if config.nvme_budget is None else config.size("nvme_budget", 0),
            max_slowdown=config.max_slowdown,
            tiers=tiers,
            recompute=config.recompute and self._bounded and not several_ranks(),
        )

    # -- what is measured ---------------------------------------------------------------------------------------------

    def _rates(self) -> dict[str, Any]:
        """Rates of links that were full, as fields of `Observed`."""
        found = self._tiers.rates(full=True)
        return {f"{link}_{way}_bytes_per_s": rate for (link, way), rate in found.items()}

    def _links(self) -> dict[str, Any]:
        """The links as they are known by now, as fields of `Profile`."""
        self._known_rates.update({key: rate for key, rate in self._tiers.rates().items() if rate is not None})
        links: dict[str, Link | None] = {}
        for name in ("host", "disk"):
            write, read = (self._known_rates.get((name, way)) for way in ("write", "read"))
            known = write or read
            links[name] = (
                None if known is None else Link(write_bytes_per_s=write or known, read_bytes_per_s=read or known)
            )
        return links


def _largest_recomputation(profile: Profile, plan: Plan) -> int:
    """The most bytes that one of the plan's recomputed blocks saves."""
    held = dict.fromkeys((n for n, block in enumerate(profile.blocks) if block.name in plan.recompute), 0)
    for storage in profile.storages:
        if storage.block in held:
            held[storage.block] += storage.nbytes
    return max(held.values(), default=0)


def _median(observed: list[Observed]) -> Observed:
    last = observed[-1]
    return replace(
        last,
        step_s=median(o.step_s for o in observed),
        forward_wait_s=median(o.forward_wait_s for o in observed),
        backward_wait_s=median(o.backward_wait_s for o in observed),
        peak_bytes=max(o.peak_bytes or 0 for o in observed),
    )
