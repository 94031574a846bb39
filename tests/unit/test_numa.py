"""Host memory and I/O threads near the device: what the kernel says, and what is done about it."""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import addressof, c_char
from pathlib import Path
from typing import Literal

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


@pytest.mark.parametrize("node", ["-1", "far", ""])
def test_a_device_of_no_node(tmp_path: Path, node: str) -> None:
    assert numa.node_of(GPU, make_system(tmp_path, node=node)) is None


@pytest.mark.parametrize(
    ("nodes", "several"), [("0-1", True), ("0,2", True), ("0", False), ("", False), ("all", False)]
)
def test_several_nodes(tmp_path: Path, nodes: str, several: bool) -> None:
    assert numa.several_nodes(make_system(tmp_path, nodes=nodes)) is several
    assert not numa.several_nodes(tmp_path / "elsewhere")


def test_the_processors_of_a_node(tmp_path: Path) -> None:
    system = make_system(tmp_path)
    assert numa.processors_of(1, system) == {4, 5, 6, 7, 12}
    assert numa.processors_of(7, system) == frozenset()


def test_threads_are_sent_where_they_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = {11: {0, 1, 4, 5}, 12: {0, 1}, 13: {5}}
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(masks[thread]), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", masks.__setitem__, raising=False)
    assert numa.send([11, 12, 13], frozenset({4, 5, 6})) == 2
    assert masks == {11: {4, 5}, 12: {0, 1}, 13: {5}}, "who was bound elsewhere by the user stays there"

    def gone(thread: int) -> set[int]:
        raise ProcessLookupError

    monkeypatch.setattr(os, "sched_getaffinity", gone, raising=False)
    assert numa.send([11], frozenset({4})) == 0


@LINUX
def test_this_thread_runs_there_and_comes_back() -> None:
    before = os.sched_getaffinity(0)
    one = frozenset({min(before)})

    def fail() -> None:
        with numa.running_on(one):
            assert os.sched_getaffinity(0) == one
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert os.sched_getaffinity(0) == before
    with numa.running_on(frozenset()), numa.running_on(frozenset({1 << 14})):  # nothing to go by, and none such
        assert os.sched_getaffinity(0) == before


@LINUX
def test_memory_is_asked_for_before_it_is_touched() -> None:
    memory = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = addressof(c_char.from_buffer(memory))
    assert numa.prefer(address, len(memory), 900), "there is no such node"
    refused = numa.prefer(address, len(memory), 0)
    memory[:] = b"\1" * len(memory)
    maps = Path("/proc/self/numa_maps")
    if refused or not maps.exists():
        pytest.skip(f"the system refuses, or does not say: {refused}")
    lines = [line for line in maps.read_text().splitlines() if line.startswith(f"{address:x} ")]
    assert [line.split()[1] for line in lines] == ["prefer:0"]


def test_a_slab_is_placed_before_it_is_pinned() -> None:
    told: list[str] = []

    def pin(address: int, nbytes: int) -> bool:
        told.append("pin")
        return True

    @contextmanager
    def place(address: int, nbytes: int) -> Iterator[None]:
        assert (address % mmap.PAGESIZE, nbytes) == (0, 1 << 20)
        told.append("place")
        yield
        told.append("placed")

    pool = HostPool(1 << 20, slab_bytes=1 << 20, pin=pin, unpin=lambda address: True, place=place)
    assert pool.acquire(1) is not None
    assert told == ["place", "pin", "placed"]


@LINUX
@pytest.mark.parametrize("refused", ["", "EPERM: not permitted"])
@pytest.mark.parametrize("target", ["host", "tiered"])
def test_an_offloader_near_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, target: Literal["host", "tiered"]
) -> None:
    before = os.sched_getaffinity(0)
    one = frozenset({min(before)})
    asked: list[int] = []
    pinned_on: list[set[int]] = []
    device = FakeDevice()

    def pin(address: int, nbytes: int) -> bool:
        pinned_on.append(os.sched_getaffinity(0))
        return True

    def prefer(address: int, nbytes: int, node: int) -> str:
        asked.append(node)
        return refused

    monkeypatch.setattr(device, "pci_address", lambda index: GPU, raising=False)
    monkeypatch.setattr(device, "pin", pin)
    monkeypatch.setattr(device, "unpin", lambda address: True)
    monkeypatch.setattr(numa, "several_nodes", lambda: True)
    monkeypatch.setattr(numa, "node_of", lambda address: 1 if address == GPU else None)
    monkeypatch.setattr(numa, "processors_of", lambda node: one if node == 1 else frozenset())
    monkeypatch.setattr(numa, "prefer", prefer)
    threads = set(threading.enumerate())
    config = OffloadConfig(target=target, path=tmp_path, engine="posix", allow_any_filesystem=True)
    offloader = Offloader(config, accelerator=device)
    try:
        assert not asked, "nothing is asked of the device before there is something to place"
        assert offloader.tiers.pools[0].acquire(4096) is not None
        begun = [thread for thread in threading.enumerate() if thread not in threads]
        assert len(begun) > 0 if target == "tiered" else not begun
        assert all(os.sched_getaffinity(thread.native_id or 0) == one for thread in begun)
        assert asked == [1]
        assert pinned_on == [one if refused else before], "who touches it first decides where asking did not help"
        assert os.sched_getaffinity(0) == before
        (note,) = [note for note in offloader.tiers.notes if "NUMA" in note]
        assert f"{device.type}:0 is at NUMA node 1: {len(begun)} I/O threads there, host memory" in note
        assert (f"could not be asked for ({refused})" in note) == bool(refused)
    finally:
        offloader.close()


def test_memory_is_had_where_nobody_knows_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(index: int) -> str:
        raise RuntimeError("no such property")

    device = FakeDevice()
    monkeypatch.setattr(device, "pci_address", fail, raising=False)
    monkeypatch.setattr(numa, "several_nodes", lambda: True)
    offloader = Offloader(OffloadConfig(target="host", path=tmp_path), accelerator=device)
    try:
        assert offloader.tiers.pools[0].acquire(4096) is not None
    finally:
        offloader.close()


def test_on_one_node_the_device_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    monkeypatch.setattr(device, "pci_address", lambda index: pytest.fail("this would begin its runtime"), raising=False)
    monkeypatch.setattr(numa, "several_nodes", lambda: False)
    offloader = Offloader(OffloadConfig(target="host", path=tmp_path), accelerator=device)
    try:
        assert offloader.tiers.pools[0].acquire(4096) is not None
        assert not any("NUMA" in note for note in offloader.tiers.notes)
    finally:
        offloader.close()
