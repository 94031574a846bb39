"""Time on a step's compute timeline, the waits of compute streams for our copies, and the idle time that hooks cost.

Nothing here blocks the host.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from itertools import accumulate
from typing import Any

from ..events import now
from .accelerator import Accelerator, Event, Stream
from .accounts import Accounts

Stamp = Any
"""A moment, taken by `Stopwatch.stamp`; opaque until `Stopwatch.seconds` can tell."""

MOST_OPEN = 4096
"""Most entries of a timeline that were not taken yet; later ones are dropped."""
TIMED_WAITS = 32
"""This many waits of a step are timed; after that, unless a planner needs the times, ..."""
SAMPLE = 7
"""... one of this many, which stands for all of them."""
GOLDEN = 0.6180339887498949
"""Its multiples are spread evenly, so that a sample by them follows no period of the step's, as every seventh may."""

Traced = tuple[str | None, int]
"""A tensor of a transfer, for a trace: its module and its bytes."""


class Stopwatch:
    """Stamps moments of one step, for CPU tensors: the host's clock, less the waits that were counted.

    `seconds` converts the stamps later.
    """

    running = False
    """Whether a step is being timed: waits and hooks count then."""
    hooks_s = 0.0
    """For how long the device idled in the step, because hooks of ours kept its host busy."""
    lead_s = 0.0
    """For how long the device had work left as the last hook ended."""
    number = 0
    """Of the steps that were timed so far."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._origin_s = self._latest_s = 0.0

    def begin(self) -> None:
        """The step begins."""
        self._origin_s, self._latest_s = self._compute_s(), 0.0

    def stamp(self) -> Stamp:
        """This moment, as a position in the work enqueued so far."""
        # Threads that have waited at once would turn this clock back: the waits of all of them count.
        self._latest_s = max(self._latest_s, self._compute_s() - self._origin_s)
        return self._latest_s

    def hook(self) -> AbstractContextManager[None]:
        """Return a context for a hook of ours, which counts while a step is timed."""
        return nullcontext()

    def end(self) -> bool:
        """Whether `seconds` can convert every stamp so far; if not, call again later."""
        return True

    def seconds(self, stamp: Stamp) -> float:
        """Seconds from the beginning until a stamp, without the waits that we caused."""
        return float(stamp)

    def _compute_s(self) -> float:
        return now() - self._accounts.pack_wait_s - self._accounts.unpack_wait_s


class DeviceStopwatch(Stopwatch):
    """For an accelerator: timed events on the compute stream, less what this stream loses because of us.

    It loses its waits for our copies, and the time for which it idles while our hooks keep the host busy. Between an
    event before a hook and one after it, a device with work left does nothing else. One that has caught up with its
    host idles.

    A step is timed on the device on which it began; waits of other devices do not count.

    Args:
        device: drives all of them.
        index: returns the index of the device on which the calling thread computes; None before a tensor was seen.
            Stamps until then are the beginning.
    """

    def __init__(self, device: Accelerator, index: Callable[[], int | None]) -> None:
        self._device = device
        self._current_index = index
        self._index = 0
        self._forget()

    def _forget(self) -> None:
        self._origin: Stamp = None
        self._last: Stamp = None
        self._last_of: dict[int, Stamp] = {}
        """The last stamp of each thread: of two that stamp at once, the one that was made first may be noted last."""
        self._waits: list[tuple[Stamp, Stamp]] = []
        self._hooks: list[tuple[Stamp, Stamp]] = []
        self._began_s = self._last_s = now()
        """By the host's clock: of the step, and the end of its last hook."""
        self._copies: dict[str, list[tuple[int, Stamp, Stamp]]] = {"write": [], "read": []}
        self._copied = {"write": (0, 0.0), "read": (0, 0.0)}
        self._lost: tuple[list[float], list[float], list[float]] | None = None

    def begin(self) -> None:
        self._forget()
        self.number += 1
        self.running = True
        self.stamp()

    def stamp(self) -> Stamp:
        index = self._current_index() if self._last is None else self._index
        if index is None or self._device.capturing(index):
            return self._last  # no event may be added to a graph that is being captured
        self._index = index
        self._last = stamp = self._device.timestamp(self._device.current_stream(self._index))
        self._last_of[threading.get_ident()] = stamp
        self._origin = self._origin or stamp
        return stamp

    def waited(self, begin: Stamp, end: Stamp, index: int) -> None:
        """A compute stream of device ``index`` waited from a moment of its own for the end of a copy of ours."""
        if index == self._index:
            self._waits.append((begin, end))

    @contextmanager
    def hook(self) -> Iterator[None]:
        begin = self.stamp() if self.running else None
        yield
        if begin is not None:  # else no device was known yet
            self._hooks.append((begin, self.stamp()))
            self._last_s = now()

    def copied(self, way: str, nbytes: int, begin: Stamp, end: Stamp) -> None:
        """Note a copy on a side stream, ``"write"`` or ``"read"``, between two moments of that stream."""
        self._copies[way].append((nbytes, begin, end))

    def rate(self, way: str) -> float | None:
        """Bytes per second of the copies of the step in one direction; None where there were none."""
        nbytes, seconds = self._copied[way]
        under_way = []
        for copy in self._copies[way]:  # the sums have those that were over at an earlier look
            if self._device.done(copy[2]):
                nbytes += copy[0]
                seconds += self._device.seconds_between(*copy[1:])
            else:
                under_way.append(copy)
        self._copies[way], self._copied[way] = under_way, (nbytes, seconds)
        return nbytes / seconds if seconds > 0 else None

    def end(self) -> bool:
        self.running = False
        stamps = [*tuple(self._last_of.values()), *(stamp for wait in self._waits for stamp in wait)]
        return all(stamp is None or self._device.done(stamp) for stamp in stamps)

    def seconds(self, stamp: Stamp) -> float:
        if self._lost is None:
            self._lost = self._union(self._waits + self._hooks)
        begins, ends, lost = self._lost
        elapsed_s = self._since(stamp)
        count = bisect_right(begins, elapsed_s)
        ahead_s = max(0.0, ends[count - 1] - elapsed_s) if count else 0.0  # a stamp within a span comes at its begin
        return max(0.0, elapsed_s - lost[count] + ahead_s)

    @property
    def hooks_s(self) -> float:  # type: ignore[override]
        lost = self._lost or self._union(self._waits + self._hooks)
        return lost[2][-1] - self._union(self._waits)[2][-1]

    @property
    def lead_s(self) -> float:  # type: ignore[override]
        return max(0.0, self._since(self._hooks[-1][1]) - (self._last_s - self._began_s)) if self._hooks else 0.0

    def _union(self, pairs: list[tuple[Stamp, Stamp]]) -> tuple[list[float], list[float], list[float]]:
        """Return the begins and ends of spans that do not overlap, and the seconds in the first 0, 1, ... of them."""
        begins: list[float] = []
        ends: list[float] = []
        for begin, end in sorted((self._since(begin), self._since(end)) for begin, end in pairs):
            if ends and begin <= ends[-1]:
                ends[-1] = max(ends[-1], end)
            else:
                begins.append(begin)
                ends.append(max(begin, end))
        lasts = (end - begin for begin, end in zip(begins, ends, strict=True))
        return begins, ends, list(accumulate(lasts, initial=0.0))

    def _since(self, stamp: Stamp) -> float:
        return 0.0 if stamp is None else self._device.seconds_between(self._origin, stamp)


class HookCosts:
    """The time that a device idles because hooks that move records keep its host busy. The store's lock is held."""

    def __init__(self, accounts: Accounts, device: Accelerator, stopwatch: Stopwatch) -> None:
        self._accounts = accounts
        self._device = device
        self._stopwatch = stopwatch
        self._last_hook: Event | None = None
        """After all work of the compute stream by the end of the last hook, if that was watched."""
        self._behind_s = 0.0
        """By how much the hooks that were watched have put the host back since the device had caught up with it."""

    @contextmanager
    def watched(self, index: int) -> Iterator[None]:
        """Return a context for a hook on device ``index`` that counts its time, and the device's idle time."""
        accounts, device = self._accounts, self._device
        # A hook that the device did not notice, as it had work left, has put the host back all the same: where the
        # device has caught up by the time of a later hook, it has waited for that one as well.
        if self._last_hook is not None and device.done(self._last_hook):
            accounts.idle_s += self._behind_s
            self._behind_s = 0.0
        since_s, waited_s = now(), accounts.pack_wait_s + accounts.unpack_wait_s
        with self._stopwatch.hook():
            yield
        hook_s = now() - since_s - (accounts.pack_wait_s + accounts.unpack_wait_s - waited_s)
        accounts.hooks_s += hook_s
        self._behind_s += hook_s
        self._last_hook = device.record(device.current_stream(index))

    def forward_begins(self) -> None:
        """Forget the hooks before: they may be steps ago, and the device has had other work since."""
        self._behind_s, self._last_hook = 0.0, None


class WaitFor(Enum):
    """Why a compute stream waits."""

    __hash__ = object.__hash__  # as in `State`

    ROOM = "room"  # memory that is being copied out is to be used again
    DATA = "data"  # memory that is being copied in is needed


class Timeline:
    """The work of a device with its times, on the host's clock, while tracing is on. It never blocks the host or fails.

    On the simulated device times are virtual: they begin at a moment of the host's clock and go on by the model.
    The first arguments are as for `DeviceStopwatch`.

    Args:
        capturing: whether a stream of any device is being captured.
    """

    def __init__(self, device: Accelerator, index: Callable[[], int | None], capturing: Callable[[], bool]) -> None:
        self._device = device
        self.current_index = index
        self._capturing = capturing
        self._open: deque[tuple[str, int, Event, Event, Any]] = deque()
        self._origins: dict[int, tuple[float, Event]] = {}
        """By device, a moment of the host's clock and of the device's."""

    def moment(self, index: int, stream: Stream | None = None) -> Event | None:
        """A moment of a stream of device ``index``, the current one by default; None while nothing can be timed."""
        if self._capturing():
            return None
        try:
            if index not in self._origins:  # on a stream with no work, so that it happens at once
                self._origins[index] = now(), self._device.timestamp(self._device.side_stream(index, "clock"))
            return self._device.timestamp(self._device.current_stream(index) if stream is None else stream)
        except RuntimeError:  # no timed events here, or a broken device
            return None

    def add(self, what: str, index: int, begin: Event | None, end: Event | None, about: Any) -> None:
        """Note work between two moments, by its kind and subject. It took no time if ``end`` came first."""
        if begin is not None and end is not None and index in self._origins and len(self._open) < MOST_OPEN:
            self._open.append((what, index, begin, end, about))

    def take(self, *, wait: bool = False) -> list[tuple[str, float, float, Any]]:
        """Remove and return the work that is over: for each its kind, begin, end and subject.

        ``wait``: block this thread until all is over.
        """
        found: list[tuple[str, float, float, Any]] = []
        try:
            # Any device: a capture may be of one that has no work here, and no event of another is queried then.
            for _ in range(0 if self._capturing() else len(self._open)):
                try:
                    what, index, begin, end, about = entry = self._open.popleft()
                except IndexError:  # another thread takes as well
                    break
                if wait:
                    self._device.synchronize(begin)
                    self._device.synchronize(end)
                elif not (self._device.done(end) and self._device.done(begin)):
                    self._open.append(entry)
                    continue
                since_s, origin = self._origins[index]
                times = [since_s + self._device.seconds_between(origin, event) for event in (begin, end)]
                found.append((what, times[0], max(times), about))
        except RuntimeError:
            self._open.clear()
        return found


class StreamWaits:
    """Times the waits of compute streams for copies: from an event before each to the one after the copy.

    Nothing here blocks the host or fails.

    Attributes:
        samples: of many waits a part is timed, see `SAMPLE`: to time one takes three calls of the driver or more.
    """

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self.samples = False
        self._count = 0
        """Waits since the times were taken."""
        self._refused = False  # no timed events here, or a broken device
        self._open: dict[Stream, deque[tuple[WaitFor, int, Event, Event, int]]] = {}
        """By compute stream, in its order."""
        self._found: dict[int, dict[WaitFor, float]] = {}
        """The seconds of the waits that were looked at, by device."""

    def stands_for(self) -> int:
        """For how many waits the next one stands: 0 if it is not timed."""
        self._count += 1
        if not self.samples or self._count <= TIMED_WAITS:
            return 1
        return SAMPLE if self._count * GOLDEN % 1 < 1 / SAMPLE else 0

    def moment(self, stream: Stream) -> Event | None:
        """A moment of ``stream``, just before it is made to wait or after a copy; None when that is not timed."""
        open_waits = 0
        for waits in self._open.values():  # mostly one stream; a generator costs more than the wait that is timed
            open_waits += len(waits)
        if self._refused or open_waits >= MOST_OPEN:
            return None
        try:
            return self._device.timestamp(stream)
        except RuntimeError:
            self._refuse()
            return None

    def add(
        self, why: WaitFor, index: int, begin: Event, end: Event, stream: Stream = None, stands_for: int = 1
    ) -> None:
        """Note a wait of a stream of device ``index``, from a moment of its own to the end of a copy."""
        self._open.setdefault(stream, deque()).append((why, index, begin, end, stands_for))

    def look(self) -> None:
        """Time the waits that are over, for the next `take`. Not for several threads at once, nor during a capture."""
        try:
            for waits in () if self._refused else tuple(self._open.values()):
                for _ in range(self._over(waits)):
                    why, index, begin, end, stands_for = waits.popleft()
                    of_device = self._found.get(index)  # mostly it is there: a new dict costs more than a wait
                    if of_device is None:
                        of_device = self._found[index] = dict.fromkeys(WaitFor, 0.0)
                    of_device[why] += stands_for * max(0.0, self._device.seconds_between(begin, end))
        except RuntimeError:
            self._refuse()

    def take(self) -> dict[WaitFor, float]:
        """Remove the waits that are over; return the seconds of the device that waited most."""
        self._count = 0
        self.look()
        found, self._found = self._found, {}
        return max(found.values(), key=lambda waits: sum(waits.values()), default=dict.fromkeys(WaitFor, 0.0))

    def _over(self, waits: deque[tuple[WaitFor, int, Event, Event, int]]) -> int:
        """How many of a stream's waits are over: if one is, all before it are. Queries few events."""
        fewest, most = 0, len(waits)
        look_at = most - 1  # mostly all are
        while fewest < most:
            if all(map(self._device.done, waits[look_at][2:4])):
                fewest = look_at + 1
            else:
                most = look_at
            look_at = (fewest + most) // 2
        return fewest

    def stop(self) -> None:
        """Stop timing, and make no calls to the device, not even to destroy the events that are there."""
        self._refused = True

    def _refuse(self) -> None:
        self.stop()
        self._open.clear()


def traced(owner: object, nbytes: int) -> Traced:
    """Return a tensor for a trace. ``owner``: its record, a record and the first byte, or another library's object."""
    saved = getattr(owner[0] if isinstance(owner, tuple) else owner, "saved", None)
    return (None if saved is None else saved.module), nbytes
