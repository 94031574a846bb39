"""``device_budget`` under a plan, on a disk so slow that storages which should have left are still there."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from actoffload import Offloader, Plan
from actoffload.errors import BudgetError
from actoffload.planning.constants import WARM_UP
from actoffload.planning.plan import PlanEntry
from actoffload.policy import KeepReason
from actoffload.testing.faults import GateEngine, SlowEngine
from actoffload.testing.simulated_device import NAME, SimulatedAccelerator, SimulatedDevice
from actoffload.tiers.record import State
from tests.harness import (
    ADVERSARIES,
    ON_EACH_DEVICE,
    Adversary,
    MakeOffloader,
    accounts_of,
    budget_of,
    following,
    hinder,
    lock_of,
    note_rooms,
    only_engine,
    plan_with,
    same_bits,
    simulated,
    tape_records,
    tier_of,
)

RECORD_BYTES = 64 << 10
LAYERS = 12
SLOW = partial(SlowEngine, threads=1, bandwidth_bytes_per_s=4e6)  # 16 ms a record: slower than the compute


def _plan(stays: str) -> Plan:
    """One entry for each layer's storage; ``stays``: k for keep, . for offload."""
    actions = {"k": "keep", ".": "offload"}
    return Plan(tuple(PlanEntry(index=i, nbytes=RECORD_BYTES, action=actions[c]) for i, c in enumerate(stays)))


def _input(where: str = "cpu") -> Tensor:
    """A leaf of the size of a record."""
    return torch.linspace(-1, 1, RECORD_BYTES // 4).to(where).requires_grad_()


def _waves(h: Tensor, layers: int = LAYERS) -> Tensor:
    """Layers that save a record each."""
    for _ in range(layers):
        h = (h * 1.0001).sin()
    return h


def _gradient(x: Tensor) -> Tensor:
    """Of the sum of `_waves`, without an offloader."""
    return torch.autograd.grad(_waves(x).sum(), x)[0]


KEEPS_LATE = "......kkkkk."
"""Five stay at the end of the forward, when the first six have left, as far as the plan knows."""


@pytest.mark.parametrize(
    ("stays", "least", "most"),
    [(KEEPS_LATE, 1, 7), ("k" * LAYERS, LAYERS, LAYERS)],
    ids=["waits for the room that writes free", "knows the room that is needed next, and waits for no more"],
)
def test_a_storage_that_a_plan_keeps_has_room(make_offloader: MakeOffloader, stays: str, least: int, most: int) -> None:
    """Without a wait all except the first would be resident; a machine slower than the disk needs less."""
    x = _input()
    offloader = make_offloader(policy=_plan(stays), device_budget=most * RECORD_BYTES, engine=SLOW)
    with offloader:
        loss = _waves(x).sum()
    assert same_bits(torch.autograd.grad(loss, x)[0], _gradient(x))
    statistics = offloader.statistics()
    assert statistics.live_records == 0
    assert statistics.baseline_peak_bytes == LAYERS * RECORD_BYTES
    assert least * RECORD_BYTES <= statistics.resident_peak_bytes <= most * RECORD_BYTES


def _follow(
    plan: Plan, where: str, make_offloader: MakeOffloader, **options: Any
) -> tuple[Offloader, list[dict[str, int]]]:
    """Six steps in which every plan is this one; returns what stayed and what moved in each. Gradients are right."""
    offloader = make_offloader(policy="auto", **options)
    plan_with(offloader, SimpleNamespace(plan=lambda profile, limits: plan))
    x = _input(where)
    expected = _gradient(x)
    steps = []
    for _ in range(6):
        before = offloader.statistics()
        with offloader:
            loss = _waves(x).sum()
        assert same_bits(torch.autograd.grad(loss, x)[0], expected)
        del loss
        after, fits = offloader.statistics(), KeepReason.FITS.value
        kept = after.kept_bytes.get(fits, 0) - before.kept_bytes.get(fits, 0)
        steps.append({"kept": kept, "moved": after.moved_bytes - before.moved_bytes})
    return offloader, steps


@ON_EACH_DEVICE
def test_storages_that_a_plan_keeps_leave_if_the_budget_has_no_room_for_them(
    where: str, make_offloader: MakeOffloader
) -> None:
    """A plan may be wrong about a step's peak: here every plan keeps all, in a budget for half of it."""
    keeps = replace(_plan("k" * LAYERS), predicted_peak_bytes=0)
    half = LAYERS // 2 * RECORD_BYTES
    offloader, steps = _follow(keeps, where, make_offloader, device_budget=half)
    assert steps[-1]["kept"] > 0, "the plan is followed"
    assert offloader.statistics().resident_peak_bytes <= half


@ON_EACH_DEVICE
def test_storages_that_a_plan_keeps_stay_if_storages_on_their_way_out_give_them_room(
    where: str, make_offloader: MakeOffloader
) -> None:
    """On the CPU a write takes longer than the compute; on a device the window lets the copies out wait."""
    late = replace(_plan(KEEPS_LATE), predicted_peak_bytes=7 * RECORD_BYTES)
    options = {"device_budget": 7 * RECORD_BYTES, "pending_bytes": "1GiB", "engine": SLOW if where == "cpu" else "auto"}
    _, steps = _follow(late, where, make_offloader, **options)
    assert steps[-1]["kept"] == 5 * RECORD_BYTES


@ON_EACH_DEVICE
def test_a_storage_that_the_program_holds_stays_though_the_budget_has_no_room(
    where: str, make_offloader: MakeOffloader
) -> None:
    """Moving it frees nothing: the recorded step has shown that the program holds it."""
    held = tuple(replace(entry, reason="held elsewhere") for entry in _plan("k" * LAYERS).entries)
    keeps = replace(_plan("k" * LAYERS), entries=held, predicted_peak_bytes=0)
    _, steps = _follow(keeps, where, make_offloader, device_budget=LAYERS // 2 * RECORD_BYTES)
    assert steps[0]["moved"] > 0, "nothing is known of the first step"
    assert steps[-1]["moved"] == 0


@pytest.mark.simulated
@pytest.mark.parametrize("target", ["host", "nvme"])
def test_on_a_device_kept_ones_make_the_compute_stream_wait_for_copies(
    device: SimulatedDevice, tmp_path: Path, target: Any
) -> None:
    """In stream order: memory is reused only after the copies that read it, else the device counts a violation."""
    accelerator = SimulatedAccelerator()
    hinder(device, accelerator, "late copies")
    x = _input(NAME)
    expected = _gradient(x)
    with simulated(
        accelerator,
        target=target,
        path=str(tmp_path),
        debug=True,
        policy=_plan(KEEPS_LATE),
        device_budget=7 * RECORD_BYTES,
        pending_bytes="1GiB",  # the window alone would keep everything
    ) as offloader:
        with offloader:
            loss = _waves(x).sum()
        assert same_bits(torch.autograd.grad(loss, x)[0], expected)
        statistics = offloader.statistics()
        assert statistics.live_records == 0
        assert statistics.resident_peak_bytes <= 7 * RECORD_BYTES


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("options", "first"), [({"device_memory": "1GiB"}, True), ({"device_budget": "1MiB"}, False), ({}, False)]
)
def test_memory_in_use_counts_beside_saved_tensors_only_where_that_is_measured(
    device: SimulatedDevice, make_offloader: MakeOffloader, options: dict[str, Any], first: bool
) -> None:
    """A ``device_budget`` also bounds the tensor in use. On a CPU only the process's highest peak is known."""
    with simulated(policy="auto", **options) as offloader:
        assert tier_of(offloader).evicts_first == first
    assert not tier_of(make_offloader(policy="auto", devices="cpu", **options)).evicts_first


@pytest.mark.simulated
@pytest.mark.parametrize(("let_go", "each"), [(False, 0), (True, 1)])
def test_a_storage_that_backward_takes_leaves_its_room_to_the_next_fetch(
    device: SimulatedDevice, let_go: bool, each: int
) -> None:
    """If it is evicted, the budget has room for the next record, and for one that backward may need at once."""
    x = _input(NAME)
    records: list[Any] = []
    ahead: list[int] = []

    def count(_: Tensor) -> None:
        ahead.append(sum(record.state is State.RELOADING for record in records if record is not None))

    with simulated(policy="all", device_budget=2 * RECORD_BYTES) as offloader:
        tier_of(offloader).evicts_first = let_go
        with offloader:
            h = x
            for _ in range(LAYERS):
                h = (h * 1.0001).sin()
                h.register_hook(count)
            records += tape_records(offloader)
        offloader.synchronize()
        h.sum().backward()
        assert offloader.statistics().resident_peak_bytes <= 2 * RECORD_BYTES
    assert ahead[1:-1] == [each] * (LAYERS - 2)


@pytest.mark.simulated
@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_a_tensor_in_use_that_was_evicted_keeps_its_bytes(device: SimulatedDevice, adversary: Adversary) -> None:
    """Backward's kernels read it while the next fetch fills memory; the simulated device notices early reuse."""
    accelerator = SimulatedAccelerator()
    hinder(device, accelerator, adversary)
    x = _input(NAME)
    expected = _gradient(x)
    with simulated(accelerator, debug=True, policy="all", device_budget=3 * RECORD_BYTES) as offloader:
        tier_of(offloader).evicts_first = True
        for _ in range(2):
            with offloader:
                loss = _waves(x).sum()
            offloader.synchronize()
            assert same_bits(torch.autograd.grad(loss, x)[0], expected)
        assert offloader.statistics().host_read_bytes > 0


@pytest.mark.parametrize(("reserved", "states"), [(0, {State.RESIDENT}), (1 << 20, {State.SPILLING})])
def test_a_write_goes_on_where_its_room_is_needed(
    make_offloader: MakeOffloader, reserved: int, states: set[State]
) -> None:
    """Backward takes records back from their writes, unless another record will need that memory."""
    offloader = make_offloader(device_budget="1MiB", engine=GateEngine)  # no write begins
    x = torch.ones(1024, requires_grad=True)
    with offloader:
        tape = offloader._forwards.tape
        loss: Any = ((x * 1.0).sin() * 1.0).sin().cos()
    budget_of(offloader).made_bytes = reserved
    _needed = loss.grad_fn._saved_self
    *others, last = [record for record in tape.records if record is not None]
    assert last.state is State.RESIDENT
    assert {record.state for record in others} == states


# -- recomputation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "once", "place", "ahead"),
    [
        (0, 8, set(), 7, 6),
        (4, 4, set(), 7, 4),
        (8, 0, set(), 6, 6),
        (8, 0, {0}, 7, 3),
        (8, 0, {0}, 6, 6),
        (8, 4, {0}, 8, 6),
    ],
    ids=["first", "in the middle", "last", "run once", "run once and left", "run once and not begun"],
)
def test_reading_ahead_leaves_room_for_the_regions_that_run_again_before_the_need(
    make_offloader: MakeOffloader, before: int, after: int, once: set[int], place: int, ahead: int
) -> None:
    """The region holds four tensors of a budget of eight, of which one is for a tensor that is needed at once.

    A region that runs once keeps the room of its four tensors until backward has left it. ``ahead``: the tensors that
    are here when backward comes to this ``place``.
    """
    offloader = make_offloader(policy="all", device_budget=8 * RECORD_BYTES, prefetch_bytes=1 << 20)
    accounts = accounts_of(offloader)
    resident: dict[int, int] = {}

    def note(number: int) -> None:
        resident[number] = accounts.resident_bytes // RECORD_BYTES

    following(offloader, *once)
    for _ in range(2):  # the first step shows the bytes that the region holds
        accounts.resident_peak_bytes = 0
        with offloader:
            h = _input()
            for number in range(before + 1 + after):
                h = checkpoint(_waves, h, 4, use_reentrant=False) if number == before else _waves(h, 1)
                h.register_hook(lambda _, number=number: note(number))
            loss = h.sum()
        del h
        offloader.synchronize()  # all have left
        loss.backward()
    assert resident[place] == ahead
    assert accounts.resident_peak_bytes <= 8 * RECORD_BYTES


@pytest.mark.parametrize("once", [set(), {1}, {0, 1, 2}], ids=["none", "one", "all"])
def test_reading_ahead_leaves_room_for_regions_that_use_one_tensor(
    make_offloader: MakeOffloader, once: set[int]
) -> None:
    """The first region has saved the mask, and backward needs it in the last one first.

    Later uses of the mask do not end the count of the region that backward is in: it has used four tensors of that one.
    """
    budget = 10 * RECORD_BYTES
    resident: list[int] = []
    offloader = make_offloader(policy="all", device_budget=budget, prefetch_bytes=1 << 20)
    accounts = accounts_of(offloader)
    x = _input()

    def region(h: Tensor, mask: Tensor) -> Tensor:
        for _ in range(4):
            h = (h * mask).sin()
        return h

    def forward() -> Tensor:
        h, mask = x, (x.detach() * 0.5).cos()
        for _ in range(3):
            h = _waves(h, 4)
            h.register_hook(lambda _: resident.append(accounts.resident_bytes))
            h = checkpoint(region, h, mask, use_reentrant=False)
        return h.sum()

    (expected,) = torch.autograd.grad(forward(), x)
    following(offloader, *once)
    for _ in range(2):  # the first step shows the bytes that the regions hold
        accounts.resident_peak_bytes = 0
        resident.clear()
        with offloader:
            loss = forward()
        offloader.synchronize()
        assert same_bits(torch.autograd.grad(loss, x)[0], expected)
    assert accounts.resident_peak_bytes <= budget
    left = [nbytes for place, nbytes in zip((2, 1, 0), resident, strict=True) if place in once]
    assert all(nbytes + 4 * RECORD_BYTES <= budget for nbytes in left)


def test_reading_ahead_leaves_room_for_the_regions_of_another_branch(make_offloader: MakeOffloader) -> None:
    """Backward takes the first branch first, so the order of saving does not show what comes before its need."""
    budget = 9 * RECORD_BYTES
    offloader = make_offloader(policy="all", device_budget=budget, prefetch_bytes=1 << 20)
    accounts = accounts_of(offloader)
    x = _input()

    def branch() -> Tensor:
        return _waves(checkpoint(_waves, _waves(x, 8), 6, use_reentrant=False), 1).sum()

    for _ in range(3):  # the first step shows the bytes that the regions hold, and the order
        accounts.resident_peak_bytes = 0
        with offloader:
            losses = [branch() for _ in range(2)]
        offloader.synchronize()
        for loss in losses:
            loss.backward()
    assert accounts.resident_peak_bytes <= budget


@pytest.mark.simulated
def test_room_is_made_before_the_forward_of_a_region_takes_it(device: SimulatedDevice) -> None:
    """A region that runs once saves no input, so no save makes room for it."""
    accelerator = SimulatedAccelerator()
    hinder(device, accelerator, "late copies")
    x = _input(NAME)
    expected = _gradient(x)
    resident: list[int] = []
    with simulated(accelerator, debug=True, device_budget=6 * RECORD_BYTES) as offloader:
        accounts = accounts_of(offloader)

        def region(h: Tensor) -> Tensor:
            resident.append(accounts.resident_bytes)
            return _waves(h, 1)

        following(offloader, 0)
        offloader.store.regions.taken.in_forward = {0: 4 * RECORD_BYTES}
        with offloader:
            loss = checkpoint(region, _waves(x, LAYERS - 1), use_reentrant=False).sum()
        resident.append(accounts.resident_bytes)
        assert same_bits(torch.autograd.grad(loss, x)[0], expected)
    inside, afterwards = resident
    assert 4 * RECORD_BYTES < inside <= 6 * RECORD_BYTES
    assert afterwards <= 3 * RECORD_BYTES


def test_a_region_gives_its_room_back_before_the_save_that_follows_it(make_offloader: MakeOffloader) -> None:
    """The region has computed that tensor in the room of its forward: so nothing moves for it."""
    entries = tuple(PlanEntry(index=i, nbytes=RECORD_BYTES, action="keep") for i in range(5))
    offloader = make_offloader(policy=Plan(entries, once=(0,), regions=1), device_budget=6 * RECORD_BYTES)
    store = offloader.store
    store.decision.why_planned = KeepReason.FITS  # as for a plan of the planner's, which may be wrong about the room
    x = _input()
    moved = []
    for step in range(3):  # the first forward under a plan shows which save follows the region
        if step == 2:
            store.regions.follow(frozenset({0}), (5, 5 * RECORD_BYTES + 1))  # another plan
        with offloader:
            store.regions.taken.in_forward = {0: 2 * RECORD_BYTES}
            h = checkpoint(lambda h: (h * 1.0001).sin().sin().sin().sin(), x, use_reentrant=False)
            loss = h.sin().sum()
        moved.append(offloader.statistics().moved_bytes)
        loss.backward()
    assert 0 < moved[0] == moved[1] < moved[2], "in the second step nothing has moved"


def test_a_region_whose_input_has_no_record_ends_the_count_of_the_one_before(make_offloader: MakeOffloader) -> None:
    offloader = following(make_offloader(policy="all", device_budget=20 * RECORD_BYTES), 1)
    used: list[int] = []

    def first(h: Tensor) -> Tensor:
        used.append(budget_of(offloader).used_bytes)
        return _waves(h, 1)

    def second(h: Tensor) -> Tensor:
        h = _waves(h, 1)
        h.register_hook(lambda _: used.append(budget_of(offloader).used_bytes))
        return h.sin()

    with offloader:
        h: Tensor = checkpoint(first, _input(), use_reentrant=False)
        h = checkpoint(second, h, use_reentrant=False)
    h.sum().backward()
    assert used == [0, RECORD_BYTES, 0]


def test_a_region_that_follows_another_makes_room_for_the_first_save_in_it(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The region before it has given that save's room back."""
    entries = tuple(PlanEntry(index=i, nbytes=RECORD_BYTES, action="keep") for i in range(4))
    offloader = make_offloader(policy=Plan(entries, once=(0, 1), regions=2), device_budget=20 * RECORD_BYTES)
    x = _input()
    asked = note_rooms(monkeypatch)
    for _ in range(2):  # the first forward shows which save follows the first region
        asked.clear()
        offloader.store.regions.taken.in_forward = dict.fromkeys((0, 1), 5 * RECORD_BYTES)
        with offloader:
            h = x
            for _ in range(2):
                h = checkpoint(lambda h: (h * 1.0001).sin().sin(), h, use_reentrant=False)
            loss = h.sum()
        loss.backward()
    assert [nbytes for nbytes in asked if nbytes >= 5 * RECORD_BYTES] == [5 * RECORD_BYTES, 6 * RECORD_BYTES]


def test_no_room_is_made_where_nothing_may_be_ordered(
    make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During graph capture and after abort() the library orders nothing."""
    offloader = make_offloader(device_budget=1000)
    tier = tier_of(offloader)
    asked: list[int] = []
    monkeypatch.setattr(tier, "wait_for_room", asked.append)
    tier.make_room(2000)
    assert asked == [2000]
    with monkeypatch.context() as capture:
        capture.setattr(tier, "capturing", lambda: True)
        tier.make_room(2000)
    offloader.store.shared.stopped = True
    tier.make_room(2000)
    offloader.store.shared.stopped = False
    assert asked == [2000]


def test_a_read_under_way_is_not_counted_twice(make_offloader: MakeOffloader, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read has its room from its begin on: backward must not wait for writes to make that room again."""
    offloader = make_offloader(device_budget="1MiB", engine=GateEngine)
    x = torch.ones(1024, requires_grad=True)
    with offloader:
        tape = offloader._forwards.tape
        y: Any = (x * 1.0).sin()
    gate = only_engine(offloader)
    gate.open()
    offloader.synchronize()
    gate.shut()
    (record,) = tape.records
    assert record is not None
    with lock_of(offloader):
        tier_of(offloader).fetch(record, urgent=False)
    assert (record.state, record.counted) == (State.FETCHING, True)
    asked = note_rooms(monkeypatch)
    gate.open()
    _value = y.grad_fn._saved_self
    assert asked == []


@pytest.mark.simulated
@pytest.mark.parametrize("budget", [3, 4, 6])
@pytest.mark.parametrize("steps", [[1] * 4 + [2] * 4, [2] * 4 + [3] * 4], ids=["one more", "another one more"])
def test_a_plan_leaves_room_for_another_forward(steps: list[int], budget: int, device: SimulatedDevice) -> None:
    """Only the first step with more micro-batches than ever may pass a budget, by the first tensor of the new forward.

    Budgets are in tensors, of which a forward saves eight.
    """
    x = torch.linspace(-1, 1, 1 << 16).to(NAME).requires_grad_()
    with simulated(policy="auto", device_budget=budget * x.nbytes) as offloader:
        peaks = []
        for microbatches in steps:
            accounts_of(offloader).resident_peak_bytes = 0
            losses = []
            for _ in range(microbatches):
                with offloader:
                    h = x
                    for _ in range(8):
                        h = h.sin()
                losses.append(h.sum())
                del h
            for loss in reversed(losses):
                loss.backward()
            peaks.append(accounts_of(offloader).resident_peak_bytes / x.nbytes)
        assert peaks.pop(4) <= budget + 1
        assert max(peaks) <= budget, peaks


@pytest.mark.simulated
def test_a_budget_is_refused_only_after_the_disk_was_measured(device: SimulatedDevice, tmp_path: Path) -> None:
    """The first writes may end after the step. On paper nothing moves to a disk of unknown speed."""
    x, small = _input(NAME), _input(NAME)[: RECORD_BYTES // 8].detach().requires_grad_()
    options: dict[str, Any] = {"target": "nvme", "path": str(tmp_path), "engine": GateEngine, "min_bytes": RECORD_BYTES}
    with simulated(policy="auto", device_budget=2 * RECORD_BYTES, **options) as offloader:

        def steps(count: int, *, measured: bool) -> None:
            for _ in range(count):
                with offloader:
                    loss = _waves(x).sum() + _waves(small).sum()  # the small ones stay, and pass the budget
                loss.backward()
                if measured:
                    offloader.synchronize()

        steps(WARM_UP + 2, measured=False)
        only_engine(offloader).open()
        with pytest.raises(BudgetError) as caught:
            steps(3, measured=True)
        assert caught.value.floor_bytes < offloader.statistics().baseline_peak_bytes
