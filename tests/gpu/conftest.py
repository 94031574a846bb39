"""Fixtures of the tests on an accelerator: a real one, or with ``--simulated`` the simulated device."""

from __future__ import annotations

from typing import Any

import pytest

from actoffload import Offloader
from tests.harness import MakeOffloader


@pytest.fixture
def make_offloader(make_offloader: MakeOffloader) -> MakeOffloader:
    """Make offloaders that move all that may move, and poison freed memory; they end with the test."""

    def make(**options: Any) -> Offloader:
        defaults: dict[str, Any] = {"policy": "all", "debug": True, "allow_any_filesystem": True}
        return make_offloader(**defaults | options)

    return make
