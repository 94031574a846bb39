"""Ranks whose blocks communicate agree on what is recomputed; if they did not, this would fail."""

from __future__ import annotations

from pathlib import Path

from tests.integration.processes import launch


def test_ranks_recompute_the_same_blocks_whatever_their_disks(tmp_path: Path) -> None:
    one, other = launch("tests.integration.workers.planned_ranks", 2, tmp_path)
    assert one["equal"]
    assert other["equal"]
    assert one["recompute"] == tuple(f"layers.{n}" for n in range(4))  # the slow disk decides for both
    assert one["recompute"] == other["recompute"]
    assert one["live"] == other["live"] == 0
    assert one["history"][-1] == other["history"][-1] == "the ranks agreed on one profile"  # and it stays
