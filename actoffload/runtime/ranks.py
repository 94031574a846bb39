"""Facts about the process groups of `torch.distributed`."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist


def several_ranks(group: Any = None) -> bool:
    """Whether the process group has more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def collectives() -> int | None:
    """Return how many collectives this process has enqueued, over all groups; None if a backend does not count."""
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return 0
    try:
        return sum(int(group._get_sequence_number_for_group()) for group in distributed._world.pg_map)
    except (RuntimeError, AttributeError):
        return None
