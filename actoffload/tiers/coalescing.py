"""Several small records in one transfer: they share one extent, one write, and reads of all that are wanted together.

A transfer costs as much for 128 KiB as for some MiB (room on the disk, a request, a turn at the interpreter's lock in
an I/O thread), and a disk is fastest with large ones. Records that are saved one after the other are needed one after
the other, so backward gets none of them much too early. A large record has an extent of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..errors import StateError
from ..memory.cpu_allocator import HeldBlock
from ..storage.arena import Extent
from .record import DiskCopy, Record, State

MIN_ALIGNMENT = 512
"""A restored storage keeps its address modulo this many bytes, or modulo the engine's alignment if that is larger: then
kernels see the same alignment and round in the same way."""


class Layout(NamedTuple):
    """How a span of ``nbytes`` bytes of a CPU tensor lies around the aligned body that direct I/O can transfer.

    Tensors have neither aligned addresses nor aligned lengths. So the body is written where it lies, and the few bytes
    before and after it are kept in memory.

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


class SharedExtent:
    """An extent and the records in it; the body of each lies behind that of the one before.

    Args:
        layouts: how the bytes of each record lie around its direct I/O, in the order of their bytes.
        step: addresses are kept modulo this many bytes.
        allocate: returns room on disk; an error of it is raised.

    Attributes:
        records: in this order; emptied when the last record has freed its room. ``layouts``: theirs.
        starts: where each record begins in memory that holds all of them and keeps their addresses.
        offsets: where the body of each begins in the extent.
        io_bytes: the bytes of all bodies.
        users: how many of the records still need it.
    """

    __slots__ = ("extent", "io_bytes", "layouts", "offsets", "records", "starts", "users")

    def __init__(self, layouts: dict[Record, Layout], step: int, allocate: Callable[[int], Extent]) -> None:
        self.records, self.layouts = list(layouts), list(layouts.values())
        self.starts: list[int] = []
        self.offsets: list[int] = []
        self.io_bytes = end = 0
        for record, layout in layouts.items():
            start = -(-end // step) * step + layout.pad
            self.starts.append(start)
            self.offsets.append(self.io_bytes)
            self.io_bytes += layout.io_bytes
            end = start + record.nbytes
        self.extent = allocate(self.io_bytes)
        self.users = len(self.records)
        for record in self.records:
            record.disk = DiskCopy(self)

    def wanted_with(self, record: Record) -> list[int]:
        """Return the places of a record and of all to read with it: on disk, and backward waits for them."""
        return [
            place
            for place, one in enumerate(self.records)
            if one is record or (one.waiting > 0 and one.state is State.SPILLED and one.original() is None)
        ]


class Sources:
    """The storages that one write reads where their owners hold them; alive until the write has ended.

    Args:
        records: the owners may free their storages meanwhile, so the address of each is remembered.
        held: keep the memory from being used again, though an owner frees it.
    """

    def __init__(self, records: Iterable[Record], held: Iterable[HeldBlock]) -> None:
        self._places = [(record.data, record.saved.address) for record in records]
        self._held = tuple(held)
        self._moved = False

    def check(self) -> None:
        """Look at the storages just before they are read, on an engine thread.

        Raises:
            StateError: an owner has freed or resized one.
        """
        if self.moved():
            raise StateError("a storage was freed or resized by its owner while it was to be written")

    def moved(self) -> bool:
        """Whether an owner has freed or resized a storage since."""
        # Seen once it stays so: the owner may have filled the storage again at its old address.
        self._moved = self._moved or any(data is not None and data.data_ptr() != at for data, at in self._places)
        return self._moved
