"""Predicts a step under a plan: the profile's events in order, with transfers beside them. Pure, deterministic.

The compute timeline is the profile's, delayed by waits. Storages that a recomputation holds stay. Each link has a queue
for each direction, first come first served. An offloaded storage is enqueued when it is saved, and its device memory is
released at the first event after its write to the first tier has ended. An event is the save of a storage that has a
place on its tape, or its first use in backward. A moment in time cannot decide the release: PyTorch's allocator lives
in the time of the host, which may have enqueued the whole forward before the first copy ends. Storages come back in the
order in which backward needs them, as far ahead as the window and the budget allow. A storage that has not left yet is
used where it is, and its write is cancelled if it has not begun.

Inside, a storage is known by its number (``p``), and times are seconds since the step began.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import StateError
from .plan import Plan
from .profile import BIRTH, DEATH, DROP, DROP_AT_ONCE, ENTER, HOLD, LEAVE, NEED, RECOMPUTED, Profile
from .transfers import (
    BACKWARD,
    COPIED,
    FORWARD,
    FREED,
    NEVER,
    ON_DEVICE,
    ON_DISK,
    ON_HOST,
    SPILL,
    UNSAVED,
    WRITE_QUEUED,
    Clock,
    Transfers,
)
from .workload import KEEP, NVME, Choice, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The limits under which a step runs. Sizes in bytes; None is no limit.

    Attributes:
        device_budget: forward waits for room, and no prefetch passes it.
        host_budget: most bytes of host memory; ``nvme_budget``: of the disk.
        pending_bytes: most bytes on their way out of the device at once. Before the limit is passed, a device's compute
            stream waits, and a CPU tensor stays, or with a ``device_budget`` forward waits.
        in_forward: by the place of a region, bytes that its forward takes beside saved tensors. They count as saved.
            The number of regions stands for the turn: from the last region's forward until backward reaches one.
    """

    device_budget: int | None = None
    host_budget: int | None = None
    nvme_budget: int | None = None
    pending_bytes: int | None = None
    in_forward: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The contents of the device at its peak.

    Attributes:
        time_s: when, on the timeline of the step as it ran.
        phase: ``"forward"``, ``"backward"`` or ``"recompute"``.
        bytes_by_kind: ``"kept"``, ``"on its way out"``, ``"brought back"`` and ``"recomputed"``, in bytes.
        storages: the storages there, by number.
    """

    time_s: float
    phase: str
    bytes_by_kind: dict[str, int]
    storages: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The bytes that went to host memory or disk in a step, came from there, and the most that were there at once."""

    written_bytes: int
    read_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A simulated step. Seconds and bytes; storages by number.

    Attributes:
        forward_wait_s: waits of saving, mostly for room.
        cost_s: compute time that moving storages took.
        pending_peak_bytes: the most bytes on their way out of the device at once.
        cancelled_bytes: bytes that backward needed before their write had begun.
        waits: ``(storage, seconds)`` for each wait in backward.
        pressed: the storages that stayed although planned to leave, because a limit would have been passed.
        stayed: the pressed storages, and the storages that backward needed before they had left.
        releases: by storage, how many events after its own save its device memory was released; 0 if backward needed it
            before that.
        peak: the contents of the device at the peak; None without ``detail``.
    """

    step_s: float
    forward_wait_s: float
    backward_wait_s: float
    cost_s: float
    peak_bytes: int
    host: Traffic
    disk: Traffic
    pending_peak_bytes: int
    cancelled_bytes: int
    waits: tuple[tuple[int, float], ...]
    pressed: tuple[int, ...]
    stayed: tuple[int, ...]
    releases: tuple[int, ...]
    peak: Peak | None

    @property
    def wait_s(self) -> float:
        """All waits of the step."""
        return self.forward_wait_s + self.backward_wait_s

    @property
    def moved_bytes(self) -> int:
        """Bytes over any link, both ways: the step's traffic."""
        return sum(way.written_bytes + way.read_bytes for way in (self.host, self.disk))


def simulate(
    profile: Profile, plan: Plan | None = None, conditions: Conditions | None = None, *, detail: bool = True
) -> Prediction:
    """Predict one step of ``profile`` under ``plan``.

    Args:
        profile: the step and its links; `Profile.with_links` replaces the links.
        plan: the storages that move; None keeps all. Its regions are taken to be the profile's.
        conditions: budgets and windows; None for no limits.
        detail: whether to return the contents of the peak.
    """
    workload = Workload(profile)
    if plan is None:
        return run(workload, workload.keep_all(), conditions or Conditions(), detail=detail)
    choice = workload.from_plan(plan)
    return run(workload, choice, conditions or Conditions(), window=plan.prefetch_bytes, detail=detail)


def run(
    workload: Workload, choice: Choice, conditions: Conditions, *, window: int | None = None, detail: bool = False
) -> Prediction:
    """Predict one step of a prepared profile under a planner's choice; see `simulate`."""
    step = _Step(workload, choice, conditions, window or workload.profile.prefetch_bytes, detail=detail)
    step.run()
    return step.prediction()


class _ReadAhead:
    """Fetches storages before backward needs them, in the order of need."""

    def __init__(self, workload: Workload, modes: Sequence[int], transfers: Transfers, window: int) -> None:
        self.workload, self.transfers = workload, transfers
        sizes = workload.nbytes
        self.largest = max((size for size, record in zip(sizes, workload.recorded, strict=True) if record), default=0)
        moved = (size for size, mode in zip(sizes, modes, strict=True) if mode != KEEP)
        # As the offloader does: one storage is in use while the next one is on its way, however small the window is.
        self.window = max(window, 2 * max(moved, default=0))
        self.place = self.cursor = 0
        """The next place to fetch, and the next place that backward needs."""
        self.ahead = 0
        self.is_ahead = [False] * len(modes)
        self.held_bytes = self.begun = 0
        """Bytes that recomputations hold at this moment, and the number of those that have begun."""
        self.used_bytes = 0
        """Bytes that backward has used of the region, run once, that it is in."""
        self._region: tuple[int, int] | None = None
        transfers.device.has_room_early = self._has_room

    def use(self, p: int) -> None:
        """Backward needs ``p``. See `DeviceBudget.used_bytes`."""
        storage = self.workload.profile.storages[p]
        region = None if storage.region is None else (storage.tape, storage.region)
        if region != self._region:
            self._region, self.used_bytes = region, 0
        if region is not None:
            self.used_bytes += storage.nbytes

    def arrive(self, p: int, now: float) -> None:
        """Backward has ``p``: fetch beyond its place."""
        self.forget(p)
        self.cursor = max(self.cursor, self.workload.place[p] + 1)
        # A storage without a record is on no tape, so the offloader does not notice its use.
        if self.workload.recorded[p] and self.ahead < self.window:
            self._fetch(now)

    def forget(self, p: int) -> None:
        """Count ``p`` as fetched ahead no longer: backward has it, or it has died."""
        if self.is_ahead[p]:
            self.is_ahead[p] = False
            self.ahead -= self.workload.nbytes[p]

    def _fetch(self, now: float) -> None:
        order, reach, state, host = self.workload.order, self.workload.reach, self.transfers.state, self.transfers.host
        while self.place < len(order) and self.ahead < self.window:
            p = order[self.place]
            where = state[p]
            if where == ON_DEVICE:
                self.place += 1
                continue
            if where == UNSAVED:
                return  # a later forward saves it: backward has not begun there
            nbytes = self.workload.nbytes[p]
            if ON_HOST <= where <= ON_DISK:
                # Kept storages fill the window as well: the offloader's window counts bytes from backward's position.
                if reach[self.place] - reach[self.cursor] >= self.window:
                    return
                if not self._has_room(p):
                    return
                # A read from disk passes through host memory, which must have room for it.
                if where == ON_DISK and self.transfers.has_host and not host.has_room(nbytes):
                    return
                self.is_ahead[p] = True
                self.ahead += self.transfers.fetch(p, now)
            elif WRITE_QUEUED <= where <= COPIED:
                if not self._has_room(p, 0):
                    return  # the next storages may need the room that this one's write frees
                self.transfers.fetch(p, now)
            self.place += 1

    def _has_room(self, p: int, nbytes: int | None = None) -> bool:
        """Whether ``p``, or ``nbytes`` more, fit beside all that may be there before backward needs ``p``.

        As `DeviceBudget.has_room_early`.
        """
        device, workload = self.transfers.device, self.workload
        before = workload.recomputed[self.begun : workload.begun[workload.place[p]]]
        made = max(workload.derived, *before) if before else workload.derived
        at_once = max(self.largest, self.used_bytes, made - self.held_bytes)
        return device.used + (workload.nbytes[p] if nbytes is None else nbytes) + at_once <= device.limit


class _Step:
    """One step: create it, `run` it, and read its `prediction`."""

    def __init__(
        self, workload: Workload, choice: Choice, conditions: Conditions, window: int, *, detail: bool
    ) -> None:
        self.workload, self.conditions = workload, conditions
        self.modes = workload.modes(choice)
        self.clock = Clock()
        budgets = conditions.device_budget, conditions.host_budget, conditions.nvme_budget
        self.transfers = Transfers(workload, self.clock, *budgets)
        self.device = self.transfers.device
        if detail:
            self.device.on_peak = self._note_peak
        self.ahead = _ReadAhead(workload, self.modes, self.transfers, window)
        self.waits: list[tuple[int, float]] = []
        self.refused: list[int] = []
        """Storages that were to leave, and stay because the next tier has no room."""
        self._events = 0
        """Events so far: saves of recorded storages, and their first uses in backward."""
        self._saved_at = [0] * len(self.modes)
        self._releases = [0] * len(self.modes)
        self._at_peak: tuple[list[bool], list[int], list[bool]] | None = None

    def run(self) -> None:
        """Execute the events of the step."""
        modes, state, links, clock, device = (
            self.modes,
            self.transfers.state,
            self.transfers.links,
            self.clock,
            self.device,
        )
        in_forward = self.conditions.in_forward
        for base, kind, p in self.workload.events:
            now = base + clock.delay
            # Transfers that end at this moment end first: an event finds the room and the storages that they bring.
            if links.next_end <= now:
                self.transfers.advance(now)
            if kind in (ENTER, LEAVE):
                if p in in_forward:
                    self._forward_takes(in_forward[p], now, ends=kind == LEAVE)
                continue
            mode = modes[p]
            if kind in (BIRTH, NEED):
                self.transfers.poll(now)
                if kind == BIRTH:
                    self._save(p, mode, now)
                else:
                    self._need(p, now)
                if self.workload.recorded[p]:
                    self._events += 1
                    # Later than `now` if the event had to wait.
                    self._let_go(base + clock.delay)
            elif kind == DEATH and not (mode == KEEP and state[p] == ON_DEVICE):
                self.transfers.free(p, now)
                self.ahead.forget(p)
            elif kind == HOLD:
                self._hold(p, now)
            else:  # the storage has never left the device
                device.remove(p, now)
                state[p] = FREED
                if kind in (DROP, DROP_AT_ONCE):
                    self.ahead.held_bytes -= self.workload.nbytes[p]

    def _let_go(self, now: float) -> None:
        for p in self.transfers.let_go(now):
            self._releases[p] = self._events - self._saved_at[p]

    def _save(self, p: int, mode: int, now: float) -> None:
        device = self.device
        # Its own save is an event as well, which `run` counts afterwards: a release there comes 0 events later.
        self._saved_at[p] = self._events + 1
        device.phase = "forward"
        now = self._wait_for_room(self.workload.nbytes[p], now, FORWARD)
        device.add(p, now)
        self.transfers.state[p] = ON_DEVICE
        if mode == KEEP:
            return
        now = self._admit(p, mode, now)
        if now < 0:
            self.refused.append(p)
        else:
            self.transfers.write(p, now)

    def _admit(self, p: int, mode: int, now: float) -> float:
        """Reserve room where ``p`` goes; return the time at which there is room, or -1 if ``p`` has to stay."""
        nbytes, transfers = self.workload.nbytes[p], self.transfers
        now = self._wait_for_pending(nbytes, now)
        if now < 0:
            return now
        # If the disk is full, a storage that is bound for it goes as far as host memory.
        to_disk = mode == NVME and transfers.disk.has_room(nbytes)
        if mode == NVME and not to_disk and not transfers.has_host:
            return -1.0
        if transfers.has_host:
            since = now
            while not transfers.host.has_room(nbytes):
                self._let_go(now)  # a spill, which frees host memory, begins only when the device copy is released
                waits = self.device.limit < NEVER and (transfers.links.is_busy(SPILL) or transfers.pending)
                if not waits or transfers.links.next_end == NEVER:
                    return -1.0
                now = max(now, transfers.complete_next())
            self.clock.wait(now - since, FORWARD)
            transfers.host.add(p, now)
        if to_disk:
            transfers.disk.add(p, now)
        return now

    def _wait_for_pending(self, nbytes: int, now: float) -> float:
        """Wait until this many more bytes may be on their way out; return the time, or -1 if forward does not wait."""
        transfers, most = self.transfers, self.conditions.pending_bytes
        if most is None:
            return now
        # As the offloader does: a storage larger than the limit may go while at most half of the limit is on its way.
        counted = nbytes if nbytes <= most else (most + 1) // 2
        if not transfers.has_host:
            return -1.0 if transfers.pending + counted > most and self.device.limit == NEVER else now
        until = now
        while transfers.pending and transfers.pending + counted > most:
            until = max(until, transfers.complete_next())
        self.clock.wait(until - now, FORWARD)
        return until

    def _need(self, p: int, now: float) -> None:
        transfers, device = self.transfers, self.device
        state, device.phase = transfers.state, "backward"
        self.ahead.use(p)
        if state[p] != ON_DEVICE:
            nbytes = self.workload.nbytes[p]
            if ON_HOST <= state[p] <= ON_DISK:
                now = self._wait_for_room(nbytes, now, BACKWARD)
            transfers.fetch(p, now)
            if state[p] != ON_DEVICE:
                transfers.needed, until = p, now
                # One transfer after the other: ends in between make room, and may begin the next leg of this storage.
                while state[p] != ON_DEVICE:
                    if transfers.links.next_end == NEVER:
                        raise StateError(f"the simulator waits for storage {p}, which is not on its way")
                    until = max(until, transfers.complete_next())
                self.clock.wait(until - now, BACKWARD)
                if until > now:
                    self.waits.append((p, until - now))
                now = until
        if device.left[p] and self.workload.profile.storages[p].let_go:
            device.remove(p, now)  # before the fetch of the next one, as the offloader does
        self.ahead.arrive(p, now)

    def _forward_takes(self, nbytes: int, now: float, *, ends: bool) -> None:
        """The forward of a region begins, which takes these bytes, or ends."""
        if not ends:
            now = self._wait_for_room(nbytes, now, FORWARD)
        self.device.take(-nbytes if ends else nbytes, now)

    def _hold(self, p: int, now: float) -> None:
        """A region runs again, and holds the storages that it saves."""
        nbytes = self.workload.nbytes[p]
        self.device.phase = "recompute"
        now = self._wait_for_room(nbytes, now, BACKWARD)
        self.device.add(p, now)
        self.transfers.state[p] = ON_DEVICE
        self.ahead.held_bytes += nbytes
        if self.workload.profile.storages[p].kept == RECOMPUTED:
            self.ahead.begun += 1
            self.ahead.used_bytes = 0  # backward has left the region before

    def _wait_for_room(self, nbytes: int, now: float, kind: int) -> float:
        """Wait until ``nbytes`` fit the budget, or nothing more is leaving; return the time."""
        if self.device.has_room(nbytes):
            return now
        until = now
        # As at an event, copied storages are released first: forward does not wait for room that they already give.
        self._let_go(now)
        # With nothing on its way out no wait ends, and the budget is passed: the peak then shows it to the planner.
        while not self.device.has_room(nbytes) and self.transfers.releasing > 0:
            until = max(until, self.transfers.complete_next())
            self._let_go(until)
        self.clock.wait(until - now, kind)
        return until

    def prediction(self) -> Prediction:
        """The simulated step."""
        transfers, clock = self.transfers, self.clock
        written, spilled, loaded, fetched = transfers.links.moved
        # Without host memory the first and the last queue are those between device and disk.
        ways = (written, fetched), (spilled, loaded)
        to_host, to_disk = ways if transfers.has_host else ((0, 0), ways[0])
        return Prediction(
            step_s=self.workload.profile.step_s + clock.delay,
            forward_wait_s=clock.waited[FORWARD],
            backward_wait_s=clock.waited[BACKWARD],
            cost_s=clock.cost_s,
            peak_bytes=self.device.peak,
            host=Traffic(written_bytes=to_host[0], read_bytes=to_host[1], peak_bytes=transfers.host.peak),
            disk=Traffic(written_bytes=to_disk[0], read_bytes=to_disk[1], peak_bytes=transfers.disk.peak),
            pending_peak_bytes=transfers.pending_peak,
            cancelled_bytes=transfers.cancelled,
            waits=tuple(self.waits),
            pressed=tuple(self.refused),
            stayed=tuple(p for p, mode in enumerate(self.modes) if mode != KEEP and not self.device.left[p]),
            releases=tuple(self._releases),
            peak=self._describe_peak(),
        )

    def _note_peak(self) -> None:
        # Copied at each new peak: the simulator cannot know yet which one is the last.
        self._at_peak = self.device.holds[:], self.transfers.state[:], self.device.left[:]

    def _describe_peak(self) -> Peak | None:
        """The contents of the device at its peak."""
        if self._at_peak is None:
            return None
        kinds = {"kept": 0, "on its way out": 0, "brought back": 0, "recomputed": 0}
        holds, states, left = self._at_peak
        there = tuple(p for p, held in enumerate(holds) if held)
        for p in there:
            if WRITE_QUEUED <= states[p] <= COPIED:
                kind = "on its way out"
            elif self.workload.held[p]:
                kind = "recomputed"
            else:
                kind = "brought back" if left[p] else "kept"
            kinds[kind] += self.workload.nbytes[p]
        return Peak(time_s=self.device.peak_time, phase=self.device.peak_phase, bytes_by_kind=kinds, storages=there)
