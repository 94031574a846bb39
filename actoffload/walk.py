"""The simulator's walk over one step: what is saved, needed, recomputed and freed, in order. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from .errors import StateError
from .timeline import ABSENT, BIRTH, DROPPED, HOST, KEEP, NEED, NVME, RECOMPUTE, Workload
from .transit import (
    AWAY,
    GONE,
    HOSTED,
    IN_1,
    IN_2,
    NEAR,
    NEVER,
    NONE,
    OUT_1,
    OUT_2,
    QUEUED,
    WRITING,
    Bounds,
    StoppedError,
    Transit,
)


class Walk(Transit):
    """One step. Make it, `go`, read the attributes; times in seconds, sizes in bytes."""

    def __init__(self, workload: Workload, modes: Sequence[int], recompute: frozenset[int], bounds: Bounds) -> None:
        super().__init__(workload, modes, bounds)
        self.blocks = frozenset(b for group in recompute for b in workload.groups[group].blocks)
        self.is_ahead = [False] * len(modes)
        self.forward_wait = self.backward_wait = self.recompute_s = 0.0
        self.waits: list[tuple[int, float]] = []
        self.pressed: list[int] = []
        there = zip(self.nbytes, modes, workload.recorded, strict=True)
        self.largest = max((size for size, mode, record in there if record and KEEP <= mode <= NVME), default=0)
        moved = max((self.nbytes[p] for p, mode in enumerate(modes) if HOST <= mode <= NVME), default=0)
        self.window = max(bounds.window, 2 * moved) if bounds.window else 0
        self.frontier = self.cursor = self.ahead = self.reserved = 0
        self.reach = workload.reach_of(modes, self.blocks) if self.blocks else workload.reach
        self.begun: set[int] = set()
        self.passed: set[int] = set()
        self.need_times, self.safe = self._safe_starts() if bounds.latest_safe else ([], [])

    def _safe_starts(self) -> tuple[list[float], list[float]]:
        """When each read has to begin at the latest, by place in the order of need, if reads follow each other."""
        order = self.workload.order
        times = [self._need_time(p, block) for p, block in order]
        safe = [NEVER] * len(order)
        following = NEVER
        for place in range(len(order) - 1, -1, -1):
            position, block = order[place]
            if position < 0:
                position = self.workload.block_input[block] if block in self.blocks else position
            mode = self.modes[position] if position >= 0 else KEEP
            if HOST <= mode <= NVME:
                steps = (IN_2, IN_1) if self.has_host and mode == NVME else (IN_1,)
                takes = [self.nbytes[position] * self.seconds_per_byte[k] + self.latency[k] for k in steps]
                following = min(times[place] - sum(takes) + max(takes), following) - max(takes)
            safe[place] = following
        return times, safe

    def _need_time(self, position: int, block: int) -> float:
        need = self.workload.need[position] if position >= 0 else self.workload.block_begin[block]
        return NEVER if need is None else need

    # -- the walk -----------------------------------------------------------------------------------------------------

    def go(self) -> bool:
        """Walk the step; whether it came to its end, rather than to where it was told to stop."""
        modes, state, blocks = self.modes, self.state, self.blocks
        try:
            for base, kind, p in self.workload.events:
                if kind == RECOMPUTE:
                    if p in blocks:
                        self._recompute(p, base)
                    continue
                mode = modes[p]
                if mode == ABSENT or (mode == DROPPED and kind == BIRTH):
                    continue
                now = base + self.delay
                if self.next_end <= now:
                    self._advance(now)
                if kind == BIRTH:
                    self._born(p, mode, now)
                elif kind == NEED:
                    self._need(p, now)
                elif mode == KEEP and state[p] == NEAR:  # most often; it was never anywhere else
                    self._went(p, now)
                    state[p] = GONE
                else:
                    self._die(p, now)
        except StoppedError:
            return False
        while self.log is not None and self.next_end < NEVER:
            self._complete_next()
        return True

    def _born(self, p: int, mode: int, now: float) -> None:
        nbytes = self.nbytes[p]
        bounds = self.bounds
        self.phase = "forward"
        if bounds.device is not None and self.resident + nbytes > bounds.device:
            waited_until = self._make_room(nbytes, now)
            self.forward_wait += waited_until - now
            self._wait(waited_until - now)
            now = waited_until
        self._came(p, now)
        self.state[p] = NEAR
        if mode == KEEP:
            return
        now = self._admit(p, mode, now)
        if now < 0:
            self.pressed.append(p)
            return
        if self.costs[mode]:
            self._charge(nbytes * self.costs[mode])
        self.state[p] = QUEUED
        self.pending += nbytes
        self.releasing += nbytes
        if self.pending > self.pending_peak:
            self.pending_peak = self.pending
        self._enqueue(OUT_1, p, now)

    def _admit(self, p: int, mode: int, now: float) -> float:
        """Take room where ``p`` is going; the time when there was some, or -1 when it has to stay."""
        nbytes, bounds = self.nbytes[p], self.bounds
        if bounds.pending is not None and self.pending + nbytes > bounds.pending:
            return -1.0
        to_disk = mode == NVME and (bounds.disk is None or self.disk + nbytes <= bounds.disk)
        if mode == NVME and not to_disk and not self.has_host:
            return -1.0
        if self.has_host:
            since = now
            while bounds.host is not None and self.host + nbytes > bounds.host:
                waits = bounds.device is not None and (self.queues[OUT_2] or self.current[OUT_2] >= 0 or self.pending)
                if not waits or self.next_end == NEVER:
                    return -1.0
                now = max(now, self._complete_next())
            self.forward_wait += now - since
            self._wait(now - since)
            self.on_host[p] = True
            self.host += nbytes
            if self.host > self.host_peak:
                self.host_peak = self.host
        if to_disk:
            self.on_disk[p] = True
            self.disk += nbytes
            if self.disk > self.disk_peak:
                self.disk_peak = self.disk
        return now

    def _need(self, p: int, now: float, place: int = -1) -> None:
        self.phase = "backward"
        state = self.state[p]
        if state != NEAR:
            limit = self.bounds.device
            if limit is not None and HOSTED <= state <= AWAY and self.resident + self.nbytes[p] > limit:
                until = self._make_room(self.nbytes[p], now)
                self._wait(until - now)
                self.backward_wait += until - now
                now = until
            self._fetch(p, now)
            if self.state[p] != NEAR:
                until = self._until_near(p, now)
                self._wait(until - now)
                self.backward_wait += until - now
                if until > now:
                    self.waits.append((p, until - now))
                now = until
        if self.is_ahead[p]:
            self.is_ahead[p] = False
            self.ahead -= self.nbytes[p]
        after = (self.workload.place[p] if place < 0 else place) + 1
        if after > self.cursor:
            self.cursor = after
        if self.frontier < len(self.workload.order) and (self.safe or self._looks_ahead(p)):
            self._fetch_ahead(now)

    def _looks_ahead(self, p: int) -> bool:
        """Whether there is room in the window, and who asked for ``p`` has a record to look ahead from."""
        return self.ahead < self.window and self.workload.recorded[p] and self.modes[p] != DROPPED

    def _until_near(self, p: int, now: float) -> float:
        while self.state[p] != NEAR:
            if self.next_end == NEVER:
                raise StateError(f"the simulator waits for storage {p}, which is not on its way")
            now = max(now, self._complete_next())
        return now

    def _recompute(self, block: int, base: float) -> None:
        now = base + self.delay
        if self.next_end <= now:
            self._advance(now)
        nbytes = self.workload.dropped_bytes[block]
        self.begun.add(block)
        if block not in self.passed:  # nothing that is fetched beside the input may take the room
            self.reserved += nbytes
        source = self.workload.block_input[block]
        if self.state[source] not in (NONE, GONE):
            self._need(source, now, self.workload.block_place[block])
        now = base + self.delay
        self.reserved -= nbytes
        self.phase = "recompute"
        limit = self.bounds.device
        if limit is not None and self.resident + nbytes > limit:
            until = self._make_room(nbytes, now)
            self.backward_wait += until - now
            self._wait(until - now)
            now = until
        for p in self.workload.dropped[block]:
            if self.state[p] != GONE:
                self.state[p] = NEAR
                self._came(p, now)
        seconds = self.workload.profile.blocks[block].recompute_s
        self.recompute_s += seconds
        self._wait(seconds)

    def _die(self, p: int, now: float) -> None:
        nbytes, state = self.nbytes[p], self.state[p]
        if state == QUEUED:
            self.pending -= nbytes
        if state in (QUEUED, WRITING):
            self.releasing -= nbytes
        if self.on_device[p]:
            self._went(p, now)
        self._leave_host(p)
        if self.on_disk[p]:
            self.on_disk[p] = False
            self.disk -= nbytes
        if self.is_ahead[p]:
            self.is_ahead[p] = False
            self.ahead -= nbytes
        self.state[p] = GONE

    def _make_room(self, nbytes: int, now: float) -> float:
        """Wait until ``nbytes`` fit the budget or nothing more will leave; the time then."""
        limit = self.bounds.device
        while limit is not None and self.resident + nbytes > limit and self.releasing > 0:
            now = max(now, self._complete_next())
        return now

    def _fetch_ahead(self, now: float) -> None:
        order, limit, states, safe = self.workload.order, self.bounds.device, self.state, self.safe
        horizon = self._horizon(now) if safe else now
        count = len(order)
        while self.frontier < count:
            if self.ahead >= self.window and not (safe and safe[self.frontier] + self.delay <= horizon):
                return
            p, block = order[self.frontier]
            if p < 0:
                if not self._pass_block(block):
                    return
                p = self.workload.block_input[block] if block in self.blocks else -1
            state = states[p] if p >= 0 else NEAR
            if state == NEAR:
                self.frontier += 1
                continue
            if state == NONE and self.modes[p] != DROPPED:
                return  # a later forward's
            nbytes = self.nbytes[p]
            if HOSTED <= state <= AWAY:
                if not safe and self.reach[self.frontier] - self.reach[self.cursor] >= self.window:
                    return
                if limit is not None and self.resident + nbytes + self.largest + self.reserved > limit:
                    return
                host = self.bounds.host
                if state == AWAY and self.has_host and host is not None and self.host + nbytes > host:
                    return
                self.is_ahead[p] = True
                self.ahead += self._fetch(p, now)
            elif state in (QUEUED, WRITING):
                if limit is not None and self.resident + self.largest + self.reserved > limit:
                    return  # what comes next may need the room that its write gives
                self._fetch(p, now)
            self.frontier += 1

    def _horizon(self, now: float) -> float:
        """When backward will next ask for something; for reads that begin as late as is safe."""
        place = bisect_right(self.need_times, now - self.delay)
        following = self.need_times[place] if place < len(self.need_times) else NEVER
        return following + self.delay

    def _pass_block(self, block: int) -> bool:
        """Reserve what recomputing a block will need, before fetching beyond it; False when there is no room yet."""
        if block not in self.blocks or block in self.begun or block in self.passed:
            return True
        limit, nbytes = self.bounds.device, self.workload.dropped_bytes[block]
        if limit is not None and self.resident + nbytes + self.largest + self.reserved > limit:
            return False
        self.passed.add(block)
        self.reserved += nbytes
        return True
