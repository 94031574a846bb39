"""What a step shows, taken back into the profile; and when that is reason enough to plan anew. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...errors import ConfigError
from ..plan import Plan
from ..profile import Block, Link, Profile, Storage
from ..simulator import Conditions, Prediction, simulate

WEIGHT = 0.5
"""How far a corrected value goes from the old one towards what was seen."""
BANDWIDTH_CHANGE = 0.2
STEP_CHANGE = 0.05
PEAK_CHANGE = 0.05
MAX_COST_SHARE = 2.0
"""Bytes are never taken to cost more compute time than this share of the step, however late it was."""


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


def correct(profile: Profile, plan: Plan | None, observed: Observed, conditions: Conditions | None = None) -> Profile:
    """The profile as it looks after a step under ``plan``.

    Bandwidths move towards what was seen. With those, the rest of the difference between the step and its prediction
    is what moving bytes cost the compute (`Link.cost_s_per_byte`); a step that moved nothing corrects the times.

    Args:
        profile: what the plan was made from.
        plan: what the step ran under; None when nothing was moved.
        observed: the step.
        conditions: the budgets that it ran under.
    """
    changed = correct_links(profile, observed)
    seen = simulate(changed, plan, conditions, detail=False)
    if seen.moved_bytes > 0:
        return _with_costs(changed, seen, observed)
    step_s = observed.step_s - (seen.step_s - seen.compute_s)
    if profile.step_s <= 0 or step_s <= 0:
        return changed
    return replace(rescaled(changed, _towards(profile.step_s, step_s) / profile.step_s), keep_step_s=step_s)


def correct_links(profile: Profile, observed: Observed) -> Profile:
    """The profile with its bandwidths half of the way towards those that were seen."""
    return replace(
        profile,
        host=_corrected(profile.host, observed.host_write_bytes_per_s, observed.host_read_bytes_per_s),
        disk=_corrected(profile.disk, observed.disk_write_bytes_per_s, observed.disk_read_bytes_per_s),
    )


def needs_replan(
    profile: Profile,
    plan: Plan,
    observed: Observed,
    corrected: Profile | None = None,
    conditions: Conditions | None = None,
) -> str:
    """Why a plan should be made anew after a step, or an empty text.

    Args:
        profile: what the plan was made from.
        plan: what the step ran under.
        observed: the step.
        corrected: `correct`'s profile where it is known already.
        conditions: the budgets that the step ran under.
    """
    after = corrected if corrected is not None else correct(profile, plan, observed, conditions)
    for name, old, new in (("host", profile.host, after.host), ("disk", profile.disk, after.disk)):
        if old is not None and new is not None and (text := _link_change(name, old, new)):
            return text
    predicted = plan.predicted_step_s
    if predicted and abs(observed.step_s - predicted) > STEP_CHANGE * predicted:
        return f"the step took {observed.step_s:.3g} s, not {predicted:.3g} s"
    peak = plan.predicted_peak_bytes
    if peak and observed.peak_bytes is not None and observed.peak_bytes > (1 + PEAK_CHANGE) * peak:
        return f"the peak was {observed.peak_bytes} bytes, not {peak}"
    return ""


def _link_change(name: str, old: Link, new: Link) -> str:
    for direction in ("write", "read"):
        key = f"{direction}_bytes_per_s"
        before, now = getattr(old, key), getattr(new, key)
        if abs(now - before) > BANDWIDTH_CHANGE * WEIGHT * before:
            return f"{name} {direction} bandwidth went from {before / 1e9:.3g} to {now / 1e9:.3g} GB/s"
    return ""


def _corrected(link: Link | None, write: float | None, read: float | None) -> Link | None:
    if link is None:
        return None
    return replace(
        link,
        write_bytes_per_s=_towards(link.write_bytes_per_s, write),
        read_bytes_per_s=_towards(link.read_bytes_per_s, read),
    )


def _towards(old: float, seen: float | None) -> float:
    return old if seen is None or not 0 < seen < float("inf") else old + WEIGHT * (seen - old)


def _with_costs(profile: Profile, seen: Prediction, observed: Observed) -> Profile:
    """What moving each byte cost the compute, by what the step took beyond its prediction."""
    waited_s = observed.forward_wait_s + observed.backward_wait_s
    expected_s = seen.compute_s + seen.recompute_s + seen.cost_s + waited_s
    late_s = min(observed.step_s - expected_s, MAX_COST_SHARE * seen.compute_s)
    crossed = seen.host_written_bytes + seen.host_read_bytes
    on_disk = seen.disk_written_bytes + seen.disk_read_bytes
    each = WEIGHT * late_s / (crossed + on_disk)
    return replace(profile, host=_costlier(profile.host, each, crossed), disk=_costlier(profile.disk, each, on_disk))


def _costlier(link: Link | None, each: float, nbytes: int) -> Link | None:
    if link is None or nbytes == 0:
        return link
    return replace(link, cost_s_per_byte=max(0.0, link.cost_s_per_byte + each))


def rescaled(profile: Profile, factor: float) -> Profile:
    """The profile of a step that computes ``factor`` times as long, everywhere alike."""

    def scaled(part: Storage | Block | Profile, *names: str) -> dict[str, Any]:
        times = {name: getattr(part, name) for name in names}
        return {name: None if seconds is None else seconds * factor for name, seconds in times.items()}

    return replace(
        profile,
        storages=tuple(replace(s, **scaled(s, "birth_s", "need_s", "last_need_s")) for s in profile.storages),
        blocks=tuple(replace(b, **scaled(b, "forward_s", "backward_s", "recompute_s")) for b in profile.blocks),
        **scaled(profile, "forward_s", "backward_s", "other_s", "keep_step_s"),
    )
