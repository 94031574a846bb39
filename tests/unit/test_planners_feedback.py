"""What steps show corrects the profile, and so the next plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actoffload.errors import ConfigError
from actoffload.planning.constants import LINK_CHANGE, WAIT_SHARE
from actoffload.planning.plan import Plan
from actoffload.planning.planners import Limits, Observed, Rate, StepModel, make_planner
from actoffload.planning.planners.feedback import rescaled
from actoffload.planning.profile import Link, Profile
from actoffload.planning.simulator import simulate
from tests.profiles import slow_profile

HALF = Limits(device_budget=slow_profile().baseline_peak_bytes // 2)
EACH = pytest.mark.parametrize(
    "limits", [Limits(), Limits(max_slowdown=0.05), HALF], ids=["none", "slowdown", "budget"]
)


def _disk(profile: Profile) -> Link:
    assert profile.disk is not None
    return profile.disk


def _made(limits: Limits) -> tuple[StepModel, Plan]:
    profile = slow_profile()
    return StepModel(profile, limits), make_planner("auto").plan(profile, limits)


def _seen(real: Profile, plan: Plan, limits: Limits, **changes: Any) -> Observed:
    """A step of what is really the case."""
    seen = simulate(real, plan, limits)
    return Observed(
        step_s=seen.step_s,
        forward_wait_s=changes.pop("forward_wait_s", seen.forward_wait_s),
        backward_wait_s=seen.backward_wait_s,
        peak_bytes=seen.peak_bytes,
        **changes,
    )


def _full(link: Link) -> dict[tuple[str, str], Rate]:
    return {
        ("disk", "write"): Rate(bytes_per_s=link.write_bytes_per_s, full=True),
        ("disk", "read"): Rate(bytes_per_s=link.read_bytes_per_s, full=True),
    }


@EACH
def test_a_step_as_predicted_changes_nothing(limits: Limits) -> None:
    model, plan = _made(limits)
    before = model.profile
    assert model.learn(plan, _seen(before, plan, limits, rates=_full(_disk(before)))) == ""
    assert model.profile.step_s == pytest.approx(before.step_s)
    assert _disk(model.profile).write_bytes_per_s == _disk(before).write_bytes_per_s
    assert _disk(model.profile).cost_s_per_byte == pytest.approx(0.0, abs=1e-15)


@EACH
@pytest.mark.parametrize("factor", [0.25, 0.8])
def test_a_step_that_computes_faster_is_known_at_once(limits: Limits, factor: float) -> None:
    model, plan = _made(limits)
    recorded = model.profile
    real = rescaled(recorded, factor)
    assert model.learn(plan, _seen(real, plan, limits)).startswith("the step computes for ")
    assert model.profile.step_s == pytest.approx(real.step_s)
    assert model.profile.storages[3].birth_s == pytest.approx(factor * recorded.storages[3].birth_s)
    assert model.predict(plan).step_s == pytest.approx(simulate(real, plan, limits).step_s)


def test_slower_compute_is_believed_under_a_budget_and_makes_no_room_without_one() -> None:
    for limits, expected in ((HALF, 2.0), (Limits(), 1.0), (Limits(max_slowdown=0.05), 1.0)):
        model, plan = _made(limits)
        recorded_s = model.profile.step_s
        model.learn(plan, _seen(rescaled(model.profile, 2.0), plan, limits))
        assert model.profile.step_s == pytest.approx(expected * recorded_s)
        if limits.device_budget is None:
            model.learn(plan, _seen(rescaled(slow_profile(), 0.5), plan, limits))
            assert model.profile.step_s == pytest.approx(0.5 * recorded_s)
            if limits.max_slowdown is None:
                model.learn(plan, _seen(rescaled(slow_profile(), 3.0), plan, limits))
                assert model.profile.step_s == pytest.approx(recorded_s), "as long as recorded, but no longer"


def test_what_moving_costs_is_learned_where_it_is_bounded() -> None:
    limits = Limits(max_slowdown=0.05)
    model, plan = _made(limits)
    cost_s = 0.3 * model.profile.step_s / model.profile.saved_bytes
    real = replace(model.profile, disk=replace(_disk(model.profile), cost_s_per_byte=cost_s))
    for _ in range(3):
        model.learn(plan, _seen(real, plan, limits))
    assert _disk(model.profile).cost_s_per_byte == pytest.approx(cost_s, rel=0.1)
    again = make_planner("auto").plan(model.profile, limits)
    assert model.gains(again, plan), "the old one is too slow"
    assert simulate(real, again).step_s <= 1.05 * real.step_s


def test_what_the_device_idles_for_hooks_is_what_moving_costs() -> None:
    model, plan = _made(Limits())
    step_s = model.profile.step_s
    seen = Observed(step_s=1.2 * step_s, hooks_s=0.3 * step_s, idle_s=0.2 * step_s)
    assert "while hooks kept the host busy" in model.learn(plan, seen)
    assert model.profile.step_s == pytest.approx(step_s)
    assert model.predict(plan).cost_s == pytest.approx(0.2 * step_s, rel=0.01)
    again = make_planner("auto").plan(model.profile, Limits())
    assert model.gains(again, plan)
    assert model.predict(again).step_s <= 1.01 * step_s


@pytest.mark.parametrize("limits", [Limits(), HALF], ids=["none", "budget"])
def test_a_link_is_as_fast_as_it_was_seen_full(limits: Limits) -> None:
    model, plan = _made(limits)
    real = replace(model.profile, disk=_disk(model.profile).scaled(0.25))
    assert "disk write bandwidth" in model.learn(plan, _seen(real, plan, limits, rates=_full(_disk(real))))
    assert _disk(model.profile) == _disk(real)
    again = make_planner("auto").plan(model.profile, limits)
    assert model.gains(again, plan)
    assert simulate(real, again, limits).step_s < simulate(real, plan, limits).step_s


def test_a_link_that_was_not_full_is_at_least_as_fast() -> None:
    model, plan = _made(Limits())
    link = _disk(model.profile)
    for factor, known in ((0.2, 1.0), (1 + 0.9 * LINK_CHANGE, 1.0), (3.0, 3.0)):
        rates = {("disk", "write"): Rate(bytes_per_s=factor * link.write_bytes_per_s, full=False)}
        model.learn(plan, _seen(model.profile, plan, Limits(), rates=rates))
        assert _disk(model.profile).write_bytes_per_s == pytest.approx(known * link.write_bytes_per_s)


@EACH
def test_waits_that_nothing_predicted_make_a_link_slower(limits: Limits) -> None:
    model, plan = _made(limits)
    link, seen = _disk(model.profile), _seen(model.profile, plan, limits)
    late_s = 2 * WAIT_SHARE * seen.step_s
    little = replace(seen, step_s=seen.step_s + late_s / 4, backward_wait_s=seen.backward_wait_s + late_s / 4)
    assert model.learn(plan, little) == ""
    late = replace(seen, step_s=seen.step_s + late_s, backward_wait_s=seen.backward_wait_s + late_s)
    assert model.learn(plan, late).startswith("the step waited ")
    assert _disk(model.profile).write_bytes_per_s < 0.95 * link.write_bytes_per_s
    assert limits is not HALF or model.predict(plan).wait_s >= late.wait_s, "it is explained"
    assert model.profile.step_s == pytest.approx(slow_profile().step_s), "what was waited is not computed"
    slow = {("disk", "read"): Rate(bytes_per_s=0.3 * link.read_bytes_per_s, full=False)}
    model.learn(plan, replace(late, step_s=3 * late.step_s, backward_wait_s=3 * late.step_s - seen.step_s, rates=slow))
    assert _disk(model.profile).read_bytes_per_s == pytest.approx(0.3 * link.read_bytes_per_s)
    other = _full(link.scaled(2))
    model.learn(plan, replace(seen, rates=other))
    assert _disk(model.profile).write_bytes_per_s == 2 * link.write_bytes_per_s, "another link is trusted anew"


def test_plans_that_are_alike_do_not_take_turns() -> None:
    model, plan = _made(HALF)
    assert not model.gains(plan, plan)
    slower = make_planner("ssdtrain").plan(model.profile, HALF)
    assert model.predict(slower).step_s > 1.03 * model.predict(plan).step_s
    assert model.gains(plan, slower)
    assert not model.gains(slower, plan)
    over = make_planner("auto").plan(model.profile, Limits(device_budget=model.profile.baseline_peak_bytes))
    assert model.gains(plan, over), "it breaks the budget, however fast it is"


def test_a_step_takes_time() -> None:
    with pytest.raises(ConfigError):
        Observed(step_s=0.0)
