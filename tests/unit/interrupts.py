"""Interrupts at a place of our choice, as Python takes them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from actoffload import hostpool

OURS = (
    "accounts.py",
    "arena.py",
    "device_tier.py",
    "engines/base.py",
    "extent_io.py",
    "extents.py",
    "record.py",
    "row_tier.py",
    "rows.py",
    "spool.py",
    "tiers.py",
    "transfer.py",
)
EVENTS = ("call", "c_return")
"""Python looks for an interrupt when a function is entered, and after one in C."""


class Interrupt:
    """Raises KeyboardInterrupt once, at the n-th place in our code where Python may."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        if event in EVENTS and frame.f_code.co_filename.endswith(OURS):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)


def forget_pools() -> None:
    """Let the memory of pools go that an interrupt left behind, once no copy of a simulated device uses it.

    They would be looked at for ever. Their address space adds up: mapped side by side it is one piece to Linux, which
    lets no process fork that has a piece larger than the machine's memory.
    """
    hostpool._CLOSED.clear()
    hostpool._LOCKED.clear()
