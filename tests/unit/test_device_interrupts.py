"""Interrupts at every function of the way from a device to host memory, to disk and back."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from actoffload import OffloadConfig, Offloader
from actoffload.device_tier import DeviceMover
from actoffload.record import State
from actoffload.testing.fakedevice import FakeDevice
from actoffload.transfer import Transfers
from tests.harness import WAIT_S, flush_autograd, forget_failed_backward
from tests.unit.interrupts import Interrupt, forget_pools
from tests.unit.rows import records_of, states

SIZE = 64


def model_and_input() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE), nn.Tanh()), torch.randn(SIZE, SIZE)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def offloader_of(
    device: FakeDevice, path: Path, model: nn.Module, target: Literal["host", "nvme"], pending_bytes: int = 1
) -> Offloader:
    config = OffloadConfig(
        target=target,
        path=path,
        engine="memory",
        min_bytes=0,
        keep_last_bytes=0,
        pending_bytes=pending_bytes,
        prefetch_bytes=1 << 20,
        host_budget="1MiB",
        policy="all",
    )
    offloader = Offloader(config, accelerator=device)
    offloader.use(model)  # else it looks through all live objects, each time
    return offloader


def rests(offloader: Offloader) -> bool:
    """Whether every transfer ends, also for those who would be told of it."""
    spool = offloader.tiers.spool
    deadline_s = time.monotonic() + WAIT_S
    while spool is not None and spool.statistics().busy_extents:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.001)
    return True


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where it comes in a finalizer
@pytest.mark.parametrize("part", ["forward", "synchronize", "backward"])
@pytest.mark.parametrize("target", ["host", "nvme"])
def test_an_interrupt_at_any_function_of_a_step(
    tmp_path: Path, target: Literal["host", "nvme"], part: Literal["forward", "synchronize", "backward"]
) -> None:
    model, x = model_and_input()
    model(x).square().sum().backward()
    expected = gradients(model)
    for at in itertools.count(1):
        device, interrupt = FakeDevice("lazy"), Interrupt(at)
        # what is to go to disk as we wait for it must not have gone in forward
        offloader = offloader_of(device, tmp_path, model, target, pending_bytes=1 << 20 if part == "synchronize" else 1)
        loss: Tensor | None = None
        with device:
            with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
                if part == "forward":
                    stack.enter_context(interrupt.armed())
                with offloader:
                    loss = model(x).square().sum()
            if part == "synchronize":
                with contextlib.suppress(KeyboardInterrupt), interrupt.armed():
                    offloader.synchronize()
            if part == "backward":
                assert loss is not None
                offloader.synchronize()  # else it forwards what is on its way
                with contextlib.suppress(KeyboardInterrupt), interrupt.armed():
                    loss.backward(retain_graph=True)
            model.zero_grad()
            if part != "synchronize":
                offloader.synchronize()
            if loss is not None:
                loss.backward()
                assert all(map(torch.equal, expected, gradients(model))), f"interrupted at {at}"
            del loss
            gc.collect(1)  # the error's traceback holds the graph; all of it is young
            flush_autograd()
        device.finish()
        assert device.violations == [], f"interrupted at {at}"
        assert rests(offloader), f"interrupted at {at}"
        offloader.close()
        forget_pools()
        if interrupt.left > 0:
            break
    assert at > 20, "hardly anything was interrupted"


@contextlib.contextmanager
def late_interrupt(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, count: int = 1) -> Iterator[None]:
    """After the ``count``-th call of a method, which does what it does, comes an interrupt."""
    real, calls = getattr(owner, name), itertools.count(1)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        result = real(*arguments, **options)
        if next(calls) == count:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        try:
            yield
        except KeyboardInterrupt:
            return
    pytest.fail("nothing was interrupted")


@pytest.mark.parametrize("way", ["write", "read"])
def test_an_interrupt_when_a_transfer_was_just_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """It ends by itself, and its end changes nothing of a record that is elsewhere by now."""
    model, x = model_and_input()
    model(x).square().sum().backward()
    expected = gradients(model)
    device = FakeDevice("lazy")
    offloader = offloader_of(device, tmp_path, model, "nvme", pending_bytes=1 << 20)
    spool = offloader.tiers.spool
    assert spool is not None
    with device:
        with offloader:
            loss = model(x).square().sum()
        with late_interrupt(monkeypatch, spool, "write") if way == "write" else contextlib.nullcontext():
            offloader.synchronize()
        assert rests(offloader)
        assert offloader.core.pending_bytes == 0
        offloader.synchronize()
        model.zero_grad()
        with late_interrupt(monkeypatch, spool, "read") if way == "read" else contextlib.nullcontext():
            loss.backward(retain_graph=True)
        assert rests(offloader)
        if way == "read":
            model.zero_grad()
            loss.backward()
        assert all(map(torch.equal, expected, gradients(model)))
        del loss
        forget_failed_backward()
    assert offloader.statistics().live_records == 0
    assert offloader.core.accounts.resident_bytes == 0
    device.finish()
    assert device.violations == []
    offloader.close()


def test_the_end_of_a_read_that_was_given_up_is_not_that_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next would count as read while its memory holds what it held before."""
    model, x = model_and_input()
    device = FakeDevice("lazy")
    offloader = offloader_of(device, tmp_path, model, "nvme")
    spool, (mover,) = offloader.tiers.spool, offloader.tiers.movers.values()
    assert spool is not None
    assert isinstance(mover, DeviceMover)
    ends: list[Callable[[], None]] = []
    real = DeviceMover._fetched

    def held_back(self: DeviceMover, *arguments: Any) -> None:
        ends.append(lambda: real(self, *arguments))

    with device:
        with offloader:
            loss = model(x).square().sum()
        offloader.synchronize()
        record = next(record for record in records_of(offloader) if record.state is State.SPILLED)
        monkeypatch.setattr(DeviceMover, "_fetched", held_back)
        with offloader.core.lock:
            with late_interrupt(monkeypatch, spool, "read"):
                mover.bring(record, urgent=True)
            assert states(offloader).count(State.FETCHING) == 0
            assert mover.bring(record, urgent=True)
        assert rests(offloader)
        assert len(ends) == 2
        ends[0]()
        assert states(offloader).count(State.FETCHING) == 1
        ends[1]()
        assert states(offloader).count(State.HOSTED) == 1
        monkeypatch.undo()
        loss.backward()
        del loss
    offloader.close()


def test_memory_on_another_stream_is_looked_after_before_it_counts_as_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice("lazy")
    transfers = Transfers(device)
    incoming = transfers.begin_in(torch.ones(4096, dtype=torch.uint8), 0)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    other = device.side_stream(0, "another")  # computes as well
    with monkeypatch.context() as patch:
        patch.setattr(device, "current_stream", lambda index: other)
        patch.setattr(device, "used_on", interrupted)
        with pytest.raises(KeyboardInterrupt):
            transfers.before_use(incoming)
    assert incoming.awaited_by == [], "dropping it orders its reuse"
