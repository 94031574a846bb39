"""Profiles and plans are plain data: checked, saved, loaded; and the numbers derived from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actoffload.errors import ConfigError
from actoffload.planning.plan import Plan, PlanEntry
from actoffload.planning.profile import RECOMPUTED, Link, Profile, Region, RegionSave, Storage
from actoffload.policy import Decision, TensorFacts
from tests.profiles import Accelerator, link, random_profile, scaled, transformer_profile

LINK = Link(write_bytes_per_s=100.0, read_bytes_per_s=200.0)


def _storage(**changes: Any) -> Storage:
    values: dict[str, Any] = {"index": 0, "nbytes": 10, "birth_s": 0.0, "need_s": 2.0, "last_need_s": 3.0}
    return Storage(**(values | changes))


def _profile(**changes: Any) -> Profile:
    values: dict[str, Any] = {
        "storages": (_storage(), _storage(index=1, birth_s=1.0, nbytes=20, last_need_s=2.5)),
        "forward_s": 1.0,
        "backward_s": 2.0,
        "disk": LINK,
    }
    return Profile(**(values | changes))


def test_numbers_derived_from_a_profile() -> None:
    profile = _profile(other_s=0.5)
    assert profile.step_s == 3.5
    assert (profile.saved_bytes, profile.movable_bytes) == (30, 30)
    assert profile.baseline_peak_bytes == 30
    assert Profile(storages=()).baseline_peak_bytes == 0


def test_a_profile_on_other_links() -> None:
    profile, faster = _profile(), scaled(LINK, 2)
    other = profile.with_links(disk=faster)
    assert other == _profile(disk=faster)
    assert profile == _profile()
    assert other.with_links(host=LINK) == _profile(disk=faster, host=LINK)
    assert other.with_links(disk=faster) is other
    with pytest.raises(ConfigError, match=r"host\.latency_s"):
        profile.with_links(host=replace(LINK, latency_s=-1.0))


def test_json_there_and_back(tmp_path: Path) -> None:
    accelerator = Accelerator(name="a", flops=1e14, host=link(20), disk=link(3, 5))
    for profile in (_profile(), transformer_profile(256, 2, 1, accelerator=accelerator), random_profile(3)):
        assert Profile.from_json(profile.to_json()) == profile
    path = tmp_path / "profile.json"
    _profile().save(path)
    assert Profile.load(path) == _profile()
    assert json.loads(path.read_text())["version"] == 2
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]


def test_which_regions_ran_once() -> None:
    again, once = REGION, replace(REGION, place=1, again_s=None, saves=(), backward_end_s=2.0)
    never = replace(REGION, place=2, again_s=None, saves=())
    saved = (_storage(region=3), _storage(index=None, birth_s=1.5, need_s=None, last_need_s=2.0, kept=RECOMPUTED))
    profile = _profile(storages=saved, regions=(again, once, never, replace(never, place=3)))
    assert profile.once == (1, 3), "a region that saved something, or that backward reached"
    assert _profile().once == ()
    assert Profile.from_json(profile.to_json()) == profile


SAVE = RegionSave(offset_s=0.1, nbytes=4)
REGION = Region(place=0, name="b", begin_s=0.5, end_s=1.0, again_s=1.5, recompute_s=0.5, saves=(SAVE,))


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"forward_s": -1.0}, "forward_s must be"),
        ({"other_s": float("nan")}, "other_s must be"),
        ({"prefetch_bytes": 0}, "prefetch_bytes"),
        ({"disk": replace(LINK, write_bytes_per_s=0.0)}, "disk.write_bytes_per_s"),
        ({"host": replace(LINK, latency_s=-1.0)}, "host.latency_s"),
        ({"storages": (_storage(nbytes=-1),)}, "nbytes must be"),
        ({"storages": (_storage(birth_s=2.5),)}, "born before it is needed"),
        ({"storages": (_storage(last_need_s=9.0),)}, "after the step's end"),
        ({"storages": (_storage(birth_s=-1.0),)}, "birth_s must be"),
        ({"storages": (_storage(index=1),)}, "must count the places"),
        ({"storages": (_storage(), _storage())}, "must count the places"),
        ({"regions": (REGION, REGION)}, "the same place"),
        ({"regions": (replace(REGION, recompute_s=-1.0),)}, "recompute_s must be"),
        ({"regions": (replace(REGION, again_s=float("inf")),)}, "again_s must be"),
        ({"regions": (replace(REGION, end_s=0.1),)}, "must begin before it ends"),
        ({"regions": (replace(REGION, place=-1),)}, "counts the regions"),
        ({"regions": (replace(REGION, saves=(replace(SAVE, nbytes=-1),)),)}, "nbytes must be"),
    ],
)
def test_an_impossible_value_is_refused_with_its_field(changes: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        _profile(**changes)


def test_the_places_of_each_tape_count_for_themselves() -> None:
    storages = (_storage(), _storage(tape=1), _storage(index=None), _storage(index=1), _storage(index=1, tape=1))
    assert len(_profile(storages=storages).storages) == 5


# -- plans -------------------------------------------------------------------------------------------------------------


PLAN = Plan(
    (
        PlanEntry(index=0, nbytes=100, action="offload"),
        PlanEntry(index=1, nbytes=200, action="keep", reason="policy", module="head"),
        PlanEntry(index=2, nbytes=300, action="offload", module="layers.0"),
    )
)


def _facts(index: int, nbytes: int) -> TensorFacts:
    return TensorFacts(nbytes=nbytes, shape=(nbytes,), dtype="uint8", device="cpu", module=None, index=index)


def test_a_plan_is_followed_by_place_and_size() -> None:
    assert PLAN.decide(_facts(0, 100)) is Decision.OFFLOAD
    assert PLAN.decide(_facts(1, 200)) is Decision.KEEP
    assert PLAN.decide(_facts(1, 201)) is Decision.OFFLOAD  # another size than the plan's
    assert PLAN.decide(_facts(9, 200)) is Decision.OFFLOAD  # beyond the plan
    assert (PLAN.offloaded_bytes, PLAN.kept_bytes) == (400, 200)


def test_a_plan_as_json_there_and_back() -> None:
    text = PLAN.to_json()
    assert Plan.from_json(text) == PLAN
    assert json.loads(text)["version"] == 2
    assert Plan.from_json(Plan(()).to_json()) == Plan(())
    regions = Plan(PLAN.entries, once=(0, 3), regions=4)
    assert Plan.from_json(regions.to_json()) == regions


@pytest.mark.parametrize("kind", [Profile, Plan])
def test_a_text_of_an_older_release_is_refused_with_its_version(kind: type[Profile] | type[Plan]) -> None:
    with pytest.raises(ConfigError, match=rf"not a {kind.__name__.lower()} of version 2 \(version 1\)"):
        kind.from_json(json.dumps({"version": 1, "blocks": [], "entries": []}))


def test_the_summary_counts_regions() -> None:
    assert PLAN.summary() == "plan: moves 400 B of 600 B"
    some = Plan(PLAN.entries, once=(0, 1, 3), regions=24).summary()
    assert some.endswith("; 24 checkpointed regions: 3 run once, 21 run again")


@pytest.mark.parametrize(
    "entry", [{"action": "burn"}, {"action": "offload", "tier": "tape"}, {"action": "keep", "colour": "red"}], ids=str
)
def test_an_entry_that_no_plan_has_is_refused(entry: dict[str, str]) -> None:
    """`tests/property/test_input_property.py` has text that is no JSON, and values of other types."""
    text = json.dumps({"version": 2, "entries": [{"index": 0, "nbytes": 1, **entry}]})
    with pytest.raises(ConfigError) as caught:
        Plan.from_json(text)
    assert (caught.value.field, caught.value.value) == ("policy", text[:80])
    assert "plan" in caught.value.remedy
