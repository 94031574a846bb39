"""Statistics and the report that is made of them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from actoffload.config import make_config
from actoffload.policy import KeepReason
from actoffload.statistics import Statistics
from actoffload.summary import KEPT_MEANINGS, render_report

MIB = 1 << 20

FIELDS = [
    "steps",
    "packed_tensors",
    "packed_bytes",
    "deduplicated_bytes",
    "kept_bytes",
    "host_written_bytes",
    "host_read_bytes",
    "nvme_written_bytes",
    "nvme_read_bytes",
    "forwarded_bytes",
    "cancelled_bytes",
    "resident_peak_bytes",
    "baseline_peak_bytes",
    "host_peak_bytes",
    "nvme_peak_bytes",
    "pack_wait_s",
    "unpack_wait_s",
    "live_records",
    "degraded",
]


def _statistics(**changes: Any) -> Statistics:
    values: dict[str, Any] = {
        "steps": 3,
        "packed_tensors": 30,
        "packed_bytes": 120 * MIB,
        "deduplicated_bytes": 20 * MIB,
        "kept_bytes": {"below min_bytes": 2 * MIB, "parameter": 8 * MIB, "pressure": 0},
        "nvme_written_bytes": 90 * MIB,
        "nvme_read_bytes": 80 * MIB,
        "forwarded_bytes": 10 * MIB,
        "resident_peak_bytes": 10 * MIB,
        "baseline_peak_bytes": 40 * MIB,
        "nvme_peak_bytes": 30 * MIB,
        "pack_wait_s": 0.25,
        "unpack_wait_s": 1.0,
    }
    return Statistics(**(values | changes))


def test_the_fields_are_the_contract() -> None:
    assert [field.name for field in dataclasses.fields(Statistics)] == FIELDS


def test_derived_numbers() -> None:
    statistics = _statistics()
    assert statistics.saved_bytes == 100 * MIB
    assert statistics.moved_bytes == 90 * MIB
    assert statistics.activation_bytes == 92 * MIB
    assert statistics.moved_share == 90 / 92
    assert statistics.resident_share == 0.25
    assert statistics.wait_s == 1.25


def test_what_goes_to_disk_through_host_memory_counts_once() -> None:
    assert _statistics(host_written_bytes=95 * MIB).moved_bytes == 95 * MIB


def test_shares_of_nothing_are_zero_and_alignment_never_exceeds_one() -> None:
    assert (Statistics().moved_share, Statistics().resident_share) == (0.0, 0.0)
    assert _statistics(nvme_written_bytes=101 * MIB).moved_share == 1.0


def test_as_dict_is_json_with_derived_numbers() -> None:
    values = json.loads(json.dumps(_statistics().as_dict()))
    assert set(values) == {
        *FIELDS,
        "saved_bytes",
        "activation_bytes",
        "moved_bytes",
        "moved_share",
        "resident_share",
        "wait_s",
    }
    assert values["kept_bytes"]["parameter"] == 8 * MIB


def test_the_report_begins_with_what_matters() -> None:
    report = render_report(make_config({"target": "nvme"}), _statistics())
    assert report.splitlines()[0] == (
        "actoffload (target nvme): in 3 steps, moved 90.0 MiB of 92.0 MiB saved activations (98%); resident "
        "peak 10.0 MiB of 40.0 MiB (25%); waited 1.25 s (forward 0.25, backward 1.00)."
    )


def test_the_report_lists_what_was_kept_by_size() -> None:
    lines = render_report(make_config({}), _statistics()).splitlines()
    kept = lines[lines.index("kept where they were:") + 1 :]
    assert [line.split()[:3] for line in kept] == [["8.0", "MiB", "parameter"], ["2.0", "MiB", "below"]]


def test_every_reason_to_keep_has_a_meaning() -> None:
    assert set(KEPT_MEANINGS) == {reason.value for reason in KeepReason}


def test_the_report_shows_only_tiers_in_use() -> None:
    report = render_report(make_config({}), _statistics())
    assert "  nvme  written   90.0 MiB   read   80.0 MiB   peak   30.0 MiB" in report
    assert "  host  " not in report
    assert "forwarded 10.0 MiB" in report


def test_the_report_says_what_went_wrong_and_the_notes() -> None:
    statistics = _statistics(degraded={"disk full": 2})
    report = render_report(make_config({}), statistics, notes=["engine posix: direct I/O works"])
    assert "degraded" in report
    assert "     2 × disk full" in report
    assert report.endswith("note: engine posix: direct I/O works")
    assert "degraded" not in render_report(make_config({}), _statistics())


@dataclasses.dataclass
class _Spool:
    engine: str = "posix"
    direct: bool = True
    alignment: int = 512


def test_the_report_takes_the_spool_as_dataclass_or_mapping() -> None:
    expected = "storage engine posix, direct I/O, alignment 512 B"
    assert expected in render_report(make_config({}), _statistics(), _Spool())
    assert expected in render_report(make_config({}), _statistics(), dataclasses.asdict(_Spool()))
    with pytest.raises(TypeError, match="not str"):
        render_report(make_config({}), _statistics(), "posix")


def test_the_report_before_anything_was_saved() -> None:
    assert "saved nothing" in render_report(make_config({}), Statistics())


def test_the_report_says_what_a_day_of_this_costs_the_drive() -> None:
    statistics = Statistics(nvme_written_bytes=10**12, packed_tensors=1, steps=1)
    report = render_report(make_config({"drive_tbw": "600TB"}), statistics, elapsed_s=3600)
    assert "1.0 TB written in 60.0 min, 24.0 TB a day at this rate; 25.0 days of writing" in report
    assert "600.0 TB of the drive" in report
    two = make_config({"drive_tbw": "600TB", "path": ["/one", "/two"]})
    assert "50.0 days of writing" in render_report(two, statistics, elapsed_s=3600)
    assert "set drive_tbw=" in render_report(make_config({}), statistics, elapsed_s=3600)
    assert "wear" not in render_report(make_config({}), Statistics(packed_tensors=1, steps=1), elapsed_s=3600)
