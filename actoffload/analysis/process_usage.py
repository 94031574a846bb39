"""What the operating system says about this process: peak memory and bytes through the block layer."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import psutil


def peak_rss_bytes() -> int:
    """Return the most resident memory of this process so far.

    ``VmHWM`` where there is one: it begins at zero with each program, while ``ru_maxrss`` is inherited from the
    program that started this one.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def rss_bytes() -> int:
    """Return the resident memory of this process now."""
    return int(psutil.Process().memory_info().rss)


def block_io() -> Any:
    """Return the kernel's count of ``read_bytes`` and ``write_bytes`` to storage; None where it keeps none.

    Direct I/O is counted when it reaches the device. Buffered writes are counted when a page becomes dirty, and
    buffered reads that the page cache answers are not counted.
    """
    try:
        return psutil.Process().io_counters()
    except (AttributeError, NotImplementedError, OSError, psutil.Error):
        return None
