"""What steps show, taken back into the profile, and why that is reason enough to plan anew. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...errors import ConfigError
from ..plan import Plan
from ..profile import Block, Link, Profile, Storage
from ..simulator import Conditions, Prediction, simulate

WEIGHT = 0.5
"""How far a corrected value goes from the old one towards what was seen."""
BANDWIDTH_CHANGE = 0.25
"""A link that is faster or slower by less than this share is as it was."""
STEP_CHANGE = 0.05
PEAK_CHANGE = 0.05
MAX_COST_SHARE = 2.0
"""Bytes are never taken to cost more compute time than this share of the step, however late it was."""

WAIT_SHARE = 0.02
"""A plan that hides everything expects no waits; where they take more of a step than this, it trusted its links."""
TRUST_LESS = 0.8
COMPUTE_CHANGE = 0.1
"""A step so much shorter or longer than the profile's hides another number of bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One step as it really was. What was not seen is None.

    Attributes:
        step_s: the whole step.
        forward_wait_s: what saving waited for.
        backward_wait_s: what backward waited for.
        host_write_bytes_per_s: device to host.
        host_read_bytes_per_s: host to device.
        disk_write_bytes_per_s: to disk.
        disk_read_bytes_per_s: from disk.
        peak_bytes: the most activation bytes on the device.
        blocks: each block's name and the seconds of its forward and backward, without waits; empty if nobody looked.
    """

    step_s: float
    forward_wait_s: float = 0.0
    backward_wait_s: float = 0.0
    host_write_bytes_per_s: float | None = None
    host_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None
    disk_read_bytes_per_s: float | None = None
    peak_bytes: int | None = None
    blocks: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.step_s < float("inf"):
            raise ConfigError("step_s", self.step_s, "give the seconds that the step took")

    @property
    def wait_s(self) -> float:
        """What the step waited for, all together."""
        return self.forward_wait_s + self.backward_wait_s


def correct(
    profile: Profile, plan: Plan, observed: Observed, conditions: Conditions | None = None
) -> tuple[Profile, str]:
    """The profile after steps under a plan with a bound, and why to plan anew; an empty text: the plan is good.

    Bandwidths move towards what was seen. With those, the rest of the difference between the step and its prediction
    is what moving bytes cost the compute (`Link.cost_s_per_byte`); a step that moved nothing corrects the times.

    Args:
        profile: what the plan was made from.
        plan: what the step ran under.
        observed: the step.
        conditions: the budgets that it ran under.
    """
    changed = _with_links_seen(profile, observed)
    reason = _link_change(profile, changed)
    predicted_s, peak = plan.predicted_step_s, plan.predicted_peak_bytes
    if not reason and predicted_s and abs(observed.step_s - predicted_s) > STEP_CHANGE * predicted_s:
        reason = f"the step took {observed.step_s:.3g} s, not {predicted_s:.3g} s"
    if not reason and peak and (observed.peak_bytes or 0) > (1 + PEAK_CHANGE) * peak:
        reason = f"the peak was {observed.peak_bytes} bytes, not {peak}"
    seen = simulate(changed, plan, conditions, detail=False)
    if seen.moved_bytes > 0:
        return _with_costs(changed, seen, observed), reason
    step_s = observed.step_s - (seen.step_s - seen.compute_s)
    if profile.step_s <= 0 or step_s <= 0:
        return changed, reason
    return rescaled(changed, _towards(profile.step_s, step_s) / profile.step_s), reason


def correct_hiding(profile: Profile, observed: Observed, longest_s: float) -> tuple[Profile, str]:
    """The same for a plan without a bound, under which nothing may wait: its times and its links are corrected.

    The first steps of a process are slow, so the one that was recorded may promise time that later ones do not have.
    A step is never taken to be longer than that one: what moving costs looks like compute, and would else make room for
    more of itself without end.

    Args:
        profile: what the plan was made from.
        observed: the median of some steps under that plan.
        longest_s: the step that was recorded, in seconds.
    """
    computed_s = observed.step_s - observed.wait_s
    goal_s = min(computed_s, longest_s)
    changed = _with_links_seen(profile, observed)
    if profile.step_s > 0 and goal_s > 0 and abs(goal_s - profile.step_s) > COMPUTE_CHANGE * profile.step_s:
        text = f"the step computed for {computed_s:.3g} s, not {profile.step_s:.3g} s"
        return rescaled(changed, goal_s / profile.step_s), text
    if observed.wait_s > WAIT_SHARE * observed.step_s:
        links = {"host": profile.host, "disk": profile.disk}
        slower = {name: link.scaled(TRUST_LESS) for name, link in links.items() if link is not None}
        return profile.with_links(**slower), f"the step waited {observed.wait_s:.3g} of {observed.step_s:.3g} s"
    reason = _link_change(profile, changed)
    return (changed, reason) if reason else (profile, "")


def _with_links_seen(profile: Profile, observed: Observed) -> Profile:
    """The profile with its bandwidths half of the way towards those that were seen."""

    def corrected(link: Link | None, write: float | None, read: float | None) -> Link | None:
        if link is None:
            return None
        write, read = _towards(link.write_bytes_per_s, write), _towards(link.read_bytes_per_s, read)
        return replace(link, write_bytes_per_s=write, read_bytes_per_s=read)

    return replace(
        profile,
        host=corrected(profile.host, observed.host_write_bytes_per_s, observed.host_read_bytes_per_s),
        disk=corrected(profile.disk, observed.disk_write_bytes_per_s, observed.disk_read_bytes_per_s),
    )


def _towards(old: float, seen: float | None) -> float:
    return old if seen is None or not 0 < seen < float("inf") else old + WEIGHT * (seen - old)


def _link_change(profile: Profile, corrected: Profile) -> str:
    for name in ("host", "disk"):
        old, new = getattr(profile, name), getattr(corrected, name)
        for way in ("write", "read") if old is not None else ():
            before, after = (getattr(link, f"{way}_bytes_per_s") for link in (old, new))
            if abs(after - before) > WEIGHT * BANDWIDTH_CHANGE * before:
                return f"{name} {way} bandwidth went from {before / 1e9:.3g} towards {after / 1e9:.3g} GB/s"
    return ""


def _with_costs(profile: Profile, seen: Prediction, observed: Observed) -> Profile:
    """What moving each byte cost the compute, by what the step took beyond its prediction."""
    expected_s = seen.compute_s + seen.recompute_s + seen.cost_s + observed.wait_s
    late_s = min(observed.step_s - expected_s, MAX_COST_SHARE * seen.compute_s)
    each = WEIGHT * late_s / seen.moved_bytes

    def costlier(link: Link | None, nbytes: int) -> Link | None:
        if link is None or nbytes == 0:
            return link
        return replace(link, cost_s_per_byte=max(0.0, link.cost_s_per_byte + each))

    return replace(
        profile,
        host=costlier(profile.host, seen.host_written_bytes + seen.host_read_bytes),
        disk=costlier(profile.disk, seen.disk_written_bytes + seen.disk_read_bytes),
    )


def rescaled(profile: Profile, factor: float) -> Profile:
    """The profile of a step that computes ``factor`` times as long, everywhere alike."""

    def scaled(part: Storage | Block | Profile, *names: str) -> dict[str, Any]:
        times = {name: getattr(part, name) for name in names}
        return {name: None if seconds is None else seconds * factor for name, seconds in times.items()}

    return replace(
        profile,
        storages=tuple(replace(s, **scaled(s, "birth_s", "need_s", "last_need_s")) for s in profile.storages),
        blocks=tuple(replace(b, **scaled(b, "forward_s", "backward_s", "recompute_s")) for b in profile.blocks),
        **scaled(profile, "forward_s", "backward_s", "other_s"),
    )
