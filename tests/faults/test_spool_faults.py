"""The spool when the storage below fails, lies, fills up, is killed or is forked."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from actoffload.errors import (
    ChecksumError,
    EngineUnavailableError,
    SpoolFullError,
    StateError,
    StorageError,
    StorageReadError,
    StorageWriteError,
)
from actoffload.storage.engines.base import IoKind
from actoffload.storage.spool import Extent, Spool, Transfer
from actoffload.testing.engine_suite import WAIT_S, Memory, poke_file, random_bytes
from actoffload.testing.faults import FailingEngine, FullEngine, ShortEngine
from tests.harness import run_in_threads
from tests.spools import BLOCK, MIB, MakeSpool, get, put

ROOT = Path(__file__).resolve().parents[2]


def failure(start: Callable[..., Transfer], extent: Extent, nbytes: int) -> BaseException | None:
    """The error of a write or a read, also after ``on_done``; None if there is none."""
    called, memory = threading.Event(), Memory(nbytes)
    transfer = start(extent, memory.address, nbytes, on_done=lambda _: called.set(), keepalive=memory)
    assert called.wait(WAIT_S)
    assert transfer.wait(0)
    return transfer.error


def assert_write_error(error: BaseException | None, number: int, path: str) -> None:
    assert isinstance(error, StorageWriteError)
    assert error.errno == number
    assert error.filename == path
    assert isinstance(error.__cause__, OSError)
    assert errno.errorcode[number] in str(error)
    assert "offset" in str(error)


def test_a_full_disk_fails_the_write_and_leaves_the_rest_alone(make_spool: MakeSpool, tmp_path: Path) -> None:
    spool = make_spool(engine=partial(FullEngine, threads=1, capacity_bytes=2 * MIB + BLOCK))
    data = random_bytes(2 * MIB, 1)
    first, second = put(spool, data), spool.allocate(MIB)
    assert_write_error(failure(spool.write, second, MIB), errno.ENOSPC, str(tmp_path))
    with pytest.raises(StateError, match="0 valid bytes"):
        spool.read(second, 0, MIB)
    spool.free(second)
    assert get(spool, first, 2 * MIB) == data


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_to_grow_is_a_full_spool(make_spool: MakeSpool, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    spool = make_spool(engine="posix")
    attempts = []

    def refuse(fd: int, offset: int, length: int) -> None:
        attempts.append(length)
        os.ftruncate(fd, offset + length // 2)  # as the kernel does it: a part stays allocated
        raise OSError(number, os.strerror(number))

    spool.allocate(4 * MIB)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    for _ in range(2):
        with pytest.raises(SpoolFullError) as caught:
            spool.allocate(MIB)
        assert caught.value.errno == number
        assert isinstance(caught.value.__cause__, StorageError)
    assert len(attempts) == 1  # not again until something has changed
    assert os.fstat(spool.files[0].fd).st_size == 4 * MIB
    assert spool.statistics().allocated_bytes == 4 * MIB


def test_no_room_at_all_is_found_at_the_start(make_spool: MakeSpool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actoffload.storage.arena.free_bytes", lambda file: 0)
    fds = set(os.listdir("/proc/self/fd"))
    threads = set(threading.enumerate())
    with pytest.raises(SpoolFullError, match="free disk space"):
        make_spool(engine="posix")
    assert set(os.listdir("/proc/self/fd")) == fds
    assert set(threading.enumerate()) <= threads


def test_a_failing_write_is_an_error_with_all_facts(make_spool: MakeSpool, tmp_path: Path) -> None:
    spool = make_spool(engine=partial(FailingEngine, first=2, count=1, error_number=errno.EIO))
    extent = spool.allocate(3 * MIB)
    assert_write_error(failure(spool.write, extent, 3 * MIB), errno.EIO, str(tmp_path))
    with pytest.raises(StateError):
        spool.read(extent, 0, BLOCK)
    assert failure(spool.write, extent, 3 * MIB) is None  # the extent itself is not lost


def test_a_failing_read_is_an_error_with_all_facts(make_spool: MakeSpool, tmp_path: Path) -> None:
    spool = make_spool(engine=partial(FailingEngine, kind=IoKind.READ, first=2, count=1))
    extent = put(spool, bytes(3 * MIB))
    error = failure(spool.read, extent, 3 * MIB)
    assert isinstance(error, StorageReadError)
    assert (error.errno, error.filename) == (errno.EIO, str(tmp_path))
    assert f"read of {MIB} bytes at offset" in str(error)
    assert failure(spool.read, extent, 3 * MIB) is None


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
@pytest.mark.parametrize("kind", list(IoKind))
def test_interruptions_are_tried_again(make_spool: MakeSpool, number: int, kind: IoKind) -> None:
    spool = make_spool(engine=partial(FailingEngine, kind=kind, count=5, error_number=number))
    data = random_bytes(2 * MIB, 2)
    assert get(spool, put(spool, data), 2 * MIB) == data
    (engine,) = spool.engines
    assert isinstance(engine, FailingEngine)
    assert engine.calls == 2 + 5


def test_endless_interruptions_are_an_error(make_spool: MakeSpool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actoffload.storage.engines.queued._MAX_STALLS", 5)
    spool = make_spool(engine=partial(FailingEngine, error_number=errno.EAGAIN))
    error = failure(spool.write, spool.allocate(BLOCK), BLOCK)
    assert isinstance(error, StorageError)
    assert error.errno == errno.EAGAIN
    assert "no progress in 6 attempts" in str(error)


def test_odd_short_transfers_of_a_direct_file_continue_on_a_boundary(make_spool: MakeSpool) -> None:
    offsets: list[int] = []

    class OddEngine(ShortEngine):
        def _transfer_once(self, kind: IoKind, views: list[memoryview], offset: int) -> int:
            offsets.append(offset)
            moved = super()._transfer_once(kind, views, offset)
            return moved - 512 if moved > BLOCK else moved

    spool = make_spool(engine=partial(OddEngine, most_bytes=4 * BLOCK))
    if not spool.capabilities.direct:
        pytest.skip("this file system has no direct I/O")
    data = random_bytes(MIB, 4)
    assert get(spool, put(spool, data), MIB) == data
    assert len(offsets) > 2 * MIB // (4 * BLOCK)
    assert not [offset for offset in offsets if offset % spool.capabilities.alignment]


@pytest.mark.parametrize("position", [0, MIB - 1, MIB, 3 * MIB - 1])
def test_verify_finds_bytes_that_changed_on_disk(make_spool: MakeSpool, tmp_path: Path, position: int) -> None:
    spool = make_spool(engine="posix", verify=True)
    extent = put(spool, b"\x5a" * (3 * MIB))
    assert failure(spool.read, extent, 3 * MIB) is None
    poke_file(spool.files[0], extent.offset + position, b"\x5b")
    error = failure(spool.read, extent, 3 * MIB)
    assert isinstance(error, ChecksumError)
    assert error.filename == str(tmp_path)
    assert f"at offset {extent.offset + position // MIB * MIB} " in str(error)


# A package without its __init__: these processes start many times, and storage needs no torch (seconds to import).
PRELUDE = """
import ctypes, mmap, os, sys, types
sys.modules["actoffload"] = types.ModuleType("actoffload")
sys.modules["actoffload"].__path__ = [os.path.join(sys.argv[1], "actoffload")]
"""
CHILD = f"""{PRELUDE}
if sys.argv[3] == "named":
    del os.O_TMPFILE
from actoffload.storage.spool import Spool
spool = Spool([sys.argv[2]], grow_bytes=4 << 20)
memory = mmap.mmap(-1, 1 << 20)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
spool.write(spool.allocate(1 << 20), address, 1 << 20).wait()
queued = [spool.write(spool.allocate(1 << 20), address, 1 << 20) for _ in range(20)]
print("written", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["tmpfile", "named"])
def test_a_killed_process_leaves_no_file(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-c", CHILD, str(ROOT), str(tmp_path), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "written\n"
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait(WAIT_S) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


FORK = (
    PRELUDE
    + """
from actoffload.errors import OffloaderClosedError
from actoffload.storage.spool import Spool
from actoffload.testing.faults import GateEngine

spool = Spool([sys.argv[2]], engine=GateEngine if sys.argv[3] == "gate" else sys.argv[3], grow_bytes=4 << 20)
os.register_at_fork(after_in_child=spool.after_fork_in_child)
memory = mmap.mmap(-1, 2 << 20)
memory[: 1 << 20] = bytes(range(256)) * 4096
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
extent = spool.allocate(1 << 20)
transfer = spool.write(extent, address, 1 << 20)
inode = os.fstat(spool.files[0].fd).st_ino
lock = spool.disk.lock.acquire() and spool.disk.lock  # as if another thread held it while we fork
child = os.fork()
if child == 0:
    status = 1
    try:
        links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        assert not [link for link in links if sys.argv[2] in link], links
        assert transfer.wait(0) or sys.argv[3] != "gate"
        try:
            spool.allocate(1)
        except OffloaderClosedError:
            spool.free(extent)
            spool.statistics()
            spool.close()
            spool.abort()
            spool.after_fork_in_child()
            status = 0
    finally:
        os._exit(status)
lock.release()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
if sys.argv[3] == "gate":
    assert not transfer.wait(0)
    spool.engines[0].open()
assert transfer.wait(60) and transfer.error is None
again = spool.read(extent, address + (1 << 20), 1 << 20)
assert again.wait(60) and again.error is None
assert memory[: 1 << 20] == memory[1 << 20 :]
assert os.fstat(spool.files[0].fd).st_ino == inode
spool.close()
print("fine")
"""
)


@pytest.mark.parametrize("engine", ["gate", "posix", "uring", "aiofiles"])
def test_a_forked_child_lets_go_and_the_parent_goes_on(tmp_path: Path, engine: str) -> None:
    if engine != "gate":
        try:
            Spool([tmp_path], engine=engine).close()
        except EngineUnavailableError as exc:
            pytest.skip(str(exc))
    command = [sys.executable, "-c", FORK, str(ROOT), str(tmp_path), engine]
    found = subprocess.run(command, capture_output=True, text=True, timeout=2 * WAIT_S, check=False)
    assert (found.returncode, found.stdout) == (0, "fine\n"), found.stderr


@pytest.mark.parametrize("engine", ["auto", "posix"])
def test_random_cancels_and_frees_never_mix_bytes_up(make_spool: MakeSpool, engine: str) -> None:
    """Cancelled writes and early frees, from two threads, on an arena that is always nearly full."""
    spool = make_spool(engine=engine, capacity_bytes=8 * MIB, threads=3, poison=False)
    run_in_threads(partial(churn, spool, 1), partial(churn, spool, 2))
    found = spool.statistics()
    assert (found.allocated_bytes, found.busy_extents) == (0, 0)


def churn(spool: Spool, seed: int) -> None:
    """Writes extents, cancels every third write, and reads the other extents back."""
    for turn in range(40):
        memory = Memory(2 * MIB, fill=(seed * 97 + turn * 7) % 251 + 1)
        if turn % 3:
            extent = put(spool, memory.data)
            assert get(spool, extent, 2 * MIB) == memory.data, f"turn {turn}"
            spool.free(extent)
            continue
        extent = spool.allocate(2 * MIB)
        transfer = spool.write(extent, memory.address, 2 * MIB, keepalive=memory)
        transfer.cancel()
        spool.free(extent)
        assert transfer.wait(WAIT_S)
