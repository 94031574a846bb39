"""Machines, splits and drives on paper, from which an estimate begins, and the wear of drives."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actoffload.errors import ConfigError
from actoffload.storage.endurance import DAY_S, YEAR_S, render_wear, written_per_day
from actoffload.tools.models import import_function
from actoffload.tools.on_paper import DRIVES, Hardware, Parallelism

GIB = 1 << 30
DRIVE = DRIVES["980pro-1tb"]


def machine(**changes: Any) -> Hardware:
    values: dict[str, Any] = {"name": "toy", "flops_per_s": 5e13, "drive": DRIVE}
    values |= {"link_bytes_per_s": 10e9, "memory_bytes": 80 * GIB}
    return Hardware(**(values | changes))


def test_ssdtrains_lifetime_on_rated_endurance_is_days() -> None:
    """Of four drives in steps of two seconds that write 12.1 GB."""
    assert 4 * DRIVE.rated_written_bytes / 12.1e9 * 2 / DAY_S == pytest.approx(4.6, abs=0.05)
    assert 4 * DRIVES["p5800x-1.6tb"].rated_written_bytes / 12.1e9 * 2 / YEAR_S == pytest.approx(6.1, abs=0.05)


@pytest.mark.parametrize(
    ("changes", "write", "read"),
    [
        ({}, 10e9, 10e9),
        ({"drives": 1}, 5e9, 7e9),
        ({"disk_bytes_per_s": 2e9}, 2e9, 2e9),
        ({"disk_bytes_per_s": 2e9, "target": "host"}, 10e9, 10e9),
        ({"drive": replace(DRIVE, write_bytes_per_s=1e9), "drives": 2}, 2e9, 10e9),
    ],
)
def test_bytes_are_as_fast_as_the_slower_of_link_and_drives(changes: dict[str, Any], write: float, read: float) -> None:
    found = machine(**changes)
    assert (found.write_bytes_per_s, found.read_bytes_per_s) == (write, read)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Parallelism(data=0), "data=0"),
        (lambda: machine(flops_per_s=math.inf), "flops_per_s=inf"),
        (lambda: machine(drives=0), "drives=0"),
    ],
)
def test_errors_name_the_field_and_the_remedy(make: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value).startswith(message)


def test_wear_of_a_measured_run() -> None:
    drive = 600 * 10**12
    assert written_per_day(10**12, 3600) == 24e12
    assert render_wear(0, 3600, drive) == []
    assert render_wear(10**12, 0, drive) == []
    assert render_wear(10**12, 3600, drive) == [
        "SSD wear: 1.0 TB written in 60.0 min, 24.0 TB a day at this rate; 25.0 days of writing at this rate to the "
        "rated 600.0 TB of the drive"
    ]
    assert "50.0 days" in render_wear(10**12, 3600, drive, drives=2)[0]
    assert "1.2 PB of 2 × the drive" in render_wear(10**12, 3600, drive, drives=2)[0]
    assert "set drive_tbw=" in render_wear(10**12, 3600, None)[0]


def test_the_file_of_ones_own_model_is_a_module(tmp_path: Path) -> None:
    """Annotations, pickle and PyTorch's compiler look up the names of a file's classes in its module."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\nimport typing\nclass Own:\n    size: typing.Any\n"
        "def build(): return typing.get_type_hints(Own)\n"
    )
    assert import_function("model", f"{file}:build")() == {"size": Any}
