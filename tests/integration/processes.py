"""Run a module in several processes that form one gloo group, and collect what each rank found."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
PYTHONPATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
"""Of a process that imports these tests, and from where this one imports the rest."""
GIVE_UP_S = 240.0


def launch(module: str, world: int, directory: Path, *arguments: str, env: dict[str, str] | None = None) -> list[Any]:
    """Run ``python -m module`` once for each rank; returns what each rank gave to `answer`, in rank order.

    The ranks find each other through a file, so that tests which run side by side need no ports. A rank that fails
    ends the others; a hang dumps every stack and fails.

    Args:
        module: a module that calls `main`.
        world: how many processes.
        directory: an empty directory of the test's own.
        arguments: handed to the module.
        env: more environment variables.
    """
    base = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
        "RANKS_DIRECTORY": str(directory),
        "TMPDIR": str(directory),
        "PYTHONPATH": PYTHONPATH,
        # Used only by frameworks that insist on them; the group itself meets through a file.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        **(env or {}),
    }
    logs = [open(directory / f"log{rank}.txt", "w+", encoding="utf-8") for rank in range(world)]  # noqa: SIM115
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stdout=logs[rank],
            stderr=subprocess.STDOUT,
        )
        for rank in range(world)
    ]
    try:
        failed = _wait(ranks)
        if failed is not None:
            raise AssertionError(f"rank {failed} of {module} failed:\n{_all_logs(logs)}")
        return [torch.load(directory / f"rank{rank}.pt", weights_only=False) for rank in range(world)]
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait()
        for log in logs:
            log.close()


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """The first rank that failed or never ended, or None when all went well."""
    deadline_s = time.monotonic() + GIVE_UP_S
    while any(process.poll() is None for process in ranks):
        bad = [rank for rank, process in enumerate(ranks) if process.poll() not in (None, 0)]
        if bad:
            time.sleep(1.0)  # let it finish its message
            return bad[0]
        if time.monotonic() > deadline_s:
            for process in ranks:
                process.send_signal(signal.SIGABRT)  # faulthandler prints every stack
            time.sleep(1.0)
            return 0
        time.sleep(0.02)
    bad = [rank for rank, process in enumerate(ranks) if process.returncode]
    return bad[0] if bad else None


def _all_logs(logs: Sequence[Any]) -> str:
    texts = []
    for rank, log in enumerate(logs):
        log.seek(0)
        texts.append(f"--- rank {rank}\n{log.read()[-8000:]}")
    return "\n".join(texts)


def scratch() -> Path:
    """The directory that `launch` was given."""
    return Path(os.environ["RANKS_DIRECTORY"])


def join_group() -> None:
    """Join the gloo group of this launch."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{scratch()}/store", rank=rank, world_size=world)


def main(work: Callable[[], Any]) -> None:
    """Call ``work`` in a rank that `launch` started, inside the gloo group, and hand its result back."""
    faulthandler.enable()
    torch.set_num_threads(1)
    join_group()
    try:
        found = work()
        torch.save(found, scratch() / f"rank{os.environ['RANK']}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
