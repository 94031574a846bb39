"""Where host memory lies: on the node of the CPU that first writes it, so that thread stays near the device.

A copy between a device and the memory of another socket is slower. On NVIDIA's Grace the device's own memory is a node
of the host as well, one without CPUs: page-locked memory there would use up the memory that it should save.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from pathlib import Path

NODES = Path("/sys/devices/system/node")
PCI_DEVICES = Path("/sys/bus/pci/devices")
_MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of the system call, for which glibc has no function."""
_BIND = 2  # MPOL_BIND: from these nodes and from no other


def stay_near(pci_address: str) -> None:
    """Let the calling thread run on the CPUs local to a device alone, as far as it may run there at all.

    Args:
        pci_address: the device's, as ``/sys/bus/pci/devices`` names it.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):  # unknown, or no Linux: it stays where it is
        local = parse_list((PCI_DEVICES / pci_address / "local_cpulist").read_text())
        allowed = local & os.sched_getaffinity(0)
        if allowed:
            os.sched_setaffinity(0, allowed)  # 0 is the calling thread, and no other of the process


def keep_off_devices(address: int, nbytes: int) -> bool:
    """Have a mapping take memory only of nodes with CPUs, where there are others; return whether the call was made."""
    number = _MBIND.get(platform.machine())
    nodes = nodes_with_cpus()
    if number is None or not nodes:
        return False
    words = max(nodes) // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    limits = ctypes.c_ulong(64 * words + 1), ctypes.c_uint(0)  # the kernel uses one bit less than this
    call = ctypes.CDLL(None, use_errno=True).syscall
    arguments = ctypes.c_void_p(address), ctypes.c_ulong(nbytes), ctypes.c_int(_BIND), mask, *limits
    return int(call(ctypes.c_long(number), *arguments)) == 0


def nodes_with_cpus() -> set[int]:
    """The nodes that have memory and CPUs, where some have memory alone; else none."""
    try:
        with_memory = parse_list((NODES / "has_memory").read_text())
        with_cpus = parse_list((NODES / "has_cpu").read_text())
    except (OSError, ValueError):
        return set()
    return with_memory & with_cpus if with_memory - with_cpus else set()


def parse_list(text: str) -> set[int]:
    """The numbers of a list of the kernel's.

    >>> sorted(parse_list("0-2,8"))
    [0, 1, 2, 8]
    """
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found
