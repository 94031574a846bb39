"""The simulator against steps worked out by hand, and against what must hold for every step."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from actoffload.errors import ConfigError
from actoffload.planning.plan import Plan, PlanEntry
from actoffload.planning.profile import (
    Block,
    Link,
    Profile,
    Storage,
)
from actoffload.planning.simulator import (
    Conditions,
    Prediction,
    run,
    simulate,
)
from actoffload.planning.workload import (
    HOST,
    KEEP,
    NVME,
    Choice,
    Workload,
)
from tests.profiles import random_profile

LINK = Link(write_bytes_per_s=100.0, read_bytes_per_s=100.0)


def _storage(index: int | None, birth_s: float, need_s: float | None, **changes: Any) -> Storage:
    last_s = changes.pop("last_s", need_s)
    values: dict[str, Any] = {"nbytes": 100, "last_need_s": last_s}
    return Storage(index=index, birth_s=birth_s, need_s=need_s, **(values | changes))


def _profile(*storages: Storage, **changes: Any) -> Profile:
    values: dict[str, Any] = {"forward_s": 2.0, "backward_s": 4.0, "disk": LINK, "prefetch_bytes": 100}
    return Profile(storages=storages, **(values | changes))


def _plan(profile: Profile, actions: str, **more: Any) -> Plan:
    """One letter for each place: ``k``\\ eep, ``h``\\ ost, ``d``\\ isk."""
    sizes = [s.nbytes for s in profile.storages if s.index is not None]
    entries = []
    for place, letter in enumerate(actions):
        action = "keep" if letter == "k" else "offload"
        tier = {"k": "", "h": "host", "d": "nvme"}[letter]
        entries.append(PlanEntry(index=place, nbytes=sizes[place], action=action, tier=tier))
    return Plan(tuple(entries), **more)


def _seen(profile: Profile, actions: str, conditions: Conditions | None = None, **more: Any) -> Prediction:
    return simulate(profile, _plan(profile, actions, **more), conditions)


def test_keeping_all() -> None:
    profile = _profile(_storage(0, 0.0, 6.0), _storage(1, 1.0, 3.0), other_s=1.0)
    seen = simulate(profile)
    assert (seen.step_s, seen.compute_s, seen.peak_bytes, seen.moved_bytes) == (7.0, 7.0, 200, 0)
    assert seen.timeline == ((0.0, 100), (1.0, 200), (3.0, 100), (6.0, 0))
    assert seen.peak is not None
    assert (seen.peak.time_s, seen.peak.phase) == (1.0, "forward")
    assert seen.peak.bytes_by_kind == {"kept": 200, "on its way out": 0, "brought back": 0, "recomputed": 0}


@pytest.mark.parametrize(("window", "peak_bytes"), [(200, 300), (300, 400)])
def test_what_is_needed_last_is_not_brought_back_before_what_is_near_has_been_used(
    window: int, peak_bytes: int
) -> None:
    kept = [_storage(n, 1.0 + 0.1 * n, 2.5 + 0.5 * (4 - n), last_s=2.9 + 0.5 * (4 - n)) for n in (1, 2, 3)]
    profile = _profile(_storage(0, 0.0, 6.0), *kept, prefetch_bytes=window)
    seen = _seen(profile, "dkkk")
    assert (seen.peak_bytes, seen.backward_wait_s, seen.disk_read_bytes) == (peak_bytes, 0.0, 100)
    assert simulate(profile).peak_bytes == 400


def test_the_input_of_two_checkpoints_lies_on_the_way_once() -> None:
    storages = (
        _storage(0, 0.0, 6.0, nbytes=7),
        _storage(1, 0.5, 5.0, nbytes=100, block=0),
        _storage(2, 1.0, 4.0, nbytes=100, block=1),
    )
    blocks = tuple(
        Block(name=name, forward_s=0.5, backward_s=1.0, recompute_s=0.5, input_bytes=7, input=0) for name in ("a", "b")
    )
    workload = Workload(_profile(*storages, blocks=blocks))
    modes = workload.modes(Choice((KEEP,) * len(workload.items), frozenset({0, 1})))
    assert workload.reach_of(modes, frozenset({0, 1}))[-1] == 7
    assert workload.reach[-1] == 207


def test_a_read_that_nothing_hides_is_waited_for() -> None:
    seen = _seen(_profile(_storage(0, 0.0, 3.0)), "d")
    # Written from 0 to 1, needed at 3 and read only then, as nothing before it tells backward to read ahead.
    assert (seen.step_s, seen.backward_wait_s, seen.waits) == (7.0, 1.0, ((0, 1.0),))
    assert seen.timeline == ((0.0, 100), (1.0, 0), (3.0, 100), (4.0, 0))
    assert (seen.disk_written_bytes, seen.disk_read_bytes, seen.disk_peak_bytes) == (100, 100, 100)


def test_a_read_is_hidden_behind_the_need_before_it() -> None:
    profile = _profile(_storage(0, 0.0, 5.0), _storage(1, 1.5, 2.0, last_s=2.5))
    seen = _seen(profile, "dk")
    assert (seen.step_s, seen.backward_wait_s) == (6.0, 0.0)
    assert seen.timeline == ((0.0, 100), (1.0, 0), (1.5, 100), (2.0, 200), (2.5, 100), (5.0, 0))
    assert seen.peak is not None
    assert seen.peak.bytes_by_kind == {"kept": 100, "on its way out": 0, "brought back": 100, "recomputed": 0}


def test_what_has_not_left_is_taken_and_its_write_cancelled() -> None:
    profile = _profile(_storage(0, 0.0, 2.6), _storage(1, 1.5, 2.3), _storage(2, 1.6, 2.1))
    seen = _seen(profile, "ddd")
    # 0 is gone at 1.0; 1 is being written until 2.5; 2 has not begun at 2.1.
    assert seen.cancelled_bytes == 100
    assert (seen.disk_written_bytes, seen.disk_read_bytes) == (200, 100)
    assert seen.step_s == pytest.approx(6.5)  # 0 is read from 2.1 on


def test_forward_waits_for_room_under_a_budget() -> None:
    profile = _profile(_storage(0, 0.0, 5.0), _storage(1, 0.5, 3.0))
    seen = _seen(profile, "dk", Conditions(device_budget=150))
    assert (seen.forward_wait_s, seen.peak_bytes) == (0.5, 100)
    # Nothing is read beside what is kept, so the read of 0 begins when it is needed.
    assert seen.backward_wait_s == pytest.approx(1.0)
    assert _seen(profile, "dk").peak_bytes == 200
    assert _seen(profile, "kk", Conditions(device_budget=150)).peak_bytes == 200  # nothing to wait for
    full = _seen(profile, "dd", Conditions(nvme_budget=100))
    assert (full.pressed, full.disk_written_bytes) == ((1,), 100), "a disk that is full"


def test_bytes_that_cost_compute_time_and_transfers_that_begin_late() -> None:
    slow = replace(LINK, latency_s=0.25)
    seen = _seen(_profile(_storage(0, 0.0, 3.0), disk=slow), "d")
    assert seen.timeline == ((0.0, 100), (1.25, 0), (3.0, 100), (4.25, 0))
    costly = replace(LINK, cost_s_per_byte=0.001)
    seen = _seen(_profile(_storage(0, 0.0, 5.0), _storage(1, 1.5, 2.0), disk=costly), "dk")
    assert seen.cost_s == pytest.approx(0.2)
    assert seen.step_s == pytest.approx(6.2)


def test_host_and_disk_are_two_hops() -> None:
    profile = _profile(_storage(0, 0.0, 6.0), _storage(1, 1.5, 3.5, last_s=4.0), host=LINK.scaled(2))
    seen = _seen(profile, "dk")
    # Copied at 0.5, and released as the next one is saved; at 3.5 it is read to the host for 1 s, and then copied back.
    assert seen.timeline == ((0.0, 100), (1.5, 200), (1.5, 100), (4.0, 0), (4.5, 100), (6.0, 0))
    assert seen.releases == (1, 0)
    assert (seen.host_written_bytes, seen.disk_written_bytes, seen.disk_read_bytes, seen.host_read_bytes) == (100,) * 4
    assert (seen.host_peak_bytes, seen.disk_peak_bytes) == (100, 100)
    to_host = _seen(profile, "hk")
    assert (to_host.disk_written_bytes, to_host.host_written_bytes, to_host.host_read_bytes) == (0, 100, 100)


def test_host_memory_that_is_full_keeps_or_waits() -> None:
    profile = _profile(_storage(0, 0.0, 6.0), _storage(1, 0.6, 5.0), host=LINK.scaled(2))
    assert _seen(profile, "hh", Conditions(host_budget=100)).pressed == (1,)
    waiting = _seen(profile, "dd", Conditions(host_budget=100, device_budget=1000))
    assert waiting.pressed == ()
    assert waiting.forward_wait_s == pytest.approx(1.0)  # 0 goes on to disk as 1 is saved, until 1.6


BLOCK = Block(name="b", forward_s=1.0, backward_s=2.0, recompute_s=1.5, input_bytes=30)


def _block_profile(**changes: Any) -> Profile:
    return _profile(
        _storage(0, 0.0, 4.0, last_s=5.0, block=0),
        _storage(1, 0.5, 3.0, last_s=4.5, block=0),
        _storage(2, 1.0, 2.0, last_s=2.5),
        blocks=(replace(BLOCK, **changes),),
    )


def test_recomputing_a_block_whose_input_a_plain_run_does_not_save() -> None:
    profile = _block_profile()
    plan = Plan((PlanEntry(index=0, nbytes=30, action="keep"), PlanEntry(index=1, nbytes=100, action="keep")))
    seen = simulate(profile, replace(plan, recompute=("b",)))
    assert (seen.step_s, seen.recompute_s) == (7.5, 1.5)
    # Its input from 0 to the end of its backward; what it saves from the beginning of its backward at 3 on.
    assert seen.timeline == ((0.0, 30), (1.0, 130), (2.5, 30), (3.0, 130), (3.0, 230), (6.0, 130), (6.5, 30), (6.5, 0))
    assert seen.peak is not None
    assert (seen.peak.phase, seen.peak.bytes_by_kind["recomputed"]) == ("recompute", 200)
    assert simulate(profile).peak_bytes == 300


def test_recomputing_a_block_whose_input_is_a_storage() -> None:
    profile = _block_profile(input=0)
    entries = [PlanEntry(index=n, nbytes=100, action=action) for n, action in enumerate(("offload", "keep"))]
    seen = simulate(profile, Plan(tuple(entries), recompute=("b",)))
    # The input is written until 1, read from 2 on, as backward wants it at 3; the other one is recomputed.
    assert (seen.disk_written_bytes, seen.disk_read_bytes, seen.backward_wait_s) == (100, 100, 0.0)
    assert (seen.peak_bytes, seen.step_s) == (200, 7.5)


def test_a_block_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        simulate(_block_profile(), Plan((), recompute=("c",)))
    assert caught.value.field == "plan"
    assert caught.value.value == ["c"]


def test_a_plan_means_the_same_for_every_tape() -> None:
    storages = (_storage(0, 0.0, 1.0), _storage(0, 3.0, 5.0, tape=1), _storage(1, 3.5, 4.5, tape=1, nbytes=50))
    profile = _profile(*storages)
    workload = Workload(profile)
    assert [item.positions for item in workload.items] == [(0, 1), (2,)]
    plan = Plan((PlanEntry(index=0, nbytes=100, action="offload"), PlanEntry(index=1, nbytes=50, action="keep")))
    assert workload.from_plan(plan) == Choice((NVME, KEEP))
    assert workload.from_plan(Plan(())) == Choice((NVME, NVME))  # what a plan does not know leaves
    assert simulate(profile, plan).disk_written_bytes == 200


def _everything(workload: Workload) -> Choice:
    tier = HOST if workload.profile.host is not None else NVME
    return Choice(tuple(tier if item.movable else KEEP for item in workload.items))


@pytest.mark.parametrize("seed", range(40))
def test_what_holds_for_every_step(seed: int) -> None:
    profile = random_profile(seed)
    workload = Workload(profile)
    keep = run(workload, workload.keep_all(), Conditions(), detail=True)
    assert (keep.step_s, keep.peak_bytes, keep.moved_bytes) == (profile.step_s, profile.baseline_peak_bytes, 0)
    for choice in (_everything(workload), replace(_everything(workload), recompute=frozenset(range(1)))):
        if choice.recompute and not workload.groups:
            continue
        seen = run(workload, choice, Conditions(), detail=True)
        assert max(nbytes for _, nbytes in seen.timeline) == seen.peak_bytes
        assert seen.timeline[-1][1] == 0  # all that came has gone
        assert list(seen.timeline) == sorted(seen.timeline, key=lambda pair: pair[0])
        waits = seen.forward_wait_s + seen.backward_wait_s + seen.recompute_s + seen.cost_s
        assert seen.step_s == pytest.approx(profile.step_s + waits)
        assert sum(wait for _, wait in seen.waits) == pytest.approx(seen.backward_wait_s)
        away = [p for p, mode in enumerate(workload.modes(choice)) if mode in (HOST, NVME)]
        planned = sum(workload.nbytes[p] for p in away)
        unused = sum(workload.nbytes[p] for p in away if p < workload.count and workload.need[p] is None)
        written = seen.host_written_bytes if profile.host is not None else seen.disk_written_bytes
        assert planned - unused <= written + seen.cancelled_bytes <= planned
        assert seen.disk_read_bytes <= seen.disk_written_bytes
        assert seen.peak is not None
        assert sum(seen.peak.bytes_by_kind.values()) == seen.peak_bytes
        assert run(workload, choice, Conditions()).step_s == seen.step_s  # the same without detail, and again


@pytest.mark.parametrize("seed", range(40))
def test_faster_reads_never_slow_a_step(seed: int) -> None:
    profile = random_profile(seed)
    steps = []
    for factor in (0.25, 0.5, 1.0, 2.0, 4.0):
        links = {
            name: replace(link, read_bytes_per_s=link.read_bytes_per_s * factor)
            for name, link in (("host", profile.host), ("disk", profile.disk))
            if link is not None
        }
        faster = Workload(profile.with_links(**links))
        steps.append(run(faster, _everything(faster), Conditions()).step_s)
    assert all(after <= before * (1 + 1e-9) for before, after in pairwise(steps))
