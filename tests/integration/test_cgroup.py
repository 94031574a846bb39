"""In a cgroup with a hard limit of memory: the system kills plain PyTorch, and never a process with `device_memory`."""

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
"""Above what the process has before its first step: half of what its forward saves."""


@contextlib.contextmanager
def cgroup(limit_bytes: int) -> Iterator[Path]:
    """A cgroup below this process's own, or beside it, with a hard limit; it ends with the context.

    ``RLIMIT_AS`` is no such limit: it bounds addresses, of which PyTorch maps many times what it uses.
    """
    own = [line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines()]
    places = []
    for controllers, group in own:
        if controllers in ("", "memory"):
            base = CGROUPS / "memory" if controllers else CGROUPS
            file = "memory.limit_in_bytes" if controllers else "memory.max"
            # Version 2 has no group with processes and children, unless it is the root: there it is a sibling.
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
        with contextlib.suppress(OSError):  # without swap, or without its count
            (made / "memory.swap.max").write_text("0")
        try:
            yield made
        finally:
            made.rmdir()
        return
    pytest.skip(why)


def _train(group: Path | None, memory: str, keeps: bool, path: Path) -> tuple[int, dict[str, Any]]:
    """The worker's status, and what it printed."""
    command = [sys.executable, "-m", "tests.integration.workers.limited", memory, str(int(keeps))]
    if group is not None:  # a process of its own joins, so that this one stays where it is
        command = ["/bin/sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, json.loads(done.stdout) if done.returncode == 0 else {}


# Pages of its libraries count, but the system can take them back: no limit kills what keeps all.
@pytest.mark.skipif(torch.version.cuda is not None, reason="a build for CUDA maps more than this test's room")
@pytest.mark.slow
def test_a_hard_limit_kills_nothing_that_knows_it(tmp_path: Path) -> None:
    _, plain = _train(None, "", False, tmp_path)
    limit = plain["before"] + ROOM_BYTES
    with cgroup(limit) as group:
        assert _train(group, "", True, tmp_path)[0] == -signal.SIGKILL, "all kept has no room, or the limit is none"
        for keeps in (False, True):  # with the program's checkpoints, and without any
            status, found = _train(group, "auto", keeps, tmp_path)
            assert status == 0, "the system killed it"
            assert found["bits"] == plain["bits"]
            assert found["moved"] > 0
