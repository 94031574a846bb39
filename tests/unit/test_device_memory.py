"""``device_memory``: one number for everything on the device, kept from the first step on."""

from __future__ import annotations

import functools
import gc
import itertools
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actoffload import OffloadConfig, Offloader
from actoffload.autotune import budgets
from actoffload.autotune.observations import StepsUnderPlan
from actoffload.autotune.shapes import AGAIN, NeedBeside, Shape
from actoffload.errors import BudgetError, ConfigError
from actoffload.planning.profile import RECOMPUTED, Profile, Region, Storage
from actoffload.runtime.memory_beside import Beside, MemoryBeside, Parts
from actoffload.testing.simulated_device import NAME, SimulatedDevice
from actoffload.tiers.accounts import Accounts
from tests import scaled_llama
from tests.harness import (
    Chain,
    MakeOffloader,
    accounts_of,
    autopilot_of,
    batch,
    budget_of,
    forget_failed_backward,
    resident_set_bytes,
    simulated,
    train_step,
)
from tests.host_bound import highest_allocated

MIB = 1 << 20
WIDTH, ROWS = 64, 1024


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.back(torch.tanh(self.wide(x)))
        return out


class _Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


class _Begins(nn.Module):
    """Takes much memory before it saves anything."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.detach().repeat(1, 16).mean()


def _model(blocks: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(_Block() for _ in range(blocks))).to(NAME)


def _batch(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows)).to(NAME)


def _step(model: nn.Module, rows: int, offloader: Offloader | None = None) -> None:
    x = _batch(rows)
    with offloader or nullcontext():
        loss = model(x).square().sum()
    loss.backward()


def _taken(model: nn.Module, accumulate: int = 1, rows: Sequence[int] = (ROWS,)) -> Callable[..., int]:
    """Return a function that takes a step with Adam and returns the allocator's peak."""
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    shapes = itertools.cycle(rows)

    def step(offloader: Offloader | None = None) -> int:
        torch.accelerator.synchronize()
        with highest_allocated() as found:
            for _ in range(accumulate):
                _step(model, next(shapes), offloader)
            optimizer.step()
            optimizer.zero_grad()
            torch.accelerator.synchronize()
        return max(found)

    return step


def _train(steps: int, offloader: Offloader | None, **how: Any) -> tuple[list[int], nn.Module]:
    """Train; return the allocator's peak of each step, and the model."""
    model = _model()
    if offloader is not None:
        offloader.use(model)
    step = _taken(model, **how)
    return [step(offloader) for _ in range(steps)], model


def _offloader(**options: Any) -> AbstractContextManager[Offloader]:
    return simulated(policy="auto", min_bytes=1, announce="none", **options)


def _empty(device: SimulatedDevice) -> None:
    gc.collect()
    device.synchronize()
    torch.accelerator.empty_cache()


@pytest.mark.simulated
@pytest.mark.sampled(4)  # each share, and each way, once
@pytest.mark.parametrize("share", [0.5, 0.7, 0.85])
@pytest.mark.parametrize("how", [{}, {"accumulate": 4}, {"rows": (ROWS // 2, ROWS)}], ids=["plain", "accum", "shapes"])
def test_steps_never_pass_the_number_from_the_first_one_on(
    device: SimulatedDevice, share: float, how: dict[str, Any]
) -> None:
    steps = 8 // how.get("accumulate", 1) + 2
    peaks, alone = _train(steps, None, **how)
    limit = int(share * max(peaks))
    expected = [parameter.detach().cpu() for parameter in alone.parameters()]
    del alone
    _empty(device)
    device.limit(limit)
    with _offloader(device_memory=limit) as offloader:
        found, model = _train(steps, offloader, **how)
        assert max(found) <= limit
        assert max(found[-2:]) >= 0.8 * limit, "the rest of the number is used"
        assert all(map(torch.equal, [mine.detach().cpu() for mine in model.parameters()], expected))


@pytest.mark.simulated
def test_the_first_line_and_the_report_name_the_peak_of_the_device(device: SimulatedDevice) -> None:
    """The peak of other memory and the peak of saved tensors come at different moments."""

    def model(block: Callable[[nn.Module], nn.Module]) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(_Begins(), *(block(_Block()) for _ in range(6))).to(NAME)

    keep = _taken(model(lambda block: block))
    limit = int(0.7 * max(keep() for _ in range(2)))
    del keep
    _empty(device)
    lines: list[str] = []
    with simulated(policy="auto", min_bytes=1, announce=lines.append, device_memory=limit) as offloader:
        checkpointed = model(_Checkpointed)
        offloader.use(checkpointed)
        step = _taken(checkpointed)
        peak = [step(offloader) for _ in range(8)][-1]
        shape = autopilot_of(offloader).facts().shape
        assert shape.plan is not None
        assert (shape.plan.predicted_peak_bytes or 0) + shape.other_bytes == pytest.approx(peak, rel=0.04)
    reported = re.search(r"no longer run again.* peak (\S+) MiB of", "".join(lines))
    assert reported is not None
    assert float(reported[1]) * MIB == pytest.approx(peak, rel=0.04)


class _Forward(nn.Module):
    """A block that takes much memory in its first run only."""

    TAKES = 8 * MIB

    def __init__(self) -> None:
        super().__init__()
        self.block, self.raises = _Block(), False

    def forward(self, x: Tensor) -> Tensor:
        if self.raises:
            raise ValueError("raises")
        if torch._C._current_graph_task_id() == -1:
            torch.empty(self.TAKES, dtype=torch.uint8, device=NAME)
        out: Tensor = self.block(x)
        return out


@pytest.mark.simulated
def test_the_forward_of_a_region_has_its_room_and_backward_has_it_afterwards(device: SimulatedDevice) -> None:
    blocks = 8
    torch.manual_seed(0)
    model = nn.Sequential(*(_Checkpointed(_Forward()) for _ in range(blocks))).to(NAME)
    step = _taken(model)

    saved = ROWS * WIDTH * 4  # by each block: its input
    limit = [step() for _ in range(2)][-1] - 3 * saved
    _empty(device)
    device.limit(limit)
    with _offloader(device_memory=limit) as offloader:
        offloader.use(model)
        assert max([step(offloader) for _ in range(6)]) <= limit
        shape = autopilot_of(offloader)._shape
        assert shape.need.beside.in_forward.keys() == set(range(blocks))
        assert limit - shape.need.beside.nbytes > blocks * saved, "backward may have all inputs at once"
        broken: Any = model[1].block
        broken.raises = True
        with pytest.raises(ValueError, match="raises"), offloader:
            model(_batch(ROWS))
        accounts = accounts_of(offloader)
        assert offloader.statistics().live_records == 0
        assert accounts.baseline_bytes == 0


class _Loss(nn.Module):
    """A loss takes far more memory than any block: logits in twice the precision, and their gradients."""

    WIDE = 16 * WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(WIDTH, self.WIDE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        labels = torch.zeros(len(x), dtype=torch.long, device=x.device)
        return nn.functional.cross_entropy(self.logits(x).double(), labels)


BLOCKS = 8
"""Checkpointed ones before a `_Loss`."""


def _losses() -> tuple[nn.Module, Callable[..., int]]:
    """Such a model, and a function that takes a step and returns the allocator's peak."""
    torch.manual_seed(0)
    model = nn.Sequential(*(_Checkpointed(_Block()) for _ in range(BLOCKS)), _Loss()).to(NAME)
    return model, _taken(model)


@pytest.mark.simulated
def test_the_memory_of_a_loss_leaves_backward_its_room(device: SimulatedDevice) -> None:
    model, step = _losses()
    own = [step() for _ in range(2)][-1]
    _empty(device)
    with _offloader(device_memory=own) as offloader:
        offloader.use(model)
        assert max([step(offloader) for _ in range(6)]) <= own
        shape = autopilot_of(offloader)._shape
        assert shape.base is not None
        assert list(shape.need.beside.in_forward) == [BLOCKS], "the loss alone takes more than backward"
        assert own - shape.need.beside.nbytes >= shape.base.baseline_peak_bytes, "backward has room for all inputs"
        with offloader:
            loss = model(_batch(ROWS))
        run, accounts = offloader.store.run, accounts_of(offloader)
        assert accounts.resident_bytes >= shape.need.beside.in_forward[BLOCKS], "room for the backward that may come"
        del loss
        with offloader:
            pass
        assert offloader.statistics().live_records == 0
        assert (accounts.resident_bytes, accounts.baseline_bytes) == (0, 0)
        assert run.beside.taken_bytes == sum(run.beside.given_back.drain())


@pytest.mark.simulated
def test_a_device_budget_does_not_count_the_memory_of_a_loss(device: SimulatedDevice) -> None:
    model, step = _losses()
    with _offloader(device_budget="1GiB") as offloader:
        offloader.use(model)
        for _ in range(4):
            step(offloader)
        assert autopilot_of(offloader)._shape.need.in_forward == {}


HOST_AHEAD = scaled_llama.LAUNCHES["host ahead"]


@functools.cache
def _alone(**shape: Any) -> dict[str, Any]:
    """A step of checkpointed layers without the library, in virtual time."""
    return scaled_llama.run(None, HOST_AHEAD, checkpointed=True, **shape, steps=1)


def _with_number(nbytes: int, **shape: Any) -> dict[str, Any]:
    """Train these layers in so many bytes. No optimizer steps, and a plan waits for one for a single step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budgets, "UNSEEN_STEPS", 1)
        return scaled_llama.run({"device_memory": nbytes}, HOST_AHEAD, checkpointed=True, **shape, steps=5)


@pytest.mark.simulated
def test_without_a_number_a_loss_makes_no_step_take_more_than_checkpointing(device: SimulatedDevice) -> None:
    """In virtual time, where some of eight layers run once."""
    alone = _alone(head=True, layers=8)
    ours = scaled_llama.run({}, HOST_AHEAD, checkpointed=True, head=True, layers=8, steps=5)
    assert ours["once"] > 0
    assert ours["step_s"] < 0.98 * alone["step_s"]
    assert ours["highest_bytes"] <= alone["peak_bytes"], "in the first step as well, which has no plan"


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("layers", "head", "share", "least"),
    [(8, True, 1.0, 1), (8, False, 1.05, 1), (8, True, 1.5, 1), (6, False, 1.05, 4), (6, False, 3.0, 5)],
    ids=[
        "logits that backward has just taken",
        "inputs that are evicted",
        "inputs on their way to the host as backward takes them",
        "backward computes a region's first tensor from one that stayed",
        "no room for a region that runs again",
    ],
)
def test_regions_run_once_within_the_number(
    device: SimulatedDevice, layers: int, head: bool, share: float, least: int
) -> None:
    """In virtual time: logits that backward has just taken are no memory beside saved tensors.

    The program holds the model's own input, which counts where its region runs once: no hook sees it then, and without
    `Offloader.use` the library does not know it. If no region runs again, no room for one is left free. A tensor that
    backward computes before it takes any other one of its region counts until backward has left this region.
    """
    limit = int(share * _alone(head=head, layers=layers)["peak_bytes"])
    ours = _with_number(limit, head=head, layers=layers)
    assert ours["once"] >= least
    assert ours["highest_bytes"] <= limit


@pytest.mark.simulated
def test_held_inputs_count_once_whatever_step_measured_the_rest(device: SimulatedDevice) -> None:
    region = Region(place=0, name="", begin_s=0.0, end_s=1.0, again_s=2.0, recompute_s=1.0, backward_end_s=4.0)
    other = replace(region, place=1)
    held = Storage(index=0, nbytes=70, birth_s=0.0, need_s=2.0, last_need_s=4.0, kept="held elsewhere", input_of=0)
    shape = Shape(())
    shape.base = Profile(storages=(held,), regions=(region, other), forward_s=1.0, backward_s=3.0)
    shape.need.beside, shape.need.settled, shape.once = Beside(100, 0, {}), True, frozenset({0})
    with _offloader(device_memory="1GiB") as offloader:
        budgets = autopilot_of(offloader)._budgets
        room = budgets.of(shape, AGAIN) or 0
        assert budgets.of(shape) == room - 70
        shape.need.of = shape.once
        assert budgets.of(shape) == room, "this step had them beside its saved tensors"
        shape.need.of = AGAIN
        budgets.at_most(shape, 1000)
        assert (budgets.of(shape), budgets.of(shape, AGAIN)) == (1000, 1070)


@pytest.mark.simulated
def test_states_that_pass_the_number_alone_are_an_error_before_the_second_forward(device: SimulatedDevice) -> None:
    _empty(device)  # an earlier test's exception may hold a model until now
    peaks, model = _train(1, None, rows=(8,))
    del model
    _empty(device)
    limit = peaks[0] - MIB // 4
    with _offloader(device_memory=limit) as offloader:
        step = _taken(_model(), rows=(8,))
        step(offloader)
        with pytest.raises(BudgetError) as caught, offloader:
            raise AssertionError("not reached")
    assert caught.value.floor_bytes == pytest.approx(peaks[0], rel=0.1)
    reported = str(caught.value)
    figure = f"device_memory={limit}: the floor is {caught.value.floor_bytes} bytes (as an optimizer's "
    assert reported.startswith(figure)
    assert all(name in reported for name in ("gradients, optimizer states", "FSDP2", "ZeRO-Offload", "8-bit or paged"))


@pytest.mark.simulated
def test_a_step_without_memory_notes_its_bytes_and_later_steps_take_less(device: SimulatedDevice) -> None:
    """The number exceeds the device's memory, which the library learns from the errors."""
    peaks, _ = _train(2, None)
    _empty(device)
    model = _model()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    device.limit(int(0.7 * max(peaks)))
    notes, went_well = [], []
    with _offloader(device_memory=4 * max(peaks)) as offloader:
        offloader.use(model)
        for _ in range(20):
            loss = None
            try:
                with offloader:
                    loss = model(_batch(ROWS)).square().sum()
                loss.backward()
                optimizer.step()
                went_well.append(True)
            except torch.OutOfMemoryError as error:
                went_well.append(False)
                if loss is None:
                    notes.append(error.__notes__[0])
            del loss
            forget_failed_backward()
            optimizer.zero_grad()
    assert went_well[0]
    assert not all(went_well)
    assert all(went_well[-8:]), went_well
    assert notes
    assert all("MiB of saved tensors were on the device; the forward had saved" in note for note in notes)
    assert all(note.endswith(f"else lower device_memory={4 * max(peaks)}, or the batch") for note in notes)


def test_on_the_cpu_the_number_is_the_process(make_offloader: MakeOffloader) -> None:
    model = Chain(width=256, depth=8)
    optimizer = torch.optim.SGD(model.parameters())

    def step(offloader: Offloader, rows: int) -> None:
        train_step(model, batch(rows, width=256), offloader)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()

    offloader = make_offloader(policy="auto", device_memory="1TB")
    for _ in range(4):
        step(offloader, 512)
    left = budget_of(offloader).limit_bytes or 0
    assert 10**12 - resident_set_bytes() - (1 << 30) < left < 10**12 - (100 << 20)
    offloader = make_offloader(policy="auto", device_memory="100MB")
    step(offloader, 64)
    with pytest.raises(BudgetError, match=r"device_memory=100000000: the floor is .* FSDP2"):
        step(offloader, 64)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"device_memory": "24GB", "device_budget": "1GB"}, "device_budget bounds a part of it: give one"),
        ({"device_memory": "24GB", "policy": "greedy"}, "only a planner can keep it: leave policy at 'auto'"),
        ({"device_memory": "110%"}, "no device has more than 100%"),
        ({"device_memory": 0}, "must be above 0"),
        ({"device_memory": "all"}, "not a size"),
        ({"device_memory": 24}, 'give "24%"'),
    ],
)
def test_a_number_that_cannot_work_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
        OffloadConfig(**options)
    assert caught.value.field == "device_memory"


@pytest.mark.simulated
@pytest.mark.parametrize(("passed", "share"), [("auto", 0.97), ("50%", 0.5)])
def test_a_share_is_of_the_devices_memory(device: SimulatedDevice, passed: str, share: float) -> None:
    device.limit(1 << 28)
    with _offloader(device_memory=passed) as offloader:
        _train(3, offloader)
        pilot = autopilot_of(offloader)
        left, beside = budget_of(offloader).limit_bytes, pilot._shape.need.beside
    assert left + beside.nbytes == pytest.approx(share * (1 << 28), rel=0.02)


@pytest.mark.parametrize(
    ("microbatches", "later", "asks"),
    [(4, [False, True, True, True], False), (4, [False, True, True, True], True), (1, [True], True)],
    ids=["accumulation", "statistics between", "every step"],
)
def test_a_micro_batch_that_begins_without_gradients_does_not_settle_the_need(
    make_offloader: MakeOffloader, microbatches: int, later: list[bool], asks: bool
) -> None:
    """Without accumulation every step after the first settles it."""
    offloader, model = make_offloader(policy="auto"), Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    settled = []
    for _ in range(3):
        for _ in range(microbatches):
            settled.append(offloader.store.run.optimizer.settled)
            with offloader:
                loss = model(batch()).square().sum()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if asks:  # counts the optimizer's step before the next micro-batch
            offloader.statistics()
    assert settled == microbatches * [False] + 2 * later


@pytest.mark.simulated
def test_tensors_of_a_recomputation_are_a_part_of_the_saved_ones(device: SimulatedDevice) -> None:
    """If the number is checkpointing's own peak, saved tensors get the bytes that checkpointing saves."""
    model = nn.Sequential(*(_Checkpointed(_Block()) for _ in range(4))).to(NAME)
    step = _taken(model)
    number = [step() for _ in range(2)][-1]
    with _offloader(device_memory=number) as offloader:
        offloader.use(model)
        for _ in range(6):
            step(offloader)
        budget = autopilot_of(offloader).limits.device_budget
        assert budget is not None
        assert budget >= 0.7 * offloader.statistics().baseline_peak_bytes


class _Allocator:
    """In place of `Tiers`: an allocator that counts, and whose peak can start over."""

    def __init__(self) -> None:
        self.shared = SimpleNamespace(config=SimpleNamespace(device_memory=1000))
        self.now = self.most = 100

    def take(self, peak: int, now: int) -> Any:
        self.most, self.now = max(self.most, peak), now
        return self

    def in_use(self) -> tuple[int, int]:
        return self.now, self.most

    def reset_peak(self) -> None:
        self.most = self.now


def test_the_need_of_a_regions_forward_is_known_apart() -> None:
    accounts, tiers = Accounts(), _Allocator()
    measured: Any = MemoryBeside(accounts)
    measured.begin_step(tiers, apart=True)
    measured.look(tiers.take(peak=900, now=100), place=0)
    measured.look(tiers.take(peak=300, now=100), place=1)
    measured.look(tiers.take(peak=400, now=100))
    accounts.add_resident(50)
    measured.look(tiers.take(peak=500, now=150))  # between two samples 50 bytes may have been resident or not
    accounts.add_resident(70)
    measured.taken_bytes = 70
    measured.look(tiers.take(peak=150, now=150))
    measured.look(tiers.take(peak=560, now=150))
    measured.backward_ends(tiers, recorded=True)
    assert measured.recorded == Beside(510, 100, {0: 390})
    assert measured.passed_bytes == 900


def test_the_bytes_of_a_turn_are_its_own_only_if_backward_reaches_a_region() -> None:
    parts = Parts(7, apart=True)
    parts.add(100, None)
    parts.add(300, 0)
    parts.turn_begins(1)
    parts.add(500, None)
    parts.turn_ends()
    assert parts.result() == Beside(100, 7, {0: 200, 1: 400})
    parts.turn_begins(1)
    parts.add(600, None)
    parts.region_begins()  # another one, so that this was no turn
    assert parts.result() == Beside(600, 7, {})


def test_the_peak_of_the_last_plan_counts_until_a_step_under_a_new_plan_shows_its_own() -> None:
    shape = Shape(())
    shape.need.beside = Beside(180, 20, {})
    assert shape.facts(1000).other_bytes == 180
    shape.note_peak(120)
    shape.note_peak(None)  # a step that did not measure it
    shape.steps = StepsUnderPlan()
    assert shape.facts(1000).other_bytes == 120
    shape.note_peak(130)
    assert (shape.facts(1000).other_bytes, shape.steps.shows_peak) == (130, True)


def test_the_need_beside_saved_tensors_comes_from_steps_with_all_regions_again() -> None:
    held = Storage(index=None, nbytes=50, birth_s=0.0, need_s=None, last_need_s=1.0, kept=RECOMPUTED)
    some, none = Profile(storages=(held,), backward_s=1.0), Profile(storages=(), backward_s=1.0)
    need = NeedBeside()
    first, second = Beside(100, 10, {0: 5}), Beside(180, 20, {})
    need.take(some, first, once=AGAIN, settled=True)
    need.take(some, second, once=frozenset({1}), settled=False)
    assert (need.beside, need.settled, need.rounding_bytes) == (first, True, 512 - 50)
    need.take(none, second, once=frozenset({1}), settled=False)
    assert (need.beside, need.settled) == (first, True), "also where all run once: reading ahead leaves room"


def test_an_optimizer_step_that_is_skipped_is_no_accumulation(make_offloader: MakeOffloader) -> None:
    """As by a gradient scaler, or in a first check of gradients. Plans wait for a step that begins with gradients."""
    model, offloader = Chain(), make_offloader(policy="auto")
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def microbatch(*, step: bool) -> bool:
        """Return whether the next one begins with all memory."""
        with offloader:
            loss = model(batch()).sum()
        loss.backward()
        if step:
            optimizer.step()
        return offloader.store.run.optimizer.settled

    assert not microbatch(step=False)
    assert not microbatch(step=True), "it may have been one of two"
    assert microbatch(step=True)
    for _ in range(2):
        assert microbatch(step=False), "it begins with gradients"
        assert not microbatch(step=True), "these are two"
