"""The simulator's memory and links: the contents of each tier, four queues of transfers, and the effect of their ends.

A storage is known by its number in the profile (``p``). Times are seconds since the step began, sizes are bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from .profile import Link
from .workload import Workload

UNSAVED, ON_DEVICE, WRITE_QUEUED, WRITING, COPIED = range(5)
ON_HOST, SPILL_QUEUED, SPILLING, ON_DISK = range(5, 9)
LOADING, FETCHING, FREED = range(9, 12)
"""Where a storage is. Up to `COPIED` it is on the device. From `ON_HOST` to `ON_DISK` it is not, and nothing brings it
back. `LOADING` is from disk to host memory, `FETCHING` is to the device. `COPIED`: the copy to host memory has ended,
and the next event of the forward or backward releases the device memory, as the offloader does."""

WRITE, SPILL, LOAD, FETCH = range(4)
"""The queues: device to host, host to disk, disk to host, host to device. Without a host link, `WRITE` and `FETCH` are
between the device and the disk, and the others are unused. Reads and writes do not slow each other."""

_QUEUED = (WRITE_QUEUED, SPILL_QUEUED, LOADING, FETCHING)
_BEGUN = (WRITING, SPILLING, LOADING, FETCHING)
FORWARD, BACKWARD = range(2)
"""The part of a step that waits: forward for room or memory as it saves, backward for the storages that it needs."""

NEVER = float("inf")


class Clock:
    """The delay of the step against the profile's timeline, and its causes. Seconds."""

    def __init__(self) -> None:
        self.delay = self.cost_s = 0.0
        self.waited = [0.0, 0.0]
        """In forward and in backward."""

    def wait(self, seconds: float, kind: int) -> None:
        self.waited[kind] += seconds
        self.delay += seconds

    def charge(self, seconds: float) -> None:
        """Add compute time that moving a storage takes."""
        if seconds:
            self.delay += seconds
            self.cost_s += seconds


class Memory:
    """The memory of a tier, and the storages there."""

    def __init__(self, nbytes: Sequence[int], limit: int | None) -> None:
        self.holds = [False] * len(nbytes)
        self.used = self.peak = 0
        self.limit = NEVER if limit is None else limit
        self._nbytes = nbytes

    def has_room(self, nbytes: int) -> bool:
        return self.used + nbytes <= self.limit

    def add(self, p: int, now: float) -> None:
        self.holds[p] = True
        self.take(self._nbytes[p], now)

    def remove(self, p: int, now: float) -> None:
        if self.holds[p]:
            self.holds[p] = False
            self.take(-self._nbytes[p], now)

    def take(self, nbytes: int, now: float) -> None:
        """Take bytes, or give them back if the number is below 0."""
        self.used += nbytes
        if self.used > self.peak:
            self.peak = self.used


class Device(Memory):
    """The device, with the moment and the contents of its peak."""

    def __init__(self, nbytes: Sequence[int], limit: int | None) -> None:
        super().__init__(nbytes, limit)
        self.left = [False] * len(nbytes)
        """Whether the storage has left the device before."""
        self.has_room_early: Callable[[int], bool] = lambda p: True
        """Whether a storage that backward does not need yet fits."""
        self.phase = self.peak_phase = "forward"
        self.peak_time = 0.0
        self.on_peak: Callable[[], None] | None = None

    def take(self, nbytes: int, now: float) -> None:
        self.used += nbytes
        if self.used > self.peak:
            self.peak, self.peak_time, self.peak_phase = self.used, now, self.phase
            if self.on_peak is not None:
                self.on_peak()


class Links:
    """The four queues. A queue does one transfer at a time; it skips storages that no longer have to move."""

    def __init__(self, workload: Workload, state: list[int]) -> None:
        host, disk = workload.profile.host, workload.profile.disk
        # Without any link nothing moves, so that the rates only have to be valid.
        first = host or disk or Link(write_bytes_per_s=1.0, read_bytes_per_s=1.0)
        second = disk or first
        self.seconds_per_byte = (
            1 / first.write_bytes_per_s,
            1 / second.write_bytes_per_s,
            1 / second.read_bytes_per_s,
            1 / first.read_bytes_per_s,
        )
        self.latency = (first.latency_s, second.latency_s, second.latency_s, first.latency_s)
        self.cost_s = first.cost_s_each
        """Compute time that each move takes."""
        self.moved = [0] * 4
        self.next_end = NEVER
        self._nbytes = workload.nbytes
        self._state = state
        self._queues: list[deque[int]] = [deque() for _ in range(4)]
        self._current = [-1] * 4
        self._ends = [NEVER] * 4

    def is_busy(self, queue: int) -> bool:
        return bool(self._queues[queue]) or self._current[queue] >= 0

    def enqueue(self, queue: int, p: int, now: float) -> None:
        self._queues[queue].append(p)
        # A busy queue begins its next transfer when the running one ends.
        if self._current[queue] < 0:
            self._start(queue, now)
            if self._ends[queue] < self.next_end:
                self.next_end = self._ends[queue]

    def _start(self, queue: int, now: float) -> None:
        waiting, state, expected = self._queues[queue], self._state, _QUEUED[queue]
        while waiting:
            p = waiting.popleft()
            # An entry stays in the queue when its transfer is cancelled, so the state decides here.
            if state[p] == expected:
                state[p] = _BEGUN[queue]
                nbytes = self._nbytes[p]
                self.moved[queue] += nbytes
                self._current[queue] = p
                self._ends[queue] = now + nbytes * self.seconds_per_byte[queue] + self.latency[queue]
                return

    def finish(self, now: float) -> tuple[int, int]:
        """End the transfer that ends at ``now``, which is `next_end`; return its queue and its storage."""
        # `next_end` is the least of these very numbers, so the comparison of floats is exact.
        queue = self._ends.index(now)
        p = self._current[queue]
        self._current[queue] = -1
        self._ends[queue] = NEVER
        return queue, p

    def start_next(self, queue: int, now: float) -> None:
        """Start the next transfer of a queue after one has ended."""
        if self._queues[queue]:
            self._start(queue, now)
        self.next_end = min(self._ends)


class Transfers:
    """Where each storage is, and where it goes when a transfer begins or ends.

    Args:
        clock: charged with the costs of moving bytes.
        device: most bytes there, None for no limit; ``host`` and ``disk`` likewise.
    """

    def __init__(
        self, workload: Workload, clock: Clock, device: int | None, host: int | None, disk: int | None
    ) -> None:
        self.nbytes = workload.nbytes
        self.has_host = workload.profile.host is not None
        self.state = [UNSAVED] * len(self.nbytes)
        self.device, self.host, self.disk = (
            Device(self.nbytes, device),
            Memory(self.nbytes, host),
            Memory(self.nbytes, disk),
        )
        self.links = Links(workload, self.state)
        self.pending = self.pending_peak = 0
        """Bytes whose write has not ended, also of storages that need it no more."""
        self.releasing = 0
        """Bytes of the device that writes under way will free."""
        self.cancelled = 0
        """Bytes that backward needed before their write had begun."""
        self.needed = -1
        """The storage that backward waits for."""
        self._arrived: deque[int] = deque()
        """Storages that were read from disk early, and wait in host memory for room on the device."""
        self.clock = clock
        self._copied: list[int] = []

    def write(self, p: int, now: float) -> None:
        """Enqueue the write of a storage that was just saved, and for which there is room in the next tier."""
        nbytes = self.nbytes[p]
        self.clock.charge(self.links.cost_s)
        self.state[p] = WRITE_QUEUED
        self.pending += nbytes
        self.releasing += nbytes
        if self.pending > self.pending_peak:
            self.pending_peak = self.pending
        self.links.enqueue(WRITE, p, now)

    def fetch(self, p: int, now: float) -> int:
        """Begin to bring ``p`` back, or use it where it is; return the bytes that this adds to the device."""
        nbytes, state = self.nbytes[p], self.state[p]
        # The device copy is still there. A write that runs cannot be taken back, so its bytes stay pending.
        if WRITE_QUEUED <= state <= COPIED:
            self.releasing -= nbytes
            self.state[p] = ON_DEVICE
            if state == WRITE_QUEUED:
                self.cancelled += nbytes
                self.pending -= nbytes
                self.host.remove(p, now)
                self.disk.remove(p, now)
            return 0
        if state in (ON_HOST, SPILL_QUEUED, SPILLING):
            if state == SPILL_QUEUED:  # the spill has not begun, so the storage gives up its room on disk
                self.cancelled += nbytes
                self.disk.remove(p, now)
            if p in self._arrived:  # the whole way was charged as it left the disk
                self._arrived.remove(p)
            else:
                self.clock.charge(self.links.cost_s)
            self._fetch_to_device(p, now)
        elif state == ON_DISK:
            self.clock.charge(self.links.cost_s)
            if self.has_host:
                # No check for room in host memory: a prefetch has made it, and backward cannot do without the storage.
                self.state[p] = LOADING
                self.host.add(p, now)
                self.links.enqueue(LOAD, p, now)
            else:
                self._fetch_to_device(p, now)
        else:
            return 0
        return nbytes

    def poll(self, now: float) -> None:
        """Begin the copies to the device of storages that were read from disk early, as far as there is room."""
        while self._arrived:
            p = self._arrived[0]
            if self.state[p] == ON_HOST and not self.device.has_room_early(p):
                return
            self._arrived.popleft()
            if self.state[p] == ON_HOST:
                self._fetch_to_device(p, now)

    def _fetch_to_device(self, p: int, now: float) -> None:
        self.state[p] = FETCHING
        self.device.add(p, now)
        self.links.enqueue(FETCH, p, now)

    def free(self, p: int, now: float) -> None:
        """Release all memory of a storage that has died."""
        nbytes, state = self.nbytes[p], self.state[p]
        # A running write stays pending until it ends; only a queued one is cancelled.
        if state == WRITE_QUEUED:
            self.pending -= nbytes
        if WRITE_QUEUED <= state <= COPIED:
            self.releasing -= nbytes
        self.device.remove(p, now)
        self.host.remove(p, now)
        self.disk.remove(p, now)
        self.state[p] = FREED

    def advance(self, until: float) -> None:
        """End every transfer that ends up to that time."""
        while self.links.next_end <= until:
            self.complete_next()

    def complete_next(self) -> float:
        """End the transfer that ends first; return its time."""
        links, state = self.links, self.state
        now = links.next_end
        queue, p = links.finish(now)
        if queue == WRITE:
            self._written(p, now)
        elif queue == SPILL:
            if state[p] == SPILLING:
                state[p] = ON_DISK
            # A fetch that still reads the host copy removes it at its own end.
            if state[p] in (ON_DISK, ON_DEVICE):
                self.host.remove(p, now)
        elif queue == LOAD:
            if state[p] == LOADING and p == self.needed:
                self._fetch_to_device(p, now)
            elif state[p] == LOADING:
                state[p] = ON_HOST
                self._arrived.append(p)
                self.poll(now)
        elif state[p] == FETCHING:
            state[p] = ON_DEVICE
            # A storage from disk needs its host memory no more. Any other host copy stays until its storage dies.
            if self.disk.holds[p]:
                self.host.remove(p, now)
        links.start_next(queue, now)
        return now

    def _written(self, p: int, now: float) -> None:
        nbytes = self.nbytes[p]
        self.pending -= nbytes
        if self.state[p] != WRITING:  # backward uses the storage where it is, or the storage has died
            return
        self.state[p] = COPIED
        self._copied.append(p)
        if not self.has_host:  # the thread that sees the end of a write to disk releases the memory at once
            self.let_go(now)

    def let_go(self, now: float) -> list[int]:
        """Release the device memory of every storage that is `COPIED`; return these storages."""
        if not self._copied:
            return []
        released = [p for p in self._copied if self.state[p] == COPIED]
        self._copied.clear()
        for p in released:
            self.releasing -= self.nbytes[p]
            self.device.left[p] = True
            self.device.remove(p, now)
            if not self.has_host:
                self.state[p] = ON_DISK
            elif self.disk.holds[p]:
                self.state[p] = SPILL_QUEUED
                self.links.enqueue(SPILL, p, now)
            else:
                self.state[p] = ON_HOST
        return released
