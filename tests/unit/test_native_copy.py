"""Copies between buffers, in C."""

from __future__ import annotations

from typing import Any

import pytest

from actoffload.native_known import hooks_in_c


@pytest.fixture(scope="module")
def native() -> Any:
    module = hooks_in_c()
    assert module is not None
    return module


@pytest.mark.parametrize("sizes", [[5], [1, 4096, 0, 70_000], []])
def test_copies(native: Any, sizes: list[int]) -> None:
    sources = [bytes(range(256)) * (size // 256 + 1) for size in sizes]
    targets = [bytearray(size) for size in sizes]
    native.copy([(to, source[: len(to)]) for to, source in zip(targets, sources, strict=True)])
    assert targets == [source[: len(to)] for to, source in zip(targets, sources, strict=True)]
    for to in targets:
        to.append(0)  # nothing holds it any more


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        (1, TypeError),
        ([1], TypeError),
        ([(bytearray(2), b"xy", 2)], TypeError),
        ([(b"no", b"xy")], BufferError),
        ([(bytearray(2), None)], TypeError),
        ([(bytearray(3), b"xy")], ValueError),
    ],
)
def test_copies_of_what_does_not_fit_are_refused(native: Any, parts: Any, error: type[Exception]) -> None:
    first = bytearray(2)
    with pytest.raises(error):
        native.copy(parts if parts == 1 else [(first, b"ab"), *parts])
    first.append(0)
    assert first == bytes(3)
