"""The simulator against steps worked out by hand, and against rules for every step."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from actoffload.planning.plan import Plan, PlanEntry
from actoffload.planning.profile import RECOMPUTED, Link, Profile, Region, Storage
from actoffload.planning.simulator import Conditions, Prediction, run, simulate
from actoffload.planning.workload import HOST, KEEP, NVME, Choice, Workload
from tests.profiles import bytes_over_time, checkpointed, random_profile, scaled

LINK = Link(write_bytes_per_s=100.0, read_bytes_per_s=100.0)


def _storage(index: int | None, birth_s: float, need_s: float | None, **changes: Any) -> Storage:
    last_s = changes.pop("last_s", need_s)
    values: dict[str, Any] = {"nbytes": 100, "last_need_s": last_s}
    return Storage(index=index, birth_s=birth_s, need_s=need_s, **(values | changes))


def _profile(*storages: Storage, **changes: Any) -> Profile:
    values: dict[str, Any] = {"forward_s": 2.0, "backward_s": 4.0, "disk": LINK, "prefetch_bytes": 100}
    return Profile(storages=storages, **(values | changes))


def _plan(profile: Profile, actions: str) -> Plan:
    """One letter for each place: ``k``\\ eep, ``h``\\ ost, ``d``\\ isk."""
    sizes = [s.nbytes for s in profile.storages if s.index is not None]
    entries = []
    for place, letter in enumerate(actions):
        action = "keep" if letter == "k" else "offload"
        tier = {"k": "", "h": "host", "d": "nvme"}[letter]
        entries.append(PlanEntry(index=place, nbytes=sizes[place], action=action, tier=tier))
    return Plan(tuple(entries))


def _seen(profile: Profile, actions: str, conditions: Conditions | None = None) -> Prediction:
    return simulate(profile, _plan(profile, actions), conditions)


def test_keeping_all() -> None:
    profile = _profile(_storage(0, 0.0, 6.0), _storage(1, 1.0, 3.0), other_s=1.0)
    with bytes_over_time() as over_time:
        seen = simulate(profile)
    assert (seen.step_s, seen.peak_bytes, seen.moved_bytes) == (7.0, 200, 0)
    assert over_time == [(0.0, 100), (1.0, 200), (3.0, 100), (6.0, 0)]
    assert seen.peak is not None
    assert (seen.peak.time_s, seen.peak.phase) == (1.0, "forward")
    assert seen.peak.bytes_by_kind == {"kept": 200, "on its way out": 0, "brought back": 0, "recomputed": 0}


@pytest.mark.parametrize(("window", "peak_bytes"), [(200, 300), (300, 400)])
def test_the_storage_needed_last_is_not_read_before_nearer_ones_are_used(window: int, peak_bytes: int) -> None:
    kept = [_storage(n, 1.0 + 0.1 * n, 2.5 + 0.5 * (4 - n), last_s=2.9 + 0.5 * (4 - n)) for n in (1, 2, 3)]
    profile = _profile(_storage(0, 0.0, 6.0), *kept, prefetch_bytes=window)
    seen = _seen(profile, "dkkk")
    assert (seen.peak_bytes, seen.backward_wait_s, seen.disk.read_bytes) == (peak_bytes, 0.0, 100)
    assert simulate(profile).peak_bytes == 400


@pytest.mark.parametrize("late_s", [0.0, 0.25])
def test_a_read_that_nothing_hides_is_waited_for(late_s: float) -> None:
    with bytes_over_time() as over_time:
        seen = _seen(_profile(_storage(0, 0.0, 3.0), disk=replace(LINK, latency_s=late_s)), "d")
    # Written from 0 to 1, needed at 3 and read only then, as nothing before it tells backward to read ahead.
    wait_s = 1.0 + late_s
    assert (seen.step_s, seen.backward_wait_s, seen.waits) == (6.0 + wait_s, wait_s, ((0, wait_s),))
    assert over_time == [(0.0, 100), (wait_s, 0), (3.0, 100), (3.0 + wait_s, 0)]
    assert (seen.disk.written_bytes, seen.disk.read_bytes, seen.disk.peak_bytes) == (100, 100, 100)


def test_a_read_is_hidden_behind_the_need_before_it_and_costs_compute_time() -> None:
    profile = _profile(_storage(0, 0.0, 5.0), _storage(1, 1.5, 2.0, last_s=2.5))
    with bytes_over_time() as over_time:
        seen = _seen(profile, "dk")
    assert (seen.step_s, seen.backward_wait_s) == (6.0, 0.0)
    assert over_time == [(0.0, 100), (1.0, 0), (1.5, 100), (2.0, 200), (2.5, 100), (5.0, 0)]
    assert seen.peak is not None
    assert seen.peak.bytes_by_kind == {"kept": 100, "on its way out": 0, "brought back": 100, "recomputed": 0}
    costly = _seen(replace(profile, disk=replace(LINK, cost_s_each=0.1)), "dk")
    assert costly.cost_s == pytest.approx(0.2)
    assert costly.step_s == pytest.approx(6.2)


def test_a_storage_whose_write_has_not_begun_is_taken_and_the_write_cancelled() -> None:
    profile = _profile(_storage(0, 0.0, 2.6), _storage(1, 1.5, 2.3), _storage(2, 1.6, 2.1))
    seen = _seen(profile, "ddd")
    # 0 has left at 1.0; 1 is being written until 2.5; 2 has not begun at 2.1.
    assert seen.cancelled_bytes == 100
    assert (seen.disk.written_bytes, seen.disk.read_bytes) == (200, 100)
    assert seen.step_s == pytest.approx(6.5)  # 0 is read from 2.1 on


def test_forward_waits_for_room_under_a_budget() -> None:
    profile = _profile(_storage(0, 0.0, 5.0), _storage(1, 0.5, 3.0))
    seen = _seen(profile, "dk", Conditions(device_budget=150))
    assert (seen.forward_wait_s, seen.peak_bytes) == (0.5, 100)
    # The room beside kept storages is too small to read ahead, so the read of 0 begins when it is needed.
    assert seen.backward_wait_s == pytest.approx(1.0)
    assert _seen(profile, "dk").peak_bytes == 200
    assert _seen(profile, "kk", Conditions(device_budget=150)).peak_bytes == 200  # nothing to wait for
    full = _seen(profile, "dd", Conditions(nvme_budget=100))
    assert (full.pressed, full.disk.written_bytes) == ((1,), 100), "a disk that is full"


def test_storages_read_early_wait_in_host_memory_for_room_on_the_device() -> None:
    """A read from disk ends long after it was enqueued. By then others may have the room that there was."""
    leave = [_storage(n, 0.1 * n, 14.0 - n, last_s=14.5 - n) for n in range(4)]
    first = _storage(4, 5.0, 6.1, nbytes=10, last_s=14.0)  # backward uses it, and the reads of the others begin
    fast = Link(write_bytes_per_s=1e5, read_bytes_per_s=1e5)
    profile = _profile(*leave, first, forward_s=6.0, backward_s=9.0, host=fast, prefetch_bytes=1000)
    assert _seen(profile, "ddddk").peak_bytes == 410
    seen = _seen(profile, "ddddk", Conditions(device_budget=250))
    assert (seen.peak_bytes, seen.disk.read_bytes, seen.host.read_bytes) == (200, 400, 400)
    assert seen.backward_wait_s == pytest.approx(0.003), "the copies from host memory alone"
    # A use between two needs, once the storage before has died, begins the copy: then nothing waits.
    between = [_storage(5 + n, 5.1 + 0.1 * n, 13.7 - n, nbytes=1, last_s=13.8 - n) for n in range(3)]
    begun = _seen(replace(profile, storages=(*profile.storages, *between)), "ddddkkkk", Conditions(device_budget=250))
    assert (begun.backward_wait_s, begun.host.read_bytes) == (0.0, 400)


@pytest.mark.parametrize(("need_s", "wait_s"), [(7.7, 0.301), (8.5, 0.001)])
def test_a_read_that_backward_needs_takes_room_that_an_early_one_leaves(need_s: float, wait_s: float) -> None:
    """The disk reads one storage until 7.0 and one until 8.0. Both and room for the largest would pass the budget."""
    fast = Link(write_bytes_per_s=1e5, read_bytes_per_s=1e5)
    leave = _storage(0, 0.0, need_s, last_s=10.0), _storage(1, 0.1, 7.5, last_s=10.0)
    first = _storage(2, 5.0, 6.0, nbytes=10, last_s=10.0)  # backward uses it, and both reads begin
    profile = _profile(*leave, first, forward_s=6.0, backward_s=5.0, host=fast, prefetch_bytes=1000)
    seen = _seen(profile, "ddk", Conditions(device_budget=250))
    assert seen.backward_wait_s == pytest.approx(wait_s)
    assert seen.host.read_bytes == 200
    costs = replace(profile, host=replace(fast, cost_s_each=1e-4))
    charged = _seen(costs, "ddk", Conditions(device_budget=250)).cost_s
    assert charged == pytest.approx(2 * 2 * 1e-4), "each way once, wherever the read waits"


def test_host_and_disk_are_two_hops() -> None:
    profile = _profile(_storage(0, 0.0, 6.0), _storage(1, 1.5, 3.5, last_s=4.0), host=scaled(LINK, 2))
    with bytes_over_time() as over_time:
        seen = _seen(profile, "dk")
    # Copied at 0.5, and released as the next one is saved; at 3.5 it is read to the host for 1 s, and then copied back.
    assert over_time == [(0.0, 100), (1.5, 200), (1.5, 100), (4.0, 0), (4.5, 100), (6.0, 0)]
    assert seen.releases == (1, 0)
    assert (seen.host.written_bytes, seen.disk.written_bytes, seen.disk.read_bytes, seen.host.read_bytes) == (100,) * 4
    assert (seen.host.peak_bytes, seen.disk.peak_bytes) == (100, 100)
    to_host = _seen(profile, "hk")
    assert (to_host.disk.written_bytes, to_host.host.written_bytes, to_host.host.read_bytes) == (0, 100, 100)


def test_host_memory_that_is_full_keeps_or_waits() -> None:
    profile = _profile(_storage(0, 0.0, 6.0), _storage(1, 0.6, 5.0), host=scaled(LINK, 2))
    assert _seen(profile, "hh", Conditions(host_budget=100)).pressed == (1,)
    waiting = _seen(profile, "dd", Conditions(host_budget=100, device_budget=1000))
    assert waiting.pressed == ()
    assert waiting.forward_wait_s == pytest.approx(1.0)  # 0 goes on to disk as 1 is saved, until 1.6


def _again_profile(**changes: Any) -> Profile:
    """A region whose input is saved at 0 and needed at 3; it runs again until 4.5 and holds 200 bytes."""
    held = _storage(None, 3.0, 3.0, nbytes=200, last_s=6.5, kept=RECOMPUTED)  # needed as the region runs, as recorded
    input_ = _storage(0, 0.0, 3.0, nbytes=30, last_s=6.5)
    return _profile(input_, _storage(1, 1.0, 2.0, last_s=2.5), held, backward_s=5.5, **changes)


def test_tensors_of_a_recomputation_are_at_the_peak() -> None:
    with bytes_over_time() as over_time:
        seen = _seen(_again_profile(), "kk")
    assert (seen.step_s, seen.peak_bytes, seen.moved_bytes) == (7.5, 230, 0)
    assert over_time == [(0.0, 30), (1.0, 130), (2.5, 30), (3.0, 230), (6.5, 30), (6.5, 0)]
    assert seen.peak is not None
    assert (seen.peak.phase, seen.peak.bytes_by_kind["recomputed"]) == ("recompute", 200)


@pytest.mark.parametrize("end_s", [4.0, math.nextafter(4.0, 5.0)], ids=["", "rounded"])
def test_a_recomputation_holds_its_storages_when_the_region_before_has_let_go_of_its_own(end_s: float) -> None:
    """A device has no work between the two: both happen at one moment.

    Each time is a sum of its own, so rounding may reverse two stamps that follow each other.
    """
    first = _storage(None, 3.0, None, nbytes=200, last_s=end_s, kept=RECOMPUTED)
    second = _storage(None, 4.0, None, nbytes=200, last_s=5.0, kept=RECOMPUTED)
    at_once = _storage(None, 4.0, None, nbytes=300, last_s=end_s, kept=RECOMPUTED)
    for storages, peak in ([first, second], 200), ([first, second, at_once], 500):
        profile = _profile(*storages)
        with bytes_over_time() as over_time:
            seen = simulate(profile, conditions=Conditions(device_budget=peak))
        assert (profile.baseline_peak_bytes, seen.peak_bytes, seen.wait_s) == (peak, peak, 0.0)
        assert over_time[-1][1] == 0


def test_a_read_ahead_may_take_the_room_of_the_region_that_backward_has_just_left() -> None:
    moved, needed = _storage(0, 0.0, 4.0, nbytes=40), _storage(1, 2.0, 3.5, nbytes=10)
    held = _storage(None, 3.0, None, nbytes=200, last_s=3.5, kept=RECOMPUTED)  # at the same moment as the need after it
    seen = _seen(_profile(moved, needed, held), "dk", Conditions(device_budget=260))
    assert (seen.disk.read_bytes, seen.backward_wait_s, seen.peak_bytes) == (40, 0.0, 210)


def test_a_recomputation_waits_for_its_input() -> None:
    away = _seen(_again_profile(), "dk")
    # The input is written until 0.3, and read from 2 on, as backward comes to the storage before it.
    assert (away.disk.written_bytes, away.disk.read_bytes, away.backward_wait_s) == (30, 30, 0.0)
    late = _seen(_again_profile(disk=replace(LINK, read_bytes_per_s=20.0)), "dk")
    assert late.backward_wait_s == pytest.approx(0.5)
    assert late.step_s == pytest.approx(8.0)


def test_a_recomputation_waits_for_room_and_reading_ahead_leaves_it() -> None:
    held = _storage(None, 3.0, None, nbytes=300, last_s=3.5, kept=RECOMPUTED)
    first, kept = _storage(0, 0.0, 5.0), _storage(1, 1.5, 2.0, last_s=2.5)
    seen = _seen(_profile(first, kept, held), "dk", Conditions(device_budget=350))
    # Beside the region's 300 bytes there is no room for 100 at 2, so they are read when they are needed.
    assert (seen.peak_bytes, seen.backward_wait_s) == (300, 1.0)
    assert _seen(_profile(first, kept, held), "dk", Conditions(device_budget=500)).backward_wait_s == 0.0
    slow = replace(LINK, write_bytes_per_s=100 / 3.2)
    waits = _seen(_profile(first, held, disk=slow), "d", Conditions(device_budget=350))
    assert waits.backward_wait_s == pytest.approx(0.2 + 1.0), "for the write to make room, and then for the read"


@pytest.mark.parametrize(
    ("begin_s", "wait_s"), [(5.0, 0.0), (3.5, 1.0), (2.6, 0.0)], ids=["after the need", "before it", "before the read"]
)
def test_reading_ahead_leaves_room_for_the_regions_that_run_again_before_the_need(
    begin_s: float, wait_s: float
) -> None:
    kept, first = _storage(0, 1.0, 3.2, nbytes=50), _storage(1, 1.5, 4.5)
    held = _storage(None, begin_s, None, nbytes=300, last_s=begin_s + 0.5, kept=RECOMPUTED)
    seen = _seen(_profile(kept, first, held), "kd", Conditions(device_budget=350))
    assert (seen.peak_bytes <= 350, seen.backward_wait_s) == (True, wait_s)


@pytest.mark.parametrize(("region", "wait_s"), [(None, 0.0), (0, 1.0)])
def test_reading_ahead_leaves_the_room_of_the_region_that_backward_is_in(region: int | None, wait_s: float) -> None:
    """A region that runs again counts as a whole until backward has left it, and so does one that runs once."""
    first, *used = _storage(0, 0.0, 4.0), _storage(1, 1.0, 2.5, region=region), _storage(2, 1.1, 2.3, region=region)
    seen = _seen(_profile(first, *used), "dkk", Conditions(device_budget=350))
    assert (seen.peak_bytes, seen.backward_wait_s) == (200, wait_s)


@pytest.mark.parametrize(("let_go", "wait_s"), [(False, 2.0), (True, 1.0)])
def test_a_storage_that_backward_has_taken_leaves_its_room_to_the_next_read(let_go: bool, wait_s: float) -> None:
    first, second = _storage(0, 0.0, 5.0, last_s=6.0), _storage(1, 1.0, 3.0, last_s=6.0, let_go=let_go)
    seen = _seen(_profile(first, second), "dd", Conditions(device_budget=200))
    assert (seen.backward_wait_s, seen.peak_bytes) == (wait_s, 100 if let_go else 200)
    assert _seen(_profile(first, second), "kk").peak_bytes == 200, "a storage that stays is released at its death"


def test_the_forward_of_a_region_waits_for_its_room_and_gives_it_back() -> None:
    region = Region(place=3, name="block", begin_s=0.5, end_s=1.5)
    profile = _profile(_storage(0, 0.0, 5.0), _storage(1, 1.6, 3.0), regions=(region,))
    seen = _seen(profile, "dk", Conditions(device_budget=150, in_forward={3: 60}))
    assert (seen.forward_wait_s, seen.peak_bytes) == (0.5, 100)
    with bytes_over_time() as over_time:
        _seen(profile, "kk", Conditions(in_forward={3: 60, 7: 500}))
    assert over_time == [(0.0, 100), (0.5, 160), (1.5, 100), (1.6, 200), (3.0, 100), (5.0, 0)]
    assert _seen(profile, "dk", Conditions(device_budget=150)).forward_wait_s == 0.0


def test_the_turn_takes_its_bytes_until_backward_reaches_a_region() -> None:
    regions = tuple(Region(place=n, name="block", begin_s=n + 0.5, end_s=n + 1.0) for n in range(2))
    loss, first = _storage(2, 2.5, 3.0), _storage(1, 1.6, 4.0)
    for again_s, end_s in ((None, 4.0), (3.5, 3.5)):
        ran = replace(regions[1], again_s=again_s)
        profile = _profile(_storage(0, 0.0, 5.0), first, loss, regions=(regions[0], ran))
        with bytes_over_time() as over_time:
            seen = _seen(profile, "kkk", Conditions(in_forward={2: 60}))
        taken = [moment for moment, nbytes in over_time if nbytes % 100 == 60]
        assert (min(taken), max(moment for moment, _ in over_time if moment <= end_s)) == (2.0, end_s)
        assert seen.peak_bytes == 360
    seen = _seen(profile, "kdk", Conditions(device_budget=210, in_forward={2: 60}))
    assert seen.forward_wait_s == pytest.approx(0.6), "the last region's storage leaves before the loss takes its bytes"


def test_a_plan_means_the_same_for_every_tape() -> None:
    storages = (_storage(0, 0.0, 1.0), _storage(0, 3.0, 5.0, tape=1), _storage(1, 3.5, 4.5, tape=1, nbytes=50))
    profile = _profile(*storages)
    workload = Workload(profile)
    assert [item.positions for item in workload.items] == [(0, 1), (2,)]
    plan = Plan((PlanEntry(index=0, nbytes=100, action="offload"), PlanEntry(index=1, nbytes=50, action="keep")))
    assert workload.from_plan(plan) == (NVME, KEEP)
    assert workload.from_plan(Plan(())) == (NVME, NVME)  # a storage that the plan does not know leaves
    assert simulate(profile, plan).disk.written_bytes == 200


def _everything(workload: Workload) -> Choice:
    tier = HOST if workload.profile.host is not None else NVME
    return tuple(tier if item.movable else KEEP for item in workload.items)


@pytest.mark.parametrize("seed", range(40))
def test_rules_for_every_step(seed: int) -> None:
    profile = random_profile(seed)
    for step in (profile, checkpointed(profile)):
        workload = Workload(step)
        keep = run(workload, workload.keep_all(), Conditions(), detail=True)
        assert (keep.step_s, keep.peak_bytes, keep.moved_bytes) == (step.step_s, step.baseline_peak_bytes, 0)
        choice = _everything(workload)
        with bytes_over_time() as over_time:
            seen = run(workload, choice, Conditions(), detail=True)
        assert max(nbytes for _, nbytes in over_time) == seen.peak_bytes
        assert over_time[-1][1] == 0, "everything has been released"
        assert over_time == sorted(over_time, key=lambda pair: pair[0])
        waits = seen.forward_wait_s + seen.backward_wait_s + seen.cost_s
        assert seen.step_s == pytest.approx(step.step_s + waits)
        assert sum(wait for _, wait in seen.waits) == pytest.approx(seen.backward_wait_s)
        away = [p for p, mode in enumerate(workload.modes(choice)) if mode in (HOST, NVME)]
        planned = sum(workload.nbytes[p] for p in away)
        unused = sum(workload.nbytes[p] for p in away if workload.need[p] is None)
        written = seen.host.written_bytes if step.host is not None else seen.disk.written_bytes
        assert planned - unused <= written + seen.cancelled_bytes <= planned
        assert seen.disk.read_bytes <= seen.disk.written_bytes
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
