"""How the bytes of a CPU tensor lie around the body that direct I/O can transfer.

Direct I/O needs aligned addresses and lengths, and tensors have neither: the aligned body is written where it lies, and
the few bytes before and after it are kept in memory. A restored storage has the old address modulo the alignment, so
that kernels see the same alignment and round in the same way.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

MIN_ALIGNMENT = 512
"""A restored storage keeps its address modulo this many bytes, or modulo the engine's alignment if that is larger."""


class Layout(NamedTuple):
    """How a span of ``nbytes`` bytes lies around its aligned body.

    Attributes:
        pad: bytes before the span in memory that keeps the span's address modulo the alignment.
        head: the bytes of the span before the body.
        tail: the bytes of the span after the body.
        io_begin: where the transfer begins, relative to the span.
        io_bytes: the length of the transfer.
    """

    pad: int
    head: bytes
    tail: bytes
    io_begin: int
    io_bytes: int

    @staticmethod
    def around(address: int, nbytes: int, alignment: int) -> Layout:
        """Return the layout of memory that is written where it lies: its aligned body, and copies of its edges."""
        head = -address % alignment
        body = (nbytes - head) // alignment * alignment
        tail = nbytes - head - body
        return Layout(
            address % max(alignment, MIN_ALIGNMENT),
            ctypes.string_at(address, head) if head else b"",
            ctypes.string_at(address + nbytes - tail, tail) if tail else b"",
            head,
            body,
        )

    @staticmethod
    def padded(address: int, nbytes: int, alignment: int) -> Layout:
        """Return the layout of a copy in aligned memory, which is written whole."""
        pad = address % max(alignment, MIN_ALIGNMENT)
        return Layout(pad, b"", b"", -pad, -(-(pad + nbytes) // alignment) * alignment)

    def restore_edges(self, address: int, nbytes: int) -> None:
        """Write the edges back around a body that was read into memory at ``address``."""
        ctypes.memmove(address, self.head, len(self.head))
        ctypes.memmove(address + nbytes - len(self.tail), self.tail, len(self.tail))
