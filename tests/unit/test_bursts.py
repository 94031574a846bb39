"""When one autograd node saves most of a forward, as a compiled graph does."""

from __future__ import annotations

import pytest

from actoffload.bursts import MANY, Bursts, advice


def bursts(*nodes: tuple[int, int]) -> Bursts:
    """Nodes one after the other, each with so many storages of so many bytes."""
    seen = Bursts()
    for number, (count, nbytes) in enumerate(nodes):
        for index in range(count):
            assert seen.saved(number, nbytes) == (index + 1 >= MANY)
            assert seen.node_bytes == (index + 1) * nbytes
    return seen


@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        ([(20, 100)], True),
        ([(20, 100), (1, 1900)], True),
        ([(20, 100), (1, 2000)], False),  # half, not more
        ([(20, 100)] * 2, False),
        ([(20, 100)] * 12, False),
        ([(MANY - 1, 100)], False),
        ([(MANY, 100)], True),
        ([(1, 100)] * 50, False),
        ([], False),
    ],
)
def test_only_a_burst_of_more_than_half_is_told(nodes: list[tuple[int, int]], told: bool) -> None:
    total_bytes = sum(count * nbytes for count, nbytes in nodes)
    assert (advice(bursts(*nodes), total_bytes) is not None) == told


def test_the_advice_has_the_numbers() -> None:
    text = advice(bursts((16, 1024), (1, 4096)), 20480)
    assert text is not None
    assert "16.0 KiB of the 20.0 KiB" in text
    assert "(80%, 16 tensors)" in text
