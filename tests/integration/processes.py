"""Run a module in several processes that form one gloo group, and collect the result of each rank."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from tests.programs import warm_python

ROOT = Path(__file__).resolve().parents[2]
PYTHONPATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
"""For child processes: this repository first, then this process's own PYTHONPATH."""
GIVE_UP_S = 240.0

Chosen = Callable[[str], set[Any]]
"""The fixture ``chosen``."""


def cases(rows: Iterable[str], thorough: Collection[str], marks: Mapping[str, Any] | None = None) -> list[Any]:
    """Cases for these rows, of which those in ``thorough`` run with ``--thorough`` alone; ``marks`` are other marks."""
    known = dict(marks or {}) | dict.fromkeys(thorough, pytest.mark.thorough)
    return [pytest.param(row, marks=known.get(row, ())) for row in rows]


def launch(
    module: str,
    world: int,
    directory: Path,
    *arguments: str,
    env: dict[str, str] | None = None,
    modules: tuple[str, ...] = (),
) -> list[Any]:
    """Run ``python -m module`` once for each rank; returns the result of each rank's `main`, in rank order.

    Frameworks take seconds to import. So one process imports the module, and forks the ranks. To finalize an
    interpreter takes seconds, too, so these processes end without it. The ranks meet through a file, because tests that
    run side by side would compete for ports. If a rank fails, all end. A rank that hangs dumps the stacks of its
    threads, and the launch fails.

    Args:
        module: a module that calls `main`.
        world: how many processes.
        directory: an empty directory that no other launch uses.
        arguments: command-line arguments of the module.
        env: more environment variables.
        modules: what has been imported beside PyTorch, before these variables are set.
    """
    base = os.environ | {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    base |= {"RANKS_DIRECTORY": str(directory), "TMPDIR": str(directory), "PYTHONPATH": PYTHONPATH}
    # Some frameworks require them; the group itself meets through a file.
    base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", **(env or {})}
    command = [warm_python(*modules), "-m", __name__, module, *arguments]
    with open(directory / "log.txt", "wb") as log:
        parent = subprocess.Popen(command, env=base, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            status = parent.wait(GIVE_UP_S + 30)  # before pytest's own timeout
        finally:
            with contextlib.suppress(ProcessLookupError):  # its children are in the same process group
                os.killpg(parent.pid, signal.SIGKILL)
            parent.wait()
    if status != 0:
        files = sorted(directory.glob("log*.txt"))
        logs = (f"--- {file.name}\n{file.read_text(errors='replace')[-8000:]}" for file in files)
        raise AssertionError("\n".join([f"{module} failed:", *logs]))
    return [torch.load(directory / f"rank{rank}.pt", weights_only=False) for rank in range(world)]


def prepare_to_fork() -> None:
    """After the imports: spare children DeepSpeed's late imports, and the collection of objects that they share.

    Trainers call ``gc.collect()`` several times in a run. Each call takes a second if it visits a whole framework.
    """
    if "deepspeed" in sys.modules:
        torch.compile(abs)  # DeepSpeed calls it at its first optimizer, and the call imports the compiler
        with contextlib.suppress(ImportError):
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")  # also at the first optimizer
    gc.freeze()


def _run_ranks(module: str) -> NoReturn:
    """Fork the ranks and wait for them, in the process that `launch` started."""
    world, deadline_s = int(os.environ["WORLD_SIZE"]), time.monotonic() + GIVE_UP_S
    if world > 1:
        importlib.import_module(module)
        prepare_to_fork()
    ranks: list[int] = []
    for rank in range(world):
        ranks.append(os.fork())  # safe: no import has started a thread
        if ranks[-1] == 0:
            _run_rank(module, rank)
    running = set(ranks)
    while running and time.monotonic() < deadline_s:
        pid, status = os.waitpid(-1, os.WNOHANG)
        running.discard(pid)
        if status:
            _end(f"rank {ranks.index(pid)} failed")
        time.sleep(0.02)
    for pid in running:
        os.kill(pid, signal.SIGABRT)  # faulthandler prints every stack
    if running:
        time.sleep(1.0)
        _end("the ranks never ended")
    _end()


def _end(error: str = "") -> NoReturn:
    """End this process without finalizing the interpreter."""
    sys.stderr.write(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(bool(error))


def _run_rank(module: str, rank: int) -> NoReturn:
    """Run the module in this rank as ``python -m module`` would, with a log of its own."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    with open(scratch() / f"log{rank}.txt", "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.argv = sys.argv[1:]
    sys.modules.pop(module, None)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except BaseException:
        _end(traceback.format_exc())
    _end()


def scratch() -> Path:
    """The ``directory`` of `launch`."""
    return Path(os.environ["RANKS_DIRECTORY"])


def join_group() -> None:
    """Join the gloo group of this launch."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{scratch()}/store", rank=rank, world_size=world)


def main(work: Callable[[], Any]) -> None:
    """Call ``work`` in a rank that `launch` started, inside the gloo group, and save its result for `launch`."""
    gc.freeze()  # a single rank has imported the module itself, after the fork
    faulthandler.enable()
    torch.set_num_threads(1)
    join_group()
    try:
        found = work()
        torch.save(found, scratch() / f"rank{os.environ['RANK']}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    _run_ranks(sys.argv[1])
