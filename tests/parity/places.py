"""Where saved tensors go in the parity tests: one `Place` for each target that this machine has.

The simulated device, or a real one, is one more `Place` in `PLACES`; every test that asks for ``make_offloader`` then
runs there too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actoffload import OffloadConfig, Offloader, Statistics
from actoffload.testing.fakedevice import FakeDevice
from actoffload.tiers.accelerator import Accelerator


@dataclass(frozen=True)
class Place:
    """A target, and how to tell that tensors really went there and came back.

    Attributes:
        name: the test's id.
        options: fields of the configuration.
        device: where the models live.
        accelerator: makes the device's driver, one for each test; None takes the real one. If it is a context manager
            (the simulated device), the whole test runs inside it.
        settle: makes everything that moves leave the device, so that backward has to bring it back.
        medium: ``"nvme"`` or ``"host"``: whose counters have to show bytes.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    accelerator: Callable[[], Accelerator] | None = None
    settle: Callable[[Offloader], None] = Offloader.synchronize
    medium: str = "nvme"

    def make(self, path: Path, options: dict[str, Any], accelerator: Accelerator | None = None) -> Offloader:
        """An offloader that moves everything that may move."""
        fields: dict[str, Any] = {"path": path, "min_bytes": 0, "keep_last_bytes": 0, "allow_any_filesystem": True}
        fields["policy"] = "greedy"  # a plan would let small models stay
        config = OffloadConfig(**(fields | self.options | options))
        return Offloader(config, accelerator=accelerator)

    def written(self, statistics: Statistics) -> int:
        """Bytes that really went there."""
        return statistics.nvme_written_bytes if self.medium == "nvme" else statistics.host_written_bytes

    def read(self, statistics: Statistics) -> int:
        """Bytes that really came back."""
        return statistics.nvme_read_bytes if self.medium == "nvme" else statistics.host_read_bytes


PLACES = [Place("nvme", {"target": "nvme"}), Place("tiered", {"target": "tiered", "host_budget": "1MiB"})]
SIMULATED = Place("simulated host", {"target": "host", "debug": True}, accelerator=FakeDevice, medium="host")
"""The simulated device, slow as it is, runs the eager part of the matrix."""


class Maker:
    """What the fixture ``make_offloader`` gives: makes offloaders at one place, and closes them at the end."""

    def __init__(self, place: Place, path: Path) -> None:
        self.place = place
        self.path = path
        self.made: list[Offloader] = []
        self.accelerator = place.accelerator() if place.accelerator else None
        self._inside = contextlib.ExitStack()
        if isinstance(self.accelerator, contextlib.AbstractContextManager):
            self._inside.enter_context(self.accelerator)

    def __call__(self, **options: Any) -> Offloader:
        offloader = self.place.make(self.path, options, self.accelerator)
        self.made.append(offloader)
        return offloader

    def close(self) -> None:
        for offloader in self.made:
            offloader.close()
        self._inside.close()

    def settle(self, offloader: Offloader) -> None:
        self.place.settle(offloader)

    def assert_moved(self, offloader: Offloader, before: Statistics | None = None) -> None:
        """Bytes left and came back (since ``before``), nothing failed, and nothing is left over."""
        before = before or Statistics()
        after = offloader.statistics()
        assert self.place.written(after) > self.place.written(before)
        assert self.place.read(after) > self.place.read(before)
        assert after.degraded == {}
        assert after.live_records == 0
