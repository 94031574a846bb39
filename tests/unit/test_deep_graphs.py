"""Graphs of very many nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_deep_graph_is_freed_without_recursion(tmp_path: Path) -> None:
    """Once Python has seen a graph's nodes they are freed one inside the other: at this depth the process ended."""
    script = """
import sys, torch, torch.distributed as dist, torch.distributed.tensor
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # where DTensors may be
from actoffload import OffloadConfig, Offloader
offloader = Offloader(OffloadConfig(target="nvme", path=sys.argv[1], policy="all"))
h = x = torch.zeros(8, requires_grad=True)
with offloader:
    for _ in range(60_000):
        h = h.sin()
h.sum().backward()
del h
offloader.close()
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "alive" in done.stdout, (done.returncode, done.stderr[-2000:])
