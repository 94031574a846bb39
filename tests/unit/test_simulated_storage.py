"""Host memory and disk behind the simulated accelerator."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actoffload import Offloader, Plan
from actoffload.errors import StorageReadError
from actoffload.memory import host_pool
from actoffload.storage.engines.base import IoKind
from actoffload.storage.spool import Spool
from actoffload.testing.faults import FailingEngine, GateEngine
from actoffload.testing.simulated_device import NAME, SimulatedAccelerator, SimulatedDevice
from actoffload.tiers import device_tier, tiers
from actoffload.tiers.copy_streams import CopyStreams
from actoffload.tiers.device_tier import DeviceTier
from actoffload.tiers.direct_tier import DirectTier
from actoffload.tiers.record import State
from tests.harness import (
    accounts_of,
    acquire_slot,
    assert_same_gradients,
    copy_in,
    fill_device,
    gradients,
    lock_of,
    pools_of,
    records_of,
    spool_of,
    tier_of,
    train_step,
    wait_until,
    window_bytes,
)
from tests.unit.simulated_programs import (
    LONGEST_DELAY_S,
    RECORD_BYTES,
    LateEngine,
    _equal,
    _is_right,
    _model,
    _offloader,
    leaf,
)

pytestmark = pytest.mark.simulated

NBYTES = 1 << 12
SEEDS = 40


def _moved(offloader: Offloader, compute: Callable[[], Tensor]) -> Tensor:
    """The result of a forward, after all that it saved has moved."""
    with offloader:
        result = compute()
    offloader.synchronize()
    torch.accelerator.synchronize()
    return result


def _assert_gradient(found: Tensor, w: Tensor) -> None:
    """It is the gradient of ``(w * 2).sin().sum()``."""
    assert torch.equal(found.cpu(), (2 * (w * 2).cos()).cpu())


@pytest.mark.parametrize("ordered", [True, False])
def test_host_memory_is_written_again_after_the_copy_that_reads_it(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    accelerator = SimulatedAccelerator()
    copies = CopyStreams(accelerator)
    host = torch.full((NBYTES,), 7, dtype=torch.uint8).pin_memory()
    other = torch.full((NBYTES,), 9, dtype=torch.uint8, device=NAME)
    if not ordered:
        monkeypatch.setattr(CopyStreams, "_order_after_host_copies", lambda *_: None)
    out_stream = accelerator.side_stream(0, "out")
    with device.paused(accelerator.side_stream(0, "in")):
        incoming, filled = copy_in(copies, host)
        out = copies.gather("out", 0, None)
        out.add("other", host, other, [incoming])
        copies.begin_out(out)
        if not ordered:
            out_stream.synchronize()
    copies.synchronize(out)
    copies.before_use(incoming, lambda: filled)
    assert bool((filled.cpu() == (7 if ordered else 9)).all())
    assert bool((host == 9).all())


def test_host_memory_keeps_its_budget_when_backward_comes_in_an_unforeseen_order(
    device: SimulatedDevice, tmp_path: Path
) -> None:
    """Records fetched ahead give their host memory up, because their bytes are on disk."""
    model, x = _model()
    expected = train_step(model, x)
    budgets = {"host_budget": 3 * RECORD_BYTES, "device_budget": 3 * RECORD_BYTES}
    with _offloader(tmp_path, target="nvme", **budgets) as offloader:
        loss = _moved(offloader, lambda: model(x).square().sum())
        (pool,), tier = pools_of(offloader), tier_of(offloader)
        on_disk = [record for record in records_of(offloader) if record.state is State.SPILLED]
        assert len(on_disk) > 4
        with lock_of(offloader):
            assert [tier.fetch(record, urgent=False) for record in on_disk] == [True] * 3 + [False] * (len(on_disk) - 3)
            assert tier.fetch(on_disk[-1], urgent=True)
            assert pool.slabs.mapped_bytes <= pool.capacity_bytes
        loss.backward()
        assert_same_gradients(gradients(model), expected)
        assert pool.slabs.mapped_bytes <= pool.capacity_bytes


@pytest.mark.parametrize("offered", [True, False])
def test_memory_that_cannot_be_registered_is_page_locked_by_pytorch(
    device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offered: bool
) -> None:
    """PyTorch page-locks for devices other than CUDA's; if that fails too, memory is pageable, with one warning."""
    monkeypatch.setattr(SimulatedAccelerator, "pin", lambda *_: False)
    if not offered:
        plain = torch.empty

        def empty(*sizes: Any, pin_memory: bool = False, **options: Any) -> Tensor:
            if pin_memory:
                raise RuntimeError("in this test")
            return plain(*sizes, **options)

        monkeypatch.setattr(torch, "empty", empty)
    model, x = _model()
    expected = train_step(model, x)
    printed = contextlib.nullcontext() if offered else pytest.warns(RuntimeWarning, match="could not be page-locked")
    with printed, _offloader(tmp_path, target="host") as offloader:
        for _ in range(2):
            assert_same_gradients(train_step(model, x, offloader), expected)
        (pool,) = pools_of(offloader)
        slot = acquire_slot(pool, NBYTES)
        assert pool.tensor(slot, 0, NBYTES).is_pinned() == offered
        assert pool.pin_failed != offered
        assert ("could not be page-locked" in offloader.report()) != offered
        assert pool.slabs.mapped_bytes <= pool.capacity_bytes


def test_a_prefetch_that_found_no_memory_is_tried_once_a_step_and_half_as_far_in_the_next(
    device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = _model()
    expected = train_step(model, x)
    refused: list[int] = []

    def early(*_: Any) -> Tensor:
        refused.append(1)
        raise torch.OutOfMemoryError("in this test")

    fetch = DeviceTier.fetch

    def without_memory_ahead(tier: DeviceTier, record: Any, *, urgent: bool) -> bool:
        with monkeypatch.context() as patch:
            if not urgent:
                patch.setattr(SimulatedAccelerator, "empty", early)
            return fetch(tier, record, urgent=urgent)

    monkeypatch.setattr(DeviceTier, "fetch", without_memory_ahead)
    with _offloader(tmp_path, target="host") as offloader:
        windows = []
        for step in range(3):
            assert_same_gradients(train_step(model, x, offloader), expected)
            assert len(refused) == step + 1
            windows.append(window_bytes(offloader))
        assert windows == [2 * RECORD_BYTES, RECORD_BYTES, RECORD_BYTES // 2]


def test_uring_is_tried_first_behind_a_device(device: SimulatedDevice, tmp_path: Path) -> None:
    with _offloader(tmp_path, target="nvme", engine="auto") as offloader:
        spool = spool_of(offloader)
        assert spool.capabilities.name == "uring" or "not uring" in spool.disk.engine_reason


def test_a_read_that_fails_is_an_error_and_is_tried_again(device: SimulatedDevice, tmp_path: Path) -> None:
    w = leaf()
    engine = partial(FailingEngine, kind=IoKind.READ, count=1)
    with _offloader(tmp_path, target="nvme", engine=engine) as offloader:
        out = _moved(offloader, lambda: (w * 2).sin())
        with pytest.raises(StorageReadError):
            torch.autograd.grad(out.sum(), w, retain_graph=True)
        (found,) = torch.autograd.grad(out.sum(), w)
    _assert_gradient(found, w)


def test_a_small_view_comes_back_with_its_alignment(device: SimulatedDevice, tmp_path: Path) -> None:
    """The alignment decides which kernel runs, and so how it rounds."""
    view = torch.linspace(0, 1, 1 << 16).to(NAME)[301:5301]
    expected = view.cpu()
    with _offloader(tmp_path, target="host") as offloader:
        with offloader:
            out: Any = torch.ones(5000, device=NAME, requires_grad=True) * view
        offloader.synchronize()
        alignment = view.data_ptr() % 512
        del view
        found = out.grad_fn._saved_other
        assert offloader.statistics().host_read_bytes > 0
        assert torch.equal(found.cpu(), expected)
        assert found.data_ptr() % 512 == alignment


# -- parts of one tensor -----------------------------------------------------------------------------------------------

CHUNK = 4096


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record is copied and written in four parts."""
    assert RECORD_BYTES == 4 * CHUNK
    monkeypatch.setattr(device_tier, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(tiers, "Spool", partial(Spool, request_bytes=CHUNK))


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("target", ["host", "nvme", "tiered"])
def test_gradients_have_the_same_bits_in_parts(device: SimulatedDevice, tmp_path: Path, target: str) -> None:
    assert all(_is_right(device, tmp_path, seed, target=target, debug=seed == 0) for seed in range(2))


def test_tiered_records_go_to_disk_where_a_plan_sends_them_and_as_host_memory_gets_full(
    device: SimulatedDevice, tmp_path: Path
) -> None:
    model, x = _model()
    expected = train_step(model, x)

    def on_disk(**options: Any) -> tuple[list[int], Plan]:
        """The places of the records that a forward leaves on disk, and the plan that it followed."""
        with _offloader(tmp_path, target="tiered", **options) as offloader:
            loss = _moved(offloader, lambda: model(x).square().sum())
            found = [record.index for record in records_of(offloader) if record.state is State.SPILLED]
            loss.backward()
            assert_same_gradients(gradients(model), expected)
            return sorted(found), offloader.plan

    none, plan = on_disk()
    assert none == []
    moved = [entry.index for entry in plan.entries if entry.action == "offload"]
    chosen = moved[1::3]
    sent = [replace(entry, tier="nvme" if entry.index in chosen else "host") for entry in plan.entries]
    assert on_disk(policy=Plan(tuple(sent)))[0] == chosen
    # With a device budget a save waits for host memory; without one it stays where the disk is too slow.
    oldest, _ = on_disk(host_budget=8 * RECORD_BYTES, device_budget="1GiB")
    assert 4 <= len(oldest) < len(moved)
    assert oldest == moved[: len(oldest)]


@pytest.mark.usefixtures("chunks")
def test_a_tensor_is_written_while_the_rest_of_it_is_copied(
    device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, event, begun = torch.Stream(torch.device(NAME, 0)), torch.Event(NAME), [0]
    plain = SimulatedAccelerator.copy

    def stuck_at_the_third(accelerator: SimulatedAccelerator, copies: Any, stream: Any) -> None:
        begun[0] += 1
        if begun[0] == 3:
            stream.wait_event(event)
        plain(accelerator, copies, stream)

    monkeypatch.setattr(SimulatedAccelerator, "copy", stuck_at_the_third)
    w = leaf()
    with _offloader(tmp_path, target="nvme", pending_bytes="1MiB") as offloader:
        with device.paused(stuck):
            event.record(stuck)
            with offloader:
                out = (w * 2).sin()
            wait_until(lambda: offloader.statistics().nvme_written_bytes == 2 * CHUNK, "two parts are written")
            (record,) = records_of(offloader)
            assert record.state is State.STAGING
        offloader.synchronize()
        assert offloader.statistics().nvme_written_bytes == RECORD_BYTES
        (found,) = torch.autograd.grad(out.sum(), w)
    _assert_gradient(found, w)


@pytest.mark.usefixtures("chunks")
def test_a_tensor_is_copied_to_the_device_while_the_rest_of_it_is_read(device: SimulatedDevice, tmp_path: Path) -> None:
    w, gates = leaf(), list[GateEngine]()
    found: list[Tensor] = []

    def gate(file: Any) -> GateEngine:
        gates.append(GateEngine(file, threads=1))
        gates[0].open()
        return gates[0]

    with _offloader(tmp_path, target="nvme", engine=gate) as offloader:
        out = _moved(offloader, lambda: (w * 2).sin())
        (record,) = records_of(offloader)
        assert record.on_disk
        gates[0].shut()
        backward = threading.Thread(target=lambda: found.extend(torch.autograd.grad(out.sum(), w)))
        backward.start()
        gates[0].release(2)
        wait_until(lambda: record.host.filled_bytes == 2 * CHUNK, "two parts are on their way to the device")
        assert record.state is State.FETCHING
        gates[0].open()
        backward.join()
    _assert_gradient(found[0], w)


@pytest.mark.usefixtures("chunks")
def test_all_parts_of_a_tensor_may_come_to_the_device_before_its_read_is_seen_to_end(
    device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived = DeviceTier._arrived_on_host

    def late(tier: DeviceTier, since_s: float, transfer: Any) -> None:
        (record,) = transfer.records
        tier._part_arrived()
        wait_until(lambda: record.host.filled_bytes == RECORD_BYTES, "all parts are on their way to the device")
        arrived(tier, since_s, transfer)

    monkeypatch.setattr(DeviceTier, "_arrived_on_host", late)
    w = leaf()
    with _offloader(tmp_path, target="nvme") as offloader:
        out = _moved(offloader, lambda: (w * 2).sin())
        assert [record.on_disk for record in records_of(offloader)] == [True]
        (found,) = torch.autograd.grad(out.sum(), w)
    _assert_gradient(found, w)


# -- an engine that takes device memory --------------------------------------------------------------------------------


def _direct_is_right(device: SimulatedDevice, path: Path, seed: int) -> bool:
    device.delay(0)
    model, x = _model()
    expected = train_step(model, x)
    device.delay(LONGEST_DELAY_S, seed)
    with _offloader(path, target="nvme", engine=LateEngine, device_budget=4 * RECORD_BYTES) as offloader:
        right = all(_equal(train_step(model, x, offloader), expected) for _ in range(3))
        statistics = offloader.statistics()
        assert statistics.nvme_read_bytes > 0
        assert statistics.host_written_bytes == statistics.host_peak_bytes == 0
    return right


def test_an_engine_that_takes_device_memory_waits_for_the_device_and_needs_none_of_the_host(
    device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(_direct_is_right(device, tmp_path, seed) for seed in range(3))
    monkeypatch.setattr(DirectTier, "_work_so_far", lambda *_: lambda: None)
    assert not all(_direct_is_right(device, tmp_path, seed) for seed in range(SEEDS))


@pytest.mark.parametrize(
    ("target", "engine", "ahead"),
    [("host", "memory", State.RELOADING), ("nvme", "memory", State.RELOADING), ("nvme", LateEngine, State.RESIDENT)],
)
def test_records_fetched_ahead_make_room_for_an_urgent_one(
    device: SimulatedDevice, tmp_path: Path, target: str, engine: Any, ahead: State
) -> None:
    model, x = _model()
    expected = train_step(model, x)
    with _offloader(tmp_path, target=target, engine=engine, pending_bytes="1MiB") as offloader:
        loss = _moved(offloader, lambda: model(x).square().sum())
        tier = tier_of(offloader)
        away = [record for record in records_of(offloader) if not record.on_device]
        torch.accelerator.empty_cache()
        device.limit(torch.accelerator.memory_reserved() + 3 * RECORD_BYTES)
        with lock_of(offloader):
            for record in away[:3]:
                tier.fetch(record, urgent=False)
        wait_until(lambda: all(record.state is not State.FETCHING for record in away[:3]))
        with lock_of(offloader):
            tier.poll()
            assert [record.state for record in away[:3]] == [ahead] * 3
        _rest = fill_device(RECORD_BYTES)
        flushes = device.flushes
        found = offloader.store.obtain(away[-1], 0)
        assert found[0].nbytes() == RECORD_BYTES
        assert device.flushes == flushes + 1
        assert not any(record.on_device for record in away[:3])
        device.limit(None)
        loss.backward()
        assert_same_gradients(gradients(model), expected)


@pytest.mark.parametrize("target", ["host", "nvme"])
def test_records_fetched_ahead_leave_for_one_that_is_needed_first(
    device: SimulatedDevice, tmp_path: Path, target: str
) -> None:
    """Reads from disk end in any order, and the budget holds in each."""
    model, x = _model()
    expected = train_step(model, x)
    budget = 4 * RECORD_BYTES
    with _offloader(tmp_path, target=target, engine="memory", device_budget=budget) as offloader:
        loss = _moved(offloader, lambda: model(x).square().sum())
        tier, accounts = tier_of(offloader), accounts_of(offloader)
        beside = torch.accelerator.memory_allocated() - accounts.resident_bytes
        gone = (record for record in records_of(offloader) if not record.on_device and record.original() is None)
        away = [record for record in gone if record.nbytes == RECORD_BYTES]
        room = budget - accounts.resident_bytes
        ahead = away[: room // RECORD_BYTES]
        assert ahead
        with lock_of(offloader):
            for record in ahead:
                tier.fetch(record, urgent=False)
        wait_until(lambda: all(record.state is not State.FETCHING for record in ahead))
        with lock_of(offloader):
            tier.poll()
        held: list[torch.UntypedStorage] = []
        for record in away[-2:]:
            torch.accelerator.reset_peak_memory_stats()
            used_bytes = sum(storage.nbytes() for storage in held)
            held.append(offloader.store.obtain(record, 0)[0])
            assert torch.accelerator.max_memory_allocated() - beside - used_bytes <= budget
            assert accounts.resident_peak_bytes <= budget
        assert not ahead[0].on_device
        held.clear()
        loss.backward()
        assert_same_gradients(gradients(model), expected)
        assert accounts.resident_peak_bytes <= budget


def test_records_of_a_later_backward_leave_first(device: SimulatedDevice, tmp_path: Path) -> None:
    model, x = _model()
    budget = 100 * RECORD_BYTES
    with _offloader(tmp_path, target="host", engine="memory", device_budget=budget) as offloader:
        losses = []
        for _ in range(2):
            with offloader:
                losses.append(model(x).square().sum())
        offloader.synchronize()
        device.synchronize()
        tier, accounts = tier_of(offloader), accounts_of(offloader)
        gone = [record for record in records_of(offloader) if not record.on_device and record.original() is None]
        one, other = (
            [record for record in gone if record.tape is tape] for tape in dict.fromkeys(r.tape for r in gone)
        )
        offloader.store.obtain(one[-1], 0)  # its backward has begun
        with lock_of(offloader):
            for record in (one[0], other[-1]):
                tier.fetch(record, urgent=False)
            tier.make_room(budget - accounts.resident_bytes + 1)
        assert (one[0].on_device, other[-1].on_device) == (True, False)
        for loss in losses:
            loss.backward()


@pytest.mark.parametrize("way", ["in", "out"])
def test_an_interrupted_copy_keeps_no_memory_page_locked(
    device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    plain = SimulatedAccelerator.copy

    def interrupted(accelerator: SimulatedAccelerator, copies: Any, stream: Any) -> None:
        plain(accelerator, copies, stream)
        if stream == accelerator.side_stream(0, way):
            raise KeyboardInterrupt

    model, x = _model()
    with _offloader(tmp_path, target="host", debug=False) as offloader:
        (pool,) = pools_of(offloader)
        monkeypatch.setattr(SimulatedAccelerator, "copy", interrupted)
        loss = None
        with contextlib.suppress(KeyboardInterrupt):
            with offloader:
                loss = model(x).square().sum()
            offloader.synchronize()
            offloader.store.obtain(
                next(one for one in records_of(offloader) if not one.on_device and not one.original()), 0
            )
        assert offloader.store.shared.interrupted
        del loss
        monkeypatch.setattr(SimulatedAccelerator, "copy", plain)
        device.synchronize()
        gc.collect()
        host_pool._close_closed()
        assert pool.slabs.mapped_bytes == 0
