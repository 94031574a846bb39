"""Notes one step as it runs and makes its `Profile`: what is saved when and for how long, and how long all takes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ..planning.profile import Profile, Region, RegionSave, Storage
from ..policy import KeepReason, Kind
from ..tiers.record import Record
from ..tiers.timers import Stamp, Stopwatch
from .backward_end import BackwardEnd
from .regions import collectives
from .tape import Tape

STAMP_BYTES = 1 << 20
"""Of storages that no plan moves, so many bytes at most share one moment."""
MOST_STORAGES = 100_000
"""A recording with more is given up."""


@dataclass(slots=True, eq=False)
class SavedStorage:
    """One saved storage while its step runs."""

    nbytes: int
    birth: Stamp
    tape: int
    index: int | None
    module: str | None
    region: int | None
    kept: str
    need: Stamp = None
    death: Stamp = None
    input_of: RunRegion | None = None


@dataclass(slots=True, eq=False)
class RunRegion:
    """One run of a checkpointed region while its step runs.

    Attributes:
        place: its number in its forward; ``tape``: the number of that forward.
        name: of its function.
        once: it does not run again.
        begin: when its forward began; ``end``: when that ended; None if it raised.
        over: its forward has ended, or raised; a finalizer may set this.
        held: what it held when it ran again; None before that.
        again_end: when that second run had ended.
        saves: when each storage was saved again, its bytes, and why it would stay.
        communicates: a collective ran in it, or may have.
        versions: of each tensor that its first run saved, a tensor that shares its version counter, and the version.
        changed: one of them was changed in place before the region ran again.
        input_bytes: the most bytes of an input that its second run saved as well.
    """

    place: int
    tape: int
    name: str
    once: bool
    begin: Stamp
    end: Stamp = None
    over: bool = False
    held: SavedStorage | None = None
    again_end: Stamp = None
    saves: list[tuple[Stamp, int, str]] = field(default_factory=list)
    communicates: bool = False
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    changed: bool = False
    input_bytes: int = 0
    collectives: int | None = 0
    """That had been enqueued when it began to run, or to run again."""

    def count_collectives(self) -> None:
        """It has run: see whether a collective was enqueued meanwhile."""
        found = collectives()
        self.communicates |= found is None or found != self.collectives


class SharedStamp:
    """A moment for what no plan moves: small tensors share one, until they are together as large as one that moves.

    A stamp is an event of the device, and a step may save 20,000 small tensors. Each is taken to live from the moment
    before its birth to the one after its death, never for less, so that a plan keeps its budget.
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._birth: Stamp = None
        self._born_bytes = self._dead_bytes = 0
        """Of those that share a moment."""
        self._dead: deque[SavedStorage] = deque()

    def birth(self, nbytes: int) -> Stamp:
        """A moment no later than now, for a storage of ``nbytes`` that is saved."""
        self._born_bytes += nbytes
        if self._birth is None or self._born_bytes >= STAMP_BYTES:
            self._birth, self._born_bytes = self._stopwatch.stamp(), 0
        return self._birth

    def died(self, entry: SavedStorage) -> None:
        """Note the death of a storage. May be called anywhere: only atomic operations on the list."""
        self._dead.append(entry)
        self._dead_bytes += entry.nbytes
        if self._dead_bytes >= STAMP_BYTES:
            self.dead_by(self._stopwatch.stamp())

    def dead_by(self, stamp: Stamp) -> None:
        """Those whose death was noted were dead by this moment."""
        self._dead_bytes = 0
        while self._dead:
            try:
                self._dead.popleft().death = stamp
            except IndexError:  # another thread took the last one
                return


class Profiler:
    """The notes of one step. The offloader's lock is held.

    Args:
        stopwatch: tells the time.
    """

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch
        self._local = threading.local()
        self.running: list[None] = []
        """Not empty while a step is recorded: looked at for each tensor, in C as well."""
        self._backward_end = BackwardEnd(self._backward_ended)
        self.forget()

    def forget(self) -> None:
        """Drop what was recorded, and record nothing more."""
        self.running.clear()
        self._saved: list[SavedStorage] = []
        self._number_of: dict[Record, int] = {}
        self._regions: list[RunRegion] = []
        self._recomputations: list[SavedStorage] = []
        self._phases: list[tuple[str, Stamp]] = []
        self._tapes: dict[int, tuple[int, object]] = {}
        self._in_backward: set[int] = set()
        self._end: Stamp = None
        self._shared = SharedStamp(self.stopwatch)
        self.finished = False
        """The step has ended, and its profile may be asked for."""

    @property
    def active(self) -> bool:
        """Whether a step is recorded."""
        return bool(self.running)

    # -- while the step runs ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins; forget the last one."""
        self.forget()
        self.running.append(None)
        self.stopwatch.begin()

    def saved(self, record: Record, reason: KeepReason | None) -> None:
        """A new record was made, and stays for a reason or moves."""
        if not self.running:
            return
        if len(self._saved) >= MOST_STORAGES:
            self.forget()  # something of this step stays alive for ever, so it never ends
            return
        birth = self.stopwatch.stamp()
        tape = self._tape_of(record.tape, birth)
        kept = "" if reason is None or reason.kind is Kind.CHOSEN else reason.value
        self._number_of[record] = len(self._saved)
        region = self._running()
        place = None if region is None else region.place
        entry = SavedStorage(record.nbytes, birth, tape, record.index, record.module, place, kept)
        if region is None and (stack := self._stack()):  # it runs again, and its checkpoint saves this for that
            entry.input_of = stack[-1]
        self._saved.append(entry)

    def kept(self, nbytes: int, reason: KeepReason) -> SavedStorage | None:
        """An activation stays without a record; returns what `kept_died` takes."""
        if not self.running:
            return None
        stamp = self._shared.birth(nbytes)
        region = self._running()
        tape, place = (0, None) if region is None else (region.tape, region.place)
        entry = SavedStorage(nbytes, stamp, tape, None, None, place, reason.value)
        self._saved.append(entry)
        return entry

    def kept_died(self, entry: SavedStorage) -> None:
        """Its last user died. May be called anywhere."""
        if self.running:
            self._shared.died(entry)

    def needed(self, record: Record, *, alive: bool) -> None:
        """Backward has a record's bytes, from now on; ``alive``: others than us hold them as well."""
        number = self._number_of.get(record) if self.running else None
        if number is None or self._saved[number].need is not None:
            return
        entry = self._saved[number]
        entry.need = self.stopwatch.stamp()
        if record.handles > 1:
            entry.input_of = None  # others have saved it, too
        if alive and not entry.kept:
            entry.kept = KeepReason.ALIVE.value  # moving it would free nothing
        self._reach(entry.tape, entry.need)

    def died(self, record: Record) -> None:
        """The last handle of a record died."""
        number = self._number_of.pop(record, None) if self.running else None
        if number is not None:
            self._saved[number].death = stamp = self.stopwatch.stamp()
            self._shared.dead_by(stamp)

    def region_began(self, tape: Tape[Record], place: int, name: str, once: bool) -> RunRegion:
        """A checkpointed region begins to run in this thread."""
        begin = self.stopwatch.stamp()
        region = RunRegion(place, self._tape_of(tape, begin), name, once, begin, collectives=collectives())
        self._regions.append(region)
        self._running()  # drops those that are over
        self._stack().append(region)
        return region

    def region_ended(self, region: RunRegion) -> None:
        """Its forward has ended."""
        if region in self._regions:
            region.end = self.stopwatch.stamp()
            region.count_collectives()

    def region_saved(self, region: RunRegion, nbytes: int, reason: KeepReason | None) -> None:
        """A region that runs again saves a storage that did not exist before; ``reason``: why it would stay."""
        if region in self._regions and region.again_end is None:
            region.saves.append((self.stopwatch.stamp(), nbytes, "" if reason is None else reason.value))

    def recomputation_begins(self, region: RunRegion, *, nested: bool) -> SavedStorage | None:
        """Backward begins to run a region again, or a checkpoint that is nested in it."""
        if region not in self._regions:
            return None
        stamp = self.stopwatch.stamp()
        held = SavedStorage(0, stamp, region.tape, None, region.name, None, KeepReason.RECOMPUTED.value, need=stamp)
        self._recomputations.append(held)
        if not nested and region.held is None:
            region.held, region.collectives = held, collectives()
            region.changed = any(probe._version != version for probe, version in region.versions)
            region.versions.clear()
        self._reach(region.tape, stamp)
        return held

    def recomputation_ended(self, held: SavedStorage, nbytes: int) -> None:
        """What was to run again has done so, and saved so many bytes that are alive."""
        held.nbytes = nbytes
        region = next((region for region in self._regions if region.held is held), None)
        if region is not None:
            region.again_end = self.stopwatch.stamp()
            region.count_collectives()

    def recomputation_left(self, held: SavedStorage) -> None:
        """Backward has used all that was saved."""
        if held in self._recomputations and held.death is None:
            held.death = self.stopwatch.stamp()

    def _reach(self, tape: int, stamp: Stamp) -> None:
        """Backward is in a forward from this moment on."""
        if tape not in self._in_backward:
            self._in_backward.add(tape)
            self._phases.append(("backward", stamp))
            self._backward_end.expect()

    def _backward_ended(self) -> None:
        if self.running:
            stamp = self.stopwatch.stamp()
            self._phases.append(("other", stamp))
            for held in self._recomputations:
                held.death = held.death or stamp

    def _tape_of(self, tape: Tape[Record] | None, birth: Stamp) -> int:
        known = self._tapes.get(id(tape))
        if known is not None:
            return known[0]
        number = len(self._tapes)
        self._tapes[id(tape)] = number, tape  # held, so that its address is its own
        if number:  # the first one began with the step
            self._phases.append(("forward", birth))
        return number

    def _stack(self) -> list[RunRegion]:
        """The regions that run in this thread; of a step that was given up, none."""
        owner, stack = getattr(self._local, "stack", (None, []))
        if owner is not self._regions:
            stack = []
            self._local.stack = self._regions, stack
        return stack

    def _running(self) -> RunRegion | None:
        """The region that runs in this thread, if it runs once: its checkpoint's own hooks take what others save."""
        stack = self._stack()
        while stack and stack[-1].over:
            stack.pop()
        return stack[-1] if stack and stack[-1].once else None

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The step has ended: nothing more is noted."""
        if self.running:
            self._end = self.stopwatch.stamp()
            self._shared.dead_by(self._end)
            self.running.clear()
            self.finished = True

    @property
    def has_no_record(self) -> bool:
        """Whether no plan moves any of what the step saved, nor what a region would save if it ran once."""
        return not self._regions and all(entry.index is None for entry in self._saved)

    @property
    def useful(self) -> bool:
        """Whether the step that was recorded reached backward."""
        return bool(self._in_backward)

    def profile(self, device: str = "cpu") -> Profile | None:
        """The step as a profile, of tensors on this device; None while the device has not come to its end."""
        self.finish()
        if not self.stopwatch.end():
            return None
        held = (entry for entry in self._recomputations if entry.nbytes)
        storages = tuple(map(self._storage, [*self._saved, *held]))
        profile = Profile(
            storages=storages,
            regions=tuple(self._region(run, storages) for run in self._regions),
            device=device,
            **self._durations(),
        )
        self.forget()
        return profile

    def _durations(self) -> dict[str, Any]:
        found = {"forward": 0.0, "backward": 0.0, "other": 0.0}
        phase, since_s = "forward", 0.0
        for following, stamp in [*self._phases, ("other", self._end)]:
            time_s = max(since_s, self.stopwatch.seconds(stamp))
            found[phase] += time_s - since_s
            phase, since_s = following, time_s
        return {f"{name}_s": seconds for name, seconds in found.items()}

    def _storage(self, entry: SavedStorage) -> Storage:
        seconds = self.stopwatch.seconds
        birth_s = seconds(entry.birth)
        need_s = None if entry.need is None else max(birth_s, seconds(entry.need))
        death = self._end if entry.death is None else entry.death
        run = entry.input_of
        return Storage(
            index=entry.index,
            nbytes=entry.nbytes,
            birth_s=birth_s,
            need_s=need_s,
            last_need_s=max(birth_s, need_s or 0.0, seconds(death)),
            module=entry.module,
            tape=entry.tape,
            kept=entry.kept,
            region=entry.region,
            input_of=run.place if run is not None and entry.nbytes > run.input_bytes else None,
        )

    def _region(self, run: RunRegion, storages: Sequence[Storage]) -> Region:
        seconds = self.stopwatch.seconds
        begin_s = seconds(run.begin)
        end_s = max(begin_s, seconds(self._end if run.end is None else run.end))
        found = Region(
            place=run.place,
            name=run.name,
            tape=run.tape,
            begin_s=begin_s,
            end_s=end_s,
            communicates=run.communicates,
            changed=run.changed,
        )
        if run.once and run.tape in self._in_backward:
            mine = run.place, run.tape
            own = (storage.last_need_s for storage in storages if (storage.region, storage.tape) == mine)
            return replace(found, backward_end_s=max(own, default=seconds(self._end)))
        if run.held is None:
            return found
        again_s = max(end_s, seconds(run.held.birth))
        ran_s = max(again_s, seconds(self._end if run.again_end is None else run.again_end))
        return replace(
            found,
            again_s=again_s,
            recompute_s=ran_s - again_s,
            backward_end_s=max(ran_s, seconds(self._end if run.held.death is None else run.held.death)),
            saves=tuple(
                RegionSave(offset_s=min(ran_s - again_s, max(0.0, seconds(stamp) - again_s)), nbytes=nbytes, kept=kept)
                for stamp, nbytes, kept in run.saves
            ),
        )
