"""Plans are plain data: decided by, saved, loaded, compared."""

from __future__ import annotations

import json

import pytest

from actoffload.errors import ConfigError
from actoffload.planning.plan import Plan, PlanEntry
from actoffload.policy import Decision, TensorFacts

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


def test_json_there_and_back() -> None:
    text = PLAN.to_json()
    assert Plan.from_json(text) == PLAN
    assert json.loads(text)["version"] == 2
    assert Plan.from_json(Plan(()).to_json()) == Plan(())
    regions = Plan(PLAN.entries, once=(0, 3), regions=4)
    assert Plan.from_json(regions.to_json()) == regions


def test_a_plan_of_an_older_release_is_refused_with_its_version() -> None:
    text = json.dumps({**json.loads(PLAN.to_json()), "version": 1, "recompute": ["layers.0"]})
    with pytest.raises(ConfigError, match=r"not a plan of version 2 \(version 1\)"):
        Plan.from_json(text)


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
