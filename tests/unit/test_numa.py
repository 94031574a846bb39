"""Host memory and I/O threads near the device: what the kernel says, and what is done about it."""

from __future__ import annotations

import mmap
import os
import sys
import threading
from ctypes import addressof, c_char
from pathlib import Path

import pytest

from actoffload import OffloadConfig, Offloader, numa
from actoffload.hostpool import HostPool
from actoffload.testing.fakedevice import FakeDevice

GPU = "0000:17:00.0"
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's own files and calls")


def make_system(root: Path, *, nodes: str = "0-1", node: str = "1\n", address: str = GPU) -> Path:
    """What the kernel of a machine with two sockets would say."""
    for number, processors in ((0, "0-3,8-11"), (1, "4-7,12")):
        folder = root / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{processors}\n")
    (root / "devices/system/node/has_cpu").write_text(f"{nodes}\n")
    device = root / "bus/pci/devices" / address
    device.mkdir(parents=True)
    (device / "numa_node").write_text(node)
    return root


def test_the_node_of_a_device(tmp_path: Path) -> None:
    system = make_system(tmp_path, address="0000:1a:00.0")
    assert numa.node_of("0000:1A:00.0", system) == 1
    assert numa.node_of("0000:1b:00.0", system) is None
    assert numa.node_of(None, system) is None


@pytest.mark.parametrize(
    ("nodes", "node"), [("0", "0"), ("0-1", "-1"), ("0-1", "far"), ("", "1"), ("all", "1")], ids=repr
)
def test_one_node_or_nobody_knows(tmp_path: Path, nodes: str, node: str) -> None:
    assert numa.node_of(GPU, make_system(tmp_path, nodes=nodes, node=node)) is None


def test_processors_that_this_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = make_system(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 4, 5}, raising=False)
    assert numa.processors_of(1, system) == {4, 5}
    assert numa.processors_of(0, system) == {2, 3}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3}, raising=False)
    assert numa.processors_of(1, system) == {2, 3}, "bound elsewhere by the user: that stays"
    assert numa.processors_of(7, system) == {2, 3}


@LINUX
def test_threads_that_are_begun_inside_stay_and_nobody_else_does() -> None:
    before = os.sched_getaffinity(0)
    one = frozenset({min(before)})
    seen: list[set[int]] = []
    go = threading.Event()

    def look() -> None:
        go.wait(60)
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=look)

    def begin_and_fail() -> None:
        with numa.threads_on(one):
            thread.start()
            raise LookupError

    with pytest.raises(LookupError):
        begin_and_fail()
    assert os.sched_getaffinity(0) == before
    go.set()
    thread.join()
    assert seen == [one]
    with numa.threads_on(frozenset()), numa.threads_on(frozenset({1 << 14})):  # nothing to go by, and none such
        assert os.sched_getaffinity(0) == before


@LINUX
def test_memory_is_asked_for_before_it_is_touched() -> None:
    memory = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = addressof(c_char.from_buffer(memory))
    refused = numa.prefer(address, len(memory), 0)
    maps = Path("/proc/self/numa_maps")
    if not refused and maps.exists():
        lines = [line for line in maps.read_text().splitlines() if line.startswith(f"{address:x} ")]
        assert [line.split()[1] for line in lines] == ["prefer:0"]
    assert numa.prefer(address, len(memory), 900), "there is no such node"
    memory[:] = b"\1" * len(memory)


def test_a_slab_is_placed_before_it_is_pinned() -> None:
    told: list[str] = []

    def pin(address: int, nbytes: int) -> bool:
        told.append("pin")
        return True

    def place(address: int, nbytes: int) -> None:
        assert (address % mmap.PAGESIZE, nbytes) == (0, 1 << 20)
        told.append("place")

    pool = HostPool(1 << 20, slab_bytes=1 << 20, pin=pin, unpin=lambda address: None, place=place)
    assert pool.acquire(1) is not None
    assert told == ["place", "pin"]


@LINUX
@pytest.mark.parametrize("refused", ["", "EPERM: not permitted"])
def test_an_offloader_near_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    before = os.sched_getaffinity(0)
    one = frozenset({min(before)})
    asked: list[int] = []
    device = FakeDevice()
    monkeypatch.setattr(device, "pci_address", lambda index: GPU, raising=False)
    monkeypatch.setattr(numa, "node_of", lambda address: 1 if address == GPU else None)
    monkeypatch.setattr(numa, "processors_of", lambda node: one if node == 1 else frozenset())

    def prefer(address: int, nbytes: int, node: int) -> str:
        asked.append(node)
        return refused

    monkeypatch.setattr(numa, "prefer", prefer)
    threads = set(threading.enumerate())
    with_config = OffloadConfig(target="tiered", path=tmp_path, engine="posix", allow_any_filesystem=True)
    offloader = Offloader(with_config, accelerator=device)
    try:
        begun = [thread for thread in threading.enumerate() if thread not in threads]
        assert begun
        assert all(os.sched_getaffinity(thread.native_id or 0) == one for thread in begun)
        assert os.sched_getaffinity(0) == before
        assert any("NUMA node 1, where" in note for note in offloader.tiers.notes)
        assert offloader.tiers.pools[0].acquire(4096) is not None
        assert asked == [1]
        assert any(refused in note for note in offloader.tiers.notes if "NUMA" in note)
    finally:
        offloader.close()
