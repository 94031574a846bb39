"""Moving costs nothing while the host runs ahead of the device; where it only just keeps up, a plan declines."""

from __future__ import annotations

import pytest

from actoffload.testing.simulated_device import SimulatedDevice
from tests import host_bound

pytestmark = pytest.mark.simulated


def test_a_plan_declines_where_hooks_keep_the_host_from_the_device(device: SimulatedDevice) -> None:
    row = host_bound.run(device, host_bound.LAUNCHES["host-bound"])
    assert max(row["seconds"][2:6]) > 1.1 * row["keep_s"], "before that was seen"
    assert row["late"] <= 1.02
    assert "while hooks kept the host busy" in row["explained"]
    assert "why is a step slower:\n" not in row["explained"]


def test_a_plan_moves_where_the_host_runs_ahead(device: SimulatedDevice) -> None:
    row = host_bound.run(device, host_bound.LAUNCHES["device-bound"])
    assert row["late"] <= 1.02
    assert row["moved_share"] > 0.2
    assert "hooks that move" in row["explained"]
    assert "why is a step slower:\n" not in row["explained"]
