"""Where host memory lies: on the node of the CPU that first writes it, so that thread stays near the device.

A copy between a device and the memory of another socket is slower.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")


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
