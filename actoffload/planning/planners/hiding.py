"""What steps show a plan without a bound, under which nothing may wait: its links and its times are corrected. Pure."""

from __future__ import annotations

from ..profile import Profile
from .feedback import Observed, correct_links, rescaled

WAIT_SHARE = 0.02
"""A plan that hides everything expects no waits; where they take more of a step than this, it trusted its links."""
TRUST_LESS = 0.8
BANDWIDTH_CHANGE = 0.25
STEP_CHANGE = 0.1
"""A step so much shorter or longer than the profile's hides another number of bytes."""


def correct_hiding(profile: Profile, observed: Observed, longest_s: float) -> tuple[Profile, str]:
    """The profile that the next plan should be made from, and why there should be one; an empty text: as it is.

    The first steps of a process are slow, so the one that was recorded may promise time that later ones do not have.
    A step is never taken to be longer than that one: what moving costs looks like compute, and would else make room for
    more of itself without end.

    Args:
        profile: what the plan was made from.
        observed: the median of some steps under that plan.
        longest_s: the step that was recorded, in seconds.
    """
    waited_s = observed.forward_wait_s + observed.backward_wait_s
    computed_s = observed.step_s - waited_s
    goal_s = min(computed_s, longest_s)
    if profile.step_s > 0 and goal_s > 0 and abs(goal_s - profile.step_s) > STEP_CHANGE * profile.step_s:
        text = f"the step computed for {computed_s:.3g} s, not {profile.step_s:.3g} s"
        return rescaled(correct_links(profile, observed), goal_s / profile.step_s), text
    if waited_s > WAIT_SHARE * observed.step_s:
        links = {"host": profile.host, "disk": profile.disk}
        slower = {name: link.scaled(TRUST_LESS) for name, link in links.items() if link is not None}
        return profile.with_links(**slower), f"the step waited {waited_s:.3g} of {observed.step_s:.3g} s"
    return _by_links(profile, correct_links(profile, observed))


def _by_links(profile: Profile, corrected: Profile) -> tuple[Profile, str]:
    for name in ("host", "disk"):
        old, new = getattr(profile, name), getattr(corrected, name)
        for way in ("write", "read") if old is not None else ():
            before, now_ = (getattr(link, f"{way}_bytes_per_s") for link in (old, new))
            if abs(now_ - before) > BANDWIDTH_CHANGE / 2 * before:  # corrected goes half of the way
                text = f"{name} {way} bandwidth went from {before / 1e9:.3g} towards {now_ / 1e9:.3g} GB/s"
                return corrected, text
    return profile, ""
