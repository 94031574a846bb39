"""The GPUDirect Storage engine on a stand-in of ``kvikio`` and ``cupy`` whose device memory is host memory."""

from __future__ import annotations

import ctypes
import errno
import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actoffload.errors import EngineUnavailableError, StorageReadError, StorageWriteError
from actoffload.storage.engines import create_engine
from actoffload.storage.engines import gds as gds_module
from actoffload.storage.engines.base import IoKind, SpoolFile, StorageEngine
from actoffload.storage.engines.gds import PAGE_BYTES, GdsEngine, why_compat
from actoffload.testing.engine_suite import BLOCK, Memory, StorageEngineTests, peek_file, random_bytes
from actoffload.tools.doctor import gpudirect_storage
from tests.spools import in_child, move

Transfer = Callable[[int, int, int, int], int]  # descriptor, address, bytes, offset


def really_write(fd: int, address: int, nbytes: int, offset: int) -> int:
    return os.pwrite(fd, ctypes.string_at(address, nbytes), offset)


def really_read(fd: int, address: int, nbytes: int, offset: int) -> int:
    data = os.pread(fd, nbytes, offset)
    ctypes.memmove(address, data, len(data))
    return len(data)


class CuFile:
    """``kvikio.CuFile`` with two descriptors, as the real one. A transfer runs, and fails, when ``get`` is called."""

    def __init__(self, kvikio: StandIn, path: str, flags: str) -> None:
        assert flags == "r+"
        if kvikio.open_error is not None:
            raise kvikio.open_error
        self._kvikio = kvikio
        self._fds = [os.open(path, os.O_RDWR) for _ in range(2)]
        kvikio.opened.append(self)

    def fileno(self) -> int:
        return self._fds[0]

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    @property
    def closed(self) -> bool:
        return not self._fds

    def pread(self, buf: Any, size: int, file_offset: int) -> Any:
        return self._transfer(self._kvikio.read, buf, size, file_offset)

    def pwrite(self, buf: Any, size: int, file_offset: int) -> Any:
        return self._transfer(self._kvikio.write, buf, size, file_offset)

    def _transfer(self, transfer: Transfer, buf: Any, size: int, file_offset: int) -> Any:
        seen = buf.__cuda_array_interface__
        assert (seen["shape"], seen["typestr"], seen["strides"]) == ((size,), "|u1", None)
        return SimpleNamespace(get=lambda: transfer(self._fds[0], seen["data"][0], size, file_offset))


class StandIn:
    """The parts of ``kvikio`` that the engine uses."""

    def __init__(self) -> None:
        self.__spec__ = importlib.machinery.ModuleSpec("kvikio", None)
        self.CuFile = partial(CuFile, self)
        self.open_error: Exception | None = None
        self.opened: list[CuFile] = []
        self.read: Transfer = really_read
        self.write: Transfer = really_write
        self.settings = {"num_threads": 1}
        self.prefers_compat = False
        self.gds_available = True


class DeviceMemory:
    """``cupy.cuda.MemoryPointer``."""

    def __init__(self, nbytes: int) -> None:
        self._memory = ctypes.create_string_buffer(nbytes)
        self.ptr = ctypes.addressof(self._memory)

    def copy_from_host(self, source: ctypes.c_void_p, nbytes: int) -> None:
        ctypes.memmove(self.ptr, source, nbytes)

    def copy_to_host(self, target: ctypes.c_void_p, nbytes: int) -> None:
        ctypes.memmove(target, self.ptr, nbytes)


@pytest.fixture
def kvikio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A machine with a device, cuFile and the kernel module."""
    kvikio = StandIn()
    defaults = SimpleNamespace(
        get=kvikio.settings.__getitem__,
        set=kvikio.settings.__setitem__,
        is_compat_mode_preferred=lambda: kvikio.prefers_compat,
    )
    driver = SimpleNamespace(get=lambda name: {"is_gds_available": kvikio.gds_available}[name])
    cupy = SimpleNamespace(cuda=SimpleNamespace(alloc=DeviceMemory))
    modules = {"kvikio": kvikio, "kvikio.defaults": defaults, "kvikio.cufile_driver": driver, "cupy": cupy}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(gds_module, "_KERNEL_MODULE", tmp_path)
    return kvikio


@pytest.fixture
def engine(file: SpoolFile, kvikio: StandIn) -> Iterator[GdsEngine]:
    engine = GdsEngine(file, threads=1)
    yield engine
    engine.abort()


class TestGdsOnAStandIn(StorageEngineTests):
    @pytest.fixture(autouse=True)
    def with_the_stand_in(self, kvikio: StandIn) -> None:
        pass

    def make_engine(self, file: SpoolFile, threads: int | None = None) -> StorageEngine:
        return GdsEngine(file, threads=threads)


def test_it_is_tried_with_device_memory_and_leaves_no_trace(file: SpoolFile, kvikio: StandIn) -> None:
    os.ftruncate(file.fd, BLOCK + 512)
    tried: list[Any] = []

    def noting(name: str, transfer: Transfer) -> Transfer:
        def run(*arguments: int) -> int:
            tried.append((name, *arguments[2:]))
            return transfer(*arguments)

        return run

    kvikio.read, kvikio.write = noting("read", really_read), noting("write", really_write)
    engine = create_engine("gds", file)
    assert tried == [("write", 64 << 10, 2 * PAGE_BYTES), ("read", 64 << 10, 2 * PAGE_BYTES)]
    assert os.fstat(file.fd).st_size == BLOCK + 512
    assert engine.capabilities.direct == file.direct
    assert engine.capabilities.alignment == 1
    assert engine.capabilities.device_memory
    assert engine.remark == "GPUDirect Storage, past host memory"
    assert kvikio.settings["num_threads"] == engine.capabilities.threads > 1
    engine.close()
    engine.close()
    assert [each.closed for each in kvikio.opened] == [True]


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        ("module", "the kernel module nvidia-fs is not loaded"),
        ("preferred", "kvikio prefers it here (KVIKIO_COMPAT_MODE, or no cuFile)"),
        ("cufile", "cuFile says that GPUDirect Storage is not available"),
        ("silent", "cuFile does not answer: division by zero"),
    ],
)
def test_compatibility_mode_is_reported_and_never_called_direct(
    file: SpoolFile, kvikio: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str, reason: str
) -> None:
    assert why_compat() == ""
    kvikio.prefers_compat = cause == "preferred"
    kvikio.gds_available = cause != "cufile"
    if cause == "module":
        monkeypatch.setattr(gds_module, "_KERNEL_MODULE", tmp_path / "absent")
    if cause == "silent":
        monkeypatch.setattr(sys.modules["kvikio.cufile_driver"], "get", lambda name: 1 / 0)
    assert why_compat() == reason
    engine = GdsEngine(file)
    assert engine.remark == f"compatibility mode, through host memory: {reason}"
    assert not engine.capabilities.direct
    source, target = Memory(BLOCK, fill=3), Memory(BLOCK)
    assert move(engine, IoKind.WRITE, source).error is None
    assert move(engine, IoKind.READ, target).error is None
    assert target.data == source.data == peek_file(file, 0, BLOCK)
    engine.close()


def test_doctor_reports_whether_the_driver_offers_it(kvikio: StandIn) -> None:
    assert gpudirect_storage() == {"available": True, "reason": "the engine reads and writes past host memory"}
    kvikio.gds_available = False
    found = gpudirect_storage()
    assert not found["available"]
    assert found["reason"] == "only kvikio's compatibility mode: cuFile says that GPUDirect Storage is not available"


def wrong_bytes(fd: int, address: int, nbytes: int, offset: int) -> int:
    found = really_read(fd, address, nbytes, offset)
    ctypes.memset(address + nbytes - 1, 0x55, 1)
    return found


def failing(fd: int, address: int, nbytes: int, offset: int) -> int:
    raise RuntimeError("cuFile error at: cufile.cpp:123: CU_FILE_IO_ERROR\nmore lines")


@pytest.mark.parametrize(
    ("way", "transfer", "reason"),
    [
        ("read", wrong_bytes, "the trial read back other bytes than it wrote"),
        ("read", lambda *_: 0, "the trial read failed: .*the file ends"),
        ("write", lambda fd, address, nbytes, offset: nbytes, "the trial read failed: .*the file ends"),
        ("write", failing, r"the trial write failed: .*CU_FILE_IO_ERROR \(EIO\)"),
    ],
)
def test_a_trial_that_goes_wrong_makes_it_unavailable(
    file: SpoolFile, kvikio: StandIn, way: str, transfer: Transfer, reason: str
) -> None:
    setattr(kvikio, way, transfer)
    with pytest.raises(EngineUnavailableError, match=reason):
        create_engine("gds", file)
    assert [each.closed for each in kvikio.opened] == [True]
    assert os.fstat(file.fd).st_size == 0


def test_the_error_names_a_missing_driver_or_device(file: SpoolFile, kvikio: StandIn) -> None:
    def no_device(nbytes: int) -> DeviceMemory:
        raise RuntimeError("cudaErrorInsufficientDriver: no driver\nmore lines")

    sys.modules["cupy"].cuda.alloc = no_device
    with pytest.raises(EngineUnavailableError, match=r"no device memory to try it with: cudaError\w+: no driver; use"):
        create_engine("gds", file)
    kvikio.open_error = RuntimeError("libcuda.so.1: cannot open shared object file")
    with pytest.raises(EngineUnavailableError, match=r"kvikio does not open a file: libcuda"):
        create_engine("gds", file)
    assert [each.closed for each in kvikio.opened] == [True]


@pytest.mark.parametrize(("kind", "cls"), [(IoKind.READ, StorageReadError), (IoKind.WRITE, StorageWriteError)])
def test_an_error_of_a_transfer_names_place_and_cause(
    engine: GdsEngine, file: SpoolFile, kvikio: StandIn, kind: IoKind, cls: type[OSError]
) -> None:
    kvikio.read = kvikio.write = failing
    error = move(engine, kind, Memory(BLOCK)).error
    assert isinstance(error, cls)
    assert (error.errno, error.filename) == (errno.EIO, file.path)
    assert "CU_FILE_IO_ERROR" in str(error)
    assert "more lines" not in str(error)


def test_a_forked_child_closes_both_descriptors_and_no_other(engine: GdsEngine, file: SpoolFile) -> None:
    inode = os.fstat(file.fd).st_ino

    def child() -> None:
        engine.after_fork_in_child()
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        assert [os.stat(link).st_ino for link in links if os.path.exists(link)].count(inode) == 1
        assert os.fstat(file.fd).st_ino == inode, "the spool closes its own"

    assert in_child(child) == 0
    source = Memory(BLOCK)
    source.data = random_bytes(BLOCK, 5)
    assert move(engine, IoKind.WRITE, source).error is None
