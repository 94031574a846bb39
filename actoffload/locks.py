"""A lock for what finalizers must not wait for: whoever gives it back works off what they could only note meanwhile."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from . import native_hooks


class DrainingLock:
    """A mutex that calls its owner back when it was released and something is noted.

    A finalizer may run anywhere, also in a thread that holds the lock, so it notes its work and tries the lock without
    waiting. If it finds the lock taken, the release that follows calls `after_release`, and nothing is left lying.

    Attributes:
        noted: what was noted and not yet worked off; its owner appends to it and empties it.
        after_release: called after a release with something noted.
    """

    __slots__ = ("_lock", "after_release", "noted")

    def __init__(
        self, after_release: weakref.WeakMethod[Callable[[], None]] | None = None, noted: deque[Any] | None = None
    ) -> None:
        self._lock = threading.Lock()
        self.after_release = after_release
        self.noted: deque[Any] = deque() if noted is None else noted

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As `threading.Lock.acquire`."""
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        """Give it back, and let the owner work off what was noted meanwhile."""
        self._lock.release()
        if self.noted:
            after = self.after_release() if self.after_release is not None else None
            if after is not None:
                after()

    def run_if_free(self, work: Callable[[], bool]) -> bool | None:
        """What ``work`` returns, with the lock held meanwhile; None where somebody holds it. Never waits."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return work()
        finally:
            self._lock.release()

    def release_only(self) -> None:
        """Give it back without the call: for the owner's own work."""
        self._lock.release()

    # What `threading.Condition` asks of a lock. No call on the way into a wait: its error would leave the lock open.

    def _release_save(self) -> None:
        self._lock.release()

    def _acquire_restore(self, state: None) -> None:
        self._lock.acquire()

    def _is_owned(self) -> bool:
        return self._lock.locked()

    def locked(self) -> bool:
        """Whether somebody holds it."""
        return self._lock.locked()

    @property
    def __enter__(self) -> Callable[[], bool]:
        # What `with` calls is in C: an interrupt in a frame of Python's, after the acquisition, would leave it locked.
        # One that comes just as `__exit__` begins still does; there is no such way out of a block that does more.
        return self._lock.__enter__

    def __exit__(self, *exc: object) -> None:
        self.release()


def new_lock(
    after_release: weakref.WeakMethod[Callable[[], None]] | None = None, noted: deque[Any] | None = None
) -> DrainingLock:
    """A `DrainingLock`, in C where that is at hand."""
    native = native_hooks.loaded()
    lock: DrainingLock = (DrainingLock if native is None else native.DrainingLock)(after_release, noted)
    return lock


class Changed(threading.Condition):
    """A condition whose `notify_all` costs next to nothing while nobody waits, which is nearly always."""

    def __init__(self, lock: DrainingLock) -> None:
        super().__init__(cast(Any, lock))

    @property
    def waiters(self) -> deque[Any]:
        """Those who wait."""
        found: deque[Any] = self._waiters  # type: ignore[attr-defined]
        return found

    def notify_all(self) -> None:
        """As `threading.Condition.notify_all`; the lock is held."""
        if self._waiters:  # type: ignore[attr-defined]
            super().notify_all()
