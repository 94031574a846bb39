"""The order of copies, kernels and memory on a device: each rule holds, and removing its edge breaks runs.

A seed draws a run on the simulated device: targets, streams, devices, and the streams that are late. Gradients are
always right and no kernel or copy touches memory of another owner. Each removed edge makes runs fail.
"""

from __future__ import annotations

import contextlib
import gc
import random
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from actoffload import OffloadConfig, Offloader, Plan
from actoffload.memory.host_pool import HostPool
from actoffload.memory.slab import Device, Slab
from actoffload.testing.simulated_device import DEVICES, NAME, SimulatedAccelerator, SimulatedDevice
from actoffload.tiers.copy_streams import Batch, CopyStreams, ReleaseWindow
from actoffload.tiers.device_tier import DeviceTier
from actoffload.tiers.record import State
from actoffload.tiers.tier import LOOK_AT
from tests.harness import (
    ADVERSARIES,
    Adversary,
    acquire_slot,
    copy_in,
    copy_out,
    forget_failed_backward,
    hinder,
    lock_of,
    on_stream,
    pool_bytes,
    pools_of,
    records_of,
    same_bits,
    simulated,
    tier_of,
    wait_until,
)
from tests.unit.simulated_programs import RECORD_BYTES, SIZE, LateEngine, _model

pytestmark = pytest.mark.simulated

TARGETS = ("host", "nvme", "tiered")


def _loss(model: nn.Sequential, x: Tensor, other: torch.Stream | None = None) -> Tensor:
    """The loss of one forward; with ``other``, that stream computes every second block."""
    for number, block in enumerate(model):
        if other is None or number % 2:
            x = block(x)
        else:
            main = torch.accelerator.current_stream(x.device)
            x.record_stream(other)
            with on_stream(other):
                x = block(x)
            x.record_stream(main)
    return x.square().sum()


def _gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def _drawn(plan: Plan, draw: random.Random) -> Plan:
    entries = []
    for entry in plan.entries:
        moves = draw.random() < 0.7
        after = draw.choice([None, 1, 2, 3, 5, 9]) if moves else None
        entries.append(replace(entry, action="offload" if moves else "keep", release_after=after))
    return Plan(tuple(entries), pending_bytes=draw.choice([8, 40]) * RECORD_BYTES)


def _run(
    device: SimulatedDevice,
    path: Path,
    seed: int,
    *,
    adversary: Adversary | None = None,
    target: str | None = None,
    engine: str = "memory",
    steps: int = 2,
    debug: bool = True,
    planned: bool = False,
) -> bool:
    """Whether a training run is right; a seed draws every property without an argument.

    ``planned``: it follows a plan, which keeps some storages and releases the others at any event.
    """
    draw = random.Random(seed)
    indices = draw.choice([[0], [DEVICES - 1], list(range(DEVICES))])
    forward_elsewhere, backward_elsewhere = draw.random() < 0.5, draw.random() < 0.5
    options: dict[str, Any] = {
        "target": target or draw.choice(TARGETS), "path": path, "engine": engine, "policy": "all", "debug": debug,
        "pending_bytes": RECORD_BYTES, "prefetch_bytes": 2 * RECORD_BYTES, "host_budget": "1MiB",
        "device_budget": draw.choice([None, 8 * RECORD_BYTES]),
    }  # fmt: skip
    others = {index: torch.Stream(torch.device(NAME, index)) for index in indices if forward_elsewhere}
    second = torch.Stream(torch.device(NAME, indices[0])) if backward_elsewhere else None
    models = {index: _model(index) for index in indices}
    for model, x in models.values():
        _loss(model, x).backward()
    expected = [_gradients(model) for model, _ in models.values()]
    if planned:
        options |= {"device_budget": None, "pending_bytes": None}
        with simulated(**options) as offloader, offloader:
            _forward = [_loss(model, x, others.get(index)) for index, (model, x) in models.items()]
            _forward.append(_loss(*models[indices[0]]))
            options["policy"] = _drawn(offloader.plan, draw)
        del _forward
    accelerator = SimulatedAccelerator()
    drawn: Adversary = draw.choice(ADVERSARIES)
    hinder(device, accelerator, adversary or drawn, seed)
    right = True
    with simulated(accelerator, **options) as offloader:
        for _ in range(steps):
            with offloader:
                losses = [_loss(model, x, others.get(index)) for index, (model, x) in models.items()]
                dead = _loss(*models[indices[0]])  # a branch that backward never runs
            del dead
            loss = sum(loss.to(losses[0].device) for loss in losses)
            assert isinstance(loss, Tensor)
            with contextlib.nullcontext() if second is None else on_stream(second):
                loss.backward(retain_graph=True)
                for model, _ in models.values():
                    model.zero_grad()
                loss.backward()
            del losses, loss
            for (model, _), gradients in zip(models.values(), expected, strict=True):
                found = _gradients(model)
                right &= len(found) == len(gradients) and all(map(torch.equal, found, gradients))
        device.reset()
        assert offloader.statistics().host_read_bytes > 0
        assert offloader.statistics().live_records == 0
    return device.take_violations() == 0 and right


def test_a_graph_that_dies_as_its_tensors_come_back_leaves_their_memory_to_the_copies(device: SimulatedDevice) -> None:
    model, x = _model(0)
    accelerator = SimulatedAccelerator()
    options: dict[str, Any] = {"target": "host", "policy": "all", "pending_bytes": RECORD_BYTES}
    with simulated(accelerator, prefetch_bytes=64 * RECORD_BYTES, **options) as offloader:
        offloader.stage(0, "forward")
        with offloader:
            loss = _loss(model, x)
        offloader.synchronize()
        device.synchronize()
        device.lazy(accelerator.side_stream(0, "in"))
        offloader.stage(0, "backward")  # the first records begin to come back
        del loss  # and no stream will ever wait for them
        after = [torch.full((RECORD_BYTES // 4,), 3.0, device=x.device) for _ in range(16)]
        torch.accelerator.current_stream().synchronize()
        device.synchronize()
        assert all(bool((tensor == 3.0).all()) for tensor in after)


@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize("target", TARGETS)
def test_gradients_survive_every_adversary(
    device: SimulatedDevice, tmp_path: Path, adversary: Adversary, target: str
) -> None:
    assert _run(device, tmp_path, 0, adversary=adversary, target=target, engine="auto")


@pytest.mark.sampled(50)
@pytest.mark.parametrize("first", range(0, 1000, 10))
def test_ten_seeded_runs_are_right(device: SimulatedDevice, tmp_path: Path, first: int) -> None:
    assert [seed for seed in range(first, first + 10) if not _run(device, tmp_path, seed)] == []


@pytest.mark.sampled(10)
@pytest.mark.parametrize("first", range(0, 100, 10))
def test_ten_plans_that_release_at_any_event_are_right(device: SimulatedDevice, tmp_path: Path, first: int) -> None:
    assert [seed for seed in range(first, first + 10) if not _run(device, tmp_path, seed, planned=True)] == []


# -- single copies -----------------------------------------------------------------------------------------------------


def _on_device(value: int) -> Tensor:
    return torch.full((4096,), value, dtype=torch.uint8, device=NAME)


def _on_host(value: int) -> Tensor:
    return torch.full((4096,), value, dtype=torch.uint8).pin_memory()


def _is(value: int, *tensors: Tensor) -> bool:
    return all(bool((tensor.cpu() == value).all()) for tensor in tensors)


def _streams() -> tuple[CopyStreams, torch.Stream, torch.Stream, torch.Stream]:
    """The copies, the current stream and the side streams."""
    accelerator = SimulatedAccelerator()
    sides = accelerator.side_stream(0, "out"), accelerator.side_stream(0, "in")
    return CopyStreams(accelerator), torch.accelerator.current_stream(), *sides


def _a_copy_out_follows_the_kernel_of_its_source(device: SimulatedDevice) -> bool:
    copies, compute, _, _ = _streams()
    source, host = _on_device(0), _on_host(0)
    device.synchronize()
    device.lazy(compute)
    source.fill_(7)
    copies.synchronize(copy_out(copies, source, host))
    return _is(7, host)


def _a_copy_out_follows_the_stream_that_is_current_then(device: SimulatedDevice) -> bool:
    copies, _, _, _ = _streams()
    other = torch.Stream(torch.device(NAME, 0))
    earlier, source, host = _on_device(1), _on_device(0), _on_host(0)
    copy_out(copies, earlier, _on_host(0))
    device.synchronize()
    device.lazy(other)
    with on_stream(other, ordered=False):
        source.fill_(7)
        copies.synchronize(copy_out(copies, source, host))
    return _is(7, host)


def _a_copy_in_follows_the_copy_out(device: SimulatedDevice) -> bool:
    copies, _, out, _ = _streams()
    source, host = _on_device(7), _on_host(0)
    device.synchronize()
    device.lazy(out)
    outgoing = copy_out(copies, source, host)
    with on_stream(torch.Stream(torch.device(NAME, 0)), ordered=False):  # nothing else orders the two copies
        incoming, filled = copy_in(copies, host, after=outgoing)
        copies.before_use(incoming, lambda: filled)
        return _is(7, filled)


def _memory_being_filled_has_no_new_owner(device: SimulatedDevice, drop: Callable[[CopyStreams, Batch], None]) -> bool:
    copies, compute, _, inward = _streams()
    device.lazy(inward)
    host = _on_host(7)
    incoming, filled = copy_in(copies, host)
    drop(copies, incoming)
    del incoming, filled
    after = _on_device(3)
    compute.synchronize()
    device.synchronize()
    return _is(3, after)


def _memory_dropped_unused_has_no_new_owner(device: SimulatedDevice) -> bool:
    return _memory_being_filled_has_no_new_owner(device, lambda copies, incoming: copies.drop_unused(incoming))


def _memory_left_by_an_interrupt_has_no_new_owner(device: SimulatedDevice) -> bool:
    return _memory_being_filled_has_no_new_owner(device, lambda copies, _: copies.order_all_reuse())


def _memory_of_another_stream_is_reported(device: SimulatedDevice) -> bool:
    """A block of memory may belong to another compute stream than the one that saved it."""
    copies, owner, out, _ = _streams()
    source, host = _on_device(7), _on_host(0)
    device.synchronize()
    device.lazy(out)
    other = torch.Stream(torch.device(NAME, 0))
    device.lazy(other)
    with on_stream(other, ordered=False):
        copies.release_sources(copy_out(copies, source, host))
    del source
    after = _on_device(3)
    owner.synchronize()
    device.synchronize()
    return _is(7, host) and _is(3, after)


def _each_stream_waits_before_memory_is_released_together(device: SimulatedDevice) -> bool:
    copies, main, out, _ = _streams()
    other = torch.Stream(torch.device(NAME, 0))
    first, host, second, another = _on_device(7), _on_host(0), _on_device(5), _on_host(0)
    device.synchronize()
    for stream in (out, other):
        device.lazy(stream)
    leaving = [copy_out(copies, first, host)]
    with on_stream(other, ordered=False):
        leaving.append(copy_out(copies, second, another))
    copies.release_sources(*leaving)
    del first
    after = _on_device(3)
    main.synchronize()
    device.synchronize()
    return _is(7, host) and _is(3, after)


def _memory_that_another_stream_uses_is_reported(device: SimulatedDevice) -> bool:
    """The memory was filled for one stream, which owns it, and is unpacked on another."""
    copies, owner, _, _ = _streams()
    other = torch.Stream(torch.device(NAME, 0))
    host = _on_host(7)
    incoming, filled = copy_in(copies, host)
    device.lazy(other)
    with on_stream(other, ordered=False):
        copies.before_use(incoming, [filled].pop)
        found = filled + 0
    del incoming, filled
    after = _on_device(3)
    owner.synchronize()
    device.synchronize()
    return _is(7, found) and _is(3, after)


def _saved_on_two_streams(device: SimulatedDevice, meanwhile: str, **options: Any) -> bool:
    """A tensor is saved again, on a stream that reads it late, and then only the graph holds it.

    Args:
        device: the simulated device.
        meanwhile: the state of its copy as it is saved again: "waits for others", "has begun", or "is over", when
            its memory is released already.
        options: of the offloader.
    """
    main, other = torch.accelerator.current_stream(), torch.Stream(torch.device(NAME, 0))
    w = torch.linspace(-1, 1, SIZE * SIZE).to(NAME).requires_grad_()
    expected = [(w * 2.0).cos().cpu(), torch.autograd.grad((w * 2.0).cos().sum() + (w * 2.0).sin().sum(), w)[0].cpu()]
    with simulated(**(options | {"host_budget": "1MiB"})) as offloader:
        with offloader:
            x = w * 2.0
            loss = x.sin().sum()
            if meanwhile == "has begun":
                tier_of(offloader).begin_copies()
            elif meanwhile == "is over":
                offloader.synchronize()
            device.lazy(other)
            other.wait_stream(main)
            with on_stream(other, ordered=False):
                found = x.cos()
            del x
        offloader.synchronize()
        others = [torch.full((SIZE * SIZE,), 9.0, device=NAME) for _ in range(3)]
        main.synchronize()
        main.wait_stream(other)
        (gradient,) = torch.autograd.grad(found.sum() + loss, w)
        found.record_stream(main)
        assert offloader.statistics().moved_bytes > 0
        assert offloader.statistics().deduplicated_bytes > 0
        return all(map(same_bits, [found.detach().cpu(), gradient.cpu()], expected)) and len(others) == 3


def _saved_on_two_streams_before_its_copy(device: SimulatedDevice) -> bool:
    return _saved_on_two_streams(device, "waits for others")


def _saved_on_two_streams_while_it_is_copied(device: SimulatedDevice) -> bool:
    return _saved_on_two_streams(device, "has begun", pending_bytes=RECORD_BYTES)


def _saved_on_two_streams_after_its_copy(device: SimulatedDevice) -> bool:
    return _saved_on_two_streams(device, "is over")


def _saved_on_two_streams_and_written_from_there(device: SimulatedDevice) -> bool:
    with tempfile.TemporaryDirectory() as path:
        return _saved_on_two_streams(device, "has begun", target="nvme", path=path, engine=LateEngine)


def _a_second_prefetch_is_awaited_by_the_stream_that_uses_it(device: SimulatedDevice) -> bool:
    return _a_second_stream_waits_for_a_copy_that_the_first_still_holds(device, ahead=True)


def _a_second_stream_waits_for_a_copy_that_the_first_still_holds(device: SimulatedDevice, ahead: bool = False) -> bool:
    """``ahead``: it was prefetched for the first stream again."""
    accelerator = SimulatedAccelerator()
    w = torch.linspace(-1, 1, SIZE * SIZE).to(NAME).requires_grad_()
    expected = (w * 2.0).cpu()
    with simulated(accelerator, pending_bytes=4096, policy="all") as offloader:
        with offloader:
            out: Any = (w * 2.0).sin()
        offloader.synchronize()
        device.synchronize()
        hinder(device, accelerator, "all late")
        _first = out.grad_fn._saved_self  # its stream will wait for the copy, but has not reached the wait
        if ahead:
            with lock_of(offloader):
                assert tier_of(offloader).fetch(records_of(offloader)[-1], urgent=False)
        with on_stream(torch.Stream(torch.device(NAME, 0)), ordered=False):
            found = (out.grad_fn._saved_self * 1.0).cpu()
        assert offloader.statistics().host_read_bytes >= RECORD_BYTES
        return same_bits(found, expected.detach())


def _host_memory_of_a_copy_that_was_withdrawn_waits_for_its_reader(device: SimulatedDevice) -> bool:
    """A late copy to the device reads the memory. The next copy to it never begins, and the one after it does."""
    accelerator, other = SimulatedAccelerator(), torch.Stream(torch.device(NAME, 0))
    w = torch.linspace(-1, 1, SIZE * SIZE).to(NAME).requires_grad_()
    expected = (w * 2.0).cpu()
    with simulated(accelerator, policy="all", host_budget="1MiB", pending_bytes="1MiB") as offloader:

        def saved(factor: float) -> tuple[Any, int]:
            """The node that saves a tensor, and where that is to be copied."""
            node: Any = (w * factor).sin().grad_fn
            return node, records_of(offloader)[-1].host.slot.address

        with offloader:
            node, address = saved(2.0)
        offloader.synchronize()
        device.synchronize()
        hinder(device, accelerator, "all late")
        found = node._saved_self * 1.0
        del node
        with on_stream(other, ordered=False), offloader:  # nothing else orders the copies
            addresses = [saved(3.0)[1]]  # its copy waits in a batch, and is withdrawn
            last = saved(5.0)
        addresses.append(last[1])
        assert addresses == [address] * 2
        accelerator.side_stream(0, "out").synchronize()
        return same_bits(found.cpu(), expected.detach())


def _page_locked_memory_stays_mapped(device: SimulatedDevice) -> bool:
    """The device uses the pages it had when they were registered; a later mapping at the address has other pages."""
    accelerator = SimulatedAccelerator()
    pinned: list[int] = []

    def pin(address: int, nbytes: int) -> bool:
        pinned.append(address)
        return accelerator.pin(address, nbytes)

    for _ in range(2):
        pool = HostPool(1 << 20, device=Device(pin=pin, unpin=accelerator.unpin, is_done=accelerator.done))
        assert acquire_slot(pool, 1) is not None
        pool.close()
    for address in pinned:  # registered where they were left
        accelerator.unpin(address)
    return not pool.pin_failed


# -- each edge is needed -----------------------------------------------------------------------------------------------


def _nothing(*_: Any) -> None:
    return None


def _without_events(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceTier, "_wait_for", _nothing)


def _spill_at_once(patch: pytest.MonkeyPatch) -> None:
    plain = DeviceTier._spill

    def hasty(self: DeviceTier, record: Any) -> None:
        events, record.host.slot.events[:] = list(record.host.slot.events), []
        plain(self, record)
        record.host.slot.events[:] = events

    patch.setattr(DeviceTier, "_spill", hasty)


def _unmap_without_asking(patch: pytest.MonkeyPatch) -> None:
    plain = Slab.unlock
    patch.setattr(Slab, "unlock", lambda self, unpin: plain(self, lambda address: True))


def _remember_the_stream(patch: pytest.MonkeyPatch) -> None:
    first = torch.accelerator.current_stream()
    patch.setattr(SimulatedAccelerator, "current_stream", lambda self, index: first)


def _forget_the_incoming_copy(patch: pytest.MonkeyPatch) -> None:
    plain = DeviceTier.order_reuse

    def forgetful(self: DeviceTier, record: Any) -> None:
        plain(self, record)
        if record.host is not None:
            record.host.incoming = None

    patch.setattr(DeviceTier, "order_reuse", forgetful)


def _only_the_last_stream_waits(patch: pytest.MonkeyPatch) -> None:
    plain = CopyStreams.release_sources

    def hasty(self: CopyStreams, *outs: Batch) -> None:
        plain(self, outs[-1])
        for out in outs:
            out.copies.clear()

    patch.setattr(CopyStreams, "release_sources", hasty)


def _forget_the_reader(patch: pytest.MonkeyPatch) -> None:
    plain = ReleaseWindow.withdraw
    patch.setattr(ReleaseWindow, "withdraw", lambda self, owner, batch, used_by: plain(self, owner, batch, None))


Edge = str | Callable[[pytest.MonkeyPatch], None]
SINGLE: dict[str, tuple[Edge, Callable[[SimulatedDevice], bool]]] = {
    "1: current streams are asked for at each use":
        (_remember_the_stream, _a_copy_out_follows_the_stream_that_is_current_then),
    "2: after the producer": ("_order_after_producer", _a_copy_out_follows_the_kernel_of_its_source),
    "3: release after the copy, on each stream":
        (_only_the_last_stream_waits, _each_stream_waits_before_memory_is_released_together),
    "4: before each stream that uses it":
        (_forget_the_incoming_copy, _a_second_stream_waits_for_a_copy_that_the_first_still_holds),
    "4: before each stream that uses it, ahead":
        (_forget_the_incoming_copy, _a_second_prefetch_is_awaited_by_the_stream_that_uses_it),
    "5: after a copy that was withdrawn":
        (_forget_the_reader, _host_memory_of_a_copy_that_was_withdrawn_waits_for_its_reader),
    "9: dropped unused":
        ("_order_reuse_after_fill", _memory_dropped_unused_has_no_new_owner),
    "9: interrupted": ("order_all_reuse", _memory_left_by_an_interrupt_has_no_new_owner),
    "10: a copy in follows the copy out": ("_order_after_host_copies", _a_copy_in_follows_the_copy_out),
    "11: a source": (lambda patch: patch.setattr(SimulatedAccelerator, "used_on", _nothing),
                     _memory_of_another_stream_is_reported),
    "11: what was filled": (lambda patch: patch.setattr(SimulatedAccelerator, "used_on", _nothing),
                            _memory_that_another_stream_uses_is_reported),
    "11: saved again before its copy":
        ("_order_release_after_later_save", _saved_on_two_streams_before_its_copy),
    "11: saved again while it is copied":
        ("_order_release_after_later_save", _saved_on_two_streams_while_it_is_copied),
    "11: saved again after its copy":
        ("_order_release_after_later_save", _saved_on_two_streams_after_its_copy),
    "11: saved again, device to disk":
        ("_order_release_after_later_save", _saved_on_two_streams_and_written_from_there),
    "12: unmapped": (_unmap_without_asking, _page_locked_memory_stays_mapped),
}  # fmt: skip
IN_TRAINING: dict[str, tuple[Edge, Adversary, str]] = {
    "2: after the producer": ("_order_after_producer", "late kernels", "host"),
    "3: release after the copy": ("_order_release_after_copy", "late copies", "host"),
    "4: fill after the allocation": ("_order_after_allocation", "late kernels", "host"),
    "4: use after the fill": ("_order_use_after_fill", "late copies", "host"),
    "5: slots after their copies": (_without_events, "all late", "nvme"),
    "10: a write to disk waits": (_spill_at_once, "all late", "nvme"),
}


def _take_out(patch: pytest.MonkeyPatch, edge: Edge) -> None:
    if callable(edge):
        edge(patch)
    else:
        patch.setattr(CopyStreams, edge, _nothing)


@pytest.mark.filterwarnings("ignore:actoffload. host memory could not be page-locked:RuntimeWarning")
@pytest.mark.parametrize("edge", SINGLE)
def test_each_copy_has_its_edges_and_needs_them(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, edge: str
) -> None:
    removed, is_right = SINGLE[edge]

    def survives() -> bool:
        right = is_right(device)
        device.reset()
        return (device.take_violations() == 0) and right

    assert all(survives() for _ in range(6))
    with monkeypatch.context() as patch:
        _take_out(patch, removed)
        wrong = sum(not survives() for _ in range(6))
    assert wrong >= 5


@pytest.mark.parametrize("edge", IN_TRAINING)
def test_training_needs_each_edge(
    device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edge: str
) -> None:
    removed, adversary, target = IN_TRAINING[edge]
    debug = not edge.startswith("5")  # which poisons host memory after its copies, and waits for them

    def survives(seed: int) -> bool:
        return _run(device, tmp_path, seed, adversary=adversary, target=target, debug=debug)

    assert survives(0)
    _take_out(monkeypatch, removed)
    assert sum(not survives(seed) for seed in range(6)) >= 5


# -- memory and captures -----------------------------------------------------------------------------------------------


class _Watched(SimulatedAccelerator):
    """Notes the addresses that are page-locked."""

    def __init__(self) -> None:
        super().__init__()
        self.locked: list[int] = []

    def pin(self, address: int, nbytes: int) -> bool:
        self.locked.append(address)
        return super().pin(address, nbytes)

    def unpin(self, address: int) -> bool:
        self.locked.remove(address)
        return super().unpin(address)


@pytest.mark.parametrize("leave", ["close", "abort"])
def test_host_memory_stays_locked_and_mapped_as_long_as_a_copy_may_use_it(device: SimulatedDevice, leave: str) -> None:
    """The device uses the pages it had when they were registered: a later offloader must not get the same addresses."""
    model, x = _model()
    accelerator = _Watched()
    hinder(device, accelerator, "all late")

    def open_one() -> Offloader:
        config = OffloadConfig(target="host", min_bytes=0, keep_last_bytes=0, host_budget="1MiB")
        return Offloader(config, accelerator=accelerator)

    first = open_one()
    with first:
        loss = _loss(model, x)
    del loss  # no wait has made the copies run
    locked = list(accelerator.locked)
    assert locked
    getattr(first, leave)()
    del first
    gc.collect()
    assert accelerator.locked == ([] if leave == "close" else locked)
    second = open_one()
    slot = acquire_slot(pools_of(second)[0], 1)
    assert slot is not None
    assert len(accelerator.locked) == (1 if leave == "close" else 2)
    del slot
    with second:
        loss = _loss(model, x)
    loss.backward()
    del loss
    device.synchronize()
    second.close()
    third = open_one()
    assert acquire_slot(pools_of(third)[0], 1) is not None
    assert len(accelerator.locked) == 1, "the next mapping releases memory that was left"
    third.close()
    assert accelerator.locked == []


def test_nothing_is_pinned_after_the_first_step(device: SimulatedDevice) -> None:
    """Rule 6: pack allocates no page-locked memory once a step has been seen."""
    model, x = _model()
    accelerator = _Watched()
    hinder(device, accelerator, "late copies")
    pins = []
    with simulated(accelerator) as offloader:
        for _ in range(4):
            with offloader:
                loss = _loss(model, x)
            loss.backward()
            del loss
            pins.append(list(accelerator.locked))
    assert pins[0]
    assert pins[-1] == pins[0]


def test_a_graph_that_dies_during_capture_queries_no_event_until_its_end(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 7: querying or awaiting an event would end the user's capture. Until its end the memory has no new owner."""
    accelerator = SimulatedAccelerator()
    hinder(device, accelerator, "late copies")
    model, x = _model()
    with simulated(accelerator, policy="all") as offloader:
        with offloader:
            loss = _loss(model, x)
        with monkeypatch.context() as patch:
            patch.setattr(accelerator, "is_capturing", lambda index: True)
            for name in ("done", "wait"):
                patch.setattr(accelerator, name, lambda *_: pytest.fail("the device was asked"))
            del loss
            gc.collect()
            assert offloader.statistics().live_records == 0
            again = _loss(model, x)
        with offloader:
            again = _loss(model, x)
        del again


def test_no_memory_for_a_copy_to_the_device_holds_no_host_memory(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = SimulatedAccelerator()
    model, x = _model(blocks=3)

    def refused(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("in this test")

    with simulated(accelerator, pending_bytes=1, host_budget="1MiB", policy="all") as offloader:
        with offloader:
            loss = _loss(model, x)
        with monkeypatch.context() as patch, contextlib.suppress(torch.OutOfMemoryError):
            patch.setattr(accelerator, "empty", refused)
            loss.backward()
            pytest.fail("nothing was raised")
        del loss
        forget_failed_backward()
        device.synchronize()
        wait_until(lambda: pool_bytes(offloader) == 0, "autograd's thread of the device lets go of the graph")


def test_no_memory_for_a_prefetch_fails_nothing(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device with memory for one tensor at a time, backward still gets every tensor it needs."""
    accelerator = SimulatedAccelerator()
    w = torch.linspace(-1, 1, SIZE * SIZE).to(NAME).requires_grad_()

    def forward() -> Tensor:
        h = w
        for _ in range(8):
            h = (h * 1.01).sin()
        return h.sum()

    empty, refused, now_needed = accelerator.empty, [0], [True]

    def only_what_is_needed(*arguments: Any) -> Tensor:
        """Only the first allocation between two nodes is needed; the others are early."""
        if not now_needed[0]:
            refused[0] += 1
            raise torch.OutOfMemoryError("out of memory (simulated)")
        now_needed[0] = False
        return empty(*arguments)

    with simulated(accelerator, pending_bytes=RECORD_BYTES, prefetch_bytes="1MiB") as offloader:
        (expected,) = torch.autograd.grad(forward(), w)
        with offloader:
            loss = forward()
        offloader.synchronize()
        node: Any = loss.grad_fn
        while node is not None:
            node.register_prehook(lambda grads: now_needed.__setitem__(0, True))
            node = node.next_functions[0][0] if node.next_functions else None
        monkeypatch.setattr(accelerator, "empty", only_what_is_needed)
        (found,) = torch.autograd.grad(loss, w)
        assert same_bits(found, expected)
        assert refused[0] == 1, "each failure empties the allocator's cache"
        assert offloader.statistics().host_read_bytes >= 7 * RECORD_BYTES


class _ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        scale = ctx.saved_tensors[0].amax()
        gradient: Tensor = grads[0] * ctx.saved_tensors[0] / scale
        return gradient


@pytest.mark.parametrize("again", [False, True], ids=["read twice", "second backward"])
def test_a_storage_refilled_by_its_owner_before_its_copy_out_is_used_itself(
    device: SimulatedDevice, again: bool
) -> None:
    """The copy out runs late, so it has the bytes of the memory's owner in between."""
    accelerator = SimulatedAccelerator()
    hinder(device, accelerator, "late copies")
    weight = torch.ones(SIZE, SIZE).to(NAME).requires_grad_()
    with simulated(accelerator, policy="all") as offloader:
        with offloader:
            hidden = weight * 3.0
            loss = hidden.square().sum() if again else _ReadsTwice.apply(hidden)
        storage, nbytes = hidden.untyped_storage(), hidden.nbytes
        storage.resize_(0)
        others = [torch.full((SIZE, SIZE), 7.0, device=NAME) for _ in range(3)]
        storage.resize_(nbytes)
        storage.copy_(torch.full((SIZE, SIZE), 3.0, device=NAME).untyped_storage())
        if again:
            loss.backward(retain_graph=True)
            weight.grad = None
            device.synchronize()
        del hidden, storage
        loss.backward()
    expected = 2 * 3.0 * 3.0 if again else 3.0
    assert weight.grad is not None
    assert same_bits(weight.grad.cpu(), torch.full((SIZE, SIZE), expected)), len(others)
    device.reset()
    device.take_violations()  # of the copy that was discarded


def test_a_read_that_ends_as_its_last_handle_dies_is_no_error(
    device: SimulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    x = torch.randn(256, 1024).to(NAME).requires_grad_()
    with simulated(target="nvme", path=tmp_path, engine="posix", policy="all") as offloader:
        with offloader:
            loss = (x * 1).sin().sum()
        offloader.synchronize()
        (record,) = [record for record in records_of(offloader) if record.state is State.SPILLED]
        with lock_of(offloader):
            tier_of(offloader).fetch(record, urgent=False)
            wait_until(lambda: record.disk.transfer.wait(0))
            del loss
            assert offloader.statistics().live_records == 0
        offloader.close()  # joins the engine's threads
    assert raised == []


def test_copies_under_way_are_checked_in_turn_although_some_records_have_died(device: SimulatedDevice) -> None:
    """A storage that is freed and filled again at its old address shows no trace later."""
    x = torch.randn(SIZE, SIZE).to(NAME).requires_grad_()
    with simulated(policy="all", min_bytes=1, pending_bytes="1GiB") as offloader:
        with offloader:
            saved = [x * factor for factor in range(1, 25)]
            graphs = [one.sin() for one in saved]
        del graphs[::2]
        for one in saved:
            one.untyped_storage().resize_(0)
        with lock_of(offloader):
            for _ in range(len(saved) // LOOK_AT):
                tier_of(offloader).notice_resized()
            assert [record.saved.was_resized for record in records_of(offloader)] == [True] * len(graphs)


def _freed_and_filled(context: Any, meanwhile: Callable[[], None], then: Callable[[], None] = lambda: None) -> Tensor:
    """Gradient at an input whose exponential is freed and filled again, as in sharding and Megatron's recomputation."""
    torch.manual_seed(0)
    x = torch.randn(256, 256).to(NAME).requires_grad_()
    with context:
        result = (x * 2).exp()
    bytes_ = result.detach().clone()
    storage = result.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    meanwhile()
    storage.resize_(nbytes)
    with torch.no_grad(), _unsafe_preserve_version_counter(result):
        result.copy_(bytes_)
    then()
    result.sum().backward(retain_graph=True)
    result.sum().backward()
    assert x.grad is not None
    return x.grad


def test_a_storage_freed_during_its_copy_out_is_used_itself(device: SimulatedDevice) -> None:
    accelerator = SimulatedAccelerator()
    expected = _freed_and_filled(contextlib.nullcontext(), lambda: None)
    hinder(device, accelerator, "late copies")
    with simulated(accelerator, policy="all") as offloader:
        gradient = _freed_and_filled(offloader, offloader.synchronize)
        assert same_bits(gradient, expected)
        assert offloader.statistics().kept_bytes == {"resized": 256 * 256 * 4}
    device.reset()
    device.take_violations()  # of the copy that was discarded


def test_a_storage_whose_memory_had_another_owner_during_its_copy_out_is_used_itself(device: SimulatedDevice) -> None:
    """The storage is filled again at its old address, which shows nothing; a save in between saw it free."""
    accelerator = SimulatedAccelerator()
    expected = _freed_and_filled(contextlib.nullcontext(), lambda: None)
    hinder(device, accelerator, "late copies")
    with simulated(accelerator, policy="all", pending_bytes="1MiB") as offloader:  # the copy begins, and has not ended

        def meanwhile() -> None:
            other = torch.full((256, 256), 7.0, device=NAME)
            with offloader:
                _look = torch.ones(8, device=NAME, requires_grad=True).exp()
            accelerator.side_stream(0, "out").synchronize()
            del other

        assert same_bits(_freed_and_filled(offloader, meanwhile, offloader.synchronize), expected)
        assert offloader.statistics().kept_bytes["resized"] == 256 * 256 * 4
    device.reset()
    device.take_violations()  # of the copy that was discarded
