"""Transfers that are kept under way: what a measurement of a spool times.

As many transfers are kept waiting as run, so an engine never runs dry; an engine's own thread starts the next one when
one ends, so that the rate does not depend on what the main thread does meanwhile, but for the interpreter's lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from ..engines.base import IoKind
from ..errors import ActOffloadError
from ..spool import Extent, Spool, Transfer
from .bench import Direction


class Slot:
    """One of the transfers that are kept under way: its memory, and the extents that it goes through in turns."""

    __slots__ = ("address", "extents", "step", "written")

    def __init__(self, address: int, extents: list[Extent]) -> None:
        self.address = address
        self.extents = extents
        self.step = 0
        self.written = 0
        """How many of its extents, from the first on, hold something to read."""

    def turn(self, direction: Direction, parity: int) -> tuple[IoKind, Extent]:
        """What to do next."""
        step, self.step = self.step, self.step + 1
        if direction == "write":
            return IoKind.WRITE, self.extents[step % len(self.extents)]
        if direction == "read":
            return IoKind.READ, self.extents[step % self.written]
        half = self.written // 2  # what is read was written a while ago
        if (step + parity) % 2:
            return IoKind.READ, self.extents[(step // 2 + half) % self.written]
        return IoKind.WRITE, self.extents[step // 2 % self.written]


class Stream:
    """Keeps slots busy in one direction until a moment, or for one pass over their extents."""

    def __init__(
        self, spool: Spool, slots: list[Slot], direction: Direction, block: int, seconds: float | None
    ) -> None:
        self._spool, self._slots, self._direction, self._block = spool, slots, direction, block
        self._seconds = seconds
        self._deadline_s = 0.0
        self._one_pass = False
        self._lock = threading.Lock()
        self._running = len(slots)
        self._stopped = False
        self.error: BaseException | None = None
        self.moved_bytes = 0
        self.ended_s = 0.0
        self.over = threading.Event()

    def run(self, wait: Callable[[threading.Event], object], *, one_pass: bool) -> float:
        """Begin, wait with ``wait``, and return the seconds that it took.

        Raises:
            StorageError: a transfer failed.
        """
        self._one_pass = one_pass or self._seconds is None
        begin_s = time.perf_counter()
        self._deadline_s = float("inf") if self._seconds is None else begin_s + self._seconds
        for index, slot in enumerate(self._slots):
            slot.step = 0
            self._next(slot, index % 2)
        wait(self.over)  # interrupted, the spool's end ends the rest
        if self.error is not None:
            raise self.error
        return self.ended_s - begin_s

    def _next(self, slot: Slot, parity: int) -> None:
        limit = len(slot.extents) if self._direction == "write" else slot.written
        passed = self._one_pass and slot.step >= limit
        late = slot.step > 0 and time.perf_counter() >= self._deadline_s
        if passed or late or self._stopped:
            self._leave()
            return
        kind, extent = slot.turn(self._direction, parity)
        start = self._spool.write if kind is IoKind.WRITE else self._spool.read
        try:
            start(extent, slot.address, self._block, on_done=partial(self._done, slot, parity))
        except ActOffloadError as error:  # closed meanwhile
            self._fail(error)
            self._leave()

    def _done(self, slot: Slot, parity: int, transfer: Transfer) -> None:
        if transfer.error is not None:
            self._fail(transfer.error)
        else:
            with self._lock:
                self.moved_bytes += transfer.length
        if self._direction == "write":
            slot.written = max(slot.written, min(slot.step, len(slot.extents)))
        self._next(slot, parity)

    def _fail(self, error: BaseException) -> None:
        self._stopped = True
        self.error = self.error or error

    def _leave(self) -> None:
        with self._lock:
            self._running -= 1
            last = self._running == 0
        if last:
            self.ended_s = time.perf_counter()
            self.over.set()


def compute_until(over: threading.Event) -> None:
    """Hold the interpreter's lock as pure Python does: given up only when another thread asks for it."""
    total = 0
    while not over.is_set():
        for number in range(10_000):
            total += number * number


__all__ = ["Slot", "Stream", "compute_until"]
