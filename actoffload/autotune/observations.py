"""The evidence of the steps: profiles of recorded steps, rates of links, and medians of steps under a plan."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import replace
from statistics import median
from typing import Generic, TypeVar

from ..events import now
from ..planning.constants import LINK_CHANGE, MOST_REST, NO_LOSS, NOTICEABLE, PEAK_CHANGE, REVIEW_STEPS, STEP_CHANGE
from ..planning.observed import Observed
from ..planning.plan import Plan
from ..planning.profile import Link, Profile
from ..planning.search import Limits
from ..policy import Decision
from ..runtime.store import ActivationStore
from ..sizes import format_size
from ..tiers.accelerator import Event
from ..tiers.accounts import Accounts

LINKS = ("host", "disk")
WAYS = ("write", "read")

S = TypeVar("S")


class Watch(Generic[S]):
    """The running step, and the steps that a device has not ended yet, because its host may be several steps ahead.

    The ``signatures`` are of the models' forwards in the running step, if nothing moves in it.
    """

    def __init__(self, store: ActivationStore) -> None:
        self._shared, self._tiers, self._stopwatch = store.shared, store.tiers, store.profiler.stopwatch
        self._run = store.run
        self._run.times_backward = True
        self.shape_is_known = False
        self.signatures: set[Hashable] = set()
        self._before: tuple[float, Accounts, Event | None] | None = None
        self._now: Event | None = None
        self._open: deque[tuple[S, Plan, Observed, Event, Event | None, Event, int]] = deque(maxlen=2 * REVIEW_STEPS)

    @property
    def began(self) -> bool:
        """Whether a step runs."""
        return self._before is not None

    def begin(self) -> None:
        """Begin a step, at the moment at which the last one ended if it has just ended."""
        # One event ends a step and begins the next, so that the time in between counts for one of them.
        moment, self._now = self._now or self._tiers.moment(), None
        self._before = now(), copy.copy(self._shared.accounts), moment
        self._run.backward_ended = None
        self.shape_is_known = False
        self.signatures.clear()

    @property
    def saved(self) -> int:
        """The number of tensors that the running step has saved."""
        assert self._before is not None, "it has begun"
        return self._shared.accounts.packed_tensors - self._before[1].packed_tensors

    def end(self) -> Observed:
        """End the step and return its times by the host's clock."""
        assert self._before is not None, "it has begun"
        accounts, (began_s, before, _) = self._shared.accounts, self._before
        self._now, ended_s, backward = self._tiers.moment(), now(), self._run.backward_ended
        step_s = max(1e-9, ended_s - began_s)
        return Observed(
            step_s=step_s,
            forward_wait_s=accounts.pack_wait_s - before.pack_wait_s,
            backward_wait_s=accounts.unpack_wait_s - before.unpack_wait_s,
            peak_bytes=accounts.step_peak_bytes,
            hooks_s=accounts.hooks_s - before.hooks_s,
            idle_s=accounts.idle_s - before.idle_s,
            other_s=None if backward is None else min(step_s, ended_s - backward[0]),
        )

    def later(self, steps_of: S, plan: Plan, observed: Observed) -> bool:
        """Have `ended` return this step later, if a device ran it: the host's clock shows only when it was enqueued."""
        assert self._before is not None, "it has begun"
        began = self._before[2]
        if began is None or self._now is None:
            return False
        watched, self._stopwatch.running = self._stopwatch.number * self._stopwatch.running, False
        backward = None if self._run.backward_ended is None else self._run.backward_ended[1]
        self._open.append((steps_of, plan, observed, began, backward, self._now, watched))
        return True

    def ended(self) -> Iterator[tuple[S, Plan, Observed]]:
        """The steps that the device has ended by now, in order, with their lengths on the device."""
        while self._open:
            steps_of, plan, observed, began, backward, ended, watched = self._open[0]
            step_s = self._tiers.seconds_between(began, ended)
            if step_s is None:
                return  # a device ends steps in order, so the later ones have not ended either
            self._open.popleft()
            if step_s > 0:
                idle_s = self._idled(observed.idle_s, watched, step_s)
                other_s = None
                if backward is not None and backward.index == ended.index:
                    # None also if backward was called on a stream that the end of the step has not waited for.
                    other_s = self._tiers.seconds_between(backward, ended)
                    other_s = other_s and min(step_s, other_s)
                yield steps_of, plan, replace(observed, step_s=step_s, idle_s=idle_s, other_s=other_s)

    def _idled(self, idle_s: float, watched: int, step_s: float) -> float:
        """For how long the device idled in a step because of hooks; ``idle_s``: if the host was the bound throughout.

        Then each hook made the step longer by its time. If the device had work left as the last hook ended, the host
        had got ahead of it, and it has idled in the hooks alone, as events show.
        """
        watch = self._stopwatch
        # It was not watched, or another step is timed by now; or it is too little for the many calls that events take.
        if watched != watch.number or idle_s <= NOTICEABLE * step_s:
            return idle_s
        return max(watch.hooks_s, idle_s - watch.lead_s)


class Pauses:
    """The ``steps`` so far, and the pauses between recorded ones, which grow with the ``changes`` in a row."""

    def __init__(self) -> None:
        self.steps = self.changes = self._record_from = 0

    @property
    def over(self) -> bool:
        """Whether another step may be recorded."""
        return self.steps >= self._record_from

    def back_off(self) -> None:
        """Record again: at first the next step, then after longer and longer pauses."""
        self.changes += 1
        self._record_from = self.steps + min(MOST_REST, 2**self.changes) - 2


class Recording(Generic[S]):
    """Profiles of recorded steps, with the rates of the links as known by then.

    Attributes:
        shape: of the last recorded step; ``settled``: it began with all memory that a step needs beside saved tensors.
        steps: how many steps were recorded.
        calm: whether the allocator had memory enough in the last one. Otherwise it gave its cache back during the step
            and the device idled, so the times describe this step alone.
    """

    def __init__(self, store: ActivationStore, shape: S) -> None:
        self.shape, self.settled = shape, False
        self.steps, self.calm, self._flushes = 0, True, 0
        self._profiler, self._tiers, self._prefetch = store.profiler, store.tiers, store.prefetch
        self._rates: dict[tuple[str, str], float] = {}
        self._cost_s_each = 0.0
        """As in `Link`: of the nearest link."""

    def begin(self) -> None:
        """Record the step that begins."""
        self._profiler.begin()
        self._flushes = self._tiers.allocator_count("num_alloc_retries")

    def profile(self, *, everything_moved: bool) -> Profile | None:
        """The recorded step; None for a forward without a backward, or while the device has not ended the step.

        If ``everything_moved`` in it, it gives the first price of a move: the time for which the device idled in hooks,
        less the host's time that recording took. Steps under a plan correct it.
        """
        if not self._profiler.useful:
            return None
        profile = self._profiler.profile(next(iter(self._tiers.by_device), "cpu"))
        if profile is None:
            return None
        self.steps += 1
        # A retry means that the allocator had to give its cache back.
        self.calm = self._tiers.allocator_count("num_alloc_retries") == self._flushes
        self.look_at_links()
        if everything_moved:
            idle_s = self._profiler.stopwatch.hooks_s - self._profiler.noted_s
            self._price(sum(storage.movable for storage in profile.storages), idle_s)
        return self.on_links(replace(profile, prefetch_bytes=self._prefetch.window.nbytes))

    def look_at_links(self, *, waited: bool = False) -> None:
        """Take over the rates of the links since the last look.

        A link that was not full is at least as fast as its rate. Only if a step ``waited`` for longer than predicted, a
        lower rate replaces the known one.
        """
        for key, (rate, full) in self._tiers.rates().items():
            if full or waited or rate > self._rates.get(key, 0.0):
                self._rates[key] = rate

    def on_links(self, profile: Profile) -> Profile:
        """A step on the links as they are now."""
        links: dict[str, Link | None] = {}
        for name in LINKS:
            new, links[name] = Link.measured(*(self._rates.get((name, way)) for way in WAYS)), getattr(profile, name)
            if new is not None:
                rates = {f"{way}_bytes_per_s": getattr(new, f"{way}_bytes_per_s") for way in WAYS}
                links[name] = replace(links[name] or new, **rates)
        nearest = "disk" if links["host"] is None else "host"
        if (link := links[nearest]) is not None:
            links[nearest] = replace(link, cost_s_each=self._cost_s_each)
        return profile.with_links(**links)

    def corrected(self, recorded: Profile, before: Profile, seen: Observed | None, limits: Limits) -> Profile:
        """The step as it is now, on the present links; ``before``: as it was; ``seen``: the median of the last steps.

        If the new times prove nothing, the old ones stay.
        """
        # The part after backward of one step says nothing of the next ones: it may have been an evaluation.
        recorded = recorded.with_other(before.other_s)
        if recorded.device == "cpu" and seen is not None:
            # One step alone may be twice as long as the next one.
            recorded = recorded.lasting(pace_of(seen, before, limited=True) or before.step_s)
        if not self.calm and recorded.step_s > before.step_s:
            recorded = before  # waits for the allocator look like compute
        elif limits.device_budget is None and recorded.step_s > before.step_s - STEP_CHANGE * before.passes_s:
            # The cost of moving looks like compute, and a plan would fill that time with more moves, without end.
            recorded = before
        if seen is not None and seen.other_s is not None:
            recorded = recorded.with_other(seen.other_s)
        return self.on_links(recorded)

    def learn_idle(self, plan: Plan, seen: Observed) -> None:
        """Learn the cost of moving on a device: it idles while hooks keep the host busy, as long for any storage."""
        if seen.hooks_s:
            self._price(sum(entry.action == Decision.OFFLOAD.value for entry in plan.entries), seen.idle_s)

    def _price(self, storages: int, idle_s: float) -> None:
        if storages:  # hooks run twice for each storage: as it leaves and as it comes back
            self._cost_s_each = max(0.0, idle_s) / (2 * storages)


class StepsUnderPlan:
    """The last steps under one plan, which predicted their length and was made from the step of the given number.

    Attributes:
        seen: their median; None before there are enough.
        count: how many steps there were, also those that a device has not ended yet.
        shows_peak: one of these steps has measured the device's peak (`MemoryBeside.at_peak_bytes`).
    """

    def __init__(self, predicted_s: float | None = None, recorded_at: int = 0) -> None:
        self.predicted_s, self.recorded_at = predicted_s, recorded_at
        self.seen: Observed | None = None
        self.shows_peak = False
        self.count = 0
        self._left = REVIEW_STEPS
        self._steps: deque[Observed] = deque(maxlen=REVIEW_STEPS)

    @property
    def measures(self) -> bool:
        """Whether the next step also measures an unused link and the time of hooks, which few steps do."""
        return self.count % REVIEW_STEPS == 0

    def add(self, observed: Observed, *, limited: bool) -> Observed | None:
        """Add a step; return the median of the last ones if they are enough to compare with the plan.

        One is enough if the device idled in hooks for too long, as no other one is watched. ``limited``: as in
        `surprise`.
        """
        self._steps.append(observed)
        self._left = 0 if _idled(observed, limited) else max(0, self._left - 1)
        if self._left:
            return None
        steps = self._steps
        known = [(o.step_s - o.other_s, o.other_s) for o in steps if o.other_s is not None]
        # The least counts: pauses after some of the steps, or an optimizer after some micro-batches, are no change.
        other_s = min(other_s for _, other_s in known) if 2 * len(known) > len(steps) else None
        passes_s = median(o.step_s for o in steps) if other_s is None else median(passes_s for passes_s, _ in known)
        self.seen = Observed(
            step_s=passes_s + (other_s or 0.0),
            forward_wait_s=median(o.forward_wait_s for o in steps),
            backward_wait_s=median(o.backward_wait_s for o in steps),
            peak_bytes=int(median(o.peak_bytes or 0 for o in steps)),
            hooks_s=sum(o.hooks_s for o in steps),  # only one of them was watched, so a median would be 0
            idle_s=sum(o.idle_s for o in steps),
            other_s=other_s,
        )
        return self.seen


def surprise(plan: Plan, seen: Observed, before: Profile, after: Profile, *, limited: bool) -> str:
    """Describe the first difference between the steps and their plan; empty if there is none.

    Args:
        before: the step that the plan was made from; ``after``: the same step on the present links.
        limited: whether there is a budget, under which a step may wait, and the device may idle because of hooks.
    """
    raw, seen = seen, seen.as_recorded(before)
    if _idled(seen, limited):
        return f"the device idled for {seen.idle_s:.3g} of {seen.step_s:.3g} s while hooks kept the host busy"
    if change := link_change(before, after):
        return change
    most_s = step_change(before) * before.passes_s
    if seen.computed_s < before.step_s - most_s:
        # The recorded step was late itself. A plan fills all of its time, so no step can be shorter than predicted. On
        # an H200 a recorded step that moved everything took 641 ms, and keeping takes 447.
        return f"a step computes for {seen.computed_s:.3g} s, not {before.step_s:.3g} s"
    predicted_s, predicted_bytes = plan.predicted_step_s, plan.predicted_peak_bytes
    late_s = seen.step_s - (predicted_s or seen.step_s)
    if not limited and min(late_s, seen.wait_s) > NO_LOSS * seen.step_s:
        return f"the step takes {seen.step_s:.3g} s, not {predicted_s:.3g} s, as it waits for {seen.wait_s:.3g} s"
    if predicted_s and abs(late_s) > most_s * predicted_s / before.step_s:
        return f"the step takes {seen.step_s:.3g} s, not {predicted_s:.3g} s"
    if predicted_bytes and abs((seen.peak_bytes or 0) - predicted_bytes) > PEAK_CHANGE * predicted_bytes:
        return f"the peak is {format_size(seen.peak_bytes or 0)}, not {format_size(predicted_bytes)}"
    if raw.other_s is not None and before.forwards == 1 and abs(raw.other_s - before.other_s) > most_s:
        return f"the step goes on for {raw.other_s:.3g} s after backward, not {before.other_s:.3g} s"
    return ""


def had_stall(seen: Observed, recorded: Profile) -> bool:
    """Whether a recorded step computed for so much longer than the steps since that something in it stood still.

    It may be a compilation, kernels that were tuned, or a rank that waited for another one. If the whole step were
    scaled to the length of the others, its compute would have too little time on paper, and nothing would be moved. On
    a CPU the bound is lower, because other programs slow all of a step there.
    """
    seen = seen.as_recorded(recorded)
    # A device may compute while the host waits, so that waits are no part to leave out.
    busy_s = seen.computed_s if recorded.device == "cpu" else seen.step_s - seen.idle_s
    other_s = 0.0 if seen.other_s is None or recorded.forwards > 1 else recorded.other_s
    most = 1 / 2 if recorded.device == "cpu" else 1 - LINK_CHANGE
    return busy_s - other_s < most * (recorded.step_s - other_s)


def pace_of(seen: Observed, recorded: Profile, *, limited: bool) -> float | None:
    """How long keeping everything takes, if steps under a plan show that; None if another step has to be recorded.

    Recording takes host time, so the recorded step may have been late, and another one would be as late. Keeping
    everything takes no longer than the steps under a plan, and than these without the time for which the device idled
    in hooks. Their waits do not lower that bound, because a device may compute meanwhile. If the device idled for too
    long, the price of a move has changed, and no recorded step shows more. On the CPU, which does not compute while it
    waits, the median of the steps shows the pace better than another step does. ``limited``: see `surprise`.
    """
    seen = seen.as_recorded(recorded)
    if recorded.device == "cpu":
        changed = abs(seen.computed_s - recorded.step_s) > step_change(recorded) * recorded.passes_s
        return (seen.computed_s or None) if changed else None
    keep_s = seen.step_s - seen.idle_s
    if 0 < keep_s < recorded.step_s - STEP_CHANGE * recorded.passes_s:
        return keep_s
    return recorded.step_s if _idled(seen, limited) else None


def at_pace(seen: Observed, profile: Profile) -> float:
    """The length of steps, on the CPU as if they had computed at the pace of a profile.

    Other programs make a CPU slower or faster by more than a choice of regions does: only the waits are the plan's.
    """
    seen = seen.as_recorded(profile)
    same = profile.device == "cpu" and seen.computed_s
    return seen.step_s * profile.step_s / seen.computed_s if same else seen.step_s


def _idled(seen: Observed, limited: bool) -> bool:
    return not limited and seen.idle_s > NOTICEABLE * seen.step_s


def step_change(profile: Profile) -> float:
    """By which share steps have to be longer or shorter than predicted, so that the machine has changed.

    Other programs use a CPU as well: medians of five steps differed by a fifth within two minutes (by hand).
    """
    return LINK_CHANGE if profile.device == "cpu" else STEP_CHANGE


def differ(one: Profile, other: Profile) -> bool:
    """Whether two steps compute for different times, without the part after backward, which some micro-batches lack."""
    return abs(one.passes_s - other.passes_s) > step_change(other) * other.passes_s


def link_change(before: Profile, after: Profile) -> str:
    """Describe the first link that has changed; empty if there is none."""
    for name in LINKS:
        old, new = getattr(before, name), getattr(after, name)
        if old is None and new is not None:
            return f"{name} bandwidth was measured for the first time, {new.write_bytes_per_s / 1e9:.3g} GB/s"
        for way in WAYS if old is not None else ():
            was, now = (getattr(link, f"{way}_bytes_per_s") for link in (old, new))
            if abs(now / was - 1) > LINK_CHANGE:
                return f"{name} {way} bandwidth went from {was / 1e9:.3g} to {now / 1e9:.3g} GB/s"
    return ""
