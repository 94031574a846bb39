"""The extent allocator: best fit, coalescing, growth, and refusal of wrong frees."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from actoffload.errors import StateError
from actoffload.memory.best_fit import ExtentAllocator


def test_sizes_and_offsets_are_aligned() -> None:
    extents = ExtentAllocator(10_000, 4096)
    assert extents.capacity_bytes == 8192
    assert [extents.allocate(1), extents.allocate(4096), extents.allocate(1)] == [0, 4096, None]
    assert extents.allocated_bytes == 8192
    assert extents.largest_free_bytes == 0


def test_the_smallest_hole_that_fits_is_taken() -> None:
    extents = ExtentAllocator(100, 1)
    for size in (20, 1, 10, 1, 30, 1, 37):
        extents.allocate(size)
    extents.free(0, 20)
    extents.free(21, 10)
    extents.free(32, 30)
    assert extents.allocate(9) == 21
    assert extents.allocate(1) == 30
    assert extents.allocate(21) == 32
    assert extents.largest_free_bytes == 20


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1)])
def test_neighbours_are_joined_in_every_order(order: tuple[int, ...]) -> None:
    extents = ExtentAllocator(30, 10)
    offsets = [extents.allocate(10) for _ in range(3)]
    for index in order:
        offset = offsets[index]
        assert offset is not None
        extents.free(offset, 10)
    assert extents.largest_free_bytes == 30
    assert extents.allocate(30) == 0


def test_growth_joins_with_the_free_end() -> None:
    extents = ExtentAllocator(0, 8)
    assert extents.allocate(8) is None
    extents.grow(16)
    assert extents.allocate(8) == 0
    extents.grow(32)
    assert extents.capacity_bytes == 32
    assert extents.allocate(24) == 8


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 8), (8, 16), (8, 24), (16, 8), (12, 8)])
def test_wrong_frees_are_refused_and_change_nothing(offset: int, nbytes: int) -> None:
    extents = ExtentAllocator(64, 8)
    extents.allocate(8)
    extents.allocate(8)
    extents.free(0, 8)
    with pytest.raises(StateError):
        extents.free(offset, nbytes)
    assert extents.allocated_bytes == 8
    assert extents.allocate(8) == 0


def test_impossible_arguments_are_refused() -> None:
    extents = ExtentAllocator(64, 8)
    with pytest.raises(ValueError, match="alignment=0"):
        ExtentAllocator(64, 0)
    with pytest.raises(ValueError, match="nbytes=0"):
        extents.allocate(0)
    with pytest.raises(ValueError, match="smaller than 64"):
        extents.grow(32)


def _fragmented() -> ExtentAllocator:
    """Three ranges of 8 bytes in use, with a hole behind each, and 16 bytes at the end."""
    extents = ExtentAllocator(64, 8)
    for _ in range(6):
        extents.allocate(8)
    for offset in (8, 24, 40):
        extents.free(offset, 8)
    return extents


CHANGES: list[Callable[[ExtentAllocator], object]] = [
    lambda extents: extents.allocate(16),
    lambda extents: extents.allocate(8),
    lambda extents: extents.free(16, 8),
    lambda extents: extents.grow(96),
]


@pytest.mark.parametrize("change", CHANGES, ids=["part of a hole", "a hole", "free", "grow"])
def test_no_memory_half_way_leaves_the_free_lists_whole(change: Callable[[ExtentAllocator], object]) -> None:
    memory = pytest.importorskip("_testcapi", reason="Python's own tests are not installed")
    for allocations in range(12):
        extents = _fragmented()
        memory.set_nomemory(allocations, allocations + 1)
        try:
            found = change(extents)
        except MemoryError:
            found = None
        finally:
            memory.remove_mem_hooks()
        taken = {0, 32} | ({found} if isinstance(found, int) else set())
        while (offset := extents.allocate(8)) is not None:
            assert offset not in taken, "handed out twice"
            taken.add(offset)
        for offset in {*taken, 16}:
            for nbytes in (8, 16):
                with suppress(StateError):
                    extents.free(offset, nbytes)
        assert extents.allocated_bytes == 0
        assert extents.largest_free_bytes == extents.capacity_bytes, "all of it is one range again"
        assert extents.allocate(extents.capacity_bytes) == 0
