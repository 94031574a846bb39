"""How many processes share this machine: by the launcher's variables, else by the size of the process group."""

from __future__ import annotations

import os
import re

import torch.distributed as dist

_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PMI_LOCAL_SIZE",
    "PALS_LOCAL_SIZE",
    "SLURM_STEP_TASKS_PER_NODE",
)
"""Variables of launchers. Slurm writes ``4(x2),3`` for two machines with four tasks and one with three."""


def processes_here() -> int:
    """Return the number of processes of this job on this machine, at least 1; default budgets are divided by it.

    torchrun's ``LOCAL_WORLD_SIZE`` is the last word, and so is any other variable of two or more. If all are
    one or unset, processes may have been started by hand: then every member of the default process
    group counts as here. That may be too many, which costs some of the budget and is safe.
    """
    said = 1
    for name in reversed(_LOCAL_SIZES):
        text = re.sub(r"\(x\d+\)", "", os.environ.get(name, ""))
        if re.fullmatch(r"\d+(,\d+)*", text):
            said = max(1, *map(int, text.split(",")))
    if "LOCAL_WORLD_SIZE" in os.environ or said > 1:
        return said
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
