"""The rate of a link while it is kept busy."""

from __future__ import annotations

import pytest

from actoffload.storage.meters import ENOUGH_BYTES, RateMeter


def replay(meter: RateMeter, transfers: list[tuple[float, float, int]]) -> None:
    """Feed transfers to the meter, each with its begin, its end and its bytes."""
    moments = [(begin_s, 1, n) for n, (begin_s, _, _) in enumerate(transfers)]
    moments += [(end_s, 0, n) for n, (_, end_s, _) in enumerate(transfers)]
    before = {}
    for time_s, begins, n in sorted(moments):  # at one time, ends come before begins
        if begins:
            before[n] = meter.began(time_s)
        else:
            meter.ended(transfers[n][2], time_s, before[n])


def test_only_a_full_link_shows_its_rate() -> None:
    meter = RateMeter(depth=2)
    replay(meter, [(0.0, 10.0, ENOUGH_BYTES)])  # alone: slow
    assert meter.bytes_per_s == ENOUGH_BYTES / 10
    assert meter.full_bytes_per_s is None
    replay(meter, [(20.0, 21.0, ENOUGH_BYTES), (20.0, 21.0, ENOUGH_BYTES), (30.0, 50.0, ENOUGH_BYTES)])
    assert meter.bytes_per_s == meter.full_bytes_per_s == 2 * ENOUGH_BYTES


@pytest.mark.parametrize("overlap_s", [0.1, 1.0, 3.0])
def test_a_transfer_that_was_alone_for_a_while_counts_in_part(overlap_s: float) -> None:
    # A link of ENOUGH_BYTES a second: each transfer is alone for 4 seconds and shares the link with its neighbours.
    nbytes = int(ENOUGH_BYTES * (4.0 + 2 * overlap_s / 2))
    step_s = 4.0 + overlap_s
    meter = RateMeter(depth=2)
    replay(meter, [(n * step_s, (n + 1) * step_s + overlap_s, nbytes) for n in range(20)])
    assert meter.full_bytes_per_s == pytest.approx(ENOUGH_BYTES, rel=0.06)  # the first and the last are half alone


@pytest.mark.parametrize(("burst", "most"), [(2, 1.34), (3, 1.34), (8, 1.14)])
def test_one_after_the_other_a_burst_is_not_taken_for_much_faster_than_it_is(burst: int, most: float) -> None:
    # A link of ENOUGH_BYTES a second that serves in order: all are submitted at once, and one ends each second.
    meter = RateMeter(depth=2)
    for turn in range(4):
        begin_s = 100.0 * turn
        replay(meter, [(begin_s, begin_s + 1 + n, ENOUGH_BYTES) for n in range(burst)])
    assert meter.full_bytes_per_s is not None
    assert 1.0 <= meter.full_bytes_per_s / ENOUGH_BYTES <= most


def test_a_link_that_one_transfer_cannot_fill_is_never_taken_for_faster_than_it_is() -> None:
    # Alone a transfer goes at half of the link's rate; A runs for 3 s, B joins it for the last one and stays for two.
    meter = RateMeter(depth=2)
    a = b = int((2 * 0.5 + 0.5) * 4 * ENOUGH_BYTES)
    replay(meter, [(0.0, 3.0, a), (2.0, 5.0, b)])
    rate = meter.full_bytes_per_s
    assert rate is not None
    assert 0.3 * 4 * ENOUGH_BYTES <= rate <= 4 * ENOUGH_BYTES


def test_after_a_restart_transfers_under_way_still_count_as_load() -> None:
    meter = RateMeter(depth=2)
    first, second = meter.began(0.0), meter.began(0.0)
    meter.ended(7, 1.0, first)
    meter.restart()
    third = meter.began(1.0)
    meter.ended(2 * ENOUGH_BYTES, 2.0, third)
    assert meter.full_bytes_per_s == 2 * ENOUGH_BYTES
    meter.ended(0, 2.0, second)
