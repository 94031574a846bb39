"""What steps show corrects the profile, and so the next plan: where a bound is set, and where nothing may wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actoffload.errors import ConfigError
from actoffload.planning.plan import Plan
from actoffload.planning.planners import Limits, Observed, correct, make_planner
from actoffload.planning.planners.feedback import COMPUTE_CHANGE, WAIT_SHARE, correct_hiding
from actoffload.planning.profile import Link, Profile
from actoffload.planning.simulator import simulate
from tests.profiles import slow_profile


def _disk(profile: Profile) -> Link:
    assert profile.disk is not None
    return profile.disk


# -- with a bound: the step as a whole counts -------------------------------------------------------------------------


def _planned() -> tuple[Profile, Plan]:
    profile = slow_profile()
    return profile, make_planner("auto").plan(profile, Limits(max_slowdown=0.05))


def test_a_step_as_predicted_changes_nothing() -> None:
    profile, plan = _planned()
    seen = simulate(profile, plan)
    observed = Observed(step_s=seen.step_s, backward_wait_s=seen.backward_wait_s, peak_bytes=seen.peak_bytes)
    after, reason = correct(profile, plan, observed)
    assert _disk(after).cost_s_per_byte == pytest.approx(0.0, abs=1e-15)
    assert reason == ""


def test_bandwidth_that_is_less_is_learned_and_moves_less() -> None:
    profile, plan = _planned()
    real = replace(profile, disk=_disk(profile).scaled(0.1))
    for _ in range(6):
        seen = simulate(real, plan)
        observed = Observed(
            step_s=seen.step_s,
            forward_wait_s=seen.forward_wait_s,
            backward_wait_s=seen.backward_wait_s,
            disk_write_bytes_per_s=_disk(real).write_bytes_per_s,
            disk_read_bytes_per_s=_disk(real).read_bytes_per_s,
        )
        profile, reason = correct(profile, plan, observed)
        plan = make_planner("auto").plan(profile, Limits()) if reason else plan
    assert _disk(profile).write_bytes_per_s == pytest.approx(_disk(real).write_bytes_per_s, rel=0.2)
    assert simulate(real, plan).step_s <= 1.05 * real.step_s


def test_moving_that_costs_compute_time_is_learned() -> None:
    profile, plan = _planned()
    cost_s = 0.3 * profile.step_s / profile.saved_bytes
    real = replace(profile, disk=replace(_disk(profile), cost_s_per_byte=cost_s))
    for _ in range(8):
        seen = simulate(real, plan)
        profile, _ = correct(profile, plan, Observed(step_s=seen.step_s, backward_wait_s=seen.backward_wait_s))
    assert _disk(profile).cost_s_per_byte == pytest.approx(cost_s, rel=0.1)


def test_a_step_that_moved_nothing_corrects_the_times() -> None:
    profile = slow_profile()
    declined = make_planner("auto").plan(profile, Limits(device_budget=profile.baseline_peak_bytes))
    after, _ = correct(profile, declined, Observed(step_s=2 * profile.step_s))
    assert after.step_s == pytest.approx(1.5 * profile.step_s)
    assert after.storages[3].birth_s == pytest.approx(1.5 * profile.storages[3].birth_s)


def test_when_to_plan_anew() -> None:
    profile, plan = _planned()
    seen = simulate(profile, plan)
    same = Observed(step_s=seen.step_s, backward_wait_s=seen.backward_wait_s)
    assert correct(profile, plan, same)[1] == ""
    assert "bandwidth" in correct(profile, plan, replace(same, disk_write_bytes_per_s=1e8))[1]
    assert "the step took" in correct(profile, plan, replace(same, step_s=1.2 * seen.step_s))[1]
    assert "the peak was" in correct(profile, plan, replace(same, peak_bytes=2 * seen.peak_bytes))[1]
    with pytest.raises(ConfigError):
        Observed(step_s=0.0)


# -- without a bound: nothing may wait --------------------------------------------------------------------------------


def _seen(profile: Profile, share: float = 1.0, waited: float = 0.0) -> Observed:
    step_s = share * profile.step_s
    each_s = waited * step_s / 2
    return Observed(step_s=step_s + 2 * each_s, forward_wait_s=each_s, backward_wait_s=each_s)


def test_a_step_as_recorded_hides_as_much() -> None:
    profile = slow_profile()
    for share in (1.0, 1 - 0.9 * COMPUTE_CHANGE, 3.0):
        assert correct_hiding(profile, _seen(profile, share), profile.step_s) == (profile, "")


def test_steps_that_are_shorter_than_the_recorded_one_leave_less_time_to_hide_in() -> None:
    profile = slow_profile()
    plan = make_planner("auto").plan(profile, Limits())
    after, reason = correct_hiding(profile, _seen(profile, 0.6, waited=0.3), profile.step_s)
    assert reason.startswith("the step computed for ")
    assert after.step_s == pytest.approx(0.6 * profile.step_s)
    assert [s.birth_s for s in after.storages] == pytest.approx([0.6 * s.birth_s for s in profile.storages])
    assert after.disk == profile.disk, "waits of shorter steps say nothing of the links"
    again = make_planner("auto").plan(after, Limits())
    assert 0 < again.offloaded_bytes < plan.offloaded_bytes
    old, new = simulate(after, plan), simulate(after, again)
    assert (new.step_s, new.peak_bytes) <= (old.step_s, old.peak_bytes), "the first plan is too much for such steps"


def test_what_was_waited_is_not_computed() -> None:
    profile = slow_profile()
    after, reason = correct_hiding(profile, _seen(profile, waited=0.5), profile.step_s)
    assert reason.startswith("the step waited ")
    assert after == replace(profile, disk=_disk(profile).scaled(0.8))
    assert correct_hiding(profile, _seen(profile, waited=0.5 * WAIT_SHARE), profile.step_s) == (profile, "")


def test_a_link_that_was_full_at_another_rate_is_corrected_half_of_the_way() -> None:
    profile = slow_profile()
    rate = _disk(profile).read_bytes_per_s
    after, reason = correct_hiding(profile, replace(_seen(profile), disk_read_bytes_per_s=2 * rate), profile.step_s)
    assert "disk read bandwidth" in reason
    assert after.disk == replace(_disk(profile), read_bytes_per_s=1.5 * rate)
    near = replace(_seen(profile), disk_read_bytes_per_s=1.2 * rate)
    assert correct_hiding(profile, near, profile.step_s) == (profile, "")
