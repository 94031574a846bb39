"""The memory that the process may use: cgroup limits, ranks, and nodes of memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actoffload import OffloadConfig, Offloader
from actoffload.errors import SpoolFullError
from actoffload.memory import numa
from actoffload.memory import process_memory as memory
from actoffload.storage.spool import Spool
from actoffload.storage.transfers import crc32
from actoffload.tiers import processes as ranks
from tests.harness import run_in_threads, spool_statistics

MIB = 1 << 20
LAUNCHERS = (*ranks._LOCAL_SIZES, "WORLD_SIZE")


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "group", "expected"),
    [
        ({}, None, 1),
        ({}, 4, 4),  # started by hand
        ({"LOCAL_WORLD_SIZE": ""}, None, 1),
        ({"LOCAL_WORLD_SIZE": "many"}, None, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, None, 8),
        ({"LOCAL_WORLD_SIZE": "1"}, 4, 1),  # torchrun decides
        ({"LOCAL_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 8, 2),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 8, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, 4, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "3,4(x2)"}, 11, 4),
        ({"WORLD_SIZE": "16"}, None, 1),  # the number of machines is unknown
    ],
)
@pytest.mark.usefixtures("no_launcher")
def test_how_many_processes_share_the_machine(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], group: int | None, expected: int
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr("actoffload.tiers.processes.dist.is_initialized", lambda: group is not None)
    monkeypatch.setattr("actoffload.tiers.processes.dist.get_world_size", lambda: group)
    assert ranks.processes_here() == expected


# -- shares by the number of processes ---------------------------------------------------------------------------------


def _tiers(monkeypatch: pytest.MonkeyPatch, path: Path, processes: str, **options: Any) -> Offloader:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    monkeypatch.setattr("actoffload.tiers.tiers._budgets", {})  # of other tests' stores
    monkeypatch.setattr("actoffload.tiers.tiers.available_bytes", lambda: 64 * MIB)
    monkeypatch.setattr("actoffload.storage.arena.free_bytes", lambda file: 48 * MIB)
    return Offloader(OffloadConfig(target="nvme", path=path, **options))


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_default_budgets_are_divided_by_the_processes_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, processes: int
) -> None:
    offloader = _tiers(monkeypatch, tmp_path, str(processes))
    (pool,) = offloader.store.tiers.pools
    assert pool.capacity_bytes == 32 * MIB // processes
    spool = spool_statistics(offloader)
    assert spool.capacity_bytes == (None if processes == 1 else 48 * MIB // processes)
    assert spool.arena_bytes == 48 * MIB // processes
    offloader.close()


def test_a_budget_that_is_set_is_not_divided_by_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("actoffload.tiers.tiers.processes_here", lambda: pytest.fail("asked"))
    offloader = _tiers(monkeypatch, tmp_path, "4", host_budget="10MiB", nvme_budget="40MiB")
    (pool,) = offloader.store.tiers.pools
    assert pool.capacity_bytes == 10 * MIB
    assert spool_statistics(offloader).capacity_bytes == 40 * MIB
    offloader.close()


def test_paths_on_one_disk_share_one_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("actoffload.storage.arena.free_bytes", lambda file: 48 * MIB)
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.mkdir()
    spool = Spool(paths, processes=3, grow_bytes=4 * MIB)
    assert spool.statistics().capacity_bytes == 16 * MIB
    extents = [spool.allocate(MIB) for _ in range(16)]
    with pytest.raises(SpoolFullError, match="share of the free disk space"):
        spool.allocate(MIB)
    del extents
    spool.close()


def _fake_files(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    def read_text(self: Path, *args: object, **kwargs: object) -> str:
        try:
            return files[str(self)]
        except KeyError:
            raise FileNotFoundError(str(self)) from None

    monkeypatch.setattr(Path, "read_text", read_text)


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"/sys/fs/cgroup/memory.max": "max\n"}, None),
        ({"/sys/fs/cgroup/memory.max": "1073741824\n"}, 1 << 30),
        (
            {
                "/proc/self/cgroup": "0::/user.slice/job\n",
                "/sys/fs/cgroup/memory.max": "max\n",
                "/sys/fs/cgroup/user.slice/job/memory.max": "4096\n",
            },
            4096,
        ),
        (
            {
                "/proc/self/cgroup": "5:cpu,cpuacct:/a\n3:memory:/docker/b\n",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),  # v1's word for "no limit"
                "/sys/fs/cgroup/memory/docker/b/memory.limit_in_bytes": "8192",
            },
            8192,
        ),
        ({"/sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096)}, None),
    ],
)
def test_cgroup_limits(monkeypatch: pytest.MonkeyPatch, files: dict[str, str], limit: int | None) -> None:
    _fake_files(monkeypatch, files)
    assert memory.cgroup_limit_bytes() == limit


def test_memory_of_other_processes_in_the_cgroup_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, process = SimpleNamespace(available=1 << 40), SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=MIB))
    monkeypatch.setattr("actoffload.memory.process_memory.psutil.virtual_memory", lambda: machine)
    monkeypatch.setattr("actoffload.memory.process_memory.psutil.Process", lambda: process)
    _fake_files(
        monkeypatch,
        {
            "/sys/fs/cgroup/memory.max": str(100 * MIB),
            "/sys/fs/cgroup/memory.current": str(90 * MIB),
            "/sys/fs/cgroup/memory.stat": f"anon {10 * MIB}\ninactive_file {30 * MIB}\n",
        },
    )
    assert memory.available_bytes() == 40 * MIB
    _fake_files(monkeypatch, {"/sys/fs/cgroup/memory.max": str(100 * MIB)})
    assert memory.available_bytes() == 99 * MIB  # this cgroup does not count the other processes
    _fake_files(
        monkeypatch,
        {
            "/sys/fs/cgroup/memory/memory.limit_in_bytes": str(100 * MIB),
            "/sys/fs/cgroup/memory/memory.usage_in_bytes": str(95 * MIB),
            "/sys/fs/cgroup/memory/memory.stat": f"cache 1\ntotal_inactive_file {5 * MIB}\n",
        },
    )
    assert memory.available_bytes() == 10 * MIB


def test_a_checksum_of_memory_that_is_gone_is_an_error_and_no_crash() -> None:
    memory = mmap.mmap(-1, 3 << 20)
    memory[:] = bytes(range(256)) * (len(memory) // 256)
    anchor = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(anchor)
    del anchor
    assert crc32([(address + 5, (2 << 20) + 7)]) == zlib.crc32(memory[5 : (2 << 20) + 12])
    pieces = [(address + 7, 9), (address, 3), (address + 11, (1 << 20) + 1)]
    expected = b"".join(memory[begin - address : begin - address + length] for begin, length in pieces)
    assert crc32(pieces) == zlib.crc32(expected)
    memory.close()  # unmapped: a load there would end the process
    with pytest.raises(OSError, match=r"cannot be read|Input/output error|Bad address"):
        crc32([(address + 5, 2 << 20)])


# -- nodes of memory ---------------------------------------------------------------------------------------------------


ADDRESS = "0000:3b:00.0"


@pytest.fixture
def mine() -> set[int]:
    """The CPUs on which this thread may run."""
    return os.sched_getaffinity(0)


def _stayed(cpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str = ADDRESS) -> set[int]:
    """The CPUs of a thread that stays near a device to which ``cpus`` are local."""
    (tmp_path / ADDRESS).mkdir()
    (tmp_path / ADDRESS / "local_cpulist").write_text(f"{cpus}\n")
    monkeypatch.setattr(numa, "PCI_DEVICES", tmp_path)
    found: list[set[int]] = []

    def stay() -> None:
        numa.stay_near(address)
        found.append(os.sched_getaffinity(0))

    run_in_threads(stay)
    return found[0]


def test_a_thread_stays_near_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: set[int]) -> None:
    cpu = min(mine)
    assert _stayed(f"{cpu},100000-100003", tmp_path, monkeypatch) == {cpu}
    assert os.sched_getaffinity(0) == mine, "no other thread is moved"


@pytest.mark.parametrize(("cpus", "address"), [("100000-100003", ADDRESS), ("", ADDRESS), ("0", "0000:00:00.0")])
def test_a_thread_stays_where_it_is(
    cpus: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: set[int]
) -> None:
    """The thread may not run near the device, or the device's place is unknown."""
    assert _stayed(cpus, tmp_path, monkeypatch, address) == mine
