"""Several small records in one transfer: a batch shares one extent, one write, and reads of what is wanted together.

A transfer costs as much for 128 KiB as for some MiB (room on the disk, a request, a turn at the interpreter's lock in
an I/O thread), and a disk is fastest with large ones. Records that are saved one after the other are needed one after
the other, so backward gets none of them much too early. A large record is a batch of one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..errors import StateError
from ..memory.cpu_allocator import HeldBlock
from ..storage.transfers import Extent, Transfer
from .direct_io import Layout
from .record import Record, State

Ranges = list[tuple[int, int]]
"""Memory: address and bytes of each range."""


class Batch:
    """Records that share one extent; the body of each lies behind that of the one before.

    Args:
        records: in the order of their bytes; emptied when the last of them has given up its room.
        step: addresses are kept modulo this many bytes.

    Attributes:
        starts: where each begins in memory that holds all of them and keeps their addresses.
        offsets: where the body of each begins in the extent.
        io_bytes: the bytes of all bodies.
        extent: the room on disk.
        users: how many of the records still need it.
        read_apart: a read of several has failed, so each is read alone and an error belongs to its record.
    """

    __slots__ = ("extent", "io_bytes", "offsets", "read_apart", "records", "starts", "users")

    def __init__(self, records: list[Record], step: int) -> None:
        self.records = records
        self.starts: list[int] = []
        self.offsets: list[int] = []
        self.io_bytes = self.users = end = 0
        self.extent: Extent | None = None
        self.read_apart = False
        for record in records:
            layout: Layout = record.layout
            start = -(-end // step) * step + layout.pad
            self.starts.append(start)
            self.offsets.append(self.io_bytes)
            self.io_bytes += layout.io_bytes
            end = start + record.nbytes

    def assign(self, extent: Extent) -> None:
        """Give all records their room in ``extent``."""
        self.extent = extent
        self.users = len(self.records)
        for record in self.records:
            record.extent = self

    def wanted_with(self, record: Record) -> list[int]:
        """Return the places of a record and of those that are read with it: they are on disk, and somebody waits."""
        return [
            place
            for place, one in enumerate(self.records)
            if one is record
            or (not self.read_apart and one.waiting > 0 and one.state is State.SPILLED and one.original() is None)
        ]


@dataclass(slots=True, eq=False)
class BatchTransfer:
    """One write or read of several records. Guarded by the store's lock."""

    records: dict[Record, None] = field(default_factory=dict)  # those that it is for; who needs it no more leaves
    nbytes: int = 0  # of those
    transfer: Transfer | None = None  # once it was begun
    places: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list)
    """Of a write, each storage that is read where its owner holds it, with its address."""
    held: dict[Record, HeldBlock] = field(default_factory=dict)
    """Of a write, what keeps the memory of each record from being used again, though its owner frees it."""
    resized: bool = False  # an owner had freed or resized a storage before it was read
    left_bytes: int = 0  # of records that left a write which was begun: it still holds their memory

    def add(self, record: Record) -> None:
        """Transfer a record as well."""
        self.records[record] = None
        self.nbytes += record.nbytes
        record.transfer = self

    def add_in_place(self, record: Record) -> None:
        """Write a record as well, from where its owner holds it."""
        self.add(record)
        self.held[record] = HeldBlock(record.address, dense=not record.has_gaps)

    def leave(self, record: Record) -> None:
        """Transfer a record no more."""
        del self.records[record]
        self.nbytes -= record.nbytes
        record.transfer = None
        if self.transfer is None:
            self.held.pop(record, None)

    def promote(self) -> None:
        """Have it done before what was queued earlier."""
        if self.transfer is not None:
            self.transfer.promote()

    def check_places(self) -> None:
        """Look at the storages just before they are read, on an engine thread.

        Raises:
            StateError: an owner has freed or resized one.
        """
        if any(storage.data_ptr() != address for storage, address in self.places):
            self.resized = True
            raise StateError("a storage was freed or resized by its owner while it was to be written")

    def found_resized(self) -> bool:
        """Whether the owner of a storage that was written has freed or resized it meanwhile."""
        return (
            self.resized
            or any(storage.data_ptr() != address for storage, address in self.places)
            or any(record.was_resized for record in self.records)
        )
