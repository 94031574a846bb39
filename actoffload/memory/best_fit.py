"""Which bytes of an arena are in use: a best-fit allocator over plain integers.

Knows nothing of files or tensors, takes no lock (the caller holds one), and stays fast with thousands of extents: an
operation is a few look-ups, a bisection and a short ``memmove``.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from ..errors import StateError


class ExtentAllocator:
    """Hands out ranges ``[offset, offset + size)`` of ``[0, capacity)``.

    Best fit with immediate coalescing: activations come in few sizes, so an exact hole usually exists and little is
    left over. After an error half-way (no memory) nothing is lost.

    Args:
        capacity_bytes: Size of the arena, rounded down to ``alignment``.
        alignment: Every offset and every size is a multiple of this many bytes.

    Example:
        >>> extents = ExtentAllocator(1 << 20, 4096)
        >>> extents.allocate(5000)
        0
        >>> extents.allocated_bytes
        8192
    """

    def __init__(self, capacity_bytes: int, alignment: int) -> None:
        if alignment < 1:
            raise ValueError(f"alignment={alignment}: must be at least 1")
        self._alignment = alignment
        self._capacity = 0
        self._allocated_bytes = 0
        self._allocated: dict[int, int] = {}  # offset -> size
        self._free: dict[int, int] = {}  # offset -> size
        self._free_ends: dict[int, int] = {}  # end -> offset, of the same ranges
        self._free_by_size: list[tuple[int, int]] = []  # (size, offset) of the same ranges, sorted
        self.grow(capacity_bytes)

    @property
    def capacity_bytes(self) -> int:
        """Size of the arena in bytes."""
        return self._capacity

    @property
    def allocated_bytes(self) -> int:
        """Bytes handed out, alignment included."""
        return self._allocated_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The largest request that would succeed now."""
        return self._free_by_size[-1][0] if self._free_by_size else 0

    def round_up(self, nbytes: int) -> int:
        """Return ``nbytes`` rounded up to the alignment."""
        return -(-nbytes // self._alignment) * self._alignment

    def round_down(self, nbytes: int) -> int:
        """Return ``nbytes`` rounded down to the alignment."""
        return nbytes // self._alignment * self._alignment

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of a free range of at least ``nbytes`` bytes, or None when there is none.

        Raises:
            ValueError: ``nbytes`` is not positive.
        """
        if nbytes <= 0:
            raise ValueError(f"nbytes={nbytes}: must be positive")
        size = self.round_up(nbytes)
        index = bisect_left(self._free_by_size, (size, -1))
        if index == len(self._free_by_size):
            return None
        hole, offset = self._free_by_size[index]
        try:
            self._remove_free(offset)
            if hole > size:
                self._add_free(offset + size, hole - size)
            self._allocated_bytes += size
            self._allocated[offset] = size  # last: what is not in there is free
        except BaseException:
            self._rebuild()
            raise
        return offset

    def free(self, offset: int, nbytes: int) -> None:
        """Give a range back.

        Args:
            offset: What ``allocate`` returned.
            nbytes: What ``allocate`` was asked for, or that rounded up.

        Raises:
            StateError: The range is not allocated (a double free), or was allocated with another size.
        """
        size = self._allocated.get(offset)
        if size is None:
            raise StateError(f"free({offset}, {nbytes}): nothing is allocated at this offset (double free?)")
        if size != self.round_up(nbytes):
            raise StateError(f"free({offset}, {nbytes}): the extent at this offset has {size} bytes")
        try:
            del self._allocated[offset]
            self._allocated_bytes -= size
            self._add_free(offset, size)
        except BaseException:
            self._rebuild()
            raise

    def grow(self, new_capacity_bytes: int) -> None:
        """Make the arena larger; what is allocated stays where it is.

        Raises:
            ValueError: The new capacity is smaller than the old one.
        """
        start, capacity = self._capacity, self.round_down(new_capacity_bytes)
        if capacity < start:
            raise ValueError(f"new_capacity_bytes={new_capacity_bytes}: smaller than {start}")
        if capacity == start:
            return
        try:
            self._capacity = capacity
            self._add_free(start, capacity - start)
        except BaseException:
            self._rebuild()
            raise

    def _add_free(self, offset: int, size: int) -> None:
        """Make a range free, joined with its neighbours."""
        before = self._free_ends.get(offset)
        if before is not None:
            offset, size = before, size + self._remove_free(before)
        if offset + size in self._free:
            size += self._remove_free(offset + size)
        self._free[offset] = size
        self._free_ends[offset + size] = offset
        insort(self._free_by_size, (size, offset))

    def _remove_free(self, offset: int) -> int:
        """Take the free range at ``offset`` out of all three and return its size."""
        size = self._free.pop(offset)
        del self._free_ends[offset + size]
        del self._free_by_size[bisect_left(self._free_by_size, (size, offset))]
        return size

    def _rebuild(self) -> None:
        """Find anew what is free, from what is allocated."""
        self._allocated_bytes = sum(self._allocated.values())
        self._free.clear()
        self._free_ends.clear()
        self._free_by_size.clear()
        end = 0
        for offset in [*sorted(self._allocated), self._capacity]:
            if offset > end:
                self._add_free(end, offset - end)
            end = offset + self._allocated.get(offset, 0)
