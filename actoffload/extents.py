"""Which bytes of an arena are in use: a best-fit allocator over plain integers.

Knows nothing of files or tensors, takes no lock (the caller holds one), and stays fast with thousands of extents: both
free lists are sorted, so every operation is a bisection and a short ``memmove``.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from .errors import StateError


class ExtentAllocator:
    """Hands out ranges ``[offset, offset + size)`` of ``[0, capacity)``.

    Best fit with immediate coalescing: activations come in few sizes, so an exact hole usually exists and little is
    left over.

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
        self._free_sizes: dict[int, int] = {}  # offset -> size, the same ranges as the two sorted lists
        self._free_offsets: list[int] = []
        self._free_by_size: list[tuple[int, int]] = []  # (size, offset)
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
        """Returns ``nbytes`` rounded up to the alignment."""
        return -(-nbytes // self._alignment) * self._alignment

    def round_down(self, nbytes: int) -> int:
        """Returns ``nbytes`` rounded down to the alignment."""
        return nbytes // self._alignment * self._alignment

    def allocate(self, nbytes: int) -> int | None:
        """Returns the offset of a free range of at least ``nbytes`` bytes, or None when there is none.

        Raises:
            ValueError: ``nbytes`` is not positive.
        """
        if nbytes <= 0:
            raise ValueError(f"nbytes={nbytes}: must be positive")
        size = self.round_up(nbytes)
        index = bisect_left(self._free_by_size, (size, -1))
        if index == len(self._free_by_size):
            return None
        try:
            return self._take(index, size)
        except BaseException:  # no memory, or an interrupt
            self._rebuild()
            raise

    def free(self, offset: int, nbytes: int) -> None:
        """Gives a range back.

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
            self._insert_free(offset, size)
        except BaseException:  # no memory, or an interrupt
            self._rebuild()
            raise

    def grow(self, new_capacity_bytes: int) -> None:
        """Makes the arena larger; what is allocated stays where it is.

        Raises:
            ValueError: The new capacity is smaller than the old one.
        """
        capacity = self.round_down(new_capacity_bytes)
        if capacity < self._capacity:
            raise ValueError(f"new_capacity_bytes={new_capacity_bytes}: smaller than {self._capacity}")
        added, start = capacity - self._capacity, self._capacity
        if not added:
            return
        try:
            self._capacity = capacity
            self._insert_free(start, added)
        except BaseException:  # no memory, or an interrupt
            self._rebuild()
            raise

    def _take(self, index: int, size: int) -> int:
        """Allocates from the free range at ``index`` of the list by size."""
        hole, offset = self._free_by_size.pop(index)
        del self._free_sizes[offset]
        position = bisect_left(self._free_offsets, offset)
        if hole > size:
            self._free_offsets[position] = offset + size
            self._free_sizes[offset + size] = hole - size
            insort(self._free_by_size, (hole - size, offset + size))
        else:
            del self._free_offsets[position]
        self._allocated_bytes += size
        self._allocated[offset] = size  # last: what is not in there is free
        return offset

    def _rebuild(self) -> None:
        """After an error half-way: what is free, from what is allocated."""
        self._allocated_bytes = sum(self._allocated.values())
        begins = [*sorted(self._allocated), self._capacity]
        ends = [0, *(offset + self._allocated[offset] for offset in begins[:-1])]
        holes = [(begin - end, end) for begin, end in zip(begins, ends, strict=True) if begin > end]
        self._free_offsets[:] = [offset for _, offset in holes]
        self._free_sizes.clear()
        self._free_sizes.update((offset, size) for size, offset in holes)
        self._free_by_size[:] = sorted(holes)

    def _insert_free(self, offset: int, size: int) -> None:
        """Puts a range on the free lists, joined with its neighbours."""
        index = bisect_left(self._free_offsets, offset)
        if index < len(self._free_offsets) and self._free_offsets[index] == offset + size:
            size += self._remove_free(index)
        if index > 0:
            before = self._free_offsets[index - 1]
            if before + self._free_sizes[before] == offset:
                size += self._remove_free(index - 1)
                offset, index = before, index - 1
        self._free_offsets.insert(index, offset)
        self._free_sizes[offset] = size
        insort(self._free_by_size, (size, offset))

    def _remove_free(self, index: int) -> int:
        """Takes the free range at ``index`` of the offset list off the lists and returns its size."""
        offset = self._free_offsets.pop(index)
        size = self._free_sizes.pop(offset)
        del self._free_by_size[bisect_left(self._free_by_size, (size, offset))]
        return size


__all__ = ["ExtentAllocator"]
