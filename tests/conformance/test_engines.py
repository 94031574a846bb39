"""Every engine passes the conformance suite, direct and buffered."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from actoffload.errors import ConfigError, EngineUnavailableError
from actoffload.storage import spool_files as paths
from actoffload.storage.engines import AUTO_ORDER, ENGINES, choose_engine, create_engine
from actoffload.storage.engines.aiofiles import AiofilesEngine
from actoffload.storage.engines.base import SpoolFile, StorageEngine
from actoffload.storage.engines.memory import MemoryEngine
from actoffload.storage.engines.posix import PosixEngine
from actoffload.testing.engine_suite import StorageEngineTests
from actoffload.testing.faults import ShortEngine
from tests.spools import make_uring


class TestPosix(StorageEngineTests):
    def make_engine(self, file: SpoolFile, threads: int | None = None) -> StorageEngine:
        return PosixEngine(file, threads=threads)

    def test_is_direct_where_the_file_is(self, engine: StorageEngine, file: SpoolFile) -> None:
        assert engine.capabilities.direct == file.direct
        assert engine.capabilities.alignment == file.alignment


class TestPosixBuffered(TestPosix):
    @pytest.fixture
    def file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpoolFile]:
        monkeypatch.setattr(paths, "_enable_direct", lambda fd: None)
        file = paths.open_arena(str(tmp_path))
        assert (file.direct, file.alignment) == (False, 1)
        yield file
        os.close(file.fd)


class TestUring(TestPosix):
    def make_engine(self, file: SpoolFile, threads: int | None = None) -> StorageEngine:
        return make_uring(file, threads)


class TestUringBuffered(TestUring, TestPosixBuffered):
    pass


class TestUringOldKernel(TestUring):
    """Without the flags of Linux 6.1."""

    @pytest.fixture(autouse=True)
    def without_the_newer_flags(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("actoffload.storage.engines.ring.OWN_THREAD", 1 << 31)


class TestAiofiles(StorageEngineTests):
    def make_engine(self, file: SpoolFile, threads: int | None = None) -> StorageEngine:
        return AiofilesEngine(file, threads=threads)

    @pytest.fixture(autouse=True)
    def needs_the_package(self) -> None:
        pytest.importorskip("aiofiles")


class TestAiofilesWithoutReopening(TestAiofiles):
    @pytest.fixture
    def file(self, tmp_path: Path) -> Iterator[SpoolFile]:
        file = paths.open_arena(str(tmp_path))
        yield replace(file, reopen_path=None)
        os.close(file.fd)

    def peek(self, engine: StorageEngine, file: SpoolFile, offset: int, length: int) -> bytes:
        return super().peek(engine, replace(file, reopen_path=f"/proc/self/fd/{file.fd}"), offset, length)

    def poke(self, engine: StorageEngine, file: SpoolFile, offset: int, data: bytes) -> None:
        super().poke(engine, replace(file, reopen_path=f"/proc/self/fd/{file.fd}"), offset, data)


class TestMemory(StorageEngineTests):
    def make_engine(self, file: SpoolFile, threads: int | None = None) -> StorageEngine:
        return MemoryEngine(file, threads=threads)

    def peek(self, engine: StorageEngine, file: SpoolFile, offset: int, length: int) -> bytes:
        assert isinstance(engine, MemoryEngine)
        return engine.peek(offset, length)

    def poke(self, engine: StorageEngine, file: SpoolFile, offset: int, data: bytes) -> None:
        assert isinstance(engine, MemoryEngine)
        engine.poke(offset, data)


class TestShort(StorageEngineTests):
    def make_engine(self, file: SpoolFile, threads: int | None = None) -> StorageEngine:
        return ShortEngine(file, threads=threads)


@pytest.mark.parametrize("name", ENGINES)
def test_every_name_makes_the_engine_of_that_name(file: SpoolFile, name: str) -> None:
    try:
        engine = create_engine(name, file, threads=1)
    except EngineUnavailableError as exc:
        if name in {"aiofiles", "gds", "uring"} and str(exc).startswith(f"engine='{name}': "):
            pytest.skip(str(exc))
        raise  # other engines are always there
    assert engine.capabilities.name == name
    engine.close()


def test_an_unknown_name_is_refused_with_the_known_ones(file: SpoolFile) -> None:
    with pytest.raises(ConfigError, match=r"engine='nvme'.*posix"):
        create_engine("nvme", file)


def test_auto_names_its_engine_and_the_reason(file: SpoolFile) -> None:
    engine, reason = choose_engine(file, threads=1)
    engine.close()
    first = next(name for name in AUTO_ORDER if f"not {name}" not in reason)
    assert engine.capabilities.name == first
    assert reason.startswith(f"{first}: a write and a read")
    assert "came back equal" in reason
    assert ("O_DIRECT" in reason) == file.direct


def test_auto_falls_back_from_an_engine_that_lies(file: SpoolFile, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiofiles")
    monkeypatch.setattr("actoffload.storage.engines.AUTO_ORDER", ("posix", "aiofiles"))
    monkeypatch.setattr(PosixEngine, "_transfer_once", lambda self, kind, views, offset: sum(map(len, views)))
    engine, reason = choose_engine(file, threads=1)
    engine.close()
    assert engine.capabilities.name == "aiofiles"
    assert "not posix: the trial read back other bytes" in reason


def test_auto_fails_when_nothing_works(file: SpoolFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actoffload.storage.engines.AUTO_ORDER", ("posix",))
    monkeypatch.setattr(PosixEngine, "_transfer_once", lambda self, kind, views, offset: 0)
    monkeypatch.setattr("actoffload.storage.engines.queued._MAX_STALLS", 3)
    with pytest.raises(EngineUnavailableError, match="posix: the trial write failed"):
        choose_engine(file, threads=1)
