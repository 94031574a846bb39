"""The order of copies, kernels and memory on a device: each rule holds, and removing its edge breaks runs.

A seed draws a run on the simulated device: targets, streams, devices, and the streams that are late. Gradients are
always right and no kernel or copy touches memory of another owner. Each removed edge makes runs fail.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
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
    gradients,
    hinder,
    lock_of,
    on_stream,
    pool_bytes,
    pools_of,
    records_of,
    same_bits,
    simulated,
    tier_of,
    train_step,
    wait_until,
)
from tests.unit.simulated_programs import RECORD_BYTES, SIZE, LateEngine, _equal, _model, leaf

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
    expected = {index: train_step(model, x) for index, (model, x) in models.items()}
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
        for _ in range(2):
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
            right &= all(_equal(gradients(model), expected[index]) for index, (model, _) in models.items())
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


# -- each copy has its edges, and needs them ---------------------------------------------------------------------------

Edge = str | Callable[[pytest.MonkeyPatch], None]
"""A method of `CopyStreams` that does nothing where the edge is taken out, or a function that takes it out."""
RUNS = 6


def _nothing(*_: Any) -> None:
    return None


def _take_out(patch: pytest.MonkeyPatch, edge: Edge) -> None:
    if callable(edge):
        edge(patch)
    else:
        patch.setattr(CopyStreams, edge, _nothing)


def needs(edge: Edge) -> Callable[[Callable[..., bool]], Callable[..., None]]:
    """Make a test of a run: it is right each time, and mostly wrong once the edge is taken out.

    The rules of docs/design.md, section 6, have numbers.
    """

    def test_of(is_right: Callable[..., bool]) -> Callable[..., None]:
        @functools.wraps(is_right)
        def test(device: SimulatedDevice, **options: Any) -> None:
            def survives() -> bool:
                right = is_right(device, **options)
                device.reset()
                return device.take_violations() == 0 and right

            assert all(survives() for _ in range(RUNS))
            with pytest.MonkeyPatch.context() as patch:
                _take_out(patch, edge)
                wrong = sum(not survives() for _ in range(RUNS))
            assert wrong >= RUNS - 1

        return test

    return test_of


def _on_device(value: int) -> Tensor:
    return torch.full((4096,), value, dtype=torch.uint8, device=NAME)


def _on_host(value: int) -> Tensor:
    return torch.full((4096,), value, dtype=torch.uint8).pin_memory()


def _is(value: int, *tensors: Tensor) -> bool:
    return all(bool((tensor.cpu() == value).all()) for tensor in tensors)


def _other_stream() -> torch.Stream:
    return torch.Stream(torch.device(NAME, 0))


def _streams() -> tuple[CopyStreams, torch.Stream, torch.Stream, torch.Stream]:
    """The copies, the current stream and the side streams."""
    accelerator = SimulatedAccelerator()
    sides = accelerator.side_stream(0, "out"), accelerator.side_stream(0, "in")
    return CopyStreams(accelerator), torch.accelerator.current_stream(), *sides


@needs("_order_after_producer")  # rule 2
def test_a_copy_out_follows_the_kernel_of_its_source(device: SimulatedDevice) -> bool:
    copies, compute, _, _ = _streams()
    source, host = _on_device(0), _on_host(0)
    device.synchronize()
    device.lazy(compute)
    source.fill_(7)
    copies.synchronize(copy_out(copies, source, host))
    return _is(7, host)


def _remember_the_stream(patch: pytest.MonkeyPatch) -> None:
    first = torch.accelerator.current_stream()
    patch.setattr(SimulatedAccelerator, "current_stream", lambda self, index: first)


@needs(_remember_the_stream)  # rule 1
def test_a_copy_out_follows_the_stream_that_is_current_then(device: SimulatedDevice) -> bool:
    copies, _, _, _ = _streams()
    other = _other_stream()
    earlier, source, host = _on_device(1), _on_device(0), _on_host(0)
    copy_out(copies, earlier, _on_host(0))
    device.synchronize()
    device.lazy(other)
    with on_stream(other, ordered=False):
        source.fill_(7)
        copies.synchronize(copy_out(copies, source, host))
    return _is(7, host)


def _only_the_last_stream_waits(patch: pytest.MonkeyPatch) -> None:
    plain = CopyStreams.release_sources

    def hasty(self: CopyStreams, *outs: Batch) -> None:
        plain(self, outs[-1])
        for out in outs:
            out.copies.clear()

    patch.setattr(CopyStreams, "release_sources", hasty)


@needs(_only_the_last_stream_waits)  # rule 3
def test_each_stream_waits_before_memory_is_released_together(device: SimulatedDevice) -> bool:
    copies, main, out, _ = _streams()
    other = _other_stream()
    first, host, second, another = _on_device(7), _on_host(0), _on_device(5), _on_host(0)
    device.synchronize()
    device.lazy(out, other)
    leaving = [copy_out(copies, first, host)]
    with on_stream(other, ordered=False):
        leaving.append(copy_out(copies, second, another))
    copies.release_sources(*leaving)
    del first
    after = _on_device(3)
    main.synchronize()
    device.synchronize()
    return _is(7, host) and _is(3, after)


def _forget_the_incoming_copy(patch: pytest.MonkeyPatch) -> None:
    plain = DeviceTier.order_reuse

    def forgetful(self: DeviceTier, record: Any) -> None:
        plain(self, record)
        if record.host is not None:
            record.host.incoming = None

    patch.setattr(DeviceTier, "order_reuse", forgetful)


@pytest.mark.parametrize("ahead", [False, True], ids=["", "prefetched for the first stream again"])
@needs(_forget_the_incoming_copy)  # rule 4
def test_a_second_stream_waits_for_a_copy_that_the_first_still_holds(device: SimulatedDevice, ahead: bool) -> bool:
    accelerator = SimulatedAccelerator()
    w = leaf()
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
        with on_stream(_other_stream(), ordered=False):
            found = (out.grad_fn._saved_self * 1.0).cpu()
        assert offloader.statistics().host_read_bytes >= RECORD_BYTES
        return same_bits(found, expected.detach())


def _forget_the_reader(patch: pytest.MonkeyPatch) -> None:
    plain = ReleaseWindow.withdraw
    patch.setattr(ReleaseWindow, "withdraw", lambda self, owner, batch, used_by: plain(self, owner, batch, None))


@needs(_forget_the_reader)  # rule 5
def test_host_memory_of_a_copy_that_was_withdrawn_waits_for_its_reader(device: SimulatedDevice) -> bool:
    """A late copy to the device reads the memory. The next copy to it never begins, and the one after it does."""
    accelerator = SimulatedAccelerator()
    w = leaf()
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
        with on_stream(_other_stream(), ordered=False), offloader:  # nothing else orders the copies
            addresses = [saved(3.0)[1]]  # its copy waits in a batch, and is withdrawn
            last = saved(5.0)
        addresses.append(last[1])
        assert addresses == [address] * 2
        accelerator.side_stream(0, "out").synchronize()
        return same_bits(found.cpu(), expected.detach())


def _has_no_new_owner_while_it_is_filled(device: SimulatedDevice, drop: Callable[[CopyStreams, Batch], None]) -> bool:
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


@needs("_order_reuse_after_fill")  # rule 9
def test_memory_dropped_unused_has_no_new_owner(device: SimulatedDevice) -> bool:
    return _has_no_new_owner_while_it_is_filled(device, CopyStreams.drop_unused)


@needs("order_all_reuse")  # rule 9
def test_memory_left_by_an_interrupt_has_no_new_owner(device: SimulatedDevice) -> bool:
    return _has_no_new_owner_while_it_is_filled(device, lambda copies, _: copies.order_all_reuse())


@needs("_order_after_host_copies")  # rule 10
def test_a_copy_in_follows_the_copy_out(device: SimulatedDevice) -> bool:
    copies, _, out, _ = _streams()
    source, host = _on_device(7), _on_host(0)
    device.synchronize()
    device.lazy(out)
    outgoing = copy_out(copies, source, host)
    with on_stream(_other_stream(), ordered=False):  # nothing else orders the two copies
        incoming, filled = copy_in(copies, host, after=outgoing)
        copies.before_use(incoming, lambda: filled)
        return _is(7, filled)


def _report_no_use(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedAccelerator, "used_on", _nothing)


@needs(_report_no_use)  # rule 11
def test_memory_of_another_stream_is_reported(device: SimulatedDevice) -> bool:
    """A block of memory may belong to another compute stream than the one that saved it."""
    copies, owner, out, _ = _streams()
    source, host = _on_device(7), _on_host(0)
    device.synchronize()
    other = _other_stream()
    device.lazy(out, other)
    with on_stream(other, ordered=False):
        copies.release_sources(copy_out(copies, source, host))
    del source
    after = _on_device(3)
    owner.synchronize()
    device.synchronize()
    return _is(7, host) and _is(3, after)


@needs(_report_no_use)  # rule 11
def test_memory_that_another_stream_uses_is_reported(device: SimulatedDevice) -> bool:
    """The memory was filled for one stream, which owns it, and is unpacked on another."""
    copies, owner, _, _ = _streams()
    other = _other_stream()
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


@pytest.mark.parametrize(
    ("its_copy", "options"),
    [
        ("waits for others", {}),
        ("has begun", {"pending_bytes": RECORD_BYTES}),
        ("is over", {}),
        ("has begun", {"target": "nvme", "engine": LateEngine}),
    ],
    ids=["before its copy", "while it is copied", "after its copy", "device to disk"],
)
@needs("_order_release_after_later_save")  # rule 11
def test_memory_saved_again_on_another_stream_is_released_after_that(
    device: SimulatedDevice, tmp_path: Path, its_copy: str, options: dict[str, Any]
) -> bool:
    """That stream reads it late, and then only the graph holds it. Where its copy is over, it is released already."""
    main, other = torch.accelerator.current_stream(), _other_stream()
    w = leaf()
    expected = [(w * 2.0).cos().cpu(), torch.autograd.grad((w * 2.0).cos().sum() + (w * 2.0).sin().sum(), w)[0].cpu()]
    with simulated(**options, host_budget="1MiB", path=tmp_path) as offloader:
        with offloader:
            x = w * 2.0
            loss = x.sin().sum()
            if its_copy == "has begun":
                tier_of(offloader).begin_copies()
            elif its_copy == "is over":
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


def _unmap_without_asking(patch: pytest.MonkeyPatch) -> None:
    plain = Slab.unlock
    patch.setattr(Slab, "unlock", lambda self, unpin: plain(self, lambda address: True))


@pytest.mark.filterwarnings("ignore:actoffload. host memory could not be page-locked:RuntimeWarning")
@needs(_unmap_without_asking)  # rule 12
def test_page_locked_memory_stays_mapped(device: SimulatedDevice) -> bool:
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


def _use_slots_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceTier, "_wait_for", _nothing)


def _spill_at_once(patch: pytest.MonkeyPatch) -> None:
    plain = DeviceTier._spill

    def hasty(self: DeviceTier, record: Any) -> None:
        events, record.host.slot.events[:] = list(record.host.slot.events), []
        plain(self, record)
        record.host.slot.events[:] = events

    patch.setattr(DeviceTier, "_spill", hasty)


@pytest.mark.parametrize(
    ("edge", "adversary", "target"),
    [
        pytest.param("_order_after_producer", "late kernels", "host", id="2: after the producer"),
        pytest.param("_order_release_after_copy", "late copies", "host", id="3: release after the copy"),
        pytest.param("_order_after_allocation", "late kernels", "host", id="4: fill after the allocation"),
        pytest.param("_order_use_after_fill", "late copies", "host", id="4: use after the fill"),
        pytest.param(_use_slots_at_once, "all late", "nvme", id="5: slots after their copies"),
        pytest.param(_spill_at_once, "all late", "nvme", id="10: a write to disk waits"),
    ],
)
def test_training_needs_each_edge(
    device: SimulatedDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    edge: Edge,
    adversary: Adversary,
    target: str,
) -> None:
    debug = edge is not _use_slots_at_once  # it poisons host memory after its copies, and waits for them

    def survives(seed: int) -> bool:
        return _run(device, tmp_path, seed, adversary=adversary, target=target, debug=debug)

    assert survives(0)
    _take_out(monkeypatch, edge)
    assert sum(not survives(seed) for seed in range(RUNS)) >= RUNS - 1


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


@pytest.mark.parametrize("pending_bytes", [None, "1MiB"], ids=["before its copy begins", "while it is copied"])
def test_a_storage_freed_and_filled_again_is_used_itself(device: SimulatedDevice, pending_bytes: str | None) -> None:
    accelerator = SimulatedAccelerator()
    expected = _freed_and_filled(contextlib.nullcontext(), lambda: None)
    hinder(device, accelerator, "late copies")
    with simulated(accelerator, policy="all", pending_bytes=pending_bytes) as offloader:

        def has_another_owner() -> None:
            """The storage is filled again at its old address, which shows nothing; a save in between saw it free."""
            other = torch.full((256, 256), 7.0, device=NAME)
            with offloader:
                _look = torch.ones(8, device=NAME, requires_grad=True).exp()
            accelerator.side_stream(0, "out").synchronize()
            del other

        if pending_bytes is None:
            gradient = _freed_and_filled(offloader, offloader.synchronize)
        else:
            gradient = _freed_and_filled(offloader, has_another_owner, offloader.synchronize)
        assert same_bits(gradient, expected)
        assert offloader.statistics().kept_bytes["resized"] == 256 * 256 * 4
    device.reset()
    device.take_violations()  # of the copy that was discarded
