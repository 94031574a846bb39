"""The extent allocator: best fit, coalescing, growth, and refusal of wrong frees."""

from __future__ import annotations

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
