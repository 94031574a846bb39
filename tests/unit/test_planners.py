"""Each planner does what it is named after; what is planned is what the simulator then sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actoffload.errors import BudgetError, ConfigError
from actoffload.planning.plan import Plan
from actoffload.planning.planners import (
    PLANNERS,
    Limits,
    Planner,
    make_planner,
)
from actoffload.planning.planners.base import Bench
from actoffload.planning.planners.joint import ranking
from actoffload.planning.profile import Link, Profile, Storage
from actoffload.planning.simulator import Conditions, simulate
from actoffload.policy import Decision, TensorFacts
from tests.profiles import (
    Accelerator,
    link,
    random_profile,
    slow_profile,
    transformer_profile,
)

A100_FLOPS = 90e12
"""What an A100 at its base clock reaches, as SSDTrain's evaluation ran it."""
SHAPES = [(8192, 4), (12288, 3), (16384, 2)]
NAMES = sorted(PLANNERS)


def _a100(write_gb_s: float, read_gb_s: float | None = None) -> Accelerator:
    return Accelerator(name="A100", flops=A100_FLOPS, host=None, disk=link(write_gb_s, read_gb_s))


def _ssdtrain_profile(width: int, layers: int, write_gb_s: float) -> Profile:
    """SSDTrain's evaluation: batch 16, sequences of 1024, tensor parallel over two devices."""
    return transformer_profile(width, layers, 16, shards=2, accelerator=_a100(write_gb_s))


def test_every_planner_is_found_by_its_name() -> None:
    for name in NAMES:
        planner = make_planner(name)
        assert isinstance(planner, Planner)
        assert planner.name == name
    with pytest.raises(ConfigError) as caught:
        make_planner("best")
    assert caught.value.field == "planner"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(12))
def test_what_is_planned_is_what_is_seen(name: str, seed: int) -> None:
    profile = random_profile(seed)
    floor = Bench(profile, Limits(device_budget=1)).floor()[0]
    budget = (floor + profile.baseline_peak_bytes) // 2
    for limits in (Limits(), Limits(max_slowdown=0.1), Limits(device_budget=budget)):
        try:
            plan = make_planner(name).plan(profile, limits)
        except BudgetError:
            assert name != "auto"
            continue
        seen = simulate(profile, plan, Conditions(device_budget=limits.device_budget))
        assert (seen.step_s, seen.peak_bytes) == (plan.predicted_step_s, plan.predicted_peak_bytes)
        assert Plan.from_json(plan.to_json()) == plan
        assert plan.planner == name
        assert [entry.index for entry in plan.entries] == list(range(len(plan.entries)))
        assert make_planner(name).plan(profile, limits) == plan  # deterministic


@pytest.mark.parametrize(("width", "layers"), SHAPES)
def test_the_shapes_of_ssdtrain_with_enough_bandwidth(width: int, layers: int) -> None:
    profile = _ssdtrain_profile(width, layers, write_gb_s=24.0)  # four drives of 6 GB/s
    for name in ("ssdtrain", "auto"):
        plan = make_planner(name).plan(profile, Limits())
        assert plan.predicted_step_s is not None
        assert plan.predicted_peak_bytes is not None
        assert plan.predicted_step_s <= 1.01 * profile.step_s
        assert plan.predicted_peak_bytes <= 0.72 * profile.baseline_peak_bytes  # the paper: 28 to 40 % less
        assert plan.offloaded_bytes > 0.3 * profile.saved_bytes


@pytest.mark.parametrize(("width", "layers"), SHAPES)
def test_without_enough_bandwidth_a_part_moves_and_the_tail_stays(width: int, layers: int) -> None:
    profile = _ssdtrain_profile(width, layers, write_gb_s=3.0)
    plan = make_planner("ssdtrain").plan(profile, Limits())
    actions = [entry.action for entry in plan.entries]
    assert 0 < plan.offloaded_bytes < 0.6 * profile.saved_bytes
    moved = actions.count("offload")
    assert actions == ["offload"] * moved + ["keep"] * (len(actions) - moved)
    auto = make_planner("auto").plan(profile, Limits())
    assert auto.predicted_step_s is not None
    assert auto.predicted_step_s <= 1.01 * profile.step_s
    assert 0 < auto.offloaded_bytes < profile.saved_bytes
    assert auto.entries[-1].action == "keep"
    bench = Bench(profile, Limits())
    everything = bench.predict(bench.offload_all(), budget=profile.baseline_peak_bytes // 5)
    assert everything.step_s > 1.2 * profile.step_s  # what auto avoids


def test_a_drive_that_reads_slowly_is_asked_early_enough() -> None:
    drive = Accelerator(name="one drive", flops=140e12, host=None, disk=link(3, 1.5))
    profile = transformer_profile(8192, 25, 1, accelerator=drive)
    plan = make_planner("auto").plan(profile, Limits())
    assert plan.predicted_step_s is not None
    assert plan.predicted_peak_bytes is not None
    assert plan.predicted_step_s <= 1.01 * profile.step_s
    assert plan.predicted_peak_bytes <= 0.9 * profile.baseline_peak_bytes


def test_ssdtrain_cuts_by_reads_too() -> None:
    fast = make_planner("ssdtrain").plan(transformer_profile(8192, 4, 16, accelerator=_a100(6.0, 12.0)), Limits())
    slow = make_planner("ssdtrain").plan(transformer_profile(8192, 4, 16, accelerator=_a100(6.0, 1.0)), Limits())
    assert slow.offloaded_bytes < fast.offloaded_bytes


def test_joint_recomputes_what_is_cheapest_by_the_byte() -> None:
    profile = slow_profile()
    cheap = tuple(
        replace(block, recompute_s=block.recompute_s * (0.1 if number == 3 else 1.0))
        for number, block in enumerate(profile.blocks)
    )
    profile = replace(profile, blocks=cheap, disk=None)
    bench = Bench(profile, Limits(device_budget=1))
    assert ranking(bench, earliest_first=True)[0] == 3
    assert ranking(bench, earliest_first=True)[1:] == [0, 1, 2, 4, 5]
    assert ranking(bench, earliest_first=False)[1:] == [5, 4, 2, 1, 0]
    budget = int(0.9 * profile.baseline_peak_bytes)
    plan = make_planner("joint").plan(profile, Limits(device_budget=budget))
    assert plan.recompute == ("layers.3",)
    assert plan.offloaded_bytes == 0


def test_joint_mixes_all_three_under_a_tight_budget() -> None:
    profile = transformer_profile(8192, 12, 4, accelerator=_a100(3.0))
    budget = profile.baseline_peak_bytes // 4
    plan = make_planner("auto").plan(profile, Limits(device_budget=budget))
    assert plan.recompute
    assert plan.offloaded_bytes > 0
    assert plan.kept_bytes > 0
    assert make_planner("auto").plan(profile, Limits()).recompute == (), "nobody allowed what recomputing costs"
    only = make_planner("auto").plan(profile, Limits(device_budget=budget, recompute=False))
    assert plan.predicted_step_s is not None
    assert only.predicted_step_s is not None
    assert plan.predicted_step_s < only.predicted_step_s
    assert only.recompute == ()


def test_a_plan_is_followed_by_place_where_blocks_are_recomputed() -> None:
    profile = transformer_profile(8192, 12, 4, accelerator=_a100(3.0))
    plan = make_planner("auto").plan(profile, Limits(device_budget=profile.baseline_peak_bytes // 4))
    saved = sum(1 for s in profile.storages if s.block is None or profile.blocks[s.block].name not in plan.recompute)
    assert len(plan.entries) == saved + len(plan.recompute)  # of each recomputed block only its input
    for entry in plan.entries:
        facts = TensorFacts(
            nbytes=entry.nbytes, shape=(), dtype="x", device="cuda", module=entry.module, index=entry.index
        )
        assert plan.decide(facts) is (Decision.KEEP if entry.action == "keep" else Decision.OFFLOAD)
        assert plan.tier(facts) == ("" if entry.action == "keep" else "nvme")


def test_tiers_are_chosen() -> None:
    accelerator = Accelerator(name="a", flops=2e13, host=link(20), disk=link(5))
    profile = transformer_profile(4096, 8, 8, accelerator=accelerator)
    host = profile.saved_bytes // 4
    plan = make_planner("auto").plan(profile, Limits(host_budget=host))
    tiers = [entry.tier for entry in plan.entries if entry.action == "offload"]
    assert {"host", "nvme"} <= set(tiers)
    seen = simulate(profile, plan, Conditions(host_budget=host))
    assert seen.host_peak_bytes <= host
    assert seen.pressed == ()
    for tier in ("host", "nvme"):
        only = make_planner("auto").plan(profile, Limits(tiers=(tier,)))
        assert {entry.tier for entry in only.entries if entry.action == "offload"} == {tier}
    assert make_planner("auto").plan(profile, Limits(tiers=())).declined
    direct = replace(profile, host=None)
    full = make_planner("auto").plan(direct, Limits(nvme_budget=host))
    assert 0 < simulate(direct, full, Conditions(nvme_budget=host)).disk_peak_bytes <= host
    assert full.offloaded_bytes <= host


# -- budgets and verdicts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_budget_that_cannot_be_met_names_the_floor(name: str) -> None:
    profile = slow_profile()
    with pytest.raises(BudgetError) as caught:
        make_planner(name).plan(profile, Limits(device_budget=1 << 20))
    error = caught.value
    assert error.budget_bytes == 1 << 20
    assert 1 << 20 < error.floor_bytes < profile.baseline_peak_bytes
    assert f"the floor is {error.floor_bytes} bytes" in str(error)
    if name == "auto":
        plan = make_planner(name).plan(profile, Limits(device_budget=error.floor_bytes))
        assert plan.predicted_peak_bytes is not None
        assert plan.predicted_peak_bytes <= error.floor_bytes


def test_a_budget_with_nothing_to_move_names_the_floor() -> None:
    profile = slow_profile()
    storages = tuple(replace(storage, block=None) for storage in profile.storages)
    profile = replace(profile, disk=None, blocks=(), storages=storages)
    with pytest.raises(BudgetError, match="floor"):
        make_planner("auto").plan(profile, Limits(device_budget=1))


def test_declined_says_why() -> None:
    auto = make_planner("auto")
    profile = slow_profile()
    fits = auto.plan(profile, Limits(device_budget=profile.baseline_peak_bytes))
    assert fits.declined.startswith("all fits")
    still = replace(profile, storages=tuple(replace(s, kept="below min_bytes") for s in profile.storages))
    assert "may move" in auto.plan(still, Limits()).declined
    accelerator = Accelerator(name="slow reads", flops=1e12, host=None, disk=link(3.0, 1e-4))
    slow = transformer_profile(1024, 12, 4, sequence=512, accelerator=accelerator, vocabulary=1000)
    assert "slows the step by more than 1.0%" in auto.plan(slow, Limits()).declined
    brief = Storage(index=0, nbytes=100, birth_s=0.0, need_s=0.1, last_need_s=0.1, module="loss")
    disk = Link(write_bytes_per_s=1e9, read_bytes_per_s=1)
    once = auto.plan(Profile(storages=(brief,), forward_s=1.0, backward_s=1.0, disk=disk), Limits())
    assert "lowers the peak by less than 16.0 MiB" in once.declined
    assert "loss" in once.declined
    for plan in (fits, once, auto.plan(still, Limits()), auto.plan(Profile(storages=()), Limits())):
        assert (plan.offloaded_bytes, plan.recompute) == (0, ())
        assert plan.declined


def test_more_slow_down_frees_more() -> None:
    profile = transformer_profile(8192, 8, 8, accelerator=_a100(3.0))
    peaks = []
    for slowdown in (None, 0.02, 0.1, 0.3):
        plan = make_planner("auto").plan(profile, Limits(max_slowdown=slowdown))
        assert plan.predicted_step_s is not None
        assert plan.predicted_step_s <= profile.step_s * (1 + (slowdown or 0.01))
        peaks.append(plan.predicted_peak_bytes or 0)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.8 * peaks[0]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"device_budget": -1}, "device_budget"),
        ({"host_budget": 1.5}, "host_budget"),
        ({"nvme_budget": True}, "nvme_budget"),
        ({"max_slowdown": -0.1}, "max_slowdown"),
        ({"max_slowdown": float("nan")}, "max_slowdown"),
        ({"tiers": ("tape",)}, "tiers"),
    ],
)
def test_limits_are_checked(values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Limits(**values)
    assert caught.value.field == field
