"""A recorded step becomes a profile: sizes, times without waits, blocks and their inputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actoffload import Offloader, Profile, create_selective_checkpoint_contexts, keep
from actoffload.planning.regions import choosable, with_regions
from actoffload.testing.faults import GateEngine, SlowEngine
from actoffload.testing.gpt import GPT, GPTConfig
from actoffload.testing.simulated_device import NAME, SimulatedAccelerator, SimulatedDevice
from actoffload.tiers.timers import Stamp, Stopwatch
from tests.harness import (
    Chain,
    MakeOffloader,
    accounts_of,
    batch,
    following,
    hinder,
    profile_of,
    recorder_of,
    simulated,
    tier_of,
    train_step,
)

ATEN = torch.ops.aten
TOKENS = torch.arange(64).reshape(2, 32)


class _Counter(Stopwatch):
    """Every moment is one second after the last."""

    def __init__(self) -> None:
        self.count = 0
        self.ready = True

    def begin(self) -> None:
        self.count = 0

    def stamp(self) -> Stamp:
        self.count += 1
        return self.count

    def end(self) -> bool:
        return self.ready

    def seconds(self, stamp: Stamp) -> float:
        return float(stamp)


def _recorded(offloader: Offloader, model: Callable[..., Tensor], *args: Any, forwards: int = 1) -> Profile:
    """The profile of one step of ``forwards`` micro-batches; their backwards run in reverse order."""
    recorder_of(offloader).stopwatch = _Counter()
    recorder_of(offloader).begin()
    losses = []
    for _ in range(forwards):
        with offloader:
            losses.append(model(*args).sum())
    while losses:
        losses.pop().backward()
    return profile_of(offloader)


def test_waits_of_several_threads_at_once_turn_no_clock_back(make_offloader: MakeOffloader) -> None:
    """A model that threads share: their waits together take longer than the step, and a plan could not be made."""
    offloader, model = make_offloader(), Chain()
    recorder_of(offloader).begin()
    with offloader:
        loss = model(batch()).sum()
    accounts_of(offloader).unpack_wait_s += 60.0
    loss.backward()
    profile = profile_of(offloader)
    assert 0 < profile.step_s < 60
    assert all(0 <= s.birth_s <= s.last_need_s <= profile.step_s for s in profile.storages)


def test_the_profile_has_the_storages_of_the_plan(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader()
    model = GPT(GPTConfig(layers=3, width=32, seq=32))
    profile = _recorded(offloader, model, TOKENS, TOKENS)
    records = [s for s in profile.storages if s.index is not None]
    assert [(s.index, s.nbytes) for s in records] == [(e.index, e.nbytes) for e in offloader.plan.entries]
    assert [(s.nbytes, s.kept) for s in records if not s.movable] == [(TOKENS.nbytes, "held elsewhere")]
    assert all(s.birth_s < s.need_s <= s.last_need_s for s in records if s.need_s is not None)
    needed = [s for s in records if s.need_s is not None]
    assert len(needed) == len(records), "each was used by backward"
    statistics = offloader.statistics()
    assert profile.saved_bytes == statistics.activation_bytes
    assert profile.baseline_peak_bytes == statistics.baseline_peak_bytes
    assert profile.forward_s == min(s.need_s for s in needed if s.need_s is not None)
    assert profile.backward_s > 0
    assert Profile.from_json(profile.to_json()) == profile


def test_a_storage_with_one_pending_handle_is_evicted_at_its_use(make_offloader: MakeOffloader) -> None:
    def waves(x: Tensor) -> Tensor:
        y = (x * 2.0).sin() * 2.0
        return y.sin() + y.cos()

    offloader = make_offloader()
    tier_of(offloader).evicts_first = True
    profile = _recorded(offloader, waves, batch().requires_grad_())
    assert [s.let_go for s in profile.storages if s.index is not None] == [True, False]


@pytest.mark.parametrize("once", [(), (1,), (0, 1, 2)])
def test_regions_have_their_times_and_saved_tensors(make_offloader: MakeOffloader, once: tuple[int, ...]) -> None:
    model = GPT(GPTConfig(layers=3, width=32, seq=32, recompute=True))
    unchecked = GPT(GPTConfig(layers=3, width=32, seq=32))
    plain = _recorded(make_offloader().use(unchecked), unchecked, TOKENS, TOKENS)
    offloader = make_offloader(include="*").use(model)
    following(offloader, *once)
    profile = _recorded(offloader, model, TOKENS, TOKENS)
    assert [region.place for region in profile.regions] == [0, 1, 2]
    assert [region.name for region in profile.regions] == [f"stack.blocks.{n}" for n in range(3)]
    held = [storage for storage in profile.storages if storage.kept == "recomputed"]
    assert len(held) == 3 - len(once)
    assert {storage.region for storage in profile.storages} - {None} == set(once)
    again = [region for region in profile.regions if region.place not in once]
    for region, storage in zip(again, held[::-1], strict=True):  # backward reaches the last region first
        assert region.begin_s < region.end_s < profile.forward_s
        assert region.again_s is not None
        assert region.backward_end_s is not None
        assert region.again_s < region.again_s + region.recompute_s < region.backward_end_s
        assert (storage.birth_s, storage.last_need_s) == (region.again_s, region.backward_end_s)
        assert storage.nbytes == sum(save.nbytes for save in region.saves)
        assert not storage.movable
        offsets = [save.offset_s for save in region.saves]
        assert offsets == sorted(offsets)
        assert offsets[-1] <= region.recompute_s
    for region in profile.regions:
        if region.place in once:
            assert (region.again_s, region.recompute_s, region.saves) == (None, 0.0, ())
    sizes = sorted(s.nbytes for s in plain.storages)
    found = [s.nbytes for s in profile.storages if s.kept != "recomputed"]
    found += [save.nbytes for region in again for save in region.saves]
    assert sorted(found) == sizes, "each storage once, and no input"
    assert Profile.from_json(profile.to_json()) == profile


class _Between(nn.Module):
    """A checkpointed region that saves small and large tensors, and tensors of its closure."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.exp(x)

        def region(x: Tensor) -> Tensor:
            y = keep(self.layer(x * 3)) * scale
            return (y.tanh()[:4].exp() * scale[:4]).sum()

        y: Tensor = checkpoint(region, x, use_reentrant=False)
        return y


def test_saves_of_a_region_have_their_reason_to_stay_and_omit_its_inputs(make_offloader: MakeOffloader) -> None:
    profile = _recorded(make_offloader(min_bytes=8 << 10), _Between(), batch().requires_grad_())
    (region,) = profile.regions
    x = batch().nbytes
    found = [(save.nbytes, save.kept) for save in region.saves]
    assert found == [(x, ""), (x, "keep()"), (x, ""), (1024, "below min_bytes")]


def _inner(x: Tensor) -> Tensor:
    return (x + 1).exp()


_HELD: list[Tensor] = []
"""Tensors that a program keeps of its forwards, as with ``output_hidden_states``."""

INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "saved by nobody else": lambda x: _region(_region(x * 2)),
    "saved by the region": lambda x: _region(_region(x * 2, torch.sin), torch.sin),
    "smaller than one that it saves": lambda x: _region((x * 2)[:32].clone(), _inner, _region(x * 2, torch.sin)),
    "saved before": lambda x: _region(torch.exp(x)),
    "saved after": lambda x: (lambda y: _region(y) * y.sin())(x * 2),
    "of two regions": lambda x: (lambda y: _region(y) + _region(y))(x * 2),
    "cached by its checkpoint": lambda x: checkpoint(
        _inner, x * 2, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, [ATEN.exp.default])
    ),
    "held by the program": lambda x: (_HELD.append(x * 2), _region(_HELD[-1]))[1],  # type: ignore[func-returns-value]
    "before a tail that saves nothing": lambda x: _region(_region(x * 2, lambda x: _inner(x) + 1)),
}

CAREFUL = ("smaller than one that it saves", "saved after", "of two regions")
"""On paper these inputs count as saved although they may not be: their other uses are unknown, or their bytes stay."""


def _region(x: Tensor, function: Callable[[Tensor], Tensor] = _inner, *more: Tensor) -> Tensor:
    def run(x: Tensor, *more: Tensor) -> Tensor:
        return function(x) + sum((one.sin().sum() for one in more), x.new_zeros(()))

    found: Tensor = checkpoint(run, x, *more, use_reentrant=False)
    return found


@pytest.mark.parametrize("inputs", INPUTS)
def test_on_paper_a_region_that_runs_once_saves_the_same_as_in_a_real_step(
    make_offloader: MakeOffloader, inputs: str
) -> None:
    """A plan made on paper names storages by their places."""
    _HELD.clear()
    model, x = INPUTS[inputs], batch().requires_grad_()
    base = _recorded(make_offloader(), model, x)
    places = choosable(base)
    assert places == [region.place for region in base.regions]
    for once in ({places[0]}, {places[-1]}, set(places)):
        offloader = make_offloader()
        following(offloader, *once)
        ran, paper = _recorded(offloader, model, x), with_regions(base, once)
        found = [[s.nbytes for s in p.storages if s.index is not None] for p in (paper, ran)]
        if inputs in CAREFUL:
            assert sum(found[0]) >= sum(found[1])
        else:
            assert found[0] == found[1]


@pytest.mark.parametrize("options", [{"boundaries": "only"}, {"exclude": ["layer"]}], ids=["boundaries", "exclude"])
def test_on_paper_a_region_moves_nothing_that_the_options_keep(
    make_offloader: MakeOffloader, options: dict[str, Any]
) -> None:
    model, x = _Between(), batch().requires_grad_()
    before, offloader = make_offloader(**options), make_offloader(**options)
    for each in (before, offloader):
        each.use(model)
    base = _recorded(before, model, x)
    once = set(choosable(base))
    following(offloader, *once)
    ran = _recorded(offloader, model, x)
    found = [[(s.nbytes, s.kept) for s in p.storages if s.index is not None] for p in (with_regions(base, once), ran)]
    assert "module excluded" in {kept for _, kept in found[1]}
    assert found[0] == found[1]


def test_micro_batches_are_tapes_of_one_step(make_offloader: MakeOffloader) -> None:
    profile = _recorded(make_offloader(), Chain(), batch(), forwards=3)
    assert {s.tape for s in profile.storages} == {0, 1, 2}
    for tape in range(3):
        places = [s.index for s in profile.storages if s.tape == tape]
        assert len(places) > 5
        assert places == list(range(len(places)))
    births = [s.birth_s for s in profile.storages]
    assert births == sorted(births)
    assert profile.step_s == pytest.approx(profile.forward_s + profile.backward_s + profile.other_s)


def test_tensors_that_may_never_move_have_a_reason_and_tensors_kept_once_do_not(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes=8 << 10, pending_bytes=1, engine=GateEngine)  # no write ends meanwhile
    x = torch.randn(64, 64, requires_grad=True)
    marked = keep(x * 3)

    profile = _recorded(offloader, lambda x: (x.sin() * marked).exp() + x[:1].exp(), x * 2)
    assert offloader.statistics().kept_bytes["pressure"] > 0
    kept = {s.kept for s in profile.storages}
    assert kept == {"", "keep()", "below min_bytes", "held elsewhere"}, "the input is the test's"
    assert all((s.index is None) == (s.kept != "held elsewhere") for s in profile.storages if s.kept)


def test_a_step_without_backward_is_of_no_use_and_one_still_running_has_no_profile_yet(
    make_offloader: MakeOffloader,
) -> None:
    offloader = make_offloader()
    stopwatch = _Counter()
    recorder_of(offloader).stopwatch = stopwatch
    recorder_of(offloader).begin()
    with offloader:
        loss = Chain()(batch()).sum()
    assert not recorder_of(offloader).useful
    loss.backward()
    assert recorder_of(offloader).useful
    stopwatch.ready = False
    assert recorder_of(offloader).profile() is None
    stopwatch.ready = True
    assert recorder_of(offloader).profile() is not None


@pytest.mark.simulated
def test_a_step_on_a_device_is_timed_without_its_stalls(device: SimulatedDevice) -> None:
    model, x = Chain().to(NAME), batch().to(NAME)

    def step_s(bytes_per_s: float) -> tuple[float, float]:
        device.model(to_device_bytes_per_s=bytes_per_s, to_host_bytes_per_s=bytes_per_s)
        accelerator = SimulatedAccelerator()
        hinder(device, accelerator, "late copies")
        with simulated(accelerator, pending_bytes=1) as offloader:
            recorder = recorder_of(offloader)
            recorder.begin()
            with offloader:
                loss = model(x).sum()
            loss.backward()
            recorder.finish()
            device.synchronize()
            profile = recorder.profile(NAME)
            assert profile is not None
            return profile.step_s, offloader.statistics().wait_s

    slow, fast = step_s(1e6), step_s(1e9)
    assert slow[1] > 10 * fast[1] > 0
    assert slow[0] == pytest.approx(fast[0], abs=slow[1] / 100)


def test_small_tensors_share_a_moment(make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device each moment is an event; no plan moves small tensors."""
    nbytes, count = 64 * 64 * 4, 100
    monkeypatch.setattr("actoffload.runtime.profiler.STAMP_BYTES", 10 * nbytes)
    offloader = make_offloader(min_bytes=nbytes + 1)
    stopwatch = recorder_of(offloader).stopwatch = _Counter()
    recorder_of(offloader).begin()
    x = torch.randn(64, 64, requires_grad=True)
    with offloader:
        y = torch.cat([x, x]).sin()[:64]  # one that moves
        for _ in range(count):
            y = y.sin()
    stopwatch.count, stamped = 0, stopwatch.count
    y.sum().backward()
    assert count / 10 <= stamped <= count / 10 + 6
    assert count / 10 <= stopwatch.count <= count / 10 + 6
    profile = profile_of(offloader)
    assert sum(s.index is None for s in profile.storages) >= count - 1
    births = [s.birth_s for s in profile.storages]
    assert births == sorted(births)


def test_waits_of_the_host_are_no_compute_time(make_offloader: MakeOffloader) -> None:
    """One tensor fills the budget, so forward and backward wait for a slow disk."""
    engine = partial(SlowEngine, bandwidth_bytes_per_s=1e6)
    offloader = make_offloader(engine=engine, device_budget=40 << 10)
    began_s = time.perf_counter()
    recorder_of(offloader).begin()
    train_step(Chain(depth=2), batch(), offloader)
    recorder_of(offloader).finish()
    profile = profile_of(offloader)
    waited_s = offloader.statistics().wait_s
    assert waited_s > 0.05
    assert profile.step_s <= time.perf_counter() - began_s - 0.9 * waited_s


def test_a_recording_that_never_ends_is_given_up(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actoffload.runtime.profiler.MOST_STORAGES", 50)
    offloader = make_offloader(policy="auto")
    recorder = recorder_of(offloader)
    recorder.begin()
    kept_alive = []
    for _ in range(60):
        with offloader:
            kept_alive.append((torch.randn(64, 64, requires_grad=True) * 2).sin())
    assert not recorder.active
    kept_alive[0].sum().backward()
