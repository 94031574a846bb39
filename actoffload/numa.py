"""Which processors and which memory are near a device, on machines with several NUMA nodes.

Copies between a device and the memory of another node can be several times slower (PyTorch's torchtitan tells of about
120 in place of 350 GB/s on a GB200; not measured here). The kernel says in
``/sys`` which node a PCI device is at; memory is asked for there before it is touched, threads go to its processors.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

SYSTEM = Path("/sys")
_MBIND = {"x86_64": 237, "aarch64": 235, "ppc64le": 259}
"""The system call's number."""
_PREFERRED = 1  # elsewhere when the node is full: never a reason to fail


def several_nodes(system: Path = SYSTEM) -> bool:
    """Whether there is more than one node with processors.

    Args:
        system: where the kernel's files are; for tests.
    """
    return len(_numbers(system / "devices/system/node/has_cpu")) > 1


def node_of(pci_address: str | None, system: Path = SYSTEM) -> int | None:
    """The NUMA node of a PCI device, or None where nobody knows.

    Args:
        pci_address: such as ``"0000:17:00.0"``.
        system: where the kernel's files are; for tests.
    """
    if pci_address is None:
        return None
    try:
        node = int((system / "bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def processors_of(node: int, system: Path = SYSTEM) -> frozenset[int]:
    """The processors of a node."""
    return _numbers(system / f"devices/system/node/node{node}/cpulist")


@contextlib.contextmanager
def running_on(processors: frozenset[int]) -> Iterator[None]:
    """This thread runs on these processors inside: pages that it touches first come from their node."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    sent = send([0], processors)
    try:
        yield
    finally:
        if sent:
            os.sched_setaffinity(0, before)


def send(threads: Iterable[int], processors: frozenset[int]) -> int:
    """Have threads run on those of these processors on which they may run now.

    Args:
        threads: their system-wide numbers; 0 is the one that calls.
        processors: where to; a thread that may run on none of them stays as it is.

    Returns:
        How many of the threads are there now.
    """
    sent = 0
    for thread in threads if hasattr(os, "sched_setaffinity") else ():
        with contextlib.suppress(OSError):  # not allowed, or it has ended
            there = os.sched_getaffinity(thread) & processors
            if there:
                os.sched_setaffinity(thread, there)
                sent += 1
    return sent


def prefer(address: int, nbytes: int, node: int) -> str:
    """Ask for memory of a node where pages are not there yet.

    Args:
        address: a multiple of the page size.
        nbytes: how many bytes from there on.
        node: the node.

    Returns:
        Why it is not to be had, or an empty text.
    """
    number = _MBIND.get(platform.machine())
    if not sys.platform.startswith("linux") or number is None:
        return "not on this system"
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << (node % bits)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    long, word = ctypes.c_long, ctypes.c_void_p
    # The kernel takes one from the number of bits that it is told.
    arguments = (word(address), ctypes.c_ulong(nbytes), long(_PREFERRED), mask, ctypes.c_ulong(bits * len(mask) + 1))
    if libc.syscall(long(number), *arguments, long(0)) == 0:
        return ""
    code = ctypes.get_errno()
    return f"{errno.errorcode.get(code, code)}: {os.strerror(code)}"


def _numbers(file: Path) -> frozenset[int]:
    """The numbers of a list such as ``0-3,8``; none where there is no such file."""
    found: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        for part in file.read_text().strip().split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
