"""Bounds that every plan keeps, over a fixed set of random profiles and over profiles that Hypothesis finds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actoffload.planning.profile import Link, Profile
from actoffload.planning.search import Limits, Search, best, plan
from actoffload.planning.simulator import Conditions, simulate
from tests.exhaustive import every_choice, every_mix
from tests.planner_baselines import predict_cut
from tests.profiles import checkpointed, predicted_peak, predicted_s, random_profile, scaled

PROFILES = 160
CHUNK = 16
EXHAUSTIVE = 40
RECORDED = Path(__file__).resolve().parents[1] / "recorded"


@pytest.fixture(autouse=True, scope="module")
def _any_gain() -> Iterator[None]:
    """Plans take every gain, however small, because these models are small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actoffload.planning.search.LEAST_GAIN_BYTES", 0)
        yield


def _check_without_budget(profile: Profile) -> None:
    """A plan is at most 1 % slower than keep, takes no more memory, and the published cut frees no more at no loss."""
    made = plan(profile, Limits())
    seen = simulate(profile, made, detail=False)
    assert seen.step_s <= 1.01 * profile.step_s
    assert seen.peak_bytes <= profile.baseline_peak_bytes
    peer = predict_cut(profile, Limits())
    if peer.step_s <= 1.009 * profile.step_s:  # the slowdown that the planner allows itself
        declined_bytes = 0.01 * profile.baseline_peak_bytes if made.declined else 0
        assert seen.peak_bytes <= 1.02 * peer.peak_bytes + declined_bytes


def _check_budget(profile: Profile, share: float) -> None:
    """A plan never exceeds a budget between the floor and the peak, and is hardly slower than the published cut."""
    lowest = Search(profile, Limits()).floor()
    budget = int(lowest + share * (profile.baseline_peak_bytes - lowest))
    seen = simulate(
        profile, plan(profile, Limits(device_budget=budget)), Conditions(device_budget=budget), detail=False
    )
    assert seen.peak_bytes <= budget
    peer = predict_cut(profile, Limits(device_budget=budget))
    if peer.peak_bytes <= budget:
        assert seen.step_s <= 1.02 * peer.step_s


@pytest.mark.sampled(4)
@pytest.mark.parametrize("first", range(0, PROFILES, CHUNK))
def test_the_fixed_set(first: int) -> None:
    for seed in range(first, first + CHUNK):
        profile = random_profile(seed)
        _check_without_budget(profile)
        for share in (0.0, random.Random(seed).random()):
            _check_budget(profile, share)


REAL = [
    pytest.param(file, speed, id=f"{file.stem}-{speed}", marks=[pytest.mark.thorough] if (row + column) % 2 else [])
    for row, file in enumerate(sorted(RECORDED.glob("*.json")))
    for column, speed in enumerate((0.1, 0.5, 1.0, 4.0))
]
"""Each model on every second disk, and each disk with every second model; with ``--thorough`` all."""


@pytest.mark.parametrize(("file", "speed"), REAL)
def test_steps_of_real_models(file: Path, speed: float) -> None:
    """Recorded steps, with the disk as recorded, slower and faster; and with their blocks checkpointed."""
    recorded = Profile.load(file)
    assert recorded.disk is not None
    profile = recorded.with_links(disk=scaled(recorded.disk, speed))
    _check_without_budget(profile)
    for share in (0.0, 0.1, 0.5):
        _check_budget(profile, share)
    base = checkpointed(profile)
    assert len(base.regions) >= 4
    for more in (1.0, 1.5):
        limits = Limits(device_budget=int(more * base.baseline_peak_bytes))
        _, made = best(base, limits)
        assert predicted_peak(made) <= more * base.baseline_peak_bytes
        assert predicted_s(made) <= base.step_s


HALF = {"bert": 0.67, "gpt": 0.61, "gpt-small": 0.42, "t5": 0.43}
"""Shares of keep's peak that a disk of half the bandwidth is known to reach."""


@pytest.mark.parametrize(("model", "share"), HALF.items())
def test_half_of_the_bandwidth_frees_memory_at_no_loss(model: str, share: float) -> None:
    """A disk that writes half of the saved bytes during the forward frees much of the peak, since reads may be late."""
    recorded = Profile.load(RECORDED / f"{model}.json")
    rate = recorded.saved_bytes / recorded.step_s  # a forward is a third of a step: 0.5 of the rate that writes all
    profile = recorded.with_links(disk=Link(write_bytes_per_s=1.5 * rate, read_bytes_per_s=1.5 * rate))
    seen = simulate(profile, plan(profile, Limits(tiers=("nvme",))), detail=False)
    assert seen.step_s <= 1.01 * profile.step_s
    assert seen.peak_bytes <= share * profile.baseline_peak_bytes


# -- against all choices that there are -------------------------------------------------------------------------------


def _one_tier(seed: int) -> Profile:
    profile = random_profile(10_000 + seed, storages=random.Random(1000 + seed).randint(4, 10), blocks=0)
    return replace(profile, disk=None) if profile.host is not None else profile


def test_near_the_best_plan_that_there_is() -> None:
    """Among random steps of a few storages, where each one weighs, hardly any takes 1.10 × the best of all choices."""
    times: list[float] = []
    peaks: list[float] = []
    for seed in range(EXHAUSTIVE):
        profile = _one_tier(seed)
        lowest = Search(profile, Limits()).floor()
        budget = int(lowest + random.Random(seed).random() * 0.98 * (profile.baseline_peak_bytes - lowest))
        for limits, ratios in ((Limits(device_budget=budget), times), (Limits(), peaks)):
            search = Search(profile, limits)
            choices = every_choice(search, at_most=2_000)
            assert choices is not None
            over, least, _ = min(map(search.score, choices))
            assert over == 0
            made = plan(profile, limits)
            if limits.device_budget is not None:
                assert predicted_peak(made) <= budget or search.kept.peak_bytes <= budget
                ratios.append(predicted_s(made) / least)
            else:
                assert predicted_s(made) <= 1.01 * profile.step_s
                ratios.append(predicted_peak(made) / least)
    for ratios in (times, peaks):
        assert sum(ratio > 1.10 for ratio in ratios) <= 0.05 * EXHAUSTIVE, sorted(ratios)[-5:]
        assert max(ratios) <= 1.30


@pytest.mark.parametrize("share", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("speed", [0.1, 0.5, 1.0, 4.0])
def test_within_five_percent_of_the_best_mix(speed: float, share: float) -> None:
    """Regions and cuts are chosen together, against every set of regions with every cut."""
    for seed in range(6):
        base = checkpointed(random_profile(seed, storages=16, blocks=4))
        links = {name: scaled(one, speed) for name in ("host", "disk") if (one := getattr(base, name)) is not None}
        base = base.with_links(**links)
        budget = int(share * base.baseline_peak_bytes)
        limits = Limits(device_budget=budget)
        shortest = every_mix(base, limits)
        if shortest < float("inf"):
            _, made = best(base, limits)
            assert predicted_peak(made) <= budget
            assert predicted_s(made) <= 1.05 * shortest


# -- found by Hypothesis ----------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(1 << 20, 1 << 40), storages=st.integers(1, 24), share=st.floats(0.0, 1.0))
def test_profiles_that_hypothesis_finds(seed: int, storages: int, share: float) -> None:
    profile = random_profile(seed, storages=storages)
    lowest = Search(profile, Limits()).floor()
    budget = int(lowest + share * (profile.baseline_peak_bytes - lowest))
    assert predicted_peak(plan(profile, Limits(device_budget=budget))) <= budget
    free = plan(profile, Limits())
    assert predicted_s(free) <= 1.01 * profile.step_s
    assert predicted_peak(free) <= profile.baseline_peak_bytes
    assert Profile.from_json(profile.to_json()) == profile
