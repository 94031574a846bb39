"""What the operating system says about this process: peak memory and bytes through the block layer."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path


def peak_rss_bytes() -> int:
    """The most resident memory of this process so far, in bytes.

    ``VmHWM`` where there is one: it begins at zero with each program, while ``ru_maxrss`` is inherited from the
    program that started this one.
    """
    peak = _proc_status("VmHWM")
    if peak is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def rss_bytes() -> int:
    """Resident memory of this process now, in bytes."""
    now = _proc_status("VmRSS")
    if now is not None:
        return now
    import psutil

    return int(psutil.Process().memory_info().rss)


@dataclass(frozen=True)
class BlockIO:
    """Bytes that this process caused to be written to and read from storage, as the kernel counts them."""

    written_bytes: int
    read_bytes: int

    def __sub__(self, other: BlockIO) -> BlockIO:
        return BlockIO(self.written_bytes - other.written_bytes, self.read_bytes - other.read_bytes)


def block_io() -> BlockIO | None:
    """The kernel's count (``/proc/self/io``), or None where it keeps none.

    Direct I/O is counted when it reaches the device. Buffered writes are counted when a page becomes dirty, and
    buffered reads that the page cache answers are not counted.
    """
    try:
        text = Path("/proc/self/io").read_text(encoding="ascii")
    except OSError:
        return None
    fields = dict(line.split(": ") for line in text.splitlines())
    return BlockIO(int(fields["write_bytes"]), int(fields["read_bytes"]))


def _proc_status(key: str) -> int | None:
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None
