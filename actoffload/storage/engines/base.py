"""What a storage engine is: it moves bytes between an address and an offset of one file, and says how that went.

An engine sees addresses, lengths and offsets, never a tensor; it knows neither extents nor devices.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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


class Completion:
    """A one-way event that may be set anywhere, also in a finalizer.

    ``threading.Event.set`` takes a lock, which the very thread that a finalizer interrupts may hold. Here every waiter
    brings a lock of its own, which ``set`` only releases.
    """

    __slots__ = ("_waiters", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._waiters: list[threading.Lock] = []

    def set(self) -> None:
        """Wake everybody who waits, now and later; may be called again."""
        self.is_set = True  # before the waiters are looked at: each of them looks at it again once it is listed
        for waiter in tuple(self._waiters):
            with contextlib.suppress(RuntimeError):  # it was released before
                waiter.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most ``timeout`` seconds for ``set`` and return whether it has been called."""
        if self.is_set:
            return True
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            return self.is_set or waiter.acquire(timeout=-1 if timeout is None else timeout)
        finally:
            self._waiters.remove(waiter)


_CANCELLED = object()

Range = tuple[int, int]
"""A range of memory: its address and its length in bytes."""


@dataclass(slots=True, eq=False, repr=False)
class IoRequest:
    """One positional transfer between memory and the engine's file, and its own ticket.

    The memory must stay valid until the request is final. ``cancel`` may run in a finalizer, inside any other method of
    the same request, so no lock is used here, only atomic operations of one list. Address, length and offset are
    multiples of the engine's alignment.

    Args:
        kind: READ (file to memory) or WRITE (memory to file).
        address: Address of the memory.
        length: Bytes to move.
        offset: Position in the file.
        ranges: Where the memory is in several pieces, whose bytes lie one behind the other in the file: all of them,
            in that order; ``address`` is then the first one's, and ``length`` that of all. Only for engines whose
            capabilities say ``vectored``.
        before: Runs in the engine's thread just before the transfer; when it raises, the request FAILED with that
            error.
        on_done: Called exactly once with the request, in the engine's thread, after DONE or FAILED; never after
            CANCELLED. Whoever waits may be woken before it has run.
    """

    kind: IoKind
    address: int
    length: int
    offset: int
    ranges: Sequence[Range] = ()
    before: Callable[[], None] | None = None
    on_done: Callable[[IoRequest], None] | None = None
    state: RequestState = RequestState.QUEUED
    error: BaseException | None = None
    _claims: list[object] = field(default_factory=list)  # the first one decides: it was started, or it was cancelled
    _final: Completion = field(default_factory=Completion)

    @property
    def memory(self) -> Sequence[Range]:
        """All of its memory."""
        return self.ranges or ((self.address, self.length),)

    def cancel(self) -> bool:
        """Take the request back.

        Returns:
            True when it was still queued, or was cancelled before: it will never touch memory or file. False when it
            has started.
        """
        self._claims.append(_CANCELLED)
        if self._claims[0] is not _CANCELLED:
            return False
        self.before = self.on_done = None  # the queue still holds the request, which must not hold the memory
        self.state = RequestState.CANCELLED
        self._final.set()
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the request is final, at most ``timeout`` seconds, and return whether it is."""
        return self._final.wait(timeout)

    def try_start(self) -> bool:
        """For engines: QUEUED to RUNNING. False when it was cancelled, or started before: then leave it alone."""
        attempt = object()
        self._claims.append(attempt)
        if self._claims[0] is not attempt:
            return False
        self.state = RequestState.RUNNING
        return True

    def finish(self, error: BaseException | None) -> None:
        """For engines: RUNNING to DONE, or to FAILED with ``error``; wakes the waiters and calls ``on_done``."""
        on_done, self.before, self.on_done = self.on_done, None, None
        self.error = error
        self.state = RequestState.DONE if error is None else RequestState.FAILED
        self._final.set()
        if on_done is not None:
            try:
                on_done(self)
            except BaseException as exc:  # it must not end the engine's thread, and must not be lost
                report_uncaught(exc)

    def __repr__(self) -> str:
        return f"<IoRequest {self.kind.value} {self.length} bytes at {self.offset}: {self.state.value}>"


def report_uncaught(error: BaseException) -> None:
    """Report an exception that a callback let out of an engine's thread, as the interpreter would for that thread."""
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
    device_memory: bool = False
    """It takes addresses of device memory: then nothing goes through host memory."""


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
    written_bytes: int
    """Bytes that really went to the file."""
    read_bytes: int
    """Bytes that really came from the file."""
    remark: str = ""
    """How it works on this machine, for reports; empty: there is nothing to say."""

    @abstractmethod
    def __init__(self, file: SpoolFile, *, threads: int | None = None) -> None: ...

    @property
    @abstractmethod
    def capabilities(self) -> EngineCapabilities:
        """What this engine does and needs."""

    @abstractmethod
    def submit(self, request: IoRequest) -> None:
        """Queue a request and return at once.

        Raises:
            OffloaderClosedError: After ``close`` or ``abort``.
        """

    @abstractmethod
    def promote(self, request: IoRequest) -> None:
        """Move a queued request to the front of its queue; nothing happens when it has started."""

    @abstractmethod
    def close(self) -> None:
        """Wait for everything that is queued, then end the threads. Idempotent; not from an engine's thread."""

    @abstractmethod
    def abort(self) -> None:
        """Cancel what is queued, wait for what runs, end the threads. Idempotent; not from an engine's thread."""

    def after_fork_in_child(self) -> None:  # noqa: B027 - most engines own nothing that a child must close
        """In a forked child: closes the engine's own descriptors. Takes no lock, touches no thread."""
