"""What the operating system says about this process: peak memory and bytes through the block layer."""

from __future__ import annotations

from typing import Any

import psutil

from ..memory.process_memory import peak_rss_bytes, rss_bytes

__all__ = ["block_io", "peak_rss_bytes", "rss_bytes"]


def block_io() -> Any:
    """Return the kernel's count of ``read_bytes`` and ``write_bytes`` to storage; None where it keeps none.

    Direct I/O is counted when it reaches the device. Buffered writes are counted when a page becomes dirty, and
    buffered reads that the page cache answers are not counted.
    """
    try:
        return psutil.Process().io_counters()
    except (AttributeError, NotImplementedError, OSError, psutil.Error):
        return None
