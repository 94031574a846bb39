"""The offloader's mutex."""

from __future__ import annotations

import _thread
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

L = TypeVar("L")


def renewed_in_child(lock: L) -> L:
    """Have a lock be free in a forked child, where the thread that held it does not exist; return it."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]  # as `threading` does
    return lock


class DrainingLock(_thread.RLock):  # type: ignore[misc]  # it may be subclassed, whatever its stub says
    """Mutex that runs deferred finalizer work on release.

    A finalizer may run anywhere, also in a thread that holds the lock. It must not wait, so it notes its work and calls
    `run_if_free`. If somebody holds the lock, the release that follows calls ``after_release``, and nothing is left.

    The base is written in C, so ``with`` acquires the lock without a Python frame in which an interrupt could leave it
    held. An interrupt at the start of `__exit__` or `release` can; `abandon` gives the lock back then.

    Args:
        noted: the deferred work. The owner appends to it and empties it.

    Attributes:
        after_release: called after a release that leaves something noted.
    """

    def __init__(self, noted: deque[Any] | None = None) -> None:
        self.noted: deque[Any] = deque() if noted is None else noted
        self.after_release: weakref.WeakMethod[Callable[[], None]] | None = None

    def __exit__(self, *exc: object) -> None:
        """Give the lock back, and have the owner do what was noted meanwhile."""
        super().release()
        if self.noted and not self.owned():
            after = self.after_release() if self.after_release is not None else None
            if after is not None:
                after()

    release = __exit__

    def run_if_free(self, work: Callable[[], bool]) -> bool | None:
        """Return what ``work`` returns with the lock held, or None where any thread holds it, even this one."""
        if self.owned() or not self.acquire(blocking=False):
            return None
        try:
            return work()
        finally:
            super().release()

    def abandon(self) -> None:
        """Give the lock back if this thread holds it, however often: after an interrupt. Deferred work is not done."""
        while self.owned():
            super().release()

    def owned(self) -> bool:
        """Return whether the calling thread holds the lock."""
        return bool(self._is_owned())  # type: ignore[attr-defined]  # the stub leaves it out
