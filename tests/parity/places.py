"""Where saved tensors go in the parity tests: one `Place` for each target that this machine has.

Tests that use ``make_offloader`` run at the first of `PLACES`, and at the second one with ``--thorough`` or with large
tensors. The matrix runs on the simulated device too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actoffload import OffloadConfig, Offloader, Statistics
from actoffload.testing.simulated_device import NAME


@dataclass(frozen=True)
class Place:
    """A target, and how to check that tensors really went there and came back.

    Attributes:
        name: the test's id.
        options: fields of the configuration.
        device: where the models live.
        medium: ``"nvme"`` or ``"host"``: its counters have to show bytes.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    medium: str = "nvme"

    def make(self, path: Path, options: dict[str, Any]) -> Offloader:
        fields: dict[str, Any] = {"path": path, "min_bytes": 0, "keep_last_bytes": 0, "allow_any_filesystem": True}
        fields["policy"] = "greedy"  # a plan would let small models stay
        return Offloader(OffloadConfig(**(fields | self.options | options)))

    def written(self, statistics: Statistics) -> int:
        return statistics.nvme_written_bytes if self.medium == "nvme" else statistics.host_written_bytes

    def read(self, statistics: Statistics) -> int:
        return statistics.nvme_read_bytes if self.medium == "nvme" else statistics.host_read_bytes


PLACES = [Place("nvme", {"target": "nvme"}), Place("tiered", {"target": "tiered", "host_budget": "1MiB"})]
OF_LARGE_TENSORS = {
    "test_unaligned_spans",
    "test_several_paths",
    "test_a_saved_tensor_that_backward_returns_as_a_gradient",
    "test_changing_a_restored_tensor_raises",
}
"""With tensors below 64 KiB both places of the CPU walk the same lines. Of larger ones the second joins none."""
SIMULATED = [
    Place("simulated host", {"target": "host", "debug": True}, device=NAME, medium="host"),
    Place("simulated nvme", {"target": "nvme", "debug": True, "host_budget": "1MiB"}, device=NAME),
    Place("simulated tiered", {"target": "tiered", "host_budget": "1MiB"}, device=NAME, medium="host"),
]
"""With ``pytest --simulated``."""


class Maker:
    """The fixture ``make_offloader``: makes offloaders at one place, and closes them at the end."""

    def __init__(self, place: Place, path: Path) -> None:
        self.place = place
        self.path = path
        self.made: list[Offloader] = []

    def __call__(self, **options: Any) -> Offloader:
        offloader = self.place.make(self.path, options)
        self.made.append(offloader)
        return offloader

    def close(self) -> None:
        for offloader in self.made:
            offloader.close()

    def assert_moved(self, offloader: Offloader, before: Statistics | None = None) -> None:
        """Bytes left and came back (since ``before``), nothing failed, and nothing is left over."""
        before = before or Statistics()
        after = offloader.statistics()
        assert self.place.written(after) > self.place.written(before)
        assert self.place.read(after) > self.place.read(before)
        assert after.degraded == {}
        assert after.live_records == 0
