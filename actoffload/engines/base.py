"""What a storage engine is: it moves bytes between an address and an offset of one file, and says how that went.

An engine sees addresses, lengths and offsets, never a tensor; it knows neither extents nor devices.
"""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, unique
from typing import ClassVar


@unique
class IoKind(Enum):
    """Direction of a transfer, seen from memory."""

    __hash__ = object.__hash__  # members are singletons, and Enum's own hash is a Python function

    READ = "read"
    WRITE = "write"


@unique
class RequestState(Enum):
    """Life of a request: QUEUED, then RUNNING and DONE or FAILED, or straight to CANCELLED."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_first_waiter = threading.Lock()
"""Held by those who wait while they note it; who sets a latch never takes it."""


def _renew_after_fork() -> None:
    global _first_waiter
    _first_waiter = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)


class Latch:
    """A one-way flag to wait for, almost free until somebody does.

    Unlike ``threading.Event``, ``set`` takes no lock that its own thread could hold when a finalizer interrupts it.
    """

    __slots__ = ("_is_set", "_waiters")

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[threading.Event] | None = None  # made by the first that waits: most often nobody does

    @property
    def is_set(self) -> bool:
        """``set`` has been called."""
        return self._is_set

    def set(self) -> None:
        """Wakes everybody who waits, now and later."""
        self._is_set = True  # first the flag, then the events: a waiter adds its event, then looks at the flag again
        for event in tuple(self._waiters or ()):
            event.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits at most ``timeout`` seconds for ``set`` and returns whether it has been called."""
        if self._is_set:
            return True
        event = threading.Event()
        with _first_waiter:
            if self._waiters is None:
                self._waiters = []
            self._waiters.append(event)
        return self.is_set or event.wait(timeout)


_CANCELLED = object()
"""The claim of whoever takes a request back."""

Range = tuple[int, int]
"""A range of memory: its address and its length in bytes."""


class IoRequest:
    """One positional transfer between memory and the engine's file, and its own ticket.

    The memory must stay valid until the request is final. No lock is used here, only operations of one list that are
    atomic: ``cancel`` may run inside a finalizer, which may interrupt any thread anywhere, also one that starts this
    request. A ``cancel`` that is itself interrupted may be called again.

    Args:
        kind: READ (file to memory) or WRITE (memory to file).
        address: Address of the memory, a multiple of the engine's alignment.
        length: Bytes to move, a multiple of the engine's alignment.
        offset: Position in the file, a multiple of the engine's alignment.
        ranges: Where the memory is in several pieces, whose bytes lie one behind the other in the file: all of them,
            in that order; ``address`` is then the first one's, and ``length`` that of all. Only for engines whose
            capabilities say ``vectored``.
        before: Runs in the engine's thread just before the transfer; when it raises, the request FAILED with that
            error.
        on_done: Called exactly once with the request, in the engine's thread, after DONE or FAILED; never after
            CANCELLED. Whoever waits may be woken before it has run.
    """

    __slots__ = (
        "_claim",
        "_final",
        "address",
        "before",
        "error",
        "kind",
        "length",
        "offset",
        "on_done",
        "ranges",
        "state",
    )

    def __init__(
        self,
        kind: IoKind,
        address: int,
        length: int,
        offset: int,
        *,
        ranges: Sequence[Range] = (),
        before: Callable[[], None] | None = None,
        on_done: Callable[[IoRequest], None] | None = None,
    ) -> None:
        self.kind = kind
        self.address = address
        self.length = length
        self.offset = offset
        self.ranges = ranges
        self.before = before
        self.on_done = on_done
        self.state = RequestState.QUEUED
        self.error: BaseException | None = None
        self._claim: list[object] = []  # what is appended first decides: started, by that attempt, or cancelled
        self._final = Latch()

    @property
    def memory(self) -> Sequence[Range]:
        """All of its memory."""
        return self.ranges or ((self.address, self.length),)

    def cancel(self) -> bool:
        """Takes the request back.

        Returns:
            True when it was still queued, or was cancelled before: it will never touch memory or file. False when it
            has started.
        """
        self._claim.append(_CANCELLED)
        if self._claim[0] is not _CANCELLED:
            return False
        self.before = self.on_done = None  # it may sit in a queue for a while: do not keep the memory alive from there
        self._settle(RequestState.CANCELLED)
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the request is final, at most ``timeout`` seconds, and returns whether it is."""
        return self._final.wait(timeout)

    def try_start(self) -> bool:
        """For engines: QUEUED to RUNNING. False when it was cancelled, or started before: then leave it alone."""
        attempt: list[None] = []
        self._claim.append(attempt)
        if self._claim[0] is not attempt:
            return False
        self.state = RequestState.RUNNING
        return True

    def finish(self, error: BaseException | None) -> None:
        """For engines: RUNNING to DONE, or to FAILED with ``error``; wakes the waiters and calls ``on_done``."""
        on_done, self.before, self.on_done = self.on_done, None, None
        self.error = error
        self._settle(RequestState.DONE if error is None else RequestState.FAILED)
        if on_done is None:
            return
        try:
            on_done(self)
        except BaseException as exc:  # must not end the engine's thread, and must not be lost
            report_uncaught(exc)

    def _settle(self, state: RequestState) -> None:
        self.state = state
        self._final.set()

    def __repr__(self) -> str:
        return f"<IoRequest {self.kind.value} {self.length} bytes at {self.offset}: {self.state.value}>"


def report_uncaught(error: BaseException) -> None:
    """Reports an exception that a callback let out of an engine's thread, as the interpreter would for that thread."""
    thread = threading.current_thread()
    with contextlib.suppress(Exception):  # a hook that fails must not end the thread either
        threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, thread)))


@dataclass(frozen=True)
class EngineCapabilities:
    """What an engine does and needs."""

    name: str
    """Name of the engine, as in the configuration."""
    direct: bool
    """Transfers bypass the page cache."""
    alignment: int
    """Address, length and offset must be multiples of this many bytes; 1: no requirement."""
    needs_file: bool = True
    """It works on the descriptor of the spool file (the memory engine does not)."""
    threads: int = 1
    """Transfers that run at the same time."""
    vectored: bool = False
    """It takes requests whose memory is in several ranges."""


@dataclass(frozen=True)
class SpoolFile:
    """An open, unlinked file; the spool owns the descriptor, an engine only uses it."""

    fd: int
    """Descriptor, opened for reading and writing."""
    path: str
    """Its directory: the file has no name, messages show this."""
    direct: bool
    """The descriptor has ``O_DIRECT``."""
    alignment: int
    """Alignment in bytes that ``O_DIRECT`` asks for; 1 when buffered."""
    reopen_path: str | None = None
    """A path that opens the same file again (``/proc/self/fd/N`` on Linux), or None."""


class StorageEngine(ABC):
    """Moves bytes between memory and one file. Thread-safe.

    Reads are served before writes, and first in, first out inside each: a read is what the training thread waits for.

    Args:
        file: The file; its descriptor must stay open until ``close`` or ``abort`` has returned.
        threads: Transfers at the same time; None: the engine's own choice.
    """

    default_name: ClassVar[str] = ""

    @abstractmethod
    def __init__(self, file: SpoolFile, *, threads: int | None = None) -> None: ...

    @property
    @abstractmethod
    def capabilities(self) -> EngineCapabilities:
        """What this engine does and needs."""

    @property
    def remark(self) -> str:
        """How it works on this machine, for reports; empty: there is nothing to say."""
        return ""

    @property
    def thread_numbers(self) -> tuple[int, ...]:
        """The system-wide numbers of the threads that move bytes, as far as they are known."""
        return ()

    def register_memory(self, address: int, nbytes: int) -> None:  # noqa: B027 - most engines have no use for it
        """Told of memory that many transfers will touch, before the first of them does; it may prepare it.

        The memory stays mapped until ``unregister_memory``, or until the engine is closed. Never fails, never waits.
        """

    def unregister_memory(self, address: int, nbytes: int) -> None:  # noqa: B027
        """Told that memory which it was told of will be unmapped; no transfer touches it any more."""

    @abstractmethod
    def submit(self, request: IoRequest) -> None:
        """Queues a request and returns at once.

        Raises:
            OffloaderClosedError: After ``close`` or ``abort``.
        """

    @abstractmethod
    def promote(self, request: IoRequest) -> None:
        """Moves a queued request to the front of its queue; nothing happens when it has started."""

    @abstractmethod
    def close(self) -> None:
        """Waits for everything that is queued, then ends the threads. Idempotent; not from an engine's thread."""

    @abstractmethod
    def abort(self) -> None:
        """Cancels what is queued, waits for what runs, ends the threads. Idempotent; not from an engine's thread."""

    @property
    @abstractmethod
    def written_bytes(self) -> int:
        """Bytes that really went to the file."""

    @property
    @abstractmethod
    def read_bytes(self) -> int:
        """Bytes that really came from the file."""

    def after_fork_in_child(self) -> None:  # noqa: B027 - most engines own nothing that a child must close
        """In a forked child: closes the engine's own descriptors. Takes no lock, touches no thread."""


__all__ = [
    "EngineCapabilities",
    "IoKind",
    "IoRequest",
    "Latch",
    "Range",
    "RequestState",
    "SpoolFile",
    "StorageEngine",
    "report_uncaught",
]
