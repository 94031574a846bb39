"""Host memory lies near the device, and never on a node that belongs to a device."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from actoffload.memory import numa
from tests.harness import run_in_threads

ADDRESS = "0000:3b:00.0"


def _write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


@pytest.fixture
def mine() -> set[int]:
    """The CPUs on which this thread may run."""
    return os.sched_getaffinity(0)


def _stayed(cpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str = ADDRESS) -> set[int]:
    """The CPUs of a thread that stays near a device to which ``cpus`` are local."""
    _write(tmp_path / ADDRESS, local_cpulist=cpus)
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


@pytest.mark.parametrize(
    ("memory", "cpus", "expected"),
    [
        ("0-2", "0", {0}),  # GH200: 0 is Grace, the others the GPU's
        ("0-1,4", "0-1", {0, 1}),
        ("0-1", "0-1", set()),  # two sockets: no node to avoid
        ("0-1", "0-2", set()),  # a node of CPUs alone
    ],
)
def test_nodes_without_cpus_belong_to_devices(
    memory: str, cpus: str, expected: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path / "node", has_memory=memory, has_cpu=cpus)
    monkeypatch.setattr(numa, "NODES", tmp_path / "node")
    assert numa.nodes_with_cpus() == expected


def test_without_known_nodes_memory_lies_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "NODES", tmp_path / "none")
    assert numa.nodes_with_cpus() == set()
    assert not numa.keep_off_devices(0, 4096)


@pytest.mark.skipif(not (numa.NODES / "has_cpu").exists(), reason="the kernel names no nodes")
def test_the_kernel_takes_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine's own node: mapped memory can be written, and the kernel takes it from the node."""
    node = min(numa.parse_list((numa.NODES / "has_cpu").read_text()))
    monkeypatch.setattr(numa, "nodes_with_cpus", lambda: {node})
    with mmap.mmap(-1, 1 << 20) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if not numa.keep_off_devices(address, 1 << 20):
            pytest.skip("this kernel or its container takes no policy")
        memory[:5] = b"bytes"
        maps = Path("/proc/self/numa_maps").read_text() if Path("/proc/self/numa_maps").exists() else ""
        lines = [line for line in maps.splitlines() if line.startswith(f"{address:08x} ")]
        assert not lines or f"bind:{node}" in lines[0]
