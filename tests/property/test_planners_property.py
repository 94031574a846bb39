"""What must hold of plans, over a fixed set of random profiles and over those that Hypothesis finds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actoffload.errors import BudgetError
from actoffload.planning.plan import Plan
from actoffload.planning.planners import Auto, Limits, make_planner
from actoffload.planning.planners.base import Bench
from actoffload.planning.planners.search import every_choice
from actoffload.planning.profile import Link, Profile
from actoffload.planning.simulator import Conditions, simulate
from tests.profiles import random_profile

PROFILES = 208
CHUNK = 16
EXHAUSTIVE = 48
SPEND = 20_000
RECORDED = sorted((Path(__file__).resolve().parents[1] / "recorded").glob("*.json"))
PEERS = ("ssdtrain", "joint")


@pytest.fixture(autouse=True, scope="module")
def _any_gain() -> Iterator[None]:
    """Whatever its size, what can be gained is: these models are small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actoffload.planning.planners.auto.LEAST_GAIN_BYTES", 0)
        yield


def _step_s(plan: Plan) -> float:
    assert plan.predicted_step_s is not None
    return plan.predicted_step_s


def _peak(plan: Plan) -> int:
    assert plan.predicted_peak_bytes is not None
    return plan.predicted_peak_bytes


def _check_without_budget(profile: Profile) -> None:
    """Never slower than keep by more than 1 %, never more memory, and no peer frees more at no loss."""
    plan = Auto(SPEND).plan(profile, Limits())
    seen = simulate(profile, plan, detail=False)
    assert seen.step_s <= 1.01 * profile.step_s
    assert seen.peak_bytes <= profile.baseline_peak_bytes
    for name in PEERS:
        peer = make_planner(name).plan(profile, Limits())
        if _step_s(peer) <= 1.009 * profile.step_s:  # within what auto allows itself
            declined_bytes = 0.01 * profile.baseline_peak_bytes if plan.declined else 0
            assert seen.peak_bytes <= _peak(peer) + declined_bytes, name


def _check_budget(profile: Profile, share: float) -> None:
    """Under a budget between the floor and the peak: never above it, and never slower than a peer."""
    floor = Bench(profile, Limits(device_budget=1)).floor()[0]
    budget = int(floor + share * (profile.baseline_peak_bytes - floor))
    plan = Auto(SPEND).plan(profile, Limits(device_budget=budget))
    seen = simulate(profile, plan, Conditions(device_budget=budget), detail=False)
    assert seen.peak_bytes <= budget
    for name in PEERS:
        try:
            peer = make_planner(name).plan(profile, Limits(device_budget=budget))
        except BudgetError:
            continue
        assert seen.step_s <= _step_s(peer) * (1 + 1e-8), name


@pytest.mark.parametrize("first", range(0, PROFILES, CHUNK))
def test_the_fixed_set(first: int) -> None:
    for seed in range(first, first + CHUNK):
        profile = random_profile(seed)
        _check_without_budget(profile)
        for share in (0.0, random.Random(seed).random()):
            _check_budget(profile, share)


@pytest.mark.parametrize("speed", [0.1, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_what_real_models_did(file: Path, speed: float) -> None:
    """Steps that were recorded, with the disk as it was, slower and faster."""
    recorded = Profile.load(file)
    assert recorded.disk is not None
    assert len(recorded.blocks) >= 4
    profile = recorded.with_links(disk=recorded.disk.scaled(speed))
    _check_without_budget(profile)
    for share in (0.0, 0.1, 0.5):
        _check_budget(profile, share)


HALF = {"bert": 0.67, "gpt": 0.61, "gpt-small": 0.42, "t5": 0.43}
"""Shares of keep's peak that a disk of half the bandwidth is known to reach."""


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_half_of_the_bandwidth_frees_memory_at_no_loss(file: Path) -> None:
    """A disk that takes half of what the forward saves in its time: much of the peak goes, if reads come late."""
    recorded = Profile.load(file)
    rate = recorded.saved_bytes / recorded.step_s  # a forward is about a third of a step: 0.5 of what would take all
    profile = recorded.with_links(disk=Link(write_bytes_per_s=1.5 * rate, read_bytes_per_s=1.5 * rate))
    plan = Auto().plan(profile, Limits(tiers=("nvme",)))
    seen = simulate(profile, plan, detail=False)
    assert seen.step_s <= 1.01 * profile.step_s
    assert seen.peak_bytes <= HALF[file.stem] * profile.baseline_peak_bytes


def test_models_were_recorded() -> None:
    assert {file.stem for file in RECORDED} >= {"gpt", "bert", "t5"}


@pytest.mark.parametrize("seed", range(EXHAUSTIVE))
def test_within_five_percent_of_the_best_that_there_is(seed: int) -> None:
    rng = random.Random(1000 + seed)
    profile = random_profile(10_000 + seed, storages=rng.randint(4, 10), blocks=rng.randint(0, 3))
    floor = Bench(profile, Limits(device_budget=1)).floor()[0]
    budget = int(floor + rng.random() * 0.98 * (profile.baseline_peak_bytes - floor))
    for limits in (Limits(device_budget=budget), Limits(max_slowdown=0.05)):
        bench = Bench(profile, limits)
        choices = every_choice(bench, at_most=20_000)
        if choices is None:  # two tiers and many storages: too many for a test
            continue
        best = min(bench.score(choice) for choice in choices)
        plan = Auto().plan(profile, limits)
        if limits.device_budget is not None:
            assert best[0] == 0
            assert _peak(plan) <= budget or bench.kept.peak_bytes <= budget
            assert _step_s(plan) <= 1.05 * best[1] * profile.step_s
        else:
            assert _step_s(plan) <= 1.05 * profile.step_s
            assert _peak(plan) <= 1.05 * best[1]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(1 << 20, 1 << 40), storages=st.integers(1, 24), share=st.floats(0.0, 1.0))
def test_profiles_that_hypothesis_finds(seed: int, storages: int, share: float) -> None:
    profile = random_profile(seed, storages=storages)
    _check_without_budget(profile)
    _check_budget(profile, share)
    assert Profile.from_json(profile.to_json()) == profile


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 40), slowdown=st.floats(0.0, 1.0))
def test_max_slowdown_is_kept(seed: int, slowdown: float) -> None:
    profile = random_profile(seed, storages=12)
    plan = Auto(SPEND).plan(profile, Limits(max_slowdown=slowdown))
    seen = simulate(profile, plan, detail=False)
    assert seen.step_s <= (1 + slowdown) * profile.step_s * (1 + 1e-9)
    assert seen.peak_bytes <= profile.baseline_peak_bytes
