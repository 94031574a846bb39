"""Several small records in one transfer: what they share, and what is done for each of them.

The functions have a twin of the same name in C (`native/rows.hpp`), which is used where there is one: what is done once
for each record in Python costs more than the transfer.
"""

from __future__ import annotations

import torch

from .cpu_tier import Layout
from .errors import StateError
from .extent_io import Extent, Transfer
from .record import Record, State

Ranges = list[tuple[int, int]]
"""Of memory: address and bytes."""
Places = list[tuple[torch.UntypedStorage, int]]
"""Storages, each with the address at which it lies."""


class Row:
    """The room on disk that some records share: the body of each behind that of the one before.

    Attributes:
        starts: where each begins in memory that holds all of them, so that each keeps its address modulo the alignment.
        offsets: where the body of each begins on disk.
        users: how many of the records have room here.
        io_bytes: the bytes of all bodies.
        apart: a read of several has failed: each is read alone.
    """

    __slots__ = ("apart", "extent", "io_bytes", "offsets", "records", "starts", "users")

    def __init__(self, records: list[Record]) -> None:
        self.records = records
        self.starts: list[int] = []
        self.offsets: list[int] = []
        self.extent: Extent | None = None
        self.users = 0
        self.apart = False
        self.io_bytes = 0


class Joint:
    """One transfer of several records, or one that is still to be begun. Guarded by the offloader's lock.

    Attributes:
        records: those that it is for; who needs it no more leaves.
        transfer: None as long as it was not begun.
        row: for a write, the room that was taken for it.
        places: for a write, each storage that is read where its owner holds it, with its address.
        spoiled: one of them was seen to lie elsewhere: its owner has freed or resized it.
        left_bytes: for a write, of those that left it since it was begun, and whose memory it still holds.
    """

    __slots__ = ("left_bytes", "nbytes", "places", "records", "row", "spoiled", "transfer")

    def __init__(self) -> None:
        self.records: dict[Record, None] = {}
        self.nbytes = 0
        self.transfer: Transfer | None = None
        self.row: Row | None = None
        self.places: list[tuple[torch.UntypedStorage, int]] = []
        self.spoiled = False
        self.left_bytes = 0

    def add(self, record: Record) -> None:
        """Have it done for a record as well."""
        self.records[record] = None
        self.nbytes += record.nbytes
        record.transfer = self

    def leave(self, record: Record) -> None:
        """A record needs it no more, if it was in it."""
        if record in self.records:
            del self.records[record]
            self.nbytes -= record.nbytes

    def promote(self) -> None:
        """See `Moving`."""
        if self.transfer is not None:
            self.transfer.promote()

    def check_places(self) -> None:
        """Just before the memory is read, on an engine thread.

        Raises:
            StateError: an owner has freed or resized a storage.
        """
        self.spoiled = any(storage.data_ptr() != address for storage, address in self.places)
        if self.spoiled:
            raise StateError("a storage was resized while it was to be written in a row with others")

    def lies_elsewhere(self) -> bool:
        """Whether a storage that was written was freed or resized meanwhile."""
        return (
            self.spoiled
            or any(storage.data_ptr() != address for storage, address in self.places)
            or any(record.was_resized for record in self.records)
        )


def lay_out(row: Row, step: int) -> None:
    """Find out where each record of a new row begins; ``step``: what the address of each keeps, modulo this."""
    end = 0
    for record in row.records:
        layout: Layout = record.io
        start = -(-end // step) * step + layout.pad
        row.starts.append(start)
        row.offsets.append(row.io_bytes)
        row.io_bytes += layout.io_bytes
        end = start + record.nbytes


def board(row: Row) -> tuple[Places, Ranges]:
    """All records of a row have their room in it from now on; the storages that are written, and each body's memory."""
    for record in row.records:
        record.extent = row
        row.users += 1
    places = [(_storage_of(record), record.address) for record in row.records]
    return places, [(record.address + record.begin + record.io.io_begin, record.io.io_bytes) for record in row.records]


def wanted(row: Row, record: Record) -> list[int]:
    """The places of a record in its row, and of those that come with it: they are on disk, and asked for."""
    apart, spilled = row.apart, State.SPILLED
    return [
        place
        for place, one in enumerate(row.records)
        if one is record or (not apart and one.waiting > 0 and one.state is spilled)
    ]


def _storage_of(record: Record) -> torch.UntypedStorage:
    assert record.data is not None, "what is to be written is in memory"
    return record.data
