"""What a report concludes: nothing moves, memory that could not be saved, slow, in time; and what to do next."""

from __future__ import annotations

from typing import Any

import pytest

from actoffload.autotune.diagnosis import Planned, diagnose
from actoffload.config import make_config
from actoffload.planning.constants import MOST_STEPS
from actoffload.planning.planners import Limits, Observed, make_planner
from actoffload.planning.profile import Profile
from actoffload.statistics import Statistics
from tests.harness import Chain, MakeOffloader, batch, train_step
from tests.unit.test_explain import one_large_block, transformer

MIB = 1 << 20


def counted(**changes: Any) -> Statistics:
    values: dict[str, Any] = {
        "packed_tensors": 30,
        "packed_bytes": 100 * MIB,
        "nvme_written_bytes": 90 * MIB,
        "resident_peak_bytes": 10 * MIB,
        "plan_peak_bytes": 10 * MIB,
        "baseline_peak_bytes": 100 * MIB,
        "process_peak_bytes": 300 * MIB,
    }
    return Statistics(**(values | changes))


def planned(profile: Profile, budget: int | None, seen: Observed | None = None) -> Planned:
    limits, planner = Limits(device_budget=budget), make_planner("auto")
    plan = planner.plan(profile, limits)
    return Planned(profile=profile, plan=plan, limits=limits, planner=planner, seen=seen)


def test_nothing_is_concluded_before_the_first_step() -> None:
    assert diagnose(make_config({}), Statistics(), 0.0) == []


@pytest.mark.parametrize(
    ("reason", "step"),
    [("below min_bytes", "lower min_bytes"), ("other device", "path="), ("no time to move", "set device_budget")],
)
def test_where_nothing_moves_the_largest_reason_is_named_and_what_to_do(reason: str, step: str) -> None:
    kept = {"parameter": 900 * MIB, reason: 90 * MIB, "last saved layer": 10 * MIB}
    lines = diagnose(make_config({}), counted(packed_bytes=1000 * MIB, nvme_written_bytes=0, kept_bytes=kept), 10.0)
    assert lines[0] == f"diagnosis: nothing moves ({reason})"
    assert step in lines[1]


def test_what_failed_below_comes_before_the_time_that_it_takes() -> None:
    lines = diagnose(make_config({}), counted(degraded={"no room on disk": 3}, unpack_wait_s=9.0), 10.0)
    assert lines[0] == "diagnosis: memory is not saved as it could be: 3 × no room on disk"
    assert "nvme_budget" in lines[1]


@pytest.mark.parametrize("forward", [True, False])
def test_a_run_that_waits_is_slow_and_it_says_for_what(forward: bool) -> None:
    waits = {"pack_wait_s" if forward else "unpack_wait_s": 5.2}
    lines = diagnose(make_config({"policy": "all"}), counted(**waits), 10.0)
    assert lines[0].startswith("diagnosis: SLOW: 52% of the time was spent waiting for the disk")
    assert ("for what leaves" in lines[0]) == forward
    assert "policy='auto'" in lines[1]
    host = diagnose(make_config({}), counted(host_written_bytes=90 * MIB, nvme_written_bytes=0, **waits), 10.0)
    assert "host memory" in host[0]


def test_a_budget_just_below_a_block_is_named_with_one_above_it_and_what_that_gives() -> None:
    profile = transformer(layers=4, write_gb_s=0.5)
    block = max(sum(s.nbytes for s in profile.storages if s.block == b) for b in range(len(profile.blocks)))
    budget = int(0.97 * block)
    facts = planned(profile, budget, Observed(step_s=10.0, forward_wait_s=4.0, backward_wait_s=1.0))
    lines = diagnose(make_config({"device_budget": budget}), counted(pack_wait_s=4.0), 1e9, facts)
    assert "SLOW: 50% of the time" in lines[0], "the last steps under the plan, not all of them"
    assert "(0.5 GB/s)" in lines[0]
    assert "is below one block" in lines[1]
    assert "none can be recomputed" in lines[1]
    assert "is predicted to peak at" in lines[1]
    assert len(lines) <= 1 + MOST_STEPS


def test_no_budget_is_named_that_buys_no_time() -> None:
    profile = one_large_block()
    facts = planned(profile, profile.baseline_peak_bytes)
    lines = diagnose(make_config({}), counted(unpack_wait_s=5.0), 10.0, facts)
    assert "SLOW" in lines[0]
    assert not any("predicted" in line for line in lines)


def test_in_time_it_says_where_activations_are_not_what_fills_the_memory() -> None:
    lines = diagnose(make_config({}), counted(process_peak_bytes=1000 * MIB), 10.0)
    assert "OK: 0.0% of the time" in lines[0]
    assert "only 10% of the process's peak" in lines[0]
    assert diagnose(make_config({}), counted(), 10.0) == ["diagnosis: OK: 0.0% of the time was spent waiting"]


def test_in_time_and_much_stays_a_budget_is_priced() -> None:
    facts = planned(transformer(layers=4, write_gb_s=0.5), None)
    peak = facts.profile.baseline_peak_bytes
    kept = counted(plan_peak_bytes=int(0.9 * peak), baseline_peak_bytes=peak, process_peak_bytes=2 * peak)
    lines = diagnose(make_config({}), kept, 10.0, facts)
    assert "90% of the activations' peak stays" in lines[0]
    assert "device_budget=" in lines[1]
    assert " instead of " in lines[1]


def test_the_report_of_an_offloader_ends_with_it(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes="1GiB")
    train_step(Chain(), batch(), offloader)
    assert offloader.report().splitlines()[-2:] == [
        "diagnosis: nothing moves (below min_bytes)",
        "  next: lower min_bytes: every activation is smaller",
    ]
