"""Steps without hooks: no tensor moves, and the hooks of tensors that stay would take too much of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from actoffload import Attachment, Offloader, attach, no_offload, offload_activations
from actoffload.autograd.hook_stack import Hooks, top
from actoffload.autotune.observations import Recording, StepsUnderPlan, Watch, at_pace, had_stall, pace_of, surprise
from actoffload.planning.constants import MOST_REST, REVIEW_STEPS
from actoffload.planning.observed import Observed
from actoffload.planning.plan import Plan
from actoffload.planning.profile import Profile, Region, RegionSave, Storage
from actoffload.planning.search import Limits
from actoffload.testing.simulated_device import SimulatedDevice
from actoffload.tiers.tiers import Tiers
from tests import host_bound
from tests.harness import Chain, assert_same_gradients, batch, gradients, train_step

SMALL, LARGE = 16, 2048
"""Rows of inputs: no tensor of the small one is large enough to move, nearly all of the large one's are."""


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Hooks take too much of its steps, however long a busy machine makes them."""
    monkeypatch.setattr("actoffload.autotune.shapes.HOOKS_S", 1.0)
    return Chain(depth=8)


def _attach(model: nn.Module, path: Path, **options: Any) -> Attachment:
    return attach(model, target="nvme", path=str(path), announce="none", min_bytes="64KiB", **options)


def _context(model: nn.Module, path: Path) -> offload_activations:
    return offload_activations("nvme", model=model, path=str(path), announce="none", min_bytes="64KiB")


def _hooks_of_the_program() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _rest(model: nn.Module, offloader: Offloader | None = None) -> None:
    """Take small steps until the library has found that they need no hooks."""
    for _ in range(8):
        train_step(model, batch(SMALL), offloader)


def _saved(attachment: Attachment) -> int:
    return attachment.offloader.statistics().packed_tensors


def test_most_steps_of_a_model_of_which_nothing_moves_run_without_hooks(model: nn.Module, tmp_path: Path) -> None:
    expected, attachment = train_step(model, batch(SMALL)), _attach(model, tmp_path)
    saved = []
    for _ in range(2 * MOST_REST):
        assert_same_gradients(train_step(model, batch(SMALL)), expected)
        saved.append(_saved(attachment))
    found = attachment.offloader.statistics()
    hooked = found.steps - found.unhooked
    assert saved[2:MOST_REST] == saved[1:2] * (MOST_REST - 2)
    assert saved[-1] == hooked * saved[0] > saved[1], "a later step has hooks again"
    assert hooked <= 6
    assert f": {hooked} forward passes: " in attachment.offloader.report()
    assert f"as nothing moves, {found.unhooked} more forward passes ran without hooks" in attachment.offloader.report()
    assert "steps run without hooks" in attachment.offloader.explain()


def test_a_forward_of_other_inputs_has_its_hooks_before_it_saves_anything(model: nn.Module, tmp_path: Path) -> None:
    large = train_step(model, batch(LARGE))
    attachment = _attach(model, tmp_path)
    _rest(model)
    before = _saved(attachment)
    assert_same_gradients(train_step(model, batch(LARGE)), large)
    assert _saved(attachment) > before
    before = _saved(attachment)
    train_step(model, batch(SMALL))
    assert _saved(attachment) == before, "small inputs still need no hooks"


@pytest.mark.parametrize("between", [nullcontext, _hooks_of_the_program], ids=["none", "the program's"])
def test_a_second_call_with_other_inputs_in_one_context_has_its_hooks(
    model: nn.Module, tmp_path: Path, between: Callable[[], AbstractContextManager[None]]
) -> None:
    """Whether or not hooks of the program came before."""
    context = _context(model, tmp_path)
    _rest(model, context.offloader)
    before = context.offloader.statistics()
    with context:
        with between():
            loss = model(batch(SMALL)).sum()
        loss = loss + model(batch(LARGE)).sum()
    loss.backward()
    assert before.unhooked > 0
    assert context.offloader.statistics().packed_tensors > before.packed_tensors


def test_a_forward_beside_the_model_in_a_context_has_its_hooks(model: nn.Module, tmp_path: Path) -> None:
    """The library cannot know beforehand which tensors it saves."""
    attachment = _attach(model, tmp_path)
    _rest(model)
    x, before = batch(LARGE).requires_grad_(), _saved(attachment)
    for number in range(2):
        with attachment.offloader:
            loss = x.exp().sum()
        loss.backward()
        assert _saved(attachment) == before + number + 1


def test_a_step_of_several_calls_never_rests(model: nn.Module, tmp_path: Path) -> None:
    """Contrastive learning has such steps: the second call's hooks would see another forward than the plan's."""
    context = _context(model, tmp_path)
    for _ in range(MOST_REST):
        with context:
            loss = model(batch(SMALL)).sum() + model(batch(2 * SMALL)).sum()
        loss.backward()
    found = context.offloader.statistics()
    assert found.unhooked == 0
    assert found.nvme_written_bytes == 0


class _Deep(nn.Module):
    """Saves little or much for an input of one shape."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(64, 64)

    def forward(self, x: Tensor, *, deep: bool = False) -> Tensor:
        out: Tensor = self.head(self.backbone(x) if deep or self.training else x)
        return out


def _unfreeze(model: _Deep) -> None:
    model.backbone.requires_grad_(True)


@pytest.mark.parametrize("change", [_unfreeze, nn.Module.train, None], ids=["trained", "mode", "argument"])
def test_a_call_that_may_save_more_has_its_hooks_at_once(model: nn.Module, tmp_path: Path, change: Any) -> None:
    deep = _Deep(model)
    deep.train(change is _unfreeze)
    deep.backbone.requires_grad_(change is not _unfreeze)
    attachment, x = _attach(deep, tmp_path), batch(SMALL)
    for _ in range(8):
        deep(x, deep=False).sum().backward()
    assert attachment.offloader.statistics().unhooked > 0
    before = attachment.offloader.statistics()
    if change is not None:
        change(deep)
    deep(x, deep=change is None).sum().backward()
    after = attachment.offloader.statistics()
    assert after.unhooked == before.unhooked
    assert after.packed_tensors - before.packed_tensors > 20
    for _ in range(16 if change is None else 0):
        deep(x, deep=False).sum().backward()
        assert attachment.offloader.statistics().unhooked == after.unhooked, "such steps differ from each other"


def test_hooks_of_the_program_around_the_context_change_nothing(model: nn.Module, tmp_path: Path) -> None:
    context = _context(model, tmp_path)
    for rows in [SMALL] * 8 + [LARGE]:
        before = context.offloader.statistics()
        with _hooks_of_the_program():
            outer = top()
            with context:
                loss = model(batch(rows)).sum()
            assert top() == outer
        loss.backward()
    assert before.unhooked > 0
    assert context.offloader.statistics().packed_tensors > before.packed_tensors


@pytest.mark.parametrize("why", ["device_budget", "trace", "long steps"])
def test_steps_with_an_observer_and_long_steps_have_their_hooks(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Hooks cost little in a long step, and measure the links."""
    if why == "long steps":
        monkeypatch.setattr("actoffload.autotune.shapes.HOOKS_S", 1e-12)
    options = {"device_budget": {why: "1GiB"}, "trace": {why: str(tmp_path / "trace.json")}}
    attachment = _attach(model, tmp_path, **options.get(why, {}))
    _rest(model)
    assert attachment.offloader.statistics().unhooked == 0


class _RunsOut(nn.Module):
    """Runs out of memory while ``fails`` is set."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.fails = model, False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise torch.OutOfMemoryError("no memory is left")
        out: Tensor = self.model(x)
        return out


@pytest.mark.parametrize("rows", [SMALL, 256], ids=["nothing to plan", "a plan"])
def test_without_memory_in_a_step_without_hooks_the_next_step_has_hooks(
    model: nn.Module, tmp_path: Path, rows: int
) -> None:
    """The plan gets a limit as well, if the bytes of a step are known: else it would be the same again."""
    fragile = _RunsOut(model)
    attachment = _attach(fragile, tmp_path)
    for _ in range(3 * MOST_REST):  # a plan's steps vary on a loaded machine, and the library measures again
        train_step(fragile, batch(rows))
        if attachment.offloader.statistics().unhooked:
            break
    else:
        pytest.fail("no step rested")
    before, fragile.fails = _saved(attachment), True
    with pytest.raises(torch.OutOfMemoryError):
        fragile(batch(rows))
    fragile.fails = False
    train_step(fragile, batch(rows))
    assert _saved(attachment) > before
    for _ in range(3 * MOST_REST):  # likewise
        train_step(fragile, batch(rows))
        found = attachment.offloader
        if "device budget" in found.explain() if rows > SMALL else found.statistics().unhooked > 8:
            break
    else:
        pytest.fail("no limit" if rows > SMALL else "a limit of 0 bytes")


def test_hooks_that_come_late_leave_the_programs_hooks_in_their_place(model: nn.Module, tmp_path: Path) -> None:
    context = _context(model, tmp_path)
    expected = train_step(model, batch(LARGE))
    _rest(model, context.offloader)
    before, taken = context.offloader.statistics().packed_tensors, []

    def take(tensor: Tensor) -> Tensor:
        taken.append(tensor)
        return tensor

    with context:
        model(batch(SMALL))
        assert top() is None, "the step has no hooks"
        with saved_tensors_hooks(take, lambda tensor: tensor):
            out = model(batch(LARGE))
        assert top() is None, "the program's hooks are gone with their context"
    out.sum().backward()
    assert len(taken) > 20
    assert context.offloader.statistics().packed_tensors == before
    with context, no_offload():
        model(batch(LARGE))
    assert context.offloader.statistics().packed_tensors == before
    assert top() is None
    model.zero_grad(set_to_none=True)
    assert_same_gradients(train_step(model, batch(LARGE), context.offloader), expected)
    assert context.offloader.statistics().packed_tensors > before


def test_a_compiled_model_is_compiled_no_more_often(model: nn.Module, tmp_path: Path) -> None:
    layers: Any = model.get_submodule("layers")
    del layers[2:]
    compiled: Any = torch.compile(model, backend="aot_eager")
    expected, frames = train_step(compiled, batch(SMALL)), torch._dynamo.utils.counters["frames"]
    attachment = _attach(compiled, tmp_path)
    train_step(compiled, batch(SMALL))
    before = Counter(frames)
    for _ in range(MOST_REST + 8):
        assert_same_gradients(train_step(compiled, batch(SMALL)), expected)
    assert attachment.offloader.statistics().unhooked > MOST_REST - 4
    assert Counter(frames) == before


def test_gradients_add_up_over_micro_batches_with_hooks_and_without(model: nn.Module, tmp_path: Path) -> None:
    def step() -> dict[str, Tensor]:
        for seed in range(4):
            model(batch(SMALL, seed=seed)).square().sum().backward()
        return gradients(model)

    expected, attachment = step(), _attach(model, tmp_path)
    for _ in range(MOST_REST // 2):
        assert_same_gradients(step(), expected)
    assert attachment.offloader.statistics().unhooked > MOST_REST


@pytest.mark.parametrize("moment", ["remove", "__enter__"])
def test_an_interrupt_as_a_rest_begins_or_ends_pops_no_hooks_of_the_program(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    context = _context(model, tmp_path)
    _rest(model, context.offloader)
    assert context.offloader.statistics().unhooked > 0
    plain = getattr(Hooks, moment)

    def interrupted(hooks: Hooks) -> None:
        monkeypatch.setattr(Hooks, moment, plain)
        if moment == "remove":
            plain(hooks)
        raise KeyboardInterrupt

    def forward() -> None:
        with context:
            if moment == "__enter__":
                model(batch(SMALL))
            monkeypatch.setattr(Hooks, moment, interrupted)
            model(batch(SMALL if moment == "remove" else LARGE))

    with _hooks_of_the_program():
        outer = top()
        with pytest.raises(KeyboardInterrupt):
            forward()
        assert top() == outer


@pytest.mark.simulated
def test_a_long_recorded_step_does_not_lengthen_steps_in_which_the_host_only_just_keeps_up(
    device: SimulatedDevice,
) -> None:
    """On an H200 a recorded step took 4.6 times as long as one that kept all, and no later step was compared with it.

    The steps under the plan show that keeping takes no longer than they compute; in the end no hooks run at all.
    """
    late = host_bound.LAUNCHES["host-bound"]
    host = host_bound.Host(recording_s=0.3e-3, staying_s=20e-6)
    found = host_bound.run(device, late, host=host, steps=16)
    assert max(found["seconds"][1:4]) > 2 * found["keep_s"], "a step was recorded"
    assert max(found["seconds"][-8:]) <= 1.01 * found["keep_s"]
    assert found["unhooked"] >= 8


def test_waits_do_not_prove_that_the_recorded_step_was_late() -> None:
    """The device may have computed meanwhile."""
    recorded = Profile(storages=(), forward_s=1.0, backward_s=2.0, device="cuda")
    assert pace_of(Observed(step_s=2.0), recorded, limited=False) == 2.0
    assert pace_of(Observed(step_s=2.9), recorded, limited=False) is None
    assert pace_of(Observed(step_s=2.0, backward_wait_s=1.0), recorded, limited=False) == 2.0
    assert pace_of(Observed(step_s=3.0, backward_wait_s=1.0), recorded, limited=False) is None


def test_on_the_cpu_the_compute_of_steps_is_their_pace_if_it_differs_by_more_than_other_programs_make_it() -> None:
    recorded = Profile(storages=(), forward_s=1.0, backward_s=2.0)
    assert pace_of(Observed(step_s=3.6), recorded, limited=False) is None
    assert pace_of(Observed(step_s=3.9), recorded, limited=False) == 3.9
    assert pace_of(Observed(step_s=3.9, backward_wait_s=0.5), recorded, limited=False) is None
    assert pace_of(Observed(step_s=2.9, backward_wait_s=0.9), recorded, limited=True) == 2.0
    assert pace_of(Observed(step_s=2.0, backward_wait_s=2.5), recorded, limited=True) is None, "of several threads"


@pytest.mark.parametrize(("device", "expected"), [("cpu", 6.0), ("cuda", 2.0)])
def test_on_the_cpu_steps_compare_at_one_pace(device: str, expected: float) -> None:
    recorded = Profile(storages=(), forward_s=1.0, backward_s=2.0, device=device)
    assert at_pace(Observed(step_s=2.0, backward_wait_s=1.0), recorded) == expected
    assert at_pace(Observed(step_s=2.0, backward_wait_s=2.5), recorded) == 2.0, "several threads waited at once"


def test_idle_time_of_the_device_in_hooks_is_no_part_of_keeps_step() -> None:
    recorded = Profile(storages=(), forward_s=1.0, backward_s=2.0, device="cuda")
    assert pace_of(Observed(step_s=3.0, idle_s=1.0), recorded, limited=False) == 2.0
    dear = Observed(step_s=3.0, idle_s=0.1)
    assert pace_of(dear, recorded, limited=False) == 3.0, "the price of a move alone has changed"
    assert pace_of(Observed(step_s=3.0, idle_s=0.05), recorded, limited=False) is None
    assert pace_of(dear, recorded, limited=True) is None


def test_one_step_with_too_long_hooks_is_enough_to_review_the_plan() -> None:
    assert StepsUnderPlan().add(Observed(step_s=1.0, idle_s=0.03), limited=False) is not None
    steps = StepsUnderPlan()
    found = [steps.add(Observed(step_s=1.0, idle_s=0.03), limited=True) for _ in range(REVIEW_STEPS)]
    assert [one is None for one in found] == [True] * (REVIEW_STEPS - 1) + [False], "under a budget they may"


def test_a_step_at_another_pace_is_the_same_step() -> None:
    one = Storage(index=0, nbytes=8, birth_s=1.0, need_s=2.0, last_need_s=3.0)
    region = Region(place=0, name="block", begin_s=0.0, end_s=1.0, again_s=1.5, recompute_s=0.5, backward_end_s=3.0)
    region = replace(region, saves=(RegionSave(offset_s=0.25, nbytes=8),))
    profile = Profile(storages=(one, replace(one, index=1, need_s=None)), forward_s=1.0, backward_s=2.0, other_s=1.0)
    profile = replace(profile, regions=(region,))
    found = profile.lasting(2.0, 0.5)
    assert (found.step_s, found.forward_s, found.backward_s) == (2.0, 0.5, 1.0)
    assert found.storages[0] == replace(one, birth_s=0.5, need_s=1.0, last_need_s=1.5)
    assert found.storages[1].need_s is None
    again = replace(region, end_s=0.5, again_s=0.75, recompute_s=0.25, backward_end_s=1.5)
    assert found.regions == (replace(again, saves=(replace(region.saves[0], offset_s=0.125),)),)
    assert found.baseline_peak_bytes == profile.baseline_peak_bytes
    found = profile.lasting(2.0)
    assert found.forward_s == pytest.approx(1 / 3)
    assert found.other_s == 1.0
    late = replace(profile, storages=(replace(one, last_need_s=4.0),))
    assert late.lasting(3.25, 0.25).storages[0] == replace(one, last_need_s=3.25), "it died after backward"


def test_several_forwards_of_a_step_have_one_pace() -> None:
    """Between them there may be time that is no forward and no backward."""
    one = Storage(index=0, nbytes=8, birth_s=1.0, need_s=2.0, last_need_s=3.0)
    profile = Profile(storages=(one, replace(one, tape=1)), forward_s=1.0, backward_s=2.0, other_s=1.0)
    assert profile.lasting(2.0) == replace(
        profile,
        storages=tuple(replace(s, birth_s=0.5, need_s=1.0, last_need_s=1.5) for s in profile.storages),
        forward_s=0.5,
        backward_s=1.0,
        other_s=0.5,
    )


def test_the_time_after_a_backward_on_another_stream_is_unknown_while_that_stream_runs() -> None:
    """PyTorch raises for an event that has not happened."""
    happened: set[str] = {"end"}
    device: Any = SimpleNamespace(done=lambda event: event.name in happened, seconds_between=lambda *_: -1.0)
    tiers: Any = SimpleNamespace(_copies=SimpleNamespace(device=device))
    begin, end, elsewhere = (SimpleNamespace(index=i, name=n) for i, n in ((0, "begin"), (0, "end"), (1, "end")))
    assert Tiers.seconds_between(tiers, begin, end) is None
    assert Tiers.seconds_between(tiers, begin, elsewhere) == 0.0
    happened.add("begin")
    assert Tiers.seconds_between(tiers, begin, end) == 0.0, "of another stream"


def test_the_time_after_backward_is_the_least_of_the_last_steps() -> None:
    """Otherwise a step of two micro-batches, whose optimizer follows every other one, would change all the time."""
    steps = StepsUnderPlan()
    for other_s in (0.5, 0.0, 0.5, 0.0):
        assert steps.add(Observed(step_s=1.0 + other_s, other_s=other_s), limited=False) is None
    seen = steps.add(Observed(step_s=1.5, other_s=0.5), limited=False)
    assert seen is not None
    assert (seen.step_s, seen.other_s) == (1.0, 0.0)
    for _ in range(2):
        seen = steps.add(Observed(step_s=1.5, other_s=None), limited=False)
    assert seen is not None
    assert (seen.step_s, seen.other_s) == (1.0, 0.0), "of most steps it is known"
    seen = steps.add(Observed(step_s=1.5), limited=False)
    assert seen is not None
    assert (seen.step_s, seen.other_s) == (1.5, None)


def test_a_recorded_step_had_a_stall_if_steps_compute_for_much_less() -> None:
    recorded = Profile(storages=(), forward_s=1.0, backward_s=3.0, other_s=1.0, device="cuda")
    on_cpu = replace(recorded, device="cpu")
    assert had_stall(Observed(step_s=2.9, other_s=0.0), recorded)
    assert not had_stall(Observed(step_s=3.1, other_s=0.0), recorded)
    assert had_stall(Observed(step_s=3.2, idle_s=0.3, other_s=0.0), recorded), "in hooks, which is no compute"
    assert not had_stall(Observed(step_s=4.9, backward_wait_s=1.8, other_s=1.0), recorded), "it may compute meanwhile"
    assert not had_stall(Observed(step_s=2.9, other_s=0.0), on_cpu), "other programs may have slowed all of it"
    assert had_stall(Observed(step_s=2.9, backward_wait_s=1.0, other_s=0.0), on_cpu)
    one = Storage(index=0, nbytes=8, birth_s=0.0, need_s=2.0, last_need_s=3.0)
    several = replace(recorded, storages=(one, replace(one, tape=1)))
    assert not had_stall(Observed(step_s=4.0, other_s=0.1), several), "of 5 s, with time between backwards"


def test_a_recorded_step_is_no_faster_because_less_follows_backward() -> None:
    """The cost of moving looks like compute in it, as in any recorded step that took as long as the one before."""
    before = Profile(storages=(), forward_s=1.0, backward_s=2.0, other_s=5.0, device="cuda")
    recorded = Profile(storages=(), forward_s=1.1, backward_s=2.2, device="cuda")
    recording: Any = SimpleNamespace(calm=True, on_links=lambda profile: profile)
    found = Recording.corrected(recording, recorded, before, Observed(step_s=3.3, other_s=0.0), Limits())
    assert found == replace(before, other_s=0.0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_part_after_backward_is_no_pace(device: str) -> None:
    recorded = Profile(storages=(), forward_s=1.0, backward_s=2.0, other_s=1.0, device=device)
    plan = Plan((), planner="auto", predicted_step_s=4.0)
    seen = Observed(step_s=8.0, other_s=5.0)
    assert pace_of(seen, recorded, limited=False) is None
    assert pace_of(Observed(step_s=4.1, other_s=1.1), recorded, limited=False) is None
    assert at_pace(seen, recorded) == 4.0
    told = surprise(plan, seen, recorded, recorded, limited=False)
    assert told == "the step goes on for 5 s after backward, not 1 s"
    assert surprise(plan, Observed(step_s=4.1, other_s=1.1), recorded, recorded, limited=False) == ""
    assert "takes 6 s, not 4 s" in surprise(plan, Observed(step_s=9.0, other_s=4.0), recorded, recorded, limited=False)


def test_a_device_that_had_work_left_at_the_last_hook_has_idled_in_hooks_alone() -> None:
    def idled(idle_s: float, lead_s: float, watched: int = 1) -> float:
        watch: Any = SimpleNamespace(_stopwatch=SimpleNamespace(number=1, hooks_s=2.0, lead_s=lead_s))
        return Watch._idled(watch, idle_s, watched, 100.0)

    assert [idled(5.0, lead_s) for lead_s in (0.0, 1.0, 4.0)] == [5.0, 4.0, 2.0]
    assert idled(5.0, 4.0, watched=0) == 5.0, "another step is timed"
    assert idled(1.5, 4.0) == 1.5, "too little for a query of events"


def test_steps_that_wait_for_longer_than_predicted_are_planned_again_unless_a_budget_lets_them() -> None:
    plan, recorded = Plan((), planner="auto", predicted_step_s=1.0), Profile(storages=(), forward_s=1.0)
    seen = Observed(step_s=1.018, forward_wait_s=0.015)
    assert "as it waits for 0.015 s" in surprise(plan, seen, recorded, recorded, limited=False)
    assert surprise(plan, seen, recorded, recorded, limited=True) == ""
    assert surprise(plan, Observed(step_s=1.018, forward_wait_s=0.005), recorded, recorded, limited=False) == ""
