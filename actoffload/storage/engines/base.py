"""The interface of a storage engine, which moves bytes between an address and an offset of one file.

An engine sees addresses, lengths and offsets, never a tensor; it knows neither extents nor devices.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import ClassVar, TypeVar

from ...locks import Claim

T = TypeVar("T")


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

    ``threading.Event.set`` takes a lock, which the thread that a finalizer interrupts may hold. Here every waiter
    brings a lock of its own, and ``set`` only releases those.
    """

    __slots__ = ("_waiters", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._waiters: list[threading.Lock] = []

    def set(self) -> None:
        """Wake every thread that waits, now and later; may be called again."""
        self.is_set = True  # before the loop over the waiters: each waiter looks at it again once it is listed
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
    the same request, so it takes no lock: a `Claim` decides between started and cancelled. Address, length and offset
    are multiples of the engine's alignment.

    Args:
        kind: READ (file to memory) or WRITE (memory to file).
        address: Address of the memory.
        length: Bytes to move.
        offset: Position in the file.
        ranges: All pieces of the memory, if there are several; their bytes lie one behind the other in the file, in
            this order. ``address`` is then of the first, and ``length`` the sum. Only for ``vectored`` engines.
        before: Runs in the engine's thread just before the transfer; when it raises, the request FAILED with that
            error.
        on_done: Called exactly once with the request, in the engine's thread, after DONE or FAILED; never after
            CANCELLED. A thread in `wait` may wake before it has run.
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
    _claim: Claim = field(default_factory=Claim)  # of `_CANCELLED`, or of the thread that starts it
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
        self._claim.take(_CANCELLED)
        if not self._claim.is_by(_CANCELLED):  # not the result of `take`: it may have been cancelled before
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
        if not self._claim.take(object()):
            return False
        self.state = RequestState.RUNNING
        return True

    def finish(self, error: BaseException | None) -> None:
        """For engines: RUNNING to DONE, or to FAILED with ``error``; wake the waiters and call ``on_done``."""
        on_done, self.before, self.on_done = self.on_done, None, None
        self.error = error
        self.state = RequestState.DONE if error is None else RequestState.FAILED
        self._final.set()
        if on_done is not None:
            call_back(on_done, self)

    def __repr__(self) -> str:
        return f"<IoRequest {self.kind.value} {self.length} bytes at {self.offset}: {self.state.value}>"


def call_back(on_done: Callable[[T], None], ended: T) -> None:
    """Call ``on_done``. Its exception must neither end the engine's thread nor be lost: report it as of that thread."""
    try:
        on_done(ended)
    except BaseException as error:
        thread = threading.current_thread()
        with contextlib.suppress(Exception):  # a hook that fails must not end the thread either
            threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, thread)))


@dataclass(frozen=True)
class EngineCapabilities:
    """The properties of an engine, and its demands."""

    name: str
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

    Reads are served before writes, because the training thread waits for reads; each kind is first in, first out.

    Args:
        file: The file; its descriptor must stay open until ``close`` or ``abort`` has returned.
        threads: Transfers at the same time; None: the engine's own choice.
    """

    default_name: ClassVar[str] = ""
    remark: str = ""
    """A remark on how it works on this machine, for reports; may be empty."""

    @abstractmethod
    def __init__(self, file: SpoolFile, *, threads: int | None = None) -> None: ...

    @property
    @abstractmethod
    def capabilities(self) -> EngineCapabilities:
        """The properties of this engine."""

    @abstractmethod
    def submit(self, request: IoRequest) -> None:
        """Enqueue a request and return at once.

        Raises:
            OffloaderClosedError: After ``close`` or ``abort``.
        """

    @abstractmethod
    def promote(self, request: IoRequest) -> None:
        """Move a queued request to the front of its queue; nothing happens when it has started."""

    @abstractmethod
    def close(self) -> None:
        """Wait for all requests in the queues, then end the threads. Idempotent; not from an engine's thread."""

    @abstractmethod
    def abort(self) -> None:
        """Cancel queued requests, wait for running ones, end the threads. Idempotent; not from an engine's thread."""

    def after_fork_in_child(self) -> None:  # noqa: B027 - most engines own nothing that a child must close
        """In a forked child: closes the engine's own descriptors. Takes no lock, touches no thread."""


OTHER_BYTES = "the trial read back other bytes than it wrote"


def try_transfers(engine: StorageEngine, address: int, nbytes: int, offset: int) -> str | None:
    """Write memory to the file, and read it back to the memory behind it; return a description of the failure, or None.

    The caller compares the bytes.
    """
    for kind, place in ((IoKind.WRITE, address), (IoKind.READ, address + nbytes)):
        request = IoRequest(kind, place, nbytes, offset)
        engine.submit(request)
        request.wait()
        if request.error is not None:
            return f"the trial {kind.value} failed: {request.error}"
    return None
