"""One line, said once: what is active and what the first forward shows; for adapters and for users who ask for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

from .summary import render_announcement

if TYPE_CHECKING:
    from .offloader import Storer


class Announcement:
    """Speaks at the end of the first forward that saved something.

    Args:
        announce: to whom, as in the configuration.
    """

    def __init__(self, announce: str | Callable[[str], None]) -> None:
        self._announce = announce
        self._wanted = announce != "none"

    def after_forward(self, storer: Storer) -> None:
        """A forward of ``storer`` has ended without an error."""
        if not self._wanted or storer.core.accounts.packed_tensors == 0:
            return
        self._wanted = False
        announce = self._announce
        rank, world = _rank()
        if announce == "first" and rank != 0:
            return
        line = _line(storer) + (f" [rank {rank} of {world}]" if world > 1 else "")
        if callable(announce):
            announce(line)
        else:
            print(line, file=sys.stderr, flush=True)


def _line(storer: Storer) -> str:
    spool = storer.tiers.spool
    spool_text = ""
    if spool is not None:
        directness = "direct" if spool.statistics().direct else "buffered"
        spool_text = f"{', '.join(storer.config.paths)}: {spool.engine_name} engine, {directness} I/O"
    return render_announcement(storer.config, storer.statistics(), storer.core.accounts.moved_bytes, spool_text)


def _rank() -> tuple[int, int]:
    """This process's global rank, and how many there are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1
