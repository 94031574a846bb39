"""What every test shares: markers that skip, plugins that may be absent, and Hypothesis without a clock."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actoffload import OffloadConfig, Offloader

try:
    import hypothesis
except ImportError:
    pass
else:
    # Shared machines stall: a slow example is no failure.
    hypothesis.settings.register_profile("steady", deadline=None, print_blob=True)
    hypothesis.settings.load_profile("steady")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Let the settings of pytest-timeout stand where that is not installed; `--strict-config` would refuse them."""
    if not pluginmanager.hasplugin("timeout"):
        for name in ("timeout", "timeout_method"):
            parser.addini(name, "for pytest-timeout, which is not installed here")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked ``gpu`` where there is no accelerator."""
    if torch.accelerator.is_available():
        return
    skip = pytest.mark.skip(reason="needs an accelerator")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What has been imported by now stays: no test has to look at it in search of garbage, or of live modules."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def make_offloader(tmp_path: Path) -> Iterator[Callable[..., Offloader]]:
    """Make offloaders that move everything to disk, without a plan, unless told otherwise; they end with the test."""
    made: list[Offloader] = []

    def make(**options: Any) -> Offloader:
        defaults: dict[str, Any] = {"target": "nvme", "path": str(tmp_path), "min_bytes": 0, "keep_last_bytes": 0}
        defaults["policy"] = "greedy"
        made.append(Offloader(OffloadConfig(**(defaults | options))))
        return made[-1]

    yield make
    for offloader in made:
        offloader.abort()
