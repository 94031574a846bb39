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

import pytest
import torch

from tests.programs import run_program

ROOT = Path(__file__).resolve().parents[2]
CGROUPS = Path("/sys/fs/cgroup")
LIMIT_S = 300.0


@contextlib.contextmanager
def cgroup() -> Iterator[Path]:
    """The file with the limit of a new cgroup below this process's own, or beside it, which ends with the context.

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
            (made / file).write_text(str(1 << 40))
        except OSError as error:
            why = f"no limit of memory can be set: {error.strerror}"
            made.rmdir()
            continue
        with contextlib.suppress(OSError):  # the kernel may have no swap, or not account for it
            (made / "memory.swap.max").write_text("0")
        try:
            yield made / file
        finally:
            made.rmdir()
        return
    pytest.skip(why)


def train(memory: str, keeps: bool, path: Path) -> subprocess.CompletedProcess[str]:
    """Run the worker in a cgroup of its own, which a shell joins, so that this process does not."""
    with cgroup() as limit:
        words = [sys.executable, "-m", "tests.integration.workers.limited", memory, str(int(keeps)), str(limit)]
        command = ["/bin/sh", "-c", f'echo $$ > "{limit.parent}/cgroup.procs" && exec "$@"', "sh", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(path), "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )


# The kernel can reclaim the pages of CUDA's libraries, which the worker counts, so that keeping all fits its limit.
@pytest.mark.skipif(torch.version.cuda is not None, reason="a build for CUDA maps more than this test's room")
@pytest.mark.slow
@pytest.mark.parametrize("keeps", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_hard_limit_kills_no_process_with_device_memory(keeps: bool, tmp_path: Path) -> None:
    killed = train("", True, tmp_path)
    assert killed.returncode == -signal.SIGKILL, f"keeping all must exceed the limit; {killed.stderr}"
    done = train("auto", keeps, tmp_path)
    assert done.returncode == 0, done.stderr
    # Checkpoints change no bit.
    plain = run_program("from tests.integration.workers.limited import main; main('', '1')")
    found, alone = json.loads(done.stdout), json.loads(plain.stdout)
    assert found["bits"] == alone["bits"]
    assert found["moved"] > 0
