"""The spool: extents, transfers, ordering, books."""

from __future__ import annotations

import gc
import os
import stat
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from actoffload.errors import EngineUnavailableError, OffloaderClosedError, SpoolFullError, SpoolPathError, StateError
from actoffload.storage import spool_files as paths
from actoffload.storage.engines.posix import PosixEngine
from actoffload.storage.spool import Extent, Spool, Transfer
from actoffload.testing.engine_suite import WAIT_S, Memory, peek_file, random_bytes
from actoffload.testing.faults import GateEngine
from tests.spools import BLOCK, MIB, MakeSpool, get, put


def gate_of(spool: Spool) -> GateEngine:
    (engine,) = spool.engines
    assert isinstance(engine, GateEngine)
    return engine


@pytest.mark.parametrize("engine", ["auto", "posix", "aiofiles", "memory"])
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("length", [BLOCK, MIB, 3 * MIB + BLOCK])
def test_written_bytes_come_back(make_spool: MakeSpool, engine: str, verify: bool, length: int) -> None:
    if engine == "aiofiles":
        pytest.importorskip("aiofiles")
    spool = make_spool(engine=engine, verify=verify, capacity_bytes=16 * MIB)
    blobs = [random_bytes(length, seed) for seed in range(3)]
    extents = [put(spool, blob) for blob in blobs]
    assert [get(spool, extent, length) for extent in reversed(extents)] == blobs[::-1]
    for extent in extents:
        spool.free(extent)
    found = spool.statistics()
    assert (found.written_bytes, found.read_bytes) == (3 * length, 3 * length)
    assert (found.allocated_bytes, found.busy_extents) == (0, 0)
    assert found.peak_allocated_bytes == sum(extent.nbytes for extent in extents)


class _Watched(weakref.WeakSet[Spool]):
    """The spools of a disk, which no thread looks at or changes without the lock."""

    def __init__(self, spool: Spool) -> None:
        self._lock = spool.disk.lock
        with self._lock:
            super().__init__(spool.disk.users)

    def __iter__(self) -> Iterator[Spool]:
        assert self._lock.owned()
        return super().__iter__()

    def add(self, item: Spool) -> None:
        assert self._lock.owned()
        super().add(item)


@pytest.mark.parametrize("end", [Spool.close, Spool.abort, partial(Spool.abort, all_users=True)])
def test_the_lock_guards_the_spools_of_a_disk(make_spool: MakeSpool, end: Callable[[Spool], None]) -> None:
    first = make_spool()
    disk = first.disk
    disk.users = _Watched(first)
    second = make_spool(disk=disk)
    end(second)
    end(first)
    assert disk.closed
    assert set(weakref.WeakSet.__iter__(disk.users)) == {first, second}


def place(extent: Extent) -> tuple[str, int]:
    return extent.arena.file.path, extent.offset


@pytest.fixture
def directories(tmp_path: Path) -> list[Path]:
    found = [tmp_path / name for name in "abc"]
    for directory in found:
        directory.mkdir()
    return found


def test_each_extent_lies_whole_in_one_file_and_the_paths_take_turns(
    make_spool: MakeSpool, directories: list[Path]
) -> None:
    spool = make_spool(*directories)
    blobs = [random_bytes(3 * MIB, seed) for seed in range(6)]
    extents = [put(spool, blob) for blob in blobs]
    assert [extent.arena.file.path for extent in extents] == [str(directory) for directory in directories] * 2
    assert [peek_file(extent.arena.file, extent.offset, 3 * MIB) for extent in extents] == blobs


def test_an_extent_lies_on_the_path_with_the_shortest_queue(make_spool: MakeSpool, directories: list[Path]) -> None:
    spool = make_spool(*directories, engine=GateEngine)
    memory = Memory(4 * MIB)
    lengths = [4 * MIB, 2 * MIB, MIB, MIB, MIB, MIB]  # the queue of the third path has been shorter all the time
    paths_taken, transfers = [], []
    for length in lengths:
        extent = spool.allocate(length)
        paths_taken.append(Path(extent.arena.file.path).name)
        transfers.append(spool.write(extent, memory.address, length))
    assert paths_taken == ["a", "b", "c", "c", "b", "c"]
    assert transfers[0].cancel()
    assert Path(spool.allocate(MIB).arena.file.path).name == "a", "an ended transfer is in no queue"


def test_nothing_is_left_in_the_directory(make_spool: MakeSpool, tmp_path: Path) -> None:
    spool = make_spool()
    put(spool, bytes(MIB))
    assert list(tmp_path.iterdir()) == []
    (file,) = spool.files
    info = os.fstat(file.fd)
    assert (info.st_nlink, stat.S_IMODE(info.st_mode)) == (0, 0o600)
    assert info.st_blocks * 512 >= 4 * MIB  # reserved, not sparse
    spool.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file.fd)


def test_buffered_where_there_is_no_direct_io(make_spool: MakeSpool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    monkeypatch.delattr(os, "posix_fallocate")
    spool = make_spool()
    assert (spool.capabilities.direct, spool.capabilities.alignment) == (False, 1)
    assert "page cache" in spool.disk.engine_reason
    extent = put(spool, b"odd length")
    assert get(spool, extent, 10) == b"odd length"
    assert get(spool, extent, 3) == b"odd"


def test_the_arena_grows_at_its_end_up_to_its_capacity(make_spool: MakeSpool) -> None:
    spool = make_spool(capacity_bytes=10 * MIB)
    assert spool.statistics().arena_bytes == 4 * MIB
    large = spool.allocate(MIB), spool.allocate(9 * MIB)
    assert [extent.offset for extent in large] == [0, MIB]
    assert spool.statistics().arena_bytes == 10 * MIB
    with pytest.raises(SpoolFullError, match="nvme_budget"):
        spool.allocate(BLOCK)
    spool.free(large[1])
    pieces = [spool.allocate(3 * MIB) for _ in range(3)]
    assert place(pieces[0]) == place(large[1])
    spool.free(large[0])
    spool.free(pieces[1])
    with pytest.raises(SpoolFullError, match=f"no room for {4 * MIB} bytes in one piece"):
        spool.allocate(4 * MIB)
    assert spool.statistics().allocated_bytes == 6 * MIB


def test_a_full_path_leaves_the_work_to_other_paths(
    make_spool: MakeSpool, directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = make_spool(*directories[:2])
    real = paths.free_bytes
    monkeypatch.setattr(
        "actoffload.storage.arena.free_bytes", lambda file: 0 if file.path == str(directories[0]) else real(file)
    )
    names = [Path(spool.allocate(MIB).arena.file.path).name for _ in range(12)]
    assert (names.count("a"), names.count("b")) == (4, 8)


def test_a_read_must_wait_for_its_write(make_spool: MakeSpool) -> None:
    spool = make_spool(engine=GateEngine)
    memory, extent = Memory(BLOCK), spool.allocate(2 * BLOCK)
    with pytest.raises(StateError, match="0 valid bytes"):
        spool.read(extent, memory.address, BLOCK)
    transfer = spool.write(extent, memory.address, BLOCK)
    with pytest.raises(StateError, match="is being written"):
        spool.read(extent, memory.address, BLOCK)
    with pytest.raises(StateError, match="still being read or written"):
        spool.write(extent, memory.address, BLOCK)
    gate_of(spool).open()
    assert transfer.wait(WAIT_S)
    assert get(spool, extent, BLOCK) == memory.data
    with pytest.raises(StateError, match="4096 valid bytes"):
        spool.read(extent, memory.address, 2 * BLOCK)


def test_a_transfer_must_fit_and_be_aligned(make_spool: MakeSpool) -> None:
    spool = make_spool()
    memory, extent = Memory(2 * BLOCK), spool.allocate(BLOCK)
    for length in (0, 2 * BLOCK):
        with pytest.raises(StateError, match=f"write of {length} bytes"):
            spool.write(extent, memory.address, length)
    if not spool.capabilities.direct:
        pytest.skip("this file system has no direct I/O")
    for address, length in ((memory.address + 1, BLOCK), (memory.address, BLOCK - 1)):
        with pytest.raises(StateError, match="not multiples"):
            spool.write(extent, address, length)


def test_before_comes_for_each_request_and_on_done_once_with_no_lock_held(make_spool: MakeSpool) -> None:
    spool = make_spool(threads=3, capacity_bytes=3 * MIB)
    memory, extent, me = Memory(3 * MIB), spool.allocate(3 * MIB), threading.get_ident()
    began, seen, finished = list[int](), list[Any](), threading.Event()

    def before() -> None:
        began.append(1)
        memory.data = b"\x42" * (3 * MIB)

    def on_done(transfer: Transfer) -> None:
        seen.append((transfer.wait(0), transfer.error, threading.get_ident() == me, spool.disk.lock.owned()))
        spool.free(extent)
        spool.allocate(3 * MIB)  # the room is free by now
        finished.set()

    spool.write(extent, memory.address, 3 * MIB, before=before, on_done=on_done)
    assert finished.wait(WAIT_S)
    assert peek_file(spool.files[0], extent.offset, 3 * MIB) == memory.data
    spool.close()
    assert seen == [(True, None, False, False)]
    assert len(began) == 3


def test_a_failing_before_fails_the_transfer(make_spool: MakeSpool) -> None:
    spool = make_spool()
    memory, problem = Memory(3 * MIB), KeyError("before")

    def before() -> None:
        raise problem

    extent = spool.allocate(3 * MIB)
    transfer = spool.write(extent, memory.address, 3 * MIB, before=before)
    assert transfer.wait(WAIT_S)
    assert transfer.error is problem
    assert spool.statistics().written_bytes == spool.statistics().read_bytes
    with pytest.raises(StateError):
        spool.read(extent, memory.address, BLOCK)


def test_promote_moves_a_whole_transfer_forward(make_spool: MakeSpool) -> None:
    spool = make_spool(engine=partial(GateEngine, threads=1))
    gate = gate_of(spool)
    gate.open()
    extents = [put(spool, bytes([index]) * (2 * MIB)) for index in range(2)]
    gate.shut()
    gate.started.clear()
    targets = [Memory(2 * MIB) for _ in extents]
    transfers = [spool.read(extent, target.address, 2 * MIB) for extent, target in zip(extents, targets, strict=True)]
    transfers[1].promote()
    gate.open()
    assert all(transfer.wait(WAIT_S) for transfer in transfers)
    expected = [extent.offset + begin for extent in (extents[1], extents[0]) for begin in (0, MIB)]
    assert [request.offset for request in gate.started] == expected


def test_double_free_is_refused(make_spool: MakeSpool) -> None:
    spool = make_spool()
    extent = spool.allocate(BLOCK)
    spool.free(extent)
    with pytest.raises(StateError, match="twice"):
        spool.free(extent)
    with pytest.raises(StateError, match="is freed"):
        spool.write(extent, Memory(BLOCK).address, BLOCK)


def test_free_does_not_wait_for_the_lock(make_spool: MakeSpool) -> None:
    """A finalizer may run in the very thread that holds the lock."""
    spool = make_spool(engine=GateEngine)
    memory = Memory(BLOCK)
    extents = [spool.allocate(BLOCK), spool.allocate(BLOCK)]
    transfer = spool.write(extents[1], memory.address, BLOCK)
    with spool.disk.lock:
        spool.free(extents[0])
        assert transfer.cancel()
        assert spool.disk.allocated_bytes == 2 * BLOCK
    assert spool.disk.allocated_bytes == BLOCK, "the release of the lock does the work"
    found = spool.statistics()
    assert (found.allocated_bytes, found.busy_extents) == (BLOCK, 0)


@pytest.mark.parametrize("cancelled", [False, True])
def test_freed_room_is_reused_only_after_the_running_write(make_spool: MakeSpool, cancelled: bool) -> None:
    spool = make_spool(engine=GateEngine, capacity_bytes=MIB)
    running, go_on, memory, extent = threading.Event(), threading.Event(), Memory(MIB), spool.allocate(MIB)

    def before() -> None:
        running.set()
        assert go_on.wait(WAIT_S)

    write = spool.write(extent, memory.address, MIB, before=before)
    gate_of(spool).open()
    assert running.wait(WAIT_S)
    if cancelled:
        assert write.cancel()
    spool.free(extent)
    with pytest.raises(SpoolFullError):
        spool.allocate(BLOCK)
    go_on.set()
    assert write.wait(WAIT_S)
    assert place(spool.allocate(MIB)) == place(extent)


def test_freed_room_is_poisoned(make_spool: MakeSpool) -> None:
    spool = make_spool(poison=True, capacity_bytes=4 * MIB)
    extent = put(spool, b"\x01" * (4 * MIB))
    spool.free(extent)
    again = spool.allocate(4 * MIB)
    assert place(again) == place(extent)
    assert peek_file(spool.files[0], again.offset, 4 * MIB) == b"\xff" * (4 * MIB)


def test_an_end_that_comes_twice_gives_the_room_back_once(make_spool: MakeSpool) -> None:
    """At the second time, the extent or its room may belong to another transfer."""
    spool = make_spool(engine=GateEngine, capacity_bytes=MIB)
    memory, extent = Memory(MIB, fill=0x5A), spool.allocate(MIB)
    first = spool.write(extent, memory.address, MIB)
    assert first.cancel()
    second = spool.write(extent, memory.address, MIB)
    assert first.cancel()
    gate_of(spool).open()
    assert second.wait(WAIT_S)
    assert first.cancel()
    assert get(spool, extent, MIB) == memory.data
    spool.free(extent)
    again = spool.allocate(MIB)
    assert first.cancel()
    assert (spool.statistics().allocated_bytes, spool.statistics().busy_extents) == (MIB, 0)
    assert place(again) == place(extent)


def test_close_finishes_and_refuses_more(make_spool: MakeSpool) -> None:
    spool = make_spool()
    memory, extent = Memory(MIB), spool.allocate(MIB)
    transfer = spool.write(extent, memory.address, MIB)
    spool.close()
    assert (transfer.wait(0), transfer.error) == (True, None)
    spool.close()
    spool.abort()
    spool.free(extent)
    for call in (lambda: spool.allocate(1), lambda: spool.write(extent, memory.address, MIB)):
        with pytest.raises(OffloaderClosedError):
            call()
    assert spool.statistics().written_bytes == MIB


def test_abort_cancels_and_wakes_waiting_threads(make_spool: MakeSpool) -> None:
    spool = make_spool(engine=GateEngine)
    memory, called = Memory(MIB), threading.Event()
    transfer = spool.write(spool.allocate(MIB), memory.address, MIB, on_done=lambda _: called.set())
    waiter = threading.Thread(target=transfer.wait)
    waiter.start()
    spool.abort()
    waiter.join(WAIT_S)
    assert not waiter.is_alive()
    assert isinstance(transfer.error, OffloaderClosedError)
    assert not called.is_set()
    assert spool.statistics().written_bytes == 0


@pytest.mark.parametrize("engine", ["posix", "uring", "aiofiles", "memory"])
@pytest.mark.parametrize("held", ["spool", "engine"])
def test_abort_works_where_an_interrupt_left_a_lock_held(make_spool: MakeSpool, engine: str, held: str) -> None:
    others = threading.enumerate()
    try:
        spool = make_spool(engine=engine)
    except EngineUnavailableError as exc:
        pytest.skip(str(exc))
    memory, threads = Memory(MIB), [thread for thread in threading.enumerate() if thread not in others]
    transfers = [spool.write(spool.allocate(MIB), memory.address, MIB) for _ in range(3)]
    lock: Any = spool.disk.lock if held == "spool" else spool.engines[0]._mutex  # type: ignore[attr-defined]
    assert lock.acquire()
    assert lock.acquire(blocking=False), "reentrant"
    spool.abort()
    assert all(transfer.wait(WAIT_S) for transfer in transfers)
    assert not any(thread.is_alive() for thread in threads)
    spool.abort()


def test_abort_ends_a_transfer_of_an_interrupted_write(make_spool: MakeSpool, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = make_spool()
    memory, extent, real = Memory(3 * MIB), spool.allocate(3 * MIB), PosixEngine.submit
    dead = weakref.ref(memory)

    def submit(engine: PosixEngine, request: Any) -> None:
        real(engine, request)
        if request.offset == MIB:
            raise KeyboardInterrupt

    monkeypatch.setattr(PosixEngine, "submit", submit)
    with pytest.raises(KeyboardInterrupt):
        spool.write(extent, memory.address, 3 * MIB, keepalive=memory)
    spool.abort()
    assert spool.statistics().busy_extents == 0
    del memory
    gc.collect()
    assert dead() is None


def test_a_write_that_meets_a_closing_engine_leaves_nothing_behind(make_spool: MakeSpool) -> None:
    spool = make_spool()
    memory, extent = Memory(2 * MIB), spool.allocate(2 * MIB)
    spool.engines[0].close()
    with pytest.raises(OffloaderClosedError):
        spool.write(extent, memory.address, 2 * MIB)
    assert spool.statistics().busy_extents == 0


# -- directories -------------------------------------------------------------------------------------------------------


def test_a_directory_without_write_permission_is_refused(
    make_spool: MakeSpool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(SpoolPathError, match="is not writable"):
        make_spool()


MOUNTS = (
    ("/tmp dir", "tmpfs"),
    ("/mnt/net", "nfs4"),
    ("/mnt/net/local", "xfs"),
    ("/mnt/ssh", "fuse.sshfs"),
    ("/mnt/ssh", "btrfs"),
)


def mounted(monkeypatch: pytest.MonkeyPatch, root: str) -> None:
    """Have the file system of the root be of a kind."""
    found = [types.SimpleNamespace(mountpoint=point, fstype=kind) for point, kind in (("/", root), *MOUNTS)]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: found)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home/me", "ext4"),
        ("/tmp dir/x", "tmpfs"),
        ("/tmp dirt", "ext4"),
        ("/mnt/net", "nfs4"),
        ("/mnt/net/local/x", "xfs"),
        ("/mnt/ssh", "btrfs"),
    ],
)
def test_the_file_system_is_that_of_the_innermost_last_mount(
    path: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted(monkeypatch, "ext4")
    assert paths.filesystem_type(path) == kind


NETWORKS = {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "lustre", "gpfs", "beegfs", "ceph", "virtiofs", "afs"}
HERE = Path("/proc/filesystems")
KNOWN = [line.split() for line in HERE.read_text().splitlines()] if HERE.exists() else []
ON_NO_DEVICE = [line[1] for line in KNOWN if line[0] == "nodev" and line[1] not in ("overlay", "zfs", "aufs", "ubifs")]


@pytest.mark.parametrize("kind", sorted({"tmpfs", "ramfs", *ON_NO_DEVICE} | NETWORKS))
def test_memory_and_network_file_systems_are_refused_by_default(
    make_spool: MakeSpool, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    mounted(monkeypatch, kind)
    with pytest.raises(SpoolPathError, match=f"is on {kind}, .*allow_any_filesystem"):
        make_spool()
    spool = make_spool(allow_any_filesystem=True)
    assert get(spool, put(spool, b"\x07" * BLOCK), BLOCK) == b"\x07" * BLOCK


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "f2fs", "apfs", "fuseblk"])
def test_local_disks_are_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    mounted(monkeypatch, kind)
    assert paths.check_directory(tmp_path) == os.path.realpath(tmp_path)


def test_overlay_is_taken_but_buffered(make_spool: MakeSpool, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted(monkeypatch, "overlay")
    assert not make_spool().capabilities.direct


def test_a_system_without_mount_table_takes_every_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [])
    assert paths.filesystem_type("/") is None
    assert paths.check_directory(tmp_path) == os.path.realpath(tmp_path)
