"""The offloader's mutex, and the two tools for code that a finalizer may run: a mailbox and a claim.

A finalizer may interrupt any thread at any point, even a thread that holds the lock which the finalizer would need. So
a finalizer never takes a lock. It uses one operation that the interpreter makes atomic: an append.
"""

from __future__ import annotations

import _thread
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

L = TypeVar("L")
T = TypeVar("T")


def renewed_in_child(lock: L) -> L:
    """Make a lock free in a forked child, where the thread that held it does not exist; return the lock."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]  # as `threading` does
    return lock


class Mailbox(deque[T]):
    """A queue that finalizers and other threads fill with `append`, and that the holder of a lock empties."""

    __slots__ = ()

    def drain(self) -> Iterator[T]:
        """Remove and yield each item, also those that arrive meanwhile. The lock makes the caller the one consumer."""
        while self:
            yield self.popleft()


class Claim:
    """Which of several threads and finalizers comes first."""

    __slots__ = ("_claimants",)

    def __init__(self) -> None:
        self._claimants: list[object] = []

    def take(self, claimant: object) -> bool:
        """Return whether ``claimant`` is the first that was ever passed."""
        self._claimants.append(claimant)  # atomic, so every thread sees the same first entry
        return self._claimants[0] is claimant

    def is_by(self, claimant: object) -> bool:
        """Return whether ``claimant`` has come first; takes nothing."""
        return bool(self._claimants) and self._claimants[0] is claimant


class DrainingLock(_thread.RLock):  # type: ignore[misc]  # its stub calls it final, but Python permits a subclass
    """Mutex that runs deferred finalizer work on release.

    A finalizer appends its work to ``noted`` and calls `deliver`. If any thread holds the lock, the release that
    follows calls ``after_release``, so no work is left behind.

    The base is written in C, so ``with`` acquires the lock without a Python frame in which an interrupt could leave it
    held. An interrupt at the start of `__exit__` or `release` can; `abandon` releases the lock then.
    """

    def __init__(self, noted: deque[Any] | None = None) -> None:
        self.noted: deque[Any] = Mailbox() if noted is None else noted  # the owner appends to it and empties it
        self.after_release: weakref.WeakMethod[Callable[[], None]] | None = None

    def __exit__(self, *exc: object) -> None:
        """Release the lock, and have the owner do the work that was deferred meanwhile."""
        try:  # noqa: SIM105 - `suppress` would cost two calls for each release
            super().release()
        except RuntimeError:  # an interrupt has ended a wait of `Condition` before it had the lock again
            pass
        # After the release, not before: a finalizer that comes in between finds the lock held and relies on this look.
        if self.noted and not self.owned():
            after = self.after_release() if self.after_release is not None else None
            if after is not None:
                after()

    release = __exit__

    def run_if_free(self, work: Callable[[], bool]) -> bool | None:
        """Return the result of ``work`` under the lock, or None if any thread holds the lock, even this one."""
        # Not even for the owner, though the lock is reentrant: a finalizer interrupts it amid a change.
        if self.owned() or not self.acquire(blocking=False):
            return None
        try:
            return work()
        finally:
            super().release()

    def deliver(self, work: Callable[[], bool]) -> None:
        """Have ``work`` empty ``noted`` with the lock held, now or, where any thread holds it, after its release."""
        while self.noted and self.run_if_free(work) is not None:  # again: `noted` may have filled before the release
            pass

    def abandon(self) -> None:
        """Release the lock if this thread holds it, however often: after an interrupt. Deferred work is not done."""
        while self.owned():
            super().release()

    def owned(self) -> bool:
        """Return whether the calling thread holds the lock."""
        return bool(self._is_owned())  # type: ignore[attr-defined]  # the stub leaves it out


class Changed(threading.Condition):
    """A condition whose `notify_all` costs next to nothing while no thread waits: each tensor that dies notifies."""

    def __init__(self, lock: DrainingLock) -> None:
        super().__init__(cast(Any, lock))

    def notify_all(self) -> None:
        """As of `threading.Condition`. The caller holds the lock, so no thread begins to wait meanwhile."""
        if self._waiters:  # type: ignore[attr-defined]
            super().notify_all()
