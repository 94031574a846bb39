"""Which bytes of an arena are in use: a best-fit allocator over plain integers.

Knows nothing of files or tensors, and takes no lock (the caller holds one).
"""

from __future__ import annotations

from bisect import bisect_left

from ..errors import StateError


class ExtentAllocator:
    """Allocates ranges ``[offset, offset + size)`` of ``[0, capacity)``.

    Best fit with immediate coalescing: activations come in few sizes, so an exact hole usually exists and little is
    left over. The list of free ranges changes by one operation, so that no interrupt leaves it half changed.

    Args:
        capacity_bytes: Size of the arena, rounded down to ``alignment``.
        alignment: Every offset and every size is a multiple of this many bytes.

    Attributes:
        capacity_bytes: Size of the arena.
        allocated_bytes: Bytes in use, alignment included.

    Example:
        >>> extents = ExtentAllocator(1 << 20, 4096)
        >>> extents.allocate(5000)
        0
        >>> extents.allocated_bytes
        8192
    """

    def __init__(self, capacity_bytes: int, alignment: int) -> None:
        self._alignment = alignment
        self.capacity_bytes = 0
        self.allocated_bytes = 0
        self._allocated: dict[int, int] = {}  # offset -> size
        self._free: list[tuple[int, int]] = []  # offset and size, sorted; no two of them touch
        self.grow(capacity_bytes)

    @property
    def largest_free_bytes(self) -> int:
        """The largest request that would succeed now."""
        return max([size for _, size in self._free], default=0)

    @property
    def free_at_end_bytes(self) -> int:
        """The free bytes at the end of the arena; growth is joined with them."""
        return self._free[-1][1] if self._free and sum(self._free[-1]) == self.capacity_bytes else 0

    def round_up(self, nbytes: int) -> int:
        """Return ``nbytes`` rounded up to the alignment."""
        return -(-nbytes // self._alignment) * self._alignment

    def round_down(self, nbytes: int) -> int:
        """Return ``nbytes`` rounded down to the alignment."""
        return nbytes // self._alignment * self._alignment

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a free range of at least ``nbytes`` bytes, or None when there is none."""
        size = self.round_up(nbytes)
        fitting = [(hole, index) for index, (_, hole) in enumerate(self._free) if hole >= size]
        if not fitting:
            return None
        hole, index = min(fitting)
        offset = self._free[index][0]
        self._free[index : index + 1] = [(offset + size, hole - size)] if hole > size else []
        self._allocated[offset] = size
        self.allocated_bytes += size
        return offset

    def free(self, offset: int, nbytes: int) -> None:
        """Give a range back.

        Args:
            offset: The result of ``allocate``.
            nbytes: The argument of ``allocate``, or that rounded up.

        Raises:
            StateError: The range is not allocated (a double free), or was allocated with another size.
        """
        size = self._allocated.get(offset)
        if size is None:
            raise StateError(f"free({offset}, {nbytes}): nothing is allocated at this offset (double free?)")
        if size != self.round_up(nbytes):
            raise StateError(f"free({offset}, {nbytes}): the extent at this offset has {size} bytes")
        del self._allocated[offset]
        self.allocated_bytes -= size
        self._add_free(offset, size)

    def grow(self, new_capacity_bytes: int) -> None:
        """Make the arena larger; allocated ranges stay where they are."""
        start, capacity = self.capacity_bytes, self.round_down(new_capacity_bytes)
        if capacity > start:
            self.capacity_bytes = capacity
            self._add_free(start, capacity - start)

    def _add_free(self, offset: int, size: int) -> None:
        """Make a range free, joined with its neighbours."""
        first = last = bisect_left(self._free, (offset,))
        if last < len(self._free) and self._free[last][0] == offset + size:
            size += self._free[last][1]
            last += 1
        if first and sum(self._free[first - 1]) == offset:
            first -= 1
            offset, size = self._free[first][0], self._free[first][1] + size
        self._free[first:last] = [(offset, size)]
