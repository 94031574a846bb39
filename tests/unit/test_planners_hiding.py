"""Without a bound nothing may wait: what the steps show corrects the time that there is to hide in, and the links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actoffload.planners import Limits, Observed, make_planner
from actoffload.planners.hiding import STEP_CHANGE, WAIT_SHARE, correct_hiding
from actoffload.profile import Profile
from actoffload.simulator import simulate
from tests.profiles import slow_profile


def _seen(profile: Profile, share: float = 1.0, waited: float = 0.0) -> Observed:
    step_s = share * profile.step_s
    each_s = waited * step_s / 2
    return Observed(step_s=step_s + 2 * each_s, forward_wait_s=each_s, backward_wait_s=each_s)


def test_a_step_as_recorded_changes_nothing() -> None:
    profile = slow_profile()
    for share in (1.0, 1 - 0.9 * STEP_CHANGE, 3.0):
        assert correct_hiding(profile, _seen(profile, share), profile.step_s) == (profile, "")


def test_steps_that_are_shorter_than_the_recorded_one_leave_less_time_to_hide_in() -> None:
    profile = slow_profile()
    plan = make_planner("auto").plan(profile, Limits())
    after, reason = correct_hiding(profile, _seen(profile, 0.6), profile.step_s)
    assert reason.startswith("the step computed for ")
    assert after.step_s == pytest.approx(0.6 * profile.step_s)
    assert [s.birth_s for s in after.storages] == pytest.approx([0.6 * s.birth_s for s in profile.storages])
    assert (after.host, after.disk) == (profile.host, profile.disk)
    again = make_planner("auto").plan(after, Limits())
    assert 0 < again.offloaded_bytes < plan.offloaded_bytes
    old, new = simulate(after, plan), simulate(after, again)
    assert (new.step_s, new.peak_bytes) <= (old.step_s, old.peak_bytes), "the first plan is too much for such steps"


def test_a_step_is_taken_to_be_longer_again_but_never_than_the_recorded_one() -> None:
    recorded = slow_profile()
    profile, _ = correct_hiding(recorded, _seen(recorded, 0.5), recorded.step_s)
    after, reason = correct_hiding(profile, _seen(recorded, 1.7), recorded.step_s)
    assert reason
    assert after.step_s == pytest.approx(recorded.step_s)


def test_what_was_waited_is_not_computed() -> None:
    profile = slow_profile()
    assert profile.disk is not None
    after, reason = correct_hiding(profile, _seen(profile, waited=0.5), profile.step_s)
    assert reason.startswith("the step waited ")
    assert after == replace(profile, disk=profile.disk.scaled(0.8))
    assert correct_hiding(profile, _seen(profile, waited=0.5 * WAIT_SHARE), profile.step_s) == (profile, "")


def test_steps_that_wait_because_they_are_shorter_say_nothing_of_the_links() -> None:
    profile = slow_profile()
    after, reason = correct_hiding(profile, _seen(profile, 0.6, waited=0.3), profile.step_s)
    assert reason.startswith("the step computed for ")
    assert after.step_s == pytest.approx(0.6 * profile.step_s)
    assert after.disk == profile.disk


def test_a_link_that_was_full_at_another_rate_is_corrected_half_of_the_way() -> None:
    profile = slow_profile()
    assert profile.disk is not None
    rate = profile.disk.read_bytes_per_s
    after, reason = correct_hiding(profile, replace(_seen(profile), disk_read_bytes_per_s=2 * rate), profile.step_s)
    assert "disk read bandwidth" in reason
    assert after.disk == replace(profile.disk, read_bytes_per_s=1.5 * rate)
    near = replace(_seen(profile), disk_read_bytes_per_s=1.2 * rate)
    assert correct_hiding(profile, near, profile.step_s) == (profile, "")
