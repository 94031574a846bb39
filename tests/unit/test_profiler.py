"""A step that is recorded becomes a profile: sizes, times without waits, blocks and their inputs."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actoffload import Offloader, Profile, keep
from actoffload.autotune.blocks import BlockWatch
from actoffload.planning.profile import Storage
from actoffload.testing.faults import GateEngine, SlowEngine
from actoffload.testing.gpt import GPT, GPTConfig
from actoffload.testing.simulated_device import NAME, SimulatedAccelerator, SimulatedDevice
from actoffload.tiers.timers import (
    Stamp,
    Stopwatch,
)
from tests.harness import Chain, MakeOffloader, batch, hinder, recorder_of, simulated, train_step

TOKENS = torch.arange(64).reshape(2, 32)


class _Counter(Stopwatch):
    """Every moment is one second after the one before."""

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


def _recorded(offloader: Offloader, model: nn.Module, *args: Any, forwards: int = 1) -> Profile:
    """The profile of one step of ``forwards`` micro-batches, whose backwards run in reverse order."""
    recorder_of(offloader).stopwatch = _Counter()
    watch = BlockWatch(recorder_of(offloader))
    watch.watch(model)
    recorder_of(offloader).begin()
    losses = []
    for _ in range(forwards):
        with offloader:
            losses.append(model(*args).sum())
    while losses:
        losses.pop().backward()
    watch.remove()
    profile = recorder_of(offloader).profile()
    assert profile is not None
    return profile


def test_the_profile_holds_what_the_plan_holds(make_offloader: MakeOffloader) -> None:
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


def _saved_by(profile: Profile, block: int) -> list[Storage]:
    return [storage for storage in profile.storages if storage.block == block]


def test_blocks_have_their_storages_their_input_and_their_times(make_offloader: MakeOffloader) -> None:
    model = GPT(GPTConfig(layers=3, width=32, seq=32))
    profile = _recorded(make_offloader(), model, TOKENS, TOKENS)
    assert [block.name for block in profile.blocks] == [f"stack.blocks.{n}" for n in range(3)]
    sizes = [sorted(storage.nbytes for storage in _saved_by(profile, b)) for b in range(3)]
    assert sizes[0] == sizes[1] == sizes[2]
    for number, block in enumerate(profile.blocks):
        assert block.input is not None
        entry = profile.storages[block.input]
        assert entry.nbytes == block.input_bytes == 2 * 32 * 32 * 4
        assert entry.block == number
        assert entry.birth_s == min(storage.birth_s for storage in _saved_by(profile, number))
        assert block.forward_s > 0
        assert block.backward_s > 0
        assert block.recompute_s == block.forward_s
    outside = [s for s in profile.storages if s.block is None]
    assert outside, "embedding, head and loss save as well"
    assert sum(b.forward_s for b in profile.blocks) < profile.forward_s
    assert sum(b.backward_s for b in profile.blocks) < profile.backward_s


def _count(module: nn.Module, args: object, output: object) -> None:
    module.get_buffer("calls").add_(1)


class _Shared(nn.Module):
    """Two blocks that save the same tensor, a block that runs twice, and one that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.layers[3].register_buffer("calls", torch.zeros(()))
        self.layers[3].register_forward_hook(_count)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        y = self.layers[0](x) + self.layers[1](x)
        for index in (2, 2, 3):
            y = self.layers[index](torch.tanh(y))
        assert isinstance(y, Tensor)
        return y


def test_what_two_blocks_share_belongs_to_neither_and_what_cannot_run_again_is_no_block(
    make_offloader: MakeOffloader,
) -> None:
    profile = _recorded(make_offloader(), _Shared(), torch.randn(64, 16, requires_grad=True))
    assert [block.name for block in profile.blocks] == ["layers.0", "layers.1"]
    first, second = profile.blocks
    assert first.input is not None
    assert first.input == second.input
    assert profile.storages[first.input].block is None


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


def test_what_may_never_move_is_said_and_what_stayed_for_once_may(make_offloader: MakeOffloader) -> None:
    offloader = make_offloader(min_bytes=8 << 10, pending_bytes=1, engine=GateEngine)  # no write ends meanwhile
    x = torch.randn(64, 64, requires_grad=True)
    marked = keep(x * 3)

    class _Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.sin() * marked).exp() + x[:1].exp()

    profile = _recorded(offloader, _Model(), x * 2)
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
    """Slow copies change no time but that of the waits for them."""
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
    """On a device each moment is an event; no plan moves them."""
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
    profile = recorder_of(offloader).profile()
    assert profile is not None
    assert sum(s.index is None for s in profile.storages) >= count - 1
    births = [s.birth_s for s in profile.storages]
    assert births == sorted(births)


def test_waits_of_the_host_are_no_compute_time(make_offloader: MakeOffloader) -> None:
    """Under a budget that one tensor fills, a slow disk is waited for in forward and in backward."""
    engine = partial(SlowEngine, bandwidth_bytes_per_s=1e6)
    offloader = make_offloader(engine=engine, device_budget=40 << 10)
    began_s = time.perf_counter()
    recorder_of(offloader).begin()
    train_step(Chain(depth=2), batch(), offloader)
    recorder_of(offloader).finish()
    profile = recorder_of(offloader).profile()
    assert profile is not None
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
