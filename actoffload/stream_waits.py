"""What compute streams wait for our copies, in seconds: the host only gives the order and never waits itself."""

from __future__ import annotations

from collections import deque
from enum import Enum

from .device import Accelerator, Event, Stream

MOST_OPEN = 4096
"""Waits that nobody has taken yet; what comes then is not timed."""


class WaitFor(Enum):
    """Why a compute stream waits."""

    ROOM = "room"  # memory that is being copied out is to be used again
    DATA = "data"  # what is being copied in is needed


class StreamWaits:
    """Times the waits of compute streams by a pair of events around each. Nothing here blocks the host or fails.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._refused = False  # no timed events here, or a broken device
        self._open: deque[tuple[WaitFor, int, Event, Event]] = deque()

    def begin(self, stream: Stream, event: Event) -> Event | None:
        """Just before ``stream`` is made to wait for ``event``; None when that is not timed."""
        if self._refused or len(self._open) >= MOST_OPEN:
            return None
        try:
            if self._device.is_capturing() or self._device.done(event):  # a captured graph takes no event of ours
                return None
            return self._device.timestamp(stream)
        except RuntimeError:
            self._refuse()
            return None

    def end(self, why: WaitFor, index: int, stream: Stream, begin: Event) -> Event | None:
        """Just after, on a stream of device ``index``; the moment."""
        try:
            end = self._device.timestamp(stream)
        except RuntimeError:
            self._refuse()
            return None
        self._open.append((why, index, begin, end))
        return end

    def take(self) -> dict[WaitFor, float]:
        """Seconds of the waits that are over and were not taken yet: those of the device that waited most.

        Not for several threads at once.
        """
        found: dict[int, dict[WaitFor, float]] = {}
        try:
            if self._open and not self._refused and not self._device.is_capturing():  # nor may an event be asked then
                self._take(found)
        except RuntimeError:
            self._refuse()
        return max(found.values(), key=lambda waits: sum(waits.values()), default=dict.fromkeys(WaitFor, 0.0))

    def _take(self, found: dict[int, dict[WaitFor, float]]) -> None:
        later: set[int] = set()  # devices with a wait that is not over: those after it are looked at when it is
        for _ in range(len(self._open)):
            why, index, begin, end = wait = self._open.popleft()
            if index in later or not self._device.done(end):
                later.add(index)
                self._open.append(wait)
            else:
                waits = found.setdefault(index, dict.fromkeys(WaitFor, 0.0))
                waits[why] += max(0.0, self._device.seconds_between(begin, end))

    def stop(self) -> None:
        """Time nothing any more, and ask the device nothing: not even to destroy the events that are there."""
        self._refused = True

    def _refuse(self) -> None:
        self.stop()
        self._open.clear()
