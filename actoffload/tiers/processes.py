"""How many processes share this machine: what the launcher says, else what the members of the group tell each other."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

ANSWER_WITHIN_S = 2.0
"""How long to wait for the other members of a group to say where they run; who does not answer counts as here."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_KEY = "actoffload/host/"
_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PMI_LOCAL_SIZE",
    "PALS_LOCAL_SIZE",
    "JSM_NAMESPACE_LOCAL_SIZE",
    "HOROVOD_LOCAL_SIZE",
)


def processes_here() -> int:
    """The number of processes of this job on this machine, at least 1: by it default budgets are divided.

    torchrun's ``LOCAL_WORLD_SIZE`` is the last word, and so is any other launcher that says two or more. Where a
    launcher says one or nothing, processes may have been spawned by hand: then the members of the default group tell
    each other through its store where they run. That is no collective: a member may do it alone.
    """
    said = local_ranks()
    if "LOCAL_WORLD_SIZE" in os.environ or (said or 1) > 1:
        return said or 1
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return _members_here(dist.get_rank(), dist.get_world_size())


def _members_here(rank: int, world: int) -> int:
    if world < 2 or rank < 0:
        return 1
    try:
        store: Any = dist.distributed_c10d._get_default_store()
        return world if is_loopback(_address(store)) else _ask(store, rank, world)
    except Exception:  # a store of another kind, or one whose server has gone: nobody is known to be elsewhere
        return world


def _address(store: Any) -> str:
    """Where the store of a group is served, if it is served at all."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return str(getattr(store, "host", ""))


def _ask(store: Any, rank: int, world: int) -> int:
    here = _machine()
    store.set(f"{_KEY}{rank}", here)
    open_ = [f"{_KEY}{other}" for other in range(world) if other != rank]
    members = 1
    give_up_s = time.monotonic() + ANSWER_WITHIN_S
    while open_:
        for key in [key for key in open_ if store.check([key])]:
            open_.remove(key)
            members += store.get(key).decode() == here
        if time.monotonic() > give_up_s:
            break
        time.sleep(0.01)
    return members + len(open_)


def _machine() -> str:
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"


# -- what launchers say ---------------------------------------------------------------------------------------------


def local_ranks() -> int | None:
    """How many processes of this job share the machine, as its launcher says; None when no launcher says it.

    Asked in this order: torchrun (and what imitates it), MPI's launchers, DeepSpeed's, Slurm's ``srun``, and a group
    whose master is this machine's loopback address, which nobody else can reach.
    """
    for name in _LOCAL_SIZES:
        ranks = _count(os.environ.get(name))
        if ranks is not None:
            return ranks
    if "LOCAL_RANK" in os.environ:
        ranks = _count(os.environ.get("LOCAL_SIZE"))  # DeepSpeed; too plain a name to be believed alone
        if ranks is not None:
            return ranks
    ranks = _slurm_tasks(os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""), os.environ.get("SLURM_NODEID", "0"))
    if ranks is not None:
        return ranks
    return _count(os.environ.get("WORLD_SIZE")) if is_loopback(os.environ.get("MASTER_ADDR", "")) else None


def is_loopback(host: str) -> bool:
    """Whether a host's name or address means the machine itself, so that only its own processes can use it."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _count(text: str | None) -> int | None:
    try:
        return max(1, int(text or ""))
    except ValueError:
        return None


def _slurm_tasks(text: str, node: str) -> int | None:
    """This node's part of ``SLURM_STEP_TASKS_PER_NODE``, for example ``"4(x2),3"``: four, four and three tasks."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return None
        tasks += [int(match[1])] * int(match[2] or 1)
    index = int(node) if node.isdigit() else 0
    return max(1, tasks[min(index, len(tasks) - 1)])
