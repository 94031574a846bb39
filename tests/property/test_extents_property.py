"""The extent allocator against a model that is a plain list of bytes in use."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from actoffload.errors import StateError
from actoffload.memory.best_fit import ExtentAllocator

UNIT = 4
Range = tuple[int, int]


class AllocatorMachine(RuleBasedStateMachine):
    """Random allocations, frees and growth; the model marks every unit of the arena."""

    ranges = Bundle[Range]("ranges")

    def __init__(self) -> None:
        super().__init__()
        self.extents = ExtentAllocator(16 * UNIT, UNIT)
        self.used = [False] * 16
        self.freed: list[Range] = []

    def holes(self) -> list[Range]:
        """Start and size of every maximal free range, in units."""
        holes, start = [], None
        for index, used in enumerate([*self.used, True]):
            if not used and start is None:
                start = index
            elif used and start is not None:
                holes.append((start, index - start))
                start = None
        return holes

    @rule(target=ranges, nbytes=st.integers(1, 6 * UNIT))
    def allocate(self, nbytes: int) -> Range:
        units = -(-nbytes // UNIT)
        fitting = [size for _, size in self.holes() if size >= units]
        offset = self.extents.allocate(nbytes)
        if offset is None:
            assert not fitting
            return (-1, 0)
        assert offset % UNIT == 0
        start = offset // UNIT
        assert (start, min(fitting)) in self.holes()  # best fit, at the start of the hole
        self.used[start : start + units] = [True] * units
        return (offset, nbytes)

    @rule(taken=consumes(ranges))
    def free(self, taken: Range) -> None:
        offset, nbytes = taken
        if offset < 0:
            return
        self.extents.free(offset, nbytes)
        start, units = offset // UNIT, -(-nbytes // UNIT)
        self.used[start : start + units] = [False] * units
        self.freed.append(taken)

    @precondition(lambda self: self.freed)
    @rule(data=st.data())
    def free_again(self, data: st.DataObject) -> None:
        offset, nbytes = data.draw(st.sampled_from(self.freed))
        if not self.used[offset // UNIT]:
            with pytest.raises(StateError):
                self.extents.free(offset, nbytes)

    @precondition(lambda self: len(self.used) < 64)
    @rule(units=st.integers(0, 8))
    def grow(self, units: int) -> None:
        self.used += [False] * units
        self.extents.grow(len(self.used) * UNIT)

    @invariant()
    def books_agree(self) -> None:
        assert self.extents.capacity_bytes == len(self.used) * UNIT
        assert self.extents.allocated_bytes == sum(self.used) * UNIT
        at_end = [size for start, size in self.holes() if start + size == len(self.used)]
        assert self.extents.free_at_end_bytes == sum(at_end) * UNIT
        assert self.extents.largest_free_bytes == max((size for _, size in self.holes()), default=0) * UNIT


TestAllocator = AllocatorMachine.TestCase
