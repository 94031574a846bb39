"""What the operating system says about this process: peak memory and bytes through the block layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..memory.process_memory import peak_rss_bytes, rss_bytes

__all__ = ["BlockIO", "block_io", "peak_rss_bytes", "rss_bytes"]


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
