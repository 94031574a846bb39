"""``policy="auto"`` on machines that change: many steps of the real offloader in virtual time."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actoffload import Plan
from actoffload.errors import BudgetError, ConfigError
from actoffload.planning import profile as profiles
from actoffload.planning.constants import WARM_UP
from actoffload.planning.profile import Profile
from actoffload.runtime.profiler import Profiler
from tests import planner_cases
from tests.harness import autopilot_of
from tests.planner_rig import MIB, TOKENS, MakeRig, Rig, rigs

FAST, SLOW = 120e6, 15e6
"""Disks, in bytes a second: one that takes all that a step saves, and one that takes a fraction."""
BUDGET = 24 * MIB
SOON = 10
"""From this many steps after a change on, a step is as good as the best plan's."""
NEAR = 1.05


@pytest.fixture
def make_rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRig]:
    with rigs(tmp_path, monkeypatch) as make:
        yield make


@pytest.fixture
def kind() -> str:
    """The kind of device that `recorded` steps are of."""
    return "cpu"


@pytest.fixture
def recorded(kind: str, monkeypatch: pytest.MonkeyPatch) -> list[Profile]:
    """Each recorded step, which is of this kind of device: rules differ by it."""
    profile_of, steps = Profiler.profile, list[Profile]()

    def profile(*given: Any, **options: Any) -> Profile | None:
        found = profile_of(*given, **options)
        if found is not None:
            steps.append(found := replace(found, device=kind))
        return found

    monkeypatch.setattr(Profiler, "profile", profile)
    return steps


ON_EACH_KIND = pytest.mark.parametrize("kind", ["cpu", "cuda"])


def _settled(
    make_rig: MakeRig, bytes_per_s: float, budget: int | None, blocks: int = 8, scale: float = 1.0
) -> tuple[float, int]:
    """Seconds and peak of a step where nothing has ever changed."""
    rig = make_rig(bytes_per_s=bytes_per_s, device_budget=budget, blocks=blocks)
    return rig.steps(WARM_UP + 3, scale), rig.peaks[-1]


def _check(rig: Rig, best: tuple[float, int], first: int) -> None:
    """From one step on, every step is nearly as short as the best, and keeps its budget."""
    config = rig.offloader.config
    budget = None if config.device_budget is None else config.size("device_budget", 0)
    for seconds, peak in zip(rig.seconds[first:], rig.peaks[first:], strict=True):
        assert seconds <= NEAR * best[0]
        assert peak <= (NEAR * best[1] if budget is None else budget)


def test_slow_first_steps_are_unlearned_under_a_budget(make_rig: MakeRig) -> None:
    """Compute becomes fast after the recorded step, so the plan was made for a slower machine."""
    best = _settled(make_rig, 3 * SLOW, BUDGET)
    rig = make_rig(bytes_per_s=3 * SLOW, device_budget=BUDGET)
    rig.clock.speed = 0.25
    rig.steps(WARM_UP + 3)
    rig.clock.speed = 1.0
    changed = len(rig.seconds)
    rig.steps(2 * SOON)
    _check(rig, best, changed + SOON)
    pilot = autopilot_of(rig.offloader)
    assert pilot.plan.predicted_step_s == pytest.approx(rig.seconds[-1], rel=0.05)


@pytest.mark.parametrize(("budget", "blocks"), [(None, 8), (BUDGET, 8), (None, 2)])
def test_a_disk_that_is_throttled_for_a_while(make_rig: MakeRig, budget: int | None, blocks: int) -> None:
    """The small model moves too little to fill the link, and its plan follows the disk all the same."""
    fast, slow = (_settled(make_rig, rate, budget, blocks) for rate in (FAST, SLOW))
    rig = make_rig(bytes_per_s=FAST, device_budget=budget, blocks=blocks)
    rig.steps(2 * SOON)
    _check(rig, fast, WARM_UP + 1)
    rig.disk.bytes_per_s = SLOW
    rig.steps(23)
    _check(rig, slow, 3 * SOON)
    rig.disk.bytes_per_s = FAST
    rig.steps(2 * SOON)
    _check(rig, fast, 2 * SOON + 23 + SOON)


def test_a_disk_that_another_program_writes_to_as_well(make_rig: MakeRig) -> None:
    """The plan uses the bandwidth that another program leaves (DeepSpeed swaps), and later all of it again."""
    shared, whole = (_settled(make_rig, rate, None) for rate in (FAST / 4, FAST))
    rig = make_rig(bytes_per_s=FAST)
    rig.disk.other_bytes = 3 * 2 * MIB  # before each of our writes of 2 MiB
    rig.steps(2 * SOON)
    _check(rig, shared, WARM_UP + 1)
    assert autopilot_of(rig.offloader).profile.disk.write_bytes_per_s == pytest.approx(FAST / 4, rel=0.05)
    assert 0 < rig.moved[-1] < 8 * 4 * 2 * MIB
    rig.disk.other_bytes = 0
    rig.steps(2 * SOON)
    _check(rig, whole, 3 * SOON)


@pytest.mark.parametrize(("factor", "soon"), [(50, SOON), (500, 2 * SOON)])
def test_a_disk_that_no_plan_used_is_measured_now_and_then(make_rig: MakeRig, factor: int, soon: int) -> None:
    """At first the disk is too slow for any plan; the slower one has ended no write when the plan is made."""
    best = _settled(make_rig, FAST, None)
    rig = make_rig(bytes_per_s=FAST / factor)
    rig.steps(3 * SOON)
    assert sum(rig.moved[2 * SOON :]) <= 3 * 2 * MIB, "one storage at a time"
    assert max(rig.seconds) <= 1.01 * min(rig.seconds), "no step waits for it"
    assert "one storage in 5 steps moves only to be measured" in rig.offloader.explain()
    rig.disk.bytes_per_s = FAST
    rig.steps(soon + SOON)
    _check(rig, best, 3 * SOON + soon)
    assert "only to be measured" not in rig.offloader.explain()


def _from_a_file(make_rig: MakeRig, **options: Any) -> Rig:
    """A rig that follows a plan of the usual one, read from its text."""
    rig = make_rig(bytes_per_s=SLOW, device_budget=BUDGET)
    rig.steps(WARM_UP + 2)
    plan = Plan.from_json(autopilot_of(rig.offloader).plan.to_json())
    assert plan.offloaded_bytes
    return make_rig(bytes_per_s=SLOW, device_budget=BUDGET, policy=plan, **options)


@pytest.mark.parametrize(
    ("sizes", "blocks", "where"),
    [
        ((2 * MIB, 3 * MIB, 2 * MIB, 2 * MIB), 8, r"at place \d+ it has 2097152 bytes in layers\.\d"),
        ((2 * MIB,) * 4, 9, r"at place \d+ it has nothing more, and the forward saves 2097152 bytes in layers\.8"),
    ],
)
def test_a_plan_for_another_model_is_refused_with_the_difference(
    make_rig: MakeRig, sizes: tuple[int, ...], blocks: int, where: str
) -> None:
    planned = _from_a_file(make_rig, sizes=sizes, blocks=blocks)
    with pytest.raises(ConfigError, match=where):
        planned.step()


def test_a_plan_from_a_file_decides_alone_once_a_forward_has_fitted_it(make_rig: MakeRig) -> None:
    """From then on its kept storages need no record."""
    planned = _from_a_file(make_rig)
    decision, plan = planned.offloader.store.decision, planned.offloader.config.policy
    assert isinstance(plan, Plan)
    planned.step()
    assert decision.planned_sizes() == ()
    assert planned.steps(4) == pytest.approx(plan.predicted_step_s, rel=0.03)
    assert len(decision.planned_sizes()) == len(plan.entries)


@pytest.mark.parametrize("bytes_per_s", [1.5e6, 3e6, 7e6, FAST])
def test_a_disk_is_known_after_the_first_steps(make_rig: MakeRig, bytes_per_s: float) -> None:
    """A write that runs when backward takes its storage has used the disk, as any other."""
    rig = make_rig(bytes_per_s=bytes_per_s)
    rig.steps(WARM_UP + 2)
    assert autopilot_of(rig.offloader).profile.disk.write_bytes_per_s == pytest.approx(bytes_per_s, rel=0.05)


def test_pending_bytes_bound_the_plan(make_rig: MakeRig) -> None:
    """The disk writes all bytes in time, but `pending_bytes` limits the bytes under way at once."""
    rig = make_rig(bytes_per_s=FAST, pending_bytes="3MiB", forward_s=0.05)
    rig.steps(WARM_UP + 6)
    pilot = autopilot_of(rig.offloader)
    assert pilot.plan.offloaded_bytes == pytest.approx(rig.moved[-1], rel=0.01)
    assert pilot.plan.predicted_peak_bytes == pytest.approx(rig.peaks[-1], rel=0.1)
    assert (pilot.plan.pending_bytes or 0) <= 3 * MIB


def test_planning_comes_to_rest(make_rig: MakeRig) -> None:
    """Steps and a disk that are a little faster or slower each time are no reason for other plans."""
    noise = random.Random(0)
    rig = make_rig(bytes_per_s=SLOW, device_budget=BUDGET)
    for _ in range(100):
        rig.clock.speed = noise.uniform(0.93, 1.07)
        rig.disk.bytes_per_s = SLOW * noise.uniform(0.8, 1.2)
        rig.step()
    assert rig.plans <= 3
    assert len({round(moved / MIB, 1) for moved in rig.moved[50:]}) <= 2  # a page more or less is no other plan


def test_a_step_under_a_plan_looks_at_no_storage_of_its_profile_again(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step compares its links with the plan's; a device waits meanwhile for the first kernel of the step."""
    rig = make_rig(bytes_per_s=SLOW, device_budget=BUDGET)
    rig.steps(2 * SOON)
    looked = []

    def note(name: str) -> None:
        plain = getattr(profiles, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            looked.append(name)
            return plain(*arguments, **options)

        monkeypatch.setattr(profiles, name, noted)

    note("_check_storage")
    note("accumulate")  # the peak of a profile needs all its events in order
    rig.disk.bytes_per_s = 0.99 * SLOW  # so that the link differs
    rig.steps(SOON)
    assert (rig.plans, looked) == (1, [])


def test_shapes_that_take_turns_have_a_plan_each(make_rig: MakeRig) -> None:
    best = {scale: _settled(make_rig, SLOW, BUDGET // 2, 4, scale)[0] for scale in (1.0, 1.5)}
    rig = make_rig(bytes_per_s=SLOW, device_budget=BUDGET // 2, blocks=4)
    for step in range(4 * SOON):
        rig.step(1.0 + step % 2 / 2)
        assert step < 2 * SOON or rig.seconds[-1] <= NEAR * best[1.0 + step % 2 / 2]
    assert rig.plans <= 4
    assert max(rig.peaks) <= BUDGET // 2
    lines = rig.offloader.explain().splitlines()
    (other,) = [line for line in lines if line.startswith("inputs 1000: ")]
    assert re.fullmatch(r"inputs 1000: .* leave, .* stay, a step is predicted to take .*, takes .* s", other)
    assert any(line.startswith("plan 2: first plan (inputs 1") for line in lines)


@pytest.mark.parametrize(("budget", "times"), [(None, 1.0), (BUDGET, 2.0)])
def test_steps_that_become_longer_make_no_room_for_more_without_a_budget(
    make_rig: MakeRig, budget: int | None, times: float
) -> None:
    """The cost of moving looks like compute, so a longer step must not allow more of it."""
    rig = make_rig(bytes_per_s=FAST / 4, device_budget=budget)
    rig.steps(WARM_UP + 3)
    before_s = autopilot_of(rig.offloader).profile.step_s
    rig.clock.speed = 0.5
    rig.steps(2 * SOON)
    assert autopilot_of(rig.offloader).profile.step_s == pytest.approx(times * before_s, rel=0.02)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("bytes_per_s", "speeds"),
    [(FAST, (1.0, 1.0, 1.0, 0.7, 0.5, 0.35)), (SLOW, (1.0, 0.95, 0.9, 0.85))],
    ids=["much", "little"],
)
def test_blocks_run_once_although_other_programs_use_the_processors_now_and_then(
    make_rig: MakeRig, bytes_per_s: float, speeds: tuple[float, ...], seed: int
) -> None:
    """Two steps in a row take up to three times as long. That says nothing about the blocks which run once."""
    rng, rig = random.Random(seed), make_rig(bytes_per_s=bytes_per_s, recompute=True, announce="none")
    once = []
    for _ in range(20):
        rig.clock.speed = rng.choice(speeds)
        rig.steps(2)
        once.append(_once(rig))
    assert once[0] == 0 < once[1]
    assert once[1:] == once[1:2] * 19
    assert rig.plans == 2


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(("kind", "speed", "pause_s"), [("cpu", 0.35, 0.0), ("cpu", 1.0, 5.0), ("cuda", 1.0, 5.0)])
def test_one_long_step_does_not_refuse_blocks_that_should_run_once(
    make_rig: MakeRig, speed: float, pause_s: float
) -> None:
    """It is the first one of its plan, and saves another size than the plan was made for, so its times are used."""
    rig = make_rig(bytes_per_s=FAST, recompute=True, announce="none")
    rig.steps(WARM_UP + 1)
    layer: Any = rig.model.layers[3]
    layer.sizes = (3 * MIB, 2 * MIB, 2 * MIB, 2 * MIB)
    rig.clock.speed = speed
    rig.step()
    rig.clock.compute(pause_s)
    rig.clock.speed = 1.0
    rig.steps(2)
    assert _once(rig) == 8


@pytest.mark.parametrize("slow", range(4))
def test_one_slow_step_is_no_new_pace(make_rig: MakeRig, slow: int) -> None:
    """After the disk has changed a step is recorded, which may be the slow one."""
    rig = make_rig(bytes_per_s=SLOW, recompute=True, announce="none")
    rig.steps(SOON)
    rig.disk.bytes_per_s = 2 * SLOW
    once = []
    for step in range(SOON):
        rig.clock.speed = 0.35 if step == slow else 1.0
        rig.step()
        once.append(_once(rig))
    assert max(once) <= 5, "the disk takes no more"


@ON_EACH_KIND
@pytest.mark.parametrize(("speed", "expected"), [(0.5, range(5, 8)), (2.0, range(1, 3))])
def test_another_pace_of_the_machine_changes_the_blocks_that_run_once(
    make_rig: MakeRig, recorded: list[Profile], speed: float, expected: range, kind: str
) -> None:
    rig = make_rig(bytes_per_s=SLOW * 4 / 3, recompute=True, announce="none")
    rig.steps(2 * SOON)
    assert _once(rig) in (3, 4), "the disk takes no more during a forward"
    rig.clock.speed = speed
    once = []
    recorded.clear()
    for _ in range(SOON + 5):
        rig.step()
        once.append(_once(rig))
    assert len(recorded) == 1 or kind != "cpu", "only the first one under the new plan"
    assert set(once[SOON:]) <= set(expected)
    assert min(once) > 0, "no step tells how long the program's own checkpoints take now"


PAUSES: dict[str, Collection[int]] = {
    "none": (),
    "after the recorded steps": range(WARM_UP + 2),
    "at first": range(SOON + 2),
    "in the end": range(SOON + 2, 2 * SOON + 4),
}
"""After these steps something else takes as long as two steps: an evaluation, say, or the data are late."""


NOTHING_RECOMPUTED: dict[str, Any] = {"bytes_per_s": 40e6}
SOME_RUN_ONCE: dict[str, Any] = {"bytes_per_s": 4 / 3 * SLOW, "recompute": True}


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (NOTHING_RECOMPUTED, "cuda"),
        (SOME_RUN_ONCE, "cpu"),
        pytest.param(NOTHING_RECOMPUTED, "cpu", marks=pytest.mark.thorough),
        pytest.param(SOME_RUN_ONCE, "cuda", marks=pytest.mark.thorough),
    ],
)
def test_the_time_between_backward_and_the_next_forward_changes_no_plan(
    make_rig: MakeRig, recorded: list[Profile], options: dict[str, Any]
) -> None:
    """It is no pace of the machine, and no part of what a plan makes shorter."""
    found = {}
    for pauses, after in PAUSES.items():
        rig = make_rig(announce="none", **options)
        once = []
        recorded.clear()
        for step in range(2 * SOON + 4):
            _steps_beside(rig, 1, 5.0 if step in after else 0.0)
            once.append(_once(rig))
        assert len(recorded) <= 4, pauses
        settled = slice(SOON, None)
        found[pauses] = (set(once[settled]), max(rig.peaks[settled]), rig.seconds[settled])
    once_alone, peak, _ = found["none"]
    for pauses, (once_beside, highest, seconds) in found.items():
        assert once_beside == once_alone, pauses
        assert highest <= peak, pauses
        assert max(seconds) <= 1.01 * min(found["none"][2]), pauses


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("options", "layer", "backward", "kind"),
    [
        (NOTHING_RECOMPUTED, 3, False, "cpu"),
        (SOME_RUN_ONCE, 3, False, "cuda"),
        (NOTHING_RECOMPUTED, 3, True, "cuda"),
        ({"bytes_per_s": 3 * SLOW, "recompute": True}, 7, True, "cpu"),
        pytest.param(NOTHING_RECOMPUTED, 3, False, "cuda", marks=pytest.mark.thorough),
        pytest.param(SOME_RUN_ONCE, 3, False, "cpu", marks=pytest.mark.thorough),
        pytest.param({"bytes_per_s": 3 * SLOW, "recompute": True}, 7, True, "cuda", marks=pytest.mark.thorough),
    ],
)
def test_a_stall_in_the_recorded_steps_makes_no_other_plan(
    make_rig: MakeRig, options: dict[str, Any], layer: int, backward: bool
) -> None:
    """A compilation, say: at one pace throughout, the step on paper would have no time for any move."""
    found = []
    for stalls in False, True:
        rig = make_rig(announce="none", **options)
        block: Any = rig.model.layers[layer]
        plain, left_s = block.compute, [0.0]

        def compute(seconds: float, plain: Any = plain, block: Any = block, left_s: list[float] = left_s) -> None:
            if (seconds > block.forward_s) == backward:
                seconds, left_s[0] = seconds + left_s[0], 0.0
            plain(seconds)

        block.compute = compute
        for step in range(SOON):
            left_s[0] = 10.0 if stalls and step < WARM_UP + 2 else 0.0
            rig.step()
        rig.steps(SOON)
        found.append((_once(rig), max(rig.peaks[-SOON:]), max(rig.seconds[-SOON:])))
    (once_alone, peak, seconds), (once, highest, longest) = found
    assert once == once_alone
    assert highest <= peak
    assert longest <= 1.01 * seconds


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("kind", ["cuda"])
def test_a_stall_in_the_step_that_is_recorded_after_a_change_of_the_model(make_rig: MakeRig) -> None:
    """Steps were as the first recorded one, which says nothing of the one that takes its place."""
    rig = make_rig(bytes_per_s=40e6)
    rig.steps(2 * SOON)
    blocks: list[Any] = list(rig.model.layers)
    for block in blocks:
        block.sizes = (3 * MIB,) * 4
    plain_s = blocks[3].forward_s
    for step in range(2 * SOON):
        blocks[3].forward_s = plain_s + (10.0 if step < WARM_UP + 2 else 0.0)
        rig.step()
    *_, reason, last = autopilot_of(rig.offloader).history
    assert "a step computes for" in reason
    assert last == "first plan"


def test_a_second_backward_over_one_forward_is_no_part_after_backward(
    make_rig: MakeRig, recorded: list[Profile]
) -> None:
    rig = make_rig(bytes_per_s=FAST)
    for _ in range(WARM_UP + 2):
        with rig.offloader:
            out = rig.model(torch.empty(TOKENS))
        for keep in True, False:
            out.backward(torch.empty_like(out), retain_graph=keep)
            rig.clock.compute(0.5)
    assert recorded[-1].backward_s == pytest.approx(2 * 1.6 + 0.5)
    assert recorded[-1].other_s == pytest.approx(0.5)


def test_a_look_at_saved_tensors_after_backward_begins_no_backward(make_rig: MakeRig, recorded: list[Profile]) -> None:
    rig = make_rig(bytes_per_s=FAST)
    for _ in range(WARM_UP + 2):
        with rig.offloader:
            out = rig.model(torch.empty(TOKENS))
        node: Any = out.grad_fn
        out.backward(torch.empty_like(out), retain_graph=True)
        assert node.saved_tensors
        rig.clock.compute(0.5)
        del out, node
    assert recorded[-1].backward_s == pytest.approx(1.6)
    assert recorded[-1].other_s == pytest.approx(0.5)


@pytest.mark.usefixtures("recorded")
@ON_EACH_KIND
def test_a_plan_after_a_pause_is_for_steps_without_it(make_rig: MakeRig) -> None:
    """The first steps were followed by it, that is, also the one in which all blocks ran again."""
    rig = make_rig(bytes_per_s=4 / 3 * SLOW, recompute=True, announce="none")
    _steps_beside(rig, 2 * SOON, 5.0)
    rig.steps(2 * SOON)
    rig.disk.bytes_per_s = 3 * SLOW
    rig.steps(2 * SOON)
    assert _once(rig) == 7, "as without a pause"


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(("kind", "before"), [("cpu", WARM_UP + 2), ("cpu", 2 * SOON), ("cuda", 2 * SOON)])
def test_the_time_after_backward_and_the_pace_change_at_once(make_rig: MakeRig, before: int) -> None:
    """The base takes the new pace in forward and backward alone. The first steps under a plan show both changes."""
    rig = make_rig(bytes_per_s=SLOW * 4 / 3, recompute=True, announce="none")
    rig.steps(before)
    rig.clock.speed = 0.5
    _steps_beside(rig, 2 * SOON, 5.0)
    again_s = autopilot_of(rig.offloader).facts().shape.base_s
    assert again_s == pytest.approx((3.2 + 5.0) / rig.clock.speed, rel=0.005)
    assert _once(rig) == 6, "as without a pause"


@pytest.mark.usefixtures("recorded")
@ON_EACH_KIND
def test_a_slower_machine_is_seen_although_less_follows_backward(make_rig: MakeRig) -> None:
    """The first steps under the plan show both at once."""
    rig = make_rig(bytes_per_s=40e6, device_budget=BUDGET)
    _steps_beside(rig, WARM_UP + 1, 5.0)
    rig.clock.speed = 0.5
    rig.steps(2 * SOON)
    profile = autopilot_of(rig.offloader).profile
    assert profile.passes_s == pytest.approx(2 * 2.4, rel=0.05)
    assert profile.other_s == pytest.approx(0.0, abs=0.01)


def _steps_beside(rig: Rig, count: int, pause_s: float) -> None:
    """Train steps, each with time after it that is none of forward or backward."""
    for _ in range(count):
        rig.step()
        rig.clock.compute(pause_s)


def _once(rig: Rig) -> int:
    """The number of blocks that run once in the next step."""
    plan = autopilot_of(rig.offloader).plan
    return 0 if plan is None else len(plan.once or ())


def test_a_budget_that_a_step_keeps_needs_no_plan(make_rig: MakeRig) -> None:
    """The planner's floor is 4 MiB.

    Below it, tensors that stay because backward follows at once have no room, and leave.
    """
    rig = make_rig(bytes_per_s=SLOW, device_budget=3 * MIB)
    rig.steps(WARM_UP + 3)
    assert max(rig.peaks) <= 3 * MIB


SMALL = MIB // 2
SOME_STAY: dict[str, Any] = {"bytes_per_s": SLOW, "sizes": (2 * MIB, SMALL, SMALL, SMALL)}
"""Three tensors of each block are below ``min_bytes``. One of them may be saved before there is room for it."""


@pytest.mark.parametrize("megabytes", [2, 4, 6])
def test_a_budget_in_bytes_that_no_step_keeps_is_an_error_after_one_step(make_rig: MakeRig, megabytes: int) -> None:
    rig = make_rig(device_budget=megabytes * MIB, **SOME_STAY)
    rig.step()
    with pytest.raises(BudgetError) as caught:
        rig.step()
    assert len(rig.peaks) == 1, "before the second step passes it as well"
    floor = caught.value.floor_bytes
    assert f"the floor is {floor} bytes" in str(caught.value)
    enough = make_rig(device_budget=floor, **SOME_STAY)
    enough.steps(WARM_UP + SOON)
    assert max(enough.peaks[WARM_UP + 1 :]) <= floor + SMALL


@pytest.mark.parametrize("percent", [2, 10, 20])
def test_a_share_that_no_step_keeps_is_the_floor_with_one_warning(make_rig: MakeRig, percent: int) -> None:
    rig = make_rig(device_budget=f"{percent}%", **SOME_STAY)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rig.steps(WARM_UP + SOON)
    reported = [str(warning.message) for warning in caught]
    assert len(reported) == 1
    floor = int(re.findall(r"\((\d+) bytes\) holds from now on", reported[0])[0])
    assert f"device_budget='{percent}%' is " in reported[0]
    assert max(rig.peaks[WARM_UP + 1 :]) <= floor + SMALL
    assert reported[0].removeprefix("actoffload: ") in rig.offloader.report()
    budget = percent * rig.offloader.statistics().baseline_peak_bytes // 100
    with pytest.raises(BudgetError) as error:
        make_rig(device_budget=budget, **SOME_STAY).steps(WARM_UP + 2)
    assert error.value.floor_bytes == floor, "the same in bytes names the same figure"


@pytest.mark.parametrize(
    ("model", "scenario", "limited"),
    [
        ("two blocks", "throttled for a while", True),
        ("small inputs", planner_cases.FROM_A_FILE, True),
        pytest.param("BERT", "others in backward", True, marks=pytest.mark.thorough),  # a test above has others
        ("conv", "alternating shapes", False),  # one shape moves nothing but to measure the disk
    ],
)
def test_a_sample_of_the_cases(make_rig: MakeRig, model: str, scenario: str, limited: bool) -> None:
    """``python -m benchmarks.planner`` makes the table of all cases."""
    row = planner_cases.run(make_rig, model, scenario, limited)
    assert row["holds"], row


def test_an_explanation_has_the_age_of_its_profile(make_rig: MakeRig) -> None:
    rig = make_rig(bytes_per_s=SLOW, device_budget=BUDGET)
    rig.steps(WARM_UP + 2)
    assert "\nmeasured: in the step recorded 1 step ago\n" in rig.offloader.explain()
    rig.steps(12)
    assert "\nmeasured: in the step recorded 13 steps ago\n" in rig.offloader.explain()
