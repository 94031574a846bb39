"""Interrupts as a write is taken back: nobody waits for it ever after, and what is given back is right."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch

from actoffload import OffloadConfig, Offloader
from actoffload.engines.base import IoKind
from actoffload.spool import Spool, Transfer
from actoffload.testing.behind import Memory
from actoffload.testing.fakedevice import FakeDevice
from actoffload.testing.faults import GateEngine
from tests.harness import WAIT_S, flush_autograd, only_engine
from tests.unit.interrupts import Interrupt, forget_pools
from tests.unit.rows import FULL, NBYTES, Saved, activations

MIB = 1 << 20
Way = Literal["rows", "alone", "device"]


def offloader_of(way: Way, path: Path) -> tuple[Offloader, FakeDevice | None]:
    device = FakeDevice("lazy") if way == "device" else None
    config = OffloadConfig(
        target="nvme",
        path=path,
        engine=GateEngine,
        min_bytes=0,
        keep_last_bytes=0,
        policy="greedy",
        io_threads=1,
        host_budget="64MiB",
    )
    offloader = Offloader(config) if device is None else Offloader(config, accelerator=device)
    offloader.use(torch.nn.Identity())  # else it looks through all live objects, each time
    return offloader, device


@pytest.mark.parametrize("part", ["dropped", "backward"])
@pytest.mark.parametrize("way", ["rows", "alone", "device"])
def test_an_interrupt_at_any_function_as_a_write_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Way, part: str
) -> None:
    """Nothing is under way then that will not end: `synchronize` returns, and so does `close`."""
    in_finalizers: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: in_finalizers.append(what.exc_type))
    nbytes, count = (NBYTES, FULL) if way == "rows" else (MIB, 2)
    tensors = activations(count, nbytes)
    for at in itertools.count(1):
        interrupt = Interrupt(at)
        offloader, device = offloader_of(way, tmp_path)
        with contextlib.nullcontext() if device is None else device:
            saved = Saved(offloader, tensors)
            if device is not None:
                with offloader.core.lock:
                    offloader._flush()
            assert offloader.core.pending_bytes == count * nbytes
            for index in range(count):
                with contextlib.suppress(KeyboardInterrupt), interrupt.armed():
                    if part == "dropped":
                        saved.drop(index)
                    else:
                        saved.check(index, again=True)
            if part == "backward":
                for index in range(count):
                    saved.handles.clear()
                    saved.check(index, again=True)
            only_engine(offloader).open()
            offloader.synchronize()
            assert offloader.core.pending_bytes == 0, f"interrupted at {at}"
            spool = offloader.tiers.spool
            assert spool is not None
            for transfer in tuple(spool._live):
                assert transfer.wait(WAIT_S), f"interrupted at {at}"
            assert spool.statistics().busy_extents == 0, f"interrupted at {at}"
            del saved
            gc.collect(1)
            flush_autograd()
        offloader.close()
        offloader.abort()  # what was dropped as the interrupt came may be forgotten
        if device is not None:
            device.finish()
            assert device.violations == [], f"interrupted at {at}"
        forget_pools()
        assert set(in_finalizers) <= {KeyboardInterrupt}, f"interrupted at {at}"
        if interrupt.left > 0:
            break
    assert at > 20, "hardly anything was interrupted"


@pytest.mark.parametrize("segments", [1, 3])
def test_a_cancellation_that_was_interrupted_may_be_done_again(tmp_path: Path, segments: int) -> None:
    for at in itertools.count(1):
        interrupt = Interrupt(at)
        spool = Spool([tmp_path], engine=GateEngine, stripe_bytes=MIB, threads=1)
        memory = Memory(segments * MIB)
        called: list[Transfer] = []
        extent = spool.allocate(segments * MIB)
        transfer = spool.write(extent, memory.address, segments * MIB, on_done=called.append)
        with contextlib.suppress(KeyboardInterrupt), interrupt.armed():
            transfer.cancel()
        assert transfer.cancel(), f"interrupted at {at}"
        assert transfer.wait(0), f"interrupted at {at}"
        assert spool.statistics().busy_extents == 0, f"interrupted at {at}"
        spool.free(extent)
        assert spool.statistics().allocated_bytes == 0, f"interrupted at {at}"
        spool.close()
        assert (called, spool.statistics().written_bytes) == ([], 0)
        if interrupt.left > 0:
            break
    assert at > 5 * segments, "hardly anything was interrupted"


def test_an_interrupt_as_ends_are_worked_off(tmp_path: Path) -> None:
    """An engine's thread has only left a note of an end, as somebody held the lock."""
    for at in itertools.count(1):
        interrupt = Interrupt(at)
        spool = Spool([tmp_path], engine="memory", threads=1)
        memory, extents = Memory(MIB), [spool.allocate(MIB) for _ in range(2)]
        transfers = [spool.write(extent, memory.address, MIB) for extent in extents]
        with spool._lock:
            spool.free(extents[0])
            assert all(transfer.wait(WAIT_S) for transfer in transfers)
        with contextlib.suppress(KeyboardInterrupt), interrupt.armed():
            spool.statistics()
        statistics = spool.statistics()
        assert statistics.busy_extents == 0, f"interrupted at {at}"
        assert statistics.allocated_bytes in (MIB, 2 * MIB), "room may be lost until `close`, never given out twice"
        assert spool.meters[IoKind.WRITE]._count == 0, f"interrupted at {at}"
        spool.close()
        if interrupt.left > 0:
            break
    assert at > 5, "hardly anything was interrupted"


def test_who_cancels_last_changes_nothing_of_the_next_write(tmp_path: Path) -> None:
    """The end of a cancelled transfer may come twice; the second time its extent may be another's."""
    spool = Spool([tmp_path], engine=GateEngine, threads=1)
    memory, extent = Memory(MIB, fill=0x5A), spool.allocate(MIB)
    first = spool.write(extent, memory.address, MIB)
    assert first.cancel()
    second = spool.write(extent, memory.address, MIB)
    assert first.cancel()
    only = spool.engines[0]
    assert isinstance(only, GateEngine)
    only.open()
    assert second.wait(WAIT_S)
    assert second.error is None
    assert first.cancel()
    back = Memory(MIB)
    read = spool.read(extent, back.address, MIB)
    assert read.wait(WAIT_S)
    assert read.error is None
    assert back.data == memory.data
    spool.close()


def test_an_end_that_is_noted_twice_has_freed_room_poisoned_once(tmp_path: Path) -> None:
    """The second time the room may be another's: the poison would be read back as its bytes."""
    spool = Spool([tmp_path], engine=GateEngine, stripe_bytes=MIB, capacity_bytes=4 * MIB, threads=1, poison=True)
    memory, extent = Memory(MIB, fill=0x5A), spool.allocate(MIB)
    transfer = spool.write(extent, memory.address, MIB)
    spool.free(extent)
    assert transfer.cancel()
    assert transfer.cancel()
    only = spool.engines[0]
    assert isinstance(only, GateEngine)
    assert spool.statistics().busy_extents == 1, "it is being poisoned"
    (poisoning,) = spool._live
    assert transfer.cancel()
    assert spool.statistics().allocated_bytes == MIB, "nobody gets it meanwhile"
    only.open()
    assert poisoning.wait(WAIT_S)
    assert spool.statistics().allocated_bytes == 0
    assert transfer.cancel()
    assert spool._live == {}
    assert (spool.statistics().busy_extents, spool.statistics().allocated_bytes) == (0, 0)
    spool.close()
