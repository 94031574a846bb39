"""The running counts, and the frozen statistics made of them."""

from __future__ import annotations

import dataclasses

import pytest

from actoffload.accounts import Accounts


def test_peaks_are_the_most_at_once() -> None:
    accounts = Accounts()
    for nbytes in (10, 20):
        accounts.born(nbytes)
        accounts.came(nbytes)
    accounts.left(10)
    accounts.born(5)
    accounts.came(5)
    assert (accounts.live_records, accounts.resident_bytes, accounts.baseline_bytes) == (3, 25, 35)
    for nbytes in (10, 20, 5):
        accounts.died(nbytes)
    for nbytes in (20, 5):
        accounts.left(nbytes)
    assert (accounts.live_records, accounts.resident_bytes, accounts.baseline_bytes) == (0, 0, 0)
    assert (accounts.resident_peak_bytes, accounts.baseline_peak_bytes) == (30, 35)


def test_kept_tensors_count_in_the_baseline_but_are_no_records() -> None:
    accounts = Accounts()
    accounts.saved(7)
    assert (accounts.live_records, accounts.baseline_bytes, accounts.baseline_peak_bytes) == (0, 7, 7)


def test_frozen_statistics_do_not_follow_the_counts() -> None:
    accounts = Accounts()
    accounts.born(10)
    accounts.kept_bytes["policy"] += 10
    accounts.degraded["write failed"] += 1
    frozen = accounts.freeze(nvme_written_bytes=4096, host_peak_bytes=1)
    accounts.born(10)
    accounts.kept_bytes["policy"] += 10
    accounts.degraded["write failed"] += 1
    assert (frozen.live_records, frozen.kept_bytes, frozen.degraded) == (1, {"policy": 10}, {"write failed": 1})
    assert (frozen.nvme_written_bytes, frozen.host_peak_bytes, frozen.host_read_bytes) == (4096, 1, 0)


def test_every_count_has_its_place_in_the_statistics() -> None:
    running = {"resident_bytes", "baseline_bytes", "moved_bytes", "step_peak_bytes", "recomputed_bytes", "notes"}
    own = set(Accounts.__slots__) - running
    fields = {field.name for field in dataclasses.fields(Accounts().freeze())}
    assert own <= fields
    assert fields - own == {
        "host_written_bytes",
        "host_read_bytes",
        "nvme_written_bytes",
        "nvme_read_bytes",
        "host_peak_bytes",
        "nvme_peak_bytes",
    }


def test_an_unknown_count_is_refused() -> None:
    with pytest.raises(TypeError):
        Accounts().freeze(eaten_bytes=1)
