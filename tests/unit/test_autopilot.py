"""From steps to a plan, and the plan's effect on the steps that follow."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actoffload import Offloader, Plan
from actoffload.autotune.budgets import Budgets
from actoffload.autotune.observations import surprise
from actoffload.autotune.shapes import AGAIN, Shape, Tried
from actoffload.errors import BudgetError
from actoffload.planning.constants import MOST_KNOWN, TIGHTER, WARM_UP
from actoffload.planning.observed import Observed
from actoffload.planning.plan import PlanEntry
from actoffload.planning.profile import Link, Profile, Storage
from actoffload.planning.search import Limits, Proposal, own_budget
from actoffload.testing.gpt import GPT, GPTConfig
from tests.harness import (
    Chain,
    MakeOffloader,
    accounts_of,
    assert_empty,
    assert_same_gradients,
    autopilot_of,
    batch,
    budget_of,
    gradients,
    plan_with,
    recorder_of,
    use_clock,
)

TOKENS = torch.arange(64).reshape(2, 32)
Choose = Callable[[int, int], bool]
ALL_AGAIN: frozenset[int] = frozenset()


@pytest.fixture(autouse=True)
def no_pause_after_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause is as long as the search took, many times over: on a busy machine that would be all steps of a test."""
    monkeypatch.setattr("actoffload.autotune.making.PLANNING_SHARE", 1e9)


class _Script:
    """A planner with fixed answers: which storages stay (by place and size), and which regions run once."""

    def __init__(self, stays: Choose, *proposals: frozenset[int]) -> None:
        self.stays = stays
        self.proposals = list(proposals)
        self.bases: list[Profile] = []
        self.profiles: list[Profile] = []
        self.limits: list[Limits] = []
        self.error: BudgetError | None = None
        self.errors_left = 1000
        self.scale = 1.0
        self.gain = 0.1
        self.most_gain = 1000
        """More regions that run once make a step longer."""

    def plan(self, profile: Profile, limits: Limits) -> Plan:
        self.profiles.append(profile)
        self.limits.append(limits)
        if self.error is not None and self.errors_left:
            self.errors_left -= 1
            raise self.error
        entries = tuple(
            PlanEntry(index=s.index, nbytes=s.nbytes, action="keep" if self.stays(s.index, s.nbytes) else "offload")
            for s in profile.storages
            if s.index is not None and s.tape == 0
        )
        seconds = (1.0 if len(profile.once) <= self.most_gain else 2.0) - self.gain * len(profile.once)
        return Plan(entries, planner="scripted", predicted_step_s=self.scale * seconds)

    def propose(self, base: Profile, limits: Limits) -> Proposal:
        self.bases.append(base)
        once = self.proposals.pop(0) if len(self.proposals) > 1 else self.proposals[0]
        return Proposal(once=once, step_s=0.5, peak_bytes=0)


def _scripted(
    make_offloader: MakeOffloader, *proposals: set[int], stays: Choose = lambda *_: True, **options: Any
) -> tuple[Offloader, _Script, Any]:
    """An offloader under ``policy="auto"``, its planner with fixed answers, and the autopilot that calls it."""
    offloader, planner = make_offloader(policy="auto", **options), _Script(stays, *map(frozenset, proposals))
    return offloader, planner, plan_with(offloader, planner)


def _step(offloader: Offloader, model: nn.Module, *args: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(5)
    with offloader:
        loss = model(*args).square().sum()
    loss.backward()
    return gradients(model)


def _steps(offloader: Offloader, count: int, model: nn.Module | None = None) -> None:
    model = Chain() if model is None else model
    for _ in range(count):
        _step(offloader, model, batch())


def test_the_step_after_the_warm_up_becomes_a_plan_that_is_followed(make_offloader: MakeOffloader) -> None:
    offloader, planner, pilot = _scripted(make_offloader, stays=lambda index, _: index % 2 == 0, engine="memory")
    _steps(offloader, WARM_UP + 1)
    assert planner.profiles == []
    assert "no time to move" not in offloader.statistics().kept_bytes
    assert "\nno plan yet: it is made from what the first 2 steps show\n" in offloader.explain()
    _steps(offloader, 1)
    (profile,) = planner.profiles
    assert profile.disk is not None
    assert profile.saved_bytes > 0
    assert list(pilot.history) == ["first plan"]
    assert [e.action for e in offloader.plan.entries] == [e.action for e in pilot.plan.entries]
    assert {e.reason for e in offloader.plan.entries if e.action == "keep"} == {"no time to move"}
    text = offloader.explain(tensors=True)
    assert all(part in text for part in ("scripted", "plan 1: first plan", "keep (no time to move)"))
    assert_empty(offloader)


def test_passes_without_gradients_or_without_backward_are_no_steps(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloader, planner, _ = _scripted(make_offloader)
    model, seconds = Chain(), [0.0]
    use_clock(lambda: seconds[0], monkeypatch)

    def evaluate() -> None:
        with torch.no_grad(), offloader:
            model(batch())
            seconds[0] += 1.0

    for _ in range(6):
        evaluate()
        with offloader:
            model(batch())
    assert planner.profiles == []
    for _ in range(WARM_UP + 2):
        evaluate()
        _steps(offloader, 1, model)
    (profile,) = planner.profiles
    assert profile.step_s < 1.0, "the evaluation before a step is not recorded with it"


def test_a_graph_that_is_kept_alive_is_the_reason_for_no_plan(make_offloader: MakeOffloader) -> None:
    offloader, model = make_offloader(policy="auto"), Chain()
    optimizer = torch.optim.SGD(model.parameters())
    with offloader:
        kept = model(batch()).sum()
    for _ in range(WARM_UP + 3):
        _steps(offloader, 1, model)
        optimizer.step()
    assert "no plan yet: no step has ended" in offloader.explain()
    del kept
    _steps(offloader, 1, model)
    assert "no step has ended" not in offloader.explain()


def test_steps_in_which_all_is_small_are_recorded_less_and_less(make_offloader: MakeOffloader) -> None:
    """There is nothing to plan, and recording takes time for each small tensor."""
    offloader, model = make_offloader(policy="auto", min_bytes="1MiB"), Chain()
    recorded = []
    for _ in range(40):
        with offloader:
            recorded.append(recorder_of(offloader).active)
            loss = model(batch()).sum()
        loss.backward()
    assert recorded[0]
    assert sum(recorded) <= 8
    _steps(offloader, 64, nn.Sequential(nn.Linear(64, 1 << 12), nn.Tanh(), nn.Tanh()))
    assert autopilot_of(offloader).plan is not None, "later steps save large ones"


def test_a_forward_that_saves_something_else_starts_over(make_offloader: MakeOffloader) -> None:
    """The first storage is the same, so the library takes it for the same shape."""
    offloader, _, pilot = _scripted(make_offloader)
    _steps(offloader, WARM_UP + 2, Chain(depth=2))
    _steps(offloader, 2, Chain(depth=4))
    assert pilot.plan is None
    _steps(offloader, 1, Chain(depth=4))
    again = "the forward saved other sizes than the plan was made for"
    assert list(pilot.history) == ["first plan", again, "first plan"]


def test_a_budget_that_cannot_be_kept_is_an_error_before_the_forward(make_offloader: MakeOffloader) -> None:
    offloader, planner, _ = _scripted(make_offloader, device_budget=1000)
    planner.error = BudgetError(1000, 4096)
    _steps(offloader, WARM_UP)
    with pytest.raises(BudgetError, match="device_budget=1000: the floor is "), offloader:
        raise AssertionError("not reached")
    assert_empty(offloader)


def test_a_planner_that_is_too_strict_is_not_believed(make_offloader: MakeOffloader) -> None:
    offloader, planner, pilot = _scripted(make_offloader, device_budget="1GiB", nvme_budget="8MiB")
    planner.error = BudgetError(1 << 30, 1 << 31)
    _steps(offloader, WARM_UP + 6)
    (limits,) = planner.limits
    assert (limits.device_budget, limits.nvme_budget, limits.tiers) == (1 << 30, 8 << 20, ("nvme",))
    assert len(pilot.history) == 1
    assert pilot.history[0].startswith("no plan: device_budget=")


def test_gradients_are_the_same_under_any_plan(make_offloader: MakeOffloader) -> None:
    model = GPT(GPTConfig(layers=3, width=32, seq=32, dropout=0.1))
    reference = _step(make_offloader(policy="all"), model, TOKENS)
    chance = random.Random(0)
    for _ in range(6):
        stays = [chance.random() < 0.5 for _ in range(200)]
        offloader, planner, _ = _scripted(make_offloader, device_budget="1MiB", debug=True)
        planner.stays = partial(lambda stays, index, nbytes: stays[index], stays)
        offloader.use(model)
        for _ in range(WARM_UP + 3):
            assert_same_gradients(_step(offloader, model, TOKENS), reference)
        offloader.close()


def test_without_a_plan_room_is_made_for_the_largest_that_any_shape_has_saved(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(policy="auto", device_budget="1MiB")
    following, budget = autopilot_of(offloader)._following, budget_of(offloader)
    budget.largest_bytes = 1000
    following.follow(Plan((PlanEntry(index=0, nbytes=10, action="keep"),)))
    assert budget.largest_bytes == 10
    following.follow(None)
    assert budget.largest_bytes == 1000


# -- checkpointed regions ---------------------------------------------------------------------------------------------


class _Checkpointed(nn.Module):
    """Four layers, each in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Chain().layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)) * torch.sigmoid(x), x, use_reentrant=False)
        return x


def _regions(offloader: Offloader, count: int) -> None:
    """Take steps with four checkpointed regions."""
    _steps(offloader, count, _Checkpointed())


def _once(offloader: Offloader) -> frozenset[int]:
    return frozenset(offloader.store.regions.once)


def test_a_step_with_all_regions_again_is_the_base_of_the_choice_and_the_next_one_of_the_plan(
    make_offloader: MakeOffloader,
) -> None:
    reported: list[str] = []
    offloader, planner, pilot = _scripted(make_offloader, {1, 3}, announce=reported.append)
    _regions(offloader, WARM_UP + 1)
    assert (_once(offloader), planner.bases) == (ALL_AGAIN, [])
    _regions(offloader, 1)
    assert _once(offloader) == {1, 3}
    (base,) = planner.bases
    assert [region.again_s is None for region in base.regions] == [False] * 4
    planned_from, on_paper = planner.profiles
    assert planned_from == base
    assert on_paper.once == (1, 3), "no step has saved these regions' tensors yet"
    assert pilot.plan is not None
    assert not any("checkpointed regions" in line for line in reported), "a plan made only on paper is not announced"
    _regions(offloader, 1)
    _, _, profile = planner.profiles
    assert [region.again_s is None for region in profile.regions] == [False, True, False, True]
    own = own_budget(base, {})
    assert own <= base.baseline_peak_bytes, "no more than the program's own checkpoints"
    assert planner.limits[-1].device_budget == own
    plan: Any = pilot.plan
    assert (plan.once, plan.regions, _once(offloader)) == ((1, 3), 4, frozenset({1, 3}))
    _regions(offloader, 3)
    (line,) = [line for line in reported if "checkpointed regions" in line]
    assert line.startswith("actoffload: 4 checkpointed regions: 2 no longer run again, predicted ")
    assert line.removeprefix("actoffload: ") in offloader.explain()


def test_without_a_plan_that_keeps_the_budget_other_regions_are_chosen_for_less(make_offloader: MakeOffloader) -> None:
    offloader, planner, pilot = _scripted(make_offloader, {0, 1, 2, 3}, {3}, device_budget="1GiB")
    _regions(offloader, WARM_UP + 2)
    assert set(_once(offloader)) == {0, 1, 2, 3}
    planner.error, planner.errors_left = BudgetError(1 << 30, 1 << 31), 1
    _regions(offloader, 1)
    assert set(_once(offloader)) == {3}, "no plan for the recorded step kept the budget"
    assert planner.limits[-1].device_budget == int(TIGHTER * (1 << 30))
    planner.errors_left = 2
    _regions(offloader, 1)
    assert set(_once(offloader)) == set(), "no plan keeps it, for these regions or on paper for all again: all moves"
    assert pilot.plan is None, "the next step is recorded"


def test_each_plan_is_made_within_the_budget_of_its_own_regions(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of the base while other regions run once, and that of regions on paper alone."""
    offloader, planner, pilot = _scripted(make_offloader, {0, 1, 2, 3}, {3}, device_budget="1GiB")
    limits = pilot.making.limits

    def limits_of(shape: Shape, once: frozenset[int] | None = None) -> Limits:
        found: Limits = limits(shape, once)
        return replace(found, host_budget=1 + len(shape.once if once is None else once))

    monkeypatch.setattr(pilot.making, "limits", limits_of)
    _regions(offloader, WARM_UP + 2)
    planner.error, planner.errors_left = BudgetError(1 << 30, 1 << 31), 1
    _regions(offloader, 1)
    planned = zip(planner.profiles, planner.limits, strict=True)
    seen = [(len(profile.once), (limits.host_budget or 0) - 1) for profile, limits in planned]
    assert seen == [(0, 0), (4, 4), (4, 4), (0, 0), (1, 1)]


def test_regions_with_which_a_step_passed_the_number_are_tried_once_more_with_less(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloader, _, _ = _scripted(make_offloader, {1, 3}, device_budget="1GiB")
    _regions(offloader, WARM_UP + 2)
    assert _once(offloader) == {1, 3}
    monkeypatch.setattr(Budgets, "passed_bytes", 1000)
    _regions(offloader, 1)
    assert _once(offloader) == {1, 3}
    _regions(offloader, 1)
    assert _once(offloader) == ALL_AGAIN, "it has passed the number twice"


@pytest.mark.parametrize(("gain", "count"), [(0.0035, 4), (0.002, 0), (-0.1, 0)])
def test_regions_run_once_for_a_gain_of_more_than_a_percent(
    make_offloader: MakeOffloader, gain: float, count: int
) -> None:
    offloader, planner, pilot = _scripted(make_offloader, {0, 1, 2, 3}, device_budget="1GiB")
    planner.gain = gain
    for _ in range(2):  # on paper, and for the tensors that the step has saved
        _regions(offloader, WARM_UP + 2)
        assert len(_once(offloader)) == len(pilot.plan.once) == count
    assert len(pilot.history) == (2 if count else 1)


def test_a_recorded_step_that_is_no_shorter_than_the_bases_is_not_followed(make_offloader: MakeOffloader) -> None:
    offloader, planner, pilot = _scripted(make_offloader, {0, 1, 2, 3}, device_budget="1GiB")
    _regions(offloader, WARM_UP + 2)
    assert len(_once(offloader)) == 4
    planner.most_gain = 2
    _regions(offloader, 1)
    assert (_once(offloader), pilot.plan.once) == (ALL_AGAIN, ())
    _regions(offloader, 12)
    assert _once(offloader) == ALL_AGAIN, "the choice is not tried again within the same budget"


def test_measured_steps_decide_at_last(make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans predict a shorter mix; measured, it is longer than the base's prediction and than the base's steps."""
    offloader, planner, pilot = _scripted(make_offloader, {0, 1, 2, 3}, device_budget="1GiB")
    planner.scale = 1e-9  # any measured step is longer, by too little for a new plan
    monkeypatch.setattr("actoffload.autotune.autopilot.surprise", lambda *_, **__: "")
    seen = []
    for _ in range(40):
        _regions(offloader, 1)
        seen.append(len(_once(offloader)))
    assert 4 in seen
    assert 0 in seen[seen.index(4) :]
    assert any("4 regions run once takes" in reason for reason in pilot.history)


@pytest.mark.parametrize(("wait_s", "late"), [(0.16, True), (0.01, False)])
def test_a_late_recorded_step_is_found_by_the_compute_of_later_steps(wait_s: float, late: bool) -> None:
    """A plan without a budget fills all the time of the recorded step: no step is shorter than predicted."""
    recorded = Profile(storages=(), forward_s=0.33, backward_s=0.31, device="cuda")
    plan = Plan((), predicted_step_s=0.64, predicted_peak_bytes=1)
    seen = Observed(step_s=0.64, forward_wait_s=wait_s, peak_bytes=1)
    assert surprise(plan, seen, recorded, recorded, limited=False).startswith("a step computes for 0.48 s") == late


def test_a_plan_that_passes_the_budget_is_replaced_even_if_the_new_one_is_slower(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    making = autopilot_of(make_offloader(policy="auto")).making
    storages = [Storage(index=n, nbytes=100, birth_s=float(n), need_s=9.0 - n, last_need_s=10.0 - n) for n in range(3)]
    disk = Link(write_bytes_per_s=100, read_bytes_per_s=10)  # a read takes longer than backward is away
    step = Profile(storages=tuple(storages), forward_s=5.0, backward_s=5.0, disk=disk)
    keep, move = (
        Plan(tuple(PlanEntry(index=n, nbytes=100, action=action) for n, action in enumerate(actions)))
        for actions in (["keep"] * 3, ["offload", "keep", "keep"])
    )
    for budget, gains in ((250, True), (350, False)):
        monkeypatch.setattr(making, "limits", lambda shape, budget=budget: Limits(device_budget=budget))
        assert making.gains(Shape(()), step, move, keep) == gains


def _know(shape: Shape, once: frozenset[int], seconds: float, nbytes: int = 0) -> None:
    """Tell the shape how long a step takes under a plan of these regions."""
    plan = Plan((PlanEntry(index=0, nbytes=nbytes, action="keep"),))
    shape.tried.know(Tried(once, plan, Profile(storages=()), None, None, seconds))


def test_of_many_choices_of_regions_the_longest_steps_are_forgotten() -> None:
    shape = Shape(())
    for count, seconds in [(0, 9.0), (1, 1.0), *((n, 2.0 + n) for n in range(2, 30))]:
        shape.once = frozenset(range(count))
        _know(shape, shape.once, seconds)
    assert {0, 1, 2, 3, 29} <= {len(tried.once) for tried in shape.tried}, "the base, the shortest ones and the last"
    assert len(list(shape.tried)) == MOST_KNOWN


def test_of_many_plans_of_no_regions_the_first_is_remembered() -> None:
    """Corrections of one plan differ in their entries, and none of them runs a region once."""
    shape = Shape(())
    for number in (0, 1, 0, *range(2, 3 * MOST_KNOWN)):  # the first plan is measured, and known again
        _know(shape, AGAIN, 1.0 + number % 5 if number else 9.0, nbytes=number)
    known = list(shape.tried)
    assert len(known) == MOST_KNOWN
    assert [tried.plan.entries[0].nbytes for tried in (known[0], known[-1])] == [0, 3 * MOST_KNOWN - 1]


def test_a_base_during_which_the_allocator_gave_its_cache_back_is_recorded_again(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloader, planner, pilot = _scripted(make_offloader, {1, 3}, device_budget="1GiB")
    flushes = itertools.count()
    count = partial(next, flushes)
    monkeypatch.setattr(offloader.store.tiers, "allocator_count", lambda n: count() if n == "num_alloc_retries" else 0)
    _regions(offloader, WARM_UP + 2)
    assert (_once(offloader), pilot.plan.once, planner.bases) == (ALL_AGAIN, (), []), "its times choose no regions"
    planner.scale = 1e-9  # the simulation of the present plan is no shorter
    count = partial(int, 99)
    _regions(offloader, 1)
    assert _once(offloader) == {1, 3}


def test_each_shape_has_regions_of_its_own(make_offloader: MakeOffloader) -> None:
    offloader, _, _ = _scripted(make_offloader, {0}, {2})
    model = _Checkpointed()
    for step in range(2 * (WARM_UP + 4)):
        _step(offloader, model, batch(rows=128 if step % 2 else 64))
        seen = _once(offloader)
        if step < 2:
            assert seen == ALL_AGAIN
    _step(offloader, model, batch(rows=64))
    assert {seen, _once(offloader)} == {frozenset({0}), frozenset({2})}


def _run_out_of_memory(offloader: Offloader, model: nn.Module) -> None:
    with offloader:
        _ = model(batch()).sum()
        raise torch.OutOfMemoryError("no memory")


def test_a_step_that_ran_out_of_memory_is_followed_by_one_with_all_regions_again(make_offloader: MakeOffloader) -> None:
    offloader, planner, pilot = _scripted(make_offloader, {1, 3}, stays=lambda *_: False, device_budget="1GiB")
    model = _Checkpointed()
    _regions(offloader, WARM_UP + 4)
    assert pilot.plan.once == (1, 3)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        _run_out_of_memory(offloader, model)
    (note,) = caught.value.__notes__
    assert note.startswith("actoffload: ")
    assert "of saved tensors were on the device; the forward had saved" in note
    assert note.endswith("else lower device_budget=1073741824, or the batch")
    peak = accounts_of(offloader).step_peak_bytes
    del caught
    with offloader:
        assert _once(offloader) == ALL_AGAIN
        loss = model(batch()).sum()
    loss.backward()
    _regions(offloader, 1)
    assert planner.limits[-1].device_budget <= 0.9 * peak
