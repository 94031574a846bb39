"""What the tests of rows share: tensors that are saved one after the other, and what became of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actoffload import Offloader
from actoffload.cpu_tier import Layout
from actoffload.engines.base import IoKind, SpoolFile
from actoffload.engines.posix import PosixEngine
from actoffload.record import Record, State
from actoffload.row_tier import ROW_BYTES, RowMover
from actoffload.rows import Row
from tests.harness import (
    same_bits,
)

CPU = torch.device("cpu")
KIB = 1 << 10
ALIGNMENT = 512
"""Of the disk of records that no offloader has made."""
NBYTES = 256 * KIB
"""Of one record of most tests: four fill a row."""
FULL = ROW_BYTES // NBYTES


class Save(torch.autograd.Function):
    """Saves one tensor; its backward asks for it and has `seen` look at it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor, seen: Callable[[Tensor], None]) -> Tensor:
        ctx.save_for_backward(saved)
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.seen(ctx.saved_tensors[0])
        return grads[0], None, None


class Saved:
    """Tensors that were saved one after the other, each in a graph of its own, and copies of what was in them."""

    def __init__(self, offloader: Offloader, tensors: list[Tensor]) -> None:
        self.expected: list[Tensor | None] = [t.clone() for t in tensors]
        self.graphs: list[Tensor | None] = []
        self.handles: list[Any] = []
        with offloader:
            for tensor in tensors:
                x = torch.ones(1, requires_grad=True)
                self.graphs.append(Save.apply(x, tensor, self.handles.append))

    def check(self, index: int, *, again: bool = False) -> Tensor:
        """Unpack one; it has the bits that it had."""
        graph = self.graphs[index]
        assert graph is not None
        graph.backward(retain_graph=again)
        found: Tensor = self.handles.pop()
        expected = self.expected[index]
        assert expected is not None
        assert same_bits(found, expected), f"tensor {index}"
        if not again:
            self.drop(index)
        return found

    def drop(self, index: int) -> None:
        """Let one go without having asked for it."""
        self.graphs[index] = self.expected[index] = None


def activations(count: int, nbytes: int = NBYTES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(nbytes // 4, generator=generator) for _ in range(count)]


def mover_of(offloader: Offloader) -> RowMover:
    mover = offloader.tiers.movers["cpu"]
    assert isinstance(mover, RowMover)
    return mover


def records_of(offloader: Offloader) -> list[Any]:
    entries = offloader._identities.entries.values()
    return sorted((entry.record for found in entries for entry in found), key=lambda record: record.index)


def states(offloader: Offloader) -> list[State]:
    return [record.state for record in records_of(offloader)]


class CountingEngine(PosixEngine):
    """Counts the requests of each kind."""

    def __init__(self, file: SpoolFile) -> None:
        self.requests: list[tuple[IoKind, int]] = []
        super().__init__(file)

    def submit(self, request: Any) -> None:
        self.requests.append((request.kind, request.length))
        super().submit(request)


def row_of(given_records: list[tuple[int, int, State, int]], apart: bool = False) -> Row:
    """A row of records as they are once they were saved; of each: where it begins, its bytes, its state, who waits."""
    records = []
    for begin, nbytes, state, waiting in given_records:
        storage = torch.zeros(begin + nbytes, dtype=torch.uint8).untyped_storage()
        record = Record(storage, storage.data_ptr(), begin, begin + nbytes, CPU)
        record.io = Layout.around(record.address + begin, nbytes, ALIGNMENT)
        record.state, record.waiting = state, waiting
        records.append(record)
    row = Row(records)
    row.apart = apart
    return row
