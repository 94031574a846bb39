"""What the process may take: cgroup limits, ranks, and glibc's threshold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from actoffload import memory

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("text", "ranks"), [(None, 1), ("", 1), ("8", 8), ("0", 1), ("-3", 1), ("many", 1)])
def test_local_ranks(monkeypatch: pytest.MonkeyPatch, text: str | None, ranks: int) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if text is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    assert memory.local_ranks() == ranks


def _fake_files(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    def read_text(self: Path, *args: object, **kwargs: object) -> str:
        try:
            return files[str(self)]
        except KeyError:
            raise FileNotFoundError(str(self)) from None

    monkeypatch.setattr(Path, "read_text", read_text)


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"/sys/fs/cgroup/memory.max": "max\n"}, None),
        ({"/sys/fs/cgroup/memory.max": "1073741824\n"}, 1 << 30),
        (
            {
                "/proc/self/cgroup": "0::/user.slice/job\n",
                "/sys/fs/cgroup/memory.max": "max\n",
                "/sys/fs/cgroup/user.slice/job/memory.max": "4096\n",
            },
            4096,
        ),
        (
            {
                "/proc/self/cgroup": "5:cpu,cpuacct:/a\n3:memory:/docker/b\n",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),  # v1's word for "no limit"
                "/sys/fs/cgroup/memory/docker/b/memory.limit_in_bytes": "8192",
            },
            8192,
        ),
        ({"/sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096)}, None),
    ],
)
def test_cgroup_limits(monkeypatch: pytest.MonkeyPatch, files: dict[str, str], limit: int | None) -> None:
    _fake_files(monkeypatch, files)
    assert memory.cgroup_limit_bytes() == limit


def test_what_is_available_is_within_the_limit_and_never_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    free = memory.available_bytes()
    assert free > 0
    monkeypatch.setattr(memory, "cgroup_limit_bytes", lambda: 1)
    assert memory.available_bytes() == 0
    monkeypatch.setattr(memory, "cgroup_limit_bytes", lambda: 1 << 60)
    assert memory.available_bytes() > 0


_GLIBC = """
import os, sys
import torch
from actoffload.memory import fix_mmap_threshold
def rss(): return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
assert fix_mmap_threshold()
first = rss()
for _ in range(3):
    held = [torch.full((2 << 20,), 1, dtype=torch.uint8) for _ in range(32)]
    pins = [torch.empty(100) for _ in range(8)]
    assert rss() - first > 48 << 20
    del held
    assert rss() - first < 16 << 20, rss() - first
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_freed_blocks_leave_the_process() -> None:
    run = subprocess.run([sys.executable, "-c", _GLIBC], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def test_elsewhere_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert memory.fix_mmap_threshold() is False
