"""The order of copies, kernels and memory on a device: each rule holds, and each is shown to matter by removing it.

`_gradients_survive` trains on the simulated device and says whether gradients are right and no copy touched memory that
had a new owner. Each mutation takes one edge out of the code; under at least one adversary the run must then fail.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actoffload import OffloadConfig, Offloader
from actoffload.storage.spool import Spool
from actoffload.testing.fakedevice import Adversary, FakeDevice, FakeStream
from actoffload.tiers.copy_streams import Batch, CopyStreams
from actoffload.tiers.device_tier import DeviceTier
from actoffload.tiers.record import State
from tests.harness import (
    acquire_slot,
    copy_in,
    copy_out,
    forget_failed_backward,
    gradients,
    lock_of,
    pool_bytes,
    pools_of,
    records_of,
    same_bits,
    simulated,
    tier_of,
    wait_until,
)

ADVERSARIES: tuple[Adversary, ...] = ("lazy", "eager", "random")
SIZE = 64
RECORD_BYTES = SIZE * SIZE * 4


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)).t() * x


def _model(blocks: int = 6) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*[_Block() for _ in range(blocks)]), torch.randn(SIZE, SIZE)


def _loss(model: nn.Sequential, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().sum()
    return loss


def _gradients_survive(
    path: Path,
    adversary: Adversary,
    target: str,
    *,
    seed: int = 0,
    steps: int = 3,
    engine: str = "auto",
    debug: bool = True,
) -> bool:
    model, x = _model()
    _loss(model, x).backward()
    expected = gradients(model)
    device = FakeDevice(adversary, seed=seed)
    right = True
    with simulated(
        device,
        target=target,
        path=path,
        engine=engine,
        pending_bytes=RECORD_BYTES,
        prefetch_bytes=2 * RECORD_BYTES,
        debug=debug,
        host_budget="1MiB",
    ) as offloader:
        for _ in range(steps):
            with device:
                with offloader:
                    loss = _loss(model, x)
                    dead = _loss(model, x)  # a branch that backward never runs
                del dead
                loss.backward(retain_graph=True)
                model.zero_grad()
                loss.backward()
            del loss
            found = gradients(model)
            right &= all(torch.equal(found[name], gradient) for name, gradient in expected.items())
        device.finish()
        assert offloader.statistics().host_read_bytes > 0
        assert offloader.statistics().live_records == 0
    return right and not device.violations


@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize("target", ["host", "nvme", "tiered"])
def test_gradients_survive_every_adversary(tmp_path: Path, adversary: Adversary, target: str) -> None:
    assert _gradients_survive(tmp_path, adversary, target)


@pytest.mark.parametrize("seed", range(8))
def test_gradients_survive_random_interleavings(tmp_path: Path, seed: int) -> None:
    assert _gradients_survive(tmp_path, "random", "host", seed=seed, steps=2)


def _nothing(*_: Any) -> None:
    return None


def _any_failure(path: Path, target: str, *, debug: bool = True) -> bool:
    """On no disk, which could be so slow that nothing leaves."""

    def survives(adversary: Adversary) -> bool:
        return _gradients_survive(path, adversary, target, engine="memory", debug=debug)

    return not all(map(survives, ADVERSARIES))


@pytest.mark.parametrize(
    "edge",
    ["_order_release_after_copy", "_order_use_after_fill", "_order_after_allocation"],
    ids=["rule 3: release after the copy", "rule 4: use after the fill", "rule 4: fill after the allocation"],
)
def test_removing_an_edge_breaks_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edge: str) -> None:
    monkeypatch.setattr(CopyStreams, edge, _nothing)
    assert _any_failure(tmp_path, "host")


def test_reusing_a_host_slot_before_its_copies_are_done_breaks_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Spool.read

    def hasty(self: Spool, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *args, **{**kwargs, "before": None})

    monkeypatch.setattr(Spool, "read", hasty)
    assert _any_failure(tmp_path, "nvme", debug=False)


def test_spilling_waits_for_the_host_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write to disk reads a slot only after the copy that fills it; without the wait the disk gets poison."""
    assert _gradients_survive(tmp_path, "lazy", "nvme", engine="memory")
    plain = DeviceTier._spill

    def hasty(self: DeviceTier, record: Any) -> None:
        events, record.slot.events[:] = list(record.slot.events), []
        plain(self, record)
        record.slot.events[:] = events

    # "random" only: with "lazy" nothing else would make the copy run before the slot is written
    monkeypatch.setattr(DeviceTier, "_spill", hasty)
    monkeypatch.setattr(CopyStreams, "_order_release_after_copy", _release_without_running)
    assert not _gradients_survive(tmp_path, "lazy", "nvme", steps=1, engine="memory")


def _release_without_running(self: CopyStreams, out: Batch) -> None:
    """Keep the sources alive for ever instead of making the compute stream wait for the copy."""
    _leaked.append(dict(out.copies))


_leaked: list[Any] = []


@pytest.mark.parametrize("leave", ["close", "abort"])
def test_host_memory_stays_locked_and_mapped_as_long_as_a_copy_may_use_it(tmp_path: Path, leave: str) -> None:
    """The device goes by the pages that it was told of: a later offloader must not be given the same addresses."""
    model, x = _model()
    device = FakeDevice("lazy")

    def open_one() -> Offloader:
        config = OffloadConfig(target="host", path=tmp_path, min_bytes=0, keep_last_bytes=0, host_budget="1MiB")
        return Offloader(config, accelerator=device)

    first = open_one()
    with device, first:
        loss = _loss(model, x)
    del loss  # and nothing has made the copies run
    locked = dict(device.locked)
    assert locked
    getattr(first, leave)()
    del first
    gc.collect()
    assert device.locked == ({} if leave == "close" else locked)
    second = open_one()
    slot = acquire_slot(pools_of(second)[0], 1)
    assert slot is not None
    assert device.locked.keys() > (set() if leave == "close" else locked.keys())
    del slot
    with device, second:
        loss = _loss(model, x)
    loss.backward()
    del loss
    device.finish()
    second.close()
    assert device.violations == []
    third = open_one()
    assert acquire_slot(pools_of(third)[0], 1) is not None
    assert len(device.locked) == 1, "what was left is given back when memory is mapped"
    third.close()
    assert device.locked == {}


def test_no_memory_for_a_copy_to_the_device_holds_no_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice("lazy")
    model, x = _model(3)

    def refused(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("in this test")

    with simulated(device, pending_bytes=1, host_budget="1MiB", policy="all") as offloader:
        with device:
            with offloader:
                loss = _loss(model, x)
            with monkeypatch.context() as patch, contextlib.suppress(torch.OutOfMemoryError):
                patch.setattr(device, "empty", refused)
                loss.backward()
                pytest.fail("nothing was raised")
            del loss
            forget_failed_backward()
        device.finish()
        assert pool_bytes(offloader) == 0


def test_running_out_of_memory_for_what_is_early_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device has memory for one tensor at a time, backward still has all that it needs."""
    device = FakeDevice("eager")
    w = torch.linspace(-1, 1, SIZE * SIZE).requires_grad_()

    def forward() -> Tensor:
        h = w
        for _ in range(8):
            h = (h * 1.01).sin()
        return h.sum()

    empty, refused, now_needed = device.empty, [0], [True]

    def only_what_is_needed(*arguments: Any) -> Tensor:
        """Of what is asked for between two nodes only the first is needed."""
        if not now_needed[0]:
            refused[0] += 1
            raise torch.OutOfMemoryError("out of memory (simulated)")
        now_needed[0] = False
        return empty(*arguments)

    with simulated(device, pending_bytes=RECORD_BYTES, prefetch_bytes="1MiB") as offloader:
        with device:
            (expected,) = torch.autograd.grad(forward(), w)
            with offloader:
                loss = forward()
            offloader.synchronize()
            node: Any = loss.grad_fn
            while node is not None:
                node.register_prehook(lambda grads: now_needed.__setitem__(0, True))
                node = node.next_functions[0][0] if node.next_functions else None
            monkeypatch.setattr(device, "empty", only_what_is_needed)
            (found,) = torch.autograd.grad(loss, w)
        assert same_bits(found, expected)
        assert refused[0] == 1, "each time the allocator gives back all that it keeps"
        assert offloader.statistics().host_read_bytes >= 7 * RECORD_BYTES


# -- single copies, with kernels that run when they are told to ---------------------------------------------------


def _filled(value: int, nbytes: int = 4096) -> Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


@contextlib.contextmanager
def _without(monkeypatch: pytest.MonkeyPatch, edge: str | None) -> Iterator[None]:
    with monkeypatch.context() as patch:
        if edge is not None:
            patch.setattr(CopyStreams, edge, _nothing)
        yield


def _copy_out_waits_for_the_producer(monkeypatch: pytest.MonkeyPatch, edge: str | None) -> bool:
    device = FakeDevice("eager")
    source, host = _filled(0), _filled(0)
    device.launch(lambda: source.fill_(7))
    with _without(monkeypatch, edge):
        copy_out(CopyStreams(device), source, host)
    device.advance(1.0)  # side streams run what they can; the producer has not run yet
    device.finish()
    return bool((host == 7).all())


def _copy_in_waits_for_the_host_bytes(monkeypatch: pytest.MonkeyPatch, edge: str | None) -> bool:
    device = FakeDevice("eager")
    transfers = CopyStreams(device)
    source, host = _filled(0), _filled(0)
    device.launch(lambda: source.fill_(7))
    out = copy_out(transfers, source, host)
    with _without(monkeypatch, edge), device.on(FakeStream("other compute")):  # nothing else orders the two copies
        incoming, filled = copy_in(transfers, host, after=out)
        device.advance(1.0)
        device.before_kernel()
        transfers.before_use(incoming, lambda: filled)
        device.before_kernel()
    device.finish()
    return bool((filled == 7).all())


def _unused_reload_is_dropped_safely(monkeypatch: pytest.MonkeyPatch, edge: str | None) -> bool:
    device = FakeDevice("lazy")
    transfers = CopyStreams(device)
    host = _filled(7)
    incoming, filled = copy_in(transfers, host)
    with _without(monkeypatch, edge):
        transfers.drop_unused(incoming)
    del incoming, filled
    device.before_kernel()  # the memory gets its next owner here
    device.finish()
    return not device.violations


def _copies_that_an_interrupt_left_are_dropped_safely(monkeypatch: pytest.MonkeyPatch, edge: str | None) -> bool:
    device = FakeDevice("lazy")
    transfers = CopyStreams(device)
    host = _filled(7)
    incoming, filled = copy_in(transfers, host)
    with _without(monkeypatch, edge):
        transfers.order_all_reuse()
    del incoming, filled
    device.before_kernel()  # the memory gets its next owner here
    device.finish()
    return not device.violations


SINGLE: list[tuple[str, Callable[[pytest.MonkeyPatch, str | None], bool]]] = [
    ("_order_after_producer", _copy_out_waits_for_the_producer),
    ("_order_after_host_copies", _copy_in_waits_for_the_host_bytes),
    ("_order_reuse_after_fill", _unused_reload_is_dropped_safely),
    ("order_all_reuse", _copies_that_an_interrupt_left_are_dropped_safely),
]


@pytest.mark.parametrize(("edge", "scenario"), SINGLE, ids=[edge for edge, _ in SINGLE])
def test_each_copy_has_its_edges_and_needs_them(
    monkeypatch: pytest.MonkeyPatch, edge: str, scenario: Callable[[pytest.MonkeyPatch, str | None], bool]
) -> None:
    assert scenario(monkeypatch, None)
    assert not scenario(monkeypatch, edge)


def test_current_streams_are_read_at_each_use() -> None:
    """Rule 1: a copy follows the stream that is current when its tensor is saved, not the one of an earlier tensor."""

    def survives(cached: bool) -> bool:
        device = FakeDevice("eager")
        transfers = CopyStreams(device)
        earlier, slot = _filled(1), _filled(0)
        copy_out(transfers, earlier, slot)
        if cached:
            device.current_stream = lambda index: device.compute  # type: ignore[method-assign]
        source, host = _filled(0), _filled(0)
        other = FakeStream("other compute")
        with device.on(other):
            device.launch(lambda: source.fill_(7))
            copy_out(transfers, source, host)
        device.before_kernel()  # the first stream goes on; the other one, which makes the bytes, has not run
        device.finish()
        return bool((host == 7).all())

    assert survives(cached=False)
    assert not survives(cached=True)


def test_memory_of_another_stream_is_reported_to_the_allocator() -> None:
    """Rule 3 with several compute streams: the block may belong to another stream than the one that saved it."""
    device = FakeDevice("lazy")
    transfers = CopyStreams(device)
    owner, user = FakeStream("owner"), FakeStream("user")
    with device.on(owner):
        source = device.empty(4096, 0, owner)
        other = _filled(1)
        used, memory = copy_in(transfers, other)  # the owner has computed
        transfers.before_use(used, lambda: memory)
        filled = source.fill_
        device.launch(lambda: filled(7))
        device.before_kernel()
    host = _filled(0)
    with device.on(user):
        out = copy_out(transfers, source, host)
        transfers.release_sources(out)
    del source, out
    with device.on(owner):
        device.before_kernel()
    device.finish()
    assert bool((host == 7).all())
    assert not device.violations


def test_a_second_stream_waits_for_a_copy_that_the_first_still_holds() -> None:
    device = FakeDevice("lazy")
    w = torch.linspace(-1, 1, SIZE * SIZE).requires_grad_()
    with simulated(device, pending_bytes=4096, policy="all") as offloader:
        with device:
            expected = (w * 2.0).detach()
            with offloader:
                out: Any = (w * 2.0).sin()
        offloader.synchronize()
        device.finish()
        _first = out.grad_fn._saved_self  # its stream will wait for the copy, and has not come to that
        seen: list[bool] = []
        with device.on(FakeStream("second compute")):
            second = out.grad_fn._saved_self
            device.launch(lambda: seen.append(same_bits(second, expected)))
            device.before_kernel()
        assert seen == [True]
        assert offloader.statistics().host_read_bytes >= RECORD_BYTES


def test_nothing_is_pinned_after_the_first_step(tmp_path: Path) -> None:
    """Rule 6: pack allocates no page-locked memory once a step has been seen."""
    torch.manual_seed(0)
    model = nn.Sequential(*[_Block() for _ in range(6)])
    x = torch.randn(SIZE, SIZE)
    device = FakeDevice("lazy")
    offloader = Offloader(OffloadConfig(target="host", min_bytes=0, path=str(tmp_path)), accelerator=device)
    pins = []
    for _ in range(4):
        with device, offloader:
            loss = _loss(model, x)
        with device:
            loss.backward()
        del loss
        pins.append(len(device.pins))
    offloader.close()
    assert pins[0] > 0
    assert pins[-1] == pins[0]


def test_tensors_stay_during_graph_capture(tmp_path: Path) -> None:
    """Rule 7."""
    torch.manual_seed(0)
    model = nn.Sequential(_Block())
    device = FakeDevice("lazy")
    offloader = Offloader(OffloadConfig(target="host", min_bytes=0, path=str(tmp_path)), accelerator=device)
    device.capturing = True
    with device, offloader:
        loss = _loss(model, torch.randn(SIZE, SIZE))
        loss.backward()
    device.capturing = False
    statistics = offloader.statistics()
    offloader.close()
    assert statistics.host_written_bytes == 0
    assert statistics.kept_bytes["graph capture"] > 0


def test_a_graph_that_dies_during_capture_asks_the_device_nothing_until_it_is_over() -> None:
    """Rule 7: an event that is queried or awaited would end the user's capture."""

    class Watched(FakeDevice):
        asked: list[str]

        def done(self, event: Any) -> bool:
            self.asked.append("done")
            return super().done(event)

        def wait(self, stream: Any, event: Any) -> None:
            self.asked.append("wait")
            super().wait(stream, event)

    device = Watched("lazy")
    device.asked = []
    with device, simulated(device, policy="all") as offloader:
        with offloader:
            loss = _loss(_model()[0], torch.randn(SIZE, SIZE))
        device.capturing = True
        device.asked.clear()
        del loss
        gc.collect()
        assert offloader.statistics().live_records == 0
        assert device.asked == []
        offloader.synchronize()
        assert device.asked == []
        device.capturing = False
        offloader.synchronize()
        assert "wait" in device.asked
        device.finish()
    assert device.violations == []


class _ReadsTwice(torch.autograd.Function):
    """Its backward unpacks what it saved twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        scale = ctx.saved_tensors[0].amax()
        torch.zeros(1)  # the device goes on
        gradient: Tensor = grads[0] * ctx.saved_tensors[0] / scale
        return gradient


@pytest.mark.parametrize("again", [False, True], ids=["read twice", "second backward"])
def test_what_its_owner_fills_again_while_its_copy_out_is_queued_is_the_owners(again: bool) -> None:
    """The copy out runs late: it has the bytes of whoever had the memory in between."""
    device = FakeDevice("lazy")
    weight = torch.ones(SIZE, SIZE, requires_grad=True)
    with device, simulated(device, policy="all") as offloader:
        with offloader:
            hidden = weight * 3.0
            loss = hidden.square().sum() if again else _ReadsTwice.apply(hidden)
        storage, nbytes = hidden.untyped_storage(), hidden.nbytes
        storage.resize_(0)
        others = [torch.full((SIZE, SIZE), 7.0) for _ in range(3)]
        storage.resize_(nbytes)
        storage.copy_(torch.full((SIZE, SIZE), 3.0).untyped_storage())
        if again:
            loss.backward(retain_graph=True)
            weight.grad = None
            device.finish()
        del hidden, storage
        loss.backward()
    expected = 2 * 3.0 * 3.0 if again else 3.0
    assert same_bits(weight.grad, torch.full((SIZE, SIZE), expected)), len(others)
    assert device.violations == []


def test_a_read_that_ends_as_its_last_handle_dies_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    device = FakeDevice("eager")
    options = {"target": "nvme", "path": tmp_path, "engine": "posix", "policy": "all"}
    with device, simulated(device, **options) as offloader:
        with offloader:
            loss = (torch.randn(256, 1024, requires_grad=True) * 1).sin().sum()
        offloader.synchronize()
        (record,) = [record for record in records_of(offloader) if record.state is State.SPILLED]
        with lock_of(offloader):
            tier_of(offloader).fetch(record, urgent=False)
            wait_until(lambda: record.transfer.done)
            del loss
            assert offloader.statistics().live_records == 0
        offloader.close()  # joins the engine's threads
    assert raised == []


def test_memory_that_nobody_used_waits_for_its_copy_though_another_stream_has_used_its_neighbour() -> None:
    """Copies that begin together share an event. That a second stream has waited for it says nothing of the first."""
    device = FakeDevice("lazy")
    transfers = CopyStreams(device)
    batch = transfers.gather("in", 0, None)
    hosts, filled = [_filled(7), _filled(8)], [transfers.destination(batch, 4096) for _ in range(2)]
    for owner, (host, tensor) in enumerate(zip(hosts, filled, strict=True)):
        batch.add(owner, tensor, host, 4096, [])
    transfers.begin_in(batch)
    with device.on(FakeStream("second compute")):
        transfers.before_use(batch, lambda: filled[0])
    transfers.drop_unused(batch)
    del filled[1]
    device.before_kernel()  # the memory gets its next owner here
    device.finish()
    assert device.violations == []
