"""The rate of a link while it is kept busy."""

from __future__ import annotations

import pytest

from actoffload.meters import ENOUGH_BYTES, RateMeter


def test_nothing_is_known_before_anything_has_ended() -> None:
    meter = RateMeter()
    assert meter.bytes_per_s is None
    meter.began(0.0)
    assert meter.bytes_per_s is None


def test_only_a_full_link_shows_its_rate() -> None:
    meter = RateMeter(depth=2)
    meter.began(0.0)
    meter.ended(ENOUGH_BYTES, 10.0)  # alone: slow
    assert meter.bytes_per_s == ENOUGH_BYTES / 10
    meter.began(20.0)
    meter.began(20.0)
    meter.began(20.0)
    meter.ended(ENOUGH_BYTES // 2, 20.5)
    meter.ended(ENOUGH_BYTES // 2, 21.0)
    meter.ended(ENOUGH_BYTES, 30.0)  # the last one is alone
    assert meter.bytes_per_s == ENOUGH_BYTES


def test_time_without_transfers_does_not_count() -> None:
    meter = RateMeter(depth=2)
    for begin_s in (0.0, 100.0, 200.0):
        meter.began(begin_s)
        meter.ended(1000, begin_s + 1)
    assert meter.bytes_per_s == pytest.approx(1000)


def test_what_failed_takes_time_and_moves_nothing() -> None:
    meter = RateMeter(depth=1)
    meter.began(0.0)
    meter.ended(0, 1.0)
    meter.began(1.0)
    meter.ended(1000, 2.0)
    assert meter.bytes_per_s == 500


def test_after_a_restart_what_is_under_way_still_counts_as_load() -> None:
    meter = RateMeter(depth=2)
    meter.began(0.0)
    meter.began(0.0)
    meter.ended(7, 1.0)
    meter.restart()
    meter.began(1.0)
    meter.ended(ENOUGH_BYTES, 2.0)
    assert meter.bytes_per_s == ENOUGH_BYTES
