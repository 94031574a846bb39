"""Who tells the engines of memory that comes and goes: every slab of a pool to every engine, and the bench rig's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import actoffload
from actoffload import assembly
from actoffload.engines.base import SpoolFile
from actoffload.engines.posix import PosixEngine
from actoffload.engines.uring import UringEngine
from actoffload.errors import EngineUnavailableError
from actoffload.hostpool import HostPool
from actoffload.report.bench_run import Rig
from actoffload.testing.fakedevice import FakeDevice
from tests.spools import needs_registration


class Told(PosixEngine):
    """Notes what memory it is told of; ``fails`` is raised the next time that memory comes."""

    def __init__(self, file: SpoolFile) -> None:
        super().__init__(file)
        self.memory: set[tuple[int, int]] = set()
        self.fails: BaseException | None = None

    def register_memory(self, address: int, nbytes: int) -> None:
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        self.memory.add((address, nbytes))

    def unregister_memory(self, address: int, nbytes: int) -> None:
        self.memory.discard((address, nbytes))


@pytest.fixture
def told(tmp_path: Path) -> Iterator[tuple[Any, list[Told]]]:
    """The pool of an offloader on two directories, with room for two slabs, and its engines."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    room = 2 * assembly.CPU_SLAB_BYTES
    config = actoffload.OffloadConfig(target="nvme", path=folders, engine=Told, host_budget=room, devices=("cpu",))
    with actoffload.Offloader(config) as offloader:
        assert offloader.tiers.spool is not None
        engines = [engine for engine in offloader.tiers.spool.engines if isinstance(engine, Told)]
        assert len(engines) == 2
        (pool,) = offloader.tiers.pools
        yield pool, engines


def test_every_engine_is_told_of_every_slab_that_comes_and_goes(told: tuple[Any, list[Told]]) -> None:
    pool, engines = told
    size = assembly.CPU_SLAB_BYTES
    slots = [pool.acquire(size), pool.acquire(size)]
    for engine in engines:
        assert engine.memory == {(slot.address, size) for slot in slots}
    slots.clear()
    large = pool.acquire(2 * size)
    for engine in engines:
        assert engine.memory == {(large.address, 2 * size)}


def test_what_one_engine_was_told_of_does_not_go_without_a_word_when_the_other_fails(
    told: tuple[Any, list[Told]],
) -> None:
    pool, engines = told
    size = assembly.CPU_SLAB_BYTES
    engines[1].fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        pool.acquire(size)
    ((address, _),) = engines[0].memory
    assert [slab.address for slab in pool._slabs] == [address], "it is mapped as long as somebody thinks so"
    large = pool.acquire(2 * size)
    assert engines[0].memory == engines[1].memory == {(large.address, 2 * size)}


def test_a_slab_of_which_a_warning_is_an_error_is_not_lost() -> None:
    memory: set[int] = set()
    pool = HostPool(
        1 << 20,
        slab_bytes=1 << 18,
        pin=lambda address, nbytes: False,
        mapped=lambda address, nbytes: memory.add(address),
        unmapping=lambda address, nbytes: memory.discard(address),
    )
    with pytest.raises(RuntimeWarning, match="page-locked"):
        pool.acquire(4096)
    assert memory == {slab.address for slab in pool._slabs}
    slot = pool.acquire(4096)
    assert slot is not None
    assert {slot.address} == memory


@pytest.mark.parametrize("can", [True, False])
def test_the_report_says_when_memory_could_not_be_page_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can: bool
) -> None:
    device = FakeDevice()
    monkeypatch.setattr(device, "pin", lambda address, nbytes: can)
    offloader = actoffload.Offloader(actoffload.OffloadConfig(target="host", path=tmp_path), accelerator=device)
    (pool,) = offloader.tiers.pools
    with contextlib.nullcontext() if can else pytest.warns(RuntimeWarning, match="could not be page-locked"):
        assert pool.acquire(4096) is not None
    told = "note: host memory could not be page-locked (see `ulimit -l`)" in offloader.report()
    assert told is not can
    offloader.close()


def test_a_rig_takes_its_memory_back_before_it_lays_out_new(tmp_path: Path) -> None:
    needs_registration(16 << 20)
    try:
        rig = Rig([str(tmp_path)], "uring", 2, 1 << 20, 8 << 20)
    except EngineUnavailableError as exc:
        pytest.skip(str(exc))
    with rig:
        (engine,) = rig._spool.engines
        assert isinstance(engine, UringEngine)
        for block in (1 << 18, 1 << 20, 1 << 19):
            rig.prepare(block)
            assert rig.measure("write", 0.05).bytes_per_s > 0
            rig._check_content()
            assert engine._registered.nbytes == len(rig._slots) * block
            assert len(engine._registered._pieces) == 1
