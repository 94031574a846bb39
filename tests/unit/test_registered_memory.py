"""Memory that is registered with io_uring: which transfers go by it, and that none goes by what is mapped no more."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import actoffload
from actoffload.engines import registered as registered_module
from actoffload.engines.base import IoKind, IoRequest, SpoolFile
from actoffload.engines.registered import Registered
from actoffload.engines.ring import Ring
from actoffload.engines.uring import UringEngine
from actoffload.errors import EngineUnavailableError
from actoffload.testing.behind import Memory, peek_file, poke_file, random_bytes
from actoffload.testing.engine_suite import BLOCK, WAIT_S
from actoffload.testing.fakedevice import FakeDevice
from tests.spools import make_uring, needs_registration

READ_FIXED, WRITE_FIXED, READ, WRITE, READV, WRITEV = 4, 5, 22, 23, 1, 2


@pytest.fixture
def engine(file: SpoolFile) -> Iterator[UringEngine]:
    needs_registration()
    engine = make_uring(file)
    yield engine
    engine.abort()


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The operations that any ring is given for its file, in order."""
    seen: list[int] = []
    real = Ring._add

    def add(ring: Ring, operation: int, flags: int, *rest: int) -> None:
        if flags:
            seen.append(operation)
        real(ring, operation, flags, *rest)

    monkeypatch.setattr(Ring, "_add", add)
    return seen


class Places(Ring):
    """Stands for a ring: what is registered where. ``refuse`` is the error of what is put from now on.

    Attributes:
        calls: how often something was put.
    """

    def __init__(self) -> None:
        self.held: dict[int, tuple[int, int]] = {}
        self.count = self.calls = 0
        self.refuse: BaseException | None = None

    def make_places(self, count: int) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.count = count

    def put(self, place: int, address: int, nbytes: int) -> None:
        assert 0 <= place < self.count
        self.calls += 1
        if self.refuse is not None:
            raise self.refuse
        assert (place in self.held) == (nbytes == 0), "a place is filled once and emptied once"
        if nbytes:
            self.held[place] = (address, nbytes)
        else:
            del self.held[place]


def tell(known: Registered, *changes: tuple[bool, int, int]) -> None:
    for change in changes:
        known.told(*change)
    known.carry_out(known.take_notes())


def move(engine: UringEngine, kind: IoKind, address: int, nbytes: int, offset: int = 0) -> None:
    request = IoRequest(kind, address, nbytes, offset)
    engine.submit(request)
    assert request.wait(WAIT_S)
    assert request.error is None


# -- what is known ----------------------------------------------------------------------------------------------------


def test_memory_is_found_where_it_lies_in_one_piece() -> None:
    ring = Places()
    known = Registered(ring)
    tell(known, (True, 8000, 1000), (True, 1000, 500), (True, 3000, 2000))
    places = {ring.held[place]: place for place in ring.held}
    assert known.place_of(3000, 2000) == places[3000, 2000]
    assert known.place_of(4999, 1) == places[3000, 2000]
    assert known.place_of(1000, 500) == places[1000, 500]
    assert known.place_of(8999, 1) == places[8000, 1000]
    for address, nbytes in ((999, 1), (1000, 501), (1499, 2), (2999, 1), (2999, 5), (5000, 1), (9000, 1), (0, 1)):
        assert known.place_of(address, nbytes) is None, (address, nbytes)
    assert known.nbytes == 3500


def test_what_goes_is_known_no_more_and_its_place_is_used_again() -> None:
    ring = Places()
    known = Registered(ring)
    tell(known, (True, 1000, 500), (True, 3000, 500))
    first = known.place_of(1000, 500)
    tell(known, (False, 1000, 500))
    assert known.place_of(1000, 500) is None
    assert known.place_of(3000, 500) is not None
    tell(known, (True, 7000, 100))
    assert known.place_of(7000, 100) == first
    tell(known, (False, 7000, 100), (False, 3000, 500), (False, 12345, 500))
    assert ring.held == {}
    assert known.nbytes == 0


def test_nothing_is_done_before_the_notes_are_carried_out() -> None:
    ring = Places()
    known = Registered(ring)
    known.told(True, 1000, 500)
    assert ring.held == {}
    assert known.place_of(1000, 500) is None
    notes = known.take_notes()
    assert known.take_notes() == []
    known.carry_out(notes)
    assert known.place_of(1000, 500) is not None


@pytest.mark.parametrize("begin", [500, 1000, 1200, 1400])
def test_what_comes_takes_the_place_of_all_that_it_lies_over(begin: int) -> None:
    """Somebody forgot to say that it goes: its pages are not those of what is mapped there now."""
    ring = Places()
    known = Registered(ring)
    tell(known, (True, 1000, 500), (True, 5000, 500))
    tell(known, (True, begin, 600))
    assert sorted(ring.held.values()) == [(begin, 600), (5000, 500)]
    place = known.place_of(begin, 600)
    assert place is not None
    assert ring.held[place] == (begin, 600)
    assert known.place_of(1000, 500) == (place if begin == 1000 else None)
    tell(known, (False, begin + 100, 1))
    assert known.place_of(begin, 1) is None


def test_a_piece_is_as_large_as_the_kernel_takes() -> None:
    assert registered_module.MAX_PIECE_BYTES == 1 << 30
    ring = Places()
    known = Registered(ring)
    tell(known, (True, 1 << 40, (1 << 30) + 4096))
    assert sorted(nbytes for _, nbytes in ring.held.values()) == [4096, 1 << 30]


def test_large_memory_is_registered_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered_module, "MAX_PIECE_BYTES", 1000)
    ring = Places()
    known = Registered(ring)
    tell(known, (True, 5000, 2500))
    assert sorted(ring.held.values()) == [(5000, 1000), (6000, 1000), (7000, 500)]
    assert known.place_of(5999, 1) != known.place_of(6000, 1)
    assert known.place_of(5999, 2) is None
    tell(known, (False, 5000, 2500))
    assert ring.held == {}


def test_what_the_kernel_refuses_is_used_as_it_is() -> None:
    ring = Places()
    known = Registered(ring)
    ring.refuse = OSError(errno.ENOMEM, "Cannot allocate memory")
    tell(known, (True, 1000, 500))
    assert known.place_of(1000, 500) is None
    assert "500 bytes: Cannot allocate memory; see `ulimit -l`" in known.refusal
    tell(known, (True, 5000, 700))
    tell(known, (False, 1000, 500))
    assert "700 bytes" in known.refusal, "of memory that is there"
    ring.refuse = None
    tell(known, (True, 5000, 700))
    assert known.refusal == ""
    tell(known, (False, 1000, 500), (True, 3000, 500))
    assert known.place_of(3000, 500) is not None


def test_what_the_kernel_does_not_let_go_is_not_used_either() -> None:
    ring = Places()
    known = Registered(ring)
    tell(known, (True, 1000, 500))
    ring.refuse = OSError(errno.ENXIO, "No such device or address")
    tell(known, (False, 1000, 500))
    assert known.place_of(1000, 500) is None
    ring.refuse = None
    tell(known, (True, 1000, 500))  # in another place: `Places` would not have the old one filled twice
    assert known.place_of(1000, 500) is not None


def test_what_has_come_and_gone_meanwhile_is_left_alone() -> None:
    """Something else may lie there by now."""
    ring = Places()
    known = Registered(ring)
    tell(known, (True, 1000, 500), (False, 1000, 500))
    tell(known, (True, 1000, 500), (True, 5000, 500), (False, 1200, 1))
    assert ring.calls == 1
    assert list(ring.held.values()) == [(5000, 500)]
    tell(known, (True, 7000, 500), (False, 7000, 500), (True, 7000, 600))
    assert sorted(ring.held.values()) == [(5000, 500), (7000, 600)]


def test_after_an_error_half_way_nothing_is_known_any_more() -> None:
    """A note that is lost would leave memory known that is there no more."""
    ring = Places()
    known = Registered(ring)
    tell(known, (True, 1000, 500), (True, 3000, 500))
    ring.refuse = MemoryError()
    tell(known, (True, 7000, 500), (False, 3000, 500))
    ring.refuse = None
    tell(known, (True, 9000, 500))
    assert [known.place_of(address, 1) for address in (1000, 3000, 7000, 9000)] == [None] * 4
    assert known.refusal == "given up after MemoryError"


def test_a_kernel_without_it_and_one_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Places()
    ring.refuse = OSError(errno.EINVAL, "Invalid argument")
    known = Registered(ring)
    assert "registers no memory one by one (Invalid argument)" in known.refusal
    ring.refuse = None
    tell(known, (True, 1000, 500))
    assert known.place_of(1000, 500) is None
    assert known.refusal.startswith("this kernel")
    monkeypatch.setattr(registered_module, "PLACES", 1)
    known = Registered(Places())
    tell(known, (True, 1000, 500), (True, 3000, 500))
    assert known.place_of(1000, 500) == 0
    assert known.place_of(3000, 500) is None
    assert known.refusal == "1 pieces are registered already"


# -- with the kernel --------------------------------------------------------------------------------------------------


def test_transfers_go_by_it_where_all_of_their_memory_is_registered(
    engine: UringEngine, file: SpoolFile, operations: list[int]
) -> None:
    memory, other = Memory(8 * BLOCK), Memory(BLOCK)
    memory.data = data = random_bytes(memory.nbytes, 1)
    engine.register_memory(other.address, other.nbytes)  # has the first place
    engine.register_memory(memory.address, 4 * BLOCK)
    move(engine, IoKind.WRITE, memory.address, 2 * BLOCK)
    move(engine, IoKind.WRITE, memory.address + 2 * BLOCK, 2 * BLOCK, 2 * BLOCK)
    move(engine, IoKind.WRITE, memory.address + 3 * BLOCK, 2 * BLOCK, 4 * BLOCK)
    move(engine, IoKind.WRITE, memory.address + 5 * BLOCK, BLOCK, 6 * BLOCK)
    assert not engine._registered.refusal
    assert operations == [WRITE_FIXED, WRITE_FIXED, WRITE, WRITE]
    assert peek_file(file, 0, 7 * BLOCK) == data[: 4 * BLOCK] + data[3 * BLOCK : 5 * BLOCK] + data[5 * BLOCK :][:BLOCK]
    operations.clear()
    poke_file(file, 0, again := random_bytes(5 * BLOCK, 2))
    move(engine, IoKind.READ, memory.address, 4 * BLOCK)
    move(engine, IoKind.READ, memory.address + 4 * BLOCK, BLOCK, 4 * BLOCK)
    assert operations == [READ_FIXED, READ]
    assert memory.data[: 5 * BLOCK] == again
    assert "registered with the kernel" in engine.remark
    engine.unregister_memory(memory.address, 4 * BLOCK)
    move(engine, IoKind.WRITE, memory.address, BLOCK)
    assert operations[-1] == WRITE
    engine.unregister_memory(other.address, other.nbytes)
    move(engine, IoKind.WRITE, memory.address, BLOCK)
    assert engine.remark == ""


def test_several_ranges_go_as_they_did(engine: UringEngine, file: SpoolFile, operations: list[int]) -> None:
    memory = Memory(4 * BLOCK)
    memory.data = data = random_bytes(memory.nbytes, 1)
    engine.register_memory(memory.address, memory.nbytes)
    ranges = ((memory.address + 2 * BLOCK, BLOCK), (memory.address, BLOCK))
    for kind in (IoKind.WRITE, IoKind.READ):
        request = IoRequest(kind, ranges[0][0], 2 * BLOCK, 0, ranges=ranges)
        engine.submit(request)
        assert request.wait(WAIT_S)
        assert request.error is None
    assert operations == [WRITEV, READV]
    assert peek_file(file, 0, 2 * BLOCK) == data[2 * BLOCK : 3 * BLOCK] + data[:BLOCK]


def test_a_short_transfer_goes_on_in_registered_memory(
    engine: UringEngine, file: SpoolFile, operations: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Ring.results

    def short(ring: Ring) -> list[tuple[int, int]]:
        return [(tag, result - 100 if tag and result > BLOCK else result) for tag, result in real(ring)]

    monkeypatch.setattr(Ring, "results", short)
    memory = Memory(3 * BLOCK)
    memory.data = data = random_bytes(memory.nbytes, 1)
    engine.register_memory(memory.address, memory.nbytes)
    move(engine, IoKind.WRITE, memory.address, memory.nbytes)
    assert len(operations) > 1
    assert set(operations) == {WRITE_FIXED}
    assert peek_file(file, 0, memory.nbytes) == data


class Mapping:
    """A block of memory that can be mapped anew at the same address."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
        libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._libc = libc
        self.address: int = self._map(None, 0)

    def renew(self) -> None:
        assert self._libc.munmap(self.address, BLOCK) == 0
        assert self._map(self.address, 0x10) == self.address  # MAP_FIXED

    def fill(self, value: int) -> None:
        ctypes.memset(self.address, value, BLOCK)

    def _map(self, address: int | None, flags: int) -> Any:
        flags |= mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return self._libc.mmap(address, BLOCK, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)

    def __del__(self) -> None:
        self._libc.munmap(self.address, BLOCK)


def test_memory_that_is_mapped_anew_at_the_same_address_is_what_is_written(
    engine: UringEngine, file: SpoolFile, operations: list[int]
) -> None:
    """The kernel keeps the pages that it was told of: by the old registration it would write what they held."""
    memory = Mapping()
    for value in range(1, 6):
        memory.fill(value)
        if value % 2:
            engine.register_memory(memory.address, BLOCK)
        move(engine, IoKind.WRITE, memory.address, BLOCK)
        assert peek_file(file, 0, BLOCK) == bytes([value]) * BLOCK
        if value % 2:
            engine.unregister_memory(memory.address, BLOCK)
        memory.renew()
    assert operations == [WRITE_FIXED, WRITE, WRITE_FIXED, WRITE, WRITE_FIXED]


def test_what_is_told_before_a_transfer_is_asked_for_holds_for_it(
    engine: UringEngine, file: SpoolFile, operations: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when both come at the last moment, as the reaper is about to look at what there is to start."""
    memory, other = Mapping(), Memory(BLOCK)
    engine.register_memory(memory.address, BLOCK)
    move(engine, IoKind.WRITE, memory.address, BLOCK)
    assert operations == [WRITE_FIXED]
    late = IoRequest(IoKind.WRITE, memory.address, BLOCK, 0)
    real = engine._pop

    def pop() -> IoRequest | None:
        if not late_came:
            late_came.append(True)
            engine._registered.told(False, memory.address, BLOCK)  # as `unregister_memory` does
            memory.renew()
            memory.fill(7)
            engine._writes.append(late)  # as `submit` does; its lock is held
        return real()

    late_came: list[bool] = []
    monkeypatch.setattr(engine, "_pop", pop)
    move(engine, IoKind.WRITE, other.address, BLOCK, BLOCK)
    assert late.wait(WAIT_S)
    assert late.error is None
    assert peek_file(file, 0, BLOCK) == bytes([7]) * BLOCK


def test_pages_that_are_gone_are_not_held_until_somebody_has_a_transfer(engine: UringEngine) -> None:
    memory = Memory(4 * BLOCK)
    engine.register_memory(memory.address, memory.nbytes)
    move(engine, IoKind.WRITE, memory.address, BLOCK)
    assert engine._registered.nbytes == 4 * BLOCK
    engine.unregister_memory(memory.address, memory.nbytes)
    deadline_s = time.monotonic() + WAIT_S
    while engine._registered.nbytes and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert engine._registered.nbytes == 0


def test_an_engine_that_closes_registers_nothing_more(file: SpoolFile, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_registration()
    put: list[int] = []
    monkeypatch.setattr(Ring, "put", lambda ring, place, address, nbytes: put.append(address))
    engine = make_uring(file)
    memory = Memory(BLOCK)
    deadline_s = time.monotonic() + WAIT_S
    while not engine._asleep and time.monotonic() < deadline_s:
        time.sleep(0.001)
    engine.register_memory(memory.address, BLOCK)
    engine.close()
    engine.unregister_memory(memory.address, BLOCK)
    assert put == []


def test_an_error_as_memory_is_registered_hangs_nothing(
    engine: UringEngine, file: SpoolFile, operations: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, other = Memory(BLOCK, fill=1), Memory(BLOCK, fill=2)
    engine.register_memory(memory.address, BLOCK)
    move(engine, IoKind.WRITE, memory.address, BLOCK)

    def put(ring: Ring, place: int, address: int, nbytes: int) -> None:
        raise MemoryError("in this test")

    with monkeypatch.context() as patch:
        patch.setattr(Ring, "put", put)
        engine.register_memory(other.address, BLOCK)
        move(engine, IoKind.WRITE, other.address, BLOCK)
    move(engine, IoKind.WRITE, memory.address, BLOCK, BLOCK)
    assert operations == [WRITE_FIXED, WRITE, WRITE]
    assert peek_file(file, 0, 2 * BLOCK) == other.data + memory.data
    assert "given up after MemoryError" in engine.remark


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_was_forked_leaves_the_parent_its_pages(
    engine: UringEngine, file: SpoolFile, operations: list[int]
) -> None:
    """Were the registered pages shared until somebody writes, the parent would write to others than the kernel has."""
    memory = Mapping()
    memory.fill(1)
    engine.register_memory(memory.address, BLOCK)
    move(engine, IoKind.WRITE, memory.address, BLOCK)
    wait, end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(end)
            os.read(wait, 1)
        finally:
            os._exit(0)
    try:
        memory.fill(2)
        move(engine, IoKind.WRITE, memory.address, BLOCK)
        assert peek_file(file, 0, BLOCK) == bytes([2]) * BLOCK
        poke_file(file, 0, bytes([3]) * BLOCK)
        move(engine, IoKind.READ, memory.address, BLOCK)
        assert ctypes.string_at(memory.address, BLOCK) == bytes([3]) * BLOCK
    finally:
        os.close(wait)
        os.close(end)
        os.waitpid(child, 0)
    assert operations == [WRITE_FIXED, WRITE_FIXED, READ_FIXED]


def test_what_leaves_a_device_for_disk_goes_by_registered_memory(tmp_path: Path, operations: list[int]) -> None:
    needs_registration(2 << 20)
    torch.manual_seed(0)
    model, inputs = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))), torch.randn(64, 64)
    device = FakeDevice("random")
    try:
        config = actoffload.OffloadConfig(
            target="nvme",
            path=str(tmp_path),
            engine="uring",
            min_bytes=0,
            keep_last_bytes=0,
            pending_bytes=1 << 14,
            prefetch_bytes=1 << 15,
            host_budget="1MiB",
        )
        offloader = actoffload.Offloader(config, accelerator=device)
    except EngineUnavailableError as exc:
        pytest.skip(str(exc))
    with device, offloader:
        loss = model(inputs).square().sum()
    offloader.synchronize()  # so that nothing is taken back before it is written
    with device:
        loss.backward()
    ours = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    del loss
    offloader.close()
    device.finish()
    model.zero_grad()
    model(inputs).square().sum().backward()
    plain = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(plain) == 8
    assert all(map(torch.equal, ours, plain))
    assert device.violations == []
    assert set(operations) == {WRITE_FIXED, READ_FIXED}


@pytest.mark.parametrize("engine_name", ["uring", "posix"])
def test_what_a_step_reads_comes_back_into_registered_memory(
    tmp_path: Path, operations: list[int], engine_name: Any
) -> None:
    """Whole tensors on the CPU: each comes back in one range of the pool's memory. Bits as without."""

    def gradients(offloader: actoffload.Offloader | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
        inputs = torch.randn(512, 512)
        if offloader is None:
            model(inputs).square().sum().backward()
        else:
            with offloader.use(model):
                loss = model(inputs).square().sum()
            loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    needs_registration(32 << 20)
    try:
        config = actoffload.OffloadConfig(target="nvme", path=str(tmp_path), engine=engine_name, policy="all")
        offloader = actoffload.Offloader(config)
    except EngineUnavailableError as exc:
        pytest.skip(str(exc))
    with offloader:
        ours = gradients(offloader)
        report = offloader.report()
    assert all(map(torch.equal, gradients(None), ours))
    if engine_name == "posix":
        assert operations == []
    else:
        assert READ_FIXED in operations
        assert READ not in operations
        assert "registered with the kernel" in report
