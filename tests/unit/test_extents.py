"""The extent allocator: best fit, coalescing, growth, and refusal of wrong frees."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from actoffload.errors import StateError
from actoffload.memory.best_fit import ExtentAllocator


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
