"""The transfers beside the simulator's walk: where each storage is, four queues, and what each tier holds. Pure.

Queues: device → host (or disk, where there is no host link), host → disk, disk → host, host (or disk) → device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from .profile import Link
from .timeline import HOST, NVME, Workload

NONE, NEAR, QUEUED, WRITING, HOSTED, SPILL_QUEUED, SPILLING, AWAY, READING, RETURNING, GONE = range(11)
"""Where a storage is: not saved yet; on the device; there, and waiting for its write, or being written; in host memory
(and waiting for disk, or being written there); on disk; on its way to host memory; on its way to the device; dead."""

OUT_1, OUT_2, IN_2, IN_1 = range(4)
WAITING_STATE = (QUEUED, SPILL_QUEUED, READING, RETURNING)
NEVER = float("inf")


class StoppedError(Exception):
    """The walk has come to where it was told to stop: at a peak, or at more bytes or delay than is of interest."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits in bytes, None for none; ``window`` is how far ahead to fetch."""

    device: int | None
    host: int | None
    disk: int | None
    pending: int | None
    window: int
    latest_safe: bool


class Transit:
    """The transfers of one step. Times in seconds, sizes in bytes."""

    def __init__(self, workload: Workload, modes: Sequence[int], bounds: Bounds) -> None:
        profile = workload.profile
        count = len(modes)
        self.workload, self.modes, self.bounds = workload, modes, bounds
        self.nbytes = workload.nbytes
        self.has_host = profile.host is not None
        self._set_links(profile.host, profile.disk)
        self.state = [NONE] * count
        self.on_device = [False] * count
        self.on_host = [False] * count
        self.on_disk = [False] * count
        self.left = [False] * count
        self.queues: list[deque[int]] = [deque() for _ in range(4)]
        self.current = [-1] * 4
        self.ends = [NEVER] * 4
        self.next_end = NEVER
        self.resident = self.host = self.disk = self.pending = self.releasing = 0
        self.peak = self.host_peak = self.disk_peak = self.pending_peak = 0
        self.peak_time, self.peak_phase, self.phase = 0.0, "forward", "forward"
        self.delay = self.cost_s = 0.0
        self.moved = [0] * 4
        self.forwarded = self.cancelled = 0
        self.log: list[tuple[float, int]] | None = None
        self.stop_at_bytes = -1
        self.stop_above_bytes = self.stop_after_s = NEVER

    def _set_links(self, host: Link | None, disk: Link | None) -> None:
        first = host or disk or Link(write_bytes_per_s=1.0, read_bytes_per_s=1.0)
        second = disk or first
        self.seconds_per_byte = (
            1 / first.write_bytes_per_s,
            1 / second.write_bytes_per_s,
            1 / second.read_bytes_per_s,
            1 / first.read_bytes_per_s,
        )
        self.latency = (first.latency_s, second.latency_s, second.latency_s, first.latency_s)
        self.duplex = (first.duplex, second.duplex, second.duplex, first.duplex)
        far = first.cost_s_per_byte + (second.cost_s_per_byte if self.has_host else 0.0)
        self.costs = (0.0, first.cost_s_per_byte, far)  # by tier

    # -- memory -------------------------------------------------------------------------------------------------------

    def _came(self, p: int, now: float) -> None:
        self.on_device[p] = True
        self.resident += self.nbytes[p]
        if self.resident > self.peak:
            self.peak = self.resident
            self.peak_time, self.peak_phase = now, self.phase
            if self.resident == self.stop_at_bytes or self.resident > self.stop_above_bytes:
                raise StoppedError
        if self.log is not None:
            self.log.append((now, self.resident))

    def _went(self, p: int, now: float) -> None:
        self.on_device[p] = False
        self.resident -= self.nbytes[p]
        if self.log is not None:
            self.log.append((now, self.resident))

    def _leave_host(self, p: int) -> None:
        if self.on_host[p]:
            self.on_host[p] = False
            self.host -= self.nbytes[p]

    # -- bringing back ------------------------------------------------------------------------------------------------

    def _fetch(self, p: int, now: float) -> int:
        """Begin to bring ``p`` back, or take it where it is; the bytes that this brings to the device."""
        nbytes, state = self.nbytes[p], self.state[p]
        if state in (QUEUED, WRITING):
            self.forwarded += nbytes
            self.releasing -= nbytes
            self.state[p] = NEAR
            if state == QUEUED:
                self._cancel(p)
            return 0
        if state in (HOSTED, SPILL_QUEUED, SPILLING):
            if state != HOSTED:
                self.forwarded += nbytes
            if state == SPILL_QUEUED:  # its bytes stay in host memory, and never go to disk
                self.cancelled += nbytes
                self.on_disk[p] = False
                self.disk -= nbytes
            self._charge(nbytes * self.costs[HOST])
            self._return(p, now)
        elif state == AWAY:
            self._charge(nbytes * self.costs[NVME])
            if not self.has_host:
                self._return(p, now)
            else:
                self.state[p] = READING
                self.on_host[p] = True
                self.host += nbytes
                self.host_peak = max(self.host_peak, self.host)
                self._enqueue(IN_2, p, now)
        else:
            return 0
        return nbytes

    def _cancel(self, p: int) -> None:
        nbytes = self.nbytes[p]
        self.cancelled += nbytes
        self.pending -= nbytes
        self._leave_host(p)
        if self.on_disk[p]:
            self.on_disk[p] = False
            self.disk -= nbytes

    def _charge(self, seconds: float) -> None:
        if seconds:
            self.delay += seconds
            self.cost_s += seconds

    def _wait(self, seconds: float) -> None:
        self.delay += seconds
        if self.delay > self.stop_after_s:
            raise StoppedError

    def _return(self, p: int, now: float) -> None:
        self.state[p] = RETURNING
        self._came(p, now)
        self._enqueue(IN_1, p, now)

    # -- queues -------------------------------------------------------------------------------------------------------

    def _enqueue(self, k: int, p: int, now: float) -> None:
        self.queues[k].append(p)
        if self.current[k] < 0:
            self._start(k, now)
            if self.ends[k] < self.next_end:
                self.next_end = self.ends[k]

    def _start(self, k: int, now: float) -> None:
        if self.current[k] >= 0 or (not self.duplex[k] and self.current[3 - k] >= 0):
            return
        queue, state, expected = self.queues[k], self.state, WAITING_STATE[k]
        while queue:
            p = queue.popleft()
            if state[p] == expected:
                if k == OUT_1:
                    state[p] = WRITING
                elif k == OUT_2:
                    state[p] = SPILLING
                nbytes = self.nbytes[p]
                self.moved[k] += nbytes
                self.current[k] = p
                self.ends[k] = now + nbytes * self.seconds_per_byte[k] + self.latency[k]
                return

    def _advance(self, until: float) -> None:
        while self.next_end <= until:
            self._complete_next()

    def _complete_next(self) -> float:
        """Let the transfer that ends first end; the time then."""
        now = self.next_end
        k = self.ends.index(now)
        p = self.current[k]
        self.current[k] = -1
        self.ends[k] = NEVER
        if k == OUT_1:
            self._written_out(p, now)
        elif k == OUT_2:
            if self.state[p] == SPILLING:
                self.state[p] = AWAY
            if self.state[p] in (AWAY, NEAR):
                self._leave_host(p)
        elif k == IN_2:
            if self.state[p] == READING:
                self._return(p, now)
        elif self.state[p] == RETURNING:
            self.state[p] = NEAR
            if self.on_disk[p]:
                self._leave_host(p)
        if not self.duplex[k]:
            self._start(max(k, 3 - k), now)
            k = min(k, 3 - k)
        if self.queues[k]:
            self._start(k, now)
        self.next_end = min(self.ends)
        return now

    def _written_out(self, p: int, now: float) -> None:
        nbytes = self.nbytes[p]
        self.pending -= nbytes
        if self.state[p] != WRITING:  # taken, or dead
            return
        self.releasing -= nbytes
        self.left[p] = True
        self._went(p, now)
        if not self.has_host:
            self.state[p] = AWAY
        elif self.on_disk[p]:
            self.state[p] = SPILL_QUEUED
            self._enqueue(OUT_2, p, now)
        else:
            self.state[p] = HOSTED
