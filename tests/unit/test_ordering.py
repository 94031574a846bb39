"""Every ordering rule of the design's section 6, on the simulated device, and each shown to matter by removing it.

`_gradients_survive` trains on the simulated device and says whether gradients are right and no copy touched memory that
had a new owner. Each mutation takes one edge out of the code; under at least one adversary the run must then fail.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from actoffload import OffloadConfig, Offloader
from actoffload.device_tier import DeviceMover
from actoffload.hostpool import HostPool
from actoffload.testing.fakedevice import Adversary, FakeDevice, FakeStream
from actoffload.transfer import Incoming, Outgoing, Transfers
from tests.harness import forget_failed_backward

ADVERSARIES: tuple[Adversary, ...] = ("lazy", "eager", "random")
SIZE = 64


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)).t() * x


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
    engine: Literal["auto", "memory"] = "auto",
) -> bool:
    torch.manual_seed(0)
    model = nn.Sequential(*[_Block() for _ in range(6)])
    x = torch.randn(SIZE, SIZE)
    _loss(model, x).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    device = FakeDevice(adversary, seed=seed)
    config = OffloadConfig(
        target=target,  # type: ignore[arg-type]
        path=str(path),
        engine=engine,
        min_bytes=0,
        pending_bytes=SIZE * SIZE * 4,
        prefetch_bytes=2 * SIZE * SIZE * 4,
        keep_last_bytes=0,
        debug=True,
        host_budget="1MiB",
    )
    offloader = Offloader(config, accelerator=device)
    right = True
    try:
        for _ in range(steps):
            model.zero_grad()
            with device:
                with offloader:
                    loss = _loss(model, x)
                    dead = _loss(model, x)  # a branch that backward never runs
                del dead
                loss.backward(retain_graph=True)
                model.zero_grad()
                loss.backward()
            del loss
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            right &= all(torch.equal(a, b) for a, b in zip(expected, grads, strict=True))
        device.finish()
        assert offloader.statistics().host_read_bytes > 0
        assert offloader.statistics().live_records == 0
    finally:
        offloader.close()
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


def _any_failure(path: Path, target: str) -> bool:
    """On no disk, which could be so slow that nothing leaves."""
    return not all(_gradients_survive(path, adversary, target, engine="memory") for adversary in ADVERSARIES)


@pytest.mark.parametrize(
    "edge",
    ["_order_release_after_copy", "_order_use_after_fill", "_order_after_allocation"],
    ids=["rule 3: release after the copy", "rule 4: use after the fill", "rule 4: fill after the allocation"],
)
def test_removing_an_edge_breaks_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edge: str) -> None:
    monkeypatch.setattr(Transfers, edge, _nothing)
    assert _any_failure(tmp_path, "host")


def test_reusing_a_host_slot_before_its_copies_are_done_breaks_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = HostPool.__init__

    def hasty(self: HostPool, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **{**kwargs, "is_done": None})

    monkeypatch.setattr(HostPool, "__init__", hasty)
    assert _any_failure(tmp_path, "nvme")


@pytest.mark.parametrize("leave", ["close", "abort"])
def test_host_memory_stays_locked_and_mapped_as_long_as_a_copy_may_use_it(tmp_path: Path, leave: str) -> None:
    """The device goes by the pages that it was told of: a later offloader must not be given the same addresses."""
    model, x = nn.Sequential(*[_Block() for _ in range(6)]), torch.randn(SIZE, SIZE)
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
    slot = second.tiers.pools[0].acquire(1)
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
    assert third.tiers.pools[0].acquire(1) is not None
    assert len(device.locked) == 1, "what was left is given back when memory is mapped"
    third.close()
    assert device.locked == {}


@pytest.mark.parametrize("copy", ["begin_out", "begin_in"])
def test_an_interrupt_as_a_copy_is_begun_leaves_its_host_memory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy: str
) -> None:
    """It is under way, and nobody knows the event that tells when it is over."""
    real = getattr(Transfers, copy)

    def interrupted(self: Transfers, *arguments: Any, **options: Any) -> Any:
        real(self, *arguments, **options)
        monkeypatch.setattr(Transfers, copy, real)
        raise KeyboardInterrupt

    device, pool = _interrupted_step(tmp_path, monkeypatch, copy, interrupted, KeyboardInterrupt)
    assert pool.allocated_bytes == SIZE * SIZE * 4
    assert device.violations == []


def test_an_interrupt_as_device_memory_is_filled_leaves_it_until_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice("lazy")
    transfers, host, real = Transfers(device), _filled(1), device.record

    def record(stream: FakeStream) -> Any:
        if stream.name == "in":
            monkeypatch.setattr(device, "record", real)
            raise KeyboardInterrupt
        return real(stream)

    monkeypatch.setattr(device, "record", record)
    with contextlib.suppress(KeyboardInterrupt):
        transfers.begin_in(host, 0)
    gc.collect()
    for _ in range(2):
        device.before_kernel()
    device.finish()
    assert device.violations == []
    assert len(host) == 4096


@pytest.mark.parametrize("then", ["release", "again"])
def test_a_fill_that_nobody_took_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    """An interrupt between the copy and its being noted as the record's bytes."""
    device = FakeDevice("lazy")
    config = OffloadConfig(target="host", path=tmp_path, min_bytes=0, keep_last_bytes=0, pending_bytes=1, policy="all")
    offloader = Offloader(config, accelerator=device)
    model, x = nn.Sequential(*[_Block() for _ in range(3)]), torch.randn(SIZE, SIZE)
    _loss(model, x).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    real = DeviceMover.hold_near

    def interrupted(self: DeviceMover, *arguments: Any) -> None:
        monkeypatch.setattr(DeviceMover, "hold_near", real)
        left.append(arguments[0])
        raise KeyboardInterrupt

    begin_in = Transfers.begin_in
    left: list[Any] = []

    def again(self: Transfers, *arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(Transfers, "begin_in", begin_in)
        assert left[0].incoming is None, "what was filled first is not held beside the second"
        device.before_kernel()  # somebody computes before the second is awaited, in the memory of the first
        return begin_in(self, *arguments, **options)

    with device:
        with offloader:
            loss = _loss(model, x)
        monkeypatch.setattr(DeviceMover, "hold_near", interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            loss.backward(retain_graph=True)
            pytest.fail("nothing was raised")
        if then == "again":
            model.zero_grad()
            monkeypatch.setattr(Transfers, "begin_in", again)
            loss.backward()
            assert all(map(torch.equal, expected, [p.grad for p in model.parameters() if p.grad is not None]))
        del loss
        forget_failed_backward()
        for _ in range(2):
            device.before_kernel()
    device.finish()
    assert device.violations == []
    offloader.close()


def test_no_memory_for_a_copy_to_the_device_holds_no_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Transfers.begin_in

    def refused(self: Transfers, *arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(Transfers, "begin_in", real)
        raise torch.OutOfMemoryError("in this test")

    _, pool = _interrupted_step(tmp_path, monkeypatch, "begin_in", refused, torch.OutOfMemoryError)
    assert pool.allocated_bytes == 0


def _interrupted_step(
    path: Path, monkeypatch: pytest.MonkeyPatch, copy: str, instead: Any, error: type[BaseException]
) -> tuple[FakeDevice, HostPool]:
    """A step that ends with ``error``, and everything that was under way is done."""
    device = FakeDevice("lazy")
    model, x = nn.Sequential(*[_Block() for _ in range(3)]), torch.randn(SIZE, SIZE)
    config = OffloadConfig(
        target="host",
        path=path,
        min_bytes=0,
        keep_last_bytes=0,
        pending_bytes=1,
        host_budget="1MiB",
        policy="all",
    )
    offloader = Offloader(config, accelerator=device)
    loss = None
    if copy == "begin_out":
        monkeypatch.setattr(Transfers, copy, instead)
    with device, contextlib.suppress(error):
        with offloader:
            loss = _loss(model, x)
        monkeypatch.setattr(Transfers, copy, instead)
        loss.backward()
        pytest.fail("nothing was raised")
    del loss
    forget_failed_backward()
    device.finish()
    (pool,) = offloader.tiers.pools
    pool.settle()
    offloader.close()
    return device, pool


# -- single copies, with kernels that run when they are told to ---------------------------------------------------


def _filled(value: int, nbytes: int = 4096) -> Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


@contextlib.contextmanager
def _without(monkeypatch: pytest.MonkeyPatch, edge: str | None) -> Iterator[None]:
    with monkeypatch.context() as patch:
        if edge is not None:
            patch.setattr(Transfers, edge, _nothing)
        yield


def _copy_out_waits_for_the_producer(monkeypatch: pytest.MonkeyPatch, edge: str | None) -> bool:
    device = FakeDevice("eager")
    source, host = _filled(0), _filled(0)
    device.launch(lambda: source.fill_(7))
    with _without(monkeypatch, edge):
        Transfers(device).begin_out(source, host)
    device.advance(1.0)  # side streams run what they can; the producer has not run yet
    device.finish()
    return bool((host == 7).all())


def _copy_in_waits_for_the_host_bytes(monkeypatch: pytest.MonkeyPatch, edge: str | None) -> bool:
    device = FakeDevice("eager")
    transfers = Transfers(device)
    source, host = _filled(0), _filled(0)
    device.launch(lambda: source.fill_(7))
    out = transfers.begin_out(source, host)
    with _without(monkeypatch, edge), device.on(FakeStream("other compute")):  # nothing else orders the two copies
        incoming = transfers.begin_in(host, 0, after=out.event)
        device.advance(1.0)
        device.before_kernel()
        transfers.before_use(incoming)
        device.before_kernel()
    device.finish()
    return bool((incoming.tensor == 7).all())


def _unused_reload_is_dropped_safely(monkeypatch: pytest.MonkeyPatch, edge: str | None) -> bool:
    device = FakeDevice("lazy")
    transfers = Transfers(device)
    host = _filled(7)
    incoming = transfers.begin_in(host, 0)
    with _without(monkeypatch, edge):
        transfers.drop_unused(incoming)
    del incoming
    device.before_kernel()  # the memory gets its next owner here
    device.finish()
    return not device.violations


SINGLE: list[tuple[str, Callable[[pytest.MonkeyPatch, str | None], bool]]] = [
    ("_order_after_producer", _copy_out_waits_for_the_producer),
    ("_order_after_host_bytes", _copy_in_waits_for_the_host_bytes),
    ("_order_reuse_after_fill", _unused_reload_is_dropped_safely),
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
        transfers = Transfers(device)
        earlier, slot = _filled(1), _filled(0)
        transfers.begin_out(earlier, slot)
        if cached:
            device.current_stream = lambda index: device.compute  # type: ignore[method-assign]
        source, host = _filled(0), _filled(0)
        other = FakeStream("other compute")
        with device.on(other):
            device.launch(lambda: source.fill_(7))
            transfers.begin_out(source, host)
        device.before_kernel()  # the first stream goes on; the other one, which makes the bytes, has not run
        device.finish()
        return bool((host == 7).all())

    assert survives(cached=False)
    assert not survives(cached=True)


def test_each_use_on_another_stream_waits_too() -> None:
    """Rule 4 per stream: a second stream that uses a reload waits for the fill itself."""
    device = FakeDevice("lazy")
    transfers = Transfers(device)
    host = _filled(7)
    incoming = transfers.begin_in(host, 0)
    transfers.before_use(incoming)
    other = FakeStream("other compute")
    seen: list[bool] = []
    with device.on(other):
        tensor = transfers.before_use(incoming)
        device.launch(lambda: seen.append(bool((tensor == 7).all())))
        device.before_kernel()  # only the other stream runs
    assert seen == [True]
    assert len(incoming.awaited_by) == 2


def test_memory_of_another_stream_is_reported_to_the_allocator() -> None:
    """Rule 3 with several compute streams: the block may belong to another stream than the one that saved it."""
    device = FakeDevice("lazy")
    transfers = Transfers(device)
    owner, user = FakeStream("owner"), FakeStream("user")
    with device.on(owner):
        source = device.empty(4096, 0, owner)
        other = _filled(1)
        used = transfers.begin_in(other, 0)  # the owner has computed
        transfers.before_use(used)
        filled = source.fill_
        device.launch(lambda: filled(7))
        device.before_kernel()
    host = _filled(0)
    with device.on(user):
        out = transfers.begin_out(source, host)
        transfers.release_source(out)
    del source, out
    with device.on(owner):
        device.before_kernel()
    device.finish()
    assert bool((host == 7).all())
    assert not device.violations


def test_spilling_waits_for_the_host_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write to disk reads a slot only after the copy that fills it; without the wait the disk gets poison."""
    assert _gradients_survive(tmp_path, "lazy", "nvme", engine="memory")
    plain = DeviceMover._spill

    def hasty(self: DeviceMover, record: Any) -> None:
        events, record.slot.events[:] = list(record.slot.events), []
        plain(self, record)
        record.slot.events[:] = events

    # "random" only: with "lazy" nothing else would make the copy run before the slot is written
    monkeypatch.setattr(DeviceMover, "_spill", hasty)
    monkeypatch.setattr(Transfers, "_order_release_after_copy", _release_without_running)
    assert not _gradients_survive(tmp_path, "lazy", "nvme", steps=1, engine="memory")


def _release_without_running(self: Transfers, out: Outgoing) -> None:
    """Keep the source alive for ever instead of making the compute stream wait for the copy."""
    _leaked.append(out.source)


_leaked: list[Tensor] = []


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


def test_incoming_is_plain_data() -> None:
    device = FakeDevice()
    host = _filled(3)
    incoming = Transfers(device).begin_in(host, 0)
    assert isinstance(incoming, Incoming)
    device.finish()
    assert bool((incoming.tensor == 3).all())
