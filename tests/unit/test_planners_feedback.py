"""What a step shows corrects the profile, and so the next plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actoffload.errors import ConfigError
from actoffload.planner import Plan, PlanEntry
from actoffload.planners import Limits, Observed, correct, make_planner, needs_replan
from actoffload.profile import Profile
from actoffload.simulator import simulate
from tests.profiles import slow_profile


def _planned() -> tuple[Profile, Plan]:
    profile = slow_profile()
    return profile, make_planner("auto").plan(profile, Limits(max_slowdown=0.05))


def test_a_step_as_predicted_changes_nothing() -> None:
    profile, plan = _planned()
    seen = simulate(profile, plan)
    observed = Observed(step_s=seen.step_s, backward_wait_s=seen.backward_wait_s, peak_bytes=seen.peak_bytes)
    after = correct(profile, plan, observed)
    assert after.disk is not None
    assert after.disk.cost_s_per_byte == pytest.approx(0.0, abs=1e-15)
    assert needs_replan(profile, plan, observed) == ""


def test_bandwidth_that_is_less_is_learned_and_moves_less() -> None:
    profile, plan = _planned()
    assert profile.disk is not None
    real = replace(profile, disk=profile.disk.scaled(0.1))
    assert real.disk is not None
    for _ in range(6):
        seen = simulate(real, plan)
        observed = Observed(
            step_s=seen.step_s,
            forward_wait_s=seen.forward_wait_s,
            backward_wait_s=seen.backward_wait_s,
            disk_write_bytes_per_s=real.disk.write_bytes_per_s,
            disk_read_bytes_per_s=real.disk.read_bytes_per_s,
        )
        reason = needs_replan(profile, plan, observed)
        profile = correct(profile, plan, observed)
        plan = make_planner("auto").plan(profile, Limits()) if reason else plan
    assert profile.disk is not None
    assert profile.disk.write_bytes_per_s == pytest.approx(real.disk.write_bytes_per_s, rel=0.2)
    assert simulate(real, plan).step_s <= 1.05 * real.step_s


def test_moving_that_costs_compute_time_is_learned() -> None:
    profile, plan = _planned()
    assert profile.disk is not None
    real = replace(profile, disk=replace(profile.disk, cost_s_per_byte=0.3 * profile.step_s / profile.saved_bytes))
    for _ in range(8):
        seen = simulate(real, plan)
        observed = Observed(step_s=seen.step_s, backward_wait_s=seen.backward_wait_s)
        profile = correct(profile, plan, observed)
    assert real.disk is not None
    assert profile.disk is not None
    assert profile.disk.cost_s_per_byte == pytest.approx(real.disk.cost_s_per_byte, rel=0.1)


def test_a_step_that_moved_nothing_corrects_the_times() -> None:
    profile = slow_profile()
    after = correct(profile, None, Observed(step_s=2 * profile.step_s))
    assert after.step_s == pytest.approx(1.5 * profile.step_s)
    assert after.keep_step_s == 2 * profile.step_s
    assert after.storages[3].birth_s == pytest.approx(1.5 * profile.storages[3].birth_s)


def test_when_to_plan_anew() -> None:
    profile, plan = _planned()
    seen = simulate(profile, plan)
    sizes = tuple(entry.nbytes for entry in plan.entries)
    same = Observed(step_s=seen.step_s, backward_wait_s=seen.backward_wait_s, sizes=sizes)
    assert needs_replan(profile, plan, same) == ""
    assert "other sizes" in needs_replan(profile, plan, replace(same, sizes=sizes[1:]))
    assert "bandwidth" in needs_replan(profile, plan, replace(same, disk_write_bytes_per_s=1e8))
    assert "the step took" in needs_replan(profile, plan, replace(same, step_s=1.2 * seen.step_s))
    assert "the peak was" in needs_replan(profile, plan, replace(same, peak_bytes=2 * seen.peak_bytes))
    with pytest.raises(ConfigError):
        Observed(step_s=0.0)


def test_a_plan_without_tiers_is_still_a_plan() -> None:
    old = Plan((PlanEntry(index=0, nbytes=1, action="offload"),))
    new = Plan((PlanEntry(index=0, nbytes=1, action="offload", tier="nvme"),))
    other = Plan((PlanEntry(index=0, nbytes=1, action="offload", tier="host"),))
    assert old.difference(new) == ()
    assert new.difference(other) == (0,)
    with pytest.raises(ConfigError):
        Plan.from_json(new.to_json().replace("nvme", "tape"))
