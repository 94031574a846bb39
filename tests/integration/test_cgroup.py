"""In a cgroup with a hard memory limit, the kernel kills plain PyTorch, and never a process with `device_memory`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
CGROUPS = Path("/sys/fs/cgroup")
LIMIT_S = 300.0
ROOM_BYTES = 96 * MIB
"""Memory beyond the process's before its first step: half of the bytes that its forward saves."""


@contextlib.contextmanager
def cgroup(limit_bytes: int) -> Iterator[Path]:
    """A cgroup below this process's own, or beside it, with a hard limit; it is removed with the context.

    ``RLIMIT_AS`` does not serve: it bounds the address space, and PyTorch maps many times the memory that it uses.
    """
    own = [line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines()]
    places = []
    for controllers, group in own:
        if controllers in ("", "memory"):
            base = CGROUPS / "memory" if controllers else CGROUPS
            file = "memory.limit_in_bytes" if controllers else "memory.max"
            # In cgroup v2 only the root may have both processes and children; so the new group is a sibling.
            places += [(base / group.lstrip("/"), file), ((base / group.lstrip("/")).parent, file)]
    why = "no cgroup has a memory controller"
    for parent, file in places:
        made = parent / f"actoffload-{uuid.uuid4().hex}"
        try:
            made.mkdir()
        except OSError as error:
            why = f"no cgroup can be made: {error.strerror}"
            continue
        try:
            (made / file).write_text(str(limit_bytes))
        except OSError as error:
            why = f"no limit of memory can be set: {error.strerror}"
            made.rmdir()
            continue
        with contextlib.suppress(OSError):  # the kernel may have no swap, or not account for it
            (made / "memory.swap.max").write_text("0")
        try:
            yield made
        finally:
            made.rmdir()
        return
    pytest.skip(why)


def _train(group: Path | None, memory: str, keeps: bool, path: Path) -> tuple[int, dict[str, Any]]:
    """The worker's exit status, and the facts that it printed."""
    command = [sys.executable, "-m", "tests.integration.workers.limited", memory, str(int(keeps))]
    if group is not None:  # a shell joins the group, so that this process does not
        command = ["/bin/sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, json.loads(done.stdout) if done.returncode == 0 else {}


# `before` counts the pages of CUDA's libraries. The kernel can reclaim them, so that keeping all fits the limit.
@pytest.mark.skipif(torch.version.cuda is not None, reason="a build for CUDA maps more than this test's room")
@pytest.mark.slow
@pytest.mark.parametrize("keeps", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_hard_limit_kills_no_process_with_device_memory(keeps: bool, tmp_path: Path) -> None:
    _, plain = _train(None, "", True, tmp_path)  # checkpoints change no bit, and import PyTorch's compiler
    limit = plain["before"] + ROOM_BYTES
    with cgroup(limit) as group:
        assert _train(group, "", True, tmp_path)[0] == -signal.SIGKILL, "keeping all must exceed the limit"
        status, found = _train(group, "auto", keeps, tmp_path)
        assert status == 0, "the kernel killed it"
        assert found["bits"] == plain["bits"]
        assert found["moved"] > 0
